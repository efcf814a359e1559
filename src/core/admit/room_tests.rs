use proptest::prelude::*;

use super::*;
use crate::ledger::fixture::lease;
use crate::ledger::{Container, LeaseState, SuspendedProcess};
use crate::place::fixture::{GIB, device, host, request};
use crate::process::Process;
use crate::request::Request;
use crate::share::{Memory, Mode, Suspend};

/// When containers came to the GPU, in milliseconds since boot.
const CAME: u64 = 1_000_000;

/// Milliseconds.
const AT_LEAST: u64 = 30_000;

fn id(n: u64) -> LeaseId {
    LeaseId::parse(&format!("{n:016x}")).unwrap()
}

fn me() -> Process {
    Process::current().unwrap()
}

/// It runs on the GPU of 100 GiB, with so many booked.
fn on_gpu(n: u64, gib: u64, suspend: Suspend) -> Lease {
    let (state, memory_bytes, resumed_ms) = (LeaseState::Active, Some(gib * GIB), Some(CAME));
    Lease { memory_bytes, suspend, resumed_ms, state, ..lease(n, "GPU-0") }
}

/// A start that waits.
fn start(n: u64, gib: u64) -> Waiter {
    let memory = Some(Memory::Bytes(gib * GIB));
    let asked = Request { memory, suspend: Suspend::Allow, ..request(Mode::TimeSlice) };
    let container = Container { id: format!("start-{n}"), ..Container::default() };
    Waiter::new(&id(n), &container, &asked, "no room", Some(me()))
}

fn ledger(leases: Vec<Lease>, waiters: Vec<Waiter>) -> Ledger {
    Ledger { leases, waiters, ..Ledger::empty("boot") }
}

/// Lease `n` is suspended for another container.
fn suspend(ledger: &mut Ledger, n: u64) {
    let bytes = ledger.lease(&id(n)).and_then(|lease| lease.memory_bytes).unwrap();
    ledger.begin_suspending(&id(n), me(), vec![SuspendedProcess { process: me(), bytes }], None).unwrap();
    ledger.note_on_demand(&id(n));
    assert!(ledger.end_suspended(&id(n), me()));
}

fn resume(ledger: &mut Ledger, n: u64, at_ms: u64) {
    ledger.begin_resuming(&id(n), me(), None).unwrap();
    assert!(ledger.end_resumed(&id(n), me(), "GPU-0"));
    ledger.lease_mut(&id(n)).unwrap().resumed_ms = Some(at_ms);
}

fn look(ledger: &Ledger, at_ms: u64, config: &Config) -> Room {
    let inventory = host(vec![device(0)]);
    look_by(None, ledger, (&inventory, at_ms, config))
}

/// Where each user has the policy `rule`.
fn look_by(
    rule: Option<&PolicyRule>,
    ledger: &Ledger,
    (inventory, at_ms, config): (&Inventory, u64, &Config),
) -> Room {
    Sight { inventory, ledger, config, at_ms, is_busy: &|_| Some(true), rule_of: &|_| rule.cloned() }
        .next_step()
}

fn step(ledger: &Ledger, at_ms: u64) -> Option<RoomStep> {
    look(ledger, at_ms, &Config::default()).step
}

fn suspend_for(n: u64, waiter: u64) -> RoomStep {
    RoomStep::Suspend { leases: vec![id(n)], waiter: id(waiter) }
}

#[test]
fn a_start_gets_the_room_of_one_that_allows_it_and_that_comes_back_afterwards() {
    let mut ledger = ledger(vec![on_gpu(1, 60, Suspend::Allow)], vec![start(2, 60)]);
    assert_eq!(step(&ledger, CAME + AT_LEAST - 1), None, "it has just come");
    assert_eq!(step(&ledger, CAME + AT_LEAST), Some(suspend_for(1, 2)));
    suspend(&mut ledger, 1);
    let room = look(&ledger, CAME + AT_LEAST, &Config::default());
    assert_eq!((room.step, room.placed), (None, vec![id(2)]), "the start is before it in the order");
    ledger.waiters.remove(0);
    ledger.leases.push(on_gpu(2, 60, Suspend::Allow));
    assert_eq!(step(&ledger, u64::MAX), None, "without turns it waits for the other's end");
    ledger.leases.pop();
    assert_eq!(step(&ledger, u64::MAX), Some(RoomStep::Resume(id(1))));
    resume(&mut ledger, 1, CAME);
    assert!(ledger.waiters.is_empty());
}

