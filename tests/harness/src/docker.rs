//! A dockerd for one test, in the root that tests/engines/enter provides.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::bundle::{Finished, by_systemd, logged};
use crate::processes::{in_cgroup, is_alive, shims_of};
use crate::world::{World, bin_dir, eventually};

/// The only image, made from the world's minimal root filesystem.
pub const IMAGE: &str = "probe";

/// A dockerd with the runtime `sublet`.
pub struct Docker {
    /// The driver, configuration and leases.
    pub world: World,
    daemon: Option<Child>,
    run: PathBuf,
    /// What comes before `dockerd`, to start it elsewhere than here.
    enter: Vec<String>,
}

/// Whether to skip the test: daemons need a machine of their own, which tests/engines/enter provides. Prints that the
/// test was skipped.
#[must_use]
pub fn skip_unless_engines() -> bool {
    let inside = Path::new("/.sublet-root").exists();
    if !inside {
        eprintln!("skipped: needs tests/engines/enter (make test-docker)");
    }
    !inside
}

impl Docker {
    /// Starts a dockerd; `settings` override the daemon.json that all tests share.
    ///
    /// Its run directory is named through /var/run, like Docker's own: bundles come with that path, while runc tells
    /// hooks the real one.
    #[must_use]
    pub fn up(world: World, settings: &Value) -> Self {
        Self::up_in(world, settings, Vec::new())
    }

    /// [`Self::up`] with the daemon behind the command `enter`, such as nsenter(1), which has to become it.
    #[must_use]
    pub fn up_in(world: World, settings: &Value, enter: Vec<String>) -> Self {
        let name = world.dir.path().file_name().expect("a name").to_owned();
        let run = Path::new("/var/run").join(name);
        for directory in [&run, &world.dir.path().join("cdi"), &world.dir.path().join("bin")] {
            std::fs::create_dir_all(directory).expect("a directory");
        }
        let mut docker = Self { world, daemon: None, run, enter };
        docker.write_settings(settings);
        docker.start_daemon();
        let image = docker.import();
        assert!(image.ok, "docker import: {}", image.stderr);
        docker
    }

    fn write_settings(&self, settings: &Value) {
        let dir = self.world.dir.path();
        let mut all = json!({
            "data-root": dir.join("docker"), "exec-root": self.run, "pidfile": self.run.join("pid"),
            "hosts": [format!("unix://{}", self.socket().display())],
            "iptables": false, "bridge": "none", "storage-driver": "vfs",
            "features": {"cdi": true}, "cdi-spec-dirs": [dir.join("cdi")],
            "runtimes": {"sublet": {"path": bin_dir().join("sublet-runtime")}},
        });
        if by_systemd() {
            all["exec-opts"] = json!(["native.cgroupdriver=systemd"]);
        }
        for (key, value) in settings.as_object().into_iter().flatten() {
            all[key] = value.clone();
        }
        let text = serde_json::to_vec_pretty(&all).expect("JSON");
        std::fs::write(dir.join("daemon.json"), text).expect("daemon.json is written");
    }

