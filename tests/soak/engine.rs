//! What starts the containers: the low-level runtimes by themselves, Docker or Podman.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sublet_e2e::{Bundle, Finished, World};

use crate::plan::{By, Limit};

/// No command takes longer, on however busy a machine.
const LONGEST: Duration = Duration::from_secs(120);
/// Nor one that a limit may make hang.
const LONGEST_LIMITED: Duration = Duration::from_secs(20);

/// What a container is.
pub struct Wanted<'a> {
    /// Its name, which is used again and again.
    pub name: &'a str,
    pub annotations: &'a [(&'a str, &'a str)],
    pub by: By,
    pub command: &'a [&'a str],
}

/// What to do to a command meanwhile.
#[derive(Clone, Copy, Debug)]
pub enum Harm {
    None,
    KilledAfter(Duration),
    Limited(Limit),
}

/// A way to start and end containers. Nothing of it panics, whatever has just been killed.
pub trait Engine: Sync {
    fn world(&self) -> &World;
    /// Programs of the engine that may be killed at any moment.
    fn parts(&self) -> &'static [&'static str];
    /// Starts a container. On success the standard output is its id.
    fn start(&self, wanted: &Wanted<'_>, harm: Harm) -> Finished;
    /// Ends and removes a container, if there is one.
    fn stop(&self, name: &str, harm: Harm) -> Finished;
    fn exec(&self, name: &str, command: &[&str]) -> Finished;
    /// The root filesystem of a container, where it outlives the container.
    fn kept_rootfs(&self, _name: &str) -> Option<PathBuf> {
        None
    }
    /// Whether the container gets its share by a hook at prestart.
    fn at_prestart(&self, _wanted: &Wanted<'_>) -> bool {
        false
    }
    /// Brings back what was killed of the engine itself.
    fn recover(&self) {}
}

/// Runs a command to its end, and says in its standard error that it did not end in time. Its output goes to files,
/// because a container keeps it open.
pub fn bounded(mut command: Command, world: &World, name: &str, harm: Harm) -> Finished {
    let path = |what: &str| world.dir.path().join(format!("{name}.{what}"));
    let file = |what: &str| File::create(path(what)).expect("a file for output");
    command.stdin(Stdio::null()).stdout(file("out")).stderr(file("err"));
    let began = Instant::now();
    let mut child = command.spawn().expect("it is installed");
    let limit = match harm {
        Harm::None => LONGEST,
        Harm::KilledAfter(after) => after,
        Harm::Limited(_) => LONGEST_LIMITED,
    };
    let (mut late, mut running) = (false, String::new());
    let status = loop {
        if let Some(status) = child.try_wait().expect("our child") {
            break status;
        }
        if began.elapsed() >= limit {
            late = matches!(harm, Harm::None | Harm::Limited(_));
            let pid = Pid::from_raw(i32::try_from(child.id()).expect("a pid"));
            running = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            let _ = kill(pid, Signal::SIGKILL);
            break child.wait().expect("our child");
        }
        std::thread::sleep(Duration::from_millis(3));
    };
    let read = |what: &str| std::fs::read(path(what)).unwrap_or_default();
    let text = |what: &str| String::from_utf8_lossy(&read(what)).into_owned();
    let mut stderr = text("err");
    if late {
        // Without descriptors or memory a runtime may hang, but not sublet.
        let whose = if matches!(harm, Harm::Limited(_)) && !running.starts_with("sublet") {
            "late"
        } else {
            "TOO LATE"
        };
        stderr = format!("{stderr}\nsoak: {whose}: {} was killed", running.trim_end());
    }
    Finished { ok: status.success(), code: status.code(), stdout: text("out"), stderr }
}

/// `command` below prlimit(1).
pub fn limited(command: &Command, limit: Limit) -> Command {
    let mut by = Command::new("prlimit");
    match limit {
        Limit::Descriptors(count) => by.arg(format!("--nofile={count}")),
        Limit::AddressSpaceMib(mib) => by.arg(format!("--as={}", mib << 20)),
    };
    by.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            by.env(name, value);
        }
    }
    by
}

