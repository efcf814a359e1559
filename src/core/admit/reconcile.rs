//! Changes the ledger and adjusts what depends on its leases: MPS daemons, mount points, MIG instances.

use std::cell::Cell;

use super::AdmitError;
use super::dynamic_mig::{self, MigWork, PutOff};
use crate::config::Config;
use crate::ledger::{Freed, Lease, LeaseId, Ledger, LedgerError, Leftover, Store};
use crate::mps::Lowering;
use crate::{mps, oci};

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

/// What [`Local::reconcile`] found and did.
#[derive(Debug)]
pub struct Reconciled {
    /// Leases whose containers were gone.
    pub freed: Freed,
    /// Messages about the rest and its failures, one line each.
    pub lines: Vec<String>,
}

impl Local<'_> {
    /// Frees the leases of ended containers, applies `change` to the ledger, and repairs everything that depends on
    /// leases: restarts crashed MPS daemons, ends unneeded ones, and removes leftovers.
    pub fn reconcile(
        &self,
        change: impl FnOnce(&mut Ledger) -> std::io::Result<()>,
    ) -> Result<Reconciled, LedgerError> {
        let store = self.store()?;
        let (changed, freed) = store.update(change)?;
        self.clean_up(&freed, &store);
        clear_leftovers(&store);
        self.destroy_unneeded(&store);
        let failed = changed.err().map(|error| error.to_string());
        Ok(Reconciled { freed, lines: failed.into_iter().chain(mps::heal(&store, self.config)).collect() })
    }

    /// Applies `change` to the ledger, and cleans up after leases whose containers have ended.
    pub fn update<R>(&self, change: impl FnOnce(&mut Ledger) -> R) -> Result<R, LedgerError> {
        let store = self.store()?;
        let (done, freed) = store.change(change)?;
        self.clean_up(&freed, &store);
        Ok(done)
    }

    /// Removes `lease` from the ledger and cleans up after it.
    pub(super) fn free(&self, lease: &LeaseId, store: &Store) -> Result<(), AdmitError> {
        let (cleared, _) = clear_before_freeing(lease, store, true);
        let freed = store.remove(lease, &cleared)?;
        self.clean_up(&freed, store);
        if freed.is_empty() {
            self.finish_pending(&read(store)?, store);
        }
        Ok(())
    }

    /// [`Local::clear_pending`], and ends unneeded daemons: not every command that frees a lease does so.
    pub(super) fn finish_pending(&self, ledger: &Ledger, store: &Store) {
        self.clear_pending(ledger, store);
        for line in mps::end_overdue(store, self.config) {
            tracing::warn!("{line}");
        }
    }

    /// [`Local::free`] for when another error is already being reported to the user.
    pub(super) fn free_or_warn(&self, lease: &Lease, store: &Store) {
        if let Err(error) = self.free(&lease.id, store) {
            tracing::warn!(
                "lease {} could not be freed yet: {error}; the next sublet command frees it",
                lease.id
            );
        }
    }

    /// Clears the leftovers and instances in `ledger`. The command that freed their lease may be too late for that, or be
    /// killed.
    pub(super) fn clear_pending(&self, ledger: &Ledger, store: &Store) {
        if !ledger.clearable().is_empty() {
            clear_leftovers(store);
        }
        if ledger.has_unneeded() {
            self.destroy_unneeded(store);
        }
    }

    /// After leases were freed: adjusts or ends their MPS servers, removes the mount points that they left in a rootfs
    /// and the files that a killed shim left in a bundle, and destroys MIG instances that were created for them.
    pub(super) fn clean_up(&self, freed: &Freed, store: &Store) {
        if freed.is_empty() {
            return;
        }
        self.settle(freed, store);
        self.destroy_unneeded(store);
    }

    /// [`Local::clean_up`] without changes of the MIG layout.
    pub fn settle(&self, freed: &Freed, store: &Store) {
        clear_leftovers(store);
        let mut settled = Vec::new();
        for lease in freed {
            let Some(key) = &lease.daemon else { continue };
            if settled.contains(&key) {
                continue;
            }
            settled.push(key);
            if let Err(error) = mps::settle(key, store, self.config, self.lowering) {
                tracing::warn!("{error}");
            }
        }
    }

    /// Destroys dynamic instances that no lease needs any more. The next command tries again what cannot be destroyed
    /// now.
    pub fn destroy_unneeded(&self, store: &Store) {
        dynamic_mig::destroy_unneeded(store, self.mig);
    }
}

/// Removes the leftovers of `lease`'s container before the lease is freed, if the container has ended or `has_ended`, and
/// the leftovers that waited for it. Returns those that one change of the ledger can forget with the lease, and whether
/// the container is known to have ended. If this process is killed in between, the lease is still there, and the next
/// command does it again.
pub(super) fn clear_before_freeing(lease: &LeaseId, store: &Store, has_ended: bool) -> (Vec<Leftover>, bool) {
    let ended = Cell::new(has_ended);
    let left = |ledger: &Ledger| {
        let left = ledger.lease(lease).map(|lease| ledger.leftovers_of(lease, ended.get()));
        let left = left.unwrap_or_default();
        ended.set(ended.get() || !left.is_empty());
        left
    };
    (clear_locked(store, left).unwrap_or_default(), ended.get())
}

/// Removes the leftovers that `select` finds in the ledger, and returns those that may be forgotten; `None`: there are none.
///
/// The ledger is read again under `clearing.lock`: no file is removed where a container has got a lease meanwhile. (A start
/// waits for that lock once it has its lease.)
fn clear_locked(store: &Store, select: impl Fn(&Ledger) -> Vec<Leftover>) -> Option<Vec<Leftover>> {
    let read = || store.read().map(|ledger| select(&ledger)).unwrap_or_default();
    if read().is_empty() {
        return None;
    }
    let _alone = store
        .clearing()
        .inspect_err(|error| {
            tracing::warn!("what ended containers left is not removed yet: clearing.lock: {error}");
        })
        .ok()?;
    Some(read().iter().map(clear).collect())
}

fn clear(left: &Leftover) -> Leftover {
    crate::fs::atomic::sweep(&left.bundle);
    oci::clear(left)
}

/// Removes the leftovers of ended containers, and only then forgets them. If this process is killed in between, the next
/// `sublet` command or the next end of a container does the rest. A start does not, because it must be fast.
///
/// Some engines (containerd) unmount the root filesystem once the runtime has deleted the container, and then the files
/// can no longer be reached. So this is done before anything that takes time. A delete does it even if another command
/// has just freed the container's lease.
fn clear_leftovers(store: &Store) {
    let Some(clearable) = clear_locked(store, Ledger::clearable) else { return };
    if let Err(error) = store.forget(&clearable) {
        tracing::warn!("{error}");
    }
}

/// Reads the ledger, after rebuilding it if it is unreadable.
pub fn read(store: &Store) -> Result<Ledger, LedgerError> {
    match store.read() {
        Err(LedgerError::Corrupt { .. }) => {
            store.reclaim()?;
            store.read()
        }
        read => read,
    }
}
