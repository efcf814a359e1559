//! GPUs that report errors: a program's own is its container's, any other keeps new leases away until the GPU is well. And drains,
//! which outlive a reboot.

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use nix::unistd::Pid;
use serde_json::{Value, json};
use sublet_e2e::user::Host;
use sublet_e2e::{World, bin_dir, eventually, skip_unless_root};

use crate::two_users::{self, ALICE, BOB, HOLD, QUARTER};

/// What `sublet` prints on stdout.
fn said(world: &World, arguments: &[&str]) -> String {
    String::from_utf8_lossy(&world.sublet(arguments).stdout).into_owned()
}

/// What it says on stderr, and whether it succeeded.
fn run(world: &World, arguments: &[&str]) -> (bool, String) {
    let output = world.sublet(arguments);
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// The events of this kind, each with the container and the text.
fn events(world: &World, kind: &str) -> Vec<(String, String)> {
    let text = said(world, &["events", "--format", "json", "--filter", &format!("kind={kind}")]);
    let parse = |line: &str| -> (String, String) {
        let event: Value = serde_json::from_str(line).expect("JSON");
        let field = |key: &str| event[key].as_str().unwrap_or_default().to_owned();
        (field("container_id"), field("text"))
    };
    text.lines().map(parse).collect()
}

fn state(world: &World, gpu: usize) -> Value {
    world.status()["devices"][gpu]["health"]["state"].clone()
}

fn serving() -> Host {
    let mut host = two_users::host("h200x8");
    host.start();
    host
}

fn share(gpu: &str) -> [(&'static str, &str); 2] {
    [("sublet.gpu", gpu), ("sublet.mode", "time-slice")]
}

#[test]
fn an_error_of_a_programs_own_is_its_containers() {
    if skip_unless_root() {
        return;
    }
    let host = serving();
    let world = &host.world;
    let (one, two) = (world.bundle("one", &share("3"), HOLD), world.bundle("two", &share("3"), HOLD));
    one.up();
    two.up();
    let mps = [("sublet.gpu", "4"), ("sublet.sm", "25")];
    let (left, right) = (world.bundle("left", &mps, HOLD), world.bundle("right", &mps, HOLD));
    left.up();
    right.up();
    world.report_xid(3, 31, Some(two.pid()), "Ch 00000008, intr 00000000");
    assert!(eventually(|| events(world, "gpu-error").len() == 1), "{:?}", events(world, "gpu-error"));
    let (container, text) = events(world, "gpu-error").remove(0);
    assert_eq!(container, "two", "{text}");
    assert!(text.starts_with(&format!("Xid 31 on GPU 3, process {} (", two.pid())), "{text}");
    assert!(text.contains("; fix: start the program again"), "{text}");
    // Whoever it was, all clients of a shared server lose their work.
    world.report_xid(4, 13, Some(left.pid()), "Graphics Exception");
    assert!(eventually(|| events(world, "gpu-error").len() == 3), "{:?}", events(world, "gpu-error"));
    let mut whose: Vec<String> =
        events(world, "gpu-error").into_iter().map(|(container, _)| container).collect();
    whose.sort();
    assert_eq!(whose, ["left", "right", "two"]);
    // A stream that never stops: the same error has an event once a minute, and another one has its own.
    for _ in 0..300 {
        world.report_xid(3, 31, Some(two.pid()), "again");
    }
    world.report_xid(3, 43, Some(one.pid()), "Ch 00000010");
    assert!(eventually(|| events(world, "gpu-error").len() == 4), "{:?}", events(world, "gpu-error"));
    // The driver may name the server itself.
    let is_server = |pid: &Pid| {
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.contains("nvidia-cuda-mps-server")
    };
    let server = || world.daemon_pids("").into_iter().find(is_server);
    assert!(eventually(|| server().is_some()), "the server of GPU 4");
    world.report_xid(4, 31, server().map(Pid::as_raw), "Ch 00000008");
    assert!(eventually(|| events(world, "gpu-error").len() == 6), "{:?}", events(world, "gpu-error"));
    let mut last = events(world, "gpu-error").split_off(4);
    last.sort();
    let whose = [&*last[0].0, &*last[1].0];
    assert!(whose == ["left", "right"] && last[0].1.contains("Xid 31 on GPU 4, process "), "{last:?}");
    assert_eq!((state(world, 3), state(world, 4)), (json!("ok"), json!("ok")));
    for bundle in [one, two, left, right] {
        bundle.down();
    }
    world.assert_empty();
}

#[test]
fn a_stream_of_errors_that_never_stops_hides_no_other_gpus_fault() {
    if skip_unless_root() {
        return;
    }
    let host = serving();
    let world = &host.world;
    let root = world.driver_root.clone().expect("simulated");
    let (noisy, sick) = (world.bundle("noisy", &share("3"), HOLD), world.bundle("sick", &share("5"), HOLD));
    noisy.up();
    sick.up();
    // One as the driver writes it, and then the same without end, beside as many of NVML's events.
    world.report_xid(3, 31, Some(noisy.pid()), "Ch 00000008");
    let files = [root.join("dev/kmsg"), root.join("sim/events")];
    let last = |file: &PathBuf| {
        let text = std::fs::read_to_string(file).expect("it is there");
        text.lines().last().expect("a line").to_owned()
    };
    let lines = files.clone().map(|file| last(&file));
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Relaxed) {
                for (file, line) in files.iter().zip(&lines) {
                    let mut file = File::options().append(true).open(file).expect("it is there");
                    file.write_all(format!("{line}\n").repeat(100).as_bytes()).expect("written");
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        world.report_xid(5, 79, None, "GPU has fallen off the bus.");
        let is_seen = eventually(|| state(world, 5) == "unhealthy");
        ended.store(true, Relaxed);
        assert!(is_seen, "{}", said(world, &["status"]));
    });
    let errors = events(world, "gpu-error");
    assert!(errors.len() <= 2 && errors.iter().all(|(container, _)| container == "noisy"), "{errors:?}");
    assert_eq!(state(world, 3), json!("ok"));
    noisy.down();
    sick.down();
    world.assert_empty();
}

#[test]
fn a_user_sees_the_errors_of_their_own_containers() {
    if skip_unless_root() {
        return;
    }
    let host = two_users::serving("h200");
    let alices = host.bundle(ALICE, "alices", QUARTER, HOLD);
    alices.up();
    let seen = |uid| {
        let mut command = host.command(uid, "sublet");
        let output = command.args(["events", "--filter", "kind=gpu-error"]).output().expect("it runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    host.world.report_xid(0, 31, Some(alices.pid()), "Ch 00000008");
    let error = format!(" Xid 31 on GPU 0, process {} (", alices.pid());
    assert!(eventually(|| seen(ALICE).contains(&error)), "{}", seen(ALICE));
    assert!(seen(ALICE).contains(" alices on "), "{}", seen(ALICE));
    assert_eq!(seen(BOB), "");
    alices.down();
    host.world.assert_empty();
}

#[test]
fn any_other_error_makes_a_gpu_unhealthy_and_the_others_serve_on() {
    if skip_unless_root() {
        return;
    }
    let host = serving();
    let world = &host.world;
    let (sick, well) = (world.bundle("sick", &share("3"), HOLD), world.bundle("well", &share("1"), HOLD));
    sick.up();
    well.up();
    for (xid, meaning) in
        [(95, "an uncorrectable memory error"), (4242, "an error that this version does not know")]
    {
        world.report_xid(3, xid, None, "Uncontained error");
        assert!(eventually(|| state(world, 3) == "unhealthy"), "{xid}");
        let status = world.status();
        let reason = status["devices"][3]["health"]["reason"].as_str().expect("a reason").to_owned();
        assert!(reason.starts_with(&format!("Xid {xid}: {meaning}")), "{reason}");
        assert!(reason.contains(", at 2") && reason.contains("; fix: "), "{reason}");
        let lease =
            status["leases"].as_array().expect("leases").iter().find(|lease| lease["container_id"] == "sick");
        assert_eq!(lease.map(|lease| &lease["state"]), Some(&json!("active")), "it goes on");
        let why = world.bundle("late", &share("3"), HOLD).refused();
        assert!(why.contains(&format!("GPU 3 is left out: Xid {xid}")), "{why}");
        let other = world.bundle("other", &share("1"), HOLD);
        other.up();
        other.down();
        let warnings = events(world, "warned");
        assert!(
            warnings
                .iter()
                .any(|(container, text)| container == "sick" && text.contains(&format!("Xid {xid}"))),
            "{warnings:?}"
        );
        assert!(!warnings.iter().any(|(container, _)| container == "well"), "{warnings:?}");
        let doctor = said(world, &["doctor", "--quick"]);
        let rows: Vec<&str> =
            doctor.lines().filter(|line| line.contains("GPU ") && line.contains("NVIDIA H200")).collect();
        assert_eq!(rows.len(), 7, "{doctor}");
        let metrics = said(world, &["metrics"]);
        let row = metrics.lines().find(|line| line.starts_with("sublet_gpu_healthy{gpu=\"3\""));
        assert!(row.is_some_and(|row| row.ends_with(" 0")), "{xid}: {row:?}");
        assert!(said(world, &["top", "--once"]).contains("UNHEALTHY"), "{xid}");
        // A refresh does not forget it, nor does the service.
        assert!(world.sublet(&["refresh"]).status.success());
        assert_eq!(state(world, 3), json!("unhealthy"));
        let (done, error) = undrain_healthy(world);
        assert!(done, "{error}");
        assert_eq!(state(world, 3), json!("ok"), "{xid}");
    }
    assert_eq!((events(world, "gpu-lost").len(), events(world, "gpu-back").len()), (2, 2));
    sick.down();
    well.down();
    world.assert_empty();
}

/// NVML registers no events of one GPU, and the kernel's log cannot be read.
#[test]
fn one_gpu_without_events_hides_no_other_gpus_fault() {
    if skip_unless_root() {
        return;
    }
    let mut host = two_users::host("h200x8");
    let root = host.world.driver_root.clone().expect("simulated");
    std::fs::remove_file(root.join("dev/kmsg")).expect("removed");
    std::fs::write(root.join("sim/fail"), "nvmlDeviceRegisterEvents@0 0 999\n").expect("written");
    host.start();
    let world = &host.world;
    let (mute, sick) = (world.bundle("mute", &share("0"), HOLD), world.bundle("sick", &share("3"), HOLD));
    mute.up();
    sick.up();
    let told =
        || events(world, "warned").iter().filter(|(_, text)| text.contains("no error of GPU 0")).count();
    assert!(eventually(|| told() == 1), "{:?}", events(world, "warned"));
    let is_seen = || {
        world.report_xid(3, 95, None, "Uncontained error");
        state(world, 3) == "unhealthy"
    };
    assert!(eventually(is_seen), "{}", said(world, &["status"]));
    assert_eq!((told(), state(world, 0)), (1, json!("ok")));
    mute.down();
    sick.down();
    world.assert_empty();
}

fn undrain_healthy(world: &World) -> (bool, String) {
    run(world, &["undrain", "3", "--healthy"])
}

#[test]
fn a_gpu_that_asks_for_a_reset_is_well_after_it() {
    if skip_unless_root() {
        return;
    }
    let host = serving();
    let world = &host.world;
    let root = world.driver_root.clone().expect("simulated");
    let bundle = world.bundle("one", &share("3"), HOLD);
    bundle.up();
    // Too hot: it is served, with a warning.
    std::fs::write(root.join("sim/health"), "3 slow 64\n").expect("written");
    assert!(
        eventually(|| said(world, &["status"]).contains("GPU 3: it is slowed down")),
        "{}",
        said(world, &["status"])
    );
    assert_eq!(state(world, 3), json!("ok"));
    std::fs::write(root.join("sim/health"), "3 230 1\n").expect("written");
    assert!(eventually(|| state(world, 3) == "unhealthy"));
    bundle.down();
    reset(world);
    assert!(eventually(|| state(world, 3) == "ok"), "{}", said(world, &["status"]));
    let again = world.bundle("again", &share("3"), HOLD);
    again.up();
    again.down();
    world.assert_empty();
}

#[test]
fn what_a_gpu_tells_is_a_warning_or_keeps_leases_away() {
    if skip_unless_root() {
        return;
    }
    let host = serving();
    let world = &host.world;
    let root = world.driver_root.clone().expect("simulated");
    let tell = |text: &str| std::fs::write(root.join("sim/health"), text).expect("written");
    let bundle = world.bundle("one", &share("3"), HOLD);
    bundle.up();
    // It is asked at once. Errors that were before are none.
    tell("3 slow 64\n");
    assert!(eventually(
        || said(world, &["status"]).contains("GPU 3: it is slowed down, because it is too hot")
    ));
    tell("3 slow 128\n3 163/17 5\n3 fabric 2\n");
    let warnings = [
        "GPU 3: it is slowed down by the host's power supply",
        "GPU 3: its NVLinks have errors",
        "GPU 3: it has not joined its NVLink fabric yet",
    ];
    let has_all = |status: &str| warnings.iter().all(|warning| status.contains(warning));
    assert!(eventually(|| has_all(&said(world, &["status"]))), "{}", said(world, &["status"]));
    assert_eq!(state(world, 3), json!("ok"));
    let doctor = said(world, &["doctor", "--quick"]).to_lowercase();
    let row = doctor.lines().find(|row| row.contains("gpu 3: ")).unwrap_or_default();
    for part in ["by the host's power supply", "it has not joined its nvlink fabric yet"] {
        assert!(row.starts_with("warn") && row.contains(part), "{doctor}");
    }
    // This host does not see the switches.
    let doctor = said(world, &["doctor"]);
    assert!(doctor.contains("GPU 3 has not joined its NVLink fabric yet: CUDA ends with"), "{doctor}");
    let has = |reason: &str| {
        let health = world.status()["devices"][3]["health"].clone();
        health["state"] == "unhealthy" && health["reason"].as_str().is_some_and(|why| why.contains(reason))
    };
    for (file, text, reason) in [
        ("sim/health", "3 145 1\n", "a faulty row of its memory cannot be replaced"),
        ("sim/health", "3 fabric 3\n3 fabric-status 1\n", "it could not join its NVLink fabric"),
        ("sim/events", "3 0\n", "Xid 48: an uncorrectable memory error"),
    ] {
        // Told again: while the service opens NVML anew, an event is lost that the kernel's log does not have.
        let mut last = None::<Instant>;
        let is_told = || {
            if last.is_none_or(|at| at.elapsed() > Duration::from_secs(15)) {
                let opened = File::options().append(true).create(true).open(root.join(file));
                opened.expect("it is there").write_all(text.as_bytes()).expect("written");
                last = Some(Instant::now());
            }
            has(reason)
        };
        assert!(eventually(is_told), "{reason}: {}", said(world, &["status"]));
        tell("");
        assert!(undrain_healthy(world).0);
        assert_eq!(state(world, 3), json!("ok"));
    }
    tell("3 144 1\n");
    let reason = "a faulty row of its memory is replaced at a reset";
    assert!(eventually(|| has(reason)), "{}", said(world, &["status"]));
    bundle.down();
    reset(world);
    assert!(eventually(|| state(world, 3) == "ok"), "{}", said(world, &["status"]));
    world.assert_empty();
}

/// As at a boot, or after the service did not run for a while.
#[test]
fn a_fault_that_was_there_before_the_service_keeps_the_first_container_away() {
    if skip_unless_root() {
        return;
    }
    let mut host = two_users::host("h200x8");
    let root = host.world.driver_root.clone().expect("simulated");
    let tell = |text: &str| std::fs::write(root.join("sim/health"), text).expect("written");
    assert!(host.world.sublet(&["refresh"]).status.success());
    tell("3 145 1\n");
    host.start();
    // It answers when it has looked.
    let asked = host.command(ALICE, "sublet").arg("status").output().expect("it runs");
    assert!(asked.status.success(), "{asked:?}");
    let world = &host.world;
    assert_eq!(state(world, 3), json!("unhealthy"), "{}", said(world, &["status"]));
    let late = world.bundle("late", &share("3"), HOLD).create();
    assert!(!late.ok && late.stderr.contains("a faulty row of its memory cannot be replaced"), "{late:?}");
    let all = world.bundle("all", &share("any:7"), HOLD);
    all.up();
    let sick = world.status()["devices"][3]["uuid"].clone();
    let leases = world.leases();
    assert!(leases.len() == 7 && leases.iter().all(|lease| lease["device"] != sick), "{leases:?}");
    all.down();
    drop(all);
    tell("");
    assert!(undrain_healthy(world).0);
    assert_eq!(state(world, 3), json!("ok"));
    host.stop();
    // The driver asks for a reset.
    tell("3 144 1\n");
    host.start();
    let world = &host.world;
    assert!(eventually(|| state(world, 3) == "unhealthy"), "{}", said(world, &["status"]));
    reset(world);
    assert!(eventually(|| state(world, 3) == "ok"), "{}", said(world, &["status"]));
    host.stop();
    // NVML cannot be opened when the service starts: it is asked later.
    tell("3 145 1\n");
    let fail = root.join("sim/fail");
    std::fs::write(&fail, "nvmlInit_v2 0 999\n").expect("written");
    host.start();
    let world = &host.world;
    assert!(world.sublet(&["status"]).status.success());
    std::fs::remove_file(&fail).expect("removed");
    assert!(eventually(|| state(world, 3) == "unhealthy"), "{}", said(world, &["status"]));
    host.stop();
    // A driver that hangs keeps the service from starting for a time only.
    std::fs::write(&fail, "nvmlDeviceGetFieldValues@0 0 hang\n").expect("written");
    host.start();
    let world = &host.world;
    assert!(world.sublet(&["status"]).status.success());
    world.assert_empty();
}

fn reset(world: &World) {
    let smi = world.driver_root.as_ref().expect("simulated").join("usr/bin/nvidia-smi");
    let reset = Command::new(smi).args(["-i", "3", "--gpu-reset"]).output().expect("it runs");
    assert!(reset.status.success(), "{reset:?}");
}

/// What a reboot leaves of the state directory.
fn reboot(world: &World) {
    for entry in std::fs::read_dir(world.state_dir()).expect("a directory").flatten() {
        if entry.file_name() != "lasting" {
            let path = entry.path();
            let done =
                if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
            done.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        }
    }
}

#[test]
fn a_drain_outlives_a_reboot_with_its_reason() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "[[device]]\nmatch = 7\nuse = \"none\"\n");
    let long = format!("fan \u{1b}[2J {}", "x".repeat(4096));
    assert_eq!(run(&world, &["drain", "3", "--reason", &long, "--until", "2h"]), (true, String::new()));
    assert!(run(&world, &["drain", "3", "--until", "2020-01-01"]).1.contains("2020-01-01 has passed"));
    for _ in 0..2 {
        let why = world.bundle("late", &share("3"), HOLD).refused();
        assert!(why.contains("GPU 3 is drained; why: by ") && why.contains(": fan \\u{1b}[2J xxx"), "{why}");
        let status = said(&world, &["status"]);
        assert!(status.contains("GPU 3 is drained by ") && !status.contains('\u{1b}'), "{status}");
        // The first command after a boot is a start.
        reboot(&world);
    }
    let kept = world.bundle("kept", &share("7"), HOLD).refused();
    assert!(kept.contains("GPU 7 is kept from containers; why: [[device]] use = \"none\""), "{kept}");
    let other = world.bundle("other", &share("1"), HOLD);
    other.up();
    other.down();
    assert!(world.sublet(&["undrain", "3"]).status.success());
    reboot(&world);
    assert_eq!(run(&world, &["drain", "3", "--until", "1s"]), (true, String::new()));
    assert!(eventually(|| world.status()["devices"][3]["drained"] == json!(false)), "it ends by itself");
    reboot(&world);
    let open = world.bundle("open", &share("3"), HOLD);
    open.up();
    open.down();
    world.assert_empty();
}

#[test]
fn who_logged_in_is_who_drained() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let login = "echo 4321 >/proc/self/loginuid || exit 77; exec \"$@\"";
    let mut command = Command::new("/bin/sh");
    command.args(["-c", login, "sh"]).arg(bin_dir().join("sublet")).args(["drain", "0"]);
    let drained = command.env("SUBLET_CONFIG", &world.config).output().expect("sh runs");
    if drained.status.code() == Some(77) {
        eprintln!("skipped: {}", String::from_utf8_lossy(&drained.stderr));
        return;
    }
    assert!(drained.status.success(), "{drained:?}");
    let status = said(&world, &["status"]);
    assert!(status.contains("GPU 0 is drained by 4321 since "), "{status}");
    world.assert_empty();
}

