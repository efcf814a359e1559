//! A daemon that a hook has started below a container runtime, where neither systemd nor `sublet serve` could start it.
//! The runtime may wait until it has no child any more, the daemon for the end of the lease, and the lease for the
//! runtime's poststop hook. So somebody else ends the lease with its container: `sublet mps await LEASE`.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use super::by_service::is_by_service;
use sublet_core::admit::{self, Local};
use sublet_core::config::Config;
use sublet_core::ledger::{DaemonKey, Lease, LeaseId, Ledger, Store};
use sublet_core::mps::idle::waits;
use sublet_core::mps::{self, MpsError, child_await, limits_and_state};
use sublet_core::process::Process;
use sublet_core::text::safe;

/// The process that adopts orphans whom no other has asked for.
const FIRST: i32 = 1;

/// Between two looks at what has ended and is not freed yet.
const AGAIN: Duration = Duration::from_secs(1);

/// How long one wait for the end of a container lasts; then the ledger is read again.
const LONG: Duration = Duration::from_secs(3600);

/// Has somebody end the leases of `key`'s hooks with their containers, if the daemon, which this process has just
/// started, is below another process than the first. Returns warnings, one line each.
pub(super) fn see_off(key: &DaemonKey, store: &Store) -> Result<Vec<String>, MpsError> {
    let ledger = store.read()?;
    let adopter = daemon_of(key, &ledger).and_then(|daemon| daemon.parent());
    let Some(adopter) = adopter.filter(|pid| *pid != FIRST && !is_by_service(&ledger)) else {
        return Ok(Vec::new());
    };
    let mut warnings = Vec::new();
    for lease in ledger.on_daemon(key).filter(|lease| is_of_hook(lease)) {
        let container = safe(&lease.container.name());
        let name = fs::read_to_string(format!("/proc/{adopter}/comm")).unwrap_or_default();
        let runtime = format!("{} (pid {adopter})", safe(name.trim_end()));
        if let Err(error) = child_await(&lease.id) {
            warnings.push(format!(
                "{runtime} may not end before the next sublet command after the end of container {container}: \
                 `sublet mps await` cannot be started: {error}"
            ));
        }
        if LeaseId::parse(&key.0).is_none() {
            warnings.push(format!(
                "{runtime} may wait for the MPS daemon {key} after the end of container {container}, as long as \
                 other containers use that: run `sublet serve`, which then starts the daemons"
            ));
        }
    }
    Ok(warnings)
}

/// Whether a hook of its container took it: the container exists, and its runtime's record is not known.
fn is_of_hook(lease: &Lease) -> bool {
    lease.init.is_some() && lease.container.record.as_os_str().is_empty()
}

fn daemon_of(key: &DaemonKey, ledger: &Ledger) -> Option<Process> {
    limits_and_state::daemon(ledger, key)?.process
}

/// Waits until the container of lease `id` has ended, then frees the lease, until its daemon has ended or serves others.
///
/// Unlike `sublet gc` it restarts no daemon, which would be below the runtime, too.
///
/// # Errors
/// The ledger cannot be read at the beginning.
pub(crate) fn await_end(id: &LeaseId, store: &Store, config: &Config) -> Result<(), MpsError> {
    let ledger = admit::read(store)?;
    let Some(key) = ledger.lease(id).and_then(|lease| lease.daemon.clone()) else { return Ok(()) };
    let Some(daemon) = daemon_of(&key, &ledger) else { return Ok(()) };
    while daemon.is_alive() {
        match admit::read(store) {
            Ok(ledger) => match ledger.lease(id) {
                Some(lease) if lease.has_processes() => {
                    lease.await_change(LONG);
                    // Cgroup v1 tells of no change.
                    if lease.has_processes() {
                        sleep(AGAIN);
                    }
                }
                None if is_needed(&key, &ledger, config) => return Ok(()),
                _ => sleep(AGAIN),
            },
            Err(error) => {
                tracing::warn!("{error}");
                sleep(AGAIN);
            }
        }
        if let Err(error) = Local::new(config).update(|_| ()) {
            tracing::warn!("{error}");
        }
        // Another command may have freed the lease, and not have ended the daemon.
        for line in mps::end_overdue(store, config) {
            tracing::warn!("{line}");
        }
    }
    Ok(())
}

/// Whether the daemon of `key` serves a lease, or waits for the next.
fn is_needed(key: &DaemonKey, ledger: &Ledger, config: &Config) -> bool {
    let rests = limits_and_state::daemon(ledger, key).is_some_and(|daemon| waits(daemon, ledger, config));
    rests || ledger.on_daemon(key).next().is_some()
}
