//! A containerd for one test, in the root that tests/engines/enter provides.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::bundle::{Finished, by_systemd};
use crate::killing::assert_no_daemons;
use crate::processes::{in_cgroup, shims_of};
use crate::world::{World, bin_dir, eventually};

/// The only image, made from the world's minimal root filesystem. Pod sandboxes use it too.
pub const IMAGE: &str = "docker.io/library/probe:latest";

/// The CRI plugin's table in containerd's configuration, version 2.
const CRI: &str = "plugins.\"io.containerd.grpc.v1.cri\"";

/// containerd with `ctr`, and with the CRI ([`crate::cri`]).
pub struct Containerd {
    /// The driver, configuration and leases.
    pub world: World,
    /// The namespace for `ctr`: runc's records and the cgroups of all containerds in this root are in the same place.
    pub namespace: String,
    daemon: Option<Child>,
    state: PathBuf,
    execs: AtomicUsize,
}

impl Containerd {
    /// Starts containerd and imports the image.
    #[must_use]
    pub fn up(world: World) -> Self {
        let namespace = world.dir.path().file_name().expect("a name").to_string_lossy().into_owned();
        let state = Path::new("/run").join(&namespace);
        let mut containerd = Self { world, namespace, daemon: None, state, execs: AtomicUsize::new(0) };
        containerd.write_settings();
        containerd.start_daemon();
        let archive = containerd.archive();
        for namespace in [&containerd.namespace, "k8s.io"] {
            let mut import = containerd.command_in(namespace);
            let import = import.args(["images", "import", "--snapshotter=native"]).arg(&archive).output();
            let import = Finished::of(&import.expect("ctr is installed"));
            assert!(import.ok, "ctr images import: {import:?}");
        }
        containerd
    }

    /// Writes the settings of docs/containerd.md for the programs under test, and a handler `unlisted` that passes no
    /// annotations.
    ///
    /// overlayfs does not work on overlayfs, and root may not lower `oom_score_adj` on every machine.
    fn write_settings(&self) {
        let dir = self.world.dir.path();
        let shim = bin_dir().join("sublet-runtime");
        let listed =
            "pod_annotations = [\"sublet.*\", \"sublet.*/*\"]\ncontainer_annotations = [\"sublet.*\"]\n";
        let text = format!(
            "version = 2\nroot = \"{}\"\nstate = \"{}\"\n[grpc]\naddress = \"{}\"\n\
             [{CRI}]\nsandbox_image = \"{IMAGE}\"\nrestrict_oom_score_adj = true\n\
             enable_cdi = true\ncdi_spec_dirs = [\"{}\"]\n\
             [{CRI}.containerd]\nsnapshotter = \"native\"\n{}{}{}",
            dir.join("containerd").display(),
            self.state.display(),
            self.socket().display(),
            dir.join("cdi").display(),
            handler("runc", Path::new(self.world.engine.program()), ""),
            handler("sublet", &shim, listed),
            handler("unlisted", &shim, ""),
        );
        std::fs::write(dir.join("containerd.toml"), text).expect("containerd.toml");
    }

