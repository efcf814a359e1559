//! The ledger's file, and the one way to change it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use super::error::{failed, text};
use super::events_of_change;
use super::file_system::FileSystem;
use super::known::{Known, Last};
use super::liveness::{Alive, Scan, reclaim};
use super::lock;
use super::lock_mark::Mark;
use super::namespaces::{self, Namespaces};
use super::rebuild::{inventory, rebuild, trace, unexplained};
use super::runtime_record::{LARGEST, read_up_to};
use super::runtime_roots::remember_roots;
use super::stored::{self, NotALedger, parse};
use super::unmounted::Place;
use super::{Lease, Ledger, LedgerError};
use crate::events::{self, Event};
use crate::fs::trusted;
use crate::host::boot_id;
use crate::process::uptime_seconds;
use crate::text::safe;
use serde_json::Value;

const LEDGER: &str = "ledger.json";
const COPY: &str = "ledger.json.copy";
/// The ledger of one state directory.
#[derive(Debug)]
pub struct Store {
    pub(super) state_dir: PathBuf,
    /// Where the caller's runtime keeps its records.
    pub(super) root: Option<PathBuf>,
    /// That of the state directory, when the store was opened.
    pub(super) file_system: FileSystem,
    /// Whether a ledger that was on another file system is given up.
    pub(super) given_up: bool,
    /// What was read or written last.
    pub(super) last: Last,
}

/// Leases that an update freed because their containers had ended. Their servers may have to be adjusted or stopped.
pub type Freed = Vec<Lease>;

/// The ledger from which a change starts.
struct Beginning {
    start: Arc<Ledger>,
    /// Whether the file says the same.
    is_stored: bool,
    /// What the file says, if it is sound and still not where to start: it is of an earlier boot, or does not have the
    /// leases of a ledger that is given up.
    old: Option<Arc<Ledger>>,
    /// That the ledger was lost and rebuilt.
    lost: Option<Event>,
}

impl Beginning {
    const fn stored(start: Arc<Ledger>) -> Self {
        Self { start, is_stored: true, old: None, lost: None }
    }

    fn not_stored(start: Ledger, lost: Option<Event>) -> Self {
        Self { start: Arc::new(start), is_stored: false, old: None, lost }
    }
}

/// The content of `ledger.json`.
enum Loaded {
    Missing,
    Sound(Arc<Ledger>),
    /// It is not a ledger, for this reason.
    Corrupt(String),
}

impl Store {
    /// The ledger in `state_dir`, which is created if it is missing (0755).
    ///
    /// # Errors
    /// The directory cannot be created or cannot be trusted.
    pub fn open(state_dir: &Path) -> Result<Self, LedgerError> {
        let unusable = |why| LedgerError::Directory { path: safe(&state_dir.to_string_lossy()), why };
        trusted::make(state_dir).map_err(unusable)?;
        let file_system = FileSystem::of(state_dir).map_err(|error| failed("read", state_dir, error))?;
        Ok(Self {
            state_dir: state_dir.to_owned(),
            root: None,
            file_system,
            given_up: false,
            last: Last::default(),
        })
    }

    /// [`Store::open`] for a caller that knows a container's `record`. After a loss of the ledger, the records beside
    /// it are read, too.
    #[must_use]
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
    ///
    /// # Errors
    /// [`LedgerError::Elsewhere`], [`LedgerError::NoNamespaces`].
    pub fn is_of_here(&self) -> Result<(), LedgerError> {
        match self.read() {
            Err(error) if error.is_elsewhere() => Err(error),
            _ => Ok(()),
        }
    }

    /// [`Store::read`] in any namespace. The result may be shown but not acted upon.
    ///
    /// # Errors
    /// It cannot be read or parsed.
    pub fn peek(&self) -> Result<Ledger, LedgerError> {
        let boot = Self::boot_id()?;
        match self.load()? {
            Loaded::Missing => Ok(Ledger::empty(&boot)),
            Loaded::Sound(ledger) => Ok(of_this_boot(&ledger, &boot)),
            Loaded::Corrupt(why) => Err(LedgerError::Corrupt { path: text(&self.file()), why }),
        }
    }

