//! Hosts of which one GPU does not answer, or does not tell all that a refresh asks: what can be had of it is served, and the
//! others are served as ever.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Child;

use serde_json::{Value, json};
use sublet_core::inventory::FACTS;
use sublet_e2e::user::Host;
use sublet_e2e::{World, eventually, skip_unless_root};

use crate::two_users::{self, HOLD};

fn driver(world: &World, path: &str) -> PathBuf {
    world.driver_root.as_ref().expect("simulated").join(path)
}

fn fail(world: &World, line: &str) {
    std::fs::write(driver(world, "sim/fail"), line).expect("written");
}

fn heal(world: &World) {
    std::fs::remove_file(driver(world, "sim/fail")).expect("removed");
}

/// What `sublet` prints on stdout.
fn said(world: &World, arguments: &[&str]) -> String {
    String::from_utf8_lossy(&world.sublet(arguments).stdout).into_owned()
}

/// The word for the refusal of a share; `null`: it would be given.
fn refused(world: &World, share: &[&str]) -> Value {
    let annotations = share.iter().flat_map(|key| ["--annotation", key]);
    let arguments: Vec<&str> = ["explain", "--format", "json"].into_iter().chain(annotations).collect();
    let output = world.sublet(&arguments);
    let text = if output.stdout.is_empty() { &output.stderr } else { &output.stdout };
    serde_json::from_slice::<Value>(text).unwrap_or_else(|_| panic!("{output:?}"))["reason"].clone()
}

/// The functions that this command calls.
fn called(world: &World, command: &str) -> BTreeSet<String> {
    called_during(world, || assert!(world.sublet(&[command]).status.success()))
}

/// The functions that are called during this work.
fn called_during(world: &World, work: impl FnOnce()) -> BTreeSet<String> {
    let trace = driver(world, "sim/trace");
    std::fs::write(&trace, "").expect("written");
    work();
    let called = std::fs::read_to_string(&trace).expect("a trace").lines().map(str::to_owned).collect();
    std::fs::remove_file(&trace).expect("removed");
    called
}

/// That `line` is among the warnings of `status`, and that `doctor` says it.
fn assert_told(world: &World, line: &str) {
    let (status, line) = (world.status(), line.to_lowercase());
    let has = |text: &Value| text.as_str().is_some_and(|text| text.to_lowercase().contains(&line));
    assert!(status["warnings"].as_array().is_some_and(|all| all.iter().any(has)), "{line}: {status}");
    let doctor = said(world, &["doctor"]);
    assert!(doctor.to_lowercase().contains(&line), "{line}: {doctor}");
}

