//! During a change of the layout there is no other change, and no new lease on its GPUs.

use std::time::{Duration, Instant};

use sublet_core::ledger::{Freed, Ledger, LedgerError, MigBusy, MigChange, Store};
use sublet_core::process::Process;

/// Others make or destroy an instance each, which takes a driver a second or two.
const PATIENCE: Duration = Duration::from_secs(30);

/// Between two looks whether the other change is over.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Held while a layout changes; it falls when it is dropped, and with the process.
#[derive(Debug)]
pub(crate) struct Fence<'a> {
    store: &'a Store,
    owner: Process,
    changed: bool,
}

/// Why a layout cannot be changed now.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FenceError {
    /// Somebody else is at it.
    #[error(transparent)]
    Busy(#[from] MigBusy),
    /// The ledger cannot be written.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// /proc does not say who we are.
    #[error("cannot read our own process's start time: {0}")]
    Process(#[from] std::io::Error),
}

impl<'a> Fence<'a> {
    /// Puts it around `gpus`; with the ledger as it is from then on, as far as they go, and what was freed.
    /// Without any it keeps other changes away, and no lease.
    ///
    /// A change that takes but a moment is waited for; one without GPUs waits for others as well.
    ///
    /// # Errors
    /// Another change is under way, or the ledger cannot be written.
    pub fn raise(gpus: &[String], store: &'a Store) -> Result<(Self, Ledger, Freed), FenceError> {
        let owner = Process::current()?;
        let deadline = Instant::now() + PATIENCE;
        let mut all_freed = Freed::new();
        loop {
            let (begun, freed) = store.update(|ledger| {
                ledger.begin_mig(MigChange { gpus: gpus.to_vec(), owner })?;
                Ok::<_, MigBusy>(ledger.clone())
            })?;
            all_freed.extend(freed);
            match begun {
                Ok(ledger) => return Ok((Self { store, owner, changed: true }, ledger, all_freed)),
                Err(busy) if (busy.brief || gpus.is_empty()) && Instant::now() < deadline => {}
                Err(busy) => return Err(busy.into()),
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}

impl Fence<'_> {
    /// Nothing was changed behind it: inventories from before hold still.
    pub(crate) fn nothing_changed(&mut self) {
        self.changed = false;
    }
}

impl Drop for Fence<'_> {
    fn drop(&mut self) {
        let ended = self.store.change(|ledger| ledger.end_mig(self.owner, self.changed));
        // It ends with this process at the latest.
        if let Err(error) = ended {
            tracing::warn!("the GPUs take no lease until this process has ended: {error}");
        }
    }
}
