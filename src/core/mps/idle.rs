//! Daemons that outlive their last lease (`[mps] idle`), so that none has to be started for the next container.
//!
//! While they wait, the original compute mode is restored. A request that takes the device for another use ends them
//! first. `sublet serve` ends them after the configured time. Without the service no daemon waits, because nothing
//! would end it.

use std::time::Duration;

use super::{MpsError, STOP_LIMIT, child_stop, limits_and_state};
use crate::config::Config;
use crate::ledger::DaemonKey;
use crate::ledger::{DaemonState, LeaseId, Ledger, MpsDaemon, Store};
use crate::process::{Process, sublet, uptime_seconds};

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
    if ledger.keeper.is_some_and(|keeper| keeper.is_alive()) {
        remaining(daemon.idle_since, config.mps.idle, uptime_seconds())
    } else {
        Duration::ZERO
    }
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
pub(super) fn run((key, errand): &(DaemonKey, Errand)) -> Result<Vec<String>, MpsError> {
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
        if let Err(error) = run(errand) {
            tracing::warn!("{error}");
        }
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
