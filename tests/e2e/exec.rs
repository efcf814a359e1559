//! Processes started by `exec` when sublet's state is lost, broken or another container's, or when the MPS daemon has
//! ended: each gets its container's share or is not started.

use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
use nix::unistd::Pid;
use serde_json::{Value, json};
use sublet_e2e::{Bundle, Engine, Finished, World, in_one_line, skip_unless_root, stop};

/// Survives the end of the MPS daemon, which a program with work on the GPU does not.
const SLEEP: &[&str] = &["/bin/sleep", "300"];
const SHARE: &[(&str, &str)] = &[("sublet.sm", "25"), ("sublet.memory", "8GiB")];
const INFO: &[&str] = &["/usr/bin/cuda-probe", "info"];
/// What Docker gives a health check.
const IMAGES: &[&str] = &["PATH=/usr/bin:/bin"];

/// Every way to start a process in the container.
fn ways(bundle: &Bundle<'_>) -> Vec<(&'static str, Finished)> {
    let with_env = bundle.runtime_with(&["exec", "--env", "MINE=1", "--env", "CUDA_VISIBLE_DEVICES=7"], INFO);
    let by_letter = bundle.runtime_with(&["exec", "-e", "MINE=1"], INFO);
    let mut file_by_letter = bundle.runtime();
    let file_by_letter = file_by_letter.args(["exec", "-p"]).arg(process_file(bundle)).arg(&bundle.id);
    let file_by_letter = Finished::of(&file_by_letter.output().expect("it runs"));
    let stdin = by_stdin(bundle, Stdio::from(std::fs::File::open(process_file(bundle)).expect("a file")));
    let mut piped = by_pipe(bundle);
    vec![
        ("--process", bundle.exec_file(INFO, IMAGES)),
        ("alone", bundle.exec(INFO)),
        ("--env", with_env),
        ("-e", by_letter),
        ("-p", file_by_letter),
        ("--process /dev/stdin", stdin),
        ("a pipe", piped.remove(0)),
    ]
}

trait More {
    fn runtime_with(&self, options: &[&str], args: &[&str]) -> Finished;
}

impl More for Bundle<'_> {
    fn runtime_with(&self, options: &[&str], args: &[&str]) -> Finished {
        Finished::of(&self.runtime().args(options).arg(&self.id).args(args).output().expect("it runs"))
    }
}

/// A process file as Docker writes it.
fn process_file(bundle: &Bundle<'_>) -> PathBuf {
    let process = json!({"cwd": "/", "args": INFO, "env": IMAGES, "user": {"uid": 0, "gid": 0},
        "capabilities": bundle.spec["process"]["capabilities"]});
    let file = bundle.dir.join("own-process.json");
    std::fs::write(&file, process.to_string()).expect("a process file");
    file
}

fn by_stdin(bundle: &Bundle<'_>, stdin: Stdio) -> Finished {
    let mut command = bundle.runtime();
    command.args(["exec", "--process", "/dev/stdin"]).arg(&bundle.id).stdin(stdin);
    Finished::of(&command.output().expect("it runs"))
}

fn by_pipe(bundle: &Bundle<'_>) -> Vec<Finished> {
    let text = std::fs::read(process_file(bundle)).expect("a file");
    let mut command = bundle.runtime();
    command.args(["exec", "--process", "/dev/stdin"]).arg(&bundle.id);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("it runs");
    // If the request is refused before its input is read, the pipe has no reader.
    let _ = child.stdin.take().expect("piped").write_all(&text);
    vec![Finished::of(&child.wait_with_output().expect("it ends"))]
}

/// The share that [`SHARE`] is, by each way.
fn assert_held(what: &str, bundle: &Bundle<'_>) {
    for (way, seen) in ways(bundle) {
        let info = seen.json().into_iter().next().unwrap_or_else(|| panic!("{what}, {way}: {seen:?}"));
        assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)), "{what}, {way}: {info}");
        assert!(info["free_mib"].as_u64().is_some_and(|free| free < 8192), "{what}, {way}: {info}");
    }
}

