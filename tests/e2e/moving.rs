//! `sublet move` and `drain --move`: a container goes on, on another GPU, with what it had, and has the node of that one alone; what
//! cannot be moved is refused before anything is locked; what fails goes back, and what is killed is put right. Eight H200s, whose
//! device minors are not their indices: GPU 0 has nvidia0, GPU 1 nvidia1, GPU 2 nvidia3.

use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::process::Output;

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use nix::sys::stat::major;
use serde_json::{Value, json};
use sublet_e2e::kept::OPEN_NODES;
use sublet_e2e::{Bundle, World, eventually, skip_unless_root};

use crate::suspend::{
    ALLOW, KEEP, assert_goes_on, assert_not_locked, done, fail, hanging_in, in_sim, kill_hanging, killed_in,
    kinds, refused, rounds, text,
};
use crate::two_users::{ALICE, serving};

/// UUID of the GPU with this index.
fn gpu(index: u32) -> String {
    format!("GPU-5b1e7000-0000-4000-8000-0000000008{index:02}")
}

fn on<'a>(world: &'a World, index: &str, id: &str, more: &[(&str, &str)], program: &[&str]) -> Bundle<'a> {
    let bundle = world.bundle(id, &[&[("sublet.gpu", index)], more].concat(), program);
    bundle.up();
    bundle.event("round");
    bundle
}

/// It computes, with what it had, on that GPU alone, and has no other's node.
fn assert_is_on(bundle: &Bundle<'_>, index: u32, minor: u32) {
    assert_goes_on(bundle);
    assert_eq!(rounds(bundle).last().expect("a round")["uuids"], json!([gpu(index)]), "{}", bundle.output());
    assert_eq!(nodes(bundle), format!("/dev/nvidia{minor}"));
    let leases = bundle.world.leases();
    let own: Vec<&Value> =
        leases.iter().filter(|lease| lease["container_id"] == bundle.id.as_str()).collect();
    assert_eq!(own.len(), 1, "{leases:?}");
    assert_eq!((&own[0]["device"], &own[0]["state"]), (&json!(gpu(index)), &json!("active")));
}

/// The GPUs' nodes that it may open.
fn nodes(bundle: &Bundle<'_>) -> String {
    said(bundle, OPEN_NODES)
}

fn listed(bundle: &Bundle<'_>, pattern: &str) -> String {
    said(bundle, &format!("echo {pattern}"))
}

fn said(bundle: &Bundle<'_>, script: &str) -> String {
    let listed = bundle.exec_file(&["/bin/sh", "-c", script], &["PATH=/bin:/usr/bin"]);
    assert!(listed.ok, "{listed:?}");
    listed.stdout.trim().to_owned()
}

