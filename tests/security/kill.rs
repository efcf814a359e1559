//! C5: the shim killed with SIGKILL before and after each system call by which `create` and `delete` change
//! something: the next command alone, `sublet gc`, must put everything right.
//!
//! strace lists the calls of one undisturbed run; each run after that is killed at the entry of one of
//! them, which the kernel then does not carry out. A call that this file does not know fails the test.

#[path = "kill/system_calls.rs"]
mod system_calls;

use std::fmt::Write as _;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use serde_json::{Value, json};
use sublet_e2e::{Bundle, Engine, World, eventually, skip_unless_root};
use system_calls::{Call, calls, points};

/// A shim command below strace, which follows the shim alone.
fn strace(world: &World, options: &[&str], arguments: &[&str], bundle: &Bundle<'_>) -> (ExitStatus, String) {
    // What the command before started apart takes the same locks.
    assert!(eventually(|| world.lowering().is_empty()), "limits are still being lowered");
    let log = world.dir.path().join("strace");
    let shim = world.runtime();
    let mut command = Command::new("strace");
    command.arg("-o").arg(&log).args(options).arg("--").arg(shim.get_program()).args(shim.get_args());
    command.envs(shim.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let out = std::fs::File::create(bundle.dir.join("out")).expect("output file");
    let err = std::fs::File::create(bundle.dir.join("err")).expect("output file");
    command.args(arguments).stdin(Stdio::null()).stdout(out).stderr(err);
    let status = command.status().expect("strace is installed");
    (status, std::fs::read_to_string(log).expect("strace writes its log"))
}

/// The undisturbed run.
fn traced(world: &World, arguments: &[&str], bundle: &Bundle<'_>) -> Vec<Call> {
    let (status, log) = strace(world, &[], arguments, bundle);
    let stderr = std::fs::read_to_string(bundle.dir.join("err")).expect("output file");
    assert!(status.success(), "{arguments:?} under strace: {stderr}");
    calls(&log)
}

/// The same, killed at `point`. How often something is polled differs from run to run, and with it the
/// count by which strace knows the call: a run that ended elsewhere is taken back, and tried again with
/// the count that it shows.
fn killed(scene: &Scene<'_>, arguments: &[&str], point: &Call, prepare: impl Fn()) {
    let mut nth = point.nth;
    for _ in 0..20 {
        prepare();
        let inject = format!("inject={}:signal=KILL:when={nth}", point.name);
        let (status, log) =
            strace(scene.world, &["-e", "trace=all", "-e", &inject], arguments, &scene.bundle);
        let calls = calls(&log);
        let same = |call: &&Call| {
            (&call.name, call.before, call.changes) == (&point.name, point.before, point.changes)
        };
        if status.signal() == Some(9) && calls.last().is_some_and(|last| same(&last)) {
            return;
        }
        nth = calls.iter().find(same).map_or(point.nth, |call| call.nth);
        scene.bundle.down();
    }
    panic!("twenty runs and none killed at call {} of {}: {}", point.nth, point.name, point.line);
}

/// What stands in the ledger, without asking a command that would put it right.
fn ledger(world: &World) -> Value {
    let text = std::fs::read(world.state_dir().join("ledger.json")).unwrap_or_else(|_| b"{}".to_vec());
    serde_json::from_slice(&text).expect("the ledger is JSON")
}

fn lease_of<'a>(ledger: &'a Value, id: &str) -> Option<&'a Value> {
    ledger["leases"].as_array()?.iter().find(|lease| lease["container"]["id"] == id)
}

/// Names in `dir`, sorted.
fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Whether the low-level runtime itself has a container with a live process.
fn exists(world: &World, id: &str) -> bool {
    let mut command = Command::new(world.engine.program());
    let output = command.arg("--root").arg(world.runtime_root()).args(["state", id]).output().expect("state");
    let state: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    output.status.success() && state["status"] != "stopped"
}

/// One device with or without another container on it, and the container that is killed for.
struct Scene<'a> {
    world: &'a World,
    bundle: Bundle<'a>,
    /// Whether a container named `holder` keeps the MPS daemon running.
    warm: bool,
}

impl<'a> Scene<'a> {
    fn new(world: &'a World, warm: bool) -> Self {
        if warm {
            world.bundle("holder", &[("sublet.sm", "25")], &["/bin/sleep", "600"]).up();
        } else {
            // The inventory is there as after boot: what `sublet refresh` does is not the shim's doing.
            assert!(world.sublet(&["refresh"]).status.success());
        }
        let share = [("sublet.sm", "50"), ("sublet.memory", "8GiB")];
        let bundle = world.bundle("victim", &share, &["/bin/sleep", "600"]);
        Self { world, bundle, warm }
    }

