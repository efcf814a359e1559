//! Settings of the device itself: the compute mode under shared servers, and the length of the time slice. On the
//! simulated driver only: a real GPU's settings are left as they are.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sublet_e2e::{World, eventually, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];

/// The compute mode as nvidia-smi says it.
fn compute_mode(world: &World) -> String {
    smi(world, &["--query-gpu=compute_mode", "--format=csv,noheader"])
}

fn smi(world: &World, arguments: &[&str]) -> String {
    let program = world.driver_root.as_ref().expect("simulated").join("usr/bin/nvidia-smi");
    let output = std::process::Command::new(program).args(arguments).output().expect("nvidia-smi runs");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[test]
fn a_shared_server_has_the_gpu_to_itself_and_gives_the_mode_back() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    assert_eq!(compute_mode(&world), "Default");
    let bundle = world.bundle("one", &[("sublet.sm", "25")], HOLD);
    bundle.up();
    bundle.event("info");
    assert_eq!(compute_mode(&world), "Exclusive_Process");
    // Leaving MPS: without sublet's environment, and with an empty directory at CUDA's default place.
    let outside = ["/bin/env", "CUDA_MPS_PIPE_DIRECTORY=/nowhere", "/usr/bin/cuda-probe", "info"];
    let refused = bundle.exec(&outside);
    assert_ne!(refused.json()[0]["error"], serde_json::Value::Null, "{refused:?}");
    bundle.down();
    assert_eq!(compute_mode(&world), "Default");
    world.assert_empty();
}

#[test]
fn a_mode_that_was_ours_at_the_last_refresh_closes_nothing() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let shared = world.bundle("shared", &[("sublet.sm", "25")], HOLD);
    shared.up();
    assert!(world.sublet(&["refresh"]).status.success(), "it sees EXCLUSIVE_PROCESS");
    shared.down();
    assert_eq!(compute_mode(&world), "Default");
    let sliced = world.bundle("sliced", &[("sublet.mode", "time-slice")], HOLD);
    sliced.up();
    sliced.down();
    world.assert_empty();
}

#[test]
fn the_mode_found_comes_back_after_a_crash() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("one", &[("sublet.sm", "25")], HOLD);
    bundle.up();
    bundle.event("info");
    assert_eq!(compute_mode(&world), "Exclusive_Process");
    let daemon =
        world.status()["mps"][0]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).expect("pid");
    kill(Pid::from_raw(daemon), Signal::SIGKILL).expect("SIGKILL");
    // The engine is gone too: its runtime removed the container, and sublet was not informed.
    let mut command = std::process::Command::new(world.engine.program());
    let deleted = command.arg("--root").arg(world.runtime_root()).args(["delete", "--force", "one"]).status();
    assert!(deleted.expect("the runtime runs").success());
    // The container may end while the first command starts its daemon again. What that frees is cleared by the same command.
    assert!(eventually(|| world.leases().is_empty()));
    assert_eq!(compute_mode(&world), "Default");
    let ledger = std::fs::read(world.state_dir().join("ledger.json")).expect("the ledger");
    let ledger: serde_json::Value = serde_json::from_slice(&ledger).expect("the ledger is whole");
    assert_eq!(ledger["leftovers"], serde_json::Value::Null);
    world.assert_empty();
}

#[test]
fn exclusive_mode_is_off_beside_strangers_and_where_it_is_forbidden() {
    if skip_unless_root() {
        return;
    }
    let never = World::simulated("h200", "[mps]\nexclusive_compute_mode = \"never\"\n");
    let bundle = never.bundle("one", &[("sublet.sm", "25")], HOLD);
    bundle.up();
    assert_eq!(compute_mode(&never), "Default");
    bundle.down();

    let world = World::simulated("h200", "");
    let mut stranger = world.stranger();
    let bundle = world.bundle("one", &[("sublet.sm", "25")], HOLD);
    let created = bundle.create();
    assert!(created.ok, "{created:?}");
    assert_eq!(compute_mode(&world), "Default");
    assert!(created.stderr.contains(&format!("pid {}", stranger.id())), "the warning names it: {created:?}");
    bundle.down();
    stranger.kill().expect("SIGKILL");
    stranger.wait().expect("reaped");

    let always = World::simulated("h200", "[mps]\nexclusive_compute_mode = \"always\"\n");
    let mut stranger = always.stranger();
    let bundle = always.bundle("one", &[("sublet.sm", "25")], HOLD);
    let refused = bundle.create();
    assert!(!refused.ok && refused.stderr.contains("exclusive_compute_mode"), "{refused:?}");
    assert_eq!(compute_mode(&always), "Default");
    stranger.kill().expect("SIGKILL");
    stranger.wait().expect("reaped");
    always.assert_empty();
}

