//! A driver and a state directory: the simulator's, or the host's own driver.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::unistd::Pid;
use nvml_wrapper::Nvml;
use serde_json::Value;
use tempfile::TempDir;

use crate::processes::{self, read};
use crate::rootfs::Rootfs;

/// A low-level runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// opencontainers/runc
    Runc,
    /// containers/crun
    Crun,
}

impl Engine {
    /// The runtime that `SUBLET_TEST_ENGINE` names; runc if it is unset.
    #[must_use]
    pub fn chosen() -> Self {
        match std::env::var("SUBLET_TEST_ENGINE").as_deref() {
            Ok("crun") => Self::Crun,
            _ => Self::Runc,
        }
    }

    /// The name of its program.
    #[must_use]
    pub fn program(self) -> &'static str {
        match self {
            Self::Runc => "runc",
            Self::Crun => "crun",
        }
    }
}

/// A driver, sublet's configuration and state, and a directory for bundles.
pub struct World {
    /// The configuration in use (`SUBLET_CONFIG`).
    pub config: PathBuf,
    /// Bundles, rootfs and the low-level runtime's state; removed when dropped.
    pub dir: TempDir,
    /// The simulated driver's root; `None` on a real GPU.
    pub driver_root: Option<PathBuf>,
    /// The low-level runtime.
    pub engine: Engine,
    /// The root filesystem from which containers are made.
    pub rootfs: Rootfs,
}

impl World {
    /// A world with the simulated driver, one of `tests/sim/topologies`, and sublet's default settings. The lines in
    /// `extra` are appended to the configuration.
    #[must_use]
    pub fn simulated(topology: &str, extra: &str) -> Self {
        let dir = temporary();
        let root = dir.path().join("sim");
        // Benchmarks also run from a copy of the checkout, elsewhere than where they were built.
        let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sim/topologies");
        let topologies = if built.is_dir() { built } else { PathBuf::from("tests/sim/topologies") };
        let given = Path::new(topology);
        let file =
            if given.is_absolute() { given.to_owned() } else { topologies.join(format!("{topology}.toml")) };
        let mut up = Command::new(sim_dir().join("sublet-sim"));
        let up = up
            .arg("up")
            .arg("--topology")
            .arg(file)
            .arg("--root")
            .arg(&root)
            .output()
            .expect("sublet-sim runs");
        assert!(up.status.success(), "sublet-sim up: {}", String::from_utf8_lossy(&up.stderr));
        let printed = String::from_utf8_lossy(&up.stdout).into_owned();
        let config = PathBuf::from(printed.lines().last().expect("the path of config.toml"));
        let rootfs = Rootfs::minimal(&dir.path().join("rootfs"), &root.join("usr/bin/cuda-probe"));
        let world = Self { config, dir, driver_root: Some(root), engine: Engine::chosen(), rootfs };
        let text = std::fs::read_to_string(&world.config).expect("config.toml is there");
        let named = format!("low_level = [\"{}\"]", world.engine.program());
        let text = text.replace("low_level = [\"runc\", \"crun\"]", &named);
        std::fs::write(&world.config, text).expect("config.toml is written");
        world.configure(extra);
        world
    }

    /// A world with the host's own driver; `probe` is the built `tests/gpu/cuda-probe.cu`.
    #[must_use]
    pub fn real(probe: &Path, extra: &str) -> Self {
        let dir = temporary();
        let config = dir.path().join("config.toml");
        let (engine, state) = (Engine::chosen(), dir.path().join("run"));
        let text = format!(
            "state_dir = \"{}\"\n[runtime]\nlow_level = [\"{}\"]\n",
            state.display(),
            engine.program()
        );
        std::fs::write(&config, text).expect("config.toml is written");
        let rootfs = Rootfs::minimal(&dir.path().join("rootfs"), probe);
        let world = Self { config, dir, driver_root: None, engine, rootfs };
        world.configure(extra);
        world
    }

    /// Adds lines to the configuration.
    pub fn configure(&self, extra: &str) {
        let mut text = std::fs::read_to_string(&self.config).expect("config.toml is there");
        text.push_str("\n# Added by the test.\n");
        text.push_str(extra);
        std::fs::write(&self.config, text).expect("config.toml is written");
    }

