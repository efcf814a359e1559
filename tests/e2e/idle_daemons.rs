//! MPS daemons that outlive their last lease while `sublet serve` runs (`[mps] idle`): how they are found again, what
//! ends them, and what they leave alone meanwhile. One H200: 143155 MiB, of which 512 are kept free, 132 SMs.

use std::path::Path;
use std::process::Output;

use nix::unistd::Pid;
use serde_json::{Value, json};
use sublet_e2e::user::Host;
use sublet_e2e::{Bundle, eventually, is_alive as lives, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const QUARTER: &[(&str, &str)] = &[("sublet.sm", "25")];
/// Leaves MPS: neither the variable nor the default place leads to a server.
const OUTSIDE: &[&str] = &["/bin/env", "CUDA_MPS_PIPE_DIRECTORY=/nowhere", "/usr/bin/cuda-probe", "info"];

/// The host, with the service not started yet.
fn host(topology: &str, extra: &str) -> Host {
    Host::new(topology, extra, Path::new(env!("CARGO_BIN_EXE_speak")))
}

fn serving(extra: &str) -> Host {
    let mut host = host("h200", extra);
    host.start();
    host
}

fn compute_mode(host: &Host) -> String {
    let program = host.world.driver_root.as_ref().expect("simulated").join("usr/bin/nvidia-smi");
    let query = ["--query-gpu=compute_mode", "--format=csv,noheader"];
    let output = std::process::Command::new(program).args(query).output().expect("nvidia-smi runs");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn ledger(host: &Host) -> Value {
    let text = std::fs::read(host.world.state_dir().join("ledger.json")).expect("ledger.json");
    serde_json::from_slice(&text).expect("JSON")
}

/// The control daemon of the ledger's first server, read without a sublet command.
fn daemon(host: &Host) -> Pid {
    let pid = ledger(host)["daemons"][0]["process"]["pid"].as_i64().expect("a daemon");
    Pid::from_raw(i32::try_from(pid).expect("a pid"))
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn share<'a>(host: &'a Host, id: &str, annotations: &[(&str, &str)]) -> Bundle<'a> {
    let bundle = host.world.bundle(id, annotations, HOLD);
    bundle.up();
    bundle
}

/// A daemon whose last lease has ended just now.
fn idle(host: &Host) -> Pid {
    let bundle = share(host, "first", QUARTER);
    assert_eq!(bundle.event("info")["mps"], json!(true));
    assert_eq!(compute_mode(host), "Exclusive_Process");
    let daemon = daemon(host);
    bundle.down();
    assert_rests(host);
    daemon
}

/// The mode does not outlive the lease. The service may have freed that before the delete did, and be at it still.
fn assert_rests(host: &Host) {
    assert!(eventually(|| compute_mode(host) == "Default"), "{}", ledger(host));
}

fn kill_serve(host: &mut Host) {
    let mut serve = host.serve.take().expect("it runs");
    serve.kill().expect("SIGKILL");
    serve.wait().expect("reaped");
}

#[test]
fn the_next_container_finds_the_daemon_of_the_last() {
    if skip_unless_root() {
        return;
    }
    let host = serving("");
    let warm = idle(&host);
    let status = host.world.status();
    assert_eq!((&status["leases"], &status["devices"][0]["mode"]), (&json!([]), &json!("idle")));
    assert_eq!(status["mps"][0]["state"], "serving");
    assert!(status["mps"][0]["ends_in_seconds"].as_u64().is_some_and(|left| left <= 60), "{status}");
    // All of it less the reserve and the server's own.
    let free = status["devices"][0]["free"]["memory_bytes"].as_u64().expect("a number");
    let total = status["devices"][0]["memory_bytes"].as_u64().expect("a number");
    assert_eq!(total - free, (512 + 66) << 20);
    let table = text(&host.world.sublet(&["status"]));
    assert!(table.contains("serving, idle, ends in "), "{table}");
    let greedy = ["/bin/env", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100", "/usr/bin/cuda-probe", "info"];
    for (sm, sms) in [("50", 66), ("25", 32)] {
        let next = share(&host, "next", &[("sublet.sm", sm)]);
        let info = next.event("info");
        assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(sms)));
        assert_eq!(next.exec(&greedy).json()[0]["sm"], json!(sms), "the server's ceiling is this lease's");
        assert_eq!((daemon(&host), compute_mode(&host).as_str()), (warm, "Exclusive_Process"));
        let refused = next.exec(OUTSIDE);
        assert_ne!(refused.json()[0]["error"], Value::Null, "{refused:?}");
        next.down();
        assert_rests(&host);
        assert!(lives(warm));
    }
    host.world.assert_empty();
}

