//! Several GPUs in one MPS share: one server of the lease's own over all of them, bound on each of them whatever of
//! them a process sees, booked on each, taken and given back together. The simulator counts ordinals as two real H200s
//! did (docs/evidence).

use crate::two_users::{self, HOLD};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use nvml_wrapper::enum_wrappers::device::ComputeMode;
use serde_json::{Value, json};
use sublet_e2e::guarded::{SPOIL, probes};
use sublet_e2e::{Bundle, World, eventually, in_one_line, skip_unless_root};

/// Of an H200 25 % are 32 SMs.
const PAIR: &[(&str, &str)] =
    &[("sublet.gpu", "any:2"), ("sublet.sm", "25"), ("sublet.memory", "8GiB"), ("sublet.processes", "1")];
/// What a limit of 8 GiB leaves beside a context, in MiB.
const FREE: std::ops::Range<i64> = 7900..8192;
/// The SMs of a quarter.
const QUARTER: i64 = 32;

/// SMs and free MiB on each device that a CUDA program sees which is run by `/bin/env` with these arguments.
fn seen(bundle: &Bundle<'_>, env: &[&str]) -> Vec<(i64, i64)> {
    let args = [&["/bin/env"], env, &["/usr/bin/cuda-probe", "info"]].concat();
    let info = bundle.exec(&args).info();
    assert_eq!((&info["error"], &info["mps"]), (&Value::Null, &json!(true)), "{env:?}");
    let devices = info["devices"].as_array().expect("devices");
    devices.iter().map(|device| (number(&device["sm"]), number(&device["free_mib"]))).collect()
}

fn number(value: &Value) -> i64 {
    value.as_i64().unwrap_or_else(|| panic!("a number: {value}"))
}

/// Bound on all devices that it sees, in every form in which a program may look at them.
fn assert_bound(bundle: &Bundle<'_>, free: &std::ops::Range<i64>, sm: i64) {
    let forms: [(&[&str], usize); 5] = [
        (&[], 2),
        (&["CUDA_VISIBLE_DEVICES=1"], 1),
        (&["CUDA_VISIBLE_DEVICES=1,0"], 2),
        (&["CUDA_VISIBLE_DEVICES=0"], 1),
        (&["-u", "CUDA_VISIBLE_DEVICES"], 2),
    ];
    for (env, count) in forms {
        let seen = seen(bundle, env);
        assert_eq!(seen.len(), count, "{env:?}");
        assert!(seen.iter().all(|(sms, left)| *sms == sm && free.contains(left)), "{env:?}: {seen:?}");
    }
    // Without sublet's environment the server's own limits apply.
    let bare = seen(bundle, &["-i"]);
    assert!(bare.len() == 2 && bare.iter().all(|(sms, left)| *sms == sm && free.contains(left)), "{bare:?}");
}

/// GPUs of the world on which anything is booked: index, and MiB of memory.
fn booked(world: &World) -> Vec<(i64, u64)> {
    let status = world.status();
    let devices = status["devices"].as_array().expect("devices").clone();
    let of = |device: &Value| {
        let reserve = 512 << 20;
        let (all, free) = (device["memory_bytes"].as_u64()?, device["free"]["memory_bytes"].as_u64()?);
        let booked = all.checked_sub(reserve + free)? >> 20;
        (booked > 0).then(|| (number(&device["index"]), booked))
    };
    devices.iter().filter_map(of).collect()
}

fn refused(world: &World, id: &str, annotations: &[(&str, &str)]) -> String {
    let before = world.leases();
    let bundle = world.bundle(id, annotations, HOLD);
    bundle.write();
    let finished = bundle.create();
    assert!(!finished.ok, "{annotations:?} is not refused");
    assert_eq!(world.leases(), before, "nothing is taken");
    let message = in_one_line(&finished.stderr);
    assert_eq!(message.lines().count(), 1, "{message}");
    message
}

