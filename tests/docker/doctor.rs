//! `sublet doctor` on a host whose driver is simulated: what it says when all is well, and what when not.
//! Each check by itself fails in the unit tests of `src/cli/doctor`.

use std::fs;
use std::process::{Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use sublet_e2e::docker::{Docker, skip_unless_engines};
use sublet_e2e::podman::Podman;
use sublet_e2e::{World, eventually, skip_unless_root};

const CHECKS: [&str; 32] = [
    "configuration",
    "kernel",
    "driver",
    "kernel-modules",
    "device-nodes",
    "fabric-manager",
    "nvml",
    "gpu",
    "inventory",
    "cap-nodes",
    "dev-char",
    "persistence",
    "compute-modes",
    "mps-programs",
    "stray-mps",
    "toolkit",
    "runtimes",
    "docker",
    "swarm",
    "slurm",
    "podman",
    "hook-files",
    "cgroup",
    "daemon-reload",
    "serve",
    "policy",
    "security",
    "state",
    "clock",
    "leases",
    "lost-nodes",
    "unleased",
];

/// `sublet doctor --format json` with these options, and its exit code.
fn doctor(world: &World, options: &[&str]) -> (Option<i32>, Vec<Value>) {
    let output = world.sublet(&[&["doctor", "--format", "json"], options].concat());
    let document: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    assert_eq!(document["schema"], "sublet.doctor/1");
    (output.status.code(), document["checks"].as_array().expect("an array").clone())
}

fn names(checks: &[Value]) -> Vec<&str> {
    checks.iter().map(|check| check["check"].as_str().expect("a name")).collect()
}

fn one<'a>(checks: &'a [Value], name: &str) -> &'a Value {
    checks.iter().find(|check| check["check"] == name).unwrap_or_else(|| panic!("no {name}"))
}

fn found(check: &Value) -> &str {
    check["found"].as_str().expect("a string")
}

#[test]
fn a_host_that_works_passes_and_each_check_is_a_line() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let _ = world.status();
    let (code, checks) = doctor(&world, &[]);
    assert_eq!(names(&checks), CHECKS);
    let failed: Vec<&Value> = checks.iter().filter(|check| check["result"] == "fail").collect();
    assert!(failed.is_empty() && code == Some(0), "{failed:?}");
    for name in
        ["driver", "kernel-modules", "device-nodes", "nvml", "inventory", "mps-programs", "state", "leases"]
    {
        assert_eq!(one(&checks, name)["result"], "pass", "{:?}", one(&checks, name));
    }
    assert_eq!(one(&checks, "dev-char")["result"], "warn", "the simulated driver has no /dev/char");
    let table = world.sublet(&["doctor"]);
    let text = String::from_utf8(table.stdout).expect("UTF-8");
    assert_eq!(text.lines().count(), CHECKS.len() + 3, "{text}");
    assert!(
        text.lines().any(|line| line.starts_with("pass    driver ") && line.ends_with("580.159.04")),
        "{text}"
    );
    let count = |result: &str| checks.iter().filter(|check| check["result"] == result).count();
    let [fail, warn, pass, skip] = ["fail", "warn", "pass", "skip"].map(count);
    let summary = format!("{} checks: {fail} fail, {warn} warn, {pass} pass, {skip} skip", CHECKS.len());
    assert_eq!(text.lines().last(), Some(summary.as_str()));
    assert_eq!(one(&checks, "cap-nodes")["result"], "skip", "there are no MIG instances");
    assert!(text.contains("  -> ln -s ../nvidiactl /dev/char/195:255"), "{text}");
    world.assert_empty();
}

#[test]
fn a_host_without_a_driver_fails_with_the_fix() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let _ = world.status();
    let root = world.driver_root.as_ref().expect("simulated");
    fs::remove_file(root.join("dev/nvidia-uvm")).expect("it was there");
    let (code, checks) = doctor(&world, &[]);
    assert_eq!((code, &one(&checks, "device-nodes")["result"]), (Some(1), &json!("fail")));
    assert!(found(one(&checks, "device-nodes")).contains("nvidia-uvm is missing"));
    for gone in ["proc/driver/nvidia", "sys/module/nvidia"] {
        fs::remove_dir_all(root.join(gone)).expect("it was there");
    }
    for options in [&[][..], &["--quick"]] {
        let (code, checks) = doctor(&world, options);
        assert_eq!((code, &one(&checks, "driver")["result"]), (Some(1), &json!("fail")));
        assert!(one(&checks, "driver")["fix"].as_str().expect("a fix").starts_with("modprobe nvidia"));
    }
}

