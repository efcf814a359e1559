//! Starts the programs of a cell, as containers of an engine or as processes by hand, and ends them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde_json::json;

use super::result::{Cell, Sharing};
use sublet_core::config::Config;
use sublet_core::inventory::{Device, FileKind, Inventory, MpsPrograms};
use sublet_core::process::child::{self, ChildError};

/// An engine that hangs when it should end a container is left alone after this time.
const END_LIMIT: Duration = Duration::from_secs(30);

/// A container that is still being created cannot be killed yet: after this time it is tried again.
const KILL_AGAIN: Duration = Duration::from_millis(500);

/// The beginning of every container's name. Behind it stand this process's pid and a number.
const PREFIX: &str = "sublet-bench-";

/// The program that runs containers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Engine {
    /// `docker` with the runtime sublet, or `podman` with its hook.
    Program(&'static str),
    /// `sublet-runtime` itself, above the low-level runtime that is configured.
    Runtime(PathBuf),
}

impl Engine {
    /// The program that is started.
    pub fn program(&self) -> &Path {
        match self {
            Self::Program(program) => Path::new(program),
            Self::Runtime(program) => program,
        }
    }
}

/// The program of every container.
#[derive(Clone, Debug)]
pub struct Workload {
    pub engine: Engine,
    /// The image of an engine, or the root filesystem for the runtime itself.
    pub image: String,
    pub command: Vec<String>,
    /// Further words for the engine's `run`.
    pub options: Vec<String>,
    /// One for each container, if they are servers.
    pub ports: Vec<u16>,
    /// Where bundles are made.
    pub dir: PathBuf,
}

/// A program that was started. It is ended when this is dropped.
pub struct Running {
    pub child: Child,
    engine: Option<Engine>,
    name: String,
}

impl Workload {
    /// Starts container `number` with these annotations. Its output comes through a pipe.
    ///
    /// # Errors
    /// The engine's program cannot be started. The engine's own report comes later, on standard error.
    pub fn start(&self, number: u32, annotations: &BTreeMap<String, String>) -> anyhow::Result<Running> {
        let name = format!("{PREFIX}{}-{number}", std::process::id());
        let mut command = match &self.engine {
            Engine::Program(_) => self.engines(&name, annotations, number),
            Engine::Runtime(program) => {
                let bundle = self.dir.join(&name);
                fs::create_dir_all(&bundle).with_context(|| format!("cannot make {}", bundle.display()))?;
                fs::write(bundle.join("config.json"), self.spec(annotations, number).to_string())?;
                let mut command = Command::new(program);
                command.args(["run", "--bundle"]).arg(bundle).arg(&name);
                command
            }
        };
        let child = spawn(&mut command)?;
        Ok(Running { child, engine: Some(self.engine.clone()), name })
    }

    /// Starts the same program as a process of this host, with this environment.
    pub fn by_hand(&self, number: u32, environment: &BTreeMap<String, String>) -> anyhow::Result<Running> {
        let words = self.own(&self.command, number);
        let own = self.command.first().is_some_and(|word| word == crate::own_root::PROGRAM);
        let program = if own { "/proc/self/exe" } else { words[0].as_str() };
        let mut command = Command::new(program);
        command.args(&words[1..]).envs(environment);
        Ok(Running { child: spawn(&mut command)?, engine: None, name: String::new() })
    }

    /// Words for one container: `{n}` is its number, `{port}` its port.
    fn own(&self, words: &[String], number: u32) -> Vec<String> {
        let port = self.ports.get(number as usize).map(u16::to_string).unwrap_or_default();
        words.iter().map(|word| word.replace("{n}", &number.to_string()).replace("{port}", &port)).collect()
    }

    fn engines(&self, name: &str, annotations: &BTreeMap<String, String>, number: u32) -> Command {
        let (program, options) = (self.engine.program(), self.own(&self.options, number));
        let mut command = Command::new(program);
        command.args(["run", "--rm", "--name", name]);
        if program == Path::new("docker") {
            command.arg("--runtime=sublet");
        }
        if !options.iter().any(|option| option.starts_with("--net")) {
            command.arg("--network=none");
        }
        for (key, value) in annotations {
            command.arg("--annotation").arg(format!("{key}={value}"));
        }
        command.args(options).arg(&self.image).args(self.own(&self.command, number));
        command
    }

