//! A root of the simulated driver made by hand, and the programs in it.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Lines, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::Pid;
use nvidia_ml::layout::contexts::{self, Held};
use nvidia_ml::layout::state_file::State;
use nvidia_ml::layout::topology::Topology;
use nvidia_ml::layout::{Root, trailer};
use serde_json::{Value, json};
use sublet_core::process::live_proc_dir_of;
use tempfile::TempDir;

pub const H200: &str = "GPU-11111111-2222-3333-4444-555555555555";

/// The second GPU of [`Rig::pair`].
pub const OTHER: &str = "GPU-22222222-2222-3333-4444-555555555555";

static COUNT: AtomicU32 = AtomicU32::new(0);

pub fn signal(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).unwrap();
}

pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(10), "{what}: not within 10 s");
        sleep(Duration::from_millis(5));
    }
}

pub struct Rig {
    dir: TempDir,
    pub tag: String,
}

impl Rig {
    /// One H200; `None` without root, because only root may create nodes.
    pub fn new() -> Option<Self> {
        Self::with("9.0")
    }

    /// Two H200s.
    pub fn pair() -> Option<Self> {
        Self::of(&json!([gpu(0, 3, H200, "9.0"), gpu(1, 4, OTHER, "9.0")]))
    }

    /// One H200, and a daemon that serves all users.
    pub fn with_daemon() -> Option<Self> {
        let rig = Self::new()?;
        assert!(rig.daemon("a", &["-M"]).status.success());
        Some(rig)
    }

    pub fn with(compute_capability: &str) -> Option<Self> {
        Self::of(&json!([gpu(0, 3, H200, compute_capability)]))
    }

    fn of(gpus: &Value) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: needs root to make device nodes");
            return None;
        }
        let tag = format!("{:04x}{:04x}", std::process::id() & 0xffff, COUNT.fetch_add(1, Ordering::Relaxed));
        let rig = Self { dir: tempfile::Builder::new().prefix("mps").tempdir().unwrap(), tag };
        fs::set_permissions(rig.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let topology = json!({"tag": rig.tag, "driver": "580.159.04", "cuda": "13.0", "gpu": gpus});
        rig.lay_out(&serde_json::from_value(topology).unwrap());
        Some(rig)
    }

    fn lay_out(&self, topology: &Topology) {
        let root = Root::new(self.path("").canonicalize().unwrap());
        for directory in ["usr/bin", "sim", "dev", "a", "log"] {
            fs::create_dir_all(self.path(directory)).unwrap();
        }
        fs::create_dir_all(root.libraries()).unwrap();
        for (name, program) in PROGRAMS {
            // By another process: what we had open for writing, a child that another test is just starting would hold
            // open too, and the program could not be run (ETXTBSY, execve(2)).
            let copied = Command::new("cp").arg(program).arg(self.path("usr/bin").join(name)).status();
            assert!(copied.unwrap().success());
        }
        fs::write(root.topology(), serde_json::to_vec(topology).unwrap()).unwrap();
        State::initial(topology).write(&root).unwrap();
        trailer::append(crate::libcuda::built(), &root.libraries().join("libcuda.so.580.159.04"), topology)
            .unwrap();
        symlink("libcuda.so.580.159.04", root.libraries().join("libcuda.so.1")).unwrap();
        let common = [("nvidiactl".to_owned(), 195, 255), ("nvidia-uvm".to_owned(), 510, 0)];
        let own = topology.gpu.iter().map(|gpu| (format!("nvidia{}", gpu.minor), 195, u64::from(gpu.minor)));
        for (name, major, minor) in common.into_iter().chain(own) {
            let mode = Mode::from_bits_truncate(0o666);
            let node = self.path("dev").join(name);
            mknod(&node, SFlag::S_IFCHR, mode, makedev(major, minor)).unwrap();
            fs::set_permissions(&node, fs::Permissions::from_mode(0o666)).unwrap();
        }
    }

    pub fn path(&self, relative: &str) -> PathBuf {
        self.dir.path().join(relative)
    }

    pub fn compute_mode(&self, mode: u32) {
        let root = Root::new(self.path("").canonicalize().unwrap());
        State::update(&root, |state| state.compute_mode.insert(H200.into(), mode)).unwrap();
    }

    /// A program of the root, with the pipe directory `pipe` and no other environment.
    pub fn program(&self, name: &str, pipe: &str) -> Command {
        let mut command = Command::new(self.path("usr/bin").join(name));
        let libraries = format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH);
        command
            .env_clear()
            .env("PATH", self.path("usr/bin"))
            .env("CUDA_MPS_PIPE_DIRECTORY", self.path(pipe))
            .env("CUDA_MPS_LOG_DIRECTORY", self.path("log"))
            .env("SUBLET_SIM_DEV", self.path("dev"))
            .env("LD_LIBRARY_PATH", self.path(&libraries));
        command
    }

    /// Starts a daemon and returns its output. It returns although the daemon lives, which holds no file of this test
    /// open.
    pub fn daemon(&self, pipe: &str, arguments: &[&str]) -> Output {
        self.program("nvidia-cuda-mps-control", pipe).arg("-d").args(arguments).output().unwrap()
    }

    pub fn daemon_pid(&self, pipe: &str) -> i32 {
        let file = self.path(pipe).join("nvidia-cuda-mps-control.pid");
        fs::read_to_string(file).unwrap().trim().parse().unwrap()
    }

    pub fn ask_with_status(&self, pipe: &str, command: &str) -> (String, Option<i32>) {
        let output = output_of(self.program("nvidia-cuda-mps-control", pipe), command);
        (String::from_utf8(output.stdout).unwrap().trim_end().to_owned(), output.status.code())
    }

    pub fn ask(&self, command: &str) -> String {
        self.ask_with_status("a", command).0
    }

    pub fn server(&self) -> String {
        self.ask("get_server_list")
    }

    /// Runs the probe to its end: what it said, and its status.
    pub fn probe(&self, task: &str, env: &[(&str, &str)]) -> (Vec<Value>, i32) {
        let mut probe = self.start(task, env);
        let mut said = vec![probe.info.clone()];
        said.extend(std::iter::from_fn(|| probe.next()));
        (said, probe.status())
    }

    pub fn info(&self, env: &[(&str, &str)]) -> Value {
        self.probe("info", env).0.remove(0)
    }

    /// Starts the probe and waits for its first line.
    pub fn start(&self, task: &str, env: &[(&str, &str)]) -> Probe {
        self.start_as(task, env, 0, "a")
    }

    pub fn start_as(&self, task: &str, env: &[(&str, &str)], uid: u32, pipe: &str) -> Probe {
        let mut probe = self.start_silent(task, env, uid, pipe);
        probe.info = probe.next().expect("the probe says something");
        probe
    }

    /// Starts the probe and does not wait.
    pub fn start_silent(&self, task: &str, env: &[(&str, &str)], uid: u32, pipe: &str) -> Probe {
        Self::spawn(self.program("cuda-probe", pipe), task, env, uid)
    }

    /// Starts the probe as uid 0 of new namespaces, which is this uid outside.
    pub fn start_in_namespaces(&self, task: &str, uid: u32) -> Probe {
        let probe = self.program("cuda-probe", "a");
        let mut command = Command::new("/usr/bin/unshare");
        command.args(["--user", "--map-root-user", "--pid", "--fork", "--ipc", "--uts", "--mount-proc"]);
        command.arg(probe.get_program()).env_clear();
        command.envs(probe.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let mut probe = Self::spawn(command, task, &[], uid);
        probe.info = probe.next().expect("the probe says something");
        probe
    }

    fn spawn(mut command: Command, task: &str, env: &[(&str, &str)], uid: u32) -> Probe {
        let env: BTreeMap<_, _> = env.iter().copied().collect();
        command.args(task.split(' ')).envs(env).uid(uid).gid(uid).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Probe { child, lines, info: Value::Null }
    }

    pub fn contexts(&self) -> Vec<Held> {
        contexts::list(&self.tag)
    }

    /// Processes of this root's programs.
    fn processes(&self) -> Vec<i32> {
        let all = fs::read_dir("/proc").unwrap().flatten();
        all.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .filter(|pid| {
                let exe = fs::read_link(live_proc_dir_of(*pid).join("exe")).unwrap_or_default();
                exe.starts_with(self.dir.path().join("usr/bin"))
            })
            .collect()
    }
}

