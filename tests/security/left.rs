//! B16 to B22: what a container that was deleted has left is ended, and nothing that may be somebody else's.
//!
//! The low-level runtime here is the real one, except that its `delete` forgets the container and ends nothing, as the real
//! one does with a process whose first thread has ended. The containers have the host's PID namespace, so that their
//! processes do not end with the first one.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::two_users::{self, ALICE};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use sublet_e2e::{Bundle, World, eventually, is_alive, programs, skip_unless_root};

const SHARE: &[(&str, &str)] = &[("sublet.gpu", "0"), ("sublet.mode", "time-slice")];
/// Two processes.
const TWO: &[&str] = &["/bin/sh", "-c", "sleep 600 & exec sleep 600"];

/// A world whose runtime forgets at `delete`; where the file `slow` is, it then hangs, and where `refuses` is, it fails.
fn world() -> World {
    let world = World::simulated("h200", "");
    let engine = world.engine.program();
    let dir = world.dir.path();
    std::fs::create_dir(dir.join("forgets")).expect("a directory");
    let script = dir.join("forgets").join(engine);
    let text = format!(
        "for id; do :; done\ncase \" $* \" in *' delete '*)\n[ ! -e {0}/refuses ] || exit 1\n\
         [ ! -e {0}/hangs ] || exec sleep 60\nrm -r \"$2/$id\"\n[ ! -e {0}/slow ] || exec sleep 60\nexit ;; esac\n\
         exec {engine} \"$@\"\n",
        dir.display()
    );
    programs::script(&script, &text);
    let config = std::fs::read_to_string(&world.config).expect("config.toml");
    let config = config
        .replace(&format!("low_level = [\"{engine}\"]"), &format!("low_level = [\"{}\"]", script.display()));
    std::fs::write(&world.config, config).expect("config.toml");
    world
}

/// A container in the host's PID namespace, and what is in its cgroup. All of it is ended at the end.
struct Left<'a> {
    bundle: Bundle<'a>,
    cgroup: PathBuf,
    bystander: Option<Child>,
}

impl<'a> Left<'a> {
    fn up(world: &'a World, id: &str, cgroup: Option<&str>) -> Self {
        let mut bundle = world.bundle(id, SHARE, TWO);
        let namespaces = bundle.spec["linux"]["namespaces"].as_array_mut().expect("namespaces");
        namespaces.retain(|namespace| namespace["type"] != "pid");
        if let Some(path) = cgroup {
            bundle.spec["linux"]["cgroupsPath"] = json!(path);
        }
        bundle.up();
        let lease = world.leases().into_iter().find(|lease| lease["container_id"] == id).expect("a lease");
        assert_eq!(lease["state"], "active");
        let cgroup = PathBuf::from(ledger(world, id)["init"]["cgroup"].as_str().expect("a cgroup"));
        let left = Self { bundle, cgroup, bystander: None };
        assert!(eventually(|| left.processes().len() == 2), "{:?}", left.processes());
        left
    }

    /// Puts the process that `command` starts into the cgroup.
    fn join(&mut self, mut command: Command) -> Pid {
        let child = command.stdin(Stdio::null()).spawn().expect("it starts");
        let pid = i32::try_from(child.id()).expect("a pid");
        std::fs::write(self.cgroup.join("cgroup.procs"), pid.to_string()).expect("it is moved");
        self.bystander = Some(child);
        Pid::from_raw(pid)
    }

    fn processes(&self) -> Vec<Pid> {
        let text = std::fs::read_to_string(self.cgroup.join("cgroup.procs")).unwrap_or_default();
        let pids = text.lines().filter_map(|line| line.parse().ok()).map(Pid::from_raw);
        pids.filter(|pid| is_alive(*pid)).collect()
    }

    /// `delete`, killed when the runtime has forgotten the container.
    fn delete_killed(&self, world: &World) {
        std::fs::write(world.dir.path().join("slow"), "").expect("a file");
        let mut shim = self.bundle.runtime();
        let mut shim = shim.args(["delete", &self.bundle.id]).spawn().expect("it starts");
        let record = world.runtime_root().join(&self.bundle.id);
        assert!(eventually(|| !record.exists()), "it is not deleted");
        shim.kill().expect("it runs");
        shim.wait().expect("it ends");
        std::fs::remove_file(world.dir.path().join("slow")).expect("the file");
    }

