//! Podman as people use it: containers with a share by sublet's hook and by `--runtime sublet`, and every way in which
//! they end but by SIGKILL of the engine (killed.rs). Runs in the root that tests/engines/enter gives. One H200: 132
//! SMs, 143155 MiB.

use std::path::PathBuf;
use std::process::Stdio;

use serde_json::{Value, json};
use sublet_e2e::docker::skip_unless_engines;
use sublet_e2e::podman::{IMAGE, Podman};
use sublet_e2e::{Finished, World, bin_dir, eventually, programs, tree};

const QUARTER: &[&str] = &["sublet.sm=25"];
const SHARE: &[&str] = &["sublet.sm=25", "sublet.memory=8GiB"];
const SLEEP: &[&str] = &["sleep", "600"];

fn h200() -> Podman {
    Podman::up(World::simulated("h200", ""))
}

fn is_share(info: &Value) {
    assert_eq!(
        (&info["error"], &info["mps"], &info["sm"]),
        (&Value::Null, &json!(true), &json!(32)),
        "{info}"
    );
    let free = info["free_mib"].as_i64().expect("free_mib");
    assert!((free - 8047).abs() < 64, "free {free} MiB of 8192");
}

fn lease_id(podman: &Podman, id: &str) -> String {
    let lease = podman.lease(id).unwrap_or_else(|| panic!("no lease of {id}: {:?}", podman.world.leases()));
    assert_eq!(lease["state"], "active");
    lease["id"].as_str().expect("an id").to_owned()
}

/// A low-level runtime that does `before` and then becomes the real one.
fn wrapped_runtime(podman: &Podman, before: &str) -> String {
    let path = podman.world.dir.path().join("wrapped-runtime");
    let real = podman.runtime.display();
    programs::script(&path, &format!("{before}\nexec {real} \"$@\"\n"));
    path.display().to_string()
}

