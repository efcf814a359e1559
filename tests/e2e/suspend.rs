//! `sublet suspend` and `resume`: what comes back is what was there, what cannot be suspended is refused before anything is
//! locked, and whatever is killed at whatever step, the next command puts it right. One H200: 143155 MiB.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

use crate::two_users::{ALICE, BOB, serving};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use serde_json::{Value, json};
use sublet_e2e::{Bundle, World, eventually, skip_unless_root};

// A suspension asks the host for as much memory as the GPU has of it, though the simulator copies only some.
pub(crate) const KEEP: &[&str] = &["/usr/bin/cuda-probe", "keep", "1024", "600"];
pub(crate) const ALLOW: &[(&str, &str)] = &[("sublet.memory", "24GiB"), ("sublet.suspend", "allow")];

pub(crate) fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned()).concat()
}

pub(crate) fn kept<'a>(world: &'a World, id: &str) -> Bundle<'a> {
    let bundle = world.bundle(id, ALLOW, KEEP);
    bundle.up();
    bundle.event("round");
    bundle
}

pub(crate) fn done(world: &World, arguments: &[&str]) -> String {
    let output = world.sublet(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output));
    text(&output)
}

/// The refusal's reason and its words.
pub(crate) fn refused(world: &World, arguments: &[&str]) -> (String, String) {
    let output = world.sublet(&[arguments, &["--format", "json"]].concat());
    assert!(!output.status.success(), "{arguments:?}: {}", text(&output));
    let error: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let field = |key: &str| error[key].as_str().expect("text").to_owned();
    (field("reason"), field("error"))
}

pub(crate) fn rounds(bundle: &Bundle<'_>) -> Vec<Value> {
    let lines = bundle.output();
    let lines = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["event"] == "round").collect()
}

/// It goes on, with what it had.
pub(crate) fn assert_goes_on(bundle: &Bundle<'_>) {
    let before = rounds(bundle).len();
    assert!(eventually(|| rounds(bundle).len() > before), "it hangs: {}", bundle.output());
    assert!(rounds(bundle).iter().all(|round| round["equal"] == true), "{}", bundle.output());
}

fn assert_waits(bundle: &Bundle<'_>) {
    let before = rounds(bundle).len();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(rounds(bundle).len(), before, "it computes");
}

fn state(world: &World) -> Value {
    world.leases()[0]["state"].clone()
}

pub(crate) fn fail(world: &World, line: &str) {
    std::fs::write(in_sim(world, "fail"), line).expect("sim/fail");
}

pub(crate) fn in_sim(world: &World, name: &str) -> PathBuf {
    world.driver_root.as_ref().expect("simulated").join("sim").join(name)
}

/// By `sim/trace`, the driver was asked to lock nothing.
pub(crate) fn assert_not_locked(world: &World) {
    let trace = std::fs::read_to_string(in_sim(world, "trace")).expect("sim/trace");
    assert!(!trace.contains("cuCheckpointProcessLock"), "{trace}");
}

pub(crate) fn kinds(world: &World) -> Vec<Value> {
    let events = done(world, &["events", "--format", "json"]);
    let events = events.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    events.map(|event| event["kind"].clone()).collect()
}

#[test]
fn another_takes_the_gpu_meanwhile_and_all_comes_back_when_it_has_ended() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let kept = kept(&world, "kept");
    let all = world.status()["devices"][0]["free"]["memory_bytes"].clone();
    let said = done(&world, &["suspend", "kept"]);
    assert!(said.starts_with("Suspended kept: ") && said.contains("MiB are in host memory"), "{said}");
    assert_waits(&kept);
    let lease = &world.leases()[0];
    assert_eq!(lease["state"], "suspended");
    let bytes = lease["suspended_bytes"].as_u64().expect("bytes");
    assert!(bytes >= 1024 << 20, "{bytes}");
    assert!(world.status()["devices"][0]["free"]["memory_bytes"].as_u64() > all.as_u64());
    let answer = done(&world, &["explain", "--container", "kept"]);
    assert!(answer.contains("it goes on after `sublet resume kept`"), "{answer}");
    let metrics = done(&world, &["metrics"]);
    for sample in ["sublet_suspended_containers 1", "sublet_last_suspend_seconds "] {
        assert!(metrics.contains(sample), "{sample}: {metrics}");
    }
    assert_eq!(refused(&world, &["suspend", "kept"]).0, "suspended");

    let large = world.bundle(
        "large",
        &[("sublet.memory", "130GiB"), ("sublet.mode", "time-slice")],
        &["/bin/sleep", "600"],
    );
    large.up();
    let (reason, why) = refused(&world, &["resume", "kept"]);
    assert_eq!(reason, "no-room");
    assert!(why.contains("left to book") && why.contains("needed"), "{why}");
    assert_eq!(state(&world), "suspended");
    large.down();
    let said = done(&world, &["resume", "kept", "--wait", "10s", "--gpu", "0"]);
    assert!(said.starts_with("Resumed kept: "), "{said}");
    assert_goes_on(&kept);
    assert_eq!(refused(&world, &["resume", "kept"]).0, "not-suspended");
    let kinds = kinds(&world);
    assert!(kinds.contains(&json!("suspended")) && kinds.contains(&json!("resumed")), "{kinds:?}");
    kept.down();
    world.assert_empty();
}