/// A list that NVML does not give is not an empty list, a GPU that does not report a display may have one, and the driver may
/// refuse the mode.
#[test]
fn exclusive_mode_is_off_where_nobody_can_tell_who_is_there_and_where_it_cannot_be_set() {
    if skip_unless_root() {
        return;
    }
    for (call, why) in [
        ("nvmlDeviceGetComputeRunningProcesses_v3", "who is on it"),
        ("nvmlDeviceGetDisplayActive", "whether it drives a display"),
        ("nvmlDeviceSetComputeMode", "an internal driver error occurred"),
    ] {
        for policy in ["auto", "always"] {
            let world = World::simulated("h200", &format!("[mps]\nexclusive_compute_mode = \"{policy}\"\n"));
            assert!(world.sublet(&["refresh"]).status.success());
            let fail = world.driver_root.as_ref().expect("simulated").join("sim/fail");
            std::fs::write(&fail, format!("{call} 0 999\n")).expect("written");
            let bundle = world.bundle("one", &[("sublet.sm", "25")], HOLD);
            let created = bundle.create();
            assert_eq!(created.ok, policy == "auto", "{created:?}");
            assert!(created.stderr.contains(why), "{call}, {policy}: {created:?}");
            assert_eq!(compute_mode(&world), "Default", "{call}, {policy}");
            std::fs::remove_file(&fail).expect("removed");
            bundle.down();
            world.assert_empty();
        }
    }
}

/// A daemon that is restarted reports containers that continued without it, or that this is not known.
#[test]
fn a_daemon_that_comes_back_says_what_cannot_be_told() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    // It lives on when its server ends.
    let bundle = world.bundle("one", &[("sublet.sm", "25")], &["/bin/sleep", "120"]);
    bundle.up();
    let key = world.status()["mps"][0]["key"].as_str().expect("a key").to_owned();
    let fail = world.driver_root.as_ref().expect("simulated").join("sim/fail");
    for (lines, said) in
        [("", ""), ("nvmlDeviceGetMPSComputeRunningProcesses_v3 0 999\n", "it is not known whether")]
    {
        for daemon in world.daemon_pids("") {
            // A server may have ended with its daemon.
            let _ = kill(daemon, Signal::SIGKILL);
        }
        std::fs::write(&fail, lines).expect("written");
        let started = world.sublet(&["mps", "start", &key]);
        let stderr = String::from_utf8_lossy(&started.stderr).into_owned();
        assert!(started.status.success() && stderr.contains(said), "{stderr}");
        assert_eq!(stderr.is_empty(), said.is_empty(), "{stderr}");
    }
    std::fs::remove_file(&fail).expect("removed");
    bundle.down();
    world.assert_empty();
}

#[test]
fn the_time_slice_of_a_device_is_set_at_refresh() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "[[device]]\nmatch = \"0\"\ntime_slice = \"long\"\n");
    assert!(smi(&world, &["compute-policy", "--list"]).ends_with("timeslice 0"));
    let refreshed = world.sublet(&["refresh"]);
    assert!(refreshed.status.success(), "{refreshed:?}");
    let listed = smi(&world, &["compute-policy", "--list"]);
    assert!(listed.ends_with("timeslice 3"), "{listed}");
}

#[test]
fn a_device_keeps_the_use_that_the_configuration_fixes() {
    if skip_unless_root() {
        return;
    }
    let rules = "[[device]]\nmatch = \"0\"\nname = \"alpha\"\nuse = \"mps\"\n[[device]]\nmatch = \"1\"\nuse = \"exclusive\"\n";
    let world = World::simulated("h200x8", rules);
    let named = world.bundle("named", &[("sublet.gpu", "name:alpha")], HOLD);
    named.up();
    assert_eq!(world.leases()[0]["mode"], "mps");
    let sliced = world.bundle("sliced", &[("sublet.gpu", "0"), ("sublet.mode", "time-slice")], HOLD);
    let refused = sliced.create();
    assert!(!refused.ok && refused.stderr.contains("mps"), "{refused:?}");
    let alone = world.bundle("alone", &[("sublet.gpu", "1")], HOLD);
    alone.up();
    assert!(world.leases().iter().any(|lease| lease["mode"] == "exclusive"));
    named.down();
    alone.down();
    world.assert_empty();
}
