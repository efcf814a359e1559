//! The servers of an MPS daemon, as /proc shows them: processes that it started.

use std::fs;

use crate::process::Process;
use crate::reading::kernel_file;

/// The driver's MPS programs, as the kernel truncates their names (proc(5), `comm`).
const NAME: &str = "nvidia-cuda-mps";

/// Pids of the servers that `daemon` has started. The list may be incomplete or outdated: only the daemon knows.
pub(super) fn list(daemon: Process) -> Vec<i32> {
    let threads = fs::read_dir(format!("/proc/{}/task", daemon.pid)).into_iter().flatten().flatten();
    let children =
        |thread: fs::DirEntry| fs::read_to_string(thread.path().join("children")).unwrap_or_default();
    let all: String = threads.map(children).collect();
    all.split_whitespace().filter_map(|pid| pid.parse().ok()).filter(|pid| may_be(*pid)).collect()
}

/// Whether the process `pid` may be a server.
pub(super) fn may_be(pid: i32) -> bool {
    match kernel_file(format!("/proc/{pid}/comm")) {
        Ok(name) => name.starts_with(NAME),
        Err(error) => error.kind() != std::io::ErrorKind::NotFound,
    }
}
