//! Opens the host's files before a container's namespace is entered: the namespace itself, and every source
//! as a detached mount. Sources are always paths on the host.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use nix::libc;
use nix::sys::stat::{FileStat, fstat};
use nix::unistd::{Gid, Uid};
use rustix::fs::CWD;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, OpenTreeFlags, fsconfig_create, fsmount, fsopen, open_tree,
};

use super::{Live, NamespaceError, failed};
use crate::fs::open_root;
use crate::grant::Grant;

/// For files and directories.
const READ_ONLY: u64 = libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
/// For device nodes, which `nodev` would make unusable.
const NODE: u64 = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC;

/// Descriptors that were opened on the host.
pub(super) struct HostSide {
    /// The container's mount namespace.
    pub namespace: OwnedFd,
    /// The container's rootfs as the host sees it. It distinguishes the rootfs from anything else at the same path.
    pub rootfs: FileStat,
    /// /proc of this process's PID namespace; the container has another one.
    pub proc: OwnedFd,
    /// If the container has a user namespace: the uid and gid of its root on the host. Files created on file systems
    /// that were mounted in the namespace must belong to one of its users.
    pub owner: Option<(Uid, Gid)>,
    /// One for each node of the grant; `None`: the node is created by mknod.
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
        let owner = owner(container.init.pid)?;
        let nodes = grant.nodes.iter().map(|node| owner.map(|_| detached(&node.source, NODE)).transpose());
        let mounts = grant.mounts.iter().map(|mount| detached(&mount.source, READ_ONLY));
        let masks = grant.masked_paths.iter().map(|_| empty());
        Ok(Self {
            namespace,
            rootfs,
            proc,
            owner,
            nodes: nodes.collect::<Result<_, _>>()?,
            mounts: mounts.collect::<Result<_, _>>()?,
            masks: masks.collect::<Result<_, _>>().map_err(|error| failed("make an empty mount", error))?,
        })
    }
}

/// The mount namespace of the container's first process. Fails if another process has its pid by now.
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

/// `None` if the container has no user namespace of its own. In one, nodes created by mknod could not be opened
/// (mount(2)).
fn owner(pid: i32) -> Result<Option<(Uid, Gid)>, NamespaceError> {
    let owner = || {
        let inode = |who: &str| fs::metadata(format!("/proc/{who}/ns/user")).map(|metadata| metadata.ino());
        if inode(&pid.to_string())? == inode("self")? {
            return Ok(None);
        }
        let root = |map: &str| root_of(&fs::read_to_string(format!("/proc/{pid}/{map}"))?);
        Ok(Some((Uid::from_raw(root("uid_map")?), Gid::from_raw(root("gid_map")?))))
    };
    owner().map_err(|error: io::Error| failed("read its user namespace", error))
}

/// The id on the host of the namespace's id 0 (`user_namespaces(7)`, "User and group ID mappings").
fn root_of(map: &str) -> io::Result<u32> {
    let outside = |line: &str| {
        let mut numbers = line.split_whitespace();
        (numbers.next() == Some("0")).then(|| numbers.next()?.parse().ok())?
    };
    map.lines().find_map(outside).ok_or_else(|| io::Error::other("its root is nobody on the host"))
}

/// A copy of the mount at `source`, attached nowhere, without the mounts below it.
fn detached(source: &Path, attributes: u64) -> Result<OwnedFd, NamespaceError> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let open = || {
        let mount = open_tree(CWD, source, flags)?;
        set_attributes(&mount, attributes)?;
        Ok::<_, io::Error>(mount)
    };
    open().map_err(|error| failed(format!("take {} from the host", super::shown(source)), error))
}

/// Sets the attributes `set` (`MOUNT_ATTR_*`) on `mount` and takes it out of its peer group: `mount_setattr(2)`, for which
/// neither nix nor rustix has a function. ENOSYS before Linux 5.12.
#[allow(unsafe_code, reason = "one system call, wrapped here and nowhere else")]
fn set_attributes(mount: &OwnedFd, set: u64) -> io::Result<()> {
    let attributes =
        libc::mount_attr { attr_set: set, attr_clr: 0, propagation: libc::MS_PRIVATE, userns_fd: 0 };
    // SAFETY: the path is a C string that lives as long as the program, the structure outlives the call and
    // its true size is given; the kernel only reads both.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
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

#[cfg(test)]
mod tests {
    use super::root_of;

    #[test]
    fn the_root_of_a_user_namespace_is_found_among_its_mappings() {
        assert_eq!(root_of("         0     100000      65536\n").unwrap(), 100_000);
        assert_eq!(root_of("1 5 1\n0 7 1\n").unwrap(), 7);
        assert!(root_of("1 0 5\n").is_err());
        assert!(root_of("").is_err());
    }
}
