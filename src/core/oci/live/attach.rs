//! Attaches a container's mounts and nodes inside its mount namespace: only by descriptor, and never where the host
//! would see them.
//!
//! The kernel resolves mount points and directories as if the rootfs were / (openat2). Missing ones are created relative
//! to a descriptor, and all are returned as descriptors.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat, readlinkat};
use nix::libc::dev_t;
use nix::sys::stat::{FchmodatFlags, Mode, SFlag, fchmodat, fstat, fstatat, makedev, mkdirat, mknodat};
use nix::sys::statfs::{
    CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC, FsType, PROC_SUPER_MAGIC, SYSFS_MAGIC, fstatfs,
};
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchdir, setfsgid, setfsuid, unlinkat};
use rustix::fs::{StatxAttributes, StatxFlags, statx};
use rustix::mount::{MoveMountFlags, UnmountFlags, move_mount};

use super::{HostSide, NamespaceError, failed};
use crate::fs::{kind, open_in, open_root};
use crate::inventory::Node;
use crate::text::safe_path;

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

    /// That of a container that runs.
    pub const fn of(root: OwnedFd, host: &'a HostSide) -> Self {
        Self { root, host }
    }

    /// Attaches the detached `mount` at `path`, which is made if need be.
    pub fn mount(&self, mount: &OwnedFd, path: &Path) -> Result<(), NamespaceError> {
        // Not knowing it, one could leave an empty file in the image where the next container needs a directory.
        let found = fstat(mount)
            .map_err(|error| failed(format!("examine what {} will be", safe_path(path)), error))?;
        let is_directory = kind(found.st_mode) == SFlag::S_IFDIR;
        let wanted = if is_directory { Kind::Directory } else { Kind::File };
        let make = || place(&self.root, path, wanted);
        let target = self
            .as_owner(make)
            .map_err(|error| failed(format!("make the mount point {}", safe_path(path)), error))?;
        if is_of_the_kernel(&target) {
            return Err(NamespaceError::Kernel(path.to_owned()));
        }
        let target = if is_directory { target } else { self.open_itself(path)? };
        self.attach(mount, &target, path)
    }

    /// The file at `path`; if that is a link, the link, so that the image's file to which it leads is not covered.
    fn open_itself(&self, path: &Path) -> Result<OwnedFd, NamespaceError> {
        let found = open_in(&self.root, path, OFlag::O_NOFOLLOW)
            .map_err(|error| failed(format!("look at the mount point {}", safe_path(path)), error))?;
        if is_of_the_kernel(&found) { Err(NamespaceError::Kernel(path.to_owned())) } else { Ok(found) }
    }

    /// Covers `path`, a directory of the kernel's own; without one there is nothing to hide.
    pub fn mask(&self, mount: &OwnedFd, path: &Path) -> Result<(), NamespaceError> {
        match open_in(&self.root, path, OFlag::O_DIRECTORY) {
            Ok(target) => self.attach(mount, &target, path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(failed(format!("hide {}", safe_path(path)), error)),
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
            done => done.map_err(|error| failed(format!("make the node {}", safe_path(&node.path)), error)),
        }
    }

    /// Whether the container has the node.
    pub fn has(&self, node: &Node) -> bool {
        find_node(&self.root, node).is_some()
    }

    /// Takes the node away: in a user namespace a mount, and the file that it lies on. Where the container has the
    /// directory `host`, by device and inode, the node is the host's own and stays.
    pub fn remove_node(&self, node: &Node, host: Option<(u64, u64)>) -> Result<(), NamespaceError> {
        let Some((dir, name)) = find_node(&self.root, node) else { return Ok(()) };
        let unlink = || Ok(unlinkat(&dir, name, UnlinkatFlags::NoRemoveDir)?);
        let remove = || {
            let found = fstat(&dir)?;
            if host == Some((found.st_dev, found.st_ino)) {
                return Ok(());
            }
            match (unmount(&dir, name)?, self.as_owner(unlink)) {
                (false, Err(error)) => Err(error),
                _ => Ok(()),
            }
        };
        remove().map_err(|error| failed(format!("take away the node {}", safe_path(&node.path)), error))
    }

    /// Does `work` as the root of the container's user namespace, as its runtime would: no more of the host's is in its reach.
    fn as_owner<T>(&self, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        match self.host.owner {
            Some((uid, gid)) => with_fs_ids(uid, gid, work),
            None => work(),
        }
    }

    /// Whether something covers `path`.
    pub fn is_covered(&self, path: &Path) -> bool {
        let (Some(parent), Ok(name)) = (path.parent(), name_of(path)) else { return false };
        open_in(&self.root, parent, OFlag::O_DIRECTORY)
            .and_then(|dir| is_mounted(&dir, name))
            .unwrap_or(false)
    }

    /// Uncovers `path`, which is a directory of the kernel's own, if it is covered.
    pub fn unmask(&self, path: &Path) -> Result<(), NamespaceError> {
        let (Some(parent), Ok(name)) = (path.parent(), name_of(path)) else { return Ok(()) };
        match open_in(&self.root, parent, OFlag::O_DIRECTORY).and_then(|dir| unmount(&dir, name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failed(format!("uncover {}", safe_path(path)), error))
            }
            _ => Ok(()),
        }
    }

    fn attach(&self, mount: &OwnedFd, target: &OwnedFd, path: &Path) -> Result<(), NamespaceError> {
        let attaching = |error| failed(format!("mount {}", safe_path(path)), error);
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
fn open_to_all(proc: &OwnedFd, dir: &OwnedFd, name: &OsStr, device: dev_t) -> io::Result<()> {
    let node = openat(dir, name, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty())?;
    let found = fstat(&node)?;
    if kind(found.st_mode) != SFlag::S_IFCHR || found.st_rdev != device {
        return Err(Errno::EEXIST.into());
    }
    // fchmod(2) does not take a descriptor of O_PATH.
    let path = format!("self/fd/{}", node.as_raw_fd());
    Ok(fchmodat(proc, path.as_str(), Mode::from_bits_truncate(0o666), FchmodatFlags::FollowSymlink)?)
}

fn is_node(dir: &OwnedFd, name: &OsStr, device: dev_t) -> bool {
    fstatat(dir, name, AtFlags::AT_SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| kind(stat.st_mode) == SFlag::S_IFCHR && stat.st_rdev == device)
}

/// The directory and the name of `node`, if it is there.
pub(super) fn find_node<'n>(root: &OwnedFd, node: &'n Node) -> Option<(OwnedFd, &'n OsStr)> {
    let dir = open_in(root, node.path.parent()?, OFlag::O_DIRECTORY).ok()?;
    let name = name_of(&node.path).ok()?;
    is_node(&dir, name, makedev(node.major.into(), node.minor.into())).then_some((dir, name))
}

