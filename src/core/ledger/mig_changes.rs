//! Changes of MIG layouts. During one, its GPUs take no new lease. After it, every earlier inventory
//! is out of date, even if ids and /proc look the same.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{DynamicInstance, Ledger};
use crate::process::Process;

/// Changes of MIG layouts on this host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigChanges {
    /// How many changes have ended since boot. An inventory with a smaller count is out of date.
    pub count: u64,
    /// The change under way. There is at most one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub under_way: Option<MigChange>,
    /// Instances that were created for containers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dynamic_instances: Vec<DynamicInstance>,
}

/// A change under way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigChange {
    /// UUIDs of the GPUs that take no new lease meanwhile. Empty if dynamic instances are created or destroyed: that is
    /// short and touches no other container's instance.
    pub gpus: Vec<String>,
    /// The process that makes the change. The change ends at the latest with that process.
    pub owner: Process,
}

/// Another process is changing MIG layouts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("process {pid} is changing this host's MIG layout: wait until it has ended")]
pub struct MigBusy {
    /// Who.
    pub pid: i32,
    /// Whether it will end in a moment.
    pub brief: bool,
}

impl MigChanges {
    /// Whether there has never been one.
    #[must_use]
    pub(crate) fn are_none(&self) -> bool {
        *self == Self::default()
    }

    /// Ends a change whose process was killed.
    pub(super) fn end_change_of_dead_process(&mut self) {
        if self.under_way.as_ref().is_some_and(|change| !change.owner.is_alive()) {
            self.end(true);
        }
    }

    fn end(&mut self, changed: bool) {
        self.under_way = None;
        self.count += u64::from(changed);
    }
}

/// The GPUs (UUIDs) of the change under way, by the ledger as it is on disk. A hint for processes that hold no lock, and
/// of users who may not open the store; none if the process that made the change has ended.
#[must_use]
pub(crate) fn gpus_under_change(state_dir: &Path) -> Vec<String> {
    let change =
        super::store::parse_ledger(&super::read_text(state_dir)).ok().and_then(|ledger| ledger.mig.under_way);
    change.filter(|change| change.owner.is_alive()).map(|change| change.gpus).unwrap_or_default()
}

impl Ledger {
    /// The change that is under way on this GPU.
    #[must_use]
    pub(crate) fn mig_change(&self, gpu: &str) -> Option<&MigChange> {
        self.mig.under_way.as_ref().filter(|change| change.gpus.iter().any(|uuid| uuid == gpu))
    }

    /// Begins a change: its GPUs take no new lease, and no other process may change any GPU.
    pub fn begin_mig(&mut self, change: MigChange) -> Result<(), MigBusy> {
        if let Some(other) = &self.mig.under_way {
            return Err(MigBusy { pid: other.owner.pid, brief: other.gpus.is_empty() });
        }
        self.mig.under_way = Some(change);
        Ok(())
    }

    /// Ends the change that `owner` began. With `changed`, earlier inventories are out of date.
    pub fn end_mig(&mut self, owner: Process, changed: bool) {
        if self.mig.under_way.as_ref().is_some_and(|change| change.owner == owner) {
            self.mig.end(changed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_change_at_a_time_and_the_dead_end_theirs() {
        let me = Process::current().unwrap();
        let mut ledger = Ledger::empty("boot");
        let change = MigChange { gpus: vec!["GPU-1".into()], owner: me };
        ledger.begin_mig(change.clone()).unwrap();
        assert_eq!(ledger.begin_mig(change.clone()), Err(MigBusy { pid: me.pid, brief: false }));
        assert!(ledger.mig_change("GPU-1").is_some() && ledger.mig_change("GPU-2").is_none());
        ledger.mig.end_change_of_dead_process();
        ledger.end_mig(Process { start_time: 1, ..me }, true);
        assert!(ledger.mig.under_way.is_some(), "another process's end is not ours");
        ledger.end_mig(me, true);
        assert_eq!(ledger.mig, MigChanges { count: 1, ..MigChanges::default() });
        ledger.begin_mig(MigChange { owner: Process { start_time: 1, ..me }, ..change }).unwrap();
        ledger.mig.end_change_of_dead_process();
        assert_eq!(ledger.mig, MigChanges { count: 2, ..MigChanges::default() });
    }
}
