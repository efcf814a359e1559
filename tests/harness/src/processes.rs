//! The processes of this machine, read from /proc.

use std::path::Path;

use nix::unistd::Pid;

/// All processes, including zombies.
pub(crate) fn all() -> impl Iterator<Item = Pid> {
    let entries = std::fs::read_dir("/proc").expect("/proc").flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).map(Pid::from_raw)
}

/// A file of `pid` in /proc, with blanks between the words of a command line; empty if the process has ended.
pub(crate) fn read(pid: Pid, name: &str) -> String {
    let text = std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
    String::from_utf8_lossy(&text).replace('\0', " ")
}

/// Whether `pid` runs; a zombie does not, unless it is only its first thread that has ended (proc(5), `num_threads`).
#[must_use]
pub fn is_alive(pid: Pid) -> bool {
    let threads = |rest: &str| rest.split(' ').nth(17).and_then(|count| count.parse().ok()).unwrap_or(0);
    let runs = |rest: &str| !rest.starts_with(['Z', 'X']) || threads(rest) > 1;
    read(pid, "stat").rsplit_once(") ").is_some_and(|(_, rest)| runs(rest))
}

/// Stops `pid` and waits until it has stopped, because a signal takes a moment.
///
/// # Panics
/// The process does not stop.
pub fn stop(pid: Pid) {
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).expect("it lives");
    let stands = || read(pid, "stat").rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'));
    assert!(crate::eventually(stands), "{pid} does not stop");
}

/// Every process in a cgroup whose path contains `part`.
#[must_use]
pub(crate) fn in_cgroup(part: &str) -> Vec<Pid> {
    all().filter(|pid| is_alive(*pid) && read(*pid, "cgroup").contains(part)).collect()
}

/// The containerd-shims of the containerd that listens at `address`, without those that it starts to delete what
/// another one left.
#[must_use]
pub(crate) fn shims_of(address: &Path) -> Vec<Pid> {
    let address = format!(" -address {} ", address.display());
    let is_shim = |line: &str| {
        line.starts_with("/usr/bin/containerd-shim") && line.contains(&address) && !line.ends_with(" delete ")
    };
    all().filter(|pid| is_shim(&read(*pid, "cmdline"))).collect()
}
