//! Who is served first, with plain values, and under random orders of requests and ends.

use std::num::NonZeroU32;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::config::PolicyRule;
use crate::ledger::{LeaseState, Retry};
use crate::place::accounts_tests::{any_request, assert_accounts, lease_of};
use crate::place::fixture::{device, host, request};
use crate::place::tests::{leased, ledger, mps};
use crate::share::{Devices, Mode, Selector};

fn id(n: u64) -> LeaseId {
    LeaseId::parse(&format!("{n:016x}")).unwrap()
}

fn container(n: u64) -> Container {
    Container { id: format!("c{n}"), ..Container::default() }
}

/// Container `n` waits, in this process.
fn waits(n: u64, wanted: &Request) -> Waiter {
    Waiter::new(&id(n), &container(n), wanted, "no room", Process::current().ok())
}

/// What container `n` gets that asks now, as when a lease is taken.
fn asks(n: u64, wanted: &Request, host: &Inventory, ledger: &Ledger) -> Result<Placement, Box<Refusal>> {
    let config = Config::default();
    let placement = find(wanted, &id(n), World { inventory: host, ledger, config: &config })?;
    let asks = Asks { id: &id(n), container: &container(n), by: None, request: wanted };
    place_in_order(asks, placement, (host, host), ledger, &config)
}

/// GPU 0 with `sm` % of it taken, and who waits.
fn one_gpu(sm: u32, waiters: Vec<Waiter>) -> (Inventory, Ledger) {
    let held = ledger(vec![leased(90, "GPU-0", sm * 1000, 1)]);
    (host(vec![device(0)]), Ledger { waiters, ..held })
}

fn on(index: u32, wanted: &Request) -> Request {
    Request { devices: Devices::These(vec![Selector::Index(index)]), ..wanted.clone() }
}

#[test]
fn who_came_first_is_first_and_a_smaller_one_passes_only_where_that_could_not_start() {
    let (half, quarter) = (mps(50_000, 1), mps(25_000, 1));
    // 40 % are left: the first one has no room, the second one goes before it.
    let (host, held) = one_gpu(60, vec![waits(1, &half), waits(2, &quarter)]);
    assert!(asks(1, &half, &host, &held).is_err());
    assert!(asks(2, &quarter, &host, &held).is_ok());
    // 60 % are left, enough for either.
    let (_, held) = one_gpu(40, vec![waits(1, &half), waits(2, &quarter)]);
    assert!(asks(1, &half, &host, &held).is_ok());
    let refused = asks(2, &quarter, &host, &held).unwrap_err();
    assert!(refused.temporary, "it waits on");
    // And who has not waited at all comes behind both.
    let refused = asks(3, &quarter, &host, &held).unwrap_err();
    assert_eq!(
        refused.message,
        "no room: others wait for what is left; why: one came first, as `sublet status` shows; fix: \
         sublet.wait=60s waits for room"
    );
    assert!(asks(3, &mps(10_000, 1), &host, &held).is_ok(), "there is room beside them");
    // 80 % are left: the second one has room beside the first.
    let (_, held) = one_gpu(20, vec![waits(1, &half), waits(2, &quarter)]);
    assert!(asks(2, &quarter, &host, &held).is_ok());
    assert!(asks(3, &quarter, &host, &held).unwrap_err().message.contains("; why: 2 came first"));
}

#[test]
fn who_waits_for_other_devices_is_in_nobodys_way() {
    let host = host(vec![device(0), device(1)]);
    let whole = request(Mode::Exclusive);
    let held = Ledger { waiters: vec![waits(1, &on(0, &whole))], ..ledger(vec![]) };
    assert_eq!(asks(2, &whole, &host, &held).unwrap().devices, ["GPU-1"], "the one that is not waited for");
    assert!(asks(2, &on(1, &whole), &host, &held).is_ok());
    assert!(asks(2, &on(0, &whole), &host, &held).is_err());
    // Neighbours are those that are there, not those that wait.
    let beside = Ledger { waiters: vec![waits(1, &on(0, &mps(50_000, 1)))], ..ledger(vec![]) };
    assert_eq!(asks(2, &on(0, &mps(50_000, 1)), &host, &beside).unwrap().neighbours, Some(0));
    let places = |waiters: &[Waiter]| crate::place::places(waiters, &host, &Config::default());
    let all = [on(0, &whole), on(1, &whole), on(0, &mps(25_000, 1)), whole.clone(), on(7, &whole)];
    let all: Vec<_> = (1..).zip(&all).map(|(n, wanted)| waits(n, wanted)).collect();
    assert_eq!(places(&all), [1, 1, 2, 4, 1]);
}

#[test]
fn a_refused_container_of_dockers_is_waited_for_only_while_the_service_starts_it() {
    let half = mps(50_000, 1);
    let refused = |confirmed: bool, from: u64| {
        let attempts = serde_json::json!({"confirmed": confirmed, "starts": 0, "from": from});
        let retry: Retry = serde_json::from_value(attempts).unwrap();
        let mut waiter = waits(1, &half);
        (waiter.process, waiter.retry) = (None, Some(retry));
        waiter
    };
    let passes = |waiter: Waiter, keeper: Option<Process>| {
        let (host, held) = one_gpu(40, vec![waiter]);
        asks(2, &half, &host, &Ledger { keeper, ..held }).is_ok()
    };
    let serves = Process::current().ok();
    assert!(!passes(refused(true, 0), serves));
    assert!(passes(refused(true, 0), None), "no service would start it");
    assert!(passes(refused(true, 0), Some(Process { pid: i32::MAX, start_time: 1 })), "it was killed");
    assert!(passes(refused(false, 0), serves), "nobody has said that it is to be started again");
    assert!(passes(refused(true, u64::MAX / 2), serves), "it is not its time");
}

