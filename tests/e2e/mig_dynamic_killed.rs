//! `[mig] dynamic` when something fails or is killed, and when other programs create instances too.

use std::process::Stdio;
use std::time::Duration;

use nix::unistd::Pid;
use serde_json::{Value, json};
use sublet_e2e::mig::{
    By, SLEEP, assert_nothing_made, bare, created, devices, fail, gc, ledger, listed, process_on, refused,
    shape, smi, up,
};
use sublet_e2e::{World, eventually, skip_unless_root};

const DYNAMIC: &str = "[mig]\ndynamic = true\n";
/// An H200 in MIG mode with nothing in it.
const HOPPER: &str = "h200-mig";
const GPU: &str = "GPU-5b1e7000-0000-4000-8000-000000000120";
const SMALL: &[(&str, &str)] = &[("sublet.mig", "1g.18gb")];

fn world(topology: &str) -> World {
    World::simulated(topology, DYNAMIC)
}

#[test]
fn whatever_call_fails_the_state_found_comes_back() {
    if skip_unless_root() {
        return;
    }
    let world = world(HOPPER);
    let _ = world.sublet(&["refresh"]);
    for function in [
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "nvmlGpuInstanceCreateComputeInstance",
        "nvmlGpuInstanceGetInfo",
        "nvmlDeviceGetGpuInstanceById",
        "nvmlGpuInstanceGetComputeInstances",
        "nvmlGpuInstanceGetComputeInstanceProfileInfo",
    ] {
        for after in ["", " done"] {
            fail(&world, &format!("{function} 1 999{after}"));
            let error = refused(&world, SMALL);
            assert!(error.contains("a 1g.18gb at 6:1 cannot be created: "), "{function}{after}: {error}");
            assert!(!error.contains("still there"), "{function}{after}: {error}");
            assert_nothing_made(&world);
        }
    }
    fail(&world, "");
    up(&world, "one", SMALL).down();
    assert_nothing_made(&world);
    world.assert_empty();
}

