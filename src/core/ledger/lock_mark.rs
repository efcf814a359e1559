//! The content of the lock file: the ledger of this boot has entries, and of which namespaces. If the ledger and its copy
//! are missing, only this distinguishes a loss from a first start.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::Namespaces;
use crate::fs::trusted;

/// More than it ever has.
const LONGEST: usize = 512;

/// The lock file's content as JSON. The file is empty while the ledger names no process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Mark {
    boot_id: String,
    pub namespaces: Namespaces,
}

impl Mark {
    pub fn of(boot_id: &str, namespaces: Namespaces) -> Self {
        Self { boot_id: boot_id.to_owned(), namespaces }
    }

    /// The mark of this boot in the lock file.
    pub fn read(lock: &File, boot_id: &str) -> Option<Self> {
        let mut content = [0; LONGEST];
        let length = lock.read_at(&mut content, 0).ok()?;
        Self::parse(&content[..length], boot_id)
    }

    /// [`Mark::read`] without taking the lock. Users without root may not open it.
    pub fn read_in(path: &Path, boot_id: &str) -> Option<Self> {
        Self::parse(&trusted::read_if_trusted(path, LONGEST as u64)?, boot_id)
    }

    fn parse(content: &[u8], boot_id: &str) -> Option<Self> {
        serde_json::from_slice(content).ok().filter(|mark: &Self| mark.boot_id == boot_id)
    }

    /// Writes `mark` into the lock file, whose lock this process holds.
    pub fn write(mark: Option<&Self>, lock: &File) -> io::Result<()> {
        let content = mark.map(serde_json::to_vec).transpose()?.unwrap_or_default();
        lock.set_len(0)?;
        lock.write_all_at(&content, 0)
    }
}
