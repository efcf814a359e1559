//! The ledger's file, and the one way to change it. What a store last read or wrote is kept, so that an
//! unchanged ledger is not read and parsed again.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fs, io};

use super::error::{failed, text};
use super::liveness::{Scan, reclaim, running_first};
use super::lock::{Mark, Namespaces, Place};
use super::rebuild::{find_running, find_trace, last_inventory, rebuild, salvage, unexplained};
use super::runtime_record::{LARGEST, read_bounded, remember_roots};
use super::text::{ledger_text, parse_ledger};
use super::{Lease, Ledger, LedgerError, events_of_change, lock};
use crate::fs::replace_own;
use crate::fs::trusted::{self, Stamp, Trusted};
use crate::process::{epoch_seconds, uptime_seconds};
use crate::{events, process};

const LEDGER: &str = "ledger.json";
const COPY: &str = "ledger.json.copy";
/// The ledger of one state directory.
#[derive(Debug)]
pub struct Store {
    pub(super) state_dir: PathBuf,
    /// Where the caller's runtime keeps its records.
    pub(super) root: Option<PathBuf>,
    /// The state directory's when the store was opened, by device number (`st_dev`).
    pub(super) file_system: u64,
    /// Whether a change first rebuilds the ledger.
    pub(super) rebuilds: bool,
    /// The ledger that was last read or written.
    pub(super) known: Mutex<Option<Known>>,
}

/// Leases that an update freed because their containers had ended. Their servers may have to be adjusted or stopped.
pub type Freed = Vec<Lease>;

impl Store {
    /// The ledger in `state_dir`, which is created if it is missing (0755).
    pub fn open(state_dir: &Path) -> Result<Self, LedgerError> {
        let unusable = |why| LedgerError::Directory { path: text(state_dir), why };
        let directory = trusted::make(state_dir).map_err(unusable)?;
        Ok(Self {
            state_dir: state_dir.to_owned(),
            root: None,
            file_system: directory.dev(),
            rebuilds: false,
            known: Mutex::default(),
        })
    }

    /// [`Store::open`] for a caller that knows a container's `record`. After a loss of the ledger, the records beside
    /// it are read, too.
    pub fn beside(self, record: &Path) -> Self {
        Self { root: record.parent().map(Path::to_owned), ..self }
    }

    /// The ledger as it stands, without the lock.
    ///
    /// # Errors
    /// It cannot be read or parsed, or its process ids are of other namespaces than this process's.
    pub fn read(&self) -> Result<Ledger, LedgerError> {
        let ledger = self.peek()?;
        ledger.check_namespaces(Namespaces::current()?)?;
        Ok(ledger)
    }

    /// Whether its process ids are valid here. Other faults of the ledger are not reported.
    pub fn is_of_here(&self) -> Result<(), LedgerError> {
        self.read().err().filter(LedgerError::is_elsewhere).map_or(Ok(()), Err)
    }

    /// [`Store::read`] in any namespace. The result may be shown but not acted upon.
    pub fn peek(&self) -> Result<Ledger, LedgerError> {
        let boot = Self::boot_id()?;
        let ledger = self.load()?.map(|ledger| Ledger::clone(&keep_settings(ledger, boot)));
        Ok(ledger.unwrap_or_else(|| Ledger::empty(boot)))
    }

    /// Takes the lock, frees the leases of ended containers, runs `change` and writes the ledger if it differs.
    ///
    /// If `change` fails, its changes are dropped, freed leases stay freed, and its error is the inner one. `change`
    /// must not start, ask or wait for a process, because all other processes wait for the lock meanwhile.
    ///
    /// Also removes temporary files that killed processes left in the state directory. A start and an end, which look for
    /// ended containers briefly, leave that to other commands.
    ///
    /// An unreadable or missing ledger is rebuilt from its copy and from what runs, if its copy or its lock shows that it
    /// was in this directory. One unreadable file is kept beside it as `ledger.json.corrupt-<seconds since the epoch>`.
    ///
    /// # Errors
    /// The lock cannot be taken within 5 s, the file cannot be read or written, a newer version wrote it, or its process
    /// ids are of other namespaces than this process's. Nothing is changed then.
    pub fn update<T, E>(
        &self,
        change: impl FnOnce(&mut Ledger) -> Result<T, E>,
    ) -> Result<(Result<T, E>, Freed), LedgerError> {
        self.update_with_scan(Scan::Full, change)
    }

