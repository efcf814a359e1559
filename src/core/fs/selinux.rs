//! `SELinux`: containers may connect to their MPS daemon only if the daemon's files have the type that the policy
//! module `sublet` gives them. A container that may not connect does not fail: a CUDA program that does not reach its
//! daemon runs without limits. (packaging/selinux/sublet.te; docs/evidence/2026-11-22-selinux-apparmor.md)

use std::io;
use std::path::Path;

use rustix::fs::getxattr;
use rustix::io::Errno;

use crate::fs::below::under;

/// The package with the module, and what to do if there is none.
pub const FIX: &str = "install the package sublet-selinux (semodule -i /usr/share/selinux/packages/sublet.pp \
                              && restorecon -R /run/sublet)";

/// The types of `mps` in the state directory, and of the state directory itself, in which `mps` gets its type by a type
/// transition.
const MPS_TYPE: &str = "sublet_mps_t";
const STATE_TYPE: &str = "sublet_run_t";

/// Whether containers of the host at `root` cannot reach MPS daemons, whose files are in `state_dir`: `SELinux` is
/// enforcing, and the files do not have the type of sublet's module. (Engines may not read the list of modules.)
#[must_use]
pub fn denies_mps_sockets(root: &Path, state_dir: &Path) -> bool {
    is_enforcing(root) && !is_labelled(type_of(&state_dir.join("mps")), || type_of(state_dir))
}

/// `/sys/fs/selinux/enforce` contains 1 (selinux(8)). The file does not exist if `SELinux` is off. If reading is
/// denied, `SELinux` is enforcing.
#[must_use]
pub fn is_enforcing(root: &Path) -> bool {
    match std::fs::read_to_string(under(root, "/sys/fs/selinux/enforce")) {
        Ok(text) => text.trim() == "1",
        Err(error) => error.kind() == io::ErrorKind::PermissionDenied,
    }
}

/// `error`, with a remedy if this host's policy refused an engine what its shim or hook needs. Nothing else refuses
/// root.
#[must_use]
pub fn explained(error: io::Error) -> io::Error {
    let refused = error.kind() == io::ErrorKind::PermissionDenied && nix::unistd::geteuid().is_root();
    if refused && is_enforcing(Path::new("/")) {
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

/// The type in a file's context, which has the form user:role:type:level.
fn type_of(path: &Path) -> Result<String, Errno> {
    let mut context = [0; 512];
    let length = getxattr(path, "security.selinux", &mut context)?;
    let context = String::from_utf8_lossy(&context[..length]);
    Ok(context.split(':').nth(2).unwrap_or_default().to_owned())
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
