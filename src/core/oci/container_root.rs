//! The rights of a container in a user namespace on the host's files: whether its root may create a file in a directory, as
//! its runtime does for a mount point, and whether its processes may open device nodes.

use std::fs::Metadata;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::sys::stat::FileStat;
use nix::unistd::{AccessFlags, faccessat, geteuid};
use rustix::fs::getxattr;
use serde_json::Value;

use crate::grant::GrantedNode;
use crate::host::user_namespace;
use crate::inventory::NodeError;

/// The id that stands for ids without a mapping (`user_namespaces(7)`, "Unmapped user and group IDs").
const OVERFLOW: u32 = 65534;

/// The root of a container's user namespace.
pub(super) struct ContainerRoot {
    /// Its own on the host, and all that its namespace has; `None`: it has no user namespace with mappings of its own.
    ids: Option<(Ids, Ids)>,
    /// This process runs in a user namespace, too.
    nested: bool,
}

/// Ids on the host: that of the namespace's id 0, and all.
struct Ids {
    root: Option<u64>,
    all: Vec<Range<u64>>,
}

impl ContainerRoot {
    pub fn of(spec: &Value) -> Self {
        let uids = Ids::read(spec, "/linux/uidMappings");
        let ids = uids.map(|uids| (uids, Ids::read(spec, "/linux/gidMappings").unwrap_or(Ids::NONE)));
        Self { ids, nested: user_namespace::is_nested() }
    }

    /// Whether it is the root of the host, which may create everything.
    pub fn is_hosts(&self) -> bool {
        self.ids.is_none() && !self.nested
    }

    /// Whether processes of the namespace may open a node of the host's. It is not refused where that depends on their ids:
    /// where the namespace has the node's owner or group, or the node has an access control list.
    fn may_open(&self, path: &Path, found: &Metadata, access: u32) -> bool {
        let has = |ids: &Ids, id: u32| ids.has(id.into());
        let is_theirs = match &self.ids {
            // Ids that this process's namespace lacks all look the same.
            _ if self.nested => found.uid() != OVERFLOW || found.gid() != OVERFLOW,
            ids => ids.as_ref().is_some_and(|(uids, gids)| has(uids, found.uid()) || has(gids, found.gid())),
        };
        let has_list = getxattr(path, "system.posix_acl_access", &mut [0; 0]).is_ok_and(|length| length > 0);
        found.mode() & access == access || is_theirs || has_list
    }

    /// Its capabilities count for files whose owner and group its namespace has (`capabilities(7)`, "Interaction with user
    /// namespaces"); for the rest it is an ordinary user.
    pub fn may_create_in(&self, directory: &OwnedFd, stat: &FileStat) -> bool {
        let by_ids = self.ids.as_ref().is_none_or(|(uids, gids)| {
            let (uid, gid) = (u64::from(stat.st_uid), u64::from(stat.st_gid));
            let bit = match (uids.root == Some(uid), gids.root == Some(gid)) {
                (true, _) => 0o200,
                (_, true) => 0o020,
                _ => 0o002,
            };
            uids.has(uid) && gids.has(gid) || stat.st_mode & bit != 0
        });
        by_ids && (!self.nested || is_writable(directory))
    }
}

/// For this process, which is root of a namespace above the container's.
fn is_writable(directory: &OwnedFd) -> bool {
    may(Path::new(&format!("/proc/self/fd/{}", directory.as_raw_fd())), AccessFlags::W_OK)
}

fn may(path: &Path, access: AccessFlags) -> bool {
    faccessat(AT_FDCWD, path, access, AtFlags::AT_EACCESS).is_ok()
}

/// The annotation by which crun, and no other runtime, leaves a container the groups of its starter
/// (`podman run --group-add keep-groups`).
pub const KEEP_GROUPS: &str = "run.oci.keep_original_groups";

