//! The low-level runtime's own record of a container (runc `state.json`, crun `status`), and where runtimes keep these
//! records: the usual places, and those that were seen in use.
//!
//! A directory that cannot be read is an error, because a container with a share may be recorded there. Only one that
//! an ordinary user may not read counts as empty, with a warning.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::Duration;
use std::{fs, io, thread};

use nix::libc::{ENAMETOOLONG, O_NOFOLLOW, O_NONBLOCK};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::error::failed;
use super::{Init, LEASE_ANNOTATION, LEASE_RECORD_ANNOTATION, Ledger, LedgerError};
use crate::fs::{is_absent, parse_json, regular_file, unless_absent};
use crate::process::{CGROUP_MOUNT, Process, cgroup_line, cgroup_table, has_unified_cgroups, unless_gone};
use crate::text::safe_path;

/// Larger files are not read. runc's record holds the whole specification, at most a few MiB.
pub(super) const LARGEST: u64 = 16 << 20;

/// A low-level runtime's record of one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The container's first process.
    pub init: Process,
    /// Its cgroup directory; `None` if it has none of its own.
    pub cgroup: Option<PathBuf>,
    /// The value of `sublet.lease` with which the container was created.
    pub lease: Option<String>,
    /// The value of `sublet.lease.record` with which the container was created.
    pub restorable: Option<String>,
    /// Its bundle.
    pub bundle: Option<PathBuf>,
}

/// runc's `state.json`, as of 1.1 and 1.2 (libcontainer `State`).
#[derive(Deserialize)]
pub(super) struct Runc {
    init_process_pid: i32,
    init_process_start: u64,
    /// By v1 controller. The key of v2 is empty.
    cgroup_paths: Option<BTreeMap<String, PathBuf>>,
    config: Option<RuncConfig>,
}

#[derive(Deserialize)]
struct RuncConfig {
    /// `bundle=DIR` and every annotation as `key=value`.
    labels: Option<Vec<String>>,
}

/// crun's `status`, as of 1.8 and later (`libcrun_container_status_t`).
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Crun {
    pid: i32,
    process_start_time: u64,
    /// Relative to each hierarchy.
    cgroup_path: Option<String>,
    bundle: Option<PathBuf>,
}

/// The needed part of the config.json that crun copies beside its `status`.
#[derive(Deserialize)]
pub(super) struct CrunConfig {
    pub(super) annotations: Option<BTreeMap<String, String>>,
}

impl Record {
    /// The record in `dir`; `None` if the runtime keeps none (not yet, or no longer), or cannot keep one.
    ///
    /// # Errors
    /// It exists and cannot be read. The container may be alive.
    pub fn read(dir: &Path) -> io::Result<Option<Self>> {
        if !dir.is_absolute() {
            return Ok(None);
        }
        match read_bounded(&dir.join("state.json")) {
            Ok(Some(state)) => return Ok(Some(from_runc(parse(&state)?))),
            Err(error) if has_no_such_name(dir, &error) => return Ok(None),
            state => state?,
        };
        let Some(status) = read_bounded(&dir.join("status"))? else { return Ok(None) };
        let config = read_bounded(&dir.join("config.json"))?;
        let config = config.map(|config| parse::<CrunConfig>(&config)).transpose()?;
        let annotations = config.and_then(|config| config.annotations);
        Ok(Some(from_crun(parse(&status)?, annotations.unwrap_or_default())))
    }
}

/// Whether `error` means that a name in `dir` is too long for the file system: runc accepts ids of up to 1024
/// characters and fails to create their directories. If only the whole path is too long, the directory may exist.
fn has_no_such_name(dir: &Path, error: &io::Error) -> bool {
    let longest = dir.components().map(|part| part.as_os_str().len()).max().unwrap_or(0);
    // NAME_MAX of Linux. The few file systems with longer names do not give this error.
    error.raw_os_error() == Some(ENAMETOOLONG) && longest > 255
}

