//! The guard of `sublet serve`: containers whose programs pass what MPS holds honest ones to, and neighbours who
//! must not notice. One H200: 143155 MiB, 48 MPS clients.

#[expect(dead_code, reason = "Bob has no part in this")]
mod two_users;

use serde_json::{Value, json};
use sublet_e2e::user::Host;
use sublet_e2e::{Bundle, eventually, skip_unless_root};
use two_users::{ALICE, HOLD, serving};

/// Limits gone by one bad value (docs/evidence).
const SPOIL: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=garbage";
/// Away from MPS: neither the variable nor the default place leads to a server.
const LEAVE: &str = "CUDA_MPS_PIPE_DIRECTORY=/nowhere";
const SHARE: &[(&str, &str)] = &[("sublet.sm", "25"), ("sublet.memory", "4GiB")];

fn guarded(extra: &str) -> Host {
    let mut host = two_users::host("h200");
    host.world.configure(extra);
    host.start();
    host
}

/// A container that waits, and in it the commands of a shell.
fn waiting<'a>(host: &'a Host, id: &str, script: &str) -> Bundle<'a> {
    let script = format!("{script}\nwait; exec sleep 600");
    let bundle = host.world.bundle(id, SHARE, &["/bin/sh", "-c", &script]);
    bundle.up();
    bundle
}

/// How many of its processes are CUDA programs.
fn probes(bundle: &Bundle<'_>) -> usize {
    let seen = bundle.exec(&["/bin/sh", "-c", "cat /proc/[0-9]*/comm"]);
    seen.stdout.lines().filter(|name| *name == "cuda-probe").count()
}

/// As the guard wrote them down: a command of ours would put its ledger right on the way.
fn events(host: &Host) -> Vec<Value> {
    let text = std::fs::read(host.world.state_dir().join("guard.json")).unwrap_or_default();
    let book: Value = serde_json::from_slice(&text).unwrap_or_default();
    book["events"].as_array().cloned().unwrap_or_default()
}

fn seen(host: &Host, offence: &str) -> Option<Value> {
    events(host).into_iter().find(|event| event["offence"] == offence)
}

/// A container that keeps to its share all the while, and is to notice nothing.
struct Neighbour<'a>(Bundle<'a>);

impl<'a> Neighbour<'a> {
    fn up(host: &'a Host) -> Self {
        let bundle = host.world.bundle("neighbour", SHARE, HOLD);
        bundle.up();
        assert_eq!(bundle.event("info")["mps"], json!(true));
        Self(bundle)
    }

    fn lives(self, host: &Host) {
        assert!(!self.0.output().contains("\"end\""), "{}", self.0.output());
        assert!(!events(host).iter().any(|event| event["container_id"] == "neighbour"), "{:?}", events(host));
        let info = self.0.exec(&["/usr/bin/cuda-probe", "info"]).json().remove(0);
        assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)), "{info}");
        self.0.down();
    }
}

#[test]
fn whoever_spoils_their_memory_limit_is_ended_and_nobody_else() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let neighbour = Neighbour::up(&host);
    let hostile =
        waiting(&host, "hostile", &format!("{SPOIL} cuda-probe alloc 52000 600 & cuda-probe hold 600 &"));
    assert_eq!(hostile.event("alloc")["result"], json!("CUDA_SUCCESS"), "the driver does not hold it");
    assert!(eventually(|| seen(&host, "memory").is_some()), "{:?}", events(&host));
    let event = seen(&host, "memory").expect("it was seen");
    assert_eq!((&event["action"], &event["container_id"]), (&json!("terminate"), &json!("hostile")));
    let text = event["text"].as_str().expect("text");
    assert!(
        text.contains("passed its sublet.memory") && text.ends_with("of 4096 MiB): it was ended"),
        "{text}"
    );
    // The container and its other process go on.
    assert!(eventually(|| probes(&hostile) == 1), "{}", probes(&hostile));
    let explained = host.world.sublet(&["explain", "--container", "hostile"]);
    assert!(String::from_utf8_lossy(&explained.stdout).contains(text), "{explained:?}");
    assert_eq!(events(&host).len(), 1, "{:?}", events(&host));
    hostile.down();
    neighbour.lives(&host);
    host.world.assert_empty();
}

