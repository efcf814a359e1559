//! `sublet status`: what is used, by whom, and what is not known; on a narrow terminal, again and again, of one GPU.

use std::process::{Command, Output};

use serde_json::{Value, json};
use sublet_e2e::{World, bin_dir, eventually, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const MIB: u64 = 1 << 20;

fn used(world: &World, container: &str) -> Value {
    let status = world.status();
    let mut leases = status["leases"].as_array().expect("leases").iter();
    leases.find(|lease| lease["container_id"] == container).expect("a lease")["used"].clone()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// `sublet` with `arguments` on a terminal of `columns`.
fn on_terminal(world: &World, columns: u32, arguments: &str, variables: &[(&str, &str)]) -> Command {
    let line = format!("stty cols {columns} rows 24; {} {arguments}", bin_dir().join("sublet").display());
    let mut command = Command::new("script");
    command.args(["-qec", &line, "/dev/null"]).env("SUBLET_CONFIG", &world.config).env("TERM", "xterm");
    command.env_remove("LC_ALL").env("LANG", "C").env("NO_COLOR", "1");
    command.envs(variables.iter().copied());
    command
}

#[test]
fn a_container_under_time_slicing_has_its_own_load_and_memory() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let (one, two) = (
        world.bundle("one", &[("sublet.mode", "time-slice")], HOLD),
        world.bundle("two", &[("sublet.mode", "time-slice")], HOLD),
    );
    one.up();
    one.event("info");
    let alone = used(&world, "one");
    assert_eq!((&alone["sm_percent"], &alone["server_sm_percent"]), (&json!(100), &json!(null)), "{alone}");
    assert!(alone["memory_bytes"].as_u64().is_some_and(|bytes| bytes >= 100 * MIB), "{alone}");
    two.up();
    two.event("info");
    for container in ["one", "two"] {
        let used = used(&world, container);
        // Of 25 samples 12 or 13 are of each.
        assert!(used["sm_percent"].as_u64().is_some_and(|percent| (45..=55).contains(&percent)), "{used}");
        assert_eq!(used["processes"], json!(1));
    }
    one.down();
    two.down();
    world.assert_empty();
}

#[test]
fn seven_containers_that_take_turns_all_have_a_figure() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let seven: Vec<_> = (0..7)
        .map(|number| {
            let bundle = world.bundle(&format!("c{number}"), &[("sublet.mode", "time-slice")], HOLD);
            bundle.up();
            bundle.event("info");
            bundle
        })
        .collect();
    for number in 0..7 {
        let used = used(&world, &format!("c{number}"));
        // In one second the driver notes five of them.
        assert!(used["sm_percent"].as_u64().is_some_and(|percent| (10..=20).contains(&percent)), "{used}");
    }
    for bundle in &seven {
        bundle.down();
    }
    world.assert_empty();
}

#[test]
fn containers_of_one_mps_server_are_not_told_apart_and_one_with_its_own_server_is() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200-h100", "");
    let shared = world.bundle("shared", &[("sublet.gpu", "0"), ("sublet.sm", "25")], HOLD);
    let own = [("sublet.gpu", "1"), ("sublet.sm", "25"), ("sublet.isolation", "dedicated")];
    let own = world.bundle("own", &own, HOLD);
    for bundle in [&shared, &own] {
        bundle.up();
        bundle.event("info");
    }
    let load = |container| {
        let used = used(&world, container);
        (used["sm_percent"].clone(), used["server_sm_percent"].clone(), used["processes"].clone())
    };
    assert_eq!(load("shared"), (json!(null), json!(100), json!(1)), "never a 0 of its own");
    assert_eq!(load("own"), (json!(100), json!(null), json!(1)));
    let table = text(&world.sublet(&["status"]));
    assert!(table.contains("n/a of 100 %") && table.contains("mps, own MPS"), "{table}");
    shared.down();
    own.down();
    world.assert_empty();
}

