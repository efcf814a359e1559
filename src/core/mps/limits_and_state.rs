//! The ledger's record of a daemon and changes of it, and the default limits that its leases need.

use super::MpsError;
use super::control::{AskError, Control, list_servers};
use super::dirs::DaemonLock;
use crate::config::Config;
use crate::inventory::{self, Device};
use crate::ledger::{
    DaemonKey, DaemonState, DefaultLimits, Lease, Ledger, MpsDaemon, Scan, Store, read_up_to,
};
use crate::process::{Condition, Process, epoch_seconds, live_proc_dir_of, sockets};
use crate::text::safe;

/// Whether the recorded process of `daemon` still runs.
pub fn is_alive(daemon: &MpsDaemon) -> bool {
    daemon.process.is_some_and(|daemon| daemon.is_alive())
}

/// Whether it is recorded as one that has served, and its process still runs.
pub fn runs(daemon: &MpsDaemon) -> bool {
    matches!(daemon.state, DaemonState::Serving | DaemonState::Fault) && is_alive(daemon)
}

/// Changes the ledger. Leases that this frees may leave idle servers, which [`super::settle`] handles.
pub fn change<T>(
    store: &Store,
    change: impl FnOnce(&mut Ledger) -> Result<T, MpsError>,
) -> Result<T, MpsError> {
    let (changed, freed) = store.update(change)?;
    for lease in freed {
        tracing::debug!("lease {} was found gone", lease.id);
    }
    changed
}

/// Changes the record of `key`, if there is one.
pub fn note(store: &Store, key: &DaemonKey, change: impl FnOnce(&mut MpsDaemon)) -> Result<(), MpsError> {
    store.change_with_scan(Scan::Brief, |ledger| {
        if let Some(daemon) = ledger.daemons.iter_mut().find(|daemon| daemon.key == *key) {
            change(daemon);
        }
    })?;
    Ok(())
}

/// Records that the daemon has just answered. This does not end a change of its default limits ([`adjust`]).
pub fn note_answer(store: &Store, daemon: &MpsDaemon) -> Result<(), MpsError> {
    let process = daemon.process;
    note(store, &daemon.key, |daemon| {
        if daemon.process == process {
            daemon.state = DaemonState::Serving;
            if daemon.answered_at != 0 {
                daemon.answered_at = epoch_seconds();
            }
        }
    })
}

/// Handles a failed command: a silent daemon is recorded with a fault and named in the error.
pub fn note_failure(store: &Store, daemon: &MpsDaemon, error: AskError) -> MpsError {
    if matches!(error, AskError::Silent) {
        if let Err(error) = note(store, &daemon.key, |daemon| daemon.state = DaemonState::Fault) {
            return error;
        }
        let ledger = store.read().ok();
        return silent(daemon.devices.join(", "), &daemon.key, daemon.process, ledger.as_ref());
    }
    refused(&daemon.key, error)
}

/// The error for a daemon of `device` that does not answer.
pub(super) fn silent(
    device: String,
    key: &DaemonKey,
    process: Option<Process>,
    ledger: Option<&Ledger>,
) -> MpsError {
    let waits = process.filter(|daemon| daemon.condition() != Condition::Stopped).zip(ledger);
    let kept_by = waits.map(|(daemon, ledger)| find_connected(daemon, key, ledger)).unwrap_or_default();
    MpsError::Silent { device, key: key.to_string(), pid: process.map_or(0, |daemon| daemon.pid), kept_by }
}

/// How much of one namespace's list of sockets is read at most, in bytes.
const LONGEST_LIST: u64 = 16 << 20;

/// The names of the containers of `key` that have a connection to `daemon`, as /proc shows them to root. CUDA programs keep
/// none, so it is one that the daemon waits for, or a control program's (docs/evidence/2026-11-25-mps-control.md). A socket
/// that accept(2) made is in the network namespace of who connected; so containers without one of their own are not found.
fn find_connected(daemon: Process, key: &DaemonKey, ledger: &Ledger) -> Vec<String> {
    let (own, host) = (sockets::inodes(daemon.pid), sockets::network(daemon.pid));
    // `/proc/net/unix` (proc(5)): the inode is the seventh column.
    let inode = |line: &str| line.split_whitespace().nth(6)?.parse::<u64>().ok();
    let has_one = |lease: &&Lease| {
        let Some(pid) = lease.init.as_ref().map(|init| init.process.pid) else { return false };
        let list = || read_up_to(&live_proc_dir_of(pid).join("net/unix"), LONGEST_LIST).ok().flatten();
        let list = if sockets::network(pid) == host { None } else { list() }.unwrap_or_default();
        String::from_utf8_lossy(&list).lines().filter_map(inode).any(|inode| own.contains(&inode))
    };
    ledger.on_daemon(key).filter(has_one).map(|lease| safe(&lease.container.name())).collect()
}

/// The error for a failed command to a daemon that should have answered.
pub fn refused(key: &DaemonKey, error: AskError) -> MpsError {
    match error {
        AskError::Refused { command, answer } => MpsError::Refused { key: key.to_string(), command, answer },
        AskError::Program(source) => {
            MpsError::Io { attempt: "cannot run nvidia-cuda-mps-control".into(), source }
        }
        AskError::Taken => MpsError::Taken { key: key.to_string() },
        AskError::Gone(_) | AskError::Silent => {
            MpsError::Unreachable { key: key.to_string(), why: error.to_string() }
        }
    }
}