/// Every function that a refresh calls fails on the first of two GPUs, in turn, and the driver has none of the newest. Those of
/// no GPU fail at all.
#[test]
fn what_nvml_does_not_tell_costs_only_that() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h100x2-mig-off", "");
    let called = called(&world, "refresh");
    let healthy = world.status()["warnings"].clone();
    // Without NVML or the number of GPUs nothing is known: the inventory before stays.
    let of_none = [
        ("nvmlInit_v2", "failed to initialize: an internal driver error occurred"),
        ("nvmlDeviceGetCount_v2", "failed to count the GPUs: an internal driver error occurred"),
        ("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion_v2 does not answer: no image"),
        // nvml-wrapper's, for the ids of fields that are not read here.
        ("nvmlSystemGetDriverVersion", ""),
    ];
    for (function, expected) in of_none {
        fail(&world, &format!("{function} 0 999\n"));
        let output = world.sublet(&["refresh"]);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(told.contains(expected) && told.is_empty() == expected.is_empty(), "{function}: {told}");
        assert_eq!(output.status.success(), !expected.starts_with("failed"), "{function}: {told}");
        for gpu in ["sublet.gpu=0", "sublet.gpu=1"] {
            assert_eq!(
                refused(&world, &[gpu, "sublet.sm=25", "sublet.memory=8GiB"]),
                Value::Null,
                "{function}"
            );
        }
        if expected.is_empty() {
            assert_eq!(world.status()["warnings"], healthy, "{function}");
        } else if output.status.success() {
            assert_told(&world, expected);
        } else {
            let doctor = said(&world, &["doctor"]);
            assert!(doctor.contains(expected), "{function}: {doctor}");
        }
        heal(&world);
    }
    let of_none = of_none.map(|(function, _)| function);
    // Without these it is not known which GPU it is.
    let identity = [
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetUUID",
    ];
    let (mut facts, mut identities, mut others) = (0, 0, Vec::new());
    for function in called.iter().filter(|function| !of_none.contains(&function.as_str())) {
        fail(&world, &format!("{function}@0 0 999\n"));
        let output = world.sublet(&["refresh"]);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{function}: {told}");
        let status = world.status();
        assert_eq!(refused(&world, &["sublet.gpu=1", "sublet.sm=25", "sublet.memory=8GiB"]), Value::Null);
        let (state, expected) = if identity.contains(&function.as_str()) {
            identities += 1;
            assert_eq!(refused(&world, &["sublet.gpu=0"]), json!("gpu-lost"), "{function}");
            ("unhealthy", "GPU 0 is left out: NVML answers ".to_owned())
        } else if let Some((_, _, cost)) = FACTS.iter().find(|(_, name, _)| name == function) {
            facts += 1;
            assert_eq!(refused(&world, &["sublet.gpu=0"]), Value::Null, "{function}: {status}");
            ("ok", format!("GPU 0: {function} answers \"an internal driver error occurred\": {cost}"))
        } else {
            others.push(function.as_str());
            ("ok", String::new())
        };
        if expected.is_empty() {
            assert_eq!((told.as_str(), &status["warnings"]), ("", &healthy), "{function}");
        } else {
            assert_told(&world, &expected);
        }
        assert_eq!(status["devices"][0]["health"]["state"], json!(state), "{function}: {status}");
        assert_eq!(
            status["devices"][0]["uuid"],
            json!("GPU-5b1e7000-0000-4000-8000-000000000110"),
            "{function}"
        );
        assert!(told.to_lowercase().contains(&expected.to_lowercase()), "{function}: {told}");
        let memory = refused(&world, &["sublet.gpu=0", "sublet.mode=mps", "sublet.memory=8GiB"]);
        let needs = ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetCudaComputeCapability"];
        assert_eq!(memory != Value::Null, needs.contains(&function.as_str()) || state != "ok", "{function}");
        let exclusive = refused(&world, &["sublet.gpu=0", "sublet.mode=exclusive"]);
        let needs = function.ends_with("RunningProcesses_v3");
        assert_eq!(exclusive != Value::Null, needs || state != "ok", "{function}");
    }
    // The last fact is of MIG devices.
    assert_eq!((facts, identities), (FACTS.len() - 1, identity.len()), "{called:?}");
    // How the GPUs are joined: they are taken for joined in no better way than others.
    assert_eq!(others, ["nvmlDeviceGetP2PStatus", "nvmlDeviceGetTopologyCommonAncestor"]);
}

/// The same of a GPU in MIG mode: what is lost is a fact, its MIG devices or the GPU, and never the other GPU.
#[test]
fn what_nvml_does_not_tell_of_mig_devices_costs_no_other_gpu() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("a100x2-mig", "");
    let mut costs = BTreeMap::new();
    for function in called(&world, "refresh") {
        fail(&world, &format!("{function}@0 0 999\n"));
        let output = world.sublet(&["refresh"]);
        assert!(output.status.success(), "{function}: {output:?}");
        for share in [&["sublet.gpu=1", "sublet.mode=time-slice"][..], &["sublet.gpu=1", "sublet.sm=25"]] {
            assert_eq!(refused(&world, share), Value::Null, "{function}");
        }
        let gpu = world.status()["devices"][0].clone();
        let parts = gpu["mig"].as_array().expect("MIG devices").clone();
        let served = parts.iter().filter(|part| part["fault"].is_null()).count();
        let fact = FACTS.iter().find(|(_, name, _)| *name == function);
        if gpu["health"]["state"] == "unhealthy" {
            assert_told(&world, "GPU 0 is left out: NVML answers ");
            costs.insert(function, "the GPU");
        } else if served == 0 {
            let (_, _, cost) = fact.unwrap_or_else(|| panic!("{function}: {gpu}"));
            assert_told(
                &world,
                &format!("MIG device 0:0: {function} answers \"an internal driver error occurred\": {cost}"),
            );
            costs.insert(function, "its MIG devices");
        } else {
            assert_eq!(served, 4, "{function}: {gpu}");
            costs.extend(fact.map(|_| (function, "that fact")));
        }
    }
    let of = |cost| {
        let named = costs.iter().filter(|(_, of)| **of == cost);
        named.map(|(function, _)| function.trim_start_matches("nvmlDeviceGet")).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(
        of("the GPU"),
        "ComputeInstanceId GpuInstanceId HandleByIndex_v2 Index MaxMigDeviceCount MigDeviceHandleByIndex MigMode MinorNumber \
         PciInfo_v3 UUID"
    );
    assert_eq!(of("its MIG devices"), "Attributes_v2 MemoryInfo_v2 Name");
    assert_eq!(
        of("that fact"),
        "ComputeMode ComputeRunningProcesses_v3 CudaComputeCapability DisplayActive MPSComputeRunningProcesses_v3 NumGpuCores \
         VirtualizationMode"
    );
}

