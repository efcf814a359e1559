//! The privileges of sublet's programs when real runc and crun run them: a working hook has the rights of its stage
//! and nothing else. What it starts, and what the shim becomes, has all the rights that it would have without sublet.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Command, Stdio};

use nix::fcntl::{Flock, FlockArg};
use rustix::fs::{XattrFlags, setxattr};
use serde_json::json;
use sublet_e2e::{Bundle, World, eventually, in_one_line, programs, skip_unless_root};

const SHARE: &[(&str, &str)] = &[("sublet.sm", "25"), ("sublet.memory", "1GiB")];
const SLEEP: &[&str] = &["/bin/sleep", "600"];

/// By number (linux/capability.h): `DAC_OVERRIDE`, `DAC_READ_SEARCH`, FOWNER, `SYS_PTRACE`.
const LEDGER: u64 = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 19;
/// CHOWN and MKNOD besides.
const SHARED: u64 = LEDGER | 1 | 1 << 27;
/// SETGID, SETUID, `NET_ADMIN`, `SYS_CHROOT` and `SYS_ADMIN` besides.
const CONTAINER: u64 = SHARED | 1 << 6 | 1 << 7 | 1 << 12 | 1 << 18 | 1 << 21;

/// Every process waits while this exists, for five seconds at most.
pub(crate) struct Held(#[expect(dead_code, reason = "held until it is dropped")] Flock<File>);

impl Held {
    pub(crate) fn ledger(world: &World) -> Self {
        assert!(world.sublet(&["gc"]).status.success());
        Self::lock(&world.state_dir().join("lock"))
    }

    fn lock(path: &Path) -> Self {
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
        let held = Flock::lock(file.expect("a lock file"), FlockArg::LockExclusive);
        Self(held.map_err(|(_, error)| error).expect("the lock"))
    }
}

/// The fields of /proc/PID/status that show its privileges.
fn rights(pid: i32) -> BTreeMap<String, String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let fields = status.lines().filter_map(|line| line.split_once(":\t"));
    let wanted = ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp"];
    let fields = fields.filter(|(name, _)| wanted.contains(name));
    fields.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

fn of_ours() -> BTreeMap<String, String> {
    rights(i32::try_from(std::process::id()).expect("a pid"))
}

fn parent(pid: i32) -> i32 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:\t"));
    line.and_then(|pid| pid.parse().ok()).unwrap_or(0)
}

/// Processes of the world, whose command line holds `words`.
fn running(world: &World, words: &str) -> Vec<i32> {
    let dir = world.dir.path().to_string_lossy().into_owned();
    let read = |pid: i32, name: &str| {
        let bytes = fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).replace('\0', " ")
    };
    let pids = fs::read_dir("/proc").expect("/proc").flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| read(*pid, "cmdline").contains(words) && read(*pid, "environ").contains(&dir)).collect()
}

/// The two processes of a hook at `stage`: the one that waits, and the one at work.
fn hook(world: &World, stage: &str) -> (i32, i32) {
    let mut found = None;
    let both = || {
        let all = running(world, &format!("sublet-hook {stage}"));
        found = all.iter().copied().find(|pid| all.contains(&parent(*pid))).map(|pid| (parent(pid), pid));
        // Its work has begun: the filter comes last.
        found.is_some_and(|(_, worker)| rights(worker).get("Seccomp").is_some_and(|mode| mode == "2"))
    };
    assert!(eventually(both), "no hook is at work at {stage}: {found:?}");
    found.expect("it was found")
}

fn descriptors(pid: i32) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| Some(fs::read_link(entry.path()).ok()?.to_string_lossy().into_owned()))
        .collect()
}

