//! Where our mounts land in a container's tree: whether they can, and taking away what they leave behind.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, readlinkat};
use nix::sys::stat::{FileStat, SFlag, fstatat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::image::ImageError;
use super::tree::{Tree, open_in, open_root};

/// Looks at each mount point. Files that are not there yet and will be made in the rootfs come back.
///
/// A link is fine wherever it leads: the runtime resolves it inside the rootfs, as the kernel did here.
pub(super) fn check(
    tree: &Tree,
    files: &[PathBuf],
    directories: &[PathBuf],
) -> Result<Vec<PathBuf>, ImageError> {
    let (mut created, mut impossible) = (Vec::new(), Vec::new());
    let all = files.iter().map(|path| (path, false)).chain(directories.iter().map(|path| (path, true)));
    for (path, directory) in all {
        if tree.is_shared(path) && !cfg!(sublet_without = "a9") {
            return Err(ImageError::Shared(path.clone()));
        }
        match tree.find(path) {
            Ok(found) if found.is(SFlag::S_IFDIR) == directory => {}
            Ok(_) if directory => return Err(ImageError::NotDirectory(path.clone())),
            Ok(_) => return Err(ImageError::Directory(path.clone())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => match tree.place_for(path) {
                (true, _) => impossible.push(path.clone()),
                (false, false) if !directory => created.push(path.clone()),
                (false, _) => {}
            },
            Err(source) => return Err(ImageError::Unusable { path: path.clone(), source }),
        }
    }
    if !impossible.is_empty() {
        return Err(ImageError::ReadOnly(impossible));
    }
    if !cfg!(sublet_without = "a2-nested") {
        check_directories(tree, files, directories)?;
    }
    Ok(created)
}

/// Refuses links by which something would be made in a directory of ours that is mounted already: it is the host's.
fn check_directories(tree: &Tree, files: &[PathBuf], directories: &[PathBuf]) -> Result<(), ImageError> {
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
#[expect(clippy::must_use_candidate, reason = "the count is for the curious")]
pub fn cleanup_mount_points(rootfs: &Path, created: &[PathBuf]) -> usize {
    let Ok(root) = open_root(rootfs) else { return 0 };
    created.iter().filter(|path| remove(&root, path).is_ok_and(|removed| removed)).count()
}

fn remove(root: &OwnedFd, path: &Path) -> io::Result<bool> {
    let (parent, name, stat) = entry(root, path)?;
    let is_file = SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT == SFlag::S_IFREG;
    if !is_file || stat.st_size != 0 || stat.st_nlink != 1 {
        return Ok(false);
    }
    unlinkat(&parent, name.as_os_str(), UnlinkatFlags::NoRemoveDir)?;
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