    /// Deletes the container, and checks that all others of its cgroup live on and are named with `why`, and with how they
    /// can be ended.
    fn stays(&self, world: &World, why: &str) {
        self.is_named(world, &[why, &self.cgroup.display().to_string(), "kill -KILL"]);
    }

    /// As [`Left::stays`]; everything that says something of the container has all of `parts`.
    fn is_named(&self, world: &World, parts: &[&str]) {
        let id = &self.bundle.id;
        let first = Pid::from_raw(
            i32::try_from(ledger(world, id)["init"]["process"]["pid"].as_i64().expect("a pid")).unwrap(),
        );
        let others: Vec<Pid> = self.processes().into_iter().filter(|pid| *pid != first).collect();
        let deleted = self.bundle.delete();
        assert!(deleted.ok, "{deleted:?}");
        let collected = text(&world.sublet(&["gc"]).stdout);
        assert!(!collected.contains("was ended"), "{collected}");
        let left = self.processes();
        assert!(others.iter().all(|pid| left.contains(pid)), "of {others:?} {left:?} is left");
        assert_eq!(ledger(world, id)["state"], "ending");
        let status = world.status();
        let released = world.sublet(&["lease", "release", id]);
        assert!(!released.status.success());
        let events = world.sublet(&["events", "--filter", "kind=left-running"]);
        let doctor = world.sublet(&["doctor"]);
        for said in [
            collected,
            status["warnings"].to_string(),
            text(&released.stderr),
            text(&events.stdout),
            text(&doctor.stdout),
        ] {
            for part in parts {
                assert!(said.contains(*part), "{part} is not in: {said}");
            }
        }
    }
}

impl Drop for Left<'_> {
    fn drop(&mut self) {
        for pid in self.processes() {
            let _ = kill(pid, Signal::SIGKILL);
        }
        if let Some(bystander) = &mut self.bystander {
            let _ = bystander.wait();
        }
        let root = Path::new("/sys/fs/cgroup");
        eventually(|| self.processes().is_empty());
        for dir in self.cgroup.ancestors().take_while(|dir| *dir != root) {
            let _ = std::fs::remove_dir(dir);
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The lease of container `id`, as it is written.
fn ledger(world: &World, id: &str) -> Value {
    let text = std::fs::read(world.state_dir().join("ledger.json")).expect("the ledger");
    let ledger: Value = serde_json::from_slice(&text).expect("JSON");
    let leases = ledger["leases"].as_array().expect("leases");
    leases.iter().find(|lease| lease["container"]["id"] == id).cloned().unwrap_or_default()
}

/// As a process of another container: in a mount namespace of its own.
fn in_a_container() -> Command {
    let mut command = Command::new("unshare");
    command.args(["-m", "sleep", "600"]);
    command
}

#[test]
fn b16_what_is_left_in_its_own_cgroup_ends_with_delete() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let left = Left::up(&world, "leaves", None);
    let below = left.cgroup.join("below");
    std::fs::create_dir(&below).expect("a cgroup");
    if below.join("cpuset.mems").exists() {
        for name in ["cpuset.cpus", "cpuset.mems"] {
            let _ = std::fs::copy(left.cgroup.join(name), below.join(name));
        }
    }
    let processes = left.processes();
    std::fs::write(below.join("cgroup.procs"), processes[1].to_string()).expect("it is moved");
    let deleted = left.bundle.delete();
    assert!(deleted.ok, "{deleted:?}");
    assert_eq!(processes.iter().filter(|pid| is_alive(**pid)).count(), 0);
    assert_eq!(ledger(&world, "leaves"), Value::Null, "its lease is free");
    let events = text(&world.sublet(&["events", "--filter", "kind=left-ended"]).stdout);
    assert!(events.contains("(sleep), which container leaves has left, was ended"), "{events}");
    std::fs::remove_dir(below).expect("it is empty");
    world.assert_empty();
}

#[test]
fn b16_what_a_delete_that_was_killed_left_is_ended_by_gc_and_by_the_service() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let left = Left::up(&world, "leaves", None);
    let processes = left.processes();
    left.delete_killed(&world);
    assert_eq!(left.processes(), processes, "nobody has ended them");
    let said = text(&world.sublet(&["gc"]).stdout);
    assert!(said.contains("which container leaves has left, was ended"), "{said}");
    assert!(eventually(|| left.processes().is_empty()), "{:?}", left.processes());
    assert!(eventually(|| world.leases().is_empty()), "{:?}", world.leases());
    drop(left);
    let left = Left::up(&world, "again", None);
    left.delete_killed(&world);
    let mut service = world.command("sublet").arg("serve").spawn().expect("it starts");
    assert!(eventually(|| left.processes().is_empty()), "{:?}", left.processes());
    service.kill().expect("it runs");
    service.wait().expect("it ends");
    assert!(eventually(|| world.leases().is_empty()), "{:?}", world.leases());
    world.assert_empty();
}

