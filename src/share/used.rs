//! The GPU memory that this container's processes use, as nvidia-smi in the container lists it.
//!
//! NVML in a container lists the processes of the container's PID namespace with their memory, in every mode
//! (docs/evidence/2026-11-23-h200-used.md). What cannot be told apart from other containers' use is unknown.

use std::fs;
use std::io::Read as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Where sublet mounts the driver's program.
const SMI: &str = "/usr/bin/nvidia-smi";

/// A driver that does not answer is no reason to wait longer.
const LIMIT: Duration = Duration::from_secs(5);

/// In bytes; `None` if it is not known.
pub(crate) fn bytes() -> Option<u64> {
    // In the host's PID namespace the kernel's threads are listed, and so are the processes of other containers.
    if fs::read_to_string("/proc/2/comm").is_ok_and(|name| name.trim_end() == "kthreadd") {
        return None;
    }
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    sum(&listed()?, |pid| {
        let theirs = cgroups(pid);
        (!theirs.is_empty()).then(|| theirs.iter().any(|theirs| is_below(theirs, &own)))
    })
}

/// Those of each thread of a process: of one that has ended, cgroup v1 shows the root, also where others go on.
fn cgroups(pid: u32) -> Vec<String> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.filter_map(|thread| fs::read_to_string(thread.path().join("cgroup")).ok()).collect()
}

/// What nvidia-smi prints: a line for each process with its pid and MiB.
fn listed() -> Option<String> {
    let mut child = Command::new(SMI)
        .args(["--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let begun = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if begun.elapsed() < LIMIT => std::thread::sleep(Duration::from_millis(10)),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
        }
    };
    let mut text = String::new();
    // The child has ended, so this does not wait. Longer output than a pipe holds (64 KiB) ends at the limit above.
    child.stdout.take()?.read_to_string(&mut text).ok()?;
    status.success().then_some(text)
}

/// The sum of the processes that `is_own`. `None` if a line, or whose a process is, is not understood.
fn sum(text: &str, is_own: impl Fn(u32) -> Option<bool>) -> Option<u64> {
    let mut total = 0_u64;
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let (pid, mib) = line.split_once(',')?;
        let mib: u64 = mib.trim().parse().ok()?;
        if is_own(pid.trim().parse().ok()?)? {
            total = total.checked_add(mib.checked_mul(1 << 20)?)?;
        }
    }
    Some(total)
}

/// Whether a process with the cgroups `theirs` is in the cgroups `own` or below, in each hierarchy (cgroups(7),
/// `/proc/PID/cgroup`). Containers of a pod can share a PID namespace, but not a cgroup.
fn is_below(theirs: &str, own: &str) -> bool {
    let count = own.lines().count();
    count == theirs.lines().count()
        && own.lines().zip(theirs.lines()).all(|(own, theirs)| {
            let rest = theirs.strip_prefix(own.trim_end_matches('/'));
            // A path with `..` is outside the root of this cgroup namespace.
            rest.is_some_and(|rest| (rest.is_empty() || rest.starts_with('/')) && !rest.starts_with("/.."))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_containers_own_processes_count() {
        let own = |pid| Some(pid < 100);
        assert_eq!(sum("1, 2518\n7, 516\n200, 9000\n", own), Some(3034 << 20));
        assert_eq!(sum("", own), Some(0));
        assert_eq!(sum("1, [N/A]\n", own), None);
        assert_eq!(sum("1, 2518\n", |_| None), None);
        assert_eq!(sum("No devices were found\n", own), None);
    }

    #[test]
    fn a_cgroup_of_another_container_is_not_below() {
        assert!(is_below("0::/\n", "0::/\n"));
        assert!(is_below("0::/init.scope\n", "0::/\n"));
        assert!(!is_below("0::/../other\n", "0::/\n"));
        assert!(is_below("0::/docker/a/b\n", "0::/docker/a\n"));
        assert!(!is_below("0::/docker/ab\n", "0::/docker/a\n"));
        assert!(!is_below("2:cpu:/a\n1:memory:/b\n", "2:cpu:/a\n1:memory:/a\n"));
        assert!(!is_below("", "0::/\n"));
    }
}
