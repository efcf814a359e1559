//! Tests of the whole of `place`, with values written out.

use std::num::NonZeroU32;

use super::fixture::{GIB, device, host, process, request};
use super::*;
use crate::config::{DeviceRule, Policy, Use};
use crate::inventory::{ComputeMode, Virtualization};
use crate::ledger::fixture::lease;
use crate::ledger::{ChangedComputeMode, Drain, Lease};
use crate::share::{Memory, Selector};

type Change = fn(&mut Inventory);

pub(crate) fn id() -> LeaseId {
    LeaseId::parse("00000000000000ff").unwrap()
}

pub(super) fn percent(thousandths: u32) -> Percent {
    Percent::from_thousandths(thousandths)
}

pub(crate) fn ledger(leases: Vec<Lease>) -> Ledger {
    Ledger { leases, ..Ledger::empty("boot") }
}

pub(crate) fn mps(sm: u32, gib: u64) -> Request {
    Request { sm: Some(percent(sm)), memory: Some(Memory::Bytes(gib * GIB)), ..request(Mode::Mps) }
}

pub(crate) fn leased(n: u64, gpu: &str, sm: u32, gib: u64) -> Lease {
    Lease {
        mode: Mode::Mps,
        daemon: Some(DaemonKey(gpu.into())),
        sm: Some(percent(sm)),
        memory_bytes: Some(gib * GIB),
        ..lease(n, gpu)
    }
}

pub(crate) fn placed(
    request: &Request,
    inventory: &Inventory,
    ledger: &Ledger,
) -> Result<Placement, Box<Refusal>> {
    place(request, &id(), inventory, ledger, &Config::default())
}

pub(crate) fn refused(request: &Request, inventory: &Inventory, ledger: &Ledger) -> Refusal {
    *placed(request, inventory, ledger).unwrap_err()
}

pub(crate) fn rule(matches: &str, fixed_use: Use) -> Config {
    let rule =
        DeviceRule { matches: matches.into(), name: None, fixed_use: Some(fixed_use), time_slice: None };
    Config { device: vec![rule], ..Config::default() }
}

#[test]
fn a_shared_share_is_served_by_the_devices_server() {
    let placement = placed(&mps(25_000, 8), &host(vec![device(0)]), &ledger(vec![])).unwrap();
    let expected = Placement {
        devices: vec!["GPU-0".into()],
        mig_devices: vec![],
        mode: Mode::Mps,
        isolation: Isolation::Shared,
        daemon: Some(DaemonKey("GPU-0".into())),
        sm: Some(percent(25_000)),
        memory_bytes: Some(8_589_934_592),
        processes: 1,
        priority: Priority::Normal,
        guard: None,
        suspend: Suspend::Never,
        mig_caps: vec![],
        refresh_first: false,
        neighbours: Some(0),
        warnings: vec![],
    };
    assert_eq!(placement, expected);
}

#[test]
fn a_share_that_may_be_suspended_has_no_server_and_no_device_in_use_by_mps() {
    let host = host(vec![device(0)]);
    let asked =
        Request { memory: Some(Memory::Bytes(8 * GIB)), suspend: Suspend::Allow, ..request(Mode::TimeSlice) };
    let given = placed(&asked, &host, &ledger(vec![])).unwrap();
    assert_eq!((given.daemon, given.memory_bytes, given.suspend), (None, Some(8 * GIB), Suspend::Allow));
    let any = Request { mode: None, ..asked };
    let refused = place(&any, &id(), &host, &ledger(vec![]), &rule("0", Use::Mps)).unwrap_err();
    assert!(refused.message.contains("shared by mps, where the driver suspends nothing"), "{refused}");
}

#[test]
fn time_slice_with_memory_gets_a_server_of_its_own_and_without_none() {
    let host = host(vec![device(0)]);
    let plain = placed(&request(Mode::TimeSlice), &host, &ledger(vec![])).unwrap();
    assert_eq!((plain.daemon, plain.isolation), (None, Isolation::Shared));
    let limited = Request { memory: Some(Memory::Share(percent(25_000))), ..request(Mode::TimeSlice) };
    let limited = placed(&limited, &host, &ledger(vec![])).unwrap();
    assert_eq!(limited.daemon, Some(DaemonKey("00000000000000ff".into())));
    assert_eq!(limited.isolation, Isolation::Dedicated);
    assert_eq!(limited.memory_bytes, Some(25 * GIB));
}

