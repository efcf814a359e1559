//! `[mig] dynamic`: instances that are created for containers that find none free, and destroyed with them.

use std::path::Path;

use serde_json::{Value, json};
use sublet_e2e::mig::{
    By, HOLD, SLEEP, altered, assert_nothing_made, bare, created, devices, ledger, listed, namespaces, nodes,
    refused, shape, up,
};
use sublet_e2e::user::Host;
use sublet_e2e::{Bundle, World, eventually, skip_unless_root};

const DYNAMIC: &str = "[mig]\ndynamic = true\n";
/// An H200 in MIG mode with nothing in it.
const HOPPER: &str = "h200-mig";
const GPU: &str = "GPU-5b1e7000-0000-4000-8000-000000000120";
const SMALL: &[(&str, &str)] = &[("sublet.mig", "1g.18gb")];

fn world(topology: &str) -> World {
    World::simulated(topology, DYNAMIC)
}

/// The service tells users that a container has ended before its instance is gone.
fn assert_soon_gone(world: &World) {
    let gone =
        || ledger(world)["mig"]["dynamic_instances"].is_null() && ledger(world)["mig"]["under_way"].is_null();
    let _ = eventually(gone);
    assert_nothing_made(world);
}

fn lives(by: By) {
    let world = world(HOPPER);
    let one = created(&world, "one", by, SMALL, HOLD);
    let info = one.event("info");
    assert_eq!(
        (&info["error"], &info["count"], &info["sm"]),
        (&Value::Null, &json!(1), &json!(16)),
        "{info}"
    );
    // Where it takes no place from a 4g.71gb, and none from a second 2g.35gb before it must.
    assert_eq!(shape(&listed(&world, 0)), "1g.18gb@6");
    assert_eq!(
        nodes(&one).matches("nvidia-cap").count(),
        4,
        "a directory and a node, twice: {}",
        nodes(&one)
    );
    let seen = world.status();
    let device = &seen["devices"][0]["mig"][0];
    assert_eq!((&device["profile"], &device["dynamic"]), (&json!("1g.18gb"), &json!(true)), "{device}");
    assert_eq!(devices(&world), [device["uuid"].as_str().expect("a UUID")]);
    let large = created(&world, "large", by, &[("sublet.mig", "4g.71gb")], HOLD);
    assert_eq!(large.event("info")["error"], Value::Null);
    assert_eq!(shape(&listed(&world, 0)), "4g.71gb@0 1g.18gb@6");
    large.down();
    one.down();
    assert_nothing_made(&world);
    world.assert_empty();
}

#[test]
fn it_lives_as_long_as_its_container_by_the_shim() {
    if !skip_unless_root() {
        lives(By::Shim);
    }
}

#[test]
fn it_lives_as_long_as_its_container_by_precreate() {
    if !skip_unless_root() {
        lives(By::Precreate);
    }
}

#[test]
fn it_lives_as_long_as_its_container_by_prestart() {
    if !skip_unless_root() {
        lives(By::Prestart);
    }
}

#[test]
fn a_part_of_a_profile_and_the_smallest_that_will_do() {
    if skip_unless_root() {
        return;
    }
    let world = world(HOPPER);
    let cases: [(&[(&str, &str)], &str); 5] = [
        (&[("sublet.mig", "1c.2g.35gb")], "2g.35gb@4[1c]"),
        (&[("sublet.mode", "mig")], "1g.18gb@6"),
        (&[("sublet.mode", "mig"), ("sublet.memory", "20GiB")], "1g.35gb@6"),
        (&[("sublet.mode", "mig"), ("sublet.sm", "23")], "2g.35gb@4"),
        (&[("sublet.mig", "3g.71gb"), ("sublet.gpu", GPU)], "3g.71gb@4"),
    ];
    for (annotations, expected) in cases {
        let one = up(&world, "one", annotations);
        assert_eq!(shape(&listed(&world, 0)), expected, "{annotations:?}");
        one.down();
        assert_nothing_made(&world);
    }
    world.assert_empty();
}

