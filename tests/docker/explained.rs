//! `sublet explain` beside real engines: a stack as Docker Compose resolves it, units as Podman's generator reads them, and
//! containers by the names that Docker has for them. Runs in the root that tests/engines/enter gives. One H200.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sublet_e2e::docker::{Docker, skip_unless_engines};
use sublet_e2e::podman::Podman;
use sublet_e2e::{World, eventually};

fn h200() -> Docker {
    Docker::up(World::simulated("h200", ""), &json!({}))
}

/// `sublet explain` with the environment of Docker's client.
fn explain(docker: &Docker, arguments: &[&str]) -> Output {
    explain_with(docker, arguments, &[])
}

fn explain_with(docker: &Docker, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = docker.world.command("sublet");
    for (name, value) in docker.command().get_envs() {
        command.env(name, value.expect("it is set"));
    }
    command.envs(environment.iter().copied());
    command.env("SHARE", "60").arg("explain").args(arguments).output().expect("it runs")
}

/// The services that a stack's JSON has, each with its percentage of SMs.
fn shares(output: &Output) -> Vec<(String, Value)> {
    let document: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    let services = document["services"].as_array().expect("services");
    let one = |service: &Value| {
        (service["service"].as_str().expect("a name").to_owned(), service["sm_percent"].clone())
    };
    services.iter().map(one).collect()
}

fn write(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
    std::fs::write(path, text).expect("written");
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
    for (service, said) in [
        (
            "labels: { sublet.sm: $SHARE }, runtime: sublet",
            "NO: labels are not annotations: write under `annotations:` sublet.sm=60",
        ),
        (
            "annotations: { sublet.sm: $SHARE }",
            "NO: its runtime is the engine's default, which does not read its annotations",
        ),
    ] {
        std::fs::write(&file, format!("services: {{ web: {{ image: probe, {service} }} }}\n"))
            .expect("written");
        let output = explain(&docker, &["--compose", path]);
        assert!(output.status.code() == Some(1) && text(&output.stdout).contains(said), "{output:?}");
    }
    for wrong in ["annotations: [ sublet.sm: 5 ]", "devices: /dev/dri", "annotation: [ sublet.sm=5 ]"] {
        std::fs::write(&file, format!("services: {{ web: {{ image: probe, {wrong} }} }}\n"))
            .expect("written");
        let refused = explain(&docker, &["--compose", path]);
        let said = text(&refused.stderr);
        assert!(refused.status.code() == Some(1) && said.lines().count() == 1, "{wrong}: {said}");
        assert!(said.contains(" config: ") && said.contains("web"), "{wrong}: {said}");
    }
    // Its names outlive it.
    docker.done(&["rm", "-f", "shop-web-1"]);
    assert!(eventually(|| docker.lease(&id).is_none()));
    let told = text(&explain(&docker, &["--container", "shop-web-1"]).stdout);
    for part in ["engine     docker", "part of    shop/web", &id, "ended; it was last seen at "] {
        assert!(told.contains(part), "{part} is not in {told}");
    }
    docker.world.assert_empty();
}

/// Docker Compose takes none of them, each for another reason.
fn refused_files() -> Vec<String> {
    let long = "k".repeat(4096);
    [
        "",
        "services:\n\tweb: { image: probe }",
        "services: []",
        "services: { web: { image: probe, annotations: 5 } }",
        "services: { web: { image: probe, command: \"${MISSING:?nobody set it}\" } }",
        "services: { web: { image: probe, env_file: [ gone.env ] } }",
        "services: { web: { extends: { service: gone } } }",
        "include: [ gone.yaml ]\nservices: { web: { image: probe } }",
        // What a terminal would act on, and what fills it.
        "services: { \"w\\e[31mb\\e]0;owned\\a\": { image: probe } }",
        "services: { web: { image: probe, \"\\e[2J\": 1 } }",
        &format!("services: {{ web: {{ image: probe, {long}: 1 }} }}"),
        &format!("services: {{ {long}{long}/: {{ image: probe }} }}"),
    ]
    .map(|text| text.to_owned() + "\n")
    .into()
}

