//! `sublet mps start KEY`: starts a daemon, also after a crash. `sublet mps await LEASE`: ends the one that a hook has
//! started below a container runtime.

use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::unistd::{geteuid, getpgrp, getpid, getppid};

use super::detach::{self, Left};
use super::launch::{self, Kind, Launch, Logs};
use super::{Daemon, Warnings, compute_mode};
use sublet_core::admit::{self, Local};
use sublet_core::broker::client::Broker;
use sublet_core::broker::protocol::{Answer, Ask};
use sublet_core::config::Config;
use sublet_core::inventory;
use sublet_core::ledger::{
    DaemonKey, DaemonState, DefaultLimits, Lease, LeaseId, Ledger, MpsDaemon, StartClaim, Store,
};
use sublet_core::mps::control::{AskError, Control};
use sublet_core::mps::dirs::DaemonLock;
use sublet_core::mps::heal::waits;
use sublet_core::mps::{self, MpsError, child_await, child_start, dirs, limits_and_state};
use sublet_core::process::sublet::SubletError;
use sublet_core::process::{Process, epoch_seconds, listens};
use sublet_core::text::safe;

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
pub fn start(key: &DaemonKey, store: &Store, config: &Config) -> Warnings {
    dirs::check_key(key)?;
    // setsid(2) would fail: a shell makes each of its jobs the leader of a process group. Its child can leave its session.
    if getpgrp() == getpid() {
        return child_start(key, config);
    }
    let control = Control::new(key, config)?;
    // Checked before the lock, which creates a directory: an unknown key leaves nothing behind.
    let ledger = store.read()?;
    let not_wanted = || MpsError::NotWanted { key: key.to_string() };
    if ledger.on_daemon(key).next().is_none() && ledger.daemon(key).is_none() {
        return Err(not_wanted());
    }
    if let Some(started) = start_by_service(key, &ledger, config) {
        return started;
    }
    let left = detach::leave(&[&config.state_dir, control.program()]);
    let daemon = Daemon { key, store, config };
    let held = DaemonLock::take(key, &config.state_dir, sublet_core::mps::ready::lock_limit(config))?;
    if let Some(warnings) = serves_already(daemon, &held, &control)? {
        return Ok(warnings);
    }
    // Under the ledger's lock: a lease needs the daemon, and it is recorded as starting.
    let claim = limits_and_state::change(store, |ledger| ledger.claim_start(key).ok_or_else(not_wanted));
    let claim = claim.inspect_err(|_| {
        // A dedicated daemon whose lease is gone leaves no directory either.
        if LeaseId::parse(&key.0).is_some() {
            let _ = dirs::clear(key, &config.state_dir).inspect_err(|error| tracing::debug!("{error}"));
        }
    })?;
    let started = bring_up(daemon, &claim, &control, &left);
    if started.is_err() {
        daemon.note_down()?;
    }
    if stop_unwanted(daemon, &held, started.is_ok())? {
        return started.and(Err(not_wanted()));
    }
    let mut warnings = started?;
    warnings.extend(see_off(key, store)?);
    Ok(warnings)
}

/// Stops the daemon if no lease needs it any more. The container may have ended while the daemon came up, or the
/// process that started it been killed; whichever process freed the lease found this lock taken and went on. `true`:
/// no lease needs the daemon, and nothing is left of it.
fn stop_unwanted(daemon: Daemon<'_>, held: &DaemonLock, serves: bool) -> Result<bool, MpsError> {
    let ledger = daemon.store.read()?;
    let record = ledger.daemon(daemon.key).filter(|_| serves);
    if record.is_some_and(|record| waits(record, &ledger, daemon.config)) {
        return daemon.rest(held).map(|_| false);
    }
    match daemon.stop(held, false) {
        Err(MpsError::InUse { .. }) => Ok(false),
        stopped => stopped.map(|_| true),
    }
}

/// Warnings about a daemon that is kept; `None` if it cannot be.
type Kept = Result<Option<Vec<String>>, MpsError>;

