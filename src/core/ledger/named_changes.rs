//! The steps of a lease's life on disk, each a method that makes one change of the ledger.

use std::convert::Infallible;
use std::path::Path;

use super::{Binding, Freed, Init, Lease, LeaseId, Ledger, LedgerError, Leftover, NotBound, Scan, Store};
use crate::process::Process;

impl Store {
    /// [`Store::update`] by a change that cannot fail.
    pub fn change<T>(&self, change: impl FnOnce(&mut Ledger) -> T) -> Result<(T, Freed), LedgerError> {
        let (Ok(done), freed) = self.update(|ledger| Ok::<_, Infallible>(change(ledger)))?;
        Ok((done, freed))
    }

    /// [`Store::change`] by a container's end, which is not about other containers.
    fn at_end<T>(&self, change: impl FnOnce(&mut Ledger) -> T) -> Result<(T, Freed), LedgerError> {
        let (Ok(done), freed) =
            self.update_after(Scan::Brief, |ledger| Ok::<_, Infallible>(change(ledger)))?;
        Ok((done, freed))
    }

    /// Frees the leases of containers that have ended, and nothing else.
    pub(crate) fn reclaim(&self) -> Result<Freed, LedgerError> {
        let ((), freed) = self.change(|_| ())?;
        Ok(freed)
    }

    /// A change of one lease or daemon that cannot fail.
    ///
    /// # Errors
    /// As [`Store::update`].
    pub(crate) fn of_one<T>(&self, change: impl FnOnce(&mut Ledger) -> T) -> Result<T, LedgerError> {
        let Ok(done) = self.step(|ledger| Ok::<_, Infallible>(change(ledger)))?;
        Ok(done)
    }

    /// As [`Ledger::hand_over`].
    pub fn hand_over(&self, lease: &LeaseId, owner: Process) -> Result<(), LedgerError> {
        self.of_one(|ledger| ledger.hand_over(lease, owner))
    }

    /// As [`Ledger::bind`].
    pub fn bind(&self, lease: &LeaseId, binding: &Binding) -> Result<Result<(), NotBound>, LedgerError> {
        self.step(|ledger| ledger.bind(lease, binding))
    }

    /// As [`Ledger::activate`].
    pub fn activate(&self, lease: &LeaseId, init: Init) -> Result<(), LedgerError> {
        self.of_one(|ledger| ledger.activate(lease, init))
    }

    /// As [`Ledger::mark_ending`]. What the lease had left is forgotten if it is among `cleared`, the leftovers that
    /// were removed already. The lease `gone` is freed: its container was seen to have ended.
    pub fn mark_ending(
        &self,
        uid: u32,
        id: &str,
        record: &Path,
        deleter: Option<Process>,
        (cleared, gone): (&[Leftover], Option<LeaseId>),
    ) -> Result<(Option<LeaseId>, Freed), LedgerError> {
        let (Ok(marked), freed) = self.update_seen(Scan::Brief, gone, |ledger| {
            ledger.forget(cleared);
            Ok::<_, Infallible>(ledger.mark_ending(uid, id, record, deleter))
        })?;
        Ok((marked, freed))
    }

    /// As [`Ledger::mark_deleted`].
    pub(crate) fn mark_deleted(&self, lease: &LeaseId, ender: Process) -> Result<(), LedgerError> {
        self.of_one(|ledger| ledger.mark_deleted(lease, ender))
    }

    /// As [`Ledger::unmark_ending`].
    pub(crate) fn unmark_ending(&self, lease: &LeaseId) -> Result<Freed, LedgerError> {
        let ((), freed) = self.at_end(|ledger| ledger.unmark_ending(lease))?;
        Ok(freed)
    }

    /// As [`Ledger::remove`]; the lease is among those that were freed. Of what it had left, `cleared` is forgotten.
    pub fn remove(&self, lease: &LeaseId, cleared: &[Leftover]) -> Result<Freed, LedgerError> {
        let (removed, freed) = self.at_end(|ledger| {
            let removed = ledger.remove(lease);
            ledger.forget(cleared);
            removed
        })?;
        Ok(with(freed, removed))
    }

    /// As [`Ledger::abandon`]; the leases are among those that were freed.
    pub fn abandon(&self, uid: u32, id: &str, owner: Process) -> Result<Freed, LedgerError> {
        let (abandoned, freed) = self.at_end(|ledger| ledger.abandon(uid, id, owner))?;
        Ok(with(freed, abandoned))
    }

    /// As [`Ledger::forget`].
    pub fn forget(&self, cleared: &[Leftover]) -> Result<Freed, LedgerError> {
        let ((), freed) = self.at_end(|ledger| ledger.forget(cleared))?;
        Ok(freed)
    }
}

fn with(mut freed: Freed, more: impl IntoIterator<Item = Lease>) -> Freed {
    freed.extend(more);
    freed
}
