//! C6: the content of a hook's standard input. The hook prints an error in one line, its status is not 0, and nothing
//! is half done. B24: what a low-level runtime gets on its command line.

use std::io::Write as _;
use std::process::Stdio;

use serde_json::{Value, json};
use sublet_e2e::hooked::{PODMANS_ID as ID, fed, precreated, refusal};
use sublet_e2e::{Finished, World, eventually, in_one_line, programs, skip_unless_root};

fn hook(world: &World, stage: &str, input: &[u8]) -> Finished {
    fed(world.command("sublet-hook"), stage, input)
}

fn precreate(world: &World, spec: &Value) -> Value {
    precreated(world.command("sublet-hook"), spec)
}

#[test]
fn c6_precreate_leaves_nothing_half_done() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("bad", &[("sublet.sm", "25")], &["/bin/true"]);
    let spec = serde_json::to_vec(&bundle.podmans()).expect("JSON");
    let huge = vec![b' '; 17 << 20];
    let twice = br#"{"annotations":{"sublet.sm":"25","sublet.sm":"50"}}"#;
    let inputs: [&[u8]; 7] = [b"", b"\n", &spec[..spec.len() - 1], b"[]x", &huge, twice, b"{\"a\":\xff}"];
    for input in inputs {
        let failed = hook(&world, "precreate", input);
        assert!(!failed.ok && failed.stdout.is_empty(), "{failed:?}");
        assert_eq!(in_one_line(&failed.stderr).lines().count(), 1, "{failed:?}");
    }
    // A spec that can be read is refused with the reason, whatever else is wrong with it.
    for (pointer, value, word) in [
        ("/root/path", json!("rootfs"), "root.path"),
        ("/annotations/sublet.sm", json!(25), "annotations.*"),
        ("/annotations/sublet.sm", json!("2\u{1b}[2J"), "sublet.sm"),
        ("/process", json!(null), "process"),
    ] {
        let mut spec = bundle.podmans();
        *spec.pointer_mut(pointer).expect(pointer) = value;
        let refused = precreate(&world, &spec);
        assert!(refusal(&refused).contains(word), "{pointer}: {refused}");
        assert!(!refusal(&refused).contains('\u{1b}'));
    }
    assert_eq!(world.leases(), Vec::<Value>::new());
    // If the cgroup's name contains no id, the root filesystem identifies the container.
    let mut unnamed = bundle.podmans();
    unnamed["linux"]["cgroupsPath"] = json!("/user.slice");
    unnamed["annotations"]["sublet.sm"] = json!("250");
    assert!(refusal(&precreate(&world, &unnamed)).contains("sublet.sm=250"));
    let last = world.sublet(&["status", "--last-error"]);
    let name = format!("  container {}: ", bundle.dir.join("rootfs").display());
    assert!(String::from_utf8_lossy(&last.stdout).contains(&name), "{name} is not in {last:?}");
}

#[test]
fn c6_a_lease_is_bound_to_a_live_process_or_not_at_all() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("bind", &[("sublet.sm", "25")], &["/bin/true"]);
    let granted = precreate(&world, &bundle.podmans());
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
        let failed = hook(&world, "createRuntime", input);
        assert!(!failed.ok, "{}: {failed:?}", String::from_utf8_lossy(&input[..input.len().min(200)]));
        assert_eq!(in_one_line(&failed.stderr).lines().count(), 1, "{failed:?}");
        assert_eq!(world.leases()[0]["state"], "pending");
    }
    for _ in 0..2 {
        let bound = hook(&world, "createRuntime", &good);
        assert!(bound.ok, "{bound:?}");
        let leases = world.leases();
        assert_eq!((leases.len(), &leases[0]["state"], &leases[0]["pid"]), (1, &json!("active"), &live));
    }
}

#[test]
fn c6_poststop_frees_what_it_names_and_nothing_else() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("stop", &[("sublet.sm", "25")], &["/bin/true"]);
    let granted = precreate(&world, &bundle.podmans());
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
        let failed = hook(&world, "poststop", input);
        assert!(!failed.ok, "{}: {failed:?}", String::from_utf8_lossy(&input[..input.len().min(200)]));
        assert_eq!(in_one_line(&failed.stderr).lines().count(), 1, "{failed:?}");
        assert!(!failed.stderr.contains('\u{1b}'));
        assert_eq!(world.leases().len(), 1);
    }
    // The end of other containers: one with an unknown lease id, and one without annotations.
    let unannotated = json!({"id": ID, "status": "stopped", "bundle": bundle.dir});
    for input in [state("stopped", "0123456789abcdef"), unannotated.to_string().into_bytes()] {
        assert!(hook(&world, "poststop", &input).ok);
        assert_eq!(world.leases().len(), 1);
    }
    // A second call is no error, although the process no longer exists.
    for _ in 0..2 {
        let freed = hook(&world, "poststop", &good);
        assert!(freed.ok, "{freed:?}");
        world.assert_empty();
    }
    for stage in ["", "poststart", "createContainer", "../prestart"] {
        let unknown = hook(&world, stage, &good);
        assert!(!unknown.ok && unknown.stderr.contains("unknown stage"), "{unknown:?}");
    }
}

