//! A daemon shared by several containers must not inherit the resource limits, priorities and signals of the process
//! that started the first container. systemd gives it those of a service. Without systemd it gets the same here.
//!
//! `sublet mps start` does this to itself, once, when a daemon has to be started. Other processes start the low-level
//! runtime and the container, which keep what their caller gave them.
//!
//! If this process may not change something (a hard limit without `CAP_SYS_RESOURCE`, a nice value without
//! `CAP_SYS_NICE`), it warns: such a daemon is slower, or ended first when memory is short. Limits that would end
//! the daemon, or make it fail for some clients, are refused instead ([`DEADLY`]).
//!
//! Not changed: settings that cannot be undone and do not affect these programs (`no_new_privs`, locked securebits,
//! the capability bounding set, and seccomp filters, which mean that this process runs in a container), and settings
//! that exec or fork resets (dumpable, the parent-death signal, signal handlers).

use std::{fs, io};

use nix::libc::{RLIM_INFINITY, rlim_t};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::personality::{self, Persona};
use nix::sys::prctl::set_timerslack;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::SigSet;
use nix::unistd::Pid;
use rustix::process::setpriority_process;

use super::service_syscalls as calls;

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

/// The caller's settings that remain.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// Limits of [`DEADLY`]: no daemon is started with these.
    pub deadly: Vec<String>,
    /// All others, one line each.
    pub warnings: Vec<String>,
}

/// Gives this process, which has a single thread, the settings of a systemd service: systemd.exec(5).
pub(super) fn become_service() -> Kept {
    let mut kept = Kept::default();
    for (resource, soft, hard) in limits() {
        if let Some(left) = limit(resource, soft, hard) {
            let lists = if DEADLY.contains(&resource) { &mut kept.deadly } else { &mut kept.warnings };
            lists.push(left);
        }
    }
    // The policy comes before the nice value and the timer slack, which have no meaning under some policies.
    let steps: [(&str, io::Result<()>); 11] = [
        ("scheduling policy", calls::schedule_normally()),
        ("nice value", setpriority_process(None, 0).map_err(Into::into)),
        ("CPU affinity", every_cpu()),
        ("memory policy", calls::any_memory()),
        ("I/O priority", calls::no_io_priority()),
        ("timer slack", set_timerslack(TIMER_SLACK).map_err(Into::into)),
        // `PER_LINUX` without flags: addresses are random again (setarch(8)). It takes effect at the next exec.
        ("personality", personality::set(Persona::empty()).map(drop).map_err(Into::into)),
        ("session keyring", calls::own_keyring()),
        ("oom_score_adj", fs::write("/proc/self/oom_score_adj", "0")),
        ("ignored signals", calls::heed_signals()),
        ("signal mask", SigSet::empty().thread_set_mask().map_err(Into::into)),
    ];
    for (what, done) in steps {
        match done {
            // ENOSYS means a kernel built without the feature.
            Err(error) if error.raw_os_error() != Some(nix::libc::ENOSYS) => {
                kept.warnings.push(format!("{what} ({error})"));
            }
            _ => {}
        }
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
