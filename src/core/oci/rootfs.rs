//! The file tree of a container that does not exist yet: its rootfs and the volumes over it. The kernel resolves every
//! path of the image inside the rootfs (openat2, `RESOLVE_IN_ROOT`, no magic links). A found file is then used by its
//! descriptor, never by its path again.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;

use nix::errno::Errno;
use nix::fcntl::{OFlag, ResolveFlag, open, readlinkat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat};
use nix::sys::statvfs::{FsFlags, fstatvfs};
use serde_json::Value;

use super::ImageError;
use super::conflict::{entries, is_bind, plain, text};
use super::container_root::ContainerRoot;
use super::live::{Kind, place};
use crate::fs::regular_file;
use crate::fs::{
    ROUNDS, host_path, is_of_the_image, open_below, open_in, open_root, open_without_links, path_in_root,
};
use crate::ledger::VolumeFiles;

/// The tree, opened once for all that is found out of a container before it is created.
pub struct Tree {
    rootfs: OwnedFd,
    /// The path of `rootfs` on the host, as the kernel reports it.
    host_path: OnceCell<PathBuf>,
    volumes: Vec<Volume>,
    /// The ids that create mount points. That of the host leaves all of them to the container's runtime.
    pub(super) root: ContainerRoot,
    /// Results of look-ups: most paths are looked up several times.
    known: RefCell<BTreeMap<PathBuf, Result<Rc<Found>, i32>>>,
}

/// Something mounted over a part of the rootfs.
pub(super) struct Volume {
    destination: PathBuf,
    /// On the host; `None`: a file system of its own, which is assumed to be empty.
    source: Option<PathBuf>,
    read_only: bool,
    /// Mounts made in it appear on the host too (`mount_namespaces(7)`).
    shared: bool,
}

/// A file or directory that exists.
pub(super) struct Found {
    /// Opened with `O_PATH`, which neither reads the file nor has an effect on a device or a FIFO.
    fd: OwnedFd,
    /// Its path in the container, with links resolved.
    pub path: PathBuf,
    /// Whether it belongs to a volume and not to the rootfs.
    pub in_volume: bool,
    /// Whether it belongs to a volume that is mounted read-only.
    in_read_only_volume: bool,
    // Most that is found is only found.
    stat: OnceCell<FileStat>,
    is_read_only: OnceCell<bool>,
}

impl Tree {
    /// That of the container with this config.json, at `rootfs`.
    ///
    /// # Errors
    /// [`ImageError::Rootfs`].
    pub fn open(spec: &Value, rootfs: &Path) -> Result<Self, ImageError> {
        let failed = |error| ImageError::Rootfs(rootfs.to_owned(), error);
        let (fd, host_path) = (open_root(rootfs).map_err(failed)?, OnceCell::new());
        let (root, known) = (ContainerRoot::of(spec), RefCell::default());
        let mut tree = Self { rootfs: fd, host_path, volumes: Vec::new(), root, known };
        let volumes = entries(spec, "/mounts").iter().filter_map(|mount| tree.volume(mount).transpose());
        tree.volumes = volumes.collect::<io::Result<_>>().map_err(failed)?;
        Ok(tree)
    }

    /// A mount of the spec, with its destination resolved as the runtime will resolve it.
    fn volume(&self, mount: &Value) -> io::Result<Option<Volume>> {
        let Some(destination) = text(mount, "destination").map(plain) else { return Ok(None) };
        let options: Vec<&str> = entries(mount, "/options").iter().filter_map(Value::as_str).collect();
        // Of options that exclude each other the last one counts. `rro` is `ro` for mounts below, too
        // (runtime-spec, config.md, "Linux mount options").
        let is_last = |yes: &str, no: &str| {
            let last = options.iter().rev().find(|option| [yes, no].contains(option));
            last.is_some_and(|option| *option == yes)
        };
        let source = text(mount, "source").filter(|_| is_bind(mount));
        Ok(Some(Volume {
            destination: self.without_links(destination)?,
            source: source.map(PathBuf::from),
            read_only: is_last("ro", "rw") || is_last("rro", "rrw"),
            shared: options.iter().any(|option| ["shared", "rshared"].contains(option)),
        }))
    }

