//! The fence: while a layout is changed there is no other change, and no new lease on its GPUs.

use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};

use sublet_core::ledger::{Freed, Ledger, LedgerError, MigBusy, MigChange, Store};
use sublet_core::process::Process;

/// Other processes create or destroy one instance each, which takes the driver a second or two.
const PATIENCE: Duration = Duration::from_secs(30);

/// The pause between two checks whether the other change is over.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Held while a layout changes. Dropping it or ending the process removes the fence.
#[derive(Debug)]
pub(crate) struct Fence<'a> {
    store: &'a Store,
    owner: Process,
    changed: bool,
}

/// Why a layout cannot be changed now.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FenceError {
    /// Another process is changing MIG instances.
    #[error(transparent)]
    Busy(#[from] MigBusy),
    /// The ledger cannot be written.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// /proc does not describe this process.
    #[error("cannot read our own process's start time: {0}")]
    Process(#[from] std::io::Error),
}

impl<'a> Fence<'a> {
    /// Raises the fence around `gpus`. Returns the ledger, which is final for those GPUs from then on, and the leases
    /// that were freed. Without GPUs the fence prevents other changes but no leases.
    ///
    /// A brief change of another process is waited for. A fence without GPUs waits for longer ones as well.
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
    /// Nothing was changed behind the fence, so earlier inventories stay valid.
    pub(crate) fn nothing_changed(&mut self) {
        self.changed = false;
    }
}

impl Drop for Fence<'_> {
    fn drop(&mut self) {
        let ended = self.store.change(|ledger| ledger.end_mig(self.owner, self.changed));
        // The fence ends with this process at the latest.
        if let Err(error) = ended {
            tracing::warn!("the GPUs take no lease until this process has ended: {error}");
        }
    }
}

/// While it exists these signals are blocked, so that no layout is left half done.
#[derive(Debug)]
pub(crate) struct Uninterrupted {
    before: Option<SigSet>,
}

impl Uninterrupted {
    /// Blocks the signals from now on.
    pub fn begin() -> Self {
        let mut polite = SigSet::empty();
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
            polite.add(signal);
        }
        let mut before = SigSet::empty();
        let blocked = sigprocmask(SigmaskHow::SIG_BLOCK, Some(&polite), Some(&mut before));
        Self { before: blocked.is_ok().then_some(before) }
    }
}

impl Drop for Uninterrupted {
    fn drop(&mut self) {
        let _ = sigprocmask(SigmaskHow::SIG_SETMASK, self.before.as_ref(), None);
    }
}
