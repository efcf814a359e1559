use std::collections::BTreeMap;

use super::record::{DAY, date, days};
use super::*;
use crate::gpu_processes::Holder;
use crate::names::Of;
use crate::usage::{DeviceUse, ProcessUse};
use sublet_core::events::timestamp;
use sublet_core::ledger::LeaseState;
use sublet_core::ledger::fixture::lease;
use sublet_core::place::fixture::{GIB, device, host, part};
use sublet_core::process::Process;

const HOUR: u64 = 3_600_000;

/// Noon.
const START: u64 = 20_000 * DAY + DAY / 2;

fn all(by: By) -> Wanted {
    let until = UNIX_EPOCH + Duration::from_secs(1 << 40);
    Wanted { since: UNIX_EPOCH, until, by, of: Of::default() }
}

/// A record, and the clocks.
struct Host {
    #[expect(dead_code, reason = "it lasts as long")]
    dir: tempfile::TempDir,
    config: Config,
    uptime: u64,
    time: u64,
    boot_id: &'static str,
    ledger: Ledger,
    inventory: Inventory,
    usage: Option<Usage>,
}

impl Host {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { state_dir: dir.path().to_owned(), ..Config::default() };
        std::fs::create_dir_all(config.lasting_dir().join(DIRECTORY)).unwrap();
        Self {
            dir,
            config,
            uptime: HOUR,
            time: START,
            boot_id: "first",
            ledger: Ledger::empty("first"),
            inventory: host(vec![device(0), device(1)]),
            usage: None,
        }
    }

    fn record(&self) -> std::path::PathBuf {
        self.config.lasting_dir().join(DIRECTORY)
    }

    fn pass(&mut self, milliseconds: u64) {
        self.uptime += milliseconds;
        self.time += milliseconds;
    }

    fn look(&self, events: &[Event]) {
        let at = Moment { uptime: self.uptime, time: self.time };
        let mut record = Record::open(&self.record(), at).unwrap();
        let last = record.begin(self.boot_id).unwrap();
        let (names, inventory) = (&Names::default(), Some(&self.inventory));
        let mut look =
            Look { record, last, ledger: &self.ledger, names, inventory, usage: self.usage.as_ref() };
        look.add(events).unwrap();
        look.record.write().unwrap();
    }

    fn event(&self, kind: Kind, lease: &Lease) -> Event {
        Event {
            time: timestamp(UNIX_EPOCH + Duration::from_millis(self.time)),
            uptime_ms: self.uptime,
            uid: lease.container.uid,
            lease: lease.id.to_string(),
            container_id: lease.container.id.clone(),
            owner: lease.claimed_owner.clone().unwrap_or_default(),
            devices: lease.devices.clone(),
            text: "mps sm=25 memory=25600MiB".to_owned(),
            ..Event::now(kind)
        }
    }

    fn report(&self, by: By) -> Report {
        all(by).report(None, &self.config)
    }
}

/// A quarter of GPU 0 for `ana`, taken now.
fn quarter(host: &Host) -> Lease {
    Lease {
        mode: Mode::Mps,
        sm: Some(Percent::from_thousandths(25_000)),
        memory_bytes: Some(25 * GIB),
        claimed_owner: Some("ana".to_owned()),
        since: host.time / 1000,
        ..lease(1, "GPU-0")
    }
}

/// What was held: whole, by SMs, by memory.
fn held(report: &Report) -> (f64, f64, f64) {
    let total = &report.total;
    (total.whole_gpu_hours, total.sm_gpu_hours, total.memory_gpu_hours)
}

#[test]
fn a_lease_counts_from_its_taking_to_its_end_whoever_looks_when() {
    for looks in [vec![], vec![HOUR], vec![1, HOUR, 2 * HOUR]] {
        let mut host = Host::new();
        host.look(&[]);
        let lease = quarter(&host);
        let mut events = vec![host.event(Kind::LeaseTaken, &lease)];
        let (taken, began) = (host.uptime, host.time);
        for look in looks {
            (host.uptime, host.time) = (taken + look, began + look);
            host.ledger.leases = vec![lease.clone()];
            host.look(&std::mem::take(&mut events));
        }
        host.ledger.leases.clear();
        (host.uptime, host.time) = (taken + 4 * HOUR, began + 4 * HOUR);
        events.push(host.event(Kind::LeaseEnded, &lease));
        host.pass(HOUR);
        host.look(&events);
        let report = host.report(By::Owner);
        assert_eq!(held(&report), (4.0, 1.0, 1.0));
        let ana = &report.rows[0];
        assert_eq!((ana.words().as_str(), ana.leases, ana.unseen_ends), ("ana (claim)", 1, 0));
        assert_eq!(host.report(By::Gpu).rows[0].name, "GPU-0");
        assert_eq!(host.report(By::Mode).rows[0].name, "mps");
        assert_eq!(host.report(By::Container).rows[0].name, "container-1");
    }
}

