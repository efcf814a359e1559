//! Daemons that outlive their last lease (`[mps] idle`), so that the next container need not start one.
//!
//! While they wait, the original compute mode is restored. A request that takes the device for another use ends them
//! first. `sublet serve` ends them after that time. Without the service none waits, because nothing would end it.

use std::thread::sleep;
use std::time::{Duration, Instant};

use super::{MpsError, STOP_LIMIT, ServerKey, child_rest, child_stop, record};
use crate::config::{Config, Stay};
use crate::ledger::{LeaseId, Ledger, Server, ServerState, Store};
use crate::process::Process;
use crate::process::uptime_seconds;

/// Between two tries to end a daemon that another process is ending.
const AGAIN: Duration = Duration::from_millis(50);

/// Whether the daemon of `server`, which serves no lease, waits for the next one.
#[must_use]
pub fn waits(server: &Server, ledger: &Ledger, config: &Config) -> bool {
    // A dedicated one is of no use to anybody else.
    let useful = LeaseId::parse(&server.key.0).is_none()
        && !server.devices.iter().any(|device| is_closed(device, ledger));
    let runs = server.state == ServerState::Serving && record::is_alive(server);
    useful && runs && left(server, ledger, config) > Duration::ZERO
}

/// How long the daemon of `server` may wait still: [`Duration::MAX`] without end, nothing where nobody would end it.
#[must_use]
pub fn left(server: &Server, ledger: &Ledger, config: &Config) -> Duration {
    match config.mps.after_last_lease() {
        Stay::Always => Duration::MAX,
        Stay::For(idle) if ledger.keeper.is_some_and(|keeper| keeper.is_alive()) => {
            remaining(server.idle_since, idle, uptime_seconds())
        }
        Stay::For(_) => Duration::ZERO,
    }
}

/// What is left of `idle`. Whoever cannot tell since when it waits has waited long enough, and so has one that
/// will have begun in the future.
fn remaining(since: Option<u64>, idle: Duration, now: u64) -> Duration {
    let waited = since.and_then(|since| now.checked_sub(since)).map(Duration::from_secs);
    waited.map_or(Duration::ZERO, |waited| idle.saturating_sub(waited))
}

/// Whether no later lease can need the daemon of `device`.
fn is_closed(device: &str, ledger: &Ledger) -> bool {
    let listed = |list: &[String]| list.iter().any(|uuid| uuid == device);
    listed(&ledger.drained) || listed(&ledger.unexplained) || ledger.on_device(device).next().is_some()
}

/// What is to be done about a device that no lease has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Errand {
    /// Its daemon ends, and its compute mode goes back.
    Stop,
    /// Its daemon waits: its compute mode goes back.
    Rest,
}

/// What is due: daemons that have to go, and compute modes that a last lease or a crash left behind.
pub(super) fn errands(ledger: &Ledger, config: &Config) -> Vec<(ServerKey, Errand)> {
    let unused = |key: &ServerKey| ledger.on_server(key).next().is_none();
    let changed = |key: &ServerKey| ledger.compute_modes.iter().any(|changed| changed.device == key.0);
    let servers = ledger.servers.iter().filter(|server| unused(&server.key)).filter_map(|server| {
        let errand = if waits(server, ledger, config) { Errand::Rest } else { Errand::Stop };
        let due = errand == Errand::Stop || changed(&server.key);
        due.then(|| (server.key.clone(), errand))
    });
    let modes = ledger.compute_modes.iter().map(|changed| ServerKey(changed.device.clone()));
    let left = modes.filter(|key| unused(key) && record::server(ledger, key).is_none());
    servers.chain(left.map(|key| (key, Errand::Stop))).collect()
}

/// Has it done by `sublet`; its warnings.
pub(super) fn run((key, errand): &(ServerKey, Errand)) -> Result<Vec<String>, MpsError> {
    match errand {
        Errand::Stop => child_stop(key),
        Errand::Rest => child_rest(key),
    }
}

/// Ends the daemons `keys`, which wait for a lease, before the container of another use of their devices starts.
/// Returns warnings, one line each.
///
/// # Errors
/// One does not end.
pub fn make_way(keys: &[ServerKey], store: &Store) -> Result<Vec<String>, MpsError> {
    let deadline = Instant::now() + STOP_LIMIT;
    let mut warnings = Vec::new();
    for key in keys {
        // Somebody else may be ending it at this moment, and have its lock.
        while let Err(error) = child_stop(key).map(|lines| warnings.extend(lines)) {
            if Instant::now() >= deadline {
                return Err(error);
            }
            sleep(AGAIN);
        }
        if record::server(&store.read()?, key).is_some() {
            return Err(MpsError::InTheWay { key: key.to_string() });
        }
    }
    Ok(warnings)
}

