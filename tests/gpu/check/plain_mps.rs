//! MPS as others give it to containers: a daemon with default limits whose whole pipe directory is mounted, as
//! NVIDIA's Kubernetes device plugin, DRA driver and Container Toolkit (legacy mode) do; plain runc or crun.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};
use sublet_e2e::{Bundle, World, eventually};

/// Where containers see the daemon's directory.
const MOUNTED: &str = "/mps";

/// A daemon that belongs to this check only; it ends when dropped.
pub(super) struct PlainMps<'a> {
    world: &'a World,
    dir: PathBuf,
    whole: &'a Value,
}

impl<'a> PlainMps<'a> {
    /// Starts it with the limits that every client of it has: 25 % and `mib` MiB. `whole`: [`whole`].
    pub fn start(world: &'a World, whole: &'a Value, mib: u64) -> Self {
        let plain = Self { world, dir: world.dir.path().join("plain"), whole };
        std::fs::create_dir_all(plain.pipe()).expect("a pipe directory");
        let program = control(world);
        let beside = program.parent().expect("a directory").to_owned();
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::iter::once(beside).chain(std::env::split_paths(&path));
        let mut daemon = Command::new(program);
        let daemon = daemon
            .arg("-d")
            .env("PATH", std::env::join_paths(path).expect("a PATH"))
            .env("CUDA_MPS_PIPE_DIRECTORY", plain.pipe())
            .env("CUDA_MPS_LOG_DIRECTORY", plain.dir.join("log"))
            .env_remove("CUDA_VISIBLE_DEVICES")
            .current_dir("/");
        let started = daemon.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
        assert!(started.expect("nvidia-cuda-mps-control runs").success(), "no plain MPS daemon");
        plain.ask(&format!("set_default_device_pinned_mem_limit 0 {mib}M"));
        plain.ask("set_default_active_thread_percentage 25");
        plain
    }

    /// Its pipe directory.
    pub fn pipe(&self) -> PathBuf {
        self.dir.join("pipe")
    }

    /// A container that plain runc or crun starts, with the GPU's nodes and the whole pipe directory.
    pub fn bundle(&self, id: &str, args: &[&str]) -> Bundle<'a> {
        let mut bundle = self.world.bundle(id, &[], args);
        bundle.plain = true;
        for part in ["devices", "resources"] {
            bundle.spec["linux"][part] = self.whole["linux"][part].clone();
        }
        bundle.spec["mounts"] = self.whole["mounts"].clone();
        let mounts = bundle.spec["mounts"].as_array_mut().expect("mounts");
        mounts.push(
            json!({"destination": MOUNTED, "type": "bind", "source": self.pipe(), "options": ["rbind"]}),
        );
        let environment = bundle.spec["process"]["env"].as_array_mut().expect("env");
        environment.push(json!(format!("CUDA_MPS_PIPE_DIRECTORY={MOUNTED}")));
        bundle
    }

    fn ask(&self, command: &str) -> String {
        ask(self.world, &self.pipe(), command)
    }

    fn pids(&self) -> Vec<nix::unistd::Pid> {
        self.world.daemon_pids(&self.pipe().to_string_lossy())
    }
}

impl Drop for PlainMps<'_> {
    /// By its own words, and by signal what hangs.
    fn drop(&mut self) {
        let _ = self.ask("quit -t 1");
        if !eventually(|| self.pids().is_empty()) {
            for pid in self.pids() {
                let _ = kill(pid, Signal::SIGKILL);
            }
            eventually(|| self.pids().is_empty());
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// What the daemon of this pipe directory answers within five seconds.
pub(super) fn ask(world: &World, pipe: &Path, command: &str) -> String {
    let mut program = Command::new("timeout");
    program.arg("5").arg(control(world)).env("CUDA_MPS_PIPE_DIRECTORY", pipe).current_dir("/");
    let program = program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut running = program.spawn().expect("timeout runs");
    let mut stdin = running.stdin.take().expect("piped");
    // One that has gone already reads nothing.
    let _ = std::io::Write::write_all(&mut stdin, format!("{command}\n").as_bytes());
    drop(stdin);
    let output = running.wait_with_output().expect("it ends");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// The control program of this world's driver.
pub(super) fn control(world: &World) -> PathBuf {
    const NAME: &str = "nvidia-cuda-mps-control";
    if let Some(root) = &world.driver_root {
        return root.join("usr/bin").join(NAME);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join(NAME)).find(|path| path.is_file());
    found.expect("nvidia-cuda-mps-control is installed")
}

/// config.json of a container that has the whole GPU without MPS: its nodes, rules and driver files.
pub(super) fn whole(world: &World) -> Value {
    let bundle = world.bundle("template", &[("sublet.gpu", "0")], &["/bin/sleep", "1"]);
    let created = bundle.create();
    assert!(created.ok, "create template: {}", created.stderr);
    let config = bundle.config();
    bundle.down();
    config
}