/// Checks that each way is refused within five seconds, with `why`.
fn assert_refused(what: &str, bundle: &Bundle<'_>, why: &str) {
    let began = Instant::now();
    for (way, seen) in ways(bundle) {
        assert!(!seen.ok && seen.json().is_empty(), "{what}, {way}: {seen:?}");
        assert!(seen.stderr.contains(why), "{what}, {way}: {}", seen.stderr);
        assert_eq!(in_one_line(&seen.stderr).lines().count(), 1, "{what}, {way}: {}", seen.stderr);
    }
    assert!(began.elapsed() < Duration::from_secs(25), "{what}: {:?}", began.elapsed());
}

fn world() -> World {
    World::simulated("h200", "")
}

fn up<'a>(world: &'a World, id: &str) -> Bundle<'a> {
    let bundle = world.bundle(id, SHARE, SLEEP);
    bundle.up();
    bundle
}

fn control(world: &World) -> PathBuf {
    world.driver_root.as_ref().expect("simulated").join("usr/bin/nvidia-cuda-mps-control")
}

/// Moves a file aside for as long as `meanwhile` takes.
fn without<T>(path: &Path, meanwhile: impl FnOnce() -> T) -> T {
    let aside = path.with_extension("aside");
    std::fs::rename(path, &aside).expect("moved");
    let done = meanwhile();
    std::fs::rename(&aside, path).expect("moved back");
    done
}

/// Listens where the ended daemon did for as long as `meanwhile` takes, as the last thread of a killed one may.
fn listening(world: &World, meanwhile: impl FnOnce()) {
    let daemons = std::fs::read_dir(world.state_dir().join("mps")).expect("directories of daemons");
    let sockets = daemons.flatten().map(|daemon| daemon.path().join("public/control"));
    let path = sockets.into_iter().find(|socket| socket.exists()).expect("the ended daemon's");
    std::fs::remove_file(&path).expect("removed");
    let listener =
        socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).expect("a socket");
    bind(listener.as_raw_fd(), &UnixAddr::new(&path).expect("a short path")).expect("bound");
    listen(&listener, Backlog::MAXCONN).expect("it listens");
    meanwhile();
}

#[test]
fn a_share_is_known_without_ledger_inventory_and_configuration() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let bundle = up(&world, "held");
    let state = world.state_dir();
    assert_held("all is well", &bundle);
    for name in ["inventory.json", "ledger.json"] {
        let path = state.join(name);
        without(&path, || assert_held(&format!("no {name}"), &bundle));
        let whole = std::fs::read(&path).expect("it is there");
        for (what, text) in
            [("cut off", &whole[..whole.len() / 2]), ("another schema", b"{\"schema\":\"x/9\"}")]
        {
            std::fs::write(&path, text).expect("written");
            assert_held(&format!("{name} {what}"), &bundle);
        }
        std::fs::write(&path, &whole).expect("written");
        let mode = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(&path, mode(0o666)).expect("chmod");
        assert_held(&format!("{name} of mode 0666"), &bundle);
        std::fs::set_permissions(&path, mode(0o644)).expect("chmod");
    }
    let text = std::fs::read_to_string(&world.config).expect("config.toml");
    for typo in ["[limits]\ntime_slice_maximum = 3\n", "[mps]\nexclusive_compute_mode = \"x\"\n", "[limits\n"]
    {
        std::fs::write(&world.config, format!("{text}\n{typo}")).expect("config.toml");
        assert_held(typo, &bundle);
    }
    std::fs::write(&world.config, text).expect("config.toml");
    bundle.down();
    world.assert_empty();
}

#[test]
fn a_ledger_that_is_locked_and_unreadable_is_not_needed() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let bundle = up(&world, "held");
    let state = world.state_dir();
    let lock = std::fs::File::open(state.join("lock")).expect("the lock");
    let lock = nix::fcntl::Flock::lock(lock, nix::fcntl::FlockArg::LockExclusive).expect("locked");
    let whole = std::fs::read(state.join("ledger.json")).expect("the ledger");
    std::fs::write(state.join("ledger.json"), "{").expect("written");
    assert_held("locked", &bundle);
    std::fs::write(state.join("ledger.json"), whole).expect("written");
    drop(lock);
    bundle.down();
    world.assert_empty();
}

