//! MPS daemons from first start to last stop, against the simulated driver: real processes, a real ledger.
//! Skipped, with a line that says so, where the simulator is not built or we are not root.
#![cfg(feature = "cli")]

use std::fs;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sublet::config::Config;
use sublet::inventory::ComputeMode;
use sublet::ledger::{Container, Lease, LeaseId, LeaseState, Ledger, Server, ServerState, Store};
use sublet::mps::{self, ServerKey};
use sublet::process::Process;
use sublet::request::{Isolation, Mode, Percent, Priority};

/// The GPU of topologies/h200.toml.
const GPU: &str = "GPU-5b1e7000-0000-4000-8000-000000000100";

struct Host {
    root: PathBuf,
    config: Config,
    store: Store,
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = Command::new(built("sublet-sim")).args(["down", "--root"]).arg(&self.root).status();
        let _ = fs::remove_dir_all(&self.root);
    }
}

fn built(program: &str) -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_sublet")).with_file_name(program)
}

impl Host {
    /// A simulated H200, or `None` where there can be none.
    fn up(name: &str) -> Option<Self> {
        let can = nix::unistd::geteuid().is_root()
            && built("sublet-sim").exists()
            && built("nvidia-cuda-mps-control").exists();
        if !can {
            eprintln!("SKIPPED: needs root and the simulator (cargo build --workspace)");
            return None;
        }
        // Daemons move to the root of their cgroup namespace, and this is to be one of the test's own.
        unshare(CloneFlags::CLONE_NEWCGROUP).unwrap();
        let root = PathBuf::from(format!("/tmp/sublet-mps-{}-{name}", std::process::id()));
        let topology = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sim/topologies/h200.toml");
        let up = Command::new(built("sublet-sim"))
            .args(["up", "--topology"])
            .arg(topology)
            .arg("--root")
            .arg(&root)
            .stdout(Stdio::null())
            .status();
        assert!(up.unwrap().success());
        // Our own `sublet` is looked for beside the running program, which is this test.
        let beside = std::env::current_exe().unwrap().with_file_name("sublet");
        let _ = symlink(env!("CARGO_BIN_EXE_sublet"), beside);
        let mut config = Config { state_dir: root.join("run"), ..Config::default() };
        config.driver.root.clone_from(&root);
        let library = format!("usr/lib/{}-linux-gnu/libnvidia-ml.so.1", std::env::consts::ARCH);
        config.driver.nvml = Some(root.join(library));
        let store = Store::open(&config.state_dir).unwrap();
        let host = Self { root, config, store };
        assert!(host.sublet(&["refresh"]).0);
        Some(host)
    }

    fn sublet(&self, arguments: &[&str]) -> (bool, String) {
        let output = Command::new(env!("CARGO_BIN_EXE_sublet"))
            .args(arguments)
            .env_clear()
            .env("SUBLET_CONFIG", self.root.join("config.toml"))
            .output()
            .unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    }

    fn take(&self, id: &str, key: &str, sm: Option<u32>, memory: Option<u64>) -> Lease {
        let lease = Lease {
            id: LeaseId::parse(id).unwrap(),
            container: Container {
                uid: 0,
                id: format!("container-{id}"),
                bundle: "/nowhere".into(),
                rootfs: "/nowhere/rootfs".into(),
                record: "/nowhere/record".into(),
            },
            devices: vec![GPU.into()],
            mode: Mode::Mps,
            isolation: Isolation::Shared,
            server: Some(ServerKey(key.into())),
            sm: sm.map(|percent| Percent::from_thousandths(percent * 1000)),
            memory_bytes: memory,
            processes: 1,
            priority: Priority::Normal,
            guard: None,
            state: LeaseState::Pending,
            owner: Process::current().unwrap(),
            init: None,
            bind_by: None,
            since: 0,
            mount_points: Vec::new(),
            library_dir: None,
            brokered: false,
            parts: Vec::new(),
        };
        self.edit(|ledger| ledger.leases.push(lease.clone()));
        lease
    }

