//! `sublet mps start KEY`: from nothing, or from what a crash left, to a daemon that serves.

use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::unistd::geteuid;

use super::control::{AskError, Control, listens};
use super::heal::stays;
use super::launch::{self, Kind, Launch};
use super::lock::DaemonLock;
use super::ready::lock_limit;
use super::stop::stop_held;
use super::{MpsError, ServerKey, child_start, compute_mode, detach, dirs, record};
use crate::config::Config;
use crate::inventory;
use crate::ledger::{Lease, LeaseId, Server, ServerState, Store};
use crate::process::Process;
use crate::process::epoch_seconds;
use crate::request::Percent;
use crate::request::units::MIB;

/// Starts the daemon of `key`, which a lease must want, and brings it to what its leases want.
///
/// This process leaves its caller's session, cgroups, mount namespace and descriptors for good: call it
/// from a program that does nothing else, before it has threads. Returns warnings, one line each.
///
/// # Errors
/// The daemon cannot be started; everything is then as it was, and the record says `down`.
pub fn start(key: &ServerKey, store: &Store, config: &Config) -> Result<Vec<String>, MpsError> {
    dirs::check_key(key)?;
    if detach::is_group_leader() {
        // A shell's job cannot leave its session; its child can.
        return child_start(key, config);
    }
    let control = Control::new(key, config)?;
    let host_mounts = detach::leave(&[&config.state_dir, control.program()]);
    let held = DaemonLock::take(key, &config.state_dir, lock_limit(config))?;
    if serves_already(key, &held, &control, store, config)? {
        return Ok(Vec::new());
    }
    let claim = claim(key, store).inspect_err(|_| forget_directory(key, config))?;
    let started = bring_up(&claim, &control, host_mounts, store, config);
    if started.is_err() {
        let down = |server: &mut Server| {
            server.state = ServerState::Down;
            server.daemon = None;
        };
        record::note(store, key, down)?;
    }
    if stop_unwanted(&held, key, started.is_ok(), store, config)? {
        return started.and(Err(MpsError::NotWanted { key: key.to_string() }));
    }
    started
}

/// Its container may have ended, or its starter been killed, while the daemon came up: who freed the lease
/// found our lock taken and went on. `true`: no lease wants it, and nothing is left of it.
fn stop_unwanted(
    held: &DaemonLock,
    key: &ServerKey,
    serves: bool,
    store: &Store,
    config: &Config,
) -> Result<bool, MpsError> {
    if serves && stays(key, config) {
        return Ok(false);
    }
    match stop_held(held, key, false, store, config) {
        Err(MpsError::InUse { .. }) => Ok(false),
        stopped => stopped.map(|_| true),
    }
}

/// A dedicated daemon whose lease is gone leaves no directory either.
fn forget_directory(key: &ServerKey, config: &Config) {
    if LeaseId::parse(&key.0).is_some() {
        if let Err(error) = dirs::clear(key, &config.state_dir) {
            tracing::debug!("{error}");
        }
    }
}

/// A daemon that answers is kept: it is published again and its ceiling set.
fn serves_already(
    key: &ServerKey,
    held: &DaemonLock,
    control: &Control,
    store: &Store,
    config: &Config,
) -> Result<bool, MpsError> {
    let ledger = store.read()?;
    let running = |server: &&Server| {
        matches!(server.state, ServerState::Serving | ServerState::Fault) && record::is_alive(server)
    };
    let Some(server) = record::server(&ledger, key).filter(running) else { return Ok(false) };
    match control.ceiling() {
        Ok(_) => {}
        Err(AskError::Gone(_) | AskError::Refused { .. }) => return Ok(false),
        Err(error) => return Err(record::note_failure(store, server, error)),
    }
    dirs::publish(key, &config.state_dir)?;
    record::note_answer(store, server)?;
    record::adjust(held, key, store, config)?;
    Ok(true)
}

/// What a start is for.
struct Claim {
    key: ServerKey,
    device: String,
    /// A daemon that is recorded and does not serve.
    before: Option<Process>,
    /// The one lease of a dedicated daemon.
    own: Option<Lease>,
    /// Containers live that had an earlier daemon.
    returns: bool,
}

/// Under the ledger's lock: a lease wants the daemon, and it is recorded as starting.
fn claim(key: &ServerKey, store: &Store) -> Result<Claim, MpsError> {
    record::change(store, |ledger| {
        let Some(first) = ledger.on_server(key).next().cloned() else {
            return Err(MpsError::NotWanted { key: key.to_string() });
        };
        let known = record::server(ledger, key);
        let device = match known {
            Some(server) => server.device.clone(),
            None => first.devices.first().cloned().unwrap_or_else(|| key.0.clone()),
        };
        let claim = Claim {
            key: key.clone(),
            device: device.clone(),
            before: known.and_then(|server| server.daemon),
            own: LeaseId::parse(&key.0).map(|_| first),
            returns: known.is_some(),
        };
        ledger.servers.retain(|server| server.key != *key);
        ledger.servers.push(Server {
            key: key.clone(),
            device,
            daemon: None,
            state: ServerState::Starting,
            ceiling: Percent::default(),
            answered_at: 0,
        });
        Ok(claim)
    })
}

