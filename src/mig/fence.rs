//! While a layout changes: no other change beside it, and no new lease on its GPUs.

use crate::ledger::{Freed, Ledger, LedgerError, MigBusy, MigChange, Store};
use crate::process::Process;

/// Held while a layout changes; it falls when it is dropped, and with the process.
#[derive(Debug)]
pub struct Fence<'a> {
    store: &'a Store,
    owner: Process,
}

/// Why a layout cannot be changed now.
#[derive(Debug, thiserror::Error)]
pub enum FenceError {
    /// Somebody else is at it.
    #[error(transparent)]
    Busy(#[from] MigBusy),
    /// The ledger cannot be written.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// /proc does not say who we are.
    #[error("cannot tell our own process: {0}")]
    Process(#[from] std::io::Error),
}

impl<'a> Fence<'a> {
    /// Puts it around `gpus`; with the ledger as it is from then on, as far as they go, and what was freed.
    ///
    /// # Errors
    /// Another change is under way, or the ledger cannot be written.
    pub fn raise(gpus: Vec<String>, store: &'a Store) -> Result<(Self, Ledger, Freed), FenceError> {
        let owner = Process::current()?;
        let (begun, freed) = store.update(|ledger| {
            ledger.begin_mig(MigChange { gpus, owner })?;
            Ok::<_, MigBusy>(ledger.clone())
        })?;
        Ok((Self { store, owner }, begun?, freed))
    }
}

impl Drop for Fence<'_> {
    fn drop(&mut self) {
        let ended = self.store.update(|ledger| {
            ledger.end_mig(self.owner);
            Ok::<_, std::convert::Infallible>(())
        });
        // It ends with this process at the latest.
        if let Err(error) = ended {
            tracing::warn!("the GPUs take leases again only when this process has ended: {error}");
        }
    }
}
