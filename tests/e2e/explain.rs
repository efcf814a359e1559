//! `sublet explain`: a share, a stack, a container; and errors in JSON.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;

use serde_json::{Value, json};
use sublet_e2e::user::Host;
use sublet_e2e::{World, in_one_line, skip_unless_root};

const SLEEP: &[&str] = &["/bin/sleep", "120"];
const GPU: &str = "GPU-5b1e7000-0000-4000-8000-000000000100";

/// What a command prints that ends with `code`: standard output, standard error.
fn run(world: &World, arguments: &[&str], code: i32) -> (String, String) {
    // Without Docker Compose, whatever this machine has.
    let output =
        world.command("sublet").env("PATH", "/nonexistent").args(arguments).output().expect("it runs");
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).expect("UTF-8"));
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stdout}{stderr}");
    (stdout, stderr)
}

/// Standard output of a command that succeeds.
fn stdout(world: &World, arguments: &[&str]) -> String {
    run(world, arguments, 0).0
}

/// The one message of a command that fails with exit code 1.
fn failure(world: &World, arguments: &[&str]) -> String {
    let stderr = in_one_line(&run(world, arguments, 1).1);
    assert_eq!(stderr.lines().count(), 1, "{arguments:?}: {stderr}");
    stderr
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

/// Whole lines, with runs of spaces as one.
fn squeezed(text: &str) -> String {
    text.lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect::<Vec<_>>()
        .join("\n")
}

/// Every file below `dir` with its bytes.
fn contents(dir: &Path) -> BTreeMap<String, String> {
    sublet_e2e::tree(dir)
        .into_keys()
        .filter(|path| dir.join(path).is_file()) // A FIFO would wait for its writer.
        .map(|path| (path.clone(), std::fs::read_to_string(dir.join(&path)).unwrap_or_default()))
        .collect()
}

#[test]
fn explain_says_what_would_come_of_it_and_changes_nothing() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    assert!(world.sublet(&["refresh"]).status.success());
    let keeper = world.bundle("keeper", &[("sublet.sm", "60")], SLEEP);
    keeper.up();
    let _ = world.status();
    let bundle = world.bundle("asked", &[("sublet.sm", "25"), ("sublet.memory", "8GiB")], SLEEP);
    bundle.write();
    let before = (contents(&world.state_dir()), contents(&bundle.dir));
    let explained = stdout(&world, &["explain", "--annotation", "sublet.sm=25"]);
    for short in ["sm=25", "sublet.sm=25"] {
        assert_eq!(stdout(&world, &["explain", short]), explained);
    }
    let edits = ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25", "/dev/nvidia0 195:0", "/run/sublet/mps from"];
    let answers = squeezed(&explained);
    let first = format!(
        "GPU 0, NVIDIA H200, {GPU}\nMode mps\nSMs 32 of 132 (at most 25 %)\nMemory 143771 MiB (no limit)\n\
         Processes 1, with 32 SMs\n\nThis share protects\n"
    );
    assert!(answers.starts_with(&first) && answers.contains("\nIt does not protect\n"), "{answers}");
    let unfolded = squeezed(&stdout(&world, &["explain", "sm=25", "--edits"]));
    for part in edits {
        assert!(!answers.contains(part) && unfolded.contains(part), "{part}: {unfolded}");
    }
    let document = stdout(&world, &["explain", "sm=25", "processes=2", "--edits", "--format", "json"]);
    let document: Value = serde_json::from_str(&document).expect("JSON");
    assert_eq!((&document["schema"], &document["for"]), (&json!("sublet.explain/1"), &json!("root")));
    assert_eq!(
        (&document["gpus"][0]["sm_count"], &document["gpus"][0]["process_sm_count"]),
        (&json!(32), &json!(16))
    );
    assert_eq!(document["edits"]["environment"]["SUBLET_SM_PERCENT"], "12.5");
    let dedicated = stdout(
        &world,
        &[
            "explain",
            "--annotation",
            "sublet.gpu=0",
            "--annotation",
            "sublet.mode=mps",
            "--annotation",
            "sublet.isolation=shared",
        ],
    );
    assert!(
        dedicated.contains("ends the work of all of them"),
        "shared: a neighbour's fault reaches it: {dedicated}"
    );
    let dir = bundle.dir.to_str().expect("UTF-8");
    let diff = stdout(&world, &["explain", "--edits", "--bundle", dir]);
    for line in [
        "+++ config.json for this share",
        "+      \"CUDA_MPS_PIPE_DIRECTORY=/run/sublet/mps\"",
        "+      \"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M\"",
    ] {
        assert!(diff.lines().any(|have| have.trim_end_matches(',') == line), "{line} is not in {diff}");
    }
    assert!(
        !diff.lines().any(|line| line.starts_with('-')
            && !line.starts_with("---")
            && !line.ends_with('"')
            && !line.ends_with('}')),
        "only commas change: {diff}"
    );
    let refused = failure(&world, &["explain", "--annotation", "sublet.sm=70"]);
    assert!(refused.contains("40 % SM left") && refused.contains("keeper"), "{refused}");
    assert_eq!(
        failure(&world, &["explain"]),
        "sublet: nothing to explain: give a share, such as sm=25 memory=8GiB, or --annotation KEY=VALUE, --bundle \
         DIR, --name NAME, --container CONTAINER, --compose FILE or --quadlet FILE"
    );
    assert_eq!(
        failure(&world, &["explain", "--container", "nobody"]),
        "sublet: container nobody holds no lease, and neither an earlier one, nor a refusal, nor an action of the \
         guard is recorded for it; earlier ones are shown to root alone"
    );
    let after = (contents(&world.state_dir()), contents(&bundle.dir));
    let changed: Vec<_> = before.0.iter().filter(|(path, text)| after.0.get(*path) != Some(text)).collect();
    assert!(after == before, "explain changed something: {changed:?}");
    // The same once it has been created: neither its edits nor its lease are in its way. The list of devices that it had not
    // stays, empty, behind the line that then has a comma.
    bundle.up();
    let added = |text: &str| -> Vec<String> {
        let is_edit = |line: &&str| {
            line.starts_with('+') && !line.contains("sublet.lease") && !line.contains("cgroupsPath")
        };
        text.lines().filter(is_edit).map(|line| line.trim_end_matches(',').to_owned()).collect()
    };
    assert_eq!(added(&stdout(&world, &["explain", "--edits", "--bundle", dir])), added(&diff));
    bundle.down();
    keeper.down();
    world.assert_empty();
}

