//! A8, A9 and B13 with real Docker and Podman, in the root of tests/engines/enter: an image's environment reaches no
//! hook, a shared volume does not propagate sublet's mounts, and a program without its first thread lives.

use std::process::Child;

use std::sync::{Mutex, PoisonError};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use sublet_e2e::docker::{Docker, skip_unless_engines};
use sublet_e2e::guarded::SPOIL;
use sublet_e2e::hooked::HOSTILE_ENVIRONMENT;
use sublet_e2e::podman::Podman;
use sublet_e2e::{Finished, World, eventually, is_alive};

const QUARTER: &[&str] = &["sublet.sm=25"];
/// A program whose first thread has ended: the container's first process, and a child of it.
const FIRST: &[&str] = &["cuda-probe", "leaderless", "later", "hold", "600"];
const CHILD: &[&str] = &["sh", "-c", "cuda-probe leaderless later hold 600 & exec sleep 600"];

/// Held while [`probes`] are one test's.
static PROBES: Mutex<()> = Mutex::new(());

/// The processes of the program, on this machine.
fn probes() -> Vec<Pid> {
    let all = std::fs::read_dir("/proc").expect("/proc").flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).map(Pid::from_raw);
    let is_probe = |pid: &Pid| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "cuda-probe\n")
            && std::fs::read_link(format!("/proc/{pid}/exe")).is_err()
            && is_alive(*pid)
    };
    pids.filter(is_probe).collect()
}

fn environment() -> Vec<String> {
    HOSTILE_ENVIRONMENT.iter().map(|variable| format!("--env={variable}")).collect()
}

/// sublet's own configuration is used. The image names another file, which is invalid.
fn assert_share(info: &Value) {
    assert_eq!(
        (&info["error"], &info["mps"], &info["sm"]),
        (&Value::Null, &json!(true), &json!(32)),
        "{info}"
    );
}

#[test]
fn a8_podman() {
    if skip_unless_engines() {
        return;
    }
    let podman = Podman::up(World::simulated("h200", ""));
    let environment = environment();
    let options: Vec<&str> = environment.iter().map(String::as_str).collect();
    for runtime in [None, Some("--runtime=sublet")] {
        let options = [&options[..], runtime.as_slice()].concat();
        let id = podman.hold("hostile", QUARTER, &options);
        assert_share(&podman.event("hostile", "info"));
        assert_eq!(podman.lease(&id).expect("a lease")["state"], "active");
        podman.done(&["rm", "-f", "-t0", "hostile"]);
        assert_eq!(podman.ledger()["leases"], json!([]), "the end was told, by a hook or by the shim");
        podman.assert_empty();
    }
}

#[test]
fn a8_docker() {
    if skip_unless_engines() {
        return;
    }
    let docker = Docker::up(World::simulated("h200", ""), &json!({}));
    let environment = environment();
    let options: Vec<&str> = environment.iter().map(String::as_str).collect();
    let id = docker.hold("hostile", QUARTER, &options);
    assert_share(&docker.event("hostile", "info"));
    let lease = || docker.lease(&id).is_some_and(|lease| lease["state"] == "active");
    assert!(eventually(lease), "{:?}", docker.world.leases());
    docker.done(&["rm", "-f", "hostile"]);
    assert!(eventually(|| docker.world.leases().is_empty()), "{:?}", docker.world.leases());
    docker.world.assert_empty();
}

#[test]
fn a9_docker() {
    if skip_unless_engines() {
        return;
    }
    let docker = Docker::up(World::simulated("h200", ""), &json!({}));
    let volume = docker.world.dir.path().join("volume");
    std::fs::create_dir_all(&volume).expect("a directory");
    let within = volume.display().to_string();
    let mounts = || {
        let table = std::fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
        let of_ours = |line: &&str| line.contains(&within) || line.contains("/sim/");
        table.lines().filter(of_ours).map(str::to_owned).collect::<Vec<_>>()
    };
    let before = mounts();
    // The root's mounts are shared, as on a machine booted by systemd.
    let run = |at: &str| {
        let volume = format!("--volume={within}:{at}:shared");
        docker.run("shared", QUARTER, &[&volume], &["cuda-probe", "hold", "600"])
    };
    let refused = run("/run");
    assert!(!refused.ok && refused.stderr.contains("shared with the host"), "{refused:?}");
    assert_eq!(mounts(), before, "refused");
    docker.done(&["rm", "-f", "shared"]);
    // A shared volume at another path is allowed.
    let started = run("/srv");
    assert!(started.ok, "{started:?}");
    assert_share(&docker.event("shared", "info"));
    assert_eq!(mounts(), before, "while it runs");
    docker.done(&["rm", "-f", "shared"]);
    assert!(eventually(|| docker.world.leases().is_empty()), "{:?}", docker.world.leases());
    assert_eq!(mounts(), before, "after its end");
    docker.world.assert_empty();
}

