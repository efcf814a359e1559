//! The late entry point: plain OCI bundles started by runc and crun themselves. Their config.json names `sublet-hook`
//! and is not edited. The grant must be the same as the shim's, except for the environment.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use sublet_e2e::hooked::fed;
use sublet_e2e::{Bundle, Engine, World, bin_dir, by_systemd, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const INFO: &[&str] = &["/usr/bin/cuda-probe", "info"];
const BARE: &[&str] = &["/bin/env", "-i", "/usr/bin/cuda-probe", "info"];

/// A bundle without the shim, with sublet's hook at `stages`.
fn plain<'a>(
    world: &'a World,
    id: &str,
    stages: &[&str],
    annotations: &[(&str, &str)],
    args: &[&str],
) -> Bundle<'a> {
    let mut bundle = world.bundle(id, annotations, args);
    bundle.hook(stages);
    bundle
}

fn info(bundle: &Bundle<'_>, args: &[&str]) -> Value {
    bundle.exec(args).info()
}

/// How opening each of `paths` ends in an exec'd process.
fn opened(bundle: &Bundle<'_>, paths: &[&str]) -> Vec<String> {
    let args: Vec<&str> = ["/usr/bin/cuda-probe", "noderights"].iter().chain(paths).copied().collect();
    let lines = bundle.exec(&args).json();
    let results = lines.iter().filter(|line| line["event"] == "node").map(|line| line["result"].clone());
    results.map(|result| result.as_str().expect("text").to_owned()).collect()
}

/// Checks that the container does not start, for the reason `why`, and leaves nothing.
fn assert_refused(world: &World, bundle: &Bundle<'_>, why: &str) {
    let created = bundle.create();
    assert!(!created.ok, "{} was created", bundle.id);
    // crun does not show what hooks print.
    if world.engine == Engine::Runc {
        assert!(created.stderr.contains(why), "{why:?} is not in: {}", created.stderr);
    }
    let last = world.sublet(&["status", "--last-error"]);
    let last = String::from_utf8_lossy(&last.stdout).into_owned();
    assert!(last.contains(why) && last.contains(&bundle.id), "{why:?} is not in: {last}");
    let mut command = Command::new(world.engine.program());
    let forgotten = command.arg("--root").arg(world.runtime_root()).args(["delete", "--force", &bundle.id]);
    let _ = forgotten.output();
    world.assert_empty();
}

#[test]
fn every_process_finds_its_mps_server_and_limits_without_an_environment() {
    if skip_unless_root() {
        return;
    }
    for stage in ["prestart", "createRuntime"] {
        let world = World::simulated("h200", "");
        let annotations = [("sublet.sm", "25"), ("sublet.memory", "8GiB")];
        let bundle = plain(&world, "late", &[stage, "poststop"], &annotations, HOLD);
        bundle.up();
        let shim_sees = 8047;
        for seen in [bundle.event("info"), info(&bundle, INFO), info(&bundle, BARE)] {
            assert_eq!((&seen["error"], &seen["count"]), (&Value::Null, &json!(1)), "{stage}: {seen}");
            assert_eq!((&seen["mps"], &seen["sm"]), (&json!(true), &json!(32)), "{stage}: {seen}");
            let free = seen["free_mib"].as_i64().expect("free_mib");
            assert!((free - shim_sees).abs() < 64, "{stage}: free {free} MiB");
        }
        let status = world.status();
        let lease = &status["leases"][0];
        assert_eq!((&lease["state"], &lease["isolation"]), (&json!("active"), &json!("dedicated")));
        assert_eq!((&lease["container_id"], &lease["pid"]), (&json!("late"), &json!(bundle.pid())));
        assert_eq!(status["mps"][0]["lease"], lease["id"], "a server of its own");
        assert_eq!(bundle.config(), bundle.spec, "config.json is as it was");
        bundle.down();
        world.assert_empty();
    }
}