/// Bundles, by runc or crun.
pub struct Plain {
    world: World,
}

impl Plain {
    pub fn new(world: World) -> Self {
        Self { world }
    }

    fn bundle(&self, wanted: &Wanted<'_>) -> Bundle<'_> {
        let mut bundle = self.world.bundle(wanted.name, wanted.annotations, wanted.command);
        if self.at_prestart(wanted) {
            bundle.hook(&["prestart", "poststop"]);
        }
        bundle.spec["root"]["path"] = serde_json::json!(bundle.dir.join("rootfs"));
        bundle
    }

    /// What Podman does: the hook's `precreate` edits the bundle's config.json, and then the low-level runtime creates
    /// the container. One process does both, so that whoever takes the lease ends when it is killed.
    fn precreate(&self, bundle: &Bundle<'_>, arguments: &[&str]) -> Command {
        let script = "hook=$1; config=$2; shift 2\n\
                      \"$hook\" precreate <\"$config\" >\"$config.new\" && mv \"$config.new\" \"$config\" && exec \"$@\"";
        let config = bundle.dir.join("config.json");
        let mut command = self.world.command("sublet-hook");
        let hook = std::mem::replace(&mut command, Command::new("sh"));
        command.args(["-c", script, "precreate"]).arg(hook.get_program()).arg(config);
        command.arg(self.world.engine.program()).arg("--root").arg(self.world.runtime_root());
        command.args(arguments).arg(&bundle.id).env("SUBLET_CONFIG", &self.world.config);
        command
    }

    fn run(&self, bundle: &Bundle<'_>, arguments: &[&str], harm: Harm) -> Finished {
        let mut command = bundle.runtime();
        command.args(arguments).arg(&bundle.id);
        if let Harm::Limited(limit) = harm {
            command = limited(&command, limit);
        }
        bounded(command, &self.world, &bundle.id, harm)
    }
}

/// Half of the bundles with a hook have it at precreate, the others at prestart.
fn by_precreate(wanted: &Wanted<'_>) -> bool {
    wanted.by == By::Hook && wanted.name.ends_with(['1', '3'])
}

impl Engine for Plain {
    fn world(&self) -> &World {
        &self.world
    }

    fn parts(&self) -> &'static [&'static str] {
        match self.world.engine {
            sublet_e2e::Engine::Runc => &["runc"],
            sublet_e2e::Engine::Crun => &["crun"],
        }
    }

    fn start(&self, wanted: &Wanted<'_>, harm: Harm) -> Finished {
        let bundle = self.bundle(wanted);
        bundle.write();
        let dir = bundle.dir.to_string_lossy().into_owned();
        let create = ["create", "--bundle", &dir];
        let created = if by_precreate(wanted) {
            // By Podman, the name of the cgroup says whose the child of a killed runtime is, which goes on for a moment.
            // Nothing does here, so that nobody could know that it still makes mount points.
            bounded(self.precreate(&bundle, &create), &self.world, &bundle.id, Harm::None)
        } else {
            self.run(&bundle, &create, harm)
        };
        if !created.ok {
            return created;
        }
        let started = self.run(&bundle, &["start"], Harm::None);
        Finished { stdout: bundle.id.clone(), ..started }
    }

    fn stop(&self, name: &str, harm: Harm) -> Finished {
        let mut command = self.world.runtime();
        command.args(["delete", "--force", name]);
        bounded(command, &self.world, name, harm)
    }

    fn at_prestart(&self, wanted: &Wanted<'_>) -> bool {
        wanted.by == By::Hook && !by_precreate(wanted)
    }

    fn kept_rootfs(&self, name: &str) -> Option<PathBuf> {
        Some(self.world.dir.path().join("bundles").join(name).join("rootfs"))
    }

    fn exec(&self, name: &str, arguments: &[&str]) -> Finished {
        let mut command = self.world.runtime();
        command.args(["exec", name]).args(arguments);
        bounded(command, &self.world, &format!("{name}.exec"), Harm::None)
    }
}