#[test]
fn of_eight_at_once_the_seven_that_fit_start_each_on_its_own() {
    if skip_unless_root() {
        return;
    }
    let world = world(HOPPER);
    let ids: Vec<String> = (0..8).map(|number| format!("c{number}")).collect();
    let bundles: Vec<Bundle<'_>> = ids.iter().map(|id| world.bundle(id, SMALL, SLEEP)).collect();
    let results: Vec<_> = std::thread::scope(|scope| {
        let each = bundles.iter().map(|bundle| scope.spawn(|| bundle.create()));
        each.collect::<Vec<_>>().into_iter().map(|each| each.join().expect("it ends")).collect()
    });
    let refusals: Vec<&str> =
        results.iter().filter(|done| !done.ok).map(|done| done.stderr.as_str()).collect();
    assert_eq!(refusals.len(), 1, "{refusals:?}");
    assert!(
        refusals[0].contains("no MIG instance can be created for it: GPU 0 has no room for a 1g.18gb"),
        "{refusals:?}"
    );
    let mut uuids = devices(&world);
    uuids.sort();
    uuids.dedup();
    assert_eq!((uuids.len(), bare(&world).len()), (7, 7));
    std::thread::scope(|scope| {
        for (bundle, _) in bundles.iter().zip(&results).filter(|(_, done)| done.ok) {
            scope.spawn(|| bundle.down());
        }
    });
    assert_nothing_made(&world);
    world.assert_empty();
}

#[test]
fn what_has_no_room_is_refused_and_nothing_changes() {
    if skip_unless_root() {
        return;
    }
    let world = world("a100x2-mig");
    let found = "4g.20gb@0 2g.10gb@4[1c,1c] 1g.5gb@6";
    let held = up(&world, "held", &[("sublet.mig", "4g.20gb")]);
    let none = refused(&world, &[("sublet.mig", "3g.20gb")]);
    let expected =
        "no MIG instance can be created for it: GPU 0 has no room for a 3g.20gb beside 4g.20gb at 0 (lease ";
    assert!(
        none.contains(expected) && none.contains(" of container held), 2g.10gb at 4, 1g.5gb at 6"),
        "{none}"
    );
    assert_eq!(none.lines().count(), 1, "{none}");
    // Waiting does not help, and is not done.
    let unknown = refused(&world, &[("sublet.mig", "1g.6gb"), ("sublet.wait", "60s")]);
    assert!(
        unknown.contains("GPU 0 (NVIDIA A100-PCIE-40GB) has no profile 1g.6gb; did you mean 1g.5gb?"),
        "{unknown}"
    );
    let much = refused(&world, &[("sublet.mode", "mig"), ("sublet.memory", "80GiB"), ("sublet.wait", "60s")]);
    assert!(much.contains("GPU 0 (NVIDIA A100-PCIE-40GB) has no profile with 81920 MiB"), "{much}");
    let off = refused(&world, &[("sublet.mig", "3g.20gb"), ("sublet.gpu", "1")]);
    assert!(
        off.contains("no MIG instance can be created for it: every GPU that the request allows is drained, or not in MIG"),
        "{off}"
    );
    assert_eq!(shape(&listed(&world, 0)), found);
    held.down();
    // What is there and free is taken, and stays.
    up(&world, "one", &[("sublet.mig", "1g.5gb")]).down();
    assert_eq!(shape(&listed(&world, 0)), found);
    world.assert_empty();
    let static_ = World::simulated(HOPPER, "");
    let none = refused(&static_, SMALL);
    assert!(
        none.contains("no GPU of this host has any; fix: `sublet mig apply` creates them (root)"),
        "{none}"
    );
}