#[test]
fn a_gpu_that_hangs_holds_no_container_of_another_that_is_locked() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200-h100", "");
    let kept = kept(&world, "kept");
    let trace = in_sim(&world, "trace");
    std::fs::write(&trace, "").expect("sim/trace");
    done(&world, &["suspend", "kept"]);
    let traced = std::fs::read_to_string(&trace).expect("sim/trace");
    let list = "nvmlDeviceGetComputeRunningProcesses_v3";
    let before = traced.lines().take_while(|call| *call != "cuCheckpointProcessLock");
    let before = before.filter(|call| *call == list).count();
    done(&world, &["resume", "kept"]);
    // Locked, its own GPU is asked, and then the other one.
    fail(&world, &format!("{list} {} hang\n", before + 2));
    done(&world, &["suspend", "kept"]);
    assert_eq!(std::fs::read_to_string(in_sim(&world, "fail")).expect("sim/fail"), "", "nothing hung");
    done(&world, &["resume", "kept"]);
    assert_goes_on(&kept);
    // One that is killed in the middle is put right while the other GPU answers nothing at all.
    killed_in(&world, "cuCheckpointProcessCheckpoint", &["suspend", "kept"]);
    fail(&world, "*@1 0 hang\n");
    done(&world, &["gc"]);
    fail(&world, "");
    assert_goes_on(&kept);
    kept.down();
    world.assert_empty();
}

#[test]
fn a_container_that_cannot_be_suspended_is_refused_before_anything_is_locked() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    std::fs::write(in_sim(&world, "trace"), "").expect("sim/trace");
    let allow = ("sublet.suspend", "allow");
    let bundles = [
        ("mps", vec![("sublet.sm", "25")], KEEP),
        ("never", vec![("sublet.mode", "time-slice")], KEEP),
        ("idle", vec![allow], &["/bin/sleep", "600"][..]),
        ("several", vec![allow], &["/bin/sh", "-c", "cuda-probe hold 600 & exec cuda-probe keep 100 600"]),
    ];
    for (id, annotations, program) in bundles {
        // A GPU has one use at a time.
        let bundle = world.bundle(id, &annotations, program);
        bundle.up();
        if id != "idle" {
            bundle.event("round");
        }
        if id == "several" {
            assert!(eventually(|| world.status()["leases"][0]["used"]["processes"] == 2));
        }
        let (reason, why) = refused(&world, &["suspend", id]);
        let (expected, words) = match id {
            "mps" => ("cannot-suspend", "MPS"),
            "never" => ("suspend-not-allowed", "--force"),
            "idle" => ("no-process", "nothing to suspend"),
            _ => ("several-processes", "allow-many"),
        };
        assert!(reason == expected && why.contains(words), "{id}: {reason}: {why}");
        bundle.down();
    }
    // A stopped process cannot do its part.
    let stopped = kept(&world, "stopped");
    let pid = Pid::from_raw(stopped.pid());
    kill(pid, Signal::SIGSTOP).expect("it runs");
    assert_eq!(refused(&world, &["suspend", "stopped"]).0, "paused");
    kill(pid, Signal::SIGCONT).expect("it is there");
    assert_goes_on(&stopped);
    stopped.down();
    assert_not_locked(&world);
    let plain = world.bundle("plain", &[], &["/bin/sleep", "600"]);
    plain.up();
    for id in ["plain", "nobody"] {
        assert_eq!(refused(&world, &["suspend", id]).0, "no-container", "{id}");
    }
    plain.down();
    world.assert_empty();
}

#[test]
fn a_copy_that_the_containers_memory_limit_has_no_room_for_is_refused() {
    if skip_unless_root() {
        return;
    }
    if !Path::new("/sys/fs/cgroup/memory").exists() && !Path::new("/sys/fs/cgroup/init/memory.max").exists() {
        eprintln!("skipped: no memory controller in cgroup2 here (SUBLET_CGROUPS=v1 has it on hybrid hosts)");
        return;
    }
    let world = World::simulated("h200", "");
    std::fs::write(in_sim(&world, "trace"), "").expect("sim/trace");
    let mut small = world.bundle("small", ALLOW, KEEP);
    small.spec["linux"]["resources"]["memory"] = json!({"limit": 512_u64 << 20});
    small.up();
    small.event("round");
    let (reason, why) = refused(&world, &["suspend", "small"]);
    assert!(reason == "no-host-memory" && why.contains("MiB of the container's memory limit left"), "{why}");
    assert_not_locked(&world);
    assert_goes_on(&small);
    small.down();
    world.assert_empty();
}

