//! Mount points in a container's tree: checks them, and removes them afterwards.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, ResolveFlag, readlinkat};
use nix::sys::stat::{FileStat, SFlag, fstatat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::ImageError;
use super::live::kind;
use super::rootfs::{Found, Tree, open_directory};
use crate::fs::{open_below, open_in, open_root};
use crate::grant::Image;
use crate::ledger::{Leftover, VolumeFiles};

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
            let mut others = tree.volumes().map(Path::to_owned).chain(files.iter().flat_map(lead));
            others.find(|other| other.starts_with(own))
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