#[test]
fn it_goes_on_there_with_its_data_and_the_other_gpus_node() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let kept = on(&world, "0", "kept", ALLOW, KEEP);
    assert_is_on(&kept, 0, 0);
    let config = kept.config();
    let said = done(&world, &["move", "kept", "--gpu", "2"]);
    assert!(said.starts_with("Moved kept: ") && said.contains("on the other GPU"), "{said}");
    assert_is_on(&kept, 2, 3);
    assert_eq!(kept.config(), config, "config.json stays as it is");
    let free = |index: usize| world.status()["devices"][index]["free"]["memory_bytes"].as_u64();
    assert!(free(0) == free(1) && free(2) < free(1), "{}", world.status());

    // Processes that join it.
    let info = kept.exec_file(&["/usr/bin/cuda-probe", "info"], &["PATH=/usr/bin"]).info();
    assert_eq!((&info["uuid"], &info["count"]), (&json!(gpu(2)), &json!(1)), "{info}");
    let environment =
        kept.exec_file(&["/bin/sh", "-c", "echo $SUBLET_DEVICES $CUDA_VISIBLE_DEVICES"], &["PATH=/bin"]);
    assert_eq!(environment.stdout.trim(), format!("{} 0", gpu(2)));
    let explained = done(&world, &["explain", "--container", "kept", "--format", "json"]);
    let explained: Value = serde_json::from_str(&explained).expect("JSON");
    let paths: Vec<&Value> =
        explained["nodes"].as_array().expect("nodes").iter().map(|node| &node["path"]).collect();
    assert!(paths.contains(&&json!("/dev/nvidia3")) && !paths.contains(&&json!("/dev/nvidia0")), "{paths:?}");
    let variables = explained["environment"].as_array().expect("variables");
    assert!(variables.contains(&json!(format!("SUBLET_DEVICES={}", gpu(2)))), "{variables:?}");
    // Its device cgroup is closed for the old one.
    let root = world.driver_root.as_ref().expect("simulated");
    let number = major(std::fs::metadata(root.join("dev/nvidia0")).expect("a node").rdev());
    let script = format!("mknod /dev/again c {number} 0; cuda-probe noderights /dev/again; rm -f /dev/again");
    let seen = kept.exec_file(&["/bin/sh", "-c", &script], &["PATH=/bin:/usr/bin"]);
    let node = seen.json().into_iter().find(|line| line["event"] == "node").expect("a node");
    assert!(["EPERM", "ENOENT"].contains(&node["result"].as_str().expect("a word")), "{node}");

    // The driver in it opens the old GPU's node at each later step, which is there for its time.
    done(&world, &["suspend", "kept"]);
    assert_eq!(nodes(&kept), "/dev/nvidia3");
    done(&world, &["resume", "kept"]);
    assert_is_on(&kept, 2, 3);
    done(&world, &["move", "kept", "--gpu", "1"]);
    assert_is_on(&kept, 1, 1);
    done(&world, &["move", "kept", "--gpu", &gpu(0)]);
    assert_is_on(&kept, 0, 0);
    assert_eq!(kinds(&world).iter().filter(|kind| **kind == "moved").count(), 3);
    assert!(done(&world, &["metrics"]).contains("sublet_last_move_seconds "));
    kept.down();
    world.assert_empty();
}

#[test]
fn its_nodes_for_graphics_are_those_of_the_new_gpu_alone() {
    if skip_unless_root() {
        return;
    }
    let topology = concat!(env!("CARGO_MANIFEST_DIR"), "/../sim/topologies/h200x8.toml");
    let topology = std::fs::read_to_string(topology).expect("a topology");
    let second = format!("uuid = \"{}\"\n", gpu(2));
    assert!(topology.contains(&second), "{topology}");
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("graphics.toml");
    std::fs::write(&file, topology.replace(&second, &format!("{second}dri = true\n"))).expect("written");
    let world = World::simulated(file.to_str().expect("UTF-8"), "");
    let graphics = [ALLOW, &[("sublet.capabilities", "compute,utility,graphics")]].concat();
    let kept = on(&world, "0", "kept", &graphics, KEEP);
    assert_eq!(listed(&kept, "/dev/dri/*"), "/dev/dri/card1 /dev/dri/renderD128");
    done(&world, &["move", "kept", "--gpu", "2"]);
    assert_is_on(&kept, 2, 3);
    assert_eq!(listed(&kept, "/dev/dri/*"), "/dev/dri/card4 /dev/dri/renderD131");
    done(&world, &["suspend", "kept"]);
    done(&world, &["resume", "kept"]);
    assert_eq!(listed(&kept, "/dev/dri/*"), "/dev/dri/card4 /dev/dri/renderD131");
    kept.down();
    world.assert_empty();
}

#[test]
fn a_container_that_cannot_be_moved_is_refused_before_anything_is_locked() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    std::fs::write(in_sim(&world, "trace"), "").expect("sim/trace");
    let kept = on(&world, "0", "kept", ALLOW, KEEP);
    let never = on(&world, "0", "never", &[("sublet.mode", "time-slice")], KEEP);
    let mps = on(&world, "3", "mps", &[("sublet.sm", "25")], KEEP);
    let large = [("sublet.gpu", "1"), ("sublet.mode", "time-slice"), ("sublet.memory", "130GiB")];
    let large = world.bundle("large", &large, &["/bin/sleep", "600"]);
    large.up();
    done(&world, &["drain", "4"]);
    for (id, to, reason, words) in [
        ("kept", "0", "cannot-move", "it is there"),
        ("kept", "1", "no-room", "left to book"),
        ("kept", "3", "no-room", "in use as mps"),
        ("kept", "4", "never-fits", "is drained"),
        ("kept", "9", "bad-usage", "no GPU 9"),
        ("kept", "all", "bad-usage", "several"),
        ("never", "2", "suspend-not-allowed", "sublet.suspend=allow"),
        ("mps", "2", "cannot-suspend", "MPS"),
    ] {
        let (found, why) = refused(&world, &["move", id, "--gpu", to]);
        assert!(found == reason && why.contains(words), "{id} to {to}: {found}: {why}");
    }
    assert_not_locked(&world);
    assert_is_on(&kept, 0, 0);
    for bundle in [kept, never, mps, large] {
        bundle.down();
    }
    world.assert_empty();

    let world = World::simulated("h200-h100", "");
    let kept = on(&world, "0", "kept", ALLOW, KEEP);
    let (reason, why) = refused(&world, &["move", "kept", "--gpu", "1"]);
    assert!(reason == "cannot-move" && why.contains("of one model"), "{reason}: {why}");
    assert_goes_on(&kept);
    kept.down();
    world.assert_empty();
}

