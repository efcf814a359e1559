//! config/home-server: its Compose file and its Quadlet units fit on one GPU of 12 GB, and on one of 24 GB with the
//! lines that their comments name; and containers with those annotations run at once, whichever starts first.

use std::path::Path;

use serde_json::{Value, json};
use sublet_e2e::{Bundle, World, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const COMPOSE: &str = include_str!("../../config/home-server/compose.yaml");
const UNITS: [(&str, &str); 4] = [
    ("ollama", include_str!("../../config/home-server/ollama.container")),
    ("jellyfin", include_str!("../../config/home-server/jellyfin.container")),
    ("whisper", include_str!("../../config/home-server/whisper.container")),
    ("immich-machine-learning", include_str!("../../config/home-server/immich-machine-learning.container")),
];
const GIB: u64 = 1 << 30;

/// One kind of GPU, and the GiB of each service there.
struct Home {
    topology: &'static str,
    memory: [(&'static str, Option<u64>); 4],
    text: fn(&str) -> String,
}

const HOMES: [Home; 2] = [
    Home {
        topology: "rtx3060",
        memory: [
            ("ollama", Some(6)),
            ("jellyfin", None),
            ("whisper", Some(2)),
            ("immich-machine-learning", Some(2)),
        ],
        text: str::to_owned,
    },
    Home {
        topology: "rtx3090",
        memory: [
            ("ollama", Some(14)),
            ("jellyfin", None),
            ("whisper", Some(5)),
            ("immich-machine-learning", Some(2)),
        ],
        text: for_24_gb,
    },
];

/// `text` with each line below a comment `24 GB` as the comment says.
fn for_24_gb(text: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    let mut instead = None;
    for line in text.lines() {
        if let Some((indent, said)) = line.split_once("# 24 GB: ") {
            instead = Some(format!("{indent}{said}"));
        } else {
            lines.push(instead.take().unwrap_or_else(|| line.to_owned()));
        }
    }
    lines.join("\n") + "\n"
}

/// `FILE…` below `dir`, as this kind of GPU needs them.
fn written(dir: &Path, text: fn(&str) -> String) -> (String, Vec<String>) {
    let file = |name: &str, shipped: &str| {
        let path = dir.join(name);
        std::fs::write(&path, text(shipped)).expect("written");
        path.to_str().expect("UTF-8").to_owned()
    };
    let units = UNITS.iter().map(|(name, unit)| file(&format!("{name}.container"), unit)).collect();
    (file("compose.yaml", COMPOSE), units)
}

/// The services of `sublet explain ARGUMENTS --format json`, which all have to fit.
fn fitting(world: &World, arguments: &[&str]) -> Vec<Value> {
    let mut command = world.command("sublet");
    // Without Docker Compose, whatever this machine has.
    let command =
        command.env("PATH", "/nonexistent").arg("explain").args(arguments).args(["--format", "json"]);
    let output = command.output().expect("it runs");
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    let document: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(document["fits"], json!(true), "{document}");
    document["services"].as_array().expect("services").clone()
}

fn annotations(unit: &str) -> Vec<(&str, &str)> {
    let lines = unit.lines().filter_map(|line| line.strip_prefix("Annotation="));
    lines.map(|line| line.split_once('=').expect("key and value")).collect()
}

#[test]
fn both_files_fit_on_12_gb_and_on_24_gb() {
    if skip_unless_root() {
        return;
    }
    for Home { topology, memory, text } in HOMES {
        let world = World::simulated(topology, "");
        let (compose, units) = written(world.dir.path(), text);
        let units: Vec<&str> = units.iter().map(String::as_str).collect();
        for services in [
            fitting(&world, &["--compose", &compose]),
            fitting(&world, &[&["--quadlet"], &units[..]].concat()),
        ] {
            assert_eq!(services.len(), memory.len(), "{services:?}");
            for (name, gib) in memory {
                let service = services.iter().find(|service| service["service"] == name).expect(name);
                let expected = (if gib.is_some() { "mps" } else { "time-slice" }, gib.map(|gib| gib * GIB));
                assert_eq!(
                    (&service["mode"], &service["memory_bytes"]),
                    (&json!(expected.0), &json!(expected.1))
                );
            }
        }
        world.assert_empty();
    }
}

#[test]
fn the_24_gb_lines_do_not_fit_on_12_gb() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("rtx3060", "");
    let (compose, _) = written(world.dir.path(), for_24_gb);
    let output = world.sublet(&["explain", "--compose", &compose]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    world.assert_empty();
}

#[test]
fn all_four_run_at_once_whichever_starts_first() {
    if skip_unless_root() {
        return;
    }
    for Home { topology, memory, text } in HOMES {
        let world = World::simulated(topology, "");
        let units: Vec<String> = UNITS.iter().map(|(_, unit)| text(unit)).collect();
        for order in [[0, 1, 2, 3], [1, 3, 2, 0]] {
            let bundle = |at: &usize| world.bundle(UNITS[*at].0, &annotations(&units[*at]), HOLD);
            let bundles: Vec<Bundle<'_>> = order.iter().map(bundle).collect();
            bundles.iter().for_each(Bundle::up);
            for (bundle, at) in bundles.iter().zip(order) {
                let info = bundle.event("info");
                let (_, gib) = memory[at];
                assert_eq!(
                    (&info["error"], &info["mps"]),
                    (&Value::Null, &json!(gib.is_some())),
                    "{}",
                    bundle.id
                );
                let free = info["free_mib"].as_u64().expect("free_mib");
                // With a limit: the share less the context. Jellyfin sees what the others leave of the GPU.
                assert!(
                    gib.is_none_or(|gib| free <= gib << 10 && free + 512 > gib << 10),
                    "{}: {free}",
                    bundle.id
                );
            }
            assert_eq!(world.leases().len(), 4);
            bundles.iter().for_each(Bundle::down);
            world.assert_empty();
        }
    }
}
