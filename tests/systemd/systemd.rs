//! sublet as a package installs it, below a systemd that is process 1: the socket, the watchdog, restarts and
//! upgrades under running containers, and MPS daemons as units of their own. Runs in the root that
//! tests/engines/enter gives, below tests/engines/systemd; `target/installed` is what `make install` made.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use sublet_e2e::installed::{done, install, show, skip_unless_installed, systemctl, write};
use sublet_e2e::{World, eventually};

/// The user `tester` of tests/engines/root.
const UID: u32 = 1000;
const SHARE: &[&str] = &["--annotation=sublet.sm=25", "--annotation=sublet.memory=8GiB"];
const POLICY: &str = "[[policy]]\nuser = \"tester\"\nsm = 50\nmemory = \"16GiB\"\n";
/// What a machine needs that is itself a container.
const CONTAINERS: &str = "[containers]\ndefault_ulimits = [\"nofile=1024:1024\", \"nproc=4096:4096\"]\n\
    pids_limit = 0\nnetns = \"none\"\nlog_driver = \"k8s-file\"\n[engine]\ncgroup_manager = \"cgroupfs\"\n\
    events_logger = \"file\"\nlock_type = \"file\"\n";
const DOCKER: &str = r#"{"iptables": false, "ip6tables": false, "bridge": "none", "storage-driver": "vfs",
    "live-restore": true, "runtimes": {"sublet": {"path": "/usr/bin/sublet-runtime"}}}"#;

/// There is one machine: one test at a time.
static MACHINE: Mutex<()> = Mutex::new(());

struct Machine {
    world: World,
    _alone: MutexGuard<'static, ()>,
}

impl Machine {
    /// Installs sublet, with the simulated driver, and starts its socket.
    fn up() -> Self {
        let alone = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
        let world = World::simulated("h200", "");
        let dir = world.dir.path().to_owned();
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).expect("chmod");
        install(&world);
        write("/etc/sublet/conf.d/policy.toml", POLICY);
        write("/etc/containers/containers.conf", CONTAINERS);
        write("/etc/docker/daemon.json", DOCKER);
        // A minute is long for a test.
        write("/etc/systemd/system/sublet.service.d/test.conf", "[Service]\nWatchdogSec=2\n");
        world.rootfs.archive(&dir.join("image.tar"));
        done(Command::new("install").args(["-d", "-o", "tester"]).arg(dir.join("home")).arg(dir.join("xdg")));
        systemctl(&["daemon-reload"]);
        systemctl(&["start", "sublet.socket"]);
        Self { world, _alone: alone }
    }

    fn podman(&self, uid: u32) -> Command {
        let dir = self.world.dir.path();
        let mut command = Command::new("podman");
        let (home, xdg) = (dir.join("home"), dir.join("xdg"));
        command.env_clear().env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin").current_dir("/");
        command.uid(uid).gid(uid).env("HOME", &home).env("XDG_RUNTIME_DIR", &xdg);
        let of_uid = |name: &str| if uid == 0 { dir.join(format!("root-{name}")) } else { home.join(name) };
        command.arg("--storage-driver=vfs").arg("--root").arg(of_uid("storage"));
        command.arg("--runroot").arg(of_uid("run")).arg("--tmpdir").arg(of_uid("tmp"));
        command
    }

    /// A container of `uid`'s that holds a context.
    fn hold(&self, uid: u32, name: &str) {
        let tar = self.world.dir.path().join("image.tar");
        done(self.podman(uid).args(["import", "--quiet"]).arg(tar).arg("probe"));
        let mut run = self.podman(uid);
        done(run.args(["run", "-d", "--name", name]).args(SHARE).args([
            "probe",
            "cuda-probe",
            "hold",
            "600",
        ]));
        self.assert_held(uid, name);
    }

    /// It runs, with its share, and so do processes that come now.
    fn assert_held(&self, uid: u32, name: &str) {
        let leases = self.world.leases();
        assert_eq!((leases.len(), &leases[0]["state"]), (1, &json!("active")), "{leases:?}");
        let info = done(self.podman(uid).args(["exec", name, "cuda-probe", "info"]));
        let info: Value = serde_json::from_str(info.lines().next().expect("a line")).expect("JSON");
        assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)), "{info}");
    }

    /// Ends the container; its daemon, which served no other lease, ends after it.
    fn remove(&self, uid: u32, name: &str) {
        let unit = self.daemon().unit;
        done(self.podman(uid).args(["rm", "-f", "-t0", name]));
        assert!(eventually(|| self.world.leases().is_empty()), "{:?}", self.world.leases());
        self.world.assert_empty();
        assert_eq!(show(&unit, "LoadState"), "not-found", "the daemon's unit is left");
    }

    fn daemon(&self) -> Daemon {
        let mps = self.world.status()["mps"][0].clone();
        let device = mps["devices"][0].as_str().expect("a device").to_owned();
        Daemon { pid: mps["pid"].to_string(), unit: format!("sublet-mps-{device}.service") }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        for uid in [UID, 0] {
            let _ = self.podman(uid).args(["rm", "--all", "--force", "--time=0"]).output();
        }
        let _ = Command::new("systemctl").args(["stop", "sublet.socket", "sublet.service"]).output();
        let _ = std::fs::remove_dir_all("/run/sublet");
    }
}