#[test]
fn the_mode_is_the_requests_or_the_devices_or_the_default() {
    let host = host(vec![device(0)]);
    let mode = |request: &Request, config: &Config| place(request, &id(), &host, &ledger(vec![]), config);
    let open = Request { mode: None, ..request(Mode::Mps) };
    assert_eq!(mode(&open, &Config::default()).unwrap().mode, Mode::TimeSlice);
    assert_eq!(mode(&open, &rule("0", Use::Exclusive)).unwrap().mode, Mode::Exclusive);
    assert_eq!(mode(&request(Mode::Mps), &rule("GPU-0", Use::Mps)).unwrap().mode, Mode::Mps);
    let kept = mode(&request(Mode::Mps), &rule("all", Use::TimeSlice)).unwrap_err();
    assert_eq!(
        kept.message,
        "cannot serve mps: GPU 0 is reserved for time-slice by [[device]] use; fix: sublet.isolation=dedicated \
         fits now, in turns; or sublet.mode=time-slice fits now"
    );
    assert!(!kept.temporary);
    let dedicated = Request { isolation: Isolation::Dedicated, ..request(Mode::Mps) };
    assert!(mode(&dedicated, &rule("all", Use::TimeSlice)).is_ok(), "dedicated servers take turns");
    assert!(mode(&dedicated, &rule("all", Use::Mps)).is_err());
    let with_memory = Request { memory: Some(Memory::Bytes(GIB)), ..open };
    assert!(mode(&with_memory, &rule("all", Use::Exclusive)).unwrap_err().message.contains("leave out"));
}

#[test]
fn another_users_container_and_one_that_starts_are_shown_without_names() {
    let mut holders =
        [leased(1, "GPU-0", 30_000, 8), leased(2, "GPU-0", 20_000, 8), leased(3, "GPU-0", 20_000, 8)];
    for (holder, (id, uid)) in holders.iter_mut().zip([("theirs", 1001), ("own", 1000), ("", 1000)]) {
        (holder.container.id, holder.container.uid) = (id.to_owned(), uid);
    }
    let (inventory, ledger) = (host(vec![device(0)]), ledger(holders.to_vec()));
    let message = |uid| refused(&mps(50_000, 8), &inventory, &ledger.clone().seen_by(uid)).message;
    let held = |by: &str| {
        format!("held by {by} (mps, 30 % SM, 8 GiB), own (mps, 20 % SM, 8 GiB), a container that starts (")
    };
    assert!(message(1000).contains(&held("another user's container")), "{}", message(1000));
    assert!(message(0).contains(&held("theirs")), "{}", message(0));
}

#[test]
fn a_refusal_names_the_room_the_holders_and_a_share_that_fits() {
    let mut holder = leased(1, "GPU-0", 60_000, 16);
    holder.container.id = "3f2a9c1b2d4e5f60718293a4b5c6d7e8".into();
    let (inventory, ledger) = (host(vec![device(0)]), ledger(vec![holder]));
    let refusal = refused(&mps(50_000, 8), &inventory, &ledger);
    assert_eq!(
        refusal.message,
        "no room for mps, 50 % SM, 8 GiB: GPU 0 has 40 % SM left; why: 40 % SM, 85438 MiB left; held by \
         3f2a9c1b2d4e (mps, 60 % SM, 16 GiB); fix: sublet.sm=40 fits now; or sublet.wait=60s waits for room"
    );
    assert!(refusal.temporary);
    assert!(!refusal.refresh_first);
    // A start that waits for room and looks again, under the lock, works out no advice.
    let world = World { inventory: &inventory, ledger: &ledger, config: &Config::default() };
    let bare = find(&mps(50_000, 8), &id(), world).unwrap_err().message;
    assert_eq!(refusal.message.split_once("; fix: ").unwrap().0, bare);
}

