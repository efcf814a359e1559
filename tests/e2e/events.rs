//! `sublet events`: what happened, from a lease's taking to its end, once each; filters, times, and what users see.

use std::process::{Command, Stdio};

use serde_json::{Value, json};
use sublet_e2e::{World, bin_dir, eventually, is_alive, skip_unless_root};

const SLEEP: &[&str] = &["/bin/sleep", "600"];
const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];

fn events(world: &World, arguments: &[&str]) -> Vec<Value> {
    let output = world.sublet(&[&["events", "--format", "json"], arguments].concat());
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["kind"].as_str().expect("a kind")).collect()
}

fn text(world: &World, arguments: &[&str]) -> String {
    String::from_utf8_lossy(&world.sublet(arguments).stdout).into_owned()
}

/// By the shim, and by a hook that engines call late.
#[test]
fn what_a_started_container_is_warned_of_is_told_once() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    for (id, stages) in
        [("shim", &[][..]), ("created", &["createRuntime", "poststop"]), ("late", &["prestart", "poststop"])]
    {
        let mut bundle = world.bundle(id, &[("sublet.gpu", "0")], SLEEP);
        let env = bundle.spec["process"]["env"].as_array_mut().expect("env");
        env.push(json!("NVIDIA_REQUIRE_CUDA=cuda>=99.1"));
        if !stages.is_empty() {
            bundle.hook(stages);
        }
        bundle.up();
        let told = events(&world, &["--filter", "kind=warned", "--container", id]);
        let [warned] = &told[..] else { panic!("{id}: {told:?}") };
        let why = "the image needs CUDA 99.1";
        assert!(warned["text"].as_str().is_some_and(|text| text.starts_with(why)), "{id}: {warned}");
        let explained = text(&world, &["explain", "--container", id]);
        assert_eq!(explained.matches(why).count(), 1, "{id}: {explained}");
        bundle.down();
    }
    world.assert_empty();
}

#[test]
fn a_lease_its_daemon_a_refusal_and_a_drain_are_told_once_each() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    assert_eq!(events(&world, &[]), Vec::<Value>::new());
    let bundle = world.bundle("told", &[("sublet.sm", "60"), ("sublet.memory", "8GiB")], HOLD);
    bundle.up();
    let _ = world.status();
    let refused = world.bundle("greedy", &[("sublet.sm", "70")], HOLD).refused();
    assert!(world.sublet(&["drain", "0"]).status.success());
    assert!(world.sublet(&["undrain", "0"]).status.success());
    bundle.down();
    world.assert_empty();
    let all = events(&world, &[]);
    assert_eq!(
        kinds(&all),
        [
            "lease-taken",
            "mps-started",
            "lease-bound",
            "refused",
            "drained",
            "undrained",
            "lease-ended",
            "mps-stopped"
        ]
    );
    let of = |kind: &str| all.iter().find(|event| event["kind"] == kind).expect("an event");
    let taken = of("lease-taken");
    assert_eq!(
        (&taken["container_id"], &taken["text"]),
        (&json!("told"), &json!("mps sm=60 memory=8192MiB"))
    );
    assert_eq!(of("lease-ended")["lease"], taken["lease"]);
    assert!(of("lease-bound")["took_ms"].as_u64().is_some_and(|took| took < 60_000), "{all:?}");
    assert_eq!((&of("refused")["container_id"], &of("refused")["text"]), (&json!("greedy"), &json!(refused)));
    assert_eq!(of("refused")["reason"], json!("no-room"));
    let last: Value =
        serde_json::from_str(&text(&world, &["status", "--last-error", "--format", "json"])).expect("JSON");
    assert_eq!(last["reason"], of("refused")["text"], "the last error is the last refusal");

    assert_eq!(kinds(&events(&world, &["--filter", "kind=drained", "--filter", "kind=undrained"])).len(), 2);
    assert_eq!(kinds(&events(&world, &["--container", "greedy"])), ["refused"]);
    assert_eq!(kinds(&events(&world, &["--filter", "gpu=0", "--filter", "kind=drained"])), ["drained"]);
    let taken = &events(&world, &["--filter", "kind=lease-taken"])[0];
    assert!(taken["took_ms"].as_u64().is_some_and(|waited| waited < 60_000), "{taken}");
    assert_eq!(events(&world, &["--until", "1h"]).len(), 0);
    assert_eq!(events(&world, &["--since", "1h"]).len(), all.len());
    assert_eq!(events(&world, &["--since", "2099-01-01"]).len(), 0);
    let lines = text(&world, &["events"]);
    let line = lines.lines().find(|line| line.contains("lease-taken")).expect("a line");
    assert!(line.contains("Z  lease-taken    told on GPU 0 mps sm=60 memory=8192MiB after "), "{line}");
    for wrong in [&["--since", "soon"][..], &["--filter", "kind=x"], &["--filter", "x=y"]] {
        let output = world.sublet(&[&["events"], wrong].concat());
        assert_eq!(output.status.code(), Some(2), "{output:?}");
    }
}