#[test]
fn a_file_of_faults_that_cannot_be_read_means_unhealthy() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    assert_eq!(state(&world, 0), json!("ok"));
    std::fs::write(world.state_dir().join("health.json"), "{").expect("written");
    assert!(world.sublet(&["refresh"]).status.success());
    for gpu in 0..8 {
        assert_eq!(state(&world, gpu), json!("unhealthy"));
    }
    let why = world.bundle("late", &share("3"), HOLD).refused();
    assert!(why.contains("GPU 3 is left out: ") && why.contains("health.json cannot be read"), "{why}");
    let (done, error) = run(&world, &["undrain", "all", "--healthy"]);
    assert!(done, "{error}");
    assert!(world.state_dir().join("health.json.aside").exists());
    let open = world.bundle("open", &share("3"), HOLD);
    open.up();
    open.down();
    world.assert_empty();
}

#[test]
fn a_file_of_drains_that_cannot_be_read_means_drained() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    assert!(world.sublet(&["drain", "0"]).status.success());
    let file = world.state_dir().join("lasting/drains.json");
    for garbage in ["", "[]", "{\"schema\":\"sublet.drains/9\",\"drains\":[]}"] {
        reboot(&world);
        std::fs::write(&file, garbage).expect("written");
        let why = world.bundle("late", &share("0"), HOLD).refused();
        assert!(why.contains("is drained; why: ") && why.contains("drains.json cannot be read"), "{why}");
    }
    assert_eq!(run(&world, &["undrain", "all"]), (true, String::new()));
    let open = world.bundle("open", &share("0"), HOLD);
    open.up();
    open.down();
    // A full or broken disk: nothing is changed, and it is said.
    std::fs::remove_dir_all(world.state_dir().join("lasting")).expect("removed");
    std::fs::write(world.state_dir().join("lasting"), "no directory").expect("written");
    let (done, error) = run(&world, &["drain", "0"]);
    assert!(!done && error.contains("nothing was changed") && error.contains("drains.json"), "{error}");
    assert_eq!(world.status()["devices"][0]["drained"], json!(false));
    world.assert_empty();
}
