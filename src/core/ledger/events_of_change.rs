//! The events of a change of the ledger. They are made only here, because every change goes through
//! [`super::Store::update`].

use std::collections::HashMap;

use super::{DaemonState, Init, Lease, LeaseId, Ledger, MpsDaemon};
use crate::events::{Event, Kind};

/// Clock ticks a second of a process's start time (proc(5); `USER_HZ` is 100 on all of sublet's architectures).
const TICKS_MILLISECONDS: u64 = 10;

/// The events between two ledgers, in an order that makes sense.
pub(super) fn events(before: &Ledger, after: &Ledger) -> Vec<Event> {
    let mut events = Vec::new();
    let (leases_before, leases_after) = skip_equal(&before.leases, &after.leases);
    events.extend(ended_events(leases_before, leases_after));
    events.extend(daemon_events(before, after));
    events.extend(lease_events(leases_before, leases_after));
    events.extend(mig_events(before, after));
    events.extend(drain_events(before, after));
    events
}

/// The ledger was lost and rebuilt, with so many leases.
pub(super) fn rebuilt_event(ledger: &Ledger, why: &str) -> Event {
    let text = format!("{why}; made anew with {} leases", ledger.leases.len());
    Event { text, ..Event::now(Kind::LedgerRebuilt) }
}

fn lease_event(kind: Kind, lease: &Lease) -> Event {
    Event {
        uid: lease.container.uid,
        container_id: lease.container.name().into_owned(),
        lease: lease.id.to_string(),
        devices: lease.devices.clone(),
        daemon: lease.daemon.as_ref().map(ToString::to_string).unwrap_or_default(),
        ..Event::now(kind)
    }
}

/// Both lists behind their common beginning: leases keep their order, so most have not moved.
fn skip_equal<'a>(before: &'a [Lease], after: &'a [Lease]) -> (&'a [Lease], &'a [Lease]) {
    let same = |(was, is): &(&Lease, &Lease)| was.id == is.id && was.init.is_some() == is.init.is_some();
    let same = before.iter().zip(after).take_while(same).count();
    (&before[same..], &after[same..])
}

/// The leases by their ids: to look for each in a list of all takes too long for hundreds.
fn by_id(leases: &[Lease]) -> HashMap<&LeaseId, &Lease> {
    leases.iter().map(|lease| (&lease.id, lease)).collect()
}

fn ended_events(before: &[Lease], after: &[Lease]) -> impl Iterator<Item = Event> {
    let left = by_id(after);
    let gone = before.iter().filter(move |lease| !left.contains_key(&lease.id));
    gone.map(|lease| {
        let held = crate::process::epoch_seconds().checked_sub(lease.since);
        // The first process of one that ran for a moment may not be in the lease. Its runtime has a record all the same.
        let ran = lease.init.is_some() || lease.container.record.symlink_metadata().is_ok();
        let text = if ran { "" } else { "its container never ran" };
        Event {
            took_ms: held.map(|seconds| seconds.saturating_mul(1000)),
            text: text.to_owned(),
            ..lease_event(Kind::LeaseEnded, lease)
        }
    })
}

fn lease_events(before: &[Lease], after: &[Lease]) -> impl Iterator<Item = Event> {
    let known = by_id(before);
    after.iter().flat_map(move |lease| {
        let was = known.get(&lease.id);
        let taken = was.is_none().then(|| taken_event(lease));
        let was_bound = was.is_some_and(|was| was.init.is_some());
        let bound = lease.init.as_ref().filter(|_| !was_bound).map(|init| bound_event(lease, init));
        taken.into_iter().chain(bound)
    })
}

/// How long it took is the container's wait for a place. A lease that a rebuild found has a process, and no wait is known.
fn taken_event(lease: &Lease) -> Event {
    let event = lease_event(Kind::LeaseTaken, lease);
    let waited = since_owners_start(lease, event.uptime_ms).filter(|_| lease.init.is_none());
    Event { took_ms: waited, text: share(lease), ..event }
}

/// The kernel knows when the container's first process started.
fn bound_event(lease: &Lease, init: &Init) -> Event {
    let started = init.process.start_time.saturating_mul(TICKS_MILLISECONDS);
    let text = format!("first process {}", init.process.pid);
    Event { took_ms: since_owners_start(lease, started), text, ..lease_event(Kind::LeaseBound, lease) }
}

/// Milliseconds from the start of the lease's owner, the process that takes it, to `then`; `None` for a hook's owner, a
/// service that may have run for days. A user's owner has just been started.
fn since_owners_start(lease: &Lease, then: u64) -> Option<u64> {
    let start = lease.owner.start_time.saturating_mul(TICKS_MILLISECONDS);
    then.checked_sub(start).filter(|_| lease.bind_by.is_none() || lease.brokered)
}

