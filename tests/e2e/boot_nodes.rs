//! `sublet refresh --boot`: the nodes and links that a host should have before its engines start; and a `sublet refresh`
//! that does not help.

use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};
use sublet_e2e::{World, programs, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const SHARE: &[(&str, &str)] = &[("sublet.sm", "25")];

#[test]
fn a_boot_makes_the_nodes_and_their_links() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("a100x2-mig", "");
    let dev = world.driver_root.as_ref().expect("a simulated driver").join("dev");
    for node in ["nvidiactl", "nvidia0", "nvidia-uvm", "nvidia-uvm-tools"] {
        std::fs::remove_file(dev.join(node)).expect("a node of the simulated driver");
    }
    let refused = world.sublet(&["refresh"]);
    assert!(!refused.status.success() && text_of(&refused).contains("/dev/"), "{}", text_of(&refused));
    for _ in 0..2 {
        let booted = world.sublet(&["refresh", "--boot"]);
        let told = text_of(&booted);
        assert!(booted.status.success() && told.contains(": 2 GPUs, "), "{told}");
        assert_eq!(device(&dev.join("nvidia0")), (195, 0, 0o666));
        assert_eq!(device(&dev.join("nvidiactl")), (195, 255, 0o666));
        let (uvm, minor, mode) = device(&dev.join("nvidia-uvm"));
        assert_eq!((minor, mode), (0, 0o666));
        let link = |number: &str| std::fs::read_link(dev.join("char").join(number)).expect(number);
        assert_eq!(link("195:0"), Path::new("../nvidia0"));
        assert_eq!(link("195:1"), Path::new("../nvidia1"));
        assert_eq!(link(&format!("{uvm}:0")), Path::new("../nvidia-uvm"));
        let caps = std::fs::read_dir(dev.join("char")).expect("/dev/char").flatten();
        let caps = caps.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        let caps = caps.filter(|target| target.starts_with("../nvidia-caps")).count();
        // A GPU instance's and a compute instance's for each of the seven MIG devices at most.
        assert!((2..=14).contains(&caps), "{caps}");
    }
}

/// A start has the inventory made, and with it the nodes; so does a boot. Then the host's driver is there for computing alone: the
/// module nvidia-modeset is not loaded, and an image that asks for all capabilities is served without its node. A node that is
/// removed after the inventory was made is left out, too.
#[test]
fn a_node_that_cuda_does_without_is_made_or_left_out() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let root = world.driver_root.as_ref().expect("a simulated driver");
    let (node, devices) = (root.join("dev/nvidia-modeset"), root.join("proc/devices"));
    let tools = root.join("dev/nvidia-uvm-tools");
    let numbers = device(&tools);
    let mut bundle = world.bundle("all", SHARE, HOLD);
    let env = bundle.spec["process"]["env"].as_array_mut().expect("env");
    env.push(json!("NVIDIA_DRIVER_CAPABILITIES=all"));
    for spare in [&node, &tools] {
        std::fs::remove_file(spare).expect("a node of the simulated driver");
    }
    let (_, warned) = bundle.up_heard();
    assert!(!warned.contains("is missing"), "{warned}");
    assert_eq!((device(&node), device(&tools)), ((195, 254, 0o666), numbers), "their modules are loaded");
    assert_eq!(device(&root.join("dev/char/195:254")), device(&node));
    let opened = ["/usr/bin/cuda-probe", "noderights", "/dev/nvidia-modeset", "/dev/nvidia-uvm-tools"];
    assert_eq!(bundle.exec(&opened).stdout.matches("ENXIO").count(), 2, "no driver is behind them");
    bundle.down();
    std::fs::remove_file(&node).expect("it was made");
    assert!(world.sublet(&["refresh", "--boot"]).status.success());
    assert_eq!(device(&node), (195, 254, 0o666), "its module is loaded");
    std::fs::remove_file(&node).expect("it was made");
    let text = std::fs::read_to_string(&devices).expect("/proc/devices");
    std::fs::write(&devices, text.replace("195 nvidia-modeset\n", "")).expect("/proc/devices");
    assert!(world.sublet(&["refresh", "--boot"]).status.success());
    assert!(!node.exists(), "its module is not loaded");
    std::fs::remove_file(&tools).expect("it was made");
    let (info, warned) = bundle.up_heard();
    for (name, fix) in [
        ("nvidia-modeset", "`nvidia-modprobe -m`"),
        ("nvidia-uvm-tools", "`modprobe nvidia-uvm`, then `nvidia-modprobe -u -c0`"),
    ] {
        let warning = format!("{name} is missing; run {fix}; the container starts without it");
        assert_eq!(warned.matches(&warning).count(), 1, "{warned}");
    }
    assert_eq!(info["mps"], json!(true));
    bundle.down();
    assert!(world.sublet(&["refresh"]).status.success());
    assert_eq!((device(&tools), node.exists()), (numbers, false), "each as its module");
    world.assert_empty();
}