#[test]
fn a_lease_counts_nothing_while_it_is_suspended_and_then_where_it_comes_back() {
    for looks in [false, true] {
        let mut host = Host::new();
        host.look(&[]);
        let mut lease = Lease { state: LeaseState::Active, ..quarter(&host) };
        let me = Process::current().unwrap();
        let (id, there) = (lease.id.clone(), "GPU-1".to_owned());
        let mut events = vec![host.event(Kind::LeaseTaken, &lease)];
        host.ledger.leases = vec![lease.clone()];
        let pass = |host: &mut Host, events: &mut Vec<Event>, kind: Kind| {
            host.pass(HOUR);
            events.push(host.event(kind, &host.ledger.leases[0]));
            if looks {
                host.look(&std::mem::take(events));
            }
        };
        host.ledger.begin_suspending(&id, me, Vec::new(), None).unwrap();
        host.ledger.end_suspended(&id, me);
        pass(&mut host, &mut events, Kind::Suspended);
        host.ledger.begin_resuming(&id, me, Some(&there)).unwrap();
        host.ledger.end_resumed(&id, me, &there);
        pass(&mut host, &mut events, Kind::Moved);
        lease = host.ledger.leases[0].clone();
        host.pass(HOUR);
        host.look(&events);
        assert_eq!(lease.devices, [there]);
        let report = host.report(By::Gpu);
        assert_eq!(held(&report).0.to_string(), "2", "an hour on each, and one on none");
        let hours: Vec<_> = report.rows.iter().map(|row| row.whole_gpu_hours.to_string()).collect();
        assert_eq!(hours, ["1", "1"], "{looks}");
    }
}

#[test]
fn clocks_that_are_set_change_nothing() {
    let mut host = Host::new();
    host.ledger.leases = vec![quarter(&host)];
    host.look(&[]);
    for step in [40 * DAY, 0, 3 * DAY] {
        host.time = START + step;
        host.pass(HOUR);
        host.look(&[]);
    }
    assert_eq!(Some(held(&host.report(By::Owner)).0), Some(3.0));
}

#[test]
fn a_lease_that_nobody_saw_end_counts_up_to_the_last_sign_of_life() {
    // A crash of the host.
    let mut host = Host::new();
    host.ledger.leases = vec![quarter(&host)];
    host.look(&[]);
    host.pass(HOUR);
    host.look(&[]);
    host.pass(DAY);
    (host.uptime, host.boot_id) = (60_000, "second");
    host.ledger.leases.clear();
    host.look(&[]);
    let report = host.report(By::Owner);
    assert_eq!((held(&report).0, report.total.unseen_ends, report.total.leases), (1.0, 1, 1));
    assert_eq!(
        Some(report.unwatched_hours),
        Some(25.0),
        "the host was off, or nobody looked; and one hour before"
    );
    // An event that is lost; one that is on its way is waited for.
    host.ledger.leases = vec![quarter(&host)];
    host.look(&[]);
    host.pass(HOUR);
    host.look(&[]);
    host.ledger.leases.clear();
    host.pass(1000);
    host.look(&[]);
    assert_eq!(host.report(By::Owner).total.unseen_ends, 1);
    host.pass(LATE + 1);
    host.look(&[]);
    let report = host.report(By::Owner);
    assert_eq!((held(&report).0, report.total.unseen_ends), (2.0, 2));
}

