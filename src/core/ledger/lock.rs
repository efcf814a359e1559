//! The ledger's lock, and whether the state directory is the one with the ledger.
//!
//! The lock file says that the ledger of this boot has entries, and of which namespaces. If the ledger and its copy are
//! missing, only this distinguishes a loss from a first start: if the directory was unmounted, emptied or replaced, the
//! present one's ledger has none of the running containers. Then changes are refused until a person decides which one
//! counts.
//!
//! In other namespaces than those to which the process ids and start times of a ledger belong, a running container
//! would seem to have ended. A management container that shares the state directory has another PID namespace.

use std::fs::{File, OpenOptions, Permissions};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use std::{fmt, fs, io};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::libc::{O_DIRECTORY, O_NOFOLLOW, O_PATH};
use serde::{Deserialize, Serialize};

use super::error::{failed, text};
use super::rebuild::running_container;
use super::{Lease, LeaseId, Ledger, LedgerError, Record, Store};
use crate::fs::trusted;
use crate::process::own_pid;

/// A process holds the lock only for a few file reads and one write. If the ledger stays as it is for 5 s and the lock is
/// not free, something is wrong.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Where hundreds of containers start at once on few processors, their processes hold it in turns for longer than 5 s. A
/// ledger that changes all the time is waited for this long.
const BUSY_TIMEOUT: Duration = Duration::from_secs(60);
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
    let lock = wait_for(path, is_over).map_err(|error| failed("locked", path, error))?;
    lock.ok_or_else(|| LedgerError::Locked { path: text(path), seconds: begun.elapsed().as_secs() })
}

/// The lock at `path`; `None` if the wait for it `is_over`, which is asked only while it is not free.
pub(super) fn wait_for(path: &Path, mut is_over: impl FnMut() -> bool) -> io::Result<Option<Flock<File>>> {
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
        nap = (nap * 2).min(LONGEST_NAP);
    }
}

/// Differs after each write, which replaces the file.
fn version(ledger: &Path) -> Option<(u64, i64, i64)> {
    std::fs::metadata(ledger).ok().map(|meta| (meta.ino(), meta.mtime(), meta.mtime_nsec()))
}

/// A process that can open the lock can block every create. So only root may open it, also if its mode was changed. A
/// lock file of another user may be held for ever.
pub(super) fn open(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(O_NOFOLLOW)
        .open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(io::Error::other("it is not a regular file: remove it, and sublet creates it again"));
    }
    if !trusted::is_trusted_owner(meta.uid()) {
        return Err(io::Error::other(format!("it was created by uid {}: remove it", meta.uid())));
    }
    if meta.mode() & 0o077 != 0 {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    Ok(file)
}

/// More than it ever has.
const LONGEST_MARK: usize = 512;

/// The lock file's content as JSON. The file is empty while the ledger names no process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Mark {
    pub boot_id: String,
    pub namespaces: Namespaces,
}

impl Mark {
    /// The mark of this boot in the lock file.
    pub fn read(lock: &File, boot_id: &str) -> Option<Self> {
        let mut content = [0; LONGEST_MARK];
        let length = lock.read_at(&mut content, 0).ok()?;
        Self::parse(&content[..length], boot_id)
    }

    /// [`Mark::read`] without taking the lock. Users without root may not open it.
    pub fn read_in(path: &Path, boot_id: &str) -> Option<Self> {
        Self::parse(&trusted::read_if_trusted(path, LONGEST_MARK as u64)?, boot_id)
    }

    fn parse(content: &[u8], boot_id: &str) -> Option<Self> {
        serde_json::from_slice(content).ok().filter(|mark: &Self| mark.boot_id == boot_id)
    }

    /// Writes `mark` into the lock file, whose lock this process holds.
    pub fn write(mark: Option<&Self>, lock: &File) -> io::Result<()> {
        let content = mark.map(serde_json::to_vec).transpose()?.unwrap_or_default();
        lock.set_len(0)?;
        lock.write_all_at(&content, 0)
    }
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
    /// For a user who gives up a missing ledger: a change first rebuilds it.
    pub fn rebuilding(self) -> Self {
        Self { rebuilds: true, ..self }
    }

    /// [`Lease::to_annotation`], which also names the ledger's file system.
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
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(failed("read", path, source)),
            _ => Err(LedgerError::Exchanged(text(path))),
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
        LedgerError::Unmounted { path: text(&self.state_dir), owner }
    }
}

/// Inode of the initial PID namespace (Linux, `PROC_PID_INIT_INO`), which sees every process.
const FIRST_PID: u64 = 0xEFFF_FFFC;

/// Inode of the initial time namespace (Linux, `PROC_TIME_INIT_INO`).
const FIRST_TIME: u64 = 0xEFFF_FFFA;

/// The namespaces of a process that records other processes, by inode as in /proc/PID/ns (namespaces(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Namespaces {
    /// The namespace of process ids.
    pid: u64,
    /// The namespace whose clocks start times refer to (`time_namespaces(7)`); 0 if the kernel has no time namespaces.
    time: u64,
}

impl Namespaces {
    /// Of this process.
    ///
    /// # Errors
    /// /proc is not mounted, or is that of another PID namespace.
    pub(super) fn current() -> Result<Self, LedgerError> {
        static OURS: OnceLock<Namespaces> = OnceLock::new();
        if let Some(ours) = OURS.get() {
            return Ok(*ours);
        }
        // Looked up by this process's id. If /proc belongs to another PID namespace, it has no such thread of this
        // process.
        let us = format!("/proc/self/task/{}/ns", own_pid());
        let ours = Self::of(Path::new(&us)).map_err(LedgerError::NoNamespaces)?;
        Ok(*OURS.get_or_init(|| ours))
    }

