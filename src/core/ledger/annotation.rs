//! The lease in a container's config.json, from which a lost ledger is rebuilt.

use std::path::Path;

use super::Lease;
use super::runtime_record::Record;

/// The directory of the ledger for leases without [`STATE_DIR`] in their annotation (`state_dir` of the configuration).
const DEFAULT_STATE_DIR: &str = "/run/sublet";
/// The key in that annotation for the ledger's directory. A host may have several ledgers, but runtimes keep the
/// records of all containers together.
const STATE_DIR: &str = "state_dir";
/// The key for the ledger's file system, by device number (`st_dev`).
const FILE_SYSTEM: &str = "state_fs";

impl Lease {
    /// The value of [`super::LEASE_RECORD_ANNOTATION`], in the ledger of `state_dir`.
    #[must_use]
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
    #[must_use]
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
    #[must_use]
    pub(crate) fn read_ended(dir: &Path) -> Option<Self> {
        let record = Record::read(dir).ok()??;
        let lease = Self::from_annotation(record.restorable.as_deref()?)?;
        (!record.init.is_alive()).then_some(lease)
    }
}

#[cfg(test)]
mod tests {
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