    fn give_back(&self, lease: &Lease) {
        self.edit(|ledger| ledger.leases.retain(|held| held.id != lease.id));
    }

    fn edit(&self, change: impl FnOnce(&mut Ledger)) {
        let edited = self.store.update(|ledger| {
            change(ledger);
            Ok::<(), std::convert::Infallible>(())
        });
        edited.unwrap().0.unwrap();
    }

    fn ready(&self, lease: &Lease) -> Result<Vec<String>, String> {
        // The child gets our SUBLET_CONFIG: each test has a process-wide one of its own.
        mps::ready(lease, &self.store, &self.config).map_err(|error| error.to_string())
    }

    fn server(&self, key: &str) -> Option<Server> {
        self.store.read().unwrap().servers.into_iter().find(|server| server.key.0 == key)
    }

    /// What the daemon itself says.
    fn ask(&self, key: &str, command: &str) -> String {
        let script =
            format!("echo {command} | {}", self.root.join("usr/bin/nvidia-cuda-mps-control").display());
        let output = Command::new("/bin/sh")
            .args(["-c", &script])
            .env("CUDA_MPS_PIPE_DIRECTORY", self.root.join("run/mps").join(key).join("pipe"))
            .output();
        String::from_utf8(output.unwrap().stdout).unwrap().trim().to_owned()
    }

    fn names(&self, directory: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.root.join("run").join(directory)) else { return Vec::new() };
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn compute_mode(&self) -> ComputeMode {
        sublet::inventory::probe(&self.config).unwrap().devices[0].compute_mode
    }
}

/// One test function: the environment, which names the configuration, is the process's.
#[test]
#[allow(unsafe_code, reason = "one test, one thread")]
fn daemons_follow_their_leases() {
    let Some(host) = Host::up("life") else { return };
    // SAFETY: this test is the only one here and has started no other thread.
    unsafe { std::env::set_var("SUBLET_CONFIG", host.root.join("config.toml")) };
    a_cold_daemon_is_started_and_a_warm_one_asked_nothing(&host);
    the_ceiling_follows_the_leases(&host);
    a_stopped_daemon_is_found_out(&host);
    a_dead_daemon_comes_back_under_the_same_directory(&host);
    a_start_that_was_killed_is_taken_up(&host);
    a_dedicated_daemon_has_its_leases_limits_and_leaves_nothing(&host);
    many_at_once_start_one_daemon(&host);
    starts_and_stops_killed_at_any_moment_are_put_right(&host);
    a_daemon_that_never_answers_leaves_nothing_changed(&host);
    a_driver_without_mps_is_named(&host);
}

fn a_cold_daemon_is_started_and_a_warm_one_asked_nothing(host: &Host) {
    assert_eq!(host.compute_mode(), ComputeMode::Default);
    // dup(2) makes a descriptor that every child inherits, as engines leave them open.
    let leaked = nix::unistd::dup(fs::File::open(host.root.join("config.toml")).unwrap()).unwrap();
    let lease = host.take("00000000000000a1", GPU, Some(25), None);
    assert_eq!(host.ready(&lease).unwrap(), Vec::<String>::new());
    let server = host.server(GPU).unwrap();
    assert_eq!(server.state, ServerState::Serving);
    assert_eq!(host.ask(GPU, "get_default_active_thread_percentage"), "25.0");
    assert_eq!(host.ask(GPU, "get_server_list").lines().count(), 1, "prewarmed");
    assert_eq!(host.names(&format!("mps/{GPU}/public")), ["control"]);
    assert_eq!(host.compute_mode(), ComputeMode::ExclusiveProcess);
    assert_eq!(host.store.read().unwrap().compute_modes[0].found, ComputeMode::Default);
    let daemon = server.daemon.unwrap().pid;
    left_the_starter(daemon, &host.root.join("config.toml"));
    drop(leaked);
    // Nothing can be started now, and nothing has to be.
    let program = host.root.join("usr/bin/nvidia-cuda-mps-control");
    let aside = program.with_extension("aside");
    fs::rename(&program, &aside).unwrap();
    assert!(host.ready(&lease).unwrap().is_empty());
    fs::rename(&aside, &program).unwrap();
}

