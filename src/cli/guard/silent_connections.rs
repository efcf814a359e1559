//! Connections that keep an MPS control daemon waiting. It takes one connection after the other, and waits without a limit
//! for what each says first. Until then it answers no command, and no GPU program begins on its devices, in no container
//! (docs/evidence/2026-11-25-mps-control.md). Whoever connects and says nothing is ended: all other clients wait.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{io, thread};

use nix::libc::SYS_recvmsg;
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};

use super::judge::{Offence, Verdict, action, verdict};
use crate::gpu_processes::Holder;
use crate::{probe, proc};
use sublet_core::config;
use sublet_core::ledger::{DaemonKey, DaemonState, Lease, LeaseId, Ledger, MpsDaemon};
use sublet_core::process::{Process, sockets};
use sublet_core::share::Action;
use sublet_core::text::safe;

/// A CUDA program says at once what it is. A host may be so busy, or a program stopped at just that moment, for so long.
const PATIENCE: Duration = Duration::from_secs(3);

/// A container that does it again within this time is ended: its next process would delay all other clients again.
const REMEMBERED: Duration = Duration::from_secs(60);

/// The state between two checks.
#[derive(Debug, Default)]
pub(super) struct Silent {
    /// The connection for which each daemon waits, and since when.
    waits: BTreeMap<DaemonKey, (u64, Instant)>,
    /// Connections of which the journal says that it is not known whose they are.
    unknown: BTreeSet<u64>,
    /// The first connection of each container that had other clients wait, and when it was found.
    first: BTreeMap<LeaseId, (u64, Instant)>,
}

impl Silent {
    /// The processes for which a daemon has waited for a while.
    pub fn find(&mut self, ledger: &Ledger, rules: &config::Guard) -> Vec<Verdict> {
        self.waits.retain(|key, _| ledger.daemons.iter().any(|daemon| daemon.key == *key));
        self.first.retain(|_, (_, found)| found.elapsed() < REMEMBERED);
        // It is in FAULT once a start has found that it does not answer.
        let runs = |daemon: &&MpsDaemon| matches!(daemon.state, DaemonState::Serving | DaemonState::Fault);
        ledger.daemons.iter().filter(runs).flat_map(|daemon| self.of_daemon(daemon, ledger, rules)).collect()
    }

    fn of_daemon(&mut self, daemon: &MpsDaemon, ledger: &Ledger, rules: &config::Guard) -> Vec<Verdict> {
        let Some(inode) = daemon.process.and_then(waited_for) else {
            if let Some((inode, _)) = self.waits.remove(&daemon.key) {
                self.unknown.remove(&inode);
            }
            return Vec::new();
        };
        let before = self.waits.get(&daemon.key).copied();
        let (_, since) = before.filter(|(same, _)| *same == inode).unwrap_or((inode, Instant::now()));
        self.waits.insert(daemon.key.clone(), (inode, since));
        if since.elapsed() < PATIENCE {
            return Vec::new();
        }
        let Some(device) = daemon.devices.first() else { return Vec::new() };
        let (processes, hidden) = found(inode, daemon, ledger).unwrap_or_else(|why| {
            // It may have been closed meanwhile.
            if daemon.process.and_then(waited_for) == Some(inode) && self.unknown.insert(inode) {
                tracing::warn!(
                    "the MPS daemon of {} waits for what a connection says first, and it is not known whose \
                     connection that is: {why}",
                    safe(device)
                );
            }
            (Vec::new(), false)
        });
        let silent = |(holder, lease): (Holder, Option<&Lease>)| {
            let action = lease.map_or(rules.strangers, |lease| self.action(lease, inode, hidden, rules));
            verdict(Offence::Silent, action, device, &holder)
        };
        processes.into_iter().filter_map(|process| holder(process, ledger)).map(silent).collect()
    }

    fn action(&mut self, lease: &Lease, connection: u64, hidden: bool, rules: &config::Guard) -> Action {
        let (first, _) = *self.first.entry(lease.id.clone()).or_insert((connection, Instant::now()));
        match action(lease, rules.silent) {
            Action::Terminate if (hidden || first != connection) && !lease.is_of_job() => Action::Container,
            action => action,
        }
    }
}

/// Whose a connection is, and whether it is hidden: no process has it open, because it is under way in another socket, for
/// example. The process is then the first one of the container that alone has its network namespace.
fn found(accepted: u64, daemon: &MpsDaemon, ledger: &Ledger) -> Result<(Vec<Process>, bool), String> {
    let (socket, namespace) = other_end(accepted, daemon, ledger)?;
    let is_in_its_container = |process| {
        let lease = holder(process, ledger).and_then(|(_, lease)| lease);
        lease.is_some_and(|lease| lease.daemon.as_ref() == Some(&daemon.key))
    };
    let processes = with_socket(socket, is_in_its_container);
    if !processes.is_empty() {
        return Ok((processes, false));
    }
    // Its process may have ended in between, and the connection with it.
    other_end(accepted, daemon, ledger)?;
    let of_host = fs::read_link("/proc/self/ns/net").map_err(|error| error.to_string())?;
    let inits = ledger.on_daemon(&daemon.key).filter_map(|lease| Some(lease.init.as_ref()?.process));
    let inside = |process: &Process| {
        sockets::network(process.pid).is_some_and(|own| own == namespace && own != of_host)
    };
    let processes: Vec<Process> = inits.filter(inside).collect();
    if processes.len() != 1 {
        let why = "no process has its other end open, and no container alone has its network namespace";
        return Err(why.to_owned());
    }
    Ok((processes, true))
}

