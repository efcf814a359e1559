//! Tests of `place` on MIG devices, with values written out.

use super::fixture::{GIB, device, host, part, process, request};
use super::tests::{id, ledger};
use super::*;
use crate::config::Use;
use crate::inventory::MigDevice;
use crate::ledger::Lease;
use crate::ledger::fixture::lease;
use crate::share::{Memory, Selector};

/// GPU 0 in MIG mode: two 1g.18gb, and two compute instances in the third GPU instance.
fn cut() -> Inventory {
    let gpu = Device { mig_enabled: true, ..device(0) };
    let shared = |n: u32, ci: u32, sibling: &str| {
        let whole = part(&gpu, n, "1c.2g.35gb");
        let own = whole.mig_device.clone().unwrap();
        let mig_device = MigDevice { gi: 5, ci, slices: (1, 2), siblings: vec![sibling.into()], ..own };
        Device { memory_bytes: 20 * GIB, memory_free_bytes: 20 * GIB, mig_device: Some(mig_device), ..whole }
    };
    let parts =
        [part(&gpu, 0, "1g.18gb"), part(&gpu, 1, "1g.18gb"), shared(2, 0, "MIG-3"), shared(3, 1, "MIG-2")];
    let mut devices = vec![gpu];
    devices.extend(parts);
    devices.push(device(1));
    host(devices)
}

fn config() -> Config {
    let mut config = Config::default();
    config.limits.reserve = 0;
    config
}

fn placed(request: &Request, held: Vec<Lease>) -> Result<Placement, Refusal> {
    place(request, &id(), &cut(), &ledger(held), &config()).map_err(|refusal| *refusal)
}

fn named(index: u32, mode: Mode) -> Request {
    Request { devices: Devices::These(vec![Selector::MigIndex(0, index)]), ..request(mode) }
}

fn alone(n: u64, uuid: &str) -> Lease {
    Lease { mode: Mode::Mig, ..lease(n, uuid) }
}

#[test]
fn a_lease_records_its_instance() {
    let placement = placed(&named(1, Mode::Mig), vec![]).unwrap();
    assert_eq!(
        (placement.devices, placement.mode, placement.daemon),
        (vec!["MIG-1".to_owned()], Mode::Mig, None)
    );
    let (uuid, gpu) = ("MIG-1".to_owned(), "GPU-0".to_owned());
    // 16 of 132 SMs.
    let (sm, memory_bytes) = (Some(Percent::from_thousandths(12_122)), Some(100 * GIB / 8));
    let mig_device = LeasedMigDevice { uuid, gpu, gi: 1, ci: 0, placement: Some((1, 1)), sm, memory_bytes };
    assert_eq!(placement.mig_devices, [mig_device]);
    assert_eq!(placement.memory_bytes, None, "all of it is its own");
}

#[test]
fn whole_gpus_and_instances_are_never_mixed_up() {
    let any = placed(&request(Mode::Exclusive), vec![]).unwrap();
    assert_eq!((any.devices, any.mig_devices), (vec!["GPU-1".to_owned()], vec![]));
    let gpu = Request { devices: Devices::These(vec![Selector::Index(0)]), ..request(Mode::TimeSlice) };
    let refusal = placed(&gpu, vec![]).unwrap_err();
    assert!(refusal.message.contains(": GPU 0 is in MIG mode"), "{refusal}");
    let of_gpu = Request { mode: Some(Mode::Mig), ..gpu };
    assert_eq!(placed(&of_gpu, vec![]).unwrap().devices, ["MIG-2"], "10 of 20 GiB are the least");
    let exclusive = placed(&named(0, Mode::Exclusive), vec![]).unwrap_err();
    assert!(exclusive.message.contains("sublet.mode=mig"), "{exclusive}");
}

#[test]
fn a_profile_takes_the_next_that_is_free() {
    let wanted = Request { mig: Some("1g.18gb".into()), ..request(Mode::Mig) };
    assert_eq!(placed(&wanted, vec![]).unwrap().devices, ["MIG-0"]);
    assert_eq!(placed(&wanted, vec![alone(1, "MIG-0")]).unwrap().devices, ["MIG-1"]);
    let refusal = placed(&wanted, vec![alone(1, "MIG-0"), lease(2, "MIG-1")]).unwrap_err();
    assert!(
        refusal.temporary && refusal.message.contains("; MIG device 0:0 is taken whole; fix: "),
        "{refusal}"
    );
    assert!(refusal.message.contains(": MIG device 0:1 is in use as time-slice; why: "), "{refusal}");
}