    /// [`Store::update`], looking as carefully for containers that have ended as `scan` says.
    pub(crate) fn update_with_scan<T, E>(
        &self,
        scan: Scan,
        change: impl FnOnce(&mut Ledger) -> Result<T, E>,
    ) -> Result<(Result<T, E>, Freed), LedgerError> {
        // Before the lock, because parsing and asking for each process take longer than all the rest.
        let running = self.read_file().ok().flatten().map(|ledger| running_first(&ledger, scan));
        let running = running.unwrap_or_default();
        let (boot, ours) = (Self::boot_id()?, Namespaces::current()?);
        let lock = lock::take(&self.lock_path(), &self.ledger_path())?;
        let mark = Mark::read(&lock, boot);
        let loaded = match self.load() {
            Err(LedgerError::Corrupt { why, .. }) => Err(why),
            loaded => Ok(loaded?),
        };
        let place = self.place(&lock)?;
        let mut events = Vec::new();
        let mut rebuild = |why: &str, last| {
            let ledger = self.rebuild_ledger(why, last, ours, mark.as_ref(), &place)?;
            events.push(events_of_change::rebuilt_event(&ledger, why));
            Ok::<_, LedgerError>(Arc::new(ledger))
        };
        // From which the change starts, and what the file has, if that is a ledger.
        let (start, stored) = match loaded {
            Ok(None) => (Arc::new(Ledger::empty(boot)), None),
            Ok(Some(ledger)) if self.rebuilds => {
                let last = (ledger.boot_id == boot).then(|| Ledger::clone(&ledger));
                (rebuild("it is given up", last)?, None)
            }
            Ok(Some(ledger)) => (keep_settings(ledger.clone(), boot), Some(ledger)),
            Err(why) => (rebuild(&why, self.read_copy(boot)?)?, None),
        };
        start.check_namespaces(ours)?;
        // Not before: elsewhere the processes that write those files seem to have ended.
        if scan == Scan::Full {
            crate::fs::sweep(&self.state_dir);
        }
        let settled = || {
            let mut ledger = Ledger::clone(&start);
            let freed = if scan == Scan::None { Freed::new() } else { reclaim(&mut ledger, &running) };
            self.reopen_devices(&mut ledger);
            (ledger, freed)
        };
        let (mut after, mut freed) = settled();
        let outcome = change(&mut after);
        if outcome.is_err() {
            (after, freed) = settled();
        }
        after.note_idle(uptime_seconds);
        after.namespaces = after.names_processes().then_some(ours);
        if mark.is_none() && after.namespaces.is_some() && !self.rebuilds {
            self.check_containers(&after)?;
        }
        let mut written = None;
        if stored.as_ref().is_none_or(|stored| **stored != after) {
            let before = stored.as_deref().filter(|stored| stored.boot_id == boot);
            written = Some(self.write(&mut after, before, &place)?);
            events.extend(events_of_change::events(stored.as_ref().unwrap_or(&start), &after));
        }
        // The mark is written last, because a mark without the files means that they were lost.
        let wanted = after.namespaces.map(|namespaces| Mark { boot_id: boot.to_owned(), namespaces });
        if mark != wanted {
            Mark::write(wanted.as_ref(), &lock)
                .map_err(|error| failed("written", &self.lock_path(), error))?;
        }
        events::emit(&self.state_dir, &events);
        // One that cannot be examined is read again.
        if let Some(file) = written.and_then(|file| Trusted::own(file).ok()) {
            self.remember(file, Arc::new(after));
        }
        // Not only when both ledgers have been freed.
        drop(lock);
        Ok((outcome, freed))
    }

    /// Reopens closed devices as soon as every process there is attributable to a lease. After a loss, the first new
    /// inventory shows which devices have to be closed.
    fn reopen_devices(&self, ledger: &mut Ledger) {
        let inventory = || last_inventory(&self.state_dir, &ledger.boot_id).ok().flatten();
        let is_new =
            ledger.lost && inventory().is_some_and(|inventory| inventory.mig_changes == ledger.mig.count);
        if !is_new && ledger.unexplained.is_empty() {
            return;
        }
        // A failure to read changes nothing.
        let Ok(still) = unexplained(&self.state_dir, ledger) else { return };
        if is_new {
            ledger.lost = false;
            ledger.unexplained = still;
        } else {
            ledger.unexplained.retain(|uuid| still.contains(uuid));
        }
    }

    #[cfg(test)]
    pub(super) fn known_inode(&self) -> Option<u64> {
        self.known.lock().unwrap().as_ref().map(|known| known.file.stamp().inode())
    }