    /// Takes the lock, frees the leases of ended containers, runs `change` and writes the ledger if it differs.
    ///
    /// If `change` fails, its changes are dropped, freed leases stay freed, and its error is the inner one. `change`
    /// must not start, ask or wait for a process, because all other processes wait for the lock meanwhile.
    ///
    /// Also removes temporary files that killed processes left in the state directory.
    ///
    /// An unreadable or missing ledger is rebuilt from its copy and from what runs. One unreadable file is kept beside
    /// it as `ledger.json.corrupt-<seconds since the epoch>`.
    ///
    /// # Errors
    /// The lock cannot be taken within 5 s, the file cannot be read or written, a newer version wrote it, or its process
    /// ids are of other namespaces than this process's. Nothing is changed then.
    pub fn update<T, E>(
        &self,
        change: impl FnOnce(&mut Ledger) -> Result<T, E>,
    ) -> Result<(Result<T, E>, Freed), LedgerError> {
        self.update_after(Scan::Full, change)
    }

    /// [`Store::update`], where `scan` says how containers that have ended are looked for.
    ///
    /// # Errors
    /// As [`Store::update`].
    pub(crate) fn update_after<T, E>(
        &self,
        scan: Scan,
        change: impl FnOnce(&mut Ledger) -> Result<T, E>,
    ) -> Result<(Result<T, E>, Freed), LedgerError> {
        // Before the lock, because asking for each process takes longer than all the rest.
        let seen = self.known().map(|ledger| Alive::of(&ledger, scan)).unwrap_or_default();
        self.locked(|ledger| reclaim(ledger, &seen), change)
    }

    /// [`Store::update`] for a step of one lease, which does not look for containers that have ended.
    ///
    /// # Errors
    /// As [`Store::update`].
    pub(super) fn step<T, E>(
        &self,
        change: impl FnOnce(&mut Ledger) -> Result<T, E>,
    ) -> Result<Result<T, E>, LedgerError> {
        let _parsed_before_the_lock = self.known();
        Ok(self.locked(|_| Freed::new(), change)?.0)
    }

    fn locked<T, E>(
        &self,
        reclaim: impl Fn(&mut Ledger) -> Freed,
        change: impl FnOnce(&mut Ledger) -> Result<T, E>,
    ) -> Result<(Result<T, E>, Freed), LedgerError> {
        let (boot, ours) = (Self::boot_id()?, Namespaces::current()?);
        let lock = lock::take(&self.lock_file(), &self.file())?;
        let mark = Mark::read(&lock, &boot);
        let loaded = self.load()?;
        let place = self.place(&lock)?;
        let Beginning { old, start, is_stored, lost } = match loaded {
            Loaded::Missing => Beginning::not_stored(Ledger::empty(&boot), None),
            Loaded::Sound(ledger) if ledger.boot_id == boot && !self.given_up => Beginning::stored(ledger),
            Loaded::Sound(ledger) => {
                let start = self.with_those_of_given_up(of_this_boot(&ledger, &boot))?;
                Beginning { old: Some(ledger), ..Beginning::not_stored(start, None) }
            }
            Loaded::Corrupt(why) => {
                let ledger = self.rebuilt(&why, &boot, ours, mark.as_ref(), &place)?;
                let lost = events_of_change::rebuilt(&ledger, &why);
                Beginning::not_stored(ledger, Some(lost))
            }
        };
        start.check_namespaces(ours)?;
        // Not before: elsewhere the processes that write those files seem to have ended.
        crate::fs::atomic::sweep(&self.state_dir);
        let settled = || {
            let mut ledger = Ledger::clone(&start);
            let freed = reclaim(&mut ledger);
            self.explain(&mut ledger);
            (ledger, freed)
        };
        let (mut after, mut freed) = settled();
        let outcome = change(&mut after);
        if outcome.is_err() {
            (after, freed) = settled();
        }
        after.note_idle(uptime_seconds);
        after.namespaces = after.names_processes().then_some(ours);
        if mark.is_none() && after.namespaces.is_some() {
            self.check_containers(&after)?;
        }
        let mut events: Vec<Event> = lost.into_iter().collect();
        let mut written = None;
        if !is_stored || *start != after {
            written = Some(self.write(&mut after, &place)?);
            events.extend(events_of_change::events(old.as_ref().unwrap_or(&start), &after));
        }
        // The mark is written last, because a mark without the files means that they were lost.
        let wanted = after.namespaces.map(|namespaces| Mark::of(&boot, namespaces));
        if mark != wanted {
            Mark::write(wanted.as_ref(), &lock)
                .map_err(|error| failed("written", &self.lock_file(), error))?;
        }
        events::tell(&self.state_dir, &events);
        if let Some(file) = written {
            self.last.wrote(file, after);
        }
        // Not only when both ledgers have been freed.
        drop(lock);
        Ok((outcome, freed))
    }

