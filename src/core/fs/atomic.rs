//! Atomic replacement of a file: readers see the old content or the new content, never a part of it.

use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::process::{Process, own_pid};

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
mod tests {
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
