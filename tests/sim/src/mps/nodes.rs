//! Device nodes, as a CUDA program opens them: below /dev, or below `SUBLET_SIM_DEV` for tests outside containers.

use std::fs::{self, OpenOptions, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

/// Whether the node with this name may be opened.
pub(crate) fn opens(name: &str) -> bool {
    matches!(open(&path(name)).as_str(), "ok" | "ENXIO")
}

/// Makes a GPU's node, if it is missing and this process may.
pub(crate) fn make(name: &str, major: u32, minor: u32) {
    let node = path(name);
    if mknod(&node, SFlag::S_IFCHR, Mode::empty(), makedev(major.into(), minor.into())).is_ok() {
        let _ = fs::set_permissions(&node, Permissions::from_mode(0o666));
    }
}

fn path(name: &str) -> PathBuf {
    std::env::var_os("SUBLET_SIM_DEV").map_or_else(|| "/dev".into(), PathBuf::from).join(name)
}

/// The result of opening a node: `ok`, or the name of the error. ENXIO is as good as `ok`: the node may be opened, and
/// there is no driver. Capability nodes are opened read-only, because nobody may write to them.
pub(crate) fn open(path: &Path) -> String {
    let capability = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("nvidia-cap"));
    match OpenOptions::new().read(true).write(!capability).open(path) {
        Ok(_) => "ok".into(),
        Err(error) if error.kind() == ErrorKind::NotFound => "ENOENT".into(),
        Err(error) => error
            .raw_os_error()
            .map_or_else(|| error.to_string(), |number| format!("{:?}", Errno::from_raw(number))),
    }
}
