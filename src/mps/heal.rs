//! After leases ended or something crashed: ceilings come down, idle daemons end, dead ones come back.

use std::time::Duration;

use super::control::{AskError, Control};
use super::lock::DaemonLock;
use super::{MpsError, ServerKey, child_start, child_stop, dirs, record};
use crate::config::Config;
use crate::ledger::{LeaseId, Ledger, Server, ServerState, Store};
use crate::text::safe;

/// After leases of `key` ended: lowers the ceiling, or stops a daemon that serves nobody any more.
///
/// Other daemons that were left idle, by leases found gone on the way, are stopped as well.
///
/// # Errors
/// The daemon does not answer or does not stop; it is then recorded as in fault.
pub fn settle(key: &ServerKey, store: &Store, config: &Config) -> Result<(), MpsError> {
    let ledger = store.read()?;
    if let (Some(_), Some(server)) = (ledger.wanted_ceiling(key), record::server(&ledger, key)) {
        dirs::cap_logs(key, &config.state_dir);
        if record::is_alive(server) && is_settled(&ledger, server) {
            let held = DaemonLock::take(key, &config.state_dir, Duration::from_secs(5))?;
            record::adjust(&held, key, store, config)?;
        }
    }
    let mut result = Ok(());
    for idle in idle(&ledger, config) {
        result = result.and(child_stop(&idle).map(drop));
    }
    result
}

/// Whether the ceiling can be changed now: a start sets it itself, a dead daemon has none.
fn is_settled(ledger: &Ledger, server: &Server) -> bool {
    matches!(server.state, ServerState::Serving | ServerState::Fault)
        && (ledger.wanted_ceiling(&server.key) != Some(server.ceiling) || server.answered_at == 0)
}

/// Whether the daemon of `key` stays when its last lease ends. A dedicated one is of no use to anybody else.
pub(super) fn stays(key: &ServerKey, config: &Config) -> bool {
    !config.mps.stop_when_idle && LeaseId::parse(&key.0).is_none()
}

/// Daemons without a lease that have to go, and devices whose compute mode was left behind by a crash.
fn idle(ledger: &Ledger, config: &Config) -> Vec<ServerKey> {
    let kept = |server: &Server| {
        stays(&server.key, config) && server.state == ServerState::Serving && record::is_alive(server)
    };
    let unused = |key: &ServerKey| ledger.wanted_ceiling(key).is_none();
    let servers = ledger.servers.iter().filter(|server| unused(&server.key) && !kept(server));
    let modes = ledger.compute_modes.iter().map(|changed| ServerKey(changed.device.clone()));
    let left = modes.filter(|key| unused(key) && record::server(ledger, key).is_none());
    servers.map(|server| server.key.clone()).chain(left).collect()
}

/// Puts right what crashes left: daemons that died under live leases come back under the directory that
/// their containers have mounted, idle ones end, compute modes are put back, logs are capped.
///
/// Returns what was found and done, one line each; what could not be done is among it.
#[must_use]
pub fn heal(store: &Store, config: &Config) -> Vec<String> {
    let ledger = match store.read() {
        Ok(ledger) => ledger,
        Err(error) => return vec![error.to_string()],
    };
    let mut lines = Vec::new();
    for server in &ledger.servers {
        dirs::cap_logs(&server.key, &config.state_dir);
        if ledger.wanted_ceiling(&server.key).is_some() && is_free(&server.key, config) {
            lines.extend(heal_one(server, &ledger, store, config));
        }
    }
    for key in idle(&ledger, config).into_iter().filter(|key| is_free(key, config)) {
        match child_stop(&key) {
            Ok(warnings) => lines.extend(warnings),
            Err(error) => lines.push(error.to_string()),
        }
    }
    remove_strays(|| store.read().ok(), config);
    lines
}

/// Nobody is starting or stopping it at this moment.
///
/// A holder that was killed while it forked leaves the lock to a child until that has exec'd: hence the wait.
fn is_free(key: &ServerKey, config: &Config) -> bool {
    DaemonLock::take(key, &config.state_dir, Duration::from_millis(50)).is_ok()
}