    /// The socket's path, for `ctr` and the CRI.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.state.join("containerd.sock")
    }

    /// Starts the daemon, possibly again, and waits until it answers.
    pub fn start_daemon(&mut self) {
        let dir = self.world.dir.path();
        let log =
            || File::options().append(true).create(true).open(dir.join("containerd.log")).expect("a log");
        let child = Command::new("containerd")
            .arg("--config")
            .arg(dir.join("containerd.toml"))
            .env("SUBLET_CONFIG", &self.world.config)
            .stdin(Stdio::null())
            .stdout(log())
            .stderr(log())
            .spawn();
        self.daemon = Some(child.expect("containerd is installed"));
        let answers = Instant::now() + Duration::from_secs(60);
        while !self.cli(&["version"]).ok {
            assert!(Instant::now() < answers, "containerd does not answer: {}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Ends the daemon by SIGTERM or SIGKILL. Its shims and their containers live on.
    pub fn end_daemon(&mut self, signal: Signal) {
        let Some(mut daemon) = self.daemon.take() else { return };
        let _ = kill(Pid::from_raw(i32::try_from(daemon.id()).expect("a pid")), signal);
        let _ = daemon.wait();
    }

    /// Ends every containerd-shim by SIGKILL.
    pub fn kill_shims(&self) {
        for shim in self.shims() {
            let _ = kill(shim, Signal::SIGKILL);
        }
        assert!(eventually(|| self.shims().is_empty()), "a shim lives on");
    }

    /// The containerd-shims of this daemon.
    #[must_use]
    pub fn shims(&self) -> Vec<Pid> {
        shims_of(&self.socket())
    }

    /// The end of the daemon's log.
    #[must_use]
    pub fn log(&self) -> String {
        let text = std::fs::read_to_string(self.world.dir.path().join("containerd.log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    fn command_in(&self, namespace: &str) -> Command {
        let mut command = Command::new("ctr");
        command.arg("--address").arg(self.socket()).args(["--namespace", namespace]).stdin(Stdio::null());
        command
    }

    /// A `ctr` command.
    #[must_use]
    pub fn command(&self) -> Command {
        self.command_in(&self.namespace)
    }

    /// Runs `ctr ARGUMENTS`.
    #[must_use]
    pub fn cli(&self, arguments: &[&str]) -> Finished {
        Finished::of(&self.command().args(arguments).output().expect("ctr is installed"))
    }

    /// [`Self::cli`], which must succeed; its standard output without the newline.
    #[must_use]
    pub fn ask(&self, arguments: &[&str]) -> String {
        let finished = self.cli(arguments);
        assert!(finished.ok, "ctr {}: {}\n{}", arguments.join(" "), finished.stderr, self.log());
        finished.stdout.trim_end().to_owned()
    }

    /// Like [`Self::ask`], without the output.
    pub fn done(&self, arguments: &[&str]) {
        let _ = self.ask(arguments);
    }

    /// The file with the container's output.
    fn output(&self, name: &str) -> PathBuf {
        self.world.dir.path().join(format!("{name}.log"))
    }

    /// `ctr run` with sublet, not started yet.
    ///
    /// Without CPU shares, which `ctr` sets by default: on hybrid hosts cgroup2 has no CPU controller.
    fn run_with(&self, name: &str, annotations: &[&str], options: &[&str], args: &[&str]) -> Command {
        let mut command = self.command();
        command.args(["run", "--snapshotter=native", "--cpu-shares=0"]);
        command.arg("--log-uri").arg(format!("file://{}", self.output(name).display()));
        command.arg("--runc-binary").arg(bin_dir().join("sublet-runtime"));
        if by_systemd() {
            command.args(["--runc-systemd-cgroup", "--cgroup"]);
            command.arg(format!("system.slice:{}:{name}", self.namespace));
        }
        command.args(annotations.iter().flat_map(|annotation| ["--annotation", annotation]));
        command.args(options).args([IMAGE, name]).args(args);
        command
    }

    /// `ctr run --detach` with sublet, not started yet.
    #[must_use]
    pub fn run_command(&self, name: &str, annotations: &[&str], options: &[&str], args: &[&str]) -> Command {
        self.run_with(name, annotations, &[options, &["--detach"]].concat(), args)
    }

    /// `ctr run` with sublet, until it ends.
    #[must_use]
    pub fn attached(&self, name: &str, annotations: &[&str], options: &[&str], args: &[&str]) -> Finished {
        let mut command = self.run_with(name, annotations, options, args);
        Finished::of(&command.output().expect("ctr is installed"))
    }

    /// [`Self::run_command`], which may fail.
    #[must_use]
    pub fn run(&self, name: &str, annotations: &[&str], options: &[&str], args: &[&str]) -> Finished {
        let mut command = self.run_command(name, annotations, options, args);
        Finished::of(&command.output().expect("ctr is installed"))
    }

    /// [`Self::run`] of a process that holds a context. It must succeed. Returns the container's id, which is its
    /// name.
    #[must_use]
    pub fn hold(&self, name: &str, annotations: &[&str], options: &[&str]) -> String {
        let started = self.run(name, annotations, options, &["cuda-probe", "hold", "600"]);
        assert!(started.ok, "ctr run {name}: {}\n{}", started.stderr, self.log());
        name.to_owned()
    }

    /// `ctr tasks exec`.
    #[must_use]
    pub fn exec(&self, name: &str, args: &[&str]) -> Finished {
        let id = format!("exec{}", self.execs.fetch_add(1, Ordering::Relaxed));
        self.cli(&[&["tasks", "exec", "--exec-id", &id, name], args].concat())
    }

    /// Like [`Self::exec`], for a process that prints something.
    ///
    /// On a busy machine `ctr` loses the output of a process that ends at once, so the command is repeated.
    #[must_use]
    pub fn exec_heard(&self, name: &str, args: &[&str]) -> Finished {
        let mut said = self.exec(name, args);
        for _ in 0..4 {
            if !said.ok || !said.stdout.is_empty() {
                break;
            }
            said = self.exec(name, args);
        }
        said
    }

    /// The output of `cuda-probe info` in a process started by `ctr tasks exec`, with the prefix command `before`.
    #[must_use]
    pub fn exec_info(&self, name: &str, before: &[&str]) -> Value {
        self.exec_heard(name, &[before, &["cuda-probe", "info"]].concat()).info()
    }

    /// The container's output.
    #[must_use]
    pub fn written(&self, name: &str) -> String {
        std::fs::read_to_string(self.output(name)).unwrap_or_default()
    }

    /// Waits for the first line with this `event` in the container's output.
    #[must_use]
    pub fn event(&self, name: &str, event: &str) -> Value {
        let text = || self.written(name);
        // In the CRI's logs the time, the stream and a tag come first.
        let json = |line: &str| serde_json::from_str::<Value>(&line[line.find('{')?..]).ok();
        let found = || text().lines().filter_map(json).find(|line| line["event"] == event);
        assert!(eventually(|| found().is_some()), "{name} wrote no {event}: {:?}", text());
        found().expect("it was there")
    }

    /// `ctr tasks ls`: name, pid and state (`RUNNING`, `STOPPED`).
    #[must_use]
    pub fn tasks(&self) -> Vec<(String, Pid, String)> {
        let listed = self.ask(&["tasks", "ls"]);
        let task = |line: &str| {
            let mut words = line.split_whitespace().map(str::to_owned);
            let (name, pid, state) = (words.next()?, words.next()?, words.next()?);
            Some((name, Pid::from_raw(pid.parse().ok()?), state))
        };
        listed.lines().filter_map(task).collect()
    }

    /// The container's first process.
    #[must_use]
    pub fn pid(&self, name: &str) -> Pid {
        self.tasks().into_iter().find(|task| task.0 == name).expect("a task").1
    }

    /// Ends the container's processes and removes the container.
    pub fn remove(&self, name: &str) {
        let _ = self.cli(&["tasks", "rm", "--force", name]);
        self.done(&["containers", "rm", name]);
    }

    /// config.json as the runtime received it; only while the container exists.
    #[must_use]
    pub fn config(&self, id: &str) -> String {
        let bundle = self.state.join("io.containerd.runtime.v2.task").join(&self.namespace).join(id);
        std::fs::read_to_string(bundle.join("config.json")).expect("config.json is there")
    }

    /// The lease of the container `id`, if it has one.
    #[must_use]
    pub fn lease(&self, id: &str) -> Option<Value> {
        self.world.leases().into_iter().find(|lease| lease["container_id"] == id)
    }

    /// Every process in the cgroup of the container `name`, which is `/NAMESPACE/NAME` for `ctr`.
    #[must_use]
    pub fn processes_of(&self, name: &str) -> Vec<Pid> {
        in_cgroup(&format!("/{}/{name}", self.namespace))
    }

    /// Checks that no lease, daemon, shim or mount is left.
    #[track_caller]
    pub fn assert_ended(&self) {
        let leases = || self.world.leases();
        assert!(eventually(|| leases().is_empty()), "leases are left: {:?}", leases());
        assert_no_daemons(&self.world, "at the end");
        self.world.assert_empty();
        assert!(eventually(|| self.shims().is_empty()), "shims are left");
        // containerd unmounts what a killed shim left at some later time.
        assert!(eventually(|| self.mounts().is_empty()), "mounts are left: {}", self.mounts().join("\n"));
    }

    /// The mountinfo lines of driver files and root filesystems.
    fn mounts(&self) -> Vec<String> {
        let driver = self.world.driver_root.as_ref().expect("simulated").display().to_string();
        let tasks = self.state.join("io.containerd.runtime.v2.task").display().to_string();
        let mounts = std::fs::read_to_string("/proc/self/mounts").expect("/proc");
        let is_left = |line: &&str| line.contains(&driver) || line.contains(&tasks);
        mounts.lines().filter(is_left).map(str::to_owned).collect()
    }

    /// Checks that nothing is left: [`Self::assert_ended`], and no mount point of sublet's in any snapshot.
    #[track_caller]
    pub fn assert_empty(&self) {
        self.assert_ended();
        let found = Command::new("find")
            .arg(self.world.dir.path().join("containerd/io.containerd.snapshotter.v1.native"))
            .args(["-type", "f", "-size", "0", "(", "-name", "libcuda*", "-o", "-name", "libnvidia*", ")"])
            .output()
            .expect("find runs");
        assert_eq!(String::from_utf8_lossy(&found.stdout), "", "mount points are left");
    }

    /// The image in the format of `docker save` (moby, image/spec/v1.2.md).
    fn archive(&self) -> PathBuf {
        let dir = self.world.dir.path().join("image");
        std::fs::create_dir(&dir).expect("a directory");
        self.world.rootfs.archive(&dir.join("layer.tar"));
        let sum = Command::new("sha256sum").arg(dir.join("layer.tar")).output().expect("sha256sum runs");
        let sum = String::from_utf8_lossy(&sum.stdout).split(' ').next().expect("a sum").to_owned();
        let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
        let config = json!({"architecture": architecture, "os": "linux",
            "config": {"Cmd": ["sleep", "600"], "Env": ["PATH=/usr/bin:/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{sum}")]}});
        let manifest = json!([{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]);
        std::fs::write(dir.join("config.json"), config.to_string()).expect("config.json");
        std::fs::write(dir.join("manifest.json"), manifest.to_string()).expect("manifest.json");
        let tar = self.world.dir.path().join("image.tar");
        let made = Command::new("tar").arg("-C").arg(&dir).arg("-cf").arg(&tar).arg(".").status();
        assert!(made.expect("tar runs").success(), "tar");
        tar
    }

    /// Ends every task and the daemon.
    fn down(&mut self) {
        if self.daemon.is_some() {
            self.remove_pods();
            for name in self.cli(&["tasks", "ls", "--quiet"]).stdout.split_whitespace() {
                let _ = self.cli(&["tasks", "rm", "--force", name]);
            }
            self.end_daemon(Signal::SIGTERM);
        }
        for shim in self.shims() {
            let _ = kill(shim, Signal::SIGKILL);
        }
    }
}

/// The table of a runtime handler.
fn handler(name: &str, program: &Path, further: &str) -> String {
    format!(
        "[{CRI}.containerd.runtimes.{name}]\nruntime_type = \"io.containerd.runc.v2\"\n{further}\
         [{CRI}.containerd.runtimes.{name}.options]\nBinaryName = \"{}\"\n",
        program.display()
    )
}

impl Drop for Containerd {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("containerd's log ends:\n{}", self.log());
        }
        self.down();
        let _ = std::fs::remove_dir_all(&self.state);
    }
}
