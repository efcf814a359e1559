//! systemd writes a container's device rules again whenever it likes (`daemon-reload`, `daemon-reexec`): its
//! nodes stay open then, and all others closed, whatever entry point it came by. Runs below tests/engines/systemd,
//! where the low-level runtimes leave cgroups to systemd.

use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use sublet_e2e::entry_point::{
    Asked, By, EntryPoint, How, OfContainerd, OfDocker, OfPodman, Plain, Request, With,
};
use sublet_e2e::{Finished, World, by_systemd, eventually};

const SHARE: Request =
    Request { name: "share", keys: &[("gpu", "0"), ("memory", "8GiB")], with: With::Nothing };
/// One that may be moved, and its program.
const MOVES: Request = Request {
    name: "moves",
    keys: &[("gpu", "0"), ("memory", "8GiB"), ("suspend", "allow")],
    with: With::Nothing,
};
const KEEP: &[&str] = &["/usr/bin/cuda-probe", "keep", "256", "600"];
/// GPU 0's own node is made by each container, too: the rule counts, not the node.
const LOOK: &[&str] = &[
    "/bin/sh",
    "-c",
    "mknod /tmp/a c 195 $1; mknod /tmp/b c 195 $2; cuda-probe noderights /dev/nvidiactl /dev/nvidia-uvm /tmp/a /tmp/b",
    "look",
];
/// ENXIO: allowed, and no driver behind it. EPERM: refused by the device cgroup.
const EXPECTED: [&str; 4] = ["ENXIO", "ENXIO", "ENXIO", "EPERM"];

/// A systemd that re-executes itself answers no requests meanwhile, so only one test runs at a time.
static SYSTEMD: Mutex<()> = Mutex::new(());

fn alone() -> Option<MutexGuard<'static, ()>> {
    if !by_systemd() {
        eprintln!("skipped: needs tests/engines/systemd");
        return None;
    }
    Some(SYSTEMD.lock().unwrap_or_else(PoisonError::into_inner))
}

fn world() -> World {
    World::simulated("h200x8", &SHARE.to_config())
}

fn systemctl(arguments: &[&str]) -> Finished {
    Finished::of(&Command::new("systemctl").args(arguments).output().expect("systemctl runs"))
}

/// How opening the control node, UVM's, its own GPU's and another's ends in the container.
fn opened(entry_point: &dyn EntryPoint, request: &Request, own: u64, other: u64) -> Vec<String> {
    let seen = entry_point.exec(request, &[LOOK, &[&own.to_string(), &other.to_string()]].concat());
    let lines = seen.json();
    let nodes = lines.iter().filter(|line| line["event"] == "node");
    nodes.map(|line| line["result"].as_str().expect("text").to_owned()).collect()
}

fn minor(entry_point: &dyn EntryPoint, index: usize) -> u64 {
    entry_point.world().status()["devices"][index]["minor"].as_u64().expect("minor")
}

/// Its nodes are as expected, whatever systemd writes again.
fn keeps(entry_point: &dyn EntryPoint, request: &Request, own: u64, other: u64) {
    assert_eq!(opened(entry_point, request, own, other), EXPECTED);
    for order in ["daemon-reload", "daemon-reexec"] {
        let ordered = systemctl(&[order]);
        assert!(ordered.ok, "{order}: {ordered:?}");
        // systemd comes back from a reexec in its own time.
        assert!(eventually(|| !systemctl(&["is-system-running"]).stdout.is_empty()), "{order}");
        assert_eq!(opened(entry_point, request, own, other), EXPECTED, "after {order}");
    }
    entry_point.stop(request);
    entry_point.remove(request);
    entry_point.world().assert_empty();
}

fn keeps_its_nodes(entry_point: &dyn EntryPoint) {
    entry_point.start(&SHARE, &["/bin/sleep", "600"]).expect("it starts");
    let minor = minor(entry_point, 0);
    keeps(entry_point, &SHARE, minor, (minor + 1) % 8);
}

/// Of a container that was moved, the GPU that it has now is open and the one that it had is closed.
fn keeps_the_node_of_where_it_moved(entry_point: &dyn EntryPoint) {
    entry_point.start(&MOVES, KEEP).expect("it starts");
    let computes = || entry_point.output(&MOVES).contains("\"round\"");
    assert!(eventually(computes), "{}", entry_point.output(&MOVES));
    let moved = Finished::of(&entry_point.world().sublet(&["move", MOVES.name, "--gpu", "1"]));
    assert!(moved.ok, "{}", moved.stderr);
    keeps(entry_point, &MOVES, minor(entry_point, 1), minor(entry_point, 0));
}

#[test]
fn of_plain_bundles() {
    let Some(_alone) = alone() else { return };
    let mut entry_point = Plain::new(world(), How::Shim);
    for how in [How::Shim, How::Precreate, How::Late("prestart"), How::Late("createRuntime")] {
        eprintln!("{how:?}");
        entry_point.go_by(how);
        keeps_its_nodes(&entry_point);
    }
}

#[test]
fn of_podman() {
    let Some(_alone) = alone() else { return };
    let mut entry_point = OfPodman::up(world(), By::Hook);
    keeps_its_nodes(&entry_point);
    entry_point.go_by(By::Runtime);
    keeps_its_nodes(&entry_point);
    drop(entry_point);
    keeps_its_nodes(&OfPodman::up(world(), By::Device));
}

#[test]
fn of_docker() {
    let Some(_alone) = alone() else { return };
    // dockerd starts its own containerd if there is none, and passes it this world's configuration.
    assert!(systemctl(&["stop", "containerd"]).ok);
    for asked in [Asked::Runtime, Asked::Device] {
        eprintln!("{asked:?}");
        keeps_its_nodes(&OfDocker::up(world(), asked, &[]));
    }
}

#[test]
fn of_containerd() {
    let Some(_alone) = alone() else { return };
    keeps_its_nodes(&OfContainerd::up(world()));
}

fn world_of_moves() -> World {
    World::simulated("h200x8", &MOVES.to_config())
}

#[test]
fn of_plain_bundles_that_moved() {
    let Some(_alone) = alone() else { return };
    keeps_the_node_of_where_it_moved(&Plain::new(world_of_moves(), How::Shim));
}

#[test]
fn of_podman_that_moved() {
    let Some(_alone) = alone() else { return };
    keeps_the_node_of_where_it_moved(&OfPodman::up(world_of_moves(), By::Hook));
}

#[test]
fn of_docker_that_moved() {
    let Some(_alone) = alone() else { return };
    // dockerd starts its own containerd if there is none, and passes it this world's configuration.
    assert!(systemctl(&["stop", "containerd"]).ok);
    keeps_the_node_of_where_it_moved(&OfDocker::up(world_of_moves(), Asked::Runtime, &[]));
}
