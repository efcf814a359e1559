//! The auxiliary vector, which the kernel gives a process at its start (getauxval(3)). It is in the process's own memory, so
//! reading it cannot fail for lack of a descriptor, as reading /proc/self/auxv can.
#![allow(unsafe_code, reason = "one call of libc's that nix has not, and the string that it points to")]

use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use nix::errno::Errno;
use nix::libc;
use nix::unistd::geteuid;

/// The path that was given to execve(2).
#[must_use]
pub fn executed() -> Option<&'static Path> {
    let address = get(libc::AT_EXECFN).filter(|address| *address != 0)?;
    // SAFETY: getauxval(3): the kernel put a string there, at the top of this process's stack, and nothing moves or
    // changes it.
    let path = unsafe { CStr::from_ptr(address as *const libc::c_char) };
    Some(Path::new(OsStr::from_bytes(path.to_bytes())))
}

/// The effective user as which this process was started. No program of sublet's becomes another one.
#[must_use]
pub fn effective_user() -> u32 {
    let told = get(libc::AT_EUID).and_then(|user| u32::try_from(user).ok());
    told.unwrap_or_else(|| geteuid().as_raw())
}

/// Whether this process gained rights by being executed: through setuid, setgid, file capabilities or a security module.
/// `true` if that is unknown.
#[must_use]
pub(super) fn is_secure() -> bool {
    get(libc::AT_SECURE) != Some(0)
}

/// One value; `None` if the kernel gave none.
fn get(key: libc::c_ulong) -> Option<libc::c_ulong> {
    Errno::clear();
    // SAFETY: the only argument is a number, and no memory of this process is involved.
    let value = unsafe { libc::getauxval(key) };
    (value != 0 || Errno::last_raw() != libc::ENOENT).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_runs_with_its_callers_rights() {
        assert!(!is_secure());
        assert_eq!(effective_user(), geteuid().as_raw());
        assert_eq!(get(0x7fff_fff0), None, "no such key");
        assert!(executed().unwrap().file_name().is_some());
    }
}
