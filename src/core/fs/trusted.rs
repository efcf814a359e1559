//! The state directory and its files are trusted only if no user except root, or this user, can have written them. This
//! is checked by descriptor each time a file is opened, because the path may name another file by then.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Ancestors, Path};

use nix::libc::{ELOOP, O_NOFOLLOW, O_NONBLOCK};
use serde::de::DeserializeOwned;

use crate::fs::regular_file;
use crate::fs::selinux;
use crate::process::inheritance::effective_user;
use crate::text::safe;

/// Creates `dir` if it is missing (0755, whatever the umask), and checks whether it can be trusted. Returns the checked
/// metadata.
pub fn make(dir: &Path) -> Result<Metadata, String> {
    let meta = match fs::symlink_metadata(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            check_before(dir)?;
            create(dir).map_err(|error| format!("cannot be created: {error}"))?;
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
    check(dir, &meta)?;
    Ok(meta)
}

/// Why `dir`, if it exists, cannot be trusted.
pub(crate) fn distrust(dir: &Path) -> Option<String> {
    check(dir, &fs::symlink_metadata(dir).ok()?).err()
}

/// Creates `dir` and its missing parents, each with mode 0755 whatever the umask.
pub fn create(dir: &Path) -> io::Result<()> {
    if let Some(above) = dir.parent().filter(|above| !above.as_os_str().is_empty() && !above.exists()) {
        create(above)?;
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

fn check(dir: &Path, meta: &Metadata) -> Result<(), String> {
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
        let shown = || safe(&above.to_string_lossy());
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

/// Whether files of `uid` are trusted: those of root and of this user.
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
pub(crate) fn open(path: &Path, largest: u64) -> io::Result<Option<Result<Trusted, String>>> {
    let file = match OpenOptions::new().read(true).custom_flags(O_NOFOLLOW | O_NONBLOCK).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(ELOOP) => {
            return Ok(Some(Err("it is not a regular file".to_owned())));
        }
        Err(error) => return Err(selinux::explain(error)),
    };
    let meta = file.metadata()?;
    let distrust = distrust_file(&meta, largest);
    Ok(Some(distrust.map_or(Ok(Trusted { file, meta, largest }), Err)))
}

/// The content of `path`, as [`open`] finds it.
pub fn read(path: &Path, largest: u64) -> io::Result<Option<Result<Vec<u8>, String>>> {
    match open(path, largest)? {
        Some(Ok(file)) => file.read().map(Ok).map(Some),
        Some(Err(why)) => Ok(Some(Err(why))),
        None => Ok(None),
    }
}

/// [`read`] for optional files: `None` if the file does not exist or is not trusted.
pub fn read_if_trusted(path: &Path, largest: u64) -> Option<Vec<u8>> {
    read(path, largest).ok()??.ok()
}

/// Reads a file with history (refusals, the guard's checks, counts) for a caller that writes it anew; the default if there
/// is none or if another user may have written it. No container's share depends on such files, so one that this version does
/// not understand becomes `<path>.aside`, where people and a newer version's users find it, and is begun anew.
///
/// # Errors
/// It exists and cannot be read, so that its content would be lost.
pub fn read_history<T: DeserializeOwned + Default>(path: &Path, largest: u64) -> io::Result<T> {
    let Some(Ok(text)) = read(path, largest)? else { return Ok(T::default()) };
    serde_json::from_slice(&text).or_else(|_| {
        let mut aside = path.as_os_str().to_owned();
        aside.push(".aside");
        fs::rename(path, aside)?;
        Ok(T::default())
    })
}

#[cfg(test)]
mod tests {
    use nix::unistd::Uid;

    use super::*;

    fn mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_directory_that_others_could_exchange_is_not_trusted() {
        let dir = tempfile::tempdir().unwrap();
        let (above, state) = (dir.path().join("a"), dir.path().join("a/sublet"));
        make(&state).unwrap();
        assert_eq!(distrust(&state), None);
        mode(&above, 0o777);
        let uid = nix::unistd::geteuid();
        let refused = |state: &Path, uid: Uid, mode: &str| {
            let expected = format!(
                "others may write to {}, which is above it, and could replace it (uid {uid}, mode {mode})",
                above.display()
            );
            assert_eq!(make(state).unwrap_err(), expected);
            assert_eq!(distrust(state), Some(expected));
        };
        refused(&state, uid, "777");
        assert!(make(&above.join("new/sublet")).is_err() && !above.join("new").exists());
        mode(&above, 0o775);
        refused(&state, uid, "775");
        mode(&above, 0o1777);
        make(&state).unwrap();
        // By way of a link, in a directory that only we may write to.
        let linked = dir.path().join("link/sublet");
        std::os::unix::fs::symlink(&above, dir.path().join("link")).unwrap();
        make(&linked).unwrap();
        mode(&above, 0o777);
        refused(&linked, uid, "777");
        if uid.is_root() {
            for mode in [0o755, 0o1777] {
                super::tests::mode(&above, mode);
                std::os::unix::fs::chown(&above, Some(4321), None).unwrap();
                refused(&state, Uid::from_raw(4321), &format!("{mode:o}"));
            }
            std::os::unix::fs::chown(&above, Some(0), None).unwrap();
        }
        mode(&above, 0o755);
        // The link of somebody else in a sticky directory, also where another link leads to it.
        if uid.is_root() {
            let sticky = dir.path().join("sticky");
            fs::create_dir(&sticky).unwrap();
            mode(&sticky, 0o1777);
            std::os::unix::fs::symlink(&above, sticky.join("theirs")).unwrap();
            std::os::unix::fs::symlink("sticky/theirs", dir.path().join("ours")).unwrap();
            for linked in ["sticky/theirs/sublet", "ours/sublet"].map(|below| dir.path().join(below)) {
                make(&linked).unwrap();
                std::os::unix::fs::lchown(sticky.join("theirs"), Some(4321), None).unwrap();
                let refused = make(&linked).unwrap_err();
                assert!(refused.contains("sticky/theirs, which is above it"), "{refused}");
                std::os::unix::fs::lchown(sticky.join("theirs"), Some(0), None).unwrap();
            }
        }
        mode(&state, 0o775);
        assert!(make(&state).unwrap_err().starts_with("others than its owner may write to it"));
        assert_eq!(distrust(&dir.path().join("none")), None);
    }

    #[test]
    fn what_a_umask_closed_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("a/b");
        make(&state).unwrap();
        let modes =
            || [dir.path().join("a"), state.clone()].map(|dir| fs::metadata(dir).unwrap().mode() & 0o7777);
        assert_eq!(modes(), [0o755, 0o755]);
        mode(&state, 0o700);
        make(&state).unwrap();
        assert_eq!(modes(), [0o755, 0o755]);
    }

    #[test]
    fn a_file_is_believed_by_its_descriptor() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        assert!(read(&path, 9).unwrap().is_none());
        fs::write(&path, "content").unwrap();
        mode(&path, 0o644);
        assert_eq!(read(&path, 9).unwrap().unwrap().unwrap(), b"content");
        let why = |path: &Path, largest| read(path, largest).unwrap().unwrap().unwrap_err();
        assert_eq!(why(&path, 6), "it has 7 bytes");
        mode(&path, 0o664);
        assert_eq!(why(&path, 9), "others than its owner may write to it (mode 664)");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert_eq!(why(&link, 9), "it is not a regular file");
        assert_eq!(why(dir.path(), 9), "it is not a regular file");
        let pipe = dir.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(why(&pipe, 9), "it is not a regular file");
        assert_eq!(read_if_trusted(&pipe, 9), None);
    }
    #[test]
    fn what_is_not_understood_is_put_aside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("h.json");
        let history = || read_history::<Vec<u32>>(&path, 99);
        assert!(history().unwrap().is_empty());
        fs::write(&path, "[1,2]").unwrap();
        assert_eq!(history().unwrap(), [1, 2]);
        let newer = r#"{"schema":"x/9","all":[1,2]}"#;
        fs::write(&path, newer).unwrap();
        assert!(history().unwrap().is_empty());
        assert!(!path.exists());
        assert_eq!(fs::read_to_string(dir.path().join("h.json.aside")).unwrap(), newer);
    }

    #[test]
    fn what_cannot_be_read_is_not_begun_anew() {
        let dir = tempfile::tempdir().unwrap();
        let unreadable = dir.path().join("x".repeat(300));
        assert!(read_history::<Vec<u32>>(&unreadable, 99).is_err());
    }
}
