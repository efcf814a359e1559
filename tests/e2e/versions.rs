//! State files of a newer version of sublet. They are refused with the reason and stay as they are, and nothing is leased
//! twice; containers go on.

use std::path::PathBuf;
use std::process::Output;

use serde_json::{Value, json};
use sublet_e2e::{Bundle, Finished, World, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const INFO: &[&str] = &["/usr/bin/cuda-probe", "info"];
const SLEEP: &[&str] = &["/bin/sleep", "120"];
const LARGE: &[(&str, &str)] = &[("sublet.sm", "60"), ("sublet.memory", "8GiB")];

const NEWER: &str = "sublet.ledger/3";
/// What every refusal says.
const REASON: [&str; 3] =
    ["was written by a newer version of sublet", NEWER, "install the newer version again"];

fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned()).concat()
}

fn assert_reason(said: &str, whose: &str) {
    for words in REASON {
        assert!(said.contains(words), "{whose}: {words:?} is not in {said}");
    }
}

fn files(world: &World) -> [PathBuf; 2] {
    ["ledger.json", "ledger.json.copy"].map(|name| world.state_dir().join(name))
}

fn bytes(files: &[PathBuf]) -> Vec<Vec<u8>> {
    files.iter().map(|path| std::fs::read(path).expect("it is there")).collect()
}

/// Gives the ledger and its copy this schema. Everything else stays.
fn set_schema(world: &World, schema: &str) {
    for path in files(world) {
        let mut ledger: Value = serde_json::from_slice(&std::fs::read(&path).expect("read")).expect("JSON");
        ledger["schema"] = json!(schema);
        ledger["of the newer version"] = json!({"leases": 7});
        std::fs::write(&path, ledger.to_string()).expect("written");
    }
}

fn stranger<'a>(world: &'a World, id: &str) -> Bundle<'a> {
    world.bundle(id, &[], SLEEP)
}

#[test]
fn a_newer_versions_ledger_is_refused_and_kept() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let held = world.bundle("held", LARGE, HOLD);
    held.up();
    held.event("info");
    let ended = world.bundle("ended", &[("sublet.sm", "10")], SLEEP);
    ended.up();
    let leases = world.leases();
    set_schema(&world, NEWER);
    let before = bytes(&files(&world));

    // The shim and the hook: no share, whatever the ledger says is free.
    let small = [("sublet.sm", "5")];
    let created = world.bundle("by-shim", &small, HOLD).create();
    assert!(!created.ok);
    assert_reason(&created.stderr, "create");
    for stage in ["createRuntime", "prestart"] {
        let mut bundle = world.bundle(stage, &small, HOLD);
        bundle.hook(&[stage]);
        let created = bundle.create();
        assert!(!created.ok, "{stage}");
        let last = said(&world.sublet(&["status", "--last-error"]));
        assert_reason(&[created.stderr, last].concat(), stage);
    }
    // Containers without a share notice nothing.
    let plain = stranger(&world, "plain");
    plain.up();
    assert!(plain.pid() > 0 && plain.exec(&["/bin/true"]).ok && plain.kill("KILL").ok);
    plain.down();
    // Those that run have what they were given, and end as ever.
    let seen = held.exec(INFO);
    assert_eq!(seen.json().first().map(|info| info["mps"].clone()), Some(json!(true)), "{seen:?}");
    assert!(held.pid() > 0);
    assert!(ended.kill("KILL").ok);
    let deleted = deleted(&ended);
    assert!(deleted.ok, "{deleted:?}");

    for (command, fails) in [
        (&["status"][..], true),
        (&["lease", "list"], true),
        (&["lease", "release", "held"], true),
        (&["gc"], true),
        (&["drain", "0"], true),
        (&["undrain", "0"], true),
        (&["mps", "list"], true),
        (&["mps", "stop", "0"], true),
        (&["doctor", "--quick"], true),
        (&["serve"], true),
        // The inventory is made anew of what the driver says.
        (&["refresh"], false),
        (&["status", "--last-error"], false),
    ] {
        let output = world.sublet(command);
        assert_eq!(!output.status.success(), fails, "{command:?}: {output:?}");
        if fails {
            assert_reason(&said(&output), &format!("{command:?}"));
        }
    }
    assert_eq!(bytes(&files(&world)), before, "the newer version's ledger");

    // Back with the version that wrote it: the container that ended has no lease, the other one has its own.
    set_schema(&world, "sublet.ledger/1");
    assert!(world.sublet(&["gc"]).status.success());
    assert_eq!(
        world.leases(),
        leases.into_iter().filter(|lease| lease["container_id"] == "held").collect::<Vec<_>>()
    );
    assert!(!world.bundle("too-much", LARGE, HOLD).create().ok);
    held.down();
    world.assert_empty();
}

/// `delete`, once the container's process has ended.
fn deleted(bundle: &Bundle<'_>) -> Finished {
    let mut outcome = bundle.delete();
    sublet_e2e::eventually(|| {
        if !outcome.ok {
            outcome = bundle.delete();
        }
        outcome.ok
    });
    outcome
}

#[test]
fn a_newer_copy_is_not_passed_over_when_the_ledger_is_gone() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let held = world.bundle("held", LARGE, HOLD);
    held.up();
    let leases = world.leases();
    set_schema(&world, NEWER);
    let [ledger, copy] = files(&world);
    std::fs::remove_file(&ledger).expect("removed");
    let before = std::fs::read(&copy).expect("read");
    let created = world.bundle("other", LARGE, HOLD).create();
    assert!(!created.ok);
    assert_reason(&created.stderr, "create");
    assert_eq!(std::fs::read(&copy).expect("read"), before);
    // docs/packaging.md: who goes back for good moves both away, and the ledger is rebuilt from what runs.
    std::fs::rename(&copy, copy.with_extension("newer")).expect("moved");
    assert!(world.sublet(&["gc"]).status.success());
    assert_eq!(world.leases(), leases);
    held.down();
    world.assert_empty();
}

/// What is only remembered, and found out again, is made anew; nothing fails for it.
#[test]
fn other_files_of_a_newer_version() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let held = world.bundle("held", LARGE, HOLD);
    held.up();
    assert!(world.sublet(&["metrics"]).status.success());
    for (file, newer) in [
        ("inventory.json", json!({"schema": "sublet.inventory/99", "devices": 7})),
        ("names.json", json!({"schema": "sublet.names/99", "leases": 7})),
        ("refusals.json", json!({"schema": "sublet.refusals/99"})),
        ("metrics.json", json!({"schema": "sublet.metrics/99", "position": [7]})),
        ("guard.json", json!({"schema": "sublet.guard/99", "events": 7})),
    ] {
        std::fs::write(world.state_dir().join(file), newer.to_string()).expect("written");
        let other = world.bundle("other", &[("sublet.sm", "20")], SLEEP);
        other.up();
        assert_eq!(world.leases().len(), 2, "{file}");
        for command in [&["status"][..], &["metrics"], &["gc"], &["status", "--last-error"]] {
            let output = world.sublet(command);
            assert!(output.status.success(), "{file}: {command:?}: {output:?}");
        }
        other.down();
        assert!(!world.bundle("too-much", LARGE, HOLD).create().ok, "{file}");
    }
    held.down();
    world.assert_empty();
}
