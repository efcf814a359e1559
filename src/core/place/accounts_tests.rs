//! The bookings under random orders of requests and ends.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use proptest::prelude::*;

use super::fixture::{GIB, device, host, request};
use super::tests::{ledger, percent};
use super::*;
use crate::config::Policy;
use crate::ledger::fixture::lease;
use crate::ledger::{Lease, LeaseState, SuspendStep, SuspendedProcess, Suspension};
use crate::process::Process;
use crate::share::{Memory, Selector, Suspend};

/// A percentage refers to the smallest device, and the amount is the same on all devices.
fn assert_share(request: &Request, placement: &Placement, inventory: &Inventory) {
    let sizes =
        placement.devices.iter().filter_map(|uuid| inventory.device(uuid)).map(|one| one.memory_bytes);
    let (Some(memory), Some(smallest)) = (request.memory, sizes.min()) else { return };
    assert_eq!(placement.memory_bytes, Some(memory.on(smallest)));
    if placement.devices.len() > 1 {
        assert_eq!(placement.isolation, Isolation::Dedicated);
        assert!(placement.daemon.as_ref().is_some_and(|key| LeaseId::parse(&key.0).is_some()));
    }
}

/// The table of bookings, written independently of [`bookings`].
#[expect(clippy::cast_precision_loss, reason = "bytes of device memory are far below 2^53")]
pub(crate) fn assert_accounts(inventory: &Inventory, ledger: &Ledger, config: &Config) {
    for device in &inventory.devices {
        let on: Vec<&Lease> = ledger
            .leases
            .iter()
            .filter(|lease| lease.devices.contains(&device.uuid) && !is_out(lease, &device.uuid))
            .collect();
        let uses: BTreeSet<&str> = on
            .iter()
            .map(|lease| match (lease.mode, lease.isolation) {
                (Mode::Exclusive, _) => "exclusive",
                (Mode::Mps, Isolation::Shared) => "mps",
                (Mode::Mps, Isolation::Dedicated) | (Mode::TimeSlice, _) => "time-slice",
                (Mode::Mig, _) => "mig",
            })
            .collect();
        assert!(uses.len() <= 1, "{}: {uses:?}", device.uuid);
        if uses.contains("exclusive") {
            assert_eq!(on.len(), 1);
        }
        if uses.contains("time-slice") {
            assert!(on.len() <= config.limits.time_slice_max as usize);
        }
        if uses.contains("mps") {
            let sum: f64 = on.iter().filter_map(|lease| lease.sm).map(Percent::as_f64).sum();
            assert!(sum <= 100.0 * config.limits.sm_overcommit + 0.001, "{}: {sum} % SM", device.uuid);
        }
        let daemons: BTreeMap<_, u64> =
            on.iter().filter_map(|lease| lease.daemon.as_ref()).map(|key| (key, 66 << 20)).collect();
        let memory: u64 =
            on.iter().filter_map(|lease| memory_of(lease)).sum::<u64>() + daemons.values().sum::<u64>();
        let capacity = (device.memory_bytes - config.limits.reserve.min(device.memory_bytes)) as f64;
        assert!(memory as f64 <= capacity * config.limits.memory_overcommit, "{}: {memory}", device.uuid);
        let reported = device.memory_free_bytes as f64 * config.limits.memory_overcommit.max(1.0);
        assert!(memory as f64 <= reported, "{}: {memory} of {reported} reported free", device.uuid);
        let clients: u32 =
            on.iter().filter(|lease| lease.daemon.is_some()).map(|lease| lease.processes).sum();
        assert!(clients <= if device.compute_capability.0 < 7 { 16 } else { 48 });
    }
}

fn is_out(lease: &Lease, uuid: &str) -> bool {
    match lease.suspension.as_ref().map(|own| own.step) {
        Some(SuspendStep::Suspended | SuspendStep::Adding) => true,
        Some(SuspendStep::Arriving) => lease.devices[0] == uuid,
        _ => false,
    }
}

/// What is on its way needs its own size, whatever its share says.
fn memory_of(lease: &Lease) -> Option<u64> {
    let own = lease.suspension.as_ref().map(Suspension::bytes);
    own.max(lease.memory_bytes)
}

/// Takes the next step of a lease's suspension or move, if it may have one: in its share there is no MPS, and one GPU.
fn take_step(ledger: &mut Ledger, at: usize, bytes: u64, inventory: &Inventory, config: &Config) {
    let me = Process { pid: 1, start_time: 1 };
    let id = ledger.leases[at].id.clone();
    let lease = &mut ledger.leases[at];
    if lease.daemon.is_some() || lease.devices.len() != 1 && lease.destination().is_none() {
        return;
    }
    lease.state = LeaseState::Active;
    let here = lease.devices[0].clone();
    let step = lease.suspension.as_ref().map(|own| own.step);
    let there = inventory.devices.iter().map(|device| device.uuid.clone()).rfind(|uuid| *uuid != here);
    let there = lease.destination().map(str::to_owned).or(there.filter(|_| bytes / GIB % 2 == 1));
    let bytes = bytes.min(lease.memory_bytes.unwrap_or(u64::MAX));
    let fits = |ledger: &Ledger, uuid: &str, bytes: u64| {
        check_resume(&ledger.leases[at], uuid, bytes, inventory, ledger, config).is_ok()
    };
    match step {
        // What it takes without a limit is not booked: it has none here.
        None if lease.memory_bytes.is_none() => {}
        None => {
            let processes = vec![SuspendedProcess { process: me, bytes }];
            match there.filter(|there| fits(ledger, there, bytes)) {
                Some(there) => ledger.begin_suspending(&id, me, processes, Some(&there)).unwrap(),
                None => ledger.begin_suspending(&id, me, processes, None).unwrap(),
            }
        }
        Some(SuspendStep::Suspending) if ledger.leases[at].destination().is_some() => {
            assert!(ledger.begin_restoring(&id, me));
        }
        Some(SuspendStep::Suspending) => assert!(ledger.end_suspended(&id, me)),
        Some(SuspendStep::Adding) => assert!(ledger.end_adding(&id, me, true)),
        // What it has is what was put away.
        Some(SuspendStep::Suspended) => {
            let own = ledger.leases[at].suspension.as_ref().unwrap().bytes();
            match there.filter(|there| fits(ledger, there, own)) {
                Some(there) => ledger.begin_resuming(&id, me, Some(&there)).unwrap(),
                None if fits(ledger, &here, own) => ledger.begin_resuming(&id, me, None).unwrap(),
                None => {}
            }
        }
        Some(SuspendStep::Resuming | SuspendStep::Arriving) => {
            let gpu = there.filter(|_| step == Some(SuspendStep::Arriving) || bytes / GIB % 2 == 1);
            assert!(ledger.end_resumed(&id, me, &gpu.unwrap_or(here)));
        }
    }
}