#[test]
fn every_form_of_a_program_is_bound_on_both_and_both_are_given_back() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let bundle = world.bundle("pair", PAIR, HOLD);
    bundle.up();
    let info = bundle.event("info");
    assert_eq!((&info["count"], &info["mps"]), (&json!(2), &json!(true)));
    assert_bound(&bundle, &FREE, QUARTER);
    let env: Vec<String> = serde_json::from_value(bundle.config()["process"]["env"].clone()).expect("env");
    let value = |name: &str| env.iter().find_map(|entry| entry.strip_prefix(name)?.strip_prefix('='));
    assert_eq!(value("CUDA_VISIBLE_DEVICES"), Some("0,1"));
    assert_eq!(value("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), Some("25"));
    assert_eq!(value("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"), None, "it would bind nothing where one is seen");
    assert_eq!(value("SUBLET_MEMORY_BYTES"), Some("8589934592"));
    assert_eq!(value("SUBLET_MEMORY_FRACTION"), Some("0.055"));
    let exec = bundle.exec_file(&["/bin/env"], &["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=100G", "PATH=/bin"]);
    for entry in env.iter().filter(|entry| entry.starts_with("CUDA_") || entry.starts_with("SUBLET_")) {
        assert!(exec.stdout.lines().any(|line| line == entry), "{entry} is not there: {}", exec.stdout);
    }
    assert!(!exec.stdout.contains("PINNED"), "{}", exec.stdout);

    let status = world.status();
    let leases = status["leases"].as_array().expect("leases");
    assert_eq!((leases.len(), &leases[0]["id"]), (2, &leases[1]["id"]));
    for (lease, device) in leases.iter().zip(status["devices"].as_array().expect("devices")) {
        assert_eq!(lease["device"], device["uuid"]);
        assert_eq!((&lease["isolation"], &lease["memory_bytes"]), (&json!("dedicated"), &json!(8_u64 << 30)));
        assert_eq!(device["mode"], "time-slice");
    }
    let daemons = status["mps"].as_array().expect("mps");
    assert_eq!((daemons.len(), &daemons[0]["lease"]), (1, &leases[0]["id"]));
    assert_eq!(daemons[0]["devices"], json!([leases[0]["device"], leases[1]["device"]]));
    let table = world.sublet(&["mps", "list"]);
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(table.contains("0, 1"), "{table}");
    // 8192 MiB, and 66 of the server's own on each.
    assert_eq!(booked(&world), [(0, 8258), (1, 8258)]);
    bundle.down();
    assert_eq!(booked(&world), []);
    world.assert_empty();
}

#[test]
fn time_slice_with_memory_over_two_is_the_same_with_all_sms() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let share = [("sublet.gpu", "2,1"), ("sublet.mode", "time-slice"), ("sublet.memory", "8GiB")];
    let bundle = world.bundle("turns", &share, HOLD);
    bundle.up();
    bundle.event("info");
    assert_bound(&bundle, &(7600..8192), 132);
    assert_eq!(booked(&world), [(1, 8258), (2, 8258)]);
    bundle.down();
    world.assert_empty();
}

#[test]
fn each_of_several_processes_has_its_part_on_both() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let share =
        [("sublet.gpu", "0,1"), ("sublet.sm", "50"), ("sublet.memory", "8GiB"), ("sublet.processes", "2")];
    let bundle = world.bundle("workers", &share, HOLD);
    bundle.up();
    bundle.event("info");
    assert_bound(&bundle, &(3900..4096), QUARTER);
    bundle.down();
    world.assert_empty();
}

#[test]
fn of_gpus_of_different_size_a_percentage_is_of_the_smallest() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200-h100", "");
    let share = [("sublet.gpu", "all"), ("sublet.sm", "25"), ("sublet.memory", "25%")];
    let bundle = world.bundle("unlike", &share, HOLD);
    bundle.up();
    bundle.event("info");
    // A quarter of 81559 MiB.
    assert_bound(&bundle, &(20_100..20_389), QUARTER);
    assert_eq!(booked(&world), [(0, 20_389 + 66), (1, 20_389 + 66)]);
    let env = bundle.config()["process"]["env"].clone();
    // 20389 MiB less the context's 147, of the larger one's 143771.
    assert!(env.as_array().expect("env").contains(&json!("SUBLET_MEMORY_FRACTION=0.140")), "{env}");
    bundle.down();
    let explained =
        world.sublet(&["explain", "--annotation", "sublet.gpu=all", "--annotation", "sublet.memory=25%"]);
    let explained = String::from_utf8_lossy(&explained.stdout).into_owned();
    let own = ", own MPS for all of them";
    let memory = "20389 MiB of 143771 MiB on 0; 20389 MiB of 81559 MiB on 1";
    assert!(explained.contains(own) && explained.contains(memory), "{explained}");
    let large =
        refused(&world, "large", &[("sublet.gpu", "all"), ("sublet.sm", "25"), ("sublet.memory", "100GiB")]);
    assert!(large.contains("GPU 1 has 81559 MiB, of which"), "{large}");
    world.assert_empty();
}

