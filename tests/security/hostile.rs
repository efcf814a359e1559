//! B1 to B10: hostile processes in containers (root inside, default capabilities), and a neighbour on the same MPS
//! server, which must not be affected. One H200: 143155 MiB, 132 SMs, 48 MPS clients.

use std::fs::File;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::two_users::{self, HOLD};
use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};
use sublet_e2e::guarded::{LEAVE, SHARE, SPOIL, probes};
use sublet_e2e::mig::{self, By};
use sublet_e2e::user::Host;
use sublet_e2e::{Bundle, World, copy_program, eventually, is_alive, skip_unless_root};

fn guarded(extra: &str) -> Host {
    let mut host = two_users::host("h200");
    host.world.configure(extra);
    host.start();
    host
}

/// The answer of the control daemon of GPU 0's shared server to its owner.
fn asked(host: &Host, command: &str) -> String {
    asked_of(host, &uuid(host), command)
}

/// The UUID of GPU 0. To ask for it is a command of sublet's, which puts right what it finds.
fn uuid(host: &Host) -> String {
    host.world.status()["devices"][0]["uuid"].as_str().expect("a UUID").to_owned()
}

/// [`asked`], by no command of sublet's.
fn asked_of(host: &Host, uuid: &str, command: &str) -> String {
    heard(|| asked_once(host, uuid, command))
}

/// What the daemon answers to `ask`. It speaks with one program at a time, and the guard may be that.
fn heard(mut ask: impl FnMut() -> String) -> String {
    let mut answer = String::new();
    eventually(|| {
        answer = ask();
        !answer.starts_with("Cannot send command")
    });
    answer
}

fn asked_once(host: &Host, uuid: &str, command: &str) -> String {
    let root = host.world.driver_root.as_ref().expect("simulated");
    let mut control = Command::new(root.join("usr/bin/nvidia-cuda-mps-control"));
    control.env("CUDA_MPS_PIPE_DIRECTORY", host.world.state_dir().join("mps").join(uuid).join("pipe"));
    let mut control =
        control.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the control program runs");
    let mut stdin = control.stdin.take().expect("piped");
    std::io::Write::write_all(&mut stdin, format!("{command}\n").as_bytes()).expect("it reads");
    drop(stdin);
    let output = control.wait_with_output().expect("it ends");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[test]
fn b1_a_containers_root_neither_sets_the_daemon_nor_ends_it() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let neighbour = host.neighbour();
    let hostile = host.waiting("hostile", "");
    let root = host.world.driver_root.as_ref().expect("simulated");
    let control = root.join("usr/bin/nvidia-cuda-mps-control");
    copy_program(&control, &hostile.dir.join("rootfs"), "usr/bin/nvidia-cuda-mps-control");
    let before = asked(&host, "get_default_active_thread_percentage");
    for dir in ["/run/sublet/mps", "/tmp/nvidia-mps"] {
        for (command, answer) in [
            ("set_default_active_thread_percentage 10", "Insufficient privileges"),
            ("quit -t 0", "Not enough privilege"),
        ] {
            let script = format!(
                "echo {command} | CUDA_MPS_PIPE_DIRECTORY={dir} busybox timeout 5 nvidia-cuda-mps-control"
            );
            let said = heard(|| hostile.exec(&["/bin/sh", "-c", &script]).stdout);
            assert!(said.contains(answer), "{dir}: {command}: {said}");
        }
    }
    assert_eq!(asked(&host, "get_default_active_thread_percentage"), before);
    hostile.down();
    neighbour.lives();
    host.world.assert_empty();
}

#[test]
fn b2_by_its_compute_mode_the_gpu_takes_nobody_beside_the_server() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let neighbour = host.neighbour();
    let hostile = host.waiting("hostile", &format!("{LEAVE} cuda-probe hold 600 &"));
    let info = hostile.event("info");
    assert_eq!(info["error"], json!("CUDA_ERROR_DEVICE_UNAVAILABLE"), "{info}");
    hostile.down();
    neighbour.lives();
    host.world.assert_empty();
}

