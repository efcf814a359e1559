//! From annotation to running CUDA: what containers of each mode see from inside, and that nothing is left when they
//! end. Expected values are literals: one H200 with 132 SMs and 143155 MiB for CUDA.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use sublet_core::process::epoch_seconds;
use sublet_core::text::timestamp;
use sublet_e2e::{Bundle, World, eventually, in_one_line, skip_unless_root, stop};

use crate::hardened::Held;

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];

/// What `cuda-probe info` says in an exec'd process.
fn exec_info(bundle: &Bundle<'_>) -> Value {
    bundle.exec(&["/usr/bin/cuda-probe", "info"]).info()
}

fn env_of(bundle: &Bundle<'_>, name: &str) -> Option<String> {
    let config = bundle.config();
    let prefix = format!("{name}=");
    let env = config["process"]["env"].as_array().expect("env");
    let mut found = env.iter().filter_map(|entry| entry.as_str()?.strip_prefix(&prefix).map(str::to_owned));
    let first = found.next();
    assert_eq!(found.next(), None, "{name} stands twice");
    first
}

#[test]
fn time_slice_is_the_default_and_gives_the_whole_gpu() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("plain", &[("sublet.gpu", "0")], HOLD);
    bundle.up();
    let info = bundle.event("info");
    assert_eq!((&info["error"], &info["count"], &info["sm"]), (&Value::Null, &json!(1), &json!(132)));
    assert_eq!(info["mps"], json!(false));
    let lease = &world.leases()[0];
    assert_eq!((lease["mode"].as_str(), lease["state"].as_str()), (Some("time-slice"), Some("active")));
    assert_eq!((&lease["sm_percent"], &lease["memory_bytes"]), (&Value::Null, &Value::Null));
    assert_eq!(lease["container_id"], "plain");
    assert_eq!(lease["pid"], json!(bundle.pid()));
    assert_eq!(world.daemons(), Vec::<String>::new());
    assert_eq!(env_of(&bundle, "CUDA_VISIBLE_DEVICES").as_deref(), Some("0"));
    assert_eq!(env_of(&bundle, "NVIDIA_VISIBLE_DEVICES").as_deref(), Some("void"));
    assert_eq!(env_of(&bundle, "CUDA_MPS_PIPE_DIRECTORY"), None);
    bundle.down();
    world.configure("[grant]\nnvidia_visible_devices = \"uuid\"\n");
    bundle.up();
    assert_eq!(env_of(&bundle, "NVIDIA_VISIBLE_DEVICES").as_deref(), world.leases()[0]["device"].as_str());
    bundle.down();
    world.assert_empty();
}

#[test]
fn three_mps_shares_at_once_and_their_execs_see_what_they_were_given() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let shares =
        [("a", "25", "8GiB", 32, 8047), ("b", "12.5", "2GiB", 16, 1961), ("c", "60", "40GiB", 78, 40640)];
    let bundles: Vec<_> = shares
        .iter()
        .map(|(id, sm, memory, ..)| world.bundle(id, &[("sublet.sm", sm), ("sublet.memory", memory)], HOLD))
        .collect();
    bundles.iter().for_each(Bundle::up);
    for (bundle, (_, sm, _, sms, free)) in bundles.iter().zip(shares) {
        assert_eq!(env_of(bundle, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").as_deref(), Some(sm));
        assert_eq!(env_of(bundle, "SUBLET_SM_PERCENT").as_deref(), Some(sm));
        for info in [bundle.event("info"), exec_info(bundle)] {
            assert_eq!(
                (&info["error"], &info["mps"], &info["sm"]),
                (&Value::Null, &json!(true), &json!(sms))
            );
            let seen = info["free_mib"].as_i64().expect("free_mib");
            // The context's own memory is inside the limit; its size is the driver's, not ours.
            assert!((seen - free).abs() < 64, "{}: free {seen} MiB, expected about {free}", bundle.id);
        }
    }
    assert_eq!(world.leases().len(), 3);
    let status = world.status();
    assert_eq!(status["mps"][0]["state"], "serving");
    assert_eq!(status["mps"].as_array().map(Vec::len), Some(1), "one server for the device");
    bundles.iter().for_each(Bundle::down);
    world.assert_empty();
}

#[test]
fn processes_that_come_by_exec_land_in_mps_whatever_their_environment() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("exec", &[("sublet.sm", "25"), ("sublet.memory", "8GiB")], HOLD);
    bundle.up();
    bundle.event("info");
    // As dockerd does it: a process file with the image's environment and nothing of config.json's.
    let health =
        bundle.exec_file(&["/usr/bin/cuda-probe", "info"], &["PATH=/usr/bin:/bin", "CUDA_VISIBLE_DEVICES=7"]);
    let info = &health.json()[0];
    assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)), "{health:?}");
    assert!(info["free_mib"].as_i64() < Some(8192));
    // No environment at all: the directory at CUDA's default place, and the server's ceiling.
    let bare = bundle.exec(&["/bin/env", "-i", "/usr/bin/cuda-probe", "info"]);
    let info = &bare.json()[0];
    assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)), "{bare:?}");
    bundle.down();
    world.assert_empty();
}

