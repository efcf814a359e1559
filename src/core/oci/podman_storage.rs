//! Finds a container's root filesystem in Podman's storage if config.json does not name it.
//!
//! For a container in a user namespace, Podman 5 writes a path into `root.path` that the namespace's root may enter
//! (`/var/tmp/intermediate-mountpoint-<uid>.<n>`). It mounts the root filesystem there after its precreate hooks, in a
//! mount namespace that only the runtime has, and the mount disappears with the container. The root filesystem itself
//! is in Podman's storage, whose files are beside the container's own directories (containers/storage, `containers.go`
//! and `layers.go`).

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::fs::trusted;
use crate::text::safe;

/// How the name begins (Podman, `libpod/container_internal_common.go`).
const INTERMEDIATE: &str = "intermediate-mountpoint-";

/// The last part of the paths of a container's own directories, both in the storage and below /run.
const USERDATA: &str = "userdata";

/// Each container takes a few hundred bytes.
const LARGEST: u64 = 64 << 20;

/// The storage does not know the container, or the container's root filesystem is not in the storage.
#[derive(Debug, thiserror::Error)]
#[error(
    "Podman has not yet mounted its root filesystem at {} for its user namespace, and Podman's storage \
     does not say where it is now: start it from an image instead of --rootfs, or leave out --uidmap and \
     --userns",
    safe(&.0.to_string_lossy())
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

    /// The container. That of `podman run --rm` is in the second file.
    fn stored(&self) -> Option<Stored> {
        let dir = self.root.join(format!("{}-containers", self.driver));
        let files = ["containers.json", "volatile-containers.json"].map(|name| dir.join(name));
        let mut all = files.iter().flat_map(|file| entries::<Stored>(file));
        all.find(|stored| stored.id == self.id)
    }

    /// The path at which `layer` is mounted, if this directory is below Podman's `--runroot`.
    fn mounted(&self, layer: &str) -> Option<PathBuf> {
        let file = self.root.join(format!("{}-layers/mountpoints.json", self.driver));
        let mounted = entries::<Mounted>(&file).into_iter().find(|mounted| mounted.id == layer)?;
        mounted.path.canonicalize().ok()
    }
}

/// A file that cannot be read counts as empty, and so does one that other users can write: the path of a volume could be
/// chosen to look like Podman's.
fn entries<T: DeserializeOwned>(path: &Path) -> Vec<T> {
    let file = trusted::read_if_trusted(path, LARGEST);
    file.and_then(|file| serde_json::from_slice(&file).ok()).unwrap_or_default()
}

/// Podman's name of the container of `spec` and `bundle`, if its storage has it. Podman 4 runs hooks elsewhere than in the
/// bundle: there the root filesystem, `ROOT/<driver>/…`, names the storage.
pub(super) fn name(spec: &Value, bundle: &Path) -> Option<String> {
    let own = Userdata::parse(bundle).or_else(|| {
        let made = made_for_it(spec).next()?;
        let root = Path::new(spec.pointer("/root/path")?.as_str()?);
        let driver = root.ancestors().find(|above| above.ends_with(made.driver))?;
        Some(Userdata { root: driver.parent()?, ..made })
    });
    own?.stored()?.names.into_iter().next()
}

/// Where Podman makes files for the container (/etc/hostname, /run/.containerenv): below its `--runroot`.
fn made_for_it(spec: &Value) -> impl Iterator<Item = Userdata<'_>> {
    let mounts = spec.get("mounts").and_then(Value::as_array).into_iter().flatten();
    mounts.filter_map(|mount| Userdata::parse(Path::new(mount.get("source")?.as_str()?).parent()?))
}

/// The root filesystem of the container of `spec` and `bundle`, for which config.json says `root`.
///
/// # Errors
/// It does not exist yet, and the storage does not say where it is.
pub fn root_filesystem(root: PathBuf, spec: &Value, bundle: &Path) -> Result<PathBuf, Unknown> {
    let name = root.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if !name.starts_with(INTERMEDIATE) {
        return Ok(root);
    }
    find(spec, bundle).ok_or(Unknown(root))
}

fn find(spec: &Value, bundle: &Path) -> Option<PathBuf> {
    let own = Userdata::parse(bundle)?;
    let layer = own.stored().filter(|stored| !stored.image.is_empty())?.layer;
    let made = made_for_it(spec).filter(|made| (made.driver, made.id) == (own.driver, own.id));
    // With `--transient-store` the bundle itself is there, too.
    [own].into_iter().chain(made).find_map(|userdata| userdata.mounted(&layer))
}

#[cfg(test)]
mod tests {
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
                &json!([{"id": "b", "layer": "k", "image": "i"},
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
            root_filesystem(root, &self.spec(source), &bundle).ok()
        }
    }

    const HOSTNAME: &str = "run/vfs-containers/c/userdata/hostname";

    #[test]
    fn what_config_json_names_is_it_anywhere_else() {
        let root = PathBuf::from("/var/lib/containers/storage/overlay/l/merged");
        let found = root_filesystem(root.clone(), &json!({}), Path::new("/none")).unwrap();
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
        assert_eq!(name(&json!({}), &bundle).as_deref(), Some("n"));
        let mut spec = host.spec(HOSTNAME);
        spec["root"] = json!({"path": host.path("root").join("vfs/dir/l")});
        assert_eq!(name(&spec, Path::new("/")).as_deref(), Some("n"), "Podman 4 runs the hook elsewhere");
        spec["root"] = json!({"path": "/srv/rootfs"});
        assert_eq!(name(&spec, Path::new("/")), None);
    }

    #[test]
    fn what_the_storage_does_not_say_for_certain_is_not_known() {
        let host = Host::new();
        // No such container, another container, another driver.
        for other in ["etc/hosts", "run/vfs-containers/b/userdata/x", "run/overlay-containers/c/userdata/x"] {
            assert_eq!(host.find(other), None, "{other}");
        }
        let error =
            root_filesystem("/t/intermediate-mountpoint-0.0".into(), &json!({}), Path::new("/")).unwrap_err();
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