#[test]
fn b2_whoever_leaves_mps_where_the_mode_does_not_hold_is_ended() {
    if skip_unless_root() {
        return;
    }
    // EXCLUSIVE_PROCESS mode would prevent it.
    let host = guarded("[mps]\nexclusive_compute_mode = \"never\"\n");
    let neighbour = host.neighbour();
    let hostile = host.waiting("hostile", &format!("{LEAVE} cuda-probe hold 600 &"));
    let info = hostile.event("info");
    assert_eq!((&info["mps"], &info["sm"]), (&json!(false), &json!(132)), "the driver does not hold it");
    assert!(eventually(|| host.event("bypass").is_some()), "{:?}", host.events());
    assert!(eventually(|| probes(&hostile) == 0), "{}", probes(&hostile));
    hostile.down();
    neighbour.lives();
    host.world.assert_empty();
}

#[test]
fn b3_whoever_spoils_their_memory_limit_is_ended_and_nobody_else() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let neighbour = host.neighbour();
    let hostile =
        host.waiting("hostile", &format!("{SPOIL} cuda-probe alloc 52000 600 & cuda-probe hold 600 &"));
    assert_eq!(hostile.event("alloc")["result"], json!("CUDA_SUCCESS"), "the driver does not hold it");
    assert!(eventually(|| host.event("memory").is_some()), "{:?}", host.events());
    let event = host.event("memory").expect("it was seen");
    assert_eq!((&event["action"], &event["container_id"]), (&json!("terminate"), &json!("hostile")));
    let text = event["text"].as_str().expect("text");
    assert!(
        text.contains("exceeds its sublet.memory") && text.ends_with("of 4096 MiB): it was ended"),
        "{text}"
    );
    // The container and its other process go on.
    assert!(eventually(|| probes(&hostile) == 1), "{}", probes(&hostile));
    let explained = host.world.sublet(&["explain", "--container", "hostile"]);
    assert!(String::from_utf8_lossy(&explained.stdout).contains(text), "{explained:?}");
    // It has two processes and a lease for one. That is only reported.
    let ended: Vec<Value> = host.events().into_iter().filter(|event| event["action"] != "report").collect();
    assert_eq!(ended.len(), 1, "{ended:?}");
    hostile.down();
    neighbour.lives();
    host.world.assert_empty();
}

#[test]
fn b4_no_client_has_more_than_the_largest_share_of_its_server() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let hostile = host.waiting("hostile", "");
    for asks in ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=abc", "X=y"] {
        let info = hostile.exec(&["/bin/env", "-i", asks, "/usr/bin/cuda-probe", "info"]).json().remove(0);
        assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)), "{asks}: {info}");
        assert_eq!(info["free_mib"], json!(4096 - 146), "{asks}: {info}");
    }
    hostile.down();
    host.world.assert_empty();
}

/// What the daemon lets a client of no share have.
const LIMIT: &str = "get_default_active_thread_percentage";

