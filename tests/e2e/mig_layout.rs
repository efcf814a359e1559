//! MIG layouts on the simulated driver: from file to instances, around those in use, and undone after a failure.

use std::path::PathBuf;
use std::process::Output;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use sublet_e2e::mig::{SMALL, ledger, listed, namespaces, process_on, remake_small, shape};
use sublet_e2e::user::Host;
use sublet_e2e::{World, eventually, skip_unless_root};

/// What the A100 of `a100x2-mig` has when it comes up, as (GPU instance, placement, UUIDs).
const FOUND: &str = "4g.20gb@0 2g.10gb@4[1c,1c] 1g.5gb@6";

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn layout(world: &World, name: &str, content: &str) -> PathBuf {
    let path = world.dir.path().join(name);
    std::fs::write(&path, content).expect("a layout file");
    path
}

fn mig(world: &World, arguments: &[&str]) -> Output {
    world.sublet(&[&["mig"], arguments].concat())
}

fn done(world: &World, arguments: &[&str]) -> String {
    let output = mig(world, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The one line of an error.
fn refused(world: &World, arguments: &[&str]) -> String {
    let output = mig(world, arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {}", text(&output));
    let error = String::from_utf8_lossy(&output.stderr).trim_end().to_owned();
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

fn uuids(gpu: &Value) -> Vec<String> {
    let instances = gpu["instances"].as_array().expect("instances").iter();
    let parts = instances.flat_map(|one| one["compute"].as_array().expect("compute"));
    parts.map(|part| part["uuid"].as_str().expect("a UUID").to_owned()).collect()
}

fn path(file: &std::path::Path) -> &str {
    file.to_str().expect("UTF-8")
}

/// As if process `pid` were changing the layout of GPU 0. Returns the ledger.
fn begin_change(world: &World, pid: u32) -> Value {
    let line = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("stat");
    let fields = line.rsplit_once(") ").expect("a name").1;
    let start: u64 = fields.split(' ').nth(19).expect("field 22").parse().expect("a number");
    let device = world.status()["devices"][0]["uuid"].clone();
    let owner = json!({"pid": pid, "start_time": start});
    let mut busy = ledger(world);
    busy["namespaces"] = namespaces();
    busy["mig"] = json!({"count": 0, "under_way": {"gpus": [device], "owner": owner}});
    write_ledger(world, &busy);
    busy
}

fn write_ledger(world: &World, ledger: &Value) {
    std::fs::write(world.state_dir().join("ledger.json"), ledger.to_string()).expect("written");
}

const SEVEN: &str = "[[gpu]]\nmatch = \"0\"\nmig = true\ninstances = [{ profile = \"1g.5gb\", count = 7 }]\n";

#[test]
fn a_layout_is_planned_applied_asserted_and_exported() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("a100x2-mig", "");
    assert_eq!(shape(&listed(&world, 0)), FOUND);
    let before = world.dir.path().join("before.toml");
    std::fs::write(&before, done(&world, &["export"])).expect("a file");
    assert!(done(&world, &["apply", path(&before)]).contains("GPU 0: matches the layout"));

    let seven = layout(&world, "seven.toml", SEVEN);
    let plan = done(&world, &["plan", path(&seven)]);
    assert!(plan.contains("destroy GPU instance 4g.20gb at 0:4"), "{plan}");
    assert!(!plan.contains("GPU instance 1g.5gb at 6:1"), "what is there already stays: {plan}");
    assert_eq!(shape(&listed(&world, 0)), FOUND, "plan changes nothing");
    assert_eq!(mig(&world, &["assert", path(&seven)]).status.code(), Some(1));

    let kept = uuids(&listed(&world, 0)).pop().expect("the 1g.5gb");
    done(&world, &["apply", path(&seven)]);
    let now = listed(&world, 0);
    assert_eq!(shape(&now), (0..7).map(|at| format!("1g.5gb@{at}")).collect::<Vec<_>>().join(" "));
    assert_eq!(uuids(&now).last(), Some(&kept));
    assert!(mig(&world, &["assert", path(&seven)]).status.success());
    let status = world.status();
    assert_eq!(status["devices"][0]["mig"].as_array().map(Vec::len), Some(7), "the inventory knows");

    done(&world, &["apply", path(&before)]);
    assert_eq!(shape(&listed(&world, 0)), FOUND);
    assert!(!world.state_dir().join("mig-before.toml").exists());
}

/// One GPU tells nothing of its profiles: the others are listed and changed, and a layout that names it is refused.
#[test]
fn a_gpu_that_does_not_tell_its_profiles_stops_no_other() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h100x2-mig-off", "[mig]\ndynamic = true\n");
    let fail = world.driver_root.as_ref().expect("simulated").join("sim/fail");
    std::fs::write(&fail, "nvmlDeviceGetGpuInstanceProfileInfoV@1 0 999\n").expect("written");
    let passed = "an internal driver error occurred; this GPU is passed over";
    for (devices, done) in [("0", true), ("all", true), ("1", false)] {
        let file = format!("[[gpu]]\nmatch = \"{devices}\"\nmig = true\n");
        let file = layout(&world, "one.toml", &file);
        let output = mig(&world, &["apply", path(&file)]);
        let said = text(&output);
        assert_eq!(output.status.success(), done, "{devices}: {said}");
        assert_eq!(said.matches(passed).count(), 1, "{devices}: {said}");
        assert_eq!(said.contains("one.toml:1: GPU 1 does not tell its profiles"), !done, "{devices}: {said}");
    }
    let all = layout(&world, "one.toml", "[[gpu]]\nmatch = \"all\"\nmig = true\n");
    let asserted = mig(&world, &["assert", path(&all)]);
    let said = text(&asserted);
    assert!(said.contains("GPU 1 does not tell whether it matches the layout"), "{said}");
    assert_eq!(asserted.status.code(), Some(1));
    let listed: Value = serde_json::from_str(&done(&world, &["list", "--format", "json"])).expect("JSON");
    let seen = |gpu: &Value| (gpu["index"].clone(), gpu["mig"]["enabled"].clone());
    let gpus: Vec<_> = listed.as_array().expect("GPUs").iter().map(seen).collect();
    assert_eq!(gpus, [(json!(0), json!(true))]);
    // An instance is created on the other one.
    let bundle = world.bundle("one", &[("sublet.mig", "1g.10gb")], &["/usr/bin/cuda-probe", "hold", "120"]);
    bundle.up();
    assert_eq!(world.status()["devices"][0]["mig"].as_array().map(Vec::len), Some(1));
    bundle.down();
    std::fs::remove_file(&fail).expect("removed");
    world.assert_empty();
}

#[test]
fn mig_parteds_yaml_and_the_configured_file() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200-mig", "");
    let yaml = "version: v1\nmig-configs:\n  off:\n    - {devices: all, mig-enabled: false}\n  mixed:\n    - devices: [0]\n      \
                mig-enabled: true\n      mig-devices: {\"1c.2g.35gb\": 2, \"3g.71gb\": 1}\n";
    let yaml = layout(&world, "parted.yaml", yaml);
    done(&world, &["apply", path(&yaml), "--name", "mixed"]);
    assert_eq!(shape(&listed(&world, 0)), "2g.35gb@0[1c,1c] 3g.71gb@4");
    let several = refused(&world, &["apply", path(&yaml)]);
    assert!(several.ends_with("choose one with --name: off, mixed"), "{several}");
    assert!(refused(&world, &["apply"]).contains("no layout is given: name a file, or set [mig] layout"));
    // One file for all hosts of a fleet, as mig-parted applies it.
    let eight = "version: v1\nmig-configs:\n  eight:\n    - devices: [0, 1, 2, 3, 4, 5, 6, 7]\n      mig-enabled: true\n      \
                 mig-devices: {\"1g.18gb\": 7}\n";
    let eight = layout(&world, "eight.yaml", eight);
    let applied = mig(&world, &["apply", path(&eight)]);
    assert!(applied.status.success(), "{}", text(&applied));
    let named = "this host serves no GPU 1, 2, 3, 4, 5, 6, 7; the others are done";
    assert!(String::from_utf8_lossy(&applied.stderr).contains(named), "{}", text(&applied));
    assert_eq!(shape(&listed(&world, 0)), [0, 1, 2, 3, 4, 5, 6].map(|at| format!("1g.18gb@{at}")).join(" "));
    let two = "[[gpu]]\nmatch = \"all\"\nmig = true\ninstances = [{ profile = \"3g.71gb\", count = 2 }]\n";
    let two = layout(&world, "two.toml", two);
    world.configure(&format!("[mig]\nlayout = \"{}\"\n", two.display()));
    done(&world, &["apply"]);
    assert_eq!(shape(&listed(&world, 0)), "3g.71gb@0 3g.71gb@4");
    // Hopper switches its mode without a reset.
    done(&world, &["apply", path(&yaml), "--name", "off"]);
    assert_eq!(listed(&world, 0)["mig"]["enabled"], false);
    done(&world, &["apply"]);
    assert_eq!(shape(&listed(&world, 0)), "3g.71gb@0 3g.71gb@4");
}

#[test]
fn whatever_nvml_call_fails_the_state_found_comes_back() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("a100x2-mig", "");
    let found = layout(&world, "found.toml", &done(&world, &["export"]));
    let target = "[[gpu]]\nmatch = \"0\"\nmig = true\ninstances = [{ profile = \"3g.20gb\" }, { profile = \
                  \"2g.10gb\", compute = [\"1c\", \"1c\"] }, { profile = \"1g.5gb\", start = 0 }]\n";
    let target = layout(&world, "target.toml", target);
    let changing = [
        "nvmlGpuInstanceDestroy",
        "nvmlComputeInstanceDestroy",
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "nvmlGpuInstanceCreateComputeInstance",
        "nvmlGpuInstanceGetInfo",
        "nvmlDeviceGetGpuInstances",
        "nvmlGpuInstanceGetComputeInstances",
        "nvmlDeviceGetMigDeviceHandleByIndex",
    ];
    let mut undone = 0;
    for (function, after) in changing.iter().flat_map(|name| [(*name, ""), (*name, " done")]) {
        // Every call of the few that change something, some of the many that look.
        let step = if function.contains("Get") { 37 } else { 1 };
        for call in (1..).step_by(step) {
            let mut command = world.command("sublet");
            command.args(["mig", "apply", path(&target)]);
            command.env("SUBLET_SIM_FAIL", format!("{function} {call} 999{after}"));
            let output = command.output().expect("sublet runs");
            if output.status.success() {
                // There was no such call, or none before the layout was there.
                done(&world, &["apply", path(&found)]);
                break;
            }
            let error = text(&output);
            assert!(!error.contains("not every change could be undone"), "{function} {call}{after}: {error}");
            assert_eq!(shape(&listed(&world, 0)), FOUND, "{function} {call}{after}: {error}");
            assert!(!world.state_dir().join("mig-before.toml").exists());
            undone += usize::from(error.contains("every change was undone"));
        }
        assert_eq!(shape(&listed(&world, 0)), FOUND);
    }
    assert!(undone > 20, "{undone}");
}