/// Its mode and its limits.
fn share(lease: &Lease) -> String {
    let mut words = vec![lease.mode.to_string()];
    words.extend(lease.sm.map(|sm| format!("sm={sm}")));
    words.extend(lease.memory_bytes.map(|bytes| format!("memory={}MiB", bytes >> 20)));
    words.join(" ")
}

fn daemon_events(before: &Ledger, after: &Ledger) -> Vec<Event> {
    let find = |ledger: &'_ Ledger, daemon: &MpsDaemon| {
        ledger.daemons.iter().find(|other| other.key == daemon.key).cloned()
    };
    let mut events = Vec::new();
    for daemon in &before.daemons {
        if find(after, daemon).is_none() {
            events.push(daemon_event(Kind::MpsStopped, daemon, ""));
        }
    }
    for daemon in &after.daemons {
        let was = find(before, daemon);
        events.extend(change_event(was.as_ref(), daemon, after));
    }
    events
}

fn change_event(was: Option<&MpsDaemon>, daemon: &MpsDaemon, ledger: &Ledger) -> Option<Event> {
    let state = was.map(|was| was.state);
    match daemon.state {
        DaemonState::Serving if state == Some(DaemonState::Serving) => None,
        // It did not answer, and does again.
        DaemonState::Serving if state == Some(DaemonState::Fault) => None,
        DaemonState::Serving => {
            let again = ledger.on_daemon(&daemon.key).any(|lease| lease.init.is_some());
            let kind = if again { Kind::MpsRestarted } else { Kind::MpsStarted };
            Some(daemon_event(kind, daemon, ""))
        }
        DaemonState::Starting if state == Some(DaemonState::Serving) => {
            Some(daemon_event(Kind::MpsFailed, daemon, "it had ended while leases needed it"))
        }
        DaemonState::Fault if state != Some(DaemonState::Fault) => {
            Some(daemon_event(Kind::MpsFailed, daemon, "it does not answer"))
        }
        DaemonState::Down if state != Some(DaemonState::Down) => {
            Some(daemon_event(Kind::MpsFailed, daemon, "it does not run"))
        }
        _ => None,
    }
}

fn daemon_event(kind: Kind, daemon: &MpsDaemon, text: &str) -> Event {
    Event {
        devices: daemon.devices.clone(),
        daemon: daemon.key.to_string(),
        text: text.to_owned(),
        ..Event::now(kind)
    }
}

fn mig_events(before: &Ledger, after: &Ledger) -> Vec<Event> {
    let made = |ledger: &Ledger| -> Vec<(String, String, String)> {
        let known = ledger.mig.dynamic_instances.iter();
        known.filter_map(|made| Some((made.uuid.clone()?, made.gpu.clone(), made.name.clone()))).collect()
    };
    let (old, new) = (made(before), made(after));
    let event = |kind, (uuid, gpu, profile): &(String, String, String)| Event {
        devices: vec![gpu.clone(), uuid.clone()],
        text: profile.clone(),
        ..Event::now(kind)
    };
    let mut events: Vec<Event> =
        old.iter().filter(|made| !new.contains(made)).map(|made| event(Kind::MigDestroyed, made)).collect();
    events.extend(new.iter().filter(|made| !old.contains(made)).map(|made| event(Kind::MigCreated, made)));
    let change = before.mig.under_way.as_ref().filter(|change| !change.gpus.is_empty());
    if let Some(change) = change.filter(|_| after.mig.count > before.mig.count) {
        events.push(Event { devices: change.gpus.clone(), ..Event::now(Kind::MigChanged) });
    }
    events
}

fn drain_events(before: &Ledger, after: &Ledger) -> impl Iterator<Item = Event> {
    let event = |kind, device: &String| Event { devices: vec![device.clone()], ..Event::now(kind) };
    let new = after.drained.iter().filter(|device| !before.drained.contains(device));
    let old = before.drained.iter().filter(|device| !after.drained.contains(device));
    new.map(move |device| event(Kind::Drained, device))
        .chain(old.map(move |device| event(Kind::Undrained, device)))
}

#[cfg(test)]
mod tests {
    use super::super::DaemonState::{Down, Fault, Serving, Starting};
    use super::super::fixture::lease;
    use super::super::{DaemonKey, DefaultLimits};
    use super::*;
    use crate::process::Process;

    const GPU: &str = "GPU-1";

    fn ledger(leases: Vec<Lease>) -> Ledger {
        Ledger { leases, ..Ledger::empty("boot") }
    }

    fn daemon(state: DaemonState) -> MpsDaemon {
        MpsDaemon {
            key: DaemonKey(GPU.to_owned()),
            devices: vec![GPU.to_owned()],
            process: None,
            state,
            default_limits: DefaultLimits::default(),
            answered_at: 0,
            idle_since: None,
            mode_left: false,
        }
    }

