//! Files with history: refusals, the guard's checks, counts. No container's share depends on them, so a file that this
//! version does not understand is renamed, where people and a newer version's users find it, and begun anew.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use super::trusted;

/// Reads the file at `path` for a caller that writes it anew; the default if there is none or if another user may have
/// written it. A file that is not understood becomes `<path>.aside`.
///
/// # Errors
/// It exists and cannot be read, so that its content would be lost.
pub fn read<T: DeserializeOwned + Default>(path: &Path, largest: u64) -> io::Result<T> {
    let Some(Ok(text)) = trusted::read(path, largest)? else { return Ok(T::default()) };
    serde_json::from_slice(&text).or_else(|_| {
        fs::rename(path, aside(path))?;
        Ok(T::default())
    })
}

fn aside(path: &Path) -> PathBuf {
    let mut name = path.to_owned().into_os_string();
    name.push(".aside");
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_understood_is_put_aside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("h.json");
        let history = || read::<Vec<u32>>(&path, 99);
        assert!(history().unwrap().is_empty());
        fs::write(&path, "[1,2]").unwrap();
        assert_eq!(history().unwrap(), [1, 2]);
        let newer = r#"{"schema":"x/9","all":[1,2]}"#;
        fs::write(&path, newer).unwrap();
        assert!(history().unwrap().is_empty());
        assert!(!path.exists());
        assert_eq!(fs::read_to_string(aside(&path)).unwrap(), newer);
    }

    #[test]
    fn what_cannot_be_read_is_not_begun_anew() {
        let dir = tempfile::tempdir().unwrap();
        let unreadable = dir.path().join("x".repeat(300));
        assert!(read::<Vec<u32>>(&unreadable, 99).is_err());
    }
}