    /// Reopens closed devices as soon as every process there is attributable to a lease. After a loss, the first new
    /// inventory shows which devices have to be closed.
    fn explain(&self, ledger: &mut Ledger) {
        let inventory = || inventory(&self.state_dir, &ledger.boot_id).ok().flatten();
        let is_new =
            ledger.lost && inventory().is_some_and(|inventory| inventory.mig_changes == ledger.mig.count);
        if !is_new && ledger.unexplained.is_empty() {
            return;
        }
        // What cannot be read for a moment changes nothing.
        let Ok(still) = unexplained(&self.state_dir, ledger) else { return };
        if is_new {
            ledger.lost = false;
            ledger.unexplained = still;
        } else {
            ledger.unexplained.retain(|uuid| still.contains(uuid));
        }
    }

    /// The inode of the file whose content is known.
    #[cfg(test)]
    pub(super) fn known_inode(&self) -> Option<u64> {
        self.last.inode()
    }

    fn file(&self) -> PathBuf {
        self.state_dir.join(LEDGER)
    }

    fn lock_file(&self) -> PathBuf {
        self.state_dir.join("lock")
    }

    pub(super) fn clearing_file(&self) -> PathBuf {
        self.state_dir.join("clearing.lock")
    }

    /// The path of the unreadable ledger during the rebuild. Without it, a crash in between would leave no ledger,
    /// which would mean an empty one.
    fn aside(&self) -> PathBuf {
        self.state_dir.join("ledger.json.rebuilding")
    }

    /// A copy of what was written last. If the ledger is lost, leases that root's runtimes have no record of (pending
    /// ones, a prestart hook's, those of rootless users) are found only here.
    fn copy(&self) -> PathBuf {
        self.state_dir.join(COPY)
    }

    /// The copy, if it is readable and of this boot.
    ///
    /// # Errors
    /// It exists and cannot be read, although it may be intact; or a newer version wrote it.
    fn last(&self, boot: &str) -> Result<Option<Ledger>, LedgerError> {
        let path = self.copy();
        let content = trusted::read(&path, LARGEST).map_err(|error| failed("read", &path, error))?;
        match content.and_then(Result::ok).map(|content| parse(&content)) {
            Some(Err(NotALedger::Newer(found))) => Err(LedgerError::Newer { path: text(&path), found }),
            Some(Ok(ledger)) if ledger.boot_id == boot => Ok(Some(ledger)),
            _ => Ok(None),
        }
    }

    /// The id of this boot.
    fn boot_id() -> Result<String, LedgerError> {
        let id = boot_id::read().map_err(|error| failed("read", Path::new(boot_id::FILE), error))?;
        Ok(id.to_owned())
    }