/// The only limits that it can have are its server's.
#[test]
fn a_share_of_several_gpus_is_bound_on_each() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let annotations = [("sublet.gpu", "any:2"), ("sublet.sm", "25"), ("sublet.memory", "4GiB")];
    let bundle = plain(&world, "two", &["createRuntime", "poststop"], &annotations, HOLD);
    bundle.up();
    for seen in [bundle.event("info"), info(&bundle, BARE)] {
        assert_eq!((&seen["mps"], &seen["count"]), (&json!(true), &json!(2)), "{seen}");
        for device in seen["devices"].as_array().expect("devices") {
            let free = device["free_mib"].as_i64().expect("free_mib");
            assert!(device["sm"] == 32 && (3900..4096).contains(&free), "{seen}");
        }
    }
    bundle.down();
    world.assert_empty();
}

#[test]
fn only_the_containers_own_nodes_open() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let mut bundle = plain(&world, "nodes", &["createRuntime", "poststop"], &[("sublet.gpu", "0")], HOLD);
    // As Podman writes it; the rules that Docker has besides make crun leave the scope open altogether.
    bundle.spec["linux"]["resources"]["devices"] = json!([{"allow": false, "access": "rwm"}]);
    bundle.up();
    bundle.event("info");
    let minor = world.status()["devices"][0]["minor"].as_u64().expect("minor");
    let other = (minor + 1) % 8;
    let (mine, stolen) = (format!("/dev/nvidia{minor}"), format!("/tmp/nvidia{other}"));
    let made = bundle.exec(&["/bin/mknod", &stolen, "c", "195", &other.to_string()]);
    assert!(made.ok, "{made:?}");
    let paths = [mine.as_str(), "/dev/nvidiactl", "/dev/nvidia-uvm", &stolen, "/dev/null"];
    // ENXIO: allowed, and no driver behind it. EPERM: refused by the device cgroup.
    let expected = ["ENXIO", "ENXIO", "ENXIO", "EPERM", "ok"];
    assert_eq!(opened(&bundle, &paths), expected);
    if by_systemd() {
        // systemd may write its own device rules again at any time, from what it knows.
        let systemctl = |args: &[&str]| Command::new("systemctl").args(args).output().expect("systemctl");
        let name = world.dir.path().file_name().expect("a name").to_string_lossy().into_owned();
        let known = systemctl(&["show", "--property=DeviceAllow", &format!("{name}-nodes.scope")]).stdout;
        let known = String::from_utf8_lossy(&known).into_owned();
        assert!(known.contains("/dev/char/195:255 rw"), "{known}");
        assert!(systemctl(&["daemon-reload"]).status.success());
        assert_eq!(opened(&bundle, &paths), expected, "after daemon-reload");
    }
    let listed = bundle.exec(&["/bin/sh", "-c", "ls /dev | grep nvidia"]).stdout;
    assert_eq!(listed, format!("nvidia-uvm\nnvidia-uvm-tools\nnvidia{minor}\nnvidiactl\n"));
    assert_eq!(bundle.exec(&["/bin/stat", "-c", "%a", &mine]).stdout, "666\n");
    bundle.down();
    world.assert_empty();
}

#[test]
fn in_a_user_namespace_the_nodes_are_the_hosts_own() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let annotations = [("sublet.sm", "25"), ("sublet.memory", "8GiB")];
    let mut bundle = plain(&world, "mapped", &["createRuntime", "poststop"], &annotations, HOLD);
    bundle.map_users();
    bundle.up();
    // Right after the start on a busy machine, crun's exec was seen to be refused the user namespace (EPERM).
    bundle.event("info");
    let map = bundle.exec(&["/bin/cat", "/proc/self/uid_map"]);
    assert_eq!(map.stdout.split_whitespace().nth(1), Some("100000"), "{map:?}");
    let minor = world.status()["devices"][0]["minor"].as_u64().expect("minor");
    let nodes = [format!("/dev/nvidia{minor}"), "/dev/nvidiactl".into()];
    let nodes: Vec<&str> = nodes.iter().map(String::as_str).collect();
    assert_eq!(opened(&bundle, &nodes), ["ENXIO", "ENXIO"]);
    let table = bundle.exec(&["/bin/cat", "/proc/self/mountinfo"]).stdout;
    let line = table.lines().find(|line| line.contains(" /dev/nvidiactl ")).expect("a mount of its own");
    assert!(line.contains("nosuid,noexec") && !line.contains("nodev"), "{line}");
    bundle.down();
    world.assert_empty();
}

