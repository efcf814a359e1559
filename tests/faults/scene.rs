//! The host of the runs: a simulated driver, a low-level runtime that takes no time, and what must hold after each run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use sublet_e2e::user::Host as Users;
use sublet_e2e::{Bundle, Finished, World, eventually};

use crate::injector::{Fault, Seen};

/// Where the programs that are followed read and write.
#[derive(Clone)]
pub struct Files {
    pub stdin: PathBuf,
    pub stdout: PathBuf,
    pub stderr: PathBuf,
}

/// One host.
pub struct Host {
    /// The driver, configuration and leases; and `sublet serve`, if it runs.
    pub users: Users,
    pub files: Files,
    /// The engine's log, `--log`.
    pub log: PathBuf,
}

/// What a container of the tests asks for.
pub const SHARE: &[(&str, &str)] = &[("sublet.sm", "50"), ("sublet.memory", "8GiB")];
const HOLDER: &[(&str, &str)] = &[("sublet.sm", "25")];

impl Host {
    pub fn new(topology: &str, extra: &str) -> Self {
        Self::of(Users { serve: None, world: World::simulated(topology, extra) })
    }

    /// One with a real low-level runtime.
    pub fn real(topology: &str, extra: &str) -> Self {
        Self::with_runtime(Users { serve: None, world: World::simulated(topology, extra) })
    }

