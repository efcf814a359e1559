//! Attaches a container's mounts and nodes inside its mount namespace: only by descriptor, and never where the host
//! would see them.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::libc::dev_t;
use nix::sys::stat::{FchmodatFlags, Mode, SFlag, fchmodat, fstat, fstatat, makedev, mknodat};
use nix::sys::statfs::{
    CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC, FsType, PROC_SUPER_MAGIC, SYSFS_MAGIC, fstatfs,
};
use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
use rustix::mount::{MoveMountFlags, move_mount};

use super::find_or_create::{Kind, kind, name_of, place};
use super::host_sources::HostSide;
use super::{NamespaceError, failed, shown};
use crate::fs::{open_in, open_root};
use crate::inventory::Node;

/// The container's root filesystem, seen from its own mount namespace.
pub(super) struct Rootfs<'a> {
    root: OwnedFd,
    host: &'a HostSide,
}

impl<'a> Rootfs<'a> {
    /// runc and crun run these hooks before `pivot_root`: the rootfs is at its path on the host. Where a
    /// runtime has changed the root already, it is /.
    pub fn find(path: &Path, host: &'a HostSide) -> Result<Self, NamespaceError> {
        for candidate in [path, Path::new("/")] {
            let Ok(root) = open_root(candidate) else { continue };
            let is_it = fstat(&root)
                .is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (host.rootfs.st_dev, host.rootfs.st_ino));
            if is_it {
                return Ok(Self { root, host });
            }
        }
        Err(NamespaceError::Rootfs(path.to_owned()))
    }

    /// Attaches the detached `mount` at `path`, which is made if need be.
    pub fn mount(&self, mount: &OwnedFd, path: &Path) -> Result<(), NamespaceError> {
        // Not knowing it, one could leave an empty file in the image where the next container needs a directory.
        let found =
            fstat(mount).map_err(|error| failed(format!("examine what {} will be", shown(path)), error))?;
        let is_directory = kind(found.st_mode) == SFlag::S_IFDIR;
        let wanted = if is_directory { Kind::Directory } else { Kind::File };
        let target = self
            .as_owner(|| place(&self.root, path, wanted))
            .map_err(|error| failed(format!("make the mount point {}", shown(path)), error))?;
        if is_of_the_kernel(&target) {
            return Err(NamespaceError::Kernel(path.to_owned()));
        }
        let target = if is_directory { target } else { self.open_itself(path)? };
        self.attach(mount, &target, path)
    }

    /// The file at `path`; if that is a link, the link, so that the image's file to which it leads is not covered.
    fn open_itself(&self, path: &Path) -> Result<OwnedFd, NamespaceError> {
        let found = open_in(&self.root, path, OFlag::O_NOFOLLOW)
            .map_err(|error| failed(format!("look at the mount point {}", shown(path)), error))?;
        if is_of_the_kernel(&found) { Err(NamespaceError::Kernel(path.to_owned())) } else { Ok(found) }
    }

    /// Covers `path`, a directory of the kernel's own; without one there is nothing to hide.
    pub fn mask(&self, mount: &OwnedFd, path: &Path) -> Result<(), NamespaceError> {
        match open_in(&self.root, path, OFlag::O_DIRECTORY) {
            Ok(target) => self.attach(mount, &target, path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(failed(format!("hide {}", shown(path)), error)),
        }
    }

    /// Creates the device node with access for all users. The device cgroup decides who may open it.
    pub fn make_node(&self, node: &Node) -> Result<(), NamespaceError> {
        let make = || {
            let (dir, name) = (node.path.parent().ok_or(Errno::EINVAL)?, name_of(&node.path)?);
            let dir = place(&self.root, dir, Kind::Directory)?;
            let device = makedev(node.major.into(), node.minor.into());
            match mknodat(&dir, name, SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), device) {
                Ok(()) => open_to_all(&self.host.proc, &dir, name, device),
                Err(Errno::EEXIST) if is_node(&dir, name, device) => Ok(()),
                Err(error) => Err(io::Error::from(error)),
            }
        };
        match make() {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(NamespaceError::Occupied(node.path.clone()))
            }
            done => done.map_err(|error| failed(format!("make the node {}", shown(&node.path)), error)),
        }
    }

    fn attach(&self, mount: &OwnedFd, target: &OwnedFd, path: &Path) -> Result<(), NamespaceError> {
        let attaching = |error| failed(format!("mount {}", shown(path)), error);
        if self.is_shared(target).map_err(attaching)? {
            return Err(NamespaceError::Shared(path.to_owned()));
        }
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(mount, "", target, "", flags).map_err(|error| attaching(error.into()))
    }

    /// Whether mounts made at `target` would appear in other namespaces (`mount_namespaces(7)`).
    fn is_shared(&self, target: &OwnedFd) -> io::Result<bool> {
        let info = self.proc(&format!("self/fdinfo/{}", target.as_raw_fd()))?;
        let id =
            info.lines().find_map(|line| line.strip_prefix("mnt_id:")).map(str::trim).unwrap_or_default();
        let table = self.proc("self/mountinfo")?;
        let line = table.lines().find(|line| line.split(' ').next() == Some(id));
        let optional = line.ok_or(Errno::ENOENT)?.split(' ').skip(6).take_while(|field| *field != "-");
        Ok(optional.into_iter().any(|field| field.starts_with("shared:")))
    }

    /// A file of our own PID namespace's /proc, wherever we are.
    fn proc(&self, path: &str) -> io::Result<String> {
        let fd = openat(&self.host.proc, path, OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?;
        let mut text = String::new();
        File::from(fd).read_to_string(&mut text)?;
        Ok(text)
    }

    /// Does `make` as the root of the container's user namespace, as its runtime would.
    fn as_owner<T>(&self, make: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        match self.host.owner {
            Some((uid, gid)) => with_fs_ids(uid, gid, make),
            None => make(),
        }
    }
}