#[test]
fn explain_of_a_container() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let held = world.bundle("held", &[("sublet.sm", "70"), ("sublet.memory", "1GiB")], SLEEP);
    held.up();
    let refused = world.bundle("refused", &[("sublet.sm", "40")], SLEEP);
    let line = refused.refused();
    let id = world.leases()[0]["id"].as_str().expect("an id").to_owned();
    let told = squeezed(&stdout(&world, &["explain", "--container", "held"]));
    let pid = held.pid();
    for part in [
        "Container\nname held\nid held\nuser root\nlease ".to_owned() + &id + "\nstate active, since ",
        format!("\npid {pid}\n\nShare\nGPU 0, NVIDIA H200, {GPU}\n"),
        "\nSMs 92 of 132 (at most 70 %)\nMemory 1024 MiB of 143771 MiB\n".to_owned(),
        "\n\nUsed\nmemory 0 MiB on GPU 0\nbusy 0 % of the SMs\n".to_owned(),
        "Z lease-taken mps sm=70 memory=1024MiB\n".to_owned(),
        format!("\n\nMPS server\nkey {GPU}\nstate serving\n"),
        "\n\nDevice nodes\n/dev/nvidiactl 195:255\n".to_owned(),
        "\nCUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1024M\n".to_owned(),
    ] {
        assert!(told.contains(&part), "{part} is not in {told}");
    }
    let told = stdout(&world, &["explain", "--container", &id, "--format", "json"]);
    let told: Value = serde_json::from_str(&told).expect("JSON");
    assert_eq!(
        keys(&told),
        ["schema", "container", "share", "used", "mps", "nodes", "environment", "history"]
    );
    assert_eq!(told["used"][0]["used"]["processes"], json!(0), "{told}");
    let kinds: Vec<_> =
        told["history"].as_array().expect("events").iter().map(|event| &event["kind"]).collect();
    assert_eq!(kinds[..], [&json!("lease-taken"), &json!("lease-bound")]);
    assert_eq!((&told["container"]["pid"], &told["share"]["sm_percent"]), (&json!(pid), &json!(70.0)));
    assert!(stdout(&world, &["explain", "--container", "refused"]).contains(&line));
    let told = stdout(&world, &["explain", "--container", "refused", "--format", "json"]);
    let told: Value = serde_json::from_str(&told).expect("JSON");
    assert_eq!(
        (&told["container"]["state"], &told["history"][0]["kind"]),
        (&json!("none"), &json!("refused"))
    );
    let last = in_one_line(&stdout(&world, &["status", "--last-error"]));
    assert!(last.trim_end().ends_with(&format!("container refused: {line}")), "{last}");
    let last: Value =
        serde_json::from_str(&stdout(&world, &["status", "--last-error", "--format", "json"])).expect("JSON");
    assert_eq!((&last["container_id"], &last["reason"]), (&json!("refused"), &json!(line)));
    held.down();
    world.assert_empty();
}

