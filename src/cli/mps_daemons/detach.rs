//! Detaches a daemon from the engine: it must not be ended, frozen or limited together with the process that started
//! the container.
//!
//! `sublet mps start` does this to itself before it starts the daemon, which inherits it.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::stat::{Mode, umask};
use nix::unistd::{chdir, setsid};

use super::service_defaults::{Kept, become_service};

/// The state of this process after it has detached from its caller.
pub(super) struct Left {
    /// Whether it is in the mount namespace of process 1, like a service of the host.
    pub host_mounts: bool,
    /// What a daemon started by it would still inherit from the caller.
    pub kept: Kept,
}

/// Leaves the caller's limits and priorities, session, directory, mount namespace and descriptors, before any thread
/// exists.
pub(super) fn leave(must_be_same: &[&Path]) -> Left {
    let kept = become_service();
    if let Err(error) = setsid() {
        tracing::debug!("setsid: {error}");
    }
    let host_mounts = leave_mounts(must_be_same);
    if let Err(error) = chdir("/") {
        tracing::debug!("chdir /: {error}");
    }
    umask(Mode::from_bits_truncate(0o022));
    sublet_core::process::inheritance::set_cloexec_on_all();
    Left { host_mounts, kept }
}

/// Joins the mount namespace of process 1 if it shows the same files; otherwise a new one that receives unmounts from
/// the host. A copy without them would keep container filesystems busy.
fn leave_mounts(must_be_same: &[&Path]) -> bool {
    if same_file(Path::new("/proc/self/ns/mnt"), Path::new("/proc/1/ns/mnt")) {
        return true;
    }
    let same = |path: &&Path| {
        same_file(path, &Path::new("/proc/1/root").join(path.strip_prefix("/").unwrap_or(path)))
    };
    if must_be_same.iter().all(same) {
        let joined = File::open("/proc/1/ns/mnt").map(|host| setns(host, CloneFlags::CLONE_NEWNS));
        if matches!(joined, Ok(Ok(()))) {
            return true;
        }
    }
    let none = None::<&str>;
    let left = unshare(CloneFlags::CLONE_NEWNS)
        .and_then(|()| mount(none, "/", none, MsFlags::MS_SLAVE | MsFlags::MS_REC, none));
    if let Err(error) = left {
        tracing::warn!("the MPS daemon stays in this mount namespace: {error}");
    }
    false
}

fn same_file(one: &Path, other: &Path) -> bool {
    let identity = |path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    identity(one).is_some_and(|one| identity(other) == Some(one))
}

/// Moves this process to the root of every cgroup hierarchy; returns a warning for each failure.
pub(super) fn leave_cgroups() -> Vec<String> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let mut warnings = Vec::new();
    for procs in foreign_hierarchies(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo")) {
        // 0 means the writing process: cgroups(7).
        if let Err(error) = fs::write(&procs, "0") {
            warnings
                .push(format!("the MPS daemon stays in its starter's cgroup: {}: {error}", procs.display()));
        }
    }
    warnings
}

/// `cgroup.procs` at the root of each hierarchy in which this process is below the root.
fn foreign_hierarchies(cgroup: &str, mountinfo: &str) -> Vec<PathBuf> {
    let entries = cgroup.lines().filter_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let directory = mounted_at(controllers, mountinfo).filter(|_| path != "/")?;
        Some(directory.join("cgroup.procs"))
    });
    entries.collect()
}

/// Where the hierarchy with these controllers (none: cgroup v2) is mounted: proc(5) on mountinfo.
fn mounted_at(controllers: &str, mountinfo: &str) -> Option<PathBuf> {
    let first = controllers.split(',').next()?;
    mountinfo.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(3);
        let (root, point) = (mount.next()?, mount.next()?);
        let mut kind = kind.split(' ');
        let (kind, options) = (kind.next()?, kind.nth(1)?);
        let right = match kind {
            "cgroup2" => first.is_empty(),
            "cgroup" => !first.is_empty() && options.split(',').any(|option| option == first),
            _ => false,
        };
        (right && root == "/").then(|| PathBuf::from(point))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
30 23 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw
32 30 0:28 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd
33 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
34 30 0:30 /docker/x /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
";

    #[test]
    fn every_hierarchy_in_which_the_process_is_below_the_root() {
        let cgroup = "9:name=systemd:/system.slice/docker.service\n8:pids:/x\n4:cpu,cpuacct:/docker/abc\n3:cpuset:/\n0::/a:b\n";
        let expected = [
            "/sys/fs/cgroup/systemd/cgroup.procs",
            "/sys/fs/cgroup/cpu,cpuacct/cgroup.procs",
            "/sys/fs/cgroup/unified/cgroup.procs",
        ];
        assert_eq!(foreign_hierarchies(cgroup, HYBRID), expected.map(PathBuf::from));
    }

    #[test]
    fn unified_hosts_have_one_hierarchy() {
        let mountinfo = "31 30 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
        let procs = [PathBuf::from("/sys/fs/cgroup/cgroup.procs")];
        assert_eq!(foreign_hierarchies("0::/system.slice/docker.service\n", mountinfo), procs);
        assert!(foreign_hierarchies("0::/\n", mountinfo).is_empty());
    }
}
