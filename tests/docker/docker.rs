//! Docker as people use it: a real dockerd, `docker run --runtime sublet`, and every way in which its containers end
//! but by SIGKILL of the engine (`docker_killed.rs`). Runs in the root that tests/engines/enter gives. One H200: 132
//! SMs, 143155 MiB for CUDA.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};
use sublet_e2e::docker::{Docker, IMAGE, skip_unless_engines};
use sublet_e2e::{World, bin_dir, eventually, in_one_line, is_alive, programs};

const QUARTER: &[&str] = &["sublet.sm=25"];

fn h200() -> Docker {
    Docker::up(World::simulated("h200", ""), &json!({}))
}

/// Nothing is left: no lease, no daemon, once the engine's own tidying is over.
fn assert_empty(docker: &Docker) {
    assert!(eventually(|| docker.world.leases().is_empty()), "leases are left: {:?}", docker.world.leases());
    assert!(eventually(|| docker.world.daemons().is_empty()), "daemons are left");
    docker.world.assert_empty();
}

fn lease_id(docker: &Docker, id: &str) -> String {
    let found = || docker.lease(id).filter(|lease| lease["state"] == "active");
    assert!(eventually(|| found().is_some()), "no active lease of {id}: {:?}", docker.world.leases());
    found().expect("it was there")["id"].as_str().expect("an id").to_owned()
}

#[test]
fn the_first_process_execs_and_health_checks_see_the_share() {
    if skip_unless_engines() {
        return;
    }
    let docker = h200();
    docker.world.configure("[accounting]\nowner_labels = [\"cost-centre\", \"team\"]\n");
    let health = [
        "--label=team=vision",
        "--health-cmd=cuda-probe info",
        "--health-interval=1s",
        "--label=com.docker.compose.project=shop",
        "--label=com.docker.compose.service=web",
    ];
    let id = docker.hold("first", &["sublet.sm=25", "sublet.memory=8GiB"], &health);
    let is_share = |info: &Value| {
        assert_eq!((&info["error"], &info["mps"], &info["sm"]), (&Value::Null, &json!(true), &json!(32)));
        let free = info["free_mib"].as_i64().expect("free_mib");
        assert!((free - 8047).abs() < 64, "free {free} MiB of 8192");
    };
    is_share(&docker.event("first", "info"));
    is_share(&docker.exec_info("first", &[]));
    // No environment at all: MPS at CUDA's default place, the server's ceiling and its memory limit.
    let bare = docker.exec_info("first", &["env", "-i"]);
    is_share(&bare);
    let checked = || {
        let log: Value = serde_json::from_str(&docker.inspect("first", "State.Health.Log")).expect("JSON");
        let text = log[0]["Output"].as_str()?.to_owned();
        serde_json::from_str::<Value>(&text).ok()
    };
    assert!(eventually(|| checked().is_some()), "no health check");
    is_share(&checked().expect("it was there"));
    let lease = docker.lease(&id).expect("a lease");
    assert_eq!((&lease["state"], &lease["pid"]), (&json!("active"), &json!(docker.pid("first").as_raw())));
    let called = ["engine", "name", "image", "part_of"].map(|key| lease[key].as_str().unwrap_or_default());
    assert_eq!(called, ["docker", "first", IMAGE, "shop/web"]);
    assert_eq!(lease["owner"], json!({"name": "vision", "known_by": "label"}));
    let report = docker.world.sublet(&["report", "--by", "image", "--format", "json"]);
    let report: Value = serde_json::from_slice(&report.stdout).expect("JSON");
    assert_eq!((&report["rows"][0]["name"], &report["rows"][1]), (&json!(IMAGE), &Value::Null), "{report}");
    let second = docker.hold("second", &["sublet.sm=25"], &health[3..]);
    let owner = docker.lease(&second).expect("a lease")["owner"].clone();
    assert_eq!(owner, json!({"name": "shop", "known_by": "project"}), "without a label of its owner");
    docker.done(&["rm", "-f", "second"]);
    docker.done(&["rename", "first", "renamed"]);
    let released = docker.world.sublet(&["lease", "release", "renam"]);
    let reason = String::from_utf8_lossy(&released.stderr).into_owned();
    assert!(!released.status.success() && reason.contains("is held by container renamed"), "{reason}");
    docker.done(&["rm", "-f", "renamed"]);
    assert_empty(&docker);
}