    /// `path` in the rootfs, with links resolved; as it is, if nothing is there.
    fn without_links(&self, path: PathBuf) -> io::Result<PathBuf> {
        // Most engines' mounts are directly below the root, on no link (EINVAL of readlink(2)).
        let name = path.file_name().filter(|_| path.parent() == Some(Path::new("/")));
        let is_link =
            |name: &OsStr| !matches!(readlinkat(&self.rootfs, name), Err(Errno::EINVAL | Errno::ENOENT));
        if !name.is_none_or(is_link) {
            return Ok(path);
        }
        match self.in_rootfs(&path) {
            Err(error) if is_of_the_image(&error) => Ok(path),
            found => found.map(|(_, path)| path),
        }
    }

    /// The volume that `path`, which contains no links, lies in, and the path in it. Later mounts cover earlier ones.
    pub(super) fn covering<'a>(&self, path: &'a Path) -> Option<(&Volume, &'a Path)> {
        let covers = |volume: &'_ Volume| path.strip_prefix(&volume.destination).ok();
        self.volumes.iter().rev().find_map(|volume| covers(volume).map(|below| (volume, below)))
    }

    /// [`Tree::find`]; `None`: nothing is there.
    ///
    /// # Errors
    /// It cannot be examined.
    pub(super) fn find_if_present(&self, path: &Path) -> io::Result<Option<Rc<Found>>> {
        match self.find(path) {
            Ok(found) => Ok(Some(found)),
            Err(error) if is_of_the_image(&error) && error.kind() != io::ErrorKind::PermissionDenied => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The first of `path` and the directories above it that is there.
    fn nearest<'p>(&self, path: &'p Path) -> io::Result<Option<(Rc<Found>, &'p Path)>> {
        for above in path.ancestors() {
            if let Some(found) = self.find_if_present(above)? {
                return Ok(Some((found, above)));
            }
        }
        Ok(None)
    }

    /// The file at `path` (absolute, in the container), links followed.
    pub(super) fn find(&self, path: &Path) -> io::Result<Rc<Found>> {
        if let Some(known) = self.known.borrow().get(path) {
            return known.clone().map_err(io::Error::from_raw_os_error);
        }
        let found = self.open_path(path).map(Rc::new);
        let known = match &found {
            Ok(found) => Some(Ok(found.clone())),
            Err(error) => error.raw_os_error().filter(|_| is_of_the_image(error)).map(Err),
        };
        if let Some(known) = known {
            self.known.borrow_mut().insert(path.to_owned(), known);
        }
        found
    }

    fn open_path(&self, path: &Path) -> io::Result<Found> {
        let mut path = path.to_owned();
        for _ in 0..ROUNDS {
            if let Some((volume, below)) = self.covering(&path) {
                return in_volume(volume, below);
            }
            let (fd, real) = self.in_rootfs(&path)?;
            if self.covering(&real).is_none() {
                return Ok(Found::new(fd, real, None));
            }
            path = real;
        }
        Err(Errno::ELOOP.into())
    }

    /// The directory of a volume that has, or will have, the mount point `path`, and the path below that directory.
    /// `None`: the mount point is in no volume, and the path returned is that in the container.
    pub(super) fn place_in_volume(&self, path: &Path) -> io::Result<(Option<VolumeFiles>, PathBuf)> {
        let landing = self.creation_path(path)?;
        let place = landing.parent().map(|parent| self.nearest(parent)).transpose()?.flatten();
        let Some((directory, above)) = place.filter(|(found, _)| found.in_volume) else {
            return Ok((None, landing));
        };
        let stat = directory.stat()?;
        let below = landing.strip_prefix(above).unwrap_or(&landing).to_owned();
        let directory = host_path(&directory.fd)?;
        let place = VolumeFiles { directory, device: stat.st_dev, inode: stat.st_ino, files: Vec::new() };
        Ok((Some(place), below))
    }

    /// Whether nothing could be created at `path`, and whether `path` is in a volume.
    pub(super) fn place_for(&self, path: &Path) -> io::Result<(bool, bool)> {
        if let Some((volume, _)) = self.covering(path).filter(|(volume, _)| volume.source.is_none()) {
            return Ok((volume.read_only, true));
        }
        match path.parent().map(|parent| self.nearest(parent)).transpose()?.flatten() {
            Some((parent, _)) => Ok((parent.is_read_only()?, parent.in_volume)),
            None => Ok((false, false)),
        }
    }

    /// The directory in which the mount point `path` has to be created, and the path below it, where the container's root
    /// may not do that; `None`: nothing has to be created, or it may.
    pub(super) fn find_denied(&self, path: &Path) -> io::Result<Option<(Rc<Found>, PathBuf)>> {
        if self.root.is_hosts() || self.find_if_present(path)?.is_some() {
            return Ok(None);
        }
        let landing = self.creation_path(path)?;
        // A file system of the container's own.
        if self.covering(&landing).is_some_and(|(volume, _)| volume.source.is_none()) {
            return Ok(None);
        }
        let parent = landing.parent().map(|parent| self.nearest(parent)).transpose()?.flatten();
        let Some((directory, above)) = parent else { return Ok(None) };
        if self.root.may_create_in(&directory.fd, &directory.stat()?) {
            return Ok(None);
        }
        let below = Path::new("/").join(landing.strip_prefix(above).unwrap_or(&landing));
        Ok(Some((directory, below)))
    }

    /// Creates the mount point `path` where the container's runtime may not.
    pub(super) fn make(&self, path: &Path, kind: Kind) -> io::Result<()> {
        let Some((directory, below)) = self.find_denied(path)? else { return Ok(()) };
        self.known.borrow_mut().clear();
        place(&directory.fd, &below, kind).map(drop)
    }

    /// Whether a mount at `path` would, or could, appear on the host: `path` is in a shared volume, or behind a link
    /// that only the runtime can resolve.
    pub(super) fn is_shared(&self, path: &Path) -> io::Result<bool> {
        if !self.volumes.iter().any(|volume| volume.shared) {
            return Ok(false);
        }
        let Some((found, above)) = self.nearest(path)? else { return Ok(false) };
        let within = self.covering(&found.path).is_some_and(|(volume, _)| volume.shared);
        let missing = path.strip_prefix(above).ok().and_then(|below| below.components().next());
        let by_link = missing.map_or(Ok(None), |name| found.link(name.as_os_str()))?;
        Ok(within || by_link.is_some())
    }

    /// The path at which the runtime would create the missing part of `path`. Links are followed inside the rootfs, also
    /// dangling ones.
    pub(super) fn creation_path(&self, path: &Path) -> io::Result<PathBuf> {
        let mut path = path.to_owned();
        for _ in 0..ROUNDS {
            let Some((found, above)) = self.nearest(&path)? else { return Ok(path) };
            let missing = path.strip_prefix(above).unwrap_or(&path);
            let mut names = missing.components();
            match names.next().map_or(Ok(None), |name| found.link(name.as_os_str()))? {
                Some(target) => {
                    path = plain(&found.path.join(target).join(names.as_path()).to_string_lossy());
                }
                None => return Ok(found.path.join(missing)),
            }
        }
        Err(Errno::ELOOP.into())
    }

    /// The destinations of the spec's own mounts.
    pub(super) fn volumes(&self) -> impl Iterator<Item = &Path> {
        self.volumes.iter().map(|volume| volume.destination.as_path())
    }

    /// The file at `path`, and its path with links resolved, if it has any.
    fn in_rootfs(&self, path: &Path) -> io::Result<(OwnedFd, PathBuf)> {
        if path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_))) {
            match open_without_links(&self.rootfs, path) {
                Err(error) if error.raw_os_error() == Some(Errno::ELOOP as i32) => {}
                opened => return Ok((opened?, path.to_owned())),
            }
        }
        let fd = open_in(&self.rootfs, path, OFlag::empty())?;
        let real = path_in_root(once(&self.host_path, || host_path(&self.rootfs))?, &fd)?;
        Ok((fd, real))
    }
}