/// Podman 5.4 passes its own list of devices with every update; the share's are not in it.
#[test]
fn an_update_does_not_take_the_gpu_away() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let mut bundle = up(&world, "held");
    let node = |bundle: &Bundle<'_>| {
        let seen = bundle.exec(&["/usr/bin/cuda-probe", "noderights", "/dev/nvidia0"]).json();
        seen.iter().find(|line| line["event"] == "node").expect("an answer")["result"].clone()
    };
    assert_eq!(node(&bundle), "ENXIO", "allowed by the cgroup, no driver behind it");
    let resources = bundle.dir.join("resources.json");
    std::fs::write(&resources, r#"{"devices": [{"allow": false, "access": "rwm"}]}"#).expect("a file");
    let update = |bundle: &Bundle<'_>| {
        let mut command = bundle.runtime();
        command.arg("update").arg(format!("--resources={}", resources.display())).arg("held");
        Finished::of(&command.output().expect("it runs"))
    };
    let updated = update(&bundle);
    assert_eq!(updated.ok, world.engine == Engine::Runc, "{updated:?}");
    if world.engine == Engine::Crun {
        assert!(updated.stderr.contains("would take the container's GPU away"), "{updated:?}");
    }
    assert_eq!(node(&bundle), "ENXIO");
    assert_eq!(world.status()["warnings"].to_string().matches("has lost").count(), 0);
    if world.engine == Engine::Crun {
        // Nobody asks sublet, as with Podman's hook.
        bundle.plain = true;
        assert!(update(&bundle).ok);
        bundle.plain = false;
        assert_eq!(node(&bundle), "EPERM");
        let lost = "container held: it has lost /dev/nvidia0: its device cgroup";
        assert!(world.status()["warnings"].to_string().contains(lost), "{}", world.status()["warnings"]);
        let doctor = world.command("sublet").args(["doctor", "--quick", "--format", "json"]).output();
        let doctor = String::from_utf8(doctor.expect("it runs").stdout).expect("UTF-8");
        assert!(doctor.contains(lost), "{doctor}");
    }
    bundle.down();
    world.assert_empty();
}

#[test]
fn a_daemon_that_died_is_brought_back_for_who_comes() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let bundle = up(&world, "held");
    world.kill_daemons();
    assert_held("the daemon was killed", &bundle);
    world.kill_daemons();
    std::fs::remove_file(world.state_dir().join("ledger.json")).expect("removed");
    assert_held("the daemon was killed and the ledger lost", &bundle);
    bundle.down();
    world.assert_empty();
}

#[test]
fn where_the_daemon_cannot_come_back_nothing_starts() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let bundle = up(&world, "held");
    world.kill_daemons();
    let why = "its MPS daemon is not available, so a process would have no limits";
    without(&control(&world), || assert_refused("no control program", &bundle, why));
    let text = std::fs::read_to_string(&world.config).expect("config.toml");
    std::fs::write(&world.config, format!("{text}\n[limits]\ntypo = 3\n")).expect("config.toml");
    assert_refused("a typo", &bundle, "unknown key `typo`");
    listening(&world, || assert_refused("a typo, and something listens", &bundle, "unknown key `typo`"));
    std::fs::write(&world.config, text).expect("config.toml");
    let state = world.state_dir();
    let mount = |options: &[&str]| {
        let done = Command::new("mount").args(options).arg(&state).status().expect("mount runs");
        assert!(done.success(), "mount {options:?}");
    };
    mount(&["--bind", state.to_str().expect("UTF-8")]);
    mount(&["-o", "remount,bind,ro"]);
    assert_refused("a read-only state directory", &bundle, why);
    let done = Command::new("umount").arg(&state).status().expect("umount runs");
    assert!(done.success());
    // What is wrong is put right: so is the container.
    assert_held("again", &bundle);
    bundle.down();
    world.assert_empty();
}

