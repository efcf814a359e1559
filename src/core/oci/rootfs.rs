//! The file tree of a container that does not exist yet: its rootfs and the volumes over it. The kernel resolves every
//! path of the image inside the rootfs (openat2, `RESOLVE_IN_ROOT`, no magic links). A found file is then used by its
//! descriptor, never by its path again.
//!
//! Then the mount points in it: checks them, and removes them afterwards.

use std::cell::{OnceCell, RefCell};
use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, ResolveFlag, open, readlinkat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat};
use nix::sys::statvfs::{FsFlags, fstatvfs};
use nix::unistd::{UnlinkatFlags, unlinkat};
use serde_json::Value;

use super::ImageError;
use super::conflict::{entries, is_bind, plain, text};
use super::container_root::ContainerRoot;
use super::live::{Kind, place};
use crate::fs::{
    ROUNDS, host_path, is_of_the_image, kind, open_below, open_in, open_root, open_without_links,
    path_in_root, regular_file,
};
use crate::grant::Image;
use crate::ledger::{Leftover, VolumeFiles};

/// The tree, opened once for all that is found out of a container before it is created.
pub struct Tree {
    rootfs: Rc<OwnedFd>,
    /// The path of `rootfs` on the host, as the kernel reports it.
    host_path: OnceCell<PathBuf>,
    volumes: Vec<Volume>,
    /// The ids that create mount points. That of the host leaves all of them to the container's runtime.
    pub(super) root: ContainerRoot,
    /// Results of look-ups: most paths are looked up several times.
    known: RefCell<std::collections::BTreeMap<PathBuf, Result<Rc<Found>, i32>>>,
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
        let opened = open_root(rootfs).map_err(|error| ImageError::Rootfs(rootfs.to_owned(), error))?;
        Self::of_opened(spec, Rc::new(opened), rootfs)
    }

    /// [`Tree::open`] with a descriptor of `path`.
    pub(crate) fn of_opened(spec: &Value, rootfs: Rc<OwnedFd>, path: &Path) -> Result<Self, ImageError> {
        let (root, known) = (ContainerRoot::of(spec), RefCell::default());
        let mut tree = Self { rootfs, host_path: OnceCell::new(), volumes: Vec::new(), root, known };
        let volumes = entries(spec, "/mounts").iter().filter_map(|mount| tree.volume(mount).transpose());
        let volumes = volumes.collect::<io::Result<_>>();
        tree.volumes = volumes.map_err(|error| ImageError::Rootfs(path.to_owned(), error))?;
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
            |name: &OsStr| !matches!(readlinkat(&*self.rootfs, name), Err(Errno::EINVAL | Errno::ENOENT));
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
            match open_without_links(&*self.rootfs, path) {
                Err(error) if error.raw_os_error() == Some(Errno::ELOOP as i32) => {}
                opened => return Ok((opened?, path.to_owned())),
            }
        }
        let fd = open_in(&*self.rootfs, path, OFlag::empty())?;
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

    pub fn is(&self, wanted: SFlag) -> io::Result<bool> {
        Ok(kind(self.stat()?.st_mode) == wanted)
    }

    /// Whether it is a file as a runtime creates it for a mount, and as it is removed again: also one without a name by now,
    /// which another command has removed since it was opened.
    pub fn is_empty_file(&self) -> io::Result<bool> {
        let stat = self.stat()?;
        Ok(self.is(SFlag::S_IFREG)? && stat.st_size == 0 && stat.st_nlink <= 1)
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
        regular_file(file.take(limit), u64::try_from(stat.st_size).unwrap_or_default(), limit)
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

/// Checks the mount points of files, and notes in `image` those that are created, are empty, lie in volumes or are left out.
///
/// The runtime resolves links inside the rootfs, as the kernel did here. It then mounts on their targets, so a link
/// may lead to nothing or to another version of the same file.
pub(super) fn check_files(tree: &Tree, files: &[PathBuf], image: &mut Image) -> Result<(), ImageError> {
    let mut impossible = Vec::new();
    for path in files {
        match find_existing(tree, path)? {
            Some(found) if found.is(SFlag::S_IFDIR).map_err(unusable(path))? => {
                return Err(ImageError::Directory(path.clone()));
            }
            Some(found) if !files.iter().any(|file| is_same(file, &found.path)) => {
                image.left_out.push(path.clone());
            }
            Some(found)
                if !found.in_volume
                    && found.is_empty_file().map_err(unusable(path))?
                    && !found.is_read_only().map_err(unusable(path))? =>
            {
                image.empty.push(path.clone());
            }
            Some(found) if found.in_volume => {
                if let (Some(place), _) = tree.place_in_volume(path).map_err(unusable(path))? {
                    add_created(place, None, &mut image.volumes);
                }
            }
            Some(_) => {}
            None => match tree.place_for(path).map_err(unusable(path))? {
                (true, _) => impossible.push(path.clone()),
                (false, false) => image.created.push(path.clone()),
                (false, true) => match tree.place_in_volume(path).map_err(unusable(path))? {
                    (Some(place), file) => add_created(place, Some(file), &mut image.volumes),
                    // A link in the volume leads back to the image's own files. A tmpfs disappears with the container.
                    (None, landing) => {
                        image.created.extend(Some(landing).filter(|path| tree.covering(path).is_none()));
                    }
                },
            },
        }
    }
    if impossible.is_empty() { Ok(()) } else { Err(ImageError::ReadOnly(impossible)) }
}

/// Whether the two paths name the same file of the driver's, perhaps in another version: `libcuda.so.1` and
/// `libcuda.so.550.54.14`.
fn is_same(one: &Path, other: &Path) -> bool {
    let stem = |path: &Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.find(".so.").map_or(name.clone(), |at| name[..at + ".so".len()].to_owned())
    };
    stem(one) == stem(other)
}

