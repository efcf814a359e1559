use proptest::prelude::*;

use super::*;

/// Shortly before a day ends.
const START: u64 = 20_000 * DAY - 3_600_000;

fn open(counted: u64) -> Open {
    let key = Key { uid: 1000, user: "ana".into(), container: "web".into(), ..Key::default() };
    let part = |gpu: &str, sm, used| Part { gpu: gpu.into(), sm, memory: 50_000, used };
    let parts = vec![part("GPU-0", 25_000, Some(10_000)), part("GPU-1", 12_500, None)];
    Open { key, parts, counted, missing: None }
}

fn record(dir: &tempfile::TempDir, time: u64) -> Record {
    Record::open(dir.path(), Moment { uptime: 0, time }).unwrap()
}

/// What is recorded of a lease that is looked at at these times since boot.
fn counted(looks: &[u64]) -> BTreeMap<String, Day> {
    let dir = tempfile::tempdir().unwrap();
    let mut record = record(&dir, 0);
    let mut open = open(0);
    for &uptime in looks {
        record.at = Moment { uptime, time: START + uptime };
        record.count(&mut open, uptime).unwrap();
    }
    record.now.days
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Sums over any split of a time into looks are the sums of the whole, on each day.
    #[test]
    fn sums_are_the_same_however_often_somebody_looks(
        mut looks in proptest::collection::vec(0..3 * DAY, 0..12),
        end in 0..3 * DAY,
    ) {
        looks.retain(|look| *look < end);
        looks.sort_unstable();
        looks.push(end);
        prop_assert_eq!(counted(&looks), counted(&[end]));
    }

    /// Whatever the clock is set to between looks, what was held is what passed since boot.
    #[test]
    fn a_clock_that_is_set_changes_no_sum(steps in proptest::collection::vec((1..DAY, 0..300 * DAY), 1..8)) {
        let dir = tempfile::tempdir().unwrap();
        let mut record = record(&dir, 0);
        let (mut open, mut uptime) = (open(0), 0);
        for (passed, time) in steps {
            uptime += passed;
            record.at = Moment { uptime, time: START + time };
            record.count(&mut open, uptime).unwrap();
        }
        let rows = record.now.days.values().flat_map(|day| &day.rows);
        let held: u64 = rows.filter(|row| row.0.gpu == "GPU-0").map(|row| row.1.held).sum();
        prop_assert_eq!(held, uptime);
    }
}

#[test]
fn a_time_belongs_to_its_days() {
    let days = counted(&[2 * 3_600_000]);
    let of = |at: usize| days.values().nth(at).unwrap().rows[0].1;
    assert_eq!(days.keys().collect::<Vec<_>>(), ["2024-10-03", "2024-10-04"]);
    let hour = 3_600_000;
    let expected = Sums {
        held: hour,
        sm: hour * 25_000,
        memory: hour * 50_000,
        measured: hour,
        used: hour * 10_000,
        ..Sums::default()
    };
    assert_eq!([of(0), of(1)], [expected, expected]);
    assert_eq!(days.values().nth(1).unwrap().rows[1].1.measured, 0, "of the second GPU nothing is told");
}

#[test]
fn days_that_are_over_have_files_and_one_that_comes_back_is_added_to() {
    let dir = tempfile::tempdir().unwrap();
    let add = |time: u64| {
        let mut record = record(&dir, time);
        record.note(&open(0), Sums { leases: 1, ..Sums::default() }, time).unwrap();
        record.write().unwrap();
    };
    let leases = |since: &str, until: &str| -> u64 {
        days(dir.path(), since, until).map(|day| day.unwrap().rows[0].1.leases).sum()
    };
    add(START);
    assert_eq!(dates(dir.path()), [""; 0], "it is in the file with what goes on");
    add(START + DAY);
    assert_eq!(dates(dir.path()), ["2024-10-03"]);
    // The clock is set back.
    add(START);
    add(START + DAY);
    assert_eq!((leases("2024-10-03", "2024-10-03"), leases("2024-10-04", "2024-10-04")), (2, 2));
    assert_eq!((leases("2024-10-01", "2024-12-01"), leases("2024-10-05", "2024-12-01")), (4, 0));
}

