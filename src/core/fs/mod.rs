//! Files that other users may have access to: reading them whole, replacing them atomically, trusting them only if no other
//! user could have written them, and finding them below a root without leaving it.
//!
//! The kernel resolves an image's paths inside the root (openat2(2), `RESOLVE_IN_ROOT`, no magic links). The result is
//! used by its descriptor, never again by its path. Files are looked for in the places of all distributions, most of
//! which do not exist, and some of which may be on file systems that answer badly.
//!
//! Files are read with few system calls: the standard library first asks for a file's length and position, and then reads once
//! more behind its end. Readers of a replaced file see the old content or the new content, never a part of it.
//!
//! The state directory and its files are trusted only if no user except root, or this user, can have written them. This
//! is checked by descriptor each time a file is opened, because the path may name another file by then.

pub mod selinux;
#[cfg(test)]
mod tests;

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown,
};
use std::path::{Ancestors, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::libc;
use nix::sys::stat::{Mode, SFlag};

use crate::process::inheritance::effective_user;
use crate::process::{PIECE, Process, kernel_file, once, own_pid, require_call};
use crate::text::safe_path;

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
    open_directory(path).map(|(path, _)| path)
}

/// [`real_directory`] with the directory, opened with `O_PATH`.
///
/// # Errors
/// It cannot be opened, or is no directory.
pub fn open_directory(path: &Path) -> io::Result<(PathBuf, OwnedFd)> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let opened = open(path, flags, Mode::empty())?;
    Ok((host_path(&opened)?, opened))
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

/// Whether `SELinux` is enforcing: `/sys/fs/selinux/enforce` contains 1 (selinux(8)). The file does not exist if `SELinux`
/// is off. If reading is denied, `SELinux` is enforcing.
pub fn is_selinux_enforcing(root: &Path) -> bool {
    match kernel_file(under(root, "/sys/fs/selinux/enforce")) {
        Ok(text) => text.trim() == "1",
        Err(error) => error.kind() == io::ErrorKind::PermissionDenied,
    }
}

/// Checks that the kernel has the system calls that sublet needs.
///
/// # Errors
/// It is too old: the message names the missing one.
pub fn check_kernel() -> io::Result<()> {
    open_in(open_root(Path::new("/"))?, Path::new("/"), OFlag::empty())?;
    crate::process::pidfd_open(nix::unistd::getpid().as_raw()).map(drop)
}

/// The type in a `st_mode`.
pub(crate) fn kind(mode: libc::mode_t) -> SFlag {
    SFlag::from_bits_truncate(mode) & SFlag::S_IFMT
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
        let path = safe_path(path);
        tracing::warn!("{path} cannot be examined and is taken as absent: {error}");
    }
    found.ok()
}

/// Whether the error says that there is no such file.
pub(crate) fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// The bytes that were read of a file; `None` if there is no such file.
pub fn unless_absent<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Err(error) if is_absent(&error) => Ok(None),
        read => read.map(Some),
    }
}

/// The rest of `file`, which has `length` bytes by its metadata (0: it does not say): a file as long as that has been read
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

