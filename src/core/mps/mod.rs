//! MPS control daemons: their directories, whether they answer, their start, default limits and stop.
//! docs/evidence has measurements of what clients need and what daemons do.
//!
//! Two locks: the daemon's own (`mps/<key>/lock`) is held while a daemon is started, asked to change or
//! stopped; the ledger's, taken inside it for a moment at a time, never while a process is waited for.

pub mod control;
pub mod dirs;
mod enter;
mod error;
mod heal;
pub mod idle;
pub mod lock;
pub mod ready;
pub mod record;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::own;

pub use control::command as control_command;
pub use enter::{answers, enter};
pub use error::MpsError;
pub use heal::{heal, settle};
pub use idle::{end_overdue, end_unexplained, keep, keep_no_more, make_way};
pub use ready::ready;

/// A daemon's name: the device's UUID (shared) or the lease id (dedicated).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ServerKey(pub String);

impl ServerKey {
    /// The daemon's own directory, 0700 but for the way to `public/`.
    #[must_use]
    pub fn dir(&self, state_dir: &Path) -> PathBuf {
        state_dir.join("mps").join(&self.0)
    }

    /// What containers see: a directory with a hard link to `control` and nothing else.
    #[must_use]
    pub fn public(&self, state_dir: &Path) -> PathBuf {
        self.dir(state_dir).join("public")
    }
}

/// Whether `text` can be a daemon's name.
#[must_use]
pub fn is_key(text: &str) -> bool {
    dirs::check_key(&ServerKey(text.to_owned())).is_ok()
}

impl std::fmt::Display for ServerKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.0)
    }
}

/// `sublet mps stop`'s own word for our programs: another one may have been first.
pub const IF_THERE: &str = "--if-there";

/// Longest that `sublet mps stop` may take.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// Runs `sublet mps start KEY`, which has NVML and need not live where we do; its warnings.
///
/// # Errors
/// The command failed: what it said last.
pub fn child_start(key: &ServerKey, config: &Config) -> Result<Vec<String>, MpsError> {
    // It may first wait for a stop and for another start to end.
    let limit = config.mps.start_timeout * 2 + STOP_LIMIT + Duration::from_secs(5);
    Ok(own::sublet(&["mps", "start", &key.0], limit)?)
}

/// Runs `sublet mps stop KEY`; its warnings.
fn child_stop(key: &ServerKey) -> Result<Vec<String>, MpsError> {
    Ok(own::sublet(&["mps", "stop", IF_THERE, &key.0], STOP_LIMIT)?)
}

/// Runs `sublet mps rest KEY`, which has NVML; its warnings.
fn child_rest(key: &ServerKey) -> Result<Vec<String>, MpsError> {
    Ok(own::sublet(&["mps", "rest", &key.0], STOP_LIMIT)?)
}