/// runc and crun take such a container for stopped, and send it no signal.
#[test]
fn b16_kill_and_forced_delete_end_a_first_process_without_its_first_thread() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    for signal in [None, Some("KILL")] {
        let bundle = world.bundle("first", SHARE, &["cuda-probe", "leaderless", "later", "hold", "600"]);
        bundle.up();
        let started = bundle.event("info");
        let pid = world.leases()[0]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).expect("a pid");
        let first = Pid::from_raw(pid);
        assert!(eventually(|| std::fs::read_link(format!("/proc/{pid}/exe")).is_err()), "{started}");
        assert!(is_alive(first));
        if let Some(signal) = signal {
            let killed = bundle.kill(signal);
            assert!(killed.ok, "{killed:?}");
            assert!(eventually(|| !is_alive(first)), "it is not ended");
        }
        bundle.down();
        assert!(!is_alive(first), "before the call returns");
    }
    world.assert_empty();
}

/// A cgroup v1 freezer. A process that is killed while it is frozen there stays in state D until it is let go.
struct Freezer(PathBuf);

impl Freezer {
    /// `None` where cgroups are of version 2, whose freezer lets killed processes end.
    fn hold(cgroup: &Path, pid: Pid) -> Option<Self> {
        let below = cgroup.strip_prefix("/sys/fs/cgroup/devices").ok()?;
        let freezer = Self(Path::new("/sys/fs/cgroup/freezer").join(below).join("held"));
        std::fs::create_dir(&freezer.0).expect("a cgroup");
        std::fs::write(freezer.0.join("cgroup.procs"), pid.to_string()).expect("it is moved");
        freezer.set("FROZEN");
        Some(freezer)
    }

    fn set(&self, state: &str) {
        std::fs::write(self.0.join("freezer.state"), state).expect("a state");
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        self.set("THAWED");
        eventually(|| std::fs::remove_dir(&self.0).is_ok());
    }
}

#[test]
fn b16_what_no_signal_ends_stays_booked_and_is_named() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let left = Left::up(&world, "frozen", None);
    let second = left.processes()[1];
    let Some(freezer) = Freezer::hold(&left.cgroup, second) else {
        eprintln!("skipped: no cgroup v1");
        return;
    };
    left.is_named(
        &world,
        &[&format!("process {second} (sleep"), "in state D: it ends when what it waits for does"],
    );
    assert_eq!(left.processes(), [second], "the first process is ended");
    assert_eq!(world.leases().len(), 1, "it stays booked");
    drop(freezer);
    assert!(eventually(|| left.processes().is_empty()), "{:?}", left.processes());
    assert!(world.sublet(&["gc"]).status.success());
    assert_eq!(ledger(&world, "frozen"), Value::Null, "its lease is free");
    world.assert_empty();
}

#[test]
fn b17_nothing_in_a_slice_is_ended() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let slice = format!("/{}.slice", world.dir.path().file_name().expect("a name").to_string_lossy());
    let mut left = Left::up(&world, "sliced", Some(&slice));
    left.join(in_a_container());
    left.stays(&world, "that is the root, a slice or a service");
}

