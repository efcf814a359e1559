//! Slurm's jobs on this node: the job to which a process belongs, by its cgroup, and the job's allocation, by the
//! record that root's prolog wrote (docs/slurm.md). Nothing is read here that the job's user could have written.

mod job_record;

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};
use serde::{Deserialize, Serialize};

use crate::fs::{is_trusted_owner, under};
use crate::process::{CGROUP_MOUNT, cgroup_line, cgroup_table, unified_cgroups, unless_gone};

pub use job_record::{JobRecord, JobShare, RecordError, make_directory, remove_stray_directories};
pub(crate) use job_record::{lease_file, lease_files};

/// The share that stands for the job's allocation: `sublet.share=slurm`, or the shim by the name `sublet-slurm`.
pub(crate) const JOB_SHARE: &str = "slurm";

/// A GPU of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobGpu {
    /// Its UUID.
    pub uuid: String,
    /// Its node on the host.
    pub node: PathBuf,
}

/// UUIDs of the `gpus` that the calling process must not open, by its cgroup. With `ConstrainDevices` (cgroup.conf(5)) slurmd
/// lets a step open the GPUs of its job that the step got, and with `--gpus-per-task` a task its own.
///
/// access(2) asks the device controllers of cgroup v1 and v2 as open(2) does (`devcgroup_inode_permission` in Linux's
/// fs/namei.c), does not reach the driver, and says EPERM. A cgroup's devices.list does not show it: slurmd forbids one
/// device after the other, and it then says `a *:* rwm`. A node of which nothing is known, such as a missing one, is not
/// said to be forbidden: the variables that follow from this only repeat the kernel's decision.
pub(crate) fn forbidden(gpus: &[JobGpu]) -> Vec<String> {
    let is_forbidden =
        |gpu: &&JobGpu| access(&gpu.node, AccessFlags::R_OK | AccessFlags::W_OK) == Err(Errno::EPERM);
    gpus.iter().filter(is_forbidden).map(|gpu| gpu.uuid.clone()).collect()
}

/// The v1 hierarchies in which slurmd may have made a cgroup for a job (cgroup.conf(5)), the one that it uses to find a
/// job's processes first (`ProctrackType=proctrack/cgroup`).
const V1: [&str; 4] = ["freezer", "devices", "cpuset", "memory"];

/// The cgroup of a job, as slurmd made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobCgroup {
    /// The job's id.
    pub job: u64,
    /// The step of the process that was looked at: `0`, `batch`, `extern`, `interactive`.
    pub step: Option<String>,
    /// The job's directory.
    pub dir: PathBuf,
    /// Its inode. A job that is requeued gets another directory of the same name.
    pub inode: u64,
}

impl JobCgroup {
    /// The cgroup of the job to which process `pid` belongs; `None`: it belongs to none. The job's user can neither make
    /// such a directory, which is root's, nor move a process into another job's.
    ///
    /// # Errors
    /// The process has ended, or cgroups cannot be read.
    pub fn of(pid: i32) -> io::Result<Option<Self>> {
        Self::in_table(Path::new(CGROUP_MOUNT), &cgroup_table(pid)?)
    }

    /// The jobs that have a process on this node. Slurm's own `extern` step is one as long as the job runs.
    pub fn jobs() -> io::Result<BTreeSet<u64>> {
        let mut jobs = BTreeSet::new();
        for entry in fs::read_dir("/proc")? {
            let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            // The process, or the last one of its job, may just have ended.
            jobs.extend(unless_gone(Self::of(pid))?.flatten().map(|cgroup| cgroup.job));
        }
        Ok(jobs)
    }

    /// That of a process with `table` as its /proc/PID/cgroup (cgroups(7)).
    fn in_table(mount: &Path, table: &str) -> io::Result<Option<Self>> {
        for controller in V1.into_iter().chain([""]) {
            let Some((job, step, dir)) = cgroup_line(table, controller).and_then(named) else { continue };
            let hierarchy =
                if controller.is_empty() { unified_cgroups(mount) } else { mount.join(controller) };
            let dir = under(&hierarchy, dir);
            let meta = fs::symlink_metadata(&dir)?;
            if meta.is_dir() && is_trusted_owner(meta.uid()) {
                let step = step.map(str::to_owned);
                return Ok(Some(Self { job, step, dir, inode: meta.ino() }));
            }
        }
        Ok(None)
    }
}

/// The job that slurmd made the cgroup `below` for, or one above it. `below` is its path in its hierarchy.
pub(crate) fn job_of_cgroup(below: &Path) -> Option<u64> {
    named(&Path::new("/").join(below).to_string_lossy()).map(|(job, ..)| job)
}

