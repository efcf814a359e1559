//! The states of a lease, and every change from one to another.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Init, Lease, LeaseId, Ledger};
use crate::process::Process;

/// States of a lease. `lost` is shown for leases whose device is no longer in the inventory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeaseState {
    /// Taken; the container is being created.
    Pending,
    /// The container exists.
    Active,
    /// Its processes are ending.
    Ending,
    /// Its device no longer exists.
    Lost,
}

impl Lease {
    /// Its container exists, with `init` as its first process. A lease that a `delete` has marked as ending meanwhile
    /// keeps that state.
    pub(super) fn note_container(&mut self, init: Init) {
        self.init = Some(init);
        if self.state == LeaseState::Pending {
            self.state = LeaseState::Active;
        }
    }

    /// The first process of its container has ended, and others have not. `init` is given if only the record names it.
    pub(super) fn note_first_process_gone(&mut self, init: Option<Init>) {
        self.init = init.or(self.init.take());
        self.state = LeaseState::Ending;
    }

    /// The `delete` that had marked it as ending was killed.
    pub(super) fn note_not_deleted(&mut self) {
        self.state = LeaseState::Active;
    }

    /// Binds it to the container whose first process is `init`.
    pub(super) fn bind_to(&mut self, init: Init) {
        self.init = Some(init);
        self.state = LeaseState::Active;
        self.bind_by = None;
    }

    /// Its container was found after a loss of the ledger: its first process, `init`, `runs`, or others of it do.
    pub(super) fn restore(&mut self, init: Init, runs: bool) {
        self.init = Some(init);
        self.state = if runs { LeaseState::Active } else { LeaseState::Ending };
    }
}

impl Ledger {
    /// Marks the lease of container `id` of `uid` as ending. The container's record is in `record`, and `deleter`
    /// deletes it.
    pub(crate) fn mark_ending(
        &mut self,
        uid: u32,
        id: &str,
        record: &Path,
        deleter: Option<Process>,
    ) -> Option<LeaseId> {
        let id = self.find_by_record(uid, id, record).map(|lease| lease.id.clone())?;
        let lease = self.lease_mut(&id)?;
        lease.state = LeaseState::Ending;
        // If `deleter` is killed, the container is not ending after all. The end of the owner shows that.
        if let (Some(_), Some(deleter)) = (&lease.init, deleter) {
            lease.owner = deleter;
        }
        Some(id)
    }

    /// The container of lease `id` was deleted, and `ender` ends what it has left.
    pub(crate) fn mark_deleted(&mut self, id: &LeaseId, ender: Process) {
        if let Some(lease) = self.lease_mut(id) {
            lease.state = LeaseState::Ending;
            lease.owner = ender;
        }
    }

    /// A failed delete leaves the lease as it was.
    pub(crate) fn unmark_ending(&mut self, id: &LeaseId) {
        if let Some(lease) = self.lease_mut(id) {
            lease.state = if lease.init.is_some() { LeaseState::Active } else { LeaseState::Pending };
        }
    }

    /// The container of lease `id` already existed when the lease was taken, with `init` as its first process.
    pub(crate) fn activate(&mut self, id: &LeaseId, init: Init) {
        if let Some(lease) = self.lease_mut(id) {
            lease.note_container(init);
        }
    }
}