impl Init {
    /// Reads a container's first process in /proc. This process's own cgroup does not count as the container's.
    ///
    /// # Errors
    /// Its cgroup cannot be read. Without that, its lease would end with this process, whatever else runs.
    pub fn of(process: Process) -> io::Result<Self> {
        Self::beside(process, nix::unistd::getpid().as_raw())
    }

    /// [`Init::of`]. `outside` is a process that is not in the container: its hook.
    pub fn beside(process: Process, outside: i32) -> io::Result<Self> {
        let own = cgroup_of(Path::new(CGROUP_MOUNT), &table(process.pid)?, &table(outside)?);
        let (cgroup, cgroup_inode) = own.unzip();
        Ok(Self { process, pid_namespace: pid_namespace(process.pid), cgroup, cgroup_inode })
    }
}

/// The text of `pid`'s /proc/PID/cgroup (cgroups(7)); empty if the process has ended.
pub(super) fn table(pid: i32) -> io::Result<String> {
    Ok(unless_gone(cgroup_table(pid))?.unwrap_or_default())
}

/// The cgroup directory that is in `table`, the text of a /proc/PID/cgroup (cgroups(7)), and not in `outside`, in the
/// hierarchies that [`runc_cgroup`] prefers; with its inode.
fn cgroup_of(mount: &Path, table: &str, outside: &str) -> Option<(PathBuf, u64)> {
    let unified = if has_unified_cgroups(mount) { "" } else { "unified" };
    let hierarchies = [("devices", "devices"), ("pids", "pids"), ("name=systemd", "systemd"), ("", unified)];
    let own = |&(key, dir): &(&str, &str)| {
        let path = cgroup_line(table, key).filter(|path| cgroup_line(outside, key) != Some(path))?;
        let below = path.trim_start_matches('/');
        (!below.is_empty()).then(|| mount.join(dir).join(below))
    };
    let there = |dir: PathBuf| {
        let inode = fs::metadata(&dir).ok().filter(fs::Metadata::is_dir)?.ino();
        is_own_cgroup(mount, &dir).then_some((dir, inode))
    };
    hierarchies.iter().filter_map(own).find_map(there)
}

pub(super) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    parse_json(bytes).map_err(io::Error::from)
}

pub(super) fn from_runc(state: Runc) -> Record {
    let labels = state.config.and_then(|config| config.labels).unwrap_or_default();
    let label = |key: &str| {
        labels.iter().find_map(|label| label.strip_prefix(key)?.strip_prefix('=')).map(str::to_owned)
    };
    Record {
        init: Process { pid: state.init_process_pid, start_time: state.init_process_start },
        cgroup: runc_cgroup(&state.cgroup_paths.unwrap_or_default()),
        lease: label(LEASE_ANNOTATION),
        restorable: label(LEASE_RECORD_ANNOTATION),
        bundle: label("bundle").map(PathBuf::from),
    }
}

/// If v1 hierarchies exist, the container is in all of them. The inventory attributes processes to leases by `devices`.
/// In hybrid mode v2 may be missing.
fn runc_cgroup(paths: &BTreeMap<String, PathBuf>) -> Option<PathBuf> {
    let path = ["devices", "pids", "name=systemd", ""].iter().find_map(|key| paths.get(*key));
    let path = path.or_else(|| paths.values().next())?;
    is_own_cgroup(Path::new(CGROUP_MOUNT), path).then(|| path.clone())
}

pub(super) fn from_crun(status: Crun, mut annotations: BTreeMap<String, String>) -> Record {
    Record {
        init: Process { pid: status.pid, start_time: status.process_start_time },
        cgroup: status.cgroup_path.and_then(|path| crun_cgroup(Path::new(CGROUP_MOUNT), &path)),
        lease: annotations.remove(LEASE_ANNOTATION),
        restorable: annotations.remove(LEASE_RECORD_ANNOTATION),
        bundle: status.bundle,
    }
}

