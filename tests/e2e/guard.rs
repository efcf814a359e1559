//! The guard of `sublet serve`: what it does by configuration, and what it reports. The attacks are in tests/security.
//! One H200: 143155 MiB, 48 MPS clients.

use crate::two_users::{self, ALICE, HOLD, serving};
use serde_json::{Value, json};
use sublet_e2e::guarded::{SHARE, SPOIL, probes};
use sublet_e2e::user::Host;
use sublet_e2e::{eventually, is_alive, skip_unless_root};

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
    let text =
        |arguments: &[&str]| String::from_utf8_lossy(&host.world.sublet(arguments).stdout).into_owned();
    let told = text(&["events", "--filter", "kind=guard", "--format", "json"]);
    assert!(told.contains(r#""reason":"memory","action":"report""#), "{told}");
    let counted = text(&["metrics"]);
    assert!(
        counted.contains(r#"sublet_guard_actions_total{offence="memory",action="report"} 1"#),
        "{counted}"
    );
    assert!(
        counted.contains(r#"sublet_guard_actions_total{offence="memory",action="terminate"} 0"#),
        "{counted}"
    );
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
fn clients_beyond_the_lease_are_told_of_once_where_nobody_needs_their_places() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let many = host.waiting("many", "for n in 1 2 3; do cuda-probe hold 600 & sleep 0.2; done");
    assert!(eventually(|| host.event("clients").is_some()), "{:?}", host.events());
    let event = host.event("clients").expect("seen");
    assert_eq!((&event["action"], &event["container_id"]), (&json!("report"), &json!("many")));
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert_eq!((host.events().len(), probes(&many)), (1, 3), "{:?}", host.events());
    many.down();
    host.world.assert_empty();
}

/// Nothing begins on the GPU until what is silent has been ended.
#[test]
fn who_keeps_the_mps_daemon_waiting_is_ended_and_the_second_time_its_container() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let neighbour = host.neighbour();
    let holder = host.waiting("holder", "cuda-probe silent 600 & cuda-probe silent 600 &");
    holder.event("connected");
    let more = host.world.bundle("more", &[("sublet.sm", "50")], HOLD);
    let refused = more.create();
    assert!(!refused.ok && refused.stderr.contains("it waits for container"), "{refused:?}");
    let told = |action: &str| {
        let is_told = |event: &Value| event["offence"] == "silent" && event["action"] == action;
        host.events().into_iter().find(|event| is_told(event))
    };
    assert!(eventually(|| told("terminate").is_some()), "{:?}", host.events());
    let event = told("terminate").expect("seen");
    assert_eq!((&event["container_id"], &event["name"]), (&json!("holder"), &json!("cuda-probe")), "{event}");
    let text = event["text"].as_str().expect("a text");
    assert!(text.contains("no GPU program begins there: it was ended"), "{text}");
    assert!(eventually(|| told("container").is_some()), "{:?}", host.events());
    assert!(eventually(|| host.world.leases().len() == 1), "{:?}", host.world.leases());
    holder.down();
    more.up();
    assert_eq!(more.event("info")["sm"], json!(66));
    more.down();
    neighbour.lives();
    host.world.assert_empty();
}

/// A socket may be under way in another one, where no process has it open.
#[test]
fn where_the_connection_is_hidden_its_container_is_ended() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let neighbour = host.neighbour();
    let holder = host.waiting("holder", "cuda-probe silent 600 hidden &");
    assert!(eventually(|| host.event("silent").is_some()), "{:?}", host.events());
    let event = host.event("silent").expect("seen");
    assert_eq!(
        (&event["container_id"], &event["action"]),
        (&json!("holder"), &json!("container")),
        "{event}"
    );
    assert!(eventually(|| host.world.leases().len() == 1), "{:?}", host.world.leases());
    holder.down();
    neighbour.lives();
    host.world.assert_empty();
}

/// One of the host's own may be an administrator's, and is told of.
#[test]
fn a_process_of_no_container_that_keeps_the_daemon_waiting_is_told_of() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let neighbour = host.neighbour();
    let probe = host.world.driver_root.as_ref().expect("simulated").join("usr/bin/cuda-probe");
    let key = host.world.status()["mps"][0]["key"].as_str().expect("a daemon").to_owned();
    let public = host.world.state_dir().join("mps").join(key).join("public");
    let mut own = std::process::Command::new(probe);
    let mut own =
        own.args(["silent", "600"]).env("CUDA_MPS_PIPE_DIRECTORY", public).spawn().expect("it runs");
    assert!(eventually(|| host.event("silent").is_some()), "{:?}", host.events());
    let event = host.event("silent").expect("seen");
    let what = (&event["action"], &event["container_id"], &event["pid"]);
    assert_eq!(what, (&json!("report"), &Value::Null, &json!(own.id())), "{event}");
    assert!(own.try_wait().expect("it can be asked").is_none(), "it runs on");
    own.kill().expect("it runs");
    own.wait().expect("it ends");
    neighbour.lives();
    host.world.assert_empty();
}

