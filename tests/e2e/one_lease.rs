//! Two entry points at once, the same entry point twice, and a container that claims a lease: always one grant and one
//! lease.

use serde_json::{Value, json};
use sublet_e2e::{Bundle, World, programs, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const SHARE: &[(&str, &str)] = &[("sublet.sm", "25"), ("sublet.memory", "8GiB")];

/// Checks for the share, once: sublet's variables, nodes, rules and mounts each occur only once in config.json.
fn assert_once(bundle: &Bundle<'_>, leases: usize) {
    let info = bundle.event("info");
    assert_eq!((&info["error"], &info["mps"], &info["sm"]), (&Value::Null, &json!(true), &json!(32)));
    assert_eq!(bundle.world().leases().len(), leases);
    let config = bundle.config();
    let listed = |pointer: &str, of: fn(&Value) -> String| {
        let all = config.pointer(pointer).and_then(Value::as_array).expect(pointer);
        let mut all: Vec<String> = all.iter().map(of).collect();
        all.sort();
        all
    };
    let variable =
        |entry: &Value| entry.as_str().expect("text").split('=').next().expect("a name").to_owned();
    for all in [
        listed("/process/env", variable),
        listed("/linux/devices", |node| node["path"].to_string()),
        listed("/linux/resources/devices", Value::to_string),
        listed("/mounts", |mount| mount["destination"].to_string()),
        listed("/linux/maskedPaths", Value::to_string),
    ] {
        let mut once = all.clone();
        once.dedup();
        assert_eq!(all, once);
    }
}

#[test]
fn precreate_the_shim_and_late_hooks_of_one_container() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let mut bundle = world.bundle("all", SHARE, HOLD);
    bundle.hook(&["prestart", "createRuntime", "poststop"]);
    bundle.precreate();
    let granted = bundle.spec.clone();
    bundle.plain = false;
    bundle.up();
    assert_once(&bundle, 1);
    assert_eq!(bundle.config(), granted, "who comes second changes nothing");
    let leases = world.leases();
    assert_eq!((&leases[0]["state"], &leases[0]["isolation"]), (&json!("active"), &json!("shared")));
    let health = bundle.exec_file(&["/usr/bin/cuda-probe", "info"], &["PATH=/usr/bin:/bin"]);
    assert!(health.json()[0]["free_mib"].as_u64() < Some(8192), "{health:?}");
    bundle.down();
    world.assert_empty();
}

#[test]
fn the_shim_above_the_shim() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    // As when a host's runc is a link to the shim: the one below finds the lease of the one above.
    let text = std::fs::read_to_string(&world.config).expect("config.toml");
    let below = world.dir.path().join("below.toml");
    std::fs::write(&below, &text).expect("below.toml");
    let script = world.dir.path().join("shim-below");
    let shim = sublet_e2e::bin_dir().join("sublet-runtime");
    let call = format!("SUBLET_CONFIG={} exec {} \"$@\"\n", below.display(), shim.display());
    programs::script(&script, &call);
    let names = format!("low_level = [\"{}\"]", world.engine.program());
    assert!(text.contains(&names), "{text}");
    let above = text.replace(&names, &format!("low_level = [\"{}\"]", script.display()));
    std::fs::write(&world.config, above).expect("config.toml");
    let bundle = world.bundle("nested", SHARE, HOLD);
    bundle.up();
    assert_once(&bundle, 1);
    bundle.down();
    world.assert_empty();
}

#[test]
fn a_lease_that_has_ended_or_is_another_containers_is_none() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let first = world.bundle("first", SHARE, HOLD);
    first.up();
    assert_once(&first, 1);
    let granted = first.config();
    // What another container holds, by the shim and by either hook.
    let stolen = |id: &str| {
        let mut bundle = world.bundle(id, SHARE, HOLD);
        bundle.spec["annotations"] = granted["annotations"].clone();
        bundle
    };
    let why = "this container has no live lease with that id";
    let refused = stolen("thief").refused();
    assert!(refused.contains(why), "{refused}");
    for stage in ["prestart", "createRuntime"] {
        let mut late = stolen("late-thief");
        late.hook(&[stage]);
        assert!(!late.create().ok, "{stage}");
        let _ = late.delete();
        let leases = world.leases();
        assert_eq!((leases.len(), &leases[0]["container_id"]), (1, &json!("first")), "{stage}");
    }
    // What it had itself, once it has ended, is no other bundle's either.
    first.down();
    world.assert_empty();
    let refused = stolen("heir").refused();
    assert!(refused.contains(why), "{refused}");
    world.assert_empty();
}

