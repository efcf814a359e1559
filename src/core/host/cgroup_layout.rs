//! How cgroups are mounted: v2 alone, v1's hierarchies, or both (systemd's hybrid layout).

use std::path::{Path, PathBuf};

/// Where every Linux system mounts them (systemd, file-hierarchy(7)).
pub(crate) const MOUNT: &str = "/sys/fs/cgroup";

/// Whether `mount` is v2 alone: a v2 hierarchy lists its controllers there (cgroups(7)).
pub(crate) fn is_unified(mount: &Path) -> bool {
    mount.join("cgroup.controllers").exists()
}

/// The v2 hierarchy, which the hybrid layout has beside v1's.
pub(crate) fn unified(mount: &Path) -> PathBuf {
    if is_unified(mount) { mount.to_owned() } else { mount.join("unified") }
}