    fn create_arguments(&self) -> [String; 4] {
        let dir = self.bundle.dir.to_string_lossy().into_owned();
        ["create".into(), "--bundle".into(), dir, "victim".into()]
    }

    /// After `sublet gc`, and nothing else, everything is as it should be.
    fn assert_restored(&self, edited: &Value, after: &str) {
        self.wait_for_death();
        let gc = self.world.sublet(&["gc"]);
        assert!(gc.status.success(), "{after}: {gc:?}");
        let ledger = ledger(self.world);
        let alive = exists(self.world, "victim");
        let state = lease_of(&ledger, "victim").map(|lease| lease["state"].clone());
        assert_eq!(state, alive.then(|| json!("active")), "{after}: the container's lease");
        assert_eq!(lease_of(&ledger, "holder").is_some(), self.warm, "{after}");
        self.assert_daemons(&ledger, alive, after);
        self.assert_files(edited, after);
        self.assert_account(alive, after);
    }

    /// crun forgets a container that it has killed before its process is gone; its lease is kept till then.
    fn wait_for_death(&self) {
        let ledger = ledger(self.world);
        if exists(self.world, "victim") {
            return;
        }
        let init = lease_of(&ledger, "victim").map(|lease| &lease["init"]["process"]["pid"]);
        let pid = init.and_then(Value::as_i64).unwrap_or(0);
        let stat = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        assert!(eventually(|| stat().is_empty() || stat().contains(") Z ")), "{}", stat());
        assert!(eventually(|| !self.is_populated()), "nothing is left in its cgroup");
    }

    /// Whether the kernel still counts a process in the container's cgroup: it does for a moment after its end.
    fn is_populated(&self) -> bool {
        let below =
            self.bundle.spec["linux"]["cgroupsPath"].as_str().expect("a path").trim_start_matches('/');
        ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].iter().any(|mount| {
            let events = Path::new(mount).join(below).join("cgroup.events");
            std::fs::read_to_string(events).is_ok_and(|events| events.contains("populated 1"))
        })
    }

    /// One daemon of control and server where a lease wants it, none where not. One that was on its way
    /// when its lease went ends by itself.
    fn assert_daemons(&self, ledger: &Value, alive: bool, after: &str) {
        let wanted = usize::from(self.warm || alive);
        let right = || self.world.daemons().len() == 2 * wanted;
        assert!(eventually(right), "{after}: {:?}", self.world.daemons());
        let servers = ledger["daemons"].as_array().map_or(0, Vec::len);
        assert!(self.warm || servers >= wanted, "{after}: {ledger}");
    }

    /// There is no temporary file anywhere, and config.json is the engine's or completely edited.
    fn assert_files(&self, edited: &Value, after: &str) {
        let state = self.world.state_dir();
        for name in names(&state) {
            let known = [
                "clearing.lock",
                "events.jsonl",
                "health.lock",
                "inventory.json",
                "ledger.json",
                "ledger.json.copy",
                "lock",
                "mps",
                "no-checkpoint.conf",
                "refresh.lock",
                "roots",
            ];
            assert!(known.contains(&name.as_str()), "{after}: {name} is left in the state directory");
        }
        for key in names(&state.join("mps")) {
            for name in names(&state.join("mps").join(&key)) {
                let known = ["asking", "lock", "log", "pipe", "public"];
                assert!(known.contains(&name.as_str()), "{after}: mps/{key}/{name} is left");
            }
        }
        assert_eq!(names(&self.bundle.dir), ["config.json", "err", "out", "rootfs"], "{after}");
        if !exists(self.world, "victim") {
            let left = Command::new("find")
                .arg(self.bundle.dir.join("rootfs"))
                .args(["-type", "f", "-empty"])
                .output();
            let left = String::from_utf8_lossy(&left.expect("find runs").stdout).into_owned();
            assert_eq!(left, "", "{after}: mount points are left in the root filesystem");
        }
        let config = self.bundle.config();
        let whole = config == self.bundle.spec || without_lease(config.clone()) == *edited;
        assert!(whole, "{after}: config.json is neither the engine's nor an edited one: {config}");
    }

    /// One H200: 143771 MiB less 512 reserved; 66 for an MPS server; 8192 for the container.
    fn assert_account(&self, alive: bool, after: &str) {
        let (sm, mib) = match (self.warm, alive) {
            (true, true) => (25.0, 135_001),
            (true, false) => (75.0, 143_193),
            (false, true) => (50.0, 135_001),
            (false, false) => (100.0, 143_259),
        };
        let mut free = Value::Null;
        let right = || {
            free = self.world.status()["devices"][0]["free"].clone();
            free == json!({"sm_percent": sm, "memory_bytes": mib * 1_048_576_u64})
        };
        assert!(eventually(right), "{after}: {free} is free, not {sm} % and {mib} MiB");
    }

    /// The engine tries again with the config.json that it writes.
    fn again(&self, after: &str) {
        let created = self.bundle.create();
        assert!(created.ok, "{after}: {created:?}");
        assert!(lease_of(&ledger(self.world), "victim").is_some(), "{after}");
        self.bundle.down();
        assert!(lease_of(&ledger(self.world), "victim").is_none(), "{after}");
    }
}