/// Each process has its own SM limit.
#[test]
fn strict_clients_are_as_many_as_the_lease_says() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("[guard]\nstrict_clients = true\n");
    let neighbour = host.world.bundle("neighbour", SHARE, HOLD);
    neighbour.up();
    neighbour.event("info");
    let many = host.waiting("many", "cuda-probe hold 600 & sleep 1; cuda-probe hold 600 &");
    assert!(eventually(|| host.event("clients").is_some()), "{:?}", host.events());
    assert_eq!(host.event("clients").expect("seen")["container_id"], json!("many"));
    assert!(eventually(|| probes(&many) == 1), "{:?}", host.events());
    assert_eq!((host.events().len(), probes(&neighbour)), (1, 1), "{:?}", host.events());
    many.down();
    neighbour.down();
    host.world.assert_empty();
}

/// By execve(2), with the same pid and memory: nothing changes that the guard reads in every check.
#[test]
fn a_client_that_leaves_mps_unseen_is_ended() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let leaver = host.world.bundle("leaver", SHARE, HOLD);
    leaver.up();
    leaver.event("info");
    let clients = || {
        let nvml = host.world.nvml();
        let clients = nvml.device_by_index(0).and_then(|gpu| gpu.mps_running_compute_processes());
        clients.expect("a list").iter().map(|client| client.pid).collect::<Vec<_>>()
    };
    assert!(eventually(|| clients().len() == 1));
    let pid = clients()[0];
    let contexts = host.world.driver_root.as_ref().expect("simulated").join("sim/contexts");
    let told = |kind: &str| std::fs::write(&contexts, format!("{pid} 0:{kind}:500\n")).expect("a file");
    told("M+C");
    // It is looked at as a client once and again.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    assert_eq!(host.events(), [Value::Null; 0], "all is well");
    told("C");
    assert!(eventually(|| host.event("bypass").is_some()), "{:?}", host.events());
    assert_eq!(host.event("bypass").expect("seen")["pid"], json!(pid));
    leaver.down();
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
    assert!(table(&host).contains("GUARD OFF: "), "{}", table(&host));
    host.start();
    assert!(eventually(|| table(&host).contains("\nGuard: on.\n")), "{}", table(&host));
    host.stop();
}

#[test]
fn a_share_says_what_is_done() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("[share.debug]\nguard = \"report\"\nsm = 25\nmemory = \"4GiB\"\n");
    let script = format!("{SPOIL} cuda-probe alloc 52000 600 & wait; exec sleep 600");
    let up = |id: &str, annotations: &[(&str, &str)]| {
        let bundle = host.world.bundle(id, annotations, &["/bin/sh", "-c", &script]);
        bundle.up();
        bundle.event("alloc");
        assert!(eventually(|| host.event("memory").is_some()), "{:?}", host.events());
        bundle
    };
    let refused = host.world.bundle("spared", &[SHARE[0], ("sublet.guard", "report")], HOLD).create();
    assert!(refused.stderr.contains("sublet.guard=report cannot be combined with [guard]"), "{refused:?}");
    let spared = up("spared", &[("sublet.share", "debug")]);
    assert_eq!(host.events()[0]["action"], json!("report"), "{:?}", host.events());
    assert_eq!(probes(&spared), 1);
    spared.down();
    std::fs::remove_file(host.world.state_dir().join("guard.json")).expect("it is there");
    let ended = up("ended", &[SHARE[0], SHARE[1], ("sublet.guard", "container")]);
    assert_eq!(host.events()[0]["action"], json!("container"), "{:?}", host.events());
    assert!(eventually(|| host.world.leases().is_empty()), "{:?}", host.world.leases());
    ended.down();
    host.world.assert_empty();
}

/// No server limits it: only the guard does.
#[test]
fn a_share_that_may_be_suspended_is_held_to_its_memory() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let share = [("sublet.memory", "2GiB"), ("sublet.suspend", "allow")];
    let within = host.world.bundle("within", &share, &["/usr/bin/cuda-probe", "keep", "1024", "600"]);
    within.up();
    let past = host.world.bundle("past", &share, &["/usr/bin/cuda-probe", "keep", "3072", "600"]);
    past.up();
    assert!(eventually(|| host.event("memory").is_some()), "{:?}", host.events());
    let event = host.event("memory").expect("seen");
    assert_eq!((&event["action"], &event["container_id"]), (&json!("terminate"), &json!("past")), "{event}");
    assert!(event["text"].as_str().expect("a text").contains("of 2048 MiB): it was ended"), "{event}");
    assert!(eventually(|| host.world.leases().len() == 1), "{:?}", host.world.leases());
    assert!(is_alive(nix::unistd::Pid::from_raw(within.pid())));
    past.down();
    within.down();
    host.world.assert_empty();
}

