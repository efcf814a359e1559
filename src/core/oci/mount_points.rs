//! Mount points in a container's tree: whether they can be used, and removing what they leave behind.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, ResolveFlag, readlinkat};
use nix::sys::stat::{FileStat, SFlag, fstatat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::image_error::ImageError;
use super::rootfs::{Found, Tree, open_directory};
use crate::fs::below::{open_below, open_in, open_root};
use crate::ledger::{Leftover, VolumeFiles};

/// Looks at the mount points of files. Those that are not there yet and will be made in the rootfs come back, and the
/// directories of volumes that files are mounted in.
///
/// A link is fine wherever it leads: the runtime resolves it inside the rootfs, as the kernel did here.
pub(super) fn check_files(
    tree: &Tree,
    files: &[PathBuf],
) -> Result<(Vec<PathBuf>, Vec<VolumeFiles>), ImageError> {
    let (mut created, mut impossible, mut volumes) = (Vec::new(), Vec::new(), Vec::new());
    for path in files {
        let unusable = |source| ImageError::Unusable { path: path.clone(), source };
        match look(tree, path)? {
            Some(found) if found.is(SFlag::S_IFDIR) => return Err(ImageError::Directory(path.clone())),
            Some(found) if found.in_volume => {
                if let (Some(place), _) = tree.place_in_volume(path).map_err(unusable)? {
                    note(place, None, &mut volumes);
                }
            }
            Some(_) => {}
            None => match tree.place_for(path) {
                (true, _) => impossible.push(path.clone()),
                (false, false) => created.push(path.clone()),
                (false, true) => match tree.place_in_volume(path).map_err(unusable)? {
                    (Some(place), file) => note(place, Some(file), &mut volumes),
                    // A link of the volume's leads back to the image's own files; a tmpfs goes with the container.
                    (None, landing) => created.extend(Some(landing).filter(|path| !tree.is_covered(path))),
                },
            },
        }
    }
    if impossible.is_empty() { Ok((created, volumes)) } else { Err(ImageError::ReadOnly(impossible)) }
}

/// Looks at the mount points of `directories`, which are mounted beside `files`.
pub(super) fn check_directories(
    tree: &Tree,
    directories: &[PathBuf],
    files: &[PathBuf],
) -> Result<(), ImageError> {
    let mut impossible = Vec::new();
    for path in directories {
        match look(tree, path)? {
            Some(found) if !found.is(SFlag::S_IFDIR) => return Err(ImageError::NotDirectory(path.clone())),
            Some(_) => {}
            None => impossible.extend(Some(path.clone()).filter(|path| tree.place_for(path).0)),
        }
    }
    if !impossible.is_empty() {
        return Err(ImageError::ReadOnlyMps(impossible));
    }
    check_nesting(tree, directories, files)
}

/// What is at a mount point, if anything is.
fn look(tree: &Tree, path: &Path) -> Result<Option<Found>, ImageError> {
    if tree.is_shared(path) {
        return Err(ImageError::Shared(path.to_owned()));
    }
    match tree.find(path) {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ImageError::Unusable { path: path.to_owned(), source }),
    }
}

/// Adds the directory of a volume that something of ours is mounted in, and the file that will be made there. What is no
/// text cannot be written down: it stays.
fn note(mut place: VolumeFiles, made: Option<PathBuf>, volumes: &mut Vec<VolumeFiles>) {
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
    let lead = |path: &PathBuf| {
        tree.leads_to(path).map_err(|source| ImageError::Unusable { path: path.clone(), source })
    };
    let landings = directories.iter().map(lead).collect::<Result<Vec<_>, _>>()?;
    for (asked, own) in directories.iter().zip(&landings) {
        let mut ours = directories.iter().zip(&landings);
        let inner = ours.find(|(_, other)| *other != own && other.starts_with(own));
        // Nearly every image has no such link: then nothing more is resolved.
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
            return Err(ImageError::Nested { outer: asked.clone(), inner });
        }
    }
    Ok(())
}

/// Removes the empty files that the runtime made for our mounts in a rootfs that outlives its container;
/// a later run without sublet would fail on them ("file too short"). Returns how many went.
///
/// `created` is what [`inspect`](super::inspect) found missing. Only regular files of length 0 with one
/// link go, whatever else stands there stays; so does everything if the rootfs is gone. No live lease may
/// have the rootfs.
pub(crate) fn cleanup_mount_points(rootfs: &Path, created: &[PathBuf]) -> usize {
    let Ok(root) = open_root(rootfs) else { return 0 };
    created.iter().filter(|path| remove(&root, path).is_ok_and(|removed| removed)).count()
}

/// Removes what an ended container left. No live lease may have its root filesystem, nor one of its volumes.
pub fn clear(left: &Leftover) {
    cleanup_mount_points(&left.rootfs, &left.mount_points);
    left.volumes.iter().for_each(clear_volume);
}

/// As [`cleanup_mount_points`], for what the runtime made in a volume: its content is the tenant's, so no link is
/// followed any more, and nothing is removed but from the very directory that it was in.
pub(crate) fn clear_volume(place: &VolumeFiles) {
    let Ok(directory) = open_directory(place) else { return };
    for file in &place.files {
        let _ = remove_below(&directory, file);
    }
}

fn remove_below(directory: &OwnedFd, file: &Path) -> io::Result<bool> {
    let (Some(parent), Some(name)) = (file.parent(), file.file_name()) else { return Ok(false) };
    let parent = Path::new(".").join(parent);
    let inside = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_XDEV;
    let parent = open_below(directory, &parent, inside)?;
    let stat = fstatat(&parent, name, AtFlags::AT_SYMLINK_NOFOLLOW)?;
    remove_empty(&parent, name, &stat)
}

fn remove(root: &OwnedFd, path: &Path) -> io::Result<bool> {
    let (parent, name, stat) = entry(root, path)?;
    remove_empty(&parent, &name, &stat)
}

fn remove_empty(parent: &OwnedFd, name: &OsStr, stat: &FileStat) -> io::Result<bool> {
    let is_file = SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT == SFlag::S_IFREG;
    if !is_file || stat.st_size != 0 || stat.st_nlink != 1 {
        return Ok(false);
    }
    unlinkat(parent, name, UnlinkatFlags::NoRemoveDir)?;
    Ok(true)
}

/// The directory entry behind `path`, its last links followed inside the root: where a dangling link of
/// the image's led, the runtime made its file at the link's end.
fn entry(root: &OwnedFd, path: &Path) -> io::Result<(OwnedFd, OsString, FileStat)> {
    let mut path = path.to_owned();
    for _ in 0..8 {
        let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else { break };
        let parent = open_in(root, dir, OFlag::O_DIRECTORY)?;
        let stat = fstatat(&parent, name, AtFlags::AT_SYMLINK_NOFOLLOW)?;
        if SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT != SFlag::S_IFLNK {
            return Ok((parent, name.to_owned(), stat));
        }
        path = dir.join(readlinkat(&parent, name)?);
    }
    Err(Errno::ELOOP.into())
}