/// The directory of `path` in the first hierarchy under `mount` that has it.
fn crun_cgroup(mount: &Path, path: &str) -> Option<PathBuf> {
    let below = path.trim_start_matches('/');
    if below.is_empty() {
        return None;
    }
    let hierarchies: &[&str] =
        if has_unified_cgroups(mount) { &[""] } else { &["devices", "pids", "systemd", "unified"] };
    let mut directories = hierarchies.iter().map(|name| mount.join(name).join(below));
    let first = directories.next()?;
    // One that cannot be examined counts as there: with another, or none, the lease would end too early.
    let is_there = |dir: &PathBuf| dir.try_exists().unwrap_or(true);
    let existing = if is_there(&first) { None } else { directories.find(is_there) };
    Some(existing.unwrap_or(first)).filter(|path| is_own_cgroup(mount, path))
}

/// Accepts only cgroup directories, and not a hierarchy's root, in which every process of the host is.
fn is_own_cgroup(mount: &Path, path: &Path) -> bool {
    let Ok(below) = path.strip_prefix(mount) else { return false };
    let plain = below.components().all(|part| matches!(part, Component::Normal(_)));
    // Only the roots of v1's hierarchies have this file (cgroup-v1 documentation).
    let is_root = below.as_os_str().is_empty() || path.join("cgroup.sane_behavior").exists();
    plain && !is_root
}

/// [`read_up_to`] the largest size of a record or ledger.
pub(super) fn read_bounded(path: &Path) -> io::Result<Option<Vec<u8>>> {
    read_up_to(path, LARGEST)
}

/// The content of a regular file; `None` if it does not exist. Links, pipes and files of more than `largest` bytes are
/// errors.
///
/// # Errors
/// It is not a regular file, is larger than `largest`, or cannot be read.
pub fn read_up_to(path: &Path, largest: u64) -> io::Result<Option<Vec<u8>>> {
    let opened = fs::OpenOptions::new().read(true).custom_flags(O_NOFOLLOW | O_NONBLOCK).open(path);
    let Some(file) = unless_absent(opened)? else { return Ok(None) };
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let content = regular_file(file, metadata.len(), largest)?;
    if content.len() as u64 > largest {
        return Err(io::Error::other(format!("it is larger than {} MiB", largest >> 20)));
    }
    Ok(Some(content))
}

/// Inode of the PID namespace of `pid`; 0 if it is this process's, or cannot be read.
pub(super) fn pid_namespace(pid: i32) -> u64 {
    let inode = |who: &str| fs::metadata(format!("/proc/{who}/ns/pid")).map(|meta| meta.ino()).ok();
    inode(&pid.to_string()).filter(|its| Some(*its) != inode("self")).unwrap_or(0)
}

/// Where root's runtimes keep their records: `ROOT/ID`. A `*` at the end of a component matches the rest of its name.
///
/// Users' own roots below /run/user are not included: a file that a user can write must not take a share.
const ROOTS: [&str; 4] = [
    // runc(8), `--root`.
    "/run/runc",
    // crun(1), `--root`. Podman and CRI-O use this default.
    "/run/crun",
    // dockerd: <exec-root>/runtime-<name>, with containerd's namespace below.
    "/run/docker/runtime-*/*",
    // containerd's runc.v2 shim: one for each namespace (`k8s.io`, `default`, `moby`).
    "/run/containerd/runc/*",
];

/// The file in the state directory that names further roots, one per line.
pub(super) const FURTHER_ROOTS: &str = "roots";