#[test]
fn a_daemon_that_is_stopped_is_found_out_whenever_it_answered_last() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let bundle = up(&world, "held");
    let daemon = Pid::from_raw(
        i32::try_from(world.status()["mps"][0]["pid"].as_i64().expect("a pid")).expect("a pid"),
    );
    stop(daemon);
    assert_refused("just answered", &bundle, "does not answer");
    world.forget_answers();
    assert_refused("answered long ago", &bundle, "does not answer");
    without(&world.state_dir().join("ledger.json"), || {
        std::fs::rename(world.state_dir().join("ledger.json.copy"), world.state_dir().join("kept"))
            .expect("moved");
        assert_refused("no ledger", &bundle, "does not answer");
        std::fs::rename(world.state_dir().join("kept"), world.state_dir().join("ledger.json.copy"))
            .expect("moved");
    });
    kill(daemon, Signal::SIGCONT).expect("SIGCONT");
    assert_held("it goes on", &bundle);
    bundle.down();
    world.assert_empty();
}

#[test]
fn the_reason_stands_where_engines_look() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let bundle = up(&world, "held");
    world.kill_daemons();
    let log = world.dir.path().join("log.json");
    let seen = without(&control(&world), || {
        let mut command = world.command("sublet-runtime");
        command.arg("--root").arg(world.runtime_root()).arg("--log").arg(&log).args(["--log-format", "json"]);
        command.args(["exec", "--process"]).arg(process_file(&bundle)).arg("held").output().expect("it runs")
    });
    let stderr = String::from_utf8(seen.stderr).expect("UTF-8");
    let text = std::fs::read_to_string(&log).expect("a log");
    let line: Value = serde_json::from_str(text.lines().last().expect("a line")).expect("JSON");
    assert_eq!((&line["level"], line["msg"].as_str()), (&json!("error"), Some(stderr.trim_end())));
    bundle.down();
    world.assert_empty();
}

#[test]
fn without_a_daemon_shells_and_health_checks_may_start_without_the_gpu() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "[mps]\nexec_without_daemon = \"no-gpu\"\n");
    let bundle = up(&world, "held");
    assert_held("it answers", &bundle);
    world.kill_daemons();
    let crun = world.engine == Engine::Crun;
    // crun takes no less than a whole environment on its command line, which every user can read.
    let refused = |seen: &Finished| {
        !seen.ok && seen.stderr.contains("pass the process with --process, or its variables with --env")
    };
    without(&control(&world), || {
        for (way, seen) in ways(&bundle) {
            if crun && way == "alone" {
                assert!(refused(&seen), "{seen:?}");
                continue;
            }
            assert_eq!(seen.json()[0]["error"], json!("CUDA_ERROR_NO_DEVICE"), "{way}: {seen:?}");
            assert!(seen.stderr.contains("the process starts without the GPU"), "{way}: {seen:?}");
        }
        let script = "echo \"[$CUDA_VISIBLE_DEVICES]\" \"$PATH\"; ls -l /dev/nvidia0 >/dev/null && id -u";
        let options: &[&str] = if crun { &["--env", "PATH=/usr/bin:/bin"] } else { &[] };
        let shell = bundle.exec_with(options, &["/bin/sh", "-c", script]);
        assert!(shell.ok && shell.stdout.starts_with("[] /usr"), "{shell:?}");
        // Whatever the program makes of its environment.
        let bare = bundle.exec_with(options, &["/bin/env", "-i", "/usr/bin/cuda-probe", "info"]);
        assert_eq!(bare.json()[0]["error"], json!("CUDA_ERROR_NO_DEVICE"), "{bare:?}");
    });
    assert_held("it came back", &bundle);
    bundle.down();
    world.assert_empty();
}