#[test]
fn an_error_in_json_has_a_reason() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let keeper = world.bundle("keeper", &[("sublet.sm", "60")], SLEEP);
    keeper.up();
    let reason = |arguments: &[&str]| {
        let (stdout, stderr) = run(&world, &[arguments, &["--format", "json"]].concat(), 1);
        let error: Value = serde_json::from_str(&stdout).expect("one JSON document");
        assert_eq!(in_one_line(&stderr), format!("sublet: {}", error["error"].as_str().expect("a text")));
        error["reason"].as_str().expect("a word").to_owned()
    };
    assert_eq!(reason(&["explain", "sm=70"]), "no-room");
    assert_eq!(reason(&["explain", "gpu=7"]), "never-fits");
    assert_eq!(reason(&["explain", "smm=70"]), "bad-request");
    assert_eq!(reason(&["explain", "--container", "nobody"]), "no-container");
    assert_eq!(reason(&["explain"]), "bad-usage");
    assert_eq!(reason(&["explain", "--name", "x"]), "no-share");
    assert_eq!(reason(&["explain", "--compose", "/nonexistent"]), "bad-file");
    keeper.down();
    for gone in ["proc/driver/nvidia", "sys/module/nvidia"] {
        let gone = world.driver_root.as_ref().expect("simulated").join(gone);
        std::fs::remove_dir_all(gone).expect("it was there");
    }
    for arguments in [&["explain", "sm=5"][..], &["status"], &["lease", "list"]] {
        assert_eq!(reason(arguments), "no-driver", "{arguments:?}");
    }
}

