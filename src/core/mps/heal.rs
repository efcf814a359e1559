//! After leases have ended or something has crashed: lowers default limits, ends unneeded daemons, restarts crashed
//! ones.

use std::time::Duration;

use super::control::{AskError, Control};
use super::idle::{self, errands};
use super::lock::DaemonLock;
use super::{MpsError, child_start, dirs, limits_and_state};
use crate::config::Config;
use crate::ledger::DaemonKey;
use crate::ledger::{LeaseId, Ledger, MpsDaemon, Store};
use crate::process::{Process, sublet};
use crate::text::safe;

/// When the default limits of a daemon are lowered after leases of it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lowering {
    /// Before this returns.
    Now,
    /// By `sublet mps lower`, a daemon: an engine waits for this process, which would wait for two answers. If that
    /// command is killed, the next `sublet gc` or the service lowers them.
    Apart,
}

/// After leases of `key` ended: lowers the default limits. A daemon without leases stops, or waits with the compute
/// mode restored (see [`idle`]).
///
/// The same is done for other daemons whose leases were freed meanwhile.
///
/// # Errors
/// The daemon does not answer or does not stop. It is then recorded with a fault.
pub fn settle(key: &DaemonKey, store: &Store, config: &Config, lowering: Lowering) -> Result<(), MpsError> {
    let ledger = store.read()?;
    if ledger.wanted_default_limits(key).is_some() && ledger.daemon(key).is_some() {
        dirs::cap_logs(key, &config.state_dir);
    }
    // If the command cannot be started, this process does its work.
    if is_due(key, &ledger)
        && (lowering == Lowering::Now || sublet::start(&["mps", "lower", &key.0]).is_err())
    {
        lower(key, store, config)?;
    }
    let mut result = Ok(());
    for errand in errands(&ledger, config) {
        result = result.and(idle::run(&errand).map(drop));
    }
    result
}

/// Sets the default limits that the remaining leases of `key` need.
///
/// # Errors
/// The daemon does not answer. It is then recorded with a fault.
pub fn lower(key: &DaemonKey, store: &Store, config: &Config) -> Result<(), MpsError> {
    dirs::check_key(key)?;
    if !is_due(key, &store.read()?) {
        return Ok(());
    }
    let held = DaemonLock::take(key, &config.state_dir, Duration::from_secs(5))?;
    limits_and_state::adjust(&held, key, None, store, config)
}

/// Whether the daemon of `key` serves leases, runs, and has other default limits than these need. A start sets them itself,
/// and a daemon that has ended has none.
fn is_due(key: &DaemonKey, ledger: &Ledger) -> bool {
    let wanted = ledger.wanted_default_limits(key);
    ledger.daemon(key).filter(|_| wanted.is_some()).is_some_and(|daemon| {
        (wanted != Some(daemon.default_limits) || daemon.answered_at == 0) && limits_and_state::runs(daemon)
    })
}

/// Recovers from crashes: restarts crashed MPS daemons of live leases in the directory that their containers have
/// mounted, ends unneeded daemons, restores compute modes, and limits logs.
///
/// Returns findings, actions and failures, one line each.
pub fn heal(store: &Store, config: &Config) -> Vec<String> {
    let ledger = match store.read() {
        Ok(ledger) => ledger,
        Err(error) => return vec![error.to_string()],
    };
    let mut lines = Vec::new();
    for daemon in &ledger.daemons {
        dirs::cap_logs(&daemon.key, &config.state_dir);
        if ledger.wanted_default_limits(&daemon.key).is_some() && is_free(&daemon.key, config) {
            lines.extend(heal_one(daemon, &ledger, store, config));
        }
    }
    lines.extend(run_errands(&ledger, config));
    remove_strays(|| store.read().ok(), config);
    lines
}

/// Ends daemons whose idle time is over. Returns failures, one line each.
pub fn end_overdue(store: &Store, config: &Config) -> Vec<String> {
    let ledger = match store.read() {
        Ok(ledger) => ledger,
        Err(error) => return vec![error.to_string()],
    };
    run_errands(&ledger, config)
}