    /// The state directory.
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        let text = std::fs::read_to_string(&self.config).expect("config.toml is there");
        let line = text.lines().find(|line| line.starts_with("state_dir")).expect("it names state_dir");
        PathBuf::from(line.split('"').nth(1).expect("a quoted path"))
    }

    /// A sublet command in this world.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(bin_dir().join(program));
        command.env("SUBLET_CONFIG", &self.config).env("LC_ALL", "C.UTF-8").stdin(Stdio::null());
        command
    }

    /// Runs `sublet` with `arguments`.
    #[must_use]
    pub fn sublet(&self, arguments: &[&str]) -> Output {
        self.command("sublet").args(arguments).output().expect("sublet runs")
    }

    /// The ids of the containers in the ledger as recorded, without a sublet command that would first correct it.
    ///
    /// # Panics
    /// There is no ledger, or it is incomplete.
    #[must_use]
    pub fn booked(&self) -> Vec<Value> {
        let text = std::fs::read(self.state_dir().join("ledger.json")).expect("the ledger");
        let ledger: Value = serde_json::from_slice(&text).expect("the ledger is whole");
        let leases = ledger["leases"].as_array().expect("leases");
        leases.iter().map(|lease| lease["container"]["id"].clone()).collect()
    }

    /// `sublet status --format json`.
    #[must_use]
    pub fn status(&self) -> Value {
        let output = self.sublet(&["status", "--format", "json"]);
        assert!(output.status.success(), "sublet status: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("status prints JSON")
    }

    /// Runs `sublet cdi generate` for the directory in which the tests' engines look.
    pub fn generate_cdi(&self) {
        let spec = self.dir.path().join("cdi/sublet.json");
        std::fs::create_dir_all(spec.parent().expect("a directory")).expect("a directory");
        let output = self.sublet(&["cdi", "generate", "--output", spec.to_str().expect("UTF-8")]);
        assert!(output.status.success(), "cdi generate: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// The leases in `sublet status`, without what their containers use at this moment.
    ///
    /// # Panics
    /// There is none of either.
    #[must_use]
    pub fn leases(&self) -> Vec<Value> {
        let mut leases = self.status()["leases"].as_array().expect("leases is an array").clone();
        for lease in &mut leases {
            lease.as_object_mut().expect("an object").remove("used").expect("what it uses");
        }
        leases
    }

    /// A process on the host with a context on the simulated GPU and no lease.
    #[must_use]
    pub fn stranger(&self) -> std::process::Child {
        self.stranger_by(Command::new("env"))
    }

    /// The same, run by a program that takes the command as its last arguments.
    #[must_use]
    pub fn stranger_by(&self, command: Command) -> std::process::Child {
        self.stranger_that(command, &["hold", "300"])
    }

    /// The same, with another task of `cuda-probe`.
    #[must_use]
    pub fn stranger_that(&self, mut command: Command, task: &[&str]) -> std::process::Child {
        let root = self.driver_root.as_ref().expect("a simulated driver");
        let libraries = root.join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH));
        command
            .arg(root.join("usr/bin/cuda-probe"))
            .args(task)
            .env("SUBLET_SIM_DEV", root.join("dev"))
            .env("LD_LIBRARY_PATH", libraries);
        let mut child = command
            .env("CUDA_MPS_PIPE_DIRECTORY", "/nowhere")
            .stdout(Stdio::piped())
            .spawn()
            .expect("it runs");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("piped");
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line).expect("a line");
        assert!(line.contains("\"error\":null"), "{line}");
        child
    }

    /// NVML of this world: the host's or the simulator's.
    #[must_use]
    pub fn nvml(&self) -> Nvml {
        let simulated = self.driver_root.as_ref().and_then(|root| {
            let dirs = ["x86_64-linux-gnu", "aarch64-linux-gnu"]
                .map(|dir| root.join("usr/lib").join(dir).join("libnvidia-ml.so.1"));
            dirs.into_iter().find(|path| path.exists())
        });
        let library = simulated.unwrap_or_else(|| PathBuf::from("libnvidia-ml.so.1"));
        Nvml::builder().lib_path(library.as_os_str()).init().expect("NVML loads")
    }

    /// A GPU (NVML's index) reports Xid `number` of process `pid`.
    pub fn report_xid(&self, gpu: u32, number: u32, pid: Option<i32>, text: &str) {
        let root = self.driver_root.as_ref().expect("a simulated driver");
        let pid = pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        let mut sim = Command::new(sim_dir().join("sublet-sim"));
        sim.args(["xid", &gpu.to_string(), &number.to_string(), &pid, text, "--root"]).arg(root);
        let output = sim.output().expect("sublet-sim runs");
        assert!(output.status.success(), "{output:?}");
    }

    /// Stops daemons that wait for their next lease, which they may do while the service runs.
    pub fn stop_waiting(&self) {
        for daemon in self.status()["mps"].as_array().into_iter().flatten() {
            if daemon["ends_in_seconds"].is_u64() {
                let stopped = self.sublet(&["mps", "stop", daemon["key"].as_str().expect("a key")]);
                assert!(stopped.status.success(), "{stopped:?}");
            }
        }
    }

    /// Checks that nothing is left: no lease, no daemon and no MPS process. Waiting daemons are stopped first.
    pub fn assert_empty(&self) {
        self.stop_waiting();
        // On a busy machine a container's end takes longer than a hook waits for it: the next command ends its daemon.
        let is_stopping = |daemon: &Value| daemon["state"] == "stopping";
        let mut status = self.status();
        crate::eventually(|| {
            status = self.status();
            !status["mps"].as_array().into_iter().flatten().any(is_stopping)
        });
        assert_eq!(status["leases"], serde_json::json!([]), "leases are left");
        assert_eq!(status["mps"], serde_json::json!([]), "MPS daemons are left");
        assert_eq!(self.daemons(), Vec::<String>::new(), "MPS processes are left");
    }

    /// The processes `sublet mps lower` of this world, for which no command waits.
    #[must_use]
    pub fn lowering(&self) -> Vec<Pid> {
        let config = format!("SUBLET_CONFIG={}", self.config.display());
        let is_ours = |pid: &Pid| {
            read(*pid, "cmdline").contains("sublet mps lower ")
                && read(*pid, "environ").split(' ').any(|variable| variable == config)
        };
        processes::all().filter(is_ours).collect()
    }

    /// Command lines of MPS processes of this world.
    #[must_use]
    pub fn daemons(&self) -> Vec<String> {
        self.daemon_pids("").into_iter().map(|pid| read(pid, "cmdline")).collect()
    }

    /// As if the MPS daemons had last answered long ago: whoever needs one asks it.
    pub fn forget_answers(&self) {
        let path = self.state_dir().join("ledger.json");
        let text = std::fs::read(&path).expect("a ledger");
        let mut ledger: Value = serde_json::from_slice(&text).expect("JSON");
        for daemon in ledger["daemons"].as_array_mut().expect("daemons") {
            daemon["answered_at"] = serde_json::json!(1);
        }
        std::fs::write(&path, ledger.to_string()).expect("written");
    }

    /// Those of them that have `part` in their environment.
    #[must_use]
    pub fn daemon_pids(&self, part: &str) -> Vec<Pid> {
        let ours = self.dir.path().to_string_lossy().into_owned();
        let is_ours = |pid: &Pid| {
            let environment = read(*pid, "environ");
            let of_world = environment.contains(&ours) && environment.contains(part);
            of_world && is_daemon(&read(*pid, "cmdline")) && processes::is_alive(*pid)
        };
        processes::all().filter(is_ours).collect()
    }

    /// Kills the MPS daemons and servers of this world, and waits until none is left: a killed process may listen on for
    /// as long as the machine is busy.
    pub fn kill_daemons(&self) {
        for pid in self.daemon_pids("") {
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
        }
        assert!(eventually(|| self.daemon_pids("").is_empty()), "{:?}", self.daemon_pids(""));
    }
}