/// Does `make` with these ids for the file system, and refuses where they, or those before, cannot be had.
fn with_fs_ids<T>(uid: Uid, gid: Gid, make: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let before = fs_ids();
    let result = set_fs_ids(uid, gid).and_then(|()| make());
    set_fs_ids(before.0, before.1)?;
    result
}

/// Neither call reports a failure, so the ids are read afterwards (setfsuid(2), "BUGS").
fn set_fs_ids(uid: Uid, gid: Gid) -> io::Result<()> {
    setfsgid(gid);
    setfsuid(uid);
    if fs_ids() == (uid, gid) {
        return Ok(());
    }
    Err(io::Error::other(format!("the kernel does not let us act as uid {uid} and gid {gid} there")))
}

/// With invalid ids the call changes nothing and returns the present ids.
fn fs_ids() -> (Uid, Gid) {
    (setfsuid(Uid::from_raw(u32::MAX)), setfsgid(Gid::from_raw(u32::MAX)))
}

/// Lets everybody open the node that was just made as `name`, whatever our umask is. By its descriptor, because somebody
/// may have put a link in its place.
fn open_to_all(proc: &OwnedFd, dir: &OwnedFd, name: &std::ffi::OsStr, device: dev_t) -> io::Result<()> {
    let node = openat(dir, name, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty())?;
    let found = fstat(&node)?;
    if kind(found.st_mode) != SFlag::S_IFCHR || found.st_rdev != device {
        return Err(Errno::EEXIST.into());
    }
    // fchmod(2) does not take a descriptor of O_PATH.
    let path = format!("self/fd/{}", node.as_raw_fd());
    Ok(fchmodat(proc, path.as_str(), Mode::from_bits_truncate(0o666), FchmodatFlags::FollowSymlink)?)
}

fn is_node(dir: &OwnedFd, name: &std::ffi::OsStr, device: dev_t) -> bool {
    fstatat(dir, name, AtFlags::AT_SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| kind(stat.st_mode) == SFlag::S_IFCHR && stat.st_rdev == device)
}

/// File systems whose files are the kernel's: a mount over one could change the runtime's behaviour.
fn is_of_the_kernel(target: impl AsFd) -> bool {
    const KERNEL: [FsType; 4] = [PROC_SUPER_MAGIC, SYSFS_MAGIC, CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC];
    fstatfs(target).map_or(true, |stat| KERNEL.contains(&stat.filesystem_type()))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    use super::*;

    /// Runs `work` in a thread, because file system ids and capabilities belong to a thread.
    fn in_a_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
        std::thread::spawn(work).join().unwrap()
    }

    #[test]
    fn nothing_is_made_as_somebody_whom_we_cannot_act_as() {
        let refused = in_a_thread(|| {
            let mut sets = capabilities(None).unwrap();
            let ids = CapabilitySet::SETUID | CapabilitySet::SETGID;
            (sets.effective, sets.permitted) = (sets.effective - ids, sets.permitted - ids);
            set_capabilities(None, sets).unwrap();
            with_fs_ids(Uid::from_raw(4321), Gid::from_raw(4321), || -> io::Result<()> {
                panic!("it is made")
            })
        });
        let line = "the kernel does not let us act as uid 4321 and gid 4321 there";
        assert_eq!(refused.unwrap_err().to_string(), line);
    }

    #[test]
    fn a_link_in_the_place_of_a_node_that_was_just_made_is_not_followed() {
        if !Uid::effective().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (precious, name) = (dir.path().join("precious"), std::ffi::OsStr::new("node"));
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        std::fs::write(&precious, "").unwrap();
        std::fs::set_permissions(&precious, Permissions::from_mode(0o600)).unwrap();
        let (proc, opened) = (open_root(Path::new("/proc")).unwrap(), open_root(dir.path()).unwrap());
        let null = makedev(1, 3);
        let open_all = || open_to_all(&proc, &opened, name, null);
        std::os::unix::fs::symlink(&precious, dir.path().join(name)).unwrap();
        assert_eq!(open_all().unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(mode(&precious), 0o600);
        std::fs::remove_file(dir.path().join(name)).unwrap();
        mknodat(&opened, name, SFlag::S_IFCHR, Mode::S_IRUSR, null).unwrap();
        open_all().unwrap();
        assert_eq!(mode(&dir.path().join(name)), 0o666);
    }

    #[test]
    fn the_ids_before_come_back() {
        if !Uid::effective().is_root() {
            return;
        }
        let (within, after) = in_a_thread(|| {
            let within = with_fs_ids(Uid::from_raw(4321), Gid::from_raw(1234), || Ok(fs_ids())).unwrap();
            (within, fs_ids())
        });
        assert_eq!(within, (Uid::from_raw(4321), Gid::from_raw(1234)));
        assert_eq!(after, (Uid::effective(), Gid::effective()));
    }
}