/// A larger share's end lowers the limits of its server. The engine does not wait for that. It takes some
/// milliseconds, and a second is what docs/security.md allows; how long it took is printed.
fn b4_falls_soon(serves: bool) {
    let mut host = two_users::host("h200");
    if serves {
        host.start();
    }
    let hostile = host.world.bundle("hostile", &[("sublet.sm", "25")], HOLD);
    hostile.up();
    let sms = || {
        let asks = ["/bin/env", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100", "/usr/bin/cuda-probe", "info"];
        hostile.exec(&asks).json().remove(0)["sm"].clone()
    };
    let large = host.world.bundle("large", &[("sublet.sm", "60")], HOLD);
    large.up();
    assert_eq!(sms(), json!(78), "while the larger share is there");
    let uuid = uuid(&host);
    large.down();
    let ended = Instant::now();
    assert!(eventually(|| asked_of(&host, &uuid, LIMIT).starts_with("25")), "nobody lowers it");
    eprintln!("serve: {serves}: lowered {} ms after the delete", ended.elapsed().as_millis());
    assert!(eventually(|| sms() == json!(32)), "of the running server too");
    hostile.down();
    host.world.assert_empty();
}

#[test]
fn b4_nor_soon_after_the_largest_share_has_ended() {
    if skip_unless_root() {
        return;
    }
    b4_falls_soon(false);
}

#[test]
fn b4_nor_soon_after_the_largest_share_has_ended_while_the_service_runs() {
    if skip_unless_root() {
        return;
    }
    b4_falls_soon(true);
}

/// Whatever lowers the limits is killed: the next command does it.
#[test]
fn b4_nor_after_the_next_command_if_the_lowering_was_killed() {
    if skip_unless_root() {
        return;
    }
    let host = two_users::host("h200");
    let hostile = host.world.bundle("hostile", &[("sublet.sm", "25")], HOLD);
    hostile.up();
    let large = host.world.bundle("large", &[("sublet.sm", "60")], HOLD);
    large.up();
    let uuid = uuid(&host);
    let lock =
        File::open(host.world.state_dir().join("mps").join(&uuid).join("lock")).expect("the daemon's lock");
    lock.lock().expect("nobody is at it");
    let deleted = large.world().runtime().args(["delete", "--force", "large"]).output().expect("it runs");
    let said = String::from_utf8_lossy(&deleted.stderr).into_owned();
    assert!(deleted.status.success() && said.is_empty(), "the delete does not wait for the lock: {said}");
    assert!(eventually(|| !host.world.lowering().is_empty()), "nobody lowers the limits");
    for pid in host.world.lowering() {
        let _ = kill(pid, Signal::SIGKILL);
    }
    assert!(eventually(|| host.world.lowering().is_empty()));
    drop(lock);
    assert!(asked_of(&host, &uuid, LIMIT).starts_with("60"), "it was lowered");
    assert!(host.world.sublet(&["gc"]).status.success());
    assert!(asked_of(&host, &uuid, LIMIT).starts_with("25"), "sublet gc does not lower it");
    hostile.down();
    host.world.assert_empty();
}

#[test]
fn b5_processes_are_counted_together() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let neighbour = host.neighbour();
    let both = "cuda-probe alloc 2500 600 & sleep 1; exec cuda-probe alloc 2600 600";
    let forking = host.world.bundle("forking", SHARE, &["/bin/sh", "-c", both]);
    forking.up();
    let first = forking.pid();
    assert!(eventually(|| host.event("memory").is_some()), "{:?} {}", host.events(), forking.output());
    let results = forking.output().matches("\"CUDA_SUCCESS\"").count();
    assert_eq!(results, 2, "each has the whole limit, for MPS: {}", forking.output());
    // The second process exceeded the share, and it was the container's first process.
    assert_eq!(host.event("memory").expect("seen")["pid"], json!(first));
    forking.down();
    neighbour.lives();
    host.world.assert_empty();
}

#[test]
fn b6_nodes_that_a_container_makes_open_no_more_than_its_own() {
    if skip_unless_root() {
        return;
    }
    let world = mig::world("");
    let (uuid, [gi, ci], ..) = mig::DEVICES[3];
    let bundle = mig::created(&world, "hostile", By::Shim, &[("sublet.gpu", uuid)], HOLD);
    bundle.event("info");
    // Its GPU and its own capabilities; another GPU, other instances' capabilities, and the one for all of them.
    let own = [(195, 0), (241, gi), (241, ci)];
    let others = [(195, 1), (241, 21), (241, 22), (241, 30), (241, 1), (241, 2)];
    assert_eq!(mig::rights(&bundle, &own), ["ENXIO"; 3]);
    assert_eq!(mig::rights(&bundle, &others), ["EPERM"; 6]);
    bundle.down();
    world.assert_empty();
}

#[test]
fn b6_holds_where_the_engine_wrote_no_rule_that_denies_the_rest() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    for (number, rules) in [
        json!([]),
        Value::Null,
        json!([{"allow": false, "type": "b", "access": "rwm"}]),
        json!([{"allow": true, "type": "c", "major": 10, "minor": 229, "access": "rwm"}]),
    ]
    .into_iter()
    .enumerate()
    {
        let mut bundle = world.bundle(&format!("hostile{number}"), &[("sublet.gpu", "0")], HOLD);
        bundle.spec["linux"]["resources"]["devices"] = rules.clone();
        bundle.up();
        bundle.event("info");
        assert_eq!(mig::rights(&bundle, &[(195, 0)]), ["ENXIO"], "{rules}");
        assert_eq!(mig::rights(&bundle, &[(195, 1), (195, 7)]), ["EPERM"; 2], "{rules}");
        let usual = bundle.exec(&[
            "/bin/sh",
            "-c",
            "echo x >/dev/null && busybox head -c 4 /dev/zero | busybox wc -c",
        ]);
        assert_eq!(usual.stdout.trim(), "4", "{rules}: {usual:?}");
        bundle.down();
    }
    let mut none = world.bundle("hostile", &[("sublet.gpu", "0")], HOLD);
    none.spec["linux"].as_object_mut().expect("an object").remove("resources");
    none.up();
    none.event("info");
    assert_eq!(mig::rights(&none, &[(195, 1)]), ["EPERM"]);
    none.down();
    world.assert_empty();
}