/// The driver's list of MIG capabilities is broken, then unreadable: one warning names it, and only what needs it is refused.
#[test]
fn a_list_of_mig_capabilities_that_cannot_be_read_costs_mig_devices_alone() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("a100x2-mig", "[mig]\nallow_caps = [\"monitor\"]\n");
    let minors = driver(&world, "proc/driver/nvidia-caps/mig-minors");
    let explained = |keys: &[&str]| {
        let keys = keys.iter().flat_map(|key| ["--annotation", key]);
        let output = world.sublet(&["explain"].into_iter().chain(keys).collect::<Vec<_>>());
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    for is_directory in [false, true] {
        std::fs::remove_file(&minors).expect("removed");
        let broken = if is_directory {
            std::fs::create_dir(&minors)
        } else {
            std::fs::write(&minors, b"monitor 2\n\xff")
        };
        broken.expect("made");
        let output = world.sublet(&["refresh"]);
        let warned = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && warned.matches("mig-minors: ").count() == 1, "{output:?}");
        assert_eq!(refused(&world, &["sublet.gpu=1", "sublet.sm=25"]), Value::Null);
        let part = explained(&["sublet.gpu=0:0"]);
        assert!(part.contains("/proc/driver/nvidia-caps/mig-minors cannot be read: "), "{part}");
        let rights = explained(&["sublet.gpu=0:0", "sublet.mig-caps=monitor"]);
        assert!(
            rights.contains("no MIG capability `monitor` (/proc/driver/nvidia-caps/mig-minors)"),
            "{rights}"
        );
    }
}

/// What `status` and `metrics` ask fails on the first of two GPUs, in turn: they tell all of the other one.
#[test]
fn what_status_and_metrics_ask_costs_no_other_gpu() {
    if skip_unless_root() {
        return;
    }
    for topology in ["h100x2-mig-off", "a100x2-mig"] {
        let world = World::simulated(topology, "");
        let bundle = world.bundle("other", &[("sublet.gpu", "1"), ("sublet.sm", "25")], HOLD);
        bundle.up();
        bundle.event("info");
        let samples = || {
            let metrics = said(&world, &["metrics"]);
            let of_other =
                metrics.lines().filter(|line| line.contains("gpu=\"1\"") && line.contains("_gpu_"));
            let named = of_other.filter_map(|line| line.rsplit_once(' '));
            named.map(|(name, _)| name.to_owned()).collect::<Vec<_>>()
        };
        let healthy = samples();
        assert!(!healthy.is_empty());
        for function in called(&world, "status").union(&called(&world, "metrics")) {
            fail(&world, &format!("{function}@0 0 999\n"));
            let gpu = world.status()["devices"][1].clone();
            assert_eq!(
                (&gpu["health"]["state"], &gpu["unknown"]),
                (&json!("ok"), &Value::Null),
                "{function}: {gpu}"
            );
            assert!(!gpu["used"].is_null(), "{function}: {gpu}");
            assert_eq!(samples(), healthy, "{function}");
        }
        heal(&world);
        bundle.down();
        world.assert_empty();
    }
}

/// Ends the service as a crash does.
fn kill(serve: &mut Option<Child>) {
    let mut serve = serve.take().expect("it runs");
    serve.kill().and_then(|()| serve.wait().map(drop)).expect("it ends");
}

