//! Detaches a daemon from the engine: it must not be ended, frozen or limited together with the process that started
//! the container. `sublet mps start` does this to itself, once, when a daemon has to be started, which inherits it. Other
//! processes start the low-level runtime and the container, which keep the settings of their caller.
//!
//! A daemon shared by several containers must not inherit the resource limits, priorities and signals of the process
//! that started the first container either. systemd gives it a service's settings. Without systemd it gets the same here.
//!
//! If this process may not change something (a hard limit without `CAP_SYS_RESOURCE`, a nice value without
//! `CAP_SYS_NICE`), it warns: such a daemon is slower, or ended first when memory is short. Limits that would end
//! the daemon, or make it fail for some clients, are refused instead ([`DEADLY`]).
//!
//! Not changed: settings that cannot be undone and do not affect these programs (`no_new_privs`, locked securebits,
//! the capability bounding set, and seccomp filters, which mean that this process runs in a container), and settings
//! that exec or fork resets (dumpable, the parent-death signal, signal handlers).

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::libc::{RLIM_INFINITY, rlim_t};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, CpuSet, sched_setaffinity, setns, unshare};
use nix::sys::personality::{self, Persona};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::SigSet;
use nix::sys::stat::{Mode, umask};
use nix::unistd::{Pid, chdir, setsid};

use super::service_syscalls as calls;

/// The state of this process after it has detached from its caller.
#[derive(Default)]
pub(super) struct Left {
    /// Whether it is in the mount namespace of process 1, like a service of the host.
    pub host_mounts: bool,
    /// The limits of [`DEADLY`] that a daemon started by it would still inherit: no daemon is started with these.
    pub deadly: Vec<String>,
    /// All other settings that it would inherit, one line each.
    pub warnings: Vec<String>,
}

/// Leaves the caller's limits and priorities, session, directory, mount namespace and descriptors, before any thread
/// exists.
pub(super) fn leave(must_be_same: &[&Path]) -> Left {
    let mut left = become_service();
    let _ = setsid().inspect_err(|error| tracing::debug!("setsid: {error}"));
    left.host_mounts = leave_mounts(must_be_same);
    let _ = chdir("/").inspect_err(|error| tracing::debug!("chdir /: {error}"));
    umask(Mode::from_bits_truncate(0o022));
    sublet_core::process::inheritance::set_cloexec_on_all();
    left
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
    let _ = left.inspect_err(|error| tracing::warn!("the MPS daemon stays in this mount namespace: {error}"));
    false
}

fn same_file(one: &Path, other: &Path) -> bool {
    let identity = |path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    identity(one).is_some_and(|one| identity(other) == Some(one))
}

/// Moves this process to the root of every cgroup hierarchy; returns a warning for each failure.
pub(super) fn leave_cgroups() -> Vec<String> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let stays = |root: PathBuf| {
        let error = enter(&root).err().filter(|_| enter_below(&root).is_err())?;
        Some(format!("the MPS daemon stays in its starter's cgroup: {}: {error}", root.display()))
    };
    let all = foreign_hierarchies(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"));
    all.into_iter().filter_map(stays).collect()
}

fn enter(cgroup: &Path) -> io::Result<()> {
    // 0 means the writing process: cgroups(7).
    fs::write(cgroup.join("cgroup.procs"), "0")
}

/// In a container the root takes no process once a cgroup below it has controllers (cgroups(7), "no internal processes").
/// This cgroup stays, empty, until whoever made the container removes the container's.
fn enter_below(root: &Path) -> io::Result<()> {
    let own = root.join("sublet-mps");
    fs::create_dir(&own).or_else(|error| if own.is_dir() { Ok(()) } else { Err(error) })?;
    enter(&own)
}

