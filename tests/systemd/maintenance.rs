//! The steps of docs/maintenance.md, as they stand there, on a machine with eight H200. Runs below tests/engines/systemd, which
//! boots the machine again when this ends with its status. In place of apt, modprobe and nvidia-smi are programs that do with
//! the simulated driver what those do with the real one.

use std::path::Path;
use std::process::{Command, exit};

use serde_json::{Value, json};
use sublet_e2e::installed::{REBOOT, done, engines, install, skip_unless_installed, systemctl, write};
use sublet_e2e::{World, bin_dir, eventually};

const PAGE: &str = include_str!("../../docs/maintenance.md");
const MOVING: &str = "Moving containers off a GPU";
const RESETTING: &str = "Resetting a GPU";
const DRIVER: &str = "A new driver";
const KERNEL: &str = "A new kernel";
const REPLACING: &str = "Replacing a GPU";

/// What is remembered over a boot: the world, and the hardware.
const WORLD: &str = "/etc/world";
const TOPOLOGY: &str = "/etc/topology.toml";
const OLD_DRIVER: &str = "580.159.04";
const NEW_DRIVER: &str = "590.44.01";

/// The lines that a section has to type.
fn steps(section: &str) -> Vec<&'static str> {
    let (_, text) = PAGE.split_once(&format!("\n## {section}\n")).expect("the page has the section");
    let text = text.split_once("\n## ").map_or(text, |(text, _)| text);
    text.lines().filter_map(|line| line.strip_prefix("    ")).collect()
}

/// Types `lines`, up to one that ends the boot. `sublet doctor` may find fault with a machine that is a container.
fn type_in(lines: &[&str]) {
    for line in lines.iter().take_while(|line| !ends_the_boot(line)) {
        let mut shell = Command::new("sh");
        shell.args(["-c", line]);
        if *line == "sublet doctor" {
            let output = shell.output().expect("it runs");
            assert!(String::from_utf8_lossy(&output.stdout).contains("checks:"), "{output:?}");
        } else {
            done(&mut shell);
        }
    }
}

fn ends_the_boot(line: &str) -> bool {
    ["reboot", "poweroff"].contains(&line)
}

/// What is typed after the boot.
fn after_the_boot(section: &str) -> Vec<&'static str> {
    steps(section).into_iter().skip_while(|line| !ends_the_boot(line)).skip(1).collect()
}

fn program(path: &str, script: &str) {
    use std::os::unix::fs::PermissionsExt as _;
    write(path, &format!("#!/bin/sh -e\n{script}\n"));
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).expect("a program");
}

/// The command that lays the simulated driver out again, as /etc/topology.toml has it.
fn lay_out(dir: &str) -> String {
    let sim = bin_dir().join("sublet-sim");
    let sim = sim.display();
    format!("{sim} down --root {dir}/sim && {sim} up --topology {TOPOLOGY} --root {dir}/sim")
}

/// The first boot.
fn set_up() {
    let world = World::simulated("h200x8", "");
    install(&world);
    engines(&world);
    let dir = world.dir.path().to_str().expect("UTF-8").to_owned();
    write(TOPOLOGY, include_str!("../sim/topologies/h200x8.toml"));
    write(WORLD, &dir);
    program("/usr/local/bin/nvidia-smi", &format!("exec {dir}/sim/usr/bin/nvidia-smi \"$@\""));
    program("/usr/local/sbin/modprobe", ":");
    let upgrade = format!("sed -i s/{OLD_DRIVER}/{NEW_DRIVER}/ {TOPOLOGY} && {}", lay_out(&dir));
    program(
        "/usr/local/bin/apt-get",
        &format!("case $3 in nvidia-driver) {upgrade} ;; linux-image-*) ;; *) exit 1 ;; esac"),
    );
    systemctl(&["enable", "--quiet", "--now", "sublet"]);
    for (name, annotations) in [
        ("web", ["sublet.sm=25", "sublet.memory=8GiB"]),
        ("train", ["sublet.gpu=1", "sublet.mode=exclusive"]),
    ] {
        let mut run = Command::new("docker");
        run.args(["run", "-d", "--name", name, "--restart=always", "--stop-signal=KILL", "--network=none"]);
        run.args(["--runtime=sublet"]).args(annotations.map(|one| format!("--annotation={one}")));
        done(run.args(["probe", "cuda-probe", "hold", "600"]));
    }
    // The next boot needs its driver.
    std::mem::forget(world);
}