#[test]
fn the_smallest_mig_device_of_the_wanted_size_is_taken() {
    let least = |memory: Option<u64>, sm: Option<u32>| Request {
        memory: memory.map(|gib| Memory::Bytes(gib * GIB)),
        sm: sm.map(Percent::from_thousandths),
        ..request(Mode::Mig)
    };
    let found = |memory, sm| placed(&least(memory, sm), vec![]).map(|placement| placement.devices.concat());
    assert_eq!(found(Some(10), None).unwrap(), "MIG-2");
    assert_eq!(found(Some(11), None).unwrap(), "MIG-0");
    assert_eq!(found(None, Some(12_000)).unwrap(), "MIG-2");
    let refusal = found(None, Some(13_000)).unwrap_err();
    assert!(refusal.message.contains("has 16 of the GPU's 132 SMs, 13 % needed") && !refusal.temporary);
}

#[test]
fn compute_instances_account_for_one_memory() {
    let share = |gib: u64| Request { memory: Some(Memory::Bytes(gib * GIB)), ..named(3, Mode::Mps) };
    let beside = Lease { memory_bytes: Some(12 * GIB), ..lease(1, "MIG-2") };
    assert!(placed(&share(7), vec![beside.clone()]).is_ok());
    let refusal = placed(&share(8), vec![beside.clone()]).unwrap_err();
    // And 66 MiB for the server.
    assert!(refusal.message.contains("has 8 GiB left to book, 8258 MiB needed"), "{refusal}");
    let whole = placed(&named(3, Mode::Mig), vec![beside]).unwrap_err();
    assert!(whole.message.contains("has 8 GiB left to book, 10 GiB needed"), "{whole}");
    let half = placed(&named(3, Mode::Mig), vec![alone(1, "MIG-2")]).unwrap();
    assert_eq!(half.memory_bytes, Some(10 * GIB));
}

/// As of a GPU of a generation that is not in our table.
#[test]
fn a_percentage_of_nobody_knows_how_many_sms_is_refused() {
    let mut inventory = cut();
    inventory.devices[0].sm_count = None;
    for device in &mut inventory.devices {
        device.mig_device.iter_mut().for_each(|mig_device| mig_device.gpu_sm_count = None);
    }
    let wanted = Request { sm: Some(Percent::from_thousandths(10_000)), ..named(0, Mode::Mig) };
    let placed = |wanted: &Request| place(wanted, &id(), &inventory, &ledger(vec![]), &config());
    let refusal = placed(&wanted).unwrap_err();
    assert!(refusal.message.contains("of unknown SM count"), "{refusal}");
    assert!(placed(&named(0, Mode::Mig)).is_ok());
    let any = Request { devices: Devices::Any(std::num::NonZeroU32::MIN), ..wanted };
    assert_eq!(
        Order::of(&any, &inventory, &ledger(vec![]), &config()).unwrap().sites,
        [],
        "none is made for it"
    );
}

#[test]
fn clients_are_limited_in_proportion() {
    let clients = |n| {
        let wanted = Request { processes: std::num::NonZeroU32::new(n).unwrap(), ..named(0, Mode::Mps) };
        placed(&wanted, vec![]).map(|placement| placement.daemon)
    };
    assert_eq!(clients(5).unwrap(), Some(DaemonKey("MIG-0".into())));
    let refusal = clients(6).unwrap_err();
    assert!(refusal.message.contains("allows at most 5 MPS clients, not 6"), "48 * 16 / 132: {refusal}");
}

