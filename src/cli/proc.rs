//! The processes of a /proc.

use std::fs;
use std::path::Path;

/// The pids in a /proc.
pub(super) fn processes(proc: &Path) -> Vec<i32> {
    let entries = fs::read_dir(proc).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// The inode in a link such as `mnt:[4026531841]`.
pub(super) fn namespace(process: &Path, kind: &str) -> Option<u64> {
    let link = fs::read_link(process.join("ns").join(kind)).ok()?;
    link.to_str()?.strip_prefix(kind)?.strip_prefix(":[")?.strip_suffix(']')?.parse().ok()
}
