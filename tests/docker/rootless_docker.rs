//! Rootless Docker as Debian starts it, by dockerd-rootless.sh: the state is where it is by default, in /run, and rootlesskit
//! gives dockerd a /run of its own, of links to what was there.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use sublet_e2e::docker::{IMAGE, skip_unless_engines};
use sublet_e2e::programs;
use sublet_e2e::{Finished, World, bin_dir, eventually};

const POLICY: &str = "[[policy]]\nuser = \"tester\"\nsm = 50\nmemory = \"16GiB\"\n";
const SHARE: &[&str] = &["--runtime=sublet", "--annotation=sublet.sm=25", "--annotation=sublet.memory=8GiB"];
const HOLD: &[&str] = &[IMAGE, "cuda-probe", "hold", "600"];

/// A dockerd of the user `tester`, and `sublet serve` as root.
struct Rootless {
    world: World,
    serve: Option<Child>,
    daemon: Option<Child>,
}

impl Rootless {
    fn up() -> Self {
        let world = World::simulated("h200", POLICY);
        let dir = world.dir.path();
        std::fs::set_permissions(dir, PermissionsExt::from_mode(0o755)).expect("chmod");
        let config = std::fs::read_to_string(&world.config).expect("config.toml");
        let own = world.state_dir().display().to_string();
        std::fs::write(&world.config, config.replace(&own, "/run/sublet")).expect("config.toml");
        for below in ["bin", "home", "home/run"] {
            std::fs::create_dir(dir.join(below)).expect("a directory");
            std::os::unix::fs::chown(dir.join(below), Some(1000), Some(1000)).expect("chown");
        }
        for program in ["sublet", "sublet-runtime", "sublet-hook"] {
            programs::copy(&bin_dir().join(program), &dir.join("bin").join(program));
        }
        let mut rootless = Self { world, serve: None, daemon: None };
        rootless.serve();
        rootless.start();
        let image = rootless.world.dir.path().join("image.tar");
        rootless.world.rootfs.archive(&image);
        rootless.done(&["import", image.to_str().expect("UTF-8"), IMAGE]);
        rootless
    }

    fn serve(&mut self) {
        self.serve = Some(self.world.command("sublet").arg("serve").spawn().expect("it runs"));
        let socket = self.world.state_dir().join("sublet.sock");
        assert!(eventually(|| std::os::unix::net::UnixStream::connect(&socket).is_ok()), "no socket");
    }

    fn run(&self) -> PathBuf {
        self.world.dir.path().join("home/run")
    }

    fn start(&mut self) {
        let dir = self.world.dir.path();
        let log = std::fs::File::create(dir.join("dockerd.log")).expect("a log");
        let mut daemon = Command::new("setpriv");
        daemon.args([
            "--reuid=1000",
            "--regid=1000",
            "--clear-groups",
            "--pdeathsig=KILL",
            "dockerd-rootless.sh",
        ]);
        // Without systemd there are no cgroups, and in the tests' root no network.
        daemon.args(["--iptables=false", "--ip6tables=false", "--bridge=none", "--ip-forward=false"]);
        daemon
            .args(["--storage-driver=vfs", "--host"])
            .arg(format!("unix://{}", self.run().join("docker.sock").display()));
        daemon.arg("--add-runtime").arg(format!("sublet={}", dir.join("bin/sublet-runtime").display()));
        daemon.env_clear().env("SUBLET_CONFIG", &self.world.config);
        daemon.env("PATH", "/usr/bin:/usr/sbin:/bin:/sbin:/usr/share/docker.io/contrib");
        daemon.env("HOME", dir.join("home")).env("USER", "tester").env("XDG_RUNTIME_DIR", self.run());
        daemon.env("DOCKERD_ROOTLESS_ROOTLESSKIT_NET", "host");
        daemon.env("DOCKERD_ROOTLESS_ROOTLESSKIT_PORT_DRIVER", "none");
        daemon.current_dir(dir.join("home")).stdin(Stdio::null());
        let daemon = daemon.stdout(log.try_clone().expect("a log")).stderr(log).spawn();
        self.daemon = Some(daemon.expect("Debian's docker.io is installed"));
        let log = || std::fs::read_to_string(dir.join("dockerd.log")).unwrap_or_default();
        // `docker version` asks rootlesskit for its network, which it has not.
        assert!(eventually(|| self.cli(&["ps"]).ok), "dockerd does not answer: {}", log());
    }

