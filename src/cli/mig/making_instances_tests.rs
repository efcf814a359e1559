use super::super::fake_driver::{Double, h200, profile, shape};
use super::*;
use sublet_core::ledger::LeaseId;
use sublet_core::place::Site;
use sublet_core::process::Process;

fn order(name: &str) -> Order {
    let site = Site { gpu: "GPU-0".into(), memory_bytes: 0, sms: 0, most: None };
    Order { sites: vec![site], profile: Some(name.into()) }
}

fn awaited() -> Awaited {
    let lease = LeaseId::parse("00000000000000aa").unwrap();
    Awaited { lease, container: "c".into(), owner: Process::current().unwrap() }
}

/// The result of creating an instance on `driver`, and the records after it.
fn made(driver: &mut Double, store: &Store) -> (Result<(), NotMade>, Vec<DynamicInstance>) {
    let mut making = Making::new(driver, store);
    let done = making.make(&order("1g.18gb"), &awaited(), Policy::Binpack);
    (done, store.read().unwrap().mig.dynamic_instances)
}

#[test]
fn every_call_may_fail_before_or_after_its_work() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    for all_the_same in [false, true] {
        for call in 0.. {
            let mut driver = Double::new(vec![h200()]);
            driver.all_the_same = all_the_same;
            driver.fails = Box::new(move |now| now == call);
            let (done, records) = made(&mut driver, &store);
            if done.is_ok() {
                assert!(call >= 3, "{call}");
                let mut making = Making::new(&mut driver, &store);
                making.change(|ledger| ledger.mig.dynamic_instances.clear()).unwrap();
                break;
            }
            assert_eq!((shape(&driver.gpus[0]), records), (vec![], vec![]), "{call} {all_the_same}");
        }
    }
}

/// Found by tests/model: a lease was taken on an instance that another process had just destroyed, while that went on
/// with something else.
#[test]
fn inventories_from_before_an_instance_was_destroyed_are_out_of_date_at_once() {
    let (mut driver, dir) = (Double::new(vec![h200()]), tempfile::tempdir().unwrap());
    let store = Store::open(dir.path()).unwrap();
    assert_eq!(made(&mut driver, &store).0, Ok(()));
    let count = store.read().unwrap().mig.count;
    Making::new(&mut driver, &store).clear(Some(&awaited().lease), &mut |_| {}).unwrap();
    assert!(store.read().unwrap().mig.count > count);
}

/// Found by tests/model: while the container waited, nothing else cleared this.
#[test]
fn remains_of_a_killed_attempt_make_way_for_the_next() {
    let (mut driver, dir) = (Double::new(vec![h200()]), tempfile::tempdir().unwrap());
    let store = Store::open(dir.path()).unwrap();
    assert_eq!(made(&mut driver, &store).0, Ok(()));
    let cut_short = |ledger: &mut sublet_core::ledger::Ledger| ledger.mig.dynamic_instances[0].uuid = None;
    store.change(cut_short).unwrap();
    let mut making = Making::new(&mut driver, &store);
    making.clear(None, &mut |_| {}).unwrap();
    assert_eq!(store.read().unwrap().mig.dynamic_instances.len(), 1, "another command leaves it alone");
    making.clear(Some(&awaited().lease), &mut |_| {}).unwrap();
    assert_eq!(store.read().unwrap().mig.dynamic_instances, []);
}

#[test]
fn an_instance_that_cannot_be_destroyed_stays_written_down_and_goes_later() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let mut driver = Double::new(vec![h200()]);
    let (done, records) = made(&mut driver, &store);
    done.unwrap();
    let uuid = records[0].uuid.clone().unwrap();
    assert_eq!(records[0].placement, (6, 1));
    let given_up = store.update(|ledger| {
        ledger.stop_awaiting(&awaited().lease);
        Ok::<_, ()>(())
    });
    given_up.unwrap().0.unwrap();
    driver.gpus[0].instances[0].compute[0].held = Some("process 7".into());
    let mut seen = Vec::new();
    let mut making = Making::new(&mut driver, &store);
    let lines = making.clear(None, &mut |uuid| seen.push(uuid.to_owned())).unwrap();
    assert!(
        lines[0].starts_with("MIG instance 1g.18gb at 6:1 of GPU GPU-0, created for a container"),
        "{lines:?}"
    );
    assert_eq!(seen, [uuid]);
    let stuck = store.read().unwrap().mig.dynamic_instances.remove(0);
    assert!(stuck.going && stuck.stuck.is_some() && !stuck.emptied, "it is whole");
    driver.gpus[0].instances[0].compute[0].held = None;
    let mut making = Making::new(&mut driver, &store);
    assert_eq!(making.clear(None, &mut |_| {}).unwrap(), Vec::<String>::new());
    assert_eq!((driver.gpus[0].instances.len(), store.read().unwrap().mig.dynamic_instances), (0, vec![]));
}