#[test]
fn a_quick_look_needs_neither_nvml_nor_engines() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let _ = world.status();
    let library = world.driver_root.as_ref().expect("simulated");
    let library = library.join(format!("usr/lib/{}-linux-gnu/libnvidia-ml.so.1", std::env::consts::ARCH));
    let before = fs::read_link(&library).expect("a link");
    fs::remove_file(&library).expect("it was there");
    let (_, checks) = doctor(&world, &["--quick"]);
    assert!(!names(&checks).contains(&"nvml") && !names(&checks).contains(&"unleased"), "{checks:?}");
    assert_eq!(one(&checks, "driver")["result"], "pass");
    let (code, checks) = doctor(&world, &[]);
    assert_eq!((code, &one(&checks, "nvml")["result"]), (Some(1), &json!("fail")), "{checks:?}");
    std::os::unix::fs::symlink(before, &library).expect("back");
    world.assert_empty();
}

#[test]
fn a_configuration_that_is_wrong_is_one_of_the_checks() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "[limit]\n");
    let (code, checks) = doctor(&world, &["--quick"]);
    let first = one(&checks, "configuration");
    assert_eq!((code, &first["result"]), (Some(1), &json!("fail")));
    assert!(found(first).contains("did you mean limits?"), "{first}");
    let line = |output: Output| String::from_utf8(output.stdout).expect("UTF-8");
    assert!(line(world.sublet(&["doctor", "--quick"])).contains("fail    configuration"));
}

#[test]
fn a_container_with_a_gpu_and_no_lease_is_listed() {
    if skip_unless_engines() {
        return;
    }
    let docker = Docker::up(World::simulated("h200", ""), &json!({}));
    let node = docker.world.driver_root.as_ref().expect("simulated").join("dev/nvidia0");
    let device = format!("{}:/dev/nvidia0", node.display());
    let ours = docker.hold("ours", &["sublet.sm=25"], &[]);
    let (_, checks) = doctor(&docker.world, &[]);
    // Containers of other tests have no lease in this world.
    assert!(!found(one(&checks, "unleased")).contains(&ours[..12]), "{checks:?}");
    let options = ["run", "-d", "--name", "beside", "--network=none", "--runtime=runc", "--device", &device];
    let id = docker.ask(&[&options[..], &[sublet_e2e::docker::IMAGE, "sleep", "600"]].concat());
    let (_, checks) = doctor(&docker.world, &[]);
    let listed = one(&checks, "unleased");
    assert_eq!(listed["result"], "warn");
    assert!(found(listed).contains(&id[..12]) && found(listed).contains("/dev/nvidia0"), "{listed}");
    assert!(!found(listed).contains(&ours[..12]), "{listed}");
    docker.done(&["rm", "-f", "beside", "ours"]);
}

/// `sublet doctor --run`'s answer, and nothing that it leaves.
fn probe(world: &World, mut command: Command) -> Value {
    let temporary = world.dir.path().join("temporary");
    fs::create_dir_all(&temporary).expect("a directory");
    let output = command.env("TMPDIR", &temporary).output().expect("sublet runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let left: Vec<_> = fs::read_dir(&temporary).expect("a directory").flatten().collect();
    assert!(left.is_empty(), "{left:?}");
    serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}"))
}

const RUN: [&str; 3] = ["doctor", "--format=json", "--run"];