    fn remember(&self, file: Trusted, ledger: Arc<Ledger>) {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = Some(Known { file, ledger });
    }

    fn ledger_path(&self) -> PathBuf {
        self.state_dir.join(LEDGER)
    }

    fn lock_path(&self) -> PathBuf {
        self.state_dir.join("lock")
    }

    /// The copy of the ledger. If the ledger is lost, leases of which root's runtimes have no record (pending ones, a
    /// prestart hook's, rootless users') are found only here.
    fn copy_path(&self) -> PathBuf {
        self.state_dir.join(COPY)
    }

    /// The copy, if it is readable and of this boot.
    ///
    /// # Errors
    /// It exists and cannot be read, although it may be intact; or a newer version wrote it.
    fn read_copy(&self, boot: &str) -> Result<Option<Ledger>, LedgerError> {
        let path = self.copy_path();
        let content = trusted::read(&path, LARGEST).map_err(|error| failed("read", &path, error))?;
        match content.and_then(Result::ok).map(|content| parse_ledger(&content, &path)) {
            Some(Err(error @ LedgerError::Newer { .. })) => Err(error),
            Some(Ok(ledger)) if ledger.boot_id == boot => Ok(Some(ledger)),
            _ => Ok(None),
        }
    }

    /// The id of this boot.
    fn boot_id() -> Result<&'static str, LedgerError> {
        process::read_boot_id().map_err(|error| failed("read", Path::new(process::BOOT_ID_FILE), error))
    }

    /// The ledger in the file, which is not read again if it is unchanged; `None`: there is no file.
    fn read_file(&self) -> Result<Option<Arc<Ledger>>, LedgerError> {
        let path = self.ledger_path();
        if let Some(known) = &*self.known.lock().unwrap_or_else(PoisonError::into_inner) {
            let present = path.symlink_metadata().map(|meta| Stamp::of(&meta));
            if present.is_ok_and(|present| known.file.stamp() == present) {
                return Ok(Some(known.ledger.clone()));
            }
        }
        let unread = |error| failed("read", &path, error);
        let Some(file) = trusted::open(&path, LARGEST).map_err(unread)? else { return Ok(None) };
        let file = file.map_err(|why| LedgerError::Corrupt { path: text(&path), why })?;
        let ledger = Arc::new(parse_ledger(&file.read().map_err(unread)?, &path)?);
        self.remember(file, ledger.clone());
        Ok(Some(ledger))
    }

    /// The ledger; `None`: there was none yet.
    fn load(&self) -> Result<Option<Arc<Ledger>>, LedgerError> {
        let Some(ledger) = self.read_file()? else { return self.load_missing() };
        if ledger.boot_id != Self::boot_id()? {
            if self.is_marked()? {
                return Err(self
                    .corrupt("it was written in an earlier boot, but its lock names a ledger of this boot"));
            }
            // A running container or daemon has its lease elsewhere.
            if let Some(what) = self.find_sign(find_running)? {
                return self.load_begun(what);
            }
        }
        Ok(Some(ledger))
    }

    /// A missing ledger is a loss, if its copy or its lock exists. Otherwise there was none yet.
    fn load_missing(&self) -> Result<Option<Arc<Ledger>>, LedgerError> {
        match fs::symlink_metadata(self.copy_path()) {
            Ok(_) => return Err(self.corrupt("it is gone")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed("read", &self.copy_path(), error)),
        }
        if self.is_marked()? {
            return Err(self.corrupt("it is missing, but its lock names it"));
        }
        match self.find_sign(find_trace)? {
            Some(what) => self.load_begun(what),
            None if self.rebuilds => Err(self.corrupt("it is given up")),
            None => Ok(None),
        }
    }

    /// The ledger, if another process has begun it since it was looked for.
    fn load_begun(&self, what: String) -> Result<Option<Arc<Ledger>>, LedgerError> {
        if self.is_marked()? { self.load() } else { Err(self.unmounted_error(what)) }
    }

    fn corrupt(&self, why: &str) -> LedgerError {
        LedgerError::Corrupt { path: text(&self.ledger_path()), why: why.to_owned() }
    }

    /// Whether the lock says that there is a ledger of this boot.
    fn is_marked(&self) -> Result<bool, LedgerError> {
        Ok(Mark::read_in(&self.lock_path(), Self::boot_id()?).is_some())
    }

    /// Rebuilds the ledger from its copy `last`, if there is one, and from the running system, writes it and keeps the
    /// unusable file.
    fn rebuild_ledger(
        &self,
        why: &str,
        last: Option<Ledger>,
        ours: Namespaces,
        mark: Option<&Mark>,
        place: &Place,
    ) -> Result<Ledger, LedgerError> {
        let (path, boot) = (self.ledger_path(), Self::boot_id()?);
        // First of all: from other namespaces the rebuild would not see the running processes.
        let checked = match (&last, mark) {
            (Some(last), _) => last.check_namespaces(ours),
            (None, Some(mark)) => mark.namespaces.check(ours),
            (None, None) => Ok(()),
        };
        // Who sees every process may say that none is left of what the ledger names.
        let may_give_up = self.rebuilds && ours.are_the_first();
        let last = match checked {
            Err(_) if may_give_up => None,
            checked => checked.map(|()| last)?,
        };
        let shown = text(&path);
        tracing::warn!("ledger {shown} cannot be used ({why}): rebuilding it from the containers that run");
        let has_last = last.is_some();
        let mut ledger = rebuild(&self.state_dir, self.root.as_deref(), boot, last)?;
        ledger.namespaces = Some(ours);
        if !has_last {
            salvage(&path, &mut ledger);
            // This makes every existing inventory out of date.
            let counted = last_inventory(&self.state_dir, boot)?.map_or(0, |inventory| inventory.mig_changes);
            ledger.mig.count = ledger.mig.count.max(counted).saturating_add(1);
            ledger.lost = true;
            // A directory could not be replaced.
            let _ = remove(&self.copy_path());
        }
        // The copy first: a process that is killed before it has written the ledger leaves that.
        let content = ledger_text(&mut ledger).map_err(io::Error::from);
        content
            .and_then(|content| replace_own(&place.file(COPY), &content, 0o600))
            .and_then(|_| self.set_aside())
            .map_err(|error| failed("written", &path, error))?;
        self.write(&mut ledger, None, place)?;
        Ok(ledger)
    }

    /// Moves the unusable file out of the way. It and no older one is kept, for people to look at.
    fn set_aside(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.state_dir)?.flatten() {
            if entry.file_name().as_encoded_bytes().starts_with(b"ledger.json.corrupt-") {
                let _ = remove(&entry.path());
            }
        }
        let now = epoch_seconds();
        match fs::rename(self.ledger_path(), self.state_dir.join(format!("ledger.json.corrupt-{now}"))) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Replaces `before` by `ledger`. Returns the new file, open.
    fn write(
        &self,
        ledger: &mut Ledger,
        before: Option<&Ledger>,
        place: &Place,
    ) -> Result<fs::File, LedgerError> {
        let written = remember_roots(&self.state_dir, ledger, before).and_then(|()| {
            let content = ledger_text(ledger)?;
            // The copy is written first, so that it has everything that the ledger has, whenever this process is
            // killed.
            replace_own(&place.file(COPY), &content, 0o600)?;
            replace_own(&place.file(LEDGER), &content, 0o644)
        });
        written.map_err(|error| failed("written", &self.ledger_path(), error))
    }
}

