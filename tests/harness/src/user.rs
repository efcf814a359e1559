//! A user without root: containers as a rootless engine creates them, and `sublet serve`.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::bundle::Finished;
use crate::programs;
use crate::world::{World, bin_dir, eventually};

/// A simulated driver, the service, and programs that every user may run.
pub struct Host {
    /// `sublet serve` while it runs.
    pub serve: Option<Child>,
    /// The driver, configuration and leases.
    pub world: World,
}

impl Host {
    /// Sets everything up without starting the service. `extra` is added to the configuration; `speak` is the built
    /// program.
    #[must_use]
    pub fn new(topology: &str, extra: &str, speak: &Path) -> Self {
        let world = World::simulated(topology, extra);
        open_to_all(world.dir.path());
        std::fs::create_dir(world.dir.path().join("bin")).expect("bin");
        for program in ["sublet", "sublet-runtime", "sublet-hook"] {
            programs::copy(&bin_dir().join(program), &world.dir.path().join("bin").join(program));
        }
        programs::copy(speak, &world.dir.path().join("bin/speak"));
        Self { serve: None, world }
    }

    /// The socket's path.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.world.state_dir().join("sublet.sock")
    }

    /// Starts the service and waits until it answers.
    pub fn start(&mut self) {
        let serve = self.world.command("sublet").arg("serve").spawn().expect("sublet serve runs");
        self.serve = Some(serve);
        assert!(eventually(|| std::os::unix::net::UnixStream::connect(self.socket()).is_ok()), "no socket");
    }

    /// Ends the service in the same way as systemd.
    pub fn stop(&mut self) {
        let Some(mut serve) = self.serve.take() else { return };
        let pid = nix::unistd::Pid::from_raw(i32::try_from(serve.id()).expect("a pid"));
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).expect("it runs");
        assert!(serve.wait().expect("it ends").success());
    }

    /// A sublet program, run by `uid`.
    #[must_use]
    pub fn command(&self, uid: u32, program: &str) -> Command {
        let mut command = Command::new(self.world.dir.path().join("bin").join(program));
        command.uid(uid).gid(uid).env("SUBLET_CONFIG", &self.world.config).current_dir("/");
        command.env("XDG_RUNTIME_DIR", self.home(uid)).stdin(Stdio::null());
        command
    }

    /// A directory of this user.
    #[must_use]
    pub fn home(&self, uid: u32) -> PathBuf {
        self.world.dir.path().join(format!("home-{uid}"))
    }

    /// The service's answers to `lines` sent by `uid`.
    #[must_use]
    pub fn say(&self, uid: u32, lines: &[Value]) -> Vec<Value> {
        let mut command = self.command(uid, "speak");
        let mut child = command
            .arg(self.socket())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("speak runs");
        let mut stdin = child.stdin.take().expect("piped");
        for line in lines {
            writeln!(stdin, "{line}").expect("it listens");
        }
        drop(stdin);
        let output = child.wait_with_output().expect("it ends");
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    /// Holds `count` connections as `uid`.
    #[must_use]
    pub fn hold(&self, uid: u32, how: &str, count: usize) -> Holder {
        let mut command = self.command(uid, "speak");
        let command = command.arg(self.socket()).args([how, &count.to_string()]);
        Holder(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("speak runs"))
    }

    /// A bundle of `uid` as a rootless engine writes it: uid 0 in its own user namespace.
    #[must_use]
    pub fn bundle(&self, uid: u32, id: &str, annotations: &[(&str, &str)], args: &[&str]) -> Bundle<'_> {
        let mut spec = self.world.bundle(id, annotations, args).spec;
        let dir = self.home(uid).join(id);
        std::fs::create_dir_all(&dir).expect("bundle");
        let from = self.world.dir.path().join("rootfs");
        run("cp", &["-a", text(&from), text(&dir.join("rootfs"))]);
        run("chown", &["-R", &format!("{uid}:{uid}"), text(&self.home(uid))]);
        let linux = spec["linux"].as_object_mut().expect("linux");
        linux.remove("cgroupsPath");
        linux.remove("resources");
        linux["namespaces"].as_array_mut().expect("namespaces").push(json!({"type": "user"}));
        let map = json!([{"containerID": 0, "hostID": uid, "size": 1}]);
        linux.insert("uidMappings".into(), map);
        linux.insert("gidMappings".into(), json!([{"containerID": 0, "hostID": uid, "size": 1}]));
        let mounts = spec["mounts"].as_array_mut().expect("mounts");
        mounts.retain(|mount| mount["destination"] != "/sys");
        Bundle { host: self, uid, id: id.to_owned(), dir, spec }
    }

    /// The leases in `sublet status`.
    #[must_use]
    pub fn leases(&self) -> Vec<Value> {
        self.world.leases()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(mut serve) = self.serve.take() {
            let _ = serve.kill();
            let _ = serve.wait();
        }
    }
}