#[test]
fn a_share_that_may_be_suspended_has_no_mps_and_not_several_gpus() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    for (share, words) in [
        (&["sm=25", "suspend=allow"][..], "nothing under MPS"),
        (&["gpu=any:2", "suspend=allow"], "several GPUs"),
        (&["mode=time-slice", "isolation=dedicated", "suspend=allow"], "nothing under MPS"),
    ] {
        let output = world.sublet(&[&["explain"], share].concat());
        assert!(!output.status.success() && text(&output).contains(words), "{share:?}: {}", text(&output));
    }
    let answer = done(&world, &["explain", "memory=8GiB", "suspend=allow"]);
    assert!(answer.contains("Suspend    allow") && answer.contains("watched by the guard"), "{answer}");
}

#[test]
fn an_old_driver_is_refused_by_its_name() {
    if skip_unless_root() {
        return;
    }
    let topology = concat!(env!("CARGO_MANIFEST_DIR"), "/../sim/topologies/h200.toml");
    let topology = std::fs::read_to_string(topology).expect("a topology").replace("580.159.04", "565.57.01");
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("old.toml");
    std::fs::write(&file, topology).expect("written");
    let world = World::simulated(file.to_str().expect("UTF-8"), "");
    let bundle = world.bundle("old", ALLOW, KEEP);
    bundle.up();
    bundle.event("round");
    let (reason, why) = refused(&world, &["suspend", "old", "--force"]);
    assert_eq!(reason, "driver-too-old");
    assert!(why.contains("565.57.01") && why.contains("R570"), "{why}");
    assert_goes_on(&bundle);
    bundle.down();
    world.assert_empty();
}

#[test]
fn a_process_that_has_loaded_a_video_codec_is_not_suspended() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    std::fs::write(in_sim(&world, "trace"), "").expect("sim/trace");
    let share = [ALLOW, &[("sublet.capabilities", "compute,utility,video")]].concat();
    for library in ["libnvcuvid.so.1", "libnvidia-encode.so.1"] {
        let command = format!("LD_PRELOAD={library} exec cuda-probe keep 1024 600");
        let bundle = world.bundle("video", &share, &["/bin/sh", "-c", &command]);
        bundle.up();
        bundle.event("round");
        let (reason, why) = refused(&world, &["suspend", "video", "--force"]);
        assert!(reason == "cannot-suspend" && why.contains("video engines"), "{reason}: {why}");
        assert_not_locked(&world);
        assert_goes_on(&bundle);
        bundle.down();
    }
    world.assert_empty();
}

#[test]
fn a_container_that_the_driver_refuses_goes_on_as_before() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let managed = world.bundle("managed", ALLOW, &[KEEP, &["managed"]].concat());
    managed.up();
    managed.event("round");
    let (reason, why) = refused(&world, &["suspend", "managed"]);
    assert!(reason == "suspend-undone" && why.contains("CUDA_ERROR_NOT_SUPPORTED"), "{reason}: {why}");
    assert_eq!(state(&world), "active");
    assert_goes_on(&managed);
    assert!(kinds(&world).contains(&json!("suspend-undone")));
    managed.down();
    world.assert_empty();
}

#[test]
fn of_several_processes_those_that_are_out_come_back_where_one_stays() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let both = "cuda-probe hold 600 & exec cuda-probe keep 1024 600";
    let many = [("sublet.suspend", "allow-many")];
    let bundle = world.bundle("both", &many, &["/bin/sh", "-c", both]);
    bundle.up();
    bundle.event("round");
    assert!(eventually(|| world.status()["leases"][0]["used"]["processes"] == 2));
    fail(&world, "cuCheckpointProcessCheckpoint 2 801\n");
    assert_eq!(refused(&world, &["suspend", "both"]).0, "suspend-undone");
    assert_eq!(state(&world), "active");
    assert_goes_on(&bundle);
    done(&world, &["suspend", "both"]);
    assert_waits(&bundle);
    done(&world, &["resume", "both"]);
    assert_goes_on(&bundle);
    bundle.down();
    world.assert_empty();
}

#[test]
fn a_state_that_the_driver_loses_ends_its_container_and_is_reported() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let kept = kept(&world, "kept");
    done(&world, &["suspend", "kept"]);
    fail(&world, "cuCheckpointProcessRestore 1 304\n");
    let (reason, why) = refused(&world, &["resume", "kept"]);
    assert!(reason == "suspend-lost" && why.contains("its container was ended"), "{reason}: {why}");
    assert!(eventually(|| world.leases().is_empty()), "{:?}", world.leases());
    assert!(kinds(&world).contains(&json!("suspend-lost")));
    kept.down();
    world.assert_empty();
}

/// Sets the GPU's compute mode, or says what it is.
fn compute_mode(world: &World, set: Option<&str>) -> String {
    let mut smi = Command::new(world.driver_root.as_ref().expect("simulated").join("usr/bin/nvidia-smi"));
    match set {
        Some(mode) => smi.args(["-i", "0", "-c", mode]),
        None => smi.args(["--query-gpu=compute_mode", "--format=csv,noheader"]),
    };
    let output = smi.output().expect("nvidia-smi runs");
    assert!(output.status.success(), "{}", text(&output));
    text(&output).trim().to_owned()
}