impl Found {
    fn new(fd: OwnedFd, path: PathBuf, volume: Option<&Volume>) -> Self {
        Self {
            fd,
            path,
            in_volume: volume.is_some(),
            in_read_only_volume: volume.is_some_and(|volume| volume.read_only),
            stat: OnceCell::new(),
            is_read_only: OnceCell::new(),
        }
    }

    /// Whether nothing can be created beside or below it.
    pub fn is_read_only(&self) -> io::Result<bool> {
        let is = || Ok(self.in_read_only_volume || fstatvfs(&self.fd)?.flags().contains(FsFlags::ST_RDONLY));
        once(&self.is_read_only, is).copied()
    }

    pub fn stat(&self) -> io::Result<FileStat> {
        once(&self.stat, || Ok(fstat(&self.fd)?)).copied()
    }

    /// The target of the link `name` in this directory, if that is one.
    fn link(&self, name: &OsStr) -> io::Result<Option<PathBuf>> {
        match readlinkat(&self.fd, name) {
            Ok(target) => Ok(Some(target.into())),
            // EINVAL: it is no link (readlink(2)).
            Err(Errno::EINVAL) => Ok(None),
            Err(errno) => Some(errno.into()).filter(|error| !is_of_the_image(error)).map_or(Ok(None), Err),
        }
    }

