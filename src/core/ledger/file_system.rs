//! How the file system on which a ledger is is named.

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use nix::sys::stat::{major, makedev, minor};

/// A file system, by its device number (`st_dev`). The inode of the directory is not part of it: a directory that was
/// removed and made again has lost its ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSystem(pub(super) u64);

impl FileSystem {
    pub(super) fn of(path: &Path) -> io::Result<Self> {
        Ok(Self(std::fs::metadata(path)?.dev()))
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        let (major, minor) = text.split_once(':')?;
        Some(Self(makedev(major.parse().ok()?, minor.parse().ok()?)))
    }
}

/// As `findmnt -o TARGET,MAJ:MIN` shows it.
impl fmt::Display for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", major(self.0), minor(self.0))
    }
}

/// What runs has its lease in a ledger on another file system.
#[derive(Debug, thiserror::Error)]
#[error(
    "the ledger of {what} is on file system {theirs}, and now {ours} is at the state directory {path} \
     (`findmnt -o TARGET,MAJ:MIN`), so nothing was changed: mount {theirs} there again, and sublet goes on; if it is lost \
     for ever, `sublet gc --rebuild` puts the containers that run into the ledger of {ours}"
)]
pub struct Unmounted {
    /// The state directory.
    pub(super) path: String,
    /// A container or an MPS daemon.
    pub(super) what: String,
    /// The file system of its ledger.
    pub(super) theirs: FileSystem,
    /// The one that is there now.
    pub(super) ours: FileSystem,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_named_as_findmnt_names_it() {
        let here = FileSystem::of(Path::new("/proc")).unwrap();
        assert_eq!(FileSystem::parse(&here.to_string()), Some(here));
        for other in ["", "5", "5:", "a:b", "5:6:7", "-1:2"] {
            assert_eq!(FileSystem::parse(other), None, "{other:?}");
        }
    }
}
