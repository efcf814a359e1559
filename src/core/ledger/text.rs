//! The ledger's text, and the text of a lease in a container's config.json, from which a lost ledger is rebuilt.
//!
//! The driver's files are the same in most containers, and the paths of their mount points are half of a lease's text. So in
//! memory there is one list for all leases that have the same, and the ledger's text has each list once, and its leases have
//! the list's number.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::error::text;
use super::runtime_record::Record;
use super::{Lease, LeaseId, Ledger, LedgerError, SCHEMA};
use crate::parse_errors::plain;
use crate::text::safe;

/// All that is known of a ledger of another version.
#[derive(Deserialize)]
struct OfAnyVersion {
    schema: String,
}

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
