//! What commands print as JSON, judged by python3-jsonschema with the schemas of docs/schema.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use sublet_e2e::{World, eventually, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const SLEEP: &[&str] = &["/bin/sleep", "120"];

/// Why `document` is not as docs/schema/`schema` says.
fn breach(world: &World, schema: &str, document: &Value) -> Option<String> {
    let script = "import json, sys, jsonschema\nread = lambda path: json.load(open(path))\n\
                  jsonschema.Draft202012Validator(read(sys.argv[1])).validate(read(sys.argv[2]))\n";
    let schemas = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schema");
    let file = world.dir.path().join(schema);
    std::fs::write(&file, document.to_string()).expect("written");
    let mut judge = Command::new("python3");
    let judged =
        judge.args(["-c", script]).arg(schemas.join(schema)).arg(&file).output().expect("python3 runs");
    (!judged.status.success()).then(|| String::from_utf8_lossy(&judged.stderr).into_owned())
}

fn judge(world: &World, schema: &str, document: &Value) {
    if let Some(why) = breach(world, schema, document) {
        panic!("{schema}: {document:#}: {why}");
    }
    assert!(breach(world, schema, &json!({"schema": 7})).is_some(), "{schema} takes anything");
}

/// Judges what a command prints with `--format json`, and returns it.
fn judged(world: &World, schema: &str, arguments: &[&str]) -> Value {
    let output = world.sublet(&[arguments, &["--format", "json"]].concat());
    let document = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{arguments:?}: {}", String::from_utf8_lossy(&output.stderr)));
    judge(world, schema, &document);
    document
}

fn file(world: &World, name: &str, text: &str) -> String {
    let path = world.dir.path().join(name);
    std::fs::write(&path, text).expect("a file");
    path.display().to_string()
}

#[test]
fn the_state_of_a_host_and_its_past() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("a100x2-mig", "");
    assert_eq!(judged(&world, "last-error.json", &["status", "--last-error"]), Value::Null);
    judged(&world, "bench.json", &["bench", "show", "published"]);
    let measured =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/evidence/2026-11-23-h200-sharing-yolos.json");
    let measured = measured.display().to_string();
    judged(&world, "bench.json", &["bench", "show", &measured]);
    judged(&world, "bench-comparison.json", &["bench", "compare", "published", &measured]);
    let bundles = ["0:0", "1"].map(|gpu| {
        let id = format!("on-{}", &gpu[..1]);
        let bundle = world.bundle(&id, &[("sublet.gpu", gpu), ("sublet.sm", "25")], HOLD);
        bundle.up();
        bundle.event("info");
        bundle
    });
    let _ = world.bundle("refused", &[("sublet.gpu", "7")], SLEEP).refused();
    let mut command = world.command("sublet");
    let mut waits = command.args(["wait", "gpu=1", "sm=90", "--timeout=60s"]).spawn().expect("it runs");
    assert!(eventually(|| world.status()["waiting"].as_array().is_some_and(|all| all.len() == 1)));
    let waiting = &judged(&world, "status.json", &["status"])["waiting"];
    assert_eq!(waiting[0]["pid"], waits.id(), "{waiting}");
    waits.kill().and_then(|()| waits.wait().map(drop)).expect("it ends");
    judged(&world, "lease-list.json", &["lease", "list"]);
    judged(&world, "mps-list.json", &["mps", "list"]);
    judged(&world, "doctor.json", &["doctor", "--quick"]);
    let of = |container| judged(&world, "explain-container.json", &["explain", "--container", container]);
    let held = of("on-1");
    assert_eq!((&held["container"]["state"], &held["share"]["sm_percent"]), (&"active".into(), &25.0.into()));
    assert!(held["mps"]["pid"].is_i64() && held["nodes"][0]["path"].is_string(), "{held}");
    bundles[1].down();
    let ended = of("on-1");
    let kinds: Vec<_> =
        ended["history"].as_array().expect("a history").iter().map(|event| &event["kind"]).collect();
    assert_eq!(
        (&ended["container"]["state"], kinds.last()),
        (&"none".into(), Some(&&"lease-ended".into())),
        "{ended}"
    );
    let refused = of("refused");
    assert_eq!((&refused["container"]["state"], refused.get("share")), (&"none".into(), None));
    assert_eq!(refused["history"][0]["kind"], "refused");
    assert!(judged(&world, "last-error.json", &["status", "--last-error"])["time"].is_string());

    let error = judged(&world, "error.json", &["explain", "--container", "nobody"]);
    assert_eq!(error["reason"], "no-container");
    let report = judged(&world, "report.json", &["report", "--by", "gpu"]);
    assert_eq!(report["total"]["leases"], 2, "{report}");
    let events = world.sublet(&["events", "--format", "json"]);
    let events = String::from_utf8_lossy(&events.stdout).into_owned();
    assert!(events.lines().count() > 3, "{events}");
    for line in events.lines() {
        judge(&world, "events.json", &serde_json::from_str(line).expect("JSON"));
    }
    let share = bundles[0].exec(&["/usr/bin/sublet-share", "--format", "json"]).json().remove(0);
    judge(&world, "share.json", &share);
    assert_eq!((&share["mode"], &share["sm_percent"]), (&"mps".into(), &25.into()), "{share}");
    bundles[0].down();
    world.assert_empty();
}

