//! MIG instances created for a container (`[mig] dynamic`). They are recorded from before the first call
//! to the driver until they are destroyed, so that the next command can finish the work of a killed one.

use serde::{Deserialize, Serialize};

use super::{LeaseId, Ledger, MigChanges};
use crate::inventory::Device;
use crate::process::Process;
use crate::text::safe;

/// A GPU instance that sublet created, with one compute instance. It is destroyed when no lease needs it any more.
///
/// Instances have no names of ours: place, ids and UUID together tell it from what somebody else has made there
/// since. A ledger of another boot has none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
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
    /// Whom it is kept for until they have a lease on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub awaited: Option<Awaited>,
    /// It is being destroyed, and takes no lease any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub going: bool,
    /// Its compute instance is being destroyed by us, or we have seen that it has none: from here on a GPU instance
    /// with none in it is ours. One that was emptied otherwise is somebody else's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub emptied: bool,
    /// Why it could not be destroyed when that was last tried.
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
    /// Who looks: the end of that process ends the waiting.
    pub owner: Process,
}

impl Made {
    /// Whether `device` is its MIG device. Before its UUID is known its place tells.
    #[must_use]
    pub fn is(&self, device: &Device) -> bool {
        let Some(part) = &device.part else { return false };
        let place = || part.gpu == self.gpu && part.placement.is_none_or(|at| at == self.placement);
        self.uuid.as_ref().map_or_else(place, |uuid| *uuid == device.uuid)
    }

    /// As `1g.18gb at 0:1`.
    #[must_use]
    pub fn label(&self) -> String {
        format!("{} at {}:{}", safe(&self.name), self.placement.0, self.placement.1)
    }
}

impl MigChanges {
    /// Nobody waits who is dead.
    pub(super) fn forget_dead_waiters(&mut self) {
        for made in &mut self.made {
            made.awaited = made.awaited.take().filter(|awaited| awaited.owner.is_alive());
        }
    }
}

impl Ledger {
    /// The instance of ours that `device` is.
    #[must_use]
    pub fn made(&self, device: &Device) -> Option<&Made> {
        self.mig.made.iter().find(|made| made.is(device))
    }

    /// Whether there is a lease on `made`, or will be one.
    #[must_use]
    pub fn needs(&self, made: &Made) -> bool {
        let leased = made.uuid.as_deref().is_some_and(|uuid| self.on_device(uuid).next().is_some());
        leased || made.awaited.is_some()
    }

    /// Whether there is an instance to be destroyed.
    #[must_use]
    pub fn has_unneeded(&self) -> bool {
        self.mig.made.iter().any(|made| !self.needs(made))
    }

    /// Why lease `id` cannot have `device`, an instance of ours.
    #[must_use]
    pub(crate) fn kept_from(&self, id: &LeaseId, device: &Device) -> Option<String> {
        let made = self.made(device)?;
        if made.going {
            return Some("is being destroyed: it was created for a container that has ended".to_owned());
        }
        match &made.awaited {
            Some(awaited) if awaited.lease != *id => Some(format!(
                "was created for container {}, which is being started",
                safe(&awaited.container)
            )),
            None if made.uuid.is_none() => Some("was being created by a process that has ended".to_owned()),
            _ => None,
        }
    }

    /// Nothing is kept for lease `id` any more: it is taken, or given up.
    pub fn await_no_more(&mut self, id: &LeaseId) {
        let of_lease = |made: &&mut Made| made.awaited.as_ref().is_some_and(|awaited| awaited.lease == *id);
        for made in self.mig.made.iter_mut().filter(of_lease) {
            made.awaited = None;
        }
    }

    /// Marks those that no lease needs for destruction; they take no lease any more.
    pub fn mark_unneeded_for_removal(&mut self) -> Vec<Made> {
        let unneeded: Vec<bool> = self.mig.made.iter().map(|made| !self.needs(made)).collect();
        let of_them = self.mig.made.iter_mut().zip(unneeded).filter(|(_, unneeded)| *unneeded);
        let condemned = of_them.map(|(made, _)| {
            made.going = true;
            made.clone()
        });
        condemned.collect()
    }

    /// The record of the instance of ours at the place of `made`.
    pub fn made_mut(&mut self, made: &Made) -> Option<&mut Made> {
        self.mig.made.iter_mut().find(|one| (&one.gpu, one.placement) == (&made.gpu, made.placement))
    }

    /// Forgets the instance of ours at the place of `made`, which is no more.
    pub fn forget_made(&mut self, made: &Made) {
        self.mig.made.retain(|one| (&one.gpu, one.placement) != (&made.gpu, made.placement));
    }
}

#[cfg(any(test, feature = "fixtures"))]
pub mod fixture {
    //! Instances of ours for tests.

    use super::Made;

    /// A 1g.18gb of `GPU-0` whose MIG device is `uuid`.
    pub fn made(start: u32, uuid: Option<&str>) -> Made {
        Made {
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
    use super::super::Store;
    use super::super::fixture::lease;
    use super::fixture::made;
    use super::*;

    #[test]
    fn an_instance_goes_when_its_last_lease_does_and_its_starter_is_gone() {
        let me = Process::current().unwrap();
        let id = LeaseId::parse("00000000000000aa").unwrap();
        let mut ledger = Ledger::empty("boot");
        ledger.mig.made = vec![made(0, Some("MIG-0")), made(1, None), made(2, Some("MIG-2"))];
        ledger.leases = vec![lease(1, "MIG-0"), lease(2, "MIG-0")];
        let awaited = |owner| Some(Awaited { lease: id.clone(), container: "c".into(), owner });
        ledger.mig.made[1].awaited = awaited(me);
        ledger.mig.made[2].awaited = awaited(Process { start_time: 1, ..me });
        ledger.mig.forget_dead_waiters();
        let gone = ledger.mark_unneeded_for_removal();
        assert_eq!(gone.iter().map(|made| made.placement.0).collect::<Vec<_>>(), [2]);
        ledger.forget_made(&gone[0]);
        assert!(!ledger.has_unneeded());
        ledger.leases.pop();
        assert!(!ledger.has_unneeded(), "the other lease is there");
        ledger.leases.pop();
        ledger.await_no_more(&id);
        assert_eq!(ledger.mark_unneeded_for_removal().len(), 2);
        assert!(ledger.mig.made.iter().all(|made| made.going));
    }
    #[test]
    fn nothing_of_another_boot_is_ours() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let mut ledger = Ledger::empty("another");
        ledger.mig.made = vec![made(0, Some("MIG-0"))];
        std::fs::write(dir.path().join("ledger.json"), serde_json::to_vec(&ledger).unwrap()).unwrap();
        assert_eq!(store.read().unwrap().mig.made, []);
        let (condemned, _) = store.update(|ledger| Ok::<_, ()>(ledger.mark_unneeded_for_removal())).unwrap();
        assert_eq!(condemned, Ok(vec![]));
    }
}
