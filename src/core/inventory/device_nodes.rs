//! Device nodes of the driver: whether they exist with the right numbers. Majors are from /proc/devices; DRI nodes
//! belong to a GPU.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::{fs, io};

use nix::sys::stat::{major, minor};

use super::{Majors, Node, mig_capabilities};
use crate::fs::{is_absent, under};

/// Why a node cannot be given to a container.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// It does not exist.
    #[error("device node {} is missing; {}", .path.display(), remedy(.path))]
    Missing {
        /// The path, driver root included.
        path: PathBuf,
    },
    /// An nvidia-caps node that does not exist and cannot be created.
    #[error(
        "device node {} is missing and cannot be created ({source}); run `nvidia-modprobe -f {file}` as root",
        .path.display()
    )]
    Unmade {
        /// The path, driver root included.
        path: PathBuf,
        /// The capability's file.
        file: String,
        /// Why.
        source: io::Error,
    },
    /// Something else is at its path.
    #[error(
        "{} is {found}, but /proc/devices says it should be the character device {major}:{minor}; remove \
         it, then {}",
        .path.display(), remedy(.path)
    )]
    Other {
        /// The path, driver root included.
        path: PathBuf,
        /// The file at the path.
        found: String,
        /// The expected node.
        major: u32,
        /// The expected node.
        minor: u32,
    },
    /// Its mode keeps the processes of a user namespace out, which have none of the host's groups.
    #[error(
        "device node {} has mode {mode:04o}, so the container, in its user namespace, may not open it: {remedy}",
        .path.display()
    )]
    Closed {
        /// The path, driver root included.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
        /// The remedy.
        remedy: &'static str,
    },
    /// It cannot be examined.
    #[error("cannot read {}: {source}", .path.display())]
    Unreadable {
        /// The path, driver root included.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl Node {
    /// Whether CUDA does without it, so that a container is served without it too: of the driver's nodes it opens
    /// nvidiactl, nvidia-uvm and the GPU's (docs/evidence/2026-11-21-h200-shares.md).
    pub fn is_optional(&self) -> bool {
        let spare = ["/dev/nvidia-modeset", "/dev/nvidia-uvm-tools", "/dev/dri"];
        spare.iter().any(|path| self.path.starts_with(path))
    }
}

/// Checks that `node` is on this host and as in the inventory.
///
/// # Errors
/// It is missing, or something else is in its place.
pub fn check_node(root: &Path, node: &Node) -> Result<(), NodeError> {
    let path = under(root, &node.path.to_string_lossy());
    let there = match fs::metadata(&path) {
        Ok(there) => there,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(NodeError::Missing { path }),
        Err(source) => return Err(NodeError::Unreadable { path, source }),
    };
    let found = if there.file_type().is_char_device() {
        let device = there.rdev();
        if (major(device), minor(device)) == (u64::from(node.major), u64::from(node.minor)) {
            return Ok(());
        }
        format!("the character device {}:{}", major(device), minor(device))
    } else {
        "no character device".to_owned()
    };
    Err(NodeError::Other { path, found, major: node.major, minor: node.minor })
}

/// [`check_node`], which also creates a missing nvidia-caps node. nvidia-modprobe creates these nodes only on request,
/// and engines do not request it.
///
/// # Errors
/// As [`check_node`], or the node cannot be created.
pub(crate) fn ensure_node(root: &Path, node: &Node) -> Result<(), NodeError> {
    match check_node(root, node) {
        Err(NodeError::Missing { path }) if mig_capabilities::is_cap(node) => {
            mig_capabilities::make(root, node).map_err(|(file, source)| NodeError::Unmade {
                path,
                file,
                source,
            })?;
            check_node(root, node)
        }
        checked => checked,
    }
}

/// The command that creates the node. `nvidia-modprobe` is setuid and part of every driver package (its manual page).
fn remedy(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match name.strip_prefix("nvidia").map(str::parse::<u32>) {
        _ if name.starts_with("nvidia-uvm") => {
            "run `modprobe nvidia-uvm`, then `nvidia-modprobe -u -c0`".to_owned()
        }
        _ if name == "nvidia-modeset" => "run `nvidia-modprobe -m`".to_owned(),
        Some(Ok(minor)) => format!("run `nvidia-modprobe -c {minor}`"),
        _ => "run `nvidia-modprobe`".to_owned(),
    }
}

impl Majors {
    /// Reads the text of /proc/devices. Drivers up to 535 call `nvidia` `nvidia-frontend`.
    pub fn parse(devices: &str) -> Self {
        let characters = devices.split("Block devices:").next().unwrap_or_default();
        let find = |names: &[&str]| {
            characters.lines().find_map(|line| {
                let (number, name) = line.trim().split_once(' ')?;
                names.contains(&name.trim()).then(|| number.parse().ok())?
            })
        };
        Self {
            nvidia: find(&["nvidia", "nvidia-frontend", "nvidiactl"]),
            uvm: find(&["nvidia-uvm"]),
            caps: find(&["nvidia-caps"]),
        }
    }
}

/// The nodes under /dev/dri of the GPU at `bus_id`. Nodes that do not exist are left out.
///
/// # Errors
/// The directory or one of the nodes cannot be examined, with its path.
pub fn list_dri_nodes(root: &Path, bus_id: &str) -> Result<Vec<Node>, (PathBuf, io::Error)> {
    let dir = under(root, &format!("/sys/bus/pci/devices/{bus_id}/drm"));
    let names = match list_names(&dir) {
        Err(error) if is_absent(&error) => return Ok(Vec::new()),
        names => names.map_err(|error| (dir, error))?,
    };
    let mut nodes = Vec::new();
    for name in names.iter().filter(|name| name.starts_with("card") || name.starts_with("renderD")) {
        nodes.extend(character_device(root, Path::new("/dev/dri").join(name))?);
    }
    nodes.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(nodes)
}

