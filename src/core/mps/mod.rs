//! MPS control daemons: their directories, whether they answer, their start, default limits and stop.
//! docs/evidence has measurements of what clients need and what daemons do.
//!
//! There are two locks. The daemon's own (`mps/<key>/lock`) is held while a daemon is started, changed or stopped. The
//! ledger's lock is taken inside it for short moments, never while waiting for a process.

pub mod control;
pub mod dirs;
mod error;
mod heal;
pub mod idle;
pub mod limits_and_state;
pub mod lock;
pub mod ready;
mod servers;

use std::time::Duration;

use crate::config::Config;
use crate::ledger::{DaemonKey, LeaseId};
use crate::process::sublet;

pub use control::command as control_command;
pub use error::MpsError;
pub use heal::{Lowering, end_all_idle, end_overdue, heal, lower, settle};
pub(crate) use idle::end_unexplained;
pub use idle::register_keeper;
pub use ready::{answers, make_ready};
pub(crate) use ready::{end_conflicting, ensure_answering};

/// Whether `text` can be a daemon's name.
pub fn is_key(text: &str) -> bool {
    dirs::check_key(&DaemonKey(text.to_owned())).is_ok()
}

/// The option with which sublet's programs call `sublet mps stop`: another process may already have stopped the daemon.
pub const IF_THERE: &str = "--if-there";

/// Longest that `sublet mps stop` may take.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// Runs `sublet mps start KEY`, which has NVML and can run in another cgroup. Returns its warnings.
///
/// # Errors
/// The command failed. The error is the last line it printed.
pub fn child_start(key: &DaemonKey, config: &Config) -> Result<Vec<String>, MpsError> {
    // It may first have to wait for a stop and for another start.
    let limit = config.mps.start_timeout * 2 + STOP_LIMIT + Duration::from_secs(5);
    Ok(sublet::run(&["mps", "start", &key.0], limit)?)
}

/// Runs `sublet mps stop KEY`. Returns its warnings.
fn child_stop(key: &DaemonKey) -> Result<Vec<String>, MpsError> {
    Ok(sublet::run(&["mps", "stop", IF_THERE, &key.0], STOP_LIMIT)?)
}

/// Starts `sublet mps await LEASE` and does not wait for it.
pub fn child_await(lease: &LeaseId) -> std::io::Result<()> {
    sublet::start(&["mps", "await", lease.as_str()])
}
