//! `sublet` in a shell: its output, output formats and exit codes.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};
use sublet_e2e::user::Host;
use sublet_e2e::{World, bin_dir, eventually, in_one_line, skip_unless_root};

const SLEEP: &[&str] = &["/bin/sleep", "120"];
const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const GPU: &str = "GPU-5b1e7000-0000-4000-8000-000000000100";

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Standard output of a command that succeeds.
fn stdout(world: &World, arguments: &[&str]) -> String {
    let output = world.sublet(arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// The one message of a command that fails with exit code 1.
fn failure(world: &World, arguments: &[&str]) -> String {
    one_line(&world.sublet(arguments), arguments)
}

fn one_line(output: &Output, arguments: &[&str]) -> String {
    let stderr = in_one_line(&text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{arguments:?}: {stderr}");
    stderr
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

#[test]
fn status_as_json_is_the_documented_schema() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let empty = world.status();
    assert_eq!(
        keys(&empty),
        ["schema", "time", "driver", "devices", "leases", "mps", "guard", "mig_made", "waiting", "warnings"]
    );
    assert_eq!((&empty["leases"], &empty["mps"]), (&json!([]), &json!([])));
    assert_eq!(empty["devices"][0]["mode"], "idle");
    let bundle = world.bundle("shown", &[("sublet.sm", "25"), ("sublet.memory", "8GiB")], HOLD);
    bundle.up();
    bundle.event("info");
    let mut status = world.status();
    let lease = &status["leases"][0];
    let (id, since) = (lease["id"].as_str().expect("id"), lease["since"].as_str().expect("since"));
    assert!(id.len() == 16 && id.bytes().all(|byte| b"0123456789abcdef".contains(&byte)), "{id}");
    assert!(since.len() == 20 && since.ends_with('Z') && since.contains('T'), "{since}");
    status["leases"][0]["id"] = json!("ID");
    status["leases"][0]["since"] = json!("SINCE");
    assert!(status["mps"][0]["pid"].as_i64().is_some_and(|pid| pid > 1));
    status["mps"][0]["pid"] = json!(0);
    // 143771 MiB less 512 MiB in reserve, 8 GiB and the server's 66 MiB; NVML's own account is narrower.
    let free = status["devices"][0]["free"]["memory_bytes"].take();
    let time = status["time"].take();
    assert!(time.as_str().is_some_and(|time| time.len() == 20 && time.ends_with('Z')), "{time}");
    let outside = status["warnings"].take();
    assert!(outside[0].as_str().is_some_and(|line| line.starts_with("GUARD OFF: ")), "{outside}");
    assert!(free.as_u64().is_some_and(|free| free <= 135_001 << 20 && free > 130_000 << 20), "{free}");
    let used = status["devices"][0]["used"]["memory_bytes"].clone();
    let own = status["leases"][0]["used"]["memory_bytes"].clone();
    assert!(
        used.as_u64().zip(own.as_u64()).is_some_and(|(used, own)| own > 100 << 20 && used > own),
        "{used} {own}"
    );
    assert_eq!(
        status,
        json!({"schema": "sublet.status/1", "time": null, "warnings": null,
            "driver": {"version": "580.159.04", "simulated": true},
            "devices": [{"uuid": GPU, "index": 0, "minor": 0, "bus_id": "0000:3b:00.0", "name": "NVIDIA H200",
                "mode": "mps", "health": {"state": "ok", "reason": null}, "memory_bytes": 150_754_820_096_u64,
                "memory_of_host": false, "sm_count": 132,
                "free": {"sm_percent": 75.0, "memory_bytes": null},
                // 8 GiB, and 66 MiB of the server's.
                "booked": {"sm_percent": 25.0, "memory_bytes": 8_659_140_608_u64},
                "used": {"memory_bytes": used, "busy_percent": 100, "sm_percent": null, "occupancy_percent": null,
                    "tensor_percent": null, "dram_percent": null, "pcie_bytes_per_second": [null, null],
                    "nvlink_bytes_per_second": [null, null], "power_watts": 387.5, "power_limit_watts": 700.0,
                    "temperature_celsius": 61, "outside": []},
                "unknown": null, "lease_count": 1, "mig_enabled": false, "mig": [], "drained": false, "drain": null}],
            "leases": [{"id": "ID", "container_id": "shown", "device": GPU, "mode": "mps",
                "isolation": "shared", "sm_percent": 25.0, "memory_bytes": 8_589_934_592_u64,
                "state": "active", "suspended_bytes": null, "pid": bundle.pid(), "since": "SINCE", "engine": null,
                "name": null, "image": null, "part_of": null, "unit": null, "user": "root", "owner": null, "job": null,
                "used": {"memory_bytes": own, "processes": 1, "sm_percent": null, "server_sm_percent": 100},
                "own_server": false, "daemon": GPU}],
            "mps": [{"devices": [GPU], "lease": null, "pid": 0, "state": "serving", "clients": 1,
                "key": GPU, "ceiling_percent": 25.0, "ceiling_memory_bytes": 8_589_934_592_u64,
                "idle_seconds": null, "ends_in_seconds": null}],
            "guard": {"watching": false, "last_look_seconds": null, "blind": [], "events": []},
            "mig_made": [], "waiting": []})
    );
    bundle.down();
    world.assert_empty();
}

#[test]
fn mig_devices_are_shown_and_have_the_documented_keys() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("a100x2-mig", "");
    let status = world.status();
    let device = &status["devices"][0];
    assert_eq!((&device["mode"], &device["mig_enabled"]), (&json!("mig"), &json!(true)));
    let mut first = device["mig"][0].clone();
    let used = first["used"].take();
    assert_eq!((&used["busy_percent"], &used["outside"]), (&json!(null), &json!([])), "{used}");
    assert_eq!(
        first,
        json!({"uuid": "MIG-5b1e7000-0000-5000-8000-000000000a01", "profile": "4g.20gb", "gi": 2, "ci": 0,
            "free": true, "number": "0:0", "mode": "idle", "memory_bytes": 21_072_183_296_u64,
            "sm_percent_free": 100.0, "memory_bytes_free": 20_535_312_384_u64, "drained": false, "drain": null, "fault": null,
            "dynamic": false, "sm_count": 56, "booked": {"sm_percent": 0.0, "memory_bytes": 0}, "used": null,
            "unknown": null, "lease_count": 0, "shares_memory_with": []})
    );
    assert_eq!(device["mig"].as_array().map(Vec::len), Some(4));
}

/// Whole lines, with runs of spaces as one, and what differs from run to run named. A pid is replaced only where it is a
/// whole word: it may also be a part of a UUID.
fn squeezed(table: &str, replace: &[(&str, &str)]) -> String {
    let lines = table.lines().map(|line| {
        let words = line.split_whitespace();
        let named =
            words.map(|word| replace.iter().find(|(from, _)| *from == word).map_or(word, |(_, to)| to));
        named.collect::<Vec<_>>().join(" ")
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn status_as_tables() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    assert_eq!(
        squeezed(&stdout(&world, &["status"]), &[]),
        "GUARD OFF: programs that tamper with their MPS limits are not stopped; run `systemctl enable --now \
         sublet.service`\n\nDriver 580.159.04 SIMULATED\n\nGPU NAME MODE MEMORY USED OF SM BUSY BOOKED \
         LEASES\n0 NVIDIA H200 idle ·········· 0 MiB 140.4 GiB ·········· 0 % 0 % SM, 0 MiB 0\n\nNo leases."
    );
    let bundle = world.bundle("a-container-with-a-long-name", &[("sublet.sm", "12.5")], SLEEP);
    bundle.up();
    let status = world.status();
    let (id, pid) = (status["leases"][0]["id"].clone(), bundle.pid().to_string());
    let daemon = status["mps"][0]["pid"].to_string();
    // However busy the machine is.
    let since: Vec<String> = (0..60).map(|seconds| format!("{seconds}s")).collect();
    let mut replace = vec![(id.as_str().expect("an id"), "LEASE"), (&pid, "PID"), (&daemon, "DAEMON")];
    replace.extend(since.iter().map(|since| (since.as_str(), "AGO")));
    assert_eq!(
        squeezed(&stdout(&world, &["status"]), &replace),
        "GUARD OFF: programs that tamper with their MPS limits are not stopped; run `systemctl enable --now \
         sublet.service`\n\nDriver 580.159.04 SIMULATED\n\nGPU NAME MODE MEMORY USED OF SM BUSY BOOKED \
         LEASES\n0 NVIDIA H200 mps █········· 66 MiB 140.4 GiB ▒········· 0 % 12.5 % SM, 66 MiB 1\n\nCONTAINER \
         IMAGE USER GPU MODE SM BUSY MEMORY PROCESSES STATE PID AGE LEASE\na-container-with-a-long-name - root 0 mps \
         12.5 % 0 % 0 MiB / no limit 0 active PID AGO LEASE\n\nMPS DAEMON GPU STATE PID SM CEILING MEMORY CEILING \
         CLIENTS\nGPU-5b1e7000-0000-4000-8000-000000000100 0 serving DAEMON 12.5 % unlimited 0"
    );
    let in_columns = |arguments: &[&str], columns: &str| {
        let output = world.command("sublet").args(arguments).env("COLUMNS", columns).output();
        text(&output.expect("sublet runs").stdout)
    };
    for arguments in
        [&["status"][..], &["events"], &["doctor", "--quick"], &["explain", "sm=25"], &["--help"]]
    {
        let narrow = in_columns(arguments, "80");
        assert!(narrow.lines().all(|line| line.chars().count() <= 80), "{arguments:?}: {narrow}");
    }
    let events = in_columns(&["events", "--format", "json"], "20");
    assert!(events.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()), "{events}");
    bundle.down();
    assert_eq!(stdout(&world, &["lease", "list"]), "No leases.\n");
    assert_eq!(stdout(&world, &["mps", "list"]), "No MPS daemons.\n");
}

#[test]
fn wait_ends_when_there_is_room_or_no_time() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    assert_eq!(stdout(&world, &["wait"]), "");
    let holder = world.bundle("holder", &[("sublet.mode", "exclusive")], SLEEP);
    holder.up();
    let wanted = ["wait", "--annotation", "sublet.sm=25", "--timeout", "300ms"];
    let late = failure(&world, &wanted);
    assert!(late.contains("is taken whole") && late.contains("holder"), "{late}");
    assert_eq!(late.lines().count(), 1, "nothing is told but to a terminal: {late}");
    let mut on_terminal = std::process::Command::new("script");
    let line = format!("{} wait sm=25 --timeout 1500ms", bin_dir().join("sublet").display());
    on_terminal.args(["-qec", &line, "/dev/null"]).env("SUBLET_CONFIG", &world.config);
    let told = text(&on_terminal.output().expect("script runs").stdout);
    assert!(
        told.starts_with(
            "sublet: waiting for up to 2s: place 1: no room for mps, 25 % SM: GPU 0 is taken whole"
        ),
        "{told}"
    );
    let never = failure(&world, &["wait", "gpu=9"]);
    assert!(
        never.contains("no GPU of this host is number 9"),
        "what no waiting changes ends at once: {never}"
    );
    std::thread::scope(|scope| {
        let waiting =
            scope.spawn(|| world.sublet(&["wait", "--annotation", "sublet.sm=25", "--timeout", "10s"]));
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert!(!waiting.is_finished(), "it waits");
        holder.down();
        let ended = waiting.join().expect("no panic");
        assert!(ended.status.success(), "{ended:?}");
    });
    world.assert_empty();
}

#[test]
fn leases_are_listed_and_released() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("tenant", &[("sublet.sm", "25")], SLEEP);
    bundle.up();
    let listed: Value =
        serde_json::from_str(&stdout(&world, &["lease", "list", "--format", "json"])).expect("JSON");
    assert_eq!(listed, world.status()["leases"]);
    let id = listed[0]["id"].as_str().expect("an id").to_owned();
    assert!(stdout(&world, &["lease", "list"]).contains(&id));
    for named in [id.as_str(), &id[..8], "tenant", "ten"] {
        let kept = failure(&world, &["lease", "release", named]).replace(&id, "LEASE");
        let kept = kept.replace(&bundle.pid().to_string(), "PID");
        assert_eq!(
            kept,
            "sublet: lease LEASE is held by container tenant: its process PID runs; end the container, or use \
             --force if it has ended",
            "{named}"
        );
    }
    assert_eq!(
        failure(&world, &["lease", "release", "0123456789abcdef"]),
        "sublet: no container with a lease is called 0123456789abcdef: `sublet lease list` shows names and ids"
    );
    assert_eq!(
        failure(&world, &["lease", "release", "../x\u{1b}[2J"]),
        "sublet: no container with a lease is called ../x\\u{1b}[2J: `sublet lease list` shows names and ids"
    );
    assert_eq!(world.leases().len(), 1);
    assert_eq!(stdout(&world, &["lease", "release", "--force", &id]), format!("Lease {id} released.\n"));
    assert_eq!(world.leases(), Vec::<Value>::new());
    bundle.down();
    world.assert_empty();
}

#[test]
fn a_drained_device_takes_no_new_lease() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let running = world.bundle("running", &[("sublet.sm", "25")], HOLD);
    running.up();
    assert_eq!(
        stdout(&world, &["drain", "0"]),
        format!("{GPU} takes no new lease; its containers go on running.\n")
    );
    assert_eq!(world.status()["devices"][0]["drained"], json!(true));
    let late = world.bundle("late", &[("sublet.sm", "25")], SLEEP);
    let (why, fix) = (late.refused(), "fix: `sublet undrain 0` ends that (root)");
    assert!(why.starts_with("cannot serve mps, 25 % SM: GPU 0 is drained; why: by "), "{why}");
    assert!(why.ends_with(fix), "{why}");
    assert_eq!(running.exec(&["/usr/bin/cuda-probe", "info"]).json()[0]["sm"], json!(32), "it goes on");
    assert_eq!(stdout(&world, &["undrain", GPU]), format!("{GPU} takes leases again.\n"));
    late.up();
    assert_eq!(
        failure(&world, &["drain", "9"]),
        "sublet: there is no device 9: `sublet status` lists the devices"
    );
    late.down();
    running.down();
    world.assert_empty();
}