#[test]
fn processes_are_counted_together() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let neighbour = Neighbour::up(&host);
    let both = "cuda-probe alloc 2500 600 & sleep 1; exec cuda-probe alloc 2600 600";
    let forking = host.world.bundle("forking", SHARE, &["/bin/sh", "-c", both]);
    forking.up();
    let first = forking.pid();
    assert!(eventually(|| seen(&host, "memory").is_some()), "{:?} {}", events(&host), forking.output());
    let results = forking.output().matches("\"CUDA_SUCCESS\"").count();
    assert_eq!(results, 2, "each has the whole limit, for MPS: {}", forking.output());
    // The second crossed the line; it was the container's first process.
    assert_eq!(seen(&host, "memory").expect("seen")["pid"], json!(first));
    forking.down();
    neighbour.lives(&host);
    host.world.assert_empty();
}

#[test]
fn whoever_leaves_mps_is_ended() {
    if skip_unless_root() {
        return;
    }
    // EXCLUSIVE_PROCESS would stop it before.
    let host = guarded("[mps]\nexclusive_compute_mode = \"never\"\n");
    let neighbour = Neighbour::up(&host);
    let hostile = waiting(&host, "hostile", &format!("{LEAVE} cuda-probe hold 600 &"));
    let info = hostile.event("info");
    assert_eq!((&info["mps"], &info["sm"]), (&json!(false), &json!(132)), "the driver does not hold it");
    assert!(eventually(|| seen(&host, "bypass").is_some()), "{:?}", events(&host));
    assert!(eventually(|| probes(&hostile) == 0), "{}", probes(&hostile));
    hostile.down();
    neighbour.lives(&host);
    host.world.assert_empty();
}

#[test]
fn clients_beyond_the_lease_make_place_for_others() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let many = "n=0; while [ $n -lt 48 ]; do cuda-probe hold 600 & n=$((n+1)); done";
    let script = format!("{many}\nwait; exec sleep 600");
    let hostile = host.world.bundle("hostile", &[("sublet.sm", "25")], &["/bin/sh", "-c", &script]);
    hostile.up();
    let late = waiting(&host, "late", "");
    let info = || late.exec(&["/usr/bin/cuda-probe", "info"]).json().into_iter().next().unwrap_or_default();
    assert!(eventually(|| seen(&host, "clients").is_some()), "{:?}", events(&host));
    assert!(eventually(|| info()["mps"] == json!(true)), "{}", info());
    hostile.down();
    late.down();
    host.world.assert_empty();
}

#[test]
fn the_configuration_says_what_is_done() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("[guard]\nmemory = \"report\"\n");
    let spared = waiting(&host, "spared", &format!("{SPOIL} cuda-probe alloc 52000 600 &"));
    assert!(eventually(|| seen(&host, "memory").is_some()), "{:?}", events(&host));
    let text = seen(&host, "memory").expect("seen")["text"].clone();
    assert!(text.as_str().expect("text").ends_with("reported only"), "{text}");
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert_eq!(events(&host).len(), 1, "told once: {:?}", events(&host));
    assert_eq!(probes(&spared), 1);
    spared.down();
    let host = guarded("[guard]\nmemory = \"container\"\n");
    let ended = waiting(&host, "ended", &format!("{SPOIL} cuda-probe alloc 52000 600 &"));
    assert!(eventually(|| seen(&host, "memory").is_some()), "{:?}", events(&host));
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
    assert!(eventually(|| seen(&host, "stranger").is_some()), "{:?}", events(&host));
    let event = seen(&host, "stranger").expect("seen");
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
    let neighbour = Neighbour::up(&host);
    let script = format!("{SPOIL} cuda-probe alloc 52000 600 & wait; exec sleep 600");
    let hostile = host.bundle(ALICE, "alices", SHARE, &["/bin/sh", "-c", &script]);
    hostile.up();
    hostile.event("alloc");
    assert!(eventually(|| seen(&host, "memory").is_some()), "{:?}", events(&host));
    let event = seen(&host, "memory").expect("seen");
    assert_eq!((&event["uid"], &event["container_id"]), (&json!(ALICE), &json!("alices")));
    assert!(event["text"].as_str().expect("text").ends_with("it was ended"), "{event}");
    hostile.down();
    neighbour.lives(&host);
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