#[test]
fn a_full_gpu_refuses_and_leaves_config_json_as_it_was() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let first = world.bundle("first", &[("sublet.sm", "70")], HOLD);
    first.up();
    let second = world.bundle("second", &[("sublet.sm", "40")], HOLD);
    let refused = second.create();
    assert!(!refused.ok);
    assert_eq!(in_one_line(&refused.stderr).lines().count(), 1, "one message: {}", refused.stderr);
    for word in ["40", "30", "first"] {
        assert!(refused.stderr.contains(word), "{word} is not in: {}", refused.stderr);
    }
    assert_eq!(second.config(), second.spec);
    let last = world.sublet(&["status", "--last-error", "--format", "json"]);
    let last: serde_json::Value = serde_json::from_slice(&last.stdout).expect("JSON");
    let candidates = last["candidates"].to_string();
    assert!(candidates.starts_with("[\"GPU 0 (NVIDIA H200) has 30 % SM left ["), "{candidates}");
    assert_eq!(world.leases().len(), 1);
    let last = world.sublet(&["status", "--last-error"]);
    assert!(String::from_utf8_lossy(&last.stdout).contains("second"));
    first.down();
    world.assert_empty();
}

#[test]
fn a_share_that_is_waited_for_comes_when_its_holder_ends() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let first = world.bundle("first", &[("sublet.sm", "70")], HOLD);
    first.up();
    let second = world.bundle("second", &[("sublet.sm", "40"), ("sublet.wait", "60s")], HOLD);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| second.create());
        let queue = || world.status()["waiting"].clone();
        assert!(eventually(|| queue()[0]["container_id"] == "second"), "{}", queue());
        let mut command = world.command("sublet");
        let mut asking = command.args(["wait", "sm=40", "--timeout=60s"]).spawn().expect("it runs");
        assert!(eventually(|| queue().as_array().map(Vec::len) == Some(2)), "{}", queue());
        let why = queue()[0]["why"].clone();
        assert!(why.as_str().is_some_and(|why| why.contains("no room for mps, 40 % SM")), "{why}");
        assert_eq!((&queue()[1]["container_id"], &queue()[1]["pid"]), (&Value::Null, &json!(asking.id())));
        asking.kill().and_then(|()| asking.wait().map(drop)).expect("it ends");
        assert_eq!(queue().as_array().map(Vec::len), Some(1), "who was killed waits no more");
        assert!(!waiting.is_finished(), "it waits");
        first.down();
        let created = waiting.join().expect("no panic");
        assert!(created.ok, "{created:?}");
    });
    assert_eq!(world.status()["waiting"], json!([]));
    second.down();
    world.assert_empty();
}

/// A process that is stopped, and killed in the end: who waits for it would wait for ever.
struct Stopped(Pid);

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill(self.0, Signal::SIGKILL);
    }
}

