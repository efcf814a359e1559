//! `sublet mps list` and `logs`: the current state of the daemons.

use schemars::JsonSchema;
use serde::Serialize;

use sublet_core::config::Config;
use sublet_core::ledger::DaemonKey;
use sublet_core::ledger::{DaemonState, LeaseId, Ledger, MpsDaemon, Store};
use sublet_core::mps::control::{AskError, Control, listens};
use sublet_core::mps::limits_and_state::is_alive;
use sublet_core::mps::{MpsError, dirs, heal};
use sublet_core::process::uptime_seconds;

/// One daemon.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
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
        let recorded = shown(daemon, ledger, config);
        match recorded.state {
            DaemonState::Serving if !is_alive(daemon) => {
                Listed { pid: None, state: DaemonState::Down, ..recorded }
            }
            _ => recorded,
        }
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
    if std::fs::metadata(control).is_err_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied) {
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
    let texts =
        names.map(|name| (name.to_owned(), dirs::log_since(key, &config.state_dir, name, 0, 1 << 20)));
    let texts = texts.into_iter().filter(|(_, text)| !text.is_empty());
    let readable = |text: String| {
        text.lines()
            .map(|line| line.chars().filter(|c| !c.is_control() || *c == '\t').collect::<String>() + "\n")
            .collect()
    };
    Ok(texts.map(|(name, text)| (name, readable(text))).collect())
}