#[test]
fn driver_files_are_mounted_as_the_shim_mounts_them() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let annotations = [("sublet.sm", "25")];
    let table = |bundle: &Bundle<'_>| {
        bundle.up();
        let text = bundle.exec(&["/bin/cat", "/proc/self/mountinfo"]).stdout;
        bundle.down();
        let mounts = text.lines().filter_map(|line| {
            let fields: Vec<&str> = line.split(' ').collect();
            let ours =
                fields[4].contains("libcuda") || fields[4].contains("nvidia") || fields[4].contains("/mps");
            ours.then(|| format!("{} {} {}", fields[4], fields[5], fields[6]))
        });
        let mut mounts: Vec<String> = mounts.collect();
        mounts.sort();
        mounts
    };
    let late = table(&plain(&world, "late", &["createRuntime", "poststop"], &annotations, HOLD));
    let early = table(&world.bundle("early", &annotations, HOLD));
    assert!(late.len() > 5, "{late:?}");
    assert!(late.iter().all(|line| line.contains(" ro,nosuid,nodev,") && line.ends_with(" -")), "{late:?}");
    assert_eq!(late, early);
    world.assert_empty();
}

#[test]
fn two_entry_points_at_once_take_one_lease() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let stages = ["prestart", "createRuntime", "poststop"];
    let twice = plain(&world, "twice", &stages, &[("sublet.sm", "25")], HOLD);
    twice.up();
    assert_eq!(world.leases().len(), 1);
    assert_eq!(twice.event("info")["sm"], json!(32));
    twice.down();
    world.assert_empty();
    // The shim first, whose lease stands in config.json.
    let mut both = plain(&world, "both", &stages, &[("sublet.sm", "25")], HOLD);
    both.plain = false;
    both.up();
    let leases = world.leases();
    assert_eq!((leases.len(), &leases[0]["isolation"]), (1, &json!("shared")), "the shim's own lease");
    both.down();
    world.assert_empty();
}

#[test]
fn a_container_that_is_not_ours_is_left_alone() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let stages = ["prestart", "createRuntime", "poststop"];
    let stranger = plain(&world, "stranger", &stages, &[("org.example.sublet", "no")], &["/bin/sleep", "60"]);
    stranger.up();
    assert_eq!(stranger.exec(&["/bin/sh", "-c", "ls /dev | grep -c nvidia"]).stdout, "0\n");
    stranger.down();
    assert!(!world.state_dir().join("ledger.json").exists(), "nothing was written down");
    world.configure("[limits\n");
    stranger.up();
    stranger.down();
}

/// As where the hook is called by hand, or by an engine that renames its containers.
#[test]
fn a_process_that_has_a_share_takes_no_other_by_another_name() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = plain(&world, "late", &["createRuntime", "poststop"], &[("sublet.sm", "25")], HOLD);
    bundle.up();
    let state = json!({"id": "other", "status": "creating", "pid": bundle.pid(), "bundle": bundle.dir});
    let done = fed(world.command("sublet-hook"), "createRuntime", state.to_string().as_bytes());
    assert!(done.ok, "{done:?}");
    assert_eq!(world.leases().len(), 1);
    bundle.down();
    world.assert_empty();
}