#[test]
fn a_way_back_that_is_barred_tells_how_to_repair() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("a100x2-mig", "");
    let seven = layout(&world, "seven.toml", SEVEN);
    let mut command = world.command("sublet");
    command.args(["mig", "apply", path(&seven)]);
    command.env("SUBLET_SIM_FAIL", "nvmlDeviceCreateGpuInstanceWithPlacement 0 19");
    let error = text(&command.output().expect("sublet runs"));
    assert!(error.contains("the GPU instance that was at 0:4 is missing"), "{error}");
    let before = world.state_dir().join("mig-before.toml");
    assert!(error.contains(&format!("`sublet mig apply {}`", before.display())), "{error}");
    done(&world, &["apply", path(&before)]);
    assert_eq!(shape(&listed(&world, 0)), FOUND);
}

#[test]
fn bad_layouts_are_refused_in_one_line_with_their_place() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("a100x2-mig", "");
    let entry = |gpu: &str, instance: &str| {
        format!("[[gpu]]\nmatch = \"{gpu}\"\nmig = true\ninstances = [\n  {instance},\n]\n")
    };
    let cases = [
        (
            entry("0", "{ profile = \"1g.18gb\" }"),
            "bad.toml:5: GPU 0 (NVIDIA A100-PCIE-40GB) has no profile 1g.18gb",
        ),
        (entry("0", "{ profile = \"MIG 1g.5gb\" }"), "did you mean 1g.5gb?"),
        (entry("0", "{ profile = \"1g.5GB\" }"), "did you mean 1g.5gb?"),
        (
            entry("0", "{ profile = \"1g.5gb\", count = 8 }"),
            "GPU 0: the layout has 8 1g.5gb, and this GPU can have at most 7",
        ),
        (entry("0", "{ profile = \"3g.20gb\", start = 2 }"), "a 3g.20gb cannot start at 2, only at 0, 4"),
        (
            entry("0", "{ profile = \"1g.5gb\", count = \"7\" }"),
            "bad.toml:5: gpu.0.instances.0.count must be a whole number, 0 or more, not \"7\"",
        ),
        (entry("9", "{ profile = \"1g.5gb\" }"), "bad.toml:1: no GPU of this host is 9"),
        (entry("0,0", "{ profile = \"1g.5gb\" }"), "bad.toml:1: GPU 0 is named twice"),
        (
            entry("1", "{ profile = \"1g.5gb\" }"),
            "GPU 1: switching MIG mode needs a reset of the GPU: add --allow-reset",
        ),
    ];
    for (content, expected) in cases {
        let file = layout(&world, "bad.toml", &content);
        let error = refused(&world, &["apply", path(&file)]);
        assert!(error.contains(expected), "{error}");
    }
    assert_eq!(shape(&listed(&world, 0)), FOUND);
    let old = World::simulated("pascal", "");
    let file = layout(&old, "bad.toml", &entry("0", "{ profile = \"1g.5gb\" }"));
    assert!(refused(&old, &["apply", path(&file)]).contains("does not support MIG"));
    assert!(done(&old, &["list"]).contains("not supported"));
}