/// The one MPS daemon.
#[derive(Debug, PartialEq)]
struct Daemon {
    pid: String,
    unit: String,
}

impl Daemon {
    /// The daemon was started by systemd and has its own cgroup.
    fn assert_is_a_unit(&self) {
        assert_eq!(show(&self.unit, "ActiveState"), "active");
        assert_eq!(show(&self.unit, "MainPID"), self.pid);
        let cgroup = std::fs::read_to_string(format!("/proc/{}/cgroup", self.pid)).expect("it runs");
        assert!(cgroup.contains(&format!("/system.slice/{}", self.unit)), "{cgroup}");
    }
}

fn is_ready() -> bool {
    show("sublet.service", "ActiveState") == "active"
}

#[test]
fn a_rootless_container_starts_the_service_and_the_watchdog_restarts_it() {
    if skip_unless_installed() {
        return;
    }
    let machine = Machine::up();
    assert_eq!(show("sublet.service", "ActiveState"), "inactive");
    machine.hold(UID, "first");
    // With Type=notify it is not "active" before it has said READY.
    assert_eq!(show("sublet.service", "Type"), "notify");
    assert!(eventually(is_ready), "{}", show("sublet.service", "ActiveState"));
    let daemon = machine.daemon();
    daemon.assert_is_a_unit();
    let pid = show("sublet.service", "MainPID");
    done(Command::new("busybox").args(["kill", "-STOP", &pid]));
    assert!(eventually(|| show("sublet.service", "NRestarts") == "1"), "the watchdog did not fire");
    assert!(eventually(is_ready));
    assert_ne!(show("sublet.service", "MainPID"), pid);
    machine.assert_held(UID, "first");
    assert_eq!(machine.daemon(), daemon);
    machine.remove(UID, "first");
}

#[test]
fn the_service_is_restarted_and_upgraded_under_running_containers() {
    if skip_unless_installed() {
        return;
    }
    let machine = Machine::up();
    machine.hold(UID, "kept");
    let daemon = machine.daemon();
    systemctl(&["restart", "sublet.service"]);
    assert!(is_ready());
    machine.assert_held(UID, "kept");
    // As dpkg does it: the new file in the old one's place.
    done(Command::new("cp").args(["-a", "/usr/bin/sublet", "/usr/bin/sublet.dpkg-new"]));
    std::fs::rename("/usr/bin/sublet.dpkg-new", "/usr/bin/sublet").expect("renamed");
    let exe = |pid: &str| std::fs::read_link(format!("/proc/{pid}/exe")).expect("it runs");
    assert!(exe(&show("sublet.service", "MainPID")).to_string_lossy().ends_with("(deleted)"));
    systemctl(&["restart", "sublet.service"]);
    assert_eq!(exe(&show("sublet.service", "MainPID")), Path::new("/usr/bin/sublet"));
    machine.assert_held(UID, "kept");
    // No service runs, and what runs continues. The socket remains the entry point, and the next ask starts the
    // service.
    systemctl(&["stop", "sublet.service"]);
    assert_eq!(machine.daemon(), daemon);
    daemon.assert_is_a_unit();
    machine.remove(UID, "kept");
    assert_eq!(show("sublet.service", "Result"), "success");
}

