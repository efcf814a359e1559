//! The steps of a lease's life on disk, each a method that makes one change of the ledger.

use std::convert::Infallible;
use std::path::Path;

use super::{Freed, LeaseId, Ledger, LedgerError, Leftover, Scan, Store};
use crate::process::Process;

impl Store {
    /// [`Store::update`] by a change that cannot fail.
    pub fn change<T>(&self, change: impl FnOnce(&mut Ledger) -> T) -> Result<(T, Freed), LedgerError> {
        let (Ok(done), freed) = self.update(|ledger| Ok::<_, Infallible>(change(ledger)))?;
        Ok((done, freed))
    }

    /// [`Store::change`] of one lease or daemon, which scans briefly.
    pub(crate) fn change_with_brief_scan<T>(
        &self,
        change: impl FnOnce(&mut Ledger) -> T,
    ) -> Result<(T, Freed), LedgerError> {
        let (Ok(done), freed) =
            self.update_with_scan(Scan::Brief, |ledger| Ok::<_, Infallible>(change(ledger)))?;
        Ok((done, freed))
    }

    /// Frees the leases of containers that have ended, and nothing else.
    pub(crate) fn reclaim(&self) -> Result<Freed, LedgerError> {
        let ((), freed) = self.change(|_| ())?;
        Ok(freed)
    }

    /// [`Store::change`] of one lease, which does not look for ended containers.
    pub(crate) fn change_without_scan<T>(
        &self,
        change: impl FnOnce(&mut Ledger) -> T,
    ) -> Result<T, LedgerError> {
        let Ok(done) = self.update_without_scan(|ledger| Ok::<_, Infallible>(change(ledger)))?;
        Ok(done)
    }

    /// As [`Ledger::mark_ending`]. What the lease had left is forgotten if it is among `cleared`, the leftovers that
    /// were removed already. The lease `gone`, whose container has ended, is freed.
    pub fn mark_ending(
        &self,
        uid: u32,
        id: &str,
        record: &Path,
        deleter: Option<Process>,
        (cleared, gone): (&[Leftover], Option<LeaseId>),
    ) -> Result<(Option<LeaseId>, Freed), LedgerError> {
        let (Ok(marked), freed) = self.update_with_gone(Scan::Brief, gone, |ledger| {
            ledger.forget(cleared);
            Ok::<_, Infallible>(ledger.mark_ending(uid, id, record, deleter))
        })?;
        Ok((marked, freed))
    }

    /// As [`Ledger::unmark_ending`].
    pub(crate) fn unmark_ending(&self, lease: &LeaseId) -> Result<Freed, LedgerError> {
        let ((), freed) = self.change_with_brief_scan(|ledger| ledger.unmark_ending(lease))?;
        Ok(freed)
    }

    /// As [`Ledger::remove`]; the lease is among those that were freed. Of what it had left, `cleared` is forgotten.
    pub fn remove(&self, lease: &LeaseId, cleared: &[Leftover]) -> Result<Freed, LedgerError> {
        let (removed, mut freed) = self.change_with_brief_scan(|ledger| {
            let removed = ledger.remove(lease);
            ledger.forget(cleared);
            removed
        })?;
        freed.extend(removed);
        Ok(freed)
    }

    /// As [`Ledger::abandon`]; the leases are among those that were freed.
    pub fn abandon(&self, uid: u32, id: &str, owner: Process) -> Result<Freed, LedgerError> {
        let (abandoned, mut freed) = self.change_with_brief_scan(|ledger| ledger.abandon(uid, id, owner))?;
        freed.extend(abandoned);
        Ok(freed)
    }

    /// As [`Ledger::forget`].
    pub fn forget(&self, cleared: &[Leftover]) -> Result<Freed, LedgerError> {
        let ((), freed) = self.change_with_brief_scan(|ledger| ledger.forget(cleared))?;
        Ok(freed)
    }
}