fn status() -> Value {
    let text = done(Command::new("sublet").args(["status", "--format", "json"]));
    serde_json::from_str(&text).expect("status prints JSON")
}

/// Where both containers are, by the GPUs' indices, once they compute there.
fn places() -> [Value; 2] {
    let active = |status: &Value| {
        let leases = status["leases"].as_array().expect("leases").iter();
        leases.filter(|lease| lease["state"] == "active").count()
    };
    assert!(eventually(|| active(&status()) == 2), "{:#}", status());
    let status = status();
    ["web", "train"].map(|name| {
        let info = done(Command::new("docker").args(["exec", name, "cuda-probe", "info"]));
        assert!(info.contains("\"error\":null"), "{name}: {info}");
        let lease = status["leases"].as_array().expect("leases").iter().find(|lease| lease["name"] == name);
        let uuid = &lease.unwrap_or_else(|| panic!("{name}: {status:#}"))["device"];
        let devices = status["devices"].as_array().expect("devices").iter();
        devices.clone().find(|gpu| gpu["uuid"] == *uuid).map_or(Value::Null, |gpu| gpu["index"].clone())
    })
}

fn first_boot() {
    set_up();
    assert_eq!(places(), [0, 1].map(Value::from));
    type_in(&steps(MOVING));
    assert_eq!(places(), [2, 1].map(Value::from));
    done(Command::new("sh").args(["-c", "sublet undrain 0 && docker restart web"]));
    assert_eq!(places(), [0, 1].map(Value::from));
    type_in(&steps(RESETTING));
    assert_eq!(places(), [0, 1].map(Value::from));
    type_in(&steps(DRIVER));
    assert_eq!((places(), &status()["driver"]["version"]), ([0, 1].map(Value::from), &json!(NEW_DRIVER)));
    type_in(&steps(KERNEL));
}

fn second_boot() {
    type_in(&after_the_boot(KERNEL));
    assert_eq!(places(), [0, 1].map(Value::from));
    type_in(&steps(REPLACING));
    // Another GPU is put in the place of GPU 1.
    let topology = std::fs::read_to_string(TOPOLOGY).expect("it was written");
    write(TOPOLOGY, &topology.replace("000000000801", "000000000899"));
    let dir = std::fs::read_to_string(WORLD).expect("it was written");
    done(Command::new("sh").args(["-c", &lay_out(&dir)]));
}

fn third_boot() {
    type_in(&after_the_boot(REPLACING));
    assert_eq!(places(), [0, 1].map(Value::from));
    let uuid = status()["devices"][1]["uuid"].clone();
    let uuid = uuid.as_str().expect("a UUID");
    assert!(uuid.ends_with("000000000899"), "{uuid}");
    // Its drain outlived the boot, and can be ended without it.
    let old = uuid.replace("000000000899", "000000000801");
    let said = done(Command::new("sublet").args(["undrain", &old]));
    assert!(said.contains("takes leases again"), "{said}");
    done(Command::new("docker").args(["rm", "-f", "web", "train"]));
    assert!(eventually(|| status()["leases"] == json!([])), "{:#}", status());
    let dir = std::fs::read_to_string(WORLD).expect("it was written");
    std::fs::remove_dir_all(Path::new(&dir)).expect("the world is removed");
}

#[test]
fn the_pages_steps_keep_a_server_running() {
    if skip_unless_installed() {
        return;
    }
    match std::env::var("SUBLET_BOOT").expect("tests/engines/systemd sets it").as_str() {
        "1" => first_boot(),
        "2" => second_boot(),
        _ => return third_boot(),
    }
    exit(REBOOT);
}
