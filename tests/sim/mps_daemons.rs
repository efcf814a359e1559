//! MPS daemons from first start to last stop, against the simulated driver: real processes, a real ledger.
//! Skipped, with a message, if the simulator is not built or the user is not root.

mod mps_host;

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use mps_host::{GPU, Host};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sublet_core::inventory::ComputeMode;
use sublet_core::ledger::{DaemonKey, DaemonState, DefaultLimits, DefaultMemoryLimit, Lease};
use sublet_core::mps;
use sublet_core::share::Percent;

/// This is one test function, because the environment variable with the configuration belongs to the process.
#[test]
#[allow(unsafe_code, reason = "one test, one thread")]
fn daemons_follow_their_leases() {
    let Some(host) = Host::up("life") else { return };
    // SAFETY: this test is the only one here and has started no other thread.
    unsafe { std::env::set_var("SUBLET_CONFIG", host.root.join("config.toml")) };
    a_cold_daemon_is_started_and_a_warm_one_asked_nothing(&host);
    the_ceiling_follows_the_leases(&host);
    the_memory_ceiling_follows_the_leases(&host);
    a_ceiling_that_is_not_known_to_be_in_force_is_set_anew(&host);
    a_stopped_daemon_is_found_out(&host);
    a_dead_daemon_comes_back_under_the_same_directory(&host);
    a_start_that_was_killed_is_taken_up(&host);
    a_dedicated_daemon_has_its_leases_limits_and_leaves_nothing(&host);
    many_at_once_start_one_daemon(&host);
    starts_and_stops_killed_at_any_moment_are_put_right(&host);
    a_daemon_that_never_answers_leaves_nothing_changed(&host);
    programs_of_container_hosts_are_found(&host);
    a_wrapper_in_place_of_the_control_program_works(&host);
    a_server_that_ends_as_it_starts_is_named(&host);
    half_of_the_programs_is_named_at_once(&host);
    a_driver_without_mps_is_named(&host);
}

fn a_cold_daemon_is_started_and_a_warm_one_asked_nothing(host: &Host) {
    assert_eq!(host.compute_mode(), ComputeMode::Default);
    // dup(2) makes a descriptor that every child inherits, like descriptors that engines leave open.
    let leaked = nix::unistd::dup(fs::File::open(host.root.join("config.toml")).unwrap()).unwrap();
    let lease = host.take("00000000000000a1", GPU, Some(25), None);
    assert_eq!(host.ready(&lease).unwrap(), Vec::<String>::new());
    let server = host.server(GPU).unwrap();
    assert_eq!(server.state, DaemonState::Serving);
    assert_eq!(host.ask(GPU, "get_default_active_thread_percentage"), "25.0");
    assert_eq!(host.ask(GPU, "get_server_list").lines().count(), 1, "prewarmed");
    assert_eq!(host.names(&format!("mps/{GPU}/public")), ["control"]);
    assert_eq!(host.compute_mode(), ComputeMode::ExclusiveProcess);
    assert_eq!(host.store.read().unwrap().compute_modes[0].found, ComputeMode::Default);
    let daemon = server.process.unwrap().pid;
    left_the_starter(daemon, &host.root.join("config.toml"));
    drop(leaked);
    // Nothing can be started now, and nothing needs to be started.
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
    let key = DaemonKey(GPU.into());
    host.give_back(&first);
    mps::settle(&key, &host.store, &host.config, mps::Lowering::Now).unwrap();
    assert_eq!((ceiling(), of_server()), ("60.0".into(), "60.0".into()));
    host.give_back(&large);
    mps::settle(&key, &host.store, &host.config, mps::Lowering::Now).unwrap();
    assert_eq!((ceiling(), of_server()), ("25.0".into(), "25.0".into()));
    let (stopped, message) = host.sublet(&["mps", "stop", GPU]);
    assert!(!stopped && message.contains("serves 1 lease"), "{message}");
    host.give_back(&third);
    let daemon = host.server(GPU).unwrap().process.unwrap();
    mps::settle(&key, &host.store, &host.config, mps::Lowering::Now).unwrap();
    assert!(host.server(GPU).is_none() && !daemon.is_alive());
    assert_eq!(host.compute_mode(), ComputeMode::Default);
    assert!(host.store.read().unwrap().compute_modes.is_empty());
    assert!(host.names(&format!("mps/{GPU}/pipe")).is_empty());
    assert!(host.names(&format!("mps/{GPU}/public")).is_empty());
}