/// A client that holds connections open until it is dropped.
pub struct Holder(Child);

impl Holder {
    /// How many connections were refused, and the message of the first.
    #[must_use]
    pub fn turned_away(&mut self) -> (usize, String) {
        let mut lines = BufReader::new(self.0.stdout.take().expect("piped")).lines();
        let count = lines.next().expect("a line").expect("a line").parse().expect("a number");
        let words = if count > 0 { lines.next().expect("a line").expect("a line") } else { String::new() };
        (count, words)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A container of a user. It is removed however its test ends.
pub struct Bundle<'a> {
    /// The host.
    pub host: &'a Host,
    /// The user.
    pub uid: u32,
    /// The container id.
    pub id: String,
    /// The bundle directory.
    pub dir: PathBuf,
    /// config.json as the engine writes it.
    pub spec: Value,
}

impl Bundle<'_> {
    /// A command of the shim, as the user.
    #[must_use]
    pub fn runtime(&self, arguments: &[&str]) -> Finished {
        let mut command = self.host.command(self.uid, "sublet-runtime");
        command.arg("--root").arg(self.dir.join("state")).args(arguments);
        let open = |name: &str| std::fs::File::create(self.dir.join(name)).expect("output file");
        let kind = arguments[0];
        let (out, err) = (format!("{kind}.out"), format!("{kind}.err"));
        let status = command.stdout(open(&out)).stderr(open(&err)).status().expect("it runs");
        let read = |name: &str| std::fs::read_to_string(self.dir.join(name)).unwrap_or_default();
        Finished { ok: status.success(), code: status.code(), stdout: read(&out), stderr: read(&err) }
    }

    /// Writes config.json.
    pub fn write(&self) {
        let file = self.dir.join("config.json");
        std::fs::write(&file, self.spec.to_string()).expect("config.json");
        std::os::unix::fs::chown(&file, Some(self.uid), Some(self.uid)).expect("chown");
    }

    /// `create`.
    #[must_use]
    pub fn create(&self) -> Finished {
        self.write();
        self.runtime(&["create", "--bundle", text(&self.dir), &self.id])
    }

    /// `create` and `start`, both of which must succeed.
    pub fn up(&self) {
        let created = self.create();
        assert!(created.ok, "create {}: {}", self.id, created.stderr);
        let started = self.runtime(&["start", &self.id]);
        assert!(started.ok, "start {}: {}", self.id, started.stderr);
    }

    /// `delete --force`, which must succeed.
    pub fn down(&self) {
        let deleted = self.runtime(&["delete", "--force", &self.id]);
        assert!(deleted.ok, "delete {}: {}", self.id, deleted.stderr);
    }

    /// Waits for the first line of that event in the container's output.
    #[allow(clippy::must_use_candidate, reason = "often only waited for")]
    pub fn event(&self, event: &str) -> Value {
        let mut found = None;
        let heard = eventually(|| {
            let output = std::fs::read_to_string(self.dir.join("create.out")).unwrap_or_default();
            let mut lines = output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            found = lines.find(|line| line["event"] == event);
            found.is_some()
        });
        assert!(heard, "container {} printed no {event}", self.id);
        found.unwrap_or_default()
    }

    /// config.json as it is now.
    #[must_use]
    pub fn config(&self) -> Value {
        let text = std::fs::read(self.dir.join("config.json")).expect("config.json");
        serde_json::from_slice(&text).expect("JSON")
    }

    /// The container's first process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        let state: Value = serde_json::from_str(&self.runtime(&["state", &self.id]).stdout).expect("JSON");
        i32::try_from(state["pid"].as_i64().expect("pid")).expect("pid")
    }
}

impl Drop for Bundle<'_> {
    fn drop(&mut self) {
        let _ = self.runtime(&["delete", "--force", &self.id]);
    }
}

fn open_to_all(path: &Path) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).expect("chmod");
}

/// Runs a program that must succeed. A minimal system has no program `kill`, but busybox has one.
pub fn run(program: &str, args: &[&str]) {
    let mut command = Command::new(if program == "kill" { "busybox" } else { program });
    if program == "kill" {
        command.arg("kill");
    }
    let status = command.args(args).status().expect("it runs");
    assert!(status.success(), "{program} {args:?}");
}

/// Converts a path to text.
#[must_use]
pub fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}
