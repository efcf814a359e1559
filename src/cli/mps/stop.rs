//! `sublet mps stop KEY`: ends the daemon, and undoes what was done for it.

use crate::probe;
use std::time::Duration;

use super::control::Control;
use super::lock::DaemonLock;
use super::mounted::is_mounted;
use super::{MpsError, ServerKey, compute_mode, dirs, launch, record};
use sublet_core::config::Config;
use sublet_core::inventory::{self, Device, Inventory};
use sublet_core::ledger::{Server, ServerState, Store};

/// Somebody who starts or stops it is nearly always done by then; else the next command stops it.
pub(super) const LOCK_LIMIT: Duration = Duration::from_millis(1500);

/// Stops the daemon of `key`, puts the device's compute mode back and forgets the record.
///
/// `force`: with leases on it too, which ends their GPU work; the next command starts it anew. A daemon
/// that is gone already is no error. Returns warnings, one line each.
///
/// # Errors
/// A lease still wants it (without `force`), or it does not end.
pub fn stop(key: &ServerKey, force: bool, store: &Store, config: &Config) -> Result<Vec<String>, MpsError> {
    dirs::check_key(key)?;
    if !is_known(key, store, config)? {
        return Ok(Vec::new());
    }
    let held = DaemonLock::take(key, &config.state_dir, LOCK_LIMIT)?;
    stop_held(&held, key, force, store, config)
}

/// [`stop`] by the holder of the daemon's lock.
pub(super) fn stop_held(
    _held: &DaemonLock,
    key: &ServerKey,
    force: bool,
    store: &Store,
    config: &Config,
) -> Result<Vec<String>, MpsError> {
    let Claim { server, leases, unexplained } = claim(key, force, store)?;
    let daemon = server.as_ref().and_then(|server| server.daemon);
    let answers = server.as_ref().is_some_and(|server| server.state != ServerState::Fault);
    let control = Control::new(key, config).ok().filter(|_| answers);
    if let Some(server) = server.filter(|_| unexplained && !force) {
        let clients = clients(&server.devices, control.as_ref(), config);
        if clients != Some(0) || is_mounted(key, &config.state_dir, daemon) {
            // Their containers' next processes would run without any limit.
            record::note(store, key, |server| server.state = ServerState::Serving)?;
            return Ok(vec![format!(
                "the ledger was lost, and MPS daemon {key} has, or may have, clients or containers without \
                 a lease: its device takes no new lease until they have ended (`sublet mps stop {key} \
                 --force` ends them)"
            )]);
        }
    }
    if let Err(error) = launch::end(key, &config.state_dir, daemon, control.as_ref()) {
        record::note(store, key, |server| server.state = ServerState::Fault)?;
        return Err(error);
    }
    if leases > 0 {
        // Its containers have the directory mounted, and compute mode keeps them from running alone.
        dirs::clear_pipe(key, &config.state_dir)?;
        record::note(store, key, |server| {
            server.state = ServerState::Down;
            server.daemon = None;
        })?;
        return Ok(vec![format!(
            "{leases} lease(s) lost their MPS daemon {key}: the next sublet command starts it"
        )]);
    }
    let warnings = compute_mode::restore(&key.0, store, config).err().map(|error| error.to_string());
    forget(key, store)?;
    dirs::clear(key, &config.state_dir)?;
    Ok(warnings.into_iter().collect())
}

/// How many clients a daemon for `devices` has; where it does not tell, as without its directory, how many contexts
/// beside its servers' there are on them. `None`: nobody tells.
fn clients(devices: &[String], control: Option<&Control>, config: &Config) -> Option<usize> {
    let told = control.and_then(|control| control.count_clients().ok());
    told.or_else(|| contexts(devices, &probe::probe(config).ok()?))
}

/// Contexts on `devices` that are no MPS server's; without any, on whatever device. `None`: one of them is not there.
fn contexts(devices: &[String], inventory: &Inventory) -> Option<usize> {
    let on = |device: &Device| device.processes.iter().filter(|process| !process.mps_server).count();
    if devices.is_empty() {
        return Some(inventory.devices.iter().map(on).sum());
    }
    devices.iter().map(|uuid| inventory.device(uuid).map(on)).sum()
}

/// Whether there is, or may have been, a daemon of `key`: one to stop, or one that is stopped already.
///
/// # Errors
/// The ledger cannot be read, or `key` is no key.
pub fn exists(key: &ServerKey, store: &Store, config: &Config) -> Result<bool, MpsError> {
    dirs::check_key(key)?;
    let is_device = || inventory::last(config).is_ok_and(|inventory| inventory.device(&key.0).is_some());
    Ok(is_known(key, store, config)? || is_device())
}

/// Anything at all is left of it.
fn is_known(key: &ServerKey, store: &Store, config: &Config) -> Result<bool, MpsError> {
    let ledger = store.read()?;
    let mode = ledger.compute_modes.iter().any(|changed| changed.device == key.0);
    Ok(mode || record::server(&ledger, key).is_some() || key.dir(&config.state_dir).exists())
}

struct Claim {
    server: Option<Server>,
    leases: usize,
    /// A rebuild of the ledger found nobody whom it serves.
    unexplained: bool,
}

/// Under the ledger's lock: no lease is left, and the daemon is recorded as stopping.
fn claim(key: &ServerKey, force: bool, store: &Store) -> Result<Claim, MpsError> {
    record::change(store, |ledger| {
        let leases = ledger.on_server(key).count();
        let server = record::server(ledger, key).cloned();
        if leases > 0 && !force {
            return Err(MpsError::InUse { key: key.to_string(), leases });
        }
        if let Some(server) = ledger.servers.iter_mut().find(|server| server.key == *key) {
            server.state = ServerState::Stopping;
        }
        let unexplained = server.as_ref().is_some_and(|server| ledger.is_unexplained(server));
        Ok(Claim { server, leases, unexplained })
    })
}

/// A lease that was taken while we stopped waits for our lock and starts the daemon anew.
fn forget(key: &ServerKey, store: &Store) -> Result<(), MpsError> {
    record::change(store, |ledger| {
        ledger.servers.retain(|server| server.key != *key);
        Ok(())
    })
}
