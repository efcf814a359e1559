//! Where a container's root filesystem is; which annotations are its own, where `KEY/NAME` is KEY for the container NAME of a
//! pod, whose annotations reach each of its containers (`podman kube generate` writes them so); and the rights of a container
//! in a user namespace on the host's files: whether its root may create a file in a directory, as its runtime does for a
//! mount point, and whether its processes may open device nodes.
//!
//! For a container in a user namespace, Podman 5 writes a path into `root.path` that the namespace's root may enter
//! (`/var/tmp/intermediate-mountpoint-<uid>.<n>`). It mounts the root filesystem there after its precreate hooks, in a
//! mount namespace that only the runtime has, and the mount disappears with the container. The root filesystem itself
//! is in Podman's storage, whose files are beside the container's own directories (containers/storage, `containers.go`
//! and `layers.go`).

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::sys::stat::FileStat;
use nix::unistd::{AccessFlags, faccessat, geteuid};
use rustix::fs::getxattr;
use serde::Deserialize;
use serde_json::Value;

use super::conflict::{entries, environment_value, is_of_podman, text};
use super::{SpecError, annotations};
use crate::config_files::Known;
use crate::fs::parse_json;
use crate::grant::GrantedNode;
use crate::inventory::NodeError;
use crate::request::split_container_name;
use crate::text::{safe, safe_path};

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
#[derive(Default)]
struct Ids {
    root: Option<u64>,
    all: Vec<std::ops::Range<u64>>,
}

impl ContainerRoot {
    pub fn of(spec: &Value) -> Self {
        let uids = Ids::read(spec, "/linux/uidMappings");
        let ids = uids.map(|uids| (uids, Ids::read(spec, "/linux/gidMappings").unwrap_or_default()));
        Self { ids, nested: crate::process::is_nested() }
    }

    /// Whether it is the root of the host, which may create everything.
    pub fn is_hosts(&self) -> bool {
        self.ids.is_none() && !self.nested
    }

    /// Whether processes of the namespace may open a node of the host's. It is not refused where that depends on their ids:
    /// where the namespace has the node's owner or group, or the node has an access control list.
    fn may_open(&self, path: &Path, found: &std::fs::Metadata, access: u32) -> bool {
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
        // This process is root of a namespace above the container's.
        let here = || PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
        by_ids && (!self.nested || may(&here(), AccessFlags::W_OK))
    }
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
        let remedy = match (is_users, is_of_podman(spec), ours) {
            (true, true, true) => "start it with crun and `--group-add keep-groups` (docs/rootless.md)",
            (true, true, false) => {
                "have root add you to its group, log in again, and start it with crun and `--group-add keep-groups` \
                 (docs/rootless.md)"
            }
            (true, false, _) => "have root give the nodes mode 0666 (NVreg_DeviceFileMode; docs/rootless.md)",
            (false, ..) => {
                "give the nodes mode 0666 (NVreg_DeviceFileMode), or leave out the user namespace (--userns=host)"
            }
        };
        return Err(NodeError::Closed { path, mode, remedy });
    }
    Ok(())
}

impl Ids {
    fn read(spec: &Value, pointer: &str) -> Option<Self> {
        let entries = spec.pointer(pointer)?.as_array().filter(|entries| !entries.is_empty())?;
        let number = |entry: &Value, key: &str| entry.get(key).and_then(Value::as_u64);
        let mut ids = Self::default();
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

/// How the name begins (Podman, `libpod/container_internal_common.go`).
const INTERMEDIATE: &str = "intermediate-mountpoint-";

/// The last part of the paths of a container's own directories, both in the storage and below /run.
const USERDATA: &str = "userdata";

/// Each container takes a few hundred bytes.
const LARGEST_STORAGE_FILE: u64 = 64 << 20;

/// The storage does not know the container, or the container's root filesystem is not in the storage.
#[derive(Debug, thiserror::Error)]
#[error(
    "Podman has not yet mounted its root filesystem at {} for its user namespace, and Podman's storage \
     does not say where it is now: start it from an image instead of --rootfs, or leave out --uidmap and \
     --userns",
    safe_path(.0)
)]
pub struct Unknown(PathBuf);

