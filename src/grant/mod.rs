//! Everything one container is given: [`Placement`] in, [`Grant`] out. Pure.

use std::path::PathBuf;

use crate::config::Config;
use crate::inventory::{Inventory, Node};
use crate::ledger::Lease;
use crate::place::Placement;
use crate::request::Capabilities;

/// All edits to one container, for the appliers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Grant {
    /// The lease, for the `sublet.lease` annotation.
    pub lease: String,
    /// Device nodes, each with a cgroup rule `rw`.
    pub nodes: Vec<GrantedNode>,
    /// Read-only bind mounts.
    pub mounts: Vec<Mount>,
    /// The process's environment.
    pub env: Environment,
    /// Paths hidden from the container.
    pub masked_paths: Vec<PathBuf>,
    /// One line each, for whoever starts the container.
    pub warnings: Vec<String>,
}

/// A node and where it is on the host (driver root included): a user namespace needs the real one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantedNode {
    /// As the container sees it.
    pub node: Node,
    /// On the host.
    pub source: PathBuf,
}

/// A bind mount: read-only, nosuid, nodev, rprivate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// On the host.
    pub source: PathBuf,
    /// In the container, absolute.
    pub destination: PathBuf,
}

/// Changes to an environment; the same for config.json and for exec's process file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment {
    /// Set, whatever was there: each name stands once afterwards.
    pub set: Vec<(String, String)>,
    /// Set only where the name is absent.
    pub default: Vec<(String, String)>,
    /// Removed if a name begins so and is not in `set`.
    pub remove_prefixes: Vec<String>,
}

/// What is known of the container's image, read by `apply::image`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// The directory inside the rootfs that holds the libc of the driver's kind; `None`: musl, static.
    pub library_dir: Option<PathBuf>,
    /// A Nix image: libraries go to /run/opengl-driver/lib.
    pub nix: bool,
    /// The container's /tmp is a bind mount from the host.
    pub tmp_is_host: bool,
    /// One line each: what of the image will win over our files.
    pub warnings: Vec<String>,
}

/// Everything the container with this placement gets.
#[must_use]
pub fn grant(
    _placement: &Placement,
    _lease: &Lease,
    _capabilities: &Capabilities,
    _image: &Image,
    _inventory: &Inventory,
    _config: &Config,
) -> Grant {
    todo!()
}

/// The environment part alone, from what the ledger and the inventory say: for `exec`.
#[must_use]
pub fn environment(_lease: &Lease, _inventory: &Inventory, _config: &Config) -> Environment {
    todo!()
}
