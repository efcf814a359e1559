//! Rootless Podman as a real uid with subordinate ids, `sublet serve` as root: by hook and by shim. Runs in
//! the root that tests/engines/enter gives.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use sublet_e2e::docker::skip_unless_engines;
use sublet_e2e::{World, bin_dir, eventually};

/// The user `tester` of tests/engines/root.
const UID: u32 = 1000;
const SHARE: &[&str] = &["sublet.sm=25", "sublet.memory=8GiB"];
const POLICY: &str = "[[policy]]\nuser = \"tester\"\nsm = 50\nmemory = \"16GiB\"\nleases = 8\n";

struct Rootless {
    serve: Option<Child>,
    world: World,
}

impl Rootless {
    fn new() -> Self {
        let world = World::simulated("h200", POLICY);
        let dir = world.dir.path();
        open_to_all(dir);
        for below in ["bin", "hooks", "home", "home/xdg"] {
            std::fs::create_dir_all(dir.join(below)).expect("a directory");
        }
        for program in ["sublet", "sublet-runtime", "sublet-hook"] {
            std::fs::copy(bin_dir().join(program), dir.join("bin").join(program)).expect("a copy");
        }
        // Podman gives most of the shim's commands an environment of its own.
        let (shim, config) = (dir.join("bin/shim"), world.config.display());
        let script =
            format!("#!/bin/sh\nSUBLET_CONFIG={config} exec {}/bin/sublet-runtime \"$@\"\n", dir.display());
        std::fs::write(&shim, script).expect("the shim is written");
        for name in ["bin/sublet", "bin/sublet-runtime", "bin/sublet-hook", "bin/shim"] {
            open_to_all(&dir.join(name));
        }
        let rootless = Self { serve: None, world };
        rootless.configure();
        let tar = dir_of(&rootless).join("image.tar");
        done(
            Command::new("tar").arg("-C").arg(dir_of(&rootless).join("rootfs")).arg("-cf").arg(&tar).arg("."),
        );
        done(Command::new("chown").args(["-R", "1000:1000"]).arg(dir_of(&rootless).join("home")));
        done(rootless.podman(&["import", "--quiet", tar.to_str().expect("UTF-8"), "probe"]));
        rootless
    }

    fn serving() -> Self {
        let mut rootless = Self::new();
        rootless.serve = Some(rootless.world.command("sublet").arg("serve").spawn().expect("it runs"));
        let socket = rootless.world.state_dir().join("sublet.sock");
        assert!(eventually(|| std::os::unix::net::UnixStream::connect(&socket).is_ok()), "no socket");
        rootless
    }

    /// hooks/sublet.json for the programs under test, and what a machine without systemd needs.
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

    fn podman(&self, arguments: &[&str]) -> Command {
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

    /// What `sublet` prints to the user.
    fn sublet(&self, arguments: &[&str]) -> String {
        let mut command = Command::new(self.world.dir.path().join("bin/sublet"));
        command.uid(UID).gid(UID).env("SUBLET_CONFIG", &self.world.config).args(arguments);
        let output = command.stdin(Stdio::null()).output().expect("sublet runs");
        text(&[output.stdout, output.stderr].concat())
    }

    fn run(&self, name: &str, options: &[&str], annotations: &[&str], args: &[&str]) -> std::process::Output {
        let mut all = vec!["run", "-d", "--name", name];
        all.extend(options);
        all.extend(annotations.iter().flat_map(|annotation| ["--annotation", annotation]));
        all.push("probe");
        all.extend(args);
        self.podman(&all).output().expect("podman runs")
    }

    fn info(&self, name: &str, command: &[&str]) -> Value {
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

    /// A whole life: first process, exec, `env -i`, stop and start again, remove.
    fn lives(&self, name: &str, options: &[&str]) {
        let health = ["--health-cmd=cuda-probe info >/tmp/checked", "--health-interval=disable"];
        let options = [options, &health].concat();
        let started = self.run(name, &options, SHARE, &["cuda-probe", "hold", "600"]);
        assert!(started.status.success(), "{}", text(&started.stderr));
        let exec = ["exec", name, "cuda-probe", "info"];
        let bare = ["exec", name, "env", "-i", "/usr/bin/cuda-probe", "info"];
        let check = ["healthcheck", "run", name];
        done(&mut self.podman(&check));
        let checked = ["exec", name, "cat", "/tmp/checked"];
        for command in [["logs", name].as_slice(), &exec, &bare, &checked] {
            let info = self.info(name, command);
            assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)), "{command:?}: {info}");
        }
        let leases = self.world.leases();
        assert_eq!((leases.len(), &leases[0]["state"]), (1, &json!("active")), "{leases:?}");
        let seen = self.sublet(&["status"]);
        let left = "Your policy: sm 50 %, 25 % of it left; memory 16 GiB, 8 GiB of it left; leases 8, 7 of them left";
        assert!(seen.contains(leases[0]["id"].as_str().expect("text")) && seen.contains(left), "{seen}");
        let pid = done(self.podman(&["inspect", "--format", "{{.State.Pid}}", name]).arg("--type=container"));
        assert_eq!(leases[0]["pid"].to_string(), pid.trim());
        done(&mut self.podman(&["stop", "-t0", name]));
        assert!(eventually(|| self.world.leases().is_empty()), "{:?}", self.world.leases());
        done(&mut self.podman(&["start", name]));
        assert_eq!(self.world.leases().len(), 1);
        done(&mut self.podman(&["rm", "-f", "-t0", name]));
        assert!(eventually(|| self.world.leases().is_empty()), "{:?}", self.world.leases());
        self.world.assert_empty();
    }
}