/// Runtimes refuse the root for a container, so the ledger is made to say it.
#[test]
fn b17_nothing_in_the_root_cgroup_is_ended() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let left = Left::up(&world, "rooted", None);
    left.delete_killed(&world);
    let file = world.state_dir().join("ledger.json");
    let mut ledger: Value = serde_json::from_slice(&std::fs::read(&file).expect("the ledger")).expect("JSON");
    let root = root_of_hierarchy();
    let init = &mut ledger["leases"][0]["init"];
    init["cgroup"] = json!(root);
    init["cgroup_inode"] = json!(std::fs::metadata(&root).expect("it is there").ino());
    std::fs::write(&file, ledger.to_string()).expect("it is written");
    let before = left.processes().len();
    let said = || text(&world.sublet(&["gc"]).stdout);
    assert!(eventually(|| said().contains("that is the root, a slice or a service")), "{}", said());
    assert_eq!(left.processes().len(), before - 1, "the first process alone");
}

#[test]
fn b18_nothing_in_a_jobs_cgroup_is_ended() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let task = "/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0";
    let mut left = Left::up(&world, "tasked", Some(task));
    left.join(in_a_container());
    left.stays(&world, "job 4711 of Slurm's");
}

#[test]
fn b19_nothing_is_ended_where_a_process_of_the_host_is() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let mut left = Left::up(&world, "engine", None);
    let mut engine = Command::new("sleep");
    engine.arg("600");
    let engine = left.join(engine);
    left.stays(&world, &format!("process {engine} (sleep) there is the host's own"));
}

#[test]
fn b20_nothing_is_ended_that_another_container_has_too() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let shared = format!("/{}-shared", world.dir.path().file_name().expect("a name").to_string_lossy());
    let leased = Left::up(&world, "one", Some(&shared));
    let mut other = world.bundle("other", SHARE, TWO);
    other.spec = leased.bundle.spec.clone();
    other.up();
    leased.stays(&world, "container other has that cgroup, too");
    assert_eq!(world.leases().len(), 2);
    drop(leased);
    other.down();

    // Without a share it has no lease.
    let leased = Left::up(&world, "two", Some(&shared));
    let mut other = world.bundle("plain", &[], TWO);
    other.spec["linux"]["cgroupsPath"] = json!(shared);
    other.up();
    leased.stays(&world, "plain has that cgroup, too");
}

#[test]
fn b20_a_restart_under_the_same_id_is_another_container() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let left = Left::up(&world, "again", None);
    let before = left.processes();
    left.delete_killed(&world);
    let mut restarted = world.bundle("again", &[], TWO);
    restarted.spec["linux"]["cgroupsPath"] = left.bundle.spec["linux"]["cgroupsPath"].clone();
    let created = restarted.create();
    assert!(created.ok, "{created:?}");
    assert!(restarted.start().ok);
    assert!(eventually(|| left.processes().len() == 2 * before.len()), "{:?}", left.processes());
    let first = restarted.pid();
    let said = || text(&world.sublet(&["gc"]).stdout);
    assert!(eventually(|| said().contains("again has that cgroup, too")), "{}", said());
    assert!(is_alive(Pid::from_raw(first)));
    assert_eq!(
        left.processes().len(),
        3,
        "of four the first process alone is ended, which is known by its start"
    );
    assert!(restarted.delete().ok);
}

/// The root of the hierarchy by which containers are known.
fn root_of_hierarchy() -> PathBuf {
    let mount = Path::new("/sys/fs/cgroup");
    if mount.join("cgroup.controllers").exists() { mount.to_owned() } else { mount.join("devices") }
}

