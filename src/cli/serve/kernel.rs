//! Two things for which no crate has a safe function: the owners of user namespaces, and the socket that systemd
//! passes.
#![allow(unsafe_code, reason = "system calls; each block says why it is sound")]

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use nix::libc;

/// `NS_GET_PARENT` and `NS_GET_OWNER_UID` of linux/nsfs.h: `_IO(0xb7, 2)` and `_IO(0xb7, 4)`.
const NS_GET_PARENT: libc::Ioctl = 0xb702;
const NS_GET_OWNER_UID: libc::Ioctl = 0xb704;

/// Who made the user namespace `namespace`, as a uid in our own (`ioctl_ns(2)`).
pub(super) fn owner_of(namespace: BorrowedFd<'_>) -> io::Result<u32> {
    let mut uid: libc::uid_t = 0;
    // SAFETY: the request writes one uid_t through the pointer, which is that of a live uid_t.
    let done = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_OWNER_UID, &raw mut uid) };
    if done == 0 { Ok(uid) } else { Err(io::Error::last_os_error()) }
}

/// The user namespace in which `namespace` was made (`ioctl_ns(2)`); EPERM outside our own.
pub(super) fn parent_of(namespace: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: the request takes no argument and touches no memory of ours.
    let fd = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_PARENT) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Takes over a descriptor that our parent left us, as `sd_listen_fds(3)` describes. Once, at the start.
pub(super) fn inherited(fd: RawFd) -> OwnedFd {
    // SAFETY: by the protocol of sd_listen_fds(3) it is open and ours alone: the caller has it from what has checked
    // that LISTEN_PID names this process, and nothing of ours has opened files as 3 since the start.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
