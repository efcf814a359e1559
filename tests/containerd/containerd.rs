//! containerd as people use it: `ctr run --runc-binary`, and pods by the CRI with a runtime handler. Runs in
//! the root that tests/engines/enter gives. One H200: 132 SMs, 143155 MiB for CUDA.

use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};
use sublet_e2e::containerd::{Containerd, IMAGE};
use sublet_e2e::docker::skip_unless_engines;
use sublet_e2e::in_one_line;
use sublet_e2e::killing::assert_no_daemons;
use sublet_e2e::{Engine, Finished, Stopping, World, bin_dir, eventually, is_alive, programs};

const QUARTER: &[&str] = &["sublet.sm=25"];
const HOLD: &[&str] = &["cuda-probe", "hold", "600"];

fn h200() -> Containerd {
    Containerd::up(World::simulated("h200", ""))
}

fn lease_id(containerd: &Containerd, id: &str) -> String {
    let found = || containerd.lease(id).filter(|lease| lease["state"] == "active");
    assert!(eventually(|| found().is_some()), "no active lease of {id}: {:?}", containerd.world.leases());
    found().expect("it was there")["id"].as_str().expect("an id").to_owned()
}

#[test]
fn the_first_process_and_execs_see_the_share() {
    if skip_unless_engines() {
        return;
    }
    let containerd = h200();
    let id = containerd.hold("first", &["sublet.sm=25", "sublet.memory=8GiB"], &[]);
    let is_share = |info: &Value| {
        assert_eq!((&info["error"], &info["mps"], &info["sm"]), (&Value::Null, &json!(true), &json!(32)));
        let free = info["free_mib"].as_i64().expect("free_mib");
        assert!((free - 8047).abs() < 64, "free {free} MiB of 8192");
    };
    is_share(&containerd.event("first", "info"));
    is_share(&containerd.exec_info("first", &[]));
    // No environment at all: MPS at CUDA's default place, the server's ceiling and its memory limit.
    let bare = containerd.exec_info("first", &["env", "-i"]);
    is_share(&bare);
    let lease = containerd.lease(&id).expect("a lease");
    assert_eq!(
        (&lease["state"], &lease["pid"]),
        (&json!("active"), &json!(containerd.pid("first").as_raw()))
    );
    containerd.remove("first");
    containerd.assert_empty();
}

#[test]
fn the_lease_follows_the_container() {
    if skip_unless_engines() {
        return;
    }
    let mut containerd = h200();
    let id = containerd.hold("moves", QUARTER, &["--runtime=io.containerd.runc.v2"]);
    let (lease, first) = (lease_id(&containerd, &id), containerd.pid("moves"));
    containerd.done(&["tasks", "pause", "moves"]);
    assert_eq!(lease_id(&containerd, &id), lease);
    containerd.done(&["tasks", "resume", "moves"]);
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        containerd.end_daemon(signal);
        assert_eq!(lease_id(&containerd, &id), lease, "without containerd");
        containerd.start_daemon();
        assert_eq!((lease_id(&containerd, &id), containerd.pid("moves")), (lease.clone(), first));
        assert_eq!(containerd.exec_info("moves", &[])["sm"], json!(32));
    }
    containerd.done(&["tasks", "kill", "--signal=SIGKILL", "moves"]);
    assert!(eventually(|| containerd.lease(&id).is_none()), "{:?}", containerd.world.leases());
    containerd.done(&["tasks", "rm", "moves"]);
    containerd.assert_empty();
    containerd.done(&["tasks", "start", "--detach", "--null-io", "moves"]);
    assert_ne!(lease_id(&containerd, &id), lease);
    containerd.remove("moves");
    containerd.assert_empty();
    // In the foreground, to its end.
    let once = containerd.attached("once", QUARTER, &["--rm"], &["cuda-probe", "info"]);
    assert!(once.ok, "{once:?}");
    assert_eq!(containerd.event("once", "info")["sm"], json!(32));
    containerd.assert_empty();
}

#[test]
fn a_killed_shim_ends_the_lease() {
    if skip_unless_engines() {
        return;
    }
    let containerd = h200();
    let id = containerd.hold("orphan", QUARTER, &[]);
    let _ = lease_id(&containerd, &id);
    let first = containerd.pid("orphan");
    containerd.kill_shims();
    assert!(eventually(|| !is_alive(first)), "containerd deletes the container by force");
    containerd.assert_empty();
    containerd.remove("orphan");
}

