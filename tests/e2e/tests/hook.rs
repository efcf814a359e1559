//! The hook by itself, fed as Podman and the runtimes feed it: what it makes of a spec, and of bad input.

use std::fs::Permissions;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Stdio;

use serde_json::{Value, json};
use sublet_e2e::{Bundle, Finished, World, skip_unless_root};

const ID: &str = "452325ed5f7f35588a551450be5d67fde0f40a94317f3f8f8a275a3aebf20f2a";

/// Runs a stage with `input`; a hook gets an environment of its own.
fn hook(world: &World, stage: &str, input: &[u8], uid: Option<u32>) -> Finished {
    let mut command = world.command("sublet-hook");
    if uid.is_some() {
        // Another user may not reach the directory that this was built in.
        command = world.command(&reachable(world, "sublet-hook"));
    }
    command.arg(stage).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    if let Some(uid) = uid {
        command.uid(uid);
    }
    let mut child = command.spawn().expect("sublet-hook runs");
    let mut stdin = child.stdin.take().expect("piped");
    let input = input.to_vec();
    // It may stop reading before the end.
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output().expect("it ends");
    let _ = writer.join().expect("no panic");
    Finished::of(&output)
}

/// A copy of one of our programs that every user may run; absolute, so it is taken as it is.
fn reachable(world: &World, program: &str) -> String {
    let open = |path: &Path| std::fs::set_permissions(path, Permissions::from_mode(0o755)).expect("chmod");
    let copy = world.dir.path().join(program);
    std::fs::copy(sublet_e2e::bin_dir().join(program), &copy).expect("it is copied");
    open(world.dir.path());
    open(&copy);
    copy.to_string_lossy().into_owned()
}

/// A bundle's spec as Podman hands it over: an absolute rootfs, the id in the name of the cgroup.
fn podmans(bundle: &Bundle<'_>) -> Value {
    let mut spec = bundle.spec.clone();
    spec["root"]["path"] = json!(bundle.dir.join("rootfs"));
    spec["linux"]["cgroupsPath"] = json!(format!("/libpod_parent/libpod-{ID}"));
    spec
}

fn precreate(world: &World, spec: &Value) -> Value {
    let done = hook(world, "precreate", &serde_json::to_vec(spec).expect("JSON"), None);
    assert!(done.ok, "{done:?}");
    serde_json::from_str(&done.stdout).expect("a spec")
}

/// What the container is refused with.
fn refusal(spec: &Value) -> &str {
    spec["hooks"]["createRuntime"][0]["path"].as_str().unwrap_or_default()
}

#[test]
fn what_is_none_of_ours_or_done_already_comes_back_byte_for_byte() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let text = br#" {"annotations": {"org.example": "sublet.x"},  "x": 1.5, "a":[]} "#;
    let plain = hook(&world, "precreate", text, None);
    assert!(plain.ok, "{plain:?}");
    assert_eq!(plain.stdout.as_bytes(), text);
    let bundle = world.bundle("twice", &[("sublet.sm", "25")], &["/bin/true"]);
    let once = precreate(&world, &podmans(&bundle));
    assert_eq!(precreate(&world, &once), once, "a second hook changes nothing");
    assert_eq!(world.leases().len(), 1);
    // The same lease in another container's spec is no lease of that one.
    let mut stolen = once.clone();
    stolen["linux"]["cgroupsPath"] = json!(format!("/libpod-{}", ID.replace('4', "5")));
    assert!(refusal(&precreate(&world, &stolen)).contains("no live lease of this container"));
    // A later start of the same container by the same engine gives the first up.
    let again = precreate(&world, &podmans(&bundle));
    assert_ne!(again["annotations"]["sublet.lease"], once["annotations"]["sublet.lease"]);
    assert_eq!(world.leases().len(), 1);
}

#[test]
fn rootless_precreate_without_the_service_is_refused_with_what_to_do() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("rootless", &[("sublet.sm", "25")], &["/bin/true"]);
    let text = serde_json::to_vec(&podmans(&bundle)).expect("JSON");
    let done = hook(&world, "precreate", &text, Some(1000));
    let spec: Value = serde_json::from_str(&done.stdout).expect("a spec");
    let what_to_do = "systemctl enable --now sublet.socket";
    assert!(refusal(&spec).contains("sublet serve is not running"), "{done:?}");
    assert!(refusal(&spec).contains(what_to_do), "{done:?}");
    assert_eq!(spec["annotations"], bundle.spec["annotations"]);
    // Its other containers start as before.
    let plain = hook(&world, "precreate", b"{\"annotations\":{}}", Some(1000));
    assert_eq!((plain.ok, plain.stdout.as_str()), (true, "{\"annotations\":{}}"));
}

