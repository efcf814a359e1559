//! Queries and changes of a ledger in memory: leases, the records made before a start or a stop of an MPS daemon,
//! which process belongs to which lease, and the files that ended containers left in places that outlive them.

use std::convert::Infallible;
use std::path::{Path, PathBuf};

use super::{
    Container, DaemonKey, DaemonState, DefaultLimits, DefaultMemoryLimit, Freed, Lease, LeaseId, Ledger,
    LedgerError, Leftover, MpsDaemon, SCHEMA, Scan, Store, SuspendStep, VolumeFiles,
};
use crate::inventory::GpuProcess;
use crate::process::Process;
use crate::share::{Percent, bytes_of_process, sm_of_process};
use crate::text::safe;

/// Stands for the id of another user's container.
pub(crate) const ANOTHER_USERS: &str = "another user's container";

/// A container that already has a live lease. A live lease is never replaced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "container {} already holds lease {lease}; fix: delete the container before you create it again",
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
    pub fn find_by_record(&self, uid: u32, id: &str, record: &Path) -> Option<&Lease> {
        self.leases.iter().find(|lease| {
            let same = lease.container.uid == uid && lease.container.id == id;
            same && lease.container.record == record && !lease.is_of_job()
        })
    }

    /// As messages for user `uid` have it: another user's containers have no ids, which a name may stand in. Root sees all.
    pub fn seen_by(mut self, uid: u32) -> Self {
        for lease in self.leases.iter_mut().filter(|lease| uid != 0 && lease.container.uid != uid) {
            ANOTHER_USERS.clone_into(&mut lease.container.id);
        }
        self
    }

    /// Leases on `device` (a UUID), in the order they were taken.
    pub fn on_device<'a>(&'a self, device: &'a str) -> impl Iterator<Item = &'a Lease> {
        self.leases.iter().filter(move |lease| lease.devices.iter().any(|uuid| uuid == device))
    }

    /// Leases on `gpu` (a UUID) and on its MIG devices.
    pub fn on_gpu<'a>(&'a self, gpu: &str) -> impl Iterator<Item = &'a Lease> {
        let is_on = move |lease: &&Lease| {
            lease.devices.iter().any(|uuid| uuid == gpu)
                || lease.mig_devices.iter().any(|part| part.gpu == gpu)
        };
        self.leases.iter().filter(is_on)
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
        let other_daemons = on_its.filter(|daemon| lease.daemon.as_ref() != Some(&daemon.key));
        other_daemons.map(|daemon| &daemon.key).filter(|key| self.on_daemon(key).next().is_none())
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
        let lease = self.leases.remove(self.leases.iter().position(|lease| lease.id == *id)?);
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
        let before = self.daemons.iter_mut().find(|daemon| daemon.key == *key).map(|daemon| {
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
    /// Whether it books room on `device`.
    pub fn books(&self, device: &str) -> bool {
        // Each start asks this of each lease for each device: first whether it is there at all.
        let number = self.devices.iter().rposition(|own| own == device);
        number.is_some_and(|number| !self.is_suspended() && (number > 0 || !self.is_arriving()))
    }

    /// Whether it comes back on another device than the one that it was suspended on.
    pub fn is_arriving(&self) -> bool {
        self.suspension.as_ref().is_some_and(|own| own.step == SuspendStep::Arriving)
    }

    /// Whether its container's GPU state is in host memory, so that it books nothing.
    pub fn is_suspended(&self) -> bool {
        let is_out = |step| matches!(step, SuspendStep::Suspended | SuspendStep::Adding);
        self.suspension.as_ref().is_some_and(|suspension| is_out(suspension.step))
    }

    /// The memory that it books on each of its devices; `None`: it has no limit. What is on its way out or back has at
    /// least its own size.
    pub fn booked_memory(&self) -> Option<u64> {
        match &self.suspension {
            None => self.memory_bytes,
            Some(_) if self.is_suspended() => None,
            Some(suspension) => Some(suspension.bytes().max(self.memory_bytes.unwrap_or(0))),
        }
    }

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

impl Ledger {
    /// Records the files that `lease`, which has ended, may have left behind.
    ///
    /// A rootless user removes the leftovers of their container. Root removes nothing at a path that a user names.
    pub(super) fn note_leftovers(&mut self, lease: &Lease) {
        let volumes = lease.volumes_with_files();
        let nothing = lease.mount_points.is_empty() && volumes.is_empty();
        if lease.brokered || lease.init.is_some() && nothing {
            return;
        }
        let Container { bundle, rootfs, .. } = &lease.container;
        // A container that is started repeatedly leaves the same files each time.
        let known = self.leftovers.iter_mut().find(|left| left.bundle == *bundle && left.rootfs == *rootfs);
        match known {
            Some(left) => {
                add_missing(&mut left.mount_points, lease.mount_points.to_vec());
                add_missing(&mut left.volumes, volumes);
            }
            None => self.leftovers.push(Leftover {
                bundle: bundle.clone(),
                rootfs: rootfs.clone(),
                mount_points: lease.mount_points.to_vec(),
                volumes,
            }),
        }
    }

    /// Leftovers whose root filesystem no live container of root's uses, without the volumes that those use.
    pub(crate) fn clearable(&self) -> Vec<Leftover> {
        let roots = || self.leases.iter().filter(|lease| lease.is_believed_by(0));
        let in_use = |left: &&Leftover| roots().any(|lease| lease.container.rootfs == left.rootfs);
        // A container may have the same volume at another path. A volume on the same file system counts as the same.
        let used: Vec<u64> = roots().flat_map(|lease| &lease.volumes).map(|volume| volume.device).collect();
        let free = |left: &Leftover| {
            let volumes = left.volumes.iter().filter(|volume| !used.contains(&volume.device));
            let free = Leftover { volumes: volumes.cloned().collect(), ..left.clone() };
            let waits = free.volumes.is_empty() && free.mount_points.is_empty() && !left.volumes.is_empty();
            (!waits).then_some(free)
        };
        self.leftovers.iter().filter(|left| !in_use(left)).filter_map(free).collect()
    }

    /// Of `found`, empty files in `rootfs`, those that a runtime made for a container that has or had a lease. The rest are
    /// the image's own.
    pub(crate) fn filter_mount_points<'p>(&self, rootfs: &Path, found: &'p [PathBuf]) -> Vec<&'p PathBuf> {
        if found.is_empty() {
            return Vec::new();
        }
        let leases = self.leases.iter().filter(|lease| lease.container.rootfs == rootfs);
        let left = self.leftovers.iter().filter(|left| left.rootfs == rootfs);
        let made: Vec<&PathBuf> = leases
            .flat_map(|lease| lease.mount_points.iter())
            .chain(left.flat_map(|left| &left.mount_points))
            .collect();
        found.iter().filter(|path| made.contains(path)).collect()
    }

    /// Whether files may be removed where `lease`'s container has its root filesystem or a volume: those that a container
    /// left, or will leave when it ends.
    pub(crate) fn has_files_to_clear(&self, lease: &Lease) -> bool {
        let shares = |volumes: &[VolumeFiles]| {
            volumes.iter().any(|theirs| lease.volumes.iter().any(|mine| mine.device == theirs.device))
        };
        // Both are canonical. To compare each by its parts takes ten times as long.
        let own = lease.container.rootfs.as_os_str();
        let beside = |rootfs: &Path, volumes: &[VolumeFiles]| rootfs.as_os_str() == own || shares(volumes);
        // A user removes the leftovers of their containers by themselves, without this lock.
        let mut roots = self.leases.iter().filter(|other| other.id != lease.id && other.is_believed_by(0));
        roots.any(|other| beside(&other.container.rootfs, &other.volumes))
            || self.leftovers.iter().any(|left| beside(&left.rootfs, &left.volumes))
    }

    /// Forgets leftovers that were removed.
    pub fn forget(&mut self, cleared: &[Leftover]) {
        self.leftovers.retain_mut(|left| {
            let same = |other: &&Leftover| other.bundle == left.bundle && other.rootfs == left.rootfs;
            let Some(done) = cleared.iter().find(same) else { return true };
            left.mount_points.retain(|path| !done.mount_points.contains(path));
            left.volumes.retain(|volume| !done.volumes.contains(volume));
            !left.mount_points.is_empty() || !left.volumes.is_empty()
        });
    }
}