/// The inode of the socket from which the daemon's main thread waits to receive. It has no other reason to wait there:
/// else it waits in poll(2) for all of its connections.
fn waited_for(daemon: Process) -> Option<u64> {
    let proc = Path::new("/proc").join(daemon.pid.to_string());
    let fd = received_from(&fs::read_to_string(proc.join("syscall")).ok()?)?;
    let inode = sockets::inode(&fs::read_link(proc.join("fd").join(fd.to_string())).ok()?)?;
    daemon.is_alive().then_some(inode)
}

/// The descriptor of a recvmsg(2) that /proc/PID/syscall shows (`proc_pid_syscall(5)`): the call's number, and its arguments.
fn received_from(syscall: &str) -> Option<i32> {
    let mut words = syscall.split_whitespace();
    (words.next()?.parse() == Ok(SYS_recvmsg)).then_some(())?;
    i32::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()
}

/// The inode of the socket that has connected, and its network namespace. A socket that accept(2) made is in the network namespace of who connected:
/// that of a container, or the host's.
fn other_end(accepted: u64, daemon: &MpsDaemon, ledger: &Ledger) -> Result<(u64, PathBuf), String> {
    let containers = ledger.on_daemon(&daemon.key).filter_map(|lease| lease.init.as_ref());
    let pids =
        daemon.process.iter().map(|process| process.pid).chain(containers.map(|init| init.process.pid));
    let (mut looked_in, mut why) = (BTreeSet::new(), None);
    for pid in pids {
        // A container that has ended has no namespace.
        let Some(namespace) = sockets::network(pid) else { continue };
        let ask = || peer(accepted, &sockets::network_file(pid));
        match looked_in.insert(namespace.clone()).then(ask) {
            Some(Ok(Some(other_end))) => return Ok((other_end, namespace)),
            Some(Err(error)) => why = Some(format!("sock_diag: {error}")),
            _ => {}
        }
    }
    Err(why.unwrap_or_else(|| "it is in no network namespace of its containers or its own".to_owned()))
}

/// The processes that have the socket: one, or those that inherited or were sent it. Only if there is none, each thread
/// of those that `may_hide_it` is looked at, because that takes long.
fn with_socket(wanted: u64, may_hide_it: impl Fn(Process) -> bool) -> Vec<Process> {
    let pids = proc::processes(Path::new("/proc"));
    let all: Vec<Process> = pids.into_iter().filter_map(Process::find).collect();
    let mut found = all.clone();
    found.retain(|process| sockets::inodes(process.pid).contains(&wanted));
    if found.is_empty() {
        found = all;
        found.retain(|process| {
            may_hide_it(*process) && sockets::inodes_of_threads(process.pid).contains(&wanted)
        });
    }
    found
}

fn holder(process: Process, ledger: &Ledger) -> Option<(Holder, Option<&Lease>)> {
    let description = probe::describe(process.pid, 0)?;
    let lease = ledger.certain_lease_of(process, &description);
    let holder = Holder {
        process,
        name: description.name,
        memory_bytes: None,
        is_server: false,
        is_client: false,
        lease: lease.map(|lease| lease.id.clone()),
    };
    Some((holder, lease))
}

// The other end of a Unix socket, which only the kernel's `sock_diag(7)` tells.