/// Calls `sublet mig make` as an entry point does that is gone by then, or that lives.
fn make(world: &World, owner: &Value) -> bool {
    let order = json!({"sites": [{"gpu": GPU, "memory_bytes": 0, "sms": 0}], "profile": "1g.18gb"});
    let awaited = json!({"lease": "00000000000000aa", "container": "c", "owner": owner});
    let mut command = world.command("sublet");
    let mut child = command
        .args(["mig", "make"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("sublet runs");
    let ask = json!({"order": order, "awaited": awaited}).to_string();
    std::io::Write::write_all(&mut child.stdin.take().expect("piped"), ask.as_bytes()).expect("it reads");
    child.wait().expect("it ends").success()
}

#[test]
fn killed_at_any_call_it_leaves_nothing_to_the_next_command() {
    if skip_unless_root() {
        return;
    }
    let world = world(HOPPER);
    let _ = world.sublet(&["refresh"]);
    let dead = json!({"pid": 1, "start_time": 1});
    let mut killed = 0;
    for (function, most) in [
        ("nvmlDeviceCreateGpuInstanceWithPlacement", 1),
        ("nvmlGpuInstanceCreateComputeInstance", 1),
        ("nvmlGpuInstanceGetInfo", 2),
        ("nvmlDeviceGetGpuInstances", 3),
        ("nvmlDeviceGetMigDeviceHandleByIndex", 2),
        // No entry point waits any more, so the instance is destroyed at once.
        ("nvmlComputeInstanceDestroy", 1),
        ("nvmlGpuInstanceDestroy", 1),
    ] {
        for (call, after) in (1..=most).flat_map(|call| [(call, ""), (call, " done")]) {
            fail(&world, &format!("{function} {call} kill{after}"));
            killed += usize::from(!make(&world, &dead));
            fail(&world, "");
            let _ = gc(&world);
            assert_nothing_made(&world);
        }
    }
    assert!(killed > 15, "{killed}");
    assert!(make(&world, &dead), "undisturbed");
    assert_nothing_made(&world);
    world.assert_empty();
}

#[test]
fn a_entry_point_that_is_killed_leaves_nothing_to_the_next_command() {
    if skip_unless_root() {
        return;
    }
    let world = world(HOPPER);
    let helpers = || sublet_e2e::killing::helpers(&world).len();
    for step in 0..7 {
        let bundle = world.bundle("victim", SMALL, SLEEP);
        bundle.write();
        let mut command = bundle.runtime();
        command.arg("create").arg("--bundle").arg(&bundle.dir).arg("victim");
        let mut entry_point = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it runs");
        // Somewhere between its start and its end.
        std::thread::sleep(Duration::from_millis(60 * step));
        entry_point.kill().expect("SIGKILL");
        entry_point.wait().expect("it is ours");
        // What it has called ends by itself, and cannot harm the next command.
        if step % 2 == 0 {
            assert!(eventually(|| helpers() == 0), "a helper stays");
        }
        let _ = bundle.runtime().args(["delete", "--force", "victim"]).output();
        let _ = gc(&world);
        assert!(eventually(|| helpers() == 0), "a helper stays");
        assert_nothing_made(&world);
    }
    world.assert_empty();
}

#[test]
fn a_delete_whose_helper_is_killed_leaves_the_rest_to_the_next_command() {
    if skip_unless_root() {
        return;
    }
    let world = world(HOPPER);
    for line in [
        "nvmlComputeInstanceDestroy 1 kill",
        "nvmlComputeInstanceDestroy 1 kill done",
        "nvmlGpuInstanceDestroy 1 kill",
    ] {
        let one = up(&world, "one", SMALL);
        fail(&world, line);
        one.down();
        fail(&world, "");
        assert_eq!(bare(&world).len(), 1, "{line}");
        let _ = gc(&world);
        assert_nothing_made(&world);
    }
    // The container itself is killed, and sublet is not informed: the next container gets its place.
    let victim = created(&world, "victim", By::Shim, &[("sublet.mig", "7g.141gb")], SLEEP);
    sublet_e2e::killing::end(&[Pid::from_raw(victim.pid())]);
    let next = up(&world, "next", SMALL);
    assert_eq!(shape(&listed(&world, 0)), "1g.18gb@6");
    next.down();
    victim.down();
    assert_nothing_made(&world);
    world.assert_empty();
}

/// As when several end at once, and one that frees another's lease too comes too late to see its instance.
#[test]
fn a_delete_destroys_what_another_command_has_freed_and_not_destroyed_yet() {
    if skip_unless_root() {
        return;
    }
    let world = world(HOPPER);
    let one = up(&world, "one", SMALL);
    assert!(one.kill("KILL").ok);
    let mut freed = ledger(&world);
    freed["leases"].as_array_mut().expect("leases").pop().expect("one");
    std::fs::write(world.state_dir().join("ledger.json"), freed.to_string()).expect("ledger.json");
    assert_eq!(bare(&world).len(), 1);
    assert!(eventually(|| one.delete().ok), "its first process has ended");
    assert_nothing_made(&world);
    world.assert_empty();
}

#[test]
fn one_that_is_in_use_is_tried_again_and_said() {
    if skip_unless_root() {
        return;
    }
    let world = world(HOPPER);
    let one = created(&world, "one", By::Shim, SMALL, SLEEP);
    let uuid = devices(&world).remove(0);
    let mut stranger = process_on(&world, &uuid);
    one.down();
    assert_eq!(bare(&world).len(), 1);
    let status = String::from_utf8_lossy(&world.sublet(&["status"]).stdout).into_owned();
    let line = format!(
        "MIG instance 1g.18gb at 6:1 of GPU {GPU} was created for a container that has ended, and cannot \
         be destroyed yet: "
    );
    assert!(status.contains(&line), "{status}");
    assert_eq!(world.status()["mig_made"][0]["state"], "going");
    let none = refused(&world, &[("sublet.gpu", &uuid)]);
    assert!(none.contains("is being destroyed"), "{none}");
    // It does not block others: the next instance is created beside it.
    up(&world, "next", SMALL).down();
    stranger.kill().expect("SIGKILL");
    stranger.wait().expect("it is reaped");
    let _ = gc(&world);
    assert_nothing_made(&world);
    world.assert_empty();
}

#[test]
fn what_others_made_is_never_destroyed() {
    if skip_unless_root() {
        return;
    }
    let world = world(HOPPER);
    let by_hand = |arguments: &[&str]| smi(&world, &[&["mig", "-i", "0"], arguments].concat());
    // The recorded instance was destroyed by hand and created again: same place, same ids.
    let one = created(&world, "one", By::Shim, SMALL, SLEEP);
    let made = listed(&world, 0);
    let gi = made["instances"][0]["gi"].to_string();
    let _ = by_hand(&["-dci", "-gi", &gi, "-ci", "0"]);
    let _ = by_hand(&["-dgi", "-gi", &gi]);
    let _ = by_hand(&["-cgi", "1g.18gb:6", "-C"]);
    let theirs = listed(&world, 0);
    assert_eq!(shape(&theirs), "1g.18gb@6");
    one.down();
    let _ = gc(&world);
    assert_eq!(listed(&world, 0)["instances"], theirs["instances"]);
    // It serves as any other does, and stays.
    let next = up(&world, "next", SMALL);
    assert_eq!(bare(&world).len(), 1);
    next.down();
    assert_eq!(listed(&world, 0)["instances"], theirs["instances"]);
    assert_eq!(ledger(&world)["mig"]["dynamic_instances"], Value::Null);
    // The same, caught before they have made its compute instance.
    let two = created(&world, "two", By::Shim, &[("sublet.mig", "2g.35gb")], SLEEP);
    assert_eq!(shape(&listed(&world, 0)), "2g.35gb@4 1g.18gb@6");
    let gi = listed(&world, 0)["instances"][0]["gi"].to_string();
    let _ = by_hand(&["-dci", "-gi", &gi, "-ci", "0"]);
    let _ = by_hand(&["-dgi", "-gi", &gi]);
    let _ = by_hand(&["-cgi", "2g.35gb:4"]);
    let theirs = listed(&world, 0);
    assert_eq!(theirs["instances"][0]["gi"].to_string(), gi);
    two.down();
    let _ = gc(&world);
    assert_eq!(listed(&world, 0)["instances"], theirs["instances"]);
    assert_eq!(ledger(&world)["mig"]["dynamic_instances"], Value::Null);
    let _ = by_hand(&["-dgi", "-gi", &gi]);
    // Another program's compute instance keeps the GPU instance that sublet created.
    let half = created(&world, "half", By::Shim, &[("sublet.mig", "1c.2g.35gb")], SLEEP);
    let gi = listed(&world, 0)["instances"][0]["gi"].to_string();
    let _ = by_hand(&["-cci", "0", "-gi", &gi]);
    half.down();
    assert_eq!(shape(&listed(&world, 0)), "2g.35gb@4[1c] 1g.18gb@6");
    assert_eq!(ledger(&world)["mig"]["dynamic_instances"], Value::Null);
    world.assert_empty();
}
