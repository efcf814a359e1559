//! Changes of MIG layouts, and the instances that were created for a container (`[mig] dynamic`).
//!
//! During a change, its GPUs take no new lease. After it, every earlier inventory is out of date, even if ids and /proc look
//! the same. Instances are recorded from before the first call to the driver until they are destroyed, so that the next
//! command can finish the work of a killed one.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{LeaseId, Ledger};
use crate::inventory::Device;
use crate::process::Process;
use crate::text::safe;

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
    pub(crate) fn are_none(&self) -> bool {
        *self == Self::default()
    }

    /// Ends a change whose process was killed, and forgets waiting processes that have ended.
    pub(super) fn forget_dead_processes(&mut self) {
        if self.under_way.as_ref().is_some_and(|change| !change.owner.is_alive()) {
            self.end(true);
        }
        for instance in &mut self.dynamic_instances {
            instance.awaited.take_if(|awaited| !awaited.owner.is_alive());
        }
    }

    fn end(&mut self, changed: bool) {
        self.under_way = None;
        self.count += u64::from(changed);
    }
}

/// A GPU instance that sublet created, with one compute instance. It is destroyed when no lease needs it any more.
///
/// Instances cannot be given names. Place, ids and UUID together distinguish this one from an instance that another
/// tool has created there since. No instance outlives a boot, so a ledger of another boot has none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DynamicInstance {
    /// `GPU-…`.
    pub gpu: String,
    /// Id of its profile.
    pub profile: u32,
    /// As `1g.18gb` or `1c.2g.35gb`.
    pub name: String,
    /// First memory slice, and how many.
    pub placement: (u32, u32),
    /// Compute slices of its compute instance.
    pub slices: u32,
    /// GPU instance id, once it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gi: Option<u32>,
    /// `MIG-…`, once its compute instance is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// The container for which it is kept until that has a lease on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub awaited: Option<Awaited>,
    /// It is being destroyed and takes no more leases.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub going: bool,
    /// sublet is destroying its compute instance, or has seen that it has none. From then on an empty GPU instance at
    /// this place is taken to be this one. An empty GPU instance is otherwise taken to belong to another tool.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub emptied: bool,
    /// Why the last attempt to destroy it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stuck: Option<String>,
}

/// A container whose share is being looked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Awaited {
    /// The lease that it will have.
    pub lease: LeaseId,
    /// The container's name.
    pub container: String,
    /// The process that looks for the share. When it ends, nothing waits any more.
    pub owner: Process,
}

impl DynamicInstance {
    /// Whether `device` is its MIG device. Before its UUID is known, its place decides.
    pub(crate) fn has_device(&self, device: &Device) -> bool {
        let Some(mig_device) = &device.mig_device else { return false };
        let place =
            || mig_device.gpu == self.gpu && mig_device.placement.is_none_or(|at| at == self.placement);
        self.uuid.as_ref().map_or_else(place, |uuid| *uuid == device.uuid)
    }

    fn is_at_place_of(&self, other: &Self) -> bool {
        (&self.gpu, self.placement) == (&other.gpu, other.placement)
    }

    /// As `1g.18gb at 0:1`.
    pub fn label(&self) -> String {
        format!("{} at {}:{}", safe(&self.name), self.placement.0, self.placement.1)
    }
}

/// The GPUs (UUIDs) of the change under way, by the ledger as it is on disk. A hint for processes that hold no lock, and
/// of users who may not open the store; none if the process that made the change has ended.
pub(crate) fn gpus_under_change(state_dir: &Path) -> Vec<String> {
    let content = super::read_text(state_dir);
    let change = super::store::parse_ledger(&content, state_dir).ok().and_then(|ledger| ledger.mig.under_way);
    change.filter(|change| change.owner.is_alive()).map(|change| change.gpus).unwrap_or_default()
}

impl Ledger {
    /// The change that is under way on this GPU.
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

    /// The dynamic instance whose MIG device is `device`.
    pub fn dynamic_instance(&self, device: &Device) -> Option<&DynamicInstance> {
        self.mig.dynamic_instances.iter().find(|instance| instance.has_device(device))
    }