/// What a hook at `stage` has while it waits for the ledger, which `call` makes it do.
fn assert_confined(world: &World, stage: &str, capabilities: u64, call: impl FnOnce() + Send) {
    let held = Held::ledger(world);
    std::thread::scope(|scope| {
        let called = scope.spawn(call);
        let (waiting, working) = hook(world, stage);
        let kept = format!("{:016x}", capabilities & mask(&of_ours()["CapPrm"]));
        let narrowed = || rights(working).get("CapEff").is_some_and(|effective| *effective == kept);
        assert!(eventually(narrowed), "{stage}: {:?}", rights(working));
        let at_work = rights(working);
        assert_eq!(at_work["CapPrm"], at_work["CapEff"], "{stage}");
        for none in ["CapInh", "CapAmb"] {
            assert_eq!(at_work[none], "0000000000000000", "{stage}: {none}");
        }
        assert_eq!((at_work["NoNewPrivs"].as_str(), at_work["Seccomp"].as_str()), ("1", "2"), "{stage}");
        let outside = rights(waiting);
        assert_eq!((outside["NoNewPrivs"].as_str(), outside["Seccomp"].as_str()), ("0", "0"), "{stage}");
        assert_eq!(outside["CapEff"], of_ours()["CapEff"], "{stage}: who waits starts programs");
        drop(held);
        called.join().expect("no panic");
    });
}

fn mask(text: &str) -> u64 {
    u64::from_str_radix(text, 16).expect("a mask")
}

/// The stage waits for the ledger only where the inventory need not be made first.
fn world() -> World {
    let world = World::simulated("h200", "");
    assert!(world.sublet(&["refresh"]).status.success());
    world
}

#[test]
fn a_hook_has_the_rights_of_its_stage_alone() {
    if skip_unless_root() {
        return;
    }
    for stage in ["prestart", "createRuntime"] {
        let world = world();
        let mut bundle = world.bundle("late", SHARE, SLEEP);
        bundle.hook(&[stage, "poststop"]);
        let up = || {
            let created = bundle.create();
            assert!(created.ok, "{stage}: {created:?}");
        };
        assert_confined(&world, stage, CONTAINER, up);
        assert!(bundle.start().ok);
        assert_eq!(world.leases()[0]["state"], "active");
        assert_confined(&world, "poststop", LEDGER, || bundle.down());
        world.assert_empty();
    }
}

#[test]
fn precreate_and_the_binding_of_its_lease_have_less() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let mut bundle = world.bundle("early", SHARE, SLEEP);
    assert_confined(&world, "precreate", SHARED, || bundle.precreate());
    assert_confined(&world, "createRuntime", LEDGER, || bundle.up());
    assert_eq!(world.leases()[0]["state"], "active");
    bundle.down();
    world.assert_empty();
}

/// `command` with the file at `path` as its descriptor 9, and variables that loaders and libraries obey.
fn burdened(command: &Command, path: &Path) -> Command {
    let mut burdened = Command::new("sh");
    burdened.args(["-c", "exec 9>\"$0\"; exec \"$@\""]).arg(path);
    burdened.arg(command.get_program()).args(command.get_args());
    burdened.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?)))).envs(BURDEN);
    burdened
}

const BURDEN: [(&str, &str); 3] =
    [("GCONV_PATH", "/nowhere/burden"), ("LD_BIND_NOW", "burden"), ("SUBLET_BURDEN", "burden")];

fn has_burden(pid: i32, planted: &Path) -> (bool, bool) {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let planted = planted.to_string_lossy();
    (
        descriptors(pid).iter().any(|file| *file == planted),
        String::from_utf8_lossy(&environment).contains("burden"),
    )
}