    pub fn is(&self, kind: SFlag) -> io::Result<bool> {
        Ok(super::live::kind(self.stat()?.st_mode) == kind)
    }

    /// Whether it is a file as a runtime creates it for a mount, and as it is removed again.
    pub fn is_empty_file(&self) -> io::Result<bool> {
        let stat = self.stat()?;
        Ok(self.is(SFlag::S_IFREG)? && stat.st_size == 0 && stat.st_nlink == 1)
    }

    /// At most `limit` bytes from its beginning.
    ///
    /// # Errors
    /// It is not a regular file, or it cannot be read.
    pub fn read(&self, limit: u64) -> io::Result<Vec<u8>> {
        let stat = self.stat()?;
        if !self.is(SFlag::S_IFREG)? {
            return Err(Errno::EINVAL.into());
        }
        // This process's own descriptor, so the magic link leads to the file that was found.
        let flags = nix::libc::O_NONBLOCK | nix::libc::O_NOCTTY | nix::libc::O_CLOEXEC;
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        let file: File = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        let length = u64::try_from(stat.st_size).unwrap_or_default();
        regular_file(file.take(limit), length, limit)
    }
}

/// The value of `cell`, which `make` makes the first time.
fn once<T>(cell: &OnceCell<T>, make: impl FnOnce() -> io::Result<T>) -> io::Result<&T> {
    match cell.get() {
        Some(known) => Ok(known),
        None => make().map(|made| cell.get_or_init(|| made)),
    }
}

fn in_volume(volume: &Volume, below: &Path) -> io::Result<Found> {
    let source = volume.source.as_deref().ok_or(Errno::ENOENT)?;
    let root = open(source, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
    let (fd, path) = if below.as_os_str().is_empty() {
        (root, volume.destination.clone())
    } else {
        let fd = open_in(&root, below, OFlag::empty())?;
        let real = path_in_root(&host_path(&root)?, &fd)?;
        let below = real.strip_prefix("/").unwrap_or(&real).to_owned();
        (fd, volume.destination.join(below))
    };
    Ok(Found::new(fd, path, Some(volume)))
}

/// Opens a directory of a volume, if it is still the same directory and its path has no link. The volume's owner may
/// have moved it.
pub(super) fn open_directory(place: &VolumeFiles) -> io::Result<OwnedFd> {
    let here = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let root = open("/", here, Mode::empty())?;
    let fd = open_below(&root, &place.directory, ResolveFlag::empty())?;
    let stat = fstat(&fd)?;
    if (stat.st_dev, stat.st_ino) == (place.device, place.inode) { Ok(fd) } else { Err(Errno::ESTALE.into()) }
}