/// Records where the runtimes of `ledger`'s leases keep their records, if that is not a usual place and not where leases of
/// `before`, which was written, had theirs. None of the known ones is looked at: a start waits for this, and others
/// for its lock.
///
/// # Errors
/// The file cannot be read, so that the roots in it would be lost, or cannot be written.
pub(super) fn remember_roots(state_dir: &Path, ledger: &Ledger, before: Option<&Ledger>) -> io::Result<()> {
    let mut seen: BTreeSet<&[u8]> =
        before.into_iter().flat_map(root_records).map(|record| root_of(record)).collect();
    // Most leases have one of a few roots.
    let unseen = root_records(ledger).filter(|record| seen.insert(root_of(record)));
    let mut new: Vec<&Path> = unseen.filter_map(|record| record.parent()).collect();
    new.retain(|root| {
        let is_line = root.to_str().is_some_and(|line| line.starts_with('/') && !line.contains('\n'));
        is_line && !ROOTS.iter().any(|pattern| matches(pattern, root))
    });
    if new.is_empty() {
        return Ok(());
    }
    let known = further_roots(state_dir)?;
    new.retain(|root| !known.iter().any(|old| old == root));
    let all = known.iter().map(PathBuf::as_path).chain(new.iter().copied());
    if new.is_empty() { Ok(()) } else { write_roots(state_dir, all) }
}

/// How long the roots are looked at: 30,000 of a local file system take some 70 ms.
const LOOK_LIMIT: Duration = Duration::from_secs(1);

/// The state directories whose roots are being looked at, each by one thread.
static LOOKING: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// The roots that are gone, and that no lease of `ledger` has. None, where it takes longer than [`LOOK_LIMIT`] to find that out: a look
/// at one on a dead network mount may not return. The next change looks again.
pub(super) fn gone_roots(state_dir: &Path, ledger: &Ledger) -> BTreeSet<PathBuf> {
    let leased = leased_roots(ledger);
    let mut unleased = further_roots(state_dir).unwrap_or_default();
    unleased.retain(|root| !leased.contains(root.as_os_str().as_bytes()));
    let is_gone = |root: &Path| root.symlink_metadata().is_err_and(|error| is_absent(&error));
    gone_within(LOOK_LIMIT, state_dir, unleased, is_gone)
}

/// Those of `roots` that are gone by `is_gone`; none, where it has not looked at all of them within `limit`. The thread that it keeps
/// ends with the process, and there is no second one beside it. A hook may start none (seccomp), and finds nothing gone.
fn gone_within(
    limit: Duration,
    state_dir: &Path,
    roots: Vec<PathBuf>,
    is_gone: impl Fn(&Path) -> bool + Send + 'static,
) -> BTreeSet<PathBuf> {
    let looking = || LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
    if roots.is_empty() || !looking().insert(state_dir.to_owned()) {
        return BTreeSet::new();
    }
    let (place, (sender, gone)) = (state_dir.to_owned(), mpsc::channel());
    let look = move || {
        let found: BTreeSet<PathBuf> = roots.into_iter().filter(|root| is_gone(root)).collect();
        // First, because whoever has the answer may look again.
        looking().remove(&place);
        // Nobody listens any more once the limit is over.
        let _ = sender.send(found);
    };
    let started = thread::Builder::new().name("roots".to_owned()).spawn(look);
    let _ = started.inspect_err(|_| _ = looking().remove(state_dir));
    gone.recv_timeout(limit).unwrap_or_default()
}

/// Forgets those of the `gone` that no lease of `ledger` has.
///
/// # Errors
/// As [`remember_roots`].
pub(super) fn forget_roots(state_dir: &Path, ledger: &Ledger, gone: &BTreeSet<PathBuf>) -> io::Result<()> {
    if gone.is_empty() {
        return Ok(());
    }
    let (known, leased) = (further_roots(state_dir)?, leased_roots(ledger));
    let is_kept = |root: &&Path| leased.contains(root.as_os_str().as_bytes()) || !gone.contains(*root);
    let kept: Vec<&Path> = known.iter().map(PathBuf::as_path).filter(is_kept).collect();
    if kept.len() == known.len() { Ok(()) } else { write_roots(state_dir, kept) }
}

/// Their texts.
fn leased_roots(ledger: &Ledger) -> BTreeSet<&[u8]> {
    ledger.leases.iter().map(|lease| root_of(&lease.container.record)).collect()
}