#[test]
fn a_refusal_names_another_device_or_a_dedicated_share_that_fits() {
    let two = host(vec![device(0), device(1)]);
    let busy = ledger(vec![leased(1, "GPU-0", 90_000, 16)]);
    let named = Request { devices: Devices::These(vec![Selector::Index(0)]), ..mps(50_000, 8) };
    let refusal = refused(&named, &two, &busy);
    assert!(refusal.message.contains("; or sublet.gpu=1 fits now; or "), "{}", refusal.message);
    let full = ledger(vec![leased(1, "GPU-0", 90_000, 16), leased(2, "GPU-1", 90_000, 16)]);
    assert!(!refused(&named, &two, &full).message.contains("sublet.gpu"));
    let sliced = Lease { mode: Mode::TimeSlice, sm: None, ..leased(1, "GPU-0", 1000, 1) };
    let beside = refused(&mps(50_000, 8), &host(vec![device(0)]), &ledger(vec![sliced]));
    let dedicated = "; fix: sublet.isolation=dedicated fits now, in turns; or ";
    assert!(beside.message.contains(dedicated), "{}", beside.message);
}

#[test]
fn a_reason_of_several_devices_is_said_once() {
    let eight = host((0..8).map(device).collect());
    let wants = Request { memory: Some(Memory::Bytes(1024 * GIB)), ..request(Mode::Mps) };
    let message = refused(&wants, &eight, &ledger(vec![])).message;
    // With the request in it, the message would be too long for one line.
    assert!(message.starts_with("refused: each of 8 GPUs has 100 GiB, of which "), "{message}");
    assert_eq!(message.matches("can be booked").count(), 1);
}

#[test]
fn shares_fit_to_the_last_thousandth_and_byte() {
    let host = host(vec![device(0)]);
    let full = ledger(vec![leased(1, "GPU-0", 75_000, 50)]);
    // 100 GiB less 512 MiB, 50 GiB and the server's 66 MiB.
    let wants = |sm, mib: u64| Request { memory: Some(Memory::Bytes(mib << 20)), ..mps(sm, 0) };
    // NVML has 512 MiB more, which is within 10 %.
    assert!(placed(&wants(25_000, 50_622), &host, &full).unwrap().refresh_first);
    assert!(placed(&wants(25_000, 50_623), &host, &full).is_err());
    assert!(placed(&wants(25_001, 8192), &host, &full).is_err());
}

#[test]
fn one_use_at_a_time() {
    let host = host(vec![device(0)]);
    let whole = Lease { mode: Mode::Exclusive, ..lease(1, "GPU-0") };
    for (wanted, held) in [
        (request(Mode::TimeSlice), leased(1, "GPU-0", 1000, 1)),
        (request(Mode::Exclusive), leased(1, "GPU-0", 1000, 1)),
        (request(Mode::Mps), lease(1, "GPU-0")),
        (Request { isolation: Isolation::Dedicated, ..request(Mode::Mps) }, leased(1, "GPU-0", 1000, 1)),
        (request(Mode::TimeSlice), whole.clone()),
        (request(Mode::Exclusive), whole),
    ] {
        let refusal = refused(&wanted, &host, &ledger(vec![held.clone()]));
        assert!(refusal.temporary, "{wanted:?} beside {held:?}");
        assert!(refusal.message.contains("is in use as") || refusal.message.contains("is taken whole"));
    }
}

#[test]
fn turns_are_counted_dedicated_servers_too() {
    let host = host(vec![device(0)]);
    let mut leases: Vec<Lease> = (1..=7).map(|n| lease(n, "GPU-0")).collect();
    leases.push(Lease { isolation: Isolation::Dedicated, ..leased(8, "GPU-0", 50_000, 1) });
    let refusal = refused(&request(Mode::TimeSlice), &host, &ledger(leases.clone()));
    assert!(refusal.message.contains("8 containers taking turns"), "{}", refusal.message);
    leases.pop();
    assert!(placed(&request(Mode::TimeSlice), &host, &ledger(leases)).is_ok());
}

