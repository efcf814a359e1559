//! The one variable that sublet's programs read: the name of a configuration file, and only if the caller has the same
//! rights as the program.

use std::path::PathBuf;

use super::auxiliary_vector;

/// The variable that names one configuration file instead of all others.
pub(crate) const VARIABLE: &str = "SUBLET_CONFIG";

/// The value of [`VARIABLE`], made absolute, if it is honoured: never when this process has more rights than its
/// caller.
#[must_use]
pub fn honoured_config() -> Option<PathBuf> {
    let file = std::env::var_os(VARIABLE).filter(|file| !file.is_empty())?;
    if !has_caller_rights() {
        tracing::warn!("{VARIABLE} is ignored in a program with more rights than its caller");
        return None;
    }
    std::path::absolute(file).ok()
}

/// Whether this process has no more rights than its caller. `false` if that is unknown. The kernel says so when the program
/// begins, by user, group and capabilities (`cap_bprm_creds_from_file` in its security/commoncap.c), and sublet's programs
/// never change user or group.
fn has_caller_rights() -> bool {
    !auxiliary_vector::is_secure()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_runs_with_its_callers_rights() {
        assert!(has_caller_rights());
    }
}