#[test]
fn the_lease_follows_stop_start_restart_and_kill() {
    if skip_unless_engines() {
        return;
    }
    let docker = h200();
    docker.done(&[
        "create",
        "--name=moves",
        "--network=none",
        "--runtime=sublet",
        "--annotation=sublet.sm=25",
        IMAGE,
        "cuda-probe",
        "hold",
        "600",
    ]);
    assert_eq!(docker.world.leases(), Vec::<Value>::new(), "a container that does not run holds nothing");
    docker.done(&["start", "moves"]);
    let id = docker.inspect("moves", "Id").trim_matches('"').to_owned();
    let mut leases = vec![lease_id(&docker, &id)];
    docker.done(&["stop", "-t", "0", "moves"]);
    assert_empty(&docker);
    docker.done(&["start", "moves"]);
    leases.push(lease_id(&docker, &id));
    docker.done(&["restart", "-t", "0", "moves"]);
    leases.push(lease_id(&docker, &id));
    docker.done(&["pause", "moves"]);
    assert_eq!(lease_id(&docker, &id), leases[2]);
    docker.done(&["unpause", "moves"]);
    assert_eq!(docker.exec_info("moves", &[])["sm"], json!(32));
    assert_eq!(docker.world.leases().len(), 1, "one container, one lease");
    docker.done(&["kill", "moves"]);
    assert_empty(&docker);
    leases.sort();
    leases.dedup();
    assert_eq!(leases.len(), 3, "each start has a lease of its own");
    // What the mounts needed in the container's own layer is gone with them.
    let changed = docker.ask(&["diff", "moves"]);
    let left = |line: &str| ["libcuda", "libnvidia", "nvidia-smi"].iter().any(|name| line.contains(name));
    assert!(!changed.lines().any(left), "{changed}");
}

#[test]
fn a_container_that_docker_restarts_gets_a_new_lease() {
    if skip_unless_engines() {
        return;
    }
    let docker = h200();
    let id = docker.hold("again", QUARTER, &["--restart=always"]);
    let before = (lease_id(&docker, &id), docker.pid("again"));
    kill(before.1, Signal::SIGKILL).expect("SIGKILL");
    assert!(
        eventually(|| docker.pid("again") != before.1 && docker.pid("again").as_raw() != 0),
        "no restart"
    );
    assert_ne!(lease_id(&docker, &id), before.0);
    assert_eq!(docker.world.leases().len(), 1);
    assert_eq!(docker.exec_info("again", &[])["sm"], json!(32));
    docker.done(&["stop", "-t", "0", "again"]);
    assert_empty(&docker);
}

#[test]
fn an_oom_kill_frees_the_lease() {
    if skip_unless_engines() {
        return;
    }
    let limits = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup/init/memory.max"];
    if !limits.iter().any(|path| Path::new(path).exists()) {
        eprintln!("skipped: no memory controller in cgroup2 here (SUBLET_CGROUPS=v1 has it on hybrid hosts)");
        return;
    }
    let docker = h200();
    let glutton = ["sh", "-c", "a=xxxxxxxx; while :; do a=$a$a; done"];
    let started = docker.run("glutton", QUARTER, &["--memory=32m", "--memory-swap=32m"], &glutton);
    assert!(started.ok, "{}", started.stderr);
    docker.done(&["wait", "glutton"]);
    assert_eq!(docker.inspect("glutton", "State.OOMKilled"), "true");
    assert_empty(&docker);
}