/// The daemon's memory limits: for servers that start later, and of the running server.
fn memory_limits(host: &Host) -> [String; 2] {
    let pid = host.ask(GPU, "get_server_list");
    ["get_default_device_pinned_mem_limit 0".into(), format!("get_device_pinned_mem_limit {pid} 0")]
        .map(|command| host.ask(GPU, &command))
}

fn the_memory_ceiling_follows_the_leases(host: &Host) {
    let key = DaemonKey(GPU.into());
    let settle = || mps::settle(&key, &host.store, &host.config, mps::Lowering::Now).unwrap();
    let small = host.take("00000000000000a4", GPU, Some(25), Some(4 << 30));
    host.ready(&small).unwrap();
    assert_eq!(memory_limits(host), ["4096M", "4096M"], "set before the server starts");
    let mut large = host.take("00000000000000a5", GPU, Some(25), Some(17 << 30));
    host.edit(|ledger| ledger.lease_mut(&large.id).unwrap().processes = 2);
    large.processes = 2;
    host.ready(&large).unwrap();
    assert_eq!(memory_limits(host), ["8704M", "8704M"], "the part of one process");
    let unlimited = host.take("00000000000000a6", GPU, Some(10), None);
    host.ready(&unlimited).unwrap();
    assert_eq!(memory_limits(host), ["", ""], "before its container starts");
    assert_eq!(host.server(GPU).unwrap().default_limits.memory, DefaultMemoryLimit::Unlimited);
    host.give_back(&unlimited);
    settle();
    assert_eq!(memory_limits(host), ["8704M", "8704M"]);
    host.give_back(&large);
    settle();
    assert_eq!(memory_limits(host), ["4096M", "4096M"]);
    // A limit within the server's default limit needs no process. None can be started here.
    let program = host.root.join("usr/bin/nvidia-cuda-mps-control");
    let aside = program.with_extension("aside");
    fs::rename(&program, &aside).unwrap();
    let other = host.take("00000000000000a7", GPU, Some(25), Some(4 << 30));
    assert!(host.ready(&other).unwrap().is_empty());
    fs::rename(&aside, &program).unwrap();
    host.give_back(&other);
    settle();
}

/// After a crash between two commands to the daemon, and after a loss of the ledger.
fn a_ceiling_that_is_not_known_to_be_in_force_is_set_anew(host: &Host) {
    let key = DaemonKey(GPU.into());
    let lease = host.store.read().unwrap().leases[0].clone();
    let settle = || mps::settle(&key, &host.store, &host.config, mps::Lowering::Now).unwrap();
    let start = || assert!(host.sublet(&["mps", "start", GPU]).0);
    let ready = || assert!(host.ready(&lease).unwrap().is_empty());
    for put_right in [&settle as &dyn Fn(), &start, &ready] {
        // The limit was being lowered: it is recorded, and the daemon has received only part of it.
        host.edit(|ledger| ledger.daemons[0].answered_at = 0);
        host.ask(GPU, &format!("set_device_pinned_mem_limit {} 0 8G", host.ask(GPU, "get_server_list")));
        put_right();
        assert_eq!(memory_limits(host), ["4096M", "4096M"]);
    }
    for put_right in [&settle as &dyn Fn(), &ready] {
        // A rebuild does not know them.
        host.edit(|ledger| ledger.daemons[0].default_limits = DefaultLimits::default());
        host.ask(GPU, &format!("set_device_pinned_mem_limit {} 0 0", host.ask(GPU, "get_server_list")));
        host.ask(GPU, "set_default_device_pinned_mem_limit 0 0");
        put_right();
        assert_eq!(memory_limits(host), ["4096M", "4096M"]);
    }
    host.give_back(&lease);
    settle();
    assert!(host.server(GPU).is_none());
}