#[test]
fn a_record_that_begins_anew_counts_nothing_twice() {
    let mut host = Host::new();
    host.ledger.leases = vec![quarter(&host)];
    host.look(&[]);
    host.pass(DAY);
    host.look(&[]);
    assert_eq!(Some(held(&host.report(By::Owner)).0.round()), Some(24.0));
    let now = host.record().join("now.json");
    std::fs::write(&now, "{").unwrap();
    host.pass(1);
    host.look(&[]);
    // Yesterday has a file; what was counted of today is lost, and is not made up from yesterday.
    assert_eq!(Some(held(&host.report(By::Owner)).0.round()), Some(12.0));
    assert!(now.with_extension("json.aside").exists());
}

#[test]
fn a_record_of_the_future_or_with_impossible_numbers_spoils_no_other_day() {
    // Of this boot and of an earlier one: a clock that was years ahead, and numbers that no clock has.
    for (boot, number) in [("first", START + 900 * DAY), ("first", u64::MAX), ("older", u64::MAX)] {
        let mut host = Host::new();
        host.ledger.leases = vec![quarter(&host)];
        host.look(&[]);
        let path = host.record().join("now.json");
        let mut now: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        now["boot_id"] = boot.into();
        now["looked"] = serde_json::json!({"uptime": number, "time": number});
        now["open"].as_object_mut().unwrap().values_mut().for_each(|open| open["counted"] = number.into());
        for day in now["days"].as_object_mut().unwrap().values_mut() {
            day["unwatched"] = number.into();
            day["rows"][0][1]["waited"] = number.into();
        }
        std::fs::write(&path, now.to_string()).unwrap();
        std::fs::write(host.record().join("9999-12-31.json"), now["days"][&date(START)].to_string()).unwrap();
        host.ledger.leases.clear();
        host.look(&[]);
        let before = host.report(By::Owner).total;
        // What comes now is counted as ever.
        host.ledger.leases = vec![Lease { id: lease(2, "GPU-0").id, ..quarter(&host) }];
        host.look(&[]);
        host.pass(HOUR);
        host.look(&[]);
        let after = host.report(By::Owner).total;
        let more = after.whole_gpu_hours - before.whole_gpu_hours;
        assert!((more - 1.0).abs() < 1e-6, "{boot} {number}: {more}");
        assert_eq!(after.leases, before.leases + 1, "{boot} {number}");
    }
}

#[test]
fn refusals_and_waits_are_their_owners() {
    let mut host = Host::new();
    let lease = quarter(&host);
    let refused = Event { text: "no room".into(), ..host.event(Kind::Refused, &lease) };
    let users = Event { uid: 4_000_000_000, owner: String::new(), ..refused.clone() };
    let waited = Event { took_ms: Some(90_000), ..host.event(Kind::LeaseTaken, &lease) };
    host.ledger.leases = vec![lease];
    host.look(&[refused, users, waited]);
    let report = host.report(By::Owner);
    let of = |name: &str| report.rows.iter().find(|row| row.name == name).unwrap();
    let ana = of("ana");
    assert_eq!((ana.refusals, ana.waits, ana.waited_seconds, ana.leases), (1, 1, 90.0, 1));
    assert_eq!(of("4000000000").refusals, 1);
    assert_eq!(report.total.refusals, 2);
    let of_user = |own| all(By::User).report(Some(own), &host.config).total;
    assert_eq!(
        (of_user(4_000_000_000).refusals, of_user(1000).refusals),
        (1, 0),
        "users see their own alone"
    );
}

#[test]
fn use_counts_where_the_driver_tells_and_somebody_looks_often() {
    let mut host = Host::new();
    let sliced = Lease { mode: Mode::TimeSlice, ..quarter(&host) };
    let holder = Holder {
        process: Process { pid: 4_000_000, start_time: 1 },
        name: "python3".to_owned(),
        memory_bytes: None,
        is_server: false,
        is_client: false,
        lease: Some(sliced.id.clone()),
    };
    let processes = vec![ProcessUse { holder, sm_percent: Some(40) }];
    let used = DeviceUse { processes, ..DeviceUse::default() };
    host.usage = Some(Usage { devices: BTreeMap::from([("GPU-0".to_owned(), used)]), ..Usage::default() });
    host.ledger.leases = vec![sliced];
    host.look(&[]);
    for _ in 0..60 {
        host.pass(60_000);
        host.look(&[]);
    }
    let total = host.report(By::Owner).total;
    assert_eq!((total.used_gpu_hours, total.measured_gpu_hours), (Some(0.4), 1.0));
    host.pass(HOUR);
    host.look(&[]);
    let total = host.report(By::Owner).total;
    assert_eq!(
        (total.used_gpu_hours, total.measured_gpu_hours, total.whole_gpu_hours),
        (Some(0.4), 1.0, 2.0)
    );
}

