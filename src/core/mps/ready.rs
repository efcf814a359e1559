//! Before a container starts: makes sure that its daemon answers and admits its share.

use std::path::Path;
use std::time::Duration;

use super::control::{AskError, Control, listens};
use super::lock::DaemonLock;
use super::{MpsError, STOP_LIMIT, child_start, dirs, limits_and_state};
use crate::config::{Config, ExclusiveComputeMode};
use crate::fs::selinux;
use crate::inventory;
use crate::ledger::{DaemonKey, DaemonState, DefaultLimits, Lease, MpsDaemon, Store};
use crate::process::sublet::SubletError;
use crate::process::{Condition, epoch_seconds};

/// Makes sure that the daemon of `lease` (already in the ledger) answers and admits its share.
///
/// For a running daemon this takes one `connect()` and no child process. Otherwise `sublet mps start` starts the
/// daemon. It also sets the compute mode again for a daemon that has waited for a lease. Returns warnings, one line
/// each.
///
/// # Errors
/// The daemon cannot be started or does not answer within `[mps] start_timeout`.
pub fn make_ready(lease: &Lease, store: &Store, config: &Config) -> Result<Vec<String>, MpsError> {
    let Some(key) = &lease.daemon else { return Ok(Vec::new()) };
    if selinux::denies_mps_sockets(Path::new("/"), &config.state_dir) {
        return Err(MpsError::SeLinux { state_dir: config.state_dir.clone() });
    }
    if serve_if_running(lease, store, config)? {
        return Ok(Vec::new());
    }
    let warnings = child_start(key, config)?;
    // It has set default limits that admit every lease in the ledger, so this one, too.
    if is_open(key, config) {
        return Ok(warnings);
    }
    Err(MpsError::Own(SubletError(format!(
        "`sublet mps start {key}` succeeded, but the daemon does not work: see `sublet mps logs {key}`"
    ))))
}

/// Whether the recorded daemon serves `lease`. Its default limits are raised if necessary. `false`: it must be started.
fn serve_if_running(lease: &Lease, store: &Store, config: &Config) -> Result<bool, MpsError> {
    let ledger = store.read()?;
    let known = lease.daemon.as_ref().and_then(|key| limits_and_state::daemon(&ledger, key));
    let Some(daemon) = known.filter(|daemon| is_reachable(daemon, config)) else { return Ok(false) };
    let Some(default_limits) = confirm_default_limits(daemon, store, config)? else { return Ok(false) };
    // A daemon that waited still has the default limits of its last leases.
    let left = daemon.mode_left && ledger.wanted_default_limits(&daemon.key) != Some(default_limits);
    if left || !default_limits.admits(lease.default_limits()) {
        let held = DaemonLock::take(&daemon.key, &config.state_dir, lock_limit(config))?;
        // Until then another process may have stopped it, or may have been killed while it started it anew.
        let still =
            limits_and_state::daemon(&store.read()?, &daemon.key).is_some_and(|now| could_serve(now, config));
        if !still {
            return Ok(false);
        }
        // The answer may be less than the record.
        let adjusted = limits_and_state::adjust(&held, &daemon.key, Some(default_limits), store, config);
        // It may end while it is asked.
        if adjusted.is_err() && !could_serve(daemon, config) {
            return Ok(false);
        }
        adjusted?;
    }
    Ok(true)
}

/// The time to wait for the lock. A start or a stop by another process may have to end first.
#[must_use]
pub fn lock_limit(config: &Config) -> Duration {
    config.mps.start_timeout + STOP_LIMIT
}

/// Whether the compute mode must be checked before the daemon serves again, because it waited for a lease.
fn has_mode_to_enter(daemon: &MpsDaemon, config: &Config) -> bool {
    // MIG devices have no compute mode of their own.
    let never = config.mps.exclusive_compute_mode == ExclusiveComputeMode::Never;
    daemon.mode_left && !never && !daemon.key.0.starts_with("MIG-")
}

/// The cheap check: the daemon is recorded as serving, the same process still runs, and it listens on the clients'
/// socket.
fn could_serve(daemon: &MpsDaemon, config: &Config) -> bool {
    is_reachable(daemon, config) && limits_and_state::is_alive(daemon)
}

/// Whether the daemon is recorded as serving, and something listens on its clients' socket.
fn is_reachable(daemon: &MpsDaemon, config: &Config) -> bool {
    matches!(daemon.state, DaemonState::Serving | DaemonState::Fault)
        && !has_mode_to_enter(daemon, config)
        && is_open(&daemon.key, config)
}

/// Whether containers can reach the daemon, and something listens there.
fn is_open(key: &DaemonKey, config: &Config) -> bool {
    dirs::is_open(key, &config.state_dir) && listens(&key.public(&config.state_dir).join("control"))
}

/// The default limits in force of a daemon that is reachable. It is asked if its last answer is too old, because a hanging
/// daemon listens, too. `None`: there is no daemon after all.
fn confirm_default_limits(
    daemon: &MpsDaemon,
    store: &Store,
    config: &Config,
) -> Result<Option<DefaultLimits>, MpsError> {
    let condition = daemon.process.map_or(Condition::Ending, |daemon| daemon.condition());
    if condition == Condition::Ending {
        return Ok(None);
    }
    if daemon.state == DaemonState::Serving
        && limits_and_state::is_recent(daemon.answered_at, epoch_seconds())
    {
        // Its clients would wait for it for ever.
        if condition == Condition::Stopped {
            return Err(limits_and_state::note_failure(store, daemon, AskError::Silent));
        }
        return Ok(Some(daemon.default_limits));
    }
    let control = match inventory::last(config) {
        Ok(known) => Control::with_known_program(&daemon.key, &known, config)?,
        Err(_) => Control::new(&daemon.key, config)?,
    };
    match control.default_limits() {
        Ok(_) if daemon.answered_at == 0 => Ok(Some(DefaultLimits::default())),
        Ok(answer) => {
            limits_and_state::note_answer(store, daemon)?;
            Ok(Some(daemon.default_limits.and(DefaultLimits { sm: answer, ..daemon.default_limits })))
        }
        Err(AskError::Gone(_)) => Ok(None),
        Err(error) => Err(limits_and_state::note_failure(store, daemon, error)),
    }
}