fn a_stopped_daemon_is_found_out(host: &Host) {
    let lease = host.take("00000000000000b1", GPU, Some(50), None);
    host.ready(&lease).unwrap();
    let daemon = host.server(GPU).unwrap().process.unwrap();
    kill(Pid::from_raw(daemon.pid), Signal::SIGSTOP).unwrap();
    // As if the last answer were half a minute and a second old.
    host.edit(|ledger| ledger.daemons[0].answered_at -= 31);
    let message = host.ready(&lease).unwrap_err();
    assert!(
        message.contains("does not answer; fix: if it is stopped") && message.contains("sublet mps stop"),
        "{message}"
    );
    assert_eq!(host.server(GPU).unwrap().state, DaemonState::Fault);
    assert_eq!(children_named("nvidia-cuda-mps"), 0, "every child is reaped");
    kill(Pid::from_raw(daemon.pid), Signal::SIGCONT).unwrap();
    assert!(host.ready(&lease).is_ok());
    assert_eq!(host.server(GPU).unwrap().state, DaemonState::Serving);
}

/// Children of this process with that name, including zombies.
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
    let daemon = host.server(GPU).unwrap().process.unwrap();
    kill(Pid::from_raw(daemon.pid), Signal::SIGKILL).unwrap();
    while daemon.is_alive() {
        std::thread::sleep(Duration::from_millis(2));
    }
    let lines = mps::heal(&host.store, &host.config);
    assert!(lines[0].contains("started again"), "{lines:?}");
    assert_eq!(inode(&public), directory);
    assert_ne!(inode(&public.join("control")), socket);
    let server = host.server(GPU).unwrap();
    assert_eq!(
        (server.state, server.default_limits.sm),
        (DaemonState::Serving, Percent::from_thousandths(50_000))
    );
    assert_eq!(host.store.read().unwrap().compute_modes[0].found, ComputeMode::Default);
    assert!(mps::heal(&host.store, &host.config).is_empty());
}

/// The ledger says `starting`, and a daemon runs that is not in the ledger.
fn a_start_that_was_killed_is_taken_up(host: &Host) {
    let stray = host.server(GPU).unwrap().process.unwrap();
    host.edit(|ledger| {
        ledger.daemons[0].state = DaemonState::Starting;
        ledger.daemons[0].process = None;
    });
    let lease = host.store.read().unwrap().leases[0].clone();
    host.ready(&lease).unwrap();
    assert!(!stray.is_alive());
    assert_eq!(host.ask(GPU, "get_default_active_thread_percentage"), "50.0");
    host.give_back(&lease);
    // No process finishes the change, so the next command does.
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
    mps::settle(&DaemonKey(id.into()), &host.store, &host.config, mps::Lowering::Now).unwrap();
    assert_eq!(host.names("mps"), [GPU]);
    assert!(host.store.read().unwrap().daemons.is_empty());
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
    mps::settle(&DaemonKey(GPU.into()), &host.store, &host.config, mps::Lowering::Now).unwrap();
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
        assert!(ledger.daemons.is_empty() && ledger.compute_modes.is_empty());
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
    script(&program, "echo 'no such device' >>$CUDA_MPS_LOG_DIRECTORY/control.log; echo oops >&2");
    let settings = host.root.join("config.toml");
    let before = fs::read_to_string(&settings).unwrap();
    fs::write(&settings, format!("{before}\n[mps]\nstart_timeout = \"1s\"\n")).unwrap();
    fs::write(host.root.join("run/mps").join(GPU).join("log/control.log"), "of an earlier start\n").unwrap();
    let lease = host.take("00000000000000f1", GPU, Some(25), None);
    let message = host.ready(&lease).unwrap_err();
    assert!(message.contains("did not start within 1 s"), "{message}");
    assert!(message.contains("output.log: oops; control.log: no such device"), "{message}");
    assert!(!message.contains("earlier") && !message.contains("hold"), "{message}");
    assert_eq!(host.compute_mode(), ComputeMode::Default);
    assert!(host.store.read().unwrap().compute_modes.is_empty());
    assert_eq!(host.server(GPU).unwrap().state, DaemonState::Down);
    fs::rename(&aside, &program).unwrap();
    fs::write(&settings, before).unwrap();
    host.ready(&lease).unwrap();
    host.give_back(&lease);
    mps::settle(&DaemonKey(GPU.into()), &host.store, &host.config, mps::Lowering::Now).unwrap();
    assert!(host.server(GPU).is_none());
}