#[test]
fn mps_daemons_by_hand() {
    if skip_unless_root() {
        return;
    }
    let mut host = Host::new("h200", "", Path::new(env!("CARGO_BIN_EXE_speak")));
    host.start();
    let world = &host.world;
    assert_eq!(
        failure(world, &["mps", "start", GPU]),
        format!("sublet: no lease needs an MPS daemon {GPU}: it starts with its first container")
    );
    // An unknown key leaves nothing behind.
    assert_eq!(
        failure(world, &["mps", "start", "0"]),
        format!("sublet: no lease needs an MPS daemon {GPU}: it starts with its first container")
    );
    let known = std::fs::read_dir(world.state_dir().join("mps")).into_iter().flatten().flatten();
    assert_eq!(known.map(|entry| entry.file_name()).collect::<Vec<_>>(), Vec::<std::ffi::OsString>::new());
    for unknown in ["9", "anything", "0123456789abcdef"] {
        assert_eq!(
            failure(world, &["mps", "stop", unknown]),
            format!("sublet: there is no MPS daemon {unknown}; fix: `sublet mps list` shows the keys")
        );
    }
    let _ = stdout(world, &["refresh", "--quiet"]);
    assert_eq!(stdout(world, &["mps", "stop", GPU]), "", "a device's that does not run is no error");
    assert_eq!(
        failure(world, &["mps", "logs", "../../etc\u{1b}"]),
        "sublet: there is no MPS daemon ../../etc\\u{1b}; fix: `sublet mps list` shows the keys"
    );
    let bundle = world.bundle("client", &[("sublet.sm", "25")], HOLD);
    bundle.up();
    bundle.event("info");
    let listed: Value =
        serde_json::from_str(&stdout(world, &["mps", "list", "--format", "json"])).expect("JSON");
    assert_eq!(listed, world.status()["mps"]);
    assert!(stdout(world, &["mps", "list"]).contains("serving"));
    assert_eq!(
        failure(world, &["mps", "stop", GPU]),
        format!("sublet: the MPS daemon {GPU} serves 1 lease(s); fix: end their containers, or use --force")
    );
    for named in [GPU, "0", "client"] {
        assert!(stdout(world, &["mps", "logs", named]).starts_with("== "), "{named}");
    }
    bundle.down();
    assert_eq!(world.status()["mps"][0]["state"], "serving", "it waits for the next lease");
    let _ = stdout(world, &["mps", "stop", GPU]);
    assert!(eventually(|| world.daemons().is_empty()));
    assert_eq!(stdout(world, &["mps", "stop", GPU]), "", "one that is stopped already is no error");
    world.assert_empty();
}