/// What the service asks fails on the first of two GPUs, in turn: the other one is guarded, its health is looked at, and it is
/// served.
#[test]
fn what_the_service_asks_costs_no_other_gpu() {
    if skip_unless_root() {
        return;
    }
    let mut host = two_users::host("h100x2-mig-off");
    let world = &host.world;
    let start = || Some(world.command("sublet").arg("serve").spawn().expect("it runs"));
    let bundles = ["0", "1"].map(|gpu| {
        let share = [("sublet.gpu", gpu), ("sublet.sm", "25"), ("sublet.memory", "4GiB")];
        let bundle = world.bundle(&format!("on-{gpu}"), &share, HOLD);
        bundle.up();
        bundle.event("info");
        bundle
    });
    // Too hot: that is noted once the health of both has been asked for.
    std::fs::write(driver(world, "sim/health"), "1 slow 64\n").expect("written");
    let record = |name: &str| std::fs::read_to_string(world.state_dir().join(name)).unwrap_or_default();
    let called = called_during(world, || {
        host.serve = start();
        // Of the guard, of health, and of accounting.
        for (name, part) in [
            ("guard.json", "looked_at"),
            ("health.json", "too hot"),
            ("lasting/usage/now.json", "sublet.usage"),
        ] {
            assert!(eventually(|| record(name).contains(part)), "{name}: {}", record(name));
        }
    });
    for name in ["GetMPSComputeRunningProcesses_v3", "GetFieldValues", "GetProcessUtilization"] {
        assert!(called.contains(&format!("nvmlDevice{name}")), "{name}: {called:?}");
    }
    let of_gpu = |name: &&String| name.starts_with("nvmlDevice") || name.starts_with("nvmlGpm");
    let first = "GPU 0 is not guarded: ";
    for function in called.iter().filter(of_gpu) {
        kill(&mut host.serve);
        for name in ["health.json", "guard.json"] {
            std::fs::remove_file(world.state_dir().join(name)).expect("removed");
        }
        fail(world, &format!("{function}@0 0 999\n"));
        host.serve = start();
        let is_seen = || {
            let status = world.status();
            let blind = status["guard"]["blind"].as_array().expect("GPUs");
            let is_first = |why: &Value| why.as_str().is_some_and(|why| why.starts_with(first));
            let looked = status["guard"]["last_look_seconds"].is_u64() && blind.iter().all(is_first);
            looked && status["warnings"].to_string().contains("GPU 1: it is slowed down")
        };
        assert!(eventually(is_seen), "{function}: {}", world.status());
        let share = ["sublet.gpu=1", "sublet.sm=25", "sublet.memory=8GiB"];
        assert_eq!(refused(world, &share), Value::Null, "{function}");
        heal(world);
        assert!(world.sublet(&["refresh"]).status.success(), "{function}");
    }
    kill(&mut host.serve);
    for bundle in &bundles {
        bundle.down();
    }
    world.assert_empty();
}

/// As the GB10 of a DGX Spark.
#[test]
fn a_gpu_that_does_not_tell_its_memory_is_served() {
    if skip_unless_root() {
        return;
    }
    let text = std::fs::read_to_string(
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../sim/topologies/h200.toml"),
    )
    .expect("a topology");
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("gb10.toml");
    std::fs::write(&file, text.replace("\"9.0\"", "\"12.1\"").replace("NVIDIA H200", "NVIDIA GB10"))
        .expect("written");
    for (topology, of_host) in [("h200", false), (file.to_str().expect("UTF-8"), true)] {
        let world = World::simulated(topology, "");
        fail(&world, "nvmlDeviceGetMemoryInfo 0 3\nnvmlDeviceGetMemoryInfo_v2 0 3\n");
        for share in [("sublet.mode", "time-slice"), ("sublet.sm", "25")] {
            let bundle = world.bundle("one", &[share], HOLD);
            bundle.up();
            bundle.event("info");
            bundle.down();
            world.stop_waiting();
        }
        let gpu = world.status()["devices"][0].clone();
        assert_eq!((&gpu["memory_of_host"], gpu["memory_bytes"] != json!(0)), (&json!(of_host), of_host));
        let table = said(&world, &["status"]);
        assert!(of_host || table.contains("nvmlDeviceGetMemoryInfo_v2 answers"), "{table}");
        assert!(!of_host || table.contains("NVIDIA GB10, host memory"), "{table}");
        let memory = world.bundle("memory", &[("sublet.memory", "1GiB")], HOLD);
        if of_host {
            memory.up();
            memory.down();
        } else {
            let why = memory.refused();
            assert!(why.contains("of which NVML does not tell"), "{why}");
        }
        world.assert_empty();
    }
}

fn on(host: &Host, uuid: &str) -> Value {
    let status = host.world.status();
    let gpus = status["devices"].as_array().expect("devices");
    gpus.iter().find(|gpu| gpu["uuid"] == uuid).cloned().unwrap_or_default()
}

