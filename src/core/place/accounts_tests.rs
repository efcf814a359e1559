//! The bookings under random orders of requests and ends.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use proptest::prelude::*;

use super::fixture::{GIB, device, host, request};
use super::tests::{ledger, percent};
use super::*;
use crate::config::Policy;
use crate::ledger::Lease;
use crate::ledger::fixture::lease;
use crate::share::{Memory, Selector};

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
        let on: Vec<&Lease> =
            ledger.leases.iter().filter(|lease| lease.devices.contains(&device.uuid)).collect();
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
            on.iter().filter_map(|lease| lease.memory_bytes).sum::<u64>() + daemons.values().sum::<u64>();
        let capacity = (device.memory_bytes - config.limits.reserve.min(device.memory_bytes)) as f64;
        assert!(memory as f64 <= capacity * config.limits.memory_overcommit, "{}: {memory}", device.uuid);
        let reported = device.memory_free_bytes as f64 * config.limits.memory_overcommit.max(1.0);
        assert!(memory as f64 <= reported, "{}: {memory} of {reported} reported free", device.uuid);
        let clients: u32 =
            on.iter().filter(|lease| lease.daemon.is_some()).map(|lease| lease.processes).sum();
        assert!(clients <= if device.compute_capability.0 < 7 { 16 } else { 48 });
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
        ..lease(n, "")
    }
}

proptest! {
    #[test]
    fn the_accounts_hold_in_any_order_of_events(
        devices in prop::collection::vec(any_device(), 1..4),
        events in prop::collection::vec((any_request(), prop::option::of(0_usize..8)), 1..40),
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
        let mut ledger = ledger(vec![]);
        for (n, (request, remove)) in (1..).zip(events) {
            if let Some(index) = remove.filter(|index| *index < ledger.leases.len()) {
                let id = ledger.leases[index].id.clone();
                ledger.remove(&id);
            }
            let lease_id = lease(n, "").id;
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