    /// The ledger, if it is sound. Called before the lock is taken, because parsing takes longer than all the rest.
    fn known(&self) -> Option<Arc<Ledger>> {
        let file = trusted::open(&self.file(), LARGEST).ok()??.ok()?;
        if let Some(ledger) = self.last.of(&file) {
            return Some(ledger);
        }
        let ledger = Arc::new(parse(&file.read().ok()?).ok()?);
        self.last.is(Known { file, ledger: ledger.clone() });
        Some(ledger)
    }

    /// The ledger; if its file is the one that was read or written last, it is not read and parsed again.
    fn load(&self) -> Result<Loaded, LedgerError> {
        let path = self.file();
        let unread = |error| failed("read", &path, error);
        let file = match trusted::open(&path, LARGEST).map_err(unread)? {
            Some(Ok(file)) => file,
            Some(Err(why)) => return Ok(Loaded::Corrupt(why)),
            None => return self.missing(),
        };
        let parsed = match self.last.of(&file) {
            Some(ledger) => Ok(ledger),
            None => parse(&file.read().map_err(unread)?).map(Arc::new),
        };
        let ledger = match parsed {
            Ok(ledger) => ledger,
            Err(NotALedger::Newer(found)) => return Err(LedgerError::Newer { path: text(&path), found }),
            Err(NotALedger::Corrupt(why)) => return Ok(Loaded::Corrupt(why)),
        };
        let boot = Self::boot_id()?;
        if ledger.boot_id != boot {
            if Mark::read_in(&self.lock_file(), &boot).is_some() {
                return Ok(Loaded::Corrupt(
                    "it was written in an earlier boot, but its lock names a ledger of this boot".into(),
                ));
            }
            // What has run since boot may have its leases elsewhere.
            self.check_file_system()?;
        }
        self.last.is(Known { file, ledger: ledger.clone() });
        Ok(Loaded::Sound(ledger))
    }

    /// What a missing ledger means: a loss, if there is evidence of an earlier one. Otherwise there was none yet.
    fn missing(&self) -> Result<Loaded, LedgerError> {
        for (path, why) in [(self.aside(), "an earlier rebuild did not finish"), (self.copy(), "it is gone")]
        {
            match fs::symlink_metadata(&path) {
                Ok(_) => return Ok(Loaded::Corrupt(why.into())),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(failed("read", &path, error)),
            }
        }
        let marked = Mark::read_in(&self.lock_file(), &Self::boot_id()?).is_some();
        if !marked {
            self.check_file_system()?;
        }
        let found = if marked {
            Some("it is missing, but its lock names it".to_owned())
        } else {
            trace(&self.state_dir, self.root.as_deref())?
        };
        Ok(found.map_or(Loaded::Missing, |what| {
            Loaded::Corrupt(format!("it and its copy are missing, but {what}"))
        }))
    }

    /// Rebuilds the ledger, writes it and keeps the unreadable file.
    fn rebuilt(
        &self,
        why: &str,
        boot: &str,
        ours: Namespaces,
        mark: Option<&Mark>,
        place: &Place,
    ) -> Result<Ledger, LedgerError> {
        let (path, aside) = (self.file(), self.aside());
        let last = self.last(boot)?;
        // First of all: from other namespaces the rebuild would not see the running processes.
        match (&last, mark) {
            (Some(last), _) => last.check_namespaces(ours)?,
            (None, Some(mark)) => namespaces::same(mark.namespaces, ours)?,
            (None, None) => {}
        }
        tracing::warn!(
            "ledger {} cannot be used ({why}): rebuilding it from the containers that run",
            text(&path)
        );
        let has_last = last.is_some();
        let mut ledger = rebuild(&self.state_dir, self.root.as_deref(), boot, last)?;
        // The mark of the lost ledger was already checked above.
        ledger.namespaces = mark.filter(|_| !has_last).map_or(ledger.namespaces, |_| Some(ours));
        ledger.check_namespaces(ours)?;
        if fs::symlink_metadata(&path).is_ok() {
            let _ = remove(&aside);
            fs::rename(&path, &aside).map_err(|error| failed("written", &path, error))?;
        }
        if !has_last {
            salvage(&aside, &mut ledger);
            // This makes every existing inventory out of date.
            let counted = inventory(&self.state_dir, boot)?.map_or(0, |inventory| inventory.mig_changes);
            ledger.mig.count = ledger.mig.count.max(counted).saturating_add(1);
            ledger.lost = true;
            // A file with another owner would keep that owner.
            let _ = remove(&self.copy());
        }
        self.write(&mut ledger, place)?;
        self.keep_one_corrupt();
        Ok(ledger)
    }