/// Keeps a daemon that answers: publishes it again and sets mode and limits. `None`: there is no such daemon.
fn serves_already(daemon: Daemon<'_>, held: &DaemonLock, control: &Control) -> Kept {
    let Daemon { key, store, config } = daemon;
    let ledger = store.read()?;
    let record = ledger.daemon(key).filter(|record| limits_and_state::runs(record));
    let Some(record) = record else { return Ok(None) };
    match control.default_limits() {
        Ok(_) => {}
        Err(AskError::Gone(_) | AskError::Refused { .. }) => return Ok(None),
        Err(error) => return Err(limits_and_state::note_failure(store, record, error)),
    }
    dirs::publish(key, &config.state_dir)?;
    limits_and_state::note_answer(store, record)?;
    let Some(warnings) = enter_again(daemon, record, &ledger)? else { return Ok(None) };
    let adjusted = limits_and_state::adjust(held, key, None, store, config);
    // It may end while it is asked.
    let ended = !limits_and_state::is_alive(record) || !listens(&daemon.pipe().join("control"));
    if adjusted.is_err() && ended { Ok(None) } else { adjusted.map(|()| Some(warnings)) }
}

/// Sets the compute mode again under a daemon that waited for a lease and now has one. `None`: not possible while its
/// server has the GPU.
fn enter_again(daemon: Daemon<'_>, record: &MpsDaemon, ledger: &Ledger) -> Kept {
    if !record.mode_left || ledger.on_daemon(daemon.key).next().is_none() {
        return Ok(Some(Vec::new()));
    }
    let entered = compute_mode::enter(daemon)?;
    if entered.beside_server {
        return Ok(None);
    }
    limits_and_state::change(daemon.store, |ledger| {
        let wanted = ledger.on_daemon(daemon.key).next().is_some();
        if let Some(record) = ledger.daemons.iter_mut().find(|record| record.key == *daemon.key && wanted) {
            record.mode_left = false;
        }
        Ok(())
    })?;
    Ok(Some(entered.warning.into_iter().collect()))
}

fn bring_up(daemon: Daemon<'_>, claim: &StartClaim, control: &Control, left: &Left) -> Warnings {
    let Daemon { key, store, config } = daemon;
    control.server_program(config)?;
    launch::end(key, &config.state_dir, claim.before.as_ref().and_then(|before| before.process), None)?;
    dirs::clear_pipe(key, &config.state_dir)?;
    dirs::cap_logs(key, &config.state_dir);
    let entered = compute_mode::enter(daemon)?;
    let logs = Logs::from_now_on(key, &config.state_dir);
    let launch = Launch { daemon, devices: &claim.devices, control, logs, left };
    let started = run_daemon(&launch).map_err(|error| match undo(daemon, entered.changed) {
        Ok(()) => error,
        Err(worse) => {
            tracing::warn!("{error}");
            worse
        }
    })?;
    let mut warnings: Vec<String> = entered.warning.into_iter().chain(started).collect();
    // Containers of the daemon before may still live.
    if claim.before.is_some() {
        let ledger = store.read()?;
        for device in &claim.devices {
            warnings.extend(compute_mode::beside_mps(key, device, &ledger, config));
        }
    }
    Ok(warnings)
}

/// Containers may have `public/` mounted, so the directory stays; its contents become unusable.
fn undo(daemon: Daemon<'_>, mode_changed: bool) -> Result<(), MpsError> {
    let Daemon { key, config, .. } = daemon;
    launch::end(key, &config.state_dir, None, None)?;
    dirs::clear_pipe(key, &config.state_dir)?;
    if mode_changed { compute_mode::restore(daemon) } else { Ok(()) }
}

