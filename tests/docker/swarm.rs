//! Docker Swarm over three nodes, each with a dockerd, a GPU (a simulated H200: 132 SMs) and a sublet of its own: Swarm
//! counts shares and places, sublet makes them real. A quarter fits four times on a node, a half twice.

use std::process::Output;

use serde_json::{Value, json};
use sublet_e2e::docker::skip_unless_engines;
use sublet_e2e::swarm::{Node, Swarm};
use sublet_e2e::{World, eventually};

const SHARES: &str = "[share.quarter]\nsm = 25\nmemory = \"8GiB\"\n[share.half]\nsm = 50\n";
const RULES: &str = "[[container]]\nservice = \"web\"\nshare = \"quarter\"\n\
                     [[container]]\nservice = \"large*\"\nimage = \"probe:latest\"\nshare = \"half\"\n";
const COUNTS: [&str; 2] = ["sublet-half=2", "sublet-quarter=4"];

fn world() -> World {
    let world = World::simulated("h200", SHARES);
    rules(&world, RULES);
    world
}

fn rules(world: &World, rules: &str) {
    let root = world.dir.path().join("docker");
    let text = format!("docker_root = \"{}\"\n{rules}", root.display());
    std::fs::write(world.config.with_file_name("containers.toml"), text).expect("containers.toml");
}

