//! Podman killed with SIGKILL, in parts and as a whole, at every step of a container's life, rootful and
//! rootless, by hook and by runtime: the next sublet command alone puts everything right. Docker's matrix is
//! in docker.rs, the shim's own, by system calls, in kill.rs. Runs in the root that tests/engines/enter gives.

use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use nix::unistd::Pid;
use sublet_e2e::docker::skip_unless_engines;
use sublet_e2e::killing::{assert_no_daemons, contained, end, end_all, engine, mount_points};
use sublet_e2e::podman::Podman;
use sublet_e2e::rootless::Rootless;
use sublet_e2e::{Finished, Stopping, World, eventually};

const POLICY: &str = "[[policy]]\nuser = \"tester\"\nsm = 50\nmemory = \"16GiB\"\nleases = 8\n";

/// Where it stops, and who is killed there. `daemon`: the lease is written down and config.json is not
/// edited yet; `before-create`: it is edited; `running`: nothing stops. Those that are not killed go on.
const POINTS: [(&str, &[Option<&str>]); 8] = [
    ("daemon", &[Some("podman"), None]),
    ("before-create", &[Some("podman"), Some("conmon"), None]),
    ("after-create", &[Some("podman"), Some("conmon"), None]),
    ("before-start", &[Some("podman"), Some("conmon"), None]),
    ("after-start", &[Some("podman"), Some("conmon"), None]),
    ("running", &[Some("conmon"), None]),
    ("before-delete", &[Some("podman"), None]),
    ("after-delete", &[Some("podman"), None]),
];

/// One way into Podman.
struct Side<'a> {
    world: &'a World,
    stopping: &'a Stopping,
    podman: &'a dyn Fn(&[&str]) -> Command,
    /// `--runtime=…`
    runtime: String,
    /// Whether root may take away what a killed container left in its root filesystem.
    cleans: bool,
}