#[test]
fn an_instance_with_a_process_stays_where_it_is() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("a100x2-mig", "");
    let parts = uuids(&listed(&world, 0));
    // The first half of the 2g.10gb.
    let mut child = process_on(&world, &parts[1]);
    let who = format!("process {}", child.id());
    assert_eq!(listed(&world, 0)["instances"][1]["compute"][0]["held_by"], json!(who));

    let seven = layout(&world, "seven.toml", SEVEN);
    let error = refused(&world, &["apply", path(&seven)]);
    assert!(error.contains(&format!("around 2g.10gb at 4 ({who}): end its use first")), "{error}");
    let plan = mig(&world, &["plan", path(&seven)]);
    assert_eq!((plan.status.code(), text(&plan).contains(&who)), (Some(1), true));

    let around = "[[gpu]]\nmatch = \"0\"\nmig = true\ninstances = [{ profile = \"1g.5gb\", count = 5 }, { profile = \
                  \"2g.10gb\", compute = [\"1c\"] }]\n";
    let around = layout(&world, "around.toml", around);
    done(&world, &["apply", path(&around)]);
    let now = listed(&world, 0);
    assert!(uuids(&now).contains(&parts[1]), "the same instance");
    assert!(!uuids(&now).contains(&parts[2]), "its other half is gone");
    child.kill().expect("it ends");
    child.wait().expect("it is reaped");
    done(&world, &["apply", path(&seven)]);
}