fn write_roots<'r>(state_dir: &Path, roots: impl IntoIterator<Item = &'r Path>) -> io::Result<()> {
    let lines: Vec<&str> = roots.into_iter().filter_map(Path::to_str).collect();
    crate::fs::replace(&state_dir.join(FURTHER_ROOTS), lines.join("\n").as_bytes(), 0o644)
}

/// The records of root's own containers.
fn root_records(ledger: &Ledger) -> impl Iterator<Item = &PathBuf> {
    ledger.leases.iter().filter(|lease| !lease.brokered).map(|lease| &lease.container.record)
}

/// The text of the path above `record`. To take paths apart takes much longer than texts.
fn root_of(record: &Path) -> &[u8] {
    let text = record.as_os_str().as_bytes();
    text.iter().rposition(|byte| *byte == b'/').map_or(text, |slash| &text[..slash])
}

/// The roots that were written down.
pub(super) fn further_roots(state_dir: &Path) -> io::Result<Vec<PathBuf>> {
    // An untrusted file is written anew.
    let trusted = crate::fs::read_trusted(&state_dir.join(FURTHER_ROOTS), LARGEST)?.and_then(Result::ok);
    let text = String::from_utf8_lossy(&trusted.unwrap_or_default()).into_owned();
    Ok(text.lines().filter(|line| line.starts_with('/')).map(PathBuf::from).collect())
}

/// Every existing root, each once, whatever links lead to it. `further` is one more.
pub(super) fn roots(state_dir: &Path, further: Option<&Path>) -> Result<BTreeSet<PathBuf>, LedgerError> {
    let file = state_dir.join(FURTHER_ROOTS);
    let mut named = further_roots(state_dir).map_err(|error| failed("read", &file, error))?;
    named.extend(further.map(Path::to_owned));
    for pattern in ROOTS {
        named.extend(expand(pattern)?);
    }
    named.iter().filter_map(|root| skip_absent(root, root.canonicalize()).transpose()).collect()
}

/// The paths in `dir`; none if it does not exist.
pub(super) fn list_directory(dir: &Path) -> Result<Vec<PathBuf>, LedgerError> {
    let listed = fs::read_dir(dir).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
    Ok(skip_absent(dir, listed)?.unwrap_or_default())
}

/// The result of reading `path`; `None` if it does not exist.
///
/// # Errors
/// It cannot be read, and not because it is another user's.
pub(super) fn skip_absent<T>(path: &Path, read: io::Result<T>) -> Result<Option<T>, LedgerError> {
    match unless_absent(read) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            tracing::warn!("{} is taken as empty: {error}", safe_path(path));
            Ok(None)
        }
        read => read.map_err(|error| failed("read", path, error)),
    }
}

fn matches(pattern: &str, path: &Path) -> bool {
    let pattern = Path::new(pattern);
    let fits = |(pattern, part): (&OsStr, &OsStr)| {
        let (pattern, part) = (pattern.as_bytes(), part.as_bytes());
        pattern.strip_suffix(b"*").map_or(pattern == part, |beginning| part.starts_with(beginning))
    };
    pattern.iter().count() == path.iter().count() && pattern.iter().zip(path).all(fits)
}

