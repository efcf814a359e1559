//! One container: its bundle, and the runtime commands an engine would give.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::frameworks;
use crate::world::{World, eventually};

/// A bundle and the container made of it.
pub struct Bundle<'a> {
    /// The container id.
    pub id: String,
    /// The bundle directory.
    pub dir: PathBuf,
    /// config.json as the engine writes it.
    pub spec: Value,
    /// Whether the low-level runtime is called directly, without the shim.
    pub plain: bool,
    /// The host.
    pub world: &'a World,
}

/// The result of a runtime command.
#[derive(Debug)]
pub struct Finished {
    /// Exit code 0.
    pub ok: bool,
    /// The exit code; `None` after a signal.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Finished {
    /// The result of a command that has ended.
    #[must_use]
    pub fn of(output: &Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self {
            ok: output.status.success(),
            code: output.status.code(),
            stdout: text(&output.stdout),
            stderr: text(&output.stderr),
        }
    }

    /// Standard output as JSON lines; other lines are skipped.
    #[must_use]
    pub fn json(&self) -> Vec<Value> {
        self.stdout.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// What `cuda-probe info` printed.
    #[must_use]
    pub fn info(&self) -> Value {
        self.json().into_iter().next().unwrap_or_else(|| panic!("no info: {self:?}"))
    }
}

/// Waits for the first line with this `event` in the log of container `name`.
pub(crate) fn logged(name: &str, event: &str, log: impl Fn() -> Finished) -> Value {
    let found = || log().json().into_iter().find(|line| line["event"] == event);
    assert!(eventually(|| found().is_some()), "{name} printed no {event}: {:?}", log());
    found().expect("it was there")
}

impl World {
    /// A bundle with the annotations and the command, as Docker would make it.
    #[must_use]
    pub fn bundle(&self, id: &str, annotations: &[(&str, &str)], args: &[&str]) -> Bundle<'_> {
        let dir = self.dir.path().join("bundles").join(id);
        std::fs::create_dir_all(&dir).expect("bundle directory");
        let rootfs = dir.join("rootfs");
        if !rootfs.exists() {
            self.rootfs.clone_to(&rootfs);
        }
        let mut spec = spec(annotations, args);
        // By default runtimes name the cgroup after the container, and several worlds run at the same time.
        let world = self.dir.path().file_name().expect("a name").to_string_lossy();
        let path = if by_systemd() { format!("system.slice:{world}:{id}") } else { format!("/{world}-{id}") };
        spec["linux"]["cgroupsPath"] = json!(path);
        Bundle { id: id.to_owned(), dir, spec, plain: false, world: self }
    }

    /// The low-level runtime's state directory.
    #[must_use]
    pub fn runtime_root(&self) -> PathBuf {
        self.dir.path().join(self.engine.program())
    }

    fn with_globals(&self, mut command: Command) -> Command {
        command.arg("--root").arg(self.runtime_root());
        if by_systemd() {
            command.arg("--systemd-cgroup");
        }
        command
    }

    /// `sublet-runtime` with the global options that an engine gives.
    #[must_use]
    pub fn runtime(&self) -> Command {
        self.with_globals(self.command("sublet-runtime"))
    }
}