#[test]
fn a_process_file_is_the_callers_own() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let bundle = up(&world, "held");
    let file = process_file(&bundle);
    let before = std::fs::read(&file).expect("the file");
    let mut command = bundle.runtime();
    let seen =
        Finished::of(&command.arg("exec").arg("--process").arg(&file).arg("held").output().expect("it runs"));
    assert_eq!(seen.json()[0]["sm"], json!(32), "{seen:?}");
    by_stdin(&bundle, Stdio::from(std::fs::File::open(&file).expect("a file")));
    assert_eq!(std::fs::read(&file).expect("the file"), before);
    // Keys that Go also reads as `env`, besides the one that sublet edits.
    let text = String::from_utf8(before).expect("UTF-8");
    std::fs::write(&file, text.replacen("\"env\"", "\"Env\":[\"PATH=/bin\"],\"env\"", 1)).expect("written");
    let mut command = bundle.runtime();
    let seen =
        Finished::of(&command.arg("exec").arg("--process").arg(&file).arg("held").output().expect("it runs"));
    assert!(!seen.ok && seen.stderr.contains("the key `Env` for `env`"), "{seen:?}");
    bundle.down();
    world.assert_empty();
}

#[test]
fn a_container_is_the_same_by_whatever_name_of_its_root() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let bundle = up(&world, "held");
    let link = world.dir.path().join("link");
    std::os::unix::fs::symlink(world.runtime_root(), &link).expect("a link");
    let dots = world.runtime_root().join("held/..");
    for root in [&link, &dots] {
        let mut command = world.command("sublet-runtime");
        command.arg("--root").arg(root).args(["exec", "--process"]).arg(process_file(&bundle)).arg("held");
        let seen = Finished::of(&command.output().expect("it runs"));
        assert_eq!(seen.json()[0]["sm"], json!(32), "{root:?}: {seen:?}");
    }
    let mut command = world.command("sublet-runtime");
    let deleted =
        command.arg("--root").arg(&link).args(["delete", "--force", "held"]).output().expect("it runs");
    assert!(deleted.status.success());
    assert!(world.booked().is_empty(), "its lease ended with it");
    world.assert_empty();
}

#[test]
fn what_runs_is_reached_whatever_stands_in_runtime() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let bundle = up(&world, "held");
    let text = std::fs::read_to_string(&world.config).expect("config.toml");
    let broken = text.replace("low_level =", "low_levle =");
    assert_ne!(text, broken);
    std::fs::write(&world.config, &broken).expect("config.toml");
    let simple = |args: &[&str]| Finished::of(&world.runtime().args(args).output().expect("it runs"));
    for args in [&["state", "held"][..], &["kill", "held", "WINCH"], &["--version"], &["list"]] {
        let seen = simple(args);
        assert!(seen.ok, "{args:?}: {seen:?}");
    }
    assert_held("[runtime]", &bundle);
    let other = world.bundle("other", SHARE, SLEEP).create();
    assert!(!other.ok && other.stderr.contains("low_levle"), "{other:?}");
    bundle.down();
    std::fs::write(&world.config, &text).expect("config.toml");
    world.assert_empty();
}

#[test]
fn other_containers_are_not_held_up_by_any_of_it() {
    if skip_unless_root() {
        return;
    }
    let world = world();
    let plain = world.bundle("plain", &[("org.sublet.x", "1")], &["/bin/sleep", "300"]);
    plain.up();
    std::fs::create_dir_all(world.state_dir()).expect("a directory");
    std::fs::write(world.state_dir().join("ledger.json"), "{").expect("written");
    let text = std::fs::read_to_string(&world.config).expect("config.toml");
    std::fs::write(&world.config, format!("{text}\n[limits\n")).expect("config.toml");
    let file = json!({"cwd": "/", "args": ["/bin/true"], "env": ["A=1"], "Env": ["B=1"], "user": {"uid": 0, "gid": 0}});
    let path = plain.dir.join("p.json");
    std::fs::write(&path, file.to_string()).expect("written");
    let seen = Finished::of(
        &plain.runtime().arg("exec").arg("--process").arg(&path).arg("plain").output().expect("it runs"),
    );
    assert!(seen.ok, "{seen:?}");
    plain.down();
}
