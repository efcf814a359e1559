//! Queries and changes of a ledger in memory: leases, what a start and a stop of an MPS daemon record before they begin,
//! and which process belongs to which lease.

use std::convert::Infallible;
use std::path::Path;

use super::{
    Container, DaemonKey, DaemonState, DefaultLimits, DefaultMemoryLimit, Freed, Lease, LeaseId, Ledger,
    LedgerError, MpsDaemon, SCHEMA, Scan, Store,
};
use crate::inventory::GpuProcess;
use crate::process::Process;
use crate::share::{Percent, bytes_of_process, sm_of_process};
use crate::text::safe;

/// A container that already has a live lease. A live lease is never replaced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "container {} already holds lease {lease}: delete the container before you create it again",
    safe(container)
)]
pub struct Doubled {
    /// The lease it holds.
    pub lease: LeaseId,
    /// The container's id.
    pub container: String,
}

/// A daemon to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartClaim {
    /// The devices that the daemon serves, in the order in which its clients count them.
    pub devices: Vec<String>,
    /// The record of an earlier daemon, whose containers may still live.
    pub before: Option<MpsDaemon>,
}

/// A daemon to stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopClaim {
    /// The record, as it was.
    pub before: Option<MpsDaemon>,
    /// How many leases lose their daemon.
    pub leases: usize,
    /// Whether the ledger was rebuilt and no lease of this daemon was found.
    pub unexplained: bool,
}

impl Ledger {
    /// An empty ledger of this boot.
    pub fn empty(boot_id: &str) -> Self {
        Self { schema: SCHEMA.to_owned(), boot_id: boot_id.to_owned(), ..Self::default() }
    }

    /// The lease with this id.
    pub fn lease(&self, id: &LeaseId) -> Option<&Lease> {
        self.leases.iter().find(|lease| lease.id == *id)
    }

    /// The lease with this id, to be changed.
    pub fn lease_mut(&mut self, id: &LeaseId) -> Option<&mut Lease> {
        self.leases.iter_mut().find(|lease| lease.id == *id)
    }

    /// The lease of container `id` of `uid`, whose runtime keeps its record in `record`.
    pub(crate) fn find_by_record(&self, uid: u32, id: &str, record: &Path) -> Option<&Lease> {
        self.leases.iter().find(|lease| {
            let same = lease.container.uid == uid && lease.container.id == id;
            same && lease.container.record == record && !lease.is_of_job()
        })
    }

    /// Leases on `device` (a UUID), in the order they were taken.
    pub fn on_device<'a>(&'a self, device: &'a str) -> impl Iterator<Item = &'a Lease> {
        self.leases.iter().filter(move |lease| lease.devices.iter().any(|uuid| uuid == device))
    }

    /// Whether `lease` is booked with the lease of the job that its container runs in.
    pub fn is_booked_with_job(&self, lease: &Lease) -> bool {
        lease.within.as_ref().is_some_and(|job| self.lease(job).is_some())
    }

    /// The lease of the job of Slurm's with this id.
    pub(crate) fn find_job_lease(&self, job: u64) -> Option<&Lease> {
        let is_its = |lease: &&Lease| lease.job.as_ref().is_some_and(|own| own.id == job);
        self.leases.iter().filter(|lease| lease.is_of_job()).find(is_its)
    }

    /// The record of the daemon `key`.
    pub fn daemon(&self, key: &DaemonKey) -> Option<&MpsDaemon> {
        self.daemons.iter().find(|daemon| daemon.key == *key)
    }

    /// Leases that the MPS server `key` serves.
    pub fn on_daemon<'a>(&'a self, key: &'a DaemonKey) -> impl Iterator<Item = &'a Lease> {
        self.leases.iter().filter(move |lease| lease.daemon.as_ref() == Some(key))
    }