/// Said at once, in one clear line, whatever the file has.
#[test]
fn a_file_that_docker_compose_refuses_is_refused_in_one_line_and_at_once() {
    if skip_unless_engines() {
        return;
    }
    let docker = h200();
    let file = docker.world.dir.path().join("stack.yaml");
    let path = file.to_str().expect("UTF-8");
    for text_of_file in refused_files() {
        write(&file, &text_of_file);
        let began = Instant::now();
        assert!(!docker.cli(&["compose", "--file", path, "config"]).ok, "Compose takes it: {text_of_file}");
        // It is asked for its version, and for what it makes of the file.
        let (alone, began) = (began.elapsed(), Instant::now());
        let refused = explain(&docker, &["--compose", path]);
        let took = began.elapsed();
        assert!(
            took < 3 * alone + Duration::from_secs(2),
            "{took:?}, Compose alone {alone:?}: {text_of_file}"
        );
        let said = text(&refused.stderr);
        assert!(refused.status.code() == Some(1) && refused.stdout.is_empty(), "{text_of_file}: {refused:?}");
        assert!(said.starts_with(&format!("sublet: {path}: docker compose config: ")), "{said}");
        let line = said.trim_end_matches('\n');
        assert!(!line.contains(char::is_control) && line.chars().count() < 1000, "{line:?}");
    }
    docker.world.assert_empty();
}

