//! Mount points and directories inside a rootfs. The kernel resolves them as if the rootfs were / (openat2). Missing
//! ones are created relative to a descriptor, and all are returned as descriptors.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat, readlinkat};
use nix::libc::mode_t;
use nix::sys::stat::{Mode, SFlag, fstat, mkdirat};

use crate::fs::open_in;

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
    let mut steps = 0;
    if wanted == Kind::Directory {
        return directory(root, path, &mut steps);
    }
    let mut path = path.to_owned();
    while steps < MOST_STEPS {
        steps += 1;
        match open_in(root, &path, OFlag::empty()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            found => return found.and_then(not_directory),
        }
        let dir = directory(root, path.parent().ok_or(Errno::EINVAL)?, &mut steps)?;
        // By the directory's descriptor, because the path may lead elsewhere by now.
        let name = name_of(&path)?;
        let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_WRONLY | OFlag::O_CLOEXEC;
        match openat(&dir, name, flags, Mode::from_bits_truncate(0o644)) {
            Ok(file) => return Ok(file),
            Err(Errno::EEXIST) => path = read_target(&dir, &path)?,
            Err(error) => return Err(error.into()),
        }
    }
    Err(Errno::ELOOP.into())
}

/// The directory at `path`, created with its parents if it is missing. The target of a dangling link is created inside
/// the rootfs, as runc and crun do.
fn directory(root: &OwnedFd, path: &Path, steps: &mut usize) -> io::Result<OwnedFd> {
    let mut path = path.to_owned();
    while *steps < MOST_STEPS {
        *steps += 1;
        match open_in(root, &path, OFlag::O_DIRECTORY) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            found => return found,
        }
        let dir = directory(root, path.parent().ok_or(Errno::EINVAL)?, steps)?;
        match mkdirat(&dir, name_of(&path)?, Mode::from_bits_truncate(0o755)) {
            Ok(()) => {}
            Err(Errno::EEXIST) => path = read_target(&dir, &path)?,
            Err(error) => return Err(error.into()),
        }
    }
    Err(Errno::ELOOP.into())
}

/// The last component.
pub(super) fn name_of(path: &Path) -> io::Result<&OsStr> {
    Ok(path.file_name().ok_or(Errno::EINVAL)?)
}

/// The type in a `st_mode`.
pub(in crate::oci) fn kind(mode: mode_t) -> SFlag {
    SFlag::from_bits_truncate(mode) & SFlag::S_IFMT
}

/// The target of the link at `path`, whose directory is `dir`. If something else is there by now, it is looked up
/// again.
fn read_target(dir: &OwnedFd, path: &Path) -> io::Result<PathBuf> {
    let link: OsString = match readlinkat(dir, name_of(path)?) {
        Ok(link) => link,
        Err(Errno::EINVAL) => return Ok(path.to_owned()),
        Err(error) => return Err(error.into()),
    };
    Ok(path.parent().unwrap_or(Path::new("/")).join(link))
}

fn not_directory(target: OwnedFd) -> io::Result<OwnedFd> {
    if kind(fstat(&target)?.st_mode) == SFlag::S_IFDIR { Err(Errno::EISDIR.into()) } else { Ok(target) }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::symlink;
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
    fn what_cannot_be_a_mount_point_is_an_error() {
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