    /// Whether there is a lease on `instance`, or will be one.
    pub fn needs(&self, instance: &DynamicInstance) -> bool {
        let leased = match &instance.uuid {
            Some(uuid) => self.on_device(uuid).next().is_some(),
            // Its creation was cut short before the UUID was recorded, and the container for which it was kept has it
            // all the same.
            None => self.leases.iter().flat_map(|lease| &lease.mig_devices).any(|device| {
                let at = device.placement;
                device.gpu == instance.gpu && at.is_none_or(|at| at == instance.placement)
            }),
        };
        leased || instance.awaited.is_some()
    }

    /// Whether an instance is to be destroyed.
    pub fn has_unneeded(&self) -> bool {
        self.mig.dynamic_instances.iter().any(|instance| !self.needs(instance))
    }

    /// Why lease `id` cannot have `device`, if that is a dynamic instance.
    pub(crate) fn explain_kept(&self, id: &LeaseId, device: &Device) -> Option<String> {
        let instance = self.dynamic_instance(device)?;
        if instance.going {
            return Some("is being destroyed; why: it was created for a container that has ended".to_owned());
        }
        match &instance.awaited {
            Some(awaited) if awaited.lease != *id => Some(format!(
                "is kept for another container; why: it was created for container {}, which is being started",
                safe(&awaited.container)
            )),
            None if instance.uuid.is_none() => {
                Some("was being created by a process that has ended".to_owned())
            }
            _ => None,
        }
    }

    /// Keeps nothing for lease `id` any more: the lease was taken, or given up.
    pub fn stop_awaiting(&mut self, id: &LeaseId) {
        for instance in &mut self.mig.dynamic_instances {
            instance.awaited.take_if(|awaited| awaited.lease == *id);
        }
    }

    /// Marks the instances that no lease needs for destruction. They take no more leases.
    pub fn mark_unneeded_for_removal(&mut self) -> Vec<DynamicInstance> {
        let mut instances = std::mem::take(&mut self.mig.dynamic_instances);
        for instance in instances.iter_mut().filter(|instance| !self.needs(instance)) {
            instance.going = true;
        }
        self.mig.dynamic_instances = instances;
        self.mig.dynamic_instances.iter().filter(|instance| !self.needs(instance)).cloned().collect()
    }

    /// The record of the dynamic instance at the place of `instance`.
    pub fn dynamic_instance_mut(&mut self, instance: &DynamicInstance) -> Option<&mut DynamicInstance> {
        self.mig.dynamic_instances.iter_mut().find(|one| one.is_at_place_of(instance))
    }

    /// Forgets the dynamic instance at the place of `instance`, which was destroyed. An inventory that shows it is out of
    /// date from now on: without the record nothing else keeps a lease from it before the change ends.
    pub fn forget_destroyed(&mut self, instance: &DynamicInstance) {
        self.forget_dynamic_instance(instance);
        self.mig.count += 1;
    }

    /// Forgets the dynamic instance at the place of `instance`, which no longer exists.
    pub fn forget_dynamic_instance(&mut self, instance: &DynamicInstance) {
        self.mig.dynamic_instances.retain(|one| !one.is_at_place_of(instance));
    }
}

#[cfg(any(test, feature = "fixtures"))]
pub mod fixture {
    //! Dynamic instances for tests.

    use super::DynamicInstance;

