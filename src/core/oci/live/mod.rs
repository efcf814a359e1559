//! Applies a [`Grant`] to a live container whose namespaces exist and whose own program does not run yet: the stage of
//! prestart and createRuntime hooks.
//!
//! Everything from the host is opened on the host: the namespace itself, and every source as a detached mount. Then this process enters the container's mount
//! namespace and attaches the mounts to descriptors that were resolved inside the rootfs. No path of the image is used
//! twice.

mod attach;
mod bpf;
mod cgroup;
mod running;

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::libc;
use nix::sched::{CloneFlags, setns};
use nix::sys::stat::{FileStat, fstat};
use nix::unistd::{Gid, Uid};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, OpenTreeFlags, fsconfig_create, fsmount, fsopen, open_tree,
};

use crate::fs::open_root;
use crate::grant::Grant;
use crate::inventory::Inventory;
use crate::ledger::Lease;
use crate::process::Process;
use crate::text::safe_path;
use attach::Rootfs;

pub(super) use attach::{Kind, place};
pub use cgroup::systemctl;
pub use running::set_gpus;

/// Whether nodes may be read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Open,
    Closed,
}

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
    #[error("it has no mount namespace of its own; fix: add one of type `mount` to its config.json")]
    NoNamespace,
    /// It is not in the state that the specification requires at this stage.
    #[error(
        "its root filesystem {} is not the one in its mount namespace; fix: start it with sublet-runtime",
        safe_path(.0)
    )]
    Rootfs(PathBuf),
    /// A mount would show on the host.
    #[error("{} is on a mount shared with the host; fix: use rslave or rprivate for that volume", safe_path(.0))]
    Shared(PathBuf),
    /// The image leads a mount point into /proc or the like.
    #[error("the image's {} is a link into a file system of the kernel; fix: remove it", safe_path(.0))]
    Kernel(PathBuf),
    /// The image has something else at the path of a node.
    #[error("the container has something else at {}; fix: remove it from the image", safe_path(.0))]
    Occupied(PathBuf),
    /// systemd refused: the container's scope, and systemctl's last words.
    #[error("systemd does not allow the devices for unit {0}: {1}")]
    Systemd(String, String),
    /// A system call failed, in an attempt such as "mount /usr/lib/libcuda.so.1".
    #[error("cannot {}: {}{}", .0, .1, hint(.1))]
    Io(String, #[source] io::Error),
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOSYS) => {
            " (the prestart hook needs Linux 5.12; start the container with sublet-runtime)"
        }
        Some(libc::EROFS) => " (read-only root filesystem: create the mount point in the image)",
        _ => "",
    }
}

/// `error`, from `attempt`.
fn failed(attempt: impl Into<String>, error: impl Into<io::Error>) -> NamespaceError {
    NamespaceError::Io(attempt.into(), error.into())
}

/// Gives `container` the nodes, mounts and masks of `grant`, and opens its device cgroup for the nodes.
///
/// This process enters another mount namespace and comes back: it must have one thread only.
///
/// # Errors
/// Some of the grant may then be missing, so the container must not start.
pub fn apply(grant: &Grant, container: Live<'_>) -> Result<(), NamespaceError> {
    let host = HostSide::open(grant, container.init, open_root(container.rootfs))?;
    let nodes: Vec<_> = grant.nodes.iter().map(|granted| &granted.node).collect();
    cgroup::set_devices(container.init.pid, &nodes, Access::Open)?;
    within(&host, || Rootfs::find(container.rootfs, &host).and_then(|rootfs| attach(grant, &host, &rootfs)))
}

/// Does `work` in the container's mount namespace.
fn within(host: &HostSide, work: impl FnOnce() -> Result<(), NamespaceError>) -> Result<(), NamespaceError> {
    let entering = |error: io::Error| failed("enter its mount namespace", error);
    let home = File::open("/proc/self/ns/mnt").map_err(entering)?;
    // The kernel refuses processes with several threads (setns(2)).
    setns(&host.namespace, CloneFlags::CLONE_NEWNS).map_err(|errno| entering(errno.into()))?;
    let done = work();
    // A process that cannot return ends, because it would mistake the container's files for the host's. The container then
    // does not start, and its lease ends with it.
    if setns(&home, CloneFlags::CLONE_NEWNS).is_err() {
        std::process::abort();
    }
    done
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
        safe_path(&closed.path)
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

/// For files and directories.
const READ_ONLY: u64 = libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
/// For device nodes, which `nodev` would make unusable.
const NODE: u64 = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC;

/// Descriptors that were opened on the host.
struct HostSide {
    /// The container's mount namespace.
    namespace: OwnedFd,
    /// The container's rootfs as the host sees it. It distinguishes the rootfs from anything else at the same path.
    rootfs: FileStat,
    /// /proc of this process's PID namespace; the container has another one.
    proc: OwnedFd,
    /// If the container has a user namespace: the uid and gid of its root on the host. Files created on file systems
    /// that were mounted in the namespace must belong to one of its users.
    owner: Option<(Uid, Gid)>,
    /// One for each node of the grant; `None`: the node is created by mknod.
    nodes: Vec<Option<OwnedFd>>,
    /// One for each mount of the grant.
    mounts: Vec<OwnedFd>,
    /// One for each masked path.
    masks: Vec<OwnedFd>,
}

impl HostSide {
    fn open(grant: &Grant, init: Process, rootfs: io::Result<OwnedFd>) -> Result<Self, NamespaceError> {
        let namespace = namespace(init)?;
        let rootfs = rootfs
            .and_then(|fd| Ok(fstat(&fd)?))
            .map_err(|error| failed("look at its root filesystem", error))?;
        let proc = open_root(Path::new("/proc")).map_err(|error| failed("open /proc", error))?;
        let owner = owner(init.pid)?;
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
fn namespace(init: Process) -> Result<OwnedFd, NamespaceError> {
    let pid = init.pid;
    let namespace = File::open(format!("/proc/{pid}/ns/mnt"));
    if !init.is_alive() {
        return Err(NamespaceError::Gone(pid));
    }
    let namespace = namespace.map_err(|error| failed("open its mount namespace", error))?;
    let looking = |error: io::Error| failed("look at its mount namespace", error);
    let its = namespace.metadata().map_err(looking)?.ino();
    let ours = fs::metadata("/proc/self/ns/mnt").map_err(looking)?.ino();
    if its == ours { Err(NamespaceError::NoNamespace) } else { Ok(namespace.into()) }
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
        let mount = open_tree(rustix::fs::CWD, source, flags)?;
        set_attributes(&mount, attributes)?;
        Ok::<_, io::Error>(mount)
    };
    open().map_err(|error| failed(format!("take {} from the host", safe_path(source)), error))
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
