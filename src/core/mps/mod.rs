//! MPS control daemons: their directories, whether they answer, their start, default limits and stop.
//! docs/evidence has measurements of the needs of clients and the behaviour of daemons.
//!
//! There are two locks. The daemon's own (`mps/<key>/lock`) is held while a daemon is started, changed or stopped. The
//! ledger's lock is taken inside it for short moments, never while waiting for a process.

pub mod control;
pub mod dirs;
pub mod heal;
pub mod limits_and_state;
pub mod ready;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::config::Config;
use crate::inventory::{InventoryError, MissingPrograms};
use crate::ledger::{DaemonKey, LeaseId, LedgerError};
use crate::process::sublet::{self, SubletError};

pub use control::command as control_command;
pub(crate) use heal::end_unexplained;
pub use heal::{Lowering, end_all_idle, end_overdue, heal, lower, register_keeper, settle};
pub(crate) use ready::end_conflicting;
pub use ready::{answers, ensure_answering, make_ready};

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
pub fn child_await(lease: &LeaseId) -> io::Result<()> {
    sublet::start(&["mps", "await", lease.as_str()])
}

/// Why an MPS daemon does not serve; every message has a remedy.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum MpsError {
    /// The driver's MPS programs are missing, or one of them is.
    #[error(transparent)]
    Programs(#[from] MissingPrograms),
    /// Its clients would not reach it.
    #[error(
        "SELinux is enforcing without sublet's policy module for {}/mps; why: containers could not \
         reach their MPS server; fix: {}; or use a share without sm and memory (mode time-slice)",
        .state_dir.display(),
        crate::fs::selinux::FIX
    )]
    SeLinux { state_dir: PathBuf },
    /// A key that is neither a device's UUID nor a lease id could name a path outside the state directory.
    #[error("'{key}' is not the key of an MPS daemon; fix: `sublet mps list` shows the keys")]
    BadKey { key: String },
    /// `sun_path` of unix(7) holds 107 bytes and a NUL.
    #[error("the MPS socket {path} has {length} bytes, and sockets allow 107; fix: set a shorter state_dir")]
    PathTooLong { path: PathBuf, length: usize },
    /// A client was not ended by its server.
    #[error("MPS did not terminate its client {pid}: {why}")]
    Client { pid: i32, why: String },
    /// There is nothing to stop.
    #[error("there is no MPS daemon {key}; fix: `sublet mps list` shows the keys")]
    NoDaemon { key: String },
    /// No lease needs it.
    #[error("no lease needs an MPS daemon {key}: it starts with its first container")]
    NotWanted { key: String },
    /// Stopping it would end the GPU work of containers.
    #[error("the MPS daemon {key} serves {leases} lease(s); fix: end their containers, or use --force")]
    InUse { key: String, leases: usize },
    /// Its device is to be used in another way.
    #[error("the MPS daemon {key} serves no lease, but still runs; fix: `sublet mps stop --force {key}`")]
    InTheWay { key: String },
    /// Another process holds this daemon's lock for too long.
    #[error("another process starts or stops the MPS daemon {key}, for {seconds} s by now; fix: try again")]
    Busy { key: String, seconds: u64 },
    /// It ended at once.
    #[error("the MPS daemon {key} was restarted, but does not work: see `sublet mps logs {key}`")]
    Gone { key: String },
    /// It runs and does not answer. `pid` is 0 where it is not known; `kept_by` are the containers for which it waits.
    #[error("the MPS daemon of {device} (pid {pid}) does not answer{}", silence(*pid, key, kept_by))]
    Silent { device: String, key: String, pid: i32, kept_by: Vec<String> },
    /// It answers another program.
    #[error(
        "the MPS daemon {key} speaks with one program at a time, and another kept it; fix: end \
         `nvidia-cuda-mps-control` where it runs"
    )]
    Taken { key: String },
    /// It was started and never answered. `log` has the last lines of its logs and its server's.
    #[error("the MPS daemon of {device} did not start within {seconds} s ({why}){log}")]
    NotUp { device: String, seconds: u64, why: String, log: String },
    /// It would end, or fail its clients, because of rights or limits of the process that starts it.
    #[error(
        "the MPS daemon of {device} would be limited; why: the process that starts it has {limits}, and other \
         containers share the daemon; fix: start this container with higher hard limits (ulimit -H, or \
         CAP_SYS_RESOURCE)"
    )]
    Limits { device: String, limits: String },
    /// It answers, and has no server for any client.
    #[error("the MPS daemon of {device} cannot start an MPS server: {why}")]
    NoServer { device: String, why: String },
    /// It answers and refuses.
    #[error("the MPS daemon {key} refused `{command}`: {answer}")]
    Refused { key: String, command: String, answer: String },
    /// It does not answer, or has ended.
    #[error("the MPS daemon {key} cannot be asked: {why}: see `sublet mps logs {key}`")]
    Unreachable { key: String, why: String },
    /// `sublet mps start` or `stop` failed.
    #[error(transparent)]
    Own(#[from] SubletError),
    /// It cannot be stopped.
    #[error(
        "the MPS daemon {key} (pid {pid}) does not end, not even on SIGKILL; fix: reset the GPU or reboot"
    )]
    WontEnd { key: String, pid: i32 },
    /// The compute mode could not be set as configured.
    #[error(
        "compute mode of {device}: {why}; fix: [mps] exclusive_compute_mode = \"never\" does not change it"
    )]
    ComputeMode { device: String, why: String },
    /// The ledger.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The inventory.
    #[error(transparent)]
    Inventory(#[from] InventoryError),
    /// A system call.
    #[error("{attempt}: {source}")]
    Io { attempt: String, source: io::Error },
}

/// Why a daemon does not answer, and a remedy.
fn silence(pid: i32, key: &str, kept_by: &[String]) -> String {
    let way = if kept_by.is_empty() {
        format!("; fix: if it is stopped, `kill -CONT {pid}` continues it")
    } else {
        let kept_by = kept_by.join(" or ");
        format!(
            ": it waits for container {kept_by}, which keeps a connection to it open; fix: end that container"
        )
    };
    format!("{way}; or `sublet mps stop --force {key}` ends it and the GPU work of its clients")
}

/// For `map_err`: an [`MpsError::Io`] with the attempt and its path.
fn io_at(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> MpsError {
    let attempt = format!("cannot {verb} {}", path.display());
    move |source| MpsError::Io { attempt, source }
}