fn by_docker(docker: &Docker, annotations: &[&str]) -> Command {
    let mut command = docker.world.command("sublet");
    let host = docker.command();
    command.envs(host.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let annotations = annotations.iter().flat_map(|annotation| ["--annotation", annotation]);
    command.args(RUN).arg("docker").args(annotations);
    command
}

fn by_podman(podman: &Podman, annotations: &[&str]) -> Command {
    let dir = podman.world.dir.path();
    let mut command = podman.world.command("sublet");
    // The same storage as the test's own, by the settings that a program without options takes.
    let storage = dir.join("storage.conf");
    let text = format!(
        "[storage]\ndriver = \"vfs\"\ngraphroot = \"{}\"\nrunroot = \"{}\"\n",
        dir.join("storage").display(),
        dir.join("run").display()
    );
    fs::write(&storage, text).expect("storage.conf");
    command.env("CONTAINERS_CONF", dir.join("containers.conf")).env("CONTAINERS_STORAGE_CONF", storage);
    let annotations = annotations.iter().flat_map(|annotation| ["--annotation", annotation]);
    command.args(RUN).arg("podman").args(annotations);
    command
}

/// A share that waits while another container has the whole GPU.
const WAITING: [&str; 2] = ["sublet.sm=25", "sublet.wait=8s"];

/// Ends the doctor by `signal` as soon as its container `is_there`; it says so, and its files are gone.
fn interrupted(world: &World, mut command: Command, signal: Signal, is_there: impl Fn() -> bool) {
    let temporary = world.dir.path().join("temporary");
    fs::create_dir_all(&temporary).expect("a directory");
    command.env("TMPDIR", &temporary).stdout(Stdio::null()).stderr(Stdio::piped());
    let doctor = command.spawn().expect("sublet runs");
    assert!(eventually(is_there), "there is no container");
    kill(Pid::from_raw(i32::try_from(doctor.id()).expect("a pid")), signal).expect("it lives");
    let output = doctor.wait_with_output().expect("it ends");
    let line = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{line}");
    assert_eq!(line, "sublet: interrupted; the container and its image were removed\n");
    let left: Vec<_> = fs::read_dir(&temporary).expect("a directory").flatten().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_probe_that_is_interrupted_leaves_nothing_in_docker() {
    if skip_unless_engines() {
        return;
    }
    let docker = Docker::up(World::simulated("h200", ""), &json!({}));
    docker.done(&[
        "run",
        "-d",
        "--name",
        "all",
        "--network=none",
        "--runtime=sublet",
        "--annotation",
        "sublet.mode=exclusive",
        sublet_e2e::docker::IMAGE,
        "sleep",
        "600",
    ]);
    let (images, containers) = (docker.ask(&["images", "-aq"]), docker.ask(&["ps", "-aq"]));
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let is_there = || docker.ask(&["ps", "-aq"]) != containers;
        interrupted(&docker.world, by_docker(&docker, &WAITING), signal, is_there);
        assert_eq!(docker.ask(&["images", "-aq"]), images);
        assert_eq!(docker.ask(&["ps", "-aq"]), containers);
    }
    docker.done(&["rm", "-f", "all"]);
    docker.world.assert_empty();
}

#[test]
fn a_probe_that_is_interrupted_leaves_nothing_in_podman() {
    if skip_unless_engines() {
        return;
    }
    let podman = Podman::up(World::simulated("h200", ""));
    let _ = podman.hold("all", &["sublet.mode=exclusive"], &[]);
    let images = podman.done(&["images", "-aq"]);
    let containers = || podman.done(&["ps", "-aq"]);
    let before = containers();
    // Podman has its container locked while the hook waits: `podman ps` would answer when the wait is over.
    let waits = || podman.ledger()["waiters"].as_array().is_some_and(|waiters| !waiters.is_empty());
    interrupted(&podman.world, by_podman(&podman, &WAITING), Signal::SIGINT, waits);
    assert_eq!((podman.done(&["images", "-aq"]), containers()), (images, before));
    podman.done(&["rm", "-f", "-t", "0", "all"]);
    // The hook of the interrupted container has waited until its time limit.
    assert!(eventually(|| podman.world.leases().is_empty()), "{:?}", podman.world.leases());
    podman.world.assert_empty();
}

#[test]
fn docker_runs_a_probe_without_an_image() {
    if skip_unless_engines() {
        return;
    }
    let docker = Docker::up(World::simulated("h200x8", ""), &json!({}));
    let images = docker.ask(&["images", "-aq"]);
    let run = |annotations: &[&str]| by_docker(&docker, annotations);
    let seen = probe(&docker.world, run(&[]));
    assert_eq!((&seen["devices"], &seen["sms"], &seen["mps"]), (&json!(1), &json!(32), &json!(true)));
    assert_eq!(seen["neighbours_hidden"], true);
    let free = seen["memory_free_bytes"].as_u64().expect("a number") >> 20;
    assert!((1800..2048).contains(&free), "its share has a memory limit: {free} MiB");
    let seen = probe(&docker.world, run(&["sublet.gpu=any:2"]));
    assert_eq!((&seen["devices"], &seen["sms"], &seen["mps"]), (&json!(2), &json!(132), &json!(false)));
    let refused = run(&["sublet.sm=0"]).output().expect("it runs");
    let line = String::from_utf8(refused.stderr).expect("UTF-8");
    assert_eq!((refused.status.code(), line.lines().count()), (Some(1), 1), "{line}");
    assert!(line.starts_with("sublet: docker: ") && line.contains("sublet.sm=0"), "{line}");
    assert_eq!(docker.ask(&["images", "-aq"]), images, "its image is gone");
    assert_eq!(docker.ask(&["ps", "-aq"]), "");
    docker.world.assert_empty();
}

#[test]
fn podman_runs_a_probe_without_an_image() {
    if skip_unless_engines() {
        return;
    }
    let podman = Podman::up(World::simulated("h200x8", ""));
    let seen = probe(&podman.world, by_podman(&podman, &[]));
    assert_eq!((&seen["sms"], &seen["neighbours_hidden"]), (&json!(32), &json!(true)));
    let free = seen["memory_free_bytes"].as_u64().expect("a number") >> 20;
    assert!((1800..2048).contains(&free), "its share has a memory limit: {free} MiB");
    let command = by_podman(&podman, &["sublet.memory=8GiB", "sublet.sm=12.5"]);
    let seen = probe(&podman.world, command);
    assert_eq!(
        (&seen["sms"], &seen["mps"], &seen["neighbours_hidden"]),
        (&json!(16), &json!(true), &json!(true))
    );
    let free = seen["memory_free_bytes"].as_u64().expect("a number") >> 20;
    assert!((8000..8192).contains(&free), "{free} MiB");
    podman.world.assert_empty();
}

#[test]
fn containers_whose_annotations_were_dropped_are_named() {
    if skip_unless_engines() {
        return;
    }
    let docker = Docker::up(World::simulated("h200", ""), &json!({}));
    let post = |path: &str, body: &str| {
        let socket = docker.socket();
        let mut curl = Command::new("curl");
        curl.args([
            "--fail-with-body",
            "-sS",
            "-X",
            "POST",
            "-H",
            "Content-Type: application/json",
            "-d",
            body,
        ]);
        curl.arg("--unix-socket").arg(socket).arg(format!("http://docker/{path}"));
        let output = curl.output().expect("curl");
        assert!(output.status.success(), "{path}: {output:?}");
    };
    let create = |version: &str, name: &str| {
        let body = json!({"Image": "probe", "Cmd": ["sleep", "600"], "HostConfig":
            {"Runtime": "sublet", "NetworkMode": "none", "Annotations": {"sublet.sm": "25"}}});
        post(&format!("{version}/containers/create?name={name}"), &body.to_string());
        post(&format!("{version}/containers/{name}/start"), "");
    };
    create("v1.43", "asks");
    let named = || docker.world.status()["warnings"].to_string().contains("container updated: ");
    assert!(!named());
    create("v1.42", "updated");
    let warnings = docker.world.status()["warnings"].to_string();
    assert!(
        warnings.contains("container updated: started with the runtime sublet, but without a share"),
        "{warnings}"
    );
    let mut doctor = docker.world.command("sublet");
    doctor
        .args(["doctor", "--format", "json"])
        .env("DOCKER_HOST", format!("unix://{}", docker.socket().display()));
    let document: Value = serde_json::from_slice(&doctor.output().expect("it runs").stdout).expect("JSON");
    let check = one(document["checks"].as_array().expect("checks"), "docker").clone();
    assert!(check["result"] == "warn" && found(&check).contains("updated"), "{check}");
    docker.done(&["rm", "-f", "updated"]);
    assert!(!named());
    docker.done(&["rm", "-f", "asks"]);
}
