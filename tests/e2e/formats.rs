//! Stored files and machine-readable output keep their names: every key of the fixtures in tests/formats is still
//! written, with a value of the same kind. A unit test beside each format checks that the stored fixtures can still be
//! read.
//!
//! `SUBLET_FORMATS=DIR` writes this build's documents there, for new fixtures.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Map, Value, json};
use sublet_e2e::{Bundle, World, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];

/// All documents of a world with one refused container, by name.
fn documents(world: &World, bundle: &Bundle<'_>) -> Map<String, Value> {
    let mut all = Map::new();
    for name in ["ledger.json", "inventory.json", "refusals.json"] {
        let text = std::fs::read_to_string(world.state_dir().join(name)).expect(name);
        all.insert(name.to_owned(), serde_json::from_str(&text).expect(name));
    }
    let annotations = bundle.config()["annotations"].as_object().expect("annotations").clone();
    let ours =
        annotations.into_iter().filter(|(key, _)| key.starts_with("sublet.lease")).map(|(key, value)| {
            let text = value.as_str().expect("a string").to_owned();
            (key, serde_json::from_str(&text).ok().filter(Value::is_object).unwrap_or(value))
        });
    all.insert("annotations.json".into(), Value::Object(ours.collect()));
    let stack = world.dir.path().join("compose.yaml");
    let services = "{ a: { runtime: sublet, annotations: [ sublet.gpu=5 ] }, b: { runtime: sublet-none } }";
    std::fs::write(&stack, format!("services: {services}\n")).expect("written");
    let stack = stack.to_str().expect("UTF-8");
    for (name, command) in [
        ("status.json", &["status"][..]),
        ("last-error.json", &["status", "--last-error"]),
        ("lease-list.json", &["lease", "list"]),
        ("doctor.json", &["doctor"]),
        ("explain.json", &["explain", "--edits", "gpu=5", "sm=25", "memory=1GiB", "guard=terminate"]),
        ("explain-stack.json", &["explain", "--compose", stack]),
        ("explain-container.json", &["explain", "--container", &bundle.id]),
        ("explain-refused.json", &["explain", "--container", "refused"]),
        ("error.json", &["explain", "gpu=17"]),
    ] {
        let mut asked = world.command("sublet");
        if command.contains(&"--compose") {
            // Docker Compose, where there is one, would refuse a service without an image.
            asked.env("PATH", "/nonexistent");
        }
        let output = asked.args(command).args(["--format", "json"]).output().expect("it runs");
        if let Ok(document) = serde_json::from_slice(&output.stdout) {
            all.insert(name.to_owned(), document);
        }
    }
    all
}

/// Every path to a value with the value's kind; elements of an array are one, and so are keys that name things.
fn shape(at: &str, value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(members) => {
            found.insert(format!("{at}: object"));
            members.iter().for_each(|(key, value)| {
                let named = ["GPU-", "MIG-", "/"].iter().any(|start| key.starts_with(start));
                shape(&format!("{at}.{}", if named { "*" } else { key }), value, found);
            });
        }
        Value::Array(elements) => elements.iter().for_each(|value| shape(&format!("{at}[]"), value, found)),
        Value::String(_) => drop(found.insert(format!("{at}: string"))),
        Value::Number(_) => drop(found.insert(format!("{at}: number"))),
        Value::Bool(_) => drop(found.insert(format!("{at}: boolean"))),
        // May be anything, another time.
        Value::Null => {}
    }
}

fn shape_of(document: &Value) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    shape("", document, &mut found);
    found
}

fn compare(name: &str, documents: &Map<String, Value>) {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../formats").join(name);
    if let Some(to) = std::env::var_os("SUBLET_FORMATS").map(|to| Path::new(&to).join(name)) {
        std::fs::create_dir_all(&to).expect("made");
        for (name, document) in documents {
            let text = serde_json::to_string_pretty(document).expect("JSON");
            std::fs::write(to.join(name), text + "\n").expect("written");
        }
        return;
    }
    let mut seen = 0;
    for entry in std::fs::read_dir(fixtures).expect("tests/formats") {
        let file = entry.expect("an entry").path();
        let name = file.file_name().expect("a name").to_string_lossy().into_owned();
        let fixture: Value = serde_json::from_slice(&std::fs::read(&file).expect("read")).expect("JSON");
        let (before, now) = (shape_of(&fixture), shape_of(&documents[&name]));
        let gone: Vec<_> = before.difference(&now).collect();
        assert!(gone.is_empty(), "{name} has no {gone:#?} any more");
        seen += 1;
    }
    assert!(seen >= 7, "{seen} fixtures");
}

#[test]
fn of_mps_and_time_slices() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let all = [
        ("sublet.gpu", "0"),
        ("sublet.sm", "25"),
        ("sublet.memory", "8GiB"),
        ("sublet.processes", "2"),
        ("sublet.isolation", "dedicated"),
        ("sublet.priority", "low"),
    ];
    let shared = world.bundle("shared", &all, HOLD);
    shared.up();
    let one =
        world.bundle("one", &[("sublet.gpu", "1"), ("sublet.sm", "12.5"), ("sublet.memory", "2GiB")], HOLD);
    one.up();
    let sliced = world.bundle("sliced", &[("sublet.gpu", "2,3"), ("sublet.mode", "time-slice")], HOLD);
    sliced.up();
    assert!(world.sublet(&["drain", "4"]).status.success());
    let refused = world.bundle("refused", &[("sublet.gpu", "17")], HOLD);
    assert!(!refused.create().ok);
    let documents = documents(&world, &shared);
    assert_eq!(documents["ledger.json"]["leases"].as_array().map(Vec::len), Some(3));
    compare("gpus", &documents);
    for bundle in [shared, one, sliced] {
        bundle.down();
    }
    world.assert_empty();
}

#[test]
fn of_mig_devices() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200-mig", "[mig]\ndynamic = true\n");
    let small = world.bundle("small", &[("sublet.mig", "1g.18gb")], HOLD);
    small.up();
    let part = [("sublet.mig", "2g.35gb"), ("sublet.mode", "mps"), ("sublet.sm", "50")];
    let part = world.bundle("part", &part, HOLD);
    part.up();
    let refused = world.bundle("refused", &[("sublet.mig", "7g.141gb")], HOLD);
    assert!(!refused.create().ok);
    let documents = documents(&world, &part);
    assert_ne!(documents["ledger.json"]["mig"], json!(null));
    compare("mig", &documents);
    small.down();
    part.down();
    world.assert_empty();
}
