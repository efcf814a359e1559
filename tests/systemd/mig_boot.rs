//! MIG layouts on a machine that boots: in force before the engines start their containers again, in the way of
//! none of them when they fail. Runs below tests/engines/systemd, which boots the machine again when this ends with
//! its status; two A100-40GB, the first in MIG mode, whose instances outlive no boot.

use std::path::Path;
use std::process::{Command, exit};

use serde_json::Value;
use sublet_e2e::installed::{
    POWER_CUT, REBOOT, done, engines, install, show, skip_unless_installed, systemctl, write,
};
use sublet_e2e::{World, bin_dir, eventually};

/// What is remembered over a boot.
const WORLD: &str = "/etc/world";
const BEFORE: &str = "/etc/instances";

/// As many instances as there are containers: a container that starts again finds exactly one free.
const LAYOUT: &str =
    "[[gpu]]\nmatch = \"0\"\nmig = true\ninstances = [{ profile = \"1g.5gb\", count = 2 }]\n";
const UNIT: &str = "sublet-mig.service";
const DROP_IN: &str = "/etc/systemd/system/sublet-mig.service.d/test.conf";
const AFTER: [&str; 4] = ["docker.service", "containerd.service", "podman-restart.service", "sublet.service"];

fn set_up() {
    let world = World::simulated("a100x2-mig", "");
    install(&world);
    engines(&world);
    write("/etc/sublet/layout.toml", LAYOUT);
    write("/etc/sublet/conf.d/mig.toml", "[mig]\nlayout = \"/etc/sublet/layout.toml\"\n");
    // What is not ordered behind it has started long before it ends.
    write(DROP_IN, "[Service]\nExecStartPre=sleep 1\n");
    let dir = world.dir.path().to_str().expect("UTF-8");
    let reboot = format!("{} reboot --root {dir}/sim", bin_dir().join("sublet-sim").display());
    let ledger = "-sh -c 'mkdir -p /run/sublet && cp /etc/old-ledger.json /run/sublet/ledger.json'";
    write(
        "/etc/systemd/system/driver.service",
        &format!(
            "[Unit]\nBefore={UNIT} {}\n[Service]\nType=oneshot\nExecStartPre={ledger}\nExecStart={reboot}\n\
             [Install]\nWantedBy=multi-user.target\n",
            AFTER.join(" ")
        ),
    );
    systemctl(&["daemon-reload"]);
    systemctl(&["enable", "--quiet", "driver", UNIT, "podman-restart", "sublet"]);
    systemctl(&["start", "driver.service"]);
    systemctl(&["start", UNIT]);
    let run = ["run", "-d", "--name=kept", "--restart=always", "--stop-signal=KILL", "--network=none"];
    for (engine, runtime) in [("docker", &["--runtime=sublet"][..]), ("podman", &[])] {
        let mut run_it = Command::new(engine);
        run_it.args(run).args(runtime).args(["--annotation=sublet.mig=1g.5gb", "probe", "cuda-probe"]);
        done(run_it.args(["hold", "600"]));
    }
    write(WORLD, dir);
    // The next boot needs its driver.
    std::mem::forget(world);
}

fn status() -> Value {
    let text = done(Command::new("sublet").args(["status", "--format", "json"]));
    serde_json::from_str(&text).expect("status prints JSON")
}

fn leases() -> Vec<Value> {
    status()["leases"].as_array().expect("leases").clone()
}

fn word(value: &Value) -> String {
    value.as_str().expect("a text").to_owned()
}

/// UUIDs of all MIG devices, and their ids.
fn instances() -> (Vec<String>, Vec<String>) {
    let status = status();
    let all = status["devices"][0]["mig"].as_array().expect("mig").iter();
    all.map(|one| (word(&one["uuid"]), format!("{}/{}", one["gi"], one["ci"]))).unzip()
}

/// Both containers run, each with its own existing instance.
fn both_have_one() {
    let active = || leases().iter().filter(|lease| lease["state"] == "active").count();
    assert!(eventually(|| active() == 2), "{:#?}", leases());
    let mut held: Vec<_> = leases().iter().map(|lease| word(&lease["device"])).collect();
    let (mut all, _) = instances();
    held.sort_unstable();
    all.sort_unstable();
    assert_eq!(held, all);
    for engine in ["docker", "podman"] {
        let info = done(Command::new(engine).args(["exec", "kept", "cuda-probe", "info"]));
        assert!(info.contains("\"error\":null") && info.contains("\"sm\":14"), "{engine}: {info}");
    }
}