/// The members that every edit adds.
fn without_lease(mut config: Value) -> Value {
    if let Some(annotations) = config["annotations"].as_object_mut() {
        let lease = annotations.shift_remove("sublet.lease");
        assert_eq!(lease.and_then(|lease| lease.as_str().map(str::len)), Some(16));
        annotations.shift_remove("sublet.lease.record");
        annotations.shift_remove("sublet.lease.edits");
    }
    config
}

fn create(warm: bool) {
    let world = World::simulated("h200", "");
    let scene = Scene::new(&world, warm);
    let arguments = scene.create_arguments();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    // The first run is not killed, so that the state directory is complete afterwards.
    scene.again("nothing");
    scene.bundle.write();
    let calls = traced(&world, &arguments, &scene.bundle);
    let edited = without_lease(scene.bundle.config());
    scene.bundle.down();
    let points = points(&calls);
    for point in &points {
        let after = format!("killed at {}", point.line);
        killed(&scene, &arguments, point, || scene.bundle.write());
        scene.assert_restored(&edited, &after);
        scene.again(&after);
    }
    report("create", warm, world.engine, &calls, &points);
}

fn delete(warm: bool, stopped: bool) {
    let world = World::simulated("h200", "");
    let scene = Scene::new(&world, warm);
    let arguments: &[&str] = if stopped { &["delete", "victim"] } else { &["delete", "--force", "victim"] };
    let prepare = || {
        scene.bundle.up();
        if stopped {
            assert!(scene.bundle.kill("KILL").ok);
            assert!(eventually(|| !exists(&world, "victim")));
        }
    };
    prepare();
    let edited = without_lease(scene.bundle.config());
    let calls = traced(&world, arguments, &scene.bundle);
    let points = points(&calls);
    for point in &points {
        let after = format!("killed at {}", point.line);
        killed(&scene, arguments, point, prepare);
        scene.assert_restored(&edited, &after);
        scene.bundle.down();
        let ledger = ledger(&world);
        assert!(lease_of(&ledger, "victim").is_none(), "{after}: {ledger}");
        assert!(!exists(&world, "victim"), "{after}");
        scene.assert_restored(&edited, &format!("{after} and deleted"));
    }
    report(
        if stopped { "delete of a stopped container" } else { "delete --force" },
        warm,
        world.engine,
        &calls,
        &points,
    );
}

/// Prints past the test harness's capture.
fn report(what: &str, warm: bool, engine: Engine, calls: &[Call], points: &[Call]) {
    let daemon = if warm { "another lease keeps the daemon" } else { "no daemon" };
    let changing = calls.iter().filter(|call| call.changes).count();
    let mut line = String::new();
    let _ = writeln!(
        line,
        "kill: {what}, {daemon}, {engine:?}: {} kill points around {changing} state-changing calls of {}",
        points.len(),
        calls.len()
    );
    // The test harness hides the output of a test that succeeds. Standard error may be a file, so this appends.
    let stderr = std::fs::OpenOptions::new().append(true).open("/dev/stderr");
    let _ = stderr.and_then(|mut stderr| stderr.write_all(line.as_bytes()));
}

#[test]
fn c5_create_with_a_warm_daemon() {
    if !skip_unless_root() {
        create(true);
    }
}

#[test]
fn c5_create_with_a_cold_daemon() {
    if !skip_unless_root() {
        create(false);
    }
}

#[test]
fn c5_delete_beside_another_container() {
    if !skip_unless_root() {
        delete(true, false);
    }
}

#[test]
fn c5_delete_of_the_last_container() {
    if !skip_unless_root() {
        delete(false, false);
    }
}

#[test]
fn c5_delete_of_a_stopped_container() {
    if !skip_unless_root() {
        delete(false, true);
    }
}
