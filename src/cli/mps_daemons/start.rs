//! `sublet mps start KEY`: starts a daemon, also after a crash.

use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::unistd::geteuid;

use super::detach::{self, Left};
use super::launch::{self, Kind, Launch};
use super::logs::Logs;
use super::stop::rest_held;
use super::stop::stop_held;
use super::{below_runtime, compute_mode};
use sublet_core::config::Config;
use sublet_core::inventory;
use sublet_core::ledger::DaemonKey;
use sublet_core::ledger::{DaemonState, DefaultLimits, LeaseId, Ledger, MpsDaemon, StartClaim, Store};
use sublet_core::mps::control::{AskError, Control, listens};
use sublet_core::mps::idle::waits;
use sublet_core::mps::lock::DaemonLock;
use sublet_core::mps::ready::lock_limit;
use sublet_core::mps::{MpsError, child_start, dirs, limits_and_state};
use sublet_core::process::Process;
use sublet_core::process::epoch_seconds;

/// A server is ready 75 ms after its start (T4: 280 ms; kubernetes-sigs/dra-driver-nvidia-gpu, pull request 1153;
/// bottlerocket-kernel-kit, 415), and its first client would wait as long. A server that cannot use its GPU has ended
/// by then.
const READY_LIMIT: Duration = Duration::from_millis(500);

/// Starts the daemon of `key`, which a lease must need, and sets the limits and mode that its leases need. Without
/// systemd, `sublet serve` does it where it runs.
///
/// This process leaves its caller's session, cgroups, mount namespace and descriptors for good. Call it only from a
/// program that does nothing else, before it has threads. Returns warnings, one line each.
///
/// # Errors
/// The daemon cannot be started. Everything else is as before, and the record says `down`.
pub fn start(key: &DaemonKey, store: &Store, config: &Config) -> Result<Vec<String>, MpsError> {
    dirs::check_key(key)?;
    if detach::is_group_leader() {
        // A shell's job cannot leave its session, but its child can.
        return child_start(key, config);
    }
    let control = Control::new(key, config)?;
    // Checked before the lock, which creates a directory: an unknown key leaves nothing behind.
    let ledger = store.read()?;
    if ledger.on_daemon(key).next().is_none() && ledger.daemon(key).is_none() {
        return Err(MpsError::NotWanted { key: key.to_string() });
    }
    if let Some(started) = below_runtime::start(key, &ledger, config) {
        return started;
    }
    let left = detach::leave(&[&config.state_dir, control.program()]);
    let held = DaemonLock::take(key, &config.state_dir, lock_limit(config))?;
    if let Some(warnings) = serves_already(key, &held, &control, store, config)? {
        return Ok(warnings);
    }
    let claim = claim(key, store).inspect_err(|_| forget_directory(key, config))?;
    let started = bring_up(&claim, &control, &left, store, config);
    if started.is_err() {
        let down = |daemon: &mut MpsDaemon| {
            daemon.state = DaemonState::Down;
            daemon.process = None;
        };
        limits_and_state::note(store, key, down)?;
    }
    if stop_unwanted(&held, key, started.is_ok(), store, config)? {
        return started.and(Err(MpsError::NotWanted { key: key.to_string() }));
    }
    let mut warnings = started?;
    warnings.extend(below_runtime::see_off(key, store)?);
    Ok(warnings)
}

/// Stops the daemon if no lease needs it any more. The container may have ended while the daemon came up, or the
/// process that started it been killed; whichever process freed the lease found this lock taken and went on. `true`:
/// no lease needs the daemon, and nothing is left of it.
fn stop_unwanted(
    held: &DaemonLock,
    key: &DaemonKey,
    serves: bool,
    store: &Store,
    config: &Config,
) -> Result<bool, MpsError> {
    let ledger = store.read()?;
    if serves && ledger.daemon(key).is_some_and(|daemon| waits(daemon, &ledger, config)) {
        return rest_held(held, key, store, config).map(|_| false);
    }
    match stop_held(held, key, false, store, config) {
        Err(MpsError::InUse { .. }) => Ok(false),
        stopped => stopped.map(|_| true),
    }
}

/// A dedicated daemon whose lease is gone leaves no directory either.
fn forget_directory(key: &DaemonKey, config: &Config) {
    if LeaseId::parse(&key.0).is_some() {
        if let Err(error) = dirs::clear(key, &config.state_dir) {
            tracing::debug!("{error}");
        }
    }
}