#[test]
fn nothing_of_the_callers_is_left_to_a_hook_and_to_what_it_starts() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let planted = world.dir.path().join("planted");
    let mut bundle = world.bundle("burdened", SHARE, SLEEP);
    bundle.spec["root"]["path"] = json!(bundle.dir.join("rootfs"));
    let spec = serde_json::to_vec(&bundle.spec).expect("JSON");
    let precreate = || {
        let mut command = burdened(&world.command("sublet-hook"), &planted);
        command.arg("precreate").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("sublet-hook runs");
        child.stdin.take().expect("piped").write_all(&spec).expect("it reads");
        let output = child.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{output:?}");
    };
    let held = Held::ledger(&world);
    std::thread::scope(|scope| {
        let called = scope.spawn(precreate);
        let (waiting, working) = hook(&world, "precreate");
        // What /proc shows of an environment is how it began.
        assert!(!has_burden(waiting, &planted).0 && !has_burden(working, &planted).0);
        drop(held);
        called.join().expect("no panic");
    });
    let daemons = running(&world, "nvidia-cuda-mps-control");
    assert!(!daemons.is_empty(), "the share has a daemon");
    for daemon in daemons.into_iter().chain(running(&world, "nvidia-cuda-mps-server")) {
        assert_eq!(has_burden(daemon, &planted), (false, false));
        let (theirs, ours) = (rights(daemon), of_ours());
        assert_eq!(theirs, ours, "a daemon is somebody else's program");
    }
    // Its engine, this test, lives: the lease is given up by hand.
    let lease = world.leases()[0]["id"].as_str().expect("an id").to_owned();
    assert!(world.sublet(&["lease", "release", "--force", &lease]).status.success());
    world.assert_empty();
}

/// Puts a program before the world's low-level runtime that writes down what it was given.
fn witness(world: &World) {
    let (name, dir) = (world.engine.program(), world.dir.path().display());
    let program = world.dir.path().join(format!("witness-{name}"));
    let script = format!(
        "{{ cat /proc/$$/status; ls -l /proc/$$/fd; tr '\\0' '\\n' </proc/$$/environ; }} >>{dir}/given\n\
         exec {name} \"$@\"\n"
    );
    programs::script(&program, &script);
    let text = fs::read_to_string(&world.config).expect("config.toml");
    let text = text.replace(&format!("{:?}", [name]), &format!("{:?}", [&program]));
    fs::write(&world.config, text).expect("config.toml");
}

#[test]
fn the_low_level_runtime_gets_all_that_the_shim_got_and_our_own_child_nothing() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    witness(&world);
    let planted = world.dir.path().join("planted");
    let bundle = world.bundle("burdened", SHARE, SLEEP);
    bundle.write();
    let uuid = world.status()["devices"][0]["uuid"].as_str().expect("a UUID").to_owned();
    // Its start waits for the daemon's own lock.
    let daemon = world.state_dir().join("mps").join(uuid);
    fs::create_dir_all(&daemon).expect("a directory");
    for dir in [daemon.as_path(), daemon.parent().expect("mps")] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).expect("chmod");
    }
    let held = Held::lock(&daemon.join("lock"));
    let mut command = burdened(&world.runtime(), &planted);
    command.args(["create", "--bundle"]).arg(&bundle.dir).arg(&bundle.id);
    let null = || Stdio::from(File::options().write(true).open("/dev/null").expect("/dev/null"));
    let mut shim = command.stdin(Stdio::null()).stdout(null()).stderr(null()).spawn().expect("it runs");
    let mut begun = Vec::new();
    let started = || {
        begun = running(&world, "sublet mps start");
        !begun.is_empty()
    };
    assert!(eventually(started), "no `sublet mps start`");
    assert_eq!(has_burden(begun[0], &planted), (false, false));
    drop(held);
    assert!(shim.wait().expect("it ends").success());
    let given = fs::read_to_string(world.dir.path().join("given")).expect("the witness");
    assert!(given.contains(&format!(" 9 -> {}", planted.display())), "{given}");
    for (name, value) in BURDEN {
        assert!(given.lines().any(|line| line == format!("{name}={value}")), "{name}: {given}");
    }
    for (name, value) in of_ours() {
        assert!(given.lines().any(|line| line == format!("{name}:\t{value}")), "{name}: {value}: {given}");
    }
    assert!(bundle.start().ok);
    bundle.down();
    world.assert_empty();
}

#[test]
fn a_container_with_a_share_has_the_rights_of_one_without() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let seen = |bundle: &Bundle<'_>| {
        bundle.up();
        let rights = rights(bundle.pid());
        bundle.down();
        rights
    };
    let without = seen(&world.bundle("without", &[], SLEEP));
    assert_eq!(without.len(), 7, "{without:?}");
    assert_eq!(seen(&world.bundle("shim", SHARE, SLEEP)), without);
    let mut hooked = world.bundle("hook", SHARE, SLEEP);
    hooked.hook(&["createRuntime", "poststop"]);
    assert_eq!(seen(&hooked), without);
    world.assert_empty();
}