/// Removes the file or directory at `path`.
fn remove(path: &Path) -> io::Result<()> {
    if fs::symlink_metadata(path)?.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

/// Settings made by people survive a boot.
fn keep_settings(ledger: Arc<Ledger>, boot: &str) -> Arc<Ledger> {
    if ledger.boot_id == boot {
        return ledger;
    }
    Arc::new(Ledger { drained: ledger.drained.clone(), ..Ledger::empty(boot) })
}

/// Whether there is a ledger in `state_dir`, or was one that is lost. `true` if this cannot be checked.
pub fn is_there(state_dir: &Path) -> bool {
    [LEDGER, COPY].iter().any(|name| {
        let found = fs::symlink_metadata(state_dir.join(name));
        !found.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    })
}

/// The ledger file's content, which every user may read. It is a hint for processes that may not open the store. Its
/// owner cannot be checked: in a user namespace, root's files belong to the overflow uid (`user_namespaces(7)`).
pub(crate) fn read_text(state_dir: &Path) -> Vec<u8> {
    read_bounded(&state_dir.join(LEDGER)).ok().flatten().unwrap_or_default()
}

/// A ledger and its open file. While it is open, no other file has its inode. Times alone are not enough: two files may be
/// written within one tick of the kernel's clock.
#[derive(Debug)]
pub(super) struct Known {
    file: Trusted,
    ledger: Arc<Ledger>,
}

#[cfg(test)]
mod known_tests {
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
