//! `mount_setattr(2)`, for which neither nix nor rustix has a function.
#![allow(unsafe_code, reason = "one system call, wrapped here and nowhere else")]

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

use nix::libc;

/// Sets the attributes `set` (`MOUNT_ATTR_*`) on the mount at `mount` and takes it out of its peer group.
///
/// # Errors
/// ENOSYS before Linux 5.12.
pub(super) fn set(mount: impl AsFd, set: u64) -> io::Result<()> {
    let attributes =
        libc::mount_attr { attr_set: set, attr_clr: 0, propagation: libc::MS_PRIVATE, userns_fd: 0 };
    // SAFETY: the path is a C string that lives as long as the program, the structure outlives the call and
    // its true size is given; the kernel only reads both.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