    /// The default limits that the server `key` should have: the smallest that admit all its leases; `None` if it
    /// serves no lease.
    pub fn wanted_default_limits(&self, key: &DaemonKey) -> Option<DefaultLimits> {
        self.on_daemon(key).map(Lease::default_limits).reduce(DefaultLimits::or)
    }

    /// How many devices the server `key` serves. Each of as many ordinals has a memory limit.
    pub fn devices_of(&self, key: &DaemonKey) -> usize {
        self.on_daemon(key).map(|lease| lease.devices.len()).max().unwrap_or(1)
    }

    /// Shared daemons without a lease on the devices of `lease`, except its own daemon. They have to end before its
    /// container starts.
    pub(crate) fn conflicting_daemons<'a>(&'a self, lease: &'a Lease) -> impl Iterator<Item = &'a DaemonKey> {
        let shared = self.daemons.iter().filter(|daemon| LeaseId::parse(&daemon.key.0).is_none());
        let on_its = shared.filter(|daemon| lease.devices.iter().any(|device| daemon.serves(device)));
        let others = on_its.filter(|daemon| lease.daemon.as_ref() != Some(&daemon.key));
        others.map(|daemon| &daemon.key).filter(|key| self.on_daemon(key).next().is_none())
    }

    /// Whether `daemon` runs on a device that was closed after a loss of the ledger, or on an unknown device.
    pub(crate) fn is_unexplained(&self, daemon: &MpsDaemon) -> bool {
        self.unexplained.iter().any(|device| daemon.devices.is_empty() || daemon.serves(device))
    }

    /// Records which servers have begun, or ceased, to wait for a lease. `now` is in seconds since boot.
    pub(super) fn note_idle(&mut self, now: impl Fn() -> u64) {
        let leases = &self.leases;
        for daemon in &mut self.daemons {
            let idle = !leases.iter().any(|lease| lease.daemon.as_ref() == Some(&daemon.key));
            match (idle, daemon.idle_since) {
                (true, None) => (daemon.idle_since, daemon.mode_left) = (Some(now()), true),
                (false, Some(_)) => daemon.idle_since = None,
                _ => {}
            }
        }
    }

    /// Adds `lease`.
    ///
    /// # Errors
    /// [`Doubled`]: there already is a lease with this id, or one of the same user's container with that id and bundle.
    pub fn insert(&mut self, lease: Lease) -> Result<(), Doubled> {
        // Containers whose ids are not yet known are different ones: rootless Podman starts several at once.
        let same = |a: &Container, b: &Container| {
            !a.id.is_empty() && a.uid == b.uid && a.id == b.id && a.bundle == b.bundle
        };
        let taken = |old: &&Lease| old.id == lease.id || same(&old.container, &lease.container);
        if let Some(old) = self.leases.iter().find(taken) {
            return Err(Doubled { lease: old.id.clone(), container: lease.container.id });
        }
        self.leases.push(lease);
        Ok(())
    }

    /// Removes the lease with this id and returns it. An unknown id is no error, because the end of a container may be
    /// reported twice.
    pub fn remove(&mut self, id: &LeaseId) -> Option<Lease> {
        let at = self.leases.iter().position(|lease| lease.id == *id)?;
        let lease = self.leases.remove(at);
        self.note_leftovers(&lease);
        Some(lease)
    }

    /// Records the daemon `key` as starting. `None`: no lease needs it.
    pub fn claim_start(&mut self, key: &DaemonKey) -> Option<StartClaim> {
        // All leases on a device's shared server have that one device.
        let devices = self.on_daemon(key).next()?.devices.clone();
        let before = self.daemon(key).cloned();
        self.forget_daemon(key);
        self.daemons.push(MpsDaemon::starting(key.clone(), devices.clone()));
        Some(StartClaim { devices, before })
    }