/// It stays suspended, and `what` asks the driver for no restore, which would lose it.
fn assert_not_restored(world: &World, what: impl Fn()) {
    std::fs::write(in_sim(world, "trace"), "").expect("sim/trace");
    what();
    let trace = std::fs::read_to_string(in_sim(world, "trace")).expect("sim/trace");
    assert!(!trace.contains("cuCheckpointProcessRestore"), "{trace}");
    assert_eq!(state(world), "suspended");
}

/// A process that the ledger knows nothing of has nearly all of the GPU.
fn start_large_stranger(world: &World) -> Child {
    let stranger = world.stranger_that(Command::new("env"), &["alloc", "141500", "300"]);
    let free = || {
        let gpu = world.nvml().device_by_index(0).and_then(|gpu| gpu.memory_info().map(|memory| memory.free));
        gpu.expect("NVML answers") >> 20
    };
    assert!(eventually(|| free() < 1600), "{} MiB are free", free());
    stranger
}

fn end(mut stranger: Child) {
    stranger.kill().expect("SIGKILL");
    stranger.wait().expect("reaped");
}

#[test]
fn no_restore_begins_without_room_that_the_driver_confirms() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let kept = kept(&world, "kept");
    done(&world, &["suspend", "kept"]);
    let stranger = start_large_stranger(&world);
    assert_not_restored(&world, || {
        let (reason, why) = refused(&world, &["resume", "kept"]);
        assert!(reason == "no-room" && why.contains(" needed"), "{reason}: {why}");
    });
    end(stranger);
    done(&world, &["resume", "kept"]);
    assert_goes_on(&kept);
    // Its room is booked already, and another has it all the same.
    done(&world, &["suspend", "kept"]);
    killed_in(&world, "cuCheckpointProcessRestore", &["resume", "kept"]);
    let stranger = start_large_stranger(&world);
    assert_not_restored(&world, || assert!(text(&world.sublet(&["gc"])).contains("MiB free, and ")));
    end(stranger);
    done(&world, &["resume", "kept"]);
    assert_goes_on(&kept);
    kept.down();
    world.assert_empty();
}

#[test]
fn no_restore_begins_in_another_compute_mode() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let world = &host.world;
    let kept = kept(world, "kept");
    done(world, &["suspend", "kept"]);
    let mps = world.bundle("mps", &[("sublet.sm", "25")], KEEP);
    mps.up();
    mps.event("round");
    assert_eq!(compute_mode(world, None), "Exclusive_Process");
    mps.down();
    // The mode does not outlive the lease.
    assert!(eventually(|| compute_mode(world, None) == "Default"));
    done(world, &["resume", "kept"]);
    assert_goes_on(&kept);
    done(world, &["suspend", "kept"]);
    let _ = compute_mode(world, Some("EXCLUSIVE_PROCESS"));
    assert_not_restored(world, || {
        let (reason, why) = refused(world, &["resume", "kept"]);
        assert!(reason == "never-fits" && why.contains("compute mode EXCLUSIVE_PROCESS"), "{reason}: {why}");
    });
    let _ = compute_mode(world, Some("DEFAULT"));
    done(world, &["resume", "kept"]);
    assert_goes_on(&kept);
    kept.down();
    world.assert_empty();
}

/// The command, which hangs in a call of the driver's, with its child.
pub(crate) fn hanging_in(world: &World, call: &str, arguments: &[&str]) -> Child {
    fail(world, &format!("{call} 1 hang\n"));
    let child = world.command("sublet").args(arguments).process_group(0).spawn().expect("sublet runs");
    await_hang(world, call);
    child
}

/// Waits until `call`, which is to hang, was made.
pub(crate) fn await_hang(world: &World, call: &str) {
    let hangs = || std::fs::read_to_string(in_sim(world, "fail")).unwrap_or_default().trim().is_empty();
    assert!(eventually(hangs), "{call} was not called");
}

/// Kills both.
pub(crate) fn kill_hanging(mut child: Child) {
    killpg(Pid::from_raw(i32::try_from(child.id()).expect("a pid")), Signal::SIGKILL).expect("it hangs");
    child.wait().expect("it ends");
}

/// The command is killed in that call.
pub(crate) fn killed_in(world: &World, call: &str, arguments: &[&str]) {
    kill_hanging(hanging_in(world, call, arguments));
}

#[test]
fn while_a_step_is_taken_every_other_one_is_refused() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let kept = kept(&world, "kept");
    let suspends = hanging_in(&world, "cuCheckpointProcessLock", &["suspend", "kept"]);
    for other in [&["suspend", "kept"][..], &["resume", "kept"], &["move", "kept", "--gpu", "0"]] {
        let (reason, why) = refused(&world, other);
        assert!(
            reason == "busy" && why.contains(" suspends or resumes it now"),
            "{other:?}: {reason}: {why}"
        );
    }
    assert_eq!(state(&world), "suspending");
    kill_hanging(suspends);
    done(&world, &["gc"]);
    assert_goes_on(&kept);
    kept.down();
    world.assert_empty();
}