#[test]
fn no_container_goes_that_does_not_allow_it_or_whose_processes_are_elsewhere() {
    let never = ledger(vec![on_gpu(1, 60, Suspend::Never)], vec![start(2, 60)]);
    assert_eq!(step(&never, u64::MAX), None);
    let (inventory, config) = (host(vec![device(0)]), Config::default());
    let mut ledger = ledger(vec![on_gpu(1, 60, Suspend::Allow)], vec![start(2, 60)]);
    let (config, at_ms) = (&config, u64::MAX);
    let sight = Sight {
        inventory: &inventory,
        ledger: &ledger,
        config,
        at_ms,
        is_busy: &|_| None,
        rule_of: &|_| None,
    };
    assert_eq!(sight.next_step().step, None);
    ledger.back_off(&id(1), Duration::from_secs(30), "it is paused");
    assert_eq!(step(&ledger, u64::MAX), None);
}

#[test]
fn a_failed_resume_leaves_its_room_to_starts() {
    let mut ledger = ledger(vec![on_gpu(1, 60, Suspend::Allow)], vec![]);
    suspend(&mut ledger, 1);
    ledger.add_waiter(start(2, 60));
    assert_eq!(step(&ledger, u64::MAX), Some(RoomStep::Resume(id(1))));
    ledger.back_off(&id(1), Duration::from_secs(30), "it is paused");
    let room = look(&ledger, u64::MAX, &Config::default());
    assert_eq!((room.step, room.placed), (None, vec![id(2)]));
}

#[test]
fn who_was_suspended_first_comes_back_first_and_the_next_where_that_one_cannot() {
    let mut ledger = ledger(vec![on_gpu(1, 45, Suspend::Allow), on_gpu(2, 45, Suspend::Allow)], vec![]);
    suspend(&mut ledger, 1);
    suspend(&mut ledger, 2);
    ledger.leases.extend([on_gpu(3, 30, Suspend::Never), on_gpu(4, 60, Suspend::Never)]);
    assert_eq!(step(&ledger, u64::MAX), None);
    ledger.leases.pop();
    assert_eq!(step(&ledger, u64::MAX), Some(RoomStep::Resume(id(1))));
    let mut failed = ledger.clone();
    failed.back_off(&id(1), Duration::from_secs(30), "it is paused");
    assert_eq!(step(&failed, u64::MAX), Some(RoomStep::Resume(id(2))));
    resume(&mut ledger, 1, CAME);
    assert_eq!(step(&ledger, u64::MAX), None, "there was room for one");
}

#[test]
fn containers_take_turns_with_those_that_may_be_suspended() {
    let mut config = Config::default();
    config.suspend.turns = Duration::from_secs(60);
    let mut ledger = ledger(vec![on_gpu(1, 60, Suspend::Allow), on_gpu(2, 60, Suspend::Allow)], vec![]);
    suspend(&mut ledger, 1);
    let step = |ledger: &Ledger, at_ms| look(ledger, at_ms, &config).step;
    assert_eq!(step(&ledger, CAME + 59_999), None);
    assert_eq!(step(&ledger, CAME + 60_000), Some(suspend_for(2, 1)));
    suspend(&mut ledger, 2);
    assert_eq!(step(&ledger, CAME + 60_000), Some(RoomStep::Resume(id(1))));
    resume(&mut ledger, 1, CAME + 65_000);
    assert_eq!(step(&ledger, CAME + 124_999), None);
    assert_eq!(step(&ledger, CAME + 125_000), Some(suspend_for(1, 2)));
    ledger.lease_mut(&id(1)).unwrap().suspend = Suspend::Never;
    assert_eq!(step(&ledger, u64::MAX), None, "one that may not be suspended is never displaced");
    config.suspend.turns = Duration::from_secs(1);
    ledger.lease_mut(&id(1)).unwrap().suspend = Suspend::Allow;
    let short = look(&ledger, CAME + 65_000 + AT_LEAST - 1, &config).step;
    assert_eq!(short, None, "no turn is shorter than [suspend] at_least");
}

#[test]
fn only_commands_suspend_where_nothing_is_done_on_demand() {
    let mut config = Config::default();
    config.suspend.on_demand = false;
    let mut ledger = ledger(vec![on_gpu(1, 60, Suspend::Allow)], vec![start(2, 60)]);
    assert_eq!(look(&ledger, u64::MAX, &config), Room::default());
    // It was suspended before that was decided.
    suspend(&mut ledger, 1);
    ledger.waiters.remove(0);
    assert_eq!(look(&ledger, u64::MAX, &config).step, Some(RoomStep::Resume(id(1))));
}