#[test]
fn an_instance_made_again_between_plan_and_apply_is_another_one() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("a100x2-mig", "");
    let share = [("sublet.mig", "1g.5gb")];
    let old = world.bundle("old", &share, &["/bin/sleep", "120"]);
    old.up();
    // It would stand where the leased instance is.
    let text = "[[gpu]]\nmatch = \"0\"\nmig = true\ninstances = [{ profile = \"3g.20gb\", start = 4 }]\n";
    let file = layout(&world, "layout.toml", text);
    let plan = mig(&world, &["plan", path(&file)]);
    let said = String::from_utf8_lossy(&plan.stdout).into_owned();
    assert!(!plan.status.success() && said.contains("1g.5gb at 6 (lease "), "{said}");
    remake_small(&world);
    let now = uuids(&listed(&world, 0)).pop().expect("the 1g.5gb");
    assert_ne!(now, SMALL);
    assert_eq!(listed(&world, 0)["instances"][2]["gi"], 9, "under the same id");
    // The lease is of none that is there: it neither keeps the new one nor passes to it.
    done(&world, &["apply", path(&file)]);
    assert_eq!(shape(&listed(&world, 0)), "3g.20gb@4");
    let lease = world.leases().remove(0);
    assert_eq!((&lease["state"], &lease["device"]), (&json!("lost"), &json!(SMALL)));
    old.down();
    world.assert_empty();
}

