//! Which containers have a connection to an MPS daemon. CUDA programs keep none, so it is one that the daemon waits for,
//! or a control program's (docs/evidence/2026-11-25-mps-control.md).

use crate::ledger::{DaemonKey, Ledger, read_up_to};
use crate::process::{Process, live_proc_dir_of, sockets};
use crate::text::safe;

/// How much of one namespace's list of sockets is read at most, in bytes.
const LONGEST_LIST: u64 = 16 << 20;

/// The names of the containers of `key` that have a connection to `daemon`, as /proc shows them to root. A socket that
/// accept(2) made is in the network namespace of who connected; so containers without one of their own are not found.
pub(super) fn find_connected(daemon: Process, key: &DaemonKey, ledger: &Ledger) -> Vec<String> {
    let (own, host) = (sockets::inodes(daemon.pid), sockets::network(daemon.pid));
    let has_one = |pid: i32| sockets::network(pid) != host && has_socket_of(pid, &own);
    let of_daemon = ledger.on_daemon(key);
    let keep = of_daemon.filter(|lease| lease.init.as_ref().is_some_and(|init| has_one(init.process.pid)));
    keep.map(|lease| safe(&lease.container.name())).collect()
}

/// Whether the network namespace of the process `pid` has one of `sockets` (`/proc/net/unix`, proc(5): the inode is the
/// seventh column).
fn has_socket_of(pid: i32, sockets: &[u64]) -> bool {
    let Ok(Some(list)) = read_up_to(&live_proc_dir_of(pid).join("net/unix"), LONGEST_LIST) else {
        return false;
    };
    let inode = |line: &str| line.split_whitespace().nth(6)?.parse().ok();
    String::from_utf8_lossy(&list).lines().filter_map(inode).any(|inode: u64| sockets.contains(&inode))
}
