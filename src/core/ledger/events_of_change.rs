//! The events of a change of the ledger. They are made only here, because every change goes through
//! [`super::Store::update`].

use std::collections::HashMap;

use super::suspension::TICK_MILLISECONDS;
use super::{DaemonState, Drain, DynamicInstance, Init, Lease, LeaseId, Ledger, MpsDaemon, SuspendStep};
use crate::events::{Event, Kind};
use crate::share::{Isolation, MIB, Mode, Percent, parse_percent};
use strum::VariantArray as _;

/// The events between two ledgers, in an order that makes sense.
pub(super) fn events(before: &Ledger, after: &Ledger) -> Vec<Event> {
    // Leases keep their order, so most have not moved.
    let same = |(was, is): &(&Lease, &Lease)| {
        was.id == is.id && was.init.is_some() == is.init.is_some() && was.suspension == is.suspension
    };
    let same = before.leases.iter().zip(&after.leases).take_while(same).count();
    let (leases_before, leases_after) = (&before.leases[same..], &after.leases[same..]);
    let mut events = Vec::new();
    events.extend(ended_events(leases_before, leases_after));
    events.extend(daemon_events(before, after));
    events.extend(lease_events(leases_before, leases_after));
    events.extend(mig_events(before, after));
    let drained = |kind, device: &String| {
        let drain = if kind == Kind::Drained { after.drain_of(device) } else { None };
        let text = drain.map(Drain::words).unwrap_or_default();
        Event { devices: vec![device.clone()], text, ..Event::now(kind) }
    };
    events.extend(missing(&after.drained, &before.drained).map(|device| drained(Kind::Drained, device)));
    events.extend(missing(&before.drained, &after.drained).map(|device| drained(Kind::Undrained, device)));
    events
}

/// The items of `all` that are not among `known`.
fn missing<'a, T: PartialEq>(all: &'a [T], known: &'a [T]) -> impl Iterator<Item = &'a T> {
    all.iter().filter(move |one| !known.contains(one))
}

/// The ledger was lost and rebuilt, with so many leases.
pub(super) fn rebuilt_event(ledger: &Ledger, why: &str) -> Event {
    let text = format!("{why}; made anew with {} leases", ledger.leases.len());
    Event { text, ..Event::now(Kind::LedgerRebuilt) }
}

/// An event of `lease`.
pub fn lease_event(kind: Kind, lease: &Lease) -> Event {
    Event {
        uid: lease.container.uid,
        container_id: lease.container.name().into_owned(),
        lease: lease.id.to_string(),
        owner: lease.claimed_owner.clone().unwrap_or_default(),
        devices: lease.devices.clone(),
        daemon: lease.daemon.as_ref().map(ToString::to_string).unwrap_or_default(),
        ..Event::now(kind)
    }
}

/// `lease` was taken, now.
pub fn taken_event(lease: &Lease) -> Event {
    Event { text: Booked::of(lease).text(), ..lease_event(Kind::LeaseTaken, lease) }
}

/// The leases by their ids: to look for each in a list of all takes too long for hundreds.
fn by_id(leases: &[Lease]) -> HashMap<&LeaseId, &Lease> {
    leases.iter().map(|lease| (&lease.id, lease)).collect()
}

fn ended_events(before: &[Lease], after: &[Lease]) -> impl Iterator<Item = Event> {
    let left = by_id(after);
    before.iter().filter(move |lease| !left.contains_key(&lease.id)).map(|lease| {
        let held = crate::process::epoch_seconds().checked_sub(lease.since);
        // The first process of one that ran for a moment may not be in the lease. Its runtime has a record all the same.
        let ran = lease.init.is_some() || lease.container.record.symlink_metadata().is_ok();
        Event {
            took_ms: held.map(|seconds| seconds.saturating_mul(1000)),
            text: if ran { "" } else { "its container never ran" }.to_owned(),
            ..lease_event(Kind::LeaseEnded, lease)
        }
    })
}

