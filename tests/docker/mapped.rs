//! Containers that say nothing and get a share all the same, by `containers.toml`: with a real dockerd in the
//! root that tests/engines/enter gives, and bundles as containerd's CRI makes them. One H200: 132 SMs.

use std::path::PathBuf;

use serde_json::{Value, json};
use sublet_e2e::docker::{Docker, skip_unless_engines};
use sublet_e2e::{World, eventually, skip_unless_root};

const SHARES: &str = "[share.small]\nsm = 12.5\nmemory = \"4GiB\"\n[share.half]\nsm = 50\n";
const RULES: &str = "[[container]]\nname = \"web-*\"\nshare = \"small\"\n\
                     [[container]]\nimage = \"*/ollama:*\"\nshare = \"half\"\n\
                     [[container]]\nname = \"nowhere\"\nshare = \"nosuch\"\n";

fn table(world: &World) -> PathBuf {
    world.config.with_file_name("containers.toml")
}

/// A dockerd with sublet as its default runtime, and `rules`.
fn docker(rules: &str, extra: &str) -> Docker {
    let world = World::simulated("h200", &format!("{extra}{SHARES}"));
    let root = world.dir.path().join("docker");
    std::fs::write(table(&world), format!("docker_root = \"{}\"\n{rules}", root.display()))
        .expect("containers.toml");
    Docker::up(world, &json!({"default-runtime": "sublet"}))
}

fn run(docker: &Docker, name: &str, image: &str) -> sublet_e2e::Finished {
    docker.cli(&["run", "-d", "--name", name, "--network=none", image, "cuda-probe", "hold", "600"])
}

fn assert_empty(docker: &Docker) {
    assert!(eventually(|| docker.world.leases().is_empty()), "leases are left: {:?}", docker.world.leases());
    assert!(eventually(|| docker.world.daemons().is_empty()), "daemons are left");
    docker.world.assert_empty();
}

#[test]
fn docker_containers_are_mapped_by_name_and_by_image() {
    if skip_unless_engines() {
        return;
    }
    let docker = docker(RULES, "");
    docker.done(&["tag", "probe", "registry.test/ollama:1"]);
    for (name, image, sms) in [("web-1", "probe", 16), ("chat", "registry.test/ollama:1", 66)] {
        let started = run(&docker, name, image);
        assert!(started.ok, "{name}: {started:?}");
        let seen =
            [docker.event(name, "info"), docker.exec_info(name, &[]), docker.exec_info(name, &["env", "-i"])];
        for info in seen {
            assert_eq!((&info["mps"], &info["error"]), (&json!(true), &Value::Null), "{name}: {info}");
        }
        assert_eq!(docker.exec_info(name, &[])["sm"], json!(sms), "{name}");
        let lease = docker.lease(started.stdout.trim()).expect("a lease");
        assert_eq!(lease["state"], "active");
        docker.done(&["restart", "-t", "0", name]);
        let again = docker.lease(started.stdout.trim()).expect("a lease");
        assert_ne!(again["id"], lease["id"]);
        assert_eq!(docker.exec_info(name, &[])["sm"], json!(sms), "{name}");
        docker.done(&["stop", "-t", "0", name]);
        assert_empty(&docker);
        docker.done(&["rm", name]);
    }
    let refused = run(&docker, "nowhere", "probe");
    assert!(!refused.ok && refused.stderr.contains("nosuch"), "{refused:?}");
    assert_empty(&docker);
}

#[test]
fn a_data_root_that_nothing_names_is_found() {
    if skip_unless_engines() {
        return;
    }
    let world = World::simulated("h200", SHARES);
    std::fs::write(table(&world), RULES).expect("containers.toml");
    let docker = Docker::up(world, &json!({"default-runtime": "sublet"}));
    let started = run(&docker, "web-1", "probe");
    assert!(started.ok, "{started:?}");
    assert_eq!(docker.event("web-1", "info")["sm"], json!(16));
    docker.done(&["rm", "-f", "web-1"]);
    assert_empty(&docker);
}

#[test]
fn annotations_win_and_what_an_image_says_counts_for_nothing() {
    if skip_unless_engines() {
        return;
    }
    let docker = docker(RULES, "");
    let _ = docker.hold("web-asks", &["sublet.sm=25"], &[]);
    assert_eq!(docker.exec_info("web-asks", &[])["sm"], json!(32));
    docker.done(&["rm", "-f", "web-asks"]);
    assert_empty(&docker);
    let tar = docker.world.dir.path().join("image.tar");
    let tar = tar.to_str().expect("UTF-8");
    let lies = [
        "ENV SUBLET_SHARE=small",
        "ENV sublet.share=small",
        "ENV io.kubernetes.cri.container-name=web-1",
        "LABEL sublet.share=small",
        "LABEL io.kubernetes.cri.container-name=web-1",
        "LABEL io.kubernetes.cri.image-name=x/ollama:1",
    ];
    let mut import = vec!["import"];
    import.extend(lies.iter().flat_map(|lie| ["--change", lie]));
    docker.done(&[&import[..], &[tar, "liar"]].concat());
    let started = docker.cli(&["run", "-d", "--name=plain", "--network=none", "liar", "sleep", "600"]);
    assert!(started.ok, "{started:?}");
    assert_eq!(docker.ask(&["exec", "plain", "sh", "-c", "ls /dev | grep -c nvidia || true"]), "0");
    assert_eq!(docker.world.leases(), Vec::<Value>::new());
    let spec = docker.config(started.stdout.trim());
    assert!(!spec.contains("sublet.lease") && !spec.contains("CUDA"), "it was edited: {spec}");
    docker.done(&["rm", "-f", "plain"]);
    assert_empty(&docker);
}