/// After a loss of the ledger: ends daemons that no lease explains, which keep their devices closed. Those with
/// clients stay.
///
/// # Errors
/// The ledger cannot be read.
pub fn end_unexplained(store: &Store, config: &Config) -> Result<(), MpsError> {
    let ledger = store.read()?;
    let strays = |(key, _): &&(ServerKey, Errand)| {
        record::server(&ledger, key).is_some_and(|server| ledger.is_unexplained(server))
    };
    for errand in errands(&ledger, config).iter().filter(strays) {
        if let Err(error) = run(errand) {
            tracing::warn!("{error}");
        }
    }
    Ok(())
}

/// Writes down that this process, `sublet serve`, ends daemons when their time is up.
///
/// # Errors
/// The ledger cannot be written.
pub fn keep(ledger: &mut Ledger) -> std::io::Result<()> {
    ledger.keeper = Some(Process::current()?);
    Ok(())
}

/// Ends daemons whose time is up; what could not be done, one line each.
#[must_use]
pub fn end_overdue(store: &Store, config: &Config) -> Vec<String> {
    let ledger = match store.read() {
        Ok(ledger) => ledger,
        Err(error) => return vec![error.to_string()],
    };
    super::heal::run_errands(&ledger, config)
}

/// The end of `sublet serve`, and of all daemons that wait.
#[must_use]
pub fn keep_no_more(store: &Store, config: &Config) -> Vec<String> {
    let own = Process::current().ok();
    let left = record::change(store, |ledger| {
        ledger.keeper = ledger.keeper.filter(|keeper| Some(*keeper) != own);
        Ok(())
    });
    let mut lines: Vec<String> = left.err().map(|error| error.to_string()).into_iter().collect();
    lines.extend(end_overdue(store, config));
    lines
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::record::tests::{lease, ledger};
    use super::*;
    use crate::inventory::ComputeMode;
    use crate::ledger::{Ceiling, ChangedComputeMode};

    fn server(key: &str, daemon: Option<Process>, idle_since: u64) -> Server {
        Server {
            key: ServerKey(key.into()),
            devices: vec![key.into()],
            daemon,
            state: ServerState::Serving,
            ceiling: Ceiling::NONE,
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
        held.servers = vec![
            Server { idle_since: None, ..server("GPU-1", Some(me), 0) },
            server("GPU-2", Some(me), now),
            server("GPU-3", Some(me), now - 100),
            server("GPU-4", Some(dead), now),
            server("GPU-5", None, now),
            server("0000000000000002", Some(me), now),
        ];
        held.compute_modes = ["GPU-1", "GPU-2", "GPU-9"]
            .map(|device| ChangedComputeMode { device: device.into(), found: ComputeMode::Default })
            .to_vec();
        held
    }

    fn due(held: &Ledger, config: &Config) -> Vec<String> {
        let line = |(key, errand): (ServerKey, Errand)| format!("{errand:?} {key}");
        errands(held, config).into_iter().map(line).collect()
    }

    #[test]
    fn daemons_without_a_lease_and_modes_without_a_daemon_have_to_go() {
        let (mut held, mut config) = (held(), Config::default());
        let all = ["GPU-2", "GPU-3", "GPU-4", "GPU-5", "0000000000000002", "GPU-9"];
        let all = all.map(|key| format!("Stop {key}"));
        assert_eq!(due(&held, &config), all, "nobody would end them");
        held.keeper = held.servers[3].daemon;
        assert_eq!(due(&held, &config), all, "whoever would has died");
        held.keeper = Some(Process::current().unwrap());
        let gone = ["Stop GPU-4", "Stop GPU-5", "Stop 0000000000000002", "Stop GPU-9"];
        assert_eq!(due(&held, &config), [&["Rest GPU-2", "Stop GPU-3"][..], &gone].concat());
        config.mps.idle = Some(Duration::from_secs(1000));
        assert_eq!(due(&held, &config), [&["Rest GPU-2"][..], &gone].concat());
        config.mps.idle = Some(Duration::ZERO);
        assert_eq!(due(&held, &config), all);
        (config.mps.idle, config.mps.stop_when_idle, held.keeper) = (None, Some(false), None);
        assert_eq!(due(&held, &config), [&["Rest GPU-2"][..], &gone].concat(), "without end");
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
            server: None,
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