#[test]
fn a_command_that_is_killed_at_any_step_is_put_right_by_the_next() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let kept = kept(&world, "kept");
    for call in ["Lock", "Checkpoint"] {
        killed_in(&world, &format!("cuCheckpointProcess{call}"), &["suspend", "kept"]);
        done(&world, &["gc"]);
        assert_eq!(state(&world), "active", "{call}");
        assert_goes_on(&kept);
    }
    for call in ["Restore", "Unlock"] {
        done(&world, &["suspend", "kept"]);
        killed_in(&world, &format!("cuCheckpointProcess{call}"), &["resume", "kept"]);
        let said = done(&world, &["gc"]);
        assert!(said.contains(": putting its suspension right first: "), "{call}: {said}");
        assert_eq!(state(&world), "active", "{call}");
        assert_goes_on(&kept);
    }
    // What it waits for before the driver's restore: NVML is initialised once.
    done(&world, &["suspend", "kept"]);
    std::fs::write(in_sim(&world, "trace"), "").expect("sim/trace");
    done(&world, &["resume", "kept"]);
    let trace = std::fs::read_to_string(in_sim(&world, "trace")).expect("sim/trace");
    let before = trace.split("cuCheckpointProcessRestore").next().expect("a first part");
    assert_eq!(before.matches("nvmlInit_v2").count(), 1, "{trace}");
    assert_goes_on(&kept);
    // One that is on the GPU is unlocked by another child, and nothing is asked of a driver that does not tell the state.
    done(&world, &["suspend", "kept"]);
    fail(&world, "cuCheckpointProcessUnlock 1 801\n");
    done(&world, &["resume", "kept"]);
    assert_goes_on(&kept);
    done(&world, &["suspend", "kept"]);
    for fault in ["801", "hang"] {
        fail(&world, &format!("cuCheckpointProcessGetState 1 {fault}\n"));
        assert_eq!(refused(&world, &["resume", "kept"]).0, "suspend-stuck", "{fault}");
        done(&world, &["gc"]);
        assert_goes_on(&kept);
        done(&world, &["suspend", "kept"]);
    }
    done(&world, &["resume", "kept"]);
    kept.down();
    world.assert_empty();
}

/// The step that the ledger has of the first lease, read without a command, which would put it right first.
fn suspension(world: &World) -> Value {
    let text = std::fs::read(world.state_dir().join("ledger.json")).expect("ledger.json");
    serde_json::from_slice::<Value>(&text).expect("JSON")["leases"][0]["suspension"].clone()
}

#[test]
fn the_service_alone_puts_a_killed_command_right() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let kept = kept(&host.world, "kept");
    killed_in(&host.world, "cuCheckpointProcessCheckpoint", &["suspend", "kept"]);
    let killed = Instant::now();
    assert!(eventually(|| suspension(&host.world).is_null()), "{}", suspension(&host.world));
    assert!(killed.elapsed() < Duration::from_secs(20), "after {:?}", killed.elapsed());
    assert_goes_on(&kept);
    assert_eq!(state(&host.world), "active");
    assert!(kinds(&host.world).contains(&json!("suspend-undone")));
    kept.down();
    host.world.assert_empty();
}

/// Waits for the limits of both calls, 24 s and 44 s.
#[test]
fn a_driver_that_hangs_is_given_up_after_its_time_and_what_it_held_goes_on_or_is_ended() {
    if skip_unless_root() {
        return;
    }
    let hangs_out = || {
        let world = World::simulated("h200", "");
        let kept = kept(&world, "kept");
        fail(&world, "cuCheckpointProcessCheckpoint 1 hang\n");
        let (reason, why) = refused(&world, &["suspend", "kept"]);
        assert!(reason == "suspend-undone" && why.contains("did not do it within 24 s"), "{reason}: {why}");
        assert_eq!(state(&world), "active");
        assert_goes_on(&kept);
        assert!(kinds(&world).contains(&json!("suspend-undone")));
        kept.down();
        world.assert_empty();
    };
    let hangs_back = || {
        let world = World::simulated("h200", "");
        let kept = kept(&world, "kept");
        done(&world, &["suspend", "kept"]);
        fail(&world, "cuCheckpointProcessRestore 1 hang\n");
        let (reason, why) = refused(&world, &["resume", "kept"]);
        assert!(reason == "suspend-lost" && why.contains("did not do it within 44 s"), "{reason}: {why}");
        assert!(eventually(|| world.leases().is_empty()), "{:?}", world.leases());
        assert!(kinds(&world).contains(&json!("suspend-lost")));
        kept.down();
        world.assert_empty();
    };
    std::thread::scope(|scope| {
        scope.spawn(hangs_out);
        scope.spawn(hangs_back);
    });
}

#[test]
fn a_suspended_container_ends_as_any_other() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let kept = kept(&world, "kept");
    done(&world, &["suspend", "kept"]);
    // An engine deletes it while it runs, and then by force.
    assert!(!kept.delete().ok);
    assert_eq!(state(&world), "suspended");
    assert!(kept.kill("KILL").ok);
    kept.down();
    world.assert_empty();
}

