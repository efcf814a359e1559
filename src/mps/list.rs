//! `sublet mps list` and `logs`: what the daemons are doing, as seen now.

use serde::Serialize;

use super::control::{AskError, Control, listens};
use super::{MpsError, ServerKey, dirs};
use crate::config::Config;
use crate::ledger::{LeaseId, Server, ServerState, Store};
use crate::process::Process;

/// One daemon; the first five are an element of `mps` in `sublet status --format json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Listed {
    /// The device it serves.
    pub device: String,
    /// The lease that a dedicated daemon belongs to.
    pub lease: Option<LeaseId>,
    /// The control daemon, while it runs.
    pub pid: Option<i32>,
    /// As recorded, or as seen where that is worse.
    pub state: ServerState,
    /// Clients of all its servers; `None` where it does not answer.
    pub clients: Option<usize>,
    /// Its key, for `sublet mps stop` and `logs`.
    pub key: ServerKey,
    /// SM ceiling for new clients.
    pub ceiling_percent: f64,
}

/// Every daemon, each asked for its clients (at most 1 s).
///
/// # Errors
/// The ledger cannot be read.
pub fn list(store: &Store, config: &Config) -> Result<Vec<Listed>, MpsError> {
    Ok(store.read()?.servers.iter().map(|server| listed(server, config)).collect())
}

fn listed(server: &Server, config: &Config) -> Listed {
    let pid = server.daemon.filter(Process::is_alive).map(|daemon| daemon.pid);
    let (state, clients) = match server.state {
        ServerState::Serving | ServerState::Fault => seen(server, pid.is_some(), config),
        other => (other, None),
    };
    Listed {
        device: server.device.clone(),
        lease: LeaseId::parse(&server.key.0),
        pid,
        state,
        clients,
        key: server.key.clone(),
        ceiling_percent: server.ceiling.as_f64(),
    }
}

fn seen(server: &Server, alive: bool, config: &Config) -> (ServerState, Option<usize>) {
    if !alive || !listens(&server.key.public(&config.state_dir).join("control")) {
        return (ServerState::Down, None);
    }
    let control = dirs::pipe(&server.key, &config.state_dir).join("control");
    if std::fs::metadata(control).is_err_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied) {
        // Only its owner may ask.
        return (server.state, None);
    }
    match Control::new(&server.key, config).map(|control| control.count_clients()) {
        Ok(Ok(count)) => (ServerState::Serving, Some(count)),
        Ok(Err(AskError::Gone(_))) => (ServerState::Down, None),
        _ => (ServerState::Fault, None),
    }
}

/// Ends one client of daemon `key`.
///
/// # Errors
/// The daemon does not answer or says no.
pub(crate) fn terminate_client(key: &ServerKey, pid: i32, config: &Config) -> Result<(), MpsError> {
    let asked = Control::new(key, config)?.terminate(pid);
    asked.map_err(|error| MpsError::Client { pid, why: error.to_string() })
}

/// The logs of daemon `key` as (file name, last part of its text), oldest first; terminal-safe line by line.
///
/// # Errors
/// A key that names no daemon's directory.
pub fn logs(key: &ServerKey, config: &Config) -> Result<Vec<(String, String)>, MpsError> {
    dirs::check_key(key)?;
    if !dirs::log(key, &config.state_dir).is_dir() {
        return Err(MpsError::BadKey { key: key.to_string() });
    }
    dirs::cap_logs(key, &config.state_dir);
    let names = ["control.log.old", "control.log", "server.log.old", "server.log"];
    let texts = names.map(|name| (name.to_owned(), dirs::log_tail(key, &config.state_dir, name, 1 << 20)));
    let readable = |text: String| {
        text.lines()
            .map(|line| line.chars().filter(|c| !c.is_control() || *c == '\t').collect::<String>() + "\n")
            .collect()
    };
    Ok(texts
        .into_iter()
        .filter(|(_, text)| !text.is_empty())
        .map(|(name, text)| (name, readable(text)))
        .collect())
}
