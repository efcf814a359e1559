//! Files that other users may have access to: reading them whole, replacing them atomically, trusting them only if no other
//! user could have written them, and finding them below a root without leaving it.
//!
//! The kernel resolves an image's paths inside the root (openat2(2), `RESOLVE_IN_ROOT`, no magic links). The result is
//! used by its descriptor, never again by its path. Files are looked for in the places of all distributions, most of
//! which do not exist, and some of which may be on file systems that answer badly.
//!
//! Files are read with few system calls: the standard library first asks for a file's length and position, and then reads once
//! more behind its end. Readers of a replaced file see the old content or the new content, never a part of it.

pub mod selinux;
pub mod trusted;

use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::sys::stat::Mode;

use crate::process::{PIECE, Process, once, own_pid, require_call};
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

/// The rest of `file`, which has `length` bytes by its metadata (0: it does not say): what is as long as that has been read
/// whole. Of more than `most` bytes at least one more is read.
///
/// # Errors
/// It cannot be read.
pub(crate) fn regular_file(mut file: impl Read, length: u64, most: u64) -> io::Result<Vec<u8>> {
    let length = usize::try_from(length.min(most)).unwrap_or_default();
    // A byte more shows that it has grown since.
    let mut content = vec![0; if length == 0 { PIECE } else { length + 1 }];
    let mut end = 0;
    loop {
        let read = once(&mut file, &mut content[end..])?;
        end += read;
        if read == 0 || end == length || end as u64 > most {
            break;
        }
        if end == content.len() {
            content.resize(2 * end + PIECE, 0);
        }
    }
    content.truncate(end);
    Ok(content)
}

/// Writes `content` to `path` by way of a temporary file in the same directory.
///
/// An existing file keeps its mode and owner; a new one gets `mode`. A symbolic link at `path` is
/// replaced, not followed. If a user replaces a file of root's, the new file is the user's (Slurm 22.05's config.json,
/// docs/slurm.md).
///
/// # Errors
/// A system call failed. The old file is then unchanged, and the temporary file is removed.
pub fn replace(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    write_and_rename(path, |file| copy_metadata(file, path, mode), content, |_| Ok(())).map(drop)
}

/// As [`replace`], for a file that sublet alone writes: it gets `mode`, and belongs to this user, whatever was there before.
/// Returns the new file, open.
pub(crate) fn replace_own(path: &Path, content: &[u8], mode: u32) -> io::Result<File> {
    write_and_rename(path, |file| file.set_permissions(Permissions::from_mode(mode)), content, |_| Ok(()))
}

/// As [`replace`], for files that must survive a power failure: the file and its name are on disk when this returns.
pub fn replace_durably(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    write_and_rename(path, |file| copy_metadata(file, path, mode), content, File::sync_all)?;
    sync_directory(path);
    Ok(())
}

/// Syncs the directory of `path` to disk, if its file system supports that. The names are in place in any case.
pub fn sync_directory(path: &Path) {
    let _ = path.parent().map(|directory| File::open(directory).and_then(|directory| directory.sync_all()));
}

fn write_and_rename(
    path: &Path,
    set_mode: impl FnOnce(&File) -> io::Result<()>,
    content: &[u8],
    settle: fn(&File) -> io::Result<()>,
) -> io::Result<File> {
    let temporary = temporary_name(path)?;
    let written = create(&temporary)
        .and_then(|mut file| {
            set_mode(&file)?;
            file.write_all(content)?;
            settle(&file)?;
            Ok(file)
        })
        .and_then(|file| fs::rename(&temporary, path).map(|()| file));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Counts the calls in this process, because `sublet serve` has threads.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// A name in the directory of `path` that no other process and no other call in this process uses:
/// `.NAME.PID-CALL.tmp`.
fn temporary_name(path: &Path) -> io::Result<PathBuf> {
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let name = path.file_name().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".{}-{call}.tmp", own_pid()));
    Ok(path.with_file_name(hidden))
}