    /// Records the daemon `key` as stopping. With `force`, leases may lose it.
    pub fn claim_stop(&mut self, key: &DaemonKey, force: bool) -> Result<StopClaim, usize> {
        let leases = self.on_daemon(key).count();
        if leases > 0 && !force {
            return Err(leases);
        }
        let known = self.daemons.iter_mut().find(|daemon| daemon.key == *key);
        let before = known.map(|daemon| {
            let state = std::mem::replace(&mut daemon.state, DaemonState::Stopping);
            MpsDaemon { state, ..daemon.clone() }
        });
        let unexplained = before.as_ref().is_some_and(|daemon| self.is_unexplained(daemon));
        Ok(StopClaim { before, leases, unexplained })
    }

    /// Removes the record of the daemon `key`.
    pub fn forget_daemon(&mut self, key: &DaemonKey) {
        self.daemons.retain(|daemon| daemon.key != *key);
    }
}

impl Lease {
    /// Whether it is the lease of a whole job of Slurm's, and not a container's.
    pub const fn is_of_job(&self) -> bool {
        self.job.is_some() && self.within.is_none()
    }

    /// The SMs that one of its processes may have.
    pub fn sm_of_process(&self) -> Option<Percent> {
        self.sm.map(|sm| sm_of_process(sm, self.processes))
    }

    /// The memory that one of its processes may have on each device, in bytes, whole MiB.
    pub fn memory_of_process(&self) -> Option<u64> {
        self.memory_bytes.map(|bytes| bytes_of_process(bytes, self.processes))
    }

    /// The default limits that this lease needs on its server. They also apply to processes without the lease's
    /// environment. Memory is the part of one process. SMs are the part of one process only on a dedicated server.
    pub fn default_limits(&self) -> DefaultLimits {
        let own = self.daemon.as_ref().is_some_and(|key| key.0 == self.id.as_str());
        let clients = if own { self.processes.max(1) } else { 1 };
        let sm = self.sm.map_or(Percent::WHOLE, |sm| sm_of_process(sm, clients));
        DefaultLimits { sm, memory: DefaultMemoryLimit::of_each(self.memory_bytes, self.processes) }
    }
}

impl Store {
    /// [`Store::update`] by a change that cannot fail.
    pub fn change<T>(&self, change: impl FnOnce(&mut Ledger) -> T) -> Result<(T, Freed), LedgerError> {
        self.change_with_scan(Scan::Full, change)
    }

    /// [`Store::update_with_scan`] by a change that cannot fail.
    pub(crate) fn change_with_scan<T>(
        &self,
        scan: Scan,
        change: impl FnOnce(&mut Ledger) -> T,
    ) -> Result<(T, Freed), LedgerError> {
        let (Ok(done), freed) = self.update_with_scan(scan, |ledger| Ok::<_, Infallible>(change(ledger)))?;
        Ok((done, freed))
    }
}

impl Ledger {
    /// The lease to which a process on a GPU is attributable: by its pid, otherwise its cgroup, otherwise its PID
    /// namespace, which several containers may share. For callers that ask whether the process belongs to any lease at
    /// all.
    pub fn lease_of_process(&self, process: &GpuProcess) -> Option<&Lease> {
        let find = |fits: &dyn Fn(&Lease) -> bool| self.leases.iter().find(|lease| fits(lease));
        let has_pid = |lease: &Lease| lease.init.as_ref().is_some_and(|init| init.process.pid == process.pid);
        find(&|lease| !lease.is_of_job() && has_pid(lease))
            .or_else(|| find(&|lease| !lease.is_of_job() && has_cgroup(lease, process)))
            .or_else(|| find(&|lease| !lease.is_of_job() && has_pid_namespace(lease, process)))
            .or_else(|| find(&|lease| lease.is_of_job() && has_cgroup(lease, process)))
    }