#[test]
fn daemons_outlive_the_session_that_started_them() {
    if skip_unless_installed() {
        return;
    }
    let machine = Machine::up();
    let tar = machine.world.dir.path().join("image.tar");
    done(machine.podman(0).args(["import", "--quiet"]).arg(tar).arg("probe"));
    let mut session = Command::new("systemd-run");
    session.args(["--unit=a-session", "--service-type=oneshot", "--remain-after-exit", "--wait", "--quiet"]);
    let mut podman = machine.podman(0);
    podman.args(["run", "-d", "--name=rooted"]).args(SHARE).args(["probe", "cuda-probe", "hold", "600"]);
    session
        .args(["--property=Environment=HOME=/root", "--property=TimeoutStopSec=1", "--", "podman"])
        .args(podman.get_args());
    let mut started = session.spawn().expect("systemd-run");
    let leases = || machine.world.leases();
    // The lease is active before Podman has started the container.
    assert!(eventually(|| show("a-session.service", "SubState") == "exited"), "{:?}", leases());
    assert!(leases().len() == 1 && leases()[0]["state"] == "active", "{:?}", leases());
    let daemon = machine.daemon();
    daemon.assert_is_a_unit();
    systemctl(&["stop", "a-session.service"]);
    started.wait().expect("it ends");
    assert_eq!(machine.daemon(), daemon);
    daemon.assert_is_a_unit();
    // Podman's monitor has gone with the session, its container has not.
    done(Command::new("busybox").args(["kill", "-KILL", &leases()[0]["pid"].to_string()]));
    assert!(eventually(|| leases().is_empty()), "{:?}", leases());
    machine.world.assert_empty();
    assert_eq!(show(&daemon.unit, "LoadState"), "not-found");
}

#[test]
fn a_restart_of_docker_ends_neither_container_nor_daemon() {
    if skip_unless_installed() {
        return;
    }
    let machine = Machine::up();
    systemctl(&["restart", "docker.service"]);
    let docker = |args: &[&str]| done(Command::new("docker").args(args));
    docker(&["import", machine.world.dir.path().join("image.tar").to_str().expect("UTF-8"), "probe"]);
    let run = ["run", "-d", "--network=none", "--runtime=sublet", "--name=kept"];
    docker(&[&run, SHARE, &["probe", "cuda-probe", "hold", "600"]].concat());
    let (daemon, leases) = (machine.daemon(), machine.world.leases());
    daemon.assert_is_a_unit();
    systemctl(&["restart", "docker.service"]);
    assert_eq!(machine.daemon(), daemon);
    assert_eq!(machine.world.leases(), leases);
    assert!(docker(&["exec", "kept", "cuda-probe", "info"]).contains("\"sm\":32"));
    docker(&["rm", "-f", "kept"]);
    assert!(eventually(|| machine.world.leases().is_empty()));
    machine.world.assert_empty();
    systemctl(&["stop", "docker.service", "docker.socket"]);
}