/// Three nodes whose dockerds have read what `sublet setup docker --swarm` writes.
fn swarm() -> Swarm {
    let counting = |_: &World| json!({"default-runtime": "sublet", "node-generic-resources": COUNTS});
    Swarm::up(vec![world(), world(), world()], &counting)
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// How every service is created.
const FIXED: [&str; 6] = [
    "service",
    "create",
    "--detach",
    "--no-resolve-image",
    "--endpoint-mode=dnsrr",
    "--stop-grace-period=1s",
];

/// `docker service create`; each task holds a context and reserves as many of a share, as `quarter=1`.
fn create(swarm: &Swarm, name: &str, reserved: &str, replicas: u32, options: &[&str]) {
    let (resource, replicas) = (format!("sublet-{reserved}"), replicas.to_string());
    let asked = ["--name", name, "--replicas", &replicas, "--generic-resource", &resource];
    let command = ["probe:latest", "cuda-probe", "hold", "600"];
    swarm.manager().docker.done(&[&FIXED[..], &asked, options, &command].concat());
}

fn scale(swarm: &Swarm, service: &str, replicas: u32) {
    swarm.manager().docker.done(&["service", "scale", "--detach", &format!("{service}={replicas}")]);
}

fn availability(swarm: &Swarm, node: &str, to: &str) {
    swarm.manager().docker.done(&["node", "update", "--availability", to, node]);
}

/// Waits until the service's tasks run on these nodes and no others are wanted.
#[track_caller]
fn assert_running(swarm: &Swarm, service: &str, nodes: &[&str]) {
    let all_run = || swarm.running(service) == nodes && swarm.tasks(service).len() == nodes.len();
    assert!(eventually(all_run), "{service}: {:#?}", swarm.tasks(service));
}

fn leases(node: &Node) -> usize {
    node.docker.world.leases().len()
}

/// The message of a task that a node refused, or that has no node, if there is one.
fn told(swarm: &Swarm, service: &str, part: &str) -> Option<String> {
    let all = ["service", "ps", "--no-trunc", "--format", "{{.Node}}|{{.CurrentState}}|{{.Error}}", service];
    let all = swarm.manager().docker.ask(&all);
    all.lines().find(|line| line.contains(part)).map(str::to_owned)
}

#[track_caller]
fn assert_told(swarm: &Swarm, service: &str, part: &str) {
    let all = || swarm.manager().docker.ask(&["service", "ps", "--no-trunc", service]);
    assert!(eventually(|| told(swarm, service, part).is_some()), "no {part:?} in {}", all());
}

/// Removes the services; then no node has a lease or a container.
#[track_caller]
fn assert_empty(swarm: &Swarm, services: &[&str]) {
    swarm.manager().docker.done(&[&["service", "rm"], services].concat());
    for node in &swarm.nodes {
        let docker = &node.docker;
        let gone = || docker.ask(&["ps", "-aq"]).is_empty() && docker.world.leases().is_empty();
        assert!(eventually(gone), "{}: {}", node.name, docker.ask(&["ps", "-a"]));
        docker.world.assert_empty();
    }
}

/// The check `swarm` of `sublet doctor` on the node: its result and what it found.
fn doctor(node: &Node) -> (String, String) {
    let output = node.sublet(&["doctor", "--format", "json"]);
    let document: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    let checks = document["checks"].as_array().expect("checks");
    let check = checks.iter().find(|check| check["check"] == "swarm").expect("a check of this name");
    let word = |key: &str| check[key].as_str().expect("a word").to_owned();
    (word("result"), word("found"))
}

#[test]
fn replicas_spread_a_drained_node_moves_them_and_a_full_cluster_says_why() {
    if skip_unless_engines() {
        return;
    }
    let swarm = swarm();
    create(&swarm, "web", "quarter=1", 3, &[]);
    assert_running(&swarm, "web", &["node1", "node2", "node3"]);
    for node in &swarm.nodes {
        let docker = &node.docker;
        let id = docker.ask(&["ps", "-q", "--no-trunc"]);
        assert_eq!(docker.lease(&id).expect("a lease")["state"], "active");
        for before in [&[][..], &["env", "-i"]] {
            assert_eq!(docker.exec_info(&id, before)["sm"], json!(32), "{}", node.name);
        }
        let shown = text(&node.sublet(&["status"]));
        assert!(shown.contains("web.") && shown.contains("25 %"), "{shown}");
    }
    scale(&swarm, "web", 12);
    assert!(eventually(|| swarm.running("web").len() == 12), "{:#?}", swarm.tasks("web"));
    assert_eq!(swarm.nodes.iter().map(leases).collect::<Vec<_>>(), [4, 4, 4]);
    scale(&swarm, "web", 13);
    assert_told(&swarm, "web", "no suitable node (insufficient resources on 3 nodes)");
    assert_eq!(swarm.nodes.iter().map(leases).collect::<Vec<_>>(), [4, 4, 4]);
    scale(&swarm, "web", 6);
    assert!(eventually(|| swarm.nodes.iter().map(leases).sum::<usize>() == 6));
    availability(&swarm, "node3", "drain");
    assert!(
        eventually(|| swarm.running("web").len() == 6 && !swarm.running("web").contains(&"node3".into()))
    );
    assert!(eventually(|| leases(&swarm.nodes[2]) == 0), "a drained node keeps no lease");
    availability(&swarm, "node3", "active");
    // Counted in quarters, two halves fill a node.
    scale(&swarm, "web", 0);
    create(&swarm, "large", "quarter=2", 3, &["--constraint=node.hostname==node3"]);
    assert_told(&swarm, "large", "insufficient resources on 1 node");
    assert!(eventually(|| swarm.running("large").len() == 2 && leases(&swarm.nodes[2]) == 2));
    swarm.manager().docker.done(&["service", "rm", "large"]);
    assert!(eventually(|| leases(&swarm.nodes[2]) == 0));
    // A service of no rule is none of sublet's business.
    let other = ["--name=other", "--constraint=node.hostname==node3", "probe:latest", "sleep", "600"];
    swarm.manager().docker.done(&[&FIXED[..], &["--generic-resource=sublet-quarter=1"], &other].concat());
    assert_running(&swarm, "other", &["node3"]);
    assert_eq!(leases(&swarm.nodes[2]), 0);
    assert_empty(&swarm, &["web", "other"]);
}

#[test]
fn a_node_whose_gpu_is_taken_otherwise_refuses_and_says_why() {
    if skip_unless_engines() {
        return;
    }
    let swarm = swarm();
    // Swarm counts neither containers that it did not start, nor what shares take from each other.
    let _ = swarm.nodes[1].docker.hold("by-hand", &["sublet.mode=exclusive"], &[]);
    create(&swarm, "large", "half=1", 2, &["--constraint=node.hostname==node3"]);
    assert_running(&swarm, "large", &["node3", "node3"]);
    for node in ["node2", "node3"] {
        let only = format!("--constraint=node.hostname=={node}");
        create(&swarm, "web", "quarter=1", 1, &["--restart-delay=1s", &only]);
        assert_told(&swarm, "web", "no room for mps, 25 % SM");
        swarm.manager().docker.done(&["service", "rm", "web"]);
    }
    // Tasks that are refused are tried again until a node takes them.
    create(&swarm, "web", "quarter=1", 4, &["--restart-delay=1s"]);
    assert_running(&swarm, "web", &["node1"; 4]);
    assert_eq!(swarm.nodes.iter().map(leases).collect::<Vec<_>>(), [4, 1, 2]);
    swarm.nodes[1].docker.done(&["rm", "-f", "by-hand"]);
    assert_empty(&swarm, &["web", "large"]);
}

#[test]
fn setup_advertises_and_doctor_says_what_is_stale() {
    if skip_unless_engines() {
        return;
    }
    let mut swarm = Swarm::up(vec![world(), world()], &|_| json!({"node-generic-resources": ["fpga=1"]}));
    let file = swarm.nodes[1].docker.world.dir.path().join("daemon.json");
    let found = std::fs::read(&file).expect("daemon.json");
    let node = &swarm.nodes[1];
    assert_eq!(doctor(node).0, "skip");
    let diff = text(&node.sublet(&["setup", "docker", "--swarm", "--dry-run"]));
    assert!(diff.contains(r#"["fpga=1", "sublet-half=2", "sublet-quarter=4"]"#), "{diff}");
    assert_eq!(std::fs::read(&file).expect("daemon.json"), found);
    let done = text(&node.sublet(&["setup", "docker", "--swarm"]));
    assert!(done.contains("restart dockerd") && done.contains("--availability drain"), "{done}");
    assert!(text(&node.sublet(&["setup", "docker", "--swarm"])).contains("nothing to do"));
    // A reload does not do.
    node.docker.hang_up();
    let (result, said) = doctor(node);
    assert_eq!(result, "warn");
    assert!(said.starts_with("dockerd tells Swarm of no share, daemon.json of sublet-half=2"), "{said}");
    create(&swarm, "web", "quarter=1", 1, &[]);
    assert_told(&swarm, "web", "no suitable node (insufficient resources on 2 nodes)");
    swarm.nodes[1].docker.restart();
    assert_running(&swarm, "web", &["node2"]);
    assert_eq!(leases(&swarm.nodes[1]), 1);
    let node = &swarm.nodes[1];
    assert_eq!(node.advertised(&swarm.manager().docker, "sublet-quarter"), Some(4));
    assert_eq!(doctor(node), ("pass".into(), "sublet-half=2, sublet-quarter=4".into()));
    // The share changes: another count fits.
    let config = std::fs::read_to_string(&node.docker.world.config).expect("config.toml");
    std::fs::write(&node.docker.world.config, config.replace("sm = 25", "sm = 20")).expect("written");
    let (result, said) = doctor(node);
    assert_eq!(result, "warn");
    assert!(said.contains("sublet-quarter=4, but the GPUs hold sublet-half=2, sublet-quarter=5"), "{said}");
    std::fs::write(&node.docker.world.config, config).expect("written");
    let undone = text(&node.sublet(&["setup", "docker", "--undo"]));
    assert!(undone.contains("sublet is out"), "{undone}");
    let found: Value = serde_json::from_slice(&found).expect("JSON");
    let left: Value = serde_json::from_slice(&std::fs::read(&file).expect("daemon.json")).expect("JSON");
    assert_eq!(left["node-generic-resources"], found["node-generic-resources"]);
    assert!(
        doctor(node)
            .1
            .starts_with("dockerd tells Swarm of sublet-half=2, sublet-quarter=4, daemon.json of no")
    );
    assert_empty(&swarm, &["web"]);
}

#[test]
fn a_share_that_is_renamed_while_services_use_it() {
    if skip_unless_engines() {
        return;
    }
    let mut swarm = swarm();
    create(&swarm, "web", "quarter=1", 3, &["--restart-delay=1s"]);
    assert_running(&swarm, "web", &["node1", "node2", "node3"]);
    for node in &swarm.nodes {
        let world = &node.docker.world;
        let config = std::fs::read_to_string(&world.config).expect("config.toml");
        std::fs::write(&world.config, config.replace("[share.quarter]", "[share.little]")).expect("written");
    }
    // What runs keeps its share; a new task is refused, because its rule names no share.
    for node in &swarm.nodes {
        let id = node.docker.ask(&["ps", "-q", "--no-trunc"]);
        assert_eq!(node.docker.exec_info(&id, &[])["sm"], json!(32));
        let (result, said) = doctor(node);
        assert!(result == "warn" && said.contains("the GPUs hold sublet-half=2, sublet-little=4"), "{said}");
    }
    scale(&swarm, "web", 4);
    assert_told(&swarm, "web", "quarter");
    // As docs/swarm.md says: rules, setup, and one node after the other.
    for node in &mut swarm.nodes {
        rules(&node.docker.world, &RULES.replace("\"quarter\"", "\"little\""));
        assert!(text(&node.sublet(&["setup", "docker", "--swarm"])).contains("sublet is in"));
    }
    let update = ["--generic-resource-rm=sublet-quarter", "--generic-resource-add=sublet-little=1"];
    swarm.manager().docker.done(&[&["service", "update", "--detach"], &update[..], &["web"]].concat());
    for index in [1, 2, 0] {
        availability(&swarm, &format!("node{}", index + 1), "drain");
        swarm.nodes[index].docker.restart();
        assert!(eventually(|| swarm.ready() == 3));
        availability(&swarm, &format!("node{}", index + 1), "active");
    }
    assert!(eventually(|| swarm.running("web").len() == 4), "{:#?}", swarm.tasks("web"));
    assert!(eventually(|| swarm.nodes.iter().map(leases).sum::<usize>() == 4));
    for node in &swarm.nodes {
        assert_eq!(doctor(node), ("pass".into(), "sublet-half=2, sublet-little=4".into()), "{}", node.name);
    }
    assert_empty(&swarm, &["web"]);
}

#[test]
fn a_container_that_calls_itself_a_services_task_gets_nothing() {
    if skip_unless_engines() {
        return;
    }
    let swarm =
        Swarm::up(vec![world()], &|_| json!({"default-runtime": "sublet", "node-generic-resources": COUNTS}));
    let docker = &swarm.manager().docker;
    let tar = docker.world.dir.path().join("image.tar");
    let label = "LABEL com.docker.swarm.service.name=web";
    docker.done(&["import", "--change", label, tar.to_str().expect("UTF-8"), "liar"]);
    let labelled = "--label=com.docker.swarm.service.name=web";
    let plain =
        docker.ask(&["run", "-d", "--network=none", "--name=web.1.x", labelled, "liar", "sleep", "600"]);
    assert_eq!(docker.lease(&plain), None);
    // Its image and its user say `web`, dockerd says what it is.
    let lie = ["--name=other", "--container-label=com.docker.swarm.service.name=web", "liar", "sleep", "600"];
    docker.done(&[&FIXED[..], &lie].concat());
    assert_running(&swarm, "other", &["node1"]);
    assert_eq!(leases(swarm.manager()), 0);
    let shown = text(&swarm.manager().sublet(&["explain", "--service", "web"]));
    assert!(shown.contains("gives it share quarter"), "{shown}");
    docker.done(&["rm", "-f", "web.1.x"]);
    assert_empty(&swarm, &["other"]);
}
