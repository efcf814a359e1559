//! The steps of docs/maintenance.md, as they stand there, on a machine with eight H200. Runs below tests/engines/systemd, which
//! boots the machine again when this ends with its status. In place of apt, modprobe and nvidia-smi are programs that do with
//! the simulated driver what those do with the real one.

use std::path::Path;
use std::process::{Command, exit};

use serde_json::{Value, json};
use sublet_e2e::installed::{REBOOT, done, engines, install, skip_unless_installed, systemctl, write};
use sublet_e2e::kept::{ALLOW, KEEP, Kept};
use sublet_e2e::{Finished, World, bin_dir, eventually};

const PAGE: &str = include_str!("../../docs/maintenance.md");
const MOVING: &str = "Moving containers off a GPU";
const RESETTING: &str = "Resetting a GPU";
const DRIVER: &str = "A new driver";
const KERNEL: &str = "A new kernel";
const REPLACING: &str = "Replacing a GPU";

const HOLD: &[&str] = &["cuda-probe", "hold", "600"];
/// The page's containers.
const BOTH: [&str; 2] = ["web", "train"];
/// The same, and one that may be moved.
const ALL: [&str; 3] = ["web", "train", "tune"];

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

/// Starts a container of Docker's.
fn run(name: &str, restart: &str, annotations: &[&str], command: &[&str]) {
    let mut run = Command::new("docker");
    run.args(["run", "-d", "--name", name, "--restart", restart, "--stop-signal=KILL", "--network=none"]);
    run.arg("--runtime=sublet").args(annotations.iter().map(|one| format!("--annotation={one}")));
    done(run.arg("probe").args(command));
}

/// The first boot.
fn set_up() -> World {
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
    run("web", "always", &["sublet.sm=25", "sublet.memory=8GiB"], HOLD);
    run("train", "always", &["sublet.gpu=1", "sublet.mode=exclusive"], HOLD);
    world
}

fn status() -> Value {
    let text = done(Command::new("sublet").args(["status", "--format", "json"]));
    serde_json::from_str(&text).expect("status prints JSON")
}

/// Where these containers are, by the GPUs' indices, once they compute there. There are no others.
fn places<const N: usize>(names: [&str; N]) -> [Value; N] {
    let active = |status: &Value| {
        let leases = status["leases"].as_array().expect("leases").iter();
        leases.filter(|lease| lease["state"] == "active").count()
    };
    assert!(eventually(|| active(&status()) == N), "{:#}", status());
    let status = status();
    names.map(|name| {
        let info = done(Command::new("docker").args(["exec", name, "cuda-probe", "info"]));
        assert!(info.contains("\"error\":null"), "{name}: {info}");
        let lease = status["leases"].as_array().expect("leases").iter().find(|lease| lease["name"] == name);
        let uuid = &lease.unwrap_or_else(|| panic!("{name}: {status:#}"))["device"];
        let devices = status["devices"].as_array().expect("devices").iter();
        devices.clone().find(|gpu| gpu["uuid"] == *uuid).map_or(Value::Null, |gpu| gpu["index"].clone())
    })
}

/// Types the steps by which containers leave GPU 0, of which the first one says `said` and ends with `code`. Nothing is on that
/// GPU then, until it takes leases again.
fn move_off(code: i32, said: &str) {
    let steps = steps(MOVING);
    let [drain, away @ .., undrain] = &steps[..] else { panic!("{steps:?}") };
    let drained = Finished::of(&Command::new("sh").args(["-c", drain]).output().expect("it runs"));
    assert_eq!(drained.code, Some(code), "{drained:?}");
    assert!(format!("{}{}", drained.stdout, drained.stderr).contains(said), "{drained:?}");
    type_in(away);
    // It uses what an idle one does.
    let is_empty = || {
        let devices = &status()["devices"];
        let used = |index: usize| devices[index]["used"]["memory_bytes"].as_u64().expect("bytes");
        let (drained, leases) = (&devices[0]["drained"], &devices[0]["lease_count"]);
        (drained, leases, used(0)) == (&json!(true), &json!(0), used(7))
    };
    assert!(eventually(is_empty), "{:#}", status());
    type_in(&[undrain]);
}

/// A container that may be moved computes on, with what it has in its memory, while GPU 0 is drained and while that is reset.
fn compute_meanwhile(world: &World) {
    run("tune", "no", ALLOW, KEEP);
    let log = || Finished::of(&Command::new("docker").args(["logs", "tune"]).output().expect("docker runs"));
    let tune = Kept::of(world, log);
    tune.computes_on(0);
    move_off(0, "Moved tune to GPU 3.");
    assert_eq!(places(ALL), [2, 1, 3].map(Value::from));
    tune.computes_on(3);
    // Its MPS daemon would keep it on GPU 2.
    done(Command::new("sh").args(["-c", "docker stop web && sublet mps stop 2 && docker start web"]));
    assert_eq!(places(ALL), [0, 1, 3].map(Value::from));
    type_in(&steps(RESETTING));
    assert_eq!(places(ALL), [0, 1, 3].map(Value::from));
    tune.computes_on(3);
    done(Command::new("docker").args(["rm", "-f", "tune"]));
}

fn first_boot() {
    let world = set_up();
    assert_eq!(places(BOTH), [0, 1].map(Value::from));
    move_off(1, "container web stays: ");
    assert_eq!(places(BOTH), [2, 1].map(Value::from));
    compute_meanwhile(&world);
    assert_eq!(places(BOTH), [0, 1].map(Value::from));
    type_in(&steps(DRIVER));
    assert_eq!((places(BOTH), &status()["driver"]["version"]), ([0, 1].map(Value::from), &json!(NEW_DRIVER)));
    type_in(&steps(KERNEL));
    // The next boot needs its driver.
    std::mem::forget(world);
}

fn second_boot() {
    type_in(&after_the_boot(KERNEL));
    assert_eq!(places(BOTH), [0, 1].map(Value::from));
    type_in(&steps(REPLACING));
    // Another GPU is put in the place of GPU 1.
    let topology = std::fs::read_to_string(TOPOLOGY).expect("it was written");
    write(TOPOLOGY, &topology.replace("000000000801", "000000000899"));
    let dir = std::fs::read_to_string(WORLD).expect("it was written");
    done(Command::new("sh").args(["-c", &lay_out(&dir)]));
}

fn third_boot() {
    type_in(&after_the_boot(REPLACING));
    assert_eq!(places(BOTH), [0, 1].map(Value::from));
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
    let sections: Vec<&str> = PAGE.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    assert_eq!(sections, [MOVING, RESETTING, DRIVER, KERNEL, REPLACING], "each is typed");
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