impl Side<'_> {
    fn podman(&self, arguments: &[&str]) -> Command {
        let mut command = (self.podman)(&[&[self.runtime.as_str()], arguments].concat());
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    fn run(&self) -> Command {
        let share = ["--annotation=sublet.sm=25", "--annotation=sublet.memory=1GiB"];
        self.podman(&[&["run", "-d", "--name=victim"], &share[..], &["probe", "sleep", "600"]].concat())
    }

    /// Every point there is, one after the other.
    fn killed_everywhere(&self) {
        for (stage, victims) in POINTS {
            for victim in victims {
                self.killed(stage, *victim);
            }
        }
        done(self.run(), "afterwards");
        assert_eq!(self.world.leases().len(), 1);
        done(self.podman(&["rm", "-f", "-t0", "victim"]), "afterwards");
        self.assert_nothing_left("afterwards");
    }

    fn killed(&self, stage: &str, victim: Option<&str>) {
        let at = format!("{stage}, {} killed", victim.unwrap_or("all"));
        eprintln!("{at}");
        if stage == "running" {
            done(self.run(), &at);
            end(&engine(self.world, victim));
            assert_eq!(self.world.leases().len(), 1, "{at}: the container lives");
        } else {
            self.killed_at(stage, victim, &at);
        }
        self.assert_accounted(&at);
        end_all(self.world);
        // What was killed is in its cgroup for a moment after it has let go of everything else.
        let freed = || {
            let gc = self.world.sublet(&["gc"]);
            assert!(gc.status.success(), "{at}: {gc:?}");
            self.world.booked().is_empty()
        };
        assert!(eventually(freed), "{at}: {:?}", self.world.booked());
        self.assert_nothing_left(&at);
        // Podman may need a second look to find out what has become of its container.
        for _ in 0..2 {
            let _ = self.podman(&["rm", "-f", "-t0", "victim"]).output();
        }
        assert_eq!(mount_points(self.world.dir.path()), "", "{at}: mount points are left");
    }

    fn killed_at(&self, stage: &str, victim: Option<&str>, at: &str) {
        let mut command = if stage.ends_with("delete") {
            done(self.run(), at);
            self.podman(&["rm", "-f", "-t0", "victim"])
        } else {
            self.run()
        };
        self.stopping.at(stage);
        let said = self.world.dir.path().join("podman.err");
        let error = std::fs::File::create(&said).expect("a file");
        let mut client = command.stderr(error).spawn().expect("podman runs");
        let said = || std::fs::read_to_string(&said).unwrap_or_default();
        let log = || std::fs::read_to_string(self.world.dir.path().join("sublet.log")).unwrap_or_default();
        assert!(eventually(|| self.stopping.has_stopped()), "{at}: not reached: {} {}", said(), log());
        end(&engine(self.world, victim));
        if victim == Some("podman") {
            // Some command frees what it may before the others go on.
            let _ = self.world.leases();
        }
        self.stopping.go_on();
        let _ = client.wait();
        if victim == Some("podman") {
            // What goes on is let come to its end: killed half-way it would leave what nobody is there to remove.
            let creates = |name: &str| !engine(self.world, Some(name)).is_empty();
            let ended = || !["crun", "runc", "sublet-hook"].into_iter().any(creates);
            assert!(eventually(ended), "{at}: what creates the container does not end");
        }
    }

    /// What lives on has its lease. (One whose lease has ended is created as far as the hook that says so.)
    fn assert_accounted(&self, at: &str) {
        let program = |pid: &Pid| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let runs = |pid: &Pid| program(pid).starts_with(b"sleep\0");
        for _ in 0..5 {
            let held = self.world.leases().len();
            let running = contained(self.world).iter().any(runs);
            assert!(held == 1 || !running, "{at}: a container runs without a lease");
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }

    fn assert_nothing_left(&self, at: &str) {
        let leases = || self.world.leases();
        assert!(eventually(|| leases().is_empty()), "{at}: {:?}", leases());
        assert_no_daemons(self.world, at);
        self.world.assert_empty();
        let driver = self.world.driver_root.as_ref().expect("simulated").display().to_string();
        let mounts = std::fs::read_to_string("/proc/self/mounts").expect("/proc");
        assert!(!mounts.lines().any(|line| line.contains(&driver)), "{at}: mounts are left: {mounts}");
        if self.cleans {
            assert_eq!(mount_points(self.world.dir.path()), "", "{at}: mount points are left");
        }
    }
}

/// crun keeps what hooks say to itself.
fn with_log(world: World) -> World {
    let log = format!("[runtime]\nlog = \"{}/sublet.log\"\n", world.dir.path().display());
    let text = std::fs::read_to_string(&world.config).expect("config.toml").replacen("[runtime]\n", &log, 1);
    std::fs::write(&world.config, text).expect("config.toml is written");
    world
}

fn done(mut command: Command, at: &str) {
    let finished = Finished::of(&command.output().expect("podman runs"));
    assert!(finished.ok, "{at}: {finished:?}");
}

/// As root: the hook above a runtime that stops, or the shim above it.
fn rootful(shim: bool) {
    let world = with_log(World::simulated("h200", ""));
    let stopping = Stopping::install(&world);
    let podman = Podman::up(world);
    let dir = podman.world.dir.path();
    let runtime = if shim {
        std::fs::remove_file(dir.join("hooks/sublet.json")).expect("the hook is there");
        "--runtime=sublet".to_owned()
    } else {
        format!("--runtime={}/stopping-{}", dir.display(), podman.world.engine.program())
    };
    let command = |arguments: &[&str]| {
        let mut command = podman.command();
        command.args(arguments);
        command
    };
    Side { world: &podman.world, stopping: &stopping, podman: &command, runtime, cleans: true }
        .killed_everywhere();
}

/// As a user with `sublet serve`, the same.
fn rootless(shim: bool) {
    let world = with_log(World::simulated("h200", POLICY));
    let stopping = Stopping::install(&world);
    let engine = world.engine.program();
    let rootless = Rootless::serving(world);
    // The runtime that stops says so there, and is the user's.
    std::fs::set_permissions(rootless.dir(), std::fs::Permissions::from_mode(0o1777)).expect("chmod");
    let dir = rootless.dir();
    let runtime = if shim {
        std::fs::remove_file(dir.join("hooks/sublet.json")).expect("the hook is there");
        format!("--runtime={}/bin/shim", dir.display())
    } else {
        format!("--runtime={}/stopping-{engine}", dir.display())
    };
    let command = |arguments: &[&str]| rootless.podman(arguments);
    Side { world: &rootless.world, stopping: &stopping, podman: &command, runtime, cleans: false }
        .killed_everywhere();
}

#[test]
fn podman_by_hook() {
    if !skip_unless_engines() {
        rootful(false);
    }
}

#[test]
fn podman_by_runtime() {
    if !skip_unless_engines() {
        rootful(true);
    }
}

#[test]
fn rootless_podman_by_hook() {
    if !skip_unless_engines() {
        rootless(false);
    }
}

#[test]
fn rootless_podman_by_runtime() {
    if !skip_unless_engines() {
        rootless(true);
    }
}

/// Podman is killed while its container waits for a share at `entry point`: the waiting process notices, and nothing
/// is created.
fn waiting(entry_point: &str) {
    let world = with_log(World::simulated("h200", ""));
    let podman = Podman::up(world);
    let world = &podman.world;
    let dir = world.dir.path();
    let hook = dir.join("hooks/sublet.json");
    let mut runtime: &[&str] = &[];
    match entry_point {
        "sublet-runtime" => {
            std::fs::remove_file(hook).expect("the hook is there");
            runtime = &["--runtime=sublet"];
        }
        // Run by the low-level runtime, which conmon runs.
        "createRuntime" => {
            let mut late = podman.hook();
            late["stages"] = serde_json::json!([entry_point]);
            late["hook"]["args"] = serde_json::json!(["sublet-hook", entry_point]);
            std::fs::write(hook, late.to_string()).expect("the hook is written");
        }
        _ => {}
    }
    let holder = world.bundle("holder", &[("sublet.mode", "exclusive")], &["/bin/sleep", "600"]);
    holder.up();
    let run = ["run", "-d", "--name=victim", "--annotation=sublet.sm=25", "--annotation=sublet.wait=60s"];
    let mut command = podman.command();
    command
        .args(runtime)
        .args(run)
        .args(["probe", "sleep", "600"])
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut client = command.spawn().expect("podman runs");
    let program = if entry_point == "sublet-runtime" { entry_point } else { "sublet-hook" };
    let waits = || engine(world, Some(program));
    assert!(eventually(|| !waits().is_empty()), "nobody waits: {:?}", engine(world, None));
    std::thread::sleep(std::time::Duration::from_millis(300));
    end(&engine(world, Some("podman")));
    let _ = client.wait();
    assert!(eventually(|| waits().is_empty()), "it waits on");
    holder.down();
    // A process that had gone on waiting would have the share by now.
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert_eq!(contained(world), Vec::<Pid>::new(), "a container that nobody knows");
    assert_eq!(world.leases(), Vec::<serde_json::Value>::new());
    let _ = podman.cli(&["rm", "-f", "-t0", "victim"]);
    podman.world.assert_empty();
}

#[test]
fn podman_while_its_container_waits_by_runtime() {
    if !skip_unless_engines() {
        waiting("sublet-runtime");
    }
}

#[test]
fn podman_while_its_container_waits_by_hook() {
    if !skip_unless_engines() {
        waiting("precreate");
    }
}

#[test]
fn podman_while_its_container_waits_in_a_hook_of_the_runtimes() {
    if !skip_unless_engines() {
        waiting("createRuntime");
    }
}