impl<'a> Bundle<'a> {
    /// The root filesystem.
    #[must_use]
    pub const fn world(&self) -> &'a World {
        self.world
    }

    /// Writes config.json.
    pub fn write(&self) {
        let text = serde_json::to_vec(&self.spec).expect("a spec is JSON");
        std::fs::write(self.dir.join("config.json"), text).expect("config.json is written");
    }

    /// `create`; the container's output goes to a file in the bundle.
    #[must_use]
    pub fn create(&self) -> Finished {
        self.write();
        let mut command = self.runtime();
        command.arg("create").arg("--bundle").arg(&self.dir).arg(&self.id);
        let created = self.detached(command);
        if created.ok && self.config().pointer("/annotations/sublet.lease").is_some() {
            let env: Vec<String> =
                serde_json::from_value(self.config()["process"]["env"].take()).expect("strings");
            assert_eq!(frameworks::refusals(&env), Vec::<String>::new(), "{env:?}");
        }
        created
    }

    /// `create`, run by a program that takes the command as its last arguments.
    #[must_use]
    pub fn create_by(&self, mut command: Command) -> Finished {
        self.write();
        let runtime = self.runtime();
        command.arg(runtime.get_program()).args(runtime.get_args());
        command.args(["create", "--bundle"]).arg(&self.dir).arg(&self.id);
        command.env("SUBLET_CONFIG", &self.world.config);
        self.detached(command)
    }

    /// `start`.
    #[must_use]
    pub fn start(&self) -> Finished {
        self.simple(&["start"])
    }

    /// `create` and `start`, both of which must succeed.
    pub fn up(&self) {
        let created = self.create();
        assert!(created.ok, "create {}: {}", self.id, created.stderr);
        let started = self.start();
        assert!(started.ok, "start {}: {}", self.id, started.stderr);
    }

    /// `run` in the foreground, like `runc run` at a prompt.
    #[must_use]
    pub fn run(&self) -> Finished {
        self.write();
        let mut command = self.runtime();
        command.arg("run").arg("--bundle").arg(&self.dir).arg(&self.id);
        Finished::of(&command.output().expect("sublet-runtime runs"))
    }

    /// `exec` of a command, given on the command line.
    #[must_use]
    pub fn exec(&self, args: &[&str]) -> Finished {
        let mut command = self.runtime();
        command.arg("exec").arg(&self.id).args(args);
        Finished::of(&command.output().expect("sublet-runtime runs"))
    }

    /// `exec` of a command, with options of `exec` before it.
    #[must_use]
    pub fn exec_with(&self, options: &[&str], args: &[&str]) -> Finished {
        let mut command = self.runtime();
        command.arg("exec").args(options).arg(&self.id).args(args);
        Finished::of(&command.output().expect("sublet-runtime runs"))
    }

    /// `exec` by a process file, as dockerd and health checks do; `environment` is the whole environment.
    #[must_use]
    pub fn exec_file(&self, args: &[&str], environment: &[&str]) -> Finished {
        let process = json!({"cwd": "/", "args": args, "env": environment, "user": {"uid": 0, "gid": 0},
            "capabilities": self.spec["process"]["capabilities"]});
        let file = self.dir.join("process.json");
        std::fs::write(&file, serde_json::to_vec(&process).expect("JSON")).expect("process.json is written");
        let mut command = self.runtime();
        command.arg("exec").arg("--process").arg(&file).arg(&self.id);
        Finished::of(&command.output().expect("sublet-runtime runs"))
    }

    /// `kill` with a signal.
    #[must_use]
    pub fn kill(&self, signal: &str) -> Finished {
        let mut command = self.runtime();
        command.arg("kill").arg(&self.id).arg(signal);
        Finished::of(&command.output().expect("sublet-runtime runs"))
    }

    /// `delete`.
    #[must_use]
    pub fn delete(&self) -> Finished {
        self.simple(&["delete"])
    }

    /// `delete --force`, which must succeed.
    pub fn down(&self) {
        let deleted = self.simple(&["delete", "--force"]);
        assert!(deleted.ok, "delete {}: {}", self.id, deleted.stderr);
    }

    /// config.json as it is now.
    #[must_use]
    pub fn config(&self) -> Value {
        let text = std::fs::read(self.dir.join("config.json")).expect("config.json is there");
        serde_json::from_slice(&text).expect("config.json is JSON")
    }

    /// What the container has printed so far.
    #[must_use]
    pub fn output(&self) -> String {
        std::fs::read_to_string(self.dir.join("out")).unwrap_or_default()
    }

    /// Creates and starts it: what its first process sees, and the warnings of create.
    ///
    /// # Panics
    /// It does not start, or CUDA does not.
    #[expect(clippy::must_use_candidate, reason = "often only waited for")]
    pub fn up_heard(&self) -> (Value, String) {
        let created = self.create();
        assert!(created.ok, "{created:?}");
        let started = self.start();
        assert!(started.ok, "{started:?}");
        let info = self.event("info");
        assert_eq!(info["error"], Value::Null, "{info}");
        (info, created.stderr)
    }

    /// Where something is mounted in it, according to config.json.
    #[must_use]
    pub fn destinations(&self) -> Vec<String> {
        let config = self.config();
        let mounts = config["mounts"].as_array().expect("mounts");
        mounts.iter().map(|mount| mount["destination"].as_str().expect("a path").to_owned()).collect()
    }

    /// Waits up to ten seconds for the first JSON line with this `event` in the container's output.
    #[expect(clippy::must_use_candidate, reason = "often only waited for")]
    pub fn event(&self, event: &str) -> Value {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let output = self.output();
            let found = output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            if let Some(found) = found.into_iter().find(|line| line["event"] == event) {
                return found;
            }
            assert!(Instant::now() < deadline, "container {} printed no {event}: {output:?}", self.id);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The container's first process, according to the low-level runtime.
    #[must_use]
    pub fn pid(&self) -> i32 {
        let state = self.simple(&["state"]);
        let state: Value = serde_json::from_str(&state.stdout).expect("state prints JSON");
        i32::try_from(state["pid"].as_i64().expect("a pid")).expect("a pid")
    }

    /// The shim or the low-level runtime, with the global options that an engine gives.
    #[must_use]
    pub fn runtime(&self) -> Command {
        if !self.plain {
            return self.world.runtime();
        }
        self.world.with_globals(Command::new(self.world.engine.program()))
    }

    fn simple(&self, arguments: &[&str]) -> Finished {
        let mut command = self.runtime();
        command.args(arguments).arg(&self.id);
        Finished::of(&command.output().expect("sublet-runtime runs"))
    }

    /// The container keeps the standard output with which it is created. It is a file, so that no reader waits for its
    /// end.
    pub(crate) fn detached(&self, mut command: Command) -> Finished {
        let open = |name: &str| File::create(self.dir.join(name)).expect("output file");
        command.stdin(Stdio::null()).stdout(open("out")).stderr(open("err"));
        let status = command.status().expect("sublet-runtime runs");
        let stderr = std::fs::read_to_string(self.dir.join("err")).unwrap_or_default();
        Finished { ok: status.success(), code: status.code(), stdout: String::new(), stderr }
    }
}