    fn cli(&self, args: &[&str]) -> Finished {
        let mut command = Command::new("docker");
        command.arg("--host").arg(format!("unix://{}", self.run().join("docker.sock").display())).args(args);
        Finished::of(&command.stdin(Stdio::null()).output().expect("docker is installed"))
    }

    fn done(&self, args: &[&str]) -> String {
        let done = self.cli(args);
        assert!(done.ok, "{args:?}: {done:?}");
        done.stdout
    }

    /// `docker run --detach --network none`.
    fn container(&self, name: &str, options: &[&str], args: &[&str]) -> Finished {
        self.cli(&[&["run", "--detach", "--network=none", "--name", name], options, args].concat())
    }

    /// What `cuda-probe` in the container sees, from a command that prints it.
    fn info(&self, command: &[&str]) -> Value {
        let mut found = None;
        let heard = eventually(|| {
            let printed = self.cli(command).stdout;
            let mut lines = printed.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            found = lines.rfind(|line| line["event"] == "info");
            found.is_some()
        });
        assert!(heard, "{command:?}: {:?}", self.cli(command));
        found.unwrap_or_default()
    }

    fn assert_shared(&self, name: &str) {
        for command in [["logs", name].as_slice(), &["exec", name, "cuda-probe", "info"]] {
            let info = self.info(command);
            assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)), "{command:?}: {info}");
        }
        let leases = self.world.leases();
        assert_eq!((leases.len(), &leases[0]["state"]), (1, &json!("active")), "{leases:?}");
        assert_eq!(leases[0]["user"], "tester");
        assert_eq!(leases[0]["owner"], json!({"name": "tester", "known_by": "user"}));
    }
}

impl Drop for Rootless {
    fn drop(&mut self) {
        let _ = self.cli(&["rm", "-f", "held"]);
        // rootlesskit ends its child, which ends containerd.
        for child in [self.daemon.take(), self.serve.take()].into_iter().flatten() {
            let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).expect("a pid"));
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
            let mut child = child;
            let _ = child.wait();
        }
    }
}

#[test]
fn a_container_has_its_share_through_the_service() {
    if skip_unless_engines() {
        return;
    }
    let mut rootless = Rootless::up();
    let started = rootless.container("held", SHARE, HOLD);
    assert!(started.ok, "{started:?}");
    rootless.assert_shared("held");
    assert!(!rootless.run().join("sublet").exists() && Path::new("/run/sublet/ledger.json").exists());
    rootless.done(&["restart", "-t0", "held"]);
    rootless.assert_shared("held");
    let large = ["--runtime=sublet", "--annotation=sublet.sm=30", "--annotation=sublet.memory=1GiB"];
    let refused = rootless.container("large", &large, HOLD);
    assert!(!refused.ok && refused.stderr.contains("limits sm to 50 %"), "{refused:?}");
    rootless.done(&["rm", "large"]);
    // Docker has no option by which a container keeps its user's groups.
    let node = rootless.world.driver_root.as_ref().expect("a simulated driver").join("dev/nvidia0");
    std::fs::set_permissions(&node, PermissionsExt::from_mode(0o660)).expect("chmod");
    let refused = rootless.container("closed", SHARE, HOLD);
    let why = "has mode 0660, so the container, in its user namespace, may not open it: have root give the nodes mode 0666";
    assert!(!refused.ok && refused.stderr.contains(why), "{refused:?}");
    std::fs::set_permissions(&node, PermissionsExt::from_mode(0o666)).expect("chmod");
    rootless.done(&["rm", "closed"]);
    // Its first process ends, and Docker deletes it.
    rootless.done(&["kill", "held"]);
    assert!(eventually(|| rootless.world.leases().is_empty()), "{:?}", rootless.world.leases());
    rootless.done(&["start", "held"]);
    rootless.assert_shared("held");
    rootless.done(&["rm", "-f", "held"]);
    assert!(eventually(|| rootless.world.leases().is_empty()), "{:?}", rootless.world.leases());
    rootless.world.assert_empty();
    let mut serve = rootless.serve.take().expect("it runs");
    serve.kill().expect("SIGKILL");
    serve.wait().expect("it has ended");
    let refused = rootless.container("held", SHARE, HOLD);
    assert!(!refused.ok && refused.stderr.contains("sublet serve is not running"), "{refused:?}");
    rootless.done(&["rm", "held"]);
    let plain = rootless.container("held", &["--runtime=sublet"], &[IMAGE, "sleep", "600"]);
    assert!(plain.ok, "{plain:?}");
}