/// The `paths` that no longer exist in `rootfs`. One that cannot be examined may exist.
pub(crate) fn filter_missing<'p>(rootfs: &Path, paths: &[&'p PathBuf]) -> Vec<&'p PathBuf> {
    let Ok(root) = open_root(rootfs) else { return Vec::new() };
    let mut parents = Parents::below(&root);
    let mut is_gone =
        |path: &Path| parents.entry(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    paths.iter().copied().filter(|path| is_gone(path)).collect()
}

/// Checks the mount points of `directories`, which are mounted beside `files`.
pub(super) fn check_directories(
    tree: &Tree,
    directories: &[PathBuf],
    files: &[PathBuf],
) -> Result<(), ImageError> {
    let mut impossible = Vec::new();
    for path in directories {
        match find_existing(tree, path)? {
            Some(found) if !found.is(SFlag::S_IFDIR).map_err(unusable(path))? => {
                return Err(ImageError::NotDirectory(path.clone()));
            }
            Some(_) => {}
            None => {
                let is_read_only = tree.place_for(path).map_err(unusable(path))?.0;
                impossible.extend(is_read_only.then(|| path.clone()));
            }
        }
    }
    if !impossible.is_empty() {
        return Err(ImageError::ReadOnlyMps(impossible));
    }
    check_nesting(tree, directories, files)
}

/// For `map_err`: an [`ImageError::Unusable`] of `path`.
pub(super) fn unusable(path: &Path) -> impl Fn(io::Error) -> ImageError {
    move |error| ImageError::Unusable(path.to_owned(), error)
}

fn find_existing(tree: &Tree, path: &Path) -> Result<Option<Rc<Found>>, ImageError> {
    if tree.is_shared(path).map_err(unusable(path))? {
        return Err(ImageError::Shared(path.to_owned()));
    }
    match tree.find(path) {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unusable(path)(error)),
    }
}

/// Adds the directory of a volume in which a file is mounted, and the file that will be created there. A path that is
/// not UTF-8 cannot be recorded, so its file stays.
fn add_created(mut place: VolumeFiles, made: Option<PathBuf>, volumes: &mut Vec<VolumeFiles>) {
    let made = made.filter(|file| file.to_str().is_some());
    match volumes.iter_mut().find(|known| known.directory == place.directory) {
        Some(known) => known.files.extend(made),
        None if place.directory.to_str().is_some() => {
            place.files.extend(made);
            volumes.push(place);
        }
        None => {}
    }
}

/// Refuses links by which a file would be created in a directory that sublet has already mounted, because that
/// directory is on the host.
fn check_nesting(tree: &Tree, directories: &[PathBuf], files: &[PathBuf]) -> Result<(), ImageError> {
    let lead = |path: &PathBuf| tree.creation_path(path).map_err(unusable(path));
    let landings = directories.iter().map(lead).collect::<Result<Vec<_>, _>>()?;
    for (asked, own) in directories.iter().zip(&landings) {
        let mut ours = directories.iter().zip(&landings);
        let inner = ours.find(|(_, other)| *other != own && other.starts_with(own));
        // Almost no image has such a link. Without one, nothing more has to be resolved.
        let covered = || {
            let mut candidates = tree.volumes().map(Path::to_owned).chain(files.iter().flat_map(lead));
            candidates.find(|other| other.starts_with(own))
        };
        let inner = match inner {
            Some((inner, _)) => Some(inner.clone()),
            None if own == asked => None,
            None => covered(),
        };
        if let Some(inner) = inner {
            return Err(ImageError::Nested(inner, asked.clone()));
        }
    }
    Ok(())
}