#[test]
fn what_the_driver_does_not_tell_is_unknown_and_said_first() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("held", &[("sublet.mode", "time-slice"), ("sublet.memory", "8GiB")], HOLD);
    bundle.up();
    bundle.event("info");
    let root = world.driver_root.as_ref().expect("simulated");
    let fail = |line: &str| std::fs::write(root.join("sim/fail"), line).expect("written");
    // 999 is NVML_ERROR_UNKNOWN.
    fail("nvmlDeviceGetMemoryInfo_v2 0 999\nnvmlDeviceGetMemoryInfo 0 999\n");
    let used = world.status()["devices"][0]["used"].clone();
    assert_eq!((&used["memory_bytes"], &used["busy_percent"]), (&json!(null), &json!(100)), "{used}");
    // NVML's search for a UUID may fail alone.
    fail("nvmlDeviceGetHandleByUUID 0 15\n");
    assert!(world.status()["devices"][0]["used"].is_object(), "{}", world.status());
    fail("nvmlDeviceGetHandleByUUID 0 999\nnvmlDeviceGetHandleByIndex_v2 0 999\n");
    let status = world.status();
    assert_eq!(status["devices"][0]["used"], json!(null));
    let nothing =
        json!({"memory_bytes": null, "processes": null, "sm_percent": null, "server_sm_percent": null});
    assert_eq!(status["leases"][0]["used"], nothing);
    let table = text(&world.sublet(&["status"]));
    assert!(table.lines().any(|line| line.starts_with("GPU 0: what is used is not known: ")), "{table}");
    assert!(table.contains("- / 8 GiB"), "{table}");
    fail("nvmlInit_v2 0 999\n");
    let status = world.status();
    let first = status["warnings"].as_array().and_then(|all| all.get(1)).and_then(Value::as_str);
    assert!(first.is_some_and(|line| line.starts_with("what is used is not known: ")), "{status}");
    // One that only does not tell processes apart.
    fail("nvmlDeviceGetProcessUtilization 0 3\nnvmlDeviceGetUtilizationRates 0 3\n");
    let status = world.status();
    assert_eq!(status["leases"][0]["used"]["sm_percent"], json!(null));
    assert_eq!(status["devices"][0]["used"]["busy_percent"], json!(null));
    assert!(status["leases"][0]["used"]["memory_bytes"].is_u64(), "{status}");
    std::fs::remove_file(root.join("sim/fail")).expect("removed");
    bundle.down();
    world.assert_empty();
}

#[test]
fn who_uses_a_gpu_without_a_lease_is_named() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let _ = world.status();
    let mut stranger = world.stranger();
    let status = world.status();
    let outside = &status["devices"][0]["used"]["outside"];
    assert_eq!(
        (&outside[0]["pid"], &outside[0]["name"]),
        (&json!(stranger.id()), &json!("cuda-probe")),
        "{status}"
    );
    let table = text(&world.sublet(&["status"]));
    let line = format!("GPU 0: used without a lease by cuda-probe (pid {}, ", stranger.id());
    assert!(table.lines().any(|shown| shown.starts_with(&line)), "{table}");
    let _ = stranger.kill();
    let _ = stranger.wait();
    assert!(eventually(|| world.status()["devices"][0]["used"]["outside"] == json!([])));
}

#[test]
fn mig_devices_are_a_tree_and_compute_instances_show_that_they_share_memory() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("a100x2-mig", "");
    let bundle = world.bundle("part", &[("sublet.gpu", "0:0"), ("sublet.mode", "mig")], HOLD);
    bundle.up();
    bundle.event("info");
    let status = world.status();
    let parts = status["devices"][0]["mig"].as_array().expect("MIG devices").clone();
    let sharing: Vec<_> = parts.iter().filter(|part| part["shares_memory_with"] != json!([])).collect();
    let used = &status["leases"][0]["used"];
    assert_eq!((&used["processes"], &used["sm_percent"]), (&json!(1), &json!(null)), "{used}");
    let table = text(&world.sublet(&["status"]));
    let of = |start: &str| table.lines().find(|line| line.starts_with(start)).unwrap_or_default().to_owned();
    assert!(of("0 ").contains(" mig ") && !of("0 ").contains('▒'), "a parent has nothing booked: {table}");
    assert!(of("├ 0:0").contains("4g.20gb") && of("└ 0:3").contains('g'), "{table}");
    for part in &sharing[1..] {
        let line = of(&format!("├ {}", part["number"].as_str().expect("a number")));
        let line = if line.is_empty() {
            of(&format!("└ {}", part["number"].as_str().unwrap_or_default()))
        } else {
            line
        };
        assert!(line.contains(" as 0:"), "{line} in {table}");
    }
    assert!(sharing.len() >= 2, "the topology has compute instances: {parts:?}");
    assert!(table.contains("mig 4g.20gb") && table.contains("/ all"), "{table}");
    bundle.down();
    world.assert_empty();
}