/// A GPU fails beside running containers, in each way, and comes back.
#[test]
fn a_sick_gpu_is_named_and_the_others_are_served_and_guarded() {
    if skip_unless_root() {
        return;
    }
    let mut host = two_users::host("h200x8");
    host.start();
    let world = &host.world;
    let share = |gpu| [("sublet.gpu", gpu), ("sublet.sm", "25"), ("sublet.memory", "4GiB")];
    let (third, first) = (world.bundle("third", &share("3"), HOLD), world.bundle("first", &share("1"), HOLD));
    third.up();
    first.up();
    let uuid = world.leases()[0]["device"].as_str().expect("a UUID").to_owned();
    let bus = on(&host, &uuid)["bus_id"].as_str().expect("a bus id").to_owned();
    let pci = driver(world, "sys/bus/pci/devices").join(&bus);
    // Unknown, reset required, no permission, GPU is lost, and a GPU that is gone from the bus.
    for (fault, state) in
        [("999", "unhealthy"), ("16", "unhealthy"), ("4", "unhealthy"), ("15", "lost"), ("gone", "lost")]
    {
        match fault {
            "gone" => std::fs::rename(&pci, driver(world, "aside")).expect("moved"),
            code => fail(world, &format!("*@3 0 {code}\n")),
        }
        assert!(eventually(|| on(&host, &uuid)["health"]["state"] == state), "{fault}: {}", on(&host, &uuid));
        let table = said(world, &["status"]);
        let row = table.lines().find(|line| line.starts_with("3 ")).unwrap_or_default();
        assert!(row.contains(&state.to_uppercase()), "{fault}: {table}");
        assert!(table.contains("GPU 3 is left out: "), "{fault}: {table}");
        assert!(said(world, &["status", "--gpu", "3"]).contains(&state.to_uppercase()), "{fault}");
        assert!(eventually(|| said(world, &["status"]).contains("GPU 3 is not guarded: ")), "{fault}");
        let status = world.status();
        assert!(!said(world, &["status"]).contains("GUARD OFF"), "{fault}: {status}");
        assert_eq!(status["guard"]["blind"].as_array().map(Vec::len), Some(1), "{fault}: {status}");
        assert_eq!(status["leases"].as_array().map(Vec::len), Some(2), "{fault}: {status}");
        assert_eq!(refused(world, &["sublet.gpu=3"]), json!("gpu-lost"), "{fault}");
        let other = world.bundle("other", &share("1"), HOLD);
        other.up();
        other.event("info");
        other.down();
        assert_eq!(refused(world, &["sublet.gpu=any:6"]), Value::Null, "{fault}");
        let explained = said(world, &["explain", "--container", "third"]);
        assert!(!explained.contains("which this host no longer has"), "{fault}: {explained}");
        for name in ["3", &bus, &uuid] {
            assert_ne!(said(world, &["events", "--filter", &format!("gpu={name}")]), "", "{fault}: {name}");
            assert!(world.sublet(&["drain", name]).status.success(), "{fault}: {name}");
            assert_eq!(on(&host, &uuid)["drained"], json!(true), "{fault}: {name}");
            assert!(world.sublet(&["undrain", name]).status.success(), "{fault}: {name}");
        }
        let metrics = said(world, &["metrics"]);
        assert!(metrics.contains(&format!("sublet_gpu_healthy{{gpu=\"3\",uuid=\"{uuid}\"}} 0")), "{metrics}");
        let doctor = said(world, &["doctor", "--quick"]);
        let line = doctor.lines().find(|line| line.contains("GPU 3 is left out"));
        assert!(line.is_some_and(|line| line.to_lowercase().contains("fail")), "{fault}: {doctor}");
        match fault {
            "gone" => std::fs::rename(driver(world, "aside"), &pci).expect("moved"),
            _ => heal(world),
        }
        assert!(eventually(|| on(&host, &uuid)["health"]["state"] == "ok"), "{fault}");
        assert!(eventually(|| world.status()["guard"]["watching"] == json!(true)), "{fault}");
    }
    let events = said(world, &["events", "--format", "json"]);
    let told =
        |kind: &str| events.lines().filter(|line| line.contains(&format!("\"kind\":\"{kind}\""))).count();
    assert_eq!((told("gpu-lost"), told("gpu-back")), (5, 5), "{events}");
    let parsed = events.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let is_warning = |event: &Value| {
        let text = event["text"].as_str().unwrap_or_default();
        event["kind"] == "warned" && text.starts_with("GPU 3 is left out: ")
    };
    let warned: Vec<Value> = parsed.filter(is_warning).map(|event| event["container_id"].clone()).collect();
    assert_eq!(warned, vec![json!("third"); 5], "{events}");
    third.down();
    first.down();
    let again = world.bundle("again", &share("3"), HOLD);
    again.up();
    again.down();
    world.assert_empty();
}