/// If no compute mode has to be set, a sublet program is run only if the limits differ.
#[test]
fn where_the_mode_is_left_alone_the_ceiling_follows_all_the_same() {
    if skip_unless_root() {
        return;
    }
    let host = serving("[mps]\nexclusive_compute_mode = \"never\"\n");
    let first = share(&host, "first", &[("sublet.sm", "50")]);
    let warm = daemon(&host);
    first.down();
    let greedy = ["/bin/env", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100", "/usr/bin/cuda-probe", "info"];
    for (sm, sms) in [("25", 32), ("75", 98)] {
        let next = share(&host, "next", &[("sublet.sm", sm)]);
        assert_eq!((daemon(&host), compute_mode(&host).as_str()), (warm, "Default"));
        assert_eq!(next.exec(&greedy).json()[0]["sm"], json!(sms));
        next.down();
    }
    host.world.assert_empty();
}

#[test]
fn it_ends_when_its_time_is_up() {
    if skip_unless_root() {
        return;
    }
    let host = serving("[mps]\nidle = \"3s\"\n");
    let warm = idle(&host);
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert!(lives(warm));
    // Done by the service: no sublet command is run.
    assert!(eventually(|| host.world.daemons().is_empty()), "{}", ledger(&host));
    assert!(eventually(|| ledger(&host)["daemons"] == json!([])), "{}", ledger(&host));
    host.world.assert_empty();
}

#[test]
fn nobody_waits_where_nobody_would_end_it() {
    if skip_unless_root() {
        return;
    }
    let ends_at_once = |host: &Host| {
        let _ = idle(host);
        // The service may have freed the lease before the delete did, and be at it still.
        assert!(eventually(|| ledger(host)["daemons"] == json!([])), "{}", ledger(host));
        assert_eq!(host.world.daemons(), Vec::<String>::new());
    };
    ends_at_once(&host("h200", ""));
    ends_at_once(&serving("[mps]\nidle = \"0\"\n"));
    let mut stopped = serving("");
    stopped.stop();
    ends_at_once(&stopped);
}

#[test]
fn another_use_of_the_device_ends_it_before_its_container_starts() {
    if skip_unless_root() {
        return;
    }
    let host = serving("");
    let uses: [&[(&str, &str)]; 5] = [
        &[("sublet.mode", "exclusive")],
        &[("sublet.mode", "time-slice")],
        &[("sublet.mode", "time-slice"), ("sublet.memory", "4GiB")],
        &[("sublet.sm", "25"), ("sublet.isolation", "dedicated")],
        // Room that the idle server has still when the share is taken: 143155 less 512 and 66 for its own.
        &[("sublet.mode", "time-slice"), ("sublet.memory", "142577MiB")],
    ];
    for annotations in uses {
        let warm = idle(&host);
        let other = host.world.bundle("other", annotations, HOLD);
        let created = other.create();
        assert!(created.ok, "{annotations:?}: {created:?}");
        assert!(!lives(warm), "{annotations:?}");
        assert_eq!(compute_mode(&host), "Default", "{annotations:?}");
        assert!(other.start().ok);
        assert_eq!(other.event("info")["error"], Value::Null, "{annotations:?}");
        other.down();
    }
    host.world.assert_empty();
}

#[test]
fn drain_ends_it() {
    if skip_unless_root() {
        return;
    }
    let host = serving("");
    let warm = idle(&host);
    let drained = host.world.sublet(&["drain", "0"]);
    assert!(drained.status.success() && !lives(warm), "{drained:?}");
    assert!(host.world.sublet(&["undrain", "0"]).status.success());
    host.world.assert_empty();
}

#[test]
fn a_layout_ends_it() {
    if skip_unless_root() {
        return;
    }
    let host = serving("");
    let warm = idle(&host);
    let layout = host.world.dir.path().join("layout.toml");
    let content = "[[gpu]]\nmatch = \"0\"\nmig = true\ninstances = [{ profile = \"1g.18gb\", count = 2 }]\n";
    std::fs::write(&layout, content).expect("a layout");
    let file = layout.to_str().expect("UTF-8");
    let planned = host.world.sublet(&["mig", "plan", file]);
    assert!(planned.status.success() && lives(warm), "{}", text(&planned));
    let applied = host.world.sublet(&["mig", "apply", file]);
    assert!(applied.status.success() && !lives(warm), "{}", text(&applied));
    // The same on an instance, which has no compute mode.
    let on_instance = share(&host, "mps", &[("sublet.mig", "1g.18gb"), ("sublet.sm", "25")]);
    let warm = daemon(&host);
    on_instance.down();
    let again = share(&host, "mps", &[("sublet.mig", "1g.18gb"), ("sublet.sm", "25")]);
    assert_eq!(daemon(&host), warm);
    again.down();
    std::fs::write(&layout, "[[gpu]]\nmatch = \"0\"\nmig = false\n").expect("a layout");
    let applied = host.world.sublet(&["mig", "apply", file]);
    assert!(applied.status.success() && !lives(warm), "{}", text(&applied));
    host.world.assert_empty();
}

#[test]
fn it_ends_with_the_service() {
    if skip_unless_root() {
        return;
    }
    let mut host = serving("");
    let warm = idle(&host);
    host.stop();
    assert!(!lives(warm), "the end of the service is theirs");
    host.start();
    let warm = idle(&host);
    kill_serve(&mut host);
    assert!(lives(warm));
    assert!(host.world.sublet(&["gc"]).status.success());
    assert!(!lives(warm), "the next command ends it");
    host.start();
    let warm = idle(&host);
    kill_serve(&mut host);
    host.start();
    assert!(host.world.sublet(&["gc"]).status.success() && lives(warm), "the next service takes it over");
    host.world.assert_empty();
}

#[test]
fn who_leaves_without_a_word_leaves_the_mode_as_well() {
    if skip_unless_root() {
        return;
    }
    let host = serving("");
    let bundle = share(&host, "crashed", QUARTER);
    let warm = daemon(&host);
    let mut command = std::process::Command::new(host.world.engine.program());
    let deleted = command.arg("--root").arg(host.world.runtime_root()).args(["delete", "--force", "crashed"]);
    assert!(deleted.status().expect("the runtime runs").success());
    assert!(eventually(|| host.world.leases().is_empty()));
    assert_rests(&host);
    assert!(lives(warm));
    drop(bundle);
    // The state after a crash between ledger and driver: the record says that sublet set the mode.
    let mut text = ledger(&host);
    let device = text["daemons"][0]["devices"][0].clone();
    text["compute_modes"] = json!([{"device": device, "found": "DEFAULT"}]);
    let path = host.world.state_dir().join("ledger.json");
    std::fs::write(path, serde_json::to_vec(&text).expect("JSON")).expect("written");
    let smi = host.world.driver_root.as_ref().expect("simulated").join("usr/bin/nvidia-smi");
    let set = std::process::Command::new(smi).args(["-i", "0", "-c", "EXCLUSIVE_PROCESS"]).status();
    assert!(set.expect("nvidia-smi runs").success());
    assert!(host.world.sublet(&["gc"]).status.success());
    assert_eq!((lives(warm), compute_mode(&host).as_str()), (true, "Default"));
    host.world.assert_empty();
}

#[test]
fn strangers_who_came_meanwhile_are_named_and_the_server_is_none() {
    if skip_unless_root() {
        return;
    }
    for (policy, starts) in [("auto", true), ("always", false)] {
        let host = serving(&format!("[mps]\nexclusive_compute_mode = \"{policy}\"\n"));
        let warm = idle(&host);
        // The simulated server sees soon that the mode is another.
        std::thread::sleep(std::time::Duration::from_millis(300));
        let mut stranger = host.world.stranger();
        let next = host.world.bundle("next", QUARTER, HOLD);
        let created = next.create();
        assert_eq!(created.ok, starts, "{created:?}");
        assert!(created.stderr.contains(&format!("pid {}", stranger.id())), "{created:?}");
        assert!(!created.stderr.contains("nvidia-cuda-mps"), "{created:?}");
        assert_eq!((lives(warm), compute_mode(&host).as_str()), (true, "Default"));
        let _ = next.delete();
        stranger.kill().expect("SIGKILL");
        stranger.wait().expect("reaped");
        let next = share(&host, "later", QUARTER);
        assert_eq!((daemon(&host), compute_mode(&host).as_str()), (warm, "Exclusive_Process"));
        next.down();
        host.world.assert_empty();
    }
}

#[test]
fn a_driver_that_changes_no_mode_beside_a_server_gets_a_new_one() {
    if skip_unless_root() {
        return;
    }
    let host = serving("[mps]\nexclusive_compute_mode = \"always\"\n");
    let warm = idle(&host);
    let fail = host.world.driver_root.as_ref().expect("simulated").join("sim/fail");
    std::fs::write(&fail, "nvmlDeviceSetComputeMode 1 19\n").expect("written");
    let next = share(&host, "next", QUARTER);
    assert!(!lives(warm));
    assert_eq!(compute_mode(&host), "Exclusive_Process");
    // And back: without the mode there is no daemon either.
    std::fs::write(&fail, "nvmlDeviceSetComputeMode 1 19\n").expect("written");
    next.down();
    assert_rests(&host);
    assert!(eventually(|| host.world.daemons().is_empty()), "{}", ledger(&host));
    host.world.assert_empty();
}

#[test]
fn a_lost_ledger_ends_it_and_closes_nothing() {
    if skip_unless_root() {
        return;
    }
    let host = serving("");
    let path = |name: &str| host.world.state_dir().join(name);
    let lose_one = || std::fs::remove_file(path("ledger.json")).expect("removed");
    let lose_both = || {
        std::fs::write(path("ledger.json"), "garbage").expect("written");
        std::fs::write(path("ledger.json.copy"), "garbage").expect("written");
    };
    let losses: [&dyn Fn(); 2] = [&lose_one, &lose_both];
    for lose in losses {
        for annotations in [QUARTER, &[("sublet.mode", "exclusive")]] {
            let warm = idle(&host);
            lose();
            // The container is the first to notice.
            let next = share(&host, "next", annotations);
            assert!(!lives(warm), "{annotations:?}");
            assert_eq!(next.event("info")["error"], Value::Null, "{annotations:?}");
            next.down();
            assert!(host.world.sublet(&["gc"]).status.success());
            // The rebuilt ledger knows no service; the service records itself again before long.
            assert!(eventually(|| ledger(&host)["keeper"]["pid"].is_i64()), "{}", ledger(&host));
        }
    }
    host.world.assert_empty();
}
