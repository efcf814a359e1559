//! What sublet's programs take from their environment: the name of one configuration file, and only if the caller has
//! the same rights as the program.

use std::path::PathBuf;

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

/// `AT_SECURE` of the auxiliary vector (getauxval(3)). It is set if the program gained rights by being executed:
/// through setuid, setgid, file capabilities or a security module.
const AT_SECURE: usize = 23;

/// Whether this process has no more rights than its caller. `false` if that is unknown.
fn has_our_rights() -> bool {
    let users = getresuid().is_ok_and(|ids| ids.real == ids.effective && ids.real == ids.saved);
    let groups = getresgid().is_ok_and(|ids| ids.real == ids.effective && ids.real == ids.saved);
    users && groups && std::fs::read("/proc/self/auxv").is_ok_and(|auxv| secure(&auxv) == Some(0))
}

/// The value of `AT_SECURE` in `auxv`, which is a list of pairs of machine words (proc(5)).
fn secure(auxv: &[u8]) -> Option<usize> {
    const WORD: usize = size_of::<usize>();
    let word = |bytes: &[u8]| bytes.try_into().map(usize::from_ne_bytes).ok();
    let entry = auxv.chunks_exact(2 * WORD).find(|pair| word(&pair[..WORD]) == Some(AT_SECURE))?;
    word(&entry[WORD..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn auxv(pairs: &[(usize, usize)]) -> Vec<u8> {
        pairs.iter().flat_map(|(key, value)| [key.to_ne_bytes(), value.to_ne_bytes()].concat()).collect()
    }

    #[test]
    fn finds_at_secure() {
        assert_eq!(secure(&auxv(&[(6, 4096), (23, 1), (0, 0)])), Some(1));
        assert_eq!(secure(&auxv(&[(23, 0), (6, 23)])), Some(0));
        assert_eq!(secure(&auxv(&[(6, 23)])), None);
        assert_eq!(secure(&[]), None);
    }

    #[test]
    fn a_test_runs_with_its_callers_rights() {
        assert!(has_our_rights());
    }
}