impl Drop for Rootless {
    fn drop(&mut self) {
        let _ = self.podman(&["rm", "--all", "--force", "--time=0"]).output();
        // Podman keeps a process for its user namespace.
        let pause = self.world.dir.path().join("home/xdg/libpod/tmp/pause.pid");
        if let Ok(pid) = std::fs::read_to_string(pause) {
            let _ = Command::new("kill").arg(pid.trim()).output();
        }
        if let Some(mut serve) = self.serve.take() {
            let _ = serve.kill();
            let _ = serve.wait();
        }
    }
}

fn dir_of(rootless: &Rootless) -> PathBuf {
    rootless.world.dir.path().to_owned()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn open_to_all(path: &Path) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).expect("chmod");
}

/// Runs it, which must succeed; what it printed.
fn done(command: impl std::borrow::BorrowMut<Command>) -> String {
    let mut command = command;
    let command: &mut Command = command.borrow_mut();
    let output = command.output().expect("it runs");
    assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn by_the_hook() {
    if skip_unless_engines() {
        return;
    }
    Rootless::serving().lives("hooked", &[]);
}

#[test]
fn by_the_shim() {
    if skip_unless_engines() {
        return;
    }
    let rootless = Rootless::serving();
    std::fs::remove_file(dir_of(&rootless).join("hooks/sublet.json")).expect("the hook is there");
    let shim = dir_of(&rootless).join("bin/shim");
    let option = format!("--runtime={}", shim.display());
    rootless.lives("shimmed", &[&option]);
}

#[test]
fn refused_without_the_service_and_beyond_the_policy() {
    if skip_unless_engines() {
        return;
    }
    let alone = Rootless::new();
    let refused = alone.run("alone", &[], SHARE, &["sleep", "600"]);
    assert!(!refused.status.success());
    assert!(text(&refused.stderr).contains("sublet serve is not running"), "{}", text(&refused.stderr));
    let plain = alone.run("plain", &[], &[], &["sleep", "600"]);
    assert!(plain.status.success(), "{}", text(&plain.stderr));
    drop(alone);
    let rootless = Rootless::serving();
    let refused = rootless.run("large", &[], &["sublet.sm=60", "sublet.memory=1GiB"], &["sleep", "600"]);
    assert!(text(&refused.stderr).contains("caps sm at 50 %"), "{}", text(&refused.stderr));
    assert!(!refused.status.success());
    let last = rootless.sublet(&["status", "--last-error"]);
    assert!(last.contains("caps sm at 50 %"), "{last}");
    rootless.world.assert_empty();
}

#[test]
fn an_engine_that_is_killed_leaves_nothing() {
    if skip_unless_engines() {
        return;
    }
    let rootless = Rootless::serving();
    // The runtime's create fails after precreate took the lease: no poststop of any kind runs.
    let failed = rootless.run("failed", &[], SHARE, &["/no/such/program"]);
    assert!(!failed.status.success());
    let started = rootless.run("killed", &[], SHARE, &["cuda-probe", "hold", "600"]);
    assert!(started.status.success(), "{}", text(&started.stderr));
    let inspect =
        |member: &str| done(rootless.podman(&["inspect", "--format", member, "killed"])).trim().to_owned();
    let (conmon, pid) = (inspect("{{.State.ConmonPid}}"), inspect("{{.State.Pid}}"));
    done(Command::new("kill").args(["-9", &conmon, &pid]));
    assert!(eventually(|| rootless.world.leases().is_empty()), "{:?}", rootless.world.leases());
    rootless.world.assert_empty();
}

/// Without a cgroup of its own a container has no id that precreate could know.
#[test]
fn several_at_once() {
    if skip_unless_engines() {
        return;
    }
    let rootless = Rootless::serving();
    let names: Vec<String> = (0..6).map(|number| format!("many-{number}")).collect();
    let started: Vec<_> = std::thread::scope(|scope| {
        let run = |name| rootless.run(name, &[], &["sublet.sm=8", "sublet.memory=1GiB"], &["sleep", "600"]);
        let threads: Vec<_> = names.iter().map(|name| scope.spawn(move || run(name))).collect();
        threads.into_iter().map(|thread| thread.join().expect("it runs")).collect()
    });
    for output in &started {
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    let leases = rootless.world.leases();
    assert_eq!(leases.len(), 6, "{leases:?}");
    assert!(leases.iter().all(|lease| lease["state"] == "active"), "{leases:?}");
    done(rootless.podman(&["rm", "--all", "--force", "--time=0"]));
    assert!(eventually(|| rootless.world.leases().is_empty()), "{:?}", rootless.world.leases());
    rootless.world.assert_empty();
}