#[test]
fn several_share_one_until_the_last_has_ended() {
    if skip_unless_root() {
        return;
    }
    let world = world(HOPPER);
    let turns = [("sublet.mig", "1g.18gb"), ("sublet.mode", "time-slice")];
    let [first, second] = ["first", "second"].map(|id| up(&world, id, &turns));
    assert_eq!(bare(&world).len(), 1);
    first.down();
    assert_eq!(bare(&world).len(), 1);
    second.down();
    assert_nothing_made(&world);
    world.assert_empty();
    // A daemon ends before its device is destroyed, although a service runs, for which daemons wait for their next lease.
    let mut host = Host::new(HOPPER, DYNAMIC, Path::new(env!("CARGO_BIN_EXE_speak")));
    host.start();
    let mps = [("sublet.mig", "1g.18gb"), ("sublet.sm", "25"), ("sublet.memory", "2GiB")];
    let [first, second] = ["first", "second"].map(|id| up(&host.world, id, &mps));
    assert_eq!((bare(&host.world).len(), host.world.daemons().is_empty()), (1, false));
    first.down();
    second.down();
    assert_soon_gone(&host.world);
    host.world.assert_empty();
}

#[test]
fn layouts_are_kept_and_asserted_beside_them() {
    if skip_unless_root() {
        return;
    }
    let world = world(HOPPER);
    let layout = |name: &str, instances: &str| {
        let path = world.dir.path().join(name);
        let text = format!("[[gpu]]\nmatch = \"0\"\nmig = true\ninstances = [{instances}]\n");
        std::fs::write(&path, text).expect("a layout");
        path.to_str().expect("UTF-8").to_owned()
    };
    let run = |arguments: &[&str]| world.sublet(&[&["mig"], arguments].concat());
    let half = layout("half.toml", "{ profile = \"3g.71gb\", start = 0 }");
    assert!(run(&["apply", &half]).status.success());
    let one = up(&world, "one", SMALL);
    assert!(run(&["assert", &half]).status.success());
    assert!(run(&["apply", &half]).status.success());
    assert_eq!(shape(&listed(&world, 0)), "3g.71gb@0 1g.18gb@6");
    let exported = run(&["export"]).stdout;
    assert!(!String::from_utf8_lossy(&exported).contains("1g.18gb"), "it goes by itself");
    let whole = layout("whole.toml", "{ profile = \"7g.141gb\" }");
    let plan = run(&["plan", &whole]);
    let said = String::from_utf8_lossy(&plan.stdout).into_owned();
    assert!(said.contains("around 1g.18gb at 6 (lease ") && said.contains("of container one)"), "{said}");
    one.down();
    assert!(run(&["apply", &whole]).status.success());
    assert_eq!(shape(&listed(&world, 0)), "7g.141gb@0");
    assert_eq!(ledger(&world)["mig"]["dynamic_instances"], Value::Null);
    world.assert_empty();
}