/// Ends all idle daemons when `sublet serve` ends.
pub fn end_all_idle(store: &Store, config: &Config) -> Vec<String> {
    let own = Process::current().ok();
    let left = limits_and_state::change(store, |ledger| {
        ledger.keeper = ledger.keeper.filter(|keeper| Some(*keeper) != own);
        Ok(())
    });
    let mut lines: Vec<String> = left.err().map(|error| error.to_string()).into_iter().collect();
    lines.extend(end_overdue(store, config));
    lines
}

/// Ends or idles daemons without a lease in `ledger`. Returns messages.
fn run_errands(ledger: &Ledger, config: &Config) -> Vec<String> {
    let mut lines = Vec::new();
    for errand in errands(ledger, config).iter().filter(|(key, _)| is_free(key, config)) {
        match idle::run(errand) {
            Ok(warnings) => lines.extend(warnings),
            Err(error) => lines.push(error.to_string()),
        }
    }
    lines
}

/// Whether no process is starting or stopping it now.
///
/// If a process that held the lock was killed while it forked, its child has the lock until exec. So this waits.
fn is_free(key: &DaemonKey, config: &Config) -> bool {
    DaemonLock::take(key, &config.state_dir, Duration::from_millis(50)).is_ok()
}

fn heal_one(daemon: &MpsDaemon, ledger: &Ledger, store: &Store, config: &Config) -> Vec<String> {
    if !limits_and_state::runs(daemon) {
        return restart(daemon, ledger, config);
    }
    // The daemon is really asked, because one that is ending or stopped still has its pid.
    let asked = Control::new(&daemon.key, config).map(|control| control.default_limits());
    let healed = match asked {
        Ok(Ok(_)) => DaemonLock::take(&daemon.key, &config.state_dir, Duration::from_secs(2))
            .and_then(|held| limits_and_state::adjust(&held, &daemon.key, None, store, config)),
        Ok(Err(AskError::Gone(_))) => return restart(daemon, ledger, config),
        Ok(Err(error)) => Err(limits_and_state::note_failure(store, daemon, error)),
        Err(error) => Err(error),
    };
    healed.err().map(|error| error.to_string()).into_iter().collect()
}

fn restart(daemon: &MpsDaemon, ledger: &Ledger, config: &Config) -> Vec<String> {
    match child_start(&daemon.key, config) {
        Ok(mut lines) => {
            let (key, device) = (&daemon.key, daemon.devices.join(", "));
            let hit: Vec<String> = ledger.on_daemon(key).map(|lease| safe(&lease.container.name())).collect();
            lines.insert(
                0,
                format!(
                    "the MPS daemon {key} of {device} had died while leases needed it, and was started \
                     again; GPU work was lost in {}",
                    hit.join(", ")
                ),
            );
            lines
        }
        Err(error) => vec![error.to_string()],
    }
}

/// Removes directories of dedicated daemons that have neither lease nor record. They are left if a start is killed very
/// early.
fn remove_strays(read: impl Fn() -> Option<Ledger>, config: &Config) {
    let Ok(entries) = std::fs::read_dir(config.state_dir.join("mps")) else { return };
    for name in entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
        let key = DaemonKey(name);
        if LeaseId::parse(&key.0).is_none() {
            continue;
        }
        let Ok(Some(_held)) = DaemonLock::try_take(&key, &config.state_dir) else { continue };
        // The ledger is read while the lock is held. A lease taken before is in it, and a later one starts its daemon
        // after this.
        let known =
            |ledger: &Ledger| ledger.wanted_default_limits(&key).is_some() || ledger.daemon(&key).is_some();
        if read().is_some_and(|ledger| !known(&ledger)) {
            if let Err(error) = dirs::clear(&key, &config.state_dir) {
                tracing::debug!("{error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::limits_and_state::tests::{lease, ledger};
    use super::*;
    #[test]
    fn directories_of_leases_that_never_came_to_be_are_removed() {
        let state = tempfile::tempdir().unwrap();
        let config = Config { state_dir: state.path().to_owned(), ..Config::default() };
        for name in ["0000000000000001", "0000000000000002", "GPU-1"] {
            dirs::make(&DaemonKey(name.into()), state.path()).unwrap();
        }
        let held = ledger(vec![lease("0000000000000001", "0000000000000001", None)]);
        remove_strays(|| Some(held.clone()), &config);
        let there = |name: &str| state.path().join("mps").join(name).exists();
        assert!(there("0000000000000001") && there("GPU-1") && !there("0000000000000002"));
    }
}