fn left_the_starter(daemon: i32, leaked: &Path) {
    let session = |pid: i32| nix::unistd::getsid(Some(Pid::from_raw(pid))).unwrap();
    assert_ne!(session(daemon), session(0));
    assert_eq!(fs::read_link(format!("/proc/{daemon}/cwd")).unwrap(), Path::new("/"));
    for fd in 0..3 {
        let target = fs::read_link(format!("/proc/{daemon}/fd/{fd}")).unwrap();
        assert_eq!(target, Path::new("/dev/null"), "descriptor {fd}");
    }
    for fd in fs::read_dir(format!("/proc/{daemon}/fd")).unwrap() {
        assert_ne!(fs::read_link(fd.unwrap().path()).unwrap_or_default(), leaked);
    }
}

fn the_ceiling_follows_the_leases(host: &Host) {
    let ceiling = || host.ask(GPU, "get_default_active_thread_percentage");
    let of_server = || {
        let pid = host.ask(GPU, "get_server_list");
        host.ask(GPU, &format!("get_active_thread_percentage {pid}"))
    };
    let first = host.store.read().unwrap().leases[0].clone();
    let large = host.take("00000000000000a2", GPU, Some(60), None);
    assert_eq!(ceiling(), "25.0");
    host.ready(&large).unwrap();
    assert_eq!((ceiling(), of_server()), ("60.0".into(), "60.0".into()));
    let third = host.take("00000000000000a3", GPU, Some(25), None);
    host.ready(&third).unwrap();
    let key = ServerKey(GPU.into());
    host.give_back(&first);
    mps::settle(&key, &host.store, &host.config).unwrap();
    assert_eq!((ceiling(), of_server()), ("60.0".into(), "60.0".into()));
    host.give_back(&large);
    mps::settle(&key, &host.store, &host.config).unwrap();
    assert_eq!((ceiling(), of_server()), ("25.0".into(), "25.0".into()));
    let (stopped, message) = host.sublet(&["mps", "stop", GPU]);
    assert!(!stopped && message.contains("serves 1 lease"), "{message}");
    host.give_back(&third);
    let daemon = host.server(GPU).unwrap().daemon.unwrap();
    mps::settle(&key, &host.store, &host.config).unwrap();
    assert!(host.server(GPU).is_none() && !daemon.is_alive());
    assert_eq!(host.compute_mode(), ComputeMode::Default);
    assert!(host.store.read().unwrap().compute_modes.is_empty());
    assert!(host.names(&format!("mps/{GPU}/pipe")).is_empty());
    assert!(host.names(&format!("mps/{GPU}/public")).is_empty());
}

fn a_stopped_daemon_is_found_out(host: &Host) {
    let lease = host.take("00000000000000b1", GPU, Some(50), None);
    host.ready(&lease).unwrap();
    let daemon = host.server(GPU).unwrap().daemon.unwrap();
    kill(Pid::from_raw(daemon.pid), Signal::SIGSTOP).unwrap();
    // As if the last answer were half a minute and a second old.
    host.edit(|ledger| ledger.servers[0].answered_at -= 31);
    let message = host.ready(&lease).unwrap_err();
    assert!(
        message.contains("does not answer (stopped?)") && message.contains("sublet mps stop"),
        "{message}"
    );
    assert_eq!(host.server(GPU).unwrap().state, ServerState::Fault);
    assert_eq!(children_named("nvidia-cuda-mps"), 0, "every child is reaped");
    kill(Pid::from_raw(daemon.pid), Signal::SIGCONT).unwrap();
    assert!(host.ready(&lease).is_ok());
    assert_eq!(host.server(GPU).unwrap().state, ServerState::Serving);
}