#[test]
fn a_lease_that_a_command_suspended_waits_for_a_command() {
    let mut ledger = ledger(vec![on_gpu(1, 60, Suspend::Allow)], vec![]);
    ledger.begin_suspending(&id(1), me(), vec![], None).unwrap();
    assert!(ledger.end_suspended(&id(1), me()));
    assert_eq!((step(&ledger, u64::MAX), ledger.waiters.len()), (None, 0));
    assert_eq!(ledger.keep_suspended(&id(1)), None, "it is one of these");
    resume(&mut ledger, 1, CAME);
    suspend(&mut ledger, 1);
    assert_eq!((ledger.keep_suspended(&id(1)), ledger.waiters.len()), (Some(60 * GIB), 0));
    assert_eq!(step(&ledger, u64::MAX), None, "a command says that it stays there");
}

#[test]
fn who_waits_for_a_share_without_a_start_and_who_is_not_due_displace_nobody() {
    let mut waits = start(2, 60);
    waits.container = Container::default();
    let refused = Waiter::new(&id(3), &start(3, 1).container, &start(3, 60).request().unwrap(), "no", None);
    let mut ledger = ledger(vec![on_gpu(1, 60, Suspend::Allow)], vec![waits, refused]);
    assert_eq!(step(&ledger, u64::MAX), None);
    ledger.waiters[1].retry.as_mut().unwrap().confirmed = true;
    assert_eq!(step(&ledger, u64::MAX), Some(suspend_for(1, 3)), "Docker says that it is to be started");
}

#[test]
fn a_users_start_displaces_those_that_the_policy_allows() {
    let mut own = on_gpu(1, 60, Suspend::Allow);
    (own.brokered, own.container.uid) = (true, 1000);
    let roots = on_gpu(1, 60, Suspend::Allow);
    let step = |lease: &Lease, rule: &PolicyRule| {
        let mut waiter = start(2, 60);
        (waiter.container.uid, waiter.rule) = (1000, Some(rule.clone()));
        step(&ledger(vec![lease.clone()], vec![waiter]), u64::MAX)
    };
    let none = PolicyRule::default();
    let suspend = PolicyRule { suspend: true, ..none.clone() };
    let displaces = PolicyRule { displace: true, ..none.clone() };
    assert_eq!((step(&own, &none), step(&roots, &none)), (None, None));
    assert_eq!((step(&own, &suspend), step(&roots, &suspend)), (Some(suspend_for(1, 2)), None));
    assert_eq!((step(&own, &displaces), step(&roots, &displaces)), (None, Some(suspend_for(1, 2))));
    let few = PolicyRule { leases: Some(1), ..suspend };
    assert_eq!(step(&own, &few), None, "it may not hold a second lease");
}

#[test]
fn who_comes_back_displaces_those_that_a_start_of_its_users_would() {
    let mut config = Config::default();
    config.suspend.turns = Duration::from_secs(60);
    let inventory = host(vec![device(0)]);
    let of = |n: u64, uid: u32| {
        let mut lease = on_gpu(n, 60, Suspend::Allow);
        (lease.brokered, lease.container.uid) = (uid != 0, uid);
        lease
    };
    let displaces = |uid: u32, other: u32, rule: Option<&PolicyRule>| {
        let mut ledger = ledger(vec![of(1, uid), of(2, other)], vec![]);
        suspend(&mut ledger, 1);
        let step = look_by(rule, &ledger, (&inventory, CAME + 60_000, &config)).step;
        assert!(step.is_none() || step == Some(suspend_for(2, 1)), "{step:?}");
        step.is_some()
    };
    // The policy for its own, for another user's, and for root's.
    let by = |rule: Option<&PolicyRule>| [1000, 1001, 0].map(|other| displaces(1000, other, rule));
    let few = PolicyRule { leases: Some(2), ..PolicyRule::default() };
    assert_eq!(by(None), [false; 3], "its user may have no share any more");
    assert_eq!(by(Some(&few)), [false; 3]);
    let own = PolicyRule { suspend: true, ..few.clone() };
    assert_eq!(by(Some(&own)), [true, false, false], "both leases are counted already");
    let foreign = PolicyRule { displace: true, ..few };
    assert_eq!(by(Some(&foreign)), [false, true, true]);
    assert_eq!([1000, 0].map(|other| displaces(0, other, None)), [true; 2], "root has no policy");
    let mut ledger = ledger(vec![of(1, 1000), of(2, 0)], vec![]);
    suspend(&mut ledger, 1);
    let (is_busy, rule_of) = (&|_: &Lease| Some(true), &|_| unreachable!("nobody may go yet"));
    let at_ms = CAME + 59_999;
    let sight = Sight { inventory: &inventory, ledger: &ledger, config: &config, at_ms, is_busy, rule_of };
    assert_eq!(sight.next_step().step, None);
}