/// Moves both programs to `dir` below the root, which is a directory of one of the driver's layouts.
fn move_programs(host: &Host, from: &str, dir: &str) {
    fs::create_dir_all(host.root.join(dir)).unwrap();
    for name in ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"] {
        fs::rename(host.root.join(from).join(name), host.root.join(dir).join(name)).unwrap();
    }
}

/// Another process writes the file. If this process had it open for writing, a child that another test is just starting
/// would keep it open, and the program could not be run (ETXTBSY, execve(2)).
fn script(path: &Path, text: &str) {
    use std::io::Write as _;
    let mut install = Command::new("install");
    let mut install =
        install.args(["-m", "0755", "/dev/stdin"]).arg(path).stdin(Stdio::piped()).spawn().unwrap();
    install.stdin.take().unwrap().write_all(format!("#!/bin/sh\n{text}\n").as_bytes()).unwrap();
    assert!(install.wait().unwrap().success());
}

/// Starts a daemon and its server, and ends both. Returns the server's program and the first directory of the daemon's
/// PATH.
fn served(host: &Host) -> (PathBuf, String) {
    let lease = host.take("00000000000000d3", GPU, Some(25), None);
    host.ready(&lease).unwrap();
    let server = host.ask(GPU, "get_server_list");
    let program = fs::read_link(format!("/proc/{server}/exe")).unwrap();
    let daemon = host.server(GPU).unwrap().process.unwrap();
    let environment = String::from_utf8(fs::read(format!("/proc/{}/environ", daemon.pid)).unwrap()).unwrap();
    let path = environment.split('\0').find_map(|entry| entry.strip_prefix("PATH=")).unwrap();
    let first = path.split(':').next().unwrap().to_owned();
    host.give_back(&lease);
    mps::settle(&DaemonKey(GPU.into()), &host.store, &host.config, mps::Lowering::Now).unwrap();
    assert!(host.server(GPU).is_none() && !daemon.is_alive());
    assert_eq!(running(program.to_str().unwrap()), 0);
    (program, first)
}

fn programs_of_container_hosts_are_found(host: &Host) {
    let dir = "usr/local/nvidia/bin";
    move_programs(host, "usr/bin", dir);
    let expected = host.root.join(dir);
    let (program, first) = served(host);
    assert_eq!((program, first), (expected.join("nvidia-cuda-mps-server"), expected.display().to_string()));
    // As in Debian: the server is in /usr/sbin.
    move_programs(host, dir, "usr/bin");
    let sbin = host.root.join("usr/sbin");
    fs::create_dir_all(&sbin).unwrap();
    let server = |dir: &Path| dir.join("nvidia-cuda-mps-server");
    fs::rename(server(&host.root.join("usr/bin")), server(&sbin)).unwrap();
    assert_eq!(served(host), (server(&sbin), sbin.display().to_string()));
    fs::rename(server(&sbin), server(&host.root.join("usr/bin"))).unwrap();
}

