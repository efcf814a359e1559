//! A container's first process as the kernel shows it, for leases that are bound by a hook.

use std::fs;
use std::path::{Path, PathBuf};

use super::Init;
use super::record::pid_namespace;
use crate::process::Process;

/// The hierarchies that are looked at, as /proc/PID/cgroup names their controllers, and where they are
/// mounted: v2 alone, v2 beside v1, v1.
const HIERARCHIES: [(&str, &str); 4] = [
    ("", "/sys/fs/cgroup"),
    ("", "/sys/fs/cgroup/unified"),
    ("devices", "/sys/fs/cgroup/devices"),
    ("pids", "/sys/fs/cgroup/pids"),
];

/// What a lease remembers of the container whose first process is `process`. A cgroup in which `beside`
/// lives too (the hook, started by the runtime outside the container) is not the container's own.
#[must_use]
pub fn bound(process: Process, beside: i32) -> Init {
    let read = |pid: i32| fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let own = own_cgroups(&read(process.pid), &read(beside));
    Init {
        process,
        pid_namespace: pid_namespace(process.pid),
        cgroup: own.into_iter().find(|dir| dir.exists()),
    }
}

/// Directories that may be the cgroup of `container` alone, from two texts of /proc/PID/cgroup.
fn own_cgroups(container: &str, beside: &str) -> Vec<PathBuf> {
    let path = |text: &str, wanted: &str| {
        text.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            controllers.split(',').any(|name| name == wanted).then(|| path.to_owned())
        })
    };
    let own = |&(controller, mount): &(&str, &str)| {
        let path_of = path(container, controller)?;
        let below = path_of.trim_start_matches('/');
        let plain = !below.is_empty() && !below.split('/').any(|part| part == "..");
        (plain && path(beside, controller).as_ref() != Some(&path_of)).then(|| Path::new(mount).join(below))
    };
    HIERARCHIES.iter().filter_map(own).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_is_the_containers_own_where_the_hook_is_not_in_it() {
        let container = "0::/user.slice/user-1000.slice/c1.scope/container\n";
        let hook = "0::/user.slice/user-1000.slice/session.scope\n";
        let found = own_cgroups(container, hook);
        let expected = [
            "/sys/fs/cgroup/user.slice/user-1000.slice/c1.scope/container",
            "/sys/fs/cgroup/unified/user.slice/user-1000.slice/c1.scope/container",
        ];
        assert_eq!(found, expected.map(PathBuf::from));
        assert_eq!(own_cgroups(hook, hook), Vec::<PathBuf>::new());
    }

    #[test]
    fn roots_and_ways_out_are_nobodys_own() {
        for path in ["/", "/../../x", "", "/a/../b"] {
            assert_eq!(own_cgroups(&format!("0::{path}\n"), "0::/h\n"), Vec::<PathBuf>::new(), "{path}");
        }
        assert_eq!(own_cgroups("garbage\n1:\n", ""), Vec::<PathBuf>::new());
    }

    #[test]
    fn version_1_is_told_by_its_controllers() {
        let container = "12:cpu,devices:/docker/c1\n11:pids:/h\n0::/h\n";
        let hook = "12:cpu,devices:/h\n11:pids:/h\n0::/h\n";
        assert_eq!(own_cgroups(container, hook), [PathBuf::from("/sys/fs/cgroup/devices/docker/c1")]);
    }
}
