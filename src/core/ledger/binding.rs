//! Leases that a hook takes before it knows their container, and binding them to it. Pure, except for looking at the
//! container's first process.

use std::path::PathBuf;

use super::{Init, Lease, LeaseId, Ledger};
use crate::process::{Process, uptime_seconds};
use crate::text::safe;

/// The longest time between the hook that takes a lease and the hook that binds it. In between, the engine starts its
/// monitor and the runtime creates the container. A later container is refused.
const TIME_TO_BIND: u64 = 60;

/// The most leases of one user that wait for their containers. A container is created in less than a second.
const MOST_UNBOUND: usize = 64;

/// The container that a hook's standard input names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    /// The container id.
    pub id: String,
    /// The bundle, canonical.
    pub bundle: PathBuf,
    /// As in [`super::Container::record`].
    pub record: PathBuf,
    /// The container's first process.
    pub init: Init,
}

/// Why a lease is not bound to a container.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotBound {
    /// The lease was freed.
    #[error(
        "lease {0} does not exist any more: the engine took longer than {TIME_TO_BIND} s to create the \
         container, or ended meanwhile (start the container again); or sublet did not write this \
         annotation sublet.lease (remove it)"
    )]
    Unknown(LeaseId),
    /// The lease belongs to another container.
    #[error("lease {lease} belongs to container {}", safe(container))]
    Other {
        /// The lease.
        lease: LeaseId,
        /// The container that has it.
        container: String,
    },
}

/// A user holds too many leases whose containers have not been created.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "you hold {MOST_UNBOUND} leases whose containers have not been created yet: wait until they are, or until their \
     leases are freed after {TIME_TO_BIND} s"
)]
pub struct TooManyUnbound;

impl Lease {
    /// As taken by a user through `sublet serve`, to be bound in time: a user who never starts a container must not keep it.
    pub(crate) fn brokered(self) -> Self {
        Self { brokered: true, bind_by: Some(uptime_seconds() + TIME_TO_BIND), ..self }
    }

    /// Whether it still waits for a container to be bound to.
    pub(crate) fn is_unbound(&self) -> bool {
        self.init.is_none() && self.container.bundle.as_os_str().is_empty()
    }

    /// Whether its container was not created in time.
    pub fn is_overdue(&self) -> bool {
        self.bind_by.is_some_and(|limit| uptime_seconds() > limit)
    }
}

impl Ledger {
    /// Makes `owner` responsible for the unbound lease `id`, for the time that binding may take. That of a user's began
    /// when it was taken, because a user may hand it over again and again.
    pub fn hand_over(&mut self, id: &LeaseId, owner: Process) {
        let Some(lease) = self.lease_mut(id) else { return };
        lease.owner = owner;
        if !lease.brokered {
            lease.bind_by = Some(uptime_seconds() + TIME_TO_BIND);
        }
    }

    /// Whether `uid` may take another lease through `sublet serve`.
    ///
    /// # Errors
    /// Too many of theirs wait for a container.
    pub(crate) fn check_unbound(&self, uid: u32) -> Result<(), TooManyUnbound> {
        let waits = |lease: &&Lease| lease.brokered && lease.init.is_none() && lease.container.uid == uid;
        if self.leases.iter().filter(waits).count() < MOST_UNBOUND { Ok(()) } else { Err(TooManyUnbound) }
    }

    /// Removes the unbound leases that `owner` holds for container `id` of `uid`. `owner` starts the container anew, so
    /// the one for which they were taken was never created.
    pub fn abandon(&mut self, uid: u32, id: &str, owner: Process) -> Vec<Lease> {
        let stale = |lease: &&Lease| {
            let same = lease.container.uid == uid && lease.container.id == id && !id.is_empty();
            same && lease.is_unbound() && lease.owner == owner
        };
        let ids: Vec<LeaseId> = self.leases.iter().filter(stale).map(|lease| lease.id.clone()).collect();
        ids.iter().filter_map(|id| self.remove(id)).collect()
    }

