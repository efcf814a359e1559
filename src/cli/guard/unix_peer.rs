//! The other end of a Unix socket, which only the kernel's `sock_diag(7)` tells.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::thread;

use nix::errno::Errno;
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};

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
pub(super) fn peer(inode: u64, namespace: &Path) -> io::Result<Option<u64>> {
    let Ok(inode) = u32::try_from(inode) else { return Ok(None) };
    let is_own = fs::read_link(namespace)? == fs::read_link("/proc/thread-self/ns/net")?;
    let namespace = File::open(namespace)?;
    let ask = || -> io::Result<Option<u64>> {
        // The thread's namespace, which ends with it.
        if !is_own {
            setns(namespace, CloneFlags::CLONE_NEWNET)?;
        }
        let diag = socket(
            AddressFamily::Netlink,
            SockType::Datagram,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkSockDiag,
        )?;
        send(diag.as_raw_fd(), &request(inode), MsgFlags::empty())?;
        let mut answer = [0; 4096];
        // The kernel has answered by the time that send(2) returns.
        match recv(diag.as_raw_fd(), &mut answer, MsgFlags::MSG_DONTWAIT) {
            Ok(length) => Ok(answered(&answer[..length])),
            Err(Errno::EAGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    };
    thread::scope(|scope| scope.spawn(ask).join()).unwrap_or_else(|_| Err(io::Error::other("a panic")))
}

/// `struct nlmsghdr` and `struct unix_diag_req`.
fn request(inode: u32) -> Vec<u8> {
    let any = u32::MAX;
    let length = u32::try_from(HEADER + 24).unwrap_or(0);
    let mut request = Vec::new();
    request.extend(length.to_ne_bytes());
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
