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

/// Takes out what differs from one start to the next: the lease.
fn without_lease(spec: &mut Value) -> (Value, Value) {
    let annotations = spec["annotations"].as_object_mut().expect("annotations");
    let lease = annotations.remove("sublet.lease").unwrap_or_default();
    (lease, annotations.remove("sublet.lease.record").unwrap_or_default())
}

/// What the container is refused with.
fn refusal(spec: &Value) -> &str {
    spec["hooks"]["createRuntime"][0]["path"].as_str().unwrap_or_default()
}

#[test]
fn the_hooks_edits_are_the_shims() {
    if skip_unless_root() {
        return;
    }
    let requests: [&[(&str, &str)]; 8] = [
        &[("sublet.gpu", "0")],
        &[("sublet.sm", "25"), ("sublet.memory", "8GiB")],
        &[("sublet.mode", "time-slice")],
        &[("sublet.sm", "12.5"), ("sublet.processes", "2"), ("sublet.memory", "25%")],
        &[("sublet.mode", "exclusive"), ("sublet.gpu", "any:2")],
        &[("sublet.gpu", "2"), ("sublet.capabilities", "all"), ("sublet.mode", "exclusive")],
        &[("sublet.share", "small")],
        &[("sublet.priority", "low"), ("sublet.gpu", "1")],
    ];
    let world = World::simulated("h200x8", "[share.small]\nsm = \"10\"\nmemory = \"4GiB\"\n");
    let config = std::fs::read_to_string(&world.config).expect("config.toml");
    let no_runtime: String = config
        .lines()
        .map(|line| {
            if line.starts_with("low_level") {
                "low_level = [\"/bin/true\"]\n".into()
            } else {
                format!("{line}\n")
            }
        })
        .collect();
    std::fs::write(&world.config, no_runtime).expect("config.toml is written");
    for (number, request) in requests.iter().enumerate() {
        let mut bundle = world.bundle(&format!("table-{number}"), request, &["/bin/true"]);
        bundle.spec = podmans(&bundle);
        let created = bundle.create();
        assert!(created.ok, "{request:?}: {created:?}");
        let mut by_shim = bundle.config();
        assert_eq!(world.leases(), Vec::<Value>::new(), "the runtime ended without a container");
        let mut by_hook = precreate(&world, &bundle.spec);
        let (shims, hooks) = (without_lease(&mut by_shim), without_lease(&mut by_hook));
        assert!(shims.0.is_string() && shims.0 != hooks.0, "{request:?}");
        let added = by_hook.as_object_mut().expect("an object").remove("hooks").expect("our hooks");
        for stage in ["createRuntime", "poststop"] {
            let hook = &added[stage][0];
            assert_eq!(hook["args"], json!(["sublet-hook", stage]));
            assert!(hook["env"].as_array().is_some_and(|env| !env.is_empty()), "an env of its own");
        }
        assert_eq!(by_hook, by_shim, "{request:?}");
        assert_ne!(by_hook, bundle.spec, "and they are edits");
        let stopped = json!({"id": ID, "status": "stopped", "annotations": {"sublet.lease": hooks.0}});
        let ended = hook(&world, "poststop", stopped.to_string().as_bytes(), None);
        assert!(ended.ok, "{ended:?}");
        world.assert_empty();
    }
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