    /// The lease of `process`, which is `seen` on a GPU, if it is certain enough to kill the process:
    /// by its container's first process or cgroup. The PID namespace counts only for running containers without a
    /// cgroup of their own: other containers may have joined it, and the inode of a namespace that has ended is reused.
    pub fn certain_lease_of(&self, process: Process, seen: &GpuProcess) -> Option<&Lease> {
        let find = |fits: &dyn Fn(&Lease) -> bool| self.leases.iter().find(|lease| fits(lease));
        let is_init = |lease: &Lease| lease.init.as_ref().is_some_and(|init| init.process == process);
        let certain = find(&is_init).or_else(|| find(&|lease| !lease.is_of_job() && has_cgroup(lease, seen)));
        if certain.is_some() {
            return certain;
        }
        let lives = |lease: &Lease| lease.init.as_ref().is_some_and(|init| init.process.is_alive());
        let mut found = self.leases.iter().filter(|lease| has_pid_namespace(lease, seen) && lives(lease));
        let alone = |lease: &&Lease| lease.init.as_ref().is_some_and(|init| init.cgroup.is_none());
        match (found.next().filter(alone), found.next()) {
            (Some(lease), None) => Some(lease),
            // A job's cgroup is its user's only, also where a process in it belongs to no container.
            _ => find(&|lease| lease.is_of_job() && has_cgroup(lease, seen)),
        }
    }
}

fn has_pid_namespace(lease: &Lease, process: &GpuProcess) -> bool {
    process.pid_namespace != 0
        && lease.init.as_ref().is_some_and(|init| init.pid_namespace == process.pid_namespace)
}

fn has_cgroup(lease: &Lease, process: &GpuProcess) -> bool {
    let Some(cgroup) = lease.init.as_ref().and_then(|init| init.cgroup.as_deref()) else { return false };
    within_hierarchy(cgroup).any(|own| process.cgroups.iter().any(|path| Path::new(path).starts_with(&own)))
}

/// The paths that /proc/PID/cgroup may show for the cgroup directory `dir`: below the mount of cgroup v2, of v2 beside
/// v1, or of the v1 hierarchies that a record names ([`super::Init::cgroup`]; the last three for jobs of Slurm's). Never a root, because every process is
/// in it.
fn within_hierarchy(dir: &Path) -> impl Iterator<Item = std::path::PathBuf> {
    ["devices", "pids", "systemd", "unified", "freezer", "cpuset", "memory", ""]
        .into_iter()
        .filter_map(move |hierarchy| dir.strip_prefix(Path::new("/sys/fs/cgroup").join(hierarchy)).ok())
        .filter(|below| !below.as_os_str().is_empty())
        .map(|below| Path::new("/").join(below))
}

#[cfg(any(test, feature = "fixtures"))]
pub mod fixture {
    //! Leases for tests.
    #![allow(clippy::missing_panics_doc, reason = "for tests")]

    use super::super::{Container, Lease, LeaseId, LeaseState};
    use crate::process::Process;
    use crate::share::{Isolation, Mode, Priority};

