//! On which file system the ledger is. Where a state directory was unmounted there is another directory, in which there
//! never was a ledger. That is not a lost ledger: the ledger comes back with its file system, and knows nothing of what
//! was done meanwhile.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use nix::libc::{O_DIRECTORY, O_NOFOLLOW, O_PATH};

use super::file_system::{FileSystem, Unmounted};
use super::liveness::{has_processes, init_of};
use super::rebuild::{is_of, rebuild, running_daemons, trusted_record, variable};
use super::runtime_roots::{entries, roots};
use super::{Lease, LeaseId, Ledger, LedgerError, Record, Store};
use crate::text::safe;

/// The key in the annotation of a container for the file system of its ledger.
const KEY: &str = "state_fs";

/// The same in the environment of an MPS daemon.
pub const FILE_SYSTEM_VARIABLE: &str = "SUBLET_STATE_FS";

/// The state directory as it was opened once: what is written there is on one file system, whatever is mounted
/// meanwhile.
pub(super) struct Place(File);

impl Place {
    /// The path of its file `name`.
    pub fn file(&self, name: &str) -> PathBuf {
        format!("/proc/self/fd/{}/{name}", self.0.as_raw_fd()).into()
    }
}

impl Store {
    /// The same for a user who gives up the ledger that was on another file system: a new one is made from what runs.
    #[must_use]
    pub fn giving_up(self) -> Self {
        Self { given_up: true, ..self }
    }

    /// The file system on which its ledger is.
    #[must_use]
    pub const fn file_system(&self) -> FileSystem {
        self.file_system
    }