    /// One with users without root.
    pub fn of(users: Users) -> Self {
        let world = &users.world;
        let dir = world.dir.path();
        let low_level = dir.join("low-level/runc");
        fs::create_dir(dir.join("low-level")).expect("a directory");
        fs::write(&low_level, include_str!("low-level")).expect("the low-level runtime is written");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&low_level, mode).expect("and can be run");
        let text = fs::read_to_string(&world.config).expect("config.toml is there");
        let named = format!("low_level = [\"{}\"]", world.engine.program());
        assert!(text.contains(&named), "config.toml names no low-level runtime");
        fs::write(&world.config, text.replace(&named, &format!("low_level = [\"{}\"]", low_level.display())))
            .expect("written");
        Self::with_runtime(users)
    }

    /// One with the low-level runtime that its configuration names.
    fn with_runtime(users: Users) -> Self {
        let dir = users.world.dir.path();
        let of = |name: &str| dir.join(name);
        let files = Files { stdin: "/dev/null".into(), stdout: of("stdout"), stderr: of("stderr") };
        let log = of("log");
        let host = Self { users, files, log };
        assert!(host.sublet(&["refresh"]).ok, "sublet refresh");
        host
    }

    /// A container that keeps the MPS daemon running.
    pub fn hold(&self) {
        let holder = self.users.world.bundle("holder", HOLDER, &["/bin/sleep", "600"]);
        holder.write();
        let created = self.undisturbed(&self.create(&holder));
        assert!(created.ok, "{created:?}");
        assert!(self.sublet(&["gc"]).ok);
    }

    pub fn shim(&self, arguments: &[&str]) -> Command {
        let mut command = self.users.world.runtime();
        command.arg("--log").arg(&self.log).args(["--log-format", "json"]).args(arguments);
        command
    }

    pub fn create(&self, bundle: &Bundle<'_>) -> Command {
        self.shim(&["create", "--bundle", bundle.dir.to_str().expect("a path of ours"), &bundle.id])
    }

    /// `run` of a container that goes on in the background.
    pub fn run(&self, bundle: &Bundle<'_>) -> Command {
        let dir = bundle.dir.to_str().expect("a path of ours");
        self.shim(&["run", "--detach", "--bundle", dir, &bundle.id])
    }

    /// A hook of config.json, as a low-level runtime calls it: with its own environment alone.
    pub fn hook(&self, hook: &Value, state: &Value) -> Finished {
        let input = self.users.world.dir.path().join("state");
        fs::write(&input, state.to_string()).expect("the hook's input is written");
        let words = |key: &str| {
            hook[key].as_array().into_iter().flatten().filter_map(Value::as_str).collect::<Vec<_>>()
        };
        let mut command = Command::new(hook["path"].as_str().unwrap_or_default());
        command.args(words("args").iter().skip(1)).env_clear();
        command.envs(words("env").iter().filter_map(|entry| entry.split_once('=')));
        command.stdin(fs::File::open(&input).expect("its input"));
        Finished::of(&command.output().expect("it runs"))
    }

    pub fn sublet(&self, arguments: &[&str]) -> Finished {
        self.undisturbed(self.users.world.command("sublet").args(arguments))
    }

    /// The low-level runtime itself.
    pub fn low_level(&self, arguments: &[&str]) {
        let mut command = Command::new(self.users.world.dir.path().join("low-level/runc"));
        let _ = command.arg("--root").arg(self.users.world.runtime_root()).args(arguments).status();
    }

    /// The same command without a fault.
    pub fn undisturbed(&self, command: &Command) -> Finished {
        let mut again = Command::new(command.get_program());
        again
            .args(command.get_args())
            .envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        again.stdin(fs::File::open(&self.files.stdin).map_or_else(|_| Stdio::null(), Stdio::from));
        Finished::of(&again.output().expect("it runs"))
    }

    /// Without what earlier runs said.
    pub fn forget_output(&self) {
        for file in [&self.log, &self.files.stdout, &self.files.stderr] {
            let _ = fs::remove_file(file);
        }
    }

    /// What the run said on standard error and in the engine's log.
    pub fn said(&self) -> String {
        let text = |file: &Path| String::from_utf8_lossy(&fs::read(file).unwrap_or_default()).into_owned();
        text(&self.files.stderr) + &text(&self.log)
    }

    /// What stands in the ledger, without asking a command that would put it right.
    pub fn ledger(&self) -> Result<Value, String> {
        let text =
            fs::read(self.users.world.state_dir().join("ledger.json")).map_err(|error| error.to_string())?;
        serde_json::from_slice(&text).map_err(|error| format!("the ledger is no JSON: {error}"))
    }

    /// The ledger without what differs from run to run.
    pub fn books(&self) -> Result<Value, String> {
        let mut ledger = self.ledger()?;
        let mut lists = ledger["mount_point_lists"].take();
        for places in lists.as_array_mut().into_iter().flatten().filter_map(Value::as_array_mut) {
            places.retain(|place| *place != SHARE_PROGRAM);
        }
        for lease in ledger["leases"].as_array_mut().into_iter().flatten() {
            for key in ["id", "owner", "init", "since", "state"] {
                lease[key] = Value::Null;
            }
            if let Some(number) =
                lease["mount_points"].as_u64().and_then(|number| usize::try_from(number).ok())
            {
                lease["mount_points"] = lists[number].clone();
            }
        }
        for server in ledger["daemons"].as_array_mut().into_iter().flatten() {
            for key in ["process", "answered_at"] {
                server[key] = Value::Null;
            }
        }
        if let Some(leases) = ledger["leases"].as_array_mut() {
            leases.sort_by_key(|lease| lease["container"]["id"].to_string());
        }
        Ok(json!({"leases": ledger["leases"], "daemons": ledger["daemons"], "mig": ledger["mig"],
            "compute_modes": ledger["compute_modes"], "drained": ledger["drained"],
            "unexplained": ledger["unexplained"], "leftovers": ledger["leftovers"],
            "driver": self.changed_modes()?}))
    }

    /// The compute modes of the driver's GPUs that are not the default one: what no ledger names, nobody restores.
    fn changed_modes(&self) -> Result<Value, String> {
        let text = match fs::read(self.users.world.dir.path().join("sim/sim/state.json")) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(json!({})),
            Err(error) => return Err(error.to_string()),
        };
        let mut state: Value = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
        if let Some(modes) = state["compute_mode"].as_object_mut() {
            modes.retain(|_, mode| *mode != 0);
        }
        Ok(state["compute_mode"].take())
    }

    /// A container without sublet's keys is refused only if it is not known by which runtime, if that cannot be
    /// started, and without memory.
    pub fn may_refuse(&self, seen: &Seen) -> bool {
        let said = self.said();
        let no_runtime = said.contains("cannot run ") || said.contains("no executable ");
        let unknown = said.contains("configuration ") && said.contains(" cannot be read");
        no_runtime || unknown || seen.signal.is_some() || said.contains("loading shared libraries")
    }

    /// `sublet gc` alone puts everything right.
    pub fn collect(&self) -> Result<(), String> {
        let gc = self.sublet(&["gc"]);
        if gc.ok { Ok(()) } else { Err(format!("sublet gc fails: {gc:?}")) }
    }

    /// `sublet gc` puts the books right; `when` says whose they are.
    pub fn comes_to(&self, wanted: &Value, when: &str) -> Result<(), String> {
        // A `sublet mps lower` of a container that has ended may hold its daemon at this moment.
        let mut result = Ok(());
        eventually(|| {
            result = self.collect().and_then(|()| self.books()).and_then(|books| {
                let differs = || format!("{when}, and in the ledger {}", difference(&books, wanted));
                if books == *wanted { Ok(()) } else { Err(differs()) }
            });
            result.is_ok()
        });
        result
    }

    /// There is no temporary file, and nothing in the state directory that does not belong there.
    pub fn tidy(&self, bundle: Option<&Bundle<'_>>) -> Result<(), String> {
        let state = self.users.world.state_dir();
        let is_left =
            |name: &String| name.starts_with('.') || name.contains("corrupt") || name.contains("rebuilding");
        // A `sublet mps lower` of a container that has ended may write the ledger at this moment.
        if !eventually(|| !names(&state).iter().any(is_left)) {
            return Err(format!("in the state directory are left {:?}", names(&state)));
        }
        let left = bundle.map(|bundle| names(&bundle.dir)).unwrap_or_default();
        match left.iter().find(|name| !["config.json", "rootfs", "process.json"].contains(&name.as_str())) {
            Some(name) => Err(format!("{name} is left in the bundle")),
            None => Ok(()),
        }
    }

    /// No process of the run is left. Daemons and containers are in sessions or groups of others.
    pub fn daemons(&self, wanted: usize) -> Result<(), String> {
        let right = || self.users.world.daemons().len() == wanted;
        if right() || eventually(right) {
            return Ok(());
        }
        Err(format!("{wanted} MPS processes should run: {:?}", self.users.world.daemons()))
    }

    /// What every run of a command must come to.
    pub fn ended_well(&self, seen: &Seen, fault: Option<Fault>) -> Result<(), String> {
        let said = self.said();
        if !seen.unknown.is_empty() {
            return Err(format!("system calls that tests/faults/table does not have: {:?}", seen.unknown));
        }
        if seen.timed_out {
            return Err(format!("it hangs: {said}"));
        }
        if said.contains("panicked at") && !before_main(&said) {
            return Err(format!("it panics: {said}"));
        }
        match (seen.signal, seen.code) {
            (Some(Signal::SIGKILL), _) if fault == Some(Fault::Kill) => Ok(()),
            // Rust's answer to memory that is refused, and to a start without what its library needs.
            (Some(Signal::SIGABRT), _) if out_of_memory(&said) || before_main(&said) => Ok(()),
            // The C library's loader does not look at what its first allocations come to.
            (Some(Signal::SIGSEGV), _) if seen.before_main => Ok(()),
            (Some(signal), _) => Err(format!("{signal} ends it: {said}")),
            (None, Some(0)) => Ok(()),
            (None, _) if seen.became.is_some() => Ok(()),
            (None, _) if said.trim().is_empty() => Err("it fails without a word".to_owned()),
            (None, _) => Ok(()),
        }
    }
}