#[test]
fn who_waits_longest_is_served_first_and_leaves_its_place_when_it_is_killed() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let holder = world.bundle("holder", &[("sublet.sm", "70")], HOLD);
    holder.up();
    let waits =
        |id: &'static str, sm: &str| world.bundle(id, &[("sublet.sm", sm), ("sublet.wait", "60s")], HOLD);
    let (large, small) = (waits("large", "80"), waits("small", "40"));
    let began = timestamp(epoch_seconds());
    let queue = || world.status()["waiting"].clone();
    let wait_for = |many: usize| {
        assert!(eventually(|| queue().as_array().map(Vec::len) == Some(many)), "{}", queue());
    };
    std::thread::scope(|scope| {
        let of_large = scope.spawn(|| large.create());
        wait_for(1);
        let of_small = scope.spawn(|| small.create());
        wait_for(2);
        let seen = queue();
        let told = |at: usize| {
            (seen[at]["container_id"].clone(), seen[at]["place"].clone(), seen[at]["asks"].clone())
        };
        assert_eq!(told(0), (json!("large"), json!(1), json!("mps, 80 % SM")));
        assert_eq!(told(1), (json!("small"), json!(2), json!("mps, 40 % SM")));
        let since = |at: usize| seen[at]["since"].as_str().expect("a time");
        let now = timestamp(epoch_seconds());
        let times = [&*began, since(0), since(1), &*now];
        assert!(times.is_sorted(), "{times:?}");
        // It does not look any more, and keeps its place.
        let pid = seen[0]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).expect("a pid");
        let stopped = Stopped(Pid::from_raw(pid));
        // Not while it has the ledger's lock: that it would keep.
        let held = Held::ledger(&world);
        stop(stopped.0);
        drop(held);
        holder.down();
        let late = world.bundle("late", &[("sublet.sm", "40")], HOLD).create();
        assert!(!late.ok && late.stderr.contains("no room: others wait for what is left"), "{late:?}");
        let explained = |options: &[&str]| world.sublet(&[&["explain", "sm=40"], options].concat());
        let asked = explained(&[]);
        assert!(String::from_utf8_lossy(&asked.stderr).contains("others wait for what is left"), "{asked:?}");
        assert!(explained(&["--empty"]).status.success());
        let own = world.sublet(&["explain", "--bundle", large.dir.to_str().expect("UTF-8")]);
        assert!(own.status.success(), "it waits for itself: {own:?}");
        let beside = world.bundle("beside", &[("sublet.sm", "20")], HOLD);
        beside.up();
        assert!(!of_small.is_finished(), "it has no room beside the first one");
        drop(stopped);
        let created = of_small.join().expect("no panic");
        assert!(created.ok, "{created:?}");
        assert!(!of_large.join().expect("no panic").ok);
        beside.down();
    });
    small.down();
    world.assert_empty();
}

#[test]
fn run_in_the_foreground_gives_its_lease_back_by_itself() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("once", &[("sublet.sm", "25")], &["/usr/bin/cuda-probe", "info"]);
    let finished = bundle.run();
    assert!(finished.ok, "{finished:?}");
    assert_eq!(finished.json()[0]["sm"], json!(32));
    world.assert_empty();
}

#[test]
fn time_slice_with_memory_is_held_by_a_server_of_its_own() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let annotations = [("sublet.mode", "time-slice"), ("sublet.memory", "4GiB")];
    let bundle = world.bundle("limited", &annotations, HOLD);
    bundle.up();
    let info = bundle.event("info");
    assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(132)));
    // In a process of its own, because the probe ends when an allocation fails.
    let lines = bundle.exec(&["/usr/bin/cuda-probe", "alloc", "5000", "60"]).json();
    let tried = lines.iter().find(|line| line["event"] == "alloc").expect("it tries");
    assert_eq!(tried["result"], "CUDA_ERROR_OUT_OF_MEMORY");
    let status = world.status();
    assert_eq!(status["mps"][0]["lease"], status["leases"][0]["id"], "the daemon is the lease's own");
    bundle.down();
    world.assert_empty();
}

#[test]
fn the_ceiling_of_a_shared_server_follows_its_leases() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "[limits]\nsm_overcommit = 2.0\n");
    let share = |id: &str, sm: &str| world.bundle(id, &[("sublet.sm", sm)], HOLD);
    let (first, large, last) = (share("first", "25"), share("large", "60"), share("last", "25"));
    [&first, &large, &last].into_iter().for_each(Bundle::up);
    assert_eq!(large.event("info")["sm"], json!(78), "60 of 132, in pairs");
    let greedy = ["/bin/env", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100", "/usr/bin/cuda-probe", "info"];
    first.down();
    assert_eq!(last.exec(&greedy).json()[0]["sm"], json!(78), "the server's ceiling is the largest share");
    large.down();
    assert!(eventually(|| last.exec(&greedy).json()[0]["sm"] == json!(32)), "and falls with it");
    last.down();
    world.assert_empty();
}