/// Checks that processes in the user namespace of `spec`, or in that of this process, may open `nodes`, which are mounted
/// there with the host's owner and mode. With `keeps_groups` they have the groups of this process.
///
/// # Errors
/// They may not open one that CUDA needs.
pub(crate) fn check_node_modes(
    spec: &Value,
    nodes: &[GrantedNode],
    keeps_groups: bool,
) -> Result<(), NodeError> {
    let root = ContainerRoot::of(spec);
    if root.is_hosts() {
        return Ok(());
    }
    for granted in nodes.iter().filter(|granted| !granted.node.is_optional()) {
        // That it is there was checked.
        let Ok(found) = std::fs::metadata(&granted.source) else { continue };
        let (path, mode) = (granted.source.clone(), found.mode() & 0o777);
        // Nodes of MIG capabilities are read-only; the driver asks no more of them.
        let (access, flags) = if granted.node.path.starts_with("/dev/nvidia-caps") {
            (0o004, AccessFlags::R_OK)
        } else {
            (0o006, AccessFlags::R_OK | AccessFlags::W_OK)
        };
        let ours = may(&path, flags);
        if root.may_open(&path, &found, access) || keeps_groups && ours {
            continue;
        }
        let is_users = root.nested || !geteuid().is_root();
        let remedy = match (is_users, ours) {
            (true, true) => "start it with crun and `--group-add keep-groups` (docs/rootless.md)",
            (true, false) => {
                "have root add you to its group, log in again, and start it with crun and `--group-add keep-groups` \
                 (docs/rootless.md)"
            }
            (false, _) => {
                "give the nodes mode 0666 (NVreg_DeviceFileMode), or leave out the user namespace (--userns=host)"
            }
        };
        return Err(NodeError::Closed { path, mode, remedy });
    }
    Ok(())
}

impl Ids {
    const NONE: Self = Self { root: None, all: Vec::new() };

    fn read(spec: &Value, pointer: &str) -> Option<Self> {
        let entries = spec.pointer(pointer)?.as_array().filter(|entries| !entries.is_empty())?;
        let number = |entry: &Value, key: &str| entry.get(key).and_then(Value::as_u64);
        let mut ids = Self::NONE;
        for entry in entries {
            let (Some(host), Some(size)) = (number(entry, "hostID"), number(entry, "size")) else { continue };
            if number(entry, "containerID") == Some(0) {
                ids.root = Some(host);
            }
            ids.all.push(host..host.saturating_add(size));
        }
        Some(ids)
    }

    fn has(&self, id: u64) -> bool {
        self.all.iter().any(|range| range.contains(&id))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use nix::sys::stat::fstat;
    use serde_json::json;

    use super::*;

    fn mapped(host: u32) -> ContainerRoot {
        let map = json!([{"containerID": 1, "hostID": 5, "size": 1}, {"containerID": 0, "hostID": host, "size": 2}]);
        let root = ContainerRoot::of(&json!({"linux": {"uidMappings": map, "gidMappings": map}}));
        ContainerRoot { nested: false, ..root }
    }

    #[test]
    fn a_root_creates_where_it_owns_or_everybody_may() {
        let directory: OwnedFd = File::open("/").unwrap().into();
        let stat = |uid, gid, mode| {
            let mut stat = fstat(&directory).unwrap();
            (stat.st_uid, stat.st_gid, stat.st_mode) = (uid, gid, mode);
            stat
        };
        let may = |uid, gid, mode| mapped(100_000).may_create_in(&directory, &stat(uid, gid, mode));
        assert!(may(100_000, 100_000, 0o755) && may(100_001, 5, 0o555), "its own capabilities count");
        assert!(may(100_000, 0, 0o755) && may(0, 100_000, 0o775) && may(0, 0, 0o1777));
        assert!(!may(0, 0, 0o775) && !may(100_002, 100_000, 0o755) && !may(100_000, 0, 0o577));
        assert!(!mapped(100_000).is_hosts());
        assert!(ContainerRoot { nested: false, ..ContainerRoot::of(&json!({"linux": {}})) }.is_hosts());
    }
}
