//! The file that engines read. It is replaced as a whole, only if it changes, and removed if no share is left. Files
//! of other programs are not touched.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{list, render};
use sublet_core::admit::{AdmitError, fresh_inventory};
use sublet_core::config::Config;
use sublet_core::oci::cdi::KIND;
use sublet_core::oci::hooks;
use sublet_core::process::environment;
use sublet_core::text::safe;

/// A larger file was not written by sublet.
const LONGEST: u64 = 16 << 20;

/// Why the specification is not written.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file was written by another program.
    #[error(
        "{} is not a CDI specification of kind {KIND} and was not overwritten: choose another --output",
        safe(&.0.to_string_lossy())
    )]
    NotOurs(PathBuf),
    /// A system call failed.
    #[error("cannot {what} {}: {source}", safe(&path.to_string_lossy()))]
    Io {
        /// The operation that failed, such as "write".
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The inventory cannot be read, or a share cannot be resolved.
    #[error(transparent)]
    Admit(#[from] AdmitError),
    /// No program for the engines to run.
    #[error("sublet-hook is missing, and CDI devices need it: install it as /usr/libexec/sublet/sublet-hook")]
    NoHook,
    /// An internal error while listing the shares.
    #[error("cannot list the shares: {0}")]
    List(io::Error),
}

/// What is at the specification's path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// There is no file.
    Missing,
    /// sublet wrote the file; this is its text.
    Ours(Vec<u8>),
    /// Another program wrote the file.
    Foreign,
}

/// Reads what is at `path` now. A file that cannot be read counts as another program's.
#[must_use]
pub fn state(path: &Path) -> State {
    #[derive(Deserialize)]
    struct Kind {
        kind: String,
    }
    let mut text = Vec::new();
    let read = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return State::Missing,
        Ok(found) if found.is_file() => {
            File::open(path).and_then(|file| file.take(LONGEST).read_to_end(&mut text))
        }
        _ => return State::Foreign,
    };
    let ours = read.is_ok() && serde_json::from_slice::<Kind>(&text).is_ok_and(|spec| spec.kind == KIND);
    if ours { State::Ours(text) } else { State::Foreign }
}

/// Writes `text` to `path` and creates its directory if needed. Returns whether anything changed.
///
/// # Errors
/// The file cannot be written, or another program wrote the one that is there.
pub fn write(path: &Path, text: &str) -> Result<bool, FileError> {
    match state(path) {
        State::Ours(before) if before == text.as_bytes() => return Ok(false),
        State::Foreign => return Err(FileError::NotOurs(path.to_owned())),
        State::Ours(_) | State::Missing => {}
    }
    let failed = |source| FileError::Io { what: "write", path: path.to_owned(), source };
    sublet_core::fs::trusted::create(path.parent().unwrap_or(Path::new("/"))).map_err(failed)?;
    sublet_core::fs::atomic::replace(path, text.as_bytes(), 0o644).map_err(failed)?;
    Ok(true)
}

/// Removes sublet's specification at `path`. Returns whether there was one.
pub fn remove(path: &Path) -> Result<bool, FileError> {
    if !matches!(state(path), State::Ours(_)) {
        return Ok(false);
    }
    let failed = |source| FileError::Io { what: "remove", path: path.to_owned(), source };
    fs::remove_file(path).map_err(failed)?;
    Ok(true)
}

/// Brings the file that `config` names up to date with the shares and devices. `sublet serve` does this every few
/// seconds. Without a named share the driver is not read.
///
/// # Errors
/// The driver cannot be read, and the file stays as it was; or the file cannot be written.
pub(crate) fn keep(config: &Config) -> Result<bool, FileError> {
    let path = &config.cdi.spec;
    if config.share.is_empty() {
        return remove(path);
    }
    let listing = list(config, &fresh_inventory(config)?).map_err(FileError::List)?;
    if listing.devices.is_empty() {
        return remove(path);
    }
    let program = hooks::program().ok_or(FileError::NoHook)?;
    write(path, &render(&listing, &program, environment::honoured_config().as_deref()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_file_is_replaced_or_removed_and_only_where_it_changes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/cdi/sublet.json");
        let ours = |n: u32| format!("{{\"kind\":\"sublet/share\",\"n\":{n}}}");
        assert!(!remove(&path).unwrap());
        assert!(write(&path, &ours(1)).unwrap());
        assert!(!write(&path, &ours(1)).unwrap());
        assert!(write(&path, &ours(2)).unwrap());
        assert_eq!(state(&path), State::Ours(ours(2).into_bytes()));
        assert!(remove(&path).unwrap());
        for foreign in ["", "{}", "{\"kind\":\"nvidia.com/gpu\"}"] {
            fs::write(&path, foreign).unwrap();
            assert!(matches!(write(&path, &ours(1)), Err(FileError::NotOurs(_))));
            assert!(!remove(&path).unwrap());
            assert_eq!(fs::read_to_string(&path).unwrap(), foreign);
        }
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", &path).unwrap();
        assert_eq!(state(&path), State::Foreign);
    }
}
