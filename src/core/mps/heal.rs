//! After leases have ended or something has crashed: lowers default limits, ends or rests unneeded daemons, restarts crashed
//! ones.
//!
//! Daemons may outlive their last lease (`[mps] idle`), so that none has to be started for the next container. While they
//! wait, the original compute mode is restored. A request that takes the device for another use ends them first.
//! `sublet serve` ends them after the configured time. Without the service no daemon waits, because nothing would end it.

use std::time::Duration;

use super::control::{AskError, Control};
use super::dirs::{self, DaemonLock};
use super::{MpsError, STOP_LIMIT, child_start, child_stop, limits_and_state};
use crate::config::Config;
use crate::ledger::{DaemonKey, DaemonState, LeaseId, Ledger, MpsDaemon, Store};
use crate::process::{Process, sublet, uptime_seconds};
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
/// mode restored ([`waits`]).
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
    let errands = errands(&ledger, config);
    let failed: Vec<MpsError> = errands.iter().filter_map(|errand| run_errand(errand).err()).collect();
    failed.into_iter().next().map_or(Ok(()), Err)
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
    // What starts a daemon again may have found that its last lease has ended meanwhile, and freed it.
    lines.extend(end_overdue(store, config));
    remove_strays(|| store.read().ok(), config);
    lines
}

/// Ends daemons whose idle time is over. Returns failures, one line each.
pub fn end_overdue(store: &Store, config: &Config) -> Vec<String> {
    store.read().map_or_else(|error| vec![error.to_string()], |ledger| run_errands(&ledger, config))
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
    let due = errands(ledger, config).into_iter().filter(|(key, _)| is_free(key, config));
    due.flat_map(|errand| run_errand(&errand).unwrap_or_else(|error| vec![error.to_string()])).collect()
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
    let healed = match Control::new(&daemon.key, config).map(|control| control.default_limits()) {
        Ok(Ok(_)) => DaemonLock::take(&daemon.key, &config.state_dir, Duration::from_secs(2))
            .and_then(|held| limits_and_state::adjust(&held, &daemon.key, None, store, config)),
        Ok(Err(AskError::Gone(_))) => return restart(daemon, ledger, config),
        Ok(Err(error)) => Err(limits_and_state::note_failure(store, daemon, error)),
        Err(error) => Err(error),
    };
    healed.err().map(|error| error.to_string()).into_iter().collect()
}

