//! Room by itself: a start that finds none has others suspended that allow it, which come back in order; and whatever is killed,
//! nobody stays out and nobody else is touched. One GPU of 24 GiB.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::suspend::{KEEP, assert_goes_on, await_hang, done, fail, in_sim, text};
use crate::two_users::ALICE;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::Value;
use sublet_e2e::user::Host;
use sublet_e2e::{Bundle, World, eventually, skip_unless_root};

/// A model of 20 GiB.
const MODEL: &[(&str, &str)] = &[("sublet.memory", "20GiB"), ("sublet.suspend", "allow")];
/// One that stays where it is.
const FIXED: &[(&str, &str)] = &[("sublet.memory", "20GiB"), ("sublet.mode", "time-slice")];
const AT_ONCE: &str = "[suspend]\nat_least = \"0\"\n";

/// A host with one GPU of 24 GiB, with the service.
fn host(extra: &str) -> Host {
    let topology = concat!(env!("CARGO_MANIFEST_DIR"), "/../sim/topologies/h200.toml");
    let topology = std::fs::read_to_string(topology).expect("a topology");
    let small = topology.replace("= 143771", "= 24564").replace("= 143155", "= 24080");
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("small.toml");
    std::fs::write(&file, small).expect("written");
    let mut host = Host::new(file.to_str().expect("UTF-8"), extra, Path::new(env!("CARGO_BIN_EXE_speak")));
    host.start();
    host
}

fn model<'a>(world: &'a World, id: &str) -> Bundle<'a> {
    let bundle = world.bundle(id, MODEL, KEEP);
    bundle.up();
    bundle.event("round");
    bundle
}

fn state(world: &World, id: &str) -> String {
    let leases = world.leases();
    let of = leases.iter().find(|lease| lease["container_id"] == id);
    of.map_or_else(String::new, |lease| lease["state"].as_str().expect("text").to_owned())
}

fn comes_to(world: &World, id: &str, expected: &str) {
    assert!(
        eventually(|| state(world, id) == expected),
        "{id} is {}: {:?}",
        state(world, id),
        world.leases()
    );
}

/// The texts of the events of this kind.
fn events(world: &World, kind: &str) -> Vec<String> {
    let lines = done(world, &["events", "--format", "json"]);
    let events = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let of_kind = events.filter(|event| event["kind"] == kind);
    of_kind.map(|event| event["text"].as_str().unwrap_or_default().to_owned()).collect()
}

/// The service, which [`kill_service`] can end.
fn start_in_group(world: &World) -> Child {
    let serve = world.command("sublet").arg("serve").process_group(0).spawn().expect("it runs");
    let socket = world.state_dir().join("sublet.sock");
    assert!(eventually(|| std::os::unix::net::UnixStream::connect(&socket).is_ok()), "no socket");
    serve
}

/// Ends the service with what it has started, in whatever they do.
fn kill_service(mut serve: Child) {
    killpg(Pid::from_raw(i32::try_from(serve.id()).expect("a pid")), Signal::SIGKILL).expect("it runs");
    serve.wait().expect("it ends");
}

/// `create`, which is not waited for.
fn begin_create(bundle: &Bundle<'_>) -> Child {
    bundle.write();
    let open = |name: &str| std::fs::File::create(bundle.dir.join(name)).expect("a file");
    let mut command = bundle.runtime();
    command.args(["create", "--bundle"]).arg(&bundle.dir).arg(&bundle.id);
    command.stdin(Stdio::null()).stdout(open("out")).stderr(open("err")).spawn().expect("it runs")
}

#[test]
fn a_start_gets_the_room_of_another_which_comes_back_when_it_has_ended() {
    if skip_unless_root() {
        return;
    }
    let host = host(AT_ONCE);
    let world = &host.world;
    let first = model(world, "first");
    let second = model(world, "second");
    assert_eq!((state(world, "first"), state(world, "second")), ("suspended".into(), "active".into()));
    let status = world.status();
    assert_eq!(status["waiting"][0]["container_id"], "first", "{}", status["waiting"]);
    let answer = done(world, &["explain", "--container", "first"]);
    assert!(answer.contains("comes back by itself, as number 1 of those who wait"), "{answer}");
    let texts = events(world, "suspended");
    assert!(texts[0].ends_with("MiB, to make room for another container"), "{texts:?}");
    second.down();
    comes_to(world, "first", "active");
    assert_goes_on(&first);
    assert_eq!(world.status()["waiting"], serde_json::json!([]));
    first.down();
    world.assert_empty();
}