/// Under any program name, the daemon is found, queried, stopped, and recovered after a loss of the ledger.
fn a_wrapper_in_place_of_the_control_program_works(host: &Host) {
    let program = host.root.join("usr/bin/nvidia-cuda-mps-control");
    let real = host.root.join("usr/lib/the-real-one");
    fs::rename(&program, &real).unwrap();
    script(&program, &format!("exec {} \"$@\"", real.display()));
    let (_, first) = served(host);
    assert_eq!(first, host.root.join("usr/bin").display().to_string());
    let lease = host.take("00000000000000d4", GPU, Some(25), None);
    host.ready(&lease).unwrap();
    let before = host.server(GPU).unwrap();
    fs::remove_file(host.root.join("run/ledger.json")).unwrap();
    // A change of the ledger rebuilds it from running processes.
    host.edit(|_| {});
    assert_eq!(host.server(GPU).unwrap().process, before.process, "by its own pid file");
    host.edit(|ledger| ledger.leases.clear());
    mps::settle(&DaemonKey(GPU.into()), &host.store, &host.config, mps::Lowering::Now).unwrap();
    assert!(host.server(GPU).is_none() && !before.process.unwrap().is_alive());
    fs::rename(&real, &program).unwrap();
}

/// The error comes at once with the server's own message, and nothing is left of a failed start.
fn a_server_that_ends_as_it_starts_is_named(host: &Host) {
    let fault = host.root.join("sim/mps-server-fault");
    fs::write(&fault, "invalid argument").unwrap();
    let lease = host.take("00000000000000d5", GPU, Some(25), None);
    let begun = std::time::Instant::now();
    let message = host.ready(&lease).unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    let program = host.root.join("usr/bin/nvidia-cuda-mps-server").display().to_string();
    for words in [
        "cannot start an MPS server",
        &program,
        "exited with status 1",
        "server.log: Startup | Failed to start : invalid argument",
        "libcuda.so.1",
        "of the loaded driver 580.159.04",
    ] {
        assert!(message.contains(words), "{words}: {message}");
    }
    assert!(!message.contains('\n') && !message.contains("held by"), "{message}");
    assert_eq!(host.compute_mode(), ComputeMode::Default);
    assert_eq!(running(host.root.join("usr/bin/nvidia-cuda-mps-control").to_str().unwrap()), 0);
    fs::remove_file(&fault).unwrap();
    host.ready(&lease).unwrap();
    host.give_back(&lease);
    mps::settle(&DaemonKey(GPU.into()), &host.store, &host.config, mps::Lowering::Now).unwrap();
}

/// This happens before a daemon is started, and not while one runs.
fn half_of_the_programs_is_named_at_once(host: &Host) {
    let server = host.root.join("usr/bin/nvidia-cuda-mps-server");
    let lease = host.take("00000000000000d6", GPU, Some(25), None);
    host.ready(&lease).unwrap();
    let aside = server.with_extension("aside");
    fs::rename(&server, &aside).unwrap();
    host.edit(|ledger| ledger.daemons[0].answered_at = 1);
    host.ready(&lease).unwrap();
    host.give_back(&lease);
    mps::settle(&DaemonKey(GPU.into()), &host.store, &host.config, mps::Lowering::Now).unwrap();
    assert!(host.server(GPU).is_none());
    let lease = host.take("00000000000000d7", GPU, Some(25), None);
    let begun = std::time::Instant::now();
    let message = host.ready(&lease).unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    let control = host.root.join("usr/bin/nvidia-cuda-mps-control");
    for words in [control.to_str().unwrap(), "nvidia-cuda-mps-server, which it starts, is not", "apt install"]
    {
        assert!(message.contains(words), "{words}: {message}");
    }
    assert!(!message.contains('\n'));
    assert_eq!(host.server(GPU).unwrap().state, DaemonState::Down);
    host.give_back(&lease);
    mps::settle(&DaemonKey(GPU.into()), &host.store, &host.config, mps::Lowering::Now).unwrap();
    fs::rename(&aside, &server).unwrap();
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