#[test]
fn a_hook_that_its_engine_kills_does_not_work_on() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let bundle = world.bundle("killed", SHARE, SLEEP);
    let mut spec = bundle.spec.clone();
    spec["root"]["path"] = json!(bundle.dir.join("rootfs"));
    let held = Held::ledger(&world);
    let mut engine = world.command("sublet-hook");
    let mut engine =
        engine.arg("precreate").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("it runs");
    let input = serde_json::to_vec(&spec).expect("JSON");
    engine.stdin.take().expect("piped").write_all(&input).expect("it reads");
    let (waiting, working) = hook(&world, "precreate");
    assert_eq!(waiting, i32::try_from(engine.id()).expect("a pid"));
    engine.kill().expect("it runs");
    engine.wait().expect("it ends");
    assert!(eventually(|| !sublet_e2e::is_alive(nix::unistd::Pid::from_raw(working))), "it works on");
    drop(held);
    world.assert_empty();
}

/// `command` on a host where `SELinux` enforces.
fn under_selinux(world: &World, command: &Command) -> Command {
    let sys = world.dir.path().join("selinux");
    for path in ["selinux", "cgroup"] {
        fs::create_dir_all(sys.join(path)).expect("directories");
    }
    fs::write(sys.join("selinux/enforce"), "1").expect("written");
    let script = "mount --rbind /sys/fs/cgroup $1/cgroup && mount --rbind $1 /sys/fs && shift && exec \"$@\"";
    let mut inside = Command::new("unshare");
    inside.args(["--mount", "sh", "-c", script, "sh"]).arg(&sys);
    inside.arg(command.get_program()).args(command.get_args());
    inside.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    inside
}

/// Gives the MPS daemons' directory a context of type `kind`, which is or is not the one of sublet's policy module.
fn label(world: &World, kind: &str) {
    let mps = world.state_dir().join("mps");
    fs::create_dir_all(&mps).expect("the state directory is ours");
    let context = format!("system_u:object_r:{kind}:s0");
    setxattr(&mps, "security.selinux", context.as_bytes(), XattrFlags::empty()).expect("root may");
}

#[test]
fn where_selinux_enforces_without_our_module_shares_of_mps_are_refused() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let create = |annotations: &[(&str, &str)], kind: &str| {
        label(&world, kind);
        let bundle = world.bundle("selinux", annotations, SLEEP);
        bundle.write();
        let mut command = world.runtime();
        command.args(["create", "--bundle"]).arg(&bundle.dir).arg(&bundle.id);
        let mut command = under_selinux(&world, &command);
        let error = world.dir.path().join("error");
        let file = File::create(&error).expect("a file");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
        let done = command.status().expect("unshare runs").success();
        (bundle, done, fs::read_to_string(error).expect("a file"))
    };
    let (_, done, line) = create(SHARE, "var_run_t");
    assert!(!done, "it was created");
    let (line, why) = (in_one_line(&line), "SELinux is enforcing without sublet's policy module");
    assert!(line.contains(why) && line.contains("sublet-selinux") && line.lines().count() == 1, "{line}");
    world.assert_empty();
    for (annotations, kind) in [(&[("sublet.gpu", "0")][..], "var_run_t"), (SHARE, "sublet_mps_t")] {
        let (bundle, done, line) = create(annotations, kind);
        assert!(done, "{line}");
        bundle.down();
        world.assert_empty();
    }
    let doctor = world.command("sublet");
    label(&world, "var_run_t");
    let mut doctor = under_selinux(&world, &doctor);
    let told = doctor.args(["doctor", "--format", "json"]).output().expect("it runs");
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    assert!(told.contains("SELinux is enforcing without sublet's policy module"), "{told}");
}