#[test]
fn a_killed_containerd_shim_ends_the_lease() {
    if skip_unless_engines() {
        return;
    }
    let docker = h200();
    let id = docker.hold("orphan", QUARTER, &[]);
    let _ = lease_id(&docker, &id);
    let first = docker.pid("orphan");
    let shims = docker.shims();
    assert_eq!(shims.len(), 1);
    kill(shims[0], Signal::SIGKILL).expect("SIGKILL");
    assert!(eventually(|| !is_alive(first)), "docker deletes the container by force");
    assert_empty(&docker);
    assert!(eventually(|| docker.inspect("orphan", "State.Running") == "false"), "docker knows");
    docker.done(&["start", "orphan"]);
    let _ = lease_id(&docker, &id);
    assert_eq!(docker.exec_info("orphan", &[])["sm"], json!(32));
    docker.done(&["rm", "-f", "orphan"]);
    assert_empty(&docker);
}

#[test]
fn live_restore_keeps_the_lease_over_a_restart_of_dockerd() {
    if skip_unless_engines() {
        return;
    }
    let mut docker = Docker::up(World::simulated("h200", ""), &json!({"live-restore": true}));
    let id = docker.hold("stays", QUARTER, &[]);
    let goes = docker.hold("goes", QUARTER, &[]);
    let (lease, first) = (lease_id(&docker, &id), docker.pid("stays"));
    let _ = lease_id(&docker, &goes);
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        docker.end_daemon(signal);
        assert_eq!(lease_id(&docker, &id), lease, "without dockerd");
        docker.start_daemon();
        assert_eq!((lease_id(&docker, &id), docker.pid("stays")), (lease.clone(), first), "with it again");
        assert_eq!(docker.exec_info("stays", &[])["sm"], json!(32));
    }
    // One that ends while there is no dockerd.
    let second = docker.pid("goes");
    docker.end_daemon(Signal::SIGKILL);
    kill(second, Signal::SIGKILL).expect("SIGKILL");
    assert!(eventually(|| docker.lease(&goes).is_none()), "{:?}", docker.world.leases());
    docker.start_daemon();
    assert_eq!(docker.world.leases().len(), 1);
    docker.done(&["stop", "-t", "0", "stays"]);
    assert_empty(&docker);
}

#[test]
fn dockerd_without_live_restore_starts_its_containers_again() {
    if skip_unless_engines() {
        return;
    }
    let mut docker = h200();
    let id = docker.hold("again", QUARTER, &["--restart=always"]);
    let before = lease_id(&docker, &id);
    docker.end_daemon(Signal::SIGKILL);
    docker.start_daemon();
    assert!(
        eventually(|| docker.lease(&id).is_some_and(|lease| lease["id"] != json!(before))),
        "no new lease"
    );
    assert_eq!(docker.world.leases().len(), 1);
    docker.done(&["rm", "-f", "again"]);
    assert_empty(&docker);
}