/// Starts the process, waits for it and records it as `serving`.
fn run_daemon(launch: &Launch<'_>) -> Warnings {
    let Daemon { key, store, config } = launch.daemon;
    let deadline = Instant::now() + config.mps.start_timeout;
    let warnings = launch.start()?;
    wait_for_answer(launch, deadline)?;
    let process = launch::find(&launch.daemon.pipe())?
        .into_iter()
        .find_map(|(process, kind)| (kind == Kind::Daemon).then_some(process))
        .ok_or_else(|| late(launch, "it answers, but its process cannot be found in /proc".to_owned()))?;
    let ledger = store.read()?;
    let default_limits = ledger.wanted_default_limits(key).unwrap_or(DefaultLimits::NONE);
    // GPUs before Volta have no default limits and refuse to set them. A new daemon has none anyway.
    if default_limits != DefaultLimits::NONE {
        let set = launch.control.set_default_limits(default_limits, ledger.devices_of(key), &[]);
        set.map_err(|error| limits_and_state::refused(key, error))?;
    }
    prewarm(launch, deadline)?;
    dirs::publish(key, &config.state_dir)?;
    limits_and_state::note(store, key, |daemon| {
        daemon.process = Some(process);
        daemon.state = DaemonState::Serving;
        daemon.default_limits = default_limits;
        daemon.answered_at = epoch_seconds();
    })?;
    Ok(warnings)
}

fn late(launch: &Launch<'_>, why: String) -> MpsError {
    launch.not_up(launch.daemon.config.mps.start_timeout, why)
}

fn wait_for_answer(launch: &Launch<'_>, deadline: Instant) -> Result<(), MpsError> {
    let socket = launch.daemon.pipe().join("control");
    let mut why = "no process listens on its socket".to_owned();
    while Instant::now() < deadline {
        if listens(&socket) {
            match launch.control.default_limits() {
                Ok(_) => return Ok(()),
                Err(error) => why = error.to_string(),
            }
        }
        sleep(Duration::from_millis(5));
    }
    Err(late(launch, why))
}