#[test]
fn events_are_in_the_journal_and_what_other_users_write_there_is_none() {
    if skip_unless_installed() {
        return;
    }
    let machine = Machine::up();
    let events = || -> Vec<Value> {
        let text =
            done(machine.world.command("sublet").args(["events", "--format", "json", "--since", "10m"]));
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    machine.hold(0, "journaled");
    let lease = machine.world.leases()[0]["id"].clone();
    let of_lease = || -> Vec<Value> {
        events()
            .into_iter()
            .filter(|event| event["lease"] == lease)
            .map(|event| event["kind"].clone())
            .collect()
    };
    assert!(eventually(|| of_lease() == [json!("lease-taken"), json!("lease-bound")]), "{:?}", events());
    let entries =
        done(Command::new("journalctl").args(["-q", "-o", "cat", "SYSLOG_IDENTIFIER=sublet-events"]));
    assert!(entries.contains("lease-taken"), "{entries}");
    assert!(!Path::new("/run/sublet/events.jsonl").exists(), "what the journal has is not kept twice");
    let forged =
        json!({"time": "2026-11-23T07:00:00.000Z", "uptime_ms": 1, "kind": "refused", "text": "forged"});
    let entry = format!("MESSAGE=x\nSYSLOG_IDENTIFIER=sublet-events\nSUBLET_EVENT={forged}\n");
    let file = machine.world.dir.path().join("entry");
    std::fs::write(&file, entry).expect("written");
    let stdin = std::fs::File::open(&file).expect("opened");
    done(Command::new("logger").arg("--journald").stdin(stdin).uid(UID).gid(UID).current_dir("/"));
    let all =
        || done(Command::new("journalctl").args(["-q", "-o", "json", "SYSLOG_IDENTIFIER=sublet-events"]));
    assert!(eventually(|| all().contains("forged")), "it is in the journal");
    assert!(!events().iter().any(|event| event["text"] == "forged"), "{:?}", events());
    systemctl(&["start", "sublet.service"]);
    systemctl(&["restart", "sublet.service"]);
    machine.remove(0, "journaled");
    assert!(eventually(|| of_lease().last() == Some(&json!("lease-ended"))), "{:?}", events());
    // The report reads them there, and keeps what it made of them where a reboot leaves it.
    let mut report = machine.world.command("sublet");
    let report = done(report.args(["report", "--by", "container", "--format", "json"]));
    let report: Value = serde_json::from_str(&report).expect("JSON");
    let rows = report["rows"].as_array().expect("rows");
    assert!(rows.iter().any(|row| row["name"] == "journaled" && row["leases"] == 1), "{report}");
    let recorded = std::fs::metadata("/var/lib/sublet/usage/now.json").expect("the record");
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&recorded.permissions()) & 0o777, 0o600);
}

#[test]
fn prometheus_is_answered_by_a_process_without_rights() {
    if skip_unless_installed() {
        return;
    }
    let machine = Machine::up();
    let unit = "sublet-metrics-http.service";
    // The simulated driver is below /tmp, of which a service with DynamicUser= has its own.
    let root = machine.world.dir.path().display();
    let drop_in = format!("[Service]\nBindReadOnlyPaths={root}\n");
    write("/etc/systemd/system/sublet-metrics-http.service.d/test.conf", &drop_in);
    systemctl(&["daemon-reload"]);
    systemctl(&["start", "sublet-metrics-http.socket"]);
    assert_eq!(show(unit, "ActiveState"), "inactive", "the first scraper starts it");
    machine.hold(0, "scraped");
    let scrape = || {
        let mut stream = TcpStream::connect("127.0.0.1:9843").expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a limit");
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost:9843\r\n\r\n").expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("it answers in time");
        answer
    };
    let text = scrape();
    assert!(text.contains("\nsublet_up 1\n"), "{text}");
    assert!(
        text.contains("sublet_container_processes{") && text.contains("sublet_gpu_memory_used_bytes{"),
        "{text}"
    );
    assert!(!text.contains("\"scraped\""), "names of other users' containers are root's alone: {text}");
    let status = std::fs::read_to_string(format!("/proc/{}/status", show(unit, "MainPID"))).expect("it runs");
    let value = |name: &str| {
        status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim().to_owned()
    };
    assert_eq!((value("CapEff:"), value("CapBnd:")), ("0".repeat(16), "0".repeat(16)), "{status}");
    assert!(
        value("Uid:").split_whitespace().all(|uid| uid != "0") && value("NoNewPrivs:") == "1",
        "{status}"
    );
    machine.remove(0, "scraped");
    assert!(eventually(|| !scrape().contains("sublet_container_processes{")), "{}", scrape());
    systemctl(&["stop", "sublet-metrics-http.socket", unit]);
}
