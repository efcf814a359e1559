//! The ledger's text, and the texts from which a lost ledger is rebuilt: of a lease in a container's config.json, and in the
//! copies of the leases of Slurm's jobs.
//!
//! The driver's files are the same in most containers, and the paths of their mount points are half of a lease's text. So in
//! memory there is one list for all leases that have the same, and the ledger's text has each list once, and its leases have
//! the list's number.

use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::error::{failed, text};
use super::runtime_record::{LARGEST, Record, skip_absent};
use super::{Lease, LeaseId, Ledger, LedgerError, SCHEMA};
use crate::fs::{replace, trusted};
use crate::parse_errors::plain;
use crate::text::safe;
use crate::{process, slurm};

/// Parses `content`, which is that of `path`. Ids become names of directories and are checked for that.
///
/// # Errors
/// [`LedgerError::Newer`]: it is not rebuilt, because its content may exist nowhere else. [`LedgerError::Corrupt`]: it is
/// not a ledger.
pub(super) fn parse_ledger(content: &[u8], path: &Path) -> Result<Ledger, LedgerError> {
    let parsed: Result<Ledger, _> = serde_json::from_slice(content);
    if parsed.as_ref().map_or(true, |ledger| ledger.schema != SCHEMA) {
        if let Some(found) = newer_schema(content) {
            return Err(LedgerError::Newer { path: text(path), found });
        }
    }
    let checked = parsed.map_err(|error| plain(&error.to_string(), None)).and_then(|mut ledger| {
        ledger.resolve_mount_points().ok_or("a lease has mount points that are not listed")?;
        check_schema(&ledger)?;
        Ok(ledger)
    });
    checked.map_err(|why| LedgerError::Corrupt { path: text(path), why })
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
    let ledger: serde_json::Value = serde_json::from_slice(content).ok()?;
    let schema = ledger.get("schema")?.as_str()?;
    let (Some((found, number)), Some((ours, our_number))) = (schema.split_once('/'), SCHEMA.split_once('/'))
    else {
        return None;
    };
    let is_newer = found == ours && number.parse::<u64>().ok()? > our_number.parse().ok()?;
    is_newer.then(|| safe(schema))
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

/// What a copy of a job's lease holds, beside the job's record. No runtime has a record of a job, so a lost ledger is rebuilt
/// from these.
#[derive(Serialize, Deserialize)]
struct Copy {
    /// That of the boot in which the job runs.
    boot_id: String,
    lease: Lease,
}

impl Lease {
    /// Writes down a job's lease, until the job's record is removed. That of a container in a job has no copy: it books
    /// nothing beside the job's.
    pub(crate) fn write_copy(&self, state_dir: &Path) -> io::Result<()> {
        let Some(job) = self.job.as_ref().filter(|_| self.is_of_job()) else { return Ok(()) };
        let copy = Copy { boot_id: process::read_boot_id()?.to_owned(), lease: self.clone() };
        replace(&slurm::lease_file(state_dir, job.id), &serde_json::to_vec(&copy)?, 0o600)
    }
}

/// The leases of jobs that still have processes. Only leases that were granted have been written down, and a job that was
/// requeued has another cgroup.
///
/// # Errors
/// A copy cannot be read. The job may still run.
pub(super) fn read_live_jobs(state_dir: &Path) -> Result<Vec<Lease>, LedgerError> {
    let files = slurm::lease_files(state_dir).map_err(|error| failed("read", state_dir, error))?;
    let mut leases = Vec::new();
    for file in files {
        let trusted = skip_absent(&file, trusted::read(&file, LARGEST))?.flatten().and_then(Result::ok);
        leases.extend(trusted.as_deref().and_then(parse_copy));
    }
    leases.retain(|lease| lease.is_of_job() && lease.has_processes());
    Ok(leases)
}

fn parse_copy(text: &[u8]) -> Option<Lease> {
    let copy: Copy = serde_json::from_slice(text).ok()?;
    LeaseId::parse(copy.lease.id.as_str())?;
    (Some(&*copy.boot_id) == process::read_boot_id().ok()).then_some(copy.lease)
}

#[cfg(test)]
mod annotation_tests {
    use super::super::fixture::lease;
    use super::*;
    use crate::process::Process;

    #[test]
    fn a_container_that_lives_has_not_ended() {
        let dir = tempfile::tempdir().unwrap();
        let held = lease(1, "GPU-a");
        let write = |process: Process| {
            let status = format!(r#"{{"pid":{},"process-start-time":{}}}"#, process.pid, process.start_time);
            std::fs::write(dir.path().join("status"), status).unwrap();
        };
        assert_eq!(Lease::read_ended(dir.path()), None);
        let config = serde_json::json!({"annotations": {"sublet.lease.record": held.to_annotation(Path::new(DEFAULT_STATE_DIR))}});
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let me = Process::current().unwrap();
        write(me);
        assert_eq!(Lease::read_ended(dir.path()), None);
        write(Process { start_time: 1, ..me });
        assert_eq!(Lease::read_ended(dir.path()), Some(held));
        assert_eq!(Lease::from_annotation("{}"), None);
    }
}

#[cfg(test)]
mod mount_points_tests {
    use std::path::Path;

    use super::super::Lease;
    use super::super::fixture::lease;
    use super::*;

    fn ledger(leases: u64) -> Ledger {
        let list = |n: u64| -> MountPoints { vec![format!("/lib/{}", n % 2).into(), "/b".into()].into() };
        let leases = (1..=leases).map(|n| Lease { mount_points: list(n), ..lease(n, "GPU-a") });
        Ledger { leases: leases.collect(), ..Ledger::empty("boot") }
    }

    #[test]
    fn the_text_has_each_list_once() {
        for (leases, lists) in [(0, 0), (1, 1), (9, 2)] {
            let mut ledger = ledger(leases);
            let before = ledger.clone();
            let written = ledger_text(&mut ledger).unwrap();
            assert_eq!(ledger, before, "as it was");
            let value: serde_json::Value = serde_json::from_slice(&written).unwrap();
            assert_eq!(value["mount_point_lists"].as_array().map_or(0, Vec::len), lists);
            let mut read = parse_ledger(&written, Path::new("")).unwrap();
            assert_eq!(read, before);
            assert_eq!(ledger_text(&mut read).unwrap(), written);
        }
    }

    #[test]
    fn an_annotation_has_the_files_themselves() {
        let lease = ledger(1).leases.remove(0);
        let text = lease.to_annotation(Path::new("/run/sublet"));
        assert_eq!(Lease::from_annotation(&text), Some(lease));
        let numbered = text.replace(r#"["/lib/1","/b"]"#, "0");
        assert_ne!(numbered, text);
        assert_eq!(Lease::from_annotation(&numbered), None);
    }

    #[test]
    fn a_number_without_a_list_is_no_ledger() {
        let written = ledger_text(&mut ledger(9)).unwrap();
        let written = String::from_utf8(written).unwrap();
        for (old, new) in [(r#""mount_points":1"#, r#""mount_points":2"#), (r#"["/lib/1","/b"]"#, "1")] {
            assert!(written.contains(old), "{written}");
            assert!(parse_ledger(written.replace(old, new).as_bytes(), Path::new("")).is_err(), "{new}");
        }
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
                let outcome = parse_ledger(text.as_bytes(), Path::new("l")).unwrap_err();
                let is_newer = matches!(&outcome, LedgerError::Newer { found, .. } if found == schema);
                assert_eq!(is_newer, newer, "{text}: {outcome:?}");
            }
        }
        let cut_off = parse_ledger(br#"{"schema":"sublet.ledger/2","leases":"#, Path::new("l"));
        assert!(matches!(cut_off, Err(LedgerError::Corrupt { .. })), "{cut_off:?}");
    }
}

#[cfg(test)]
mod job_tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt as _;

    use super::super::fixture::lease;
    use super::super::rebuild::{find_trace, rebuild};
    use super::*;
    use crate::ledger::{Init, Job};
    use crate::process::Process;
    use crate::slurm::JobRecord;

    #[test]
    fn a_lost_ledger_has_the_leases_of_jobs_with_processes() {
        let (state, cgroup) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let populated = |is: u8| {
            fs::write(cgroup.path().join("cgroup.events"), format!("populated {is}\n")).unwrap();
        };
        populated(1);
        JobRecord::new(7, 1000, None, Ok(None)).write(state.path()).unwrap();
        let job = |inode| Job { id: 7, step: None, uid: 1000, cgroup_inode: inode };
        let inode = fs::metadata(cgroup.path()).unwrap().ino();
        let (process, cgroup) = (Process::current().unwrap(), Some(cgroup.path().to_owned()));
        let init = Some(Init { process, pid_namespace: 0, cgroup, cgroup_inode: None });
        let held = Lease { job: Some(job(inode)), init, ..lease(1, "GPU-a") };
        let rebuilt = || rebuild(state.path(), None, "boot", None).unwrap().leases;
        held.write_copy(state.path()).unwrap();
        assert_eq!(rebuilt(), std::slice::from_ref(&held));
        assert!(find_trace(state.path(), None).unwrap().unwrap().contains("job 7"));
        let within = Lease { within: Some(held.id.clone()), ..held.clone() };
        within.write_copy(state.path()).unwrap();
        assert_eq!(rebuilt(), std::slice::from_ref(&held), "a container's is not written");
        Lease { job: Some(job(inode + 1)), ..held.clone() }.write_copy(state.path()).unwrap();
        assert!(rebuilt().is_empty(), "the job was requeued");
        held.write_copy(state.path()).unwrap();
        let file = slurm::lease_file(state.path(), 7);
        let written = fs::read_to_string(&file).unwrap();
        fs::write(&file, written.replace(process::read_boot_id().unwrap(), "earlier")).unwrap();
        assert!(rebuilt().is_empty(), "of an earlier boot");
        fs::write(&file, written).unwrap();
        assert_eq!(rebuilt(), std::slice::from_ref(&held));
        populated(0);
        assert!(rebuilt().is_empty(), "the job has ended");
        assert_eq!(find_trace(state.path(), None).unwrap(), None);
        populated(1);
        JobRecord::remove(state.path(), 7, None).unwrap();
        assert!(rebuilt().is_empty(), "its copy goes with its record");
    }

    #[test]
    fn copies_that_cannot_be_read_may_be_of_jobs_that_run() {
        let state = tempfile::tempdir().unwrap();
        assert!(read_live_jobs(state.path()).unwrap().is_empty(), "there is no directory");
        // What a command without descriptors left gets there: ELOOP stands for it.
        let directory = state.path().join("slurm");
        std::os::unix::fs::symlink("slurm", &directory).unwrap();
        for error in [
            read_live_jobs(state.path()).unwrap_err(),
            rebuild(state.path(), None, "boot", None).unwrap_err(),
            find_trace(state.path(), None).unwrap_err(),
        ] {
            assert!(error.to_string().contains("cannot be read"), "{error}");
        }
    }
}
