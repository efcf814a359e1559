//! The guard of `sublet serve`: what the configuration has it do, and what it tells. The attacks are in
//! tests/security. One H200: 143155 MiB, 48 MPS clients.

#[expect(dead_code, reason = "Bob has no part in this")]
mod two_users;

use serde_json::{Value, json};
use sublet_e2e::guarded::{SHARE, SPOIL, probes};
use sublet_e2e::user::Host;
use sublet_e2e::{eventually, skip_unless_root};
use two_users::{ALICE, HOLD, serving};

fn guarded(extra: &str) -> Host {
    let mut host = two_users::host("h200");
    host.world.configure(extra);
    host.start();
    host
}

#[test]
fn the_configuration_says_what_is_done() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("[guard]\nmemory = \"report\"\n");
    let spared = host.waiting("spared", &format!("{SPOIL} cuda-probe alloc 52000 600 &"));
    assert!(eventually(|| host.event("memory").is_some()), "{:?}", host.events());
    let text = host.event("memory").expect("seen")["text"].clone();
    assert!(text.as_str().expect("text").ends_with("reported only"), "{text}");
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert_eq!(host.events().len(), 1, "told once: {:?}", host.events());
    assert_eq!(probes(&spared), 1);
    spared.down();
    let host = guarded("[guard]\nmemory = \"container\"\n");
    let ended = host.waiting("ended", &format!("{SPOIL} cuda-probe alloc 52000 600 &"));
    assert!(eventually(|| host.event("memory").is_some()), "{:?}", host.events());
    assert!(eventually(|| host.world.leases().is_empty()), "{:?}", host.world.leases());
    ended.down();
    host.world.assert_empty();
}

#[test]
fn a_stranger_is_told_of_and_left_alone() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let slice = host.world.bundle("slice", &[("sublet.gpu", "0")], HOLD);
    slice.up();
    slice.event("info");
    let mut stranger = host.world.stranger();
    assert!(eventually(|| host.event("stranger").is_some()), "{:?}", host.events());
    let event = host.event("stranger").expect("seen");
    assert_eq!((&event["pid"], &event["container_id"]), (&json!(stranger.id()), &Value::Null));
    assert!(stranger.try_wait().expect("it can be asked").is_none(), "it runs on");
    stranger.kill().expect("it runs");
    stranger.wait().expect("it ends");
    slice.down();
    host.world.assert_empty();
}

#[test]
fn rootless_containers_are_held_as_well() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let neighbour = host.neighbour();
    let script = format!("{SPOIL} cuda-probe alloc 52000 600 & wait; exec sleep 600");
    let hostile = host.bundle(ALICE, "alices", SHARE, &["/bin/sh", "-c", &script]);
    hostile.up();
    hostile.event("alloc");
    assert!(eventually(|| host.event("memory").is_some()), "{:?}", host.events());
    let event = host.event("memory").expect("seen");
    assert_eq!((&event["uid"], &event["container_id"]), (&json!(ALICE), &json!("alices")));
    assert!(event["text"].as_str().expect("text").ends_with("it was ended"), "{event}");
    hostile.down();
    neighbour.lives();
    host.world.assert_empty();
}

#[test]
fn status_says_whether_there_is_a_guard() {
    if skip_unless_root() {
        return;
    }
    let mut host = two_users::host("h200");
    let table = |host: &Host| {
        let output = host.world.sublet(&["status"]);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert!(table(&host).contains("\nGUARD OFF: "), "{}", table(&host));
    host.start();
    assert!(eventually(|| table(&host).contains("\nGuard: on.\n")), "{}", table(&host));
    host.stop();
}