#[test]
fn the_state_directory_is_open_to_others_whatever_the_umask() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let _ = std::fs::remove_dir_all(world.state_dir());
    let mut refresh = std::process::Command::new("/bin/sh");
    refresh.args(["-c", "umask 077; exec \"$0\" refresh --quiet"]).arg(bin_dir().join("sublet"));
    assert!(refresh.env("SUBLET_CONFIG", &world.config).status().expect("sh").success());
    let mode = |path: &str| std::fs::metadata(world.state_dir().join(path)).expect("there").mode() & 0o7777;
    assert_eq!((mode("."), mode("inventory.json"), mode("refresh.lock")), (0o755, 0o644, 0o600));
    world.assert_empty();
}

#[test]
fn configuration_is_checked_and_shown() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "[limits]\nsm_overcommit = 1.5\n");
    let path = world.config.display().to_string();
    assert_eq!(stdout(&world, &["config", "check"]), format!("{path}: ok\n"));
    let shown = stdout(&world, &["config", "show"]);
    assert!(
        shown.starts_with(&format!("# from {path}\n")) && shown.contains("sm_overcommit = 1.5"),
        "{shown}"
    );
    // What it shows is a configuration, and the same one.
    let copy = world.dir.path().join("copy.toml");
    std::fs::write(&copy, &shown).expect("written");
    let mut again = world.command("sublet");
    let again = again.env("SUBLET_CONFIG", &copy).args(["config", "show"]).output().expect("it runs");
    let again = text(&again.stdout);
    assert_eq!(again.split_once('\n').map(|(_, rest)| rest), shown.split_once('\n').map(|(_, rest)| rest));
    world.configure(
        "[mig]\nlayout = \"/nowhere/l.toml\"\n[[device]]\nmatch = 0\nname = \"a\"\n[[device]]\nmatch = 1\nname = \
         \"a\"\n[[policy]]\nuser = \"nobody-here\"\n[[policy]]\ngroup = \"no-such\"\n[[policy]]\nuser = \"root\"\n",
    );
    let first = std::fs::read_to_string(&world.config).expect("config.toml").lines().count() - 13;
    let at = |line: usize| format!("configuration {path}:{}:1: ", first + line);
    let expected = [
        format!(
            "sublet: warning: {}device.1.name: another [[device]] is called a too: sublet.gpu=name:a takes any of their devices",
            at(7)
        ),
        format!(
            "sublet: {}mig.layout: layout /nowhere/l.toml cannot be read: No such file or directory (os error 2)",
            at(1)
        ),
        format!(
            "sublet: {}policy.0.user: this host has no user nobody-here, so the rule never applies",
            at(9)
        ),
        format!(
            "sublet: {}policy.1.group: this host has no group no-such, so the rule never applies",
            at(11)
        ),
    ];
    let checked = world.sublet(&["config", "check"]);
    assert_eq!(checked.status.code(), Some(1));
    assert_eq!(text(&checked.stderr).lines().collect::<Vec<_>>(), expected);
    world.configure("[limit]\nreserve = \"1GiB\"\n");
    let line = std::fs::read_to_string(&world.config).expect("config.toml").lines().count() - 1;
    let refused = failure(&world, &["config", "check"]);
    assert!(refused.starts_with(&format!("sublet: configuration {path}:{line}:")), "{refused}");
    assert!(refused.contains("`limit`") && refused.contains("did you mean limits?"), "{refused}");
    assert_eq!(failure(&world, &["status"]), refused, "every command says the same");
}

