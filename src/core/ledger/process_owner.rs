//! Which lease a process belongs to. This is decided only here.

use std::path::Path;

use super::{Lease, Ledger};
use crate::inventory::GpuProcess;
use crate::process::Process;

impl Ledger {
    /// The lease to which a process on a GPU is attributable: by its pid, otherwise its cgroup, otherwise its PID
    /// namespace, which several containers may share. For callers that ask whether the process belongs to any lease at
    /// all.
    #[must_use]
    pub fn lease_of_process(&self, process: &GpuProcess) -> Option<&Lease> {
        let by = |test: fn(&Lease, &GpuProcess) -> bool| {
            self.leases.iter().find(|lease| !lease.is_of_job() && test(lease, process))
        };
        let of_job = || self.leases.iter().find(|lease| lease.is_of_job() && has_cgroup(lease, process));
        let has_pid = |lease: &Lease, process: &GpuProcess| {
            lease.init.as_ref().is_some_and(|init| init.process.pid == process.pid)
        };
        by(has_pid).or_else(|| by(has_cgroup)).or_else(|| by(has_pid_namespace)).or_else(of_job)
    }

    /// The lease of `process`, which is `seen` on a GPU, if it is certain enough to kill the process:
    /// by its container's first process or cgroup. The PID namespace counts only for running containers without a
    /// cgroup of their own: other containers may have joined it, and the inode of a namespace that has ended is reused.
    #[must_use]
    pub fn certain_lease_of(&self, process: Process, seen: &GpuProcess) -> Option<&Lease> {
        let is_init = |lease: &&Lease| lease.init.as_ref().is_some_and(|init| init.process == process);
        let in_cgroup = |lease: &&Lease| !lease.is_of_job() && has_cgroup(lease, seen);
        // A job's cgroup is its user's only, also where a process in it belongs to no container.
        let of_job = || self.leases.iter().find(|lease| lease.is_of_job() && has_cgroup(lease, seen));
        if let Some(lease) = self.leases.iter().find(is_init).or_else(|| self.leases.iter().find(in_cgroup)) {
            return Some(lease);
        }
        let lives = |lease: &Lease| lease.init.as_ref().is_some_and(|init| init.process.is_alive());
        let in_namespace = |lease: &&Lease| has_pid_namespace(lease, seen) && lives(lease);
        let mut found = self.leases.iter().filter(in_namespace);
        let alone = |lease: &&Lease| lease.init.as_ref().is_some_and(|init| init.cgroup.is_none());
        match (found.next().filter(alone), found.next()) {
            (Some(lease), None) => Some(lease),
            _ => of_job(),
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
