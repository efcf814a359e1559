//! The ledger's file, its text, and the one way to change it. What a store last read or wrote is kept, so that an
//! unchanged ledger is not read and parsed again.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use std::{fs, io};

use serde::Deserialize;

use super::error::{failed, text};
use super::liveness::{Scan, Seen, reclaim};
use super::lock::Mark;
use super::lock::Namespaces;
use super::lock::Place;
use super::rebuild::{find_running, find_trace, last_inventory, rebuild, salvage, unexplained};
use super::runtime_record::remember_roots;
use super::runtime_record::{LARGEST, read_up_to};
use super::{Lease, LeaseId, Ledger, LedgerError, SCHEMA, events_of_change, lock};
use crate::events::Event;
use crate::fs::atomic::replace_own;
use crate::fs::trusted;
use crate::fs::trusted::{Stamp, Trusted};
use crate::parse_errors::plain;
use crate::process::uptime_seconds;
use crate::text::safe;
use crate::{events, host};

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
    pub(super) cache: Cache,
}

/// Leases that an update freed because their containers had ended. Their servers may have to be adjusted or stopped.
pub type Freed = Vec<Lease>;

/// The ledger from which a change starts.
struct Beginning {
    start: Arc<Ledger>,
    /// Whether the file has the same content.
    is_stored: bool,
    /// The file's content, if it is of an earlier boot.
    old: Option<Arc<Ledger>>,
    /// The loss of the ledger.
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
    pub fn open(state_dir: &Path) -> Result<Self, LedgerError> {
        let unusable = |why| LedgerError::Directory { path: safe(&state_dir.to_string_lossy()), why };
        let directory = trusted::make(state_dir).map_err(unusable)?;
        Ok(Self {
            state_dir: state_dir.to_owned(),
            root: None,
            file_system: directory.dev(),
            rebuilds: false,
            cache: Cache::default(),
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
    pub fn is_of_here(&self) -> Result<(), LedgerError> {
        match self.read() {
            Err(error) if error.is_elsewhere() => Err(error),
            _ => Ok(()),
        }
    }

    /// [`Store::read`] in any namespace. The result may be shown but not acted upon.
    pub fn peek(&self) -> Result<Ledger, LedgerError> {
        let boot = Self::boot_id()?;
        match self.load()? {
            Loaded::Missing => Ok(Ledger::empty(&boot)),
            Loaded::Sound(ledger) => Ok(keep_settings(&ledger, &boot)),
            Loaded::Corrupt(why) => Err(LedgerError::Corrupt { path: text(&self.ledger_path()), why }),
        }
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

    /// [`Store::update`] after a scan for ended containers.
    pub(crate) fn update_with_scan<T, E>(
        &self,
        scan: Scan,
        change: impl FnOnce(&mut Ledger) -> Result<T, E>,
    ) -> Result<(Result<T, E>, Freed), LedgerError> {
        self.update_with_gone(scan, None, change)
    }

    /// [`Store::update_with_scan`], where the container of the lease `gone` is known to have ended.
    pub(super) fn update_with_gone<T, E>(
        &self,
        scan: Scan,
        gone: Option<LeaseId>,
        change: impl FnOnce(&mut Ledger) -> Result<T, E>,
    ) -> Result<(Result<T, E>, Freed), LedgerError> {
        // Before the lock, because asking for each process takes longer than all the rest.
        let seen = self.known().map(|ledger| Seen::of(&ledger, scan)).unwrap_or_default().with_gone(gone);
        self.locked(|ledger| reclaim(ledger, &seen), scan == Scan::Full, change)
    }

    /// [`Store::update`] of one lease, which does not look for ended containers.
    pub(crate) fn update_without_scan<T, E>(
        &self,
        change: impl FnOnce(&mut Ledger) -> Result<T, E>,
    ) -> Result<Result<T, E>, LedgerError> {
        let _parsed_before_the_lock = self.known();
        Ok(self.locked(|_| Freed::new(), false, change)?.0)
    }

    fn locked<T, E>(
        &self,
        reclaim: impl Fn(&mut Ledger) -> Freed,
        sweeps: bool,
        change: impl FnOnce(&mut Ledger) -> Result<T, E>,
    ) -> Result<(Result<T, E>, Freed), LedgerError> {
        let (boot, ours) = (Self::boot_id()?, Namespaces::current()?);
        let lock = lock::take(&self.lock_path(), &self.ledger_path())?;
        let mark = Mark::read(&lock, &boot);
        let loaded = self.load()?;
        let place = self.place(&lock)?;
        let Beginning { old, start, is_stored, lost } = match loaded {
            Loaded::Missing => Beginning::not_stored(Ledger::empty(&boot), None),
            Loaded::Sound(ledger) if self.rebuilds => {
                let last = (ledger.boot_id == boot).then(|| Ledger::clone(&ledger));
                self.rebuild_ledger("it is given up", last, ours, mark.as_ref(), &place)?
            }
            Loaded::Sound(ledger) if ledger.boot_id == boot => Beginning::stored(ledger),
            Loaded::Sound(ledger) => {
                let start = keep_settings(&ledger, &boot);
                Beginning { old: Some(ledger), ..Beginning::not_stored(start, None) }
            }
            Loaded::Corrupt(why) => {
                self.rebuild_ledger(&why, self.read_copy(&boot)?, ours, mark.as_ref(), &place)?
            }
        };
        start.check_namespaces(ours)?;
        // Not before: elsewhere the processes that write those files seem to have ended.
        if sweeps {
            crate::fs::atomic::sweep(&self.state_dir);
        }
        let settled = || {
            let mut ledger = Ledger::clone(&start);
            let freed = reclaim(&mut ledger);
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
        let mut events: Vec<Event> = lost.into_iter().collect();
        let mut written = None;
        if !is_stored || *start != after {
            written = Some(self.write(&mut after, is_stored.then_some(&*start), &place)?);
            events.extend(events_of_change::events(old.as_ref().unwrap_or(&start), &after));
        }
        // The mark is written last, because a mark without the files means that they were lost.
        let wanted = after.namespaces.map(|namespaces| Mark::of(&boot, namespaces));
        if mark != wanted {
            Mark::write(wanted.as_ref(), &lock)
                .map_err(|error| failed("written", &self.lock_path(), error))?;
        }
        events::emit(&self.state_dir, &events);
        if let Some(file) = written {
            self.cache.remember_written(file, after);
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

    /// The inode of the file whose content is known.
    #[cfg(test)]
    pub(super) fn known_inode(&self) -> Option<u64> {
        self.cache.inode()
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
        match content.and_then(Result::ok).map(|content| parse_ledger(&content)) {
            Some(Err(NotALedger::Newer(found))) => Err(LedgerError::Newer { path: text(&path), found }),
            Some(Ok(ledger)) if ledger.boot_id == boot => Ok(Some(ledger)),
            _ => Ok(None),
        }
    }

    /// The id of this boot.
    fn boot_id() -> Result<String, LedgerError> {
        let id =
            host::read_boot_id().map_err(|error| failed("read", Path::new(host::BOOT_ID_FILE), error))?;
        Ok(id.to_owned())
    }

    /// The ledger, if it is sound. Called before the lock is taken, because parsing takes longer than all the rest.
    fn known(&self) -> Option<Arc<Ledger>> {
        let path = self.ledger_path();
        if let Some(ledger) = self.cache.get(&path) {
            return Some(ledger);
        }
        let file = trusted::open(&path, LARGEST).ok()??.ok()?;
        let ledger = Arc::new(parse_ledger(&file.read().ok()?).ok()?);
        self.cache.remember(Known { file, ledger: ledger.clone() });
        Some(ledger)
    }

    /// The ledger, from the cache if its file is unchanged.
    fn load(&self) -> Result<Loaded, LedgerError> {
        let path = self.ledger_path();
        let unread = |error| failed("read", &path, error);
        let ledger = if let Some(ledger) = self.cache.get(&path) {
            ledger
        } else {
            let file = match trusted::open(&path, LARGEST).map_err(unread)? {
                Some(Ok(file)) => file,
                Some(Err(why)) => return Ok(Loaded::Corrupt(why)),
                None => return self.load_missing(),
            };
            let ledger = match parse_ledger(&file.read().map_err(unread)?).map(Arc::new) {
                Ok(ledger) => ledger,
                Err(NotALedger::Newer(found)) => return Err(LedgerError::Newer { path: text(&path), found }),
                Err(NotALedger::Corrupt(why)) => return Ok(Loaded::Corrupt(why)),
            };
            self.cache.remember(Known { file, ledger: ledger.clone() });
            ledger
        };
        let boot = Self::boot_id()?;
        if ledger.boot_id != boot {
            if self.is_marked()? {
                return Ok(Loaded::Corrupt(
                    "it was written in an earlier boot, but its lock names a ledger of this boot".into(),
                ));
            }
            // A running container or daemon has its lease elsewhere.
            if let Some(what) = self.find_sign(find_running)? {
                return self.load_begun(what);
            }
        }
        Ok(Loaded::Sound(ledger))
    }

    /// A missing ledger is a loss, if its copy or its lock exists. Otherwise there was none yet.
    fn load_missing(&self) -> Result<Loaded, LedgerError> {
        match fs::symlink_metadata(self.copy_path()) {
            Ok(_) => return Ok(Loaded::Corrupt("it is gone".into())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed("read", &self.copy_path(), error)),
        }
        if self.is_marked()? {
            return Ok(Loaded::Corrupt("it is missing, but its lock names it".into()));
        }
        match self.find_sign(find_trace)? {
            Some(what) => self.load_begun(what),
            None if self.rebuilds => Ok(Loaded::Corrupt("it is given up".into())),
            None => Ok(Loaded::Missing),
        }
    }

    /// The ledger, if another process has begun it since it was looked for.
    fn load_begun(&self, what: String) -> Result<Loaded, LedgerError> {
        if self.is_marked()? { self.load() } else { Err(self.unmounted_error(what)) }
    }

    /// Whether the lock says that there is a ledger of this boot.
    fn is_marked(&self) -> Result<bool, LedgerError> {
        Ok(Mark::read_in(&self.lock_path(), &Self::boot_id()?).is_some())
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
    ) -> Result<Beginning, LedgerError> {
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
        tracing::warn!(
            "ledger {} cannot be used ({why}): rebuilding it from the containers that run",
            text(&path)
        );
        let has_last = last.is_some();
        let mut ledger = rebuild(&self.state_dir, self.root.as_deref(), &boot, last)?;
        ledger.namespaces = Some(ours);
        if !has_last {
            salvage(&path, &mut ledger);
            // This makes every existing inventory out of date.
            let counted =
                last_inventory(&self.state_dir, &boot)?.map_or(0, |inventory| inventory.mig_changes);
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
        let event = events_of_change::rebuilt_event(&ledger, why);
        Ok(Beginning::not_stored(ledger, Some(event)))
    }

    /// Moves the unusable file out of the way. It and no older one is kept, for people to look at.
    fn set_aside(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.state_dir)?.flatten() {
            if entry.file_name().as_encoded_bytes().starts_with(b"ledger.json.corrupt-") {
                let _ = remove(&entry.path());
            }
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
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
fn keep_settings(ledger: &Ledger, boot: &str) -> Ledger {
    if ledger.boot_id == boot {
        return ledger.clone();
    }
    Ledger { drained: ledger.drained.clone(), ..Ledger::empty(boot) }
}

/// Whether there is a ledger in `state_dir`, or was one that is lost. `true` if this cannot be checked.
#[must_use]
pub fn is_there(state_dir: &Path) -> bool {
    let is_absent = |name: &str| {
        let found = fs::symlink_metadata(state_dir.join(name));
        found.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    };
    ![LEDGER, COPY].into_iter().all(is_absent)
}

/// The ledger file's content, which every user may read. It is a hint for processes that may not open the store. Its
/// owner cannot be checked: in a user namespace, root's files belong to the overflow uid (`user_namespaces(7)`).
#[must_use]
pub(crate) fn read_text(state_dir: &Path) -> Vec<u8> {
    read_up_to(&state_dir.join("ledger.json"), LARGEST).ok().flatten().unwrap_or_default()
}

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

/// Why a text cannot be used as the ledger.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NotALedger {
    /// A newer version of sublet wrote it, with this schema. It is not rebuilt: its content may exist nowhere else.
    Newer(String),
    /// It is no ledger, for this reason.
    Corrupt(String),
}

/// All that is known of a ledger of another version.
#[derive(Deserialize)]
struct OfAnyVersion {
    schema: String,
}

/// Parses `content`. Ids become names of directories and are checked for that.
///
/// # Errors
/// It is not a ledger, or is a newer version's.
pub(super) fn parse_ledger(content: &[u8]) -> Result<Ledger, NotALedger> {
    let parsed: Result<Ledger, _> = serde_json::from_slice(content);
    if parsed.as_ref().map_or(true, |ledger| ledger.schema != SCHEMA) {
        if let Some(newer) = newer_schema(content) {
            return Err(NotALedger::Newer(newer));
        }
    }
    let mut ledger = parsed.map_err(|error| NotALedger::Corrupt(plain(&error.to_string(), None)))?;
    let resolved = ledger.resolve_mount_points();
    resolved.ok_or_else(|| NotALedger::Corrupt("a lease has mount points that are not listed".to_owned()))?;
    check_schema(&ledger).map_err(NotALedger::Corrupt)?;
    Ok(ledger)
}

/// The text of `ledger`, which is the same afterwards.
///
/// # Errors
/// It has a path that is not UTF-8.
pub(super) fn ledger_text(ledger: &mut Ledger) -> serde_json::Result<Vec<u8>> {
    ledger.number_mount_points();
    let text = serde_json::to_vec(ledger);
    // Each number is that of a list.
    let _ = ledger.resolve_mount_points();
    text
}

/// The schema, if it has our name and a higher number.
fn newer_schema(content: &[u8]) -> Option<String> {
    let OfAnyVersion { schema } = serde_json::from_slice(content).ok()?;
    let number = |schema: &str| {
        let (name, number) = schema.split_once('/')?;
        let number: u64 = number.parse().ok()?;
        Some((name.to_owned(), number))
    };
    let ((found, found_number), (ours, our_number)) = (number(&schema)?, number(SCHEMA)?);
    (found == ours && found_number > our_number).then(|| safe(&schema))
}

fn check_schema(ledger: &Ledger) -> Result<(), String> {
    if ledger.schema != SCHEMA {
        return Err(format!("its schema is {}, but {SCHEMA} is expected", safe(&ledger.schema)));
    }
    let bad_id = ledger.leases.iter().find(|lease| LeaseId::parse(lease.id.as_str()).is_none());
    if let Some(lease) = bad_id {
        return Err(format!("{} is not a lease id", safe(lease.id.as_str())));
    }
    let wanted = ledger.leases.iter().filter_map(|lease| lease.daemon.as_ref());
    let mut keys = wanted.chain(ledger.daemons.iter().map(|daemon| &daemon.key));
    match keys.find(|key| key.0.is_empty() || key.0.starts_with('.') || key.0.contains('/')) {
        Some(key) => Err(format!("{} is not the key of an MPS daemon", safe(&key.0))),
        None => Ok(()),
    }
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

#[cfg(test)]
mod stored_tests {
    use super::*;

    #[test]
    fn only_a_higher_number_of_our_schema_is_a_newer_version() {
        for (schema, newer) in [
            ("sublet.ledger/2", true),
            ("sublet.ledger/10", true),
            ("sublet.ledger/0", false),
            ("sublet.ledger/", false),
            ("sublet.ledger/-2", false),
            ("sublet.ledger", false),
            ("sublet.inventory/9", false),
            ("", false),
        ] {
            // Such a text may have nothing else in common with ours.
            for rest in [
                r#","leases":{"a":7}"#,
                r#","boot_id":"b","leases":[],"daemons":[],"compute_modes":[],"drained":[],"unexplained":[]"#,
            ] {
                let text = format!(r#"{{"schema":"{schema}"{rest}}}"#);
                let outcome = parse_ledger(text.as_bytes()).unwrap_err();
                assert_eq!(outcome == NotALedger::Newer(schema.to_owned()), newer, "{text}: {outcome:?}");
            }
        }
        let cut_off = parse_ledger(br#"{"schema":"sublet.ledger/2","leases":"#);
        assert!(matches!(cut_off, Err(NotALedger::Corrupt(_))), "{cut_off:?}");
    }
}