/// Removes the empty files that the runtime created as mount points in a rootfs that outlives its container. A later
/// run without sublet would fail on them ("file too short"). Returns how many were removed.
///
/// `created`: as [`inspect`](super::inspect) found them missing. Only regular files of length 0 with one link are
/// removed; nothing is removed if the rootfs no longer exists. No live lease may use the rootfs.
pub(crate) fn cleanup_mount_points(rootfs: &Path, created: &[PathBuf]) -> usize {
    let Ok(root) = open_root(rootfs) else { return 0 };
    let mut parents = Parents::below(&root);
    created.iter().filter(|path| parents.remove(path).is_ok_and(|removed| removed)).count()
}

/// Removes the leftovers of an ended container. No live lease may use its root filesystem, nor one of its volumes.
///
/// Returns those that may be forgotten: all except those that a transient error kept from being examined.
pub fn clear(left: &Leftover) -> Leftover {
    let mount_points = match open_root(&left.rootfs) {
        Err(error) if is_transient(&error) => Vec::new(),
        Err(_) => left.mount_points.clone(),
        Ok(root) => {
            let mut parents = Parents::below(&root);
            let done = |path: &&PathBuf| !parents.remove(path).is_err_and(|error| is_transient(&error));
            left.mount_points.iter().filter(done).cloned().collect()
        }
    };
    let volumes = left.volumes.iter().filter(|volume| clear_volume(volume)).cloned().collect();
    Leftover { mount_points, volumes, ..left.clone() }
}

/// Whether the same may well succeed a moment later, or in another process.
fn is_transient(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM | Errno::EAGAIN | Errno::EINTR))
}

/// As [`cleanup_mount_points`], for mount points in a volume, which may also be empty directories. The container's user
/// controls the volume, so no link is followed, and files are removed only from the same directory in which they were
/// created. Returns whether there was no error of the moment.
pub(crate) fn clear_volume(place: &VolumeFiles) -> bool {
    let directory = match open_directory(place) {
        Ok(directory) => directory,
        Err(error) => return !is_transient(&error),
    };
    let remove = |file: &PathBuf| -> io::Result<()> {
        let (Some(parent), Some(name)) = (file.parent(), file.file_name()) else { return Ok(()) };
        let inside = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_XDEV;
        let parent = open_below(&directory, &Path::new(".").join(parent), inside)?;
        let stat = fstatat(&parent, name, AtFlags::AT_SYMLINK_NOFOLLOW)?;
        if kind(stat.st_mode) == SFlag::S_IFDIR {
            return Ok(unlinkat(&parent, name, UnlinkatFlags::RemoveDir)?);
        }
        remove_empty(&parent, name, &stat).map(drop)
    };
    let failed = |file: &&PathBuf| remove(file).is_err_and(|error| is_transient(&error));
    // Each file is tried.
    place.files.iter().filter(failed).count() == 0
}

fn remove_empty(parent: &OwnedFd, name: &OsStr, stat: &FileStat) -> io::Result<bool> {
    if kind(stat.st_mode) != SFlag::S_IFREG || stat.st_size != 0 || stat.st_nlink != 1 {
        return Ok(false);
    }
    unlinkat(parent, name, UnlinkatFlags::NoRemoveDir)?;
    Ok(true)
}

/// The directories of mount points in a root filesystem. Most mount points are in one, which is opened once.
struct Parents<'r> {
    root: &'r OwnedFd,
    last: Option<(PathBuf, Rc<OwnedFd>)>,
}

impl<'r> Parents<'r> {
    const fn below(root: &'r OwnedFd) -> Self {
        Self { root, last: None }
    }

    fn remove(&mut self, path: &Path) -> io::Result<bool> {
        let (parent, name, stat) = self.entry(path)?;
        remove_empty(&parent, &name, &stat)
    }

    /// The directory entry at `path`, with its last links followed inside the root: for a dangling link in the image, the
    /// runtime created its file at the link's target.
    fn entry(&mut self, path: &Path) -> io::Result<(Rc<OwnedFd>, OsString, FileStat)> {
        let mut path = path.to_owned();
        for _ in 0..8 {
            let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else { break };
            let parent = self.open(dir)?;
            let stat = fstatat(&*parent, name, AtFlags::AT_SYMLINK_NOFOLLOW)?;
            if kind(stat.st_mode) != SFlag::S_IFLNK {
                return Ok((parent, name.to_owned(), stat));
            }
            path = dir.join(readlinkat(&*parent, name)?);
        }
        Err(Errno::ELOOP.into())
    }

    fn open(&mut self, dir: &Path) -> io::Result<Rc<OwnedFd>> {
        if let Some((_, opened)) = self.last.as_ref().filter(|(last, _)| last == dir) {
            return Ok(opened.clone());
        }
        let opened = Rc::new(open_in(self.root, dir, OFlag::O_DIRECTORY)?);
        self.last = Some((dir.to_owned(), opened.clone()));
        Ok(opened)
    }
}