/// The names in `dir` that are UTF-8.
fn list_names(dir: &Path) -> io::Result<Vec<String>> {
    let names = fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name().into_string().ok()));
    names.filter_map(Result::transpose).collect()
}

fn character_device(root: &Path, path: PathBuf) -> Result<Option<Node>, (PathBuf, io::Error)> {
    let file = under(root, &path.to_string_lossy());
    let there = match fs::metadata(&file) {
        Err(error) if is_absent(&error) => return Ok(None),
        there => there.map_err(|error| (file, error))?,
    };
    let number = |part: u64| u32::try_from(part).ok();
    let numbers = number(major(there.rdev())).zip(number(minor(there.rdev())));
    let numbers = numbers.filter(|_| there.file_type().is_char_device());
    Ok(numbers.map(|(major, minor)| Node { path, major, minor }))
}

#[cfg(test)]
mod tests {
    use super::super::fixture::Root;
    use super::*;

    #[test]
    fn nodes_are_checked_by_number_and_kind() {
        let node = |path: &str, major, minor| Node { path: path.into(), major, minor };
        assert!(check_node(Path::new("/"), &node("/dev/null", 1, 3)).is_ok());
        let error = check_node(Path::new("/"), &node("/dev/null", 195, 0)).unwrap_err().to_string();
        assert!(
            error.contains(
                "is the character device 1:3, but /proc/devices says it should be the character device 195:0"
            ),
            "{error}"
        );
        let root = Root::new();
        root.file("/dev/nvidia0", "");
        let error = check_node(root.path(), &node("/dev/nvidia0", 195, 0)).unwrap_err().to_string();
        assert!(error.contains("is no character device, but"), "{error}");
    }

    #[test]
    fn a_missing_node_comes_with_what_makes_it() {
        let root = Root::new();
        let cases = [
            ("/dev/nvidia3", "is missing; run `nvidia-modprobe -c 3`"),
            ("/dev/nvidiactl", "is missing; run `nvidia-modprobe`"),
            ("/dev/nvidia-modeset", "is missing; run `nvidia-modprobe -m`"),
            ("/dev/nvidia-uvm", "is missing; run `modprobe nvidia-uvm`, then `nvidia-modprobe -u -c0`"),
        ];
        for (path, message) in cases {
            let node = Node { path: path.into(), major: 195, minor: 3 };
            let error = check_node(root.path(), &node).unwrap_err().to_string();
            assert!(error.ends_with(message), "{error}");
        }
    }
}

#[cfg(test)]
mod device_majors_tests {
    use super::*;

    #[test]
    fn majors_of_new_and_old_drivers() {
        let new = "Character devices:\n  1 mem\n195 nvidia\n195 nvidia-modeset\n195 nvidiactl\n\
                   241 nvidia-caps\n240 nvidia-caps-imex-channels\n510 nvidia-uvm\n\n\
                   Block devices:\n  8 sd\n";
        assert_eq!(Majors::parse(new), Majors { nvidia: Some(195), uvm: Some(510), caps: Some(241) });
        let old = "Character devices:\n195 nvidia-frontend\n235 nvidia-uvm\n";
        assert_eq!(Majors::parse(old), Majors { nvidia: Some(195), uvm: Some(235), caps: None });
    }

    #[test]
    fn a_block_device_or_garbage_is_no_major() {
        let block = "Character devices:\n  1 mem\n\nBlock devices:\n195 nvidia\n";
        assert_eq!(Majors::parse(block), Majors::default());
        assert_eq!(Majors::parse("Character devices:\nx nvidia\nnvidia\n195\n"), Majors::default());
    }

    #[test]
    fn dri_nodes_are_numbered_as_found_and_left_out_where_nobody_made_them() {
        let root = super::super::fixture::Root::new();
        let drm = "/sys/bus/pci/devices/0000:3b:00.0/drm";
        for name in ["card1", "card2", "renderD128", "controlD64", "version"] {
            root.file(&format!("{drm}/{name}/dev"), "");
        }
        // /dev/null stands for a node: 1:3 on every Linux.
        root.link("/dev/dri/renderD128", "/dev/null").link("/dev/dri/controlD64", "/dev/null");
        root.file("/dev/dri/card1", "no device");
        let expected = Node { path: "/dev/dri/renderD128".into(), major: 1, minor: 3 };
        let found = |bus_id| list_dri_nodes(root.path(), bus_id).unwrap();
        assert_eq!(found("0000:3b:00.0"), [expected]);
        assert_eq!(found("0000:5e:00.0"), []);
    }

    #[test]
    fn what_cannot_be_examined_is_not_left_out() {
        let root = super::super::fixture::Root::new();
        root.file("/sys/bus/pci/devices/0000:3b:00.0/drm/card1/dev", "");
        // ELOOP stands for every error but absence.
        root.link("/dev/dri/card1", "card1").link("/sys/bus/pci/devices/0000:5e:00.0/drm", "drm");
        let why = |bus_id| list_dri_nodes(root.path(), bus_id).unwrap_err().0;
        assert_eq!(why("0000:3b:00.0"), root.path().join("dev/dri/card1"));
        assert_eq!(why("0000:5e:00.0"), root.path().join("sys/bus/pci/devices/0000:5e:00.0/drm"));
    }
}