#[test]
fn explain_says_that_one_would_be_made_and_makes_none() {
    if skip_unless_root() {
        return;
    }
    let world = world(HOPPER);
    let explained = world.sublet(&["explain", "--annotation", "sublet.mig=1g.18gb"]);
    let said = String::from_utf8_lossy(&explained.stderr).into_owned();
    assert!(
        said.contains("why: when the container starts, a MIG instance is created for it ([mig] dynamic): 1g.18gb at 6:1 of \
         GPU 0"),
        "{said}"
    );
    let file = world.dir.path().join("compose.yaml");
    let stack = |services: &[(&str, &str)]| {
        let service = |(name, asks): &(&str, &str)| {
            format!("{name}: {{ image: x, runtime: sublet, annotations: [ {asks} ] }}")
        };
        let services: Vec<String> = services.iter().map(service).collect();
        std::fs::write(&file, format!("services: {{ {} }}\n", services.join(", "))).expect("written");
        let stack = world.sublet(&["explain", "--compose", file.to_str().expect("UTF-8")]);
        String::from_utf8_lossy(&stack.stdout).into_owned()
    };
    let rows = stack(&[
        ("first", "sublet.mig=1g.18gb"),
        ("second", "sublet.mig=4g.71gb"),
        ("third", "sublet.mig=3g.71gb"),
        ("fourth", "sublet.mig=2g.35gb"),
    ]);
    for fits in ["1g.18gb at 6:1", "4g.71gb at 0:4", "2g.35gb at 4:2"] {
        assert!(rows.contains(&format!("fits: a MIG instance is created, {fits} of GPU 0")), "{rows}");
    }
    assert!(
        rows.contains(
            "GPU 0 has no room for a 3g.71gb beside 4g.71gb at 0 (created for a container before it)"
        ),
        "{rows}"
    );
    // These may share one instance: that depends on what it is, once it is there.
    let shared = "sublet.mig=1g.18gb, sublet.mode=mps, sublet.sm=40";
    let rows = stack(&[("first", shared), ("second", shared), ("third", "sublet.mig=1g.18gb")]);
    assert!(rows.contains("NO: a MIG instance that several may share would be created"), "{rows}");
    assert_eq!(rows.matches("fits: a MIG instance is created").count(), 2, "{rows}");
    let waited =
        |profile: &str| world.sublet(&["wait", "--annotation", &format!("sublet.mig={profile}")]).status;
    assert!(waited("1g.18gb").success() && !waited("1g.5gb").success());
    assert_eq!(bare(&world), Vec::<String>::new());
}

#[test]
fn users_have_them_made_where_their_policy_says_so() {
    if skip_unless_root() {
        return;
    }
    let speak = Path::new(env!("CARGO_BIN_EXE_speak"));
    let policy =
        format!("{DYNAMIC}[[policy]]\nuser = 1000\ndynamic = true\nleases = 1\n[[policy]]\nuser = 1001\n");
    let mut host = Host::new(HOPPER, &policy, speak);
    host.start();
    let bob = host.bundle(1001, "bob", SMALL, HOLD).create();
    assert!(!bob.ok && bob.stderr.contains("no GPU of this host has any"), "{bob:?}");
    assert_eq!(bare(&host.world), Vec::<String>::new());
    let alice = host.bundle(1000, "alice", SMALL, HOLD);
    alice.up();
    assert_eq!(alice.event("info")["error"], Value::Null);
    assert_eq!(bare(&host.world).len(), 1);
    let second = host.bundle(1000, "second", SMALL, HOLD).create();
    assert!(!second.ok && second.stderr.contains("limits your containers to 1"), "{second:?}");
    assert_eq!(bare(&host.world).len(), 1, "none is made in vain");
    alice.down();
    assert_soon_gone(&host.world);
    assert_eq!(host.leases(), Vec::<Value>::new());
}

/// As if `process` were creating an instance, and a sublet command waited for its end.
fn hold_changes(world: &World, process: u32) {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).expect("it runs");
    let start_time: u64 =
        stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(19)?.parse().ok()).unwrap();
    let mut held = ledger(world);
    held["namespaces"] = namespaces();
    held["mig"]["under_way"] = json!({"gpus": [], "owner": {"pid": process, "start_time": start_time}});
    held["mig"]["dynamic_instances"] = json!([{
        "gpu": GPU, "profile": 19, "name": "1g.18gb", "placement": [0, 1], "slices": 1, "gi": 7, "uuid": "MIG-gone"
    }]);
    std::fs::write(world.state_dir().join("ledger.json"), held.to_string()).expect("written");
}