/// The directories that match `pattern`.
fn expand(pattern: &str) -> Result<Vec<PathBuf>, LedgerError> {
    let mut found = vec![PathBuf::new()];
    for name in Path::new(pattern) {
        let Some(beginning) = name.as_bytes().strip_suffix(b"*") else {
            found = found.iter().map(|path| path.join(name)).collect();
            continue;
        };
        let mut below = Vec::new();
        for dir in &found {
            below.extend(list_directory(dir)?);
        }
        below.retain(|path| path.file_name().is_some_and(|file| file.as_bytes().starts_with(beginning)));
        found = below;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shortened from a record of runc 1.1.5, on a host with cgroup v1 and v2.
    const RUNC: &str = r#"{"id":"lt1","init_process_pid":11303,"init_process_start":196158,
        "created":"2026-11-21T10:17:03Z","config":{"no_pivot_root":false,
        "labels":["sublet.leasehold=x","sublet.lease=00000000000000aa","sublet.lease.record={\"a\":\"=\"}","bundle=/b"]},
        "cgroup_paths":{"":"/sys/fs/cgroup/unified/lt1","devices":"/sys/fs/cgroup/devices/lt1",
        "pids":"/sys/fs/cgroup/pids/lt1"}}"#;

    /// A record of crun 1.8.1, on a host with a cgroup v2 mount.
    const CRUN: &str = r#"{"pid":11870,"process-start-time":198751,"cgroup-path":"/lt2","scope":"",
        "rootfs":"rootfs","systemd-cgroup":false,"bundle":"/tmp/b2","created":"2026-11-21T10:17:29.57Z",
        "owner":"root","detached":true,"external_descriptors":"[]"}"#;

    #[test]
    fn reads_the_record_of_runc() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Record::read(dir.path()).unwrap(), None);
        fs::write(dir.path().join("state.json"), RUNC).unwrap();
        let record = Record::read(dir.path()).unwrap().unwrap();
        assert_eq!(record.init, Process { pid: 11303, start_time: 196_158 });
        assert_eq!(record.cgroup.as_deref(), Some(Path::new("/sys/fs/cgroup/devices/lt1")));
        assert_eq!(record.lease.as_deref(), Some("00000000000000aa"));
        assert_eq!(record.restorable.as_deref(), Some(r#"{"a":"="}"#));
        assert_eq!(record.bundle.as_deref(), Some(Path::new("/b")));
        assert_eq!(Record::read(Path::new("")).unwrap(), None, "never from the working directory");
    }

    #[test]
    fn reads_the_record_of_crun() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("status"), CRUN).unwrap();
        let config = r#"{"ociVersion":"1.0","annotations":{"sublet.lease":"00000000000000bb"}}"#;
        fs::write(dir.path().join("config.json"), config).unwrap();
        let record = Record::read(dir.path()).unwrap().unwrap();
        assert_eq!(record.init, Process { pid: 11870, start_time: 198_751 });
        assert_eq!(record.cgroup.unwrap().file_name().unwrap(), "lt2");
        assert_eq!(record.bundle.as_deref(), Some(Path::new("/tmp/b2")));
        assert_eq!(record.lease.as_deref(), Some("00000000000000bb"));
    }

    #[test]
    fn crun_cgroups_are_found_in_either_layout_and_a_root_is_none_of_its_own() {
        let mount = tempfile::tempdir().unwrap();
        fs::create_dir_all(mount.path().join("systemd/a.scope")).unwrap();
        let found = |path| crun_cgroup(mount.path(), path);
        assert_eq!(found("/a.scope"), Some(mount.path().join("systemd/a.scope")));
        assert_eq!(found("/none"), Some(mount.path().join("devices/none")));
        fs::write(mount.path().join("cgroup.controllers"), "").unwrap();
        assert_eq!(found("a.scope/container"), Some(mount.path().join("a.scope/container")));
        assert_eq!((found(""), found("/")), (None, None));
        assert_eq!(found("/../../tmp"), None);
        assert!(!is_own_cgroup(Path::new("/sys/fs/cgroup"), Path::new("/tmp/a.scope")));
    }

    #[test]
    fn lines_of_proc_cgroup() {
        let text = "9:name=systemd:/a\n4:cpu,devices:/b:c\n0::/d\n";
        assert_eq!(cgroup_line(text, "devices"), Some("/b:c"));
        assert_eq!(cgroup_line(text, "name=systemd"), Some("/a"));
        assert_eq!(cgroup_line(text, ""), Some("/d"));
        assert_eq!(cgroup_line(text, "pids"), None);
        let me = Process::current().unwrap();
        assert_eq!(Init::of(me).unwrap().cgroup, None, "ours is nobody else's");
    }

    #[test]
    fn the_cgroup_of_a_process_is_the_one_its_runtime_would_record() {
        let mount = tempfile::tempdir().unwrap();
        let ours = "9:name=systemd:/h\n5:misc,devices:/h\n0::/h\n";
        let found = |table| cgroup_of(mount.path(), table, ours).map(|(dir, _)| dir);
        let dir = |path: &str| Some(mount.path().join(path));
        for path in ["devices/c1", "devices/h", "unified/c1", "unified/h", "c2.scope", "h"] {
            fs::create_dir_all(mount.path().join(path)).unwrap();
        }
        assert_eq!(found("9:name=systemd:/c1\n5:misc,devices:/c1\n0::/c1\n"), dir("devices/c1"));
        assert_eq!(found("5:devices:/gone\n0::/c1\n"), dir("unified/c1"));
        assert_eq!(found("5:devices:/h\n0::/c1\n"), dir("unified/c1"), "ours is not its own");
        assert_eq!(found("5:devices:/\n0::/../c1\n"), None);
        fs::write(mount.path().join("cgroup.controllers"), "").unwrap();
        assert_eq!(found("0::/c2.scope\n"), dir("c2.scope"));
        assert_eq!(found("0::/h\n"), None, "ours is not its own");
        assert_eq!(found("0::/\n"), None, "a root is nobody's own");
        assert_eq!(found("garbage"), None);
    }

    #[test]
    fn a_record_that_cannot_be_read_is_an_error_and_never_none() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state.json");
        for garbage in ["", "{", "null", r#"{"init_process_pid":"x"}"#] {
            fs::write(&state, garbage).unwrap();
            assert!(Record::read(dir.path()).is_err(), "{garbage:?}");
        }
        fs::remove_file(&state).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &state).unwrap();
        assert!(Record::read(dir.path()).is_err());
        fs::remove_file(&state).unwrap();
        nix::unistd::mkfifo(&state, nix::sys::stat::Mode::S_IRUSR).unwrap();
        assert!(Record::read(dir.path()).is_err());
    }

    #[test]
    fn a_record_that_cannot_be_is_none_and_one_behind_a_loop_of_links_may_be() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Record::read(&dir.path().join("a".repeat(256))).unwrap(), None);
        let long = dir.path().join("b/".repeat(2100));
        assert!(Record::read(&long).is_err(), "whoever goes there step by step finds it");
        let (one, other) = (dir.path().join("one"), dir.path().join("other"));
        std::os::unix::fs::symlink(&one, &other).unwrap();
        std::os::unix::fs::symlink(&other, &one).unwrap();
        assert!(Record::read(&one.join("c1")).is_err());
    }
}

