//! The last refusals, for `sublet status --last-error`: engines do not always show what a hook said.

use serde::{Deserialize, Serialize};

use super::AdmitError;
use crate::config::Config;
use crate::replace::replace;
use crate::text::safe;

/// How many are kept.
const KEPT: usize = 32;

/// A container that was not started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusalRecord {
    /// Seconds since the epoch.
    pub time: u64,
    /// Which container.
    pub container_id: String,
    /// The one line that said why.
    pub reason: String,
}

/// The last refusals, oldest first; none when the file cannot be read.
#[must_use]
pub fn refusals(config: &Config) -> Vec<RefusalRecord> {
    let text = std::fs::read(path(config)).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

/// Adds one. A lost record is no reason to fail: the caller reports the error itself.
pub(super) fn record(container_id: &str, error: &AdmitError, config: &Config) {
    let mut all = refusals(config);
    all.push(RefusalRecord {
        time: crate::process::epoch_seconds(),
        container_id: safe(container_id),
        reason: error.to_string(),
    });
    let surplus = all.len().saturating_sub(KEPT);
    let written = serde_json::to_vec(&all[surplus..]).map_err(Into::into);
    if let Err(error) = written.and_then(|text| replace(&path(config), &text, 0o644)) {
        tracing::debug!("refusals.json is not written: {error}");
    }
}

fn path(config: &Config) -> std::path::PathBuf {
    config.state_dir.join("refusals.json")
}
