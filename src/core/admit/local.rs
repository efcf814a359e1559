//! The state on this host's disk, which this process changes itself.

use std::cell::Cell;

use super::dynamic_mig::{MigWork, PutOff};
use crate::config::Config;
use crate::ledger::{LedgerError, Store};
use crate::mps::Lowering;

/// The state, and how this process changes it.
#[derive(Clone, Copy)]
pub struct Local<'a> {
    pub(super) config: &'a Config,
    pub(super) mig: MigWork<'a>,
    pub(super) lowering: Lowering,
}

impl<'a> Local<'a> {
    /// With MIG instances created and destroyed at once.
    #[must_use]
    pub const fn new(config: &'a Config) -> Self {
        Self { config, mig: MigWork::Now, lowering: Lowering::Now }
    }

    /// For an entry point, for which an engine waits: work that can be done later is left to another process.
    #[must_use]
    pub(super) const fn for_engine(config: &'a Config) -> Self {
        Self { config, mig: MigWork::Now, lowering: Lowering::Apart }
    }

    /// Without creating or destroying MIG instances, which may take long. `put_off` records that work.
    #[must_use]
    pub const fn putting_off(config: &'a Config, put_off: &'a Cell<PutOff>) -> Self {
        Self { config, mig: MigWork::PutOff(put_off), lowering: Lowering::Now }
    }

    pub(super) fn store(&self) -> Result<Store, LedgerError> {
        Store::open(&self.config.state_dir)
    }
}
