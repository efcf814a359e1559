//! Named shares as CDI devices, by real engines: `docker run --device sublet/share=small`, `podman run`,
//! `podman kube play`. Runs in the root that tests/engines/enter gives. One H200: 132 SMs, 143155 MiB for CUDA.

use std::os::unix::fs::PermissionsExt as _;

use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};
use sublet_e2e::docker::{Docker, skip_unless_engines};
use sublet_e2e::podman::{CdiOffer, IMAGE, Podman};
use sublet_e2e::{Engine, World, eventually, is_alive};

const SMALL: &str = "[share.small]\nsm = 25\nmemory = \"8GiB\"\n";
const DEVICE: &str = "sublet/share=small";

/// Docker with a CDI device, and with the low-level runtime under test as a separate runtime.
fn docker(topology: &str, shares: &str) -> Docker {
    let world = World::simulated(topology, shares);
    let program = format!("/usr/bin/{}", world.engine.program());
    let runtimes = json!({
        "sublet": {"path": sublet_e2e::bin_dir().join("sublet-runtime")}, "low": {"path": program},
    });
    let docker = Docker::up(world, &json!({"runtimes": runtimes}));
    docker.world.generate_cdi();
    docker
}

/// The specification's place is given back last.
fn podman(shares: &str) -> (Podman, CdiOffer) {
    let podman = Podman::up(World::simulated("h200", shares));
    let offer = podman.offer_cdi();
    (podman, offer)
}

/// Nothing is left: no lease, no daemon, once the engine's own tidying is over.
fn assert_empty(world: &World) {
    assert!(eventually(|| world.leases().is_empty()), "leases are left: {:?}", world.leases());
    assert!(eventually(|| world.daemons().is_empty()), "daemons are left");
    world.assert_empty();
}

/// The ledger as it stands, without any command that would put it right first.
fn leases_on_disk(world: &World) -> usize {
    let text = std::fs::read(world.state_dir().join("ledger.json")).unwrap_or_default();
    let ledger: Value = serde_json::from_slice(&text).unwrap_or_default();
    ledger["leases"].as_array().map_or(0, Vec::len)
}

fn is_quarter(info: &Value) {
    assert_eq!(
        (&info["error"], &info["mps"], &info["sm"], &info["count"]),
        (&Value::Null, &json!(true), &json!(32), &json!(1)),
        "{info}"
    );
}

fn is_share(info: &Value) {
    is_quarter(info);
    let free = info["free_mib"].as_i64().expect("free_mib");
    assert!((free - 8047).abs() < 64, "free {free} MiB of 8192");
}