fn heal_one(server: &Server, ledger: &Ledger, store: &Store, config: &Config) -> Vec<String> {
    let runs = matches!(server.state, ServerState::Serving | ServerState::Fault) && record::is_alive(server);
    if !runs {
        return restart(server, ledger, config);
    }
    // Asked for real: a daemon that is just dying, or stopped, still has its pid.
    let asked = Control::new(&server.key, config).map(|control| control.ceiling());
    let healed = match asked {
        Ok(Ok(_)) => readjust(server, store, config),
        Ok(Err(AskError::Gone(_))) => return restart(server, ledger, config),
        Ok(Err(error)) => Err(record::note_failure(store, server, error)),
        Err(error) => Err(error),
    };
    healed.err().map(|error| error.to_string()).into_iter().collect()
}

fn readjust(server: &Server, store: &Store, config: &Config) -> Result<(), MpsError> {
    let held = DaemonLock::take(&server.key, &config.state_dir, Duration::from_secs(2))?;
    record::adjust(&held, &server.key, store, config)
}

fn restart(server: &Server, ledger: &Ledger, config: &Config) -> Vec<String> {
    match child_start(&server.key, config) {
        Ok(mut lines) => {
            let (key, device) = (&server.key, &server.device);
            let hit: Vec<String> = ledger.on_server(key).map(|lease| safe(&lease.container.name())).collect();
            lines.insert(
                0,
                format!(
                    "the MPS daemon {key} of {device} had died under live leases: started again; GPU work that \
                     ran is lost in {}",
                    hit.join(", ")
                ),
            );
            lines
        }
        Err(error) => vec![error.to_string()],
    }
}

/// Directories of dedicated daemons whose lease and record are gone: a start was killed very early.
fn remove_strays(read: impl Fn() -> Option<Ledger>, config: &Config) {
    let Ok(entries) = std::fs::read_dir(config.state_dir.join("mps")) else { return };
    for name in entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
        let key = ServerKey(name);
        if LeaseId::parse(&key.0).is_none() {
            continue;
        }
        let Ok(Some(_held)) = DaemonLock::try_take(&key, &config.state_dir) else { continue };
        // Read with the lock in hand: a lease taken before has its record, or starts after us.
        let known =
            |ledger: &Ledger| ledger.wanted_ceiling(&key).is_some() || record::server(ledger, &key).is_some();
        if read().is_some_and(|ledger| !known(&ledger)) {
            if let Err(error) = dirs::clear(&key, &config.state_dir) {
                tracing::debug!("{error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::{lease, ledger};
    use super::*;
    use crate::inventory::ComputeMode;
    use crate::ledger::ChangedComputeMode;
    use crate::process::Process;
    use crate::request::Percent;

    fn server(key: &str, daemon: Option<Process>) -> Server {
        Server {
            key: ServerKey(key.into()),
            device: "GPU-1".into(),
            daemon,
            state: ServerState::Serving,
            ceiling: Percent::WHOLE,
            answered_at: 1,
        }
    }

    #[test]
    fn daemons_without_a_lease_and_modes_without_a_daemon_have_to_go() {
        let mut held = ledger(vec![lease("0000000000000001", "GPU-1", None)]);
        let me = Process::current().unwrap();
        let dead = Process { start_time: me.start_time + 1, ..me };
        held.servers = vec![
            server("GPU-1", Some(me)),
            server("GPU-2", Some(me)),
            server("GPU-3", Some(dead)),
            server("GPU-4", None),
            server("0000000000000002", Some(me)),
        ];
        held.compute_modes = ["GPU-1", "GPU-2", "GPU-5"]
            .map(|device| ChangedComputeMode { device: device.into(), found: ComputeMode::Default })
            .to_vec();
        let mut config = Config::default();
        let names = |config: &Config| idle(&held, config).into_iter().map(|key| key.0).collect::<Vec<_>>();
        assert_eq!(names(&config), ["GPU-2", "GPU-3", "GPU-4", "0000000000000002", "GPU-5"]);
        config.mps.stop_when_idle = false;
        assert_eq!(names(&config), ["GPU-3", "GPU-4", "0000000000000002", "GPU-5"], "nobody else can use it");
    }

    #[test]
    fn directories_of_leases_that_never_came_to_be_are_removed() {
        let state = tempfile::tempdir().unwrap();
        let config = Config { state_dir: state.path().to_owned(), ..Config::default() };
        for name in ["0000000000000001", "0000000000000002", "GPU-1"] {
            dirs::make(&ServerKey(name.into()), state.path()).unwrap();
        }
        let held = ledger(vec![lease("0000000000000001", "0000000000000001", None)]);
        remove_strays(|| Some(held.clone()), &config);
        let there = |name: &str| state.path().join("mps").join(name).exists();
        assert!(there("0000000000000001") && there("GPU-1") && !there("0000000000000002"));
    }
}