#[test]
fn a_move_that_the_driver_refuses_goes_back() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let kept = on(&world, "0", "kept", ALLOW, KEEP);
    for call in ["Checkpoint 1 801", "Restore 1 1"] {
        fail(&world, &format!("cuCheckpointProcess{call}\n"));
        assert_eq!(refused(&world, &["move", "kept", "--gpu", "2"]).0, "suspend-undone", "{call}");
        assert_is_on(&kept, 0, 0);
    }
    // Something else lies where the node is to be.
    let occupied = kept.exec_file(&["/bin/sh", "-c", "echo > /dev/nvidia3"], &["PATH=/bin"]);
    assert!(occupied.ok, "{occupied:?}");
    let (reason, why) = refused(&world, &["move", "kept", "--gpu", "2"]);
    assert!(reason == "suspend-undone" && why.contains("something else at /dev/nvidia3"), "{reason}: {why}");
    assert_goes_on(&kept);
    kept.down();

    // Of two processes the first is there already, and comes back.
    let both = "cuda-probe hold 600 & exec cuda-probe keep 1024 600";
    let both = on(&world, "0", "both", &[("sublet.suspend", "allow-many")], &["/bin/sh", "-c", both]);
    assert!(eventually(|| world.status()["leases"][0]["used"]["processes"] == 2));
    fail(&world, "cuCheckpointProcessRestore 2 1\n");
    assert_eq!(refused(&world, &["move", "both", "--gpu", "2"]).0, "suspend-undone");
    assert_is_on(&both, 0, 0);
    assert_eq!(world.status()["leases"][0]["used"]["processes"], 2);
    done(&world, &["move", "both", "--gpu", "2"]);
    assert_is_on(&both, 2, 3);
    done(&world, &["suspend", "both"]);
    fail(&world, "cuCheckpointProcessRestore 2 1\n");
    // The next command brings the second there, too.
    assert_eq!(refused(&world, &["resume", "both", "--gpu", "1"]).0, "suspend-stuck");
    assert_eq!(world.status()["leases"][0]["state"], "active");
    assert_is_on(&both, 1, 1);
    assert_eq!(world.status()["leases"][0]["used"]["processes"], 2);
    both.down();
    world.assert_empty();
}

#[test]
fn one_that_can_open_every_gpu_moves_and_comes_back_where_it_is() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "[limits]\nallow_privileged = true\n");
    let mut open = world.bundle("open", &[&[("sublet.gpu", "0")], ALLOW].concat(), KEEP);
    let rules = open.spec["linux"]["resources"]["devices"].as_array_mut().expect("rules");
    rules.push(json!({"allow": true, "access": "rwm"}));
    open.up();
    open.event("round");
    done(&world, &["move", "open", "--gpu", "2"]);
    done(&world, &["suspend", "open"]);
    done(&world, &["resume", "open"]);
    assert_goes_on(&open);
    assert_eq!(rounds(&open).last().expect("a round")["uuids"], json!([gpu(2)]), "{}", open.output());
    open.down();
    world.assert_empty();
}

#[test]
fn a_move_that_is_killed_at_any_step_is_put_right_by_the_next_command() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let kept = on(&world, "0", "kept", ALLOW, KEEP);
    for call in ["Lock", "Checkpoint", "Restore"] {
        killed_in(&world, &format!("cuCheckpointProcess{call}"), &["move", "kept", "--gpu", "2"]);
        done(&world, &["gc"]);
        assert_is_on(&kept, 0, 0);
    }
    // Its state is on the other GPU already.
    killed_in(&world, "cuCheckpointProcessUnlock", &["move", "kept", "--gpu", "2"]);
    done(&world, &["gc"]);
    assert_is_on(&kept, 2, 3);
    done(&world, &["suspend", "kept"]);
    killed_in(&world, "cuCheckpointProcessRestore", &["resume", "kept", "--gpu", "1"]);
    done(&world, &["gc"]);
    assert_is_on(&kept, 1, 1);
    kept.down();
    world.assert_empty();
}