/// Keeps a daemon that answers: publishes it again and sets mode and limits. Returns warnings; `None` if there is no
/// such daemon.
fn serves_already(
    key: &DaemonKey,
    held: &DaemonLock,
    control: &Control,
    store: &Store,
    config: &Config,
) -> Result<Option<Vec<String>>, MpsError> {
    let ledger = store.read()?;
    let running = |daemon: &&MpsDaemon| {
        matches!(daemon.state, DaemonState::Serving | DaemonState::Fault)
            && limits_and_state::is_alive(daemon)
    };
    let Some(daemon) = ledger.daemon(key).filter(running) else { return Ok(None) };
    match control.default_limits() {
        Ok(_) => {}
        Err(AskError::Gone(_) | AskError::Refused { .. }) => return Ok(None),
        Err(error) => return Err(limits_and_state::note_failure(store, daemon, error)),
    }
    dirs::publish(key, &config.state_dir)?;
    limits_and_state::note_answer(store, daemon)?;
    let Some(warnings) = enter_again(daemon, &ledger, store, config)? else { return Ok(None) };
    let adjusted = limits_and_state::adjust(held, key, None, store, config);
    // It may end while it is asked.
    let ended =
        !limits_and_state::is_alive(daemon) || !listens(&dirs::pipe(key, &config.state_dir).join("control"));
    if adjusted.is_err() && ended {
        return Ok(None);
    }
    adjusted?;
    Ok(Some(warnings))
}

/// Sets the compute mode again under a daemon that waited for a lease and now has one. `None`: not possible while its
/// server has the GPU.
fn enter_again(
    daemon: &MpsDaemon,
    ledger: &Ledger,
    store: &Store,
    config: &Config,
) -> Result<Option<Vec<String>>, MpsError> {
    let key = &daemon.key;
    if !daemon.mode_left || ledger.on_daemon(key).next().is_none() {
        return Ok(Some(Vec::new()));
    }
    let entered = compute_mode::enter(key, store, &inventory::last(config)?, config)?;
    if entered.beside_server {
        return Ok(None);
    }
    limits_and_state::change(store, |ledger| {
        let wanted = ledger.on_daemon(key).next().is_some();
        if let Some(daemon) = ledger.daemons.iter_mut().find(|daemon| daemon.key == *key && wanted) {
            daemon.mode_left = false;
        }
        Ok(())
    })?;
    Ok(Some(entered.warning.into_iter().collect()))
}

/// What a start works on.
struct Claim {
    key: DaemonKey,
    /// The devices that it serves, in the order in which its clients count them.
    devices: Vec<String>,
    /// The recorded daemon, which does not serve.
    before: Option<Process>,
    /// Whether an earlier daemon existed, whose containers may still live.
    returns: bool,
}

/// Under the ledger's lock: checks that a lease needs the daemon, and records the daemon as starting.
fn claim(key: &DaemonKey, store: &Store) -> Result<Claim, MpsError> {
    let StartClaim { devices, before } = limits_and_state::change(store, |ledger| {
        ledger.claim_start(key).ok_or_else(|| MpsError::NotWanted { key: key.to_string() })
    })?;
    let returns = before.is_some();
    Ok(Claim { key: key.clone(), devices, before: before.and_then(|daemon| daemon.process), returns })
}

fn bring_up(
    claim: &Claim,
    control: &Control,
    left: &Left,
    store: &Store,
    config: &Config,
) -> Result<Vec<String>, MpsError> {
    let key = &claim.key;
    control.server_program(config)?;
    launch::end(key, &config.state_dir, claim.before, None)?;
    dirs::clear_pipe(key, &config.state_dir)?;
    dirs::cap_logs(key, &config.state_dir);
    let entered = compute_mode::enter(key, store, &inventory::last(config)?, config)?;
    let mut warnings: Vec<String> = entered.warning.into_iter().collect();
    match run_daemon(claim, control, left, store, config) {
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
        let ledger = store.read()?;
        for device in &claim.devices {
            warnings.extend(compute_mode::beside_mps(key, device, &ledger, config));
        }
    }
    Ok(warnings)
}

/// Containers may have `public/` mounted, so the directory stays; its contents become unusable.
fn undo(key: &DaemonKey, mode_changed: bool, store: &Store, config: &Config) -> Result<(), MpsError> {
    launch::end(key, &config.state_dir, None, None)?;
    dirs::clear_pipe(key, &config.state_dir)?;
    if mode_changed { compute_mode::restore(&key.0, store, config) } else { Ok(()) }
}

/// Starts the process, waits for it and records it as `serving`.
fn run_daemon(
    claim: &Claim,
    control: &Control,
    left: &Left,
    store: &Store,
    config: &Config,
) -> Result<Vec<String>, MpsError> {
    let (key, state_dir) = (&claim.key, config.state_dir.as_path());
    let deadline = Instant::now() + config.mps.start_timeout;
    let logs = Logs::from_now_on(key, state_dir);
    let devices = &claim.devices[..];
    let warnings = Launch { key, devices, state_dir, control, logs: &logs, left }.start()?;
    let not_up = |why: &str| launch::not_up(&claim.devices, config.mps.start_timeout, why, &logs);
    wait_for_answer(key, control, deadline, config).map_err(|why| not_up(&why))?;
    let process = launch::find(&dirs::pipe(key, state_dir))?
        .into_iter()
        .find_map(|(process, kind)| (kind == Kind::Daemon).then_some(process))
        .ok_or_else(|| not_up("it answers, but its process cannot be found in /proc"))?;
    let refused = |error| limits_and_state::refused(key, error);
    let ledger = store.read()?;
    let default_limits = ledger.wanted_default_limits(key).unwrap_or(DefaultLimits::NONE);
    // GPUs before Volta have no default limits and refuse to set them. A new daemon has none anyway.
    if default_limits != DefaultLimits::NONE {
        control.set_default_limits(default_limits, ledger.devices_of(key), &[]).map_err(refused)?;
    }
    prewarm(control, deadline, &logs).map_err(|unready| match unready {
        Unready::Late(why) => not_up(&format!("{why}{}", holders(claim, store, config))),
        Unready::Ended { pid, how } => no_server(pid, &how, claim, control, &logs, store, config),
    })?;
    dirs::publish(key, state_dir)?;
    limits_and_state::note(store, key, |daemon| {
        daemon.process = Some(process);
        daemon.state = DaemonState::Serving;
        daemon.default_limits = default_limits;
        daemon.answered_at = epoch_seconds();
    })?;
    Ok(warnings)
}

