//! The ledger's file: reading it, its text and that of a lease in a container's annotation, whose it is, the mark in its lock
//! file, and the namespaces for which it is valid. The ledger that a store last read or wrote is
//! kept, so that an unchanged ledger is not read and parsed again.
//!
//! The driver's files are the same in most containers, and the paths of their mount points are half of a lease's text. So in
//! memory there is one list for all leases that have the same, and the ledger's text has each list once, and its leases have
//! the list's number.
//!
//! In other namespaces than those to which the process ids and start times of a ledger belong, a running container
//! would seem to have ended. A management container that shares the state directory has another PID namespace.

use std::ops::Deref;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::{fmt, fs, io};

use serde::{Deserialize, Serialize};

use super::error::failed;
use super::rebuild::{find_running, find_trace};
use super::runtime_record::{LARGEST, Record, read_bounded};
use super::{Lease, LeaseId, Ledger, LedgerError, SCHEMA};
use crate::config::Config;
use crate::fs::{
    Stamp, Trusted, make_trusted_directory, open_trusted, parse_json, read_if_trusted, unless_absent,
};
use crate::parse_errors::plain;
use crate::process::{self, own_pid};
use crate::text::{safe, safe_path};

pub(super) const LEDGER: &str = "ledger.json";
pub(super) const COPY: &str = "ledger.json.copy";

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
        let unusable = |why| LedgerError::Directory { path: safe_path(state_dir), why };
        let directory = make_trusted_directory(state_dir).map_err(unusable)?;
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

    /// For a user who gives up a missing ledger: a change first rebuilds it.
    pub fn rebuilding(self) -> Self {
        Self { rebuilds: true, ..self }
    }

    /// [`Lease::to_annotation`], which also names the ledger's file system.
    pub fn annotation(&self, lease: &Lease) -> String {
        lease.annotation(&self.state_dir, Some(self.file_system))
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

    #[cfg(test)]
    pub(super) fn known_inode(&self) -> Option<u64> {
        self.known.lock().unwrap().as_ref().map(|known| known.file.stamp().inode())
    }

    pub(super) fn remember(&self, file: Trusted, ledger: Arc<Ledger>) {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = Some(Known { file, ledger });
    }

    pub(super) fn ledger_path(&self) -> PathBuf {
        self.state_dir.join(LEDGER)
    }

    pub(super) fn lock_path(&self) -> PathBuf {
        self.state_dir.join("lock")
    }

    /// The copy of the ledger. If the ledger is lost, leases of which root's runtimes have no record (pending ones, a
    /// prestart hook's, rootless users') are found only here.
    pub(super) fn copy_path(&self) -> PathBuf {
        self.state_dir.join(COPY)
    }

    /// The id of this boot.
    pub(super) fn boot_id() -> Result<&'static str, LedgerError> {
        process::read_boot_id().map_err(|error| failed("read", Path::new(process::BOOT_ID_FILE), error))
    }

    /// The ledger in the file, which is not read again if it is unchanged; `None`: there is no file.
    pub(super) fn read_file(&self) -> Result<Option<Arc<Ledger>>, LedgerError> {
        let path = self.ledger_path();
        if let Some(known) = &*self.known.lock().unwrap_or_else(PoisonError::into_inner) {
            let present = path.symlink_metadata().map(|meta| Stamp::of(&meta));
            if present.is_ok_and(|present| known.file.stamp() == present) {
                return Ok(Some(known.ledger.clone()));
            }
        }
        let unread = |error| failed("read", &path, error);
        let Some(file) = open_trusted(&path, LARGEST).map_err(unread)? else { return Ok(None) };
        let file = file.map_err(|why| LedgerError::Corrupt { path: safe_path(&path), why })?;
        let ledger = Arc::new(parse_ledger(&file.read().map_err(unread)?, &path)?);
        self.remember(file, ledger.clone());
        Ok(Some(ledger))
    }

    /// The ledger; `None`: there was none yet.
    pub(super) fn load(&self) -> Result<Option<Arc<Ledger>>, LedgerError> {
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

    pub(super) fn corrupt(&self, why: &str) -> LedgerError {
        LedgerError::Corrupt { path: safe_path(&self.ledger_path()), why: why.to_owned() }
    }

    /// Whether the lock says that there is a ledger of this boot.
    fn is_marked(&self) -> Result<bool, LedgerError> {
        Ok(Mark::read_in(&self.lock_path(), Self::boot_id()?).is_some())
    }
}

/// Settings made by people survive a boot.
pub(super) fn keep_settings(ledger: Arc<Ledger>, boot: &str) -> Arc<Ledger> {
    if ledger.boot_id == boot {
        return ledger;
    }
    Arc::new(Ledger { drained: ledger.drained.clone(), drains: ledger.drains.clone(), ..Ledger::empty(boot) })
}

