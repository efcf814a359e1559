//! Files that other users may have access to: replacing them atomically, trusting them only if no other user could have
//! written them, and finding them below a root without leaving it.
//!
//! The kernel resolves an image's paths inside the root (openat2(2), `RESOLVE_IN_ROOT`, no magic links). The result is
//! used by its descriptor, never again by its path. Files are looked for in the places of all distributions, most of
//! which do not exist, and some of which may be on file systems that answer badly.

pub mod atomic;
pub mod selinux;
pub mod trusted;

use std::fs::File;
use std::io::{self, ErrorKind, Read as _};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::sys::stat::Mode;

use crate::process::require_call;
use crate::text::safe;

/// How often one look-up may be repeated because of renames in the tree or because symbolic links lead into volumes.
pub(crate) const ROUNDS: usize = 16;

/// `path` (absolute) below `root`.
pub fn under(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}

/// The path of the directory `path` without links, as the kernel reports it: by three system calls, however deep it is.
///
/// # Errors
/// It cannot be opened, or is no directory.
pub fn real_directory(path: &Path) -> io::Result<PathBuf> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    host_path(&open(path, flags, Mode::empty())?)
}

/// The root itself comes from the engine and is trusted, except that it must not be a link.
pub(crate) fn open_root(rootfs: &Path) -> io::Result<OwnedFd> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    Ok(open(rootfs, flags, Mode::empty())?)
}

/// Opens a directory by a path without links.
pub(crate) fn open_below(root: impl AsFd, path: &Path, more: ResolveFlag) -> io::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_MAGICLINKS | more);
    openat2(root.as_fd(), path, how).map_err(|error| require_call("openat2", error))
}

/// Opens `path` with `O_PATH` as if `root` were /.
pub(crate) fn open_in(root: impl AsFd, path: &Path, flags: OFlag) -> io::Result<OwnedFd> {
    open_resolved(root, path, flags, ResolveFlag::RESOLVE_NO_MAGICLINKS)
}

/// [`open_in`] of a path without links. With one it is ELOOP.
pub(crate) fn open_without_links(root: impl AsFd, path: &Path) -> io::Result<OwnedFd> {
    open_resolved(root, path, OFlag::empty(), ResolveFlag::RESOLVE_NO_SYMLINKS)
}

fn open_resolved(root: impl AsFd, path: &Path, flags: OFlag, more: ResolveFlag) -> io::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC | flags)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | more);
    let mut last = Errno::EAGAIN;
    for _ in 0..ROUNDS {
        match openat2(root.as_fd(), path, how) {
            Ok(fd) => return Ok(fd),
            // A rename or a mount happened elsewhere while `..` was resolved (openat2(2)).
            Err(Errno::EAGAIN | Errno::EINTR) => last = Errno::EAGAIN,
            Err(error) => return Err(require_call("openat2", error)),
        }
    }
    Err(last.into())
}

/// Whether a lookup failed because of the tree's content. Other errors say nothing about the tree.
pub(crate) fn is_of_the_image(error: &io::Error) -> bool {
    let kinds = [Errno::ENOENT, Errno::ENOTDIR, Errno::ELOOP, Errno::ENAMETOOLONG, Errno::EACCES];
    error.raw_os_error().is_some_and(|number| kinds.contains(&Errno::from_raw(number)))
}

/// Checks that the kernel has the system calls that sublet needs.
///
/// # Errors
/// It is too old: the message names the missing one.
pub fn check_kernel() -> io::Result<()> {
    open_in(open_root(Path::new("/"))?, Path::new("/"), OFlag::empty())?;
    crate::process::pidfd_open(nix::unistd::getpid().as_raw()).map(drop)
}

/// The path of `fd` on the host, according to the kernel.
pub(crate) fn host_path(fd: &OwnedFd) -> io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// The path of `fd` as seen from inside the root at `host_path`.
pub(crate) fn path_in_root(root: &Path, fd: &OwnedFd) -> io::Result<PathBuf> {
    let path = host_path(fd)?;
    // It was moved out of the root meanwhile, so it counts as missing.
    let below = path.strip_prefix(root).map_err(|_| Errno::ENOENT)?;
    Ok(Path::new("/").join(below))
}

/// Far more than the file has, in bytes.
const LONGEST_PROC_DEVICES: u64 = 1 << 16;

/// The content of `/proc/devices` below the driver root. It is cut at a length that no kernel reaches.
pub fn read_proc_devices(root: &Path) -> io::Result<String> {
    let mut text = String::with_capacity(4 << 10);
    File::open(under(root, "/proc/devices"))?.take(LONGEST_PROC_DEVICES).read_to_string(&mut text)?;
    Ok(text)
}

/// The result of `ask` for `path`; `None` if there is no such file.
///
/// A failure is tried again, because a file must not be taken as absent for a transient error, such as a lack of memory or
/// of descriptors. If it fails again, it counts as absent, with a warning: a broken mount where the file could
/// have been must not keep it from being found elsewhere.
pub fn examine<T>(path: &Path, ask: impl Fn() -> io::Result<T>) -> Option<T> {
    let again = |error: io::Error| if is_absent(&error) { Err(error) } else { ask() };
    let found = ask().or_else(again);
    if let Some(error) = found.as_ref().err().filter(|error| !is_absent(error)) {
        let path = safe(&path.to_string_lossy());
        tracing::warn!("{path} cannot be examined and is taken as absent: {error}");
    }
    found.ok()
}

/// Whether the error says that there is no such file.
pub fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

#[cfg(test)]
mod looked_for_tests {
    use std::cell::RefCell;

    use nix::libc::{EIO, EMFILE, ENOENT, ENOMEM, ENOTDIR};

    use super::*;

    /// What is found if the kernel gives these errors one after the other (0: none), and how often it was asked.
    fn asked(errors: &[i32]) -> (Option<()>, usize) {
        let left = RefCell::new(errors.iter());
        let ask = || match left.borrow_mut().next() {
            Some(0) => Ok(()),
            errno => Err(io::Error::from_raw_os_error(*errno.expect("asked no more often"))),
        };
        let found = examine(Path::new("/x"), ask);
        (found, errors.len() - left.borrow().len())
    }

    #[test]
    fn an_error_of_the_moment_is_no_absence() {
        assert_eq!(asked(&[0]), (Some(()), 1));
        assert_eq!(asked(&[EMFILE, 0]), (Some(()), 2));
        assert_eq!(asked(&[ENOMEM, ENOENT]), (None, 2));
        assert_eq!(asked(&[EIO, EIO]), (None, 2));
        for absent in [ENOENT, ENOTDIR] {
            assert_eq!(asked(&[absent]), (None, 1));
        }
    }
}