#[test]
fn b7_of_mps_and_of_sublets_state_a_container_sees_one_socket() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let neighbour = host.neighbour();
    let hostile = host.waiting("hostile", "");
    let state = host.world.state_dir();
    let mounts = hostile.exec(&["/bin/cat", "/proc/self/mountinfo"]).stdout;
    let of_state = |line: &&str| line.contains(&*state.to_string_lossy()) || line.contains("sublet.sock");
    let found: Vec<&str> = mounts.lines().filter(of_state).collect();
    assert!(found.iter().all(|line| line.contains("/public ")), "{found:?}");
    let sees = |script: &str| hostile.exec(&["/bin/sh", "-c", script]).stdout;
    let listed = sees("ls -A /run/sublet /run/sublet/mps /tmp/nvidia-mps");
    assert_eq!(listed, "/run/sublet:\nmps\n\n/run/sublet/mps:\ncontrol\n\n/tmp/nvidia-mps:\ncontrol\n");
    let named = "busybox find / -xdev -name 'sublet.sock' -o -xdev -name 'ledger.json*' -o -name 'control_*'";
    assert_eq!(sees(named), "");
    let written =
        sees("for d in /run/sublet/mps /tmp/nvidia-mps; do echo x 2>/dev/null >$d/x && echo $d; done");
    assert_eq!(written, "");
    hostile.down();
    neighbour.lives();
    host.world.assert_empty();
}

#[test]
fn b8_a_fault_ends_the_neighbours_of_a_shared_server_and_none_of_a_dedicated_one() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    for (isolation, seconds, expected) in
        [("dedicated", "5", "CUDA_SUCCESS"), ("shared", "60", "CUDA_ERROR_ILLEGAL_ADDRESS")]
    {
        let share = [("sublet.mode", "mps"), ("sublet.isolation", isolation), ("sublet.sm", "25")];
        let neighbour = host.world.bundle(
            &format!("beside-{isolation}"),
            &share,
            &["/usr/bin/cuda-probe", "hold", seconds],
        );
        neighbour.up();
        neighbour.event("info");
        let faulty =
            host.world.bundle(&format!("faulty-{isolation}"), &share, &["/usr/bin/cuda-probe", "fault"]);
        faulty.up();
        assert_eq!(faulty.event("fault")["result"], json!("CUDA_ERROR_ILLEGAL_ADDRESS"));
        assert_eq!(neighbour.event("end")["result"], json!(expected), "{isolation}");
        faulty.down();
        neighbour.down();
    }
    host.world.assert_empty();
}

#[test]
fn b9_no_more_clients_are_promised_than_a_server_takes() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let share = |processes| [("sublet.mode", "mps"), ("sublet.processes", processes)];
    let first = host.world.bundle("first", &share("40"), HOLD);
    first.up();
    let refused = host.world.bundle("second", &share("9"), HOLD).create();
    assert!(!refused.ok && refused.stderr.contains("has 8 of 48 MPS clients left"), "{refused:?}");
    let fits = host.world.bundle("third", &share("8"), HOLD);
    fits.up();
    fits.down();
    first.down();
    host.world.assert_empty();
}

#[test]
fn b9_clients_beyond_the_lease_make_place_for_others() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let many = "n=0; while [ $n -lt 48 ]; do cuda-probe hold 600 & n=$((n+1)); done";
    let script = format!("{many}\nwait; exec sleep 600");
    let hostile = host.world.bundle("hostile", &[("sublet.sm", "25")], &["/bin/sh", "-c", &script]);
    hostile.up();
    let late = host.waiting("late", "");
    let info = || late.exec(&["/usr/bin/cuda-probe", "info"]).json().into_iter().next().unwrap_or_default();
    assert!(eventually(|| host.event("clients").is_some()), "{:?}", host.events());
    assert!(eventually(|| info()["mps"] == json!(true)), "{}", info());
    hostile.down();
    late.down();
    host.world.assert_empty();
}

