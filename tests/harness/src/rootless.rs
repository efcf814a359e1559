//! Rootless Podman of a real user with subordinate ids, in the root that tests/engines/enter provides, and `sublet
//! serve` as root.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::programs;
use crate::world::{World, bin_dir, eventually};

/// The user `tester` of tests/engines/root.
const UID: u32 = 1000;

/// A user's Podman with sublet's hook, and the shim as its runtime `shim`.
pub struct Rootless {
    serve: Option<Child>,
    /// The driver, configuration and leases.
    pub world: World,
}

impl Rootless {
    /// Sets up Podman without starting the service.
    #[must_use]
    pub fn new(world: World) -> Self {
        let dir = world.dir.path();
        open_to_all(dir);
        for below in ["bin", "hooks", "home", "home/xdg"] {
            std::fs::create_dir_all(dir.join(below)).expect("a directory");
        }
        for program in ["sublet", "sublet-runtime", "sublet-hook"] {
            programs::copy(&bin_dir().join(program), &dir.join("bin").join(program));
        }
        // Podman runs most of the shim's commands with an environment of its own.
        let (shim, config) = (dir.join("bin/shim"), world.config.display());
        let script = format!("SUBLET_CONFIG={config} exec {}/bin/sublet-runtime \"$@\"\n", dir.display());
        programs::script(&shim, &script);
        let rootless = Self { serve: None, world };
        rootless.configure();
        let tar = rootless.dir().join("image.tar");
        done(Command::new("tar").arg("-C").arg(rootless.dir().join("rootfs")).arg("-cf").arg(&tar).arg("."));
        done(Command::new("chown").args(["-R", "1000:1000"]).arg(rootless.dir().join("home")));
        done(rootless.podman(&["import", "--quiet", tar.to_str().expect("UTF-8"), "probe"]));
        rootless
    }

    /// Sets up Podman and starts the service.
    #[must_use]
    pub fn serving(world: World) -> Self {
        let mut rootless = Self::new(world);
        rootless.serve = Some(rootless.world.command("sublet").arg("serve").spawn().expect("it runs"));
        let socket = rootless.world.state_dir().join("sublet.sock");
        assert!(eventually(|| std::os::unix::net::UnixStream::connect(&socket).is_ok()), "no socket");
        rootless
    }

    /// Writes hooks/sublet.json for the programs under test, and settings for a machine without systemd.
    fn configure(&self) {
        let dir = self.world.dir.path();
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../hooks/sublet.json");
        let text = std::fs::read_to_string(shipped).expect("hooks/sublet.json");
        let mut hook: Value = serde_json::from_str(&text).expect("JSON");
        hook["hook"]["path"] = json!(dir.join("bin/sublet-hook"));
        let config = format!("SUBLET_CONFIG={}", self.world.config.display());
        hook["hook"]["env"].as_array_mut().expect("an array").push(json!(config));
        std::fs::write(dir.join("hooks/sublet.json"), hook.to_string()).expect("the hook");
        let runtime = self.world.engine.program();
        let conf = format!(
            "[containers]\ndefault_ulimits = [\"nofile=1024:1024\", \"nproc=4096:4096\"]\npids_limit = 0\n\
             netns = \"none\"\nlog_driver = \"k8s-file\"\n[engine]\ncgroup_manager = \"cgroupfs\"\n\
             events_logger = \"file\"\nlock_type = \"file\"\nruntime = \"{runtime}\"\nhooks_dir = [\"{}\"]\n\
             runtime_supports_json = [\"crun\", \"runc\", \"shim\"]\n[engine.runtimes]\nshim = [\"{}\"]\n",
            dir.join("hooks").display(),
            dir.join("bin/shim").display(),
        );
        std::fs::write(dir.join("containers.conf"), conf).expect("containers.conf");
    }

    /// A `podman` command of the user.
    #[must_use]
    pub fn podman(&self, arguments: &[&str]) -> Command {
        let dir = self.world.dir.path();
        let home = dir.join("home");
        let mut command = Command::new("podman");
        command.uid(UID).gid(UID).env_clear().current_dir(&home).stdin(Stdio::null());
        command.env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin").env("HOME", &home).env("USER", "tester");
        command.env("XDG_RUNTIME_DIR", home.join("xdg")).env("CONTAINERS_CONF", dir.join("containers.conf"));
        command.args(["--storage-driver=vfs", "--root"]).arg(home.join("storage"));
        command.arg("--runroot").arg(home.join("xdg/run")).arg("--tmpdir").arg(home.join("xdg/tmp"));
        command.args(arguments);
        command
    }

    /// The output of `sublet` when the user runs it.
    #[must_use]
    pub fn sublet(&self, arguments: &[&str]) -> String {
        let mut command = Command::new(self.world.dir.path().join("bin/sublet"));
        command.uid(UID).gid(UID).env("SUBLET_CONFIG", &self.world.config).args(arguments);
        let output = command.stdin(Stdio::null()).output().expect("sublet runs");
        text(&[output.stdout, output.stderr].concat())
    }

    /// `podman run -d` of the image, which may fail.
    #[must_use]
    pub fn run(
        &self,
        name: &str,
        options: &[&str],
        annotations: &[&str],
        args: &[&str],
    ) -> std::process::Output {
        let mut all = vec!["run", "-d", "--name", name];
        all.extend(options);
        all.extend(annotations.iter().flat_map(|annotation| ["--annotation", annotation]));
        all.push("probe");
        all.extend(args);
        self.podman(&all).output().expect("podman runs")
    }

    /// The output of `cuda-probe` in container `name`, from a Podman command that prints it.
    #[must_use]
    pub fn info(&self, name: &str, command: &[&str]) -> Value {
        let mut found = None;
        let heard = eventually(|| {
            let output = self.podman(command).output().expect("podman runs");
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let mut lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            found = lines.find(|line| line["event"] == "info");
            found.is_some()
        });
        let logs = self.podman(&["logs", name]).output().expect("podman runs");
        assert!(heard, "{name}: {command:?}: {}", text(&logs.stderr));
        found.unwrap_or_default()
    }

    /// The directory of this Podman.
    #[must_use]
    pub fn dir(&self) -> PathBuf {
        self.world.dir.path().to_owned()
    }
}

impl Drop for Rootless {
    fn drop(&mut self) {
        let _ = self.podman(&["rm", "--all", "--force", "--time=0"]).output();
        // Podman keeps one process running for its user namespace.
        let pause = self.world.dir.path().join("home/xdg/libpod/tmp/pause.pid");
        if let Ok(pid) = std::fs::read_to_string(pause) {
            let _ = Command::new("busybox").arg("kill").arg(pid.trim()).output();
        }
        if let Some(mut serve) = self.serve.take() {
            let _ = serve.kill();
            let _ = serve.wait();
        }
    }
}

/// Converts bytes to text.
#[must_use]
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn open_to_all(path: &Path) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).expect("chmod");
}

/// Runs a command that must succeed, and returns its output.
#[allow(clippy::must_use_candidate, reason = "often only done")]
pub fn done(command: impl std::borrow::BorrowMut<Command>) -> String {
    let mut command = command;
    let command: &mut Command = command.borrow_mut();
    let output = command.output().expect("it runs");
    assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
    text(&output.stdout)
}