/// The root of each hierarchy in which this process is below it.
fn foreign_hierarchies(cgroup: &str, mountinfo: &str) -> Vec<PathBuf> {
    let entries = cgroup.lines().filter_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        mounted_at(controllers, mountinfo).filter(|_| path != "/")
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

/// Timer slack of a process, in nanoseconds: the kernel's and systemd's default.
const TIMER_SLACK: u64 = 50_000;

/// Limits that end a process (SIGXCPU, SIGXFSZ) or make it fail when the next client connects.
const DEADLY: [Resource; 5] = [
    Resource::RLIMIT_CPU,
    Resource::RLIMIT_FSIZE,
    Resource::RLIMIT_DATA,
    Resource::RLIMIT_AS,
    Resource::RLIMIT_NOFILE,
];

/// Gives this process, which has a single thread, the settings of a systemd service: systemd.exec(5).
fn become_service() -> Left {
    let mut kept = Left::default();
    for (resource, soft, hard) in limits() {
        let list = if DEADLY.contains(&resource) { &mut kept.deadly } else { &mut kept.warnings };
        list.extend(limit(resource, soft, hard));
    }
    // The policy comes before the nice value and the timer slack, which have no meaning under some policies.
    let steps: [(&str, io::Result<()>); 11] = [
        ("scheduling policy", calls::schedule_normally()),
        ("nice value", rustix::process::setpriority_process(None, 0).map_err(Into::into)),
        ("CPU affinity", every_cpu()),
        ("memory policy", calls::any_memory()),
        ("I/O priority", calls::no_io_priority()),
        ("timer slack", nix::sys::prctl::set_timerslack(TIMER_SLACK).map_err(Into::into)),
        // `PER_LINUX` without flags: addresses are random again (setarch(8)). It takes effect at the next exec.
        ("personality", personality::set(Persona::empty()).map(drop).map_err(Into::into)),
        ("session keyring", calls::own_keyring()),
        ("oom_score_adj", fs::write("/proc/self/oom_score_adj", "0")),
        ("ignored signals", calls::heed_signals()),
        ("signal mask", SigSet::empty().thread_set_mask().map_err(Into::into)),
    ];
    for (setting, done) in steps {
        // ENOSYS means a kernel built without the feature.
        let failed = done.err().filter(|error| error.raw_os_error() != Some(nix::libc::ENOSYS));
        kept.warnings.extend(failed.map(|error| format!("{setting} ({error})")));
    }
    for warning in &mut kept.warnings {
        *warning = format!("the MPS daemon has inherited this from the process that started it: {warning}");
    }
    kept
}

/// Soft and hard limits of a service: systemd-system.conf(5), and the limits of the first process, which systemd
/// passes on.
fn limits() -> Vec<(Resource, rlim_t, rlim_t)> {
    const NONE: rlim_t = RLIM_INFINITY;
    let mut limits = vec![
        (Resource::RLIMIT_CPU, NONE, NONE),
        (Resource::RLIMIT_FSIZE, NONE, NONE),
        (Resource::RLIMIT_DATA, NONE, NONE),
        (Resource::RLIMIT_STACK, 8 << 20, NONE),
        (Resource::RLIMIT_CORE, 0, NONE),
        (Resource::RLIMIT_RSS, NONE, NONE),
        (Resource::RLIMIT_NOFILE, 1024, 512 << 10),
        (Resource::RLIMIT_MEMLOCK, 8 << 20, 8 << 20),
        (Resource::RLIMIT_AS, NONE, NONE),
        (Resource::RLIMIT_LOCKS, NONE, NONE),
        (Resource::RLIMIT_MSGQUEUE, 819_200, 819_200),
        (Resource::RLIMIT_NICE, 0, 0),
        (Resource::RLIMIT_RTPRIO, 0, 0),
        (Resource::RLIMIT_RTTIME, NONE, NONE),
    ];
    // Half of the kernel's maximum. If that cannot be read, the caller's limits stay; they do not bind a root process.
    let tasks = fs::read_to_string("/proc/sys/kernel/threads-max").ok();
    if let Some(tasks) = tasks.and_then(|text| text.trim().parse::<rlim_t>().ok()) {
        let each = [Resource::RLIMIT_NPROC, Resource::RLIMIT_SIGPENDING];
        limits.extend(each.map(|resource| (resource, tasks / 2, tasks / 2)));
    }
    limits
}

/// Sets a limit. Returns the caller's limit if it cannot be raised to the soft limit of a service.
fn limit(resource: Resource, soft: rlim_t, hard: rlim_t) -> Option<String> {
    let Err(error) = setrlimit(resource, soft, hard) else { return None };
    let most = getrlimit(resource).map_or(0, |(_, most)| most);
    match setrlimit(resource, soft.min(most), most) {
        Ok(()) if soft <= most => None,
        Ok(()) => Some(format!("{resource:?} of {most} ({error})")),
        Err(_) => Some(format!("{resource:?} ({error})")),
    }
}

/// The kernel ignores CPUs that do not exist or are not in the cpuset.
fn every_cpu() -> io::Result<()> {
    let mut all = CpuSet::new();
    for cpu in 0..CpuSet::count() {
        all.set(cpu)?;
    }
    Ok(sched_setaffinity(Pid::from_raw(0), &all)?)
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
        let expected = ["/sys/fs/cgroup/systemd", "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/unified"];
        assert_eq!(foreign_hierarchies(cgroup, HYBRID), expected.map(PathBuf::from));
    }

    #[test]
    fn unified_hosts_have_one_hierarchy() {
        let mountinfo = "31 30 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
        let root = [PathBuf::from("/sys/fs/cgroup")];
        assert_eq!(foreign_hierarchies("0::/system.slice/docker.service\n", mountinfo), root);
        assert!(foreign_hierarchies("0::/\n", mountinfo).is_empty());
    }
}