#[test]
fn whoever_has_one_made_or_destroyed_keeps_no_other_user_waiting() {
    if skip_unless_root() {
        return;
    }
    let speak = Path::new(env!("CARGO_BIN_EXE_speak"));
    let policy = format!("{DYNAMIC}[[policy]]\nuser = 1000\ndynamic = true\n[[policy]]\nuser = 1001\n");
    let mut host = Host::new(HOPPER, &policy, speak);
    up(&host.world, "first", SMALL).down();
    let mut other = std::process::Command::new("sleep").arg("300").spawn().expect("sleep");
    hold_changes(&host.world, other.id());
    host.start();
    let helpers = || sublet_e2e::killing::helpers(&host.world).len();
    // The service, and the helper that destroys the instance that no lease needs.
    assert!(eventually(|| helpers() > 1), "nothing is destroyed");
    let alice = host.bundle(1000, "alice", SMALL, HOLD);
    let bob = host.bundle(1001, "bob", SMALL, HOLD);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| alice.create());
        // She is heard first.
        std::thread::sleep(std::time::Duration::from_secs(2));
        let refused = bob.create();
        assert!(refused.stderr.contains("no GPU of this host has any"), "{refused:?}");
        assert!(!waits.is_finished(), "bob had to wait for alice");
        other.kill().expect("SIGKILL");
        other.wait().expect("it is reaped");
        let made = waits.join().expect("it ends");
        assert!(made.ok, "{made:?}");
    });
    assert_eq!(bare(&host.world).len(), 1);
    alice.down();
    assert_soon_gone(&host.world);
    assert_eq!(host.leases(), Vec::<Value>::new());
}

#[test]
fn no_user_has_one_made_that_their_policy_does_not_allow() {
    if skip_unless_root() {
        return;
    }
    let speak = Path::new(env!("CARGO_BIN_EXE_speak"));
    // Of an H200's 132 SMs, 26.
    let policy = format!("{DYNAMIC}[[policy]]\nuser = 1000\ndynamic = true\nsm = 20\nmemory = \"20GiB\"\n");
    let mut host = Host::new(HOPPER, &policy, speak);
    host.start();
    let trace = host.world.driver_root.as_ref().expect("simulated").join("sim/trace");
    std::fs::write(&trace, "").expect("a trace");
    let cases: [(&[(&str, &str)], &str); 3] = [
        (&[("sublet.mig", "3g.71gb")], "leaves you 26 SMs of GPU 0, and a 3g.71gb has 60"),
        (
            &[("sublet.mode", "mig"), ("sublet.memory", "21GiB")],
            "leaves you 20480 MiB of GPU 0, and a 1g.35gb",
        ),
        (
            &[("sublet.mig", "2g.35gb"), ("sublet.sm", "10"), ("sublet.memory", "75%")],
            "leaves you 27307 MiB of GPU 0, and a 2g.35gb",
        ),
    ];
    for (annotations, expected) in cases {
        let refused = host.bundle(1000, "refused", annotations, HOLD).create();
        assert!(!refused.ok && refused.stderr.contains(expected), "{annotations:?}: {}", refused.stderr);
    }
    let calls = std::fs::read_to_string(&trace).expect("a trace");
    assert!(calls.contains("nvmlDeviceGetGpuInstances") && !calls.contains("CreateGpuInstance"), "{calls}");
    let one = host.bundle(1000, "one", &[("sublet.mode", "mig")], HOLD);
    one.up();
    let second = host.bundle(1000, "second", SMALL, HOLD).create();
    let expected = "leaves you 10 SMs of GPU 0, and a 1g.18gb has 16";
    assert!(!second.ok && second.stderr.contains(expected), "{second:?}");
    one.down();
    assert_soon_gone(&host.world);
}

#[test]
fn the_fuller_gpu_is_taken_first() {
    if skip_unless_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let both_on = |text: String| text.replace("mig_mode = \"disabled\"", "mig_mode = \"enabled\"");
    let world = altered(&dir, both_on, DYNAMIC);
    let three = up(&world, "three", &[("sublet.mig", "3g.20gb")]);
    let two = up(&world, "two", &[("sublet.mig", "2g.10gb")]);
    assert_eq!(shape(&listed(&world, 1)), "2g.10gb@0 3g.20gb@4");
    three.down();
    two.down();
    assert_eq!(shape(&listed(&world, 1)), "");
    world.assert_empty();
}
