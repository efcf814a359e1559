//! A machine that reboots, and one that loses its power: the services that Compose and Quadlet keep running
//! come back with their shares, in whatever order their engines start them. Runs below tests/engines/systemd,
//! which boots the machine again when this ends with its status; eight H200, 132 SMs each.

use std::process::{Command, exit};

use serde_json::{Value, json};
use sublet_e2e::installed::{
    POWER_CUT, REBOOT, done, engines, install, show, skip_unless_installed, systemctl, write,
};
use sublet_e2e::{World, eventually};

/// Where the world of the first boot is remembered.
const WORLD: &str = "/etc/world";

/// A service, its annotations, and whether it is behind an MPS server and how many SMs it sees.
type Service = (&'static str, &'static [&'static str], bool, u32);

const COMPOSED: [Service; 4] = [
    ("web", &["sublet.gpu=0", "sublet.sm=25", "sublet.memory=8GiB"], true, 32),
    ("chat", &["sublet.gpu=0", "sublet.sm=50", "sublet.memory=60GiB"], true, 66),
    ("batch", &["sublet.gpu=1", "sublet.mode=time-slice"], false, 132),
    ("train", &["sublet.gpu=2", "sublet.mode=exclusive"], false, 132),
];
const QUADLETS: [Service; 2] = [
    ("edge", &["sublet.gpu=0", "sublet.sm=20", "sublet.memory=4GiB"], true, 26),
    ("camera", &["sublet.gpu=1", "sublet.mode=time-slice"], false, 132),
];

fn compose() -> String {
    let services = COMPOSED.iter().map(|(name, annotations, ..)| {
        let annotations: Vec<String> = annotations.iter().map(|line| format!("      - {line}\n")).collect();
        format!(
            "  {name}:\n    image: probe\n    container_name: {name}\n    command: cuda-probe hold 600\n    \
             network_mode: none\n    runtime: sublet\n    restart: always\n    annotations:\n{}",
            annotations.concat()
        )
    });
    format!("services:\n{}", services.collect::<Vec<_>>().concat())
}

/// As docs/podman.md has it.
fn quadlet((name, annotations, ..): &Service) -> String {
    let lines: Vec<String> = annotations.iter().map(|line| format!("Annotation={line}\n")).collect();
    let asked: Vec<String> = annotations.iter().map(|line| format!(" --annotation {line}")).collect();
    format!(
        "[Unit]\nStartLimitIntervalSec=0\n[Container]\nContainerName={name}\nImage=localhost/probe\n\
         Exec=cuda-probe hold 600\nPull=never\n{}[Service]\nExecStartPre=/usr/bin/sublet wait{}\nRestart=always\n\
         RestartSec=2\n[Install]\nWantedBy=multi-user.target\n",
        lines.concat(),
        asked.concat()
    )
}

/// The first boot.
fn set_up() {
    let world = World::simulated("h200x8", "");
    install(&world);
    engines(&world);
    write("/srv/compose.yaml", &compose());
    done(Command::new("docker-compose").args(["--file", "/srv/compose.yaml", "up", "--detach"]));
    for unit in &QUADLETS {
        write(&format!("/etc/containers/systemd/{}.container", unit.0), &quadlet(unit));
    }
    systemctl(&["daemon-reload"]);
    for (name, ..) in QUADLETS {
        systemctl(&["start", &format!("{name}.service")]);
    }
    write(WORLD, world.dir.path().to_str().expect("UTF-8"));
    // The next boot needs its driver.
    std::mem::forget(world);
}

fn status() -> Value {
    let text = done(Command::new("sublet").args(["status", "--format", "json"]));
    serde_json::from_str(&text).expect("status prints JSON")
}

fn leases() -> Vec<Value> {
    status()["leases"].as_array().expect("an array").clone()
}

/// What the container of a Compose service reports about its GPU.
fn composed(name: &str) -> Value {
    let mut exec = Command::new("docker");
    let output = exec.args(["exec", name, "cuda-probe", "info"]).output().expect("docker is installed");
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

/// The same by the first process of a Quadlet unit. (One that comes by `podman exec` sees all that the server
/// has: docs/podman.md.)
fn quadlets(name: &str) -> Value {
    let output = Command::new("podman").args(["logs", name]).output().expect("podman is installed");
    let said = String::from_utf8_lossy(&output.stdout);
    said.lines().rev().find_map(|line| serde_json::from_str(line).ok()).unwrap_or_default()
}

fn all_run() {
    let active = || leases().iter().filter(|lease| lease["state"] == "active").count();
    assert!(eventually(|| active() == 6), "{:#?}", leases());
    let ways = [(composed as fn(&str) -> Value, &COMPOSED[..]), (quadlets, &QUADLETS)];
    for (said, services) in ways {
        for (name, _, mps, sm) in services {
            assert!(eventually(|| said(name)["event"] == "info"), "{name}: {}", said(name));
            let info = said(name);
            assert_eq!((&info["mps"], &info["sm"]), (&json!(mps), &json!(sm)), "{name}: {info}");
        }
    }
    assert_eq!(leases().len(), 6);
    for (name, ..) in QUADLETS {
        assert_eq!(show(&format!("{name}.service"), "ActiveState"), "active");
    }
}

fn take_down() {
    systemctl(&["stop", "edge.service", "camera.service"]);
    done(Command::new("docker-compose").args(["--file", "/srv/compose.yaml", "down", "--timeout=0"]));
    assert!(eventually(|| leases().is_empty() && status()["mps"] == json!([])), "{}", status());
    let world = std::fs::read_to_string(WORLD).expect("it was written");
    std::fs::remove_dir_all(world).expect("the world is removed");
}

#[test]
fn services_come_back_with_their_shares() {
    if skip_unless_installed() {
        return;
    }
    let boot = std::env::var("SUBLET_BOOT").expect("tests/engines/systemd sets it");
    if boot == "1" {
        set_up();
    }
    all_run();
    match boot.as_str() {
        "1" => exit(REBOOT),
        "2" => exit(POWER_CUT),
        _ => take_down(),
    }
}