const COMPOSE: &str = "services:
  web: { image: x, runtime: sublet, annotations: { sublet.sm: \"25\", sublet.memory: 8GiB } }
  large: { image: x, runtime: sublet, annotations: [ sublet.sm=60 ] }
  db: { image: y }
  worker: { image: x, runtime: sublet, scale: 2, annotations: { sublet.sm: \"10\" } }
";

#[test]
fn the_services_of_a_compose_file_are_checked_together() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let file = world.dir.path().join("compose.yaml");
    std::fs::write(&file, COMPOSE).expect("written");
    let path = file.to_str().expect("UTF-8");
    let before = contents(&world.state_dir());
    let (table, said) = run(&world, &["explain", "--compose", path], 1);
    let rows = squeezed(&table);
    let rows: Vec<&str> = rows.lines().collect();
    assert_eq!(
        rows[..5],
        [
            "SERVICE GPU MODE SM MEMORY RESULT",
            "web 0 mps 25 % (32) 8192 MiB fits",
            "large 0 mps 60 % (78) no limit fits",
            "db - - - - asks for no share",
            "worker-1 0 mps 10 % (12) no limit fits",
        ]
    );
    assert!(
        rows[5].starts_with("worker-2 - - - - NO: no room for ") && rows[5].contains("5 % SM left"),
        "{table}"
    );
    assert!(said.contains("Docker Compose is not installed"), "{said}");
    let (document, _) = run(&world, &["explain", "--compose", path, "--format", "json"], 1);
    let document: Value = serde_json::from_str(&document).expect("JSON");
    assert_eq!((&document["schema"], &document["fits"]), (&json!("sublet.explain-stack/1"), &json!(false)));
    let last = &document["services"][4];
    assert_eq!((&last["fits"], &last["reason"]), (&json!(false), &json!("no-room")));
    let first = json!({"service": "web", "fits": true, "in_turns": false, "asks": true, "gpus": [GPU], "mode": "mps", "sm_percent": 25.0,
        "sm_count": 32, "memory_bytes": 8_589_934_592_u64, "error": null, "reason": null});
    assert_eq!(document["services"][0], first);
    std::fs::write(&file, COMPOSE.replace("scale: 2", "scale: 1")).expect("written");
    assert!(stdout(&world, &["explain", "--compose", path]).contains("worker"));
    std::fs::write(&file, COMPOSE.replace("scale: 2", "scale: \"${COUNT}\"")).expect("written");
    let refused = failure(&world, &["explain", "--compose", path]);
    assert!(refused.contains("compose.yaml:5: ${COUNT} needs Docker Compose"), "{refused}");
    // What no program would read, and what Docker refuses.
    for (service, said) in [
        (
            "{ annotations: { sublet.sm: \"25\" } }",
            "NO: its runtime is the engine's default, which does not read",
        ),
        (
            "{ runtime: sublet, labels: [ sublet.sm=25, \"other=${X}\" ] }",
            "NO: labels are not annotations: write under `annotations:` sublet.sm=25",
        ),
    ] {
        std::fs::write(&file, format!("services: {{ web: {service} }}\n")).expect("written");
        let (table, _) = run(&world, &["explain", "--compose", path], 1);
        assert!(table.contains(said), "{service}: {table}");
        let (document, _) = run(&world, &["explain", "--compose", path, "--format", "json"], 1);
        let document: Value = serde_json::from_str(&document).expect("JSON");
        assert_eq!(document["services"][0]["reason"], "not-by-sublet", "{document}");
    }
    for (services, said) in [
        (
            "{ web: { annotations: [ sublet.sm: 25 ] } }",
            "service web: annotations must be a map, KEY: VALUE, or a list",
        ),
        ("{ web: { annotation: [ sublet.sm=25 ] } }", "compose.yaml:1: annotation: Compose has no such key"),
        ("{ web: { devices: /dev/dri } }", "service web: devices must be a list"),
        ("{ web: {}, web: {} }", "compose.yaml:1: web stands twice"),
        ("[ web ]", "must be services by name"),
        ("{ web: ", "no YAML"),
    ] {
        std::fs::write(&file, format!("services: {services}\n")).expect("written");
        let refused = failure(&world, &["explain", "--compose", path]);
        assert!(refused.contains(said), "{services}: {refused}");
    }
    let mut after = contents(&world.state_dir());
    after.retain(|file, _| before.contains_key(file));
    assert_eq!(after, before, "nothing was booked");
    world.assert_empty();
}

#[test]
fn a_start_order_that_lets_others_in_is_said_beside_what_always_fits() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let file = world.dir.path().join("compose.yaml");
    std::fs::write(&file, COMPOSE).expect("written");
    let path = file.to_str().expect("UTF-8");
    let (document, said) = run(&world, &["explain", "--compose", path, "--format", "json"], 1);
    let document: Value = serde_json::from_str(&document).expect("JSON");
    // 25, 60, 10 and 10 %: one worker has room beside any of the others.
    assert_eq!(
        (&document["in_every_order"], &document["in_another_order"]),
        (&json!(["worker-1"]), &json!(["worker-2"]))
    );
    let sentence = "the start order decides: another, such as worker-2, worker-1, large, web, would let worker-2 in; in \
                    every order these fit: worker-1";
    assert!(said.contains(sentence) && document["remarks"].to_string().contains(sentence), "{said}");
    // It happens so.
    let sm = [("web", "25"), ("large", "60"), ("worker-1", "10"), ("worker-2", "10")];
    let bundles = sm.map(|(name, sm)| world.bundle(name, &[("sublet.sm", sm)], SLEEP));
    for (order, left_out) in [([0, 1, 2, 3], 3), ([3, 2, 1, 0], 0), ([0, 2, 3, 1], 1)] {
        for at in order {
            if at == left_out { drop(bundles[at].refused()) } else { bundles[at].up() }
        }
        for at in order.into_iter().filter(|at| *at != left_out) {
            bundles[at].down();
        }
    }
    std::fs::write(&file, COMPOSE.replace("scale: 2", "scale: 1")).expect("written");
    let (_, said) = run(&world, &["explain", "--compose", path], 0);
    assert!(!said.contains("start order"), "all fit in every order: {said}");
    world.assert_empty();
}

#[test]
fn services_that_are_suspended_for_each_other_fit_in_turns() {
    if skip_unless_root() {
        return;
    }
    let model = "{ image: x, runtime: sublet, annotations: { sublet.memory: 80GiB, sublet.suspend: allow } }";
    let explained = |config: &str, code| {
        let world = World::simulated("h200", config);
        let file = world.dir.path().join("compose.yaml");
        std::fs::write(&file, format!("services:\n  chat: {model}\n  image: {model}\n")).expect("written");
        let (table, said) = run(&world, &["explain", "--compose", file.to_str().expect("UTF-8")], code);
        (squeezed(&table), said)
    };
    let (table, said) = explained("", 0);
    assert!(table.contains("image 0 time-slice no limit 81920 MiB fits in turns"), "{table}");
    assert!(said.contains("image in turns: `sublet serve` suspends others of the stack"), "{said}");
    let (table, _) = explained("[suspend]\non_demand = false\n", 1);
    assert!(table.contains("image - - - - NO: no room"), "{table}");
}

#[test]
fn a_full_gpu_does_not_hide_a_plan_for_an_empty_one() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let keeper = world.bundle("keeper", &[("sublet.mode", "exclusive")], SLEEP);
    keeper.up();
    let file = world.dir.path().join("compose.yaml");
    std::fs::write(&file, COMPOSE.replace("scale: 2", "scale: 1")).expect("written");
    let compose = ["explain", "--compose", file.to_str().expect("UTF-8")];
    let said = "this is as if nothing were on the GPUs (--empty)";
    let leases = world.leases();
    for ask in [&["explain", "sm=70", "memory=100GiB"][..], &compose, &["advise", "--tenants", "3"]] {
        let _ = run(&world, ask, 1);
        let (stdout, stderr) = run(&world, &[ask, &["--empty"]].concat(), 0);
        assert!((stdout.clone() + &stderr).contains(said), "{ask:?}: {stdout}{stderr}");
        let (document, _) = run(&world, &[ask, &["--empty", "--format", "json"]].concat(), 0);
        assert!(document.contains(said), "{ask:?}: {document}");
    }
    let _ = failure(&world, &["explain", "--empty", "sm=25", "memory=1000GiB"]);
    let (_, usage) = run(&world, &["explain", "--empty", "--container", "keeper"], 2);
    assert!(usage.contains("cannot be used with"), "{usage}");
    // What an administrator has drained is no room on an empty host either.
    assert!(world.sublet(&["drain", "0"]).status.success());
    let drained = failure(&world, &["explain", "--empty", "sm=25"]);
    assert!(drained.contains("drain"), "{drained}");
    assert!(world.sublet(&["undrain", "0"]).status.success());
    assert_eq!(world.leases(), leases, "nothing was booked");
    keeper.down();
    world.assert_empty();
}

#[test]
fn quadlet_files_are_checked_together() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let file = |name: &str, text: &str| {
        let path = world.dir.path().join(name);
        std::fs::write(&path, text).expect("written");
        path.to_str().expect("UTF-8").to_owned()
    };
    let web = file(
        "web.container",
        "[Container]\nImage=x\nAnnotation=sublet.sm=60\nAnnotation=sublet.memory=8GiB\n",
    );
    let batch = file("batch.container", "[Container]\nImage=x\nPodmanArgs=--annotation=sublet.sm=50\n");
    let template = file("batch@.container", "[Container]\nImage=x\n");
    let labelled = file("labelled.container", "[Container]\nImage=x\nLabel=sublet.sm=25\n");
    assert!(
        squeezed(&stdout(&world, &["explain", "--quadlet", &web]))
            .ends_with("web 0 mps 60 % (78) 8192 MiB fits")
    );
    let (table, _) = run(&world, &["explain", "--quadlet", &web, &batch], 1);
    assert!(squeezed(&table).contains("\nbatch - - - - NO: no room for "), "{table}");
    let (table, said) = run(&world, &["explain", "--quadlet", &labelled], 1);
    assert!(table.contains("NO: labels are not annotations: write as Annotation= sublet.sm=25"), "{table}");
    assert!(said.contains("Podman runs no hook of sublet's"), "{said}");
    let refused = failure(&world, &["explain", "--quadlet", &web, &template]);
    assert!(refused.contains("it is a template"), "{refused}");
    world.assert_empty();
}