#[test]
fn docker_run_device_gives_the_share_and_takes_it_back() {
    if skip_unless_engines() {
        return;
    }
    let docker = docker("h200", SMALL);
    let id = docker.hold_cdi(
        "job",
        DEVICE,
        &["--runtime=low", "--health-cmd=cuda-probe info", "--health-interval=1s"],
    );
    is_share(&docker.event("job", "info"));
    // What Docker execs has the image's environment alone: the server's ceiling, CUDA's default place.
    for before in [&[][..], &["env", "-i"]] {
        is_quarter(&docker.exec_info("job", before));
    }
    let log = || docker.inspect("job", "State.Health.Log");
    assert!(eventually(|| log().contains(r#"\"sm\":32"#)), "no health check saw the share: {}", log());
    let lease = docker.lease(&id).expect("a lease");
    assert_eq!(
        (&lease["state"], &lease["isolation"], &lease["pid"]),
        (&json!("active"), &json!("shared"), &json!(docker.pid("job").as_raw()))
    );
    let listed = docker.ask(&["exec", "job", "sh", "-c", "ls -l /dev | grep nvidia"]);
    let listed: Vec<_> = listed.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
    let named: Vec<_> = listed.iter().map(|line| (line[0], line[2], *line.last().expect("a name"))).collect();
    let node = |name| ("crw-rw-rw-", "0", name);
    assert_eq!(named, [node("nvidia-uvm"), node("nvidia-uvm-tools"), node("nvidia0"), node("nvidiactl")]);
    // poststop frees it, and not only the next command.
    docker.done(&["stop", "-t", "0", "job"]);
    assert!(eventually(|| leases_on_disk(&docker.world) == 0), "poststop came to nothing");
    docker.done(&["start", "job"]);
    assert_eq!(leases_on_disk(&docker.world), 1);
    is_quarter(&docker.exec_info("job", &[]));
    kill(docker.pid("job"), Signal::SIGKILL).expect("SIGKILL");
    assert!(eventually(|| leases_on_disk(&docker.world) == 0), "poststop came to nothing");
    docker.done(&["rm", "-f", "job"]);
    assert_empty(&docker.world);
}

#[test]
fn only_the_named_gpu_opens() {
    if skip_unless_engines() {
        return;
    }
    let docker = docker("h200x8", "[share.turn]\nmode = \"time-slice\"\n");
    let unknown = docker.run_cdi("plain", "sublet/share=turn", &["--runtime=low"], &["true"]);
    assert!(!unknown.ok && unknown.stderr.contains("unresolvable CDI devices"), "{unknown:?}");
    let id = docker.hold_cdi("job", "sublet/share=turn.3", &["--runtime=low"]);
    let device = &docker.world.status()["devices"][3];
    assert_eq!(docker.lease(&id).expect("a lease")["device"], device["uuid"]);
    let info = docker.event("job", "info");
    assert_eq!((&info["error"], &info["count"], &info["mps"]), (&Value::Null, &json!(1), &json!(false)));
    // GPU 3 of this host is /dev/nvidia2.
    assert_eq!(device["minor"], 2);
    docker.done(&["exec", "job", "mknod", "/tmp/other", "c", "195", "3"]);
    let probe = ["exec", "job", "cuda-probe", "noderights", "/dev/nvidia2", "/dev/nvidiactl", "/tmp/other"];
    let opened = docker.cli(&probe).json();
    let results: Vec<_> = opened.iter().filter_map(|line| line["result"].as_str()).collect();
    // Allowed, and no driver behind it; refused by the device cgroup.
    assert_eq!(results, ["ENXIO", "ENXIO", "EPERM"]);
    docker.done(&["rm", "-f", "plain", "job"]);
    assert_empty(&docker.world);
}

#[test]
fn what_the_image_asks_for_beyond_the_specification_is_added() {
    if skip_unless_engines() {
        return;
    }
    let docker = docker("h200", SMALL);
    let probe = ["exec", "job", "cuda-probe", "noderights", "/dev/nvidia-modeset", "/dev/nvidia0"];
    for (capabilities, expected) in [("compute", ["ENOENT", "ENXIO"]), ("all", ["ENXIO", "ENXIO"])] {
        let image = format!("NVIDIA_DRIVER_CAPABILITIES={capabilities}");
        let _ = docker.hold_cdi("job", DEVICE, &["--runtime=low", "-e", &image]);
        let opened = docker.cli(&probe).json();
        let results: Vec<_> = opened.iter().filter_map(|line| line["result"].as_str()).collect();
        assert_eq!(results, expected, "{capabilities}");
        docker.done(&["rm", "-f", "job"]);
    }
    assert_empty(&docker.world);
}

#[test]
fn of_twenty_at_once_those_start_that_fit() {
    if skip_unless_engines() {
        return;
    }
    let docker = docker("h200", "[share.tenth]\nsm = 10\n");
    let names: Vec<String> = (0..20).map(|n| format!("c{n:02}")).collect();
    let start =
        |name: &String| docker.run_cdi(name, "sublet/share=tenth", &["--runtime=low"], &["sleep", "600"]);
    let done: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = names.iter().map(|name| scope.spawn(|| start(name))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    assert_eq!(done.iter().filter(|done| done.ok).count(), 10, "{done:?}");
    assert_eq!(docker.world.leases().len(), 10);
    let all: Vec<&str> = names.iter().map(String::as_str).collect();
    docker.done(&[&["rm", "-f"], &all[..]].concat());
    assert_empty(&docker.world);
}

#[test]
fn a_share_that_is_taken_stops_the_container_and_says_why() {
    if skip_unless_engines() {
        return;
    }
    let docker = docker("h200", "[share.large]\nsm = 70\n[share.small]\nsm = 40\n");
    let _ = docker.hold_cdi("large", "sublet/share=large", &["--runtime=low"]);
    let refused = docker.run_cdi("small", "sublet/share=small.0", &["--runtime=low"], &["true"]);
    assert!(!refused.ok, "{refused:?}");
    if docker.world.engine == Engine::Runc {
        assert!(refused.stderr.contains("30 % SM left"), "{refused:?}");
    }
    let last = docker.world.sublet(&["status", "--last-error"]);
    assert!(String::from_utf8_lossy(&last.stdout).contains("30 % SM left"), "{last:?}");
    assert_eq!(docker.world.leases().len(), 1);
    docker.done(&["rm", "-f", "large"]);
    assert_empty(&docker.world);
    let again = docker.cli(&["start", "small"]);
    assert!(again.ok, "{again:?}");
    docker.done(&["rm", "-f", "small"]);
    assert_empty(&docker.world);
}

#[test]
fn a_killed_engine_leaves_nothing() {
    if skip_unless_engines() {
        return;
    }
    let mut docker = docker("h200", SMALL);
    let id = docker.hold_cdi("job", DEVICE, &["--runtime=low"]);
    let first = docker.pid("job");
    docker.kill_engine();
    assert_eq!(docker.world.leases().len(), 1, "its processes live");
    kill(first, Signal::SIGKILL).expect("SIGKILL");
    assert!(eventually(|| !is_alive(first) && !docker.is_populated(&id)), "killed and not gone");
    assert_empty(&docker.world);
    docker.start_daemon();
    docker.done(&["rm", "-f", "job"]);
    assert_empty(&docker.world);
}

#[test]
fn with_the_shim_it_is_one_lease_and_execs_have_the_memory_limit_too() {
    if skip_unless_engines() {
        return;
    }
    let docker = docker("h200", "[share.small]\nsm = 25\nmemory = \"8GiB\"\n[share.other]\nsm = 10\n");
    for annotation in [&[][..], &["--annotation=sublet.share=small"], &["--annotation=sublet.wait=1s"]] {
        let id = docker.hold_cdi("job", DEVICE, &[&["--runtime=sublet"], annotation].concat());
        is_share(&docker.event("job", "info"));
        is_share(&docker.exec_info("job", &[]));
        let leases = docker.world.leases();
        assert_eq!((leases.len(), &leases[0]["container_id"]), (1, &json!(id)), "{annotation:?}");
        docker.done(&["rm", "-f", "job"]);
        assert_empty(&docker.world);
    }
    let refused = |device: &str, options: &[&str], words: &str| {
        for runtime in ["--runtime=sublet", "--runtime=low"] {
            let refused = docker.run_cdi("job", device, &[&[runtime], options].concat(), &["true"]);
            let last = docker.world.sublet(&["status", "--last-error"]);
            let said = format!("{} {}", refused.stderr, String::from_utf8_lossy(&last.stdout));
            assert!(!refused.ok && said.contains(words), "{runtime} {options:?}: {refused:?} {last:?}");
            docker.done(&["rm", "job"]);
            assert_empty(&docker.world);
        }
    };
    refused(DEVICE, &["--annotation=sublet.sm=50"], "sublet.sm=50 and the CDI device sublet/share=small");
    refused(DEVICE, &["--annotation=sublet.share=other"], "sublet.share=other and the CDI device");
    refused(DEVICE, &["--annotation=sublet.gpu=0"], "sublet.gpu=0 and the CDI device");
    refused(DEVICE, &["--device=sublet/share=other"], "two CDI devices of sublet/share are asked for");
    refused(DEVICE, &["--device-cgroup-rule=c 195:1 rw"], "device cgroup rule `c 195:1 rw`");
    refused(DEVICE, &["--privileged"], "remove `--privileged`");
    // The same device by both of its names is one.
    let _ = docker.hold_cdi("job", DEVICE, &["--runtime=low", "--device=sublet/share=small.0"]);
    assert_eq!(docker.world.leases().len(), 1);
    docker.done(&["rm", "-f", "job"]);
    assert_empty(&docker.world);
}

#[test]
fn remapped_users_get_the_hosts_own_nodes_once() {
    if skip_unless_engines() {
        return;
    }
    let world = World::simulated("h200", SMALL);
    // The container's root is 100000 outside, and has to come by.
    std::fs::set_permissions(world.dir.path(), std::fs::Permissions::from_mode(0o711)).expect("chmod");
    let docker = Docker::up(world, &json!({"userns-remap": "tester"}));
    docker.world.generate_cdi();
    // By the shim, for the simulated nodes are not where a runtime by itself would take them from.
    let _ = docker.hold_cdi("mapped", DEVICE, &["--runtime=sublet"]);
    for info in [docker.event("mapped", "info"), docker.exec_info("mapped", &[])] {
        is_share(&info);
    }
    docker.done(&["rm", "-f", "mapped"]);
    assert_empty(&docker.world);
}

#[test]
fn compose_names_the_device_and_no_runtime() {
    if skip_unless_engines() {
        return;
    }
    let docker = docker("h200", SMALL);
    let file = docker.world.dir.path().join("compose.yaml");
    let text = "services:\n  job:\n    image: probe\n    container_name: job\n    network_mode: none\n    \
                runtime: low\n    command: cuda-probe hold 600\n    deploy: {resources: {reservations: {devices: \
                [{driver: cdi, device_ids: [\"sublet/share=small\"], capabilities: [gpu]}]}}}\n";
    std::fs::write(&file, text).expect("compose.yaml");
    let compose = |what: &[&str]| {
        let file = file.to_str().expect("UTF-8");
        docker.done(&[&["compose", "-p", "test", "-f", file], what].concat());
    };
    compose(&["up", "-d", "--pull=never"]);
    is_share(&docker.event("job", "info"));
    compose(&["down", "-t", "0"]);
    assert_empty(&docker.world);
}

#[test]
fn an_environment_that_would_pass_the_limits_is_refused_or_replaced() {
    if skip_unless_engines() {
        return;
    }
    let docker = docker("h200", SMALL);
    let options =
        ["--runtime=low", "-e", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100", "-e", "NVIDIA_VISIBLE_DEVICES=all"];
    let _ = docker.hold_cdi("job", DEVICE, &options);
    is_share(&docker.event("job", "info"));
    docker.done(&["rm", "-f", "job"]);
    let strange = ["--runtime=low", "-e", "CUDA_MPS_CLIENT_PRIORITY=1"];
    let refused = docker.run_cdi("job", DEVICE, &strange, &["true"]);
    assert!(!refused.ok, "{refused:?}");
    let last = docker.world.sublet(&["status", "--last-error"]);
    let last = String::from_utf8_lossy(&last.stdout).into_owned();
    assert!(last.contains("its environment has CUDA_MPS_CLIENT_PRIORITY"), "{last}");
    docker.done(&["rm", "-f", "job"]);
    assert_empty(&docker.world);
}

#[test]
fn a_specification_that_is_out_of_date_is_refused_until_it_is_generated_anew() {
    if skip_unless_engines() {
        return;
    }
    let docker = docker("h200", SMALL);
    let configure = |from: &str, to: &str| {
        let text = std::fs::read_to_string(&docker.world.config).expect("config.toml");
        assert!(text.contains(from), "{text}");
        std::fs::write(&docker.world.config, text.replace(from, to)).expect("config.toml");
    };
    let refused = |words: &str| {
        let refused = docker.run_cdi("job", DEVICE, &["--runtime=low"], &["true"]);
        let last = docker.world.sublet(&["status", "--last-error"]);
        let last = String::from_utf8_lossy(&last.stdout).into_owned();
        assert!(!refused.ok && last.contains(words), "{refused:?} {last}");
        docker.done(&["rm", "-f", "job"]);
        assert_empty(&docker.world);
    };
    configure("sm = 25", "sm = 50");
    refused("its environment lacks the CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
    docker.world.generate_cdi();
    let _ = docker.hold_cdi("job", DEVICE, &["--runtime=low"]);
    assert_eq!(docker.event("job", "info")["sm"], json!(66));
    docker.done(&["rm", "-f", "job"]);
    configure("[share.small]", "[share.other]");
    refused("small");
}

#[test]
fn podman_run_device_gives_the_share_and_takes_it_back() {
    if skip_unless_engines() {
        return;
    }
    let (podman, _offer) = podman(SMALL);
    let id = podman.hold("job", &[], &["--device", DEVICE]);
    is_share(&podman.event("job", "info"));
    for before in [&[][..], &["env", "-i"]] {
        is_quarter(&podman.exec_info("job", before));
    }
    assert_eq!(podman.lease(&id).expect("a lease")["state"], "active");
    podman.done(&["restart", "-t0", "job"]);
    assert_eq!(podman.world.leases().len(), 1);
    is_quarter(&podman.exec_info("job", &[]));
    podman.done(&["stop", "-t0", "job"]);
    assert!(eventually(|| leases_on_disk(&podman.world) == 0), "poststop came to nothing");
    podman.done(&["rm", "-f", "-t0", "job"]);
    let unknown = podman.run("job", &[], &["--device", "sublet/share=nosuch"], &["true"]);
    assert!(!unknown.ok && unknown.stderr.contains("unresolvable CDI devices"), "{unknown:?}");
    let _ = podman.cli(&["rm", "-f", "-t0", "job"]);
    podman.assert_empty();
}

#[test]
fn podmans_hook_and_runtime_beside_it_make_one_lease() {
    if skip_unless_engines() {
        return;
    }
    let (podman, _offer) = podman("[share.small]\nsm = 25\nmemory = \"8GiB\"\n[share.other]\nsm = 10\n");
    let with = |runtime: &[&str], annotation: &str| {
        let all = Podman::arguments(
            &["run", "-d"],
            "job",
            &[annotation],
            &["--device", DEVICE],
            &["cuda-probe", "hold", "600"],
        );
        podman.cli(&[runtime, &all[..]].concat())
    };
    for runtime in [&[][..], &["--runtime=sublet"]] {
        let started = with(runtime, "sublet.share=small");
        assert!(started.ok, "{runtime:?}: {started:?}");
        is_share(&podman.event("job", "info"));
        assert_eq!(podman.world.leases().len(), 1, "{runtime:?}");
        podman.done(&["rm", "-f", "-t0", "job"]);
        podman.assert_empty();
        let refused = with(runtime, "sublet.share=other");
        let words = "sublet.share=other and the CDI device sublet/share=small";
        assert!(!refused.ok && refused.stderr.contains(words), "{runtime:?}: {refused:?}");
        podman.done(&["rm", "-f", "-t0", "job"]);
        podman.assert_empty();
    }
}

#[test]
fn a_container_of_a_pod_has_a_share_by_its_limits() {
    if skip_unless_engines() {
        return;
    }
    let (podman, _offer) = podman(SMALL);
    let yaml = podman.world.dir.path().join("pod.yaml");
    let container = |name: &str, limits: &str| {
        format!(
            "  - name: {name}\n    image: {IMAGE}\n    imagePullPolicy: Never\n    \
             command: [/usr/bin/cuda-probe, hold, \"600\"]\n{limits}"
        )
    };
    let limits = "    resources:\n      limits:\n        \"sublet/share=small\": 1\n";
    let text = format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: p\nspec:\n  restartPolicy: Never\n  \
         terminationGracePeriodSeconds: 0\n  containers:\n{}{}",
        container("one", limits),
        container("two", "")
    );
    std::fs::write(&yaml, text).expect("pod.yaml");
    let yaml = yaml.to_str().expect("UTF-8");
    let played = podman.cli(&["kube", "play", "--network=none", yaml]);
    assert!(played.ok, "{played:?}");
    is_share(&podman.event("p-one", "info"));
    assert_eq!(podman.world.leases().len(), 1, "the one container that asks");
    podman.done(&["kube", "down", yaml]);
    podman.assert_empty();
}

#[test]
fn a_container_of_a_cri_pod_has_the_share_of_its_device() {
    if skip_unless_engines() || !std::path::Path::new("/sys/fs/cgroup/cpu").exists() {
        return;
    }
    let containerd = sublet_e2e::containerd::Containerd::up(World::simulated("h200", SMALL));
    containerd.world.generate_cdi();
    for handler in ["runc", "unlisted"] {
        let pod = containerd.run_pod(handler, handler, &[]);
        let id = containerd
            .run_in_pod(
                &pod,
                "one",
                &["cdi.k8s.io/sublet=sublet/share=small"],
                &["cuda-probe", "hold", "600"],
            )
            .expect("it starts");
        let seen = containerd.exec_sync_info(&id, &[]);
        if handler == "runc" {
            is_quarter(&seen);
        } else {
            is_share(&seen);
        }
        let leases = containerd.world.leases();
        assert_eq!((leases.len(), &leases[0]["container_id"]), (1, &json!(id)), "{handler}");
        containerd.remove_pod(&pod);
        assert_empty(&containerd.world);
    }
}

#[test]
fn podman_build_gives_a_step_the_share_over_crun_and_cgroup_v2_alone() {
    if skip_unless_engines() {
        return;
    }
    let (podman, _offer) = podman(SMALL);
    if podman.done(&["version", "--format", "{{.Client.Version}}"]).starts_with("4.") {
        eprintln!("skipped: this Podman's build knows no CDI devices");
        return;
    }
    let dir = podman.world.dir.path().join("context");
    std::fs::create_dir(&dir).expect("a directory");
    std::fs::write(dir.join("Containerfile"), format!("FROM {IMAGE}\nRUN [\"cuda-probe\", \"info\"]\n"))
        .expect("written");
    let build = |options: &[&str]| {
        let mut command = podman.command();
        command
            .args("build --no-cache --ulimit=nofile=1024:1024 --ulimit=nproc=4096:4096 --device".split(' '));
        let output = command.arg(DEVICE).args(options).arg(&dir).output().expect("podman runs");
        let said =
            [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        (output.status.success(), said)
    };
    // Podman's build of 5.4 looks for CDI devices in this directory alone.
    let place = "/etc/cdi/sublet.json";
    std::fs::create_dir_all("/etc/cdi").expect("a directory");
    std::fs::copy("/var/run/cdi/sublet.json", place).expect("copied");
    let (crun, said) = build(&["--network=none", "--runtime=/usr/bin/crun"]);
    let left = leases_on_disk(&podman.world);
    // buildah gives runtimes a device rule without access, which cgroup v1 does not take, nor runc; without a runtime there are neither nodes nor hooks.
    let (runc, of_runc) = build(&["--network=none", "--runtime=/usr/bin/runc"]);
    let (_, of_chroot) = build(&["--isolation=chroot"]);
    std::fs::remove_file(place).expect("removed");
    let last = podman.world.sublet(&["status", "--last-error"]).stdout;
    let right = if std::path::Path::new("/sys/fs/cgroup/devices").exists() {
        !crun && said.contains("devices.allow")
    } else {
        crun && said.contains("\"sm\":32")
    };
    assert!(right, "{said}\n{}", String::from_utf8_lossy(&last));
    assert_eq!(left, 0, "poststop came to nothing");
    assert!(!runc && of_runc.contains("device access"), "{of_runc}");
    assert!(!of_chroot.contains("\"sm\":32") && leases_on_disk(&podman.world) == 0, "{of_chroot}");
    // The empty mount points of the driver's files are in the image that was built.
    podman.world.assert_empty();
}
