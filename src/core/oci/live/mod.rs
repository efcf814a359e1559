//! Applies a [`Grant`] to a live container whose namespaces exist and whose own program does not run yet: the stage of
//! prestart and createRuntime hooks.
//!
//! Everything from the host is opened on the host, as detached mounts. Then this process enters the container's mount
//! namespace and attaches the mounts to descriptors that were resolved inside the rootfs. No path of the image is used
//! twice.

mod attach;
mod bpf;
mod cgroup;
mod filter;
mod find_or_create;
mod host_sources;
mod systemd;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use nix::sched::{CloneFlags, setns};

use crate::grant::Grant;
use crate::inventory::Inventory;
use crate::ledger::Lease;
use crate::process::Process;
use crate::text::safe;
use attach::Rootfs;
use host_sources::HostSide;

pub(super) use find_or_create::{Kind, kind, place};
pub use systemd::command as systemctl;

/// A container between its creation and its start.
#[derive(Clone, Copy, Debug)]
pub struct Live<'a> {
    /// Its first process, which waits for its runtime.
    pub init: Process,
    /// Its root filesystem on the host, canonical.
    pub rootfs: &'a Path,
}

/// Why a grant cannot be applied to a live container.
#[derive(Debug, thiserror::Error)]
pub enum NamespaceError {
    /// The container ended meanwhile.
    #[error("its first process {0} has ended: see the container runtime's messages")]
    Gone(i32),
    /// It has no mount namespace of its own, so mounts would appear on the host.
    #[error(
        "it has no mount namespace of its own, so its devices would appear on the host: add a namespace of \
         type `mount` to its config.json"
    )]
    NoNamespace,
    /// It is not in the state that the specification requires at this stage.
    #[error(
        "its root filesystem {} is not the one in its mount namespace: run sublet-hook as a prestart or \
         createRuntime hook, or start the container with sublet-runtime",
        shown(.0)
    )]
    Rootfs(PathBuf),
    /// A mount would show on the host.
    #[error(
        "{} is on a mount shared with the host (bind-propagation shared), so the share's mounts would \
         appear on the host: use rslave or rprivate for that volume",
        shown(.0)
    )]
    Shared(PathBuf),
    /// The image leads a mount point into /proc or the like.
    #[error(
        "the image's {} is a link into a file system of the kernel: remove that link from the image",
        shown(.0)
    )]
    Kernel(PathBuf),
    /// The image has something else at the path of a node.
    #[error("the container has something else at {}: remove it from the image", shown(.0))]
    Occupied(PathBuf),
    /// systemd refused.
    #[error("systemd does not allow the devices for unit {unit}: {message}")]
    Systemd {
        /// The container's scope.
        unit: String,
        /// systemctl's last words.
        message: String,
    },
    /// A system call failed.
    #[error("cannot {attempt}: {source}{}", hint(source))]
    Io {
        /// As "mount /usr/lib/libcuda.so.1".
        attempt: String,
        /// The error.
        source: io::Error,
    },
}

fn shown(path: &Path) -> String {
    safe(&path.to_string_lossy())
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(nix::libc::ENOSYS) => {
            " (the prestart hook needs Linux 5.12; start the container with sublet-runtime)"
        }
        Some(nix::libc::EROFS) => " (read-only root filesystem: create the mount point in the image)",
        _ => "",
    }
}

/// `error`, from `attempt`.
fn failed(attempt: impl Into<String>, error: impl Into<io::Error>) -> NamespaceError {
    NamespaceError::Io { attempt: attempt.into(), source: error.into() }
}

/// Gives `container` the nodes, mounts and masks of `grant`, and opens its device cgroup for the nodes.
///
/// This process enters another mount namespace and comes back: it must have one thread only.
///
/// # Errors
/// Some of the grant may then be missing, so the container must not start.
pub fn apply(grant: &Grant, container: Live<'_>) -> Result<(), NamespaceError> {
    let host = HostSide::open(grant, container)?;
    let nodes: Vec<_> = grant.nodes.iter().map(|granted| &granted.node).collect();
    cgroup::open_devices(container.init.pid, &nodes)?;
    let entering = |error: io::Error| failed("enter its mount namespace", error);
    let home = File::open("/proc/self/ns/mnt").map_err(entering)?;
    // The kernel refuses processes with several threads (setns(2)).
    setns(&host.namespace, CloneFlags::CLONE_NEWNS).map_err(|errno| entering(errno.into()))?;
    let attached = Rootfs::find(container.rootfs, &host).and_then(|rootfs| attach(grant, &host, &rootfs));
    // A process that cannot return ends, because it would mistake the container's files for the host's. The container then
    // does not start, and its lease ends with it.
    if setns(&home, CloneFlags::CLONE_NEWNS).is_err() {
        std::process::abort();
    }
    attached
}

/// Why the container of `lease` cannot use its devices any more: its device cgroup closes one of their nodes. `None`: it does
/// not, or it is unknown (without root).
pub fn lost_node(lease: &Lease, inventory: &Inventory) -> Option<String> {
    let init = lease.init.as_ref().filter(|_| lease.job.is_none())?;
    let devices = lease.devices.iter().filter_map(|uuid| inventory.device(uuid));
    let closed =
        devices.map(|device| cgroup::first_denied(init.process.pid, &device.nodes)).find_map(|node| node)?;
    Some(format!(
        "it has lost {}: its device cgroup does not allow the node any more (`podman update` below crun, or systemd's \
         daemon-reload); restart the container",
        shown(&closed.path)
    ))
}

/// Everything that happens in the container's mount namespace.
fn attach(grant: &Grant, host: &HostSide, rootfs: &Rootfs<'_>) -> Result<(), NamespaceError> {
    for (granted, source) in grant.nodes.iter().zip(&host.nodes) {
        match source {
            Some(mount) => rootfs.mount(mount, &granted.node.path)?,
            None => rootfs.make_node(&granted.node)?,
        }
    }
    for (mount, source) in grant.mounts.iter().zip(&host.mounts) {
        rootfs.mount(source, &mount.destination)?;
    }
    for (path, mask) in grant.masked_paths.iter().zip(&host.masks) {
        rootfs.mask(mask, path)?;
    }
    Ok(())
}
