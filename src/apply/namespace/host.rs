//! What is opened on the host before a container's namespace is entered: its namespace, and every source
//! as a detached mount. Sources are paths of the host's alone.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use nix::libc;
use nix::sys::stat::{FileStat, fstat};
use rustix::fs::CWD;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, OpenTreeFlags, fsconfig_create, fsmount, fsopen, open_tree,
};

use super::{Live, NamespaceError, failed, setattr};
use crate::apply::tree::open_root;
use crate::grant::Grant;

/// For files and directories.
const READ_ONLY: u64 = libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
/// For device nodes, which `nodev` would close.
const NODE: u64 = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC;

/// Descriptors of the host's side.
pub(super) struct HostSide {
    /// The container's mount namespace.
    pub namespace: OwnedFd,
    /// The container's rootfs as the host sees it: told apart from whatever else may stand at its path.
    pub rootfs: FileStat,
    /// /proc of our own PID namespace: the container's is another one.
    pub proc: OwnedFd,
    /// One for each node of the grant; `None`: it is made by mknod.
    pub nodes: Vec<Option<OwnedFd>>,
    /// One for each mount of the grant.
    pub mounts: Vec<OwnedFd>,
    /// One for each masked path.
    pub masks: Vec<OwnedFd>,
}

impl HostSide {
    pub fn open(grant: &Grant, container: Live<'_>) -> Result<Self, NamespaceError> {
        let namespace = namespace(container)?;
        let rootfs = open_root(container.rootfs)
            .and_then(|fd| Ok(fstat(&fd)?))
            .map_err(|error| failed("look at its root filesystem", error))?;
        let proc = open_root(Path::new("/proc")).map_err(|error| failed("open /proc", error))?;
        let nested = has_user_namespace(container.init.pid).map_err(|error| failed("read /proc", error))?;
        let nodes = grant.nodes.iter().map(|node| nested.then(|| detached(&node.source, NODE)).transpose());
        let mounts = grant.mounts.iter().map(|mount| detached(&mount.source, READ_ONLY));
        let masks = grant.masked_paths.iter().map(|_| empty());
        Ok(Self {
            namespace,
            rootfs,
            proc,
            nodes: nodes.collect::<Result<_, _>>()?,
            mounts: mounts.collect::<Result<_, _>>()?,
            masks: masks.collect::<Result<_, _>>().map_err(|error| failed("make an empty mount", error))?,
        })
    }
}

/// The mount namespace of the container's first process, and not of another one that got its pid.
fn namespace(container: Live<'_>) -> Result<OwnedFd, NamespaceError> {
    let pid = container.init.pid;
    let namespace = File::open(format!("/proc/{pid}/ns/mnt"));
    if !container.init.is_alive() {
        return Err(NamespaceError::Gone(pid));
    }
    let namespace = namespace.map_err(|error| failed("open its mount namespace", error))?;
    let inode = |metadata: io::Result<fs::Metadata>| metadata.map(|metadata| metadata.ino());
    let (its, ours) = (inode(namespace.metadata()), inode(fs::metadata("/proc/self/ns/mnt")));
    match (its, ours) {
        (Ok(its), Ok(ours)) if its != ours => Ok(namespace.into()),
        (Ok(_), Ok(_)) => Err(NamespaceError::NoNamespace),
        (Err(error), _) | (_, Err(error)) => Err(failed("look at its mount namespace", error)),
    }
}

/// Nodes made by mknod cannot be opened on file systems that a user namespace mounted (mount(2)).
fn has_user_namespace(pid: i32) -> io::Result<bool> {
    let inode = |who: &str| fs::metadata(format!("/proc/{who}/ns/user")).map(|metadata| metadata.ino());
    Ok(inode(&pid.to_string())? != inode("self")?)
}

/// A copy of the mount at `source`, attached nowhere, without what is mounted below it.
fn detached(source: &Path, attributes: u64) -> Result<OwnedFd, NamespaceError> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let open = || {
        let mount = open_tree(CWD, source, flags)?;
        setattr::set(&mount, attributes)?;
        Ok::<_, io::Error>(mount)
    };
    open().map_err(|error| failed(format!("take {} from the host", super::shown(source)), error))
}

/// An empty read-only directory, mounted nowhere.
fn empty() -> io::Result<OwnedFd> {
    let tmpfs = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&tmpfs)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    Ok(fsmount(&tmpfs, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}