#[test]
fn clients_stay_within_the_drivers_limit() {
    let many = |n: u32| Request { processes: NonZeroU32::new(n).unwrap(), ..request(Mode::Mps) };
    let held = ledger(vec![Lease { processes: 40, ..leased(1, "GPU-0", 1000, 1) }]);
    let mut host = host(vec![device(0)]);
    assert!(placed(&many(8), &host, &held).is_ok());
    assert!(refused(&many(9), &host, &held).message.contains("has 8 of 48 MPS clients left"));
    assert!(!refused(&many(49), &host, &ledger(vec![])).temporary);
    host.driver.cuda = (13, 1);
    assert!(placed(&many(20), &host, &held).is_ok());
    assert!(placed(&many(21), &host, &held).is_err());
    host.devices[0].compute_capability = (6, 1);
    assert!(placed(&many(16), &host, &ledger(vec![])).is_ok());
    assert!(refused(&many(17), &host, &ledger(vec![])).message.contains("at most 16"));
}

#[test]
fn free_memory_that_nvml_reported_binds_and_asks_for_a_refresh() {
    let mut host = host(vec![device(0)]);
    host.devices[0].memory_free_bytes = 10 * GIB;
    let refusal = refused(&mps(25_000, 10), &host, &ledger(vec![]));
    assert!(refusal.refresh_first && refusal.temporary, "{refusal:?}");
    assert!(placed(&mps(25_000, 9), &host, &ledger(vec![])).unwrap().refresh_first);
    assert!(!placed(&mps(25_000, 8), &host, &ledger(vec![])).unwrap().refresh_first);
}

#[test]
fn compute_modes() {
    let in_mode = |mode| host(vec![crate::inventory::Device { compute_mode: mode, ..device(0) }]);
    let empty = ledger(vec![]);
    let exclusive = in_mode(ComputeMode::ExclusiveProcess);
    for ok in [Mode::Mps, Mode::Exclusive] {
        assert!(placed(&request(ok), &exclusive, &empty).is_ok());
    }
    let refusal = refused(&request(Mode::TimeSlice), &exclusive, &empty);
    assert_eq!(
        refusal.message,
        "cannot serve time-slice: GPU 0 has compute mode EXCLUSIVE_PROCESS; fix: \
         `nvidia-smi -i GPU-0 -c DEFAULT` resets it (root); or sublet.mode=mps fits now"
    );
    let dedicated = Request { isolation: Isolation::Dedicated, ..request(Mode::Mps) };
    assert!(placed(&dedicated, &exclusive, &empty).is_err());
    let ours = ChangedComputeMode { device: "GPU-0".into(), found: ComputeMode::Default };
    let ours = Ledger { compute_modes: vec![ours], ..Ledger::empty("boot") };
    assert!(placed(&request(Mode::TimeSlice), &exclusive, &ours).is_ok(), "we changed it ourselves");
    for mode in [Mode::Mps, Mode::Exclusive, Mode::TimeSlice] {
        assert!(placed(&request(mode), &in_mode(ComputeMode::Prohibited), &empty).is_err());
    }
}

#[test]
fn exclusive_names_the_process_that_is_in_the_way() {
    let mut host = host(vec![device(0)]);
    host.devices[0].processes = vec![process(4242, 0, GIB)];
    let refusal = refused(&request(Mode::Exclusive), &host, &ledger(vec![]));
    assert!(
        refusal.message.contains("process 4242 (python3) has a CUDA context on it"),
        "{}",
        refusal.message
    );
    assert!(refusal.temporary && refusal.refresh_first);
    assert!(placed(&request(Mode::TimeSlice), &host, &ledger(vec![])).is_ok());
}