#[test]
fn what_a_share_or_a_stack_would_get_and_how_it_is_offered() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "[share.small]\nsm = 25\nmemory = \"8GiB\"\n");
    judged(&world, "explain.json", &["explain", "sm=25", "memory=8GiB"]);
    let edits = judged(&world, "explain.json", &["explain", "sm=25", "memory=8GiB", "--edits"]);
    assert!(edits["edits"]["mounts"][0]["source"].is_string(), "{edits}");
    let stack = "services:\n  fits: {image: i, runtime: sublet, annotations: {sublet.sm: \"25\"}}\n  \
                 not: {image: i, runtime: sublet, annotations: {sublet.sm: \"90\"}}\n  \
                 none: {image: i}\n";
    let stack = file(&world, "compose.yaml", stack);
    let stack = judged(&world, "explain-stack.json", &["explain", "--compose", &stack]);
    assert_eq!(stack["fits"], false, "{stack}");
    let advised = judged(&world, "advise.json", &["advise", "--tenants", "3"]);
    assert!(advised["advice"]["paste"]["compose"].is_string(), "{advised}");
    let none = judged(&world, "advise.json", &["advise", "--trust", "none"]);
    assert!(none["why_not"].is_string(), "{none}");
    let listed = judged(&world, "cdi-list.json", &["cdi", "list"]);
    assert!(listed["devices"][0]["name"].is_string(), "{listed}");
    let engine = file(&world, "daemon.json", "{}");
    let check = judged(&world, "setup-check.json", &["setup", "docker", "--check", "--config", &engine]);
    assert_eq!(check["as_asked"], false);
}

#[test]
fn a_suspension_its_end_a_move_and_the_host_meanwhile() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let keep = ["/usr/bin/cuda-probe", "keep", "1024", "600"];
    let bundle = world.bundle("kept", &[("sublet.suspend", "allow"), ("sublet.gpu", "0")], &keep);
    bundle.up();
    bundle.event("round");
    for (command, state, kind) in [
        (&["suspend", "kept"][..], "suspended", "suspended"),
        (&["resume", "kept"], "active", "resumed"),
        (&["move", "kept", "--gpu", "2"], "active", "moved"),
    ] {
        let done = judged(&world, "suspend.json", command)[0].clone();
        let lease = &judged(&world, "status.json", &["status"])["leases"][0];
        assert_eq!((&done["name"], &done["lease"]), (&"kept".into(), &lease["id"]), "{done}");
        assert_eq!([&done["state"], &lease["state"]], [state; 2], "{done}");
        assert!(done["bytes"].as_u64() >= Some(1024 << 20) && done["seconds"].as_f64() > Some(0.0), "{done}");
        judged(&world, "lease-list.json", &["lease", "list"]);
        let explained = judged(&world, "explain-container.json", &["explain", "--container", "kept"]);
        let last = explained["history"].as_array().and_then(|history| history.last()).expect("a history");
        assert_eq!(last["kind"], kind, "{explained}");
        let bytes = &explained["container"]["suspended_bytes"];
        let out = if state == "suspended" { done["bytes"].clone() } else { Value::Null };
        assert_eq!(*bytes, out, "{explained}");
    }
    bundle.down();
    world.assert_empty();
}

#[test]
fn mig_instances_and_a_plan() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("a100x2-mig", "");
    let gpus = judged(&world, "mig-list.json", &["mig", "list"]);
    assert!(gpus[0]["instances"][0]["compute"][0]["uuid"].is_string(), "{gpus}");
    let seven = "[[gpu]]\nmatch = \"0\"\nmig = true\ninstances = [{ profile = \"1g.5gb\", count = 7 }]\n";
    let seven = file(&world, "seven.toml", seven);
    let plan = judged(&world, "mig-plan.json", &["mig", "plan", &seven]);
    assert_eq!((&plan[0]["obstacle"], plan[0]["steps"].is_array()), (&Value::Null, true), "{plan}");
    let held = world.bundle("held", &[("sublet.gpu", "0:0")], SLEEP);
    held.up();
    let plan = judged(&world, "mig-plan.json", &["mig", "plan", &seven]);
    assert!(plan[0]["obstacle"].is_string() && plan[0].get("steps").is_none(), "{plan}");
    held.down();
}