#[test]
fn ctr_run_shows_why_a_share_is_refused() {
    if skip_unless_engines() {
        return;
    }
    let containerd = h200();
    let _ = containerd.hold("large", &["sublet.sm=70"], &[]);
    let refused = |annotations: &[&str], options: &[&str], words: &[&str]| {
        let refused = containerd.run("refused", annotations, options, &["true"]);
        assert!(
            !refused.ok && words.iter().all(|word| refused.stderr.contains(word)),
            "{words:?}: {refused:?}"
        );
        assert_eq!(in_one_line(&refused.stderr).lines().count(), 1, "{refused:?}");
        containerd.remove("refused");
    };
    refused(&["sublet.sm=40"], &[], &["OCI runtime create failed: sublet-runtime", "40 %", "30 %"]);
    refused(&["sublet.smm=40"], &[], &["sublet.smm", "sublet.sm"]);
    refused(&["sublet.lease=0123456789abcdef"], &[], &["sublet.lease=0123456789abcdef", "remove"]);
    refused(QUARTER, &["--privileged"], &["remove `--privileged`"]);
    // It looks for the program that its hook would run.
    let bin = containerd.world.dir.path().join("bin");
    std::fs::create_dir(&bin).expect("a directory");
    programs::copy("/bin/true".as_ref(), &bin.join("nvidia-container-cli"));
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").expect("PATH"));
    let mut command = containerd.run_command("refused", QUARTER, &["--gpus=0"], &["true"]);
    let both = Finished::of(&command.env("PATH", path).output().expect("ctr is installed"));
    assert!(!both.ok && both.stderr.contains("remove `--gpus`"), "{both:?}");
    containerd.remove("refused");
    containerd.remove("large");
    containerd.assert_empty();
}

#[test]
fn without_annotations_nothing_is_touched() {
    if skip_unless_engines() {
        return;
    }
    let containerd = h200();
    let spec_by = |runtime: &str| {
        let started = containerd.run("plain", &[], &["--runc-binary", runtime], &["sleep", "600"]);
        assert!(started.ok, "{started:?}");
        let text = containerd.config("plain");
        let nodes = containerd.exec_heard("plain", &["sh", "-c", "ls /dev | grep -c nvidia || true"]);
        assert_eq!(nodes.stdout.trim_end(), "0");
        containerd.remove("plain");
        text
    };
    let shim = bin_dir().join("sublet-runtime");
    assert_eq!(spec_by(shim.to_str().expect("UTF-8")), spec_by(containerd.world.engine.program()));
    assert!(!containerd.world.state_dir().join("ledger.json").exists(), "nothing was written down");
    containerd.assert_empty();
}

#[test]
fn a_program_named_after_a_share_needs_no_annotation() {
    if skip_unless_engines() {
        return;
    }
    let containerd =
        Containerd::up(World::simulated("h200", "[share.small]\nsm = 12.5\nmemory = \"4GiB\"\n"));
    let small = containerd.world.dir.path().join("sublet-small");
    std::os::unix::fs::symlink(bin_dir().join("sublet-runtime"), &small).expect("a link");
    let _ = containerd.hold("job", &[], &["--runc-binary", small.to_str().expect("UTF-8")]);
    let info = containerd.exec_info("job", &[]);
    assert_eq!((&info["sm"], &info["mps"]), (&json!(16), &json!(true)));
    assert!(info["free_mib"].as_i64() < Some(4096));
    containerd.remove("job");
    containerd.assert_empty();
}

