//! System calls that the kernel must have.

use std::io;

use nix::libc::ENOSYS;

/// `error` of a system call that every kernel from Linux 5.6 on has: a kernel or a seccomp filter without it is named.
pub(crate) fn require_call(call: &str, error: impl Into<io::Error>) -> io::Error {
    let error = error.into();
    if error.raw_os_error() != Some(ENOSYS) {
        return error;
    }
    let why =
        format!("this kernel has no {call}, or a seccomp filter hides it: sublet needs Linux 5.6 or later");
    io::Error::new(io::ErrorKind::Unsupported, why)
}