/// Whether systemd creates the containers' cgroups (`SUBLET_TEST_CGROUPS=systemd`).
#[must_use]
pub fn by_systemd() -> bool {
    std::env::var_os("SUBLET_TEST_CGROUPS").is_some_and(|value| value == "systemd")
}

/// Ends every container of `world`, whatever state a test left it in.
pub(crate) fn remove_all(world: &World) {
    let Ok(entries) = std::fs::read_dir(world.dir.path().join("bundles")) else { return };
    for entry in entries.flatten() {
        let mut command = world.runtime();
        let _ = command.args(["delete", "--force"]).arg(entry.file_name()).output();
    }
}

/// A spec as Docker writes it, without members that these tests do not use.
fn spec(annotations: &[(&str, &str)], args: &[&str]) -> Value {
    let capabilities = [
        "CAP_CHOWN",
        "CAP_DAC_OVERRIDE",
        "CAP_FSETID",
        "CAP_FOWNER",
        "CAP_MKNOD",
        "CAP_NET_RAW",
        "CAP_SETGID",
        "CAP_SETUID",
        "CAP_SETFCAP",
        "CAP_SETPCAP",
        "CAP_NET_BIND_SERVICE",
        "CAP_SYS_CHROOT",
        "CAP_KILL",
        "CAP_AUDIT_WRITE",
    ];
    let annotations: serde_json::Map<_, _> =
        annotations.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect();
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": args,
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
            "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
            "noNewPrivileges": true
        },
        "root": {"path": "rootfs"},
        "hostname": "test",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]}
        ],
        "annotations": annotations,
        "linux": {
            "resources": {"devices": [
                {"allow": false, "access": "rwm"},
                {"allow": true, "type": "c", "major": 1, "minor": 5, "access": "rwm"},
                {"allow": true, "type": "c", "major": 1, "minor": 3, "access": "rwm"},
                {"allow": true, "type": "c", "major": 1, "minor": 9, "access": "rwm"},
                {"allow": true, "type": "c", "major": 1, "minor": 8, "access": "rwm"},
                {"allow": true, "type": "c", "access": "m"},
                {"allow": true, "type": "b", "access": "m"}
            ]},
            "namespaces": [
                {"type": "mount"}, {"type": "network"}, {"type": "uts"}, {"type": "pid"}, {"type": "ipc"}
            ],
            "maskedPaths": ["/proc/asound", "/proc/kcore"],
            "readonlyPaths": ["/proc/bus", "/proc/fs"]
        }
    })
}