#[test]
fn a_share_that_is_refused_stops_the_container_with_our_line() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let late = |annotations: &[(&str, &str)]| plain(&world, "late", &["createRuntime"], annotations, HOLD);
    assert_refused(&world, &late(&[("sublet.gpu", "7")]), "no GPU of this host is number 7");
    assert_refused(&world, &late(&[("sublet.smm", "25")]), "unknown key");
    let shared = late(&[("sublet.sm", "25"), ("sublet.isolation", "shared")]);
    assert_refused(&world, &shared, "sublet.isolation=shared does not work with a hook");
    assert_refused(&world, &late(&[("sublet.lease", "0123456789abcdef")]), "does not exist any more");
    let mut away = late(&[("sublet.sm", "25")]);
    away.spec["process"]["env"] = json!(["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=garbage"]);
    assert_refused(&world, &away, "its environment has CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=garbage");
    let mut tmp = late(&[("sublet.sm", "25")]);
    let mount = json!({"destination": "/tmp", "type": "bind", "source": "/tmp", "options": ["rbind"]});
    tmp.spec["mounts"].as_array_mut().expect("mounts").push(mount);
    assert_refused(&world, &tmp, "its /tmp is the host's");
}

#[test]
fn a_lease_ends_with_its_container_even_if_no_hook_says_so() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = plain(&world, "crashed", &["createRuntime"], &[("sublet.sm", "25")], HOLD);
    bundle.up();
    bundle.event("info");
    assert_eq!(world.leases().len(), 1);
    bundle.down();
    assert!(sublet_e2e::eventually(|| world.leases().is_empty()), "the next command frees it");
    world.assert_empty();
    // And the same container again, in the same bundle.
    bundle.up();
    assert_eq!(world.leases().len(), 1);
    bundle.down();
    assert!(sublet_e2e::eventually(|| world.leases().is_empty()));
    world.assert_empty();
}

#[test]
fn a_rootless_container_is_refused() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = plain(&world, "rootless", &[], &[("sublet.sm", "25")], HOLD);
    bundle.write();
    let state =
        json!({"id": "rootless", "status": "creating", "pid": std::process::id(), "bundle": bundle.dir});
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user"]).arg(bin_dir().join("sublet-hook")).arg("createRuntime");
    command.env("SUBLET_CONFIG", &world.config).stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut hook = command.spawn().expect("unshare runs");
    hook.stdin.take().expect("piped").write_all(state.to_string().as_bytes()).expect("state");
    let output = hook.wait_with_output().expect("it ends");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("cannot give a rootless container"), "{stderr}");
    world.assert_empty();
}

#[test]
fn the_example_bundle_and_the_hook_files_are_what_the_hook_takes() {
    if skip_unless_root() {
        return;
    }
    let hooks = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../hooks/prestart");
    let read = |name: &str| -> Value {
        serde_json::from_slice(&fs::read(hooks.join(name)).expect(name)).expect("JSON")
    };
    let world = World::simulated("h200", "");
    let mut bundle = plain(&world, "example", &[], &[], HOLD);
    bundle.spec = read("example-bundle/config.json");
    bundle.spec["process"]["args"] = json!(HOLD);
    for stage in ["createRuntime", "poststop"] {
        let hook = read(&format!("sublet-{stage}.json"));
        assert_eq!(hook["stages"], json!([stage]));
        let hook = &hook["hook"];
        let in_bundle = &mut bundle.spec["hooks"][stage][0];
        for key in ["path", "args", "env"] {
            assert_eq!(hook[key], in_bundle[key], "{stage}: {key}");
        }
        assert!(!hook["env"].as_array().expect("env").is_empty(), "{stage}: it would get the image's");
        // This build instead of the installed one, and this world.
        in_bundle["path"] = json!(bin_dir().join("sublet-hook"));
        let config = format!("SUBLET_CONFIG={}", world.config.display());
        in_bundle["env"].as_array_mut().expect("env").push(json!(config));
    }
    bundle.up();
    assert_eq!(bundle.event("info")["sm"], json!(32));
    bundle.down();
    world.assert_empty();
}