    /// [`Lease::to_annotation`], which also names the ledger's file system.
    #[must_use]
    pub fn annotation(&self, lease: &Lease) -> String {
        lease.annotation(&self.state_dir, Some((KEY, self.file_system.to_string())))
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
            let file_system = FileSystem(directory.metadata()?.dev());
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

    /// Whether a directory without a ledger may be where the ledger was.
    ///
    /// # Errors
    /// [`LedgerError::Unmounted`], or [`LedgerError::Io`] if this cannot be found out.
    pub(super) fn check_file_system(&self) -> Result<(), LedgerError> {
        if self.given_up { Ok(()) } else { self.check_none_elsewhere(&Ledger::empty("")) }
    }

    /// Whether a ledger that named no process before may now have `ledger`'s. It may be that of a directory over which
    /// another file system was mounted for a while, or the other way round. Daemons are not asked for: that takes longer.
    ///
    /// # Errors
    /// [`LedgerError::Unmounted`], or [`LedgerError::Io`] if this cannot be found out.
    pub(super) fn check_containers(&self, ledger: &Ledger) -> Result<(), LedgerError> {
        if self.given_up { Ok(()) } else { self.refused_for(self.container_elsewhere(ledger)?) }
    }

    /// Whether no container and no daemon that runs and is not in `ledger` belongs to a ledger in this directory on
    /// another file system. This looks at all processes, and reads the records of all containers.
    ///
    /// # Errors
    /// [`LedgerError::Unmounted`], or [`LedgerError::Io`] if this cannot be found out.
    pub fn check_none_elsewhere(&self, ledger: &Ledger) -> Result<(), LedgerError> {
        self.refused_for(self.daemon_elsewhere(ledger)?)?;
        self.refused_for(self.container_elsewhere(ledger)?)
    }

    fn refused_for(&self, elsewhere: Option<(String, FileSystem)>) -> Result<(), LedgerError> {
        elsewhere.map_or(Ok(()), |(what, theirs)| {
            let (path, ours) = (safe(&self.state_dir.to_string_lossy()), self.file_system);
            Err(LedgerError::Unmounted(Box::new(Unmounted { path, what, theirs, ours })))
        })
    }

    /// A daemon of another ledger, and that one's file system.
    fn daemon_elsewhere(&self, ledger: &Ledger) -> Result<Option<(String, FileSystem)>, LedgerError> {
        for (key, process) in running_daemons(&self.state_dir)? {
            if ledger.daemons.iter().any(|daemon| daemon.key == key) {
                continue;
            }
            let named = variable(process.pid, &format!("{FILE_SYSTEM_VARIABLE}="))?;
            let named = named.and_then(|named| FileSystem::parse(&named));
            if let Some(named) = named.filter(|named| *named != self.file_system) {
                return Ok(Some((format!("MPS daemon {}", process.pid), named)));
            }
        }
        Ok(None)
    }

    /// The same of a container.
    fn container_elsewhere(&self, ledger: &Ledger) -> Result<Option<(String, FileSystem)>, LedgerError> {
        for root in roots(&self.state_dir, self.root.as_deref())? {
            for dir in entries(&root)? {
                let Some(record) = trusted_record(&dir)? else { continue };
                let named = of_record(&record, &self.state_dir, ledger);
                if let Some(named) = named.filter(|named| *named != self.file_system) {
                    return Ok(Some((format!("the container of {}", safe(&dir.to_string_lossy())), named)));
                }
            }
        }
        Ok(None)
    }

    /// `ledger`, with the leases of containers that run and are not in it, if another ledger of theirs is given up.
    ///
    /// # Errors
    /// What runs cannot be found out.
    pub(super) fn with_those_of_given_up(&self, ledger: Ledger) -> Result<Ledger, LedgerError> {
        if !self.given_up {
            return Ok(ledger);
        }
        let boot = ledger.boot_id.clone();
        let whole = rebuild(&self.state_dir, self.root.as_deref(), &boot, Some(ledger.clone()))?;
        if whole.leases.len() == ledger.leases.len() {
            return Ok(ledger);
        }
        // What else runs on the devices is nothing new.
        Ok(Ledger { unexplained: ledger.unexplained, ..whole })
    }
}

/// The file system that `record` names for the ledger in `state_dir`, if its container runs and its lease is not in
/// `ledger`.
fn of_record(record: &Record, state_dir: &Path, ledger: &Ledger) -> Option<FileSystem> {
    LeaseId::parse(record.lease.as_deref()?).filter(|id| ledger.lease(id).is_none())?;
    let annotation = record.restorable.as_deref().filter(|_| is_of(record, state_dir))?;
    let value: serde_json::Value = serde_json::from_str(annotation).ok()?;
    let named = FileSystem::parse(value.get(KEY)?.as_str()?)?;
    let runs = record.init.is_alive() || has_processes(&init_of(record));
    runs.then_some(named)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::fixture::lease;
    use super::super::lock;
    use super::*;
    use crate::process::Process;

    /// The record of a container that runs, with its lease in the ledger of `state_dir` on `file_system`.
    fn write_record(root: &Path, state_dir: &Path, file_system: Option<FileSystem>) -> PathBuf {
        let (dir, me) = (root.join("container-1"), Process::current().unwrap());
        let named = file_system.map(|file_system| (KEY, file_system.to_string()));
        let annotations = serde_json::json!({
            "sublet.lease": lease(1, "GPU-a").id.as_str(),
            "sublet.lease.record": lease(1, "GPU-a").annotation(state_dir, named),
        });
        let config = serde_json::json!({ "annotations": annotations });
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("config.json"), config.to_string()).unwrap();
        let status = format!(r#"{{"pid":{},"process-start-time":{}}}"#, me.pid, me.start_time);
        fs::write(dir.join("status"), status).unwrap();
        dir
    }

    #[test]
    fn a_directory_on_another_file_system_than_a_containers_ledger_is_not_used_until_that_is_given_up() {
        let (dir, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let other = FileSystem::of(Path::new("/proc")).unwrap();
        let record = write_record(root.path(), dir.path(), Some(other));
        let store = || Store::open(dir.path()).unwrap().beside(&record);
        let refused = store().change(|_| ()).unwrap_err();
        assert!(matches!(refused, LedgerError::Unmounted(_)), "{refused}");
        for told in [&other.to_string(), "container-1", "mount ", "sublet gc --rebuild"] {
            assert!(refused.to_string().contains(told), "{refused}");
        }
        assert!(store().peek().is_err() && !dir.path().join("ledger.json").exists());
        // A ledger of an earlier boot does not know of it either.
        let earlier = r#"{"schema":"sublet.ledger/1","boot_id":"x","leases":[],"servers":[],"compute_modes":[],"drained":[],"unexplained":[]}"#;
        fs::write(dir.path().join("ledger.json"), earlier).unwrap();
        assert!(matches!(store().change(|_| ()), Err(LedgerError::Unmounted(_))));
        fs::remove_file(dir.path().join("ledger.json")).unwrap();
        assert_eq!(store().giving_up().change(|ledger| ledger.leases.len()).unwrap().0, 1);
        assert_eq!(store().change(|ledger| ledger.leases.len()).unwrap().0, 1, "now the ledger is there");
        let ledger = store().peek().unwrap();
        assert!(store().check_none_elsewhere(&ledger).is_ok(), "it has that container's lease");
        assert!(store().check_none_elsewhere(&Ledger::empty("boot")).is_err());
    }

    #[test]
    fn a_ledger_that_names_nothing_does_not_begin_while_containers_run_by_another() {
        let (dir, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let record = root.path().join("container-1");
        let store = || Store::open(dir.path()).unwrap().beside(&record);
        store().change(|ledger| ledger.drained.push("GPU-z".into())).unwrap();
        let other = FileSystem::of(Path::new("/proc")).unwrap();
        write_record(root.path(), dir.path(), Some(other));
        store().change(|ledger| ledger.drained.clear()).unwrap();
        let begun = Lease { owner: Process::current().unwrap(), ..lease(2, "GPU-b") };
        let take = |store: Store| store.update(|ledger| ledger.insert(begun.clone()));
        assert!(matches!(take(store()), Err(LedgerError::Unmounted(_))));
        assert!(store().peek().unwrap().leases.is_empty());
        let leases = store().giving_up().change(|ledger| ledger.leases.len()).unwrap().0;
        assert_eq!(leases, 1, "the container's lease is here now");
        take(store()).unwrap().0.unwrap();
        // The record of a container that has ended says nothing.
        let ended = format!(r#"{{"pid":{},"process-start-time":1}}"#, std::process::id());
        fs::write(record.join("status"), ended).unwrap();
        assert!(store().check_none_elsewhere(&Ledger::empty("boot")).is_ok());
    }

    #[test]
    fn a_ledger_that_was_lost_on_the_same_file_system_is_rebuilt() {
        let (dir, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let here = FileSystem::of(dir.path()).unwrap();
        // An older version named none.
        for named in [Some(here), None] {
            let record = write_record(root.path(), dir.path(), named);
            let peeked = Store::open(dir.path()).unwrap().beside(&record).peek();
            assert!(matches!(peeked, Err(LedgerError::Corrupt { .. })), "{peeked:?}");
        }
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
        let moved = Store { file_system: FileSystem::of(Path::new("/proc")).unwrap(), ..store };
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