    /// The bundle's config.json: namespaces of its own, no capabilities, an environment with nothing but PATH and HOME. A
    /// server has the network of the host, where it can be asked.
    fn spec(&self, annotations: &BTreeMap<String, String>, number: u32) -> serde_json::Value {
        let kinds = ["pid", "mount", "ipc", "uts", "network"];
        let kinds = &kinds[..if self.ports.is_empty() { 5 } else { 4 }];
        let namespaces: Vec<_> = kinds.iter().map(|kind| json!({"type": kind})).collect();
        let mount = |destination: &str, kind: &str, options: &[&str]| json!({"destination": destination, "type": kind, "source": kind, "options": options});
        json!({
            "ociVersion": "1.0.2",
            "process": {
                "terminal": false,
                "user": {"uid": 0, "gid": 0},
                "args": self.own(&self.command, number),
                "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/tmp"],
                "cwd": "/",
                "noNewPrivileges": true,
            },
            "root": {"path": self.image, "readonly": false},
            "hostname": "sublet-bench",
            "annotations": annotations,
            "mounts": [
                mount("/proc", "proc", &[]),
                mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
                mount("/dev/pts", "devpts", &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]),
                mount("/dev/shm", "tmpfs", &["nosuid", "nodev", "mode=1777"]),
                mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
                mount("/tmp", "tmpfs", &["nosuid", "nodev", "mode=1777"]),
            ],
            "linux": {"namespaces": namespaces},
        })
    }
}

/// In a process group of its own: Ctrl-C at a terminal signals the whole group, and only this program should receive it.
fn spawn(command: &mut Command) -> anyhow::Result<Child> {
    let program = command.get_program().to_string_lossy().into_owned();
    sublet_core::process::inheritance::reset_sigchld()?;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    command.spawn().with_context(|| format!("cannot run {program}"))
}

impl Running {
    /// Whether it runs. If not: how it ended.
    pub fn ended(&mut self) -> Option<String> {
        let ended = self.child.try_wait().map(|ended| ended.map(|status| status.to_string()));
        ended.unwrap_or_else(|error| Some(error.to_string()))
    }

    fn command(&self, words: &[&str]) -> Option<Command> {
        let mut command = Command::new(self.engine.as_ref()?.program());
        command.args(words).arg(&self.name).process_group(0);
        Some(command)
    }

