//! The owners and parents of user namespaces (`ioctl_ns(2)`), for which no library has a safe function.
#![allow(unsafe_code, reason = "system calls; each block says why it is sound")]

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use nix::libc;

/// `NS_GET_PARENT` and `NS_GET_OWNER_UID` of linux/nsfs.h: `_IO(0xb7, 2)` and `_IO(0xb7, 4)`.
const NS_GET_PARENT: libc::Ioctl = 0xb702;
const NS_GET_OWNER_UID: libc::Ioctl = 0xb704;

/// The uid, in this user namespace, of the user who created `namespace` (`ioctl_ns(2)`).
pub(super) fn owner_of(namespace: BorrowedFd<'_>) -> io::Result<u32> {
    let mut uid: libc::uid_t = 0;
    // SAFETY: the request writes one uid_t through the pointer, which is that of a live uid_t.
    let done = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_OWNER_UID, &raw mut uid) };
    if done == 0 { Ok(uid) } else { Err(io::Error::last_os_error()) }
}

/// The user namespace in which `namespace` was created (`ioctl_ns(2)`); EPERM if that is outside this one.
pub(super) fn parent_of(namespace: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: the request takes no argument and touches no memory of this process.
    let fd = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_PARENT) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