/// What `sublet status` reports about the guard.
fn sight(host: &Host) -> Value {
    host.world.status()["guard"].clone()
}

#[test]
fn nvml_that_goes_away_is_told_and_looked_for_until_it_is_back() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let neighbour = host.neighbour();
    assert!(eventually(|| sight(&host)["watching"] == json!(true)), "{}", sight(&host));
    let fail = host.world.driver_root.as_ref().expect("simulated").join("sim/fail");
    // NVML_ERROR_DRIVER_NOT_LOADED, then NVML_ERROR_UNINITIALIZED: for every call, from every process.
    for code in ["9", "1"] {
        std::fs::write(&fail, format!("* 0 {code}\n")).expect("written");
        let table = || String::from_utf8_lossy(&host.world.sublet(&["status"]).stdout).into_owned();
        assert!(eventually(|| table().contains("GUARD OFF: ")), "{code}: {}", table());
        std::fs::remove_file(&fail).expect("it is there");
        assert!(eventually(|| sight(&host)["watching"] == json!(true)), "{code}: {}", sight(&host));
    }
    let hostile = host.waiting("hostile", &format!("{SPOIL} cuda-probe alloc 52000 600 &"));
    assert!(eventually(|| host.event("memory").is_some()), "{:?}", host.events());
    hostile.down();
    neighbour.lives();
    host.world.assert_empty();
}

#[test]
fn a_gpu_that_is_lost_leaves_the_others_guarded() {
    if skip_unless_root() {
        return;
    }
    let mut host = two_users::host("h200x8");
    host.start();
    let on = |gpu: &'static str| [("sublet.gpu", gpu), SHARE[0], SHARE[1]];
    let lost = host.world.bundle("lost", &on("0"), HOLD);
    lost.up();
    lost.event("info");
    let script = format!("sleep 2; {SPOIL} cuda-probe alloc 52000 600 & wait; exec sleep 600");
    let hostile = host.world.bundle("hostile", &on("1"), &["/bin/sh", "-c", &script]);
    hostile.up();
    // As an Xid 79 leaves it: its PCI configuration space reads ffff, and NVML answers that it is lost.
    let devices = host.world.driver_root.as_ref().expect("simulated").join("sys/bus/pci/devices");
    let mut all: Vec<_> =
        std::fs::read_dir(&devices).expect("GPUs").flatten().map(|gpu| gpu.path()).collect();
    all.sort();
    std::fs::write(all[0].join("config"), [0xff; 64]).expect("written");
    assert!(eventually(|| host.event("memory").is_some()), "{:?}", host.events());
    let blind = sight(&host)["blind"].clone();
    assert!(blind.as_array().is_some_and(|blind| blind.len() == 1), "{blind}");
    assert_eq!(host.events().len(), 1, "{:?}", host.events());
    assert!(is_alive(nix::unistd::Pid::from_raw(lost.pid())), "nobody was taken for an offender");
    hostile.down();
    lost.down();
    host.world.assert_empty();
}

#[test]
fn without_a_lease_nvml_is_closed_and_nothing_is_asked() {
    if skip_unless_root() {
        return;
    }
    // Whose GPU cannot do MIG: on others the service looks for instances, now and then.
    let mut host = two_users::host("pascal");
    host.start();
    let serve = host.serve.as_ref().expect("it runs").id();
    let is_open = || {
        let maps = std::fs::read_to_string(format!("/proc/{serve}/maps")).expect("/proc");
        maps.contains("libnvidia-ml")
    };
    let trace = host.world.driver_root.as_ref().expect("simulated").join("sim/trace");
    let slice = host.world.bundle("slice", &[("sublet.gpu", "0")], HOLD);
    slice.up();
    assert!(eventually(is_open), "it looks");
    slice.down();
    assert!(eventually(|| !is_open()), "nobody is left");
    std::fs::write(&trace, "").expect("written");
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert_eq!(std::fs::read_to_string(&trace).expect("it is there"), "");
    std::fs::remove_file(&trace).expect("it is there");
    // The next lease is guarded all the same.
    slice.up();
    assert!(eventually(is_open), "it looks");
    slice.down();
    host.world.assert_empty();
}