#[test]
fn a_user_of_dockers_socket_is_told_of_dockers_containers() {
    if skip_unless_root() {
        return;
    }
    let policy = "[[policy]]\nuser = 1000\nsm = 50\n";
    let mut host = Host::new("h200", policy, Path::new(env!("CARGO_BIN_EXE_speak")));
    host.start();
    assert!(host.world.sublet(&["refresh"]).status.success());
    let explain = |arguments: &[&str]| {
        let output = host.command(1000, "sublet").arg("explain").args(arguments).output().expect("it runs");
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    let policy = "your policy limits sm to 50 %";
    let share = ["sm=60", "memory=1GiB"];
    assert!(explain(&share).contains(policy));
    assert!(!host.world.bundle("large", &[("sublet.sm", "200")], SLEEP).create().ok);
    let of_large = || explain(&["--container", "large"]);
    assert!(of_large().contains("holds no lease"), "{}", of_large());
    let socket = Path::new("/var/run/docker.sock");
    if socket.exists() {
        println!("skipped: this machine has a Docker of its own");
        return;
    }
    let _listener = UnixListener::bind(socket).expect("bound");
    std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o600)).expect("chmod");
    assert!(explain(&share).contains(policy), "a socket that is not hers to use");
    std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o666)).expect("chmod");
    let told = explain(&share);
    assert!(told.starts_with("For        Docker's containers (--rootless: your own)\n"), "{told}");
    assert!(told.contains("(at most 60 %)"), "{told}");
    assert!(of_large().contains("refused: sublet.sm=200"), "{}", of_large());
    assert!(explain(&[&share[..], &["--rootless"]].concat()).contains(policy));
    std::fs::remove_file(socket).expect("it was there");
}