#[test]
fn unreadable_files_are_named_and_neither_added_to_nor_lost() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name);
    let newer = r#"{"schema":"sublet.usage/2","unwatched":0,"rows":[]}"#;
    fs::write(file("2024-10-01.json"), newer).unwrap();
    fs::write(file("2024-10-02.json"), "{\"schema\":\"sublet.usa").unwrap();
    fs::write(file("2024-10-03.json"), "\u{0}\u{1b}garbage").unwrap();
    fs::write(file("now.json"), r#"{"schema":"sublet.usage/1","open":7}"#).unwrap();
    fs::write(file("2024-10-04.json.aside"), "").unwrap();
    let unread: Vec<String> = days(dir.path(), "", "9").filter_map(Result::err).collect();
    assert_eq!(unread, ["2024-10-01", "2024-10-02", "2024-10-03", "today"]);
    let mut record = record(&dir, START - 2 * DAY);
    record.note(&open(0), Sums { refusals: 1, ..Sums::default() }, START - 2 * DAY).unwrap();
    record.write().unwrap();
    assert_eq!(fs::read_to_string(file("2024-10-01.json.aside")).unwrap(), newer);
    assert!(file("now.json.aside").exists());
    assert_eq!(days(dir.path(), "2024-10-01", "2024-10-01").filter_map(Result::ok).count(), 1);
}

#[test]
fn a_record_that_cannot_be_written_is_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("now.json")).unwrap();
    let (dir_path, now) = (dir.path().to_owned(), Now::default());
    let record = Record { dir: dir_path, at: Moment::default(), before: now.clone(), now };
    assert!(record.write().is_err());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "and nothing is left");
}

#[test]
fn a_day_is_bounded_and_the_rest_is_counted_together() {
    let mut day = Day::default();
    for number in 0..3000_u32 {
        let owner = Some(Owner { name: format!("o{number}"), known_by: KnownBy::Claim });
        let container = format!("c{number}");
        let key = Key { uid: number, owner, container, gpu: "GPU-0".into(), ..Key::default() };
        day.add(key, Sums { leases: 1, held: 7, ..Sums::default() });
    }
    assert!(day.rows.len() <= 2 * MOST + 2, "{}", day.rows.len());
    assert_eq!(day.rows.iter().map(|row| row.1.held).sum::<u64>(), 3000 * 7);
    let rest = day.rows.iter().find(|row| row.0.uid == u32::MAX).unwrap();
    assert_eq!((rest.0.container.as_str(), rest.0.gpu.as_str()), (OTHERS, "GPU-0"));
    assert!(serde_json::to_vec(&day).unwrap().len() < 500 << 10);
    assert!(day.rows.is_sorted_by(|one, other| one.0 < other.0));
}

#[test]
fn a_user_with_many_containers_takes_no_room_from_anybody_else() {
    let mut day = Day::default();
    let one = |uid: u32, number: u32| Key { uid, container: format!("c{number}"), ..Key::default() };
    for number in 0..3000 {
        day.add(one(1000, number), Sums { refusals: 1, ..Sums::default() });
        day.add(one(1000, 0), Sums { leases: 1, ..Sums::default() });
    }
    assert_eq!(day.rows.len(), MOST_OF_A_USER + 1);
    // One who has many uids fills the users' part.
    (2000..6000).for_each(|uid| day.add(one(uid, 1), Sums::default()));
    day.add(one(0, 7), Sums::default());
    let sums = |name: &str| {
        day.rows.iter().find(|row| row.0.uid == 1000 && row.0.container == name).map(|row| row.1)
    };
    assert!(day.rows.iter().any(|row| row.0 == one(0, 7)), "root's has its own row");
    assert_eq!(sums("c0").map(|sums| (sums.leases, sums.refusals)), Some((3000, 1)));
    assert_eq!(sums(OTHERS).map(|sums| sums.refusals), Some(2900));
}

#[test]
fn the_oldest_days_go() {
    let dir = tempfile::tempdir().unwrap();
    for day in 0..KEPT as u64 + 3 {
        fs::write(dir.path().join(format!("{}.json", date(day * DAY))), "{}").unwrap();
    }
    let mut record = record(&dir, START);
    record.note(&open(0), Sums::default(), START).unwrap();
    record.at.time += DAY;
    record.write().unwrap();
    let left = dates(dir.path());
    assert_eq!((left.len(), left[0].as_str()), (KEPT, date(4 * DAY).as_str()));
}

#[test]
fn stored_records_are_read_and_written_again_alike() {
    let stored = include_str!("../../../tests/formats/every-key/usage.json");
    let stored: serde_json::Value = serde_json::from_str(stored).unwrap();
    let read: Now = serde_json::from_value(stored.clone()).unwrap();
    assert_eq!(serde_json::to_value(&read).unwrap(), stored);
    let Sums { leases, unseen_ends, held, sm, memory, measured, used, refusals, waits, waited } =
        read.days.values().next().unwrap().rows[0].1;
    let all = [leases, unseen_ends, held, sm, memory, measured, used, refusals, waits, waited];
    assert!(all.iter().all(|sum| *sum > 0), "{all:?}");
}
