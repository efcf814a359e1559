//! `sublet mps stop KEY`: ends the daemon and undoes what was set up for it.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Daemon, Warnings, compute_mode, launch};
use sublet_core::config::Config;
use sublet_core::grant::{MPS_DEFAULT_DIR, MPS_DIR};
use sublet_core::inventory;
use sublet_core::ledger::{DaemonKey, DaemonState, StopClaim, Store};
use sublet_core::mps::control::Control;
use sublet_core::mps::dirs::DaemonLock;
use sublet_core::mps::{MpsError, dirs, limits_and_state};
use sublet_core::process::live_proc_dir;

/// A process that starts or stops the daemon has nearly always finished by then. Otherwise the next command stops it.
pub(super) const LOCK_LIMIT: Duration = Duration::from_millis(1500);

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
    /// [`stop`] for a caller that holds the daemon's lock.
    pub fn stop(self, _held: &DaemonLock, force: bool) -> Warnings {
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
    pub fn rest(self, held: &DaemonLock) -> Warnings {
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
