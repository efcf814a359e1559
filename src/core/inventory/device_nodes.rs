//! Device nodes of the driver: whether they exist with the right numbers.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use nix::sys::stat::{major, minor};

use super::{Node, mig_capabilities};
use crate::fs::below::under;

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
    #[must_use]
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