#[test]
fn a_process_without_environment_has_at_most_what_the_largest_neighbour_may() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let share =
        |id: &str, more: &[(&str, &str)]| world.bundle(id, &[&[("sublet.sm", "25")], more].concat(), HOLD);
    let first = share("first", &[("sublet.memory", "4GiB")]);
    let large = share("large", &[("sublet.memory", "17GiB"), ("sublet.processes", "2")]);
    let unlimited = share("unlimited", &[]);
    // What the probe sees with a context of 32 SMs, 146 MiB, inside the limit.
    let free = |assignment: &str| {
        let seen =
            first.exec(&["/bin/env", "-i", assignment, "/usr/bin/cuda-probe", "info"]).json().remove(0);
        assert_eq!((&seen["mps"], &seen["sm"]), (&json!(true), &json!(32)), "{seen}");
        seen["free_mib"].as_i64().expect("free_mib")
    };
    first.up();
    assert_eq!(free("A=1"), 4096 - 146);
    large.up();
    assert_eq!(free("A=1"), 8704 - 146, "raised before the other started: 17 GiB for two processes");
    assert_eq!(free("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=90G"), 8704 - 146, "its own is clamped");
    assert_eq!(exec_info(&first)["free_mib"], json!(4096 - 146), "with its environment it has its own");
    let hog = first.exec(&["/bin/env", "-i", "/usr/bin/cuda-probe", "alloc", "9000"]);
    assert_eq!(hog.json()[1]["result"], "CUDA_ERROR_OUT_OF_MEMORY");
    unlimited.up();
    assert!(free("A=1") > 100_000, "no ceiling beside a share that has no limit");
    assert!(unlimited.event("info")["free_mib"].as_i64() > Some(100_000), "lifted before it started");
    unlimited.down();
    assert!(eventually(|| free("A=1") == 8704 - 146), "{}", free("A=1"));
    assert_eq!(world.status()["mps"][0]["ceiling_memory_bytes"], json!(8704_u64 << 20));
    large.down();
    assert!(eventually(|| free("A=1") == 4096 - 146), "and down again: {}", free("A=1"));
    first.down();
    world.assert_empty();
}

/// A server that the daemon restarts has the same limits, because they are its defaults.
#[test]
fn a_server_that_died_comes_back_with_the_memory_ceiling() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let share = |id, memory| {
        world.bundle(id, &[("sublet.sm", "25"), ("sublet.memory", memory)], &["/bin/sleep", "120"])
    };
    let (first, large) = (share("first", "4GiB"), share("large", "8GiB"));
    [&first, &large].into_iter().for_each(Bundle::up);
    let is_server = |pid: &nix::unistd::Pid| {
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm"));
        let control = i64::from(pid.as_raw()) == world.status()["mps"][0]["pid"].as_i64().expect("pid");
        comm.is_ok_and(|comm| comm.starts_with("nvidia-cuda-mps")) && !control
    };
    let servers = || world.daemon_pids("").into_iter().filter(is_server).collect::<Vec<_>>();
    let before = servers();
    nix::sys::signal::kill(before[0], nix::sys::signal::Signal::SIGKILL).expect("SIGKILL");
    let bare = || first.exec(&["/bin/env", "-i", "/usr/bin/cuda-probe", "info"]).json().remove(0);
    assert!(eventually(|| bare()["free_mib"] == json!(8192 - 146)), "{}", bare());
    assert_ne!(servers(), before);
    [&first, &large].into_iter().for_each(Bundle::down);
    world.assert_empty();
}

#[test]
fn a_daemon_that_died_is_brought_back_under_a_running_container() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("survivor", &[("sublet.sm", "25")], &["/bin/sleep", "120"]);
    bundle.up();
    assert_eq!(exec_info(&bundle)["mps"], json!(true));
    let daemon = world.status()["mps"][0]["pid"].as_i64().expect("pid");
    nix::sys::signal::kill(pid(daemon), nix::sys::signal::Signal::SIGKILL).expect("SIGKILL");
    let healed = world.sublet(&["gc"]);
    assert!(healed.status.success(), "{healed:?}");
    let info = exec_info(&bundle);
    assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)));
    assert_ne!(world.status()["mps"][0]["pid"].as_i64(), Some(daemon));
    bundle.down();
    world.assert_empty();
}

#[test]
fn a_container_without_annotations_is_not_touched() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("stranger", &[("org.example.sublet", "no")], &["/bin/sleep", "120"]);
    bundle.up();
    let before = serde_json::to_vec(&bundle.spec).expect("JSON");
    assert_eq!(std::fs::read(bundle.dir.join("config.json")).expect("config.json"), before);
    assert_eq!(bundle.exec(&["/bin/sh", "-c", "ls /dev | grep -c nvidia"]).stdout, "0\n");
    bundle.down();
    assert!(!world.state_dir().join("ledger.json").exists(), "nothing was written down");
}

#[test]
fn the_lease_is_freed_when_the_runtime_never_says_so() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("crashed", &[("sublet.sm", "25")], HOLD);
    bundle.up();
    // The engine was killed: the low-level runtime deletes the container without sublet.
    let mut command = std::process::Command::new(world.engine.program());
    let deleted =
        command.arg("--root").arg(world.runtime_root()).args(["delete", "--force", "crashed"]).output();
    assert!(deleted.expect("the runtime runs").status.success());
    assert!(eventually(|| world.leases().is_empty()), "the next command frees it");
    world.assert_empty();
}

fn pid(number: i64) -> nix::unistd::Pid {
    nix::unistd::Pid::from_raw(i32::try_from(number).expect("a pid"))
}