#[test]
fn of_two_the_idle_one_goes_though_it_came_last() {
    if skip_unless_root() {
        return;
    }
    let host = host(AT_ONCE);
    let world = &host.world;
    let half = [("sublet.memory", "11GiB"), ("sublet.suspend", "allow")];
    let [busy, idle] = ["busy", "idle"].map(|id| world.bundle(id, &half, KEEP));
    for bundle in [&busy, &idle] {
        bundle.up();
        bundle.event("round");
    }
    std::fs::write(in_sim(world, "idle"), idle.pid().to_string()).expect("written");
    let third = world.bundle("third", &half, KEEP);
    third.up();
    assert_eq!((state(world, "busy"), state(world, "idle")), ("active".into(), "suspended".into()));
    third.down();
    comes_to(world, "idle", "active");
    for bundle in [busy, idle] {
        assert_goes_on(&bundle);
        bundle.down();
    }
    world.assert_empty();
}

#[test]
fn two_models_take_turns_on_a_gpu_that_has_room_for_one() {
    if skip_unless_root() {
        return;
    }
    let host = host("[suspend]\nat_least = \"1s\"\nturns = \"2s\"\n");
    let world = &host.world;
    let models = ["one", "two"].map(|id| model(world, id));
    for _ in 0..2 {
        for (active, out) in [("one", "two"), ("two", "one")] {
            comes_to(world, active, "active");
            comes_to(world, out, "suspended");
        }
    }
    for model in models {
        comes_to(world, &model.id, "active");
        assert_goes_on(&model);
        model.down();
    }
    world.assert_empty();
}

#[test]
fn no_container_goes_that_does_not_allow_it_or_has_just_come() {
    if skip_unless_root() {
        return;
    }
    let host = host("[suspend]\nlimit = \"1s\"\n");
    let world = &host.world;
    std::fs::write(in_sim(world, "trace"), "").expect("sim/trace");
    let fixed = world.bundle("fixed", FIXED, KEEP);
    fixed.up();
    fixed.event("round");
    let second = world.bundle("second", MODEL, KEEP);
    let refused = second.create();
    assert!(!refused.ok && refused.stderr.contains("GPU 0"), "{}", refused.stderr);
    fixed.down();
    // It may not go before 30 s, and the start waits for one.
    let first = model(world, "first");
    let began = Instant::now();
    let refused = second.create();
    assert!(!refused.ok && began.elapsed() < Duration::from_secs(20), "{}", refused.stderr);
    let trace = std::fs::read_to_string(in_sim(world, "trace")).expect("sim/trace");
    assert!(!trace.contains("cuCheckpointProcessLock"), "{trace}");
    assert_goes_on(&first);
    first.down();
    world.assert_empty();
}

#[test]
fn without_the_service_nothing_is_suspended_and_the_refusal_names_it() {
    if skip_unless_root() {
        return;
    }
    let mut host = host(AT_ONCE);
    host.stop();
    let world = &host.world;
    let first = model(world, "first");
    let second = world.bundle("second", MODEL, KEEP);
    let refused = second.create();
    assert!(
        !refused.ok && refused.stderr.contains("it would fit if `sublet serve` ran"),
        "{}",
        refused.stderr
    );
    let output = world.sublet(&["explain", "memory=20GiB", "suspend=allow"]);
    assert!(text(&output).contains("it would fit if `sublet serve` ran"), "{}", text(&output));
    assert_eq!(state(world, "first"), "active");
    assert_goes_on(&first);
    first.down();
    world.assert_empty();
}

#[test]
fn a_container_that_cannot_be_suspended_is_named_in_the_refusal() {
    if skip_unless_root() {
        return;
    }
    let host = host(AT_ONCE);
    let world = &host.world;
    let managed = world.bundle("managed", MODEL, &[KEEP, &["managed"]].concat());
    managed.up();
    managed.event("round");
    let refused = world.bundle("second", MODEL, KEEP).create();
    assert!(
        !refused.ok && refused.stderr.contains("container managed cannot be suspended"),
        "{}",
        refused.stderr
    );
    assert_eq!(state(world, "managed"), "active");
    assert_goes_on(&managed);
    managed.down();
    world.assert_empty();
}

#[test]
fn a_start_says_meanwhile_who_is_being_suspended_for_it() {
    if skip_unless_root() {
        return;
    }
    let host = host(AT_ONCE);
    let world = &host.world;
    let first = model(world, "first");
    // In percent: some five seconds.
    std::fs::write(in_sim(world, "checkpoint-pace"), "500").expect("written");
    let second = world.bundle("second", MODEL, KEEP);
    let mut create = begin_create(&second);
    let says = || world.status()["waiting"][0]["why"].as_str().unwrap_or_default().to_owned();
    assert!(eventually(|| says().contains("first is being suspended to make room for it")), "{}", says());
    std::fs::remove_file(in_sim(world, "checkpoint-pace")).expect("removed");
    assert!(create.wait().expect("it ends").success(), "{:?}", world.leases());
    comes_to(world, "first", "suspended");
    second.down();
    comes_to(world, "first", "active");
    assert_goes_on(&first);
    first.down();
    world.assert_empty();
}