/// Sick since boot: of a GPU that it cannot initialize, the driver writes a UUID of question marks.
#[test]
fn gpus_that_are_sick_at_the_first_refresh_are_told_apart() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let buses = ["0000:5d:00.0", "0000:ab:00.0"];
    for bus in buses {
        let file = driver(&world, "proc/driver/nvidia/gpus").join(bus).join("information");
        let text = std::fs::read_to_string(&file).expect("the driver's");
        let (before, rest) = text.split_once("GPU UUID: \t ").expect("its UUID");
        let (_, after) = rest.split_once('\n').expect("a line");
        let text = format!("{before}GPU UUID: \t GPU-????????-????-????-????-????????????\n{after}");
        std::fs::write(&file, text).expect("written");
    }
    fail(&world, "*@3 0 999\n*@5 0 999\n");
    assert!(world.sublet(&["refresh"]).status.success());
    let state = |gpu: usize| world.status()["devices"][gpu].clone();
    for (gpu, bus) in [3, 5].into_iter().zip(buses) {
        assert_eq!((&state(gpu)["uuid"], &state(gpu)["health"]["state"]), (&json!(bus), &json!("unhealthy")));
    }
    assert_eq!(refused(&world, &["sublet.gpu=any:6"]), Value::Null);
    assert!(world.sublet(&["drain", "3"]).status.success());
    assert_eq!((&state(3)["drained"], &state(5)["drained"]), (&json!(true), &json!(false)));
    assert!(world.sublet(&["undrain", "3"]).status.success());
    heal(&world);
    assert!(world.sublet(&["refresh"]).status.success());
    assert_eq!(state(3)["uuid"], json!("GPU-5b1e7000-0000-4000-8000-000000000803"));
    world.assert_empty();
}

#[test]
fn a_lost_gpus_mig_devices_are_shown_while_containers_have_them() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("a100x2-mig", "");
    let bundle = world.bundle("part", &[("sublet.gpu", "0:0")], HOLD);
    bundle.up();
    bundle.event("info");
    fail(&world, "*@0 0 15\n");
    // The second one knows it from what the first one has kept.
    for _ in 0..2 {
        assert!(world.sublet(&["refresh"]).status.success());
        let gpu = world.status()["devices"][0].clone();
        assert_eq!(gpu["health"]["state"], json!("lost"), "{gpu}");
        let parts: Vec<_> = gpu["mig"].as_array().expect("MIG devices").iter().collect();
        let [part] = parts[..] else { panic!("{gpu}") };
        assert_eq!((&part["number"], &part["lease_count"]), (&json!("0:0"), &json!(1)), "{part}");
        let table = said(&world, &["status", "--gpu", "0"]);
        let is_shown =
            |words: [&str; 2]| table.lines().any(|line| words.iter().all(|word| line.contains(word)));
        assert!(is_shown(["0:0", "unusable"]) && is_shown(["part", "lost"]), "{table}");
    }
    heal(&world);
    assert!(world.sublet(&["refresh"]).status.success());
    assert_eq!(world.status()["devices"][0]["mig"].as_array().map(Vec::len), Some(4));
    bundle.down();
    world.assert_empty();
}

/// A GPU whose node cannot be made is left out until it can.
#[test]
fn a_missing_node_of_one_gpu_leaves_the_other_served() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h100x2-mig-off", "");
    assert!(world.sublet(&["refresh"]).status.success());
    // GPU 1.
    let (node, aside) = (driver(&world, "dev/nvidia0"), driver(&world, "aside"));
    std::fs::rename(&node, &aside).expect("moved");
    let one = world.bundle("one", &[("sublet.mode", "exclusive")], HOLD);
    one.up();
    assert_eq!(world.status()["leases"][0]["device"], world.status()["devices"][0]["uuid"]);
    let why = world.bundle("named", &[("sublet.gpu", "1")], HOLD).refused();
    assert!(
        why.contains("GPU 1 is left out: device node ") && why.contains("run `nvidia-modprobe -c 0`"),
        "{why}"
    );
    let why = world.bundle("any", &[("sublet.sm", "25")], HOLD).refused();
    assert!(why.contains("GPU 1 is left out: "), "{why}");
    std::fs::rename(&aside, &node).expect("moved");
    let two = world.bundle("two", &[("sublet.gpu", "1")], HOLD);
    two.up();
    two.down();
    one.down();
    world.assert_empty();
}