    /// The daemon's socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.run.join("docker.sock")
    }

    /// Starts the daemon, possibly again, and waits until it answers.
    pub fn start_daemon(&mut self) {
        self.daemon = Some(self.spawn_daemon());
    }

    /// A daemon that answers, for a caller that ends it.
    #[must_use]
    pub fn spawn_daemon(&self) -> Child {
        let dir = self.world.dir.path();
        let log = || File::options().append(true).create(true).open(dir.join("dockerd.log")).expect("a log");
        let path = format!("{}:{}", dir.join("bin").display(), std::env::var("PATH").expect("PATH"));
        let config = dir.join("daemon.json").to_string_lossy().into_owned();
        let daemon = ["dockerd".to_owned(), "--config-file".to_owned(), config];
        let mut argv = self.enter.iter().chain(&daemon);
        let child = Command::new(argv.next().expect("dockerd itself"))
            .args(argv)
            .env("SUBLET_CONFIG", &self.world.config)
            .env("PATH", path)
            .stdin(Stdio::null())
            .stdout(log())
            .stderr(log())
            .spawn()
            .expect("dockerd is installed");
        let answers = Instant::now() + Duration::from_secs(60);
        while !self.cli(&["version"]).ok {
            assert!(Instant::now() < answers, "dockerd does not answer: {}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
        child
    }

    /// Makes the daemon read its settings again, with these overriding them: `systemctl reload docker`.
    pub fn reload(&self, settings: &Value) {
        self.write_settings(settings);
        self.hang_up();
    }

    /// Makes the daemon read its unchanged settings again.
    pub fn hang_up(&self) {
        let daemon = self.daemon.as_ref().expect("it runs");
        kill(Pid::from_raw(i32::try_from(daemon.id()).expect("a pid")), Signal::SIGHUP).expect("SIGHUP");
    }

    /// `systemctl restart docker`.
    pub fn restart(&mut self) {
        self.end_daemon(Signal::SIGTERM);
        self.start_daemon();
    }

    /// Ends the daemon by SIGTERM or SIGKILL; its containerd ends with it.
    pub fn end_daemon(&mut self, signal: Signal) {
        let Some(mut daemon) = self.daemon.take() else { return };
        let containerd = self.containerd();
        let _ = kill(Pid::from_raw(i32::try_from(daemon.id()).expect("a pid")), signal);
        let _ = daemon.wait();
        assert!(eventually(|| !containerd.is_some_and(is_alive)), "containerd lives on");
    }

    /// [`Self::end_daemon`], and every containerd-shim of this daemon, as if the whole engine had been killed.
    pub fn kill_engine(&mut self) {
        self.end_daemon(Signal::SIGKILL);
        for shim in self.shims() {
            let _ = kill(shim, Signal::SIGKILL);
        }
        assert!(eventually(|| self.shims().is_empty()), "a shim lives on");
    }

    fn containerd(&self) -> Option<Pid> {
        let text = std::fs::read_to_string(self.run.join("containerd/containerd.pid")).ok()?;
        text.trim().parse().ok().map(Pid::from_raw)
    }

    /// The containerd-shims of this daemon.
    #[must_use]
    pub fn shims(&self) -> Vec<Pid> {
        shims_of(&self.run.join("containerd/containerd.sock"))
    }

    /// The end of the daemon's log.
    #[must_use]
    pub fn log(&self) -> String {
        let text = std::fs::read_to_string(self.world.dir.path().join("dockerd.log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    /// A `docker` command.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new("docker");
        command.env("DOCKER_HOST", format!("unix://{}", self.socket().display())).stdin(Stdio::null());
        command
    }

    /// Runs `docker ARGUMENTS`.
    #[must_use]
    pub fn cli(&self, arguments: &[&str]) -> Finished {
        Finished::of(&self.command().args(arguments).output().expect("docker is installed"))
    }

    /// [`Self::cli`], which must succeed; its standard output without the newline.
    #[must_use]
    pub fn ask(&self, arguments: &[&str]) -> String {
        let finished = self.cli(arguments);
        assert!(finished.ok, "docker {}: {}\n{}", arguments.join(" "), finished.stderr, self.log());
        finished.stdout.trim_end().to_owned()
    }

    /// Like [`Self::ask`], without the output.
    pub fn done(&self, arguments: &[&str]) {
        let _ = self.ask(arguments);
    }

    /// `docker run -d` with the runtime `sublet`, which may fail.
    #[must_use]
    pub fn run(&self, name: &str, annotations: &[&str], options: &[&str], args: &[&str]) -> Finished {
        let mut all = vec!["run", "-d", "--name", name, "--network=none", "--runtime=sublet"];
        all.extend(annotations.iter().flat_map(|annotation| ["--annotation", annotation]));
        all.extend(options);
        all.push(IMAGE);
        all.extend(args);
        self.cli(&all)
    }

    /// [`Self::run`] of a process that holds a context. It must succeed. Returns the container's id.
    #[must_use]
    pub fn hold(&self, name: &str, annotations: &[&str], options: &[&str]) -> String {
        let started = self.run(name, annotations, options, &["cuda-probe", "hold", "600"]);
        assert!(started.ok, "docker run {name}: {}\n{}", started.stderr, self.log());
        started.stdout.trim_end().to_owned()
    }

    /// `docker run -d` with a CDI device, which may fail; `options` may name a runtime. The CDI specification is the
    /// world's (`generate_cdi`).
    #[must_use]
    pub fn run_cdi(&self, name: &str, device: &str, options: &[&str], args: &[&str]) -> Finished {
        let mut all = vec!["run", "-d", "--name", name, "--network=none", "--device", device];
        all.extend(options);
        all.push(IMAGE);
        all.extend(args);
        self.cli(&all)
    }

    /// [`Self::run_cdi`] of a process that holds a context. It must succeed. Returns the container's id.
    #[must_use]
    pub fn hold_cdi(&self, name: &str, device: &str, options: &[&str]) -> String {
        let started = self.run_cdi(name, device, options, &["cuda-probe", "hold", "600"]);
        assert!(started.ok, "docker run {name}: {}\n{}", started.stderr, self.log());
        started.stdout.trim_end().to_owned()
    }

    /// The output of `cuda-probe info` in a process started by `docker exec`, with the prefix command `before`.
    #[must_use]
    pub fn exec_info(&self, name: &str, before: &[&str]) -> Value {
        self.cli(&[&["exec", name], before, &["cuda-probe", "info"]].concat()).info()
    }

    /// Waits for the first line with this `event` in the container's log.
    #[must_use]
    pub fn event(&self, name: &str, event: &str) -> Value {
        logged(name, event, || self.cli(&["logs", name]))
    }

    /// A member of `docker inspect`, such as `State.Pid`.
    #[must_use]
    pub fn inspect(&self, name: &str, member: &str) -> String {
        self.ask(&["inspect", "--format", &format!("{{{{json .{member}}}}}"), name])
    }

    /// The container's first process.
    #[must_use]
    pub fn pid(&self, name: &str) -> Pid {
        Pid::from_raw(self.inspect(name, "State.Pid").parse().expect("a pid"))
    }

    /// config.json as the runtime received it; only while the container exists.
    #[must_use]
    pub fn config(&self, id: &str) -> String {
        let bundle = self.run.join("containerd/daemon/io.containerd.runtime.v2.task/moby").join(id);
        std::fs::read_to_string(bundle.join("config.json")).expect("config.json is there")
    }

    /// The lease of the container `id`, if it has one.
    #[must_use]
    pub fn lease(&self, id: &str) -> Option<Value> {
        self.world.leases().into_iter().find(|lease| lease["container_id"] == id)
    }

    /// Every process in the cgroup of the container `id`.
    #[must_use]
    pub fn processes_of(&self, id: &str) -> Vec<Pid> {
        in_cgroup(id)
    }

    /// Whether a process lives in the cgroup of the container `id`. The kernel still counts one that ended a moment
    /// ago.
    #[must_use]
    pub fn is_populated(&self, id: &str) -> bool {
        let events = Path::new("/sys/fs/cgroup/docker").join(id).join("cgroup.events");
        let populated = std::fs::read_to_string(events).is_ok_and(|text| text.contains("populated 1"));
        populated || !self.processes_of(id).is_empty()
    }

    /// Creates the image by `docker import` of the world's root filesystem.
    fn import(&self) -> Finished {
        let tar = self.world.dir.path().join("image.tar");
        self.world.rootfs.archive(&tar);
        self.cli(&["import", tar.to_str().expect("UTF-8"), IMAGE])
    }

    /// Ends every container and the daemon.
    fn down(&mut self) {
        if self.daemon.is_none() {
            return;
        }
        let all = self.cli(&["ps", "-aq"]).stdout;
        let ids: Vec<&str> = all.split_whitespace().collect();
        if !ids.is_empty() {
            let _ = self.cli(&[&["rm", "-f"], &ids[..]].concat());
        }
        self.end_daemon(Signal::SIGTERM);
    }
}

impl Drop for Docker {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("dockerd's log ends:\n{}", self.log());
        }
        self.down();
        let _ = std::fs::remove_dir_all(&self.run);
    }
}