#[test]
fn c6_prestart_refuses_what_is_no_state() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("input", &[("sublet.sm", "25")], &["/bin/true"]);
    bundle.write();
    let dir = bundle.dir.display();
    let huge = " ".repeat((1 << 20) + 1);
    let cases = [
        (String::new(), "it is empty"),
        ("{\"id\":\"c\",".into(), "EOF"),
        (huge, "longer than 1 MiB"),
        (format!(r#"{{"id":"c","status":"creating","bundle":"{dir}"}}"#), "has no `pid`"),
        (format!(r#"{{"id":"c","status":"strange","pid":1,"bundle":"{dir}"}}"#), "unknown value"),
        (format!(r#"{{"id":"c","status":"running","pid":1,"bundle":"{dir}"}}"#), "it already runs"),
        (r#"{"id":"c","status":"creating","pid":1,"bundle":"/nowhere"}"#.into(), "bundle /nowhere"),
        (format!(r#"{{"id":"c","status":"creating","pid":{},"bundle":"{dir}"}}"#, i32::MAX), "has ended"),
        // This process is on the host, where nothing may be mounted.
        (
            format!(r#"{{"id":"c","status":"creating","pid":{},"bundle":"{dir}"}}"#, std::process::id()),
            "no mount namespace of its own",
        ),
    ];
    for (input, why) in cases {
        let refused = hook(&world, "prestart", input.as_bytes());
        assert!(!refused.ok, "{why}");
        assert!(
            refused.stderr.contains(why) && in_one_line(&refused.stderr).lines().count() == 1,
            "{why}: {refused:?}"
        );
    }
    world.assert_empty();
}

/// Otherwise the runtime would wait, and the engine too.
#[test]
fn c6_a_writer_that_keeps_silent_is_not_waited_for() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let mut waiting: Vec<_> = ["prestart", "createRuntime", "poststop"]
        .into_iter()
        .map(|stage| {
            let mut command = world.command("sublet-hook");
            command.arg(stage).stdin(Stdio::piped()).stderr(Stdio::piped());
            let mut child = command.spawn().expect("sublet-hook runs");
            let mut silent = child.stdin.take().expect("piped");
            silent.write_all(b"{\"id\":").expect("it reads");
            (stage, child, silent)
        })
        .collect();
    let ended =
        eventually(|| waiting.iter_mut().all(|(_, child, _)| child.try_wait().expect("a child").is_some()));
    for (stage, mut child, silent) in waiting {
        let _ = child.kill();
        let output = Finished::of(&child.wait_with_output().expect("it ends"));
        assert!(
            ended && !output.ok && output.stderr.contains("was not complete in time"),
            "{stage}: {output:?}"
        );
        drop(silent);
    }
    world.assert_empty();
}

/// Every user can read the command lines of the low-level runtime. Its wrapper writes them down.
#[test]
fn b24_no_command_line_has_a_containers_environment() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "[mps]\nexec_without_daemon = \"no-gpu\"\n");
    let (name, lines) = (world.engine.program(), world.dir.path().join("lines"));
    let wrapper = world.dir.path().join(format!("recording-{name}"));
    programs::script(&wrapper, &format!("echo \"$@\" >>{}; exec {name} \"$@\"\n", lines.display()));
    let text = std::fs::read_to_string(&world.config).expect("config.toml");
    let changed = text.replace(&format!("{:?}", [name]), &format!("{:?}", [&wrapper]));
    assert_ne!(changed, text);
    std::fs::write(&world.config, changed).expect("config.toml");
    let mut bundle = world.bundle("held", &[("sublet.sm", "25")], &["/bin/sleep", "300"]);
    bundle.spec["process"]["env"].as_array_mut().expect("an environment").push(json!("TOKEN=hunter2"));
    bundle.up();
    // Its daemon has ended and cannot come back.
    let root = world.driver_root.as_ref().expect("simulated").join("usr/bin/nvidia-cuda-mps-control");
    std::fs::rename(&root, root.with_extension("aside")).expect("moved");
    world.kill_daemons();
    let alone = bundle.exec(&["/bin/true"]);
    assert!(alone.ok || alone.stderr.contains("pass the process with --process"), "{alone:?}");
    let by_file = bundle.exec_file(&["/bin/true"], &["PATH=/bin", "TOKEN=hunter2"]);
    assert!(by_file.ok, "{by_file:?}");
    std::fs::rename(root.with_extension("aside"), &root).expect("moved");
    let lines = std::fs::read_to_string(&lines).expect("the command lines");
    assert!(lines.contains(" exec ") && !lines.contains("hunter2"), "{lines}");
    bundle.down();
    world.assert_empty();
}
