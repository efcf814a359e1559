//! Shares of several devices: all or none, one server of their own, one amount each.

use std::num::NonZeroU32;

use super::accounts_tests::lease_of;
use super::fixture::{GIB, device, host, request};
use super::tests::{id, leased, ledger, mps, percent, placed, refused, rule};
use super::*;
use crate::config::Use;
use crate::inventory::ComputeMode;
use crate::ledger::Lease;
use crate::ledger::fixture::lease;
use crate::share::{Memory, Selector};

#[test]
fn several_devices_are_taken_all_or_none() {
    let host = host(vec![device(0), device(1), device(2)]);
    let held = ledger(vec![leased(1, "GPU-1", 30_000, 8)]);
    let wants = |devices, mode| Request { devices, ..request(mode) };
    let two = || Devices::Any(NonZeroU32::new(2).unwrap());
    assert_eq!(placed(&wants(two(), Mode::Exclusive), &host, &held).unwrap().devices, ["GPU-0", "GPU-2"]);
    let named = Devices::These(vec![Selector::Index(2), Selector::Index(0)]);
    assert_eq!(placed(&wants(named, Mode::TimeSlice), &host, &held).unwrap().devices, ["GPU-2", "GPU-0"]);
    let refusal = refused(&wants(Devices::All, Mode::TimeSlice), &host, &held);
    assert!(refusal.temporary && refusal.message.contains(": GPU 1 is in use as mps"));
    let nine = refused(&wants(Devices::Any(NonZeroU32::new(9).unwrap()), Mode::TimeSlice), &host, &held);
    assert!(nine.message == "9 GPUs requested, 3 present" && !nine.temporary);
    let empty = refused(&request(Mode::TimeSlice), &super::fixture::host(vec![]), &held);
    assert!(!empty.temporary);
}

/// `GPU-<n>` with so many GiB.
fn sized(n: u32, gib: u64) -> Device {
    Device { memory_bytes: gib * GIB, memory_free_bytes: gib * GIB, ..device(n) }
}

fn two() -> Devices {
    Devices::Any(NonZeroU32::new(2).unwrap())
}

#[test]
fn several_devices_have_one_server_of_the_leases_own_and_one_amount_each() {
    let host = host(vec![device(0), device(1), device(2)]);
    for request in [
        Request { devices: two(), ..mps(25_000, 8) },
        Request { devices: two(), memory: Some(Memory::Bytes(8 * GIB)), ..request(Mode::TimeSlice) },
    ] {
        let placement = placed(&request, &host, &ledger(vec![])).unwrap();
        assert_eq!(placement.devices, ["GPU-0", "GPU-1"]);
        assert_eq!(placement.daemon, Some(DaemonKey(id().to_string())));
        assert_eq!((placement.isolation, placement.memory_bytes), (Isolation::Dedicated, Some(8 * GIB)));
        let held = ledger(vec![lease_of(1, placement)]);
        for device in &host.devices[..2] {
            let bookings = bookings(device, &held, &Config::default());
            assert_eq!(bookings.used_as, Some(Mode::TimeSlice));
            // The server has its own 66 MiB on each.
            assert_eq!(bookings.memory_booked, 8 * GIB + (66 << 20));
        }
        assert_eq!(bookings(&host.devices[2], &held, &Config::default()).memory_booked, 0);
    }
    let plain = Request { devices: two(), ..request(Mode::TimeSlice) };
    assert_eq!(placed(&plain, &host, &ledger(vec![])).unwrap().daemon, None);
}

