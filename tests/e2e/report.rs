//! Whom containers are for, and `sublet report`: by claims, by users, over reboots and lost events, and where no record can be kept.

use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use serde_json::{Value, json};
use sublet_e2e::{World, eventually, skip_unless_root};

use crate::two_users::{ALICE, BOB, QUARTER, serving};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const VISION: &[(&str, &str)] =
    &[("sublet.sm", "25"), ("sublet.memory", "35GiB"), ("sublet.owner", "vision")];

fn text(world: &World, arguments: &[&str]) -> String {
    let output = world.sublet(arguments);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn report(world: &World, arguments: &[&str]) -> Value {
    let text = text(world, &[&["report", "--format", "json"], arguments].concat());
    serde_json::from_str(&text).expect("JSON")
}

fn record(world: &World) -> PathBuf {
    world.state_dir().join("lasting/usage/now.json")
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value}"))
}

#[test]
fn what_an_owner_held_is_reported_and_an_owner_of_roots_container_is_a_claim() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("training", VISION, HOLD);
    bundle.up();
    let mut greedy = VISION.to_vec();
    greedy[0].1 = "90";
    let _ = world.bundle("greedy", &greedy, HOLD).refused();
    let lease = &world.status()["leases"][0];
    assert_eq!(lease["owner"], json!({"name": "vision", "known_by": "claim"}), "{lease}");
    assert!(text(&world, &["status", "--owner", "vision"]).contains("vision (claim)"));
    assert_eq!(text(&world, &["lease", "list", "--owner", "sound"]), "No leases.\n");
    assert!(text(&world, &["lease", "list", "--user", "root"]).contains("training"));
    assert!(text(&world, &["top", "--once", "--owner", "vision"]).contains("vision (claim)"));
    assert!(text(&world, &["top", "--once", "--owner", "sound"]).contains("No lease matches"));
    assert!(text(&world, &["events", "--owner", "vision"]).contains(" for vision (claim) "));
    assert_eq!(text(&world, &["events", "--owner", "sound"]), "");
    assert!(text(&world, &["metrics"]).contains("owner=\"vision\",owner_known_by=\"claim\""));
    bundle.down();
    let told = report(&world, &[]);
    let [row] = &told["rows"].as_array().expect("rows")[..] else { panic!("{told}") };
    assert_eq!((&row["name"], &row["known_by"]), (&json!("vision"), &json!("claim")));
    assert_eq!((&row["leases"], &row["refusals"], &row["unseen_ends"]), (&json!(1), &json!(1), &json!(0)));
    let (whole, sm) = (number(&row["whole_gpu_hours"]), number(&row["sm_gpu_hours"]));
    assert!(whole > 0.0 && (sm * 4.0 - whole).abs() < 1e-9, "{row}");
    assert!((number(&row["memory_gpu_hours"]) * 4.0 / whole - 1.0).abs() < 0.01, "{row}");
    // It is over, and stays so without its events.
    std::fs::remove_file(world.state_dir().join("events.jsonl")).expect("removed");
    assert_eq!(report(&world, &[])["rows"], told["rows"]);
    for (by, name) in [("user", "root"), ("container", "training"), ("mode", "mps")] {
        assert_eq!(report(&world, &["--by", by])["rows"][0]["name"], name);
    }
    assert_eq!(report(&world, &["--owner", "sound"])["rows"], json!([]));
    assert_eq!(report(&world, &["--until", "2001-01-01", "--since", "2000-01-01"])["rows"], json!([]));
    assert!(text(&world, &["report", "--by", "gpu"]).contains("\nGPU 0 "));
    assert!(text(&world, &["report", "--format", "csv"]).contains("\r\nvision,claim,"));
    assert!(text(&world, &["report", "--format", "svg"]).contains(">vision (claim)</text>"));
    world.assert_empty();
}

#[test]
fn who_waits_is_shown_by_user_and_owner() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let hers = host.bundle(ALICE, "hers", QUARTER, HOLD);
    hers.up();
    let alice = host.world.leases()[0]["user"].as_str().expect("her name").to_owned();
    let holder = host.world.bundle("holder", &[("sublet.sm", "60")], HOLD);
    holder.up();
    let claimed = [("sublet.sm", "40"), ("sublet.owner", "vision"), ("sublet.wait", "60s")];
    let claimed = host.world.bundle("claimed", &claimed, HOLD);
    let next = host.bundle(ALICE, "next", &[QUARTER, &[("sublet.wait", "60s")]].concat(), HOLD);
    let waiting = |of: &[&str]| -> Vec<String> {
        let status = text(&host.world, &[&["status", "--format", "json"], of].concat());
        let status: Value = serde_json::from_str(&status).expect("JSON");
        let all = status["waiting"].as_array().expect("a list").clone();
        all.iter().map(|one| one["container_id"].as_str().unwrap_or_default().to_owned()).collect()
    };
    std::thread::scope(|scope| {
        let of_root = scope.spawn(|| claimed.create());
        assert!(eventually(|| waiting(&[]) == ["claimed"]), "{:?}", waiting(&[]));
        let of_alice = scope.spawn(|| next.create());
        assert!(eventually(|| waiting(&[]) == ["claimed", "next"]), "{:?}", waiting(&[]));
        for (option, value, expected) in [
            ("--owner", "vision", "claimed"),
            ("--user", "root", "claimed"),
            ("--user", &*alice, "next"),
            ("--owner", &*alice, "next"),
        ] {
            assert_eq!(waiting(&[option, value]), [expected], "{option} {value}");
        }
        assert_eq!(waiting(&["--owner", "sound"]), [""; 0]);
        assert_eq!(waiting(&["--container", "holder"]), [""; 0]);
        holder.down();
        for created in [of_root, of_alice].map(|start| start.join().expect("no panic")) {
            assert!(created.ok, "{created:?}");
        }
    });
    for bundle in [&hers, &next] {
        bundle.down();
    }
    claimed.down();
    host.world.assert_empty();
}