fn bring_up(
    claim: &Claim,
    control: &Control,
    host_mounts: bool,
    store: &Store,
    config: &Config,
) -> Result<Vec<String>, MpsError> {
    let key = &claim.key;
    launch::end(key, &config.state_dir, claim.before, None)?;
    dirs::clear_pipe(key, &config.state_dir)?;
    dirs::cap_logs(key, &config.state_dir);
    let entered = compute_mode::enter(key, store, &inventory::load(config)?, config)?;
    let mut warnings: Vec<String> = entered.warning.into_iter().collect();
    match run_daemon(claim, control, host_mounts, store, config) {
        Ok(more) => warnings.extend(more),
        Err(error) => {
            let mut error = error;
            if let Err(worse) = undo(key, entered.changed, store, config) {
                tracing::warn!("{error}");
                error = worse;
            }
            return Err(error);
        }
    }
    if claim.returns {
        warnings.extend(compute_mode::beside_mps(key, &claim.device, &store.read()?, config));
    }
    Ok(warnings)
}

/// Containers may have `public/` mounted: the directory stays, its contents lead nowhere any more.
fn undo(key: &ServerKey, mode_changed: bool, store: &Store, config: &Config) -> Result<(), MpsError> {
    launch::end(key, &config.state_dir, None, None)?;
    dirs::clear_pipe(key, &config.state_dir)?;
    if mode_changed { compute_mode::restore(&key.0, store, config) } else { Ok(()) }
}

/// From the process to the record `serving`.
fn run_daemon(
    claim: &Claim,
    control: &Control,
    host_mounts: bool,
    store: &Store,
    config: &Config,
) -> Result<Vec<String>, MpsError> {
    let (key, state_dir) = (&claim.key, config.state_dir.as_path());
    let deadline = Instant::now() + config.mps.start_timeout;
    let warnings = Launch { key, device: &claim.device, state_dir, control, host_mounts }.start()?;
    let not_up = |why: &str| launch::not_up(key, &claim.device, state_dir, config.mps.start_timeout, why);
    wait_for_answer(key, control, deadline, config).map_err(|why| not_up(&why))?;
    let daemon = launch::find(&super::dirs::pipe(key, state_dir))
        .into_iter()
        .find_map(|(process, kind)| (kind == Kind::Daemon).then_some(process))
        .ok_or_else(|| not_up("it answers, and its process is not to be found in /proc"))?;
    let refused = |error| record::refused(key, error);
    let ceiling = store.read()?.wanted_ceiling(key).unwrap_or(Percent::WHOLE);
    for command in claim.own.iter().flat_map(own_limits) {
        control.ask(&command, super::control::ANSWER_LIMIT).map_err(refused)?;
    }
    // GPUs before Volta know no ceiling and refuse to hear of one; 100 % is what a new daemon has.
    if ceiling < Percent::WHOLE {
        control.set_ceiling(ceiling).map_err(refused)?;
    }
    prewarm(control, deadline).map_err(|why| not_up(&why))?;
    dirs::publish(key, state_dir)?;
    record::note(store, key, |server| {
        server.daemon = Some(daemon);
        server.state = ServerState::Serving;
        server.ceiling = ceiling;
        server.answered_at = epoch_seconds();
    })?;
    Ok(warnings)
}

fn wait_for_answer(
    key: &ServerKey,
    control: &Control,
    deadline: Instant,
    config: &Config,
) -> Result<(), String> {
    let socket = dirs::pipe(key, &config.state_dir).join("control");
    let mut why = "nobody listens at its socket".to_owned();
    while Instant::now() < deadline {
        if listens(&socket) {
            match control.ceiling() {
                Ok(_) => return Ok(()),
                Err(error) => why = error.to_string(),
            }
        }
        sleep(Duration::from_millis(5));
    }
    Err(why)
}

/// The defaults of a dedicated daemon are its lease's own limits: a client that drops the limits in its
/// environment still has these.
fn own_limits(lease: &Lease) -> Vec<String> {
    let processes = u64::from(lease.processes.max(1));
    let mebibytes = lease.memory_bytes.map(|bytes| bytes / MIB / processes);
    mebibytes.map(|limit| format!("set_default_device_pinned_mem_limit 0 {limit}M")).into_iter().collect()
}

/// A server that is there already saves the first client a tenth of a second (docs/evidence), and shows
/// before any container starts that the GPU can be had.
fn prewarm(control: &Control, deadline: Instant) -> Result<(), String> {
    let command = format!("start_server -uid {}", geteuid());
    let limit = deadline.saturating_duration_since(Instant::now()).max(Duration::from_secs(1));
    control.ask(&command, limit).map_err(|error| error.to_string())?;
    loop {
        let servers = control.servers().map_err(|error| error.to_string())?;
        if !servers.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err("its server does not start; another process may hold the GPU".into());
        }
        sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::lease;
    use super::*;

    #[test]
    fn a_dedicated_daemons_default_is_the_part_of_one_process() {
        let mut own = lease("0000000000000001", "0000000000000001", None);
        assert!(own_limits(&own).is_empty());
        own.memory_bytes = Some(8 << 30);
        own.processes = 3;
        assert_eq!(own_limits(&own), ["set_default_device_pinned_mem_limit 0 2730M"]);
    }
}