#[test]
fn b21_of_a_users_container_the_users_processes_alone_are_ended() {
    if skip_unless_root() {
        return;
    }
    let host = two_users::serving("h200");
    let name = format!("{}-users", host.world.dir.path().file_name().expect("a name").to_string_lossy());
    let cgroup = root_of_hierarchy().join(&name);
    std::fs::create_dir(&cgroup).expect("a cgroup");
    let within = |words: &[&str]| {
        let child =
            Command::new("unshare").arg("-m").args(words).args(["sleep", "600"]).spawn().expect("it starts");
        std::fs::write(cgroup.join("cgroup.procs"), child.id().to_string()).expect("it is moved");
        let comm = format!("/proc/{}/comm", child.id());
        assert!(eventually(|| std::fs::read_to_string(&comm).is_ok_and(|name| name == "sleep\n")));
        child
    };
    let alice: &[&str] = &["setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups"];
    let (mut first, mut second, mut roots) = (within(alice), within(alice), within(&[]));
    let mut speaking = host.command(ALICE, "speak");
    let speaking = speaking.arg(host.socket()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut speaking = speaking.spawn().expect("it runs");
    let mut answers = BufReader::new(speaking.stdout.take().expect("piped"));
    let mut ask = |line: &Value| {
        writeln!(speaking.stdin.as_mut().expect("piped"), "{line}").expect("it listens");
        let mut answer = String::new();
        answers.read_line(&mut answer).expect("an answer");
        serde_json::from_str::<Value>(&answer).expect("JSON")
    };
    let container = json!({"id": "c", "bundle": "/b", "rootfs": "/b/r", "record": "/r/c"});
    let granted = ask(&json!({"v": 1, "do": "admit", "container": container, "owner": null,
        "annotations": {"sublet.sm": "25", "sublet.memory": "8GiB"}, "image": {"library_dir": null, "nix": false,
        "tmp_is_host": false, "created": [], "warnings": []}}));
    let lease = &granted["granted"]["lease"];
    let bound =
        ask(&json!({"v": 1, "do": "bind", "lease": lease, "container": container, "pid": first.id()}));
    assert_eq!(bound["done"], json!(true), "{granted} {bound}");
    let end = json!({"v": 1, "do": "end", "lease": lease});
    let refused = ask(&end);
    assert!(refused["refused"].is_object(), "{refused}");
    assert_eq!(first.try_wait().expect("ours"), None, "a container that runs is left alone");
    first.kill().expect("it runs");
    first.wait().expect("it ends");
    let refused = ask(&end);
    assert!(refused["refused"]["temporary"] == true, "{refused}");
    assert!(eventually(|| second.try_wait().expect("ours").is_some()), "{refused}");
    assert_eq!(roots.try_wait().expect("ours"), None, "{refused}");
    let events = text(&host.world.sublet(&["events", "--filter", "kind=left-running"]).stdout);
    let why = format!(
        "process {} (sleep), which container c has left, is not ended: it does not belong to uid 1000",
        roots.id()
    );
    assert!(events.contains(&why), "{events}");
    assert_eq!(host.leases()[0]["state"], "ending", "what is left stays booked");
    roots.kill().expect("it runs");
    roots.wait().expect("it ends");
    assert_eq!(ask(&end)["refused"], Value::Null);
    drop(speaking.stdin.take());
    speaking.wait().expect("it ends");
    std::fs::remove_dir(cgroup).expect("it is empty");
    host.world.assert_empty();
}

#[test]
fn b22_a_slow_or_refused_delete_leaves_a_running_container_alone() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let left = Left::up(&world, "runs", None);
    let processes = left.processes();
    let file = |name: &str| world.dir.path().join(name);
    std::fs::write(file("refuses"), "").expect("a file");
    assert!(!left.bundle.delete().ok);
    assert_eq!(world.leases()[0]["state"], "active");
    std::fs::remove_file(file("refuses")).expect("the file");
    std::fs::write(file("hangs"), "").expect("a file");
    let mut shim = left.bundle.runtime().args(["delete", "runs"]).spawn().expect("it starts");
    assert!(eventually(|| ledger(&world, "runs")["state"] == "ending"), "it is marked");
    assert!(world.sublet(&["gc"]).status.success());
    assert_eq!(left.processes(), processes, "while it takes its time");
    shim.kill().expect("it runs");
    shim.wait().expect("it ends");
    assert!(world.sublet(&["gc"]).status.success());
    assert_eq!(left.processes(), processes, "after it was killed");
    assert_eq!(world.leases()[0]["state"], "active");
    std::fs::remove_file(file("hangs")).expect("the file");
}
