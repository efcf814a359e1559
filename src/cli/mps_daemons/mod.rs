//! Starts, stops and lists MPS control daemons, for `sublet mps` and `sublet serve`. The shim runs these commands when
//! it needs them; its own part is in [`sublet_core::mps`].

mod compute_mode;
mod detach;
mod launch;
mod service_syscalls;
mod start;

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sublet_core::config::Config;
use sublet_core::grant::{MPS_DEFAULT_DIR, MPS_DIR};
use sublet_core::inventory;
use sublet_core::ledger::{DaemonKey, DaemonState, LeaseId, Ledger, MpsDaemon, StopClaim, Store};
use sublet_core::mps::control::{AskError, Control};
use sublet_core::mps::dirs::DaemonLock;
use sublet_core::mps::limits_and_state::is_alive;
use sublet_core::mps::{MpsError, dirs, heal, limits_and_state};
use sublet_core::process::{listens, live_proc_dir, uptime_seconds};

pub(crate) use start::await_end;
pub use start::start;

/// Warnings, one line each.
type Warnings = Result<Vec<String>, MpsError>;

/// A daemon that is started or stopped, the ledger that records it, and the configuration.
#[derive(Clone, Copy)]
struct Daemon<'a> {
    key: &'a DaemonKey,
    store: &'a Store,
    config: &'a Config,
}

/// A process that starts or stops the daemon has nearly always finished by then. Otherwise the next command stops it.
const LOCK_LIMIT: Duration = Duration::from_millis(1500);

/// Stops the daemon of `key`, restores the device's compute mode and removes the record.
///
/// `force` stops it even with leases, which ends their GPU work; the next command starts it again. A daemon that is
/// already gone is no error. Returns warnings, one line each.
///
/// # Errors
/// A lease still needs it (without `force`), or it does not end.
pub fn stop(key: &DaemonKey, force: bool, store: &Store, config: &Config) -> Warnings {
    dirs::check_key(key)?;
    if !is_known(key, store, config)? {
        return Ok(Vec::new());
    }
    let held = DaemonLock::take(key, &config.state_dir, LOCK_LIMIT)?;
    Daemon { key, store, config }.stop(&held, force)
}

/// Restores the compute mode under the daemon of `key`, which serves no lease. Returns warnings, one line each.
///
/// # Errors
/// The mode cannot be restored, and the daemon does not end.
pub fn rest(key: &DaemonKey, store: &Store, config: &Config) -> Warnings {
    dirs::check_key(key)?;
    if store.read()?.daemon(key).is_none() {
        return Ok(Vec::new());
    }
    let held = DaemonLock::take(key, &config.state_dir, LOCK_LIMIT)?;
    Daemon { key, store, config }.rest(&held)
}

impl Daemon<'_> {
    fn pipe(self) -> PathBuf {
        dirs::pipe(self.key, &self.config.state_dir)
    }

    /// Records that it does not run.
    fn note_down(self) -> Result<(), MpsError> {
        limits_and_state::note(self.store, self.key, |daemon| {
            daemon.state = DaemonState::Down;
            daemon.process = None;
        })
    }

    /// [`stop`] for a caller that holds the daemon's lock.
    fn stop(self, _held: &DaemonLock, force: bool) -> Warnings {
        let Daemon { key, store, config } = self;
        // Under the ledger's lock: no lease is left (unless forced), and the daemon is recorded as stopping.
        let StopClaim { before, leases, unexplained } = limits_and_state::change(store, |ledger| {
            ledger.claim_stop(key, force).map_err(|leases| MpsError::InUse { key: key.to_string(), leases })
        })?;
        let answers = before.as_ref().is_some_and(|daemon| daemon.state != DaemonState::Fault);
        let control = Control::new(key, config).ok().filter(|_| answers);
        if before.is_some() && unexplained && !force {
            // One whose directory is gone cannot be asked.
            let clients = control.as_ref().and_then(|control| control.count_clients().ok());
            if clients != Some(0) || is_mounted(key, &config.state_dir) {
                // If it ended, new processes of those containers would run without any limit.
                limits_and_state::note(store, key, |daemon| daemon.state = DaemonState::Serving)?;
                return Ok(vec![format!(
                    "the ledger was lost, and MPS daemon {key} has, or may have, clients or containers without \
                     a lease: its device takes no new lease until they have ended (`sublet mps stop {key} \
                     --force` ends them)"
                )]);
            }
        }
        let process = before.and_then(|daemon| daemon.process);
        if let Err(error) = launch::end(key, &config.state_dir, process, control.as_ref()) {
            limits_and_state::note(store, key, |daemon| daemon.state = DaemonState::Fault)?;
            return Err(error);
        }
        if leases > 0 {
            // Its containers still have the directory mounted, and the compute mode keeps them from running without MPS.
            dirs::clear_pipe(key, &config.state_dir)?;
            self.note_down()?;
            return Ok(vec![format!(
                "{leases} lease(s) lost their MPS daemon {key}: the next sublet command starts it"
            )]);
        }
        let warnings = compute_mode::restore(self).err().map(|error| error.to_string());
        // A lease taken during the stop waits for the lock and starts the daemon again.
        limits_and_state::change(store, |ledger| {
            ledger.forget_daemon(key);
            Ok(())
        })?;
        dirs::clear(key, &config.state_dir)?;
        Ok(warnings.into_iter().collect())
    }

    /// [`rest`] for a caller that holds the daemon's lock.
    fn rest(self, held: &DaemonLock) -> Warnings {
        let unused = limits_and_state::change(self.store, |ledger| {
            let unused = ledger.on_daemon(self.key).next().is_none();
            let daemon = ledger.daemons.iter_mut().find(|daemon| daemon.key == *self.key);
            // A lease taken from now on waits for this lock and sets the mode again.
            Ok(daemon.filter(|_| unused).map(|daemon| daemon.mode_left = true).is_some())
        })?;
        if !unused {
            return Ok(Vec::new());
        }
        match compute_mode::restore(self) {
            Ok(()) => Ok(Vec::new()),
            // The server may have prevented the change, so the daemon is stopped.
            Err(error) => {
                tracing::warn!("{error}");
                self.stop(held, false)
            }
        }
    }
}

