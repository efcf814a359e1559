//! Compares the simulated MPS with measurements on a real H200 (docs/evidence). Each test is a line of them.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::rig::{H200, Rig, output_of, signal, until};
use nix::sys::signal::Signal;
use nvidia_ml::layout::contexts::Kind;
use nvidia_ml::mps::wire::Conn;
use serde_json::{Value, json};

const PERCENTAGE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";
const PINNED: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";

/// SMs, free MiB, MPS and error of the probe's first line.
fn seen(info: &Value) -> (Option<u64>, Option<u64>, bool, Option<&str>) {
    (info["sm"].as_u64(), info["free_mib"].as_u64(), info["mps"].as_bool().unwrap(), info["error"].as_str())
}

#[test]
fn a_daemon_makes_five_entries_and_leaves_control_behind() {
    let Some(rig) = Rig::new() else { return };
    assert_eq!(rig.ask_with_status("a", "ps"), ("Cannot find MPS control daemon process".into(), Some(1)));
    let started = rig.daemon("a", &["-M"]);
    assert_eq!((started.status.code(), started.stdout), (Some(0), vec![]));

    let mut names: Vec<_> =
        fs::read_dir(rig.path("a")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    let five = ["control", "control_lock", "control_privileged", "log", "nvidia-cuda-mps-control.pid"];
    assert_eq!(names, five);
    let meta = |name: &str| fs::metadata(rig.path("a").join(name)).unwrap();
    assert!(meta("control").file_type().is_socket() && meta("control_privileged").file_type().is_socket());
    assert!(meta("log").file_type().is_fifo());
    assert_eq!(meta("control").permissions().mode() & 0o777, 0o666);
    assert_eq!(meta("control_privileged").permissions().mode() & 0o777, 0o755);
    let log = fs::read_to_string(rig.path("log/control.log")).unwrap();
    assert!(log.contains("Starting control daemon using socket"), "{log}");

    let second = rig.daemon("a", &["-M"]);
    assert_eq!(second.status.code(), Some(1));
    assert_eq!(String::from_utf8(second.stdout).unwrap(), "An instance of this daemon is already running\n");

    assert_eq!(rig.ask_with_status("a", "quit"), (String::new(), Some(0)));
    assert!(rig.path("a/control").exists());
    assert_eq!(rig.ask("ps"), "Cannot find MPS control daemon process");
    assert!(rig.daemon("a", &["-M"]).status.success());
    signal(rig.daemon_pid("a"), Signal::SIGKILL);
    until("a new daemon in a dead one's directory", || rig.daemon("a", &["-M"]).status.success());
    assert_eq!(rig.ask("get_default_active_thread_percentage"), "100.0");
}

#[test]
fn a_path_longer_than_a_socket_address_is_no_daemon() {
    let Some(rig) = Rig::new() else { return };
    let long = "x".repeat(120);
    fs::create_dir(rig.path(&long)).unwrap();
    let output = rig.daemon(&long, &[]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "Cannot find MPS control daemon process\n");
}

#[test]
fn a_client_sees_its_share_of_the_sms() {
    let Some(rig) = Rig::with_daemon() else { return };
    for (share, sm) in [("25", 32), ("12.5", 16), ("10", 12), ("60", 78), ("abc", 132), ("0", 132)] {
        let info = rig.info(&[(PERCENTAGE, share)]);
        assert_eq!((info["sm"].as_u64(), info["mps"].as_bool()), (Some(sm), Some(true)), "{share}");
        assert_eq!(info["total_mib"], 143_155);
    }
}

#[test]
fn a_pinned_limit_holds_unless_one_entry_is_bad() {
    let Some(rig) = Rig::with_daemon() else { return };
    rig.ask("set_default_device_pinned_mem_limit 0 3G");
    let free = |limit: &str| rig.info(&[(PINNED, limit)])["free_mib"].as_u64().unwrap();
    // The context of 132 SMs, 514 MiB, is inside the limit.
    assert_eq!(free("0=2G"), 1534);
    assert_eq!(free(&format!("{H200}=2048M")), 1534);
    assert_eq!(rig.info(&[(PINNED, "0=2G"), (PERCENTAGE, "25")])["free_mib"], 1902);
    assert_eq!(rig.info(&[])["free_mib"], 2558);
    for bad in ["garbage", "0=2G,7=1G", "0=2G,GPU-00000000-0000-0000-0000-000000000000=1G"] {
        // The server may not have noticed yet that the last client ended.
        until(bad, || free(bad) == 142_575);
    }
    let (said, status) = rig.probe("info", &[(PINNED, "0=200M")]);
    assert_eq!((seen(&said[0]).3, status), (Some("CUDA_ERROR_OUT_OF_MEMORY"), 10));
}

#[test]
fn limits_are_for_each_process() {
    let Some(rig) = Rig::with_daemon() else { return };
    let limit = [(PINNED, "0=3G")];
    let mut first = rig.start("alloc 2500 30", &limit);
    assert_eq!(first.result(), "CUDA_SUCCESS");
    assert_eq!(rig.probe("alloc 2500", &limit).0[1]["result"], "CUDA_SUCCESS");
    let (said, status) = rig.probe("alloc 2600", &limit);
    assert_eq!((said[1]["result"].as_str(), status), (Some("CUDA_ERROR_OUT_OF_MEMORY"), 10));
}

#[test]
fn the_device_has_no_more_than_it_has() {
    let Some(rig) = Rig::with_daemon() else { return };
    let mut first = rig.start("alloc 100000 30", &[]);
    assert_eq!(first.result(), "CUDA_SUCCESS");
    // 143155 less 66 of the server, 100514 of the first client and 514 of the second client's context.
    assert_eq!(rig.info(&[])["free_mib"], 42_061);
    assert_eq!(rig.probe("alloc 42062", &[]).0[1]["result"], "CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(rig.probe("alloc 42061", &[]).0[1]["result"], "CUDA_SUCCESS");
}

#[test]
fn a_client_needs_control_alone_and_may_change_nothing_through_it() {
    let Some(rig) = Rig::with_daemon() else { return };
    fs::create_dir(rig.path("public")).unwrap();
    fs::hard_link(rig.path("a/control"), rig.path("public/control")).unwrap();
    let mut client = rig.start_as("hold 30", &[(PERCENTAGE, "25")], 0, "public");
    assert_eq!(seen(&client.info), (Some(32), Some(142_943), true, None));

    let ask = |command| rig.ask_with_status("public", command).0;
    assert_eq!(ask("get_default_active_thread_percentage"), "100.0");
    assert_eq!(ask("set_default_active_thread_percentage 10"), "Insufficient privileges");
    assert_eq!(ask("quit"), "Not enough privilege");
    assert_eq!(rig.ask("get_default_active_thread_percentage"), "100.0");
    assert!(client.is_running());
    // Another user cannot reach control_privileged either.
    let mut program = rig.program("nvidia-cuda-mps-control", "a");
    program.uid(1000);
    assert_eq!(output_of(program, "quit").stdout, b"Not enough privilege\n");

    signal(rig.daemon_pid("a"), Signal::SIGKILL);
    assert_eq!(client.result(), "CUDA_ERROR_MPS_RPC_FAILURE");
    assert!(rig.daemon("a", &["-M"]).status.success());
    assert!(!rig.start_as("info", &[], 0, "public").info["mps"].as_bool().unwrap(), "the old link is dead");
    fs::hard_link(rig.path("a/control"), rig.path("public/new")).unwrap();
    fs::rename(rig.path("public/new"), rig.path("public/control")).unwrap();
    assert!(rig.start_as("info", &[], 0, "public").info["mps"].as_bool().unwrap());
}

#[test]
fn a_client_that_reaches_no_daemon_has_the_whole_gpu() {
    let Some(rig) = Rig::new() else { return };
    let limits = [(PERCENTAGE, "25"), (PINNED, "0=2G")];
    let whole = (Some(132), Some(142_641), false, None);
    assert_eq!(seen(&rig.info(&limits)), whole, "no daemon");
    assert_eq!(seen(&rig.start_as("info", &limits, 0, "nowhere").info), whole, "wrong directory");
    assert!(rig.daemon("a", &["-M"]).status.success());
    fs::set_permissions(rig.path("a"), fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(seen(&rig.start_as("info", &limits, 1000, "a").info), whole, "may not traverse");
    assert!(rig.info(&limits)["mps"].as_bool().unwrap());
}

#[test]
fn defaults_are_for_later_servers_and_settings_for_later_clients() {
    let Some(rig) = Rig::new() else { return };
    rig.daemon("a", &["-M"]);
    rig.ask("set_default_active_thread_percentage 30");
    assert_eq!(rig.ask("get_default_active_thread_percentage"), "30.0");
    assert_eq!(rig.ask("start_server -uid 0"), "");
    let server = rig.server();
    let held = rig.start("hold 30", &[(PERCENTAGE, "60")]);
    assert_eq!(held.info["sm"], 38, "clamped to the server's");
    rig.ask("set_default_active_thread_percentage 50");
    assert_eq!(rig.info(&[])["sm"], 38);
    rig.ask(&format!("set_active_thread_percentage {server} 70"));
    assert_eq!(rig.ask(&format!("get_active_thread_percentage {server}")), "70.0");
    assert_eq!(rig.info(&[(PERCENTAGE, "60")])["sm"], 78);
    assert_eq!(rig.info(&[])["sm"], 92);

    rig.ask(&format!("set_default_device_pinned_mem_limit {H200} 2G"));
    assert_eq!(rig.ask("get_default_device_pinned_mem_limit 0"), "2G");
    assert_eq!(rig.info(&[])["free_mib"].as_u64().unwrap() / 1000, 142);
    rig.ask(&format!("set_device_pinned_mem_limit {server} 0 3G"));
    assert_eq!(rig.info(&[(PERCENTAGE, "25")])["free_mib"], 3072 - 146);
    assert_eq!(rig.server(), server, "all that with one server");
}

#[test]
fn a_servers_memory_limit_holds_clients_without_their_own_and_goes_up_down_and_away() {
    let Some(rig) = Rig::with_daemon() else { return };
    rig.ask("start_server -uid 0");
    let server = rig.server();
    let free = |env: &[(&str, &str)]| rig.info(&[&[(PERCENTAGE, "25")], env].concat())["free_mib"].clone();
    let set = |device: &str, value: &str| {
        rig.ask(&format!("set_device_pinned_mem_limit {server} {device} {value}"));
    };
    let mut running = rig.start("hold 30", &[(PERCENTAGE, "25")]);
    set("0", "8G");
    assert_eq!(running.info["free_mib"], 142_943, "for clients that connect later");
    assert_eq!(free(&[]), 8192 - 146);
    set(H200, "40G");
    assert_eq!((free(&[]), free(&[(PINNED, "0=9G")])), (json!(40_960 - 146), json!(9216 - 146)));
    set("0", "4G");
    assert_eq!(free(&[(PINNED, "0=9G")]), 4096 - 146, "a client's own is clamped");
    running.child.kill().unwrap();
    running.child.wait().unwrap();
    until("a bad entry drops the server's limit", || free(&[(PINNED, "garbage")]) == 142_943);
    set("0", "0");
    assert_eq!(free(&[]), 142_943, "lifted");
    // Defaults apply only to servers that start later.
    rig.ask("set_default_device_pinned_mem_limit 0 8G");
    assert_eq!(free(&[]), 142_943);
    rig.ask(&format!("shutdown_server {server} -f"));
    assert_eq!(free(&[]), 8192 - 146);
    rig.ask("set_default_device_pinned_mem_limit 0 0");
    assert_eq!(free(&[]), 8192 - 146);
    rig.ask(&format!("shutdown_server {} -f", rig.server()));
    assert_eq!(free(&[]), 142_943);
}

#[test]
fn several_commands_are_carried_out_in_one_run() {
    let Some(rig) = Rig::with_daemon() else { return };
    let commands = "set_default_active_thread_percentage 40\nset_default_device_pinned_mem_limit 0 2G\n\
                    start_server -uid 0\nget_server_list";
    let said = rig.ask(commands);
    assert_eq!(said, rig.server());
    assert_eq!(rig.info(&[])["sm"], 52);
}

#[test]
fn another_user_waits_without_multiuser_mode() {
    let Some(rig) = Rig::new() else { return };
    rig.daemon("a", &[]);
    let mut first = rig.start("hold 30", &[]);
    let server = rig.server();
    let mut other = rig.start_silent("info", &[], 1000, "a");
    sleep(Duration::from_millis(300));
    assert!(other.is_running(), "it waits");
    assert!(rig.info(&[])["mps"].as_bool().unwrap(), "the first user does not");
    first.child.kill().unwrap();
    first.child.wait().unwrap();
    assert_eq!(seen(&other.next().unwrap()), (Some(132), Some(142_575), true, None));
    assert_ne!(rig.server(), server, "it has a server of its own");
}

#[test]
fn users_share_a_multiuser_server() {
    let Some(rig) = Rig::with_daemon() else { return };
    let _first = rig.start("hold 30", &[]);
    let start = Instant::now();
    assert!(rig.start_as("info", &[], 1000, "a").info["mps"].as_bool().unwrap());
    assert!(start.elapsed() < Duration::from_secs(2));
    assert_eq!(rig.server().lines().count(), 1);
}

/// The row of the only client. A client continues as soon as its server has answered. The daemon learns of it from the
/// server over another connection.
fn only_client(rig: &Rig) -> Vec<String> {
    until("one client", || rig.ask("ps").lines().count() == 2);
    rig.ask("ps").lines().last().unwrap().split_whitespace().map(str::to_owned).collect()
}

#[test]
fn ps_names_clients_by_host_pid_and_namespace() {
    let Some(rig) = Rig::with_daemon() else { return };
    assert_eq!(
        rig.ask("ps").split_whitespace().collect::<Vec<_>>(),
        ["PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND"]
    );
    let client = rig.start("hold 30", &[]);
    let namespace = fs::read_link(format!("/proc/{}/ns/pid", client.pid())).unwrap();
    let row = only_client(&rig);
    assert_eq!(row[..4], [&client.pid().to_string(), "0", &rig.server(), "GPU-11111111-2222-3333"]);
    assert_eq!(format!("pid:[{}]", row[4]), namespace.to_string_lossy());
    assert!(row[5].ends_with("cuda-probe"), "{row:?}");
}

#[test]
fn a_client_whose_first_thread_has_ended_is_listed_until_its_last_has() {
    let Some(rig) = Rig::with_daemon() else { return };
    for when in ["at-once", "later"] {
        let mut client = rig.start(&format!("leaderless {when} alloc 512 30"), &[]);
        let pid = client.pid();
        until("no first thread", || fs::read_link(format!("/proc/{pid}/exe")).is_err());
        let listed = || {
            rig.contexts().iter().any(|held| held.pid == pid && held.kind == Kind::Client && held.mib > 512)
        };
        until("its memory is listed", listed);
        assert_eq!(only_client(&rig)[0], pid.to_string());
        signal(pid, Signal::SIGKILL);
        client.status();
        assert!(!listed());
    }
}

#[test]
fn clients_in_namespaces_of_their_own_connect_and_are_traced() {
    let Some(rig) = Rig::with_daemon() else { return };
    for uid in [0, 1000] {
        let client = rig.start_in_namespaces("hold 30", uid);
        assert_eq!((&client.info["mps"], &client.info["pid"]), (&true.into(), &1.into()));
        let row = only_client(&rig);
        let pid: i32 = row[0].parse().unwrap();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        assert!(status.contains(&format!("\nNSpid:\t{pid}\t1\n")), "{status}");
        let namespace = fs::read_link(format!("/proc/{pid}/ns/pid")).unwrap();
        assert_eq!(format!("pid:[{}]", row[4]), namespace.to_string_lossy());
        assert!(rig.contexts().iter().any(|held| held.pid == pid && held.kind == Kind::Client));
        assert_eq!(rig.ask(&format!("terminate_client {} {pid}", rig.server())), "0");
        until("no client", || rig.ask("ps").lines().count() == 1);
    }
}

#[test]
fn a_user_without_root_serves_itself_and_has_no_multiuser_mode() {
    let Some(rig) = Rig::new() else { return };
    for directory in ["a", "log"] {
        std::os::unix::fs::chown(rig.path(directory), Some(1000), Some(1000)).unwrap();
    }
    let start = |arguments: &[&str]| {
        rig.program("nvidia-cuda-mps-control", "a").arg("-d").args(arguments).uid(1000).output().unwrap()
    };
    assert_eq!(start(&["-M"]).status.code(), Some(1));
    assert_eq!(start(&[]).status.code(), Some(0));
    assert_eq!(rig.start_in_namespaces("info", 1000).info["mps"], true);
}

#[test]
fn connections_that_say_nothing_do_no_harm() {
    let Some(rig) = Rig::with_daemon() else { return };
    let descriptors = || fs::read_dir(format!("/proc/{}/fd", rig.daemon_pid("a"))).unwrap().count();
    rig.ask("ps");
    let before = descriptors();
    for _ in 0..2000 {
        drop(Conn::connect(&rig.path("a/control")).unwrap());
    }
    until("nothing leaks", || descriptors() <= before);
    assert_eq!(rig.info(&[])["mps"], true);
}

#[test]
fn nvml_finds_server_client_and_bypass() {
    let Some(rig) = Rig::with_daemon() else { return };
    let mut client = rig.start("alloc 1000 30", &[(PERCENTAGE, "25")]);
    client.result();
    let bypass = rig.start_as("hold 30", &[], 0, "nowhere");
    let mut found: Vec<_> =
        rig.contexts().iter().map(|held| (held.pid, held.on.minor, held.kind, held.mib)).collect();
    found.sort_by_key(|held| held.3);
    let server = rig.server().parse().unwrap();
    assert_eq!(
        found,
        [
            (server, 3, Kind::Server, 66),
            (bypass.pid(), 3, Kind::Compute, 514),
            (client.pid(), 3, Kind::Client, 1146),
        ]
    );
}

#[test]
fn the_49th_client_is_refused() {
    let Some(rig) = Rig::with_daemon() else { return };
    let clients: Vec<_> =
        (0..48).map(|_| rig.start_silent("hold 60", &[(PERCENTAGE, "10")], 0, "a")).collect();
    until("48 clients", || rig.ask("ps").lines().count() == 49);
    let (said, status) = rig.probe("info", &[]);
    assert_eq!((seen(&said[0]).3, status), (Some("CUDA_ERROR_MPS_MAX_CLIENTS_REACHED"), 10));
    drop(clients);
}

#[test]
fn before_volta_there_are_16_clients_and_no_limits() {
    let Some(rig) = Rig::with("6.0") else { return };
    rig.daemon("a", &["-M"]);
    assert!(rig.ask("set_default_device_pinned_mem_limit 0 2G").starts_with("Failed to"));
    assert!(rig.ask("set_default_active_thread_percentage 50").starts_with("Failed to"));
    assert_eq!(
        seen(&rig.info(&[(PERCENTAGE, "25"), (PINNED, "0=2G")])),
        (Some(132), Some(142_575), true, None)
    );
    let clients: Vec<_> = (0..16).map(|_| rig.start_silent("hold 60", &[], 0, "a")).collect();
    until("16 clients", || rig.ask("ps").lines().count() == 17);
    assert_eq!(seen(&rig.info(&[])).3, Some("CUDA_ERROR_MPS_MAX_CLIENTS_REACHED"));
    drop(clients);
}

#[test]
fn exclusive_process_keeps_bypass_and_a_second_server_out() {
    let Some(rig) = Rig::new() else { return };
    fs::create_dir(rig.path("b")).unwrap();
    rig.compute_mode(3);
    rig.daemon("a", &["-M"]);
    rig.daemon("b", &["-M"]);
    let _client = rig.start("hold 30", &[]);
    assert_eq!(rig.info(&[])["mps"], true, "the server's clients share");
    let refused = Some("CUDA_ERROR_DEVICE_UNAVAILABLE");
    assert_eq!(seen(&rig.start_as("info", &[], 0, "nowhere").info), (None, None, false, refused));
    assert_eq!(seen(&rig.start_as("info", &[], 0, "b").info).3, refused);
    // A container has only the library.
    fs::remove_file(rig.path("sim/topology.json")).unwrap();
    assert_eq!(seen(&rig.start_as("info", &[], 0, "nowhere").info).3, refused);
}

#[test]
fn in_default_mode_servers_and_bypass_share() {
    let Some(rig) = Rig::with_daemon() else { return };
    fs::create_dir(rig.path("b")).unwrap();
    rig.daemon("b", &["-M"]);
    let _one = rig.start("hold 30", &[]);
    assert_eq!(rig.start_as("info", &[], 0, "b").info["mps"], true);
    assert_eq!(seen(&rig.start_as("info", &[], 0, "nowhere").info).3, None);
}

#[test]
fn without_a_node_there_is_no_device() {
    let Some(rig) = Rig::new() else { return };
    let dev = rig.path("dev");
    let nodes = format!("noderights {0}/nvidia3 {0}/nvidia4", dev.display());
    let (said, status) = rig.probe(&nodes, &[]);
    assert_eq!((&said[1]["result"], &said[2]["result"], status), (&"ENXIO".into(), &"ENOENT".into(), 0));
    for (node, error) in [("nvidia-uvm", "CUDA_ERROR_UNKNOWN"), ("nvidia3", "CUDA_ERROR_NO_DEVICE")] {
        fs::rename(dev.join(node), dev.join("gone")).unwrap();
        assert_eq!(seen(&rig.info(&[])).3, Some(error));
        fs::rename(dev.join("gone"), dev.join(node)).unwrap();
    }
    assert_eq!(seen(&rig.info(&[("CUDA_VISIBLE_DEVICES", "0")])).3, None);
    assert_eq!(seen(&rig.info(&[("CUDA_VISIBLE_DEVICES", H200)])).3, None);
    assert_eq!(seen(&rig.info(&[("CUDA_VISIBLE_DEVICES", "1")])).3, Some("CUDA_ERROR_NO_DEVICE"));
}

#[test]
fn the_server_is_found_by_path_alone() {
    let Some(rig) = Rig::new() else { return };
    let mut daemon = rig.program("nvidia-cuda-mps-control", "a");
    assert!(daemon.arg("-d").env("PATH", "/usr/bin:/bin").output().unwrap().status.success());
    assert_eq!(rig.ask("get_default_active_thread_percentage"), "100.0", "it answers");
    assert_eq!(rig.ask_with_status("a", "start_server -uid 0"), (String::new(), Some(0)));
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert_eq!(rig.server(), "", "and no server ever appears");
    let log = fs::read_to_string(rig.path("log/control.log")).unwrap();
    assert!(log.contains(" exited with status 1\n") && !rig.path("log/server.log").exists(), "{log}");
}

#[test]
fn a_server_that_ends_as_it_starts_says_why_and_its_daemon_that_it_ended() {
    let Some(rig) = Rig::new() else { return };
    fs::write(rig.path("sim/mps-server-fault"), "invalid argument\n").unwrap();
    assert!(rig.daemon("a", &["-M"]).status.success());
    assert_eq!(rig.ask("start_server -uid 0"), "");
    let log = |name: &str| fs::read_to_string(rig.path("log").join(name)).unwrap_or_default();
    until("the end of the server", || log("control.log").contains(" exited with status 1\n"));
    assert!(log("server.log").contains("] Failed to start : invalid argument\n"), "{}", log("server.log"));
    fs::remove_file(rig.path("sim/mps-server-fault")).unwrap();
    rig.ask("start_server -uid 0");
    until("a server", || !rig.server().is_empty());
    let ready = format!("] NEW SERVER {}: Ready\n", rig.server());
    until("its word", || log("control.log").contains(&ready));
}