#[test]
fn one_name_in_two_engines_means_two_containers_which_their_ids_tell_apart() {
    if skip_unless_engines() {
        return;
    }
    let docker = h200();
    // On the same host.
    let mut beside = World::simulated("h200", "");
    beside.config.clone_from(&docker.world.config);
    let podman = Podman::up(beside);
    let ids = [docker.hold("twin", &["sublet.sm=25"], &[]), podman.hold("twin", &["sublet.sm=10"], &[])];
    let _ = (docker.event("twin", "info"), podman.event("twin", "info"));
    let leases = ids.each_ref().map(|id| docker.lease(id).expect("a lease")["id"].clone());
    let leases = leases.each_ref().map(|id| id.as_str().expect("text"));
    let table = text(&docker.world.sublet(&["status"]).stdout);
    assert_eq!(table.lines().filter(|line| line.starts_with("twin ")).count(), 2, "{table}");
    for command in [
        &["status", "--container", "twin"][..],
        &["explain", "--container", "twin"],
        &["lease", "release", "--force", "twin"],
    ] {
        let refused = docker.world.sublet(command);
        let said = text(&refused.stderr);
        assert!(refused.status.code() == Some(1) && said.lines().count() == 1, "{command:?}: {refused:?}");
        assert!(said.contains("twin means several containers: "), "{command:?}: {said}");
        assert!(leases.iter().all(|lease| said.contains(&format!("(lease {lease})"))), "{command:?}: {said}");
    }
    for (id, lease) in ids.iter().zip(leases) {
        for meant in [id.as_str(), &id[..12], lease] {
            let output = explain(&docker, &["--container", meant, "--format", "json"]);
            let document: Value =
                serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{meant}: {output:?}"));
            assert_eq!(document["container"]["container_id"], json!(id), "{meant}");
        }
    }
    // With the first one gone the name is the second one's.
    docker.done(&["rm", "-f", "twin"]);
    assert!(eventually(|| docker.lease(&ids[0]).is_none()));
    let told = text(&explain(&docker, &["--container", "twin"]).stdout);
    assert!(told.contains("engine     podman") && told.contains(&ids[1]), "{told}");
    podman.done(&["rm", "-f", "-t0", "twin"]);
    assert!(eventually(|| docker.world.leases().is_empty()), "{:?}", docker.world.leases());
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

/// Docker has removed the refused container by then, and the one of this name that ran before.
#[test]
fn a_refusal_is_told_by_names_which_no_file_has_that_others_read() {
    if skip_unless_engines() {
        return;
    }
    let docker = h200();
    let _ = docker.hold("lab-comfyui-1", &["sublet.sm=70"], &[]);
    let first = docker.hold("web", &["sublet.sm=10"], &[]);
    let _ = docker.world.status();
    docker.done(&["rm", "-f", "web"]);
    assert!(eventually(|| docker.lease(&first).is_none()));
    let refused = docker.run("web", &["sublet.sm=40"], &["--rm"], &["sleep", "600"]);
    let held = "held by lab-comfyui-1 (mps, 70 % SM)";
    assert!(
        !refused.ok && refused.stderr.contains("container web: ") && refused.stderr.contains(held),
        "{refused:?}"
    );
    let sublet = |arguments: &[&str]| {
        let output = docker.world.sublet(arguments);
        let told = text(&output.stdout) + &text(&output.stderr);
        told.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    for (arguments, part) in [
        (&["explain", "--container", "web"][..], " Refused since then at "),
        (&["events", "--container", "web"], " refused web "),
        (&["events", "--container", "web", "--format", "json"], "\"name\":\"web\""),
        (&["status", "--last-error"], " container web: "),
        (&["status", "--last-error", "--format", "json"], "\"name\": \"web\""),
        (&["wait", "sm=40", "--timeout=0"], "sublet: "),
    ] {
        let told = sublet(arguments);
        assert!(told.contains(part) && told.contains(held), "{arguments:?}: {told}");
    }
    for file in ["refusals.json", "events.jsonl", "ledger.json"] {
        let file = std::fs::read_to_string(docker.world.state_dir().join(file)).expect("it is there");
        assert!(!file.contains("lab-comfyui-1"), "{file}");
    }
    docker.done(&["rm", "-f", "lab-comfyui-1"]);
}

#[test]
fn a_docker_that_does_not_answer_is_not_waited_for() {
    if skip_unless_engines() {
        return;
    }
    let world = World::simulated("h200", "");
    let socket = world.dir.path().join("silent.sock");
    let _silent = UnixListener::bind(&socket).expect("a socket");
    let mut command = world.command("sublet");
    command.args(["explain", "--container", "nobody"]);
    let began = Instant::now();
    let output =
        command.env("DOCKER_HOST", format!("unix://{}", socket.display())).output().expect("it runs");
    let (took, said) = (began.elapsed(), text(&output.stderr));
    assert!(
        said.contains("docker was asked") && said.contains("nobody") && !output.status.success(),
        "{said}"
    );
    // Less than two seconds but for what the machine does beside it; doctor waits for ten.
    assert!(took < Duration::from_secs(3), "{took:?}");
}

#[test]
fn a_compose_file_is_read_with_what_overrides_it_in_its_directory() {
    if skip_unless_engines() {
        return;
    }
    let docker = h200();
    let dir = docker.world.dir.path().join("shop");
    let service = |sm: u32| {
        format!("services: {{ web: {{ image: probe, runtime: sublet, annotations: [ sublet.sm={sm} ] }} }}\n")
    };
    for (name, sm) in
        [("compose.yaml", 10), ("compose.override.yaml", 20), ("other.yaml", 30), ("docker-compose.yml", 50)]
    {
        write(&dir.join(name), &service(sm));
    }
    let path = |name: &str| dir.join(name).to_str().expect("UTF-8").to_owned();
    let (first, other, old) = (path("compose.yaml"), path("other.yaml"), path("docker-compose.yml"));
    let sm = |files: &[&str], environment: &[(&str, &str)]| {
        shares(&explain_with(&docker, &[files, &["--format", "json"]].concat(), environment))[0].1.clone()
    };
    // As `docker compose up` in that directory.
    let mut config = docker.command();
    config.args(["compose", "config", "--format", "json"]).current_dir(&dir);
    let config: Value = serde_json::from_slice(&config.output().expect("Compose").stdout).expect("JSON");
    assert_eq!(config["services"]["web"]["annotations"]["sublet.sm"], "20");
    assert_eq!(sm(&["--compose", &first], &[]), json!(20.0));
    assert_eq!(sm(&["--compose", &first], &[("COMPOSE_FILE", "compose.yaml:other.yaml")]), json!(30.0));
    // Others than those that Compose takes by itself stand alone, or one over the other.
    assert_eq!(sm(&["--compose", &old], &[]), json!(50.0));
    assert_eq!(sm(&["--compose", &first, "--compose", &other], &[]), json!(30.0));
    assert_eq!(sm(&["--compose", &other, &old], &[]), json!(50.0));
    let alone = explain_with(&docker, &["--compose", &first], &[("PATH", "/nonexistent")]);
    let said = text(&alone.stderr);
    assert!(
        alone.status.code() == Some(1) && said.contains("compose.override.yaml needs Docker Compose"),
        "{said}"
    );
}

#[test]
fn a_compose_that_drops_annotations_is_named() {
    if skip_unless_engines() {
        return;
    }
    let docker = h200();
    let dir = docker.world.dir.path();
    // This Debian's Compose, with the version of an older one.
    let script = "#!/bin/sh\n[ \"$1 $2\" != 'compose version' ] || exec echo Docker Compose version v2.24.5\n\
                  [ \"$1\" != compose ] || { shift; exec docker-compose \"$@\"; }\nexec /usr/bin/docker \"$@\"\n";
    write(&dir.join("old/docker"), script);
    std::fs::set_permissions(dir.join("old/docker"), std::fs::Permissions::from_mode(0o755)).expect("chmod");
    let path = format!("{}:{}", dir.join("old").display(), std::env::var("PATH").expect("PATH"));
    let file = dir.join("stack.yaml");
    write(
        &file,
        "services: { web: { image: probe, runtime: sublet, annotations: [ sublet.sm=5 ] }, db: { image: x } }\n",
    );
    let file = file.to_str().expect("UTF-8");
    let output = explain_with(&docker, &["--compose", file], &[("PATH", &path)]);
    let table = text(&output.stdout);
    assert!(
        output.status.code() == Some(1) && table.contains("Docker Compose 2.24.5 drops its annotations"),
        "{table}"
    );
    assert!(table.contains("2.26") && table.contains("asks for no share"), "{table}");
    assert!(explain(&docker, &["--compose", file]).status.success(), "this Debian's passes them on");
}

#[test]
fn a_shares_warning_is_an_event_and_no_line_of_the_containers_log() {
    if skip_unless_engines() {
        return;
    }
    let docker = h200();
    let started = docker.run("warned", &["sublet.sm=25"], &["--volume=/tmp:/tmp"], &["cuda-probe", "info"]);
    assert!(started.ok, "{started:?}");
    let _ = docker.event("warned", "info");
    let logs = docker.cli(&["logs", "warned"]);
    assert!(!(logs.stdout + &logs.stderr).contains("sublet"), "its own log has lines of sublet's");
    let told = text(&explain(&docker, &["--container", started.stdout.trim()]).stdout);
    assert!(told.contains("warned") && told.contains("/tmp is the host's"), "{told}");
    docker.done(&["rm", "-f", "warned"]);
}

/// The generator that systemd runs at boot.
const GENERATOR: &str = "/usr/lib/systemd/system-generators/podman-system-generator";

/// What `--annotation` is followed by in the command lines that Podman's generator makes.
fn generated() -> Vec<String> {
    let output = Command::new(GENERATOR).arg("--dryrun").output().expect("the generator");
    let lines = text(&output.stdout);
    let start =
        lines.lines().find(|line| line.starts_with("ExecStart=")).unwrap_or_else(|| panic!("{output:?}"));
    let words: Vec<&str> = start.split(' ').collect();
    let mut found: Vec<String> =
        words.windows(2).filter(|pair| pair[0] == "--annotation").map(|pair| pair[1].to_owned()).collect();
    found.sort();
    found
}

#[test]
fn a_quadlet_unit_is_what_podmans_generator_makes_of_it() {
    if skip_unless_engines() {
        return;
    }
    let world = World::simulated("h200", "");
    let unit = Path::new("/etc/containers/systemd/gpu/team-a-worker.container");
    let place = |path: &str| Path::new(path).to_owned();
    let add = |path: &str, line: &str| write(&place(path), &format!("[Container]\n{line}\n"));
    write(unit, "[Container]\nImage=probe\nAnnotation=sublet.sm=5 sublet.gpu=0\n");
    let explained = || {
        let output =
            world.sublet(&["explain", "--quadlet", unit.to_str().expect("UTF-8"), "--format", "json"]);
        let document: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
        (document["services"][0]["sm_percent"].clone(), document["services"][0]["memory_bytes"].clone())
    };
    let agree = |annotations: &[&str], sm: f64, gib: u64| {
        assert_eq!(generated(), annotations);
        let memory = if gib == 0 { Value::Null } else { json!(gib << 30) };
        assert_eq!(explained(), (json!(sm), memory));
    };
    agree(&["sublet.gpu=0", "sublet.sm=5"], 5.0, 0);
    add("/etc/containers/systemd/container.d/10-all.conf", "Annotation=sublet.memory=1GiB");
    agree(&["sublet.gpu=0", "sublet.memory=1GiB", "sublet.sm=5"], 5.0, 1);
    add("/usr/share/containers/systemd/team-.container.d/20-team.conf", "Annotation=sublet.sm=20");
    add("/usr/share/containers/systemd/other-.container.d/30-other.conf", "Annotation=sublet.sm=30");
    agree(&["sublet.gpu=0", "sublet.memory=1GiB", "sublet.sm=20"], 20.0, 1);
    add("/run/containers/systemd/team-a-.container.d/40-a.conf", "Annotation=\nAnnotation=sublet.sm=40");
    agree(&["sublet.sm=40"], 40.0, 0);
    // The more specific one of two of one name.
    add("/etc/containers/systemd/team-a-worker.container.d/10-all.conf", "Annotation=sublet.memory=9GiB");
    add("/run/containers/systemd/team-a-.container.d/40-a.conf", "Annotation=sublet.sm=40");
    agree(&["sublet.gpu=0", "sublet.memory=9GiB", "sublet.sm=40"], 40.0, 9);
    for top in ["/etc", "/run", "/usr/share"] {
        std::fs::remove_dir_all(Path::new(top).join("containers/systemd")).expect("removed");
    }
}
