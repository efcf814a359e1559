//! The kernel's reports about this boot and this process's namespaces and cgroups. It is asked in one place, so that all
//! callers get the same answer.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::reading::kernel_file;

/// The file in which the kernel gives the id of this boot (random(4)).
pub(crate) const BOOT_ID_FILE: &str = "/proc/sys/kernel/random/boot_id";

/// The id of this boot. No process, lease or lock outlives a boot.
pub fn read_boot_id() -> io::Result<&'static str> {
    static ID: OnceLock<String> = OnceLock::new();
    if let Some(id) = ID.get() {
        return Ok(id);
    }
    let id = kernel_file(BOOT_ID_FILE)?;
    Ok(ID.get_or_init(|| id.trim().to_owned()))
}

/// Where Linux systems mount cgroups (systemd, file-hierarchy(7)).
pub(crate) const CGROUP_MOUNT: &str = "/sys/fs/cgroup";

/// Whether `mount` has v2 only: a v2 hierarchy lists its controllers there (cgroups(7)).
pub(crate) fn has_unified_cgroups(mount: &Path) -> bool {
    // A transient failure (no memory) is tried again.
    let is_there = || mount.join("cgroup.controllers").try_exists();
    is_there().or_else(|_| is_there()).unwrap_or(false)
}

/// The path of the cgroup directory `dir` below its hierarchy's root.
pub(crate) fn below_hierarchy(dir: &Path) -> PathBuf {
    let below = dir.strip_prefix(CGROUP_MOUNT).unwrap_or(dir);
    let root = usize::from(!has_unified_cgroups(Path::new(CGROUP_MOUNT)));
    below.components().skip(root).collect()
}

/// The v2 hierarchy. In the hybrid layout it exists beside v1's.
pub(crate) fn unified_cgroups(mount: &Path) -> PathBuf {
    if has_unified_cgroups(mount) { mount.to_owned() } else { mount.join("unified") }
}

/// The path in the hierarchy `controller` in the text of /proc/PID/cgroup (cgroups(7)). That of v2 has no controller.
pub(crate) fn cgroup_line<'a>(text: &'a str, controller: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let controllers = parts.next()?;
        parts.next().filter(|_| controllers.split(',').any(|name| name == controller))
    })
}

/// Whether this process runs in a user namespace other than the initial one, which is the only one that maps every id
/// to itself (`user_namespaces(7)`). `true` if that is unknown: the process then does not act as the host's root.
///
/// The first answer holds for the process's life, so that a container is not given one half of its share as by root and
/// the other as by a user.
pub fn is_nested() -> bool {
    // No program of sublet's enters another user namespace, except in a child that becomes another program.
    static NESTED: OnceLock<bool> = OnceLock::new();
    // A transient failure (no descriptor left) is tried again.
    let read = || kernel_file("/proc/self/uid_map");
    *NESTED.get_or_init(|| is_nested_by(read().or_else(|_| read())))
}

/// Whether the first process that /proc shows runs in this process's user namespace, as in a system container. It does not
/// below a rootless engine; there nobody may look.
pub(crate) fn is_of_a_system() -> bool {
    let of = |who: &str| std::fs::read_link(format!("/proc/{who}/ns/user"));
    matches!((of("1"), of("self")), (Ok(first), Ok(own)) if first == own)
}

fn is_nested_by(map: io::Result<String>) -> bool {
    match map {
        Ok(map) => !map.split_ascii_whitespace().eq(["0", "0", "4294967295"]),
        // A kernel without user namespaces has no such file (fs/proc/base.c, CONFIG_USER_NS).
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

#[cfg(test)]
mod user_namespace_tests {
    use super::*;

    #[test]
    fn what_cannot_be_read_is_no_host() {
        let map = |text: &str| Ok(text.to_owned());
        assert!(!is_nested_by(map("         0          0 4294967295\n")));
        assert!(!is_nested_by(Err(io::ErrorKind::NotFound.into())), "a kernel without user namespaces");
        for nested in ["0 1000 1\n1 100000 65536\n", "0 0 1\n", ""] {
            assert!(is_nested_by(map(nested)), "{nested}");
        }
        assert!(is_nested_by(Err(io::ErrorKind::PermissionDenied.into())));
    }
}
