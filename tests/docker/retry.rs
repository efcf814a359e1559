//! Containers of Docker's that were refused, and that `sublet serve` starts again when there is room. Runs in the root that
//! tests/engines/enter gives. One H200.

use std::process::Child;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use sublet_e2e::docker::{Docker, IMAGE, skip_unless_engines};
use sublet_e2e::{World, eventually};

const HOLD: &[&str] = &["cuda-probe", "hold", "600"];
const WHOLE: &[&str] = &["sublet.mode=exclusive"];
const HALF: &[&str] = &["sublet.sm=50"];

/// `sublet serve`, which ends with the test.
struct Serve(Child);

impl Serve {
    fn start(docker: &Docker) -> Self {
        Self(docker.world.command("sublet").arg("serve").spawn().expect("sublet serve runs"))
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let pid = Pid::from_raw(i32::try_from(self.0.id()).expect("a pid"));
        let _ = kill(pid, Signal::SIGTERM);
        let _ = self.0.wait();
    }
}

/// A dockerd whose socket the configuration names, and a container that has the whole GPU.
fn full() -> Docker {
    let docker = Docker::up(World::simulated("h200", ""), &json!({}));
    docker.world.configure(&format!("[retry]\nsocket = \"{}\"\n", docker.socket().display()));
    let _ = docker.hold("holder", WHOLE, &[]);
    docker
}

/// A container that is refused, with options.
fn refused(docker: &Docker, name: &str, annotations: &[&str], options: &[&str]) {
    let refused = docker.run(name, annotations, options, HOLD);
    assert!(!refused.ok && refused.stderr.contains("sublet-runtime: container"), "{refused:?}");
    assert_eq!(docker.inspect(name, "State.Status"), "\"created\"");
}

/// Who waits, by status.
fn waiting(docker: &Docker) -> Vec<String> {
    let status = docker.world.status();
    let name = |waiting: &Value| waiting["name"].as_str().unwrap_or_default().to_owned();
    status["waiting"].as_array().expect("waiting").iter().map(name).collect()
}

fn status_of(docker: &Docker, name: &str) -> String {
    docker.inspect(name, "State.Status").trim_matches('"').to_owned()
}

fn wait_until(docker: &Docker, names: &[&str]) {
    assert!(eventually(|| waiting(docker) == names), "{:?}\n{}", waiting(docker), docker.log());
}

#[test]
fn containers_with_a_restart_policy_start_in_order_when_there_is_room() {
    if skip_unless_engines() {
        return;
    }
    let docker = full();
    let _serve = Serve::start(&docker);
    refused(&docker, "large", &["sublet.sm=80"], &["--restart=unless-stopped"]);
    refused(&docker, "first", HALF, &["--restart=always"]);
    refused(&docker, "second", HALF, &["--restart=always"]);
    wait_until(&docker, &["large", "first", "second"]);
    let text = String::from_utf8(docker.world.sublet(&["status"]).stdout).expect("UTF-8");
    assert!(text.contains("Waiting for a share:\n1. large has waited for "), "{text}");
    docker.done(&["rm", "-f", "holder"]);
    // Who came first has its share, and with that there is no room for the others.
    assert!(eventually(|| status_of(&docker, "large") == "running"), "{}", docker.log());
    wait_until(&docker, &["first", "second"]);
    docker.done(&["stop", "-t", "0", "large"]);
    for name in ["first", "second"] {
        assert!(eventually(|| status_of(&docker, name) == "running"), "{name}: {}", docker.log());
    }
    wait_until(&docker, &[]);
    assert_eq!(status_of(&docker, "large"), "exited", "nobody starts what was stopped");
}

/// A container that ran, and that Docker could not restart.
#[test]
fn a_container_whose_restart_was_refused_comes_back() {
    if skip_unless_engines() {
        return;
    }
    let docker = full();
    docker.done(&["rm", "-f", "holder"]);
    let _serve = Serve::start(&docker);
    let _ = docker.hold("web", HALF, &["--restart=always"]);
    docker.done(&["stop", "-t", "0", "web"]);
    let _ = docker.hold("holder", WHOLE, &[]);
    assert!(!docker.cli(&["start", "web"]).ok);
    assert_eq!(status_of(&docker, "web"), "exited");
    wait_until(&docker, &["web"]);
    docker.done(&["rm", "-f", "holder"]);
    assert!(eventually(|| status_of(&docker, "web") == "running"), "{}", docker.log());
}

#[test]
fn what_nobody_was_to_restart_and_what_was_touched_since_stays_as_it_is() {
    if skip_unless_engines() {
        return;
    }
    let docker = full();
    let _serve = Serve::start(&docker);
    let always = ["--restart=always"];
    refused(&docker, "without", HALF, &[]);
    refused(&docker, "failing", HALF, &["--restart=on-failure"]);
    // No time makes this request a right one.
    refused(&docker, "never", &["sublet.sm=200"], &always);
    docker.done(&[
        "create",
        "--name=made",
        "--network=none",
        "--restart=always",
        "--runtime=sublet",
        "--annotation=sublet.sm=50",
        IMAGE,
        "sleep",
        "600",
    ]);
    for name in ["renamed", "removed", "updated", "last"] {
        refused(&docker, name, &["sublet.sm=20"], &always);
    }
    wait_until(&docker, &["renamed", "removed", "updated", "last"]);
    docker.done(&["rename", "renamed", "other"]);
    docker.done(&["rm", "removed"]);
    docker.done(&["update", "--restart=no", "updated"]);
    wait_until(&docker, &["last"]);
    docker.done(&["rm", "-f", "holder"]);
    assert!(eventually(|| status_of(&docker, "last") == "running"), "{}", docker.log());
    for name in ["without", "failing", "never", "made", "other", "updated"] {
        assert_eq!(status_of(&docker, name), "created", "{name}");
    }
}

#[test]
fn without_the_service_or_where_it_is_turned_off_nothing_waits() {
    if skip_unless_engines() {
        return;
    }
    let docker = full();
    refused(&docker, "early", HALF, &["--restart=always"]);
    assert_eq!(waiting(&docker), [""; 0], "nobody has said that it is started again");
    // It was refused before the service began.
    let serve = Serve::start(&docker);
    wait_until(&docker, &["early"]);
    drop(serve);
    // The table is the last one in the file.
    docker.world.configure("docker = false\n");
    let _serve = Serve::start(&docker);
    wait_until(&docker, &[]);
    refused(&docker, "late", HALF, &["--restart=always"]);
    docker.done(&["rm", "-f", "holder"]);
    let ledger = || std::fs::read_to_string(docker.world.state_dir().join("ledger.json")).expect("a ledger");
    assert!(eventually(|| !ledger().contains("\"waiters\"")), "{}", ledger());
    assert_eq!(status_of(&docker, "late"), "created");
}
