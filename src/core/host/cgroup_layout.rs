//! How cgroups are mounted: v2 only, v1's hierarchies, or both (systemd's hybrid layout).

use std::path::{Path, PathBuf};

/// Where Linux systems mount them (systemd, file-hierarchy(7)).
pub(crate) const MOUNT: &str = "/sys/fs/cgroup";

/// Whether `mount` has v2 only: a v2 hierarchy lists its controllers there (cgroups(7)).
pub(crate) fn is_unified(mount: &Path) -> bool {
    // A transient failure (no memory) is tried again.
    let is_there = || mount.join("cgroup.controllers").try_exists();
    is_there().or_else(|_| is_there()).unwrap_or(false)
}

/// The path of the cgroup directory `dir` below its hierarchy's root.
pub(crate) fn below_hierarchy(dir: &Path) -> PathBuf {
    let below = dir.strip_prefix(MOUNT).unwrap_or(dir);
    let root = usize::from(!is_unified(Path::new(MOUNT)));
    below.components().skip(root).collect()
}

/// The v2 hierarchy. In the hybrid layout it exists beside v1's.
pub(crate) fn unified(mount: &Path) -> PathBuf {
    if is_unified(mount) { mount.to_owned() } else { mount.join("unified") }
}
