//! `SELinux`: containers may connect to their MPS daemon only if the daemon's files have the type that the policy
//! module `sublet` gives them. A container that may not connect does not fail: a CUDA program that does not reach its
//! daemon runs without limits. (packaging/selinux/sublet.te; docs/evidence/2026-11-22-selinux-apparmor.md)

use std::io::{self, Read as _, Write as _};
use std::path::Path;

use rustix::io::Errno;

use super::is_selinux_enforcing;

/// The package with the module, and the remedy if there is none.
pub const FIX: &str = "install the package sublet-selinux (semodule -i /usr/share/selinux/packages/sublet.pp \
                              && restorecon -R /run/sublet)";

/// The types of `mps` in the state directory, and of the state directory itself, in which `mps` gets its type by a type
/// transition.
const MPS_TYPE: &str = "sublet_mps_t";
const STATE_TYPE: &str = "sublet_run_t";
/// The type of containers, if nobody chose another.
const CONTAINER_TYPE: &str = "container_t";

/// Whether containers of the host at `root` cannot reach MPS daemons, whose files are in `state_dir`: `SELinux` is
/// enforcing, and the files do not have the type of sublet's module. (Engines may not read the list of modules.)
pub fn denies_mps_sockets(root: &Path, state_dir: &Path) -> bool {
    is_selinux_enforcing(root) && !has_labels(state_dir)
}

/// Whether the files of MPS daemons in `state_dir` have the type of sublet's module, or will have it.
pub(crate) fn has_labels(state_dir: &Path) -> bool {
    is_labelled(type_of(&state_dir.join("mps")), || type_of(state_dir))
}

/// Whether a process with the context `label` may not write to the sockets of MPS daemons, whose files are in `mps`: by the
/// policy in force, or, if the kernel does not answer, because its type is not the one in sublet's module. Without that
/// module, see [`denies_mps_sockets`].
pub(crate) fn is_denied(label: &str, mps: &Path) -> bool {
    let Some(state_dir) = mps.parent() else { return false };
    if !is_selinux_enforcing(Path::new("/")) || denies_mps_sockets(Path::new("/"), state_dir) {
        return false;
    }
    let answer = context_of(mps).ok().and_then(|files| query_policy(label, &files).ok().flatten());
    !answer.unwrap_or_else(|| type_in(label) == CONTAINER_TYPE)
}

/// Asks the kernel whether `label` may write to a socket of the context `files` (security/selinux/selinuxfs.c,
/// `sel_write_access`).
fn query_policy(label: &str, files: &str) -> io::Result<Option<bool>> {
    let root = Path::new("/sys/fs/selinux");
    let number = |path: &str| std::fs::read_to_string(root.join("class/sock_file").join(path));
    let (class, write) = (number("index")?, number("perms/write")?);
    let mut access = std::fs::OpenOptions::new().read(true).write(true).open(root.join("access"))?;
    access.write_all(format!("{label} {files} {}", class.trim()).as_bytes())?;
    let mut answer = [0; 256];
    let length = access.read(&mut answer)?;
    Ok(parse_answer(&String::from_utf8_lossy(&answer[..length]), write.trim()))
}

/// Whether `answer` has the permission with this number: `ALLOWED DECIDED AUDITALLOW AUDITDENY SEQUENCE FLAGS`, all but the
/// fifth as hexadecimal bits. The first flag says that the type is permissive.
fn parse_answer(answer: &str, permission: &str) -> Option<bool> {
    let words: Vec<&str> = answer.trim_end_matches('\0').split_ascii_whitespace().collect();
    let bits = |at: usize| u32::from_str_radix(words.get(at)?, 16).ok();
    let bit = 1_u32.checked_shl(permission.parse::<u32>().ok()?.checked_sub(1)?)?;
    Some(bits(0)? & bit != 0 || bits(5)? & 1 != 0)
}

/// `error`, with a remedy if this host's policy refused an engine an access that its shim or hook needs. Nothing else refuses
/// root.
pub fn explain(error: io::Error) -> io::Error {
    let refused = error.kind() == io::ErrorKind::PermissionDenied && nix::unistd::geteuid().is_root();
    if refused && is_selinux_enforcing(Path::new("/")) {
        return io::Error::new(error.kind(), format!("SELinux denies it to this engine: {FIX}"));
    }
    error
}

fn is_labelled(mps: Result<String, Errno>, state: impl Fn() -> Result<String, Errno>) -> bool {
    match mps {
        Err(Errno::NOENT) => state().is_ok_and(|found| found == STATE_TYPE),
        found => found.is_ok_and(|found| found == MPS_TYPE),
    }
}

fn type_of(path: &Path) -> Result<String, Errno> {
    context_of(path).map(|context| type_in(&context).to_owned())
}

fn context_of(path: &Path) -> Result<String, Errno> {
    let mut context = [0; 512];
    let length = rustix::fs::getxattr(path, "security.selinux", &mut context)?;
    Ok(String::from_utf8_lossy(&context[..length]).trim_end_matches('\0').to_owned())
}

/// The type in a context, which has the form user:role:type:level.
pub(crate) fn type_in(context: &str) -> &str {
    context.split(':').nth(2).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn mps_is_barred_where_selinux_enforces_and_its_files_are_not_of_our_type() {
        let root = tempfile::tempdir().unwrap();
        let state = root.path().join("state");
        fs::create_dir_all(state.join("mps")).unwrap();
        let enforce = |text: &str| {
            fs::create_dir_all(root.path().join("sys/fs/selinux")).unwrap();
            fs::write(root.path().join("sys/fs/selinux/enforce"), text).unwrap();
        };
        assert!(!denies_mps_sockets(root.path(), &state), "no SELinux");
        enforce("0");
        assert!(!denies_mps_sockets(root.path(), &state), "permissive");
        enforce("1");
        assert!(denies_mps_sockets(root.path(), &state));
    }

    /// In the form that selinuxfs writes: a type that may write to the socket, one that may not, and one that is permissive.
    /// `write` is the third permission of all files.
    #[test]
    fn the_kernels_answer_about_a_type() {
        assert_eq!(parse_answer("e ffffffff 0 ffffffff 7 0\0", "3"), Some(true));
        assert_eq!(parse_answer("a ffffffff 0 ffffffff 7 0", "3"), Some(false));
        assert_eq!(parse_answer("0 ffffffff 0 ffffffff 7 1", "3"), Some(true));
        for (answer, permission) in
            [("", "3"), ("x 0 0 0 7 0", "3"), ("a 0", "3"), ("a 0 0 0 7 0", "0"), ("a 0 0 0 7 0", "40")]
        {
            assert_ne!(parse_answer(answer, permission), Some(false), "{answer}: never taken for a refusal");
        }
        assert_eq!(type_in("system_u:system_r:nvidia_container_t:s0:c1,c2"), "nvidia_container_t");
        assert_eq!(type_in("unlabelled"), "");
    }

    #[test]
    fn the_type_says_whether_containers_reach_a_daemon() {
        let is = |found: &str| Ok::<_, Errno>(found.to_owned());
        let never = || unreachable!("mps is there");
        assert!(is_labelled(is(MPS_TYPE), never));
        for other in [is("var_run_t"), is(STATE_TYPE), is(""), Err(Errno::ACCESS), Err(Errno::NODATA)] {
            assert!(!is_labelled(other, never));
        }
        assert!(is_labelled(Err(Errno::NOENT), || is(STATE_TYPE)));
        assert!(!is_labelled(Err(Errno::NOENT), || is("var_run_t")));
        assert!(!is_labelled(Err(Errno::NOENT), || Err(Errno::NODATA)));
    }
}