/// As a container would, it asks the driver anew before it says no.
#[test]
fn what_an_mps_server_left_in_the_inventory_refuses_nothing() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "[mps]\nidle = \"0s\"\n");
    let file = world.dir.path().join("compose.yaml");
    let services =
        "services: { one: { image: x, runtime: sublet, annotations: [ sublet.mode=time-slice ] } }\n";
    std::fs::write(&file, services).expect("written");
    let compose = ["explain", "--compose", file.to_str().expect("UTF-8")];
    let asks: [&[&str]; 3] =
        [&["explain", "mode=time-slice"], &compose, &["wait", "--timeout", "1s", "mode=time-slice"]];
    for ask in asks {
        let server = world.bundle("server", &[("sublet.sm", "25")], SLEEP);
        server.up();
        assert!(world.sublet(&["refresh"]).status.success());
        let inventory =
            std::fs::read_to_string(world.state_dir().join("inventory.json")).expect("it is there");
        assert!(inventory.contains("EXCLUSIVE_PROCESS"));
        // While it is there, the answer is no, and it is quick.
        let _ = run(&world, ask, 1);
        server.down();
        let _ = run(&world, ask, 0);
    }
    let started = world.bundle("one", &[("sublet.mode", "time-slice")], SLEEP);
    started.up();
    started.down();
    world.assert_empty();
}
