//! Before a process joins a running container, its daemon has to answer, or is restarted at once. The container's
//! own files are enough for this: ledger, inventory and configuration need not be readable.

use std::path::Path;
use std::time::{Duration, Instant};

use super::control::{AskError, Control, listens};
use super::{MpsError, dirs, limits_and_state};
use crate::config::Config;
use crate::fs::selinux;
use crate::ledger::DaemonKey;
use crate::ledger::{DaemonState, Ledger, LedgerError, MpsDaemon, Store};
use crate::process::sublet;
use crate::process::{Condition, Process, epoch_seconds};

/// How long a restart of the daemon may take. A user at a terminal waits meanwhile.
const LIMIT: Duration = Duration::from_secs(3);

/// Longest pid file that is read.
const LONGEST_PID: u64 = 64;

/// Makes sure that the daemon of `public`, the directory that a container sees, answers.
///
/// For a healthy daemon this takes one `connect()` and no child process, if it has answered recently.
///
/// # Errors
/// It does not answer and cannot be restarted within three seconds, or this is unknown.
pub(crate) fn ensure_answering(public: &Path, config: &Config) -> Result<(), MpsError> {
    let began = Instant::now();
    let daemon = Daemon::of_public(public, config)?;
    if selinux::denies_mps_sockets(Path::new("/"), &daemon.config.state_dir) {
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
        // A start needs the lease in the ledger, so the ledger is rebuilt from what runs.
        store.reclaim()?;
    }
    sublet::run(&["mps", "start", &daemon.key.0], LIMIT.saturating_sub(began.elapsed()))?;
    if daemon.answers()? {
        return Ok(());
    }
    Err(MpsError::Gone { key: daemon.key.0 })
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
        dirs::check_key(&key)?;
        let state_dir = public.ancestors().nth(3).unwrap_or(Path::new("")).to_owned();
        if key.public(&state_dir) != public {
            return Err(MpsError::BadKey { key: crate::text::safe(&public.to_string_lossy()) });
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
        let known = ledger.as_ref().and_then(|ledger| limits_and_state::daemon(ledger, &self.key));
        let process = known.and_then(|daemon| daemon.process).or_else(|| self.process());
        match process.map(|daemon| daemon.condition()) {
            Some(Condition::Ending) => return Ok(false),
            // connect(2) to the socket of a stopped process succeeds (docs/evidence).
            Some(Condition::Stopped) => return Err(self.silent(known, process, ledger.as_ref())),
            Some(Condition::Running) | None => {}
        }
        if known.is_some_and(has_answered_lately) {
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
            Err(AskError::Silent) => Err(self.silent(known, process, ledger.as_ref())),
            Err(error) => Err(limits_and_state::refused(&self.key, error)),
        }
    }

    /// The daemon according to its pid file, if this process may read that.
    fn process(&self) -> Option<Process> {
        let file = dirs::pipe(&self.key, &self.config.state_dir).join("nvidia-cuda-mps-control.pid");
        let text = crate::fs::trusted::read_if_trusted(&file, LONGEST_PID)?;
        Process::find(std::str::from_utf8(&text).ok()?.trim().parse().ok()?)
    }

    fn silent(
        &self,
        known: Option<&MpsDaemon>,
        process: Option<Process>,
        ledger: Option<&Ledger>,
    ) -> MpsError {
        let device = known.map_or_else(|| self.key.0.clone(), |daemon| daemon.devices.join(", "));
        limits_and_state::silent(device, &self.key, process, ledger)
    }
}

/// Of a daemon that runs.
fn has_answered_lately(daemon: &MpsDaemon) -> bool {
    daemon.process.is_some()
        && daemon.state == DaemonState::Serving
        && limits_and_state::is_recent(daemon.answered_at, epoch_seconds())
}

#[cfg(test)]
mod tests {
    use super::*;

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
