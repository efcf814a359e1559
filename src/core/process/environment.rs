//! What sublet's programs take from their environment: the name of one configuration file, and only if the caller has
//! the same rights as the program.
#![allow(unsafe_code, reason = "getauxval(3), which nix has not")]

use std::path::PathBuf;

use nix::errno::Errno;
use nix::libc;
use nix::unistd::{getresgid, getresuid};

/// The variable that names one configuration file instead of all others.
pub(crate) const VARIABLE: &str = "SUBLET_CONFIG";

/// The value of [`VARIABLE`], made absolute, if it is honoured: never when this process has more rights than its
/// caller.
#[must_use]
pub fn honoured() -> Option<PathBuf> {
    let file = std::env::var_os(VARIABLE).filter(|file| !file.is_empty())?;
    if !has_our_rights() {
        tracing::warn!("{VARIABLE} is ignored in a program with more rights than its caller");
        return None;
    }
    std::path::absolute(file).ok()
}

/// Whether this process has no more rights than its caller. `false` if that is unknown.
fn has_our_rights() -> bool {
    let users = getresuid().is_ok_and(|ids| ids.real == ids.effective && ids.real == ids.saved);
    let groups = getresgid().is_ok_and(|ids| ids.real == ids.effective && ids.real == ids.saved);
    users && groups && secure() == Some(0)
}

/// `AT_SECURE` of the auxiliary vector (getauxval(3)): not 0 if the program gained rights by being executed, through
/// setuid, setgid, file capabilities or a security module. `None`: the kernel did not say.
fn secure() -> Option<libc::c_ulong> {
    Errno::clear();
    // SAFETY: the only argument is a number, and no memory of this process is involved.
    let value = unsafe { libc::getauxval(libc::AT_SECURE) };
    // It also returns 0 for what is not there.
    (value != 0 || Errno::last() != Errno::ENOENT).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_runs_with_its_callers_rights() {
        assert!(has_our_rights());
    }
}