/// A container in `containers.json`.
#[derive(Deserialize)]
struct Stored {
    id: String,
    layer: String,
    /// Absent if the root filesystem is another directory (`--rootfs`).
    #[serde(default)]
    image: String,
    #[serde(default)]
    names: Vec<String>,
    /// JSON in a text.
    #[serde(default)]
    metadata: String,
}

/// A mounted layer in `mountpoints.json`.
#[derive(Deserialize)]
struct Mounted {
    id: String,
    path: PathBuf,
}

/// `ROOT/<driver>-containers/<id>/userdata`.
#[derive(Clone, Copy)]
struct Userdata<'a> {
    root: &'a Path,
    driver: &'a str,
    id: &'a str,
}

impl<'a> Userdata<'a> {
    fn parse(path: &'a Path) -> Option<Self> {
        let own = path.parent().filter(|_| path.ends_with(USERDATA))?;
        let containers = own.parent()?;
        Some(Self {
            root: containers.parent()?,
            driver: containers.file_name()?.to_str()?.strip_suffix("-containers")?,
            id: own.file_name()?.to_str()?,
        })
    }

    /// The container.
    fn stored(&self) -> Option<Stored> {
        self.list_stored().find(|stored| stored.id == self.id)
    }

    /// All containers of this storage. Containers of `podman run --rm` are in the second file.
    fn list_stored(&self) -> impl Iterator<Item = Stored> + use<> {
        let dir = self.root.join(format!("{}-containers", self.driver));
        let files = ["containers.json", "volatile-containers.json"].map(|name| dir.join(name));
        files.into_iter().flat_map(|file| storage_entries::<Stored>(&file))
    }

    /// The path at which `layer` is mounted, if this directory is below Podman's `--runroot`.
    fn mounted(&self, layer: &str) -> Option<PathBuf> {
        let file = self.root.join(format!("{}-layers/mountpoints.json", self.driver));
        let mounted = storage_entries::<Mounted>(&file).into_iter().find(|mounted| mounted.id == layer)?;
        mounted.path.canonicalize().ok()
    }
}

/// A file that cannot be read counts as empty, and so does one that other users can write: the path of a volume could be
/// chosen to look like Podman's.
fn storage_entries<T: serde::de::DeserializeOwned>(path: &Path) -> Vec<T> {
    let file = crate::fs::read_if_trusted(path, LARGEST_STORAGE_FILE);
    file.and_then(|file| parse_json(&file).ok()).unwrap_or_default()
}

/// Podman's name of the container of `spec` and `bundle`, if its storage has it.
pub(super) fn podman_name(spec: &Value, bundle: &Path) -> Option<String> {
    let rootfs = spec.pointer("/root/path").and_then(Value::as_str).unwrap_or_default();
    podman_record(bundle, Path::new(rootfs)).map(|known| known.name)
}

/// Podman's id of the container with this root filesystem, if its storage has it.
pub fn podman_id(rootfs: &Path) -> Option<String> {
    find_by_layer(rootfs).map(|stored| stored.id)
}

/// The record of the container in Podman's storage. Podman 4 runs hooks elsewhere than in the bundle: there the root
/// filesystem tells. The files that it mounts do not: in a pod some of them are the infra container's.
pub(crate) fn podman_record(bundle: &Path, rootfs: &Path) -> Option<Known> {
    let stored = Userdata::parse(bundle).map_or_else(|| find_by_layer(rootfs), |own| own.stored())?;
    let metadata: Value = serde_json::from_str(&stored.metadata).unwrap_or_default();
    let image = metadata["image-name"].as_str().unwrap_or_default().to_owned();
    Some(Known { name: stored.names.into_iter().next()?, image, ..Known::default() })
}

/// The container whose root filesystem is `ROOT/<driver>/…/<layer>`, beside `ROOT/<driver>-containers`.
fn find_by_layer(rootfs: &Path) -> Option<Stored> {
    rootfs.ancestors().skip(1).find_map(|driver| {
        let (root, name) = (driver.parent()?, driver.file_name()?.to_str()?);
        let below = rootfs.strip_prefix(driver).ok()?;
        let is_its = |stored: &Stored| below.iter().any(|part| part == stored.layer.as_str());
        Userdata { root, driver: name, id: "" }.list_stored().find(is_its)
    })
}