    /// Time-slice lease number `n` on `device`. Its owner is a process that cannot exist.
    pub fn lease(n: u64, device: &str) -> Lease {
        Lease {
            id: LeaseId::parse(&format!("{n:016x}")).unwrap(),
            container: Container {
                uid: 0,
                id: format!("container-{n}"),
                bundle: format!("/run/bundles/{n}").into(),
                rootfs: format!("/run/bundles/{n}/rootfs").into(),
                record: format!("/nonexistent/runc/container-{n}").into(),
            },
            devices: vec![device.to_owned()],
            mode: Mode::TimeSlice,
            isolation: Isolation::Shared,
            daemon: None,
            sm: None,
            memory_bytes: None,
            processes: 1,
            priority: Priority::Normal,
            guard: None,
            state: LeaseState::Pending,
            owner: Process { pid: i32::MAX, start_time: 1 },
            init: None,
            bind_by: None,
            since: 0,
            mount_points: Vec::new().into(),
            volumes: Vec::new(),
            library_dir: None,
            brokered: false,
            job: None,
            within: None,
            mig_devices: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::fixture::lease;
    use super::*;
    use crate::inventory::GpuProcess;
    use crate::ledger::Init;
    use crate::process::Process;

    fn ledger(leases: Vec<Lease>) -> Ledger {
        Ledger { leases, ..Ledger::empty("boot") }
    }

    #[test]
    fn containers_without_an_id_yet_are_not_each_other() {
        let mut ledger = Ledger::empty("boot");
        for n in 1..=2 {
            let mut unnamed = lease(n, "GPU-a");
            (unnamed.container.id, unnamed.container.bundle) = (String::new(), "".into());
            ledger.insert(unnamed).unwrap();
        }
        assert_eq!(ledger.leases.len(), 2);
    }

    #[test]
    fn a_live_lease_is_never_replaced_and_freeing_twice_is_no_error() {
        let mut ledger = ledger(vec![lease(1, "GPU-a")]);
        let again = Lease { id: lease(2, "GPU-a").id, ..lease(1, "GPU-a") };
        let doubled = ledger.insert(again.clone()).unwrap_err();
        assert_eq!(doubled.lease.as_str(), "0000000000000001");
        assert!(ledger.insert(lease(1, "GPU-b")).is_err(), "the same lease id twice");
        let other_bundle =
            Lease { container: Container { bundle: "/b".into(), ..again.container.clone() }, ..again };
        ledger.insert(other_bundle).unwrap();
        let id = LeaseId::parse("0000000000000001").unwrap();
        assert_eq!(ledger.remove(&id).map(|lease| lease.id), Some(id.clone()));
        assert_eq!(ledger.remove(&id), None);
        assert_eq!(ledger.leases.len(), 1);
    }

    #[test]
    fn a_container_is_named_by_user_id_and_record() {
        let ledger = ledger(vec![lease(1, "GPU-a"), lease(2, "GPU-b")]);
        let record = Path::new("/nonexistent/runc/container-1");
        assert!(ledger.find_by_record(0, "container-1", record).is_some());
        assert!(ledger.find_by_record(0, "container-1", Path::new("/run/crun/container-1")).is_none());
        assert!(ledger.find_by_record(1000, "container-1", record).is_none());
        assert_eq!(ledger.on_device("GPU-b").count(), 1);
    }

    #[test]
    fn the_ceiling_is_the_largest_lease_and_none_where_one_has_none() {
        let key = DaemonKey("GPU-a".into());
        let with = |n, sm: Option<u32>| Lease {
            daemon: Some(key.clone()),
            sm: sm.map(Percent::from_thousandths),
            ..lease(n, "GPU-a")
        };
        let mut ledger = ledger(vec![]);
        assert_eq!(ledger.wanted_default_limits(&key), None);
        let wanted = |ledger: &Ledger| {
            let default_limits = ledger.wanted_default_limits(&key).unwrap();
            (default_limits.sm.thousandths(), default_limits.memory)
        };
        let memory = |n, bytes| Lease { memory_bytes: Some(bytes), processes: 2, ..with(n, Some(25_000)) };
        ledger.leases = vec![memory(1, 4 << 30), Lease { processes: 1, ..memory(2, 3 << 30) }];
        assert_eq!(
            wanted(&ledger),
            (25_000, DefaultMemoryLimit::Mebibytes(3072)),
            "each process has 2 GiB of the 4"
        );
        ledger.leases.push(with(3, Some(60_000)));
        assert_eq!(wanted(&ledger), (60_000, DefaultMemoryLimit::Unlimited));
        ledger.leases.push(Lease { sm: None, ..memory(4, 8 << 30) });
        ledger.leases.remove(2);
        assert_eq!(wanted(&ledger), (100_000, DefaultMemoryLimit::Mebibytes(4096)));
    }

    #[test]
    fn a_server_of_its_own_has_the_part_of_one_process_as_ceiling() {
        let key = |text: &str| Some(DaemonKey(text.into()));
        let (sm, processes) = (Some(Percent::from_thousandths(25_000)), 2);
        let memory_bytes = Some(8 << 30);
        let own = Lease { daemon: key("0000000000000001"), sm, memory_bytes, processes, ..lease(1, "GPU-a") };
        let memory = DefaultMemoryLimit::Mebibytes(4096);
        assert_eq!(own.default_limits(), DefaultLimits { sm: Percent::from_thousandths(12_500), memory });
        let shared = Lease { daemon: key("GPU-a"), ..own.clone() };
        assert_eq!(shared.default_limits(), DefaultLimits { sm: Percent::from_thousandths(25_000), memory });
        assert_eq!(Lease { sm: None, memory_bytes: None, ..own }.default_limits(), DefaultLimits::NONE);
    }

    fn process(pid: i32, pid_namespace: u64, cgroup: &str) -> GpuProcess {
        GpuProcess {
            pid,
            name: "python".into(),
            memory_bytes: 1,
            pid_namespace,
            cgroups: vec![cgroup.into()],
            mps_server: false,
        }
    }

    #[test]
    fn a_server_is_idle_from_its_last_lease_to_its_next() {
        let served = |n| Lease { daemon: Some(DaemonKey("GPU-a".into())), ..lease(n, "GPU-a") };
        let mut ledger = ledger(vec![served(1)]);
        ledger.daemons.push(MpsDaemon {
            key: DaemonKey("GPU-a".into()),
            devices: vec!["GPU-a".into()],
            process: None,
            state: DaemonState::Serving,
            default_limits: crate::ledger::DefaultLimits::NONE,
            answered_at: 0,
            idle_since: None,
            mode_left: false,
        });
        let mut seen = Vec::new();
        let mut at = |ledger: &mut Ledger, now| {
            ledger.note_idle(|| now);
            seen.push((ledger.daemons[0].idle_since, ledger.daemons[0].mode_left));
        };
        at(&mut ledger, 1);
        let lease = ledger.leases.pop();
        at(&mut ledger, 2);
        at(&mut ledger, 3);
        ledger.leases.extend(lease);
        at(&mut ledger, 4);
        assert_eq!(seen, [(None, false), (Some(2), true), (Some(2), true), (None, true)]);
        let other = Lease { daemon: None, ..served(2) };
        assert_eq!(ledger.conflicting_daemons(&other).count(), 0, "it serves");
        ledger.leases.clear();
        assert_eq!(ledger.conflicting_daemons(&other).count(), 1);
        assert_eq!(ledger.conflicting_daemons(&served(3)).count(), 0, "its own");
        assert_eq!(ledger.conflicting_daemons(&Lease { devices: vec!["GPU-b".into()], ..other }).count(), 0);
    }

    #[test]
    fn processes_are_joined_by_pid_then_cgroup_then_pid_namespace() {
        let with = |n, pid, pid_namespace, cgroup: &str| Lease {
            init: Some(Init {
                process: Process { pid, start_time: 9 },
                pid_namespace,
                cgroup: Some(cgroup.into()),
                cgroup_inode: None,
            }),
            ..lease(n, "GPU-a")
        };
        let ledger = ledger(vec![
            with(1, 100, 7, "/sys/fs/cgroup/docker/one"),
            with(2, 200, 7, "/sys/fs/cgroup/devices/docker/two"),
            with(3, 300, 0, "/sys/fs/cgroup/devices"),
        ]);
        let found = |process| ledger.lease_of_process(&process).map(|lease| lease.id.as_str().to_owned());
        assert_eq!(found(process(200, 7, "/docker/one")).unwrap(), "0000000000000002");
        assert_eq!(found(process(5, 7, "/docker/two/sub")).unwrap(), "0000000000000002");
        assert_eq!(found(process(5, 7, "/elsewhere")).unwrap(), "0000000000000001");
        assert_eq!(found(process(5, 8, "/docker/one-more")), None);
        assert_eq!(found(process(5, 0, "/")), None);
    }
}