#[cfg(test)]
mod runtime_roots_tests {
    use std::os::unix::fs::symlink;

    use super::super::fixture::lease;
    use super::super::liveness::Scan;
    use super::super::store::Store;
    use super::*;

    #[test]
    fn roots_are_matched_and_expanded_by_component() {
        assert!(matches("/run/docker/runtime-*/*", Path::new("/run/docker/runtime-runc/moby")));
        assert!(!matches("/run/docker/runtime-*/*", Path::new("/run/docker/runtime-runc")));
        assert!(!matches("/run/docker/runtime-*/*", Path::new("/run/docker/other/moby")));
        let dir = tempfile::tempdir().unwrap();
        for path in ["runtime-a/x", "runtime-a/y", "runtime-b/z", "other/w"] {
            fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        let mut found = expand(&format!("{}/runtime-*/*", dir.path().display())).unwrap();
        found.sort();
        let below = |path: &str| dir.path().join(path);
        assert_eq!(found, [below("runtime-a/x"), below("runtime-a/y"), below("runtime-b/z")]);
    }

    #[test]
    fn unusual_roots_are_written_down_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut ledger = Ledger { leases: vec![lease(1, "GPU-a"), lease(2, "GPU-a")], ..Ledger::empty("b") };
        ledger.leases[1].container.record = "/run/runc/container-2".into();
        remember_roots(dir.path(), &ledger, None).unwrap();
        remember_roots(dir.path(), &ledger, None).unwrap();
        let written = fs::read_to_string(dir.path().join("roots")).unwrap();
        assert_eq!(written, "/nonexistent/runc");
    }