/// Children of this process with that name, zombies too.
fn children_named(name: &str) -> usize {
    let us = format!(") S {0} |) Z {0} |) R {0} ", std::process::id());
    let stats = fs::read_dir("/proc").unwrap().flatten();
    let stats = stats.filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok());
    let ours = |stat: &String| stat.contains(name) && us.split('|').any(|parent| stat.contains(parent));
    stats.filter(ours).count()
}

fn a_dead_daemon_comes_back_under_the_same_directory(host: &Host) {
    let public = host.root.join("run/mps").join(GPU).join("public");
    let inode = |path: &Path| fs::symlink_metadata(path).unwrap().ino();
    let (directory, socket) = (inode(&public), inode(&public.join("control")));
    let daemon = host.server(GPU).unwrap().daemon.unwrap();
    kill(Pid::from_raw(daemon.pid), Signal::SIGKILL).unwrap();
    while daemon.is_alive() {
        std::thread::sleep(Duration::from_millis(2));
    }
    let lines = mps::heal(&host.store, &host.config);
    assert!(lines[0].contains("started again"), "{lines:?}");
    assert_eq!(inode(&public), directory);
    assert_ne!(inode(&public.join("control")), socket);
    let server = host.server(GPU).unwrap();
    assert_eq!((server.state, server.ceiling), (ServerState::Serving, Percent::from_thousandths(50_000)));
    assert_eq!(host.store.read().unwrap().compute_modes[0].found, ComputeMode::Default);
    assert!(mps::heal(&host.store, &host.config).is_empty());
}

/// The record says `starting`, a daemon runs that no record names.
fn a_start_that_was_killed_is_taken_up(host: &Host) {
    let stray = host.server(GPU).unwrap().daemon.unwrap();
    host.edit(|ledger| {
        ledger.servers[0].state = ServerState::Starting;
        ledger.servers[0].daemon = None;
    });
    let lease = host.store.read().unwrap().leases[0].clone();
    host.ready(&lease).unwrap();
    assert!(!stray.is_alive());
    assert_eq!(host.ask(GPU, "get_default_active_thread_percentage"), "50.0");
    host.give_back(&lease);
    // Nobody settles: the next command does.
    assert!(mps::heal(&host.store, &host.config).is_empty());
    assert!(host.server(GPU).is_none());
    assert_eq!(host.compute_mode(), ComputeMode::Default);
}

fn a_dedicated_daemon_has_its_leases_limits_and_leaves_nothing(host: &Host) {
    let id = "00000000000000c1";
    let lease = host.take(id, id, None, Some(3 << 30));
    host.ready(&lease).unwrap();
    assert_eq!(host.ask(id, "get_default_active_thread_percentage"), "100.0");
    assert!(host.ask(id, "get_default_device_pinned_mem_limit 0").starts_with('3'));
    assert_eq!(host.compute_mode(), ComputeMode::Default, "never changed for dedicated servers");
    host.give_back(&lease);
    mps::settle(&ServerKey(id.into()), &host.store, &host.config).unwrap();
    assert_eq!(host.names("mps"), [GPU]);
    assert!(host.store.read().unwrap().servers.is_empty());
}

fn many_at_once_start_one_daemon(host: &Host) {
    let leases: Vec<Lease> =
        (0..6_u32).map(|n| host.take(&format!("00000000000000e{n}"), GPU, Some(5 + n), None)).collect();
    std::thread::scope(|scope| {
        for lease in &leases {
            scope.spawn(|| assert_eq!(host.ready(lease), Ok(Vec::new())));
        }
    });
    assert_eq!(host.ask(GPU, "get_default_active_thread_percentage"), "10.0");
    let pattern = format!("{}/usr/bin/nvidia-cuda-mps-server", host.root.display());
    assert_eq!(running(&pattern), 1);
    host.edit(|ledger| ledger.leases.clear());
    mps::settle(&ServerKey(GPU.into()), &host.store, &host.config).unwrap();
    assert_eq!(running(&pattern), 0);
}

