//! `sublet mps rest KEY`: restores the device's compute mode while the daemon waits for its next lease.

use super::compute_mode;
use super::stop::{LOCK_LIMIT, stop_held};
use sublet_core::config::Config;
use sublet_core::ledger::DaemonKey;
use sublet_core::ledger::Store;
use sublet_core::mps::lock::DaemonLock;
use sublet_core::mps::{MpsError, dirs, limits_and_state};

/// Restores the compute mode under the daemon of `key`, which serves no lease. Returns warnings, one line each.
///
/// # Errors
/// The mode cannot be restored, and the daemon does not end.
pub fn rest(key: &DaemonKey, store: &Store, config: &Config) -> Result<Vec<String>, MpsError> {
    dirs::check_key(key)?;
    if limits_and_state::daemon(&store.read()?, key).is_none() {
        return Ok(Vec::new());
    }
    let held = DaemonLock::take(key, &config.state_dir, LOCK_LIMIT)?;
    rest_held(&held, key, store, config)
}

/// [`rest`] for a caller that holds the daemon's lock.
pub(super) fn rest_held(
    held: &DaemonLock,
    key: &DaemonKey,
    store: &Store,
    config: &Config,
) -> Result<Vec<String>, MpsError> {
    let unused = limits_and_state::change(store, |ledger| {
        let unused = ledger.on_daemon(key).next().is_none();
        let daemon = ledger.daemons.iter_mut().find(|daemon| daemon.key == *key);
        // A lease taken from now on waits for this lock and sets the mode again.
        Ok(daemon.filter(|_| unused).map(|daemon| daemon.mode_left = true).is_some())
    })?;
    if !unused {
        return Ok(Vec::new());
    }
    match compute_mode::restore(&key.0, store, config) {
        Ok(()) => Ok(Vec::new()),
        // The server may have prevented the change, so the daemon is stopped.
        Err(error) => {
            tracing::warn!("{error}");
            stop_held(held, key, false, store, config)
        }
    }
}