/// Waits until the guard has seen `container` compute: by `sim/trace` it has asked for MPS clients since, and looked again.
fn wait_until_seen(host: &Host, container: &str) {
    let computes = || {
        let status = host.world.status();
        let leases = status["leases"].as_array().expect("leases").clone();
        leases
            .iter()
            .any(|lease| lease["container_id"] == container && lease["used"]["processes"] == json!(1))
    };
    assert!(eventually(computes), "{}", host.world.status());
    let trace = host.world.driver_root.as_ref().expect("simulated").join("sim/trace");
    std::fs::write(&trace, "").expect("written");
    let seen = || {
        let calls = std::fs::read_to_string(&trace).expect("a trace");
        let asked = calls.split_once("nvmlDeviceGetMPSComputeRunningProcesses");
        asked.is_some_and(|(_, later)| later.contains("nvmlDeviceGetMemoryInfo"))
    };
    assert!(eventually(seen), "{:?}", std::fs::read_to_string(&trace));
    std::fs::remove_file(&trace).expect("removed");
}

#[test]
fn a_daemon_or_server_that_dies_is_there_again_and_who_was_hit_is_told() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let computing =
        host.world.bundle("computing", SHARE, &["/bin/sh", "-c", "cuda-probe hold 600; exec sleep 600"]);
    computing.up();
    let idle = host.waiting("idle", "");
    for (what, others) in [("nvidia-cuda-mps-control", 1), ("nvidia-cuda-mps-server", 2)] {
        wait_until_seen(&host, "computing");
        let pids = host.world.daemon_pids("");
        let named = |pid: &&nix::unistd::Pid| {
            std::fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(what))
        };
        let victim = pids.iter().find(named).expect("it runs");
        nix::sys::signal::kill(*victim, nix::sys::signal::Signal::SIGKILL).expect("it is ours");
        // No sublet command is run: the service alone restores the daemon.
        let hit = || host.events().iter().filter(|event| event["offence"] == "server").count();
        assert!(eventually(|| hit() == others), "{what}: {:?}", host.events());
        let whose: Vec<Value> = host.events().iter().map(|event| event["container_id"].clone()).collect();
        assert!(whose.iter().all(|id| id == "computing"), "{whose:?}");
        let info = || idle.exec(&["/usr/bin/cuda-probe", "info"]).json().remove(0);
        assert!(eventually(|| info()["mps"] == json!(true)), "{what}: {}", info());
        let again =
            computing.exec(&["/bin/sh", "-c", "busybox setsid cuda-probe hold 600 >/dev/null 2>&1 &"]);
        assert!(again.ok, "{again:?}");
    }
    let explained = host.world.sublet(&["explain", "--container", "computing"]);
    let explained = String::from_utf8_lossy(&explained.stdout).into_owned();
    assert!(explained.contains("and with it the GPU work of container computing"), "{explained}");
    computing.down();
    idle.down();
    host.world.assert_empty();
}

/// On a real GPU such a server takes no client for as long as the process lives (docs/evidence/2026-11-24-h100-cycles.md).
#[test]
fn a_server_that_takes_no_client_after_a_fault_is_ended() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let stays = host.waiting("stays", "cuda-probe alloc 100 300 &");
    assert_eq!(stays.event("alloc")["result"], json!("CUDA_SUCCESS"));
    let next = host.waiting("next", "");
    let faulty = host.world.bundle("faulty", SHARE, &["/usr/bin/cuda-probe", "fault"]);
    faulty.up();
    assert_eq!(faulty.event("fault")["result"], json!("CUDA_ERROR_ILLEGAL_ADDRESS"));
    let new_client = || next.exec(&["/usr/bin/cuda-probe", "info"]).json()[0].clone();
    assert_eq!(new_client()["error"], json!("CUDA_ERROR_MPS_SERVER_NOT_READY"));
    assert!(eventually(|| new_client()["error"].is_null()), "{:?}", host.events());
    assert_eq!((new_client()["mps"].clone(), new_client()["sm"].clone()), (json!(true), json!(32)));
    assert_eq!(probes(&stays), 1, "the process that stays is left alone");
    assert!(eventually(|| host.event("server").is_some()), "{:?}", host.events());
    let ended = |event: &Value| event["offence"] == "server" && event["action"] == "terminate";
    let events = host.events();
    let event = events.iter().find(|event| ended(event));
    let text = event.expect("an event")["text"].to_string();
    assert!(text.contains("took no new client after a GPU fault"), "{text}");
    for container in [&stays, &next, &faulty] {
        container.down();
    }
    host.world.assert_empty();
}
