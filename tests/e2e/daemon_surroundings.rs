//! The first container's start also starts the MPS daemon that others will share. The daemon gets the limits,
//! priorities and signals of a service, not those of its starter, while the container keeps what its starter gave it.

use std::path::Path;
use std::process::Command;

use nix::unistd::Pid;
use sublet_e2e::{Bundle, Finished, World, skip_unless_root};

const SHARE: &[(&str, &str)] = &[("sublet.sm", "25")];
const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];

/// Every inherited setting that a shell or a program of util-linux can change. Hard limits stay, so that the test is
/// the same where they may not be raised.
fn starter() -> Command {
    let mut command = Command::new("sh");
    command.args([
        "-c",
        "umask 077; echo 77777 >/proc/$$/timerslack_ns; echo 321 >/proc/$$/oom_score_adj; exec \"$@\"",
        "sh",
    ]);
    command.args(["env", "--ignore-signal=TERM,HUP,USR1,WINCH", "--block-signal=INT,QUIT"]);
    command.args(["prlimit", "--cpu=600:", "--fsize=100000000:", "--data=30000000000:", "--as=60000000000:"]);
    command.args([
        "--stack=4000000:",
        "--core=1000000:",
        "--nofile=300:",
        "--memlock=100000:",
        "--sigpending=999:",
    ]);
    command.args(["nice", "-n", "7", "taskset", "-c", "0", "ionice", "-c", "2", "-n", "6", "setarch", "-R"]);
    command
}

/// Under systemd daemons are separate units, and only the host's configuration counts.
fn systemd_starts_daemons() -> bool {
    let runs = Path::new("/run/systemd/system").is_dir();
    if runs {
        eprintln!("skipped: systemd starts the daemons of this host");
    }
    runs
}

fn read(pid: Pid, file: &str) -> String {
    std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join(file))
        .expect("the process is there")
}

/// A line of /proc/PID/status.
fn status(pid: Pid, key: &str) -> String {
    let text = read(pid, "status");
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    line.expect("a line of status").trim().to_owned()
}

/// What a process inherited from its caller, one line each: the soft limits, and the rest.
fn surroundings(pid: Pid) -> Vec<String> {
    let limits = read(pid, "limits");
    let mut found: Vec<String> = limits
        .lines()
        .skip(1)
        .map(|line| format!("{} {}", line[..26].trim(), line[26..47].trim()))
        // root is not held by it, and how many there can be depends on the host's memory.
        .filter(|line| !line.starts_with("Max processes"))
        .collect();
    let stat = read(pid, "stat");
    let (_, fields) = stat.rsplit_once(") ").expect("proc(5)");
    let fields: Vec<&str> = fields.split(' ').collect();
    // Fields 19 and 41 of proc(5); the third is the first here.
    found.push(format!("nice {} policy {}", fields[16], fields[38]));
    for file in ["oom_score_adj", "timerslack_ns", "personality"] {
        found.push(format!("{file} {}", read(pid, file).trim()));
    }
    for key in ["SigBlk", "Cpus_allowed_list", "Umask"] {
        found.push(format!("{key} {}", status(pid, key)));
    }
    // By what the simulator is written in: SIGPIPE (13), and in what it starts by posix_spawn(3) the C library's own
    // (32).
    let simulated = 1 << 12 | 1 << 31;
    let ignored = u64::from_str_radix(&status(pid, "SigIgn"), 16).expect("hexadecimal") & !simulated;
    found.push(format!("SigIgn {ignored:x}"));
    let priority = Command::new("ionice").arg("-p").arg(pid.to_string()).output().expect("ionice runs");
    found.push(format!("I/O {}", String::from_utf8_lossy(&priority.stdout).trim()));
    found
}

/// systemd.exec(5) and systemd-system.conf(5).
fn of_a_service() -> Vec<String> {
    let tasks = std::fs::read_to_string("/proc/sys/kernel/threads-max").expect("threads-max");
    let pending = tasks.trim().parse::<u64>().expect("a number") / 2;
    let every_cpu = status(Pid::from_raw(1), "Cpus_allowed_list");
    let text = format!(
        "Max cpu time unlimited\nMax file size unlimited\nMax data size unlimited\nMax stack size 8388608\n\
         Max core file size 0\nMax resident set unlimited\nMax open files 1024\nMax locked memory 8388608\n\
         Max address space unlimited\nMax file locks unlimited\nMax pending signals {pending}\n\
         Max msgqueue size 819200\nMax nice priority 0\nMax realtime priority 0\nMax realtime timeout unlimited\n\
         nice 0 policy 0\noom_score_adj 0\ntimerslack_ns 50000\npersonality 00000000\n\
         SigBlk 0000000000000000\nCpus_allowed_list {every_cpu}\nUmask 0022\nSigIgn 0\nI/O none: prio 0"
    );
    text.lines().map(str::to_owned).collect()
}

fn init(bundle: &Bundle<'_>) -> Vec<String> {
    surroundings(Pid::from_raw(bundle.pid()))
}