/// Whether this process may not change the state. Root of the initial user namespace may, and so may the owner of the
/// state directory (tests; root in a system container). Under rootless engines this process seems to be root, and files
/// of the real root seem to belong to the overflow uid.
pub fn is_remote(config: &Config) -> bool {
    let us = crate::process::inheritance::effective_user();
    if us == 0 && !process::is_nested() {
        return false;
    }
    // Links are followed: rootless Docker's /run is a file system of its own, with links to the files of the host's.
    let owner = match config.state_dir.metadata() {
        Ok(dir) => Some(dir),
        // A user's /run of their own is no place for a state beside the host's.
        Err(_) if process::is_nested() && !process::is_of_a_system() => None,
        // The owner of the directory above it would create it.
        Err(_) => config.state_dir.ancestors().find_map(|dir| dir.symlink_metadata().ok()),
    };
    owner.is_none_or(|dir| dir.uid() != us)
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

/// Parses `content`, which is that of `path`. Ids become names of directories and are checked for that.
///
/// # Errors
/// [`LedgerError::Newer`]: it is not rebuilt, because its content may exist nowhere else. [`LedgerError::Corrupt`]: it is
/// not a ledger.
pub(super) fn parse_ledger(content: &[u8], path: &Path) -> Result<Ledger, LedgerError> {
    let parsed: Result<Ledger, _> = parse_json(content);
    if parsed.as_ref().map_or(true, |ledger| ledger.schema != SCHEMA) {
        if let Some(found) = newer_schema(content) {
            return Err(LedgerError::Newer { path: safe_path(path), found });
        }
    }
    let checked = parsed.map_err(|error| plain(&error.to_string(), None)).and_then(|mut ledger| {
        ledger.resolve_mount_points().ok_or("a lease has mount points that are not listed")?;
        check_schema(&ledger)?;
        Ok(ledger)
    });
    checked.map_err(|why| LedgerError::Corrupt { path: safe_path(path), why })
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
    /// Whatever else a newer version writes, to any depth, is skipped.
    #[derive(Deserialize)]
    struct OfAnyVersion {
        schema: String,
    }
    let OfAnyVersion { schema } = parse_json(content).ok()?;
    let (Some((found, number)), Some((ours, our_number))) = (schema.split_once('/'), SCHEMA.split_once('/'))
    else {
        return None;
    };
    let is_newer = found == ours && number.parse::<u64>().ok()? > our_number.parse().ok()?;
    is_newer.then(|| safe(&schema))
}

fn check_schema(ledger: &Ledger) -> Result<(), String> {
    if ledger.schema != SCHEMA {
        return Err(format!("its schema is {}, but {SCHEMA} is expected", safe(&ledger.schema)));
    }
    let mut ids = ledger.leases.iter().map(|lease| lease.id.as_str());
    if let Some(bad) = ids.find(|id| LeaseId::parse(id).is_none()) {
        return Err(format!("{} is not a lease id", safe(bad)));
    }
    let wanted = ledger.leases.iter().filter_map(|lease| lease.daemon.as_ref());
    let mut keys = wanted.chain(ledger.daemons.iter().map(|daemon| &daemon.key));
    match keys.find(|key| key.0.is_empty() || key.0.starts_with('.') || key.0.contains('/')) {
        Some(key) => Err(format!("{} is not the key of an MPS daemon", safe(&key.0))),
        None => Ok(()),
    }
}

/// Files in a root filesystem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MountPoints(Form);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "mount points are a list of paths, or the number of one")]
enum Form {
    /// The number of a list in [`Ledger::mount_point_lists`]. Only in the ledger's text.
    Numbered(usize),
    These(Arc<[PathBuf]>),
}

impl Deref for MountPoints {
    type Target = [PathBuf];

    fn deref(&self) -> &[PathBuf] {
        match &self.0 {
            Form::These(files) => files,
            Form::Numbered(_) => &[],
        }
    }
}

impl From<Vec<PathBuf>> for MountPoints {
    fn from(files: Vec<PathBuf>) -> Self {
        Self(Form::These(files.into()))
    }
}

impl Ledger {
    /// Gives each list of its leases a number, for its text.
    pub(super) fn number_mount_points(&mut self) {
        for lease in self.leases.iter_mut().filter(|lease| !lease.mount_points.is_empty()) {
            let Form::These(files) = &lease.mount_points.0 else { continue };
            // Leases that were read from one ledger share a list by its address.
            let lists = &self.mount_point_lists;
            let is_same = |list: &MountPoints| matches!(&list.0, Form::These(own) if Arc::ptr_eq(own, files));
            let same = lists.iter().position(is_same);
            let known = same.or_else(|| lists.iter().position(|list| **list == **files));
            let number = known.unwrap_or(lists.len());
            let list = std::mem::replace(&mut lease.mount_points, MountPoints(Form::Numbered(number)));
            if known.is_none() {
                self.mount_point_lists.push(list);
            }
        }
    }

    /// Gives each lease its list again; `None`: there is no list of some number.
    pub(super) fn resolve_mount_points(&mut self) -> Option<()> {
        let lists = std::mem::take(&mut self.mount_point_lists);
        if !lists.iter().all(MountPoints::are_listed) {
            return None;
        }
        for lease in &mut self.leases {
            if let Form::Numbered(number) = lease.mount_points.0 {
                lease.mount_points = lists.get(number)?.clone();
            }
        }
        Some(())
    }
}

impl MountPoints {
    /// Whether the files themselves are here, and not the number of a list elsewhere.
    pub(super) fn are_listed(&self) -> bool {
        matches!(self.0, Form::These(_))
    }
}

/// The directory of the ledger for leases without [`STATE_DIR`] in their annotation (`state_dir` of the configuration).
const DEFAULT_STATE_DIR: &str = "/run/sublet";
/// The key in that annotation for the ledger's directory. A host may have several ledgers, but runtimes keep the
/// records of all containers together.
const STATE_DIR: &str = "state_dir";
/// The key for the ledger's file system, by device number (`st_dev`).
const FILE_SYSTEM: &str = "state_fs";

impl Lease {
    /// The value of [`super::LEASE_RECORD_ANNOTATION`], in the ledger of `state_dir`.
    pub fn to_annotation(&self, state_dir: &Path) -> String {
        self.annotation(state_dir, None)
    }

    /// [`Lease::to_annotation`], which also names the ledger's file system.
    pub(super) fn annotation(&self, state_dir: &Path, file_system: Option<u64>) -> String {
        let mut value = serde_json::to_value(self).unwrap_or_default();
        if let Some(lease) = value.as_object_mut() {
            lease.extend(file_system.map(|number| (FILE_SYSTEM.to_owned(), number.into())));
            if state_dir != Path::new(DEFAULT_STATE_DIR) {
                lease.insert(STATE_DIR.to_owned(), state_dir.to_string_lossy().into());
            }
        }
        // Serializing fails only for maps whose keys are not strings, and a lease has none.
        serde_json::to_string(&value).unwrap_or_default()
    }

    /// The lease that [`Lease::to_annotation`] wrote; `None` for any other text.
    pub fn from_annotation(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok().filter(|lease: &Self| lease.mount_points.are_listed())
    }

    /// Whether `text`, which [`Lease::to_annotation`] wrote, belongs to the ledger in `state_dir`. `true` if the text
    /// cannot be parsed.
    pub(super) fn is_annotation_of(text: &str, state_dir: &Path) -> bool {
        let Ok(value) = serde_json::from_str::<serde_json::Value>(text) else { return true };
        let of = value.get(STATE_DIR).and_then(serde_json::Value::as_str).unwrap_or(DEFAULT_STATE_DIR);
        Path::new(of) == state_dir
    }

    /// The file system that such a text names.
    pub(super) fn file_system_in(text: &str) -> Option<u64> {
        serde_json::from_str::<serde_json::Value>(text).ok()?.get(FILE_SYSTEM)?.as_u64()
    }

    /// The lease of a container whose first process has ended, while its low-level runtime still has a record of it in
    /// `dir`.
    pub(crate) fn read_ended(dir: &Path) -> Option<Self> {
        let record = Record::read(dir).ok()??;
        let lease = Self::from_annotation(record.restorable.as_deref()?)?;
        (!record.init.is_alive()).then_some(lease)
    }
}

/// More than it ever has.
const LONGEST_MARK: usize = 512;

/// The lock file's content as JSON: that the ledger of this boot has entries, and of which namespaces. The file is empty while
/// the ledger names no process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Mark {
    pub boot_id: String,
    pub namespaces: Namespaces,
}