/// What happens next.
#[derive(Clone, Copy, Debug)]
enum Happens {
    /// A container asks for so many GiB, which may be suspended or not.
    Starts(u64, bool),
    /// The container at this place ends.
    Ends(usize),
    /// Seconds pass.
    Passes(u64),
}

fn happens() -> impl Strategy<Value = Happens> {
    prop_oneof![
        (1_u64..90, any::<bool>()).prop_map(|(gib, may)| Happens::Starts(gib, may)),
        (0_usize..4).prop_map(Happens::Ends),
        (1_u64..90).prop_map(Happens::Passes),
    ]
}

proptest! {
    /// Whatever starts and ends: nobody goes who does not allow it or has just come, no more is booked than there is, and in
    /// the end all that was suspended is back.
    #[test]
    fn all_that_goes_comes_back(all in prop::collection::vec(happens(), 1..30), turns in 0_u64..2) {
        let mut config = Config::default();
        config.suspend.turns = Duration::from_secs(turns * 40);
        let (mut ledger, mut now, mut number) = (ledger(vec![], vec![]), CAME, 0);
        let settle = |ledger: &mut Ledger, now: u64| {
            for _ in 0..50 {
                let Room { step, placed, .. } = look(ledger, now, &config);
                for waiter in placed {
                    let at = ledger.waiters.iter().position(|one| one.id == waiter).unwrap();
                    let asked = ledger.waiters.remove(at).request().unwrap();
                    let Some(Memory::Bytes(bytes)) = asked.memory else { unreachable!() };
                    let number = u64::from_str_radix(waiter.as_str(), 16).unwrap();
                    let new = on_gpu(number, bytes / GIB, asked.suspend);
                    ledger.leases.push(Lease { resumed_ms: Some(now), ..new });
                }
                match step {
                    Some(RoomStep::Resume(lease)) => {
                        resume(ledger, u64::from_str_radix(lease.as_str(), 16).unwrap(), now);
                    }
                    Some(RoomStep::Suspend { leases, .. }) => for lease in leases {
                        let held = ledger.lease(&lease).unwrap();
                        assert!(!held.suspend.is_never() && !held.is_suspended());
                        assert!(held.resumed_ms.unwrap() + AT_LEAST <= now, "it has just come");
                        suspend(ledger, u64::from_str_radix(lease.as_str(), 16).unwrap());
                    },
                    None => break,
                }
                let booked: u64 = ledger.leases.iter().filter_map(Lease::booked_memory).sum();
                assert!(booked <= 100 * GIB - config.limits.reserve);
            }
        };
        for one in all {
            match one {
                Happens::Starts(gib, may) => {
                    number += 1;
                    let mut waiter = start(number, gib);
                    let suspend = if may { Suspend::Allow } else { Suspend::Never };
                    let asked = Request { suspend, ..waiter.request().unwrap() };
                    // A share that may not be suspended has an MPS server here; its room is the same but for that.
                    waiter = Waiter::new(&waiter.id, &waiter.container, &asked, "no room", waiter.process);
                    ledger.add_waiter(waiter);
                }
                Happens::Ends(at) if at < ledger.leases.len() => {
                    let gone = ledger.leases.remove(at).id;
                    ledger.waiters.retain(|waiter| waiter.id != gone);
                }
                Happens::Ends(_) => {}
                Happens::Passes(seconds) => now += seconds * 1000,
            }
            settle(&mut ledger, now);
        }
        ledger.waiters.retain(|waiter| ledger.leases.iter().any(|lease| lease.id == waiter.id));
        while ledger.leases.iter().any(Lease::is_suspended) {
            let running = ledger.leases.iter().position(|lease| !lease.is_suspended());
            let gone = running.map(|at| ledger.leases.remove(at));
            let before = ledger.leases.iter().filter(|lease| lease.is_suspended()).count();
            now += 3_600_000;
            settle(&mut ledger, now);
            let after = ledger.leases.iter().filter(|lease| lease.is_suspended()).count();
            prop_assert!(after < before || gone.is_some(), "it never comes back: {ledger:?}");
        }
    }
}