    /// Asks for its end without waiting for it.
    fn kill(&mut self) {
        let Some(mut command) = self.command(&["kill"]) else { return drop(self.child.kill()) };
        // The low-level runtime wants the signal behind the container's name.
        if matches!(self.engine, Some(Engine::Runtime(_))) {
            command.arg("KILL");
        }
        let _ = child::run_without_output(&mut command, END_LIMIT);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let limit = Instant::now() + END_LIMIT;
        let mut next = Instant::now();
        while self.ended().is_none() && Instant::now() < limit {
            if Instant::now() >= next {
                self.kill();
                next = Instant::now() + KILL_AGAIN;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // An engine that was killed or interrupted has not removed its container.
        let remove = if matches!(self.engine, Some(Engine::Runtime(_))) { "delete" } else { "rm" };
        if let Some(mut command) = self.command(&[remove, "--force"]) {
            let _ = child::run_without_output(&mut command, END_LIMIT);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Removes containers of measurements that were killed before they could.
pub fn sweep(engine: &Engine) {
    let Engine::Program(program) = engine else { return };
    let mut list = Command::new(program);
    list.args(["ps", "--all", "--filter", "name=sublet-bench-", "--format", "{{.Names}}"]).process_group(0);
    let Ok(listed) = child::run_whole(&mut list, END_LIMIT, 1 << 20) else { return };
    for name in listed.stdout.lines().filter(|name| is_left(name)) {
        let mut remove = Command::new(program);
        let _ = child::run_without_output(remove.args(["rm", "--force", name]).process_group(0), END_LIMIT);
    }
}

/// Whether the process that made the container of this name is gone.
fn is_left(name: &str) -> bool {
    let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
    pid.and_then(|pid| pid.parse::<u32>().ok())
        .is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists())
}

// The base line: the same programs as plain processes, with MPS daemons of their own and the limits set by hand, as one does
// without sublet.

/// How long a daemon may take to start or to quit.
const DAEMON_LIMIT: Duration = Duration::from_secs(20);

/// The environments of a cell's processes, and the daemons behind them, which end with this.
pub struct ByHand {
    daemons: Vec<Daemon>,
    /// UUIDs of the MIG devices, one for each process; none in other modes.
    mig_devices: Vec<String>,
    /// The device, in CUDA's variable; the driver's directories.
    common: BTreeMap<String, String>,
    percent: Option<f64>,
}

impl ByHand {
    /// Starts the daemons of the cell: none, one, or one for each process. `dir` is for their pipes.
    ///
    /// # Errors
    /// MPS is not installed or does not start, or there are not enough MIG devices.
    pub fn new(
        planned: &Cell,
        gpu: &str,
        dir: &Path,
        inventory: &Inventory,
        config: &Config,
    ) -> anyhow::Result<Self> {
        let count = match planned.mode.sharing {
            Sharing::Exclusive | Sharing::TimeSlice | Sharing::Mig => 0,
            Sharing::Mps => 1,
            Sharing::Dedicated => planned.n,
        };
        let mig_devices = mig_devices(planned, gpu, inventory);
        if planned.mode.sharing == Sharing::Mig && mig_devices.len() < planned.n as usize {
            bail!("the GPU has {} MIG devices for {} processes", mig_devices.len(), planned.n);
        }
        let start = |number: u32| Daemon::start(gpu, &dir.join(format!("mps-{number}")), config);
        Ok(Self {
            daemons: (0..count).map(start).collect::<Result<_, _>>()?,
            mig_devices,
            common: common(gpu, inventory),
            percent: planned.percent(),
        })
    }

    /// The variables of process `number` beside this program's own environment.
    pub fn environment(&self, number: u32) -> BTreeMap<String, String> {
        let mut environment = self.common.clone();
        if let Some(uuid) = self.mig_devices.get(number as usize) {
            environment.insert("CUDA_VISIBLE_DEVICES".to_owned(), uuid.clone());
        }
        // Servers of their own: one each; a shared one: the only one.
        let Some(daemon) = self.daemons.get(number as usize).or(self.daemons.first()) else {
            return environment;
        };
        environment.insert("CUDA_MPS_PIPE_DIRECTORY".to_owned(), daemon.dir.display().to_string());
        // The server knows one GPU, and calls it 0.
        environment.insert("CUDA_VISIBLE_DEVICES".to_owned(), "0".to_owned());
        if let Some(percent) = self.percent {
            environment.insert("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE".to_owned(), percent.to_string());
        }
        environment
    }
}

/// The MIG devices of the profile that is wanted, the smallest first: containers get them so.
fn mig_devices(planned: &Cell, gpu: &str, inventory: &Inventory) -> Vec<String> {
    if planned.mode.sharing != Sharing::Mig {
        return Vec::new();
    }
    let wanted = planned.mode.profile.as_deref();
    let fits = |device: &Device| wanted.is_none_or(|wanted| wanted == device.kind());
    let devices = inventory.mig_devices_of(gpu).map(|(device, _)| device);
    let mut devices: Vec<&Device> = devices.filter(|device| fits(device)).collect();
    devices.sort_by_key(|device| (device.memory_bytes, device.sm_count));
    devices.into_iter().map(|device| device.uuid.clone()).collect()
}

/// The driver's libraries may lie where only containers of sublet's find them.
fn common(gpu: &str, inventory: &Inventory) -> BTreeMap<String, String> {
    let libraries = inventory.files.iter().filter(|file| matches!(file.kind, FileKind::Library { .. }));
    let directories: BTreeSet<&str> = libraries.filter_map(|file| file.source.parent()?.to_str()).collect();
    let own = std::env::var("LD_LIBRARY_PATH").ok().filter(|path| !path.is_empty());
    let path: Vec<&str> = own.as_deref().into_iter().chain(directories).collect();
    BTreeMap::from([
        ("CUDA_VISIBLE_DEVICES".to_owned(), gpu.to_owned()),
        ("LD_LIBRARY_PATH".to_owned(), path.join(":")),
        // No daemon of the host's: where this directory has none, CUDA works without MPS.
        ("CUDA_MPS_PIPE_DIRECTORY".to_owned(), "/nonexistent".to_owned()),
    ])
}

/// An MPS control daemon, which quits when this is dropped.
struct Daemon {
    control: PathBuf,
    dir: PathBuf,
    path: String,
}

impl Daemon {
    fn start(gpu: &str, dir: &Path, config: &Config) -> anyhow::Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let programs = MpsPrograms::find(&config.driver);
        let (control, _) = programs.both(&config.driver)?;
        let daemon = Self { control: control.to_owned(), dir: dir.to_owned(), path: programs.path() };
        let mut command = daemon.command();
        command.arg("-d").env("CUDA_VISIBLE_DEVICES", gpu);
        match child::run_without_output(&mut command, DAEMON_LIMIT) {
            Ok(status) if status.success() => Ok(daemon),
            Ok(status) => bail!("nvidia-cuda-mps-control -d ended with {status}"),
            Err(ChildError::Io(error)) => Err(error).context("cannot run nvidia-cuda-mps-control"),
            Err(ChildError::Timeout) => {
                bail!("nvidia-cuda-mps-control -d did not end within {} s", DAEMON_LIMIT.as_secs())
            }
        }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.control);
        let dir = [("CUDA_MPS_PIPE_DIRECTORY", &self.dir), ("CUDA_MPS_LOG_DIRECTORY", &self.dir)];
        command.envs(dir).env("PATH", &self.path);
        command
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Its processes have ended, so it quits at once.
        let _ = child::run(&mut self.command(), "quit\n", DAEMON_LIMIT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(engine: Engine) -> Workload {
        Workload {
            engine,
            image: "img".to_owned(),
            command: vec!["run".to_owned(), "--me={n}".to_owned()],
            options: Vec::new(),
            ports: vec![8080, 8081],
            dir: std::env::temp_dir(),
        }
    }

    fn words(command: &Command) -> String {
        let all = command.get_args().map(|word| word.to_string_lossy().into_owned());
        all.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn engines_get_every_option() {
        let annotations = BTreeMap::from([("sublet.sm".to_owned(), "20".to_owned())]);
        let arguments = |program: &'static str, options: &str, number| {
            let workload =
                Workload { options: vec![options.to_owned()], ..workload(Engine::Program(program)) };
            words(&workload.engines("x", &annotations, number))
        };
        assert_eq!(
            arguments("docker", "--volume=/a:/a", 1),
            "run --rm --name x --runtime=sublet --network=none --annotation sublet.sm=20 --volume=/a:/a img run --me=1"
        );
        assert_eq!(
            arguments("podman", "--network=host", 0),
            "run --rm --name x --annotation sublet.sm=20 --network=host img run --me=0"
        );
        assert!(
            arguments("docker", "--publish=127.0.0.1:{port}:80", 1)
                .contains("--publish=127.0.0.1:8081:80 img")
        );
    }

    #[test]
    fn leftover_containers_are_known_by_the_pid() {
        assert!(is_left("sublet-bench-4194999-1"), "beyond the largest pid");
        assert!(!is_left(&format!("sublet-bench-{}-1", std::process::id())));
        for other in ["sublet-bench-", "sublet-bench-x-1", "my-sublet-bench-4194999-1", ""] {
            assert!(!is_left(other), "{other}");
        }
    }

    #[test]
    fn a_process_by_hand_is_ended_with_its_handle() {
        let mut by_hand = workload(Engine::Program("docker"));
        by_hand.command = vec!["sleep".to_owned(), "600".to_owned()];
        let mut running = by_hand.by_hand(0, &BTreeMap::new()).unwrap();
        let pid = running.child.id();
        assert_eq!(running.ended(), None);
        drop(running);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }
}