#[test]
fn the_first_process_execs_and_health_checks_see_the_share() {
    if skip_unless_engines() {
        return;
    }
    let podman = h200();
    let id = podman.hold("first", SHARE, &["--health-cmd=cuda-probe info", "--health-interval=disable"]);
    is_share(&podman.event("first", "info"));
    let lease = podman.lease(&id).expect("a lease");
    assert_eq!(
        (&lease["state"], lease["pid"].to_string()),
        (&json!("active"), podman.inspect("first", ".State.Pid"))
    );
    let called = ["engine", "name", "image", "user"].map(|key| lease[key].as_str().unwrap_or_default());
    assert_eq!(called, ["podman", "first", "localhost/probe:latest", "root"]);
    // What Podman execs has the image's environment alone: MPS at CUDA's default place, the server's
    // ceiling, which is the largest share's.
    for before in [&[][..], &["env", "-i"]] {
        is_share(&podman.exec_info("first", before));
    }
    // Podman keeps containers that it removes when they end in a list of their own.
    let more = podman.hold("more", &["sublet.sm=25", "sublet.memory=16GiB"], &["--rm"]);
    assert_eq!(podman.lease(&more).expect("a lease")["name"], "more");
    let free = podman.exec_info("first", &["env", "-i"])["free_mib"].as_i64();
    assert!(free > Some(16_000) && free < Some(16_384), "the largest neighbour's: {free:?} MiB");
    assert!(podman.lease(&more).is_some());
    podman.done(&["rm", "-f", "-t0", "more"]);
    is_share(&podman.exec_info("first", &["env", "-i"]));
    podman.done(&["healthcheck", "run", "first"]);
    let log = podman.inspect("first", "json .State.Health.Log");
    assert!(log.contains(r#"\"sm\":32"#), "{log}");
    let ledger = podman.ledger();
    let container = &ledger["leases"][0]["container"];
    for known in ["bundle", "record"] {
        let path = container[known].as_str().expect("a path");
        assert!(path.starts_with('/') && path.contains(&id), "{known}: {path}");
    }
    assert!(ledger["leases"][0]["init"]["cgroup"].as_str().expect("a cgroup").contains(&id));
    podman.done(&["rm", "-f", "-t0", "first"]);
    podman.assert_empty();
}

#[test]
fn the_lease_follows_the_container_through_its_life() {
    if skip_unless_engines() {
        return;
    }
    let podman = h200();
    podman.done(&Podman::arguments(&["create"], "c", QUARTER, &[], SLEEP));
    let id = podman.inspect("c", ".Id");
    assert!(podman.lease(&id).is_none(), "podman create makes no container yet");
    podman.done(&["init", "c"]);
    let first = lease_id(&podman, &id);
    podman.done(&["start", "c"]);
    assert_eq!(lease_id(&podman, &id), first);
    podman.done(&["restart", "-t0", "c"]);
    let second = lease_id(&podman, &id);
    assert_ne!(second, first, "another start, another lease");
    podman.done(&["stop", "-t0", "c"]);
    podman.assert_empty();
    podman.done(&["start", "c"]);
    podman.done(&["kill", "c"]);
    assert!(eventually(|| podman.world.leases().is_empty()), "killed");
    podman.done(&["init", "c"]);
    podman.done(&["rm", "-f", "-t0", "c"]);
    podman.assert_empty();
    // One that ends by itself, and one that is removed as it ends.
    let done = podman.run("short", QUARTER, &[], &["true"]);
    assert!(done.ok, "{done:?}");
    podman.done(&["wait", "short"]);
    podman.assert_empty();
    let info = podman.done(&Podman::arguments(&["run", "--rm"], "rm", SHARE, &[], &["cuda-probe", "info"]));
    is_share(&serde_json::from_str(&info).expect("JSON"));
    podman.assert_empty();
}

#[test]
fn a_refusal_reaches_whoever_started_the_container() {
    if skip_unless_engines() {
        return;
    }
    let podman = h200();
    let _ = podman.hold("large", &["sublet.sm=70"], &[]);
    let refused = podman.run("small", &["sublet.sm=40"], &[], SLEEP);
    let says = "sublet refuses this container: no room for mps, 40 % SM: GPU 0 has";
    assert!(!refused.ok && refused.stderr.contains(says), "{refused:?}");
    assert!(refused.stderr.contains("30 % SM left"), "{refused:?}");
    let again = podman.cli(&["start", "small"]);
    assert!(!again.ok && again.stderr.contains(says), "{again:?}");
    assert_eq!(podman.world.leases().len(), 1);
    let last = podman.world.sublet(&["status", "--last-error"]);
    assert!(String::from_utf8_lossy(&last.stdout).contains("30 % SM left"));
    for (annotation, word) in [
        ("sublet.smm=25", "did you mean"),
        ("sublet.lease=0123456789abcdef", "this container has no live lease"),
        ("Sublet.sm=25", "write sublet.sm=25"),
        ("SUBLET_SM=25", "write sublet.sm=25"),
        ("io.sublet/mig-caps=monitor", "write sublet.mig-caps=monitor"),
    ] {
        let refused = Podman::arguments(&["run", "--rm"], "bad", &[annotation], &[], SLEEP);
        let refused = podman.cli(&refused);
        assert!(!refused.ok && refused.stderr.contains(word), "{refused:?}");
    }
    for foreign in ["io.foo.sublet.color=red", "sublette.sm=1", "x.kubernetes.io/sublet-gpu=1"] {
        let run = Podman::arguments(&["run", "--rm"], "foreign", &[foreign], &[], &["true"]);
        let run = podman.cli(&run);
        assert!(run.ok, "{foreign}: {run:?}");
    }
    let masks = ["--security-opt", "mask=/run/sublet"];
    for entry_point in [&[][..], &["--runtime=sublet"]] {
        let masked = Podman::arguments(&["run", "--rm"], "bad", &["sublet.sm=10"], &masks, SLEEP);
        let masked = podman.cli(&[entry_point, &masked[..]].concat());
        assert!(!masked.ok && masked.stderr.contains("hides the MPS directory"), "{masked:?}");
    }
    podman.done(&["rm", "-f", "-t0", "large"]);
    podman.done(&["start", "small"]);
    podman.done(&["rm", "-f", "-t0", "small"]);
    podman.assert_empty();
}

#[test]
fn the_shim_is_a_runtime_of_podmans() {
    if skip_unless_engines() {
        return;
    }
    let podman = h200();
    std::fs::remove_file(podman.world.dir.path().join("hooks/sublet.json")).expect("no hook");
    let shim = |verb: &[&str], name: &str, annotations: &[&str]| {
        let all = Podman::arguments(verb, name, annotations, &[], &["cuda-probe", "hold", "600"]);
        podman.cli(&[&["--runtime=sublet"], &all[..]].concat())
    };
    let started = shim(&["run", "-d"], "s", SHARE);
    assert!(started.ok, "{started:?}");
    let id = started.stdout.trim_end();
    is_share(&podman.event("s", "info"));
    is_share(&podman.exec_info("s", &[]));
    let first = lease_id(&podman, id);
    podman.done(&["restart", "-t0", "s"]);
    assert_ne!(lease_id(&podman, id), first);
    let refused = shim(&["run", "-d"], "t", &["sublet.sm=80"]);
    assert!(!refused.ok && refused.stderr.contains("no room for mps, 80 % SM"), "{refused:?}");
    podman.done(&["rm", "-f", "-t0", "s"]);
    podman.assert_empty();
}

/// What an image declares as a VOLUME outlives the container, and `podman exec` gives none of the share's environment.
#[test]
fn an_images_volume_at_tmp_has_the_default_directory_while_the_container_runs() {
    if skip_unless_engines() {
        return;
    }
    let podman = h200();
    let tar = podman.world.dir.path().join("image.tar");
    podman.done(&["import", "--quiet", "--change=VOLUME /tmp", tar.to_str().expect("UTF-8"), "with-volume"]);
    for (name, entry_point) in [("hook", &[][..]), ("shim", &["--runtime=sublet"])] {
        let mut all = Podman::arguments(&["run", "-d"], name, SHARE, &[], &["cuda-probe", "hold", "600"]);
        for image in all.iter_mut().filter(|argument| **argument == IMAGE) {
            *image = "with-volume";
        }
        let started = podman.cli(&[entry_point, &all[..]].concat());
        assert!(started.ok, "{started:?}");
        is_share(&podman.event(name, "info"));
        let bare = podman.cli(&["exec", name, "env", "-i", "/usr/bin/cuda-probe", "info"]);
        is_share(&bare.info());
        let volume = PathBuf::from(podman.inspect(name, "(index .Mounts 0).Source"));
        assert!(volume.join("nvidia-mps").is_dir(), "{}", volume.display());
        podman.done(&["rm", "-f", "-t0", name]);
        assert!(volume.is_dir() && tree(&volume).is_empty(), "{name}: {:?}", tree(&volume));
    }
    podman.assert_empty();
}

/// Podman 5.4 passes its own list of devices with every update; the share's are not in it.
#[test]
fn an_update_does_not_take_the_gpu_away() {
    if skip_unless_engines() {
        return;
    }
    let podman = h200();
    let version = podman.done(&["version", "--format", "{{.Client.Version}}"]);
    let all = Podman::arguments(&["run", "-d"], "held", SHARE, &[], &["cuda-probe", "hold", "600"]);
    let started = podman.cli(&[&["--runtime=sublet"], &all[..]].concat());
    assert!(started.ok, "{started:?}");
    is_share(&podman.event("held", "info"));
    let updated = podman.cli(&["update", "--memory=1g", "held"]);
    let takes_it = podman.world.engine == sublet_e2e::Engine::Crun && !version.starts_with("4.");
    // On a hybrid host cgroup v2 has no memory limits: runc fails at them.
    let controllers = std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers");
    let has_memory = controllers.map_or(true, |names| names.contains("memory"));
    assert_eq!(updated.ok, !takes_it && has_memory, "{updated:?}");
    let refused = "this update would take the container's GPU away";
    assert_eq!(updated.stderr.contains(refused), takes_it, "{updated:?}");
    let seen = podman.cli(&["exec", "held", "cuda-probe", "noderights", "/dev/nvidia0"]).json();
    let node = seen.iter().find(|line| line["event"] == "node").expect("an answer");
    assert_eq!(node["result"], "ENXIO", "allowed by the cgroup, no driver behind it");
    podman.done(&["rm", "-f", "-t0", "held"]);
    podman.assert_empty();
}

/// The shim's daemon is adopted by conmon, which stays as long as the daemon does.
#[test]
fn podman_waits_for_no_daemon_that_another_container_uses() {
    if skip_unless_engines() {
        return;
    }
    let podman = h200();
    std::fs::remove_file(podman.world.dir.path().join("hooks/sublet.json")).expect("no hook");
    let by_shim = |verb: &[&str], name: &str| {
        let all = Podman::arguments(verb, name, QUARTER, &[], &["cuda-probe", "hold", "600"]);
        let mut command = podman.command();
        command.arg("--runtime=sublet").args(all).stdout(Stdio::null());
        command.spawn().expect("podman is installed")
    };
    let mut first = by_shim(&["run", "--rm"], "first");
    assert!(eventually(|| podman.cli(&["logs", "first"]).stdout.contains("info")));
    let daemons = podman.world.daemon_pids("");
    assert!(by_shim(&["run", "-d"], "other").wait().expect("it ends").success());
    let _ = podman.event("other", "info");
    podman.done(&["kill", "first"]);
    let returned = || first.try_wait().expect("it is ours").is_some();
    assert!(eventually(returned), "it waits");
    assert_eq!(podman.exec_info("other", &[])["sm"], json!(32), "by MPS");
    assert_eq!(podman.world.daemon_pids(""), daemons);
    podman.done(&["rm", "-f", "-t0", "other"]);
    podman.assert_empty();
}

#[test]
fn two_entry_points_at_once_make_one_lease() {
    if skip_unless_engines() {
        return;
    }
    let podman = h200();
    // The hook in two directories, and the shim below it.
    let hooks = podman.world.dir.path().join("hooks");
    std::fs::copy(hooks.join("sublet.json"), hooks.join("again.json")).expect("a second hook");
    let all = Podman::arguments(&["run", "-d"], "both", SHARE, &[], &["cuda-probe", "hold", "600"]);
    let started = podman.cli(&[&["--runtime=sublet"], &all[..]].concat());
    assert!(started.ok, "{started:?}");
    is_share(&podman.event("both", "info"));
    assert_eq!(podman.world.leases().len(), 1);
    is_share(&podman.exec_info("both", &[]));
    let bundle = PathBuf::from(podman.inspect("both", ".OCIConfigPath"));
    let spec: Value = serde_json::from_slice(&std::fs::read(bundle).expect("config.json")).expect("JSON");
    assert_eq!(spec["hooks"]["createRuntime"].as_array().map(Vec::len), Some(1));
    assert_eq!(spec["hooks"]["poststop"].as_array().map(Vec::len), Some(1));
    let env = spec["process"]["env"].as_array().expect("env");
    let ours =
        |entry: &&Value| entry.as_str().is_some_and(|entry| entry.starts_with("CUDA_VISIBLE_DEVICES="));
    assert_eq!(env.iter().filter(ours).count(), 1);
    podman.done(&["restart", "-t0", "both"]);
    assert_eq!(podman.world.leases().len(), 1);
    podman.done(&["rm", "-f", "-t0", "both"]);
    podman.assert_empty();
}

#[test]
fn a_runtime_that_fails_leaves_no_lease() {
    if skip_unless_engines() {
        return;
    }
    let podman = h200();
    // Before any hook of the container's runs, and after the one that binds.
    let broken = wrapped_runtime(&podman, "exit 1");
    let all = Podman::arguments(&["run", "--rm"], "broken", QUARTER, &[], SLEEP);
    assert!(!podman.cli(&[&["--runtime", &broken], &all[..]].concat()).ok);
    assert_eq!(podman.ledger()["leases"][0]["state"], "pending", "nobody has looked yet");
    podman.assert_empty();
    let absent = podman.run("absent", QUARTER, &["--rm"], &["/no/such/program"]);
    assert!(!absent.ok && absent.stderr.contains("/no/such/program"), "{absent:?}");
    podman.assert_empty();
}

#[test]
fn a_service_that_outlives_a_failed_start_may_start_it_anew() {
    if skip_unless_engines() {
        return;
    }
    let podman = h200();
    let dir = podman.world.dir.path();
    let (flag, socket) = (dir.join("fail"), format!("unix://{}", dir.join("api.sock").display()));
    let runtime = wrapped_runtime(&podman, &format!("[ -e {} ] && exit 1", flag.display()));
    let mut service = podman
        .command()
        .args(["--runtime", &runtime, "system", "service", "--time=0", &socket])
        .spawn()
        .expect("podman runs");
    let remote = |arguments: &[&str]| podman.command_remote(&socket, arguments);
    assert!(eventually(|| remote(&["version"]).ok), "the service answers");
    let create = Podman::arguments(&["create"], "c", QUARTER, &[], SLEEP);
    let created = remote(&create);
    assert!(created.ok, "{created:?}");
    std::fs::write(&flag, "").expect("fail");
    assert!(!remote(&["start", "c"]).ok);
    assert_eq!(podman.world.leases()[0]["state"], "pending", "its owner lives, and it may yet be bound");
    std::fs::remove_file(&flag).expect("no fail");
    let started = remote(&["start", "c"]);
    assert!(started.ok, "{started:?}");
    let leases = podman.world.leases();
    assert_eq!((leases.len(), &leases[0]["state"]), (1, &json!("active")));
    let removed = remote(&["rm", "-f", "-t0", "c"]);
    assert!(removed.ok, "{removed:?}");
    service.kill().expect("SIGKILL");
    service.wait().expect("it ends");
    podman.assert_empty();
}

#[test]
fn containers_without_annotations_builds_and_buildah_are_left_alone() {
    if skip_unless_engines() {
        return;
    }
    let podman = h200();
    let listed = podman.done(&["run", "--rm", "--annotation", "org.example.sublet=no", IMAGE, "ls", "/dev"]);
    assert!(!listed.contains("nvidia"), "{listed}");
    let file = podman.world.dir.path().join("Containerfile");
    std::fs::write(&file, format!("FROM {IMAGE}\nRUN echo built > /built\nLABEL sublet.sm=25\n"))
        .expect("written");
    let file = file.to_str().expect("UTF-8");
    podman.done(&["build", "--network=none", "-t", "built", "-f", file, "/tmp"]);
    assert_eq!(podman.done(&["run", "--rm", "built", "cat", "/built"]), "built");
    let buildah = |arguments: &[&str]| {
        let output = podman.command_of("buildah").args(arguments).output().expect("buildah is installed");
        assert!(
            output.status.success(),
            "buildah {arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
    };
    let container = buildah(&["from", "--pull-never", "--network=none", IMAGE]);
    let runtime = podman.runtime.display().to_string();
    assert_eq!(buildah(&["run", "--runtime", &runtime, &container, "--", "cat", "/proc/1/comm"]), "cat");
    buildah(&["rm", &container]);
    assert!(!podman.world.state_dir().join("ledger.json").exists(), "nothing was written down");
}

#[test]
fn pods_share_by_container_and_their_infra_container_takes_nothing() {
    if skip_unless_engines() {
        return;
    }
    let log = tempfile::NamedTempFile::new().expect("a file");
    let world = World::simulated("h200", "");
    let config = std::fs::read_to_string(&world.config).expect("config.toml");
    let with_log = config.replacen("[runtime]\n", &format!("[runtime]\nlog = {:?}\n", log.path()), 1);
    std::fs::write(&world.config, with_log).expect("config.toml is written");
    let podman = Podman::up(world);
    let version = podman.done(&["version", "--format", "{{.Client.Version}}"]);
    if version.starts_with("4.") && podman.world.engine == sublet_e2e::Engine::Runc {
        eprintln!("skipped: this Podman's pods do not start with runc here, with or without sublet");
        return;
    }
    let yaml = podman.world.dir.path().join("pod.yaml");
    let container = |name: &str| {
        format!(
            "  - name: {name}\n    image: {IMAGE}\n    imagePullPolicy: Never\n    command: [/bin/sleep, \"600\"]\n"
        )
    };
    let text = format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: p\n  annotations:\n    sublet.sm: \"25\"\nspec:\n  \
         restartPolicy: Never\n  terminationGracePeriodSeconds: 0\n  containers:\n{}{}",
        container("one"),
        container("two")
    );
    std::fs::write(&yaml, &text).expect("pod.yaml");
    let yaml = yaml.to_str().expect("UTF-8");
    let played = podman.cli(&["kube", "play", "--network=none", yaml]);
    assert!(played.ok, "{played:?}");
    assert_eq!(podman.world.leases().len(), 2, "two containers, and not the infra container");
    let warned = std::fs::read_to_string(log.path()).expect("the log");
    assert_eq!(
        warned.lines().filter(|line| line.contains("of the same pod holds a share too")).count(),
        1,
        "{warned}"
    );
    podman.done(&["kube", "down", yaml]);
    podman.assert_empty();
    let for_one = text.replace("sublet.sm:", "sublet.sm/one:");
    std::fs::write(yaml, for_one).expect("pod.yaml");
    let played = podman.cli(&["kube", "play", "--network=none", yaml]);
    assert!(played.ok, "{played:?}");
    assert_eq!(podman.world.leases().len(), 1, "container one alone");
    assert_eq!(podman.done(&["inspect", "--format={{.State.Running}}", "p-two"]), "true");
    podman.done(&["kube", "down", yaml]);
    podman.assert_empty();
    podman.done(&["pod", "create", "--name=q", "--network=none"]);
    let id = podman.hold("in-q", QUARTER, &["--pod=q"]);
    assert_eq!(podman.event("in-q", "info")["sm"], json!(32));
    let _ = lease_id(&podman, &id);
    assert_eq!(podman.world.leases().len(), 1);
    if version.starts_with("4.") {
        eprintln!("skipped: a container of what this Podman generates does not find its program");
        return;
    }
    // What Podman makes of it has `sublet.sm/in-q`.
    let generated = podman.done(&["kube", "generate", "q"]);
    podman.done(&["pod", "rm", "-f", "-t0", "q"]);
    podman.assert_empty();
    std::fs::write(yaml, generated).expect("pod.yaml");
    let played = podman.cli(&["kube", "play", "--network=none", yaml]);
    assert!(played.ok, "{played:?}");
    assert_eq!(podman.world.leases()[0]["sm_percent"], json!(25.0));
    podman.done(&["kube", "down", yaml]);
    podman.assert_empty();
}

#[test]
fn a_named_share_and_a_container_without_a_cgroup_of_its_own() {
    if skip_unless_engines() {
        return;
    }
    let world = World::simulated("h200", "[share.small]\nsm = \"25\"\nmemory = \"8GiB\"\n");
    let podman = Podman::up(world);
    let id = podman.hold("named", &["sublet.share=small"], &[]);
    is_share(&podman.event("named", "info"));
    podman.done(&["rm", "-f", "-t0", "named"]);
    if podman.world.engine == sublet_e2e::Engine::Crun {
        // Podman then gives precreate no id; the lease gets it when it is bound.
        let id = podman.hold("bare", &["sublet.share=small"], &["--cgroups=disabled"]);
        is_share(&podman.event("bare", "info"));
        let _ = lease_id(&podman, &id);
        assert_eq!(podman.ledger()["leases"][0]["init"]["cgroup"], Value::Null);
        podman.done(&["rm", "-f", "-t0", "bare"]);
    }
    assert!(podman.lease(&id).is_none());
    podman.assert_empty();
}

/// With the files where `make install` and docs/podman.md put them. The only test without `CONTAINERS_CONF`
/// and `SUBLET_CONFIG`, whose places no other test looks at.
#[test]
fn as_installed() {
    if skip_unless_engines() {
        return;
    }
    let podman = h200();
    let checkout = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for (from, to) in [
        (bin_dir().join("sublet"), "/usr/bin/sublet"),
        (bin_dir().join("sublet-runtime"), "/usr/bin/sublet-runtime"),
        (bin_dir().join("sublet-hook"), "/usr/libexec/sublet/sublet-hook"),
        (checkout.join("hooks/sublet.json"), "/usr/share/sublet/hooks.d/sublet.json"),
        (checkout.join("hooks/containers.conf"), "/etc/containers/containers.conf.d/sublet.conf"),
        (podman.world.config.clone(), "/etc/sublet/config.toml"),
    ] {
        let to = std::path::Path::new(to);
        std::fs::create_dir_all(to.parent().expect("a directory")).expect("a directory");
        std::fs::copy(&from, to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    }
    let needs = ["--network=none", "--pids-limit=0", "--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096"];
    for runtime in [podman.world.engine.program(), "sublet"] {
        let run = |annotation: &'static str| {
            let mut command = podman.command();
            command.env_remove("CONTAINERS_CONF").args(["--cgroup-manager=cgroupfs", "--runtime", runtime]);
            let all =
                Podman::arguments(&["run", "--rm"], "it", &[annotation], &needs, &["cuda-probe", "info"]);
            Finished::of(&command.args(all).output().expect("podman is installed"))
        };
        let done = run("sublet.sm=25");
        assert!(done.ok && done.json()[0]["sm"] == json!(32), "{runtime}: {done:?}");
        let refused = run("sublet.smm=25");
        assert!(!refused.ok && refused.stderr.contains("sublet.smm"), "{runtime}: {refused:?}");
    }
    podman.assert_empty();
}

#[test]
fn twenty_at_once_fill_the_gpu_and_no_more() {
    if skip_unless_engines() {
        return;
    }
    let podman = h200();
    let names: Vec<String> = (0..20).map(|n| format!("c{n}")).collect();
    let started: Vec<_> = names.iter().map(|name| podman.spawn(name, &["sublet.sm=10"], SLEEP)).collect();
    let finished: Vec<_> =
        started.into_iter().map(|child| child.wait_with_output().expect("it ends")).collect();
    let failed: Vec<String> = finished
        .iter()
        .filter(|output| !output.status.success())
        .map(|output| String::from_utf8_lossy(&output.stderr).into_owned())
        .collect();
    assert_eq!(failed.len(), 10, "{failed:?}");
    assert!(failed.iter().all(|text| text.contains("no room for mps, 10 % SM")), "{failed:?}");
    assert_eq!(podman.world.leases().len(), 10);
    podman.done(&["rm", "--all", "-f", "-t0"]);
    podman.assert_empty();
}