    #[test]
    fn roots_that_are_gone_are_forgotten_by_gc_and_not_by_a_start() {
        let dir = tempfile::tempdir().unwrap();
        let there = dir.path().to_str().unwrap();
        let gone: Vec<String> = (0..3_000).map(|n| format!("/nonexistent/{n}")).collect();
        let lines = format!("{}\n{there}\n/nonexistent/leased", gone.join("\n"));
        let file = dir.path().join("roots");
        let mut ledger = Ledger { leases: vec![lease(1, "GPU-a"), lease(2, "GPU-a")], ..Ledger::empty("b") };
        ledger.leases[1].container.record = "/nonexistent/leased/container-2".into();
        fs::write(&file, &lines).unwrap();
        // Whether its own is known or not.
        for _ in 0..2 {
            remember_roots(dir.path(), &ledger, None).unwrap();
            assert_eq!(fs::read_to_string(&file).unwrap(), format!("{lines}\n/nonexistent/runc"));
        }
        forget_roots(dir.path(), &ledger, &BTreeSet::new()).unwrap();
        assert!(fs::read_to_string(&file).unwrap().contains("/nonexistent/2999"), "it looks for none itself");
        let gone = gone_roots(dir.path(), &ledger);
        forget_roots(dir.path(), &ledger, &gone).unwrap();
        let kept = format!("{there}\n/nonexistent/leased\n/nonexistent/runc");
        assert_eq!(fs::read_to_string(&file).unwrap(), kept);
        let written = fs::metadata(&file).unwrap().ino();
        forget_roots(dir.path(), &ledger, &gone).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().ino(), written, "not written anew");
    }

    #[test]
    fn a_look_that_hangs_is_waited_for_briefly_and_there_is_no_second_one() {
        let dir = tempfile::tempdir().unwrap();
        let (end, hang) = mpsc::channel::<()>();
        let root = || vec![PathBuf::from("/nonexistent/mount")];
        let limit = Duration::from_millis(20);
        assert!(gone_within(limit, dir.path(), root(), move |_| hang.recv().is_err()).is_empty());
        let looked = || gone_within(Duration::from_secs(60), dir.path(), root(), |_| true);
        assert!(looked().is_empty(), "the first one hangs");
        drop(end);
        let has_looked = |_| {
            thread::sleep(Duration::from_millis(1));
            !looked().is_empty()
        };
        assert!((0..60_000).any(has_looked), "the next one looks again");
    }

    #[test]
    fn a_change_that_is_no_containers_forgets_roots_and_a_start_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        store.change(|_| ()).unwrap();
        let file = dir.path().join("roots");
        let there = dir.path().to_str().unwrap();
        fs::write(&file, format!("/nonexistent/a\n{there}")).unwrap();
        store.change_with_scan(Scan::Brief, |_| ()).unwrap();
        assert!(fs::read_to_string(&file).unwrap().contains("/nonexistent/a"));
        store.change(|_| ()).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), there);
    }

    #[test]
    fn a_root_that_cannot_be_examined_is_neither_missing_nor_empty() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        assert!(!roots(dir.path(), Some(&root)).unwrap().contains(&root), "it is not there");
        symlink("root", &root).unwrap();
        let error = roots(dir.path(), Some(&root)).unwrap_err().to_string();
        assert!(error.contains("/root cannot be read"), "{error}");
        let error = list_directory(&root).unwrap_err().to_string();
        assert!(error.contains("/root cannot be read"), "{error}");
        assert!(list_directory(&dir.path().join("none")).unwrap().is_empty());
    }
}
