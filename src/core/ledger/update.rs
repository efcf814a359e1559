//! The one way to change the ledger: its lock, whether the state directory is the one with the ledger, and writing it.
//!
//! The lock file says ([`Mark`]) that the ledger of this boot has entries, and of which namespaces. If the ledger and its copy are
//! missing, only this distinguishes a loss from a first start: if the directory was unmounted, emptied or replaced, the
//! present one's ledger has none of the running containers. Then changes are refused until a person decides which one
//! counts.
//!
//! `clearing.lock` is another lock, held while files of ended containers are removed.

use std::collections::BTreeSet;
use std::fs::{File, Permissions};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, io};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::libc::{O_DIRECTORY, O_NOFOLLOW, O_PATH};

use super::error::failed;
use super::liveness::{Scan, reclaim, running_first};
use super::rebuild::{last_inventory, rebuild, running_container, salvage, unexplained};
use super::runtime_record::{LARGEST, forget_roots, gone_roots, remember_roots};
use super::store::{COPY, LEDGER, Mark, keep_settings, ledger_text, parse_ledger};
use super::{Freed, Lease, LeaseId, Ledger, LedgerError, Namespaces, Record, Store, events_of_change};
use crate::events;
use crate::fs::{Trusted, is_trusted_owner, open_lock, read_trusted, replace_own};
use crate::process::{epoch_seconds, uptime_seconds};
use crate::text::safe_path;

/// A process holds the lock only for a few file reads and one write. If the ledger stays as it is for 5 s and the lock is
/// not free, something is wrong.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Where hundreds of containers start at once on few processors, their processes hold it in turns for longer than 5 s. A
/// ledger that changes all the time is waited for this long.
const BUSY_TIMEOUT: Duration = Duration::from_secs(60);
/// Removing a dozen empty files takes well under a millisecond, on a slow file system longer.
const CLEARING_LIMIT: Duration = Duration::from_secs(2);
/// The shortest and the longest wait between two attempts to take the lock.
const SHORTEST_NAP: Duration = Duration::from_millis(1);
const LONGEST_NAP: Duration = Duration::from_millis(20);

/// The lock at `path` of the ledger in `ledger`. It is released when it is dropped. The descriptor is closed on exec.
pub(super) fn take(path: &Path, ledger: &Path) -> Result<Flock<File>, LedgerError> {
    let begun = Instant::now();
    let (mut seen, mut since) = (None, begun);
    let is_over = || {
        let now = Some(version(ledger));
        if now != seen {
            (seen, since) = (now, Instant::now());
        }
        since.elapsed() >= TIMEOUT || begun.elapsed() >= BUSY_TIMEOUT
    };
    let lock = wait_for(path, LONGEST_NAP, is_over).map_err(|error| failed("locked", path, error))?;
    lock.ok_or_else(|| LedgerError::Locked { path: safe_path(path), seconds: begun.elapsed().as_secs() })
}

/// The lock at `path`; `None` if the wait for it `is_over`, which is asked only while it is not free. Between two
/// attempts it waits for `longest_nap` at most.
pub(super) fn wait_for(
    path: &Path,
    longest_nap: Duration,
    mut is_over: impl FnMut() -> bool,
) -> io::Result<Option<Flock<File>>> {
    let (mut file, mut nap) = (open(path)?, SHORTEST_NAP);
    loop {
        file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(Some(lock)),
            Err((file, Errno::EWOULDBLOCK | Errno::EINTR)) => file,
            Err((_, errno)) => return Err(errno.into()),
        };
        if is_over() {
            return Ok(None);
        }
        std::thread::sleep(nap);
        nap = (nap * 2).min(longest_nap);
    }
}

/// Differs after each write, which replaces the file.
fn version(ledger: &Path) -> Option<(u64, i64, i64)> {
    fs::metadata(ledger).ok().map(|meta| (meta.ino(), meta.mtime(), meta.mtime_nsec()))
}

