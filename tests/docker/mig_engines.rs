//! MIG devices for containers of real engines: Docker by the shim, Podman by its hook, both by CDI.
//! Runs in the root that tests/engines/enter gives. An A100-40GB cut into 4g.20gb, 2g.10gb in two and 1g.5gb.

use serde_json::{Value, json};
use sublet_e2e::docker::{Docker, skip_unless_engines};
use sublet_e2e::mig::{LARGE, SECOND, SMALL, devices, remake_small};
use sublet_e2e::podman::Podman;
use sublet_e2e::{World, eventually};

const NODES: &str = "cd /dev; for n in nvidia* nvidia-caps/*; do [ -c $n ] && echo $n; done";
const OF_SMALL: &str = "nvidia-uvm nvidia-uvm-tools nvidia0 nvidiactl nvidia-caps/nvidia-cap84 \
    nvidia-caps/nvidia-cap85";

fn world() -> World {
    World::simulated("a100x2-mig", "")
}

fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn sees(info: &Value, mps: bool, sm: u32) {
    let seen = (&info["error"], &info["count"], &info["mps"], &info["sm"]);
    assert_eq!(seen, (&Value::Null, &json!(1), &json!(mps), &json!(sm)), "{info}");
}

fn assert_empty(world: &World) {
    assert!(eventually(|| world.leases().is_empty()), "leases are left: {:?}", world.leases());
    assert!(eventually(|| world.daemons().is_empty()), "daemons are left");
    world.assert_empty();
}

#[test]
fn docker_gives_an_instance_and_shares_of_one() {
    if skip_unless_engines() || !std::path::Path::new("/usr/sbin/dockerd").exists() {
        return;
    }
    let docker = Docker::up(world(), &json!({}));
    let _ = docker.hold("alone", &["sublet.mig=1g.5gb"], &[]);
    sees(&docker.event("alone", "info"), false, 14);
    sees(&docker.exec_info("alone", &[]), false, 14);
    assert_eq!(words(&docker.cli(&["exec", "alone", "sh", "-c", NODES]).stdout), OF_SMALL);
    let share = |sm| [sm, "sublet.mig=4g.20gb", "sublet.memory=4GiB"];
    let _ = docker.hold("one", &share("sublet.sm=25"), &[]);
    let _ = docker.hold("two", &share("sublet.sm=50"), &[]);
    sees(&docker.event("one", "info"), true, 14);
    sees(&docker.event("two", "info"), true, 28);
    sees(&docker.exec_info("two", &["env", "-i"]), true, 28);
    assert_eq!(devices(&docker.world), [SMALL, LARGE, LARGE]);
    docker.done(&["rm", "-f", "alone", "one", "two"]);
    assert_empty(&docker.world);
}

/// An instance alone, and a quarter of another.
const SHARES: &str = "[share.one]\nmig = \"1g.5gb\"\n[share.quarter]\ngpu = \"0:0\"\nsm = 25\nmemory = \"4GiB\"\n\
    [share.half]\nmig = \"1c.2g.10gb\"\n";