/// The job that a path names, the step, and the job's part of the path:
/// `…/slurmstepd.scope/job_12/step_0/user/task_0` with cgroup v2 (in front of the name there may be the node's), and
/// `/slurm/uid_1000/job_12/step_0/task_0` with v1.
fn named(path: &str) -> Option<(u64, Option<&str>, &str)> {
    let mut above = ["", ""];
    let mut end = 0;
    let mut parts = path.split_inclusive('/');
    for part in parts.by_ref() {
        end += part.len();
        let name = part.trim_end_matches('/');
        let is_slurms = above[1].ends_with("slurmstepd.scope")
            || above[1].starts_with("uid_") && above[0].starts_with("slurm");
        if let Some(job) = name.strip_prefix("job_").filter(|_| is_slurms).and_then(number) {
            let step = parts.next().and_then(|part| part.trim_end_matches('/').strip_prefix("step_"));
            return Some((job, step, path[..end].trim_end_matches('/')));
        }
        above = [above[1], name];
    }
    None
}

fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_or_missing_node_is_not_forbidden() {
        let gpu = |node: &str| JobGpu { uuid: "GPU-a".into(), node: node.into() };
        assert!(forbidden(&[gpu("/dev/null"), gpu("/nonexistent"), gpu("/proc/version")]).is_empty());
    }
}

#[cfg(test)]
mod cgroup_tests {
    use super::*;

    #[test]
    fn a_path_names_a_job_only_where_slurmd_makes_them() {
        let job = "/system.slice/slurmstepd.scope/job_12";
        assert_eq!(named(&format!("{job}/step_0/user/task_0")), Some((12, Some("0"), job)));
        assert_eq!(named(job), Some((12, None, job)));
        let of_node = "/system.slice/n1_slurmstepd.scope/job_12";
        assert_eq!(named(&format!("{of_node}/step_batch/user")), Some((12, Some("batch"), of_node)));
        let old = "/slurm/uid_1000/job_7";
        assert_eq!(named(&format!("{old}/step_extern/task_0")), Some((7, Some("extern"), old)));
        for none in [
            "/",
            "",
            "/job_12",
            "/user.slice/job_12/step_0",
            "/slurm/job_12",
            "/system.slice/slurmstepd.scope/job_",
            "/system.slice/slurmstepd.scope/job_+1",
            "/system.slice/slurmstepd.scope/system",
        ] {
            assert_eq!(named(none), None, "{none}");
        }
    }

    #[test]
    fn a_job_has_its_directory_in_v1_and_in_v2() {
        let mount = tempfile::tempdir().unwrap();
        let of = |table: &str| JobCgroup::in_table(mount.path(), table).unwrap();
        fs::create_dir_all(mount.path().join("freezer/slurm/uid_0/job_3")).unwrap();
        let found = of("9:devices:/\n4:freezer:/slurm/uid_0/job_3/step_0\n0::/x\n").unwrap();
        assert_eq!((found.job, found.step.as_deref()), (3, Some("0")));
        assert_eq!(found.dir, mount.path().join("freezer/slurm/uid_0/job_3"));
        fs::write(mount.path().join("cgroup.controllers"), "").unwrap();
        let scope = "system.slice/slurmstepd.scope/job_4";
        fs::create_dir_all(mount.path().join(scope)).unwrap();
        let found = of("0::/system.slice/slurmstepd.scope/job_4/step_0/user/task_0\n").unwrap();
        assert_eq!((found.dir, found.job), (mount.path().join(scope), 4));
        assert_eq!(of("0::/user.slice/x\n"), None);
    }

    #[test]
    fn processes_that_end_meanwhile_are_in_no_job() {
        let mut short = std::process::Command::new("true").spawn().unwrap();
        assert!(JobCgroup::jobs().is_ok());
        short.wait().unwrap();
    }

    #[test]
    fn the_same_name_made_again_is_another_cgroup() {
        let mount = tempfile::tempdir().unwrap();
        fs::write(mount.path().join("cgroup.controllers"), "").unwrap();
        let dir = mount.path().join("slurmstepd.scope/job_4");
        let inode = || {
            fs::create_dir_all(&dir).unwrap();
            JobCgroup::in_table(mount.path(), "0::/slurmstepd.scope/job_4\n").unwrap().unwrap().inode
        };
        let first = inode();
        fs::rename(&dir, mount.path().join("slurmstepd.scope/ended")).unwrap();
        assert_ne!(inode(), first);
    }
}