#[test]
fn a_directory_is_checked_before_it_becomes_etc_sublet() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let etc = world.dir.path().join("staged");
    let at = etc.display().to_string();
    let checked = || {
        let mut command = world.command("sublet");
        command.env_remove("SUBLET_CONFIG").args(["config", "check", "--etc", &at]).output().expect("it runs")
    };
    assert!(text(&checked().stderr).contains(&format!("cannot read {at}: No such file")));
    std::fs::create_dir_all(etc.join("conf.d")).expect("created");
    let write = |name: &str, content: &str| std::fs::write(etc.join(name), content).expect("written");
    write("config.toml", "[share.small]\nsm = 25\nmemory = \"8GiB\"\n");
    write("conf.d/mig.toml", "[mig]\nlayout = \"/etc/sublet/mig.toml\"\n");
    let missing = text(&checked().stderr);
    assert!(missing.contains(&format!("layout {at}/mig.toml cannot be read")), "{missing}");
    write("mig.toml", "[[gpu]]\nmatch = \"0\"\nmig = false\n");
    write("containers.toml", "[[container]]\nname = \"*\"\nshare = \"large\"\n");
    let unknown = text(&checked().stderr);
    assert!(
        unknown.contains(&format!("{at}/containers.toml: the configuration has no [share.large]")),
        "{unknown}"
    );
    write("containers.toml", "[[container]]\nname = \"*\"\nshare = \"small\"\n");
    let right = checked();
    assert!(right.status.success(), "{}", text(&right.stderr));
    for name in ["config.toml", "conf.d/mig.toml", "containers.toml"] {
        assert!(text(&right.stdout).contains(&format!("{at}/{name}: ok\n")), "{}", text(&right.stdout));
    }
}