    /// Of the directory `ns` of a process.
    fn of(ns: &Path) -> io::Result<Self> {
        // Only the link's text is read. Following the link requires rights on the namespace's own file (SELinux,
        // nsfs_t).
        let inode = |name: &str| {
            let link = fs::read_link(ns.join(name))?;
            let digits = link.to_str().and_then(|link| link.split(['[', ']']).nth(1)?.parse().ok());
            digits.ok_or_else(|| io::Error::other(format!("{} does not name a namespace", link.display())))
        };
        let time = match inode("time") {
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            time => time?,
        };
        Ok(Self { pid: inode("pid")?, time })
    }

    /// Whether a process in them sees every process of the host, with its real start time.
    pub(super) fn are_the_first(self) -> bool {
        self.pid == FIRST_PID && matches!(self.time, 0 | FIRST_TIME)
    }

    /// Whether process ids recorded in them are valid in `ours`.
    ///
    /// # Errors
    /// [`LedgerError::Elsewhere`].
    pub(super) fn check(self, ours: Self) -> Result<(), LedgerError> {
        if self == ours {
            return Ok(());
        }
        Err(LedgerError::Elsewhere { theirs: self.to_string(), ours: ours.to_string() })
    }
}

impl fmt::Display for Namespaces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid:[{}], time:[{}]", self.pid, self.time)
    }
}

impl Ledger {
    /// Whether it names processes, whose ids differ in other namespaces.
    pub(super) fn names_processes(&self) -> bool {
        self.mig.under_way.is_some()
            || self.mig.dynamic_instances.iter().any(|instance| instance.awaited.is_some())
            || !(self.leases.is_empty() && self.daemons.is_empty() && self.unexplained.is_empty())
    }

    /// Whether its process ids are valid in this process's namespaces. `false` if that is unknown.
    pub(crate) fn is_of_here(&self) -> bool {
        Namespaces::current().is_ok_and(|ours| self.check_namespaces(ours).is_ok())
    }

    /// Whether its process ids are valid in `ours`. A ledger that names no process is valid everywhere.
    ///
    /// # Errors
    /// They belong to other namespaces, or to unknown ones.
    pub(super) fn check_namespaces(&self, ours: Namespaces) -> Result<(), LedgerError> {
        match self.namespaces {
            _ if !self.names_processes() => Ok(()),
            Some(theirs) => theirs.check(ours),
            None => Err(LedgerError::Elsewhere { theirs: "unknown ones".to_owned(), ours: ours.to_string() }),
        }
    }
}

#[cfg(test)]
mod unmounted_tests {
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

#[cfg(test)]
mod namespaces_tests {
    use super::super::fixture::lease;
    use super::*;
    use crate::ledger::{Lease, Store};

    const HERE: Namespaces = Namespaces { pid: 5, time: 6 };

    fn ledger(leases: Vec<Lease>, namespaces: Option<Namespaces>) -> Ledger {
        Ledger { namespaces, leases, ..Ledger::empty("boot") }
    }

    #[test]
    fn process_ids_of_other_namespaces_are_not_believed() {
        let held = || vec![lease(1, "GPU-a")];
        let moved =
            [Namespaces { pid: 7, ..HERE }, Namespaces { time: 7, ..HERE }, Namespaces { time: 0, ..HERE }];
        assert!(ledger(held(), Some(HERE)).check_namespaces(HERE).is_ok());
        for theirs in moved {
            let checked = ledger(held(), Some(theirs)).check_namespaces(HERE);
            assert!(matches!(checked, Err(LedgerError::Elsewhere { .. })), "{theirs}");
            assert!(ledger(Vec::new(), Some(theirs)).check_namespaces(HERE).is_ok(), "it names no process");
        }
    }

    /// Whether anything of such a ledger still runs is only seen from a host's first namespaces, and only a person says
    /// that nothing does.
    #[test]
    fn a_ledger_of_namespaces_that_are_gone_is_refused_until_the_hosts_root_gives_it_up() {
        let dir = tempfile::tempdir().unwrap();
        let store = || Store::open(dir.path()).unwrap();
        let boot_id = store().peek().unwrap().boot_id;
        let nowhere = Namespaces { pid: 1, time: 0 };
        let left = Ledger {
            boot_id,
            drained: vec!["GPU-b".into()],
            ..ledger(vec![lease(1, "GPU-a")], Some(nowhere))
        };
        std::fs::write(dir.path().join("ledger.json"), serde_json::to_vec(&left).unwrap()).unwrap();
        let refused = store().change(|_| ()).unwrap_err();
        assert!(refused.is_elsewhere() && refused.to_string().contains("sublet gc --rebuild"), "{refused}");
        let unknown = Ledger { namespaces: None, ..left.clone() };
        assert!(unknown.check_namespaces(Namespaces::current().unwrap()).unwrap_err().is_elsewhere());
        let given_up = store().rebuilding().change(|_| ());
        if Namespaces::current().unwrap().are_the_first() {
            given_up.unwrap();
            let now = store().read().unwrap();
            assert_eq!((now.leases.len(), &now.drained[..], now.lost), (0, &["GPU-b".to_owned()][..], true));
        } else {
            assert!(given_up.unwrap_err().is_elsewhere());
            assert_eq!(store().peek().unwrap(), left);
        }
    }
}