#[test]
fn names_that_are_none_are_refused() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let long = "x".repeat(4096);
    for (number, owner) in ["", " a", "a\u{1b}[2J", "a\nb", &long].into_iter().enumerate() {
        let id = format!("no-{number}");
        let refused = world.bundle(&id, &[("sublet.sm", "25"), ("sublet.owner", owner)], HOLD).refused();
        assert!(refused.contains("sublet.owner=") && !refused.contains('\u{1b}'), "{refused}");
        assert!(refused.len() < 1000, "{refused}");
    }
    assert_eq!(report(&world, &[])["total"]["refusals"], 5);
    world.assert_empty();
}

#[test]
fn a_lease_that_nobody_saw_end_is_closed_and_marked() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("running", VISION, HOLD);
    bundle.up();
    assert_eq!(report(&world, &[])["total"]["leases"], 1);
    // As if it had been recorded before a reboot.
    let stored = std::fs::read(record(&world)).expect("the record");
    let mut stored: Value = serde_json::from_slice(&stored).expect("JSON");
    stored["boot_id"] = json!("another");
    std::fs::write(record(&world), stored.to_string()).expect("written");
    let total = report(&world, &[])["total"].clone();
    assert_eq!((&total["leases"], &total["unseen_ends"]), (&json!(2), &json!(1)), "{total}");
    // An end of which no event tells.
    bundle.down();
    std::fs::remove_file(world.state_dir().join("events.jsonl")).expect("removed");
    assert!(eventually(|| report(&world, &[])["total"]["unseen_ends"] == 2));
    for format in ["table", "svg"] {
        assert!(text(&world, &["report", "--format", format]).contains("whose end nobody saw"), "{format}");
    }
    let csv = world.sublet(&["report", "--format", "csv"]);
    let [columns, notes] = [csv.stdout, csv.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    assert!(notes.contains("whose end nobody saw") && !columns.contains("nobody saw"), "{columns}{notes}");
    world.assert_empty();
}

#[test]
fn without_a_place_for_the_record_containers_run_and_the_report_says_so() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    std::fs::write(world.state_dir().join("lasting"), "no directory").expect("written");
    let bundle = world.bundle("running", VISION, HOLD);
    bundle.up();
    let output = world.sublet(&["report"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.contains("what is not recorded yet is missing"), "{said}");
    std::fs::remove_file(world.state_dir().join("lasting")).expect("removed");
    assert_eq!(report(&world, &[])["total"]["leases"], 1, "nothing was lost");
    std::fs::write(record(&world), "{\"schema\":\"sublet.usage/2\"}").expect("written");
    assert_eq!(report(&world, &[])["total"]["leases"], 1, "it begins anew");
    assert!(record(&world).with_extension("json.aside").exists(), "and a newer version's is not lost");
    bundle.down();
    world.assert_empty();
}

#[test]
fn a_last_look_that_hangs_does_not_keep_the_service_from_its_end() {
    if skip_unless_root() {
        return;
    }
    let mut host = serving("h200");
    assert!(eventually(|| record(&host.world).exists()), "the service looks by itself");
    let lock = File::open(record(&host.world).with_file_name("lock")).expect("the lock");
    let held = Flock::lock(lock, FlockArg::LockExclusive).expect("locked");
    let began = Instant::now();
    host.stop();
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    drop(held);
    host.world.assert_empty();
}

#[test]
fn users_are_known_and_see_their_own_alone() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    assert!(eventually(|| record(&host.world).exists()), "the service looks by itself");
    let roots = host.world.bundle("roots", VISION, HOLD);
    roots.up();
    let alices = host.bundle(ALICE, "alices", QUARTER, HOLD);
    alices.up();
    let other = host.bundle(ALICE, "other", &[QUARTER, &[("sublet.owner", "vision")]].concat(), HOLD);
    let refused = other.create();
    assert!(!refused.ok && refused.stderr.contains("sublet.owner=vision is not "), "{refused:?}");
    assert_eq!(report(&host.world, &["--by", "container"])["total"]["leases"], 2);
    let seen = |uid| -> Value {
        let mut command = host.command(uid, "sublet");
        let output = command.args(["report", "--format", "json"]).output().expect("it runs");
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
    };
    let own = seen(ALICE);
    assert_eq!((&own["total"]["leases"], &own["total"]["refusals"]), (&json!(1), &json!(1)), "{own}");
    assert_eq!(own["rows"][0]["known_by"], "user", "{own}");
    assert_eq!(seen(BOB)["rows"], json!([]));
    let leases = host.world.leases();
    let hers = leases.iter().find(|lease| lease["container_id"] == "alices").expect("her lease");
    let alice = hers["user"].as_str().expect("her name");
    for command in [&["status"][..], &["top", "--once"], &["events"], &["report", "--by", "container"]] {
        let told = text(&host.world, &[command, &["--user", alice]].concat());
        assert!(told.contains("alices") && !told.contains("roots"), "{command:?}: {told}");
    }
    // What the kernel says may be said, too.
    let named = host.bundle(ALICE, "named", &[QUARTER, &[("sublet.owner", alice)]].concat(), HOLD);
    named.up();
    let leases = host.world.leases();
    let named_lease = leases.iter().find(|lease| lease["container_id"] == "named").expect("its lease");
    assert_eq!(named_lease["owner"], json!({"name": alice, "known_by": "user"}));
    named.down();
    alices.down();
    roots.down();
    host.world.assert_empty();
}