fn restart(daemon: &MpsDaemon, ledger: &Ledger, config: &Config) -> Vec<String> {
    let (key, device) = (&daemon.key, daemon.devices.join(", "));
    let hit: Vec<String> = ledger.on_daemon(key).map(|lease| safe(&lease.container.name())).collect();
    let restarted = format!(
        "the MPS daemon {key} of {device} had died while leases needed it, and was started again; GPU work was lost in {}",
        hit.join(", ")
    );
    match child_start(key, config) {
        Ok(warnings) => [vec![restarted], warnings].concat(),
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

/// Whether `daemon`, which serves no lease, waits for the next one.
pub fn waits(daemon: &MpsDaemon, ledger: &Ledger, config: &Config) -> bool {
    // A dedicated daemon is of no use to another lease.
    let useful = LeaseId::parse(&daemon.key.0).is_none()
        && !daemon.devices.iter().any(|device| is_closed(device, ledger));
    let runs = daemon.state == DaemonState::Serving && limits_and_state::is_alive(daemon);
    useful && runs && left(daemon, ledger, config) > Duration::ZERO
}

/// How much longer `daemon` may wait: zero if nothing would end it.
pub fn left(daemon: &MpsDaemon, ledger: &Ledger, config: &Config) -> Duration {
    let ends = ledger.keeper.is_some_and(|keeper| keeper.is_alive());
    if ends { remaining(daemon.idle_since, config.mps.idle, uptime_seconds()) } else { Duration::ZERO }
}

/// The rest of `idle`. Zero if the beginning of the wait is unknown or in the future.
fn remaining(since: Option<u64>, idle: Duration, now: u64) -> Duration {
    let waited = since.and_then(|since| now.checked_sub(since)).map(Duration::from_secs);
    waited.map_or(Duration::ZERO, |waited| idle.saturating_sub(waited))
}

/// Whether no later lease can need the daemon of `device`.
fn is_closed(device: &str, ledger: &Ledger) -> bool {
    let listed = |list: &[String]| list.iter().any(|uuid| uuid == device);
    listed(&ledger.drained) || listed(&ledger.unexplained) || ledger.on_device(device).next().is_some()
}

/// The work for a device without leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Errand {
    /// Its daemon ends, and its compute mode is restored.
    Stop,
    /// Its daemon waits, and its compute mode is restored.
    Rest,
}

/// The due work: daemons that must end, and compute modes that a last lease or a crash left changed.
pub(crate) fn errands(ledger: &Ledger, config: &Config) -> Vec<(DaemonKey, Errand)> {
    let unused = |key: &DaemonKey| ledger.on_daemon(key).next().is_none();
    let changed = |key: &DaemonKey| ledger.compute_modes.iter().any(|changed| changed.device == key.0);
    let daemons = ledger.daemons.iter().filter(|daemon| unused(&daemon.key)).filter_map(|daemon| {
        let errand = if waits(daemon, ledger, config) { Errand::Rest } else { Errand::Stop };
        let due = errand == Errand::Stop || changed(&daemon.key);
        due.then(|| (daemon.key.clone(), errand))
    });
    let modes = ledger.compute_modes.iter().map(|changed| DaemonKey(changed.device.clone()));
    let left = modes.filter(|key| unused(key) && ledger.daemon(key).is_none());
    daemons.chain(left.map(|key| (key, Errand::Stop))).collect()
}

/// Runs the `sublet` command for it. Returns its warnings.
fn run_errand((key, errand): &(DaemonKey, Errand)) -> Result<Vec<String>, MpsError> {
    match errand {
        Errand::Stop => child_stop(key),
        Errand::Rest => Ok(sublet::run(&["mps", "rest", &key.0], STOP_LIMIT)?),
    }
}

/// After a loss of the ledger: ends daemons that are not attributable to any lease, because they keep their devices
/// closed. Daemons with clients stay.
pub(crate) fn end_unexplained(store: &Store, config: &Config) -> Result<(), MpsError> {
    let ledger = store.read()?;
    let strays = |(key, _): &&(DaemonKey, Errand)| {
        ledger.daemon(key).is_some_and(|daemon| ledger.is_unexplained(daemon))
    };
    for errand in errands(&ledger, config).iter().filter(strays) {
        let _ = run_errand(errand).inspect_err(|error| tracing::warn!("{error}"));
    }
    Ok(())
}

/// Records that this process, `sublet serve`, ends daemons after their idle time.
pub fn register_keeper(ledger: &mut Ledger) -> std::io::Result<()> {
    ledger.keeper = Some(Process::current()?);
    Ok(())
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

#[cfg(test)]
mod idle_tests {
    use proptest::prelude::*;

    use super::super::limits_and_state::tests::{lease, ledger};
    use super::*;
    use crate::inventory::ComputeMode;
    use crate::ledger::{ChangedComputeMode, DefaultLimits};

    fn daemon(key: &str, daemon: Option<Process>, idle_since: u64) -> MpsDaemon {
        MpsDaemon {
            key: DaemonKey(key.into()),
            devices: vec![key.into()],
            process: daemon,
            state: DaemonState::Serving,
            default_limits: DefaultLimits::NONE,
            answered_at: 1,
            idle_since: Some(idle_since),
            mode_left: true,
        }
    }

    /// One lease, on GPU-1; a daemon that has just begun to wait on GPU-2, one that has waited for 100 s on GPU-3,
    /// and such as nobody would find: dead ones and one of a lease that has ended.
    fn held() -> Ledger {
        let mut held = ledger(vec![lease("0000000000000001", "GPU-1", None)]);
        let (me, now) = (Process::current().unwrap(), uptime_seconds());
        let dead = Process { start_time: me.start_time + 1, ..me };
        held.daemons = vec![
            MpsDaemon { idle_since: None, ..daemon("GPU-1", Some(me), 0) },
            daemon("GPU-2", Some(me), now),
            daemon("GPU-3", Some(me), now - 100),
            daemon("GPU-4", Some(dead), now),
            daemon("GPU-5", None, now),
            daemon("0000000000000002", Some(me), now),
        ];
        held.compute_modes = ["GPU-1", "GPU-2", "GPU-9"]
            .map(|device| ChangedComputeMode { device: device.into(), found: ComputeMode::Default })
            .to_vec();
        held
    }

    fn due(held: &Ledger, config: &Config) -> Vec<String> {
        let line = |(key, errand): (DaemonKey, Errand)| format!("{errand:?} {key}");
        errands(held, config).into_iter().map(line).collect()
    }

    #[test]
    fn daemons_without_a_lease_and_modes_without_a_daemon_have_to_go() {
        let (mut held, mut config) = (held(), Config::default());
        let all = ["GPU-2", "GPU-3", "GPU-4", "GPU-5", "0000000000000002", "GPU-9"];
        let all = all.map(|key| format!("Stop {key}"));
        assert_eq!(due(&held, &config), all, "nobody would end them");
        held.keeper = held.daemons[3].process;
        assert_eq!(due(&held, &config), all, "whoever would has died");
        held.keeper = Some(Process::current().unwrap());
        let gone = ["Stop GPU-4", "Stop GPU-5", "Stop 0000000000000002", "Stop GPU-9"];
        assert_eq!(due(&held, &config), [&["Rest GPU-2", "Stop GPU-3"][..], &gone].concat());
        config.mps.idle = Duration::from_secs(1000);
        assert_eq!(due(&held, &config), [&["Rest GPU-2"][..], &gone].concat());
        config.mps.idle = Duration::ZERO;
        assert_eq!(due(&held, &config), all);
    }

    #[test]
    fn nothing_waits_on_a_device_that_nobody_can_come_to() {
        let config = Config::default();
        let open = Ledger { keeper: Some(Process::current().unwrap()), ..held() };
        let waits = |ledger: &Ledger| due(ledger, &config)[0] == "Rest GPU-2";
        assert!(waits(&open));
        assert!(!waits(&Ledger { drained: vec!["GPU-2".into()], ..open.clone() }));
        assert!(!waits(&Ledger { unexplained: vec!["GPU-2".into()], ..open.clone() }));
        let mut taken = open;
        taken.leases.push(crate::ledger::Lease {
            devices: vec!["GPU-2".into()],
            daemon: None,
            ..lease("0000000000000003", "", None)
        });
        assert!(!waits(&taken));
    }

    proptest! {
        #[test]
        fn it_waits_its_time_and_no_longer(since in 0_u64..1 << 40, waited in 0_u64..1 << 20, idle in 0_u64..1 << 20) {
            let left = |since, now| remaining(since, Duration::from_secs(idle), now).as_secs();
            prop_assert_eq!(left(Some(since), since + waited), idle.saturating_sub(waited));
            prop_assert_eq!(left(None, since), 0, "since nobody knows when");
            prop_assert_eq!(left(Some(since + waited + 1), since), 0, "of the future");
        }
    }
}