/// Sets the default limits that the leases need now. The caller holds the daemon's lock. `answered` are the
/// limits that the daemon reports, if it was asked; they may be lower than recorded.
///
/// The record never says more than is in force: it is lowered before the daemon is changed and raised after that. So a
/// lease that is taken meanwhile and needs more sees this and waits for the lock. An `answered_at` of 0 means that a
/// change was begun. After a crash, the next process that needs the daemon does it again.
///
/// A daemon that is not recorded as serving, or whose process has ended, is left alone: its start sets its limits. A
/// daemon that a killed start left may listen in its directory, and no container can reach that.
///
/// # Errors
/// The ledger cannot be written, or the daemon does not accept the limits.
pub fn adjust(
    _held: &DaemonLock,
    key: &DaemonKey,
    answered: Option<DefaultLimits>,
    store: &Store,
    config: &Config,
) -> Result<(), MpsError> {
    let (begun, _) = store.change_with_scan(Scan::Brief, |ledger| begin_adjusting(ledger, key, answered))?;
    let Some((wanted, devices, daemon)) = begun else { return Ok(()) };
    // Their age does not change with the instances of other GPUs.
    let known = inventory::last(config)?;
    let control = Control::with_known_program(key, Some(&known), config)?;
    let old = daemon.devices.iter().any(|uuid| known.device(uuid).is_some_and(Device::is_before_volta));
    // GPUs before Volta have no default limits and refuse the command.
    let set = if old {
        control.default_limits().map(drop)
    } else {
        control.set_default_limits(wanted, devices, &daemon.process.map(list_servers).unwrap_or_default())
    };
    set.map_err(|error| note_failure(store, &daemon, error))?;
    note(store, key, |daemon| {
        daemon.default_limits = wanted;
        daemon.answered_at = epoch_seconds();
        daemon.state = DaemonState::Serving;
    })
}

/// Records that a change of the limits begins. Returns them, the number of devices and the record; `None`: nothing is to
/// be changed.
pub(crate) fn begin_adjusting(
    ledger: &mut Ledger,
    key: &DaemonKey,
    answered: Option<DefaultLimits>,
) -> Option<(DefaultLimits, usize, MpsDaemon)> {
    let wanted = ledger.wanted_default_limits(key)?;
    let daemon = ledger.daemons.iter_mut().find(|daemon| daemon.key == *key)?;
    daemon.default_limits =
        answered.map_or(daemon.default_limits, |limits| daemon.default_limits.and(limits));
    let is_current = daemon.default_limits == wanted && daemon.answered_at != 0;
    if !runs(daemon) || is_current && daemon.state == DaemonState::Serving {
        return None;
    }
    daemon.default_limits = daemon.default_limits.and(wanted);
    daemon.answered_at = 0;
    let daemon = daemon.clone();
    Some((wanted, ledger.devices_of(key), daemon))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::ledger::{Lease, LeaseState, fixture};
    use crate::process::Process;
    use crate::share::{Mode, Percent};

    pub(in crate::mps) fn lease(id: &str, key: &str, sm: Option<u32>) -> Lease {
        Lease {
            mode: Mode::Mps,
            daemon: Some(DaemonKey(key.into())),
            sm: sm.map(Percent::from_thousandths),
            state: LeaseState::Active,
            owner: Process { pid: 1, start_time: 1 },
            ..fixture::lease(u64::from_str_radix(id, 16).unwrap(), "GPU-1")
        }
    }

    pub(in crate::mps) fn ledger(leases: Vec<Lease>) -> Ledger {
        Ledger { leases, ..Ledger::empty("") }
    }

    /// Found by tests/model: a start was killed after it had launched its daemon, while another process waited for the
    /// lock to adjust the limits of the daemon before.
    #[test]
    fn limits_are_adjusted_only_on_a_daemon_that_serves() {
        let state = tempfile::tempdir().unwrap();
        let config = Config { state_dir: state.path().to_owned(), ..Config::default() };
        let (store, key) = (Store::open(state.path()).unwrap(), DaemonKey("GPU-1".into()));
        let me = Process::current().unwrap();
        let dead = Process { start_time: me.start_time + 1, ..me };
        let held = DaemonLock::take(&key, state.path(), std::time::Duration::ZERO).unwrap();
        for (daemon_state, process) in [
            (DaemonState::Starting, None),
            (DaemonState::Stopping, Some(me)),
            (DaemonState::Down, None),
            (DaemonState::Serving, Some(dead)),
        ] {
            let daemon = MpsDaemon {
                key: key.clone(),
                devices: vec!["GPU-1".into()],
                process,
                state: daemon_state,
                default_limits: DefaultLimits::NONE,
                answered_at: 1,
                idle_since: None,
                mode_left: false,
            };
            let leased = Lease { owner: me, ..lease("0000000000000001", "GPU-1", Some(50_000)) };
            let set = |ledger: &mut Ledger| {
                (ledger.leases, ledger.daemons) = (vec![leased], vec![daemon.clone()]);
            };
            store.change(set).unwrap();
            adjust(&held, &key, None, &store, &config).unwrap();
            assert_eq!(store.read().unwrap().daemons, [daemon]);
        }
    }
}
