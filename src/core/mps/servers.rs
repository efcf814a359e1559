//! The servers of an MPS daemon, as /proc shows them: processes that it started.

use std::fs;

use crate::process::Process;
use crate::reading::kernel_file;

/// What the driver calls its MPS programs, as far as the kernel keeps a name (proc(5), `comm`).
const NAME: &str = "nvidia-cuda-mps";

/// Pids of the servers that `daemon` has started. It may have others, and these may have ended: only the daemon knows.
pub(super) fn of(daemon: Process) -> Vec<i32> {
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