impl Drop for World {
    fn drop(&mut self) {
        crate::bundle::remove_all(self);
        if let Some(root) = &self.driver_root {
            let _ = Command::new(sim_dir().join("sublet-sim")).arg("down").arg("--root").arg(root).output();
        }
    }
}

/// Whether this command line is of an MPS daemon or its server, and not of the control program that asks one.
fn is_daemon(line: &str) -> bool {
    let mut words = line.split(' ');
    let program = words.next().unwrap_or_default();
    program.ends_with("nvidia-cuda-mps-server")
        || program.ends_with("nvidia-cuda-mps-control") && words.any(|word| matches!(word, "-d" | "-f"))
}

/// A directory with a short path: paths of Unix sockets hold 107 bytes.
fn temporary() -> TempDir {
    tempfile::Builder::new().prefix("sl").tempdir_in("/var/tmp").expect("a temporary directory")
}

/// The directory of the programs under test: `SUBLET_BIN_DIR`, or where this test was built.
#[must_use]
pub fn bin_dir() -> PathBuf {
    if let Some(dir) = std::env::var_os("SUBLET_BIN_DIR") {
        return PathBuf::from(dir);
    }
    let test = std::env::current_exe().expect("our own path");
    let dir = test.parent().expect("target/debug/deps");
    if dir.ends_with("deps") { dir.parent().expect("target/debug").to_owned() } else { dir.to_owned() }
}

/// The directory of the simulated driver: `SUBLET_SIM_DIR`, or beside the programs under test.
fn sim_dir() -> PathBuf {
    std::env::var_os("SUBLET_SIM_DIR").map_or_else(bin_dir, PathBuf::from)
}

/// Waits up to a minute until `holds` returns true, because other tests may keep the machine busy. Returns whether it
/// did.
pub fn eventually(mut holds: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + Duration::from_secs(60);
    while Instant::now() < deadline {
        if holds() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    holds()
}

/// Whether to skip the test because containers need root. `make check` runs without it; the tests then print that they
/// were skipped.
#[must_use]
pub fn skip_unless_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("skipped: needs root");
    }
    !root
}