fn lease_events(before: &[Lease], after: &[Lease]) -> impl Iterator<Item = Event> {
    let known = by_id(before);
    after.iter().flat_map(move |lease| {
        let was = known.get(&lease.id);
        let taken = was.is_none().then(|| {
            let event = taken_event(lease);
            // The container's wait for room. A lease that a rebuild found has a process, and no wait is known.
            let waited = since_owners_start(lease, event.uptime_ms).filter(|_| lease.init.is_none());
            Event { took_ms: waited, ..event }
        });
        let was_bound = was.is_some_and(|was| was.init.is_some());
        let bound = lease.init.as_ref().filter(|_| !was_bound).map(|Init { process, .. }| {
            // The kernel knows when it started.
            let took_ms = since_owners_start(lease, process.start_time.saturating_mul(TICK_MILLISECONDS));
            let text = format!("first process {}", process.pid);
            Event { took_ms, text, ..lease_event(Kind::LeaseBound, lease) }
        });
        taken.into_iter().chain(bound).chain(was.and_then(|was| suspend_event(was, lease)))
    })
}

/// Its GPU state was put into host memory, is back from there, or is on another device. An undone step is reported by who undid
/// it.
fn suspend_event(was: &Lease, is: &Lease) -> Option<Event> {
    let before = was.suspension.as_ref()?;
    let kind = match (before.step, is.suspension.as_ref().map(|own| own.step)) {
        (SuspendStep::Suspending, Some(SuspendStep::Suspended)) => Kind::Suspended,
        (_, None) if was.destination().is_some_and(|device| is.devices == [device]) => Kind::Moved,
        (SuspendStep::Resuming, None) if was.destination().is_none() => Kind::Resumed,
        _ => return None,
    };
    let event = lease_event(kind, is);
    let took_ms = event.uptime_ms.checked_sub(before.since_ms);
    let from = if kind == Kind::Moved { format!(" from {}", was.devices[0]) } else { String::new() };
    let makes_room = before.on_demand && kind == Kind::Suspended;
    let why = if makes_room { ", to make room for another container" } else { "" };
    Some(Event { took_ms, text: format!("{} MiB{from}{why}", before.bytes() >> 20), ..event })
}

/// Milliseconds from the start of the lease's owner, the process that takes it, to `then`; `None` for a hook's owner, a
/// service that may have run for days. A user's owner has just been started.
fn since_owners_start(lease: &Lease, then: u64) -> Option<u64> {
    let start = lease.owner.start_time.saturating_mul(TICK_MILLISECONDS);
    then.checked_sub(start).filter(|_| lease.bind_by.is_none() || lease.brokered)
}

/// What a lease books of each of its devices, as the event of its taking tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Booked {
    /// How they are shared.
    pub mode: Mode,
    /// Whether its MPS server is its own.
    pub isolation: Isolation,
    /// Its limit of the SMs.
    pub sm: Option<Percent>,
    /// Its limit of the memory.
    pub memory_bytes: Option<u64>,
    /// The job of Slurm's in which its container runs: it is booked with that job's lease.
    pub job: Option<u64>,
}

impl Booked {
    /// By `lease`.
    pub fn of(lease: &Lease) -> Self {
        let Lease { mode, isolation, sm, memory_bytes, .. } = *lease;
        let job = lease.job.as_ref().filter(|_| lease.within.is_some()).map(|job| job.id);
        Self { mode, isolation, sm, memory_bytes, job }
    }

    fn text(&self) -> String {
        let mut words = vec![self.mode.to_string()];
        words.extend(self.sm.map(|sm| format!("sm={sm}")));
        words.extend(self.memory_bytes.map(|bytes| format!("memory={}MiB", bytes / MIB)));
        words.extend(self.job.map(|job| format!("job={job}")));
        words.join(" ")
    }