/// As [`replace`]; from its first moment on the file was modified at `time`.
pub(crate) fn replace_dated(path: &Path, content: &[u8], mode: u32, time: SystemTime) -> io::Result<()> {
    let date = |file: &File| file.set_modified(time);
    write_and_rename(path, |file| copy_metadata(file, path, mode), content, date).map(drop)
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
    settle: impl FnOnce(&File) -> io::Result<()>,
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
pub fn sweep(dir: &Path) {
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

/// The lock file `path`, which is created if it is missing. Only this user can open it: whoever can open a file can hold its
/// lock.
pub fn open_lock(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
}

/// Creates `dir` if it is missing (0755, whatever the umask), and checks whether it can be trusted. Returns the checked
/// metadata.
pub fn make_trusted_directory(dir: &Path) -> Result<Metadata, String> {
    let meta = match fs::symlink_metadata(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            check_before(dir)?;
            create_directories(dir).map_err(|error| format!("cannot be created: {error}"))?;
            fs::symlink_metadata(dir)
        }
        // It was created under a caller's umask, or by a sublet process that was killed before it set the mode.
        Ok(meta) if is_closed(&meta) => {
            check_before(dir)?;
            fs::set_permissions(dir, Permissions::from_mode(meta.mode() & 0o7777 | 0o755))
                .map_err(|error| format!("cannot be made readable for other users: {error}"))?;
            fs::symlink_metadata(dir)
        }
        meta => meta,
    };
    let meta = meta.map_err(|error| selinux::explain(error).to_string())?;
    check_trusted(dir, &meta)?;
    Ok(meta)
}

/// Why `dir`, if it exists, cannot be trusted.
pub(crate) fn distrust(dir: &Path) -> Option<String> {
    check_trusted(dir, &fs::symlink_metadata(dir).ok()?).err()
}

/// Creates `dir` and its missing parents, each with mode 0755 whatever the umask.
pub fn create_directories(dir: &Path) -> io::Result<()> {
    if let Some(above) = dir.parent().filter(|above| !above.as_os_str().is_empty() && !above.exists()) {
        create_directories(above)?;
    }
    match DirBuilder::new().mode(0o755).create(dir) {
        Ok(()) => fs::set_permissions(dir, Permissions::from_mode(0o755)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => Ok(()),
        Err(error) => Err(error),
    }
}

/// Whether it is a directory of this user that other users cannot search. MPS clients and users without root have to.
fn is_closed(meta: &Metadata) -> bool {
    meta.is_dir() && meta.mode() & 0o755 != 0o755 && meta.uid() == effective_user()
}

fn check_trusted(dir: &Path, meta: &Metadata) -> Result<(), String> {
    if !meta.is_dir() {
        return Err("is no directory".to_owned());
    }
    if !is_trusted_owner(meta.uid()) || meta.mode() & 0o022 != 0 {
        return Err(format!("others than its owner may write to it ({})", owner_and_mode(meta)));
    }
    dir.parent().map_or(Ok(()), |parent| check_above(parent.ancestors()))
}

/// Checks that no other user may replace `dir` while it is made.
fn check_before(dir: &Path) -> Result<(), String> {
    let there = dir.ancestors().skip(1).find(|above| fs::symlink_metadata(above).is_ok());
    there.map_or(Ok(()), |there| check_above(there.ancestors()))
}

/// Checks that no other user may replace entries of these directories.
fn check_above(directories: Ancestors<'_>) -> Result<(), String> {
    for above in directories.filter(|above| !above.as_os_str().is_empty()) {
        let shown = || safe_path(above);
        let unknown = |error| format!("{}, which is above it, cannot be examined: {error}", shown());
        let meta = fs::symlink_metadata(above).map_err(unknown)?;
        if meta.is_symlink() && is_trusted_owner(meta.uid()) {
            // A loop of links leads nowhere.
            above.canonicalize().map_err(unknown)?;
            let target = fs::read_link(above).map_err(unknown)?;
            check_above(above.parent().unwrap_or(above).join(target).ancestors())?;
        } else if can_be_swapped(&meta) {
            let (above, rights) = (shown(), owner_and_mode(&meta));
            return Err(format!(
                "others may write to {above}, which is above it, and could replace it ({rights})"
            ));
        }
    }
    Ok(())
}

fn owner_and_mode(meta: &Metadata) -> String {
    format!("uid {}, mode {:o}", meta.uid(), meta.mode() & 0o7777)
}

/// Whether other users may rename files in this directory. In one that is sticky, as /tmp is, only its owner may.
fn can_be_swapped(dir: &Metadata) -> bool {
    !is_trusted_owner(dir.uid()) || dir.mode() & 0o022 != 0 && dir.mode() & 0o1000 == 0
}

/// Whether files of `uid` are trusted: files of root and of this user are.
pub(crate) fn is_trusted_owner(uid: u32) -> bool {
    uid == 0 || uid == effective_user()
}

/// Why a file of the state directory with this metadata is not trusted.
pub(crate) fn distrust_file(meta: &Metadata, largest: u64) -> Option<String> {
    if !meta.is_file() {
        return Some("it is not a regular file".to_owned());
    }
    if meta.len() > largest {
        return Some(format!("it has {} bytes", meta.len()));
    }
    if !is_trusted_owner(meta.uid()) {
        return Some(format!("it belongs to uid {}", meta.uid()));
    }
    (meta.mode() & 0o022 != 0)
        .then(|| format!("others than its owner may write to it (mode {:o})", meta.mode() & 0o7777))
}

/// Identifies a file and its version. A file that is replaced or written to gets another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    file: (u64, u64),
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    pub(crate) fn of(meta: &Metadata) -> Self {
        Self {
            file: (meta.dev(), meta.ino()),
            bytes: meta.len(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        }
    }

    #[cfg(test)]
    pub(crate) const fn inode(&self) -> u64 {
        self.file.1
    }
}

/// A file that is trusted, open.
#[derive(Debug)]
pub(crate) struct Trusted {
    file: File,
    meta: Metadata,
    largest: u64,
}

impl Trusted {
    pub(crate) fn stamp(&self) -> Stamp {
        Stamp::of(&self.meta)
    }

    pub(crate) fn own(file: File) -> io::Result<Self> {
        Ok(Self { meta: file.metadata()?, file, largest: 0 })
    }

    pub(crate) fn read(&self) -> io::Result<Vec<u8>> {
        regular_file(&self.file, self.meta.len(), self.largest)
    }
}

/// The file `path`; the inner `Err`: why it is not trusted; `None`: there is no such file.
pub(crate) fn open_trusted(path: &Path, largest: u64) -> io::Result<Option<Result<Trusted, String>>> {
    let file =
        match OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
                return Ok(Some(Err("it is not a regular file".to_owned())));
            }
            Err(error) => return Err(selinux::explain(error)),
        };
    let meta = file.metadata()?;
    Ok(Some(distrust_file(&meta, largest).map_or(Ok(Trusted { file, meta, largest }), Err)))
}

