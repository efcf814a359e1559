//! The line at the end of a stand-in library that describes the GPUs when nothing else of the simulator is visible.
//!
//! It changes with MIG, in place, because containers have the file mounted. Writers take an exclusive lock on the file,
//! readers a shared one. The bytes before it, which running programs have mapped, never change.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use anyhow::{Context, Result};
use nix::fcntl::{Flock, FlockArg};

use super::Root;
use super::topology::Topology;
use crate::checkpoint::rules::FIRST_DRIVER;

/// The beginning of the line.
pub const MARK: &str = "\nSUBLETSIM";

/// Copies `library` to `target` with the trailer appended. A driver that is too old has no `cuCheckpointProcess…`.
pub fn append(library: &Path, target: &Path, topology: &Topology) -> Result<()> {
    let mut bytes = fs::read(library).with_context(|| format!("{}", library.display()))?;
    if topology.driver_branch() < FIRST_DRIVER {
        rename(b"cuCheckpointProcess", &mut bytes);
    }
    bytes.extend_from_slice(&line(topology)?);
    fs::write(target, bytes).with_context(|| format!("{}", target.display()))
}

/// Changes the first letter of a name wherever it stands, so that the loader finds no such symbol.
fn rename(name: &[u8], bytes: &mut [u8]) {
    let found: Vec<usize> =
        (0..bytes.len().saturating_sub(name.len())).filter(|at| bytes[*at..].starts_with(name)).collect();
    for at in found {
        bytes[at] = b'-';
    }
}

fn line(topology: &Topology) -> Result<Vec<u8>> {
    let mut line = MARK.as_bytes().to_vec();
    serde_json::to_writer(&mut line, topology)?;
    line.push(b'\n');
    Ok(line)
}

/// The topology at the end of a library file.
#[must_use]
pub fn read(library: &Path) -> Option<Topology> {
    let mut file = Flock::lock(File::open(library).ok()?, FlockArg::LockShared).ok()?;
    let (_, text) = find(&mut file)?;
    serde_json::from_slice(text.trim_ascii_end()).ok()
}

/// Writes another topology into the libraries of a root. Libraries without a trailer stay without one.
pub fn replace_all(root: &Root, topology: &Topology) -> Result<()> {
    for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
        let library = root.libraries().join(name);
        if library.exists() {
            replace(&library, topology).with_context(|| format!("{}", library.display()))?;
        }
    }
    Ok(())
}

fn replace(library: &Path, topology: &Topology) -> Result<()> {
    let file = File::options().read(true).write(true).open(library)?;
    let mut file = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| errno)?;
    let Some((at, _)) = find(&mut file) else { return Ok(()) };
    let line = line(topology)?;
    file.seek(SeekFrom::Start(at))?;
    file.write_all(&line)?;
    Ok(file.set_len(at + line.len() as u64)?)
}

/// The trailer's offset and its text after the mark. It is the last line, and is searched from the end of the file.
fn find(file: &mut File) -> Option<(u64, Vec<u8>)> {
    let length = file.metadata().ok()?.len();
    let mut tail = 1 << 13;
    loop {
        let from = length.saturating_sub(tail);
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(from)).ok()?;
        file.read_to_end(&mut bytes).ok()?;
        let before = bytes.strip_suffix(b"\n")?;
        if let Some(at) = before.iter().rposition(|byte| *byte == b'\n') {
            let text = bytes.get(at..)?.strip_prefix(MARK.as_bytes())?.to_vec();
            return Some((from + at as u64, text));
        }
        if from == 0 {
            return None;
        }
        tail *= 16;
    }
}
