//! MIG devices for containers of real engines: Docker by the shim, Podman by its hook. Runs in the root that
//! tests/engines/enter gives. An A100-40GB cut into 4g.20gb, 2g.10gb in two and 1g.5gb.

use serde_json::{Value, json};
use sublet_e2e::docker::{Docker, skip_unless_engines};
use sublet_e2e::podman::Podman;
use sublet_e2e::{World, eventually};

const LARGE: &str = "MIG-5b1e7000-0000-5000-8000-000000000a01";
const SMALL: &str = "MIG-5b1e7000-0000-5000-8000-000000000a04";
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

fn devices(world: &World) -> Vec<String> {
    let device = |lease: &Value| lease["device"].as_str().expect("a UUID").to_owned();
    world.leases().iter().map(device).collect()
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
