//! Before a container starts: makes sure that its daemon answers and admits its share.
//!
//! Before a process joins a running container: its daemon has to answer, or is restarted at once. The container's own
//! files are enough for this: ledger, inventory and configuration need not be readable.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use super::control::{AskError, Control};
use super::dirs::{self, DaemonLock};
use super::{MpsError, STOP_LIMIT, child_start, child_stop, limits_and_state};
use crate::config::{Config, ExclusiveComputeMode};
use crate::fs::{is_selinux_enforcing, selinux};
use crate::ledger::{DaemonKey, DaemonState, DefaultLimits, Lease, LedgerError, MpsDaemon, Store};
use crate::process::sublet::SubletError;
use crate::process::{Condition, Process, epoch_seconds, listens, sublet};

/// Ends the idle daemons `keys` before a container with another use of their devices starts. Returns warnings, one line
/// each.
pub(crate) fn end_conflicting(keys: &[DaemonKey], store: &Store) -> Result<Vec<String>, MpsError> {
    let deadline = Instant::now() + STOP_LIMIT;
    let mut warnings = Vec::new();
    for key in keys {
        // Another process may be ending it now and hold its lock.
        while let Err(error) = child_stop(key).map(|lines| warnings.extend(lines)) {
            if Instant::now() >= deadline {
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        if store.read()?.daemon(key).is_some() {
            return Err(MpsError::InTheWay { key: key.to_string() });
        }
    }
    Ok(warnings)
}

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
    if is_selinux_enforcing(Path::new("/")) && !selinux::has_labels(&config.state_dir) {
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
    let known = lease.daemon.as_ref().and_then(|key| ledger.daemon(key));
    let Some(daemon) = known.filter(|daemon| is_reachable(daemon, config)) else { return Ok(false) };
    let Some(default_limits) = confirm_default_limits(daemon, store, config)? else { return Ok(false) };
    // A daemon that waited still has the default limits of its last leases.
    let left = daemon.mode_left && ledger.wanted_default_limits(&daemon.key) != Some(default_limits);
    if left || !default_limits.admits(lease.default_limits()) {
        let held = DaemonLock::take(&daemon.key, &config.state_dir, lock_limit(config))?;
        // Until then another process may have stopped it, or may have been killed while it started it anew.
        let still = store.read()?.daemon(&daemon.key).is_some_and(|now| could_serve(now, config));
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
pub fn lock_limit(config: &Config) -> Duration {
    config.mps.start_timeout + STOP_LIMIT
}

/// The cheap check: the daemon is recorded as serving, the same process still runs, and it listens on the clients'
/// socket.
fn could_serve(daemon: &MpsDaemon, config: &Config) -> bool {
    is_reachable(daemon, config) && limits_and_state::is_alive(daemon)
}

/// Whether the daemon is recorded as serving, and something listens on its clients' socket.
fn is_reachable(daemon: &MpsDaemon, config: &Config) -> bool {
    // A daemon that waited for a lease: the compute mode must be checked first. MIG devices have none of their own.
    let never = config.mps.exclusive_compute_mode == ExclusiveComputeMode::Never;
    let has_mode_to_enter = daemon.mode_left && !never && !daemon.key.0.starts_with("MIG-");
    matches!(daemon.state, DaemonState::Serving | DaemonState::Fault)
        && !has_mode_to_enter
        && is_open(&daemon.key, config)
}

/// Whether containers of any user can reach the daemon, and something listens there. A client that cannot reach it runs on
/// the whole GPU.
fn is_open(key: &DaemonKey, config: &Config) -> bool {
    let (state_dir, public) = (&config.state_dir, key.public(&config.state_dir));
    let is_open = |dir: &Path| dir.metadata().is_ok_and(|found| found.mode() & 0o005 == 0o005);
    is_open(&state_dir.join("mps"))
        && is_open(&key.dir(state_dir))
        && is_open(&public)
        && listens(&public.join("control"))
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
    if has_answered_lately(daemon) {
        // Its clients would wait for it for ever.
        if condition == Condition::Stopped {
            return Err(limits_and_state::note_failure(store, daemon, AskError::Silent));
        }
        return Ok(Some(daemon.default_limits));
    }
    let known = crate::inventory::last(config).ok();
    match Control::with_known_program(&daemon.key, known.as_ref(), config)?.default_limits() {
        Ok(_) if daemon.answered_at == 0 => Ok(Some(DefaultLimits::default())),
        Ok(answer) => {
            limits_and_state::note_answer(store, daemon)?;
            Ok(Some(daemon.default_limits.and(DefaultLimits { sm: answer, ..daemon.default_limits })))
        }
        Err(AskError::Gone(_)) => Ok(None),
        Err(error) => Err(limits_and_state::note_failure(store, daemon, error)),
    }
}

/// How long a restart of the daemon may take. A user at a terminal waits meanwhile.
const EXEC_LIMIT: Duration = Duration::from_secs(3);

/// Longest pid file that is read.
const LONGEST_PID: u64 = 64;

/// Makes sure that the daemon of `public`, the directory that a container sees, answers.
///
/// For a healthy daemon this takes one `connect()` and no child process, if it has answered recently.
///
/// # Errors
/// It does not answer and cannot be restarted within three seconds, or this is unknown.
pub fn ensure_answering(public: &Path, config: &Config) -> Result<(), MpsError> {
    let began = Instant::now();
    let daemon = Daemon::of_public(public, config)?;
    if is_selinux_enforcing(Path::new("/")) && !selinux::has_labels(&daemon.config.state_dir) {
        return Err(MpsError::SeLinux { state_dir: daemon.config.state_dir });
    }
    match daemon.answers() {
        Ok(true) => return Ok(()),
        // A daemon that was killed may listen until its last thread has ended, and nobody but the start below knows
        // whether the program to ask it is missing, or the configuration that says where it is cannot be read.
        Ok(false) | Err(MpsError::Programs(_)) => {}
        Err(error) => return Err(error),
    }
    let store = Store::open(&daemon.config.state_dir)?;
    if let Err(LedgerError::Corrupt { .. }) = store.read() {
        // A start needs the lease in the ledger, so the ledger is rebuilt from the running system.
        store.change(|_| ())?;
    }
    sublet::run(&["mps", "start", &daemon.key.0], EXEC_LIMIT.saturating_sub(began.elapsed()))?;
    if daemon.answers()? { Ok(()) } else { Err(MpsError::Gone { key: daemon.key.0 }) }
}

/// Whether the daemon of `public` answers now, for a caller that may not restart it.
///
/// # Errors
/// It runs and does not answer, or this is unknown.
pub fn answers(public: &Path, config: &Config) -> Result<bool, MpsError> {
    Daemon::of_public(public, config)?.answers()
}

/// A daemon as its container sees it.
struct Daemon<'a> {
    key: DaemonKey,
    public: &'a Path,
    /// The configuration, with the state directory in which `public` is.
    config: Config,
}

impl<'a> Daemon<'a> {
    /// `public` is `<state directory>/mps/<key>/public` ([`DaemonKey::public`]).
    fn of_public(public: &'a Path, config: &Config) -> Result<Self, MpsError> {
        let name = public.parent().and_then(Path::file_name).unwrap_or_default();
        let key = DaemonKey(name.to_string_lossy().into_owned());
        if !key.is_well_formed() {
            return Err(MpsError::BadKey { key: crate::text::safe(&key.0) });
        }
        let state_dir = public.ancestors().nth(3).unwrap_or(Path::new("")).to_owned();
        if key.public(&state_dir) != public {
            return Err(MpsError::BadKey { key: crate::text::safe_path(public) });
        }
        Ok(Self { key, public, config: Config { state_dir, ..config.clone() } })
    }

    /// `false`: there is none.
    fn answers(&self) -> Result<bool, MpsError> {
        if !listens(&self.public.join("control")) {
            return Ok(false);
        }
        // If the ledger can be read, its record is used. Otherwise the daemon is asked.
        let store = Store::open(&self.config.state_dir).ok();
        let ledger = store.as_ref().and_then(|store| store.read().ok());
        let known = ledger.as_ref().and_then(|ledger| ledger.daemon(&self.key));
        let process = known.and_then(|daemon| daemon.process).or_else(|| self.process());
        let silent = || {
            let device = known.map_or_else(|| self.key.0.clone(), |daemon| daemon.devices.join(", "));
            limits_and_state::silent(device, &self.key, process, ledger.as_ref())
        };
        match process.map(|daemon| daemon.condition()) {
            Some(Condition::Ending) => return Ok(false),
            // connect(2) to the socket of a stopped process succeeds (docs/evidence).
            Some(Condition::Stopped) => return Err(silent()),
            Some(Condition::Running) | None => {}
        }
        if known.is_some_and(|daemon| daemon.process.is_some() && has_answered_lately(daemon)) {
            return Ok(true);
        }
        let control = match Control::new(&self.key, &self.config) {
            Err(error) => {
                process.and_then(|daemon| Control::of(&self.key, &self.config, daemon)).ok_or(error)?
            }
            Ok(control) => control,
        };
        match control.or_public(self.public).default_limits() {
            Ok(_) => {
                // Recorded so that the next process need not ask again. If it cannot be recorded, the next one asks.
                if let (Some(store), Some(daemon)) = (&store, known) {
                    let _ = limits_and_state::note_answer(store, daemon);
                }
                Ok(true)
            }
            Err(AskError::Gone(_)) => Ok(false),
            // It sends programs away and takes clients all the same (docs/evidence/2026-11-25-mps-control.md). Whoever
            // else listens there is not trusted to.
            Err(AskError::Taken) if process.is_some_and(|daemon| daemon.is_alive()) => Ok(true),
            Err(AskError::Silent) => Err(silent()),
            Err(error) => Err(limits_and_state::refused(&self.key, error)),
        }
    }

    /// The daemon according to its pid file, if this process may read that.
    fn process(&self) -> Option<Process> {
        let file = dirs::pipe(&self.key, &self.config.state_dir).join("nvidia-cuda-mps-control.pid");
        let text = crate::fs::read_if_trusted(&file, LONGEST_PID)?;
        Process::find(std::str::from_utf8(&text).ok()?.trim().parse().ok()?)
    }
}

fn has_answered_lately(daemon: &MpsDaemon) -> bool {
    daemon.state == DaemonState::Serving && is_recent(daemon.answered_at, epoch_seconds())
}

/// An answer older than this, in seconds, no longer proves anything.
const TRUSTED: u64 = 30;

/// Whether an answer at `answered_at` still counts. An answer from the future does not: the clock was set back.
fn is_recent(answered_at: u64, now: u64) -> bool {
    answered_at <= now && now - answered_at <= TRUSTED
}

#[cfg(test)]
mod exec_daemon_tests {
    use super::*;

    #[test]
    fn an_answer_counts_for_thirty_seconds() {
        assert!(is_recent(1000, 1000));
        assert!(is_recent(1000, 1030));
        assert!(!is_recent(1000, 1031));
        assert!(!is_recent(1000, 999), "the clock was set back");
        assert!(!is_recent(0, 1_700_000_000));
    }

    #[test]
    fn a_daemon_is_known_by_the_directory_that_its_container_sees() {
        let behind = |path: &str| {
            Daemon::of_public(Path::new(path), &Config::default())
                .map(|daemon| (daemon.key.0, daemon.config.state_dir.display().to_string()))
        };
        assert_eq!(behind("/run/sublet/mps/GPU-1/public").unwrap(), ("GPU-1".into(), "/run/sublet".into()));
        for bad in [
            "",
            "/",
            "/mps/public",
            "/run/sublet/mps/../public",
            "/run/sublet/GPU-1/public",
            "/a/mps/GPU-1/pipe",
        ] {
            assert!(behind(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn where_nobody_listens_there_is_no_daemon() {
        let state = tempfile::tempdir().unwrap();
        let public = state.path().join("mps/GPU-1/public");
        assert!(!answers(&public, &Config::default()).unwrap());
    }
}