#[test]
fn one_gpu_or_one_container_is_shown_alone() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200-h100", "");
    let bundles = ["0", "1"].map(|gpu| {
        let bundle = world.bundle(&format!("on-{gpu}"), &[("sublet.gpu", gpu), ("sublet.sm", "25")], HOLD);
        bundle.up();
        bundle
    });
    let shown = |arguments: &[&str]| -> Value {
        let output = world.sublet(&[&["status", "--format", "json"], arguments].concat());
        serde_json::from_slice(&output.stdout).expect("JSON")
    };
    let names = |status: &Value| {
        let number = |list: &str| status[list].as_array().map_or(0, Vec::len);
        (status["leases"][0]["container_id"].clone(), number("leases"), number("devices"), number("mps"))
    };
    assert_eq!(names(&shown(&["--gpu", "1"])), (json!("on-1"), 1, 1, 1));
    assert_eq!(names(&shown(&["--gpu", "0000:19:00.0"])), (json!("on-0"), 1, 1, 1));
    assert_eq!(names(&shown(&["--container", "on-0"])), (json!("on-0"), 1, 1, 1));
    assert_eq!(names(&shown(&[])).1, 2);
    let refused = world.sublet(&["status", "--gpu", "7"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("there is no device 7"), "{refused:?}");
    for bundle in &bundles {
        bundle.down();
    }
    world.assert_empty();
}

#[test]
fn a_narrow_terminal_gets_fewer_columns_and_colour_only_where_wanted() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("narrow", &[("sublet.sm", "25"), ("sublet.memory", "8GiB")], HOLD);
    bundle.up();
    let widest = |text: &str| {
        let tables = text.lines().skip_while(|line| !line.starts_with("Driver"));
        tables.map(|line| line.trim_end().chars().count()).max().unwrap_or_default()
    };
    let at = |columns| text(&on_terminal(&world, columns, "status", &[]).output().expect("script runs"));
    let (wide, usual, tiny) = (at(200), at(80), at(20));
    assert!(wide.contains("LEASE") && widest(&wide) > 80, "{wide}");
    assert!(widest(&usual) <= 80 && usual.contains("narrow") && usual.contains("MEMORY"), "{usual}");
    assert!(tiny.contains("narrow"), "{tiny}");
    assert!(!wide.contains('\u{1b}'), "NO_COLOR: {wide:?}");
    let coloured = on_terminal(&world, 80, "status", &[("NO_COLOR", ""), ("LANG", "C.UTF-8")]).output();
    let coloured = text(&coloured.expect("script runs"));
    assert!(coloured.contains("\u{1b}[1mGPU") && coloured.contains('·'), "{coloured:?}");
    assert!(usual.contains("....") && !usual.contains('·'), "no UTF-8: {usual}");
    bundle.down();
    world.assert_empty();
}

#[test]
fn watching_shows_it_again_until_nobody_reads() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let _ = world.status();
    let line = format!("timeout 4 {} status --watch=1 | grep -c ^Driver", bin_dir().join("sublet").display());
    let mut shell = Command::new("sh");
    let output = shell.args(["-c", &line]).env("SUBLET_CONFIG", &world.config).output().expect("sh runs");
    let times: u32 = text(&output).trim().parse().expect("a number");
    assert!((2..=5).contains(&times), "{times}");
    let line = format!("timeout 30 {} status --watch=1 | head -1", bin_dir().join("sublet").display());
    let mut shell = Command::new("sh");
    let began = std::time::Instant::now();
    let output = shell.args(["-c", &line]).env("SUBLET_CONFIG", &world.config).output().expect("sh runs");
    assert!(began.elapsed().as_secs() < 25 && output.stderr.is_empty(), "a closed pipe ends it: {output:?}");
}