/// The layout was there before anything of `AFTER` began, and its instances have the ids of those before.
fn came_first() {
    let ended: u64 = show(UNIT, "ActiveEnterTimestampMonotonic").parse().expect("µs");
    for unit in AFTER {
        assert!(show(unit, "After").contains(UNIT), "{unit}");
        let begun: u64 = show(unit, "InactiveExitTimestampMonotonic").parse().expect("µs");
        assert!(0 < ended && ended <= begun, "{unit}: {begun}, the layout: {ended}");
    }
    let before: (Vec<String>, Vec<String>) =
        serde_json::from_str(&std::fs::read_to_string(BEFORE).expect("it was written")).expect("JSON");
    let now = instances();
    assert_eq!(now.1, before.1, "the ids are given again");
    assert!(now.0.iter().all(|uuid| !before.0.contains(uuid)), "{now:?} {before:?}");
}

/// The next boot finds this one's ledger, as where the state directory is on a disk. The kernel's boot id is out
/// of the machine's reach, and stays.
fn keep_the_ledger() {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("boot_id");
    let ledger = std::fs::read_to_string("/run/sublet/ledger.json").expect("the ledger");
    assert!(ledger.contains(boot.trim()) && ledger.contains("\"active\""), "{ledger}");
    write("/etc/old-ledger.json", &ledger.replace(boot.trim(), "of-another-boot"));
}

fn take_down() {
    done(Command::new("docker").args(["rm", "-f", "kept"]));
    done(Command::new("podman").args(["rm", "-f", "-t0", "kept"]));
    assert!(eventually(|| leases().is_empty()), "{:#?}", leases());
}

fn failed(result: &str, words: &str) {
    assert_eq!((show(UNIT, "ActiveState"), show(UNIT, "Result")), ("failed".into(), result.into()));
    let journal = || done(Command::new("journalctl").args(["-o", "cat", "-u", UNIT]));
    assert!(eventually(|| journal().contains(words)), "{}", journal());
}

/// The last boot's layout was one that the GPU cannot have.
fn fails_alone() {
    failed(
        "exit-code",
        "layout /etc/sublet/layout.toml:4: GPU 0 (NVIDIA A100-PCIE-40GB) has no profile 1g.18gb",
    );
    for unit in AFTER {
        assert_eq!(show(unit, "ActiveState"), "active", "{unit}");
    }
    assert_eq!(leases(), Vec::<Value>::new());
    let run = ["run", "--rm", "--network=none", "--runtime=sublet", "probe", "true"];
    done(Command::new("docker").args(run));
    assert_eq!(show(UNIT, "TimeoutStartUSec"), "5min");
    // A driver that does not answer, say.
    write(DROP_IN, "[Service]\nExecStartPre=sleep 600\nTimeoutStartSec=1\n");
    systemctl(&["daemon-reload"]);
    assert!(!Command::new("systemctl").args(["start", UNIT]).status().expect("systemctl").success());
    failed("timeout", "timed out");
    let world = std::fs::read_to_string(WORLD).expect("it was written");
    std::fs::remove_dir_all(Path::new(&world)).expect("the world is removed");
}

#[test]
fn the_layout_comes_before_the_engines_and_fails_alone() {
    if skip_unless_installed() {
        return;
    }
    let boot = std::env::var("SUBLET_BOOT").expect("tests/engines/systemd sets it");
    match boot.as_str() {
        "1" => {
            set_up();
            both_have_one();
            write(BEFORE, &serde_json::to_string(&instances()).expect("JSON"));
            keep_the_ledger();
            exit(POWER_CUT)
        }
        "2" => {
            both_have_one();
            came_first();
            take_down();
            write("/etc/sublet/layout.toml", &LAYOUT.replace("1g.5gb", "1g.18gb"));
            exit(REBOOT)
        }
        _ => fails_alone(),
    }
}