/// No command of sublet's comes between its start and its end, so the lease learns nothing of its process.
#[test]
fn a_container_that_ran_for_a_second_is_not_said_never_to_have_run() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let mut bundle = world.bundle("short", &[("sublet.gpu", "0")], &["/bin/sleep", "1"]);
    assert!(bundle.create().ok);
    bundle.plain = true;
    let pid = nix::unistd::Pid::from_raw(bundle.pid());
    assert!(bundle.start().ok);
    assert!(eventually(|| !is_alive(pid)), "{pid}");
    bundle.plain = false;
    assert!(bundle.delete().ok);
    let ended = &events(&world, &["--filter", "kind=lease-ended"])[0];
    assert_eq!(ended["container_id"], "short");
    assert_eq!(ended["text"].as_str().unwrap_or_default(), "", "{ended}");
    world.assert_empty();
}

#[test]
fn a_daemon_that_dies_failed_and_is_restarted() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    // A client would end with its server.
    let bundle = world.bundle("served", &[("sublet.sm", "25")], SLEEP);
    bundle.up();
    let pid =
        world.status()["mps"][0]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).expect("a pid");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL)
        .expect("killed");
    assert!(eventually(|| world.status()["mps"][0]["pid"] != json!(pid)));
    let all = events(&world, &["--filter", "kind=mps-failed", "--filter", "kind=mps-restarted"]);
    assert_eq!(kinds(&all), ["mps-failed", "mps-restarted"]);
    bundle.down();
    world.assert_empty();
}

#[test]
fn what_happens_next_is_followed_until_nobody_reads() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let _ = world.status();
    let mut follow = world.command("sublet");
    let mut follow =
        follow.args(["events", "-f", "--format", "json"]).stdout(Stdio::piped()).spawn().expect("it runs");
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(follow.stdout.take().expect("piped")));
    assert!(world.sublet(&["drain", "0"]).status.success());
    let line = lines.next().expect("a line").expect("read");
    assert!(line.contains("\"kind\":\"drained\""), "{line}");
    drop(lines);
    assert!(eventually(|| follow.try_wait().expect("waited").is_some()), "it ends once nobody reads");
    let line = format!("timeout 20 {} events | head -1", bin_dir().join("sublet").display());
    let output = Command::new("sh").args(["-c", &line]).env("SUBLET_CONFIG", &world.config).output();
    assert!(output.expect("sh runs").stderr.is_empty());
}

#[test]
fn a_record_that_was_cut_off_and_names_that_are_none_do_no_harm() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    assert!(world.sublet(&["drain", "0"]).status.success());
    let ring = world.state_dir().join("events.jsonl");
    let mut bytes = std::fs::read(&ring).expect("the ring");
    bytes.truncate(bytes.len() - 7);
    std::fs::write(&ring, bytes).expect("written");
    assert!(world.sublet(&["undrain", "0"]).status.success());
    assert_eq!(kinds(&events(&world, &[])), ["undrained"]);
    let long = format!(
        "{{\"time\":\"2026-11-23T07:00:00.000Z\",\"uptime_ms\":1,\"kind\":\"refused\",\"uid\":0,\"container_id\":\"{}\",\"text\":\
         \"\\u001b[2J{}\"}}\n",
        "x".repeat(4096),
        "y".repeat(4096)
    );
    let mut bytes = std::fs::read(&ring).expect("the ring");
    bytes.extend(long.as_bytes());
    std::fs::write(&ring, bytes).expect("written");
    let shown = text(&world, &["events"]);
    assert!(!shown.contains('\u{1b}') && shown.contains("\\u{1b}[2J"), "{shown}");
    assert_eq!(shown.lines().count(), 2, "{shown}");
}