#[test]
fn docker_run_shows_why_a_share_is_refused() {
    if skip_unless_engines() {
        return;
    }
    let docker = h200();
    let _ = docker.hold("large", &["sublet.sm=70"], &[]);
    let refused = |name: &str, annotations: &[&str], options: &[&str], words: &[&str]| {
        let refused = docker.run(name, annotations, options, &["true"]);
        let said = in_one_line(&refused.stderr);
        let line = said.lines().find(|line| line.contains("OCI runtime create failed")).unwrap_or("");
        assert!(!refused.ok && words.iter().all(|word| line.contains(word)), "{words:?}: {refused:?}");
        docker.done(&["rm", name]);
    };
    refused("full", &["sublet.sm=40"], &[], &["40 %", "30 %"]);
    refused("typo", &["sublet.smm=40"], &[], &["sublet.smm", "sublet.sm"]);
    refused("case", &["Sublet.sm=25"], &[], &["Sublet.sm=25", "write sublet.sm=25"]);
    refused("prefix", &["io.sublet_memory=8GiB"], &[], &["write sublet.memory=8GiB"]);
    refused("forged", &["sublet.lease=0123456789abcdef"], &[], &["sublet.lease=0123456789abcdef", "remove"]);
    refused("open", QUARTER, &["--privileged"], &["remove `--privileged`"]);
    refused("rule", QUARTER, &["--device-cgroup-rule=c 195:* rwm"], &["c 195:* rwm", "--device-cgroup-rule"]);
    let foreign = ["io.foo.sublet.color=red", "sublette.sm=1", "x.kubernetes.io/sublet-gpu=1"];
    let foreign = docker.run("foreign", &foreign, &[], &["true"]);
    assert!(foreign.ok, "{foreign:?}");
    // It may have ended a moment before Docker knows.
    docker.done(&["rm", "-f", "foreign"]);
    docker.done(&["rm", "-f", "large"]);
    assert_empty(&docker);
}