/// Where Podman makes files for the container (/etc/hostname, /run/.containerenv): below its `--runroot`.
fn made_for_it(spec: &Value) -> impl Iterator<Item = Userdata<'_>> {
    let mounts = entries(spec, "/mounts").iter();
    mounts.filter_map(|mount| Userdata::parse(Path::new(text(mount, "source")?).parent()?))
}

/// The root filesystem of the container of `spec` and `bundle`, for which config.json says `root`.
///
/// # Errors
/// It does not exist yet, and the storage does not say where it is.
pub fn podman_root_filesystem(root: PathBuf, spec: &Value, bundle: &Path) -> Result<PathBuf, Unknown> {
    let name = root.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if !name.starts_with(INTERMEDIATE) {
        return Ok(root);
    }
    find_in_storage(spec, bundle).ok_or(Unknown(root))
}

fn find_in_storage(spec: &Value, bundle: &Path) -> Option<PathBuf> {
    let own = Userdata::parse(bundle)?;
    let layer = own.stored().filter(|stored| !stored.image.is_empty())?.layer;
    let made = made_for_it(spec).filter(|made| (made.driver, made.id) == (own.driver, own.id));
    // With `--transient-store` the bundle itself is there, too.
    [own].into_iter().chain(made).find_map(|userdata| userdata.mounted(&layer))
}

/// A container of a pod.
enum Member {
    /// Its name in the pod.
    Named(String),
    /// By Podman's name of it, if its storage knows that: the pod's name, `-`, and its name in the pod. Podman gives it the
    /// pod's name as that of the host, unless the pod names another.
    Podmans { name: Option<String>, host: Option<String> },
}

/// The annotations of the container of `spec` and `bundle`. For a container of a pod, `KEY/NAME` stands as KEY where NAME
/// is its name, and is left out elsewhere.
///
/// # Errors
/// They are not an object of strings, or it is ambiguous whether one is for this container.
pub fn own_annotations(spec: &Value, bundle: &Path) -> Result<BTreeMap<String, String>, SpecError> {
    let mut all = annotations(spec)?;
    let for_one: Vec<String> =
        all.keys().filter(|key| split_container_name(key).is_some()).cloned().collect();
    // Without a pod there is no NAME, and the key is unknown.
    let member = (!for_one.is_empty()).then(|| Member::of(spec, &all, bundle)).flatten();
    let Some(member) = member else { return Ok(all) };
    for whole in for_one {
        let Some((value, (key, name))) = all.remove(&whole).zip(split_container_name(&whole)) else {
            continue;
        };
        if member.is_called(name).ok_or_else(|| member.ambiguous(&whole, key))? {
            all.insert(key.to_owned(), value);
        }
    }
    Ok(all)
}

impl Member {
    /// `None`: the container is in no pod.
    fn of(spec: &Value, annotations: &BTreeMap<String, String>, bundle: &Path) -> Option<Self> {
        let said = |key: &str| annotations.get(key).cloned();
        // containerd and CRI-O.
        let by_cri = ["io.kubernetes.cri.container-name", "io.kubernetes.container.name"];
        if let Some(name) = by_cri.into_iter().find_map(said) {
            return Some(Self::Named(name));
        }
        said("io.kubernetes.cri-o.SandboxID")?;
        let host = environment_value(spec, "HOSTNAME");
        Some(Self::Podmans { name: podman_name(spec, bundle), host })
    }

    /// Whether it is called `name` in its pod, or by its engine; `None`: that is ambiguous.
    fn is_called(&self, name: &str) -> Option<bool> {
        let (whole, host) = match self {
            Self::Named(own) => return Some(own == name),
            Self::Podmans { name, host } => (name.as_deref()?, host.as_deref()),
        };
        if whole == name {
            return Some(true);
        }
        let Some(pod) = whole.strip_suffix(name).and_then(|pod| pod.strip_suffix('-')) else {
            return Some(false);
        };
        // `web` or `a-web` of shop-a-web? A pod called shop or shop-a decides.
        let is_hosts = |host: &str| whole.strip_prefix(host).is_some_and(|rest| rest.starts_with('-'));
        match host {
            Some(host) if is_hosts(host) => Some(pod == host),
            _ => (!pod.contains('-')).then_some(true),
        }
    }