/// A process that can open the lock can block every create. So only root may open it, also if its mode was changed. A
/// lock file of another user may be held for ever.
pub(super) fn open(path: &Path) -> io::Result<File> {
    let file = open_lock(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(io::Error::other("it is not a regular file: remove it, and sublet creates it again"));
    }
    if !is_trusted_owner(meta.uid()) {
        return Err(io::Error::other(format!("it was created by uid {}: remove it", meta.uid())));
    }
    if meta.mode() & 0o077 != 0 {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    Ok(file)
}

/// The opened state directory: all files are written to the same directory, whatever is mounted meanwhile.
pub(super) struct Place(File);

impl Place {
    /// The path of its file `name`.
    pub fn file(&self, name: &str) -> PathBuf {
        format!("/proc/self/fd/{}/{name}", self.0.as_raw_fd()).into()
    }
}

impl Store {
    /// Takes the lock, frees the leases of ended containers, runs `change` and writes the ledger if it differs.
    ///
    /// If `change` fails, its changes are dropped, freed leases stay freed, and its error is the inner one. `change`
    /// must not start, ask or wait for a process, because all other processes wait for the lock meanwhile.
    ///
    /// Also removes temporary files that killed processes left in the state directory, and forgets runtimes' roots that are
    /// gone. A start and an end, which look for ended containers briefly, leave that to other commands.
    ///
    /// An unreadable or missing ledger is rebuilt from its copy and the running system, if its copy or its lock shows that it
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
        let seen = self.read_file().ok().flatten().unwrap_or_else(|| Arc::new(Ledger::empty("")));
        let running = running_first(&seen, scan);
        let gone = if scan == Scan::Full { gone_roots(&self.state_dir, &seen) } else { BTreeSet::new() };
        let (boot, ours) = (Self::boot_id()?, Namespaces::current()?);
        let lock = take(&self.lock_path(), &self.ledger_path())?;
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
        // From which the change starts, and the content of the file, if that is a ledger.
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
            // Where that fails, the next command does it.
            let _ = forget_roots(&self.state_dir, &start, &gone);
        }
        let settled = || {
            let mut ledger = Ledger::clone(&start);
            let freed = if scan == Scan::None { Freed::new() } else { reclaim(&mut ledger, &running) };
            self.reopen_devices(&mut ledger);
            // Not called on the way of a start where there is none (tests/lint/visits).
            if !ledger.drains.is_empty() {
                ledger.end_drains();
            }
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

    /// The copy, if it is readable and of this boot.
    ///
    /// # Errors
    /// It exists and cannot be read, although it may be intact; or a newer version wrote it.
    fn read_copy(&self, boot: &str) -> Result<Option<Ledger>, LedgerError> {
        let path = self.copy_path();
        let content = read_trusted(&path, LARGEST).map_err(|error| failed("read", &path, error))?;
        match content.and_then(Result::ok).map(|content| parse_ledger(&content, &path)) {
            Some(Err(error @ LedgerError::Newer { .. })) => Err(error),
            Some(Ok(ledger)) if ledger.boot_id == boot => Ok(Some(ledger)),
            _ => Ok(None),
        }
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
            let (held, there) = (lock.metadata()?, fs::symlink_metadata(place.file("lock"))?);
            let same = (held.dev(), held.ino()) == (there.dev(), there.ino());
            Ok((same && file_system == self.file_system).then_some(place))
        });
        match same {
            Ok(Some(place)) => Ok(place),
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(failed("read", path, source)),
            _ => Err(LedgerError::Exchanged(safe_path(path))),
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
        LedgerError::Unmounted { path: safe_path(&self.state_dir), owner }
    }

    /// Waits up to 2 s until no other process removes leftovers of containers, and keeps them from it until the
    /// returned lock is dropped. The kernel releases it if the process is killed.
    ///
    /// Unlinking a file removes every mount on it, in all namespaces. So a container that has just got its lease in the same
    /// root filesystem, or with a volume on the same file system, must not be created while a process that looked into the
    /// ledger before that lease was written still removes files there.
    ///
    /// # Errors
    /// The lock cannot be opened, or is not free in time.
    pub(crate) fn clearing(&self) -> io::Result<Flock<File>> {
        let deadline = Instant::now() + CLEARING_LIMIT;
        let lock =
            wait_for(&self.state_dir.join("clearing.lock"), SHORTEST_NAP, || Instant::now() >= deadline)?;
        lock.ok_or_else(|| io::Error::other("another process has held it for 2 s"))
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
        // Only a process that sees every other may say that none in the ledger is left.
        let may_give_up = self.rebuilds && ours.are_the_first();
        let last = match checked {
            Err(_) if may_give_up => None,
            checked => checked.map(|()| last)?,
        };
        let shown = safe_path(&path);
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

#[cfg(test)]
mod unmounted_tests {
    use super::super::fixture::lease;
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
            for part in ["container-1", "mount ", "sublet gc --rebuild"] {
                assert!(refused.to_string().contains(part), "{refused}");
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
        let lock = open(&path).unwrap();
        assert!(store.place(&lock).is_ok());
        fs::remove_file(&path).unwrap();
        assert!(matches!(store.place(&lock), Err(LedgerError::Exchanged { .. })));
        let other = open(&path).unwrap();
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