fn add_missing<T: PartialEq>(to: &mut Vec<T>, from: Vec<T>) {
    let new: Vec<T> = from.into_iter().filter(|one| !to.contains(one)).collect();
    to.extend(new);
}

impl Lease {
    /// Whether its root filesystem and volumes count for leftovers of `uid`'s containers. A user may report any to
    /// `sublet serve`, and could so keep leftovers of other users' containers.
    pub(crate) fn is_believed_by(&self, uid: u32) -> bool {
        !self.brokered || self.container.uid == uid
    }

    /// The files to remove from volumes after it has ended.
    pub(crate) fn volumes_with_files(&self) -> Vec<VolumeFiles> {
        self.volumes.iter().filter(|volume| !volume.files.is_empty()).cloned().collect()
    }
}

#[cfg(any(test, feature = "fixtures"))]
pub mod fixture {
    //! Leases for tests.
    #![allow(clippy::missing_panics_doc, reason = "for tests")]

    use super::super::{Container, Lease, LeaseId, LeaseState};
    use crate::process::Process;
    use crate::share::{Isolation, Mode, Priority, Suspend};

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
            suspend: Suspend::Never,
            suspension: None,
            known: Vec::new(),
            resumed_ms: None,
            backoff: None,
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
            claimed_owner: None,
            mig_devices: Vec::new(),
        }
    }
}

#[cfg(test)]
#[path = "queries_tests.rs"]
mod tests;