/// `sublet serve`, until it is dropped.
struct Service(Child);

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Two containers without their first thread: one keeps to its share, the other one does not. `start` runs a script in a
/// container of this name, `pid` is its first process.
fn b13(world: &World, start: impl Fn(&str, &str) -> Finished, pid: impl Fn(&str) -> Pid) {
    let _service = Service(world.command("sublet").arg("serve").spawn().expect("sublet serve runs"));
    let started = |name: &str, script: &str| {
        let started = start(name, script);
        assert!(started.ok, "{name}: {started:?}");
        started.stdout.trim_end().to_owned()
    };
    let state = |id: &str| {
        let of = |lease: &Value| lease["container_id"] == id;
        world.leases().into_iter().find(of).map(|lease| lease["state"].clone())
    };
    let honest = started("honest", "exec cuda-probe leaderless later alloc 1024 600");
    let hostile =
        started("hostile", &format!("export {SPOIL}; exec cuda-probe leaderless at-once alloc 52000 600"));
    let told = || {
        let told = world.sublet(&["events", "--filter", "kind=guard", "--format", "json"]).stdout;
        String::from_utf8_lossy(&told).into_owned()
    };
    assert!(eventually(|| told().contains(&hostile)), "{}", told());
    assert!(told().contains("it was ended") && !told().contains(&honest), "{}", told());
    assert!(eventually(|| state(&hostile).is_none()), "{:?}", world.leases());
    assert_eq!(state(&honest), Some(json!("active")), "{:?}", world.leases());
    kill(pid("honest"), Signal::SIGKILL).expect("it runs");
    assert!(eventually(|| state(&honest).is_none()), "{:?}", world.leases());
}

const FOUR: &[&str] = &["sublet.sm=25", "sublet.memory=4GiB"];

#[test]
fn b13_docker() {
    if skip_unless_engines() {
        return;
    }
    let docker = Docker::up(World::simulated("h200", ""), &json!({}));
    let start = |name: &str, script: &str| docker.run(name, FOUR, &[], &["sh", "-c", script]);
    b13(&docker.world, start, |name| docker.pid(name));
    docker.done(&["rm", "-f", "honest", "hostile"]);
    docker.world.assert_empty();
}

#[test]
fn b13_podman() {
    if skip_unless_engines() {
        return;
    }
    let podman = Podman::up(World::simulated("h200", ""));
    let start = |name: &str, script: &str| podman.run(name, FOUR, &[], &["sh", "-c", script]);
    b13(&podman.world, start, |name| {
        Pid::from_raw(podman.inspect(name, ".State.Pid").parse().expect("a pid"))
    });
    podman.done(&["rm", "-f", "-t0", "honest", "hostile"]);
    podman.assert_empty();
}

#[test]
fn b16_podman() {
    if skip_unless_engines() {
        return;
    }
    let _alone = PROBES.lock().unwrap_or_else(PoisonError::into_inner);
    let podman = Podman::up(World::simulated("h200", ""));
    let shim: &[&str] = &["--runtime=sublet"];
    let by_shim_in_hosts: &[&str] = &["--runtime=sublet", "--pid=host"];
    let by_hook_in_hosts: &[&str] = &["--pid=host"];
    for (options, program, end) in [
        (shim, FIRST, &["stop", "-t2", "c1"][..]),
        (shim, FIRST, &["rm", "-f", "-t0", "c1"]),
        (by_shim_in_hosts, CHILD, &["rm", "-f", "-t0", "c1"]),
        (by_hook_in_hosts, CHILD, &["rm", "-f", "-t0", "c1"]),
    ] {
        let started = podman.run("c1", QUARTER, options, program);
        assert!(started.ok, "{started:?}");
        let _ = podman.event("c1", "info");
        assert!(eventually(|| probes().len() == 1), "{:?}", probes());
        podman.done(end);
        assert!(eventually(|| probes().is_empty()), "{options:?} {end:?}");
        let _ = podman.cli(&["rm", "-f", "-t0", "c1"]);
        assert!(eventually(|| podman.ledger()["leases"] == json!([])), "{:?}", podman.ledger());
    }
    // With the hook alone, Podman runs nothing of sublet's where the runtime takes the container for stopped.
    let started = podman.run("c1", QUARTER, &[], FIRST);
    assert!(started.ok, "{started:?}");
    let _ = podman.event("c1", "info");
    assert!(eventually(|| probes().len() == 1), "{:?}", probes());
    let stopped = podman.cli(&["stop", "-t1", "c1"]);
    assert!(!stopped.ok && stopped.stderr.contains("did not die within timeout"), "{stopped:?}");
    let pid = probes()[0];
    let todo = format!("`kill -KILL {pid}`");
    assert!(podman.world.status()["warnings"].to_string().contains(&todo), "{}", podman.world.status());
    let released = podman.world.sublet(&["lease", "release", "c1"]);
    assert!(String::from_utf8_lossy(&released.stderr).contains(&todo), "{released:?}");
    kill(pid, Signal::SIGKILL).expect("it runs");
    podman.done(&["rm", "-f", "-t0", "c1"]);
    podman.assert_empty();
}

#[test]
fn b16_docker() {
    if skip_unless_engines() {
        return;
    }
    let _alone = PROBES.lock().unwrap_or_else(PoisonError::into_inner);
    let docker = Docker::up(World::simulated("h200", ""), &json!({}));
    for (options, program, end) in [
        (&[][..], FIRST, &["stop", "-t2", "c1"][..]),
        (&[], FIRST, &["rm", "-f", "c1"]),
        (&["--pid=host"], CHILD, &["stop", "-t2", "c1"]),
    ] {
        let started = docker.run("c1", QUARTER, options, program);
        assert!(started.ok, "{started:?}");
        let _ = docker.event("c1", "info");
        assert!(eventually(|| probes().len() == 1), "{:?}", probes());
        docker.done(end);
        assert!(eventually(|| probes().is_empty()), "{options:?} {end:?}");
        let _ = docker.cli(&["rm", "-f", "c1"]);
        assert!(eventually(|| docker.world.leases().is_empty()), "{:?}", docker.world.leases());
    }
    docker.world.assert_empty();
}
