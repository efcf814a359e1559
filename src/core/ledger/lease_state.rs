//! The states of a lease, and every change from one to another.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Init, Lease, LeaseId, Ledger};
use crate::process::Process;

/// States of a lease (`lost` is shown for leases whose device is not in the inventory any more).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeaseState {
    /// Taken; the container is being created.
    Pending,
    /// The container exists.
    Active,
    /// Its processes are going.
    Ending,
    /// Its device went away.
    Lost,
}

impl Lease {
    /// Its container exists, with `init` as its first process. A lease that a `delete` has marked as ending meanwhile
    /// stays so.
    pub(super) fn container_exists(&mut self, init: Init) {
        self.init = Some(init);
        if self.state == LeaseState::Pending {
            self.state = LeaseState::Active;
        }
    }

    /// The first process of its container, `init` where only the record knows it, is gone, and others are not.
    pub(super) fn first_process_is_gone(&mut self, init: Option<Init>) {
        self.init = init.or(self.init.take());
        self.state = LeaseState::Ending;
    }

    /// The `delete` that had marked it was killed.
    pub(super) fn is_not_deleted(&mut self) {
        self.state = LeaseState::Active;
    }

    /// Its container is the one whose first process is `init`.
    pub(super) fn bind_to(&mut self, init: Init) {
        self.init = Some(init);
        self.state = LeaseState::Active;
        self.bind_by = None;
    }

    /// Its container is found with the ledger lost: its first process, `init`, `runs`, or others of it do.
    pub(super) fn restore(&mut self, init: Init, runs: bool) {
        self.init = Some(init);
        self.state = if runs { LeaseState::Active } else { LeaseState::Ending };
    }
}

impl Ledger {
    /// Marks the lease of container `id` of `uid`, which has its record in `record` and is deleted by `deleter`.
    pub(crate) fn mark_ending(
        &mut self,
        uid: u32,
        id: &str,
        record: &Path,
        deleter: Option<Process>,
    ) -> Option<LeaseId> {
        let id = self.of_record(uid, id, record).map(|lease| lease.id.clone())?;
        let lease = self.lease_mut(&id)?;
        lease.state = LeaseState::Ending;
        // A container whose delete is killed is not ending: its owner's death will tell.
        if let (Some(_), Some(deleter)) = (&lease.init, deleter) {
            lease.owner = deleter;
        }
        Some(id)
    }

    /// A failed delete leaves the lease as it was.
    pub(crate) fn unmark_ending(&mut self, id: &LeaseId) {
        if let Some(lease) = self.lease_mut(id) {
            lease.state = if lease.init.is_some() { LeaseState::Active } else { LeaseState::Pending };
        }
    }

    /// The container of lease `id` exists since before it was taken, with `init` as its first process.
    pub(crate) fn activate(&mut self, id: &LeaseId, init: Init) {
        if let Some(lease) = self.lease_mut(id) {
            lease.container_exists(init);
        }
    }
}