#[test]
fn of_twenty_at_once_those_start_that_fit() {
    if skip_unless_engines() {
        return;
    }
    let containerd = Containerd::up(World::simulated("h200x8", ""));
    let names: Vec<String> = (0..20).map(|n| format!("c{n:02}")).collect();
    // Two halves of each of eight GPUs.
    let done: Vec<_> = std::thread::scope(|scope| {
        let start = |name| containerd.run(name, &["sublet.sm=50"], &[], &["cuda-probe", "hold", "600"]);
        let threads: Vec<_> = names.iter().map(|name| scope.spawn(move || start(name))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let refused: Vec<_> = done.iter().filter(|done| !done.ok).collect();
    assert_eq!(refused.len(), 4, "{refused:?}");
    assert!(refused.iter().all(|done| done.stderr.contains("50 %")), "{refused:?}");
    assert_eq!(containerd.world.leases().len(), 16);
    for (name, _) in names.iter().zip(&done).filter(|(_, done)| done.ok) {
        assert_eq!(containerd.exec_info(name, &[])["sm"], json!(66), "{name}: half of 132");
    }
    for name in &names {
        containerd.remove(name);
    }
    containerd.assert_empty();
}

/// The process that is killed.
#[derive(Clone, Copy, Debug)]
enum Victim {
    Containerd,
    Shim,
    Both,
}

impl Victim {
    fn kill(self, containerd: &mut Containerd) {
        if matches!(self, Self::Containerd | Self::Both) {
            containerd.end_daemon(Signal::SIGKILL);
        }
        if matches!(self, Self::Shim | Self::Both) {
            containerd.kill_shims();
        }
    }
}

/// Kills `victim` at `stage` of a container's life, and lets the next command put everything right.
fn killed_at(containerd: &mut Containerd, stopping: &Stopping, stage: &str, victim: Victim) {
    // A different name each time: containerd may still be cleaning up the last one.
    let name = &format!("{stage}-{victim:?}");
    eprintln!("{name}");
    stopping.at(stage);
    let life = if stage.ends_with("delete") { "0" } else { "600" };
    let mut command = containerd.run_command(name, QUARTER, &[], &["sleep", life]);
    let mut client = command.spawn().expect("ctr runs");
    let mut remove = stage.ends_with("delete").then(|| {
        assert!(client.wait().expect("ctr ends").success());
        assert!(eventually(|| containerd.tasks().iter().any(|task| task.2 == "STOPPED")));
        let mut remove = containerd.command();
        remove.args(["tasks", "rm", name]).stderr(Stdio::null()).spawn().expect("ctr runs")
    });
    assert!(eventually(|| stopping.has_stopped()), "{name} was not reached: {}", containerd.log());
    victim.kill(containerd);
    stopping.go_on();
    let _ = client.wait();
    let _ = remove.as_mut().map(std::process::Child::wait);
    if !matches!(victim, Victim::Containerd) {
        // As long as a process of the container's lives its lease is held, and no longer.
        let agree = || containerd.world.leases().is_empty() == containerd.processes_of(name).is_empty();
        assert!(eventually(agree), "{name}: {:?}", containerd.world.leases());
    }
    if matches!(victim, Victim::Both) {
        let processes = containerd.processes_of(name);
        for pid in &processes {
            let _ = kill(*pid, Signal::SIGKILL);
        }
        assert!(eventually(|| !processes.iter().any(|pid| is_alive(*pid))), "{name}: killed and not gone");
        let gc = containerd.world.sublet(&["gc"]);
        assert!(gc.status.success(), "{name}: {gc:?}");
        // A daemon that was being started when its container was killed comes up, and ends by itself then.
        assert_no_daemons(&containerd.world, name);
        containerd.world.assert_empty();
    }
    if !matches!(victim, Victim::Shim) {
        containerd.start_daemon();
    }
    containerd.remove(name);
    if containerd.world.engine == Engine::Crun && stage == "after-delete" {
        // containerd forgets a shim whose container crun has deleted already.
        containerd.kill_shims();
    }
    // The shim or containerd unmounts the root filesystem before the container is deleted.
    containerd.assert_ended();
}

#[test]
fn killed_anywhere_containerd_leaves_nothing_that_the_next_command_does_not_restore() {
    if skip_unless_engines() {
        return;
    }
    let world = World::simulated("h200", "");
    let stopping = Stopping::install(&world);
    let mut containerd = Containerd::up(world);
    for stage in [
        "daemon",
        "before-create",
        "after-create",
        "before-start",
        "after-start",
        "before-delete",
        "after-delete",
    ] {
        for victim in [Victim::Containerd, Victim::Shim, Victim::Both] {
            killed_at(&mut containerd, &stopping, stage, victim);
        }
    }
    let _ = containerd.hold("after", QUARTER, &[]);
    assert_eq!(containerd.exec_info("after", &[])["sm"], json!(32));
    containerd.remove("after");
    containerd.assert_empty();
}

/// The CRI gives every container a share of the processor's time.
fn skip_without_processor_shares() -> bool {
    let v2 = std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers");
    let skip = v2.is_ok_and(|controllers| !controllers.split_whitespace().any(|name| name == "cpu"));
    if skip {
        eprintln!("skipped: no cpu controller in cgroup2 here (SUBLET_CGROUPS=v1 has it on hybrid hosts)");
    }
    skip
}

#[test]
fn a_pod_of_two_containers_takes_two_shares_and_none_for_its_sandbox() {
    if skip_unless_engines() || skip_without_processor_shares() {
        return;
    }
    let containerd = h200();
    let pod = containerd.run_pod("pod", "sublet", &["sublet.sm=25"]);
    assert_eq!(containerd.world.leases(), Vec::<Value>::new(), "the sandbox");
    // The pod's annotations go to each container, whose own stand over them.
    let run = |name, annotations: &[&str]| containerd.run_in_pod(&pod, name, annotations, HOLD);
    let quarter = run("quarter", &[]).expect("it starts");
    let half = run("half", &["sublet.sm=50", "sublet.memory=8GiB"]).expect("it starts");
    for (name, id, sm) in [("quarter", &quarter, 32), ("half", &half, 66)] {
        for info in [containerd.event(name, "info"), containerd.exec_sync_info(id, &[])] {
            assert_eq!((&info["error"], &info["mps"], &info["sm"]), (&Value::Null, &json!(true), &json!(sm)));
        }
        // Without an environment: the server's ceiling, which is the larger one.
        let bare = containerd.exec_sync_info(id, &["env", "-i"]);
        assert_eq!((&bare["mps"], &bare["sm"]), (&json!(true), &json!(66)), "{bare}");
    }
    let refused = run("third", &["sublet.sm=40"]).expect_err("no room");
    assert!(refused.contains("sublet-runtime: container ") && refused.contains("40 %"), "{refused}");
    let _ = lease_id(&containerd, &quarter);
    let lease = containerd.lease(&half).expect("a lease");
    let called = ["engine", "name", "image"].map(|key| lease[key].as_str().unwrap_or_default());
    assert_eq!(called, ["containerd", "half", IMAGE]);
    assert!(lease["part_of"].as_str().is_some_and(|pod| pod.ends_with("/pod")), "{lease}");
    containerd.stop_in_pod(&half);
    assert!(containerd.lease(&half).is_none());
    assert_eq!(containerd.world.leases().len(), 1);
    containerd.remove_pod(&pod);
    containerd.assert_empty();
}

#[test]
fn a_pod_by_a_handler_without_the_list_gets_nothing() {
    if skip_unless_engines() || skip_without_processor_shares() {
        return;
    }
    let containerd = h200();
    let pod = containerd.run_pod("pod", "unlisted", &["sublet.sm=25"]);
    let id = containerd.run_in_pod(&pod, "plain", &["sublet.sm=25"], &["sleep", "600"]).expect("it starts");
    let nodes =
        containerd.cri_ask("ExecSync", &format!("container_id: {id:?} cmd: [\"ls\", \"/dev\"] timeout: 10"));
    assert!(nodes.contains("null") && !nodes.contains("nvidia"), "{nodes}");
    assert!(!containerd.world.state_dir().join("ledger.json").exists(), "nothing was written down");
    containerd.remove_pod(&pod);
    containerd.assert_empty();
}

/// A manifest that the packages ship.
fn shipped(manifest: &str) -> String {
    let file =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/kubernetes").join(manifest);
    std::fs::read_to_string(file).expect("a manifest")
}

#[test]
fn the_pod_and_the_runtime_class_of_packaging_kubernetes_work() {
    if skip_unless_engines() || skip_without_processor_shares() {
        return;
    }
    // What a kubelet passes on: the class's handler, and the pod's annotations.
    let (class, pod) = (shipped("runtimeclass.yaml"), shipped("pod.yaml"));
    let handler = class.lines().find_map(|line| line.strip_prefix("handler: ")).expect("a handler");
    let entries = pod.lines().filter_map(|line| line.trim().strip_prefix("sublet."));
    let annotations: Vec<String> =
        entries.map(|entry| format!("sublet.{}", entry.replacen(": ", "=", 1).replace('"', ""))).collect();
    let annotations: Vec<&str> = annotations.iter().map(String::as_str).collect();
    assert_eq!(annotations, ["sublet.sm=25", "sublet.memory=8GiB"]);

    let containerd = h200();
    let sandbox = containerd.run_pod("quarter", handler, &annotations);
    assert_eq!(containerd.world.leases(), Vec::<Value>::new(), "the sandbox has no share");
    let worker = containerd.run_in_pod(&sandbox, "worker", &[], HOLD).expect("it starts");
    let info = containerd.exec_sync_info(&worker, &[]);
    assert_eq!((&info["error"], &info["mps"], &info["sm"]), (&Value::Null, &json!(true), &json!(32)));
    assert!(info["free_mib"].as_i64() < Some(8192), "{info}");
    let _ = lease_id(&containerd, &worker);
    // As many as the resource counts: four quarters. A fifth, which no scheduler would send, is refused by the node.
    for name in ["second", "third", "fourth"] {
        let _ = containerd.run_in_pod(&sandbox, name, &[], HOLD).expect("it starts");
    }
    let refused = containerd.run_in_pod(&sandbox, "fifth", &[], HOLD).expect_err("no room");
    eprintln!("StartContainer of a fifth: {refused}");
    assert!(refused.contains("no room for") && refused.contains("no SMs left"), "{refused}");
    containerd.stop_in_pod(&worker);
    assert!(containerd.lease(&worker).is_none(), "{:?}", containerd.world.leases());
    containerd.remove_pod(&sandbox);
    containerd.assert_empty();
}

#[test]
fn a_pod_by_a_handler_that_the_node_does_not_have_is_refused() {
    if skip_unless_engines() {
        return;
    }
    let containerd = h200();
    let request = "config { metadata { name: \"pod\" uid: \"pod\" namespace: \"default\" } } \
                   runtime_handler: \"sublet-small\"";
    let refused = containerd.cri("RunPodSandbox", request);
    eprintln!("RunPodSandbox without the handler: {}", refused.stderr);
    assert!(
        !refused.ok && refused.stderr.contains("no runtime for \"sublet-small\" is configured"),
        "{refused:?}"
    );
    containerd.assert_empty();
}