    /// Binds the lease `id` to its container, which now exists. Doing so twice is no error.
    ///
    /// # Errors
    /// The lease was freed, or belongs to another container.
    pub fn bind(&mut self, id: &LeaseId, binding: &Binding) -> Result<(), NotBound> {
        let lease = self.lease_mut(id).ok_or_else(|| NotBound::Unknown(id.clone()))?;
        let same = lease.container.id == binding.id || lease.container.id.is_empty();
        let bound = lease.init.as_ref().is_some_and(|init| init.process != binding.init.process);
        if !same || bound {
            return Err(NotBound::Other { lease: id.clone(), container: lease.container.id.clone() });
        }
        lease.container.id.clone_from(&binding.id);
        if lease.is_unbound() {
            lease.container.bundle.clone_from(&binding.bundle);
            lease.container.record.clone_from(&binding.record);
        }
        lease.bind_to(binding.init.clone());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::lease;
    use super::*;
    use crate::ledger::Container;
    use crate::ledger::LeaseState;

    fn unbound(n: u64, id: &str) -> Lease {
        let plain = lease(n, "GPU-a");
        let container = Container {
            id: id.into(),
            bundle: PathBuf::new(),
            record: PathBuf::new(),
            ..plain.container.clone()
        };
        Lease { container, ..plain }
    }

    fn binding(id: &str, pid: i32) -> Binding {
        let init = Init {
            process: Process { pid, start_time: 5 },
            pid_namespace: 9,
            cgroup: None,
            cgroup_inode: None,
        };
        Binding { id: id.into(), bundle: "/b".into(), record: "/run/crun/c".into(), init }
    }

    fn ledger(leases: Vec<Lease>) -> Ledger {
        Ledger { leases, ..Ledger::empty("boot") }
    }

    #[test]
    fn a_lease_learns_its_container() {
        for known in ["c", ""] {
            let mut ledger = ledger(vec![unbound(1, known)]);
            let id = ledger.leases[0].id.clone();
            ledger.hand_over(&id, Process { pid: 3, start_time: 4 });
            assert_eq!(ledger.leases[0].owner.pid, 3);
            assert!(ledger.leases[0].bind_by.is_some() && !ledger.leases[0].is_overdue());
            ledger.bind(&id, &binding("c", 7)).unwrap();
            ledger.bind(&id, &binding("c", 7)).unwrap();
            let bound = &ledger.leases[0];
            assert_eq!((bound.state, bound.bind_by), (LeaseState::Active, None));
            assert_eq!(bound.container.id, "c");
            assert_eq!(bound.container.bundle.to_str(), Some("/b"));
            assert_eq!(bound.container.record.to_str(), Some("/run/crun/c"));
            assert_eq!(bound.init.as_ref().unwrap().process.pid, 7);
        }
    }

    #[test]
    fn a_user_holds_few_leases_without_a_container_and_none_for_long() {
        let own = |n| {
            let mut lease = unbound(n, "c").brokered();
            lease.container.uid = 1001;
            lease
        };
        let mut ledger = ledger((0..63).map(own).collect());
        assert_eq!(ledger.check_unbound(1001), Ok(()));
        let last = Lease { bind_by: Some(7), ..own(63) };
        ledger.leases.push(last.clone());
        assert_eq!((ledger.check_unbound(1001), ledger.check_unbound(1002)), (Err(TooManyUnbound), Ok(())));
        ledger.hand_over(&last.id, Process { pid: 3, start_time: 4 });
        assert_eq!(ledger.leases[63].bind_by, Some(7), "as it was taken");
        ledger.bind(&last.id, &binding("c", 7)).unwrap();
        assert_eq!(ledger.check_unbound(1001), Ok(()));
    }

    #[test]
    fn no_container_gets_the_lease_of_another() {
        let mut ledger = ledger(vec![unbound(1, "c")]);
        let id = ledger.leases[0].id.clone();
        let other = NotBound::Other { lease: id.clone(), container: "c".into() };
        assert_eq!(ledger.bind(&id, &binding("d", 7)), Err(other.clone()));
        ledger.bind(&id, &binding("c", 7)).unwrap();
        assert_eq!(ledger.bind(&id, &binding("c", 8)), Err(other));
        let freed = LeaseId::parse("00000000000000ff").unwrap();
        assert_eq!(ledger.bind(&freed, &binding("c", 7)), Err(NotBound::Unknown(freed.clone())));
    }

    #[test]
    fn an_engine_that_starts_a_container_anew_gives_up_the_first_try() {
        let engine = Process { pid: 3, start_time: 4 };
        let of_engine = |n, id| Lease { owner: engine, ..unbound(n, id) };
        let bound = Lease { owner: engine, ..lease(3, "GPU-a") };
        let name = bound.container.id.clone();
        let mut ledger = ledger(vec![of_engine(1, "c"), of_engine(2, ""), bound, unbound(4, "c")]);
        assert_eq!(ledger.abandon(0, "c", engine).len(), 1);
        assert_eq!(ledger.abandon(0, "", engine).len(), 0);
        assert_eq!(ledger.abandon(0, &name, engine).len(), 0, "a bound lease is never given up");
        assert_eq!(ledger.leases.len(), 3);
    }

    #[test]
    fn a_lease_is_overdue_by_the_clock_that_nobody_sets() {
        let late = Lease { bind_by: Some(0), ..unbound(1, "c") };
        assert!(late.is_overdue());
        let waiting = Lease { bind_by: Some(uptime_seconds() + 30), ..unbound(1, "c") };
        assert!(!waiting.is_overdue() && !unbound(1, "c").is_overdue());
    }
}