    /// What the event of a taking tells; `None`: it is none.
    pub fn of_event(event: &Event) -> Option<Self> {
        let (mode, words) = event.text.split_once(' ').unwrap_or((&event.text, ""));
        let mode = *Mode::VARIANTS.iter().find(|known| <&str>::from(*known) == mode)?;
        let value = |key: &str| words.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        let memory = value("memory").and_then(|text| text.strip_suffix("MiB")?.parse::<u64>().ok());
        let own_server = !event.lease.is_empty() && event.daemon == event.lease;
        Some(Self {
            mode,
            isolation: if own_server { Isolation::Dedicated } else { Isolation::Shared },
            sm: value("sm").and_then(|sm| parse_percent(&format!("{sm}%")).ok()),
            memory_bytes: memory.map(|mebibytes| mebibytes.saturating_mul(MIB)),
            job: value("job").and_then(|job| job.parse().ok()),
        })
    }
}

fn daemon_events(before: &Ledger, after: &Ledger) -> Vec<Event> {
    use DaemonState::{Down, Fault, Serving, Starting};
    let event = |kind, daemon: &MpsDaemon, text: &str| Event {
        devices: daemon.devices.clone(),
        daemon: daemon.key.to_string(),
        text: text.to_owned(),
        ..Event::now(kind)
    };
    let find = |ledger: &Ledger, daemon: &MpsDaemon| {
        ledger.daemons.iter().find(|other| other.key == daemon.key).map(|other| other.state)
    };
    let stopped = before.daemons.iter().filter(|daemon| find(after, daemon).is_none());
    let mut events: Vec<Event> = stopped.map(|daemon| event(Kind::MpsStopped, daemon, "")).collect();
    for daemon in &after.daemons {
        let (kind, text) = match (find(before, daemon), daemon.state) {
            // One at fault did not answer, and does again.
            (Some(Serving | Fault), Serving) | (Some(Fault), Fault) | (Some(Down), Down) => continue,
            (_, Serving) if after.on_daemon(&daemon.key).any(|lease| lease.init.is_some()) => {
                (Kind::MpsRestarted, "")
            }
            (_, Serving) => (Kind::MpsStarted, ""),
            (Some(Serving), Starting) => (Kind::MpsFailed, "it had ended while leases needed it"),
            (_, Fault) => (Kind::MpsFailed, "it does not answer"),
            (_, Down) => (Kind::MpsFailed, "it does not run"),
            _ => continue,
        };
        events.push(event(kind, daemon, text));
    }
    events
}

fn mig_events(before: &Ledger, after: &Ledger) -> Vec<Event> {
    let made = |ledger: &Ledger| -> Vec<(Vec<String>, String)> {
        let known =
            |made: &DynamicInstance| Some((vec![made.gpu.clone(), made.uuid.clone()?], made.name.clone()));
        ledger.mig.dynamic_instances.iter().filter_map(known).collect()
    };
    let (old, new) = (made(before), made(after));
    let event = |kind, (devices, profile): &(Vec<String>, String)| Event {
        devices: devices.clone(),
        text: profile.clone(),
        ..Event::now(kind)
    };
    let mut events: Vec<Event> = missing(&old, &new).map(|made| event(Kind::MigDestroyed, made)).collect();
    events.extend(missing(&new, &old).map(|made| event(Kind::MigCreated, made)));
    let change = before.mig.under_way.as_ref().filter(|change| !change.gpus.is_empty());
    if let Some(change) = change.filter(|_| after.mig.count > before.mig.count) {
        events.push(Event { devices: change.gpus.clone(), ..Event::now(Kind::MigChanged) });
    }
    events
}