/// Starts the server in advance. That saves the first client a tenth of a second (docs/evidence), and shows before any
/// container starts whether the GPU can be used.
fn prewarm(launch: &Launch<'_>, deadline: Instant) -> Result<(), MpsError> {
    let Launch { control, logs, .. } = launch;
    let no_server_yet = |why: String| late(launch, format!("{why}{}", holders(launch)));
    let silent = |error: AskError| no_server_yet(error.to_string());
    let not_ended = || logs.ended().map_or(Ok(()), |(pid, how)| Err(no_server(pid, &how, launch)));
    let command = format!("start_server -uid {}", geteuid());
    let limit = deadline.saturating_duration_since(Instant::now()).max(Duration::from_secs(1));
    control.ask(&command, limit).map_err(silent)?;
    let server = loop {
        if let Some(&server) = control.servers().map_err(silent)?.first() {
            break server;
        }
        not_ended()?;
        if Instant::now() >= deadline {
            return Err(no_server_yet("its server does not start".to_owned()));
        }
        sleep(Duration::from_millis(5));
    };
    let patience = (Instant::now() + READY_LIMIT).min(deadline);
    while !logs.is_ready(server) {
        not_ended()?;
        if Instant::now() >= patience {
            // This driver may word its log message differently.
            let there = control.servers().map_err(silent)?.contains(&server);
            return if there { Ok(()) } else { Err(no_server(server, "is gone", launch)) };
        }
        sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// See [`MpsError::NoServer`].
fn no_server(pid: i32, how: &str, launch: &Launch<'_>) -> MpsError {
    let config = launch.daemon.config;
    let program = match launch.control.server_program(config) {
        Ok(program) => program,
        Err(error) => return error,
    };
    let mut advice = holders(launch);
    if advice.is_empty() {
        let driver = inventory::load(config).map(|inventory| inventory.driver.version).unwrap_or_default();
        let library = "and check that the libcuda.so.1 that it loads (ldconfig -p | grep libcuda)";
        advice = format!(", {library} is of the loaded driver {driver}");
    }
    let log = dirs::log(launch.daemon.key, &config.state_dir).join("server.log");
    let program = program.display();
    let why = format!("{program} (pid {pid}) {how}{}; see {}{advice}", launch.logs.ends(), log.display());
    MpsError::NoServer { device: launch.devices.join(", "), why }
}

/// Names the processes that keep a server off the GPU, if any were found; the daemon's own server is left out.
fn holders(launch: &Launch<'_>) -> String {
    let Daemon { key, store, config } = launch.daemon;
    let Ok(ledger) = store.read() else { return String::new() };
    let own = launch::find(&launch.daemon.pipe()).unwrap_or_default();
    let is_own =
        |name: &String| own.iter().any(|(process, _)| name.ends_with(&format!("(pid {})", process.pid)));
    let names = launch.devices.iter().flat_map(|device| compute_mode::holders(key, device, &ledger, config));
    let mut names: Vec<String> = names.filter(|name| !is_own(name)).collect();
    names.dedup();
    if names.is_empty() {
        return String::new();
    }
    format!("; the GPU is held by {}: end it", names.join(", "))
}

// A daemon that a hook has started below a container runtime, where neither systemd nor `sublet serve` could start it.
// The runtime may wait until it has no child any more, the daemon for the end of the lease, and the lease for the
// runtime's poststop hook. So somebody else ends the lease with its container: `sublet mps await LEASE`.

/// The process that adopts orphans whom no other has asked for.
const FIRST: i32 = 1;

/// Between two looks at leases that have ended and are not freed yet.
const AGAIN: Duration = Duration::from_secs(1);

/// How long one wait for the end of a container lasts; then the ledger is read again.
const LONG: Duration = Duration::from_secs(3600);

/// Has somebody end the leases of `key`'s hooks with their containers, if the daemon, which this process has just
/// started, is below another process than the first. Returns warnings, one line each.
fn see_off(key: &DaemonKey, store: &Store) -> Warnings {
    let ledger = store.read()?;
    let adopter = ledger.daemon(key).and_then(|daemon| daemon.process?.parent());
    let Some(adopter) = adopter.filter(|pid| *pid != FIRST && !is_by_service(&ledger)) else {
        return Ok(Vec::new());
    };
    let mut warnings = Vec::new();
    // A hook of its container took it: the container exists, and its runtime's record is not known.
    let is_of_hook = |lease: &&Lease| lease.init.is_some() && lease.container.record.as_os_str().is_empty();
    for lease in ledger.on_daemon(key).filter(is_of_hook) {
        let container = safe(&lease.container.name());
        let runtime = compute_mode::described(adopter);
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

/// Waits until the container of lease `id` has ended, then frees the lease, until its daemon has ended or serves another.
///
/// Unlike `sublet gc` it restarts no daemon, which would be below the runtime, too.
///
/// # Errors
/// The ledger cannot be read at the beginning.
pub(crate) fn await_end(id: &LeaseId, store: &Store, config: &Config) -> Result<(), MpsError> {
    let ledger = admit::read(store)?;
    let Some(key) = ledger.lease(id).and_then(|lease| lease.daemon.clone()) else { return Ok(()) };
    let daemon = ledger.daemon(&key).and_then(|daemon| daemon.process);
    let Some(daemon) = daemon else { return Ok(()) };
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
        let _ = Local::new(config).update(|_| ()).inspect_err(|error| tracing::warn!("{error}"));
        // Another command may have freed the lease, and not have ended the daemon.
        sublet_core::log::warn(mps::end_overdue(store, config));
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
fn start_by_service(key: &DaemonKey, ledger: &Ledger, config: &Config) -> Option<Warnings> {
    ledger.keeper.filter(Process::is_alive)?;
    if sd_notify::booted().unwrap_or(false) || is_by_service(ledger) {
        return None;
    }
    // One that hangs must not keep a container from starting.
    let asked = Broker::answers(config, PATIENCE);
    match asked.and_then(|()| Broker::new(config).ask(&Ask::StartDaemon { key: key.0.clone() })) {
        Ok(Answer::Started(warnings)) => Some(Ok(warnings)),
        Ok(Answer::NotStarted(why)) => Some(Err(MpsError::Own(SubletError(why)))),
        // It hangs, is ending, or of a version that does not start daemons for other users.
        other => {
            let _ = other.inspect_err(|error| tracing::debug!("{error}"));
            None
        }
    }
}

/// Whether this process is a child of the service, by which no process is kept waiting.
fn is_by_service(ledger: &Ledger) -> bool {
    ledger.keeper.is_some_and(|keeper| keeper.pid == getppid().as_raw())
}