#[test]
fn dockers_own_gpu_request_beside_ours_is_refused_with_the_option_to_remove() {
    if skip_unless_engines() {
        return;
    }
    let world = World::simulated("h200", "");
    // dockerd offers --gpus where it finds this hook; CDI devices are in its spec directory.
    let bin = world.dir.path().join("bin");
    std::fs::create_dir_all(&bin).expect("a directory");
    let hook = bin.join("nvidia-container-runtime-hook");
    programs::copy("/bin/true".as_ref(), &hook);
    let node = json!({"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0});
    let setup = json!([{"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook"]}]);
    let spec = json!({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [
        {"name": "0", "containerEdits": {"deviceNodes": [node], "hooks": setup}},
        {"name": "bare", "containerEdits": {"deviceNodes": [node]}},
    ]});
    std::fs::create_dir_all(world.dir.path().join("cdi")).expect("a directory");
    std::fs::write(world.dir.path().join("cdi/nvidia.json"), spec.to_string()).expect("a CDI spec");
    let docker = Docker::up(world, &json!({}));
    for (option, words) in [
        ("--gpus=all", "remove `--gpus`"),
        ("--device=nvidia.com/gpu=0", "remove `--device` or `--gpus`"),
        ("--device=nvidia.com/gpu=bare", "given the device /dev/nvidia0 in addition to its share"),
    ] {
        let refused = docker.run("both", QUARTER, &[option], &["true"]);
        assert!(!refused.ok && refused.stderr.contains(words), "{option}: {refused:?}");
        docker.done(&["rm", "both"]);
    }
    assert_empty(&docker);
}

#[test]
fn as_default_runtime_sublet_leaves_other_containers_alone() {
    if skip_unless_engines() {
        return;
    }
    let docker = Docker::up(World::simulated("h200", ""), &json!({"default-runtime": "sublet"}));
    let spec_by = |runtime: &[&str]| {
        let all = [
            &["run", "-d", "--name=plain", "--hostname=h", "--network=none"],
            runtime,
            &[IMAGE, "sleep", "600"],
        ];
        let id = docker.ask(&all.concat());
        let text = docker.config(&id).replace(&id, "ID").replace(&id[..12], "ID");
        assert_eq!(docker.ask(&["exec", "plain", "sh", "-c", "ls /dev | grep -c nvidia || true"]), "0");
        docker.done(&["rm", "-f", "plain"]);
        let mut spec: Value = serde_json::from_str(&text).expect("JSON");
        spec["root"]["path"] = json!("the layer");
        spec.to_string()
    };
    assert_eq!(spec_by(&[]), spec_by(&["--runtime=runc"]));
    assert!(!docker.world.state_dir().join("ledger.json").exists(), "nothing was written down");
    // The same default runtime serves those that ask.
    docker.done(&[
        "run",
        "-d",
        "--name=asks",
        "--network=none",
        "--annotation=sublet.sm=25",
        IMAGE,
        "cuda-probe",
        "hold",
        "600",
    ]);
    assert_eq!(docker.exec_info("asks", &[])["sm"], json!(32));
    docker.done(&["rm", "-f", "asks"]);
    assert_empty(&docker);
}

#[test]
fn a_runtime_named_after_a_share_needs_no_annotation() {
    if skip_unless_engines() {
        return;
    }
    let world = World::simulated("h200", "[share.small]\nsm = 12.5\nmemory = \"4GiB\"\n");
    let bin = world.dir.path().join("bin");
    std::fs::create_dir_all(&bin).expect("a directory");
    for name in ["sublet-small", "sublet-nosuch"] {
        std::os::unix::fs::symlink(bin_dir().join("sublet-runtime"), bin.join(name)).expect("a link");
    }
    let runtimes =
        json!({"small": {"path": bin.join("sublet-small")}, "nosuch": {"path": bin.join("sublet-nosuch")}});
    let docker = Docker::up(world, &json!({}));
    docker.reload(&json!({"runtimes": runtimes}));
    let known = || docker.ask(&["info", "--format={{json .Runtimes}}"]).contains("sublet-nosuch");
    assert!(eventually(known), "a reload is enough");
    let run = |runtime: &str| {
        docker.cli(&[
            "run",
            "-d",
            "--name=job",
            "--network=none",
            runtime,
            IMAGE,
            "cuda-probe",
            "hold",
            "600",
        ])
    };
    let started = run("--runtime=small");
    assert!(started.ok, "{}", started.stderr);
    let info = docker.exec_info("job", &[]);
    assert_eq!((&info["sm"], &info["mps"]), (&json!(16), &json!(true)));
    assert!(info["free_mib"].as_i64() < Some(4096));
    assert_eq!(docker.world.leases()[0]["memory_bytes"], json!(4_294_967_296_u64));
    docker.done(&["rm", "-f", "job"]);
    let refused = run("--runtime=nosuch");
    assert!(
        !refused.ok && refused.stderr.contains("nosuch") && refused.stderr.contains("small"),
        "{refused:?}"
    );
    assert_empty(&docker);
}

#[test]
fn two_containers_of_two_users_share_a_gpu() {
    if skip_unless_engines() {
        return;
    }
    let docker = h200();
    let _ = docker.hold("root", QUARTER, &["--read-only", "--tmpfs=/tmp"]);
    let _ = docker.hold("user", &["sublet.sm=60"], &["--user=1000:1000"]);
    for (name, sms) in [("root", 32), ("user", 78)] {
        for info in [docker.event(name, "info"), docker.exec_info(name, &[])] {
            assert_eq!(
                (&info["error"], &info["mps"], &info["sm"]),
                (&Value::Null, &json!(true), &json!(sms)),
                "{name}"
            );
        }
    }
    let status = docker.world.status();
    assert_eq!(status["mps"].as_array().map(Vec::len), Some(1), "one daemon serves both");
    docker.done(&["rm", "-f", "root", "user"]);
    assert_empty(&docker);
}

#[test]
fn remapped_users_get_the_hosts_own_nodes() {
    if skip_unless_engines() {
        return;
    }
    let world = World::simulated("h200", "");
    // The container's root is 100000 outside, and has to come by.
    std::fs::set_permissions(world.dir.path(), PermissionsExt::from_mode(0o711)).expect("chmod");
    let docker = Docker::up(world, &json!({"userns-remap": "tester"}));
    let id = docker.hold("mapped", QUARTER, &[]);
    let map = std::fs::read_to_string(format!("/proc/{}/uid_map", docker.pid("mapped"))).expect("a map");
    assert_eq!(map.split_whitespace().collect::<Vec<_>>(), ["0", "100000", "65536"]);
    for info in [docker.event("mapped", "info"), docker.exec_info("mapped", &[])] {
        assert_eq!((&info["error"], &info["mps"], &info["sm"]), (&Value::Null, &json!(true), &json!(32)));
    }
    let _ = lease_id(&docker, &id);
    let opened =
        docker.cli(&["exec", "mapped", "cuda-probe", "noderights", "/dev/nvidia0", "/dev/nvidiactl"]);
    let opened = opened.json();
    let results: Vec<_> = opened.iter().filter_map(|line| line["result"].as_str()).collect();
    // Allowed, and no driver behind it.
    assert_eq!(results, ["ENXIO", "ENXIO"]);
    docker.done(&["rm", "-f", "mapped"]);
    // The container's root is not the host's.
    let node = docker.world.driver_root.as_ref().expect("a simulated driver").join("dev/nvidia0");
    std::fs::set_permissions(node, PermissionsExt::from_mode(0o660)).expect("chmod");
    let refused = docker.run("closed", QUARTER, &[], &["sleep", "600"]);
    let why =
        "has mode 0660, so the container, in its user namespace, may not open it: give the nodes mode 0666";
    assert!(!refused.ok && refused.stderr.contains(why), "{refused:?}");
    docker.done(&["rm", "-f", "closed"]);
    assert_empty(&docker);
}

#[test]
fn of_twenty_at_once_those_start_that_fit() {
    if skip_unless_engines() {
        return;
    }
    let docker = Docker::up(World::simulated("h200x8", ""), &json!({}));
    let names: Vec<String> = (0..20).map(|n| format!("c{n:02}")).collect();
    // Two halves of each of eight GPUs.
    let done: Vec<_> = std::thread::scope(|scope| {
        let start = |name| docker.run(name, &["sublet.sm=50"], &[], &["cuda-probe", "hold", "600"]);
        let threads: Vec<_> = names.iter().map(|name| scope.spawn(move || start(name))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let refused: Vec<_> = done.iter().filter(|done| !done.ok).collect();
    assert_eq!(refused.len(), 4, "{refused:?}");
    assert!(refused.iter().all(|done| done.stderr.contains("50 %")), "{refused:?}");
    let leases = docker.world.leases();
    assert_eq!(leases.len(), 16);
    for (name, _) in names.iter().zip(&done).filter(|(_, done)| done.ok) {
        assert_eq!(docker.exec_info(name, &[])["sm"], json!(66), "{name}: half of 132");
    }
    let all: Vec<&str> = names.iter().map(String::as_str).collect();
    docker.done(&[&["rm", "-f"], &all[..]].concat());
    assert_empty(&docker);
}

#[test]
fn compose_passes_the_annotations() {
    if skip_unless_engines() {
        return;
    }
    let docker = h200();
    if !docker.cli(&["compose", "version"]).ok {
        eprintln!("skipped: no docker compose here");
        return;
    }
    let file = docker.world.dir.path().join("compose.yaml");
    let text = "services:\n  job:\n    image: probe\n    container_name: job\n    network_mode: none\n    runtime: sublet\n    \
                annotations:\n      sublet.sm: \"25\"\n      sublet.memory: 8GiB\n    command: cuda-probe hold 600\n";
    std::fs::write(&file, text).expect("compose.yaml");
    let compose = |what: &[&str]| {
        let file = file.to_str().expect("UTF-8");
        docker.done(&[&["compose", "-p", "test", "-f", file], what].concat());
    };
    compose(&["up", "-d", "--pull=never"]);
    let info = docker.exec_info("job", &[]);
    assert_eq!((&info["sm"], &info["mps"]), (&json!(32), &json!(true)));
    assert!(info["free_mib"].as_i64() < Some(8192));
    compose(&["restart", "-t", "0"]);
    assert_eq!(docker.world.leases().len(), 1);
    compose(&["down", "-t", "0"]);
    assert_empty(&docker);
}