#[test]
fn a_process_that_begins_to_compute_in_a_suspended_container_is_suspended_and_comes_back() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let kept = kept(&host.world, "kept");
    done(&host.world, &["suspend", "kept"]);
    let bytes = || host.world.leases()[0]["suspended_bytes"].as_u64().expect("bytes");
    let before = bytes();
    std::thread::scope(|scope| {
        let new = scope.spawn(|| kept.exec(&["/usr/bin/cuda-probe", "keep", "512", "15"]));
        assert!(eventually(|| host.event("suspended").is_some()), "{:?}", host.events());
        let event = host.event("suspended").expect("seen");
        let text = event["text"].as_str().expect("text");
        assert!(event["action"] == "report" && text.contains("it was suspended, too"), "{event}");
        assert!(bytes() >= before + (512 << 20), "{} after {before}", bytes());
        assert_eq!(state(&host.world), "suspended");
        assert_waits(&kept);
        assert!(!new.is_finished(), "it was ended");
        done(&host.world, &["resume", "kept"]);
        assert_goes_on(&kept);
        let new = new.join().expect("exec");
        let rounds = new.stdout.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let rounds: Vec<Value> = rounds.filter(|line| line["event"] == "round").collect();
        assert!(new.ok && !rounds.is_empty() && rounds.iter().all(|round| round["equal"] == true), "{new:?}");
    });
    kept.down();
    host.world.assert_empty();
}

/// A worker that is started again whenever it ends. Two at once would pass what is booked.
fn restarting(world: &World) -> Bundle<'_> {
    let share = [("sublet.memory", "2GiB"), ("sublet.suspend", "allow")];
    let worker = "while :; do cuda-probe keep 1024 600; done";
    let bundle = world.bundle("worker", &share, &["/bin/sh", "-c", worker]);
    bundle.up();
    bundle.event("round");
    bundle
}

/// Ends the first process of those whose state it is.
fn kill_first(suspension: &Value) {
    let pid = suspension["processes"][0]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
    kill(Pid::from_raw(pid.expect("a pid")), Signal::SIGKILL).expect("it is there");
}

#[test]
fn a_worker_that_dies_while_it_is_suspended_leaves_its_room_to_the_next() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let worker = restarting(&host.world);
    done(&host.world, &["suspend", "worker"]);
    kill_first(&suspension(&host.world));
    assert!(eventually(|| host.event("suspended").is_some()), "{:?}", host.events());
    let event = host.event("suspended").expect("seen");
    let text = event["text"].as_str().expect("text");
    assert!(event["action"] == "report" && text.contains("it was suspended, too"), "{event}");
    done(&host.world, &["resume", "worker"]);
    assert_goes_on(&worker);
    worker.down();
    host.world.assert_empty();
}

#[test]
fn a_worker_that_dies_while_it_is_being_suspended_leaves_nothing_suspended() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let worker = restarting(&world);
    for slow in [SLOW_LOCK, SLOW_CHECKPOINT] {
        let kill = || kill_first(&suspension(&world));
        // The driver's call may end before the process has.
        let (reason, why) = while_suspending(&world, "worker", slow, kill);
        assert!(reason == "suspend-undone", "{}: {reason}: {why}", slow.0);
        assert_eq!(state(&world), "active", "{}", slow.0);
        assert_goes_on(&worker);
    }
    worker.down();
    world.assert_empty();
}

/// A call of the driver's that takes some seconds with so many percent of its time.
type Slow = (&'static str, &'static str);
const SLOW_LOCK: Slow = ("cuCheckpointProcessLock", "800000");
const SLOW_CHECKPOINT: Slow = ("cuCheckpointProcessCheckpoint", "1000");

/// The refusal of a suspension, where `meanwhile` happens in a call that takes long.
fn while_suspending(
    world: &World,
    id: &str,
    (call, pace): Slow,
    meanwhile: impl FnOnce(),
) -> (String, String) {
    let (slow, traced) = (in_sim(world, "checkpoint-pace"), in_sim(world, "trace"));
    std::fs::write(&slow, pace).expect("sim/checkpoint-pace");
    std::fs::write(&traced, "").expect("sim/trace");
    let trace = || std::fs::read_to_string(&traced).expect("sim/trace");
    std::thread::scope(|scope| {
        let suspend = scope.spawn(|| refused(world, &["suspend", id]));
        assert!(eventually(|| trace().contains(call)), "{}", trace());
        meanwhile();
        std::fs::remove_file(&slow).expect("removed");
        suspend.join().expect("suspend")
    })
}

#[test]
fn a_process_that_begins_to_compute_while_another_is_being_locked_leaves_both_on_the_gpu() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let kept = kept(&world, "kept");
    std::thread::scope(|scope| {
        let mut new = None;
        let (reason, why) = while_suspending(&world, "kept", SLOW_LOCK, || {
            new = Some(scope.spawn(|| kept.exec(&["/usr/bin/cuda-probe", "keep", "512", "10"])));
            assert!(eventually(|| world.status()["leases"][0]["used"]["processes"] == 2));
        });
        assert!(reason == "suspend-undone" && why.contains("took GPU memory meanwhile"), "{reason}: {why}");
        let new = new.expect("begun").join().expect("exec");
        assert!(new.ok && new.stdout.contains("\"round\""), "{new:?}");
    });
    assert_eq!(state(&world), "active");
    assert_goes_on(&kept);
    kept.down();
    world.assert_empty();
}