#[test]
fn docker_gives_instances_by_cdi_devices() {
    if skip_unless_engines() || !std::path::Path::new("/usr/sbin/dockerd").exists() {
        return;
    }
    let world = World::simulated("a100x2-mig", SHARES);
    let low = format!("/usr/bin/{}", world.engine.program());
    let shim = sublet_e2e::bin_dir().join("sublet-runtime");
    let docker = Docker::up(world, &json!({"runtimes": {"low": {"path": low}, "sublet": {"path": shim}}}));
    docker.world.generate_cdi();
    let hold = |name, device: &str, runtime| {
        let _ = docker.hold_cdi(name, &format!("sublet/share={device}"), &[runtime]);
    };
    hold("one", "one", "--runtime=low");
    sees(&docker.event("one", "info"), false, 14);
    sees(&docker.exec_info("one", &["env", "-i"]), false, 14);
    assert_eq!(words(&docker.cli(&["exec", "one", "sh", "-c", NODES]).stdout), OF_SMALL);
    let environment = std::fs::read(format!("/proc/{}/environ", docker.pid("one"))).expect("it runs");
    let environment = String::from_utf8_lossy(&environment).into_owned();
    assert!(
        environment.split('\0').any(|entry| entry == format!("CUDA_VISIBLE_DEVICES={SMALL}")),
        "{environment}"
    );
    hold("quarter", "quarter.0:0", "--runtime=low");
    sees(&docker.event("quarter", "info"), true, 14);
    sees(&docker.exec_info("quarter", &["env", "-i"]), true, 14);
    // Two that can serve it: each by its own name, one of them by the shim beside it.
    let unnamed = docker.run_cdi("half", "sublet/share=half", &["--runtime=low"], &["true"]);
    assert!(!unnamed.ok && unnamed.stderr.contains("unresolvable CDI devices"), "{unnamed:?}");
    let _ = docker.cli(&["rm", "-f", "half"]);
    hold("half", "half.0:2", "--runtime=sublet");
    sees(&docker.event("half", "info"), false, 14);
    assert_eq!(devices(&docker.world), [SMALL, LARGE, SECOND]);
    let taken = docker.run_cdi("again", "sublet/share=one", &["--runtime=low"], &["true"]);
    let last = docker.world.sublet(&["status", "--last-error"]);
    let said = String::from_utf8_lossy(&last.stdout).into_owned();
    assert!(!taken.ok && said.contains("MIG device 0:3 is taken whole"), "{taken:?} {said}");
    docker.done(&["rm", "-f", "one", "quarter", "half", "again"]);
    assert_empty(&docker.world);
    // Its ids belong to another instance now: the specification describes the destroyed one.
    remake_small(&docker.world);
    let stale = docker.run_cdi("one", "sublet/share=one", &["--runtime=low"], &["true"]);
    let last = docker.world.sublet(&["status", "--last-error"]);
    let said = String::from_utf8_lossy(&last.stdout).into_owned();
    assert!(!stale.ok && said.contains("run `sublet cdi generate`"), "{stale:?} {said}");
    docker.done(&["rm", "-f", "one"]);
    docker.world.generate_cdi();
    hold("one", "one", "--runtime=low");
    sees(&docker.event("one", "info"), false, 14);
    docker.done(&["rm", "-f", "one"]);
    assert_empty(&docker.world);
}

#[test]
fn podman_gives_instances_by_cdi_devices() {
    if skip_unless_engines() {
        return;
    }
    let podman = Podman::up(World::simulated("a100x2-mig", SHARES));
    let _offer = podman.offer_cdi();
    let _ = podman.hold("one", &[], &["--device", "sublet/share=one.0:3"]);
    sees(&podman.event("one", "info"), false, 14);
    sees(&podman.exec_info("one", &["env", "-i"]), false, 14);
    assert_eq!(words(&podman.done(&["exec", "one", "sh", "-c", NODES])), OF_SMALL);
    let _ = podman.hold("quarter", &[], &["--device", "sublet/share=quarter"]);
    sees(&podman.event("quarter", "info"), true, 14);
    assert_eq!(devices(&podman.world), [SMALL, LARGE]);
    podman.done(&["rm", "-f", "-t", "0", "one", "quarter"]);
    assert_empty(&podman.world);
}

#[test]
fn podman_gives_an_instance_and_shares_of_one() {
    if skip_unless_engines() {
        return;
    }
    let podman = Podman::up(world());
    let _ = podman.hold("alone", &["sublet.mig=1g.5gb"], &[]);
    sees(&podman.event("alone", "info"), false, 14);
    assert_eq!(words(&podman.done(&["exec", "alone", "sh", "-c", NODES])), OF_SMALL);
    let _ = podman.hold("one", &["sublet.mig=4g.20gb", "sublet.sm=25"], &[]);
    sees(&podman.event("one", "info"), true, 14);
    sees(&podman.exec_info("one", &[]), true, 14);
    assert_eq!(devices(&podman.world), [SMALL, LARGE]);
    podman.done(&["rm", "-f", "-t", "0", "alone", "one"]);
    assert_empty(&podman.world);
}
