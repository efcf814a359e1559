//! The ledger changed, and what hangs on its leases brought into line with it: MPS daemons, mount points, MIG instances.

use super::local::Local;
use super::{AdmitError, dynamic_mig};
use crate::ledger::{Freed, Lease, LeaseId, Ledger, LedgerError, Store};
use crate::{mps, oci};

/// What [`Local::reconcile`] found and did.
#[derive(Debug)]
pub struct Reconciled {
    /// Leases whose containers were gone.
    pub freed: Freed,
    /// The rest, one line each; what could not be done is among it.
    pub lines: Vec<String>,
}

impl Local<'_> {
    /// Releases leases of exited containers, makes `change` to the ledger, and puts right all that hangs on leases: MPS
    /// daemons that crashed come back, those that nobody waits for end, what ended containers left is removed.
    ///
    /// # Errors
    /// As [`Store::update`].
    pub fn reconcile(
        &self,
        change: impl FnOnce(&mut Ledger) -> std::io::Result<()>,
    ) -> Result<Reconciled, LedgerError> {
        let store = self.store()?;
        let (changed, freed) = store.update(change)?;
        self.tidy(&freed, &store);
        clear_leftovers(&store);
        self.destroy_unneeded(&store);
        let failed = changed.err().map(|error| error.to_string());
        Ok(Reconciled { freed, lines: failed.into_iter().chain(mps::heal(&store, self.config)).collect() })
    }

    /// Makes `change` to the ledger, and tidies up after the leases that were found gone on the way.
    ///
    /// # Errors
    /// As [`Store::update`].
    pub fn update<R>(&self, change: impl FnOnce(&mut Ledger) -> R) -> Result<R, LedgerError> {
        let store = self.store()?;
        let (done, freed) = store.change(change)?;
        self.tidy(&freed, &store);
        Ok(done)
    }

    /// Takes `lease` out of the ledger and tidies up after it.
    pub(super) fn free(&self, lease: &LeaseId, store: &Store) -> Result<(), AdmitError> {
        let freed = store.remove(lease)?;
        self.tidy(&freed, store);
        if freed.is_empty() {
            self.clear_for_others(&read(store)?, store);
        }
        Ok(())
    }

    /// [`Local::free`] where another error is on its way to the user already.
    pub(super) fn give_back(&self, lease: &Lease, store: &Store) {
        if let Err(error) = self.free(&lease.id, store) {
            tracing::warn!(
                "lease {} could not be freed yet: {error}; the next sublet command frees it",
                lease.id
            );
        }
    }

    /// Another command has just freed the lease, as `ledger` has it: it may have done so too late to clear what hung on
    /// it, or be killed.
    pub(super) fn clear_for_others(&self, ledger: &Ledger, store: &Store) {
        if !ledger.clearable().is_empty() {
            clear_leftovers(store);
        }
        if ledger.has_unneeded() {
            self.destroy_unneeded(store);
        }
    }

    /// After leases were freed: settles their servers, removes the mount points they left in a rootfs and
    /// what a killed shim left in a bundle, and destroys MIG instances that were made for them.
    pub(super) fn tidy(&self, freed: &Freed, store: &Store) {
        if freed.is_empty() {
            return;
        }
        self.settle(freed, store);
        self.destroy_unneeded(store);
    }

    /// [`Local::tidy`] as far as no MIG layout changes.
    pub fn settle(&self, freed: &Freed, store: &Store) {
        clear_leftovers(store);
        let mut settled = Vec::new();
        for lease in freed {
            let Some(key) = &lease.daemon else { continue };
            if settled.contains(&key) {
                continue;
            }
            settled.push(key);
            if let Err(error) = mps::settle(key, store, self.config) {
                tracing::warn!("{error}");
            }
        }
    }

    /// Destroys the instances that were made for containers and that nobody needs any more; what cannot be destroyed
    /// now is tried again by the next command.
    pub fn destroy_unneeded(&self, store: &Store) {
        dynamic_mig::destroy_unneeded(store, self.mig);
    }
}

/// Removes what ended containers left, and only then forgets it: whoever is killed in between leaves the
/// rest to the next `sublet` command, or the next end of a container: a start has no time to look.
///
/// Some engines (containerd) unmount the root filesystem once the runtime has deleted the container, and
/// what was not removed before that cannot be reached any more. So this comes before anything that takes
/// time, and a delete does it too when another command has just freed the container's lease.
fn clear_leftovers(store: &Store) {
    let clearable = store.read().map(|ledger| ledger.clearable()).unwrap_or_default();
    if clearable.is_empty() {
        return;
    }
    for left in &clearable {
        crate::fs::atomic::sweep(&left.bundle);
        oci::clear(left);
    }
    if let Err(error) = store.forget(&clearable) {
        tracing::warn!("{error}");
    }
}

/// The ledger as it stands; one that cannot be read is rebuilt from what runs first.
///
/// # Errors
/// As [`Store::update`].
pub fn read(store: &Store) -> Result<Ledger, LedgerError> {
    match store.read() {
        Err(LedgerError::Corrupt { .. }) => {
            store.reclaim()?;
            store.read()
        }
        read => read,
    }
}