/// Waits for the limit of the call, 24 s.
#[test]
fn a_process_that_is_stopped_while_its_memory_is_copied_goes_on_with_it() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let kept = kept(&world, "kept");
    let pid = Pid::from_raw(kept.pid());
    let stop = || kill(pid, Signal::SIGSTOP).expect("it runs");
    let (reason, why) = while_suspending(&world, "kept", SLOW_CHECKPOINT, stop);
    assert!(reason == "suspend-stuck", "{reason}: {why}");
    kill(pid, Signal::SIGCONT).expect("it is there");
    done(&world, &["gc"]);
    assert_eq!(state(&world), "active");
    assert_goes_on(&kept);
    kept.down();
    world.assert_empty();
}

#[test]
fn of_a_resume_and_a_start_at_once_one_has_the_room() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let kept = kept(&world, "kept");
    for round in 0..8 {
        done(&world, &["suspend", "kept"]);
        let share = [("sublet.memory", "130GiB"), ("sublet.mode", "time-slice")];
        let large = world.bundle(&format!("large{round}"), &share, &["/bin/sleep", "600"]);
        let (resumed, created) = std::thread::scope(|scope| {
            let resumed = scope.spawn(|| world.sublet(&["resume", "kept"]));
            let created = large.create();
            (resumed.join().expect("resume"), created)
        });
        assert_ne!(resumed.status.success(), created.ok, "{}{}", text(&resumed), created.stderr);
        large.down();
        if !resumed.status.success() {
            done(&world, &["resume", "kept"]);
        }
        assert_goes_on(&kept);
    }
    kept.down();
    world.assert_empty();
}

#[test]
fn a_process_that_begins_to_compute_in_a_suspended_container_is_ended_where_it_has_no_room() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let share = [("sublet.memory", "2GiB"), ("sublet.suspend", "allow")];
    let kept = host.world.bundle("kept", &share, KEEP);
    kept.up();
    kept.event("round");
    done(&host.world, &["suspend", "kept"]);
    // Left alone, it ends well.
    let computing = kept.exec(&["/usr/bin/cuda-probe", "keep", "1024", "30"]);
    assert!(!computing.ok, "{}", computing.stdout);
    assert!(eventually(|| host.event("suspended").is_some()), "{:?}", host.events());
    let event = host.event("suspended").expect("seen");
    let text = event["text"].as_str().expect("text");
    assert!(
        event["action"] == "terminate" && text.contains("2048 MiB are booked (sublet.memory)"),
        "{event}"
    );
    done(&host.world, &["resume", "kept"]);
    assert_goes_on(&kept);
    kept.down();
    host.world.assert_empty();
}

#[test]
fn a_process_that_begins_to_compute_in_a_suspended_container_never_goes_on_where_a_step_fails() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let many = [("sublet.memory", "24GiB"), ("sublet.suspend", "allow-many")];
    let kept = host.world.bundle("kept", &many, KEEP);
    kept.up();
    kept.event("round");
    done(&host.world, &["suspend", "kept"]);
    let own = || suspension(&host.world);
    let processes = own()["processes"].clone();
    for call in ["GetState 1 801", "Lock 1 801", "Checkpoint 1 801"] {
        fail(&host.world, &format!("cuCheckpointProcess{call}\n"));
        let computing = kept.exec(&["/usr/bin/cuda-probe", "hold", "30"]);
        assert!(!computing.ok, "{call}: {}", computing.stdout);
        assert!(eventually(|| own()["step"] == "suspended"), "{call}: {}", own());
        assert_eq!(own()["processes"], processes, "{call}");
    }
    // What takes the step is killed in it.
    for call in ["Lock", "Checkpoint"] {
        fail(&host.world, &format!("cuCheckpointProcess{call} 1 hang\n"));
        std::thread::scope(|scope| {
            let new = scope.spawn(|| kept.exec(&["/usr/bin/cuda-probe", "hold", "30"]));
            let hangs = || std::fs::read_to_string(in_sim(&host.world, "fail")).unwrap_or_default();
            assert!(
                eventually(|| hangs().trim().is_empty() && own()["step"] == "adding"),
                "{call}: {}",
                own()
            );
            let owner =
                own()["owner"]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).expect("a pid");
            kill(Pid::from_raw(owner), Signal::SIGKILL).expect("it hangs");
            let new = new.join().expect("exec");
            assert!(!new.ok, "{call}: {}", new.stdout);
        });
        done(&host.world, &["gc"]);
        assert!(eventually(|| own()["step"] == "suspended"), "{call}: {}", own());
        assert_eq!(own()["processes"], processes, "{call}");
    }
    done(&host.world, &["resume", "kept"]);
    assert_goes_on(&kept);
    kept.down();
    host.world.assert_empty();
}