/// A container in the host's PID namespace whose first process ends while a child of a child computes.
fn leaving<'a>(host: &'a Host, id: &str, own_pids: bool) -> Bundle<'a> {
    let script = "(busybox setsid cuda-probe hold 600 >/tmp/out &)
        until grep -q info /tmp/out; do sleep 0.1; done; echo left";
    let mut bundle = host.world.bundle(id, SHARE, &["/bin/sh", "-c", script]);
    if !own_pids {
        let namespaces = bundle.spec["linux"]["namespaces"].as_array_mut().expect("namespaces");
        namespaces.retain(|namespace| namespace["type"] != "pid");
    }
    bundle.up();
    assert!(eventually(|| bundle.output().contains("left")), "{}", bundle.output());
    bundle
}

/// The host's pid of the process that printed the content of the container's `/tmp/out`.
fn left(bundle: &Bundle<'_>) -> nix::unistd::Pid {
    let text = std::fs::read_to_string(bundle.dir.join("rootfs/tmp/out")).expect("its output");
    let info: Value = serde_json::from_str(text.lines().next().expect("a line")).expect("JSON");
    nix::unistd::Pid::from_raw(i32::try_from(info["pid"].as_i64().expect("a pid")).expect("a pid"))
}

#[test]
fn b10_what_a_container_leaves_behind_is_ended_and_its_lease_freed_after_it() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("[guard]\nleft = \"report\"\n");
    let bundle = leaving(&host, "leaves", false);
    let process = left(&bundle);
    assert!(eventually(|| host.event("left").is_some()), "{:?}", host.events());
    // It is only reported: the process still computes, and the container keeps its share.
    assert!(is_alive(process));
    assert_eq!(host.world.sublet(&["gc"]).status.code(), Some(0));
    assert_eq!(host.leases()[0]["state"], json!("ending"), "{:?}", host.leases());
    bundle.down();
    assert!(eventually(|| !is_alive(process)), "it goes with the container's cgroup");
    host.world.assert_empty();
    drop(host);

    let host = guarded("");
    let neighbour = host.neighbour();
    let bundle = leaving(&host, "leaves", false);
    let process = left(&bundle);
    assert!(eventually(|| host.event("left").is_some()), "{:?}", host.events());
    assert!(eventually(|| !is_alive(process)));
    let held = |leases: Vec<Value>| leases.iter().any(|lease| lease["container_id"] == "leaves");
    assert!(eventually(|| !held(host.leases())), "{:?}", host.leases());
    bundle.down();
    neighbour.lives();
    host.world.assert_empty();
}

#[test]
fn b10_in_its_own_pid_namespace_nothing_outlives_the_first_process() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let bundle = leaving(&host, "own", true);
    assert!(eventually(|| host.leases().is_empty()), "{:?}", host.leases());
    assert_eq!(host.event("left"), None);
    bundle.down();
    host.world.assert_empty();
}

#[test]
fn b12_a_stopped_client_is_ended_all_the_same_and_holds_nobody() {
    if skip_unless_root() {
        return;
    }
    let host = guarded("");
    let neighbour = host.neighbour();
    let script = format!("{SPOIL} cuda-probe alloc 52000 600 & p=$!; sleep 1; kill -STOP $p");
    let hostile = host.waiting("hostile", &script);
    hostile.event("alloc");
    assert!(eventually(|| host.event("memory").is_some()), "{:?}", host.events());
    assert!(eventually(|| probes(&hostile) == 0), "{}", probes(&hostile));
    // A container that keeps to its share and is stopped: other containers start and end meanwhile.
    let stopped = host.waiting("stopped", "cuda-probe hold 600 & p=$!; sleep 0.5; kill -STOP $p");
    stopped.event("info");
    let another = host.world.bundle("another", SHARE, HOLD);
    another.up();
    assert_eq!(another.event("info")["mps"], json!(true));
    another.down();
    stopped.down();
    hostile.down();
    neighbour.lives();
    host.world.assert_empty();
}