/// `SOCK_DIAG_BY_FAMILY` (`linux/sock_diag.h`).
const BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST` (linux/netlink.h).
const REQUEST: u16 = 1;
/// `UDIAG_SHOW_PEER` and `UNIX_DIAG_PEER` (`linux/unix_diag.h`).
const SHOW_PEER: u32 = 4;
const PEER: u16 = 2;
/// Of `struct nlmsghdr`, and of that with `struct unix_diag_msg` after it.
const HEADER: usize = 16;
const ATTRIBUTES: usize = HEADER + 16;

/// The inode of the socket at the other end of the socket `inode`, which is in the network namespace `namespace`; `None` if
/// there is no such socket, or nobody has its other end any more.
///
/// # Errors
/// The namespace cannot be entered, or the kernel has no `unix_diag`.
fn peer(inode: u64, namespace: &Path) -> io::Result<Option<u64>> {
    let Ok(inode) = u32::try_from(inode) else { return Ok(None) };
    let is_own = fs::read_link(namespace)? == fs::read_link("/proc/thread-self/ns/net")?;
    let namespace = File::open(namespace)?;
    let ask = || -> io::Result<Option<u64>> {
        // The thread's namespace, which ends with it.
        if !is_own {
            setns(namespace, CloneFlags::CLONE_NEWNET)?;
        }
        let (kind, flags) = (SockType::Datagram, SockFlag::SOCK_CLOEXEC);
        let diag = socket(AddressFamily::Netlink, kind, flags, SockProtocol::NetlinkSockDiag)?;
        send(diag.as_raw_fd(), &request(inode), MsgFlags::empty())?;
        let mut answer = [0; 4096];
        // The kernel has answered by the time that send(2) returns.
        match recv(diag.as_raw_fd(), &mut answer, MsgFlags::MSG_DONTWAIT) {
            Ok(length) => Ok(answered(&answer[..length])),
            Err(nix::errno::Errno::EAGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    };
    thread::scope(|scope| scope.spawn(ask).join()).unwrap_or_else(|_| Err(io::Error::other("a panic")))
}

/// `struct nlmsghdr` and `struct unix_diag_req`.
fn request(inode: u32) -> Vec<u8> {
    let any = u32::MAX;
    let mut request = u32::try_from(HEADER + 24).unwrap_or(0).to_ne_bytes().to_vec();
    request.extend([BY_FAMILY, REQUEST].map(u16::to_ne_bytes).concat());
    request.extend([1, 0].map(u32::to_ne_bytes).concat());
    request.extend([u8::try_from(nix::libc::AF_UNIX).unwrap_or(1), 0, 0, 0]);
    request.extend([any, inode, SHOW_PEER, any, any].map(u32::to_ne_bytes).concat());
    request
}

/// The peer in an answer. An error is one for a socket that is not there.
fn answered(answer: &[u8]) -> Option<u64> {
    let half = |at: usize| Some(u16::from_ne_bytes(answer.get(at..at + 2)?.try_into().ok()?));
    let word = |at: usize| Some(u32::from_ne_bytes(answer.get(at..at + 4)?.try_into().ok()?));
    (half(4)? == BY_FAMILY).then_some(())?;
    let mut at = ATTRIBUTES;
    loop {
        // `struct nlattr`: its length with itself, and its kind.
        let length = usize::from(half(at)?);
        if half(at + 2)? == PEER {
            return word(at + 4).filter(|inode| *inode != 0).map(u64::from);
        }
        at += length.max(4).next_multiple_of(4);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_is_no_recvmsg_of_a_socket_is_nothing() {
        let shown = |call: i64, fd: &str| format!("{call} {fd} 0x7ffd 0x0 0x0 0x0 0x0 0x7ffd10 0x7f0e\n");
        assert_eq!(received_from(&shown(SYS_recvmsg, "0x1f")), Some(31));
        assert_eq!(received_from(&shown(SYS_recvmsg, "31")), None);
        assert_eq!(received_from(&shown(nix::libc::SYS_read, "0x1f")), None);
        for other in ["running\n", "-1 0x7ffd10 0x7f0e\n", "", "x"] {
            assert_eq!(received_from(other), None);
        }
    }

    #[test]
    fn the_process_at_the_other_end_is_found() {
        let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
        let inode_of = |socket: &std::os::unix::net::UnixStream| {
            sockets::inode(&fs::read_link(format!("/proc/self/fd/{}", socket.as_raw_fd())).unwrap()).unwrap()
        };
        let namespace = Path::new("/proc/self/ns/net");
        assert_eq!(peer(inode_of(&one), namespace).unwrap(), Some(inode_of(&other)));
        assert!(with_socket(inode_of(&other), |_| false).contains(&Process::current().unwrap()));
        let of_other = inode_of(&other);
        drop(other);
        // A process that another test of this program has just forked has it open until its execve(2).
        let closed = Instant::now();
        while peer(inode_of(&one), namespace).unwrap().is_some() {
            assert!(closed.elapsed() < Duration::from_secs(30), "the other end is still found");
            thread::sleep(Duration::from_millis(2));
        }
        assert!(with_socket(of_other, |_| true).is_empty());
    }

    #[test]
    fn a_thread_that_left_its_process_files_is_found_where_it_may_hide_one() {
        let (say, said) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_FILES).unwrap();
            let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
            let link = fs::read_link(format!("/proc/thread-self/fd/{}", one.as_raw_fd())).unwrap();
            say.send(sockets::inode(&link).unwrap()).unwrap();
            ended.recv().unwrap_err();
        });
        let (hidden, me) = (said.recv().unwrap(), Process::current().unwrap());
        assert!(with_socket(hidden, |_| false).is_empty());
        assert_eq!(with_socket(hidden, |process| process == me), [me]);
        drop(end);
        thread.join().unwrap();
    }
}