/// Removes from `dir` the temporary files of processes that were killed during [`replace`].
pub(crate) fn sweep(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_str().and_then(parse_writer).is_some_and(|pid| Process::find(pid).is_none()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// The process whose temporary file is called `name`; `None` if sublet gives no such name.
fn parse_writer(name: &str) -> Option<i32> {
    let writer = name.strip_prefix('.')?.strip_suffix(".tmp")?.rsplit_once('.')?.1;
    let (pid, call) = writer.split_once('-')?;
    call.parse::<u64>().ok().and(pid.parse().ok())
}

/// Gives `file` mode and owner of the one at `path`, or `mode` if there is none.
fn copy_metadata(file: &File, path: &Path, mode: u32) -> io::Result<()> {
    let mode = match fs::symlink_metadata(path) {
        Ok(old) if old.is_file() => keep_owner(file, &old)?,
        _ => mode,
    };
    file.set_permissions(Permissions::from_mode(mode))
}

/// Gives `file` the owner of `old`, as far as that is allowed; returns its mode.
fn keep_owner(file: &File, old: &Metadata) -> io::Result<u32> {
    let mode = old.mode() & 0o7777;
    match fchown(file, Some(old.uid()), Some(old.gid())) {
        Ok(()) => Ok(mode),
        Err(error) if error.kind() != io::ErrorKind::PermissionDenied => Err(error),
        Err(_) if fchown(file, None, Some(old.gid())).is_ok() => Ok(mode & 0o777),
        // The mode was for another group.
        Err(_) => Ok(mode & 0o707),
    }
}

/// Creates `temporary`. A file that a killed process with the same pid left behind is removed first.
fn create(temporary: &Path) -> io::Result<File> {
    let open = || OpenOptions::new().write(true).create_new(true).mode(0o600).open(temporary);
    match open() {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(temporary).and_then(|()| open())
        }
        opened => opened,
    }
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

#[cfg(test)]
mod reading_tests {
    use super::*;

    /// Gives at most `piece` bytes at a time, and counts how often it is asked.
    struct Pieces<'a> {
        left: &'a [u8],
        piece: usize,
        asked: usize,
    }

    impl Read for Pieces<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.asked += 1;
            let length = self.piece.min(buffer.len());
            self.left.read(&mut buffer[..length])
        }
    }

    #[test]
    fn a_file_is_read_whole_whatever_its_length_was() {
        let whole = vec![b'x'; 70_000];
        for (length, most, piece, expected, asked) in [
            // As long as it was, at once and in pieces.
            (70_000, 1 << 20, usize::MAX, 70_000, 1),
            (70_000, 1 << 20, 40_000, 70_000, 2),
            // It has grown, or its length was not known; it has been cut.
            (69_999, 1 << 20, usize::MAX, 70_000, 2),
            (0, 1 << 20, 50_000, 70_000, 8),
            (80_000, 1 << 20, usize::MAX, 70_000, 2),
            // It is too long.
            (70_000, 69_999, usize::MAX, 70_000, 1),
        ] {
            let mut file = Pieces { left: &whole, piece, asked: 0 };
            let read = regular_file(&mut file, length, most).unwrap();
            assert_eq!(read.len(), expected, "{length} {most} {piece}");
            assert!(file.asked <= asked, "{length} {most} {piece}: {} reads", file.asked);
        }
    }
}

#[cfg(test)]
mod atomic_tests {
    use super::*;

    #[test]
    fn keeps_the_mode_of_an_existing_file_and_leaves_no_temporary() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        replace(&path, b"new", 0o600).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_of_our_own_gets_its_mode_whatever_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ledger.json");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        replace_own(&path, b"new", 0o600).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
    }

    #[test]
    fn what_cannot_be_settled_is_not_in_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("daemon.json");
        fs::write(&path, "old").unwrap();
        let full = |_: &File| Err(io::Error::from(io::ErrorKind::StorageFull));
        write_and_rename(&path, |_| Ok(()), b"new", full).unwrap_err();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        write_and_rename(&path, |_| Ok(()), b"new", File::sync_all).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
    }

    #[test]
    fn sweeps_what_the_dead_left_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let ours = format!(".a.json.{}-7.tmp", std::process::id());
        let left = format!(".a.json.{}-7.tmp", child.id());
        let foreign = ["a.json.1.tmp", ".a.json.tmp", "a.json", ".a.json.1-x.tmp", ".a.json.1.tmp"];
        for name in foreign.into_iter().chain([ours.as_str(), left.as_str()]) {
            fs::write(dir.path().join(name), "").unwrap();
        }
        sweep(dir.path());
        let mut names: Vec<_> =
            fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        let mut kept = [&foreign[..], &[ours.as_str()]].concat();
        kept.sort_unstable();
        assert_eq!(names, kept);
    }

    /// Threads of one process write the same file: the content of the last one is there, complete.
    #[test]
    fn threads_do_not_share_a_temporary() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::thread::scope(|scope| {
            for byte in b'a'..b'e' {
                let path = &path;
                scope.spawn(move || (0..100).for_each(|_| replace(path, &vec![byte; 9999], 0o644).unwrap()));
            }
        });
        let content = fs::read(&path).unwrap();
        assert!(content.len() == 9999 && content.iter().all(|byte| *byte == content[0]));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn replaces_a_symbolic_link_and_not_its_target() {
        let dir = tempfile::tempdir().unwrap();
        let (target, link) = (dir.path().join("target"), dir.path().join("link"));
        fs::write(&target, "untouched").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        replace(&link, b"new", 0o644).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"untouched");
        assert_eq!(fs::read(&link).unwrap(), b"new");
        assert_eq!(fs::metadata(&link).unwrap().mode() & 0o7777, 0o644);
    }
}