#[test]
fn a_container_that_made_room_is_waited_for_only_while_the_service_would_resume_it() {
    let (me, half) = (Process::current().unwrap(), on(0, &mps(50_000, 1)));
    let suspended = || {
        let mut held = ledger(vec![leased(1, "GPU-0", 0, 1)]);
        let one = &mut held.leases[0];
        (one.mode, one.state) = (Mode::Exclusive, LeaseState::Active);
        (one.daemon, one.sm, one.memory_bytes) = (None, None, None);
        held.begin_suspending(&id(1), me, Vec::new(), None).unwrap();
        held.note_on_demand(&id(1));
        assert!(held.end_suspended(&id(1), me) && held.waiters.len() == 1);
        held
    };
    let host = host(vec![device(0)]);
    assert!(asks(2, &half, &host, &suspended()).is_ok(), "no service would resume it");
    let mut served = Ledger { keeper: Some(me), ..suspended() };
    assert!(asks(2, &half, &host, &served).unwrap_err().message.contains("; why: one came first"));
    let mut failed = served.clone();
    failed.back_off(&id(1), Duration::from_secs(30), "it is paused");
    assert!(asks(2, &half, &host, &failed).is_ok(), "it is left alone for a while");
    // On its way back it has its room already.
    served.begin_resuming(&id(1), me, None).unwrap();
    assert!(!book_waiter(&served.waiters[0].clone(), &mut served, &host, &Config::default()));
}

#[test]
fn a_user_holds_back_only_as_many_as_the_policy_allows() {
    let half = mps(50_000, 1);
    let waiter = |leases: u32| {
        let mut waiter = waits(1, &half);
        waiter.rule = Some(PolicyRule { leases: Some(leases), ..PolicyRule::default() });
        waiter.container.uid = 1000;
        waiter
    };
    let passes = |waiter: Waiter| {
        let (host, mut held) = one_gpu(40, vec![waiter]);
        held.leases[0].container.uid = 1000;
        asks(2, &half, &host, &held).is_ok()
    };
    assert!(!passes(waiter(2)));
    assert!(passes(waiter(1)), "the user's own container has to end first");
}

#[test]
fn several_devices_are_kept_for_who_can_have_all_of_them() {
    let host = host(vec![device(0), device(1)]);
    let two = Request { devices: Devices::Any(NonZeroU32::new(2).unwrap()), ..request(Mode::Exclusive) };
    let free = Ledger { waiters: vec![waits(1, &two)], ..ledger(vec![]) };
    assert!(asks(2, &mps(25_000, 1), &host, &free).is_err());
    let busy = Ledger { waiters: vec![waits(1, &two)], ..ledger(vec![leased(90, "GPU-0", 50_000, 1)]) };
    assert!(asks(2, &mps(25_000, 1), &host, &busy).is_ok(), "until the other GPU is free it could not start");
}

proptest! {
    /// Whatever is asked for and ends: what anybody takes leaves the room of those before, all together, and the first one is
    /// never passed while it could start.
    #[test]
    fn nobody_takes_the_room_of_an_earlier_waiter(
        events in prop::collection::vec((any_request(), prop::bool::ANY, prop::option::of(0_usize..6)), 1..40),
    ) {
        let (host, config) = (host((0..3).map(device).collect()), Config::default());
        let mut held = ledger(vec![]);
        for (n, (wanted, waits_too, ends)) in (1..).zip(events) {
            if let Some(one) = ends.filter(|one| *one < held.leases.len()) {
                held.leases.remove(one);
            }
            // All who wait look, in no order: the last one first.
            let mut all: Vec<(u64, Request)> = held.waiters.iter().rev().map(|waiter| {
                (u64::from_str_radix(waiter.id.as_str(), 16).unwrap(), waiter.request().unwrap())
            }).collect();
            all.insert(usize::from(n % 2 == 0) * all.len(), (n, wanted.clone()));
            for (who, wanted) in all {
                let Ok(placement) = asks(who, &wanted, &host, &held) else {
                    if who == n && waits_too {
                        held.waiters.push(waits(n, &wanted));
                    }
                    continue;
                };
                let mut ahead = held.clone();
                let before = held.waiters.iter().take_while(|waiter| waiter.id != id(who));
                let first = before.clone().next().cloned();
                before.for_each(|waiter| { book_waiter(waiter, &mut ahead, &host, &config); });
                ahead.leases.push(lease_of(who, placement.clone()));
                assert_accounts(&host, &ahead, &config);
                let could = |ledger: &Ledger| {
                    first.as_ref().is_some_and(|first| book_waiter(first, &mut ledger.clone(), &host, &config))
                };
                let before = could(&held);
                held.leases.push(lease_of(who, placement));
                held.waiters.retain(|waiter| waiter.id != id(who));
                prop_assert!(!before || could(&held), "the first one was passed");
            }
        }
    }
}
