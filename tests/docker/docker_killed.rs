//! dockerd, its containerd and every containerd-shim killed with SIGKILL at every step of a container's life:
//! the next sublet command alone puts everything right. Runs in the root that tests/engines/enter gives.

use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use serde_json::json;
use sublet_e2e::docker::{Docker, IMAGE, skip_unless_engines};
use sublet_e2e::killing::{assert_no_daemons, mount_points};
use sublet_e2e::{Stopping, World, eventually, is_alive};

fn assert_empty(docker: &Docker) {
    assert!(eventually(|| docker.world.leases().is_empty()), "leases are left: {:?}", docker.world.leases());
    assert_no_daemons(&docker.world, "at the end");
    docker.world.assert_empty();
    assert_eq!(mount_points(&docker.world.dir.path().join("docker")), "", "mount points are left");
}

/// Where it stops. `daemon`: the lease is written down and config.json is not edited yet; `before-create`: it
/// is edited.
const STAGES: [&str; 7] = [
    "daemon",
    "before-create",
    "after-create",
    "before-start",
    "after-start",
    "before-delete",
    "after-delete",
];

fn killed(docker: &mut Docker, stopping: &Stopping, stage: &str) {
    stopping.at(stage);
    let mut command = docker.command();
    command.args(["run", "--name=killed", "--network=none", "--runtime=sublet", "--annotation=sublet.sm=25"]);
    command.args([IMAGE, "sleep", if stage.ends_with("delete") { "0" } else { "600" }]);
    let mut client = command.stderr(Stdio::null()).spawn().expect("docker runs");
    assert!(eventually(|| stopping.has_stopped()), "{stage} was not reached: {}", docker.log());
    // Not `inspect`: dockerd holds the container's lock.
    let id = docker.ask(&["ps", "-aq", "--no-trunc"]);
    docker.kill_engine();
    stopping.go_on();
    let _ = client.wait();
    // The containers' own processes outlive the engine, and as long as one does its lease is held.
    let agree = || docker.world.leases().len() == usize::from(docker.is_populated(&id));
    assert!(eventually(agree), "{stage}: {:?}", docker.world.leases());
    let processes = docker.processes_of(&id);
    for pid in &processes {
        let _ = kill(*pid, Signal::SIGKILL);
    }
    // In cgroup v1 a process that exits is in no cgroup any more, and alive still.
    let gone = || !docker.is_populated(&id) && !processes.iter().any(|pid| is_alive(*pid));
    assert!(eventually(gone), "{stage}: killed and not gone");
    let gc = docker.world.sublet(&["gc"]);
    assert!(gc.status.success(), "{gc:?}");
    assert_empty(docker);
    docker.start_daemon();
    docker.done(&["rm", "-f", "killed"]);
    assert_empty(docker);
}

/// How many wait for a share.
fn waiting(docker: &Docker) -> usize {
    docker.world.status()["waiting"].as_array().map_or(0, Vec::len)
}

#[test]
fn a_container_that_waits_waits_no_longer_than_its_engine_lives() {
    if skip_unless_engines() {
        return;
    }
    let mut docker = Docker::up(World::simulated("h200", ""), &json!({}));
    let holder = docker.hold("holder", &["sublet.mode=exclusive"], &[]);
    let mut command = docker.command();
    command.args(["run", "-d", "--name=victim", "--network=none", "--runtime=sublet"]);
    command.args(["--annotation=sublet.sm=25", "--annotation=sublet.wait=60s", IMAGE, "sleep", "600"]);
    let mut client = command.stderr(Stdio::null()).spawn().expect("docker runs");
    assert!(eventually(|| waiting(&docker) == 1), "it does not wait: {}", docker.log());
    let victim = docker.ask(&["ps", "-aq", "--no-trunc", "--filter=name=victim"]);
    docker.kill_engine();
    let _ = client.wait();
    assert!(eventually(|| waiting(&docker) == 0), "it waits on");
    for pid in docker.processes_of(&holder) {
        let _ = kill(pid, Signal::SIGKILL);
    }
    assert!(eventually(|| !docker.is_populated(&holder)), "killed and not gone");
    assert!(docker.world.sublet(&["gc"]).status.success());
    assert_empty(&docker);
    assert!(!docker.is_populated(&victim), "there is room, and nobody to ask for it");
    docker.start_daemon();
    assert_eq!(docker.inspect("victim", "State.Status"), "\"created\"");
    docker.done(&["rm", "-f", "holder", "victim"]);
    assert_empty(&docker);
}

#[test]
fn an_engine_killed_anywhere_leaves_nothing_that_the_next_command_does_not_restore() {
    if skip_unless_engines() {
        return;
    }
    let world = World::simulated("h200", "");
    let stopping = Stopping::install(&world);
    let mut docker = Docker::up(world, &json!({}));
    for stage in STAGES {
        eprintln!("{stage}");
        killed(&mut docker, &stopping, stage);
    }
    let _ = docker.hold("after", &["sublet.sm=25"], &[]);
    assert_eq!(docker.exec_info("after", &[])["sm"], json!(32));
    docker.done(&["rm", "-f", "after"]);
    assert_empty(&docker);
}