/// Whether a process has the directory of `key` mounted where containers have theirs, also if it does not compute now. If
/// this cannot be found out, the answer is yes.
fn is_mounted(key: &DaemonKey, state_dir: &Path) -> bool {
    let inode = |dir: PathBuf| fs::metadata(dir).ok().map(|meta| (meta.dev(), meta.ino()));
    let (Some(own), Ok(entries)) = (inode(key.public(state_dir)), fs::read_dir("/proc")) else { return true };
    entries.flatten().map(|entry| live_proc_dir(entry.path())).any(|process| {
        // The fifth field is the mount point (proc(5), mountinfo).
        let mounts = fs::read_to_string(process.join("mountinfo")).unwrap_or_default();
        let mut at = mounts.lines().filter_map(|line| line.split(' ').nth(4));
        at.any(|at| {
            [MPS_DIR, MPS_DEFAULT_DIR].contains(&at)
                && inode(process.join("root").join(at.trim_start_matches('/'))) == Some(own)
        })
    })
}

/// Whether a daemon of `key` exists or may have existed: one to stop, or one that is stopped already.
///
/// # Errors
/// The ledger cannot be read, or `key` is not a valid key.
pub fn exists(key: &DaemonKey, store: &Store, config: &Config) -> Result<bool, MpsError> {
    dirs::check_key(key)?;
    let is_device = || inventory::last(config).is_ok_and(|inventory| inventory.device(&key.0).is_some());
    Ok(is_known(key, store, config)? || is_device())
}

/// Whether anything of it is left, or may be.
fn is_known(key: &DaemonKey, store: &Store, config: &Config) -> Result<bool, MpsError> {
    let ledger = store.read()?;
    let mode = ledger.compute_modes.iter().any(|changed| changed.device == key.0);
    Ok(mode || ledger.daemon(key).is_some() || key.dir(&config.state_dir).try_exists().unwrap_or(true))
}

// `sublet mps list` and `logs`: the current state of the daemons.

/// One daemon.
#[derive(Clone, Debug, PartialEq, serde::Serialize, schemars::JsonSchema)]
pub struct Listed {
    /// The lease that a dedicated daemon belongs to.
    #[schemars(with = "Option<String>")]
    pub lease: Option<LeaseId>,
    /// The pid of the control daemon while it runs.
    pub pid: Option<i32>,
    /// The recorded state, or the observed one if that is worse.
    #[schemars(with = "String")]
    pub state: DaemonState,
    /// The number of clients of all its servers; `None` if it does not answer.
    pub clients: Option<usize>,
    /// All devices it serves, in the order in which its clients count them.
    pub devices: Vec<String>,
    /// Its key, for `sublet mps stop` and `logs`.
    #[schemars(with = "String")]
    pub key: DaemonKey,
    /// Default SM limit of new clients, in percent.
    pub ceiling_percent: f64,
    /// Default memory limit of each new client on each device; `None` if there is none.
    pub ceiling_memory_bytes: Option<u64>,
    /// How long it has been without a lease; `None` while it has one.
    pub idle_seconds: Option<u64>,
    /// How long it will wait for the next one; `None` if it does not wait.
    pub ends_in_seconds: Option<u64>,
}

