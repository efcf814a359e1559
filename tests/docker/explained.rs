//! `sublet explain` beside a real Docker: a stack as Docker Compose resolves it, and containers by the names that
//! Docker has for them. Runs in the root that tests/engines/enter gives. One H200.

use std::process::Output;

use serde_json::{Value, json};
use sublet_e2e::docker::{Docker, skip_unless_engines};
use sublet_e2e::{World, eventually};

fn h200() -> Docker {
    Docker::up(World::simulated("h200", ""), &json!({}))
}

/// `sublet explain` with the environment of Docker's client.
fn explain(docker: &Docker, arguments: &[&str]) -> Output {
    let mut command = docker.world.command("sublet");
    for (name, value) in docker.command().get_envs() {
        command.env(name, value.expect("it is set"));
    }
    command.env("SHARE", "60").arg("explain").args(arguments).output().expect("it runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const STACK: &str = "
x-share: &share { sublet.sm: \"${SHARE}\", sublet.memory: 8GiB }
services:
  web:
    image: ${IMAGE:-probe}
    runtime: sublet
    annotations: *share
  again:
    extends: { service: web }
    scale: ${AGAIN:-0}
  small: { image: probe, deploy: { replicas: 2 }, runtime: sublet, annotations: [ sublet.sm=20 ] }
  debug: { image: probe, profiles: [ debug ], runtime: sublet, annotations: [ sublet.sm=90 ] }
";

#[test]
fn a_stack_is_what_docker_compose_makes_of_its_file() {
    if skip_unless_engines() {
        return;
    }
    let docker = h200();
    let file = docker.world.dir.path().join("compose.yaml");
    let path = file.to_str().expect("UTF-8");
    let write = |project: &str| {
        std::fs::write(&file, format!("name: {project}\n{STACK}")).expect("written");
    };
    let check = || {
        let output = explain(&docker, &["--compose", path, "--format", "json"]);
        let document: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
        assert_eq!(output.status.code(), Some(i32::from(document["fits"] != true)), "{output:?}");
        (document, text(&output.stderr))
    };
    write("shop");
    let (document, _) = check();
    let services = document["services"].as_array().expect("services");
    let names: Vec<&Value> = services.iter().map(|service| &service["service"]).collect();
    assert_eq!(names, ["web", "small-1", "small-2"], "{document}");
    assert_eq!((&services[0]["sm_percent"], &document["fits"]), (&json!(60.0), &json!(true)));
    // Those of the stack that run are not counted twice, those of another stack are.
    let labels = ["--label=com.docker.compose.project=shop", "--label=com.docker.compose.service=web"];
    let id = docker.hold("shop-web-1", &["sublet.sm=60", "sublet.memory=8GiB"], &labels);
    let _ = docker.event("shop-web-1", "info");
    let (document, said) = check();
    assert!(
        document["fits"] == true && said.contains("1 of its containers run already"),
        "{document} {said}"
    );
    write("other");
    let (document, _) = check();
    assert_eq!((&document["fits"], &document["services"][0]["reason"]), (&json!(false), &json!("no-room")));
    std::fs::write(&file, "services: { web: { nonsense: 1 } }\n").expect("written");
    let refused = explain(&docker, &["--compose", path]);
    assert!(refused.status.code() == Some(1) && text(&refused.stderr).contains(" config: "), "{refused:?}");
    // Its names outlive it.
    docker.done(&["rm", "-f", "shop-web-1"]);
    assert!(eventually(|| docker.lease(&id).is_none()));
    let told = text(&explain(&docker, &["--container", "shop-web-1"]).stdout);
    for part in ["engine     docker", "part of    shop/web", &id, "ended; it was last seen at "] {
        assert!(told.contains(part), "{part} is not in {told}");
    }
    docker.world.assert_empty();
}

#[test]
fn a_container_that_was_refused_is_known_by_its_name() {
    if skip_unless_engines() {
        return;
    }
    let docker = h200();
    assert!(!docker.run("large", &["sublet.sm=200"], &[], &["sleep", "600"]).ok);
    let told = explain(&docker, &["--container", "large"]);
    let told = text(&told.stdout) + &text(&told.stderr);
    assert!(told.contains("History") && told.contains("refused: sublet.sm=200"), "{told}");
    docker.done(&["rm", "-f", "large"]);
}