/// How many mounts may lie on each other.
const MOST_MOUNTS: usize = 8;

/// Whether a mount lies at `name` in `dir`.
fn is_mounted(dir: &OwnedFd, name: &OsStr) -> io::Result<bool> {
    let found = statx(dir, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS)?;
    Ok(found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

/// Takes away every mount at `name` in `dir`. Whether there was one.
fn unmount(dir: &OwnedFd, name: &OsStr) -> io::Result<bool> {
    for count in 0..MOST_MOUNTS {
        if !is_mounted(dir, name)? {
            return Ok(count > 0);
        }
        // There is no umount(2) by descriptor, and the container's /proc may lead anywhere.
        fchdir(dir)?;
        rustix::mount::unmount(name, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?;
    }
    Err(Errno::EBUSY.into())
}

/// File systems whose files are the kernel's: a mount over one could change the runtime's behaviour.
fn is_of_the_kernel(target: impl AsFd) -> bool {
    const KERNEL: [FsType; 4] = [PROC_SUPER_MAGIC, SYSFS_MAGIC, CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC];
    fstatfs(target).map_or(true, |stat| KERNEL.contains(&stat.filesystem_type()))
}

/// How many links may lead to a mount point, and how many directories may have to be created for it.
const MOST_STEPS: usize = 40;

/// The type of a mount point.
#[derive(Clone, Copy, PartialEq)]
pub(in crate::oci) enum Kind {
    File,
    Directory,
}

/// The file or directory at `path`, created if it is missing.
pub(in crate::oci) fn place(root: &OwnedFd, path: &Path, wanted: Kind) -> io::Result<OwnedFd> {
    find_or_create(root, path, wanted, &mut 0)
}

/// [`place`], with the directories above it. The target of a dangling link is created inside the rootfs, as runc and crun do.
fn find_or_create(root: &OwnedFd, path: &Path, wanted: Kind, steps: &mut usize) -> io::Result<OwnedFd> {
    let mut path = path.to_owned();
    let flags = if wanted == Kind::Directory { OFlag::O_DIRECTORY } else { OFlag::empty() };
    while *steps < MOST_STEPS {
        *steps += 1;
        match open_in(root, &path, flags) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            found if wanted == Kind::Directory => return found,
            found => return found.and_then(not_directory),
        }
        let dir = find_or_create(root, path.parent().ok_or(Errno::EINVAL)?, Kind::Directory, steps)?;
        // By the directory's descriptor, because the path may lead elsewhere by now.
        let name = name_of(&path)?;
        let new = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_WRONLY | OFlag::O_CLOEXEC;
        let made = match wanted {
            Kind::File => openat(&dir, name, new, Mode::from_bits_truncate(0o644)).map(Some),
            Kind::Directory => mkdirat(&dir, name, Mode::from_bits_truncate(0o755)).map(|()| None),
        };
        match made {
            Ok(Some(file)) => return Ok(file),
            // It is opened as if it had been there.
            Ok(None) => {}
            Err(Errno::EEXIST) => match readlinkat(&dir, name) {
                Ok(link) => path = path.parent().unwrap_or(Path::new("/")).join(link),
                // Something else than a link is there by now, and is looked up again.
                Err(Errno::EINVAL) => {}
                Err(error) => return Err(error.into()),
            },
            Err(error) => return Err(error.into()),
        }
    }
    Err(Errno::ELOOP.into())
}

/// The last component.
fn name_of(path: &Path) -> io::Result<&OsStr> {
    Ok(path.file_name().ok_or(Errno::EINVAL)?)
}

fn not_directory(target: OwnedFd) -> io::Result<OwnedFd> {
    if kind(fstat(&target)?.st_mode) == SFlag::S_IFDIR { Err(Errno::EISDIR.into()) } else { Ok(target) }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use nix::mount::{MsFlags, mount};
    use nix::sched::{CloneFlags, unshare};
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    use super::super::empty;
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

    /// The host's side of a container that needs none of it.
    fn host_side(root: &OwnedFd, owner: Option<(Uid, Gid)>) -> HostSide {
        HostSide {
            namespace: open_root(Path::new("/")).unwrap(),
            rootfs: fstat(root).unwrap(),
            proc: open_root(Path::new("/proc")).unwrap(),
            owner,
            nodes: Vec::new(),
            mounts: Vec::new(),
            masks: Vec::new(),
        }
    }

    #[test]
    fn a_directory_is_hidden_from_a_running_container_and_shown_again() {
        if !Uid::effective().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let of_gpu = dir.path().join("gpus/0000:18:00.0");
        std::fs::create_dir_all(&of_gpu).unwrap();
        std::fs::write(of_gpu.join("information"), "").unwrap();
        in_a_thread(move || {
            unshare(CloneFlags::CLONE_NEWNS).unwrap();
            let none = None::<&str>;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
            let root = open_root(dir.path()).unwrap();
            // The thread alone has the new mount namespace.
            std::os::unix::fs::symlink("/proc/thread-self", dir.path().join("self")).unwrap();
            let host = HostSide { proc: open_root(dir.path()).unwrap(), ..host_side(&root, None) };
            let (rootfs, path) = (Rootfs::of(root, &host), Path::new("/gpus/0000:18:00.0"));
            for _ in 0..2 {
                assert!(!rootfs.is_covered(path) && of_gpu.join("information").exists());
                rootfs.mask(&empty().unwrap(), path).unwrap();
                assert!(rootfs.is_covered(path) && !of_gpu.join("information").exists());
                rootfs.unmask(path).unwrap();
                // As after a step that was cut short.
                rootfs.unmask(path).unwrap();
            }
            let gone = Path::new("/gpus/0000:00:00.0");
            rootfs.mask(&empty().unwrap(), gone).unwrap();
            rootfs.unmask(gone).unwrap();
            assert!(of_gpu.join("information").exists());
        });
    }

    #[test]
    fn a_node_is_taken_from_a_container_and_neither_from_the_host_nor_beyond_its_users_rights() {
        if !Uid::effective().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (dev, path) = (dir.path().join("dev"), dir.path().join("dev/null"));
        std::fs::create_dir(&dev).unwrap();
        mknodat(open_root(&dev).unwrap(), "null", SFlag::S_IFCHR, Mode::S_IRUSR, makedev(1, 3)).unwrap();
        let node = Node { path: "/dev/null".into(), major: 1, minor: 3 };
        let own = std::fs::metadata(&dev).map(|found| (found.dev(), found.ino())).unwrap();
        let remove = |owner, host| {
            let (node, root) = (node.clone(), open_root(dir.path()).unwrap());
            let removed = move || {
                let host_side = host_side(&root, owner);
                Rootfs::of(root, &host_side).remove_node(&node, host).is_ok()
            };
            (in_a_thread(removed), path.exists())
        };
        assert_eq!(remove(None, Some(own)), (true, true), "the host's");
        let user = Some((Uid::from_raw(4321), Gid::from_raw(1234)));
        assert_eq!(remove(user, None), (false, true), "the user may not write there");
        assert_eq!(remove(None, None), (true, false));
        assert_eq!(remove(None, None), (true, false), "it is gone");
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

#[cfg(test)]
mod find_or_create_tests {
    use std::fs;
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicBool, Ordering};

    use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
    use tempfile::TempDir;

    use super::*;
    use crate::fs::open_root;

    /// A rootfs beside a directory that represents the host.
    fn rootfs() -> (TempDir, PathBuf, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let (inside, outside) = (dir.path().join("rootfs"), dir.path().join("host"));
        fs::create_dir_all(inside.join("usr/lib")).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("file"), "").unwrap();
        (dir, inside, outside)
    }

    fn path_of(fd: &OwnedFd) -> PathBuf {
        fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap()
    }

    #[test]
    fn links_are_followed_inside_the_rootfs_and_their_ends_made_there() {
        let (_dir, inside, outside) = rootfs();
        let root = open_root(&inside).unwrap();
        let host = outside.display().to_string();
        let cases = [
            ("usr/lib/plain.so", None, Kind::File, "usr/lib/plain.so"),
            ("usr/lib/far/off/dir", None, Kind::Directory, "usr/lib/far/off/dir"),
            ("usr/lib/abs.so", Some("/opt/new/abs.so"), Kind::File, "opt/new/abs.so"),
            ("usr/lib/rel.so", Some("../../../../opt/rel.so"), Kind::File, "opt/rel.so"),
            ("run", Some("/var/run"), Kind::Directory, "var/run"),
            ("out", Some(host.as_str()), Kind::Directory, host.trim_start_matches('/')),
            ("twice", Some("out"), Kind::Directory, host.trim_start_matches('/')),
        ];
        for (path, link, kind, end) in cases {
            if let Some(link) = link {
                symlink(link, inside.join(path)).unwrap();
            }
            let made = place(&root, &Path::new("/").join(path), kind).unwrap();
            assert_eq!(path_of(&made), inside.join(end), "{path}");
            let again = place(&root, &Path::new("/").join(path), kind).unwrap();
            assert_eq!(path_of(&again), inside.join(end), "{path}");
        }
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1, "nothing new on the host");
    }

    #[test]
    fn a_path_that_cannot_be_a_mount_point_is_an_error() {
        let (_dir, inside, _) = rootfs();
        let root = open_root(&inside).unwrap();
        symlink("loop", inside.join("loop")).unwrap();
        symlink("/proc/self/root", inside.join("magic")).unwrap();
        fs::write(inside.join("file"), "").unwrap();
        let fails = |path: &str, kind| place(&root, Path::new(path), kind).unwrap_err().raw_os_error();
        assert_eq!(fails("/usr/lib", Kind::File), Some(nix::libc::EISDIR));
        assert_eq!(fails("/file/x", Kind::File), Some(nix::libc::ENOTDIR));
        assert_eq!(fails("/file", Kind::Directory), Some(nix::libc::ENOTDIR));
        assert_eq!(fails("/loop", Kind::File), Some(nix::libc::ELOOP));
        assert_eq!(fails("/loop/x", Kind::Directory), Some(nix::libc::ELOOP));
        let deep = format!("/{}", "d/".repeat(200));
        assert_eq!(fails(&deep, Kind::Directory), Some(nix::libc::ELOOP));
    }

    /// As in CVE-2025-23359: while the path is looked up, another process swaps its parts for links to the
    /// host.
    #[test]
    fn a_path_that_is_swapped_meanwhile_never_leads_out() {
        let (_dir, inside, outside) = rootfs();
        let root = open_root(&inside).unwrap();
        symlink(&outside, inside.join("usr/evil")).unwrap();
        let (good, evil) = (inside.join("usr/lib"), inside.join("usr/evil"));
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    renameat2(AT_FDCWD, &good, AT_FDCWD, &evil, RenameFlags::RENAME_EXCHANGE).unwrap();
                }
            });
            for round in 0..10_000 {
                let path = format!("/usr/lib/{}", if round % 2 == 0 { "file" } else { "new" });
                if let Ok(made) = place(&root, Path::new(&path), Kind::File) {
                    let path = path_of(&made);
                    assert!(path.starts_with(&inside), "round {round}: {}", path.display());
                }
                if outside.join("new").exists() {
                    done.store(true, Ordering::Relaxed);
                    panic!("round {round}: made on the host");
                }
                let _ = fs::remove_file(good.join("new"));
                let _ = fs::remove_file(evil.join("new"));
            }
            done.store(true, Ordering::Relaxed);
        });
    }
}