    fn kinds(before: &Ledger, after: &Ledger) -> Vec<&'static str> {
        events(before, after).iter().map(|event| event.kind.as_str()).collect()
    }

    fn bound_lease(number: u64) -> Lease {
        let owner = Process { pid: 1, start_time: 1000 };
        let init = Init {
            process: Process { pid: 2, start_time: 1012 },
            pid_namespace: 0,
            cgroup: None,
            cgroup_inode: None,
        };
        Lease { owner, init: Some(init), ..lease(number, GPU) }
    }

    #[test]
    fn a_lease_is_taken_bound_and_ended_once_each() {
        let (none, taken) = (ledger(Vec::new()), ledger(vec![lease(1, GPU)]));
        let bound = ledger(vec![bound_lease(1)]);
        assert_eq!(kinds(&none, &taken), ["lease-taken"]);
        assert_eq!(kinds(&taken, &bound), ["lease-bound"]);
        assert_eq!(kinds(&bound, &bound), [""; 0]);
        assert_eq!(kinds(&bound, &none), ["lease-ended"]);
        assert_eq!(kinds(&none, &bound), ["lease-taken", "lease-bound"], "found by a rebuild");
        let told = &events(&taken, &bound)[0];
        assert_eq!((told.took_ms, told.lease.as_str()), (Some(120), "0000000000000001"));
        assert_eq!(events(&taken, &none)[0].text, "its container never ran");
        let dir = tempfile::tempdir().unwrap();
        let mut unnoticed = lease(1, GPU);
        unnoticed.container.record = dir.path().to_owned();
        assert_eq!(events(&ledger(vec![unnoticed]), &none)[0].text, "");
        let waited = |after: &Ledger| events(&none, after)[0].took_ms;
        assert_eq!((waited(&taken).is_some(), waited(&bound)), (true, None), "a rebuild knows no wait");
        let mut by_hook = lease(2, GPU);
        by_hook.bind_by = Some(1);
        assert_eq!(waited(&ledger(vec![by_hook])), None, "its owner is older than its request");
    }

    #[test]
    fn what_happened_behind_leases_that_stay_as_they_are_is_told() {
        let before = ledger(vec![lease(1, GPU), bound_lease(2), lease(3, GPU), lease(4, GPU)]);
        let after = ledger(vec![lease(1, GPU), lease(3, GPU), bound_lease(4), lease(5, GPU)]);
        assert_eq!(kinds(&before, &after), ["lease-ended", "lease-bound", "lease-taken"]);
        let behind = |mut leases: Vec<Lease>| {
            leases.insert(0, bound_lease(9));
            ledger(leases)
        };
        assert_eq!(kinds(&behind(vec![lease(1, GPU)]), &behind(vec![bound_lease(1)])), ["lease-bound"]);
        assert_eq!(kinds(&behind(vec![]), &behind(vec![lease(1, GPU)])), ["lease-taken"]);
    }

    #[test]
    fn a_daemon_that_serves_under_a_running_container_was_restarted() {
        let with = |state: Option<DaemonState>, leases: Vec<Lease>| {
            let leases =
                leases.into_iter().map(|lease| Lease { daemon: Some(DaemonKey(GPU.into())), ..lease });
            let ledger = ledger(leases.collect());
            Ledger { daemons: state.map(daemon).into_iter().collect(), ..ledger }
        };
        let pending = || vec![lease(1, GPU)];
        let running = || vec![bound_lease(1)];
        let step = |from, to, leases: fn() -> Vec<Lease>| kinds(&with(from, leases()), &with(to, leases()));
        assert_eq!(step(None, Some(Starting), pending), [""; 0]);
        assert_eq!(step(Some(Starting), Some(Serving), pending), ["mps-started"]);
        assert_eq!(step(Some(Serving), Some(Starting), running), ["mps-failed"]);
        assert_eq!(step(Some(Starting), Some(Serving), running), ["mps-restarted"]);
        assert_eq!(step(Some(Serving), Some(Fault), running), ["mps-failed"]);
        assert_eq!(step(Some(Fault), Some(Serving), running), [""; 0]);
        assert_eq!(step(Some(Starting), Some(Down), pending), ["mps-failed"]);
        assert_eq!(step(Some(Serving), None, running), ["mps-stopped"]);
    }

    #[test]
    fn drains_and_mig_changes_are_told() {
        let none = ledger(Vec::new());
        let drained = Ledger { drained: vec![GPU.into()], ..none.clone() };
        assert_eq!(kinds(&none, &drained), ["drained"]);
        assert_eq!(kinds(&drained, &none), ["undrained"]);
        let me = Process::current().unwrap();
        let mut changing = none.clone();
        changing.begin_mig(super::super::MigChange { gpus: vec![GPU.into()], owner: me }).unwrap();
        let mut changed = changing.clone();
        changed.end_mig(me, true);
        assert_eq!((kinds(&none, &changing), kinds(&changing, &changed)), (vec![], vec!["mig-changed"]));
        let mut unchanged = changing.clone();
        unchanged.end_mig(me, false);
        assert_eq!(kinds(&changing, &unchanged), [""; 0]);
    }
}