#[test]
fn only_an_instance_certainly_created_by_sublet_is_destroyed() {
    let there = || Double::with(&[(profile("1g.18gb"), 6)]);
    let now = there().gpus[0].instances[0].clone();
    let uuid = now.compute[0].uuid.clone();
    let record = |gi, uuid: Option<&str>, emptied| DynamicInstance {
        gi,
        uuid: uuid.map(str::to_owned),
        going: true,
        emptied,
        ..sublet_core::ledger::dynamic_instance_fixture::dynamic_instance(6, None)
    };
    let bare = Instance { compute: Vec::new(), ..now.clone() };
    let cases = [
        (record(Some(now.gi), Some(&uuid), false), &now, true, "as it was made"),
        (record(Some(now.gi), Some(&uuid), true), &now, true, "its destruction failed"),
        (record(Some(now.gi), Some("MIG-old"), true), &now, false, "made again by somebody"),
        (record(Some(now.gi + 1), Some(&uuid), false), &now, false, "another id"),
        (record(Some(now.gi), Some(&uuid), true), &bare, true, "killed between the two"),
        (record(Some(now.gi), Some(&uuid), false), &bare, false, "emptied by somebody"),
        (record(Some(now.gi), None, false), &now, true, "killed before its UUID was known"),
        (record(Some(now.gi), None, false), &bare, true, "killed before its compute instance"),
        (record(Some(now.gi), None, true), &now, false, "it had none when it was last seen"),
        (record(None, None, false), &bare, true, "killed before its id was known"),
        (record(None, None, false), &now, false, "we had not come so far"),
    ];
    for (made, now, ours, why) in cases {
        assert_eq!(is_recorded_instance(&made, now), ours, "{why}");
    }
}

/// A creation that failed and could not be undone, with or without its compute instance. Returns the record, and how
/// many instances there are after another program has put one in its place.
fn stuck(whole: bool, theirs: bool) -> (DynamicInstance, usize) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let mut driver = Double::new(vec![h200()]);
    let (done, records) = made(&mut driver, &store);
    done.unwrap();
    let mut making = Making::new(&mut driver, &store);
    // The state after a failed call to create the compute instance.
    making
        .note(&records[0], |made| (made.uuid, made.awaited, made.stuck) = (None, None, Some("x".into())))
        .unwrap();
    let one = &mut driver.gpus[0].instances[0];
    let user = Some("process 7".to_owned());
    if whole {
        one.compute[0].held = user;
    } else {
        (one.compute, one.held) = (Vec::new(), user);
    }
    let mut making = Making::new(&mut driver, &store);
    assert_eq!(making.clear(None, &mut |_| {}).unwrap().len(), 1);
    let left = store.read().unwrap().mig.dynamic_instances.remove(0);
    let span = driver.gpus[0].instances.remove(0).span;
    let gi = driver.create_instance("GPU-0", profile("1g.18gb"), span).unwrap();
    if theirs {
        driver.create_compute("GPU-0", gi, 1, None).unwrap();
    }
    let mut making = Making::new(&mut driver, &store);
    assert_eq!(making.clear(None, &mut |_| {}).unwrap(), Vec::<String>::new());
    assert_eq!(store.read().unwrap().mig.dynamic_instances, []);
    (left, driver.gpus[0].instances.len())
}

#[test]
fn an_instance_of_another_program_in_place_of_a_stuck_one_stays() {
    let (left, there) = stuck(true, true);
    assert_eq!((left.uuid.as_deref(), left.emptied, there), (Some("MIG-0"), false, 1));
    assert_eq!(stuck(true, false).1, 1);
    let (left, there) = stuck(false, true);
    assert_eq!((left.uuid, left.emptied, there), (None, true, 1));
}
