//! Leases that are still in a container's config.json but no longer in the ledger.

use std::path::Path;

use super::runtime_record::Record;
use super::{DEFAULT_STATE_DIR, Lease, STATE_DIR};

impl Lease {
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

    /// The lease of a container whose first process has ended, while its low-level runtime still has a record of it in
    /// `dir`.
    #[must_use]
    pub(crate) fn of_ended(dir: &Path) -> Option<Self> {
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
        assert_eq!(Lease::of_ended(dir.path()), None);
        let config = serde_json::json!({"annotations": {"sublet.lease.record": held.to_annotation(Path::new(DEFAULT_STATE_DIR))}});
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let me = Process::current().unwrap();
        write(me);
        assert_eq!(Lease::of_ended(dir.path()), None);
        write(Process { start_time: 1, ..me });
        assert_eq!(Lease::of_ended(dir.path()), Some(held));
        assert_eq!(Lease::from_annotation("{}"), None);
    }
}