/// (major, minor, mode) of a character device.
fn device(path: &Path) -> (u64, u64, u32) {
    use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
    let there = std::fs::metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(there.file_type().is_char_device());
    let number = there.rdev();
    (nix::sys::stat::major(number), nix::sys::stat::minor(number), there.mode() & 0o777)
}

#[test]
fn a_boot_without_a_gpu_passes() {
    let root = tempfile::tempdir().expect("a directory");
    let config = root.path().join("config.toml");
    let text = format!("state_dir = \"{0}/s\"\n[driver]\nroot = \"{0}\"\n", root.path().display());
    std::fs::write(&config, text).expect("a configuration");
    let mut command = std::process::Command::new(sublet_e2e::bin_dir().join("sublet"));
    let output = command.args(["refresh", "--boot"]).env("SUBLET_CONFIG", &config).output().expect("sublet");
    assert_eq!(
        (output.status.code(), text_of(&output)),
        (Some(0), "This host has no NVIDIA GPU.\n".to_owned())
    );
    assert!(!root.path().join("s").exists());
}

/// Both streams.
fn text_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// A `sublet refresh` that changes nothing: it is tried again for a while, with pauses. Returns how often.
fn refreshes(world: &World, why: &str) -> usize {
    let bin = world.dir.path().join("bin");
    std::fs::create_dir_all(&bin).expect("a directory");
    for program in ["sublet-runtime", "sublet-hook"] {
        programs::copy(&sublet_e2e::bin_dir().join(program), &bin.join(program));
    }
    let counted = world.dir.path().join("refreshes");
    programs::script(&bin.join("sublet"), &format!("echo $1 >>{}\n", counted.display()));
    let bundle = world.bundle("bad", SHARE, HOLD);
    bundle.write();
    let mut create = world.command(bin.join("sublet-runtime").to_str().expect("UTF-8"));
    create.arg("--root").arg(world.runtime_root()).args(["create", "--bundle"]).arg(&bundle.dir).arg("bad");
    let refused = create.output().expect("it runs");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains(why), "{said}");
    std::fs::read_to_string(&counted).expect("it was run").lines().filter(|line| *line == "refresh").count()
}

#[test]
fn an_inventory_that_stays_out_of_date_is_made_anew_a_few_times_a_second() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    assert!(world.sublet(&["refresh"]).status.success());
    // As if MIG instances were created and destroyed all the time.
    let ledger = world.state_dir().join("ledger.json");
    let bundle = world.bundle("first", SHARE, HOLD);
    bundle.up();
    bundle.down();
    let before = std::fs::read(&ledger).expect("a ledger");
    let mut changed: Value = serde_json::from_slice(&before).expect("JSON");
    changed["mig"] = json!({"count": 7});
    std::fs::write(&ledger, changed.to_string()).expect("written");
    let times = refreshes(&world, "the MIG layout changed while a device was being chosen");
    assert!((2..=210).contains(&times), "{times} times in 20 s");
    std::fs::remove_file(world.dir.path().join("refreshes")).expect("it is there");
    std::fs::write(&ledger, before).expect("written");
    let version = world.driver_root.as_ref().expect("simulated").join("proc/driver/nvidia/version");
    let text = std::fs::read_to_string(&version).expect("a version");
    std::fs::write(&version, text.replacen("Module  ", "Module  9", 1)).expect("written");
    let times = refreshes(&world, "out of date");
    assert!((2..=110).contains(&times), "{times} times in 10 s");
}