#[test]
fn a_start_for_which_there_is_no_more_time_is_refused_and_nobody_stays_out() {
    if skip_unless_root() {
        return;
    }
    let host = host("[suspend]\nat_least = \"0\"\nlimit = \"1s\"\n");
    let world = &host.world;
    let half = [("sublet.memory", "11GiB"), ("sublet.suspend", "allow")];
    let [one, two] = ["one", "two"].map(|id| world.bundle(id, &half, KEEP));
    for bundle in [&one, &two] {
        bundle.up();
        bundle.event("round");
    }
    // In percent: some five seconds for each of two.
    std::fs::write(in_sim(world, "checkpoint-pace"), "500").expect("written");
    let refused = world.bundle("second", MODEL, KEEP).create();
    assert!(
        !refused.ok && refused.stderr.contains("the time for it is over ([suspend] limit)"),
        "{}",
        refused.stderr
    );
    std::fs::remove_file(in_sim(world, "checkpoint-pace")).expect("removed");
    for bundle in [one, two] {
        comes_to(world, &bundle.id, "active");
        assert_goes_on(&bundle);
        bundle.down();
    }
    world.assert_empty();
}

#[test]
fn a_start_that_is_killed_while_it_waits_leaves_nobody_out() {
    if skip_unless_root() {
        return;
    }
    let host = host(AT_ONCE);
    let world = &host.world;
    let first = model(world, "first");
    let second = world.bundle("second", MODEL, KEEP);
    let mut create = begin_create(&second);
    assert!(eventually(|| state(world, "first") != "active"), "{:?}", world.leases());
    create.kill().expect("it is there");
    create.wait().expect("it ends");
    // It may have been faster.
    second.down();
    comes_to(world, "first", "active");
    assert_goes_on(&first);
    first.down();
    world.assert_empty();
}

#[test]
fn a_service_that_is_killed_while_it_suspends_goes_on_when_it_is_back() {
    if skip_unless_root() {
        return;
    }
    let mut host = host(AT_ONCE);
    host.stop();
    host.serve = Some(start_in_group(&host.world));
    let world = &host.world;
    let waits = [MODEL, &[("sublet.wait", "60s")]].concat();
    for call in ["Lock", "Checkpoint"] {
        let (first, second) = (model(world, "first"), world.bundle("second", &waits, KEEP));
        fail(world, &format!("cuCheckpointProcess{call} 1 hang\n"));
        let mut create = begin_create(&second);
        await_hang(world, call);
        kill_service(host.serve.take().expect("it runs"));
        host.serve = Some(start_in_group(world));
        assert!(create.wait().expect("it ends").success(), "{call}: {:?}", world.leases());
        comes_to(world, "first", "suspended");
        assert!(second.start().ok, "{call}");
        second.down();
        comes_to(world, "first", "active");
        assert_goes_on(&first);
        first.down();
    }
    world.assert_empty();
}

#[test]
fn a_service_that_is_killed_while_it_brings_one_back_does_so_when_it_is_back() {
    if skip_unless_root() {
        return;
    }
    let mut host = host(AT_ONCE);
    host.stop();
    host.serve = Some(start_in_group(&host.world));
    let world = &host.world;
    for call in ["Restore", "Unlock"] {
        let (first, second) = (model(world, "first"), model(world, "second"));
        comes_to(world, "first", "suspended");
        fail(world, &format!("cuCheckpointProcess{call} 1 hang\n"));
        second.down();
        await_hang(world, call);
        kill_service(host.serve.take().expect("it runs"));
        host.serve = Some(start_in_group(world));
        comes_to(world, "first", "active");
        assert_goes_on(&first);
        first.down();
    }
    world.assert_empty();
}

#[test]
fn a_users_start_displaces_others_where_the_policy_allows_it() {
    if skip_unless_root() {
        return;
    }
    let host = host(&format!("{AT_ONCE}[[policy]]\nuser = {ALICE}\nsuspend = true\n"));
    let world = &host.world;
    let roots = model(world, "roots");
    let alices = host.bundle(ALICE, "alices", MODEL, KEEP);
    let refused = alices.create();
    assert!(!refused.ok && refused.stderr.contains("GPU 0"), "{}", refused.stderr);
    assert_eq!(state(world, "roots"), "active");
    let config = std::fs::read_to_string(&world.config).expect("config.toml");
    let others = config.replacen("suspend = true\n", "suspend = true\ndisplace = true\n", 1);
    std::fs::write(&world.config, others).expect("written");
    alices.up();
    alices.event("round");
    assert_eq!((state(world, "roots"), state(world, "alices")), ("suspended".into(), "active".into()));
    alices.down();
    comes_to(world, "roots", "active");
    assert_goes_on(&roots);
    roots.down();
    world.assert_empty();
}