impl Mark {
    /// The mark of this boot in the lock file.
    pub fn read(lock: &fs::File, boot_id: &str) -> Option<Self> {
        let mut content = [0; LONGEST_MARK];
        let length = lock.read_at(&mut content, 0).ok()?;
        Self::parse(&content[..length], boot_id)
    }

    /// [`Mark::read`] without taking the lock. Users without root may not open it.
    pub fn read_in(path: &Path, boot_id: &str) -> Option<Self> {
        Self::parse(&read_if_trusted(path, LONGEST_MARK as u64)?, boot_id)
    }

    fn parse(content: &[u8], boot_id: &str) -> Option<Self> {
        parse_json(content).ok().filter(|mark: &Self| mark.boot_id == boot_id)
    }

    /// Writes `mark` into the lock file, whose lock this process holds.
    pub fn write(mark: Option<&Self>, lock: &fs::File) -> io::Result<()> {
        let content = mark.map(serde_json::to_vec).transpose()?.unwrap_or_default();
        lock.set_len(0)?;
        lock.write_all_at(&content, 0)
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
        Ok(Self { pid: inode("pid")?, time: unless_absent(inode("time"))?.unwrap_or(0) })
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
            || self.waiters.iter().any(|waiter| waiter.process.is_some())
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
#[path = "store_tests.rs"]
mod tests;