#[test]
fn leases_and_changes_keep_out_of_each_others_way() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h100x2-mig-off", "");
    let off = layout(&world, "on.toml", "[[gpu]]\nmatch = \"0\"\nmig = true\n");
    let bundle = world.bundle("one", &[("sublet.gpu", "0")], &["/usr/bin/cuda-probe", "hold", "120"]);
    bundle.up();
    let error = refused(&world, &["apply", path(&off)]);
    assert!(error.contains("GPU 0: MIG mode cannot be switched on while lease "), "{error}");
    bundle.down();

    // A change of a process that lives: this one.
    let mut busy = begin_change(&world, std::process::id());
    let error = refused(&world, &["apply", path(&off)]);
    assert!(
        error.contains(&format!("process {} is changing this host's MIG layout", std::process::id())),
        "{error}"
    );
    let second = world.bundle("two", &[("sublet.gpu", "0")], &["/usr/bin/cuda-probe", "hold", "120"]);
    let refusal = second.create();
    assert!(refusal.stderr.contains("is unavailable\nwhy: process"), "{}", refusal.stderr);

    // That process has ended, so it is not waited for.
    busy["mig"]["under_way"]["owner"]["start_time"] = json!(1);
    write_ledger(&world, &busy);
    second.up();
    second.down();
    assert_eq!(ledger(&world)["mig"], json!({"count": 1}));
    done(&world, &["apply", path(&off)]);
    assert_eq!(listed(&world, 0)["mig"]["enabled"], true);
    assert_eq!(ledger(&world)["mig"], json!({"count": 2}));
    world.assert_empty();
}

/// An open NVML prevents the reset that a change may need, also beside containers of other GPUs.
#[test]
fn the_service_asks_nvml_nothing_while_a_layout_changes() {
    if skip_unless_root() {
        return;
    }
    let mut host = Host::new("h100x2-mig-off", "", std::path::Path::new(env!("CARGO_BIN_EXE_speak")));
    let world = &host.world;
    let bundle = world.bundle("one", &[("sublet.gpu", "1")], &["/usr/bin/cuda-probe", "hold", "120"]);
    bundle.up();
    let mut changes = std::process::Command::new("sleep").arg("600").spawn().expect("it runs");
    begin_change(world, changes.id());
    let trace = world.driver_root.as_ref().expect("simulated").join("sim/trace");
    std::fs::write(&trace, "").expect("written");
    // Each of its threads looks at its start; of those that ask NVML, accounting leaves a sign all the same.
    host.serve = Some(world.command("sublet").arg("serve").spawn().expect("it runs"));
    assert!(eventually(|| world.state_dir().join("lasting/usage/now.json").exists()));
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert_eq!(std::fs::read_to_string(&trace).expect("a trace"), "");
    changes.kill().and_then(|()| changes.wait().map(drop)).expect("it ends");
    assert!(world.sublet(&["gc"]).status.success());
    let serve = host.serve.as_ref().expect("it runs").id();
    let maps = || std::fs::read_to_string(format!("/proc/{serve}/maps")).expect("/proc");
    assert!(eventually(|| maps().contains("libnvidia-ml")), "the lease is guarded again");
    bundle.down();
    world.assert_empty();
}