#[test]
fn a_broken_table_maps_nobody_and_stops_nobody() {
    if skip_unless_engines() {
        return;
    }
    let log = tempfile::NamedTempFile::new().expect("a file");
    let docker = docker("[[container]]\nnam = \"web-*\"\nshare = \"small\"\n", "");
    let config = std::fs::read_to_string(&docker.world.config).expect("config.toml");
    let with_log = config.replacen("[runtime]\n", &format!("[runtime]\nlog = {:?}\n", log.path()), 1);
    std::fs::write(&docker.world.config, with_log).expect("config.toml is written");
    docker.done(&["run", "-d", "--name=web-1", "--network=none", "probe", "sleep", "600"]);
    assert_eq!(docker.world.leases(), Vec::<Value>::new());
    assert_eq!(docker.ask(&["exec", "web-1", "sh", "-c", "ls /dev | grep -c nvidia || true"]), "0");
    let said = std::fs::read_to_string(log.path()).expect("the log");
    assert!(said.contains("containers.toml:3:1: unknown key `nam`"), "{said}");
    assert!(said.contains("no rule of containers.toml is applied, and it gets no GPU"), "{said}");
    // Those that ask are served as before, and the pre-flight says what is wrong.
    let _ = docker.hold("asks", &["sublet.sm=25"], &[]);
    assert_eq!(docker.exec_info("asks", &[])["sm"], json!(32));
    let checked = docker.world.sublet(&["config", "check"]);
    let checked = (checked.status.code(), String::from_utf8_lossy(&checked.stderr).into_owned());
    assert!(checked.0 == Some(1) && checked.1.contains("containers.toml:3:1"), "{checked:?}");
    docker.done(&["rm", "-f", "web-1", "asks"]);
    assert_empty(&docker);
}

#[test]
fn a_pods_container_is_mapped_by_containerds_own_annotations() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", SHARES);
    std::fs::write(table(&world), RULES).expect("containers.toml");
    let cri = |kind: &'static str| {
        [
            ("io.kubernetes.cri.container-type", kind),
            ("io.kubernetes.cri.container-name", "web-1"),
            ("io.kubernetes.cri.image-name", "docker.io/library/probe:latest"),
        ]
    };
    let hold = ["/usr/bin/cuda-probe", "hold", "120"];
    let at = |id: &str, parent: &str, kind: &'static str| {
        let mut bundle = world.bundle(id, &cri(kind), &hold);
        bundle.spec["root"]["path"] = json!(bundle.dir.join("rootfs"));
        bundle.dir = world.dir.path().join(parent).join(id);
        std::fs::create_dir_all(&bundle.dir).expect("a bundle");
        bundle
    };
    let task = "io.containerd.runtime.v2.task/k8s.io";
    let mapped = at("mapped", task, "container");
    mapped.up();
    let info = mapped.event("info");
    assert_eq!(info["sm"], json!(16), "{info}");
    assert_eq!(mapped.exec_file(&["/usr/bin/cuda-probe", "info"], &[]).json()[0]["sm"], json!(16));
    let explained = world.sublet(&["explain", "--bundle", mapped.dir.to_str().expect("UTF-8")]);
    let explained = String::from_utf8_lossy(&explained.stdout).into_owned();
    assert!(explained.contains("gives it share small"), "without what sublet has put into it: {explained}");
    mapped.down();
    world.assert_empty();
    for (id, parent, kind) in [("pause", task, "sandbox"), ("other", "overlay-containers", "container")] {
        let plain = at(id, parent, kind);
        plain.up();
        assert_eq!((plain.config(), world.leases().len()), (plain.spec.clone(), 0), "{id}");
        plain.down();
    }
}

#[test]
fn explain_and_config_know_the_table() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", SHARES);
    let path = table(&world);
    let (rules, _) = RULES.rsplit_once("[[container]]").expect("the last rule names no share there is");
    std::fs::write(&path, rules).expect("containers.toml");
    let done = |arguments: &[&str]| {
        let output = world.sublet(arguments);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let explained = done(&["explain", "--name", "web-7"]);
    let says = format!("It has no sublet.* annotation. {} gives it share small.", path.display());
    assert!(explained.starts_with(&says) && explained.contains("at most 12.5 %"), "{explained}");
    assert!(done(&["explain", "--image", "r.io/ollama:2"]).contains("at most 50 %"));
    let none = world.sublet(&["explain", "--name", "db", "--image", "postgres"]);
    assert!(String::from_utf8_lossy(&none.stderr).contains("it gets no GPU"), "{none:?}");
    assert!(done(&["config", "check"]).contains(&format!("{}: ok", path.display())));
    let shown = done(&["config", "show"]);
    assert!(shown.contains("# name = \"web-*\"\n# share = \"small\"\n"), "{shown}");
    std::fs::write(&path, RULES).expect("containers.toml");
    let refused = world.sublet(&["config", "check"]);
    let refused = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.contains("the configuration has no [share.nosuch]"), "{refused}");
}