#[test]
fn bad_input_is_an_error_and_leaves_nothing_half_done() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("bad", &[("sublet.sm", "25")], &["/bin/true"]);
    let spec = serde_json::to_vec(&podmans(&bundle)).expect("JSON");
    let huge = vec![b' '; 17 << 20];
    let twice = br#"{"annotations":{"sublet.sm":"25","sublet.sm":"50"}}"#;
    let inputs: [&[u8]; 7] = [b"", b"\n", &spec[..spec.len() - 1], b"[]x", &huge, twice, b"{\"a\":\xff}"];
    for input in inputs {
        let failed = hook(&world, "precreate", input, None);
        assert!(!failed.ok && failed.stdout.is_empty(), "{failed:?}");
        assert_eq!(failed.stderr.lines().count(), 1, "{failed:?}");
    }
    // A spec that can be read is refused with the reason, whatever else is wrong with it.
    for (pointer, value, word) in [
        ("/root/path", json!("rootfs"), "root.path"),
        ("/annotations/sublet.sm", json!(25), "annotations.*"),
        ("/annotations/sublet.sm", json!("2\u{1b}[2J"), "sublet.sm"),
        ("/process", json!(null), "process"),
    ] {
        let mut spec = podmans(&bundle);
        *spec.pointer_mut(pointer).expect(pointer) = value;
        let refused = precreate(&world, &spec);
        assert!(refusal(&refused).contains(word), "{pointer}: {refused}");
        assert!(!refusal(&refused).contains('\u{1b}'));
    }
    assert_eq!(world.leases(), Vec::<Value>::new());
    // Where the name of the cgroup has no id, the root filesystem tells which container it was.
    let mut unnamed = podmans(&bundle);
    unnamed["linux"]["cgroupsPath"] = json!("/user.slice");
    unnamed["annotations"]["sublet.sm"] = json!("250");
    assert!(refusal(&precreate(&world, &unnamed)).contains("sublet.sm=250"));
    let last = world.sublet(&["status", "--last-error"]);
    let name = format!("  container {}: ", bundle.dir.join("rootfs").display());
    assert!(String::from_utf8_lossy(&last.stdout).contains(&name), "{name} is not in {last:?}");
}

#[test]
fn a_lease_is_bound_to_a_live_process_or_not_at_all() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("bind", &[("sublet.sm", "25")], &["/bin/true"]);
    let granted = precreate(&world, &podmans(&bundle));
    let lease = granted["annotations"]["sublet.lease"].as_str().expect("a lease");
    let state = |id: &str, status: &str, pid: Value, lease: &str| {
        let state = json!({"ociVersion": "1.0.2", "id": id, "status": status, "pid": pid,
            "bundle": bundle.dir, "annotations": {"sublet.lease": lease}});
        serde_json::to_vec(&state).expect("JSON")
    };
    let live = json!(std::process::id());
    let good = state(ID, "creating", live.clone(), lease);
    let huge = vec![b' '; 2 << 20];
    let inputs: [&[u8]; 10] = [
        b"",
        &good[..good.len() - 1],
        &huge,
        &state(ID, "thinking", live.clone(), lease),
        &state(ID, "creating", Value::Null, lease),
        &state(ID, "creating", json!(0), lease),
        &state(ID, "creating", json!(-1), lease),
        &state(ID, "creating", json!(0x7fff_fff0), lease),
        &state("another", "creating", live.clone(), lease),
        &state(ID, "creating", live.clone(), "0123456789abcdef"),
    ];
    for input in inputs {
        let failed = hook(&world, "createRuntime", input, None);
        assert!(!failed.ok, "{}: {failed:?}", String::from_utf8_lossy(&input[..input.len().min(200)]));
        assert_eq!(failed.stderr.lines().count(), 1, "{failed:?}");
        assert_eq!(world.leases()[0]["state"], "pending");
    }
    for _ in 0..2 {
        let bound = hook(&world, "createRuntime", &good, None);
        assert!(bound.ok, "{bound:?}");
        let leases = world.leases();
        assert_eq!((leases.len(), &leases[0]["state"], &leases[0]["pid"]), (1, &json!("active"), &live));
    }
}

#[test]
fn poststop_frees_what_it_names_and_nothing_else() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("stop", &[("sublet.sm", "25")], &["/bin/true"]);
    let granted = precreate(&world, &podmans(&bundle));
    let lease = granted["annotations"]["sublet.lease"].as_str().expect("a lease");
    let state = |status: &str, lease: &str| {
        let annotations = json!({"sublet.sm": "25", "sublet.lease": lease});
        let state = json!({"id": ID, "status": status, "bundle": bundle.dir, "annotations": annotations});
        serde_json::to_vec(&state).expect("JSON")
    };
    let good = state("stopped", lease);
    let huge = vec![b' '; 2 << 20];
    let inputs: [&[u8]; 6] = [
        b"",
        b"[]",
        &good[..good.len() - 1],
        &huge,
        &state("thinking", lease),
        &state("stopped", "../x\u{1b}"),
    ];
    for input in inputs {
        let failed = hook(&world, "poststop", input, None);
        assert!(!failed.ok, "{}: {failed:?}", String::from_utf8_lossy(&input[..input.len().min(200)]));
        assert_eq!(failed.stderr.lines().count(), 1, "{failed:?}");
        assert!(!failed.stderr.contains('\u{1b}'));
        assert_eq!(world.leases().len(), 1);
    }
    // The end of another container, one with a lease that nobody has, one that is not ours.
    let unannotated = json!({"id": ID, "status": "stopped", "bundle": bundle.dir});
    for input in [state("stopped", "0123456789abcdef"), unannotated.to_string().into_bytes()] {
        assert!(hook(&world, "poststop", &input, None).ok);
        assert_eq!(world.leases().len(), 1);
    }
    // Twice is no error, and the pid is none any more.
    for _ in 0..2 {
        let freed = hook(&world, "poststop", &good, None);
        assert!(freed.ok, "{freed:?}");
        world.assert_empty();
    }
    for stage in ["", "poststart", "createContainer", "../prestart"] {
        let unknown = hook(&world, stage, &good, None);
        assert!(!unknown.ok && unknown.stderr.contains("no stage"), "{unknown:?}");
    }
}