    fn ambiguous(&self, annotation: &str, key: &str) -> SpecError {
        let whole = match self {
            Self::Podmans { name: Some(name), .. } => name,
            _ => "NAME, as `podman ps` shows it",
        };
        SpecError::Addressed { annotation: safe(annotation), key: safe(key), whole: safe(whole) }
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

#[cfg(test)]
mod podman_storage_tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use serde_json::json;

    use super::*;

    struct Host {
        dir: tempfile::TempDir,
    }

    impl Host {
        /// Container `c` of layer `l`, which is mounted.
        fn new() -> Self {
            let host = Self { dir: tempfile::tempdir().unwrap() };
            for dir in ["root/vfs-containers/c/userdata", "run/vfs-layers", "mounted"] {
                fs::create_dir_all(host.path(dir)).unwrap();
            }
            host.write(
                "root/vfs-containers/containers.json",
                &json!([{"id": "b", "layer": "k", "image": "i", "names": ["infra"]},
                {"id": "c", "layer": "l", "image": "i", "names": ["n"]}]),
            );
            host.write(
                "run/vfs-layers/mountpoints.json",
                &json!([{"id": "k", "path": "/", "count": 1},
                {"id": "l", "path": host.path("mounted"), "count": 1}]),
            );
            host
        }

        fn path(&self, below: &str) -> PathBuf {
            self.dir.path().canonicalize().unwrap().join(below)
        }

        fn write(&self, below: &str, value: &Value) {
            fs::write(self.path(below), value.to_string()).unwrap();
        }

        fn spec(&self, source: &str) -> Value {
            json!({"mounts": [{"destination": "/proc"}, {"destination": "/x", "source": self.path(source)}]})
        }

        fn find(&self, source: &str) -> Option<PathBuf> {
            let bundle = self.path("root/vfs-containers/c/userdata");
            let root = PathBuf::from("/var/tmp/intermediate-mountpoint-0.0");
            podman_root_filesystem(root, &self.spec(source), &bundle).ok()
        }
    }

    const HOSTNAME: &str = "run/vfs-containers/c/userdata/hostname";

    #[test]
    fn a_path_that_is_no_intermediate_mount_point_is_the_root_filesystem() {
        let root = PathBuf::from("/var/lib/containers/storage/overlay/l/merged");
        let found = podman_root_filesystem(root.clone(), &json!({}), Path::new("/none")).unwrap();
        assert_eq!(found, root);
    }

    #[test]
    fn the_layer_of_the_container_where_it_is_mounted() {
        let host = Host::new();
        assert_eq!(host.find(HOSTNAME), Some(host.path("mounted")));
        host.write("root/vfs-containers/volatile-containers.json", &json!([]));
        let stored = json!([{"id": "c", "layer": "l", "image": "i"}]);
        host.write("root/vfs-containers/containers.json", &json!([]));
        assert_eq!(host.find(HOSTNAME), None);
        host.write("root/vfs-containers/volatile-containers.json", &stored);
        assert_eq!(host.find(HOSTNAME), Some(host.path("mounted")));
        fs::remove_file(host.path("root/vfs-containers/containers.json")).unwrap();
        assert_eq!(host.find(HOSTNAME), Some(host.path("mounted")));
    }

    #[test]
    fn the_name_of_the_container() {
        let host = Host::new();
        let bundle = host.path("root/vfs-containers/c/userdata");
        assert_eq!(podman_name(&json!({}), &bundle).as_deref(), Some("n"));
        let mut spec = host.spec(HOSTNAME);
        spec["root"] = json!({"path": host.path("root").join("vfs/dir/l")});
        assert_eq!(
            podman_name(&spec, Path::new("/")).as_deref(),
            Some("n"),
            "Podman 4 runs the hook elsewhere"
        );
        let infra = json!({"source": host.path("run/vfs-containers/b/userdata/resolv.conf")});
        spec["mounts"].as_array_mut().unwrap().insert(0, infra);
        assert_eq!(podman_name(&spec, Path::new("/")).as_deref(), Some("n"), "of a pod");
        spec["root"] = json!({"path": "/srv/rootfs"});
        assert_eq!(podman_name(&spec, Path::new("/")), None);
    }

    #[test]
    fn a_layer_that_the_storage_does_not_name_for_certain_is_not_known() {
        let host = Host::new();
        // No such container, another container, another driver.
        for other in ["etc/hosts", "run/vfs-containers/b/userdata/x", "run/overlay-containers/c/userdata/x"] {
            assert_eq!(host.find(other), None, "{other}");
        }
        let error =
            podman_root_filesystem("/t/intermediate-mountpoint-0.0".into(), &json!({}), Path::new("/"))
                .unwrap_err();
        assert!(error.to_string().contains("instead of --rootfs"), "{error}");
        let files = ["root/vfs-containers/containers.json", "run/vfs-layers/mountpoints.json"];
        let bad = [
            (files[0], json!([{"id": "c", "layer": "l"}])),
            (files[0], json!([{"id": "c", "layer": "m", "image": "i"}])),
            (files[0], json!({"id": "c"})),
            (files[1], json!([])),
            (files[1], json!([{"id": "l", "path": host.path("none"), "count": 1}])),
        ];
        for (file, content) in bad {
            let before = fs::read(host.path(file)).unwrap();
            host.write(file, &content);
            assert_eq!(host.find(HOSTNAME), None, "{content}");
            fs::write(host.path(file), before).unwrap();
        }
        assert!(host.find(HOSTNAME).is_some());
        fs::set_permissions(host.path(files[1]), fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(host.find(HOSTNAME), None, "anybody may have written it");
    }
}

#[cfg(test)]
mod pod_tests {
    use super::*;

    #[test]
    fn who_is_meant_by_a_name_in_a_pod() {
        let podmans =
            |name: &str, host: &str| Member::Podmans { name: Some(name.into()), host: Some(host.into()) };
        let cases = [
            (podmans("shop-web", "shop"), "web", true),
            (podmans("shop-web", "shop"), "shop-web", true),
            (podmans("shop-a-web", "shop"), "web", false),
            (podmans("shop-a-web", "shop"), "a-web", true),
            (podmans("shop-a-web", "shop-a"), "web", true),
            (podmans("shop-web", "other"), "web", true),
            (podmans("shop-webs", "shop"), "web", false),
            (podmans("web", "shop"), "web", true),
            (podmans("shopweb", "shop"), "web", false),
            (Member::Named("web".into()), "web", true),
            (Member::Named("a-web".into()), "web", false),
        ];
        for (at, (member, name, expected)) in cases.into_iter().enumerate() {
            assert_eq!(member.is_called(name), Some(expected), "{at}");
        }
        let ambiguous = podmans("shop-a-web", "other");
        assert_eq!(ambiguous.is_called("web"), None);
        assert_eq!(Member::Podmans { name: None, host: None }.is_called("web"), None);
        let line = ambiguous.ambiguous("sublet.gpu/web", "sublet.gpu").to_string();
        assert!(line.contains("sublet.gpu/shop-a-web"), "{line}");
    }

    #[test]
    fn a_key_for_one_container_of_a_pod_is_that_containers_alone() {
        let of = |name: &str| {
            let spec = serde_json::json!({"annotations": {"io.kubernetes.cri.container-name": name,
                "sublet.sm": "50", "sublet.sm/web": "25", "sublet.gpu/db": "0", "else/web": "x",
                "Sublet.sm/late": "25", "sublet/mode/late": "mps"}});
            let mut own = own_annotations(&spec, Path::new("/none")).unwrap();
            own.retain(|key, _| key.to_lowercase().starts_with("sublet"));
            own.into_iter().collect::<Vec<_>>()
        };
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(of("web"), [pair("sublet.sm", "25")]);
        assert_eq!(of("db"), [pair("sublet.gpu", "0"), pair("sublet.sm", "50")]);
        let misspelt = [pair("Sublet.sm", "25"), pair("sublet.sm", "50"), pair("sublet/mode", "mps")];
        assert_eq!(of("late"), misspelt, "the request refuses them");
        let spec = serde_json::json!({"annotations": {"sublet.sm/web": "25"}});
        let alone = own_annotations(&spec, Path::new("/none")).unwrap();
        assert!(alone.contains_key("sublet.sm/web"), "in no pod it is an unknown key");
    }
}