fn gpu(index: u32, minor: u32, uuid: &str, compute_capability: &str) -> Value {
    json!({"index": index, "minor": minor, "uuid": uuid, "name": "NVIDIA H200",
           "bus_id": format!("0000:{:02x}:00.0", 0x3b + index), "memory_mib": 143_771, "cuda_total_mib": 143_155,
           "sm_count": 132, "compute_capability": compute_capability, "arch": "hopper"})
}

impl Drop for Rig {
    fn drop(&mut self) {
        // A daemon may be starting a server meanwhile.
        loop {
            let pids = self.processes();
            if pids.is_empty() {
                return;
            }
            for pid in pids {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
}

/// A running probe.
pub struct Probe {
    pub child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    pub info: Value,
}

impl Probe {
    pub fn next(&mut self) -> Option<Value> {
        self.lines.next().map(|line| serde_json::from_str(&line.unwrap()).unwrap())
    }

    /// The result that its next line has.
    pub fn result(&mut self) -> String {
        self.next().unwrap()["result"].as_str().unwrap().to_owned()
    }

    pub fn status(&mut self) -> i32 {
        self.child.wait().unwrap().code().unwrap_or(-1)
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

pub fn output_of(mut program: Command, input: &str) -> Output {
    let mut child = program.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    match child.stdin.take().unwrap().write_all(format!("{input}\n").as_bytes()) {
        // Where no daemon listens, it ends without reading anything.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
        written => written.unwrap(),
    }
    child.wait_with_output().unwrap()
}

const PROGRAMS: [(&str, &str); 3] = [
    ("nvidia-cuda-mps-control", env!("CARGO_BIN_EXE_nvidia-cuda-mps-control")),
    ("nvidia-cuda-mps-server", env!("CARGO_BIN_EXE_nvidia-cuda-mps-server")),
    ("cuda-probe", env!("CARGO_BIN_EXE_cuda-probe")),
];