/// Left out where it cannot be mounted (`sublet_core::oci::image`).
pub const SHARE_PROGRAM: &str = "/usr/bin/sublet-share";

/// config.json without what every edit adds, and without the program that is left out where it cannot be mounted.
pub fn without_lease(mut config: Value) -> Value {
    if let Some(annotations) = config["annotations"].as_object_mut() {
        for key in ["sublet.lease", "sublet.lease.record", "sublet.lease.edits"] {
            annotations.shift_remove(key);
        }
    }
    if let Some(mounts) = config["mounts"].as_array_mut() {
        mounts.retain(|mount| mount["destination"] != SHARE_PROGRAM);
    }
    config
}

/// A node of the driver's that CUDA does without: a share that lacks it is told so, and starts.
pub const SPARE_NODE: &str = "/dev/nvidia-uvm-tools";

/// `config` as it is where the driver's node at `path`, which CUDA does without, was left out.
pub fn without_node(mut config: Value, path: &str) -> Value {
    let Some(devices) = config.pointer_mut("/linux/devices").and_then(Value::as_array_mut) else {
        return config;
    };
    let Some(at) = devices.iter().position(|device| device["path"] == path) else { return config };
    let device = devices.remove(at);
    if let Some(rules) = config.pointer_mut("/linux/resources/devices").and_then(Value::as_array_mut) {
        rules.retain(|rule| rule["major"] != device["major"] || rule["minor"] != device["minor"]);
    }
    config
}

/// Whether what it said is of Rust's library before `main`, which no program can change.
fn before_main(said: &str) -> bool {
    said.contains("library/std/src/rt.rs")
        || said.contains("stack_overflow.rs")
        || said.contains("fatal runtime error")
}

/// Whether Rust's library ended it for want of memory, or the C library's malloc did, which does not expect the second of
/// its two first brk(2) to fail.
pub fn out_of_memory(said: &str) -> bool {
    said.contains("memory allocation of") || said.contains("malloc assertion failure in sysmalloc")
}

/// Where two values differ, for people.
pub fn difference(found: &Value, wanted: &Value) -> String {
    let mut all = Vec::new();
    differences("", found, wanted, &mut all);
    all.truncate(5);
    all.join("; ")
}

fn differences(at: &str, found: &Value, wanted: &Value, all: &mut Vec<String>) {
    match (found, wanted) {
        (Value::Object(found), Value::Object(wanted)) => {
            let keys: std::collections::BTreeSet<&String> = found.keys().chain(wanted.keys()).collect();
            for key in keys {
                let of =
                    |object: &serde_json::Map<String, Value>| object.get(key).cloned().unwrap_or_default();
                differences(&format!("{at}/{key}"), &of(found), &of(wanted), all);
            }
        }
        (Value::Array(found), Value::Array(wanted)) => {
            all.extend(found.iter().filter(|one| !wanted.contains(one)).map(|one| format!("{at} has {one}")));
            all.extend(
                wanted.iter().filter(|one| !found.contains(one)).map(|one| format!("{at} has no {one}")),
            );
        }
        _ if found != wanted => all.push(format!("{at} is {found} and not {wanted}")),
        _ => {}
    }
}

/// Names in `dir`, sorted.
pub fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