    /// The old file is kept only for people to look at, so failing to keep it is no error.
    fn keep_one_corrupt(&self) {
        let old = fs::read_dir(&self.state_dir).into_iter().flatten().flatten();
        for entry in
            old.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"ledger.json.corrupt-"))
        {
            let _ = remove(&entry.path());
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let _ = fs::rename(self.aside(), self.state_dir.join(format!("ledger.json.corrupt-{now}")));
    }

    /// The new file, open.
    fn write(&self, ledger: &mut Ledger, place: &Place) -> Result<fs::File, LedgerError> {
        let written = remember_roots(&self.state_dir, ledger).and_then(|()| {
            let content = stored::text(ledger)?;
            // The copy is written first, so that it has everything that the ledger has, whenever this process is
            // killed.
            crate::fs::atomic::replace(&place.file(COPY), &content, 0o600)?;
            crate::fs::atomic::replace_and_keep(&place.file(LEDGER), &content, 0o644)
        });
        written.map_err(|error| failed("written", &self.file(), error))
    }
}

/// Removes the file or directory at `path`.
fn remove(path: &Path) -> io::Result<()> {
    if fs::symlink_metadata(path)?.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

/// Keeps what users and sublet have set, as far as it can be read in a ledger of another version.
fn salvage(path: &Path, ledger: &mut Ledger) {
    let content = trusted::read_if_trusted(path, LARGEST).unwrap_or_default();
    let Ok(Value::Object(mut old)) = serde_json::from_slice(&content) else { return };
    let mut list = |name| old.remove(name).unwrap_or_default();
    ledger.drained = serde_json::from_value(list("drained")).unwrap_or_default();
    if list("boot_id") == ledger.boot_id.as_str() {
        ledger.compute_modes = serde_json::from_value(list("compute_modes")).unwrap_or_default();
        ledger.mig = serde_json::from_value(list("mig")).unwrap_or_default();
    }
}

/// Only settings made by people survive a boot.
fn of_this_boot(ledger: &Ledger, boot: &str) -> Ledger {
    if ledger.boot_id == boot {
        return ledger.clone();
    }
    Ledger { drained: ledger.drained.clone(), ..Ledger::empty(boot) }
}

/// Whether there is a ledger in `state_dir`, or was one that is lost. `true` if this cannot be checked.
#[must_use]
pub fn is_there(state_dir: &Path) -> bool {
    let files =
        ["ledger.json", "ledger.json.copy", "ledger.json.rebuilding"].map(|name| state_dir.join(name));
    let absent =
        |path: &Path| fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    !files.iter().all(|path| absent(path))
}

/// The ledger file's content, which every user may read. It is a hint for processes that may not open the store. Its
/// owner cannot be checked: in a user namespace, root's files belong to the overflow uid (`user_namespaces(7)`).
#[must_use]
pub fn written(state_dir: &Path) -> Vec<u8> {
    read_up_to(&state_dir.join("ledger.json"), LARGEST).ok().flatten().unwrap_or_default()
}