#[test]
fn exit_codes() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let code = |arguments: &[&str]| world.sublet(arguments).status.code();
    for right in [&["--help"][..], &["--version"], &["status"], &["gc"], &["status", "--help"]] {
        assert_eq!(code(right), Some(0), "{right:?}");
    }
    let bad_usage = [
        &[][..],
        &["nonsense"],
        &["status", "--format", "xml"],
        &["lease"],
        &["drain"],
        &["explain", "--annotation", "no-equals-sign"],
        &["wait", "--timeout", "soon"],
        &["lease", "release"],
    ];
    for wrong in bad_usage {
        assert_eq!(code(wrong), Some(2), "{wrong:?}");
    }
    std::fs::remove_dir_all(world.driver_root.as_ref().expect("simulated").join("proc/driver/nvidia"))
        .expect("gone");
    std::fs::remove_dir_all(world.driver_root.as_ref().expect("simulated").join("sys/module/nvidia"))
        .expect("gone");
    for failing in [&["status"][..], &["refresh"], &["drain", "0"], &["lease", "list"]] {
        let line = failure(&world, failing);
        assert!(line.starts_with("sublet: no NVIDIA driver is loaded: "), "{failing:?}: {line}");
    }
}

#[test]
fn colour_is_for_terminals_that_want_it() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let sublet = sublet_e2e::bin_dir().join("sublet");
    let on_terminal = |no_color: &str| {
        let mut script = std::process::Command::new("script");
        script.env("SUBLET_CONFIG", &world.config).env("NO_COLOR", no_color);
        script.args(["--quiet", "--command", &format!("{} status", sublet.display()), "/dev/null"]);
        script.output().map(|output| text(&output.stdout))
    };
    let Ok(coloured) = on_terminal("") else {
        println!("skipped: no script(1) to make a terminal with");
        return;
    };
    assert!(coloured.contains("\u{1b}["), "{coloured:?}");
    assert!(!on_terminal("1").expect("script ran before").contains('\u{1b}'));
    assert!(!stdout(&world, &["status"]).contains('\u{1b}'), "no terminal, no colour");
}
