//! B13: programs that end their first thread (`syscall(SYS_exit, 0)`) and compute in another one. The kernel then shows
//! them as zombies without memory. One H200: 143155 MiB.

use crate::two_users::{ALICE, serving};
use serde_json::{Value, json};
use sublet_e2e::guarded::{SHARE, SPOIL, probes};
use sublet_e2e::user::Host;
use sublet_e2e::{Bundle, eventually, is_alive, skip_unless_root};

/// Takes more than its share in another thread, whose context was made before (`later`) or after its first one ended.
fn cheating(when: &str) -> String {
    format!("export {SPOIL}; exec cuda-probe leaderless {when} alloc 52000 600")
}

fn started<'a>(host: &'a Host, id: &str, script: &str) -> Bundle<'a> {
    let bundle = host.world.bundle(id, SHARE, &["/bin/sh", "-c", script]);
    bundle.up();
    bundle
}

/// What the guard did to the processes of a container.
fn done_to(host: &Host, id: &str) -> Vec<Value> {
    host.events().into_iter().filter(|event| event["container_id"] == id).collect()
}

fn is_ended(host: &Host, id: &str, processes: usize) -> bool {
    let is_end = |event: &&Value| {
        (&event["offence"], &event["action"]) == (&json!("memory"), &json!("terminate"))
            && event["text"].as_str().is_some_and(|text| text.ends_with("it was ended"))
    };
    done_to(host, id).iter().filter(is_end).count() == processes
}

fn state_of(host: &Host, id: &str) -> Option<Value> {
    host.leases().into_iter().find(|lease| lease["container_id"] == id).map(|lease| lease["state"].clone())
}

/// The host's pid of the only program on the GPU whose first thread has ended.
fn without_first_thread(host: &Host) -> nix::unistd::Pid {
    let all = || {
        let listed = host.world.nvml().device_by_index(0).and_then(|gpu| gpu.running_compute_processes());
        let pids = listed.expect("a list").into_iter().map(|process| process.pid);
        pids.filter(|pid| std::fs::read_link(format!("/proc/{pid}/exe")).is_err()).collect::<Vec<_>>()
    };
    assert!(eventually(|| all().len() == 1), "{:?}", all());
    nix::unistd::Pid::from_raw(i32::try_from(all()[0]).expect("a pid"))
}

#[test]
fn b13_who_computes_on_after_its_first_thread_is_held_to_its_share() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let neighbour = host.neighbour();
    let honest = started(&host, "honest", "exec cuda-probe leaderless later alloc 1024 600");
    honest.event("alloc");
    let process = without_first_thread(&host);
    let child = host.waiting("child", "cuda-probe leaderless at-once alloc 1024 600 &");
    child.event("alloc");
    let share = child.exec(&["/usr/bin/sublet-share", "--format", "json"]).json().remove(0);
    assert!(share["used_bytes"].as_u64().is_some_and(|used| used > 1 << 30), "{share}");

    for when in ["at-once", "later"] {
        let hostile = started(&host, when, &cheating(when));
        assert_eq!(hostile.event("alloc")["result"], json!("CUDA_SUCCESS"), "the driver does not hold it");
        assert!(eventually(|| is_ended(&host, when, 1)), "{:?}", host.events());
        assert!(eventually(|| state_of(&host, when).is_none()), "{:?}", host.leases());
        hostile.down();
    }
    // Of a container that goes on, one and two children.
    for (id, processes) in [("one", 1), ("two", 2)] {
        let hostile = host.waiting(id, &format!("({}) &\n", cheating("at-once")).repeat(processes));
        assert!(eventually(|| is_ended(&host, id, processes)), "{:?}", host.events());
        assert!(eventually(|| probes(&hostile) == 0), "{}", probes(&hostile));
        assert_eq!(state_of(&host, id), Some(json!("active")));
        hostile.down();
    }
    let alices = host.bundle(ALICE, "alices", SHARE, &["/bin/sh", "-c", &cheating("later")]);
    alices.up();
    assert!(eventually(|| is_ended(&host, "alices", 1)), "{:?}", host.events());
    alices.down();

    // No container is ended only because its first thread has.
    assert_eq!(host.world.sublet(&["gc"]).status.code(), Some(0));
    assert_eq!(state_of(&host, "honest"), Some(json!("active")), "{:?}", host.leases());
    assert_eq!([done_to(&host, "honest"), done_to(&host, "child")], [[Value::Null; 0], []]);
    assert_eq!(probes(&child), 1);
    child.down();
    assert!(is_alive(process) && !honest.exec(&["/bin/true"]).ok, "its runtime takes it for stopped");
    nix::sys::signal::kill(process, nix::sys::signal::Signal::SIGKILL).expect("it runs");
    assert!(eventually(|| state_of(&host, "honest").is_none()), "{:?}", host.leases());
    honest.down();
    neighbour.lives();
    host.world.assert_empty();
}

/// The daemon's connections are looked for in the network namespaces of its containers' first processes, and then the
/// process that has the other end open.
#[test]
fn b13_who_keeps_the_daemon_waiting_after_its_first_thread_is_found() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let neighbour = host.neighbour();
    let silent = "exec cuda-probe leaderless at-once silent 600";
    let own = host.world.bundle("own", SHARE, &["/bin/sh", "-c", silent]);
    let script = format!("({silent}) &\nwait; exec sleep 600");
    let mut hosts = host.world.bundle("hosts", SHARE, &["/bin/sh", "-c", &script]);
    let namespaces = hosts.spec["linux"]["namespaces"].as_array_mut().expect("namespaces");
    namespaces.retain(|namespace| namespace["type"] != "network");
    for hostile in [own, hosts] {
        hostile.up();
        assert!(eventually(|| !done_to(&host, &hostile.id).is_empty()), "{:?}", host.events());
        let event = done_to(&host, &hostile.id).remove(0);
        assert_eq!((&event["offence"], &event["action"]), (&json!("silent"), &json!("terminate")), "{event}");
        assert!(event["text"].as_str().expect("a text").ends_with("it was ended"), "{event}");
        hostile.down();
    }
    neighbour.lives();
    host.world.assert_empty();
}
