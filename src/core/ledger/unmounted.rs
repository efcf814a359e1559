//! Whether the state directory is the one with the ledger. If it was unmounted, emptied or replaced, the present one's
//! ledger has none of the running containers. Then changes are refused until a person decides which one counts.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use nix::libc::{O_DIRECTORY, O_NOFOLLOW, O_PATH};

use super::rebuild::running_container;
use super::{Lease, LeaseId, Ledger, LedgerError, Record, Store};
use crate::text::safe;

/// The opened state directory: all files are written to the same directory, whatever is mounted meanwhile.
pub(super) struct Place(File);

impl Place {
    /// The path of its file `name`.
    pub fn file(&self, name: &str) -> PathBuf {
        format!("/proc/self/fd/{}/{name}", self.0.as_raw_fd()).into()
    }
}

impl Store {
    /// For a user who gives up a missing ledger: a change first rebuilds it.
    #[must_use]
    pub fn rebuilding(self) -> Self {
        Self { rebuilds: true, ..self }
    }

    /// [`Lease::to_annotation`], which also names the ledger's file system.
    #[must_use]
    pub fn annotation(&self, lease: &Lease) -> String {
        lease.annotation(&self.state_dir, Some(self.file_system))
    }

    /// The state directory, in which is the `lock` that this process holds.
    ///
    /// # Errors
    /// Another file system, or directory, has taken its place since the store or the lock was opened.
    pub(super) fn place(&self, lock: &File) -> Result<Place, LedgerError> {
        let path = &self.state_dir;
        let opened = File::options().read(true).custom_flags(O_PATH | O_DIRECTORY | O_NOFOLLOW).open(path);
        let same = opened.and_then(|directory| {
            // On overlayfs a file's device may be another than its directory's (overlayfs documentation, "Inode properties").
            let file_system = directory.metadata()?.dev();
            let place = Place(directory);
            let (held, there) = (lock.metadata()?, std::fs::symlink_metadata(place.file("lock"))?);
            let same = (held.dev(), held.ino()) == (there.dev(), there.ino());
            Ok((same && file_system == self.file_system).then_some(place))
        });
        match same {
            Ok(Some(place)) => Ok(place),
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(LedgerError::Io { verb: "read", path: safe(&path.to_string_lossy()), source })
            }
            _ => Err(LedgerError::Exchanged { path: safe(&path.to_string_lossy()) }),
        }
    }

    /// Whether no container that runs has its lease in a ledger of this directory on another file system, and not in
    /// `ledger`. This reads the records of all containers.
    ///
    /// # Errors
    /// [`LedgerError::Unmounted`], or [`LedgerError::Io`] if this cannot be found out.
    pub fn check_containers(&self, ledger: &Ledger) -> Result<(), LedgerError> {
        let is_elsewhere = |record: &Record| {
            let id = record.lease.as_deref().and_then(LeaseId::parse);
            let unknown = id.is_some_and(|id| ledger.lease(&id).is_none());
            let named = record.restorable.as_deref().and_then(Lease::file_system_in);
            unknown && named.is_some_and(|named| named != self.file_system)
        };
        let found = running_container(&self.state_dir, self.root.as_deref(), is_elsewhere)?;
        found.map_or(Ok(()), |owner| Err(self.unmounted_error(owner)))
    }

    /// The owner of a lease in another ledger of this directory, as `look` finds it, unless that ledger is given up.
    pub(super) fn find_sign(
        &self,
        look: fn(&Path, Option<&Path>) -> Result<Option<String>, LedgerError>,
    ) -> Result<Option<String>, LedgerError> {
        if self.rebuilds { Ok(None) } else { look(&self.state_dir, self.root.as_deref()) }
    }

    pub(super) fn unmounted_error(&self, owner: String) -> LedgerError {
        LedgerError::Unmounted { path: safe(&self.state_dir.to_string_lossy()), owner }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::fixture::lease;
    use super::super::lock;
    use super::*;
    use crate::process::Process;

    /// A file system on which no test has its directory.
    fn another() -> u64 {
        fs::metadata("/proc").unwrap().dev()
    }

    /// The record of a container that runs, with its lease in the ledger of `state_dir` on `file_system`.
    fn write_record(root: &Path, state_dir: &Path, file_system: Option<u64>) -> PathBuf {
        let (dir, me) = (root.join("container-1"), Process::current().unwrap());
        let annotations = serde_json::json!({
            "sublet.lease": lease(1, "GPU-a").id.as_str(),
            "sublet.lease.record": lease(1, "GPU-a").annotation(state_dir, file_system),
        });
        let config = serde_json::json!({ "annotations": annotations });
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("config.json"), config.to_string()).unwrap();
        let status = format!(r#"{{"pid":{},"process-start-time":{}}}"#, me.pid, me.start_time);
        fs::write(dir.join("status"), status).unwrap();
        dir
    }

    #[test]
    fn a_directory_without_the_ledger_of_a_container_that_runs_is_not_used_until_that_is_given_up() {
        let (dir, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let here = fs::metadata(dir.path()).unwrap().dev();
        for named in [None, Some(here), Some(another())] {
            let record = write_record(root.path(), dir.path(), named);
            let store = || Store::open(dir.path()).unwrap().beside(&record);
            let refused = store().change(|_| ()).unwrap_err();
            assert!(matches!(refused, LedgerError::Unmounted { .. }), "{refused}");
            for told in ["container-1", "mount ", "sublet gc --rebuild"] {
                assert!(refused.to_string().contains(told), "{refused}");
            }
            assert!(store().peek().is_err() && !dir.path().join("ledger.json").exists());
            // A ledger of an earlier boot does not know of it either.
            let earlier = r#"{"schema":"sublet.ledger/1","boot_id":"x","leases":[],"daemons":[],"compute_modes":[],"drained":[],"unexplained":[]}"#;
            fs::write(dir.path().join("ledger.json"), earlier).unwrap();
            assert!(matches!(store().change(|_| ()), Err(LedgerError::Unmounted { .. })));
            fs::remove_file(dir.path().join("ledger.json")).unwrap();
            assert_eq!(store().rebuilding().change(|ledger| ledger.leases.len()).unwrap().0, 1);
            assert_eq!(store().change(|ledger| ledger.leases.len()).unwrap().0, 1, "now the ledger is there");
            let ledger = store().peek().unwrap();
            assert!(ledger.lost, "who else is on the devices is asked");
            assert!(store().check_containers(&ledger).is_ok(), "it has that container's lease");
            let empty = Ledger::empty("boot");
            assert_eq!(store().check_containers(&empty).is_err(), named == Some(another()));
            for entry in fs::read_dir(dir.path()).unwrap() {
                fs::remove_file(entry.unwrap().path()).unwrap();
            }
        }
    }

    #[test]
    fn the_record_of_a_container_that_has_ended_says_nothing() {
        let (dir, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let record = write_record(root.path(), dir.path(), Some(another()));
        let ended = format!(r#"{{"pid":{},"process-start-time":1}}"#, std::process::id());
        fs::write(record.join("status"), ended).unwrap();
        let store = Store::open(dir.path()).unwrap().beside(&record);
        assert!(store.peek().unwrap().leases.is_empty());
        assert!(store.check_containers(&Ledger::empty("boot")).is_ok());
    }

    #[test]
    fn a_ledger_that_names_nothing_does_not_begin_while_containers_run_by_another() {
        let (dir, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let record = root.path().join("container-1");
        let store = || Store::open(dir.path()).unwrap().beside(&record);
        store().change(|ledger| ledger.drained.push("GPU-z".into())).unwrap();
        write_record(root.path(), dir.path(), Some(another()));
        store().change(|ledger| ledger.drained.clear()).unwrap();
        let begun = Lease { owner: Process::current().unwrap(), ..lease(2, "GPU-b") };
        let take = |store: Store| store.update(|ledger| ledger.insert(begun.clone()));
        assert!(matches!(take(store()), Err(LedgerError::Unmounted { .. })));
        assert!(store().peek().unwrap().leases.is_empty());
        let leases = store().rebuilding().change(|ledger| ledger.leases.len()).unwrap().0;
        assert_eq!(leases, 1, "the container's lease is here now");
        take(store()).unwrap().0.unwrap();
    }

    #[test]
    fn a_directory_with_another_lock_is_another_place() {
        let dir = tempfile::tempdir().unwrap();
        let (store, path) = (Store::open(dir.path()).unwrap(), dir.path().join("lock"));
        let lock = lock::open(&path).unwrap();
        assert!(store.place(&lock).is_ok());
        fs::remove_file(&path).unwrap();
        assert!(matches!(store.place(&lock), Err(LedgerError::Exchanged { .. })));
        let other = lock::open(&path).unwrap();
        assert!(matches!(store.place(&lock), Err(LedgerError::Exchanged { .. })));
        assert!(store.place(&other).is_ok());
        let moved = Store { file_system: another(), ..store };
        assert!(matches!(moved.place(&other), Err(LedgerError::Exchanged { .. })));
    }

    #[test]
    fn a_change_is_written_where_its_lock_is_whatever_takes_the_directorys_place_meanwhile() {
        let above = tempfile::tempdir().unwrap();
        let (dir, moved) = (above.path().join("state"), above.path().join("moved"));
        let store = Store::open(&dir).unwrap();
        let change = |ledger: &mut Ledger| {
            fs::rename(&dir, &moved).unwrap();
            fs::create_dir(&dir).unwrap();
            ledger.drained.push("GPU-a".into());
        };
        store.change(change).unwrap();
        assert!(!dir.join("ledger.json").exists() && !dir.join("ledger.json.copy").exists());
        assert_eq!(Store::open(&moved).unwrap().peek().unwrap().drained, ["GPU-a"]);
    }
}
