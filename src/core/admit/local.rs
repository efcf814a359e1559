//! The state on this host's disk, which this process changes itself.

use std::cell::Cell;

use super::dynamic_mig::{MigWork, PutOff};
use crate::config::Config;
use crate::ledger::{LedgerError, Store};

/// It, and how this process changes it.
#[derive(Clone, Copy)]
pub struct Local<'a> {
    pub(super) config: &'a Config,
    pub(super) mig: MigWork<'a>,
}

impl<'a> Local<'a> {
    /// MIG instances are made and destroyed at once.
    #[must_use]
    pub const fn new(config: &'a Config) -> Self {
        Self { config, mig: MigWork::Now }
    }

    /// They are not, which takes the driver's time and that of all who have one made as well: `put_off` says what there
    /// would have been.
    #[must_use]
    pub const fn putting_off(config: &'a Config, put_off: &'a Cell<PutOff>) -> Self {
        Self { config, mig: MigWork::PutOff(put_off) }
    }

    pub(super) fn store(&self) -> Result<Store, LedgerError> {
        Store::open(&self.config.state_dir)
    }
}