/// Every daemon; each is asked for its clients (at most 1 s).
pub fn list(store: &Store, config: &Config) -> Result<Vec<Listed>, MpsError> {
    let ledger = store.peek()?;
    let elsewhere = store.is_of_here().is_err();
    let look = |daemon: &MpsDaemon| {
        let recorded = shown(daemon, &ledger, config);
        if elsewhere {
            return recorded;
        }
        let alive = is_alive(daemon);
        let (state, clients) = match daemon.state {
            DaemonState::Serving | DaemonState::Fault => seen(daemon, alive, config),
            other => (other, None),
        };
        Listed { pid: recorded.pid.filter(|_| alive), state, clients, ..recorded }
    };
    Ok(ledger.daemons.iter().map(look).collect())
}

/// Every daemon as the ledger has it, and whether its process lives. None is asked for its clients: each question is a
/// child process, too much for who looks again and again.
pub(crate) fn list_unasked(ledger: &Ledger, config: &Config) -> Vec<Listed> {
    let look = |daemon: &MpsDaemon| {
        let mut recorded = shown(daemon, ledger, config);
        if daemon.state == DaemonState::Serving && !is_alive(daemon) {
            (recorded.pid, recorded.state) = (None, DaemonState::Down);
        }
        recorded
    };
    ledger.daemons.iter().map(look).collect()
}

/// The daemon as the ledger has it.
fn shown(daemon: &MpsDaemon, ledger: &Ledger, config: &Config) -> Listed {
    let left = heal::left(daemon, ledger, config);
    Listed {
        devices: daemon.devices.clone(),
        lease: LeaseId::parse(&daemon.key.0),
        pid: daemon.process.map(|daemon| daemon.pid),
        state: daemon.state,
        clients: None,
        key: daemon.key.clone(),
        ceiling_percent: daemon.default_limits.sm.as_f64(),
        ceiling_memory_bytes: daemon.default_limits.memory.bytes(),
        idle_seconds: daemon.idle_since.map(|since| uptime_seconds().saturating_sub(since)),
        ends_in_seconds: (!left.is_zero()).then_some(left.as_secs()),
    }
}

fn seen(daemon: &MpsDaemon, alive: bool, config: &Config) -> (DaemonState, Option<usize>) {
    if !alive || !listens(&daemon.key.public(&config.state_dir).join("control")) {
        return (DaemonState::Down, None);
    }
    let control = dirs::pipe(&daemon.key, &config.state_dir).join("control");
    if fs::metadata(control).is_err_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied) {
        // Only the daemon's owner may ask it.
        return (daemon.state, None);
    }
    match Control::new(&daemon.key, config).map(|control| control.count_clients()) {
        Ok(Ok(count)) => (DaemonState::Serving, Some(count)),
        Ok(Err(AskError::Gone(_))) => (DaemonState::Down, None),
        Ok(Err(AskError::Taken)) => (daemon.state, None),
        _ => (DaemonState::Fault, None),
    }
}

/// Ends one client of daemon `key`.
pub(crate) fn terminate_client(key: &DaemonKey, pid: i32, config: &Config) -> Result<(), MpsError> {
    let asked = Control::new(key, config)?.terminate(pid);
    asked.map_err(|error| MpsError::Client { pid, why: error.to_string() })
}

/// The logs of daemon `key` as (file name, end of its text), oldest first; each line is safe for terminals.
///
/// # Errors
/// The key names no daemon's directory.
pub fn logs(key: &DaemonKey, config: &Config) -> Result<Vec<(String, String)>, MpsError> {
    dirs::check_key(key)?;
    if !dirs::log(key, &config.state_dir).is_dir() {
        return Err(MpsError::BadKey { key: key.to_string() });
    }
    dirs::cap_logs(key, &config.state_dir);
    let names = [dirs::OUTPUT, "control.log.old", "control.log", "server.log.old", "server.log"];
    let line = |line: &str| line.chars().filter(|c| !c.is_control() || *c == '\t').collect::<String>() + "\n";
    let file = |name: &str| {
        let text = dirs::log_since(key, &config.state_dir, name, 0, 1 << 20);
        (!text.is_empty()).then(|| (name.to_owned(), text.lines().map(line).collect()))
    };
    Ok(names.into_iter().filter_map(file).collect())
}