#[test]
fn what_one_of_them_lacks_refuses_all() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let two = [("sublet.gpu", "0,1"), ("sublet.sm", "25"), ("sublet.memory", "8GiB")];
    let says = |id: &str, words: &str| {
        let line = refused(&world, id, &two);
        assert!(line.contains(&format!(": GPU 1 {words}")) && !line.contains("GPU 0 "), "{line}");
    };
    assert!(world.sublet(&["drain", "1"]).status.success());
    says("drained", "is drained; why: by ");
    assert!(world.sublet(&["undrain", "1"]).status.success());

    let shared = world.bundle("shared", &[("sublet.gpu", "1"), ("sublet.sm", "10")], HOLD);
    shared.up();
    says("beside", "is in use as mps; why: an MPS server for several devices takes turns");
    shared.down();

    let full = [("sublet.gpu", "1"), ("sublet.mode", "time-slice"), ("sublet.memory", "135GiB")];
    let full = world.bundle("full", &full, HOLD);
    full.up();
    says("full-memory", "has 4953 MiB left to book, 8258 MiB needed");
    full.down();

    let shared = refused(&world, "said", &[two[0], two[1], ("sublet.isolation", "shared")]);
    assert!(shared.contains("sublet.isolation=shared cannot be combined with sublet.gpu=0,1"), "{shared}");
    world.assert_empty();

    let mig = World::simulated("a100x2-mig", "");
    let line = refused(&mig, "mig", &two);
    assert!(line.contains("GPU 0 is in MIG mode"), "{line}");
    let parts =
        refused(&mig, "parts", &[("sublet.gpu", "0:0,0:1"), ("sublet.mode", "mps"), ("sublet.sm", "25")]);
    assert!(parts.contains("an MPS server can use only one MIG device"), "{parts}");
    mig.assert_empty();
}

#[test]
fn a_gpu_whose_compute_mode_is_not_the_default_is_refused() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let nvml = world.nvml();
    let mut second = nvml.device_by_index(1).expect("it is there");
    second.set_compute_mode(ComputeMode::ExclusiveProcess).expect("root may");
    let line = refused(&world, "exclusive", &[("sublet.gpu", "0,1"), ("sublet.sm", "25")]);
    assert!(line.contains("GPU 1 has compute mode EXCLUSIVE_PROCESS"), "{line}");
    world.assert_empty();
}

#[test]
fn a_daemon_that_died_comes_back_with_its_limits_on_both() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let bundle = world.bundle("pair", PAIR, &["/bin/sleep", "600"]);
    bundle.up();
    let daemon = || world.status()["mps"][0].clone();
    let pid = |daemon: &Value| Pid::from_raw(i32::try_from(number(&daemon["pid"])).expect("a pid"));
    let before = daemon();
    for server in world.daemon_pids("") {
        let _ = kill(server, Signal::SIGKILL);
    }
    assert!(eventually(|| !sublet_e2e::is_alive(pid(&before))));
    let gc = world.sublet(&["gc"]);
    let said = String::from_utf8_lossy(&[gc.stdout, gc.stderr].concat()).into_owned();
    let gpus = before["devices"].as_array().expect("devices");
    assert!(gpus.iter().all(|gpu| said.contains(gpu.as_str().expect("a UUID"))), "{said}");
    let after = daemon();
    assert_eq!((&after["state"], &after["devices"]), (&json!("serving"), &before["devices"]));
    assert_bound(&bundle, &FREE, QUARTER);

    // The same after the ledger was lost while it ran.
    for name in ["ledger.json", "ledger.json.copy"] {
        std::fs::write(world.state_dir().join(name), "garbage").expect("it is written");
    }
    assert!(world.sublet(&["gc"]).status.success());
    let rebuilt = daemon();
    assert_eq!((&rebuilt["pid"], &rebuilt["devices"]), (&after["pid"], &before["devices"]));
    assert_eq!(booked(&world), [(0, 8258), (1, 8258)]);
    assert_bound(&bundle, &FREE, QUARTER);
    bundle.down();
    world.assert_empty();
}

