//! The directories of the driver's files. As long as one is as it was seen, no entry of it was added, renamed or removed
//! since, and its files need not be looked for one by one.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::DriverFile;

/// A change that comes as soon after another may get the same time: the kernel's clock for files goes on once in 10 ms at
/// the most (`current_time` in the kernel's fs/inode.c).
const TICK: Duration = Duration::from_millis(100);
/// The same on file systems that count whole seconds, or two.
const LONG_TICK: Duration = Duration::from_secs(3);

/// A directory when all files of the driver in it were there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileDirectory {
    path: PathBuf,
    device: u64,
    inode: u64,
    /// Seconds and nanoseconds of its last change (`st_ctim`), which no program can set.
    changed: (i64, i64),
}

impl FileDirectory {
    /// Of `files`. One that has just been changed is left out, because the next change could have the same time.
    #[must_use]
    pub fn of(files: &[DriverFile]) -> Vec<Self> {
        let mut paths: Vec<&Path> = files.iter().filter_map(|file| file.source.parent()).collect();
        paths.sort_unstable();
        paths.dedup();
        let seen: Vec<Self> = paths.into_iter().filter_map(Self::stat).filter(Self::is_settled).collect();
        // A file that is missing now went before its directory was seen.
        let is_whole = |directory: &Self| {
            let inside = files.iter().filter(|file| directory.has(&file.source));
            inside.into_iter().all(|file| file.source.is_file())
        };
        seen.into_iter().filter(is_whole).collect()
    }

    fn stat(path: &Path) -> Option<Self> {
        let meta = fs::metadata(path).ok()?;
        let changed = (meta.ctime(), meta.ctime_nsec());
        Some(Self { path: path.to_owned(), device: meta.dev(), inode: meta.ino(), changed })
    }

    fn is_settled(&self) -> bool {
        let (seconds, nanoseconds) = (u64::try_from(self.changed.0), u32::try_from(self.changed.1));
        let Some((seconds, nanoseconds)) = seconds.ok().zip(nanoseconds.ok()) else { return false };
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let passed = since.checked_sub(Duration::new(seconds, nanoseconds));
        passed.is_some_and(|passed| passed > if nanoseconds == 0 { LONG_TICK } else { TICK })
    }

    /// Whether `file` is in it.
    pub(super) fn has(&self, file: &Path) -> bool {
        file.parent() == Some(&self.path)
    }

    /// Whether it is as it was seen.
    pub(super) fn is_unchanged(&self) -> bool {
        Self::stat(&self.path).as_ref() == Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::super::FileKind;
    use super::*;
    use crate::share::Capability;

    fn file(source: PathBuf) -> DriverFile {
        let kind = FileKind::Program { name: "x".into() };
        DriverFile { source, kind, capability: Capability::Utility, needs: None }
    }

    #[test]
    fn a_directory_counts_until_an_entry_comes_or_goes() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("libcuda.so.1"), dir.path().join("other"));
        fs::write(&path, "").unwrap();
        let files = [file(path.clone()), file(dir.path().join("below/libnone.so"))];
        assert!(FileDirectory::of(&files).is_empty(), "it has just been changed");
        // Its time is the kernel's clock's.
        std::thread::sleep(2 * TICK);
        let seen = || FileDirectory::of(&files);
        let [directory] = seen().try_into().unwrap();
        assert!(directory.is_unchanged() && directory.has(&path) && !directory.has(dir.path()));
        for change in
            [|path: &Path| fs::write(path, "").unwrap(), |path: &Path| fs::remove_file(path).unwrap()]
        {
            change(&other);
            assert!(!directory.is_unchanged());
        }
        std::thread::sleep(2 * TICK);
        assert_ne!(seen(), [directory]);
        fs::remove_file(&path).unwrap();
        std::thread::sleep(2 * TICK);
        assert!(seen().is_empty(), "the file is gone");
    }
}