/// `create` and `start` with the existing config.json, unlike [`Bundle::up`], which writes its spec first.
fn up_as_written(bundle: &Bundle<'_>) {
    std::fs::remove_file(bundle.dir.join("out")).expect("its output");
    let mut command = bundle.runtime();
    command.arg("create").arg("--bundle").arg(&bundle.dir).arg(&bundle.id).stdin(std::process::Stdio::null());
    let open = |name: &str| std::fs::File::create(bundle.dir.join(name)).expect("an output file");
    let created = command.stdout(open("out")).stderr(open("err")).status().expect("it runs");
    assert!(created.success(), "{}", std::fs::read_to_string(bundle.dir.join("err")).unwrap_or_default());
    assert!(bundle.start().ok);
}

#[test]
fn a_bundle_that_is_run_again_is_granted_anew() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    for share in [SHARE, &[("sublet.gpu", "any"), ("sublet.mode", "exclusive")]] {
        let bundle = world.bundle("again", share, HOLD);
        bundle.up();
        bundle.event("info");
        let first = bundle.config();
        bundle.down();
        world.assert_empty();
        // On another GPU: what was granted before must be gone.
        let device = first["annotations"]["sublet.lease.record"].as_str().expect("a record").to_owned();
        let device: Value = serde_json::from_str(&device).expect("JSON");
        let gone = device["devices"][0].as_str().expect("a device").to_owned();
        assert!(world.sublet(&["drain", &gone]).status.success());
        for _ in 0..2 {
            up_as_written(&bundle);
            let info = bundle.event("info");
            assert_eq!((&info["error"], &info["count"]), (&Value::Null, &json!(1)), "{info}");
            assert_ne!(info["uuid"], json!(gone));
            let (config, mut before) = (bundle.config(), first.clone());
            assert_ne!(config["annotations"]["sublet.lease"], before["annotations"]["sublet.lease"]);
            for key in ["/mounts", "/linux/devices", "/linux/resources/devices", "/linux/maskedPaths"] {
                let length = |spec: &Value| spec.pointer(key).and_then(Value::as_array).map(Vec::len);
                assert_eq!(length(&config), length(&before), "{key}");
            }
            let names = |spec: &mut Value| {
                let env = spec["process"]["env"].as_array().expect("env").iter();
                let mut names: Vec<String> =
                    env.map(|entry| entry.to_string().split('=').next().unwrap_or("").to_owned()).collect();
                names.sort();
                names
            };
            assert_eq!(names(&mut config.clone()), names(&mut before));
            bundle.down();
            world.assert_empty();
        }
        assert!(world.sublet(&["undrain", &gone]).status.success());
    }
}

#[test]
fn a_bundle_whose_create_failed_is_granted_anew_when_it_is_mended() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    for collected in [false, true] {
        let mut bundle = world.bundle("mended", SHARE, HOLD);
        let nowhere =
            json!({"destination": "/x", "type": "bind", "source": "/nowhere/at/all", "options": ["bind"]});
        bundle.spec["mounts"].as_array_mut().expect("mounts").push(nowhere.clone());
        let failed = bundle.create();
        assert!(!failed.ok, "{failed:?}");
        let mut config = bundle.config();
        assert!(config["annotations"]["sublet.lease"].is_string(), "the runtime failed, not we");
        world.kill_daemons();
        if collected {
            assert!(world.sublet(&["gc"]).status.success());
        }
        config["mounts"].as_array_mut().expect("mounts").retain(|mount| *mount != nowhere);
        std::fs::write(bundle.dir.join("config.json"), config.to_string()).expect("config.json");
        up_as_written(&bundle);
        assert_once(&bundle, 1);
        assert!(world.sublet(&["gc"]).status.success());
        assert_eq!(world.leases().len(), 1, "it is held as long as the container lives");
        let beside = world.bundle("beside", &[("sublet.sm", "90")], HOLD).create();
        assert!(!beside.ok, "{beside:?}");
        bundle.down();
        world.assert_empty();
    }
}

#[test]
fn no_annotation_makes_up_a_lease() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    for (key, value) in
        [("sublet.lease", "0123456789abcdef"), ("sublet.lease", "../../../etc/passwd"), ("sublet.lease", "")]
    {
        let line = world.bundle("forger", &[SHARE, &[(key, value)]].concat(), HOLD).refused();
        assert!(line.contains(key), "{line}");
    }
    // The record that a lost ledger is rebuilt from is written over.
    let bundle = world.bundle("writer", &[SHARE, &[("sublet.lease.record", "{}")]].concat(), HOLD);
    bundle.up();
    let annotations = &bundle.config()["annotations"];
    let record = annotations["sublet.lease.record"].as_str().expect("a record");
    let record: Value = serde_json::from_str(record).expect("JSON");
    assert_eq!(record["id"], annotations["sublet.lease"]);
    assert_once(&bundle, 1);
    bundle.down();
    world.assert_empty();
}
