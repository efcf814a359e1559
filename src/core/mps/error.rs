//! Why an MPS daemon does not serve, one line each, with a remedy.

use std::io;
use std::path::{Path, PathBuf};

use crate::inventory::{InventoryError, MissingPrograms};
use crate::ledger::LedgerError;
use crate::process::sublet::SubletError;

/// Why an MPS daemon does not serve; every message has a remedy.
#[derive(Debug, thiserror::Error)]
pub enum MpsError {
    /// The driver's MPS programs are missing, or one of them is.
    #[error(transparent)]
    Programs(#[from] MissingPrograms),
    /// Its clients would not reach it.
    #[error(
        "SELinux is enforcing without sublet's policy module for {}/mps, so containers could not reach \
         their MPS server and would run without limits: {}; or use a share without sm and memory (mode \
         time-slice)",
        .state_dir.display(),
        crate::fs::selinux::FIX
    )]
    SeLinux {
        /// The state directory.
        state_dir: PathBuf,
    },
    /// A key that is neither a device's UUID nor a lease id could name a path outside the state directory.
    #[error(
        "'{key}' is not the key of an MPS daemon: a GPU-… or MIG-… UUID or a lease id is expected (`sublet \
         mps list` shows the keys)"
    )]
    BadKey {
        /// The key, made safe.
        key: String,
    },
    /// `sun_path` of unix(7) holds 107 bytes and a NUL.
    #[error(
        "the path of the MPS socket {path} has {length} bytes, and sockets allow 107: set state_dir in the \
         configuration to a shorter path"
    )]
    PathTooLong {
        /// The socket.
        path: PathBuf,
        /// Its length in bytes.
        length: usize,
    },
    /// A client was not ended by its server.
    #[error("MPS did not terminate its client {pid}: {why}")]
    Client {
        /// The client.
        pid: i32,
        /// The daemon's answer.
        why: String,
    },
    /// There is nothing to stop.
    #[error(
        "there is no MPS daemon {key}: the key of a daemon is its device's UUID, or its lease id if it is \
         dedicated (`sublet mps list` shows the keys)"
    )]
    NoDaemon {
        /// Its key.
        key: String,
    },
    /// No lease needs it.
    #[error("no lease needs an MPS daemon {key}: it starts with its first container")]
    NotWanted {
        /// Its key.
        key: String,
    },
    /// Stopping it would end the GPU work of containers.
    #[error(
        "the MPS daemon {key} serves {leases} lease(s): end their containers first, or use `sublet mps \
         stop --force {key}`, which ends their GPU work"
    )]
    InUse {
        /// Its key.
        key: String,
        /// How many.
        leases: usize,
    },
    /// Its device is to be used in another way.
    #[error(
        "the MPS daemon {key} serves no lease, but still runs on the device: `sublet mps stop {key}` says \
         why; `sublet mps stop --force {key}` ends it and the GPU work of its clients"
    )]
    InTheWay {
        /// Its key.
        key: String,
    },
    /// Another process holds this daemon's lock for too long.
    #[error(
        "another sublet process has been starting or stopping the MPS daemon {key} for more than {seconds} \
         s: try again; `sublet mps list` shows its state"
    )]
    Busy {
        /// Its key.
        key: String,
        /// How long we waited.
        seconds: u64,
    },
    /// It ended at once.
    #[error("the MPS daemon {key} was restarted, but does not work: see `sublet mps logs {key}`")]
    Gone {
        /// Its key.
        key: String,
    },
    /// It runs and does not answer.
    #[error("the MPS daemon of {device} (pid {pid}) does not answer{}", silence(*pid, key, kept_by))]
    Silent {
        /// The device.
        device: String,
        /// The daemon's key.
        key: String,
        /// The daemon's pid; 0 where it is not known.
        pid: i32,
        /// The containers for which it waits, if any are known.
        kept_by: Vec<String>,
    },
    /// It answers another program.
    #[error(
        "the MPS daemon {key} speaks with one program at a time, and another kept it: end \
         `nvidia-cuda-mps-control` where it runs, or the container that does"
    )]
    Taken {
        /// Its key.
        key: String,
    },
    /// It was started and never answered.
    #[error("the MPS daemon of {device} did not start within {seconds} s ({why}){log}")]
    NotUp {
        /// The device.
        device: String,
        /// The limit.
        seconds: u64,
        /// The missing step.
        why: String,
        /// The last lines of its logs and its server's.
        log: String,
    },
    /// It would end, or fail its clients, because of rights or limits of the process that starts it.
    #[error(
        "the MPS daemon of {device}, which other containers share, would run with the resource limits of \
         the process that starts it: {limits}; that process may not raise them, so start this container \
         with higher hard limits (ulimit -H; prlimit(1)) or with CAP_SYS_RESOURCE"
    )]
    Limits {
        /// The device.
        device: String,
        /// Each with what the system says.
        limits: String,
    },
    /// It answers, and has no server for any client.
    #[error("the MPS daemon of {device} cannot start an MPS server: {why}")]
    NoServer {
        /// The device.
        device: String,
        /// The server program, how it ended, the last line it printed, and what to check.
        why: String,
    },
    /// It answers and refuses.
    #[error("the MPS daemon {key} refused `{command}`: {answer}")]
    Refused {
        /// Its key.
        key: String,
        /// The command.
        command: String,
        /// Its answer, made safe.
        answer: String,
    },
    /// It does not answer, or has ended.
    #[error("the MPS daemon {key} cannot be asked: {why}: see `sublet mps logs {key}`")]
    Unreachable {
        /// Its key.
        key: String,
        /// What the system or the control program says, made safe.
        why: String,
    },
    /// `sublet mps start` or `stop` failed.
    #[error(transparent)]
    Own(#[from] SubletError),
    /// It cannot be stopped.
    #[error(
        "the MPS daemon {key} (pid {pid}) does not end, not even on SIGKILL, because a process hangs in \
         the driver (see dmesg): reset the GPU or reboot the host"
    )]
    WontEnd {
        /// Its key.
        key: String,
        /// Its pid.
        pid: i32,
    },
    /// The compute mode could not be set as configured.
    #[error(
        "compute mode of {device}: {why}; with [mps] exclusive_compute_mode = \"never\" sublet does not \
         change it"
    )]
    ComputeMode {
        /// The device.
        device: String,
        /// The reason, NVML's or sublet's.
        why: String,
    },
    /// The ledger.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The inventory.
    #[error(transparent)]
    Inventory(#[from] InventoryError),
    /// A system call.
    #[error("{attempt}: {source}")]
    Io {
        /// The attempt, with the path.
        attempt: String,
        /// The system's answer.
        source: io::Error,
    },
}

/// Why a daemon does not answer, and a remedy.
fn silence(pid: i32, key: &str, kept_by: &[String]) -> String {
    let stop = format!("`sublet mps stop --force {key}` ends the daemon and the GPU work of its clients");
    if kept_by.is_empty() {
        return format!(
            ": if it is stopped, `kill -CONT {pid}` continues it; if a process keeps a connection to it open and \
             says nothing, end that; {stop}"
        );
    }
    format!(
        ": it waits for container {}, which keeps a connection to it open and says nothing: end that \
         container; {stop}",
        kept_by.join(" or ")
    )
}

/// For `map_err`: an [`MpsError::Io`] with the attempt and its path.
pub(super) fn io_at(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> MpsError {
    let attempt = format!("cannot {verb} {}", path.display());
    move |source| MpsError::Io { attempt, source }
}
