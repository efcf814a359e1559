//! `sublet metrics`: what there is, what is not known, what is gone, and what was counted.

use serde_json::json;
use sublet_e2e::{World, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const GPU: &str = "GPU-5b1e7000-0000-4000-8000-000000000100";

fn metrics(world: &World, arguments: &[&str]) -> String {
    let output = world.sublet(&[&["metrics"], arguments].concat());
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The value of the one sample that starts so.
fn value(text: &str, start: &str) -> Option<f64> {
    let mut found =
        text.lines().filter_map(|line| line.strip_prefix(start)?.rsplit_once(' ')?.1.parse().ok());
    let first = found.next();
    assert_eq!(found.next(), None, "{start} in {text}");
    first
}

#[test]
fn a_container_has_samples_while_it_is_there_and_what_is_not_known_has_none() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("seen", &[("sublet.sm", "25"), ("sublet.memory", "8GiB")], HOLD);
    bundle.up();
    bundle.event("info");
    let text = metrics(&world, &[]);
    assert!(text.ends_with("# EOF\n"), "{text}");
    let of = |name: &str| value(&text, &format!("{name}{{container=\"seen\""));
    assert_eq!(of("sublet_container_memory_limit_bytes"), Some(8_589_934_592.0));
    assert_eq!(of("sublet_container_sm_limit_ratio"), Some(0.25));
    assert!(of("sublet_container_memory_used_bytes").is_some_and(|bytes| bytes > 100e6), "{text}");
    assert_eq!(
        (of("sublet_container_busy_ratio"), of("sublet_container_server_busy_ratio")),
        (None, Some(1.0))
    );
    let gpu = |name: &str| value(&text, &format!("{name}{{gpu=\"0\",uuid=\"{GPU}\"}}"));
    assert_eq!((gpu("sublet_gpu_sm_booked_ratio"), gpu("sublet_gpu_leases")), (Some(0.25), Some(1.0)));
    let root = world.driver_root.as_ref().expect("simulated");
    std::fs::write(root.join("sim/fail"), "nvmlInit_v2 0 999\n").expect("written");
    let blind = metrics(&world, &[]);
    assert!(!blind.contains("_used_bytes") && !blind.contains("sublet_gpu_busy_ratio"), "{blind}");
    assert_eq!(
        (value(&blind, "sublet_up"), value(&blind, "sublet_healthy")),
        (Some(1.0), Some(0.0)),
        "{blind}"
    );
    std::fs::remove_file(root.join("sim/fail")).expect("removed");
    bundle.down();
    assert!(!metrics(&world, &[]).contains("container=\"seen\""), "it leaves with the next scrape");
    world.assert_empty();
}

#[test]
fn what_happened_is_counted_once_however_often_it_is_scraped() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("counted", &[("sublet.sm", "60")], HOLD);
    bundle.up();
    let _ = world.bundle("greedy", &[("sublet.sm", "60")], HOLD).refused();
    let _ = metrics(&world, &[]);
    let count = |name: &str| value(&metrics(&world, &[]), name);
    assert_eq!(count("sublet_refusals_total{reason=\"no-room\"}"), Some(1.0));
    assert_eq!(count("sublet_events_total{kind=\"lease-taken\"}"), Some(1.0));
    bundle.down();
    assert_eq!(count("sublet_lease_duration_seconds_count"), Some(1.0));
    assert_eq!(count("sublet_start_duration_seconds_bucket{le=\"+Inf\"}"), Some(1.0));
    // The events are gone, the counts are not.
    std::fs::remove_file(world.state_dir().join("events.jsonl")).expect("removed");
    assert_eq!(count("sublet_refusals_total{reason=\"no-room\"}"), Some(1.0));
    world.assert_empty();
}

#[test]
fn the_textfile_is_replaced_and_a_name_with_escapes_is_one_label() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("named", &[("sublet.sm", "25")], HOLD);
    bundle.up();
    let lease = world.leases()[0]["id"].as_str().expect("an id").to_owned();
    let name = format!("a\"b\\c\nd\u{1b}[2J{}", "x".repeat(4096));
    let names = json!({"schema": "sublet.names/1", "leases": {lease: {"seen": 1, "engine": null, "name": name,
        "image": "", "part_of": "", "unit": ""}}});
    std::fs::write(world.state_dir().join("names.json"), names.to_string()).expect("written");
    let file = world.dir.path().join("sublet.prom");
    std::fs::write(&file, "old").expect("written");
    let _ = metrics(&world, &["--format", "prometheus", "--output", file.to_str().expect("UTF-8")]);
    let text = std::fs::read_to_string(&file).expect("read");
    assert!(text.contains("# TYPE sublet_events_total counter") && !text.contains("# EOF"), "{text}");
    let line = text.lines().find(|line| line.starts_with("sublet_lease_info")).expect("a line");
    assert!(
        line.starts_with("sublet_lease_info{container=\"a\\\"b\\\\c\\nd\u{fffd}[2Jx") && line.len() < 1000,
        "{line}"
    );
    bundle.down();
    world.assert_empty();
}

#[test]
fn without_a_driver_it_is_down() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let root = world.driver_root.as_ref().expect("simulated");
    for there in ["proc/driver", "sys/module/nvidia"] {
        std::fs::remove_dir_all(root.join(there)).expect("removed");
    }
    let output = world.sublet(&["metrics"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!((value(&text, "sublet_up"), value(&text, "sublet_healthy")), (Some(0.0), Some(0.0)), "{text}");
    assert_eq!(text.lines().count(), 7, "{text}");
}