#[cfg(test)]
mod tests {
    use super::super::DaemonState::{Down, Fault, Serving, Starting};
    use super::super::fixture::lease;
    use super::super::{DaemonKey, DefaultLimits, SuspendedProcess, Suspension};
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
        events(before, after).iter().map(|event| event.kind.into()).collect()
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
        let event = &events(&taken, &bound)[0];
        assert_eq!((event.took_ms, event.lease.as_str()), (Some(120), "0000000000000001"));
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
    fn a_suspended_or_resumed_lease_is_reported_with_its_size_and_time() {
        let at = |step| {
            let owner = Process { pid: 1, start_time: 1 };
            let processes = vec![SuspendedProcess { process: owner, bytes: 5 << 20 }];
            let own = Suspension { step, owner, processes, since_ms: 0, on_demand: false };
            ledger(vec![Lease { suspension: Some(own), ..bound_lease(1) }])
        };
        let (on_gpu, steps) =
            (ledger(vec![bound_lease(1)]), [SuspendStep::Suspending, SuspendStep::Suspended]);
        let [going, out] = steps.map(at);
        let coming = at(SuspendStep::Resuming);
        assert_eq!(kinds(&on_gpu, &going), [""; 0]);
        assert_eq!((kinds(&going, &out), kinds(&out, &coming)), (vec!["suspended"], vec![]));
        assert_eq!((kinds(&coming, &on_gpu), kinds(&going, &on_gpu)), (vec!["resumed"], vec![]));
        let event = &events(&going, &out)[0];
        assert_eq!((event.text.as_str(), event.took_ms), ("5 MiB", Some(event.uptime_ms)));
        let on = |before: &Ledger, devices: &[&str]| {
            let devices = devices.iter().map(|&device| device.to_owned()).collect();
            ledger(vec![Lease { devices, ..before.leases[0].clone() }])
        };
        let (moving, there, back) =
            (on(&coming, &[GPU, "GPU-b"]), on(&on_gpu, &["GPU-b"]), on(&on_gpu, &[GPU]));
        assert_eq!((kinds(&moving, &there), kinds(&moving, &back)), (vec!["moved"], vec![]));
        assert_eq!(events(&moving, &there)[0].text, format!("5 MiB from {GPU}"));
    }

    #[test]
    fn changes_behind_unchanged_leases_are_reported() {
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
    fn the_event_of_a_taking_has_the_booking() {
        let mut held = lease(1, GPU);
        let emitted = |held: &Lease| {
            let event = events(&ledger(Vec::new()), &ledger(vec![held.clone()])).remove(0);
            (event.text.clone(), event.owner.clone(), Booked::of_event(&event).unwrap())
        };
        assert_eq!(emitted(&held), ("time-slice".into(), String::new(), Booked::of(&held)));
        (held.mode, held.sm, held.memory_bytes) = (Mode::Mps, parse_percent("12.5").ok(), Some(8 << 30));
        held.claimed_owner = Some("team-a".to_owned());
        assert_eq!(emitted(&held), ("mps sm=12.5 memory=8192MiB".into(), "team-a".into(), Booked::of(&held)));
        (held.isolation, held.daemon) = (Isolation::Dedicated, Some(DaemonKey(held.id.to_string())));
        held.job = Some(super::super::Job { id: 6, step: None, uid: 1000, cgroup_inode: 1 });
        assert_eq!(emitted(&held).2.job, None, "the job's own lease");
        held.within = Some(held.id.clone());
        assert_eq!(
            emitted(&held),
            ("mps sm=12.5 memory=8192MiB job=6".into(), "team-a".into(), Booked::of(&held))
        );
        for other in ["", "mps\u{1b}", "first process 7"] {
            let event = Event { text: other.to_owned(), ..Event::now(Kind::LeaseTaken) };
            assert_eq!(Booked::of_event(&event), None, "{other}");
        }
        let odd = Event {
            text: "mps sm=1e9 memory=99999999999999999999MiB".into(),
            ..Event::now(Kind::LeaseTaken)
        };
        let booked = Booked::of_event(&odd).unwrap();
        assert_eq!((booked.sm, booked.memory_bytes), (None, None));
    }

    #[test]
    fn drains_and_mig_changes_are_reported() {
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
