//! A JSON file of an engine's: config.json, exec's process file. Read with bounds, replaced atomically.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::lossless_json;
use crate::reading::regular_file;
use crate::text::safe;

/// Longest file that is read. Docker's and Podman's are some ten KiB.
const LONGEST: u64 = 16 << 20;

/// Why a file could not be read or replaced.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It could not be opened or read.
    #[error("cannot read {}: {source}", safe(&path.to_string_lossy()))]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A directory, a FIFO, a device.
    #[error("{} is not a regular file: the container's bundle is damaged, recreate the container",
        safe(&path.to_string_lossy()))]
    NotRegular {
        /// The file.
        path: PathBuf,
    },
    /// More than any engine writes.
    #[error("{} is larger than 16 MiB, which no engine writes, and was not read: recreate the container",
        safe(&path.to_string_lossy()))]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// Its content could not be written back unchanged.
    #[error(
        "cannot edit {}: {message}; the file was not changed, and the program that wrote it is at fault",
        safe(&path.to_string_lossy())
    )]
    Json {
        /// The file.
        path: PathBuf,
        /// Why, safe to print.
        message: String,
    },
    /// It could not be written.
    #[error("cannot write {}, which was not changed: {source}", safe(&path.to_string_lossy()))]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl FileError {
    /// Whether there is no such file, for any program that looks for it.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        use nix::libc::{ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR};
        let Self::Read { source, .. } = self else { return false };
        source.raw_os_error().is_some_and(|errno| [ENOENT, ENOTDIR, ELOOP, ENAMETOOLONG].contains(&errno))
    }
}

/// A JSON file as read, with its fields in their order.
#[derive(Debug)]
pub struct JsonFile {
    /// Where it is; behind a symbolic link, the file itself.
    pub path: PathBuf,
    /// Its bytes as read.
    pub text: Vec<u8>,
}

impl JsonFile {
    /// Reads at most 16 MiB of a regular file.
    ///
    /// # Errors
    /// It is missing, larger, or no regular file.
    pub fn read(path: &Path) -> Result<Self, FileError> {
        let (path, file) = open(path).map_err(|source| FileError::Read { path: path.to_owned(), source })?;
        let read_error = |source| FileError::Read { path: path.clone(), source };
        let metadata = file.metadata().map_err(read_error)?;
        if !metadata.is_file() {
            return Err(FileError::NotRegular { path });
        }
        let text = regular_file(file, metadata.len(), LONGEST).map_err(read_error)?;
        if text.len() as u64 > LONGEST {
            return Err(FileError::TooLarge { path });
        }
        Ok(Self { path, text })
    }

    /// Whether the text may contain a `sublet.` annotation, a misspelt one, or the name `sublet-hook`. The text is
    /// scanned, not parsed.
    ///
    /// An escape that could stand for one of its characters counts as a hit.
    #[must_use]
    pub fn mentions_sublet(&self) -> bool {
        mentions(&self.text)
    }

    /// The value, fields in their order; refuses text that could not be reproduced: keys that stand
    /// twice in one object, numbers that would change.
    ///
    /// # Errors
    /// That, or it is no JSON, or nested deeper than `serde_json`'s limit of 128.
    pub fn parse(&self) -> Result<Value, FileError> {
        lossless_json::parse(&self.text)
            .map_err(|message| FileError::Json { path: self.path.clone(), message })
    }

    /// Replaces the file atomically; mode and owner stay.
    ///
    /// # Errors
    /// It cannot be written; the old file is then untouched.
    pub fn replace(&self, value: &Value) -> Result<(), FileError> {
        let error = |source| FileError::Write { path: self.path.clone(), source };
        let mut text = Vec::with_capacity(self.text.len() + 16384);
        serde_json::to_writer(&mut text, value).map_err(|source| error(source.into()))?;
        if self.text.ends_with(b"\n") {
            text.push(b'\n');
        }
        // The mode applies only if the file was removed meanwhile. Engines create theirs for root only, or with 0644.
        crate::fs::atomic::replace(&self.path, &text, 0o600).map_err(error)
    }
}

/// Length of `sublet.`.
const WORD: usize = 7;

fn mentions(text: &[u8]) -> bool {
    let hit = |window: &[u8]| match window[0] {
        b's' | b'S' => {
            matches!(window[6], b'.' | b'-' | b'_' | b'/' | b'\\')
                && window[..6].eq_ignore_ascii_case(b"sublet")
        }
        b'\\' => window[1..].starts_with(b"u00") && matches!(window[4], b'2' | b'4' | b'5' | b'6' | b'7'),
        _ => false,
    };
    text.windows(WORD).any(hit)
}

/// [`JsonFile::mentions_sublet`] of a regular file that is too large to be edited; one that cannot be read may.
#[must_use]
pub fn mentions_sublet(path: &Path) -> bool {
    let scan = || -> io::Result<bool> {
        let (_, mut file) = open(path)?;
        let mut part = vec![0; 1 << 20];
        let mut kept = 0;
        loop {
            let read = match file.read(&mut part[kept..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                read => read?,
            };
            if read == 0 {
                return Ok(false);
            }
            if mentions(&part[..kept + read]) {
                return Ok(true);
            }
            // A word may extend over two parts.
            let end = kept + read;
            kept = end.min(WORD - 1);
            part.copy_within(end - kept..end, 0);
        }
    };
    scan().unwrap_or(true)
}

/// Opens the target of `path`, with the path under which it is replaced. A FIFO does not block.
fn open(path: &Path) -> io::Result<(PathBuf, File)> {
    let open = |path: &Path| {
        let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK | nix::libc::O_CLOEXEC;
        OpenOptions::new().read(true).custom_flags(flags).open(path)
    };
    match open(path) {
        Err(error) if error.raw_os_error() == Some(nix::libc::ELOOP) => {
            let path = path.canonicalize()?;
            open(&path).map(|file| (path, file))
        }
        other => other.map(|file| (path.to_owned(), file)),
    }
}