#[test]
fn a_move_that_is_killed_while_its_nodes_are_changed_is_put_right_by_the_next_command() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let kept = on(&world, "0", "kept", ALLOW, KEEP);
    // `sublet nodes` waits for whoever has this byte of the file: that of the container's first process.
    let file = world.state_dir().join("suspend.lock");
    let lock = std::fs::File::options().write(true).create(true).truncate(false).mode(0o600).open(file);
    let lock = lock.expect("suspend.lock");
    let range = libc::flock {
        l_type: i16::try_from(libc::F_WRLCK).expect("a type"),
        l_whence: i16::try_from(libc::SEEK_SET).expect("a word"),
        l_start: world.leases()[0]["pid"].as_i64().expect("a pid"),
        l_len: 1,
        l_pid: 0,
    };
    fcntl(&lock, FcntlArg::F_OFD_SETLK(&range)).expect("a lock");
    let mut moves = world.command("sublet");
    let moves = moves.args(["move", "kept", "--gpu", "2"]).process_group(0).spawn().expect("sublet runs");
    let waits = || std::fs::read_to_string("/proc/locks").expect("/proc/locks").contains("-> OFDLCK");
    assert!(eventually(waits), "nothing waits");
    kill_hanging(moves);
    drop(lock);
    done(&world, &["gc"]);
    assert_is_on(&kept, 0, 0);
    done(&world, &["move", "kept", "--gpu", "2"]);
    assert_is_on(&kept, 2, 3);
    kept.down();
    world.assert_empty();
}

#[test]
fn who_computes_on_a_gpu_that_it_has_for_the_time_of_a_step_is_ended() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200x8");
    let world = &host.world;
    let kept = on(world, "0", "kept", ALLOW, KEEP);
    done(world, &["move", "kept", "--gpu", "2"]);
    let suspends = hanging_in(world, "cuCheckpointProcessCheckpoint", &["suspend", "kept"]);
    assert_eq!(nodes(&kept), "/dev/nvidia0 /dev/nvidia3");
    let script = format!("CUDA_VISIBLE_DEVICES={} exec cuda-probe hold 60", gpu(0));
    let other = kept.exec_file(&["/bin/sh", "-c", &script], &["PATH=/bin:/usr/bin"]);
    assert!(!other.ok, "it was not ended: {other:?}");
    assert!(eventually(|| host.event("elsewhere").is_some()), "it is an event");
    let event = host.event("elsewhere").expect("an event");
    assert_eq!((&event["action"], &event["container_id"]), (&json!("terminate"), &json!("kept")));
    kill_hanging(suspends);
    done(world, &["gc"]);
    assert_is_on(&kept, 2, 3);
    kept.down();
    world.assert_empty();
}

#[test]
fn a_suspended_container_comes_back_on_another_gpu() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let kept = on(&world, "2", "kept", ALLOW, KEEP);
    done(&world, &["suspend", "kept"]);
    let large = [("sublet.gpu", "2"), ("sublet.mode", "time-slice"), ("sublet.memory", "130GiB")];
    let large = world.bundle("large", &large, &["/bin/sleep", "600"]);
    large.up();
    assert_eq!(refused(&world, &["resume", "kept"]).0, "no-room");
    assert_eq!(refused(&world, &["move", "kept", "--gpu", "1"]).0, "suspended");
    // The driver refuses, and it stays where it was, which has no room for it.
    fail(&world, "cuCheckpointProcessRestore 1 1\n");
    assert_eq!(refused(&world, &["resume", "kept", "--gpu", "1"]).0, "no-room");
    assert_eq!(world.leases().iter().filter(|lease| lease["state"] == "suspended").count(), 1);
    done(&world, &["resume", "kept", "--gpu", "1"]);
    assert_is_on(&kept, 1, 1);
    large.down();
    // Where it has not come to, the driver does not count with: it comes back where it was.
    done(&world, &["suspend", "kept"]);
    fail(&world, "cuCheckpointProcessRestore 1 1\n");
    assert_eq!(refused(&world, &["resume", "kept", "--gpu", "0"]).0, "no-room");
    done(&world, &["resume", "kept"]);
    assert_is_on(&kept, 1, 1);
    kept.down();
    world.assert_empty();
}