fn any_device() -> impl Strategy<Value = (u64, u64, bool)> {
    (1_u64..200, 50_u64..=100, prop::bool::weighted(0.2))
}

pub(crate) fn any_request() -> impl Strategy<Value = Request> {
    let memory = prop_oneof![
        Just(None),
        (1_u64..60).prop_map(|gib| Some(Memory::Bytes(gib * GIB))),
        (1_u32..=100_000).prop_map(|share| Some(Memory::Share(percent(share)))),
    ];
    let mode = prop_oneof![
        1 => Just(Some(Mode::TimeSlice)),
        3 => Just(Some(Mode::Mps)),
        1 => Just(Some(Mode::Exclusive)),
        1 => Just(None),
    ];
    let devices = prop_oneof![
        4 => Just(Devices::Any(NonZeroU32::MIN)),
        1 => Just(Devices::Any(NonZeroU32::new(2).unwrap())),
        1 => Just(Devices::All),
        1 => (0_u32..4).prop_map(|index| Devices::These(vec![Selector::Index(index)])),
    ];
    (devices, mode, prop::option::of(1_u32..=100_000), memory, 1_u32..20, prop::bool::ANY).prop_map(
        |(devices, mode, sm, memory, processes, dedicated)| Request {
            suspend: match (mode, &devices) {
                (Some(Mode::TimeSlice), Devices::Any(NonZeroU32::MIN) | Devices::These(_)) => Suspend::Allow,
                _ => Suspend::Never,
            },
            devices,
            mode,
            sm: sm.filter(|_| mode == Some(Mode::Mps)).map(percent),
            memory: memory.filter(|_| mode != Some(Mode::Exclusive)),
            processes: NonZeroU32::new(if mode == Some(Mode::Mps) { processes } else { 1 }).unwrap(),
            isolation: if dedicated { Isolation::Dedicated } else { Isolation::Shared },
            ..request(Mode::TimeSlice)
        },
    )
}

pub(crate) fn lease_of(n: u64, placement: Placement) -> Lease {
    Lease {
        devices: placement.devices,
        mode: placement.mode,
        isolation: placement.isolation,
        daemon: placement.daemon,
        sm: placement.sm,
        memory_bytes: placement.memory_bytes,
        processes: placement.processes,
        suspend: placement.suspend,
        ..lease(n, "")
    }
}

proptest! {
    #[test]
    fn the_accounts_hold_in_any_order_of_events(
        devices in prop::collection::vec(any_device(), 1..4),
        events in prop::collection::vec((any_request(), prop::option::of(0_usize..8)), 1..40),
        steps in prop::collection::vec((0_usize..8, 1_u64..60), 1..40),
        sm_overcommit in 0.5_f64..2.0,
        memory_overcommit in 0.5_f64..2.0,
        time_slice_max in 1_u32..4,
        spread in prop::bool::ANY,
    ) {
        let devices = (0..).zip(devices).map(|(n, (gib, free, old))| crate::inventory::Device {
            memory_bytes: gib * GIB,
            memory_free_bytes: gib * GIB / 100 * free,
            compute_capability: if old { (6, 1) } else { (9, 0) },
            ..device(n)
        });
        let inventory = host(devices.collect());
        let mut config = Config::default();
        config.limits.sm_overcommit = sm_overcommit;
        config.limits.memory_overcommit = memory_overcommit;
        config.limits.time_slice_max = time_slice_max;
        config.placement.policy = if spread { Policy::Spread } else { Policy::Binpack };
        let (mut ledger, mut steps) = (ledger(vec![]), steps.into_iter().cycle());
        for (n, (request, remove)) in (1..).zip(events) {
            if let Some(index) = remove.filter(|index| *index < ledger.leases.len()) {
                let id = ledger.leases[index].id.clone();
                ledger.remove(&id);
            }
            let lease_id = lease(n, "").id;
            if let Some((at, gib)) = steps.next().filter(|(at, _)| *at < ledger.leases.len()) {
                take_step(&mut ledger, at, gib * GIB, &inventory, &config);
                assert_accounts(&inventory, &ledger, &config);
            }
            match place(&request, &lease_id, &inventory, &ledger, &config) {
                Ok(placement) => {
                    assert_share(&request, &placement, &inventory);
                    ledger.insert(lease_of(n, placement)).unwrap();
                }
                Err(refusal) => prop_assert!(!refusal.message.contains('\n')),
            }
            assert_accounts(&inventory, &ledger, &config);
        }
    }
}
