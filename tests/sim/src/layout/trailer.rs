//! The line at the end of a stand-in library that tells it what the GPUs are, where it sees nothing else.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::topology::Topology;

/// What the line begins with.
pub const MARK: &str = "\nSUBLETSIM";

/// Copies `library` to `target` with the trailer appended.
///
/// # Errors
/// A file cannot be read or written.
pub fn append(library: &Path, target: &Path, topology: &Topology) -> Result<()> {
    let mut bytes = fs::read(library).with_context(|| format!("{}", library.display()))?;
    bytes.extend_from_slice(MARK.as_bytes());
    serde_json::to_writer(&mut bytes, topology)?;
    bytes.push(b'\n');
    fs::write(target, bytes).with_context(|| format!("{}", target.display()))
}

/// The topology at the end of a library file.
#[must_use]
pub fn read(library: &Path) -> Option<Topology> {
    let bytes = fs::read(library).ok()?;
    let start = bytes.windows(MARK.len()).rposition(|window| window == MARK.as_bytes())?;
    serde_json::from_slice(bytes[start + MARK.len()..].trim_ascii_end()).ok()
}