#[test]
fn nodes_of_an_instance_that_is_gone_stay_its_containers() {
    let of = |uuid: &str| LeasedMigDevice {
        uuid: uuid.into(),
        gpu: "GPU-0".into(),
        gi: 0,
        ci: 0,
        placement: None,
        sm: None,
        memory_bytes: None,
    };
    let lost = Lease { mig_devices: vec![of("MIG-gone")], ..alone(1, "MIG-gone") };
    let refusal = placed(&named(0, Mode::Mig), vec![lost]).unwrap_err();
    assert!(refusal.temporary && refusal.message.contains("container container-1 still holds"), "{refusal}");
    let elsewhere =
        Lease { mig_devices: vec![LeasedMigDevice { gi: 9, ..of("MIG-gone") }], ..alone(1, "MIG-gone") };
    assert!(placed(&named(0, Mode::Mig), vec![elsewhere]).is_ok());
}

#[test]
fn several_are_of_as_many_gpu_instances() {
    let these = |indexes: &[u32]| Request {
        devices: Devices::These(indexes.iter().map(|index| Selector::MigIndex(0, *index)).collect()),
        ..request(Mode::Mig)
    };
    assert_eq!(placed(&these(&[3, 0]), vec![]).unwrap().devices, ["MIG-3", "MIG-0"]);
    let same = placed(&these(&[2, 3]), vec![]).unwrap_err();
    assert!(same.message.contains("are compute instances of one GPU instance"), "{same}");
    let any =
        |count| Request { devices: Devices::Any(std::num::NonZeroU32::new(count).unwrap()), ..these(&[]) };
    assert_eq!(placed(&any(3), vec![]).unwrap().devices, ["MIG-0", "MIG-1", "MIG-2"]);
    assert!(placed(&any(4), vec![]).is_err());
    let mut old = cut();
    old.driver.version = "550.163.01".into();
    let refusal = place(&these(&[3, 0]), &id(), &old, &ledger(vec![]), &config()).unwrap_err();
    assert!(refusal.message.contains("several need R570 or later") && !refusal.temporary, "{refusal}");
}

#[test]
fn faults_drains_and_strangers_close_one_instance() {
    let why = |change: fn(&mut Inventory), ledger: Ledger| {
        let mut host = cut();
        change(&mut host);
        place(&named(0, Mode::Mig), &id(), &host, &ledger, &config()).unwrap_err().message
    };
    let fault = |host: &mut Inventory| {
        host.devices[1].mig_device.as_mut().unwrap().fault = Some("told twice".into());
    };
    assert!(why(fault, ledger(vec![])).contains("cannot be used; why: told twice"));
    let stranger = |host: &mut Inventory| host.devices[1].processes = vec![process(7, 0, GIB)];
    assert!(
        why(stranger, ledger(vec![]))
            .contains("process 7 (python3) has a CUDA context on it without a lease")
    );
    for drained in ["GPU-0", "MIG-0"] {
        let ledger = Ledger { drained: vec![drained.into()], ..Ledger::empty("boot") };
        assert!(why(|_| {}, ledger).contains("is drained"), "{drained}");
    }
}

#[test]
fn rules_are_for_the_instance_or_its_gpu_not_both() {
    let with = |matches: &str, fixed_use| {
        let rule = crate::config::DeviceRule {
            matches: matches.into(),
            name: Some("it".into()),
            fixed_use: Some(fixed_use),
            time_slice: None,
        };
        Config { device: vec![rule], ..config() }
    };
    let by_name = Request {
        devices: Devices::These(vec![Selector::Name("it".into())]),
        mode: None,
        ..request(Mode::TimeSlice)
    };
    let on = |config: &Config, request: &Request| place(request, &id(), &cut(), &ledger(vec![]), config);
    let found = on(&with("0:1", Use::Mps), &by_name).unwrap();
    assert_eq!((found.devices.concat().as_str(), found.mode), ("MIG-1", Mode::Mps));
    assert!(on(&with("0", Use::Mps), &named(1, Mode::Mig)).is_ok(), "a GPU's use is not its instances'");
    for name in ["0", "0:1"] {
        let closed = on(&with(name, Use::None), &named(1, Mode::Mig)).unwrap_err().message;
        assert!(closed.contains("is kept from containers"), "{name}: {closed}");
    }
    let kept = on(&with("0:1", Use::Mps), &named(1, Mode::Mig)).unwrap_err();
    assert!(kept.message.contains(": MIG device 0:1 is reserved for mps"), "{kept}");
}