#[test]
fn each_mode_books_its_part_of_the_gpu() {
    let (gpu, mig) = (device(0), part(&device(1), 3, "1g.18gb"));
    let inventory = host(vec![gpu, device(1), mig]);
    let held = |mode, isolation, sm, memory_bytes: Option<u64>, uuid: &str| {
        let booked = Booked { mode, isolation, sm, memory_bytes, job: None };
        let Part { gpu, sm, memory, .. } = parts(&booked, &[uuid.to_owned()], Some(&inventory)).remove(0);
        (gpu, sm, memory)
    };
    let (shared, half) = (Isolation::Shared, Some(Percent::from_thousandths(50_000)));
    let on = |gpu: &str, sm, memory| (gpu.to_owned(), sm, memory);
    assert_eq!(held(Mode::Exclusive, shared, None, None, "GPU-0"), on("GPU-0", 100_000, 100_000));
    assert_eq!(held(Mode::Mps, shared, half, Some(10 * GIB), "GPU-0"), on("GPU-0", 50_000, 10_000));
    let dedicated = held(Mode::Mps, Isolation::Dedicated, half, Some(10 * GIB), "GPU-0");
    assert_eq!(dedicated, on("GPU-0", 0, 10_000), "it takes turns");
    assert_eq!(held(Mode::TimeSlice, shared, None, None, "GPU-0"), on("GPU-0", 0, 0));
    // 16 of 132 SMs, an eighth of the memory.
    assert_eq!(held(Mode::Mig, shared, None, None, "MIG-3"), on("GPU-1", 12_122, 12_500));
    assert_eq!(held(Mode::Mps, shared, half, None, "MIG-3"), on("GPU-1", 6_061, 0));
    assert_eq!(held(Mode::Exclusive, shared, None, None, "GPU-9"), on("GPU-9", 0, 0), "it is gone");
    assert_eq!(parts(&Booked::of(&quarter(&Host::new())), &["GPU-0".to_owned()], None)[0].sm, 0);
}

#[test]
fn a_users_report_is_bounded() {
    let mut host = Host::new();
    for day in 0..25_u64 {
        host.time = START + day * DAY;
        let of_user = host.event(Kind::Refused, &quarter(&host));
        let refused = |number: u32| Event {
            uid: 4_000_000_000,
            container_id: format!("c{day}-{number}"),
            ..of_user.clone()
        };
        host.look(&(0..100).map(refused).collect::<Vec<_>>());
        host.pass(1000);
    }
    let report = |own| all(By::Container).report(own, &host.config);
    let users = report(Some(4_000_000_000));
    assert_eq!((users.rows.len(), users.total.refusals), (2001, 2500));
    assert_eq!(users.rows.last().map(|row| (&*row.name, row.refusals)), Some(("(others)", 500)));
    assert_eq!(report(None).rows.len(), 2500);
}

#[test]
fn a_million_leases_in_a_year_are_read_day_by_day() {
    let mut host = Host::new();
    host.look(&[]);
    for day in 0..20_u64 {
        host.time = START + day * DAY;
        let mut events = Vec::new();
        for number in 0..2750_u64 {
            let held = lease(day * 10_000 + number, "GPU-0");
            let taken = host.event(Kind::LeaseTaken, &held);
            host.pass(1000);
            events.extend([taken, host.event(Kind::LeaseEnded, &held)]);
        }
        host.look(&events);
    }
    let report = host.report(By::Container);
    assert_eq!((report.total.leases, report.rows.len()), (55_000, 20 * 500 + 1));
    assert!((held(&report).0 - 55_000.0 / 3600.0).abs() < 1e-6);
    assert_eq!(days(&host.record(), "", "9").count(), 20);
    let bytes: u64 =
        std::fs::read_dir(host.record()).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum();
    assert!(bytes < 20 * (300 << 10), "{bytes}");
}