/// The content of `path`, as [`open_trusted`] finds it.
pub fn read_trusted(path: &Path, largest: u64) -> io::Result<Option<Result<Vec<u8>, String>>> {
    match open_trusted(path, largest)? {
        Some(Ok(file)) => file.read().map(Ok).map(Some),
        Some(Err(why)) => Ok(Some(Err(why))),
        None => Ok(None),
    }
}

/// [`read_trusted`] for optional files: `None` if the file does not exist or is not trusted.
pub fn read_if_trusted(path: &Path, largest: u64) -> Option<Vec<u8>> {
    read_trusted(path, largest).ok()??.ok()
}

/// `serde_json::from_slice`, which checks each string of the text for UTF-8, and only those that it keeps: for a large ledger
/// that takes a fifth of the time. Here the whole text is checked at once. The shim, which is small, has only this one of the two
/// parsers.
///
/// # Errors
/// It is not UTF-8, not JSON, or not a `T`.
pub fn parse_json<T: serde::de::DeserializeOwned>(text: &[u8]) -> serde_json::Result<T> {
    serde_json::from_str(std::str::from_utf8(text).map_err(<serde_json::Error as serde::de::Error>::custom)?)
}

/// Reads a file with history (refusals, the guard's checks, counts) for a caller that writes it anew; the default if there
/// is none or if another user may have written it. No container's share depends on such files, so one that this version does
/// not understand becomes `<path>.aside`, where people and a newer version's users find it, and is begun anew.
///
/// # Errors
/// It exists and cannot be read, so that its content would be lost.
pub fn read_history<T: serde::de::DeserializeOwned + Default>(path: &Path, largest: u64) -> io::Result<T> {
    let Some(Ok(text)) = read_trusted(path, largest)? else { return Ok(T::default()) };
    parse_json(&text).or_else(|_| put_aside(path).map(|()| T::default()))
}

/// Renames `path` to `<path>.aside`.
///
/// # Errors
/// It cannot be renamed.
pub fn put_aside(path: &Path) -> io::Result<()> {
    let mut aside = path.as_os_str().to_owned();
    aside.push(".aside");
    fs::rename(path, aside)
}