#[test]
fn a_gpu_with_a_suspended_container_keeps_its_mig_mode() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let kept = kept(&world, "kept");
    done(&world, &["move", "kept", "--gpu", "2"]);
    done(&world, &["suspend", "kept"]);
    let file = world.dir.path().join("mig.toml");
    // The driver opens also the one that it was moved from.
    for index in [0, 2] {
        let layout =
            format!("[[gpu]]\nmatch = \"{index}\"\nmig = true\ninstances = [{{ profile = \"1g.18gb\" }}]\n");
        std::fs::write(&file, layout).expect("written");
        let output = world.sublet(&["mig", "apply", file.to_str().expect("UTF-8"), "--allow-reset"]);
        assert!(!output.status.success() && text(&output).contains("suspended lease"), "{}", text(&output));
    }
    done(&world, &["resume", "kept"]);
    assert_goes_on(&kept);
    kept.down();
    world.assert_empty();
}

#[test]
fn a_user_suspends_their_own_container_where_the_policy_allows_it() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let bundle = host.bundle(ALICE, "mine", &[("sublet.suspend", "allow")], KEEP);
    let allow = "[[policy]]\nuser = 1000\nsuspend = true\n";
    let config = std::fs::read_to_string(&host.world.config).expect("config.toml");
    let without =
        config.replacen("[[policy]]\nuser = 1000\nmodes = [\"mps\"]\n", "[[policy]]\nuser = 1000\n", 1);
    let without = without.replacen("sm = 50\nmemory = \"16GiB\"\n", "", 1);
    std::fs::write(&host.world.config, &without).expect("config.toml");
    bundle.up();
    bundle.event("round");
    let by_alice =
        |arguments: &[&str]| host.command(ALICE, "sublet").args(arguments).output().expect("it runs");
    let output = by_alice(&["suspend", "mine"]);
    assert!(!output.status.success() && text(&output).contains("[[policy]]"), "{}", text(&output));
    std::fs::write(&host.world.config, without.replacen("[[policy]]\nuser = 1000\n", allow, 1))
        .expect("written");
    let output = by_alice(&["suspend", "mine", "--force"]);
    assert!(!output.status.success() && text(&output).contains("only root"), "{}", text(&output));
    let output = by_alice(&["suspend", "mine"]);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(host.leases()[0]["state"], "suspended");
    let output = by_alice(&["resume", "mine"]);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(host.leases()[0]["state"], "active");
    bundle.down();
    host.world.assert_empty();
}

#[test]
fn the_container_of_another_user_is_as_if_there_were_none() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let config = std::fs::read_to_string(&host.world.config).expect("config.toml");
    let limits = "user = 1000\nmodes = [\"mps\"]\nsm = 50\nmemory = \"16GiB\"\n";
    assert!(config.contains(limits) && config.contains("user = 1001\n"), "{config}");
    let both = config.replacen(limits, "user = 1000\nsuspend = true\n", 1);
    let both = both.replacen("user = 1001\n", "user = 1001\nsuspend = true\n", 1);
    std::fs::write(&host.world.config, both).expect("config.toml");
    let bundle = host.bundle(ALICE, "mine", &[("sublet.suspend", "allow")], KEEP);
    bundle.up();
    bundle.event("round");
    let id = host.leases()[0]["id"].as_str().expect("an id").to_owned();
    let assert_none_of_bobs = |verb: &str, gpu: &[&str]| {
        for name in [id.as_str(), "mine"] {
            let mut command = host.command(BOB, "sublet");
            let output = command.arg(verb).arg(name).args(gpu).output().expect("it runs");
            assert!(
                !output.status.success() && text(&output).contains(&format!("you hold no lease {id}")),
                "{verb} {name}: {}",
                text(&output)
            );
        }
        let answer = |lease: &str| {
            let mut ask = json!({"v": 1, "do": verb, "lease": lease});
            if let Some(gpu) = gpu.last() {
                ask["gpu"] = json!(gpu);
            }
            json!(host.say(BOB, &[ask])).to_string().replace(lease, "ID")
        };
        let of_none = answer("0123456789abcdef");
        assert!(of_none.contains("you hold no lease ID"), "{of_none}");
        assert_eq!(answer(&id), of_none, "{verb}");
        let trace = std::fs::read_to_string(in_sim(&host.world, "trace")).expect("sim/trace");
        assert!(!trace.contains("cuCheckpointProcess"), "{verb}: {trace}");
    };
    std::fs::write(in_sim(&host.world, "trace"), "").expect("sim/trace");
    assert_none_of_bobs("suspend", &[]);
    assert_none_of_bobs("move", &["--gpu", "0"]);
    done(&host.world, &["suspend", "mine"]);
    std::fs::write(in_sim(&host.world, "trace"), "").expect("sim/trace");
    assert_none_of_bobs("resume", &[]);
    assert_eq!(state(&host.world), "suspended");
    bundle.down();
    host.world.assert_empty();
}
