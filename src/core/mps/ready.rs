//! Before a container starts: its daemon answers and admits its share.

use std::path::Path;
use std::time::Duration;

use super::control::{AskError, Control, listens};
use super::lock::DaemonLock;
use super::{MpsError, STOP_LIMIT, child_start, dirs, record};
use crate::config::{Config, ExclusiveComputeMode};
use crate::ledger::{Ceiling, Lease, Server, ServerState, Store};
use crate::own::OwnError;
use crate::process::epoch_seconds;
use crate::selinux;

/// Makes sure that the daemon of `lease` (already in the ledger) answers and admits its share.
///
/// A warm daemon costs a `connect()` and no process; a cold one is started by `sublet mps start`,
/// which also sets the compute mode anew under one that has waited for a lease.
/// Returns warnings, one line each.
///
/// # Errors
/// The daemon cannot be started or does not answer in `[mps] start_timeout`.
pub fn ready(lease: &Lease, store: &Store, config: &Config) -> Result<Vec<String>, MpsError> {
    let Some(key) = &lease.server else { return Ok(Vec::new()) };
    if selinux::denies_mps_sockets(Path::new("/"), &config.state_dir) {
        return Err(MpsError::SeLinux { state_dir: config.state_dir.clone() });
    }
    if serves(lease, store, config)? {
        return Ok(Vec::new());
    }
    let warnings = child_start(key, config)?;
    if serves(lease, store, config)? {
        return Ok(warnings);
    }
    Err(MpsError::Own(OwnError(format!(
        "`sublet mps start {key}` succeeded, but the daemon does not work: see `sublet mps logs {key}`"
    ))))
}

/// Whether the recorded daemon serves `lease`; its ceiling is raised for it if need be. `false`: it has to
/// be started.
fn serves(lease: &Lease, store: &Store, config: &Config) -> Result<bool, MpsError> {
    let ledger = store.read()?;
    let known = lease.server.as_ref().and_then(|key| record::server(&ledger, key));
    let Some(server) = known.filter(|server| could_serve(server, config)) else { return Ok(false) };
    let Some(ceiling) = confirmed_ceiling(server, store, config)? else { return Ok(false) };
    // One that waited still has the ceiling of its last leases.
    let left = server.mode_left && ledger.wanted_ceiling(&server.key) != Some(ceiling);
    if left || !ceiling.admits(lease.ceiling()) {
        let held = DaemonLock::take(&server.key, &config.state_dir, lock_limit(config))?;
        // The answer may be less than the record says, which `adjust` would believe.
        record::note(store, &server.key, |server| server.ceiling = server.ceiling.and(ceiling))?;
        record::adjust(&held, &server.key, store, config)?;
    }
    Ok(true)
}

/// A start or a stop by another process may have to end first.
#[must_use]
pub fn lock_limit(config: &Config) -> Duration {
    config.mps.start_timeout + STOP_LIMIT
}

/// Whether the compute mode has to be looked at before the daemon serves again: it waited for a lease.
fn has_mode_to_enter(server: &Server, config: &Config) -> bool {
    // MIG devices have none of their own.
    let never = config.mps.exclusive_compute_mode == ExclusiveComputeMode::Never;
    server.mode_left && !never && !server.key.0.starts_with("MIG-")
}

/// The cheap check: the record says that it runs, it is still the same process, and it listens on the clients' socket.
fn could_serve(server: &Server, config: &Config) -> bool {
    matches!(server.state, ServerState::Serving | ServerState::Fault)
        && !has_mode_to_enter(server, config)
        && record::is_alive(server)
        && dirs::is_open(&server.key, &config.state_dir)
        && listens(&server.key.public(&config.state_dir).join("control"))
}

/// The ceiling in force; asked for when the last real answer is too old, since one that hangs listens
/// too. `None`: there is no daemon after all.
fn confirmed_ceiling(server: &Server, store: &Store, config: &Config) -> Result<Option<Ceiling>, MpsError> {
    if server.state == ServerState::Serving && record::is_recent(server.answered_at, epoch_seconds()) {
        // Its programs would wait for it for ever.
        if server.daemon.is_some_and(|daemon| daemon.is_stopped()) {
            return Err(record::note_failure(store, server, AskError::Silent));
        }
        return Ok(Some(server.ceiling));
    }
    match Control::new(&server.key, config)?.ceiling() {
        Ok(_) if server.answered_at == 0 => Ok(Some(Ceiling::default())),
        Ok(answer) => {
            record::note_answer(store, server)?;
            Ok(Some(server.ceiling.and(Ceiling { sm: answer, ..server.ceiling })))
        }
        Err(AskError::Gone(_)) => Ok(None),
        Err(error) => Err(record::note_failure(store, server, error)),
    }
}