#[test]
fn a_kill_in_the_middle_loses_nothing() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("a100x2-mig", "");
    let seven = layout(&world, "seven.toml", SEVEN);
    for (function, call) in [
        ("nvmlComputeInstanceDestroy", 1),
        ("nvmlGpuInstanceDestroy", 2),
        ("nvmlDeviceCreateGpuInstanceWithPlacement", 1),
        ("nvmlGpuInstanceCreateComputeInstance", 3),
    ] {
        let mut command = world.command("sublet");
        command.args(["mig", "apply", path(&seven)]);
        let output =
            command.env("SUBLET_SIM_FAIL", format!("{function} {call} kill")).output().expect("sublet runs");
        assert_eq!(output.status.code(), None, "{function}: {}", text(&output));
        // A process that has ended is not waited for, and the state before the change is recorded.
        let before = world.state_dir().join("mig-before.toml");
        done(&world, &["apply", path(&before)]);
        assert_eq!(shape(&listed(&world, 0)), FOUND, "{function}");
        assert!(!before.exists());
    }
}

#[test]
fn users_without_root_change_nothing() {
    if skip_unless_root() {
        return;
    }
    let on = "[[gpu]]\nmatch = \"0\"\nmig = true\n";
    for (topology, content, looks) in [("a100x2-mig", SEVEN, false), ("h100x2-mig-off", on, true)] {
        let host = Host::new(topology, "", std::path::Path::new(env!("CARGO_BIN_EXE_speak")));
        let file = layout(&host.world, "layout.toml", content);
        let by_user = |arguments: &[&str]| {
            host.command(1000, "sublet").arg("mig").args(arguments).output().expect("sublet runs")
        };
        let refused = |arguments: &[&str], words: &str| {
            let output = by_user(arguments);
            let said = text(&output);
            assert_eq!((output.status.code(), said.trim_end().lines().count()), (Some(1), 1), "{said}");
            assert!(said.contains(words), "{arguments:?}: {said}");
        };
        let apply = ["apply", path(&file)];
        refused(&apply, "only root can change MIG instances: run `sublet mig apply` as root");
        let found = done(&host.world, &["export"]);
        refused(&apply, "run `sublet mig apply` as root");
        for look in [&["list"][..], &["plan", path(&file)], &["export"]] {
            if looks {
                assert!(by_user(look).status.success(), "{look:?}: {}", text(&by_user(look)));
            } else {
                // Instances are NVML's to show to root alone.
                refused(look, "does not have permission to perform this operation; run as root");
            }
        }
        assert_eq!(done(&host.world, &["export"]), found);
        host.world.assert_empty();
    }
}

/// Creates on another GPU go on: each finds the inventory out of date, and again when it has been refreshed.
#[test]
fn containers_start_on_another_gpu_while_a_layout_changes() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("a100x2-mig", "");
    let mixed = "[[gpu]]\nmatch = \"0\"\nmig = true\ninstances = [{ profile = \"3g.20gb\" }, { profile = \"2g.10gb\" }]\n";
    let layouts = [layout(&world, "seven.toml", SEVEN), layout(&world, "mixed.toml", mixed)];
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let changes = scope.spawn(|| {
            let mut count = 0;
            while !ended.load(Ordering::SeqCst) {
                done(&world, &["apply", path(&layouts[count % 2])]);
                count += 1;
            }
            count
        });
        // One that has failed must not keep the other thread going.
        let refusals: Vec<String> = (0..8)
            .filter_map(|_| {
                let bundle = world.bundle(
                    "beside",
                    &[("sublet.gpu", "1"), ("sublet.sm", "25")],
                    &["/bin/sleep", "120"],
                );
                let created = bundle.create();
                let _ = bundle.delete();
                bundle.down();
                (!created.ok).then_some(created.stderr)
            })
            .collect();
        ended.store(true, Ordering::SeqCst);
        let changes = changes.join().expect("no panic");
        assert_eq!(refusals, Vec::<String>::new(), "beside {changes} changes");
        assert!(changes > 1, "{changes}");
    });
    world.assert_empty();
}
