//! The sockets that a process has open, and its network namespace, as /proc shows them.

use std::fs;
use std::path::{Path, PathBuf};

use super::live_proc_dir_of;

/// The inodes of the sockets that the process `pid` has open; none if that may not be read.
pub fn inodes(pid: i32) -> Vec<u64> {
    list_in(&live_proc_dir_of(pid))
}

/// [`inodes`], also of threads with a descriptor table of their own (unshare(2), `CLONE_FILES`).
pub fn inodes_of_threads(pid: i32) -> Vec<u64> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.flat_map(|thread| list_in(&thread.path())).collect()
}

fn list_in(proc: &Path) -> Vec<u64> {
    let open = fs::read_dir(proc.join("fd")).into_iter().flatten().flatten();
    open.filter_map(|entry| inode(&fs::read_link(entry.path()).ok()?)).collect()
}

/// The inode of the socket to which a link in /proc/PID/fd leads; `None` if it leads to none.
pub fn inode(link: &Path) -> Option<u64> {
    link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// The file that stands for the network namespace of the process `pid`.
pub fn network_file(pid: i32) -> PathBuf {
    live_proc_dir_of(pid).join("ns/net")
}

/// Identifies the network namespace of the process `pid`; `None` if it has ended or may not be examined.
pub fn network(pid: i32) -> Option<PathBuf> {
    fs::read_link(network_file(pid)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sockets_have_their_inode() {
        assert_eq!(inode(Path::new("socket:[4711]")), Some(4711));
        for other in ["/run/log", "pipe:[4711]", "socket:[]", "socket:[4711"] {
            assert_eq!(inode(Path::new(other)), None);
        }
    }
}
