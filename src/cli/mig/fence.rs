//! The fence: while a layout is changed there is no other change, and no new lease on its GPUs.

use std::time::{Duration, Instant};

use anyhow::anyhow;
use nix::sys::signal::{SigSet, SigmaskHow, Signal};

use sublet_core::ledger::{Freed, Ledger, MigBusy, MigChange, Store};
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
    /// `false`: nothing was changed behind the fence, so earlier inventories stay valid.
    pub changed: bool,
}

impl<'a> Fence<'a> {
    /// Raises the fence around `gpus`. Returns the ledger, which is final for those GPUs from then on, and the leases
    /// that were freed. Without GPUs the fence prevents other changes but no leases.
    ///
    /// A brief change of another process is waited for. A fence without GPUs waits for longer ones as well.
    ///
    /// # Errors
    /// Another change is under way, or the ledger cannot be written.
    pub fn raise(gpus: &[String], store: &'a Store) -> anyhow::Result<(Self, Ledger, Freed)> {
        let owner = Process::current()
            .map_err(|error| anyhow!("cannot read our own process's start time: {error}"))?;
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
pub(crate) struct Uninterrupted(Option<SigSet>);

impl Uninterrupted {
    /// Blocks the signals from now on.
    pub fn begin() -> Self {
        let polite = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
        Self(polite.thread_swap_mask(SigmaskHow::SIG_BLOCK).ok())
    }
}

impl Drop for Uninterrupted {
    fn drop(&mut self) {
        let _ = self.0.map(|before| before.thread_set_mask());
    }
}