#[test]
fn the_guard_holds_each_device_to_the_share_by_itself() {
    if skip_unless_root() {
        return;
    }
    let mut host = two_users::host("h200x8");
    host.start();
    let within = "CUDA_VISIBLE_DEVICES=0 cuda-probe alloc 7000 600 & CUDA_VISIBLE_DEVICES=1 cuda-probe alloc 7000 600 &";
    let share = &[PAIR[0], PAIR[1], PAIR[2], ("sublet.processes", "1")];
    let run = |id: &str, script: &str| {
        let script = format!("{script}\nwait; exec sleep 600");
        host.world.bundle(id, share, &["/bin/sh", "-c", &script]).up();
    };
    run("within", within);
    run("hog", &format!("sleep 3; {SPOIL} CUDA_VISIBLE_DEVICES=1 cuda-probe alloc 52000 600 &"));
    assert!(eventually(|| host.event("memory").is_some()), "{:?}", host.events());
    let event = host.event("memory").expect("seen");
    let second = host.world.status()["devices"][1]["uuid"].clone();
    assert_eq!((&event["container_id"], &event["device"]), (&json!("hog"), &second), "{event}");
    assert!(event["text"].as_str().expect("text").contains("of 8192 MiB"), "{event}");
    let of = |id| host.world.bundle(id, share, &[]);
    assert!(eventually(|| probes(&of("hog")) == 0), "{:?}", host.events());
    // 14000 MiB in all, and within the share on each.
    assert_eq!(probes(&of("within")), 2);
    assert!(!host.events().iter().any(|event| event["container_id"] == "within"), "{:?}", host.events());
}

/// `NVLink` bridges join 0 with 2 and 1 with 3.
#[test]
fn gpus_that_are_joined_closely_go_together_as_far_as_the_driver_tells() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h100x4-bridges", "");
    let explained = || -> Value {
        let told = world.sublet(&["explain", "gpu=any:2", "mode=exclusive", "--format=json"]);
        serde_json::from_slice(&told.stdout).expect("JSON")
    };
    let numbers = |told: &Value| {
        let gpus = told["gpus"].as_array().expect("GPUs").iter();
        gpus.map(|gpu| gpu["number"].as_str().expect("a number").to_owned()).collect::<Vec<_>>()
    };
    let told = explained();
    assert_eq!((numbers(&told), &told["joined"]), (vec!["0".to_owned(), "2".to_owned()], &json!("nvlink")));
    let pair = [("sublet.gpu", "any:2"), ("sublet.mode", "exclusive")];
    let bundle = world.bundle("pair", &pair, &["/bin/sleep", "600"]);
    bundle.up();
    let used = || -> Vec<Value> {
        let status = world.status();
        let used = status["leases"].as_array().expect("leases").iter().map(|lease| lease["device"].clone());
        used.collect()
    };
    let uuids = world.status()["devices"].clone();
    assert_eq!(used(), [uuids[0]["uuid"].clone(), uuids[2]["uuid"].clone()]);
    assert_eq!(explained()["joined"], "nvlink", "the other two");
    bundle.down();
    // What the driver does not tell costs the preference alone.
    let fail = world.driver_root.as_ref().expect("simulated").join("sim/fail");
    std::fs::write(&fail, "nvmlDeviceGetP2PStatus 0 999\n").expect("it is written");
    assert!(world.sublet(&["refresh"]).status.success());
    let told = explained();
    assert_eq!(
        (numbers(&told), &told["joined"]),
        (vec!["0".to_owned(), "1".to_owned()], &json!("host-bridge"))
    );
    let both = "nvmlDeviceGetP2PStatus 0 999\nnvmlDeviceGetTopologyCommonAncestor 0 3\n";
    std::fs::write(&fail, both).expect("it is written");
    assert!(world.sublet(&["refresh"]).status.success());
    let told = explained();
    assert_eq!((numbers(&told), &told["joined"]), (vec!["0".to_owned(), "1".to_owned()], &Value::Null));
    world.assert_empty();
}