fn wait_for_answer(
    key: &DaemonKey,
    control: &Control,
    deadline: Instant,
    config: &Config,
) -> Result<(), String> {
    let socket = dirs::pipe(key, &config.state_dir).join("control");
    let mut why = "no process listens on its socket".to_owned();
    while Instant::now() < deadline {
        if listens(&socket) {
            match control.default_limits() {
                Ok(_) => return Ok(()),
                Err(error) => why = error.to_string(),
            }
        }
        sleep(Duration::from_millis(5));
    }
    Err(why)
}

/// Why a daemon that answers has no server.
enum Unready {
    /// No server in time, or no answer.
    Late(String),
    /// A server was started and has ended.
    Ended { pid: i32, how: String },
}

/// Starts the server in advance. That saves the first client a tenth of a second (docs/evidence), and shows before any
/// container starts whether the GPU can be used.
fn prewarm(control: &Control, deadline: Instant, logs: &Logs<'_>) -> Result<(), Unready> {
    let late = |error: AskError| Unready::Late(error.to_string());
    let command = format!("start_server -uid {}", geteuid());
    let limit = deadline.saturating_duration_since(Instant::now()).max(Duration::from_secs(1));
    control.ask(&command, limit).map_err(late)?;
    let server = loop {
        if let Some(&server) = control.servers().map_err(late)?.first() {
            break server;
        }
        still_there(logs)?;
        if Instant::now() >= deadline {
            return Err(Unready::Late("its server does not start".into()));
        }
        sleep(Duration::from_millis(5));
    };
    let patience = (Instant::now() + READY_LIMIT).min(deadline);
    while !logs.is_ready(server) {
        still_there(logs)?;
        if Instant::now() >= patience {
            // This driver may word its log message differently.
            let there = control.servers().map_err(late)?.contains(&server);
            let how = "is gone".to_owned();
            return if there { Ok(()) } else { Err(Unready::Ended { pid: server, how }) };
        }
        sleep(Duration::from_millis(2));
    }
    Ok(())
}

fn still_there(logs: &Logs<'_>) -> Result<(), Unready> {
    logs.ended().map_or(Ok(()), |(pid, how)| Err(Unready::Ended { pid, how }))
}

/// See [`MpsError::NoServer`].
fn no_server(
    pid: i32,
    how: &str,
    claim: &Claim,
    control: &Control,
    logs: &Logs<'_>,
    store: &Store,
    config: &Config,
) -> MpsError {
    let program = match control.server_program(config) {
        Ok(program) => program,
        Err(error) => return error,
    };
    let mut advice = format!("see {}", logs.of_server().display());
    match holders(claim, store, config) {
        seen if seen.is_empty() => {
            let driver =
                inventory::load(config).map(|inventory| inventory.driver.version).unwrap_or_default();
            let library = "and check that the libcuda.so.1 that it loads (ldconfig -p | grep libcuda)";
            advice = format!("{advice}, {library} is of the loaded driver {driver}");
        }
        seen => advice.push_str(&seen),
    }
    let why = format!("{} (pid {pid}) {how}{}; {advice}", program.display(), logs.ends());
    MpsError::NoServer { device: claim.devices.join(", "), why }
}

/// Names the processes that keep a server off the GPU, if any were found; the daemon's own server is left out.
fn holders(claim: &Claim, store: &Store, config: &Config) -> String {
    let Ok(ledger) = store.read() else { return String::new() };
    let own = launch::find(&dirs::pipe(&claim.key, &config.state_dir)).unwrap_or_default();
    let is_own =
        |name: &String| own.iter().any(|(process, _)| name.ends_with(&format!("(pid {})", process.pid)));
    let devices = claim.devices.iter();
    let mut names: Vec<String> =
        devices.flat_map(|device| compute_mode::holders(&claim.key, device, &ledger, config)).collect();
    names.retain(|name| !is_own(name));
    names.dedup();
    if names.is_empty() {
        String::new()
    } else {
        format!("; the GPU is held by {}: end it", names.join(", "))
    }
}