#[test]
fn a_share_of_several_devices_is_refused_if_one_of_them_lacks_something() {
    let all = |change: fn(&mut Device)| {
        let mut gpus = vec![device(0), device(1)];
        change(&mut gpus[1]);
        host(gpus)
    };
    let wanted = Request { devices: Devices::All, ..mps(25_000, 8) };
    let says = |host: &Inventory, ledger: &Ledger, words: &str, temporary: bool| {
        let refusal = refused(&wanted, host, ledger);
        let (message, one) = (&refusal.message, format!(": GPU 1 {words}"));
        assert!(message.contains(&one) && !message.contains("GPU 0 "), "{message}");
        assert!(refusal.temporary == temporary && !message.contains('\n'), "{message}");
    };
    let empty = ledger(vec![]);
    let drained = Ledger { drained: vec!["GPU-1".into()], ..Ledger::empty("boot") };
    says(&all(|_| {}), &drained, "is drained", false);
    says(&all(|gpu| gpu.compute_mode = ComputeMode::ExclusiveProcess), &empty, "has compute mode", false);
    says(&all(|gpu| gpu.compute_capability = (6, 1)), &empty, "is older than Volta", false);
    let shared = ledger(vec![leased(1, "GPU-1", 30_000, 8)]);
    says(&all(|_| {}), &shared, "is in use as mps; why: an MPS server for several devices takes turns", true);
    let full = Lease { mode: Mode::TimeSlice, memory_bytes: Some(98 * GIB), ..lease(1, "GPU-1") };
    says(&all(|_| {}), &ledger(vec![full]), "has 1536 MiB left to book", true);
    // `all` does not silently leave out a GPU in MIG mode: the refusal names it.
    let named = Devices::These(vec![Selector::Index(0), Selector::Index(1)]);
    let refusal =
        refused(&Request { devices: named, ..wanted.clone() }, &all(|gpu| gpu.mig_enabled = true), &empty);
    assert!(refusal.message.contains(": GPU 1 is in MIG mode"), "{}", refusal.message);
}

#[test]
fn a_device_kept_for_mps_takes_no_share_of_several() {
    let host = host(vec![device(0), device(1)]);
    let wanted = Request { devices: two(), ..mps(25_000, 8) };
    let refusal = place(&wanted, &id(), &host, &ledger(vec![]), &rule("GPU-1", Use::Mps)).unwrap_err();
    let why = "is reserved for mps by [[device]] use; why: an MPS server for several devices takes turns";
    assert!(refusal.message.contains(why), "{}", refusal.message);
}

#[test]
fn a_percentage_of_several_devices_is_of_the_smallest() {
    let share =
        |devices, share| Request { devices, memory: Some(Memory::Share(percent(share))), ..mps(25_000, 1) };
    let mixed = host(vec![sized(0, 80), sized(1, 40), sized(2, 80)]);
    let amount = |request: &Request, held: &Ledger| {
        placed(request, &mixed, held)
            .map(|placement| (placement.devices, placement.memory_bytes.unwrap() / GIB))
    };
    let named = |a, b| Devices::These(vec![Selector::Index(a), Selector::Index(b)]);
    let gpus = |a: u32, b: u32| vec![format!("GPU-{a}"), format!("GPU-{b}")];
    let empty = ledger(vec![]);
    assert_eq!(amount(&share(named(0, 1), 50_000), &empty).unwrap(), (gpus(0, 1), 20));
    assert_eq!(amount(&share(Devices::All, 25_000), &empty).unwrap().1, 10);
    // With `any`, the devices on which the amount is largest.
    assert_eq!(amount(&share(two(), 50_000), &empty).unwrap(), (gpus(0, 2), 40));
    // The larger device need only have room for the amount on the smallest.
    let turns =
        |n, gpu: &str, gib| Lease { mode: Mode::TimeSlice, memory_bytes: Some(gib * GIB), ..lease(n, gpu) };
    let held = ledger(vec![turns(1, "GPU-0", 50)]);
    assert_eq!(amount(&share(named(0, 1), 50_000), &held).unwrap(), (gpus(0, 1), 20));
    assert_eq!(amount(&share(two(), 50_000), &held).unwrap().1, 20);
    let full = ledger(vec![turns(1, "GPU-0", 65)]);
    let refusal = amount(&share(named(0, 1), 50_000), &full).unwrap_err();
    assert!(refusal.message.starts_with("no room: GPU 0 has "), "{}", refusal.message);
    // Never less than the percentage of the devices that are taken, although the amount for the full ones would fit.
    let full = ledger(vec![turns(1, "GPU-0", 50), turns(2, "GPU-1", 25)]);
    assert!(amount(&share(two(), 50_000), &full).is_err());
    // An amount is the same on all.
    let bytes = Request { devices: named(0, 1), ..mps(25_000, 39) };
    assert_eq!(amount(&bytes, &empty).unwrap().1, 39);
    let large = Request { devices: named(0, 1), ..mps(25_000, 41) };
    assert!(amount(&large, &empty).unwrap_err().message.contains(": GPU 1 has 40 GiB, of which"));
}