fn starts_and_stops_killed_at_any_moment_are_put_right(host: &Host) {
    let (server, lease) = (host.root.join("usr/bin/nvidia-cuda-mps-server"), "00000000000000f2");
    let killed_after = |verb: &str, delay: u64| {
        let mut child = Command::new(env!("CARGO_BIN_EXE_sublet"));
        child.args(["mps", verb, GPU]).env("SUBLET_CONFIG", host.root.join("config.toml"));
        let mut child = child.stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(delay));
        let _ = child.kill();
        child.wait().unwrap();
    };
    for delay in (0..80).step_by(5) {
        let lease = host.take(lease, GPU, Some(25), None);
        killed_after("start", delay);
        host.ready(&lease).unwrap_or_else(|error| panic!("start killed after {delay} ms: {error}"));
        assert_eq!(host.ask(GPU, "get_default_active_thread_percentage"), "25.0");
        assert_eq!(running(server.to_str().unwrap()), 1);
        assert_eq!(host.store.read().unwrap().compute_modes[0].found, ComputeMode::Default);
        host.give_back(&lease);
        killed_after("stop", delay / 2);
        let lines = mps::heal(&host.store, &host.config);
        assert_eq!(
            (lines.len(), running(server.to_str().unwrap())),
            (0, 0),
            "stop killed after {delay}: {lines:?}"
        );
        assert_eq!(host.compute_mode(), ComputeMode::Default);
        let ledger = host.store.read().unwrap();
        assert!(ledger.servers.is_empty() && ledger.compute_modes.is_empty());
    }
}

/// Processes whose program is `path`.
fn running(path: &str) -> usize {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let programs = processes.filter_map(|process| fs::read_link(process.path().join("exe")).ok());
    programs.filter(|program| program == Path::new(path)).count()
}

fn a_daemon_that_never_answers_leaves_nothing_changed(host: &Host) {
    let program = host.root.join("usr/bin/nvidia-cuda-mps-control");
    let aside = program.with_extension("aside");
    fs::rename(&program, &aside).unwrap();
    fs::copy("/bin/true", &program).unwrap();
    let settings = host.root.join("config.toml");
    let before = fs::read_to_string(&settings).unwrap();
    fs::write(&settings, format!("{before}\n[mps]\nstart_timeout = \"1s\"\n")).unwrap();
    fs::write(host.root.join("run/mps").join(GPU).join("log/control.log"), "first\nno such device\n")
        .unwrap();
    let lease = host.take("00000000000000f1", GPU, Some(25), None);
    let message = host.ready(&lease).unwrap_err();
    assert!(message.contains("did not come up in 1 s") && message.contains("no such device"), "{message}");
    assert_eq!(host.compute_mode(), ComputeMode::Default);
    assert!(host.store.read().unwrap().compute_modes.is_empty());
    assert_eq!(host.server(GPU).unwrap().state, ServerState::Down);
    fs::rename(&aside, &program).unwrap();
    fs::write(&settings, before).unwrap();
    host.ready(&lease).unwrap();
    host.give_back(&lease);
    mps::settle(&ServerKey(GPU.into()), &host.store, &host.config).unwrap();
    assert!(host.server(GPU).is_none());
}

fn a_driver_without_mps_is_named(host: &Host) {
    fs::remove_file(host.root.join("usr/bin/nvidia-cuda-mps-control")).unwrap();
    let lease = host.take("00000000000000d1", GPU, None, None);
    let message = host.ready(&lease).unwrap_err();
    assert!(message.contains("Debian: apt install nvidia-cuda-mps"), "{message}");
    assert!(!message.contains('\n'));
    host.give_back(&lease);
    assert!(host.server(GPU).is_none());
}