#[test]
fn the_daemon_has_a_services_surroundings_and_the_container_its_starters() {
    if skip_unless_root() || systemd_starts_daemons() {
        return;
    }
    for policy in ["--batch", "--idle"] {
        let world = World::simulated("h200", "");
        let by = || {
            let mut command = starter();
            command.args(["chrt", policy, "0"]);
            command
        };
        let mut bare = world.bundle("bare", &[], HOLD);
        bare.plain = true;
        let created = bare.create_by(by());
        assert!(created.ok, "{created:?}");
        let bundle = world.bundle("first", SHARE, HOLD);
        let created = bundle.create_by(by());
        assert!(created.ok, "{created:?}");
        assert_eq!(created.stderr, "", "nothing that could not be set");
        assert_eq!(init(&bundle), init(&bare), "the container's own");
        assert_ne!(init(&bundle), of_a_service(), "the starter's is another");
        let daemons = world.daemon_pids("");
        assert_eq!(daemons.len(), 2, "the daemon and its server");
        for daemon in daemons {
            assert_eq!(surroundings(daemon), of_a_service(), "{}", read(daemon, "cmdline"));
        }
        assert!(bundle.start().ok);
        assert_eq!(bundle.event("info")["mps"], true);
        bundle.down();
        bare.down();
        world.assert_empty();
    }
}

/// As programs do that never wait for a child: the exit statuses of the starter's own would be lost.
#[test]
fn a_starter_that_ignores_sigchld() {
    if skip_unless_root() || systemd_starts_daemons() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("first", SHARE, HOLD);
    let mut by = Command::new("env");
    by.arg("--ignore-signal=CHLD");
    let created = bundle.create_by(by);
    assert!(created.ok && created.stderr.is_empty(), "{created:?}");
    assert!(bundle.start().ok);
    assert_eq!(bundle.event("info")["mps"], true);
    bundle.down();
    world.assert_empty();
}

/// Without `CAP_SYS_RESOURCE` a hard limit stays. One that would end a daemon shared by several containers, or make it
/// fail for the next client, is refused; others cause a warning.
#[test]
fn limits_that_may_not_be_raised() {
    if skip_unless_root() || systemd_starts_daemons() {
        return;
    }
    let world = World::simulated("h200", "");
    let by = |limit: &str| {
        let mut command = Command::new("prlimit");
        command.args([limit, "setpriv", "--bounding-set=-sys_resource", "--inh-caps=-sys_resource"]);
        command
    };
    let bundle = world.bundle("limited", SHARE, HOLD);
    for (limit, named) in [
        ("--cpu=600", "RLIMIT_CPU of 600 (EPERM"),
        ("--fsize=100000000", "RLIMIT_FSIZE of 100000000 (EPERM"),
        ("--as=60000000000", "RLIMIT_AS of 60000000000 (EPERM"),
        ("--data=30000000000", "RLIMIT_DATA of 30000000000 (EPERM"),
        ("--nofile=300", "RLIMIT_NOFILE of 300 (EPERM"),
    ] {
        let refused = bundle.create_by(by(limit));
        assert!(!refused.ok && refused.stderr.contains(named), "{limit}: {refused:?}");
        assert!(
            refused.stderr.contains("would be limited\nwhy: the process that starts it has RLIMIT_"),
            "{refused:?}"
        );
        assert_eq!(bundle.config(), bundle.spec, "the bundle is as it was");
        world.assert_empty();
    }
    let created = bundle.create_by(by("--stack=4000000"));
    assert!(
        created.ok
            && created.stderr.contains("from the process that started it: RLIMIT_STACK of 4000000 (EPERM"),
        "{created:?}"
    );
    // An existing daemon was started by another process.
    let second = world.bundle("second", SHARE, HOLD);
    let created = second.create_by(by("--cpu=600"));
    assert!(created.ok && created.stderr.is_empty(), "{created:?}");
    second.down();
    bundle.down();
    world.assert_empty();
}

/// `RLIMIT_FSIZE` kills a process that writes more. A command fails instead, as with a full disk, and leaves nothing
/// half done.
#[test]
fn a_limit_on_the_size_of_files_ends_no_command_in_the_middle() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let limited = |bundle: &Bundle<'_>, size: usize, arguments: &[&str]| {
        let mut command = Command::new("prlimit");
        let runtime = bundle.runtime();
        command.arg(format!("--fsize={size}:")).arg(runtime.get_program()).args(runtime.get_args());
        let output = command.args(arguments).arg(&bundle.id).env("SUBLET_CONFIG", &world.config).output();
        Finished::of(&output.expect("prlimit runs"))
    };
    let bundle = world.bundle("one", SHARE, HOLD);
    bundle.write();
    let dir = bundle.dir.to_str().expect("UTF-8");
    // At the first write, and at later ones; the inventory is among them.
    for size in [0, 500, 2000, 4000] {
        let refused = limited(&bundle, size, &["create", "--bundle", dir]);
        assert!(refused.code == Some(1) && refused.stderr.contains("File too large"), "{size}: {refused:?}");
        assert_eq!(bundle.config(), bundle.spec, "the bundle is as it was");
        world.assert_empty();
    }
    bundle.up();
    // Never refused; the lease goes with the next command that can write.
    let deleted = limited(&bundle, 0, &["delete", "--force"]);
    assert!(deleted.code.is_some() && deleted.stderr.contains("File too large"), "{deleted:?}");
    assert!(!bundle.kill("0").ok, "the container is gone");
    world.assert_empty();
    let left = std::fs::read_dir(world.state_dir()).expect("the state directory").flatten();
    let left: Vec<_> = left.filter(|entry| entry.file_name().to_string_lossy().ends_with(".tmp")).collect();
    assert!(left.is_empty(), "{left:?}");
}