#[test]
fn a_drained_gpus_containers_are_moved_and_those_that_stay_are_named() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let first = on(&world, "0", "first", ALLOW, KEEP);
    let never = on(&world, "0", "never", &[("sublet.mode", "time-slice")], KEEP);
    let second = on(&world, "0", "second", ALLOW, KEEP);
    let output: Output = world.sublet(&["drain", "0", "--move", "--reason", "its fan", "--until", "2h"]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for words in
        ["Moved first to GPU ", "Moved second to GPU ", "container never stays: ", "1 of 3 containers"]
    {
        assert!(said.contains(words), "{words}: {said}");
    }
    let status: Value = serde_json::from_str(&done(&world, &["status", "--format", "json"])).expect("JSON");
    assert!(status["devices"][0]["drain"].as_str().expect("drained").contains("its fan"), "{status:#}");
    assert_goes_on(&never);
    for moved in [&first, &second] {
        assert_goes_on(moved);
        assert_ne!(rounds(moved).last().expect("a round")["uuids"], json!([gpu(0)]));
    }
    never.down();
    done(&world, &["drain", "0", "--move"]);
    // One that is suspended is named, and stays so.
    let out = on(&world, "1", "out", ALLOW, KEEP);
    done(&world, &["suspend", "out"]);
    let said = text(&world.sublet(&["drain", "1", "--move"]));
    assert!(said.contains("container out stays: it is suspended"), "{said}");
    assert!(out.kill("KILL").ok);
    out.down();
    first.down();
    second.down();
    world.assert_empty();
}

#[test]
fn a_user_moves_their_own_container_to_the_gpus_that_the_policy_allows() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200x8");
    let config = std::fs::read_to_string(&host.world.config).expect("config.toml");
    let limits = "[[policy]]\nuser = 1000\nmodes = [\"mps\"]\nsm = 50\nmemory = \"16GiB\"\n";
    assert!(config.contains(limits), "{config}");
    let allow = "[[policy]]\nuser = 1000\nsuspend = true\ndevices = [\"0\", \"2\"]\n";
    std::fs::write(&host.world.config, config.replacen(limits, allow, 1)).expect("config.toml");
    let bundle = host.bundle(ALICE, "mine", &[("sublet.suspend", "allow"), ("sublet.gpu", "0")], KEEP);
    bundle.up();
    bundle.event("round");
    // With cgroup v1 it may be that of every user.
    let device_cgroup = || {
        let table = std::fs::read_to_string(format!("/proc/{}/cgroup", bundle.pid())).expect("its cgroups");
        let (_, path) = table.lines().find_map(|line| line.split_once(":devices:"))?;
        std::fs::read_to_string(format!("/sys/fs/cgroup/devices{path}/devices.list")).ok()
    };
    let before = device_cgroup();
    let by_alice =
        |arguments: &[&str]| host.command(ALICE, "sublet").args(arguments).output().expect("it runs");
    let output = by_alice(&["move", "mine", "--gpu", "1"]);
    assert!(
        !output.status.success() && text(&output).contains("policy does not allow GPU 1"),
        "{}",
        text(&output)
    );
    let output = by_alice(&["move", "mine", "--gpu", "2"]);
    assert!(output.status.success(), "{}", text(&output));
    let lease = &host.leases()[0];
    assert_eq!((&lease["device"], &lease["state"]), (&json!(gpu(2)), &json!("active")));
    let dev = std::fs::read_dir(format!("/proc/{}/root/dev", lease["pid"])).expect("its /dev");
    let names = dev.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let nodes: Vec<String> =
        names.filter(|name| name.starts_with("nvidia") && name.ends_with(char::is_numeric)).collect();
    assert_eq!(nodes, ["nvidia3"]);
    assert_eq!(device_cgroup(), before);
    let output = || std::fs::read_to_string(bundle.dir.join("create.out")).unwrap_or_default();
    assert!(eventually(|| output().contains(&gpu(2))), "{}", output());
    bundle.down();
    host.world.assert_empty();
}