    /// A 1g.18gb of `GPU-0` whose MIG device is `uuid`.
    pub fn dynamic_instance(start: u32, uuid: Option<&str>) -> DynamicInstance {
        DynamicInstance {
            gpu: "GPU-0".into(),
            profile: 19,
            name: "1g.18gb".into(),
            placement: (start, 1),
            slices: 1,
            gi: uuid.map(|_| 1),
            uuid: uuid.map(str::to_owned),
            awaited: None,
            going: false,
            emptied: false,
            stuck: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::lease;
    use super::super::{Lease, LeasedMigDevice, Store};
    use super::fixture::dynamic_instance;
    use super::*;

    #[test]
    fn an_instance_goes_when_its_last_lease_does_and_its_starter_is_gone() {
        let me = Process::current().unwrap();
        let id = LeaseId::parse("00000000000000aa").unwrap();
        let mut ledger = Ledger::empty("boot");
        ledger.mig.dynamic_instances = vec![
            dynamic_instance(0, Some("MIG-0")),
            dynamic_instance(1, None),
            dynamic_instance(2, Some("MIG-2")),
        ];
        ledger.leases = vec![lease(1, "MIG-0"), lease(2, "MIG-0")];
        let awaited = |owner| Some(Awaited { lease: id.clone(), container: "c".into(), owner });
        ledger.mig.dynamic_instances[1].awaited = awaited(me);
        ledger.mig.dynamic_instances[2].awaited = awaited(Process { start_time: 1, ..me });
        ledger.mig.forget_dead_processes();
        let gone = ledger.mark_unneeded_for_removal();
        assert_eq!(gone.iter().map(|instance| instance.placement.0).collect::<Vec<_>>(), [2]);
        ledger.forget_dynamic_instance(&gone[0]);
        assert!(!ledger.has_unneeded());
        ledger.leases.pop();
        assert!(!ledger.has_unneeded(), "the other lease is there");
        ledger.leases.pop();
        ledger.stop_awaiting(&id);
        assert_eq!(ledger.mark_unneeded_for_removal().len(), 2);
        assert!(ledger.mig.dynamic_instances.iter().all(|instance| instance.going));
    }

    /// Found by tests/model: `sublet mig make` was killed after it had created the instance and before it recorded the
    /// UUID, and the waiting shim looked again and took it.
    #[test]
    fn an_instance_whose_uuid_was_not_recorded_stays_as_long_as_its_lease() {
        let mut ledger = Ledger::empty("boot");
        ledger.mig.dynamic_instances = vec![dynamic_instance(0, None)];
        let on = |placement| LeasedMigDevice {
            uuid: "MIG-0".into(),
            gpu: "GPU-0".into(),
            gi: 1,
            ci: 0,
            placement,
            sm: None,
            memory_bytes: None,
        };
        for (placement, needed) in [(Some((0, 1)), true), (None, true), (Some((1, 1)), false)] {
            ledger.leases = vec![Lease { mig_devices: vec![on(placement)], ..lease(1, "MIG-0") }];
            assert_eq!(ledger.mark_unneeded_for_removal().is_empty(), needed, "{placement:?}");
        }
    }

    #[test]
    fn nothing_of_another_boot_is_ours() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let mut ledger = Ledger::empty("another");
        ledger.mig.dynamic_instances = vec![dynamic_instance(0, Some("MIG-0"))];
        std::fs::write(dir.path().join("ledger.json"), serde_json::to_vec(&ledger).unwrap()).unwrap();
        assert_eq!(store.read().unwrap().mig.dynamic_instances, []);
        let (condemned, _) = store.update(|ledger| Ok::<_, ()>(ledger.mark_unneeded_for_removal())).unwrap();
        assert_eq!(condemned, Ok(vec![]));
    }

    #[test]
    fn one_change_at_a_time_and_the_dead_end_theirs() {
        let me = Process::current().unwrap();
        let mut ledger = Ledger::empty("boot");
        let change = MigChange { gpus: vec!["GPU-1".into()], owner: me };
        ledger.begin_mig(change.clone()).unwrap();
        assert_eq!(ledger.begin_mig(change.clone()), Err(MigBusy { pid: me.pid, brief: false }));
        assert!(ledger.mig_change("GPU-1").is_some() && ledger.mig_change("GPU-2").is_none());
        ledger.mig.forget_dead_processes();
        ledger.end_mig(Process { start_time: 1, ..me }, true);
        assert!(ledger.mig.under_way.is_some(), "another process's end is not ours");
        ledger.end_mig(me, true);
        assert_eq!(ledger.mig, MigChanges { count: 1, ..MigChanges::default() });
        ledger.begin_mig(MigChange { owner: Process { start_time: 1, ..me }, ..change }).unwrap();
        ledger.mig.forget_dead_processes();
        assert_eq!(ledger.mig, MigChanges { count: 2, ..MigChanges::default() });
    }
}
