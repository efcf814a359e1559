//! A daemon that a hook has started below a container runtime, where neither systemd nor `sublet serve` could start it.
//! The runtime may wait until it has no child any more, the daemon for the end of the lease, and the lease for the
//! runtime's poststop hook. So somebody else ends the lease with its container: `sublet mps await LEASE`.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use nix::unistd::getppid;

use super::Warnings;
use sublet_core::admit::{self, Local};
use sublet_core::broker::client::Broker;
use sublet_core::broker::protocol::{Answer, Ask};
use sublet_core::config::Config;
use sublet_core::ledger::{DaemonKey, Lease, LeaseId, Ledger, Store};
use sublet_core::mps::heal::waits;
use sublet_core::mps::{self, MpsError, child_await};
use sublet_core::process::Process;
use sublet_core::process::sublet::SubletError;
use sublet_core::text::safe;

/// The process that adopts orphans whom no other has asked for.
const FIRST: i32 = 1;

/// Between two looks at what has ended and is not freed yet.
const AGAIN: Duration = Duration::from_secs(1);

/// How long one wait for the end of a container lasts; then the ledger is read again.
const LONG: Duration = Duration::from_secs(3600);

/// Has somebody end the leases of `key`'s hooks with their containers, if the daemon, which this process has just
/// started, is below another process than the first. Returns warnings, one line each.
pub(super) fn see_off(key: &DaemonKey, store: &Store) -> Warnings {
    let ledger = store.read()?;
    let adopter = daemon_of(key, &ledger).and_then(|daemon| daemon.parent());
    let Some(adopter) = adopter.filter(|pid| *pid != FIRST && !is_by_service(&ledger)) else {
        return Ok(Vec::new());
    };
    let mut warnings = Vec::new();
    // A hook of its container took it: the container exists, and its runtime's record is not known.
    let is_of_hook = |lease: &&Lease| lease.init.is_some() && lease.container.record.as_os_str().is_empty();
    for lease in ledger.on_daemon(key).filter(is_of_hook) {
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

fn daemon_of(key: &DaemonKey, ledger: &Ledger) -> Option<Process> {
    ledger.daemon(key)?.process
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
        let ledger = admit::read(store).inspect_err(|error| tracing::warn!("{error}")).ok();
        match ledger.as_ref().map(|ledger| (ledger.lease(id), ledger)) {
            Some((Some(lease), _)) if lease.has_processes() => {
                lease.await_change(LONG);
                // Cgroup v1 tells of no change.
                if lease.has_processes() {
                    sleep(AGAIN);
                }
            }
            Some((None, ledger)) if is_needed(&key, ledger, config) => return Ok(()),
            _ => sleep(AGAIN),
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
    let rests = ledger.daemon(key).is_some_and(|daemon| waits(daemon, ledger, config));
    rests || ledger.on_daemon(key).next().is_some()
}

// Without systemd, `sublet serve` starts the daemons where it runs. A process that is started below a container runtime
// stays below it: the kernel gives orphans to the nearest process above that asked for them (`PR_SET_CHILD_SUBREAPER`,
// prctl(2)), and `crun run`, say, waits until it has no child any more.

/// How long the service may take to say that it is there.
const PATIENCE: Duration = Duration::from_secs(2);

/// Has the service start the daemon of `key`. `None`: this process has to, because there is no service, because it is a
/// child of the service, or because systemd runs.
pub(super) fn start(key: &DaemonKey, ledger: &Ledger, config: &Config) -> Option<Warnings> {
    ledger.keeper.filter(Process::is_alive)?;
    if sd_notify::booted().unwrap_or(false) || is_by_service(ledger) {
        return None;
    }
    // One that hangs must not keep a container from starting.
    let asked = Broker::answers(config, PATIENCE);
    match asked.and_then(|()| Broker::new(config).ask(&Ask::StartDaemon { key: key.0.clone() })) {
        Ok(Answer::Started(warnings)) => Some(Ok(warnings)),
        Ok(Answer::NotStarted(why)) => Some(Err(MpsError::Own(SubletError(why)))),
        // It hangs, is ending, or of a version that does not start daemons for others.
        other => {
            let _ = other.inspect_err(|error| tracing::debug!("{error}"));
            None
        }
    }
}

/// Whether this process is a child of the service, by which no process is kept waiting.
pub(super) fn is_by_service(ledger: &Ledger) -> bool {
    ledger.keeper.is_some_and(|keeper| keeper.pid == getppid().as_raw())
}
