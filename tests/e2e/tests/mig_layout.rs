//! MIG layouts on the simulated driver: from file to instances, around those in use, and back on failure.

use std::path::PathBuf;
use std::process::Output;

use serde_json::Value;
use sublet_e2e::{World, skip_unless_root};

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

fn listed(world: &World, gpu: usize) -> Value {
    let all: Value = serde_json::from_str(&done(world, &["list", "--format", "json"])).expect("JSON");
    all[gpu].clone()
}

/// As [`FOUND`]: profile, placement, and the parts where there are several.
fn shape(gpu: &Value) -> String {
    let one = |one: &Value| {
        let name = |value: &Value| value["profile"].as_str().unwrap_or_default().to_owned();
        let parts: Vec<_> = one["compute"].as_array().expect("compute").iter().map(name).collect();
        let short = |part: &String| part.split('.').next().unwrap_or_default().to_owned();
        let cut = if parts == [name(one)] {
            String::new()
        } else {
            format!("[{}]", parts.iter().map(short).collect::<Vec<_>>().join(","))
        };
        format!("{}@{}{cut}", name(one), one["placement"]["start"])
    };
    gpu["instances"].as_array().expect("instances").iter().map(one).collect::<Vec<_>>().join(" ")
}

fn uuids(gpu: &Value) -> Vec<String> {
    let instances = gpu["instances"].as_array().expect("instances").iter();
    let parts = instances.flat_map(|one| one["compute"].as_array().expect("compute"));
    parts.map(|part| part["uuid"].as_str().expect("a UUID").to_owned()).collect()
}

fn path(file: &std::path::Path) -> &str {
    file.to_str().expect("UTF-8")
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
    assert!(done(&world, &["apply", path(&before)]).contains("GPU 0: as it should be"));

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
    assert!(refused(&world, &["apply"]).contains("no layout: name a file, or set [mig] layout"));
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
            assert!(!error.contains("could not all be put back"), "{function} {call}{after}: {error}");
            assert_eq!(shape(&listed(&world, 0)), FOUND, "{function} {call}{after}: {error}");
            assert!(!world.state_dir().join("mig-before.toml").exists());
            undone += usize::from(error.contains("all that had been changed is as it was found"));
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
            "GPU 0: 8 1g.5gb are wanted, and it can have at most 7",
        ),
        (entry("0", "{ profile = \"3g.20gb\", start = 2 }"), "a 3g.20gb cannot start at 2, only at 0, 4"),
        (entry("0", "{ profile = \"1g.5gb\", count = \"7\" }"), "bad.toml:5: invalid type: string \"7\""),
        (entry("9", "{ profile = \"1g.5gb\" }"), "bad.toml:1: no GPU here is 9"),
        (entry("0,0", "{ profile = \"1g.5gb\" }"), "bad.toml:1: GPU 0 is named twice"),
        (
            entry("1", "{ profile = \"1g.5gb\" }"),
            "GPU 1: switching MIG mode takes a reset of the GPU: say --allow-reset",
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
    assert!(refused(&old, &["apply", path(&file)]).contains("cannot do MIG"));
    assert!(done(&old, &["list"]).contains("not supported"));
}