#[test]
fn a_lack_of_the_driver_or_the_hardware_is_never_temporary() {
    let limited = mps(25_000, 8);
    let low = Request { priority: Priority::Low, ..request(Mode::Mps) };
    let slice = Request { memory: Some(Memory::Bytes(GIB)), ..request(Mode::TimeSlice) };
    let pascal = |d: &mut Inventory| d.devices[0].compute_capability = (6, 1);
    let vgpu = |d: &mut Inventory| d.devices[0].virtualization = Virtualization::Vgpu;
    let no_mps = |d: &mut Inventory| d.driver.mps_control = None;
    let mig = |d: &mut Inventory| d.devices[0].mig_enabled = true;
    let cases: [(&Request, Change, &str); 8] = [
        (&limited, pascal, "older than Volta"),
        (&low, pascal, "older than Volta"),
        (&slice, pascal, "older than Volta"),
        (&limited, vgpu, "[mps] allow_vgpu"),
        (&slice, vgpu, "[mps] allow_vgpu"),
        (&limited, no_mps, "Debian: apt install nvidia-cuda-mps"),
        (&slice, no_mps, "Debian: apt install nvidia-cuda-mps"),
        (&limited, mig, "is in MIG mode, so only its MIG devices can be used"),
    ];
    for (request, change, expected) in cases {
        let mut inventory = host(vec![device(0)]);
        change(&mut inventory);
        let refusal = refused(request, &inventory, &ledger(vec![]));
        assert!(refusal.message.contains(expected), "{}", refusal.message);
        assert!(!refusal.temporary && !refusal.message.contains('\n'));
    }
    for change in [pascal, no_mps, vgpu] {
        let mut inventory = host(vec![device(0)]);
        change(&mut inventory);
        assert!(placed(&request(Mode::TimeSlice), &inventory, &ledger(vec![])).is_ok());
    }
    let mut old = host(vec![device(0)]);
    pascal(&mut old);
    assert!(placed(&request(Mode::Mps), &old, &ledger(vec![])).is_ok(), "without limits it works");
    let mut guest = host(vec![device(0)]);
    vgpu(&mut guest);
    let mut config = Config::default();
    config.mps.allow_vgpu = true;
    assert!(place(&limited, &id(), &guest, &ledger(vec![]), &config).is_ok());
}

#[test]
fn shares_too_small_to_start_in_are_refused() {
    let host = host(vec![device(0)]);
    let with = |sm: u32, mib: u64, processes: u32| Request {
        sm: Some(percent(sm)),
        memory: Some(Memory::Bytes(mib << 20)),
        processes: NonZeroU32::new(processes).unwrap(),
        ..request(Mode::Mps)
    };
    let why = |request: &Request| refused(request, &host, &ledger(vec![])).message;
    // 1.5 % of 132 SMs is one; 2 % are two.
    assert!(why(&with(1500, 8192, 1)).contains("less than 2"));
    assert!(placed(&with(2000, 8192, 1), &host, &ledger(vec![])).is_ok());
    assert!(why(&with(4000, 8192, 3)).contains("less than 2"));
    // 25 % are 32 SMs: 29 MiB and 118.4 MiB.
    assert!(why(&with(25_000, 147, 1)).contains("needs 148 MiB"));
    assert!(placed(&with(25_000, 148, 1), &host, &ledger(vec![])).is_ok());
    // Two processes at 12 SMs each: 73.4 MiB each.
    assert!(why(&with(20_000, 146, 2)).contains("needs 147 MiB"));
    let whole = |mib: u64| Request { memory: Some(Memory::Bytes(mib << 20)), ..request(Mode::TimeSlice) };
    assert!(why(&whole(517)).contains("needs 518 MiB"));
    assert!(placed(&whole(518), &host, &ledger(vec![])).is_ok());
    let larger = refused(&mps(50_000, 101), &host, &ledger(vec![]));
    assert!(larger.message.contains("has 100 GiB, of which") && !larger.temporary, "{}", larger.message);
}

#[test]
fn neighbours_are_the_other_leases_on_its_devices() {
    let host = host(vec![device(0), device(1)]);
    let leases =
        vec![leased(1, "GPU-0", 10_000, 8), leased(2, "GPU-0", 10_000, 8), leased(3, "GPU-1", 10_000, 8)];
    let on_gpu_0 = Request { devices: Devices::These(vec![Selector::Index(0)]), ..mps(10_000, 8) };
    assert_eq!(placed(&on_gpu_0, &host, &ledger(leases)).unwrap().neighbours, Some(2));
}

#[test]
fn a_share_below_the_drivers_least_is_placed_with_a_warning() {
    let host = host(vec![device(0)]);
    let warnings = |sm: u32, processes: u32| {
        let processes = NonZeroU32::new(processes).unwrap();
        placed(&Request { processes, ..mps(sm, 8) }, &host, &ledger(vec![])).unwrap().warnings
    };
    assert_eq!(
        warnings(2_000, 1),
        ["the driver gives at least 8 SMs; sm=2 of 132 SMs is 2.6 SMs: the process gets 8"]
    );
    assert_eq!(
        warnings(12_500, 4),
        ["the driver gives at least 8 SMs; sm=12.5 of 132 SMs is 4.1 SMs for each of 4 processes: the \
          process gets 8"]
    );
    // 6.1 % are 8 SMs.
    assert_eq!((warnings(6_100, 1), warnings(25_000, 4)), (vec![], vec![]));
    let mut unknown = host.clone();
    unknown.devices[0].sm_count = None;
    assert_eq!(placed(&mps(2_000, 8), &unknown, &ledger(vec![])).unwrap().warnings, [""; 0]);
}

