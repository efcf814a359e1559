//! The ledger as a store last read or wrote it, so that an unchanged one is not read and parsed again.

use std::fs::File;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use super::Ledger;
use crate::fs::trusted::{Stamp, Trusted};

/// A ledger and its open file. While it is open, no other file has its inode. Times alone are not enough: two files may be
/// written within one tick of the kernel's clock.
#[derive(Debug)]
pub(super) struct Known {
    pub file: Trusted,
    pub ledger: Arc<Ledger>,
}

#[derive(Debug, Default)]
pub(super) struct Cache(Mutex<Option<Known>>);

impl Cache {
    /// The ledger in the file `path`, if that is the known file, unchanged.
    pub fn get(&self, path: &Path) -> Option<Arc<Ledger>> {
        let cached = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = cached.as_ref()?;
        let present = Stamp::of(&path.symlink_metadata().ok()?);
        (known.file.stamp() == present).then(|| known.ledger.clone())
    }

    #[cfg(test)]
    pub fn inode(&self) -> Option<u64> {
        self.0.lock().unwrap().as_ref().map(|known| known.file.stamp().inode())
    }

    pub fn remember(&self, known: Known) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(known);
    }

    /// Remembers `ledger` as written to `file`. If that cannot be examined, it is read again.
    pub fn remember_written(&self, file: File, ledger: Ledger) {
        if let Ok(file) = Trusted::own(file) {
            self.remember(Known { file, ledger: Arc::new(ledger) });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt as _;

    use super::super::Store;

    #[test]
    fn no_later_ledger_has_the_inode_of_one_that_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let (path, store) = (dir.path().join("ledger.json"), || Store::open(dir.path()).unwrap());
        store().change(|ledger| ledger.drained.push("GPU-0".into())).unwrap();
        let reader = store();
        reader.peek().unwrap();
        let known = fs::metadata(&path).unwrap().ino();
        for n in 1..20 {
            store().change(|ledger| ledger.drained[0] = format!("GPU-{}", n % 2)).unwrap();
            assert_ne!(fs::metadata(&path).unwrap().ino(), known, "after {n} changes");
            assert_eq!(reader.known_inode(), Some(known));
        }
    }

    #[test]
    fn what_was_written_is_known_until_another_writes() {
        let dir = tempfile::tempdir().unwrap();
        let (path, store) = (dir.path().join("ledger.json"), Store::open(dir.path()).unwrap());
        let is_known = || store.known_inode() == Some(fs::metadata(&path).unwrap().ino());
        store.change(|ledger| ledger.drained.push("GPU-a".into())).unwrap();
        assert!(is_known());
        let other = Store::open(dir.path()).unwrap();
        other.change(|ledger| ledger.drained[0] = "GPU-b".into()).unwrap();
        assert!(!is_known());
        assert_eq!(store.peek().unwrap().drained, ["GPU-b"]);
        assert!(is_known());
        // In its place, by a person with an editor.
        let text = fs::read_to_string(&path).unwrap().replace("GPU-b", "GPU-other");
        fs::write(&path, text).unwrap();
        assert_eq!(store.peek().unwrap().drained, ["GPU-other"]);
    }
}