#[test]
fn closed_devices_are_passed_over_with_the_reason() {
    let host = host(vec![device(0), device(1), device(2)]);
    let closed =
        Ledger { drained: vec!["GPU-0".into()], unexplained: vec!["GPU-1".into()], ..Ledger::empty("boot") };
    assert_eq!(placed(&mps(1_0000, 8), &host, &closed).unwrap().devices, ["GPU-2"]);
    let all = Request { devices: Devices::All, ..request(Mode::TimeSlice) };
    let refusal = refused(&all, &host, &closed);
    assert!(refusal.message.contains(": GPU 0 is drained"), "{}", refusal.message);
    assert!(refusal.message.contains("; why: GPU 1 takes no new lease; fix: "), "{}", refusal.message);
    assert!(!refusal.temporary, "a drained device opens for no waiting");
    let drain =
        Drain { device: "GPU-0".into(), reason: "fan".into(), by: "alice".into(), ..Drain::default() };
    let closed = Ledger { drains: vec![drain], ..closed };
    let message = refused(&all, &host, &closed).message;
    let why = ": GPU 0 is drained; why: by alice since 1970-01-01T00:00:00Z: fan";
    assert!(message.contains(why), "{message}");
}

#[test]
fn a_device_with_use_none_is_kept_from_containers() {
    let host = host(vec![device(0), device(1)]);
    let kept =
        |name: &str, request: &Request| place(request, &id(), &host, &ledger(vec![]), &rule(name, Use::None));
    assert_eq!(kept("0", &mps(1_0000, 8)).unwrap().devices, ["GPU-1"]);
    for request in [mps(1_0000, 8), request(Mode::Exclusive), Request { mode: None, ..request(Mode::Mps) }] {
        let refusal = kept("all", &request).unwrap_err();
        assert!(
            refusal.message.contains("is kept from containers; why: [[device]] use = \"none\""),
            "{}",
            refusal.message
        );
        assert!(!refusal.temporary);
    }
}

#[test]
fn mig_is_refused_where_there_is_none() {
    let host = host(vec![device(0)]);
    let profile = Request { mig: Some("1g.18gb".into()), ..request(Mode::Mps) };
    let named = Devices::These(vec![Selector::MigIndex(0, 1)]);
    for wanted in [request(Mode::Mig), profile, Request { devices: named, ..request(Mode::TimeSlice) }] {
        let refusal = refused(&wanted, &host, &ledger(vec![]));
        assert!(refusal.message.contains("no GPU of this host is in MIG mode") && !refusal.temporary);
        assert!(refusal.refresh_first, "it may be by now");
    }
}

#[test]
fn binpack_fills_used_devices_and_spread_empty_ones() {
    let host = host(vec![device(0), device(1), device(2)]);
    let held = ledger(vec![leased(1, "GPU-1", 30_000, 8), leased(2, "GPU-2", 60_000, 8)]);
    let mut config = Config::default();
    let take = |request: &Request, config: &Config| {
        place(request, &id(), &host, &held, config).unwrap().devices.join(" ")
    };
    assert_eq!(take(&mps(40_000, 8), &config), "GPU-2");
    assert_eq!(take(&mps(50_000, 8), &config), "GPU-1");
    assert_eq!(take(&mps(90_000, 8), &config), "GPU-0");
    config.placement.policy = Policy::Spread;
    assert_eq!(take(&mps(40_000, 8), &config), "GPU-0");
    let smaller = crate::inventory::Device { memory_bytes: 50 * GIB, ..device(2) };
    let mixed = super::fixture::host(vec![device(0), device(1), smaller]);
    let one =
        |config: &Config| place(&mps(40_000, 8), &id(), &mixed, &ledger(vec![]), config).unwrap().devices;
    assert_eq!(one(&config), ["GPU-0"]);
    assert_eq!(one(&Config::default()), ["GPU-2"]);
}
