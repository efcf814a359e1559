//! 64 containers created at once on eight GPUs, in twenty rounds. Exactly those that fit start, and ledger, daemons
//! and containers agree. What fits is counted here by hand.
//!
//! One H200 has 143771 MiB; 512 are reserved and an MPS server takes 66.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use sublet_e2e::{Bundle, Finished, World, in_one_line, skip_unless_root};

/// Containers that ask for the same.
struct Group {
    asking: usize,
    annotations: &'static [(&'static str, &'static str)],
    /// How many of them there is room for.
    fitting: usize,
    /// Devices that each of them gets.
    devices: usize,
    mode: &'static str,
    /// `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`.
    sm: Option<&'static str>,
    /// `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`.
    memory: Option<&'static str>,
    /// MPS daemons that all of them need together.
    daemons: usize,
}

const PLAIN: Group = Group {
    asking: 64,
    annotations: &[],
    fitting: 0,
    devices: 1,
    mode: "mps",
    sm: None,
    memory: None,
    daemons: 0,
};

/// What the 64 ask for; each of these comes twice.
const KINDS: [&[Group]; 10] = [
    // Four quarters of each of eight GPUs.
    &[Group { annotations: &[("sublet.sm", "25")], fitting: 32, sm: Some("25"), daemons: 8, ..PLAIN }],
    // Eight eighths: all of them.
    &[Group { annotations: &[("sublet.sm", "12.5")], fitting: 64, sm: Some("12.5"), daemons: 8, ..PLAIN }],
    // 3 × 30 % is 90 %.
    &[Group { annotations: &[("sublet.sm", "30")], fitting: 24, sm: Some("30"), daemons: 8, ..PLAIN }],
    // 3 × 40960 + 66 MiB is 122946 of 143259; a fourth would make it 163906.
    &[Group {
        annotations: &[("sublet.sm", "5"), ("sublet.memory", "40GiB")],
        fitting: 24,
        sm: Some("5"),
        memory: Some("0=40960M"),
        daemons: 8,
        ..PLAIN
    }],
    // Eight may take turns on each.
    &[Group { annotations: &[("sublet.gpu", "any")], fitting: 64, mode: "time-slice", ..PLAIN }],
    &[Group { annotations: &[("sublet.mode", "exclusive")], fitting: 8, mode: "exclusive", ..PLAIN }],
    &[Group {
        annotations: &[("sublet.gpu", "any:2"), ("sublet.mode", "exclusive")],
        fitting: 4,
        devices: 2,
        mode: "exclusive",
        ..PLAIN
    }],
    // A separate server for each: 2 × (61440 + 66) MiB is 123012; a third would make it 184518.
    &[Group {
        annotations: &[("sublet.mode", "time-slice"), ("sublet.memory", "60GiB")],
        fitting: 16,
        mode: "time-slice",
        memory: Some("0=61440M"),
        daemons: 16,
        ..PLAIN
    }],
    // Each group on its own GPU: ten tenths, one alone, eight in turns.
    &[
        Group {
            asking: 32,
            annotations: &[("sublet.gpu", "0"), ("sublet.sm", "10")],
            fitting: 10,
            sm: Some("10"),
            daemons: 1,
            ..PLAIN
        },
        Group {
            asking: 16,
            annotations: &[("sublet.gpu", "1"), ("sublet.mode", "exclusive")],
            fitting: 1,
            mode: "exclusive",
            ..PLAIN
        },
        Group { asking: 16, annotations: &[("sublet.gpu", "2")], fitting: 8, mode: "time-slice", ..PLAIN },
    ],
    // Eight eighths of 10240 MiB on GPU 3, eight in turns on 4 and 5 together.
    &[
        Group {
            asking: 40,
            annotations: &[("sublet.gpu", "3"), ("sublet.sm", "12.5"), ("sublet.memory", "10GiB")],
            fitting: 8,
            sm: Some("12.5"),
            memory: Some("0=10240M"),
            daemons: 1,
            ..PLAIN
        },
        Group {
            asking: 24,
            annotations: &[("sublet.gpu", "4,5")],
            fitting: 8,
            devices: 2,
            mode: "time-slice",
            ..PLAIN
        },
    ],
];

#[test]
fn of_64_at_once_those_start_that_fit() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    for round in 0..20 {
        play(&world, round, KINDS[round % KINDS.len()]);
    }
}

fn play(world: &World, round: usize, kind: &[Group]) {
    let members: Vec<&Group> =
        kind.iter().flat_map(|group| std::iter::repeat_n(group, group.asking)).collect();
    assert_eq!(members.len(), 64);
    let bundle = |(n, group): (usize, &&Group)| {
        world.bundle(&format!("c{n}"), group.annotations, &["/bin/sleep", "600"])
    };
    let bundles: Vec<Bundle<'_>> = members.iter().enumerate().map(bundle).collect();
    let done = at_once(&bundles, |bundle| {
        let created = bundle.create();
        if created.ok { bundle.start() } else { created }
    });
    let started: Vec<(&Bundle<'_>, &Group)> =
        (0..64).filter(|n| done[*n].ok).map(|n| (&bundles[n], members[n])).collect();
    for group in kind {
        let count = started.iter().filter(|(_, member)| std::ptr::eq(*member, group)).count();
        let refusal = done.iter().find(|done| !done.ok).map(|done| &done.stderr);
        assert_eq!(count, group.fitting, "round {round}: {:?}; {refusal:?}", group.annotations);
    }
    for (bundle, refused) in bundles.iter().zip(&done).filter(|(_, done)| !done.ok) {
        assert_refused(bundle, refused, round);
    }
    agree(world, &started, kind, round);
    at_once(&started, |(bundle, _)| bundle.down());
    world.assert_empty();
}

/// Runs `act` for each in a thread of its own.
fn at_once<T: Sync, R: Send>(all: &[T], act: impl Fn(&T) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = all.iter().map(|one| scope.spawn(|| act(one))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

fn assert_refused(bundle: &Bundle<'_>, refused: &Finished, round: usize) {
    assert_eq!(in_one_line(&refused.stderr).lines().count(), 1, "round {round}: {}", refused.stderr);
    assert_eq!(bundle.config(), bundle.spec, "round {round}: {} was refused and edited", bundle.id);
}

/// Leases, daemons and what each container was given.
fn agree(world: &World, started: &[(&Bundle<'_>, &Group)], kind: &[Group], round: usize) {
    let status = world.status();
    let leases = by_container(&status);
    let ids: Vec<&str> = leases.keys().map(String::as_str).collect();
    let mut expected: Vec<&str> = started.iter().map(|(bundle, _)| bundle.id.as_str()).collect();
    expected.sort_unstable();
    assert_eq!(ids, expected, "round {round}: who has a lease");
    let daemons: usize = kind.iter().map(|group| group.daemons).sum();
    let served: Vec<&Value> = status["mps"].as_array().expect("mps").iter().collect();
    assert_eq!(served.len(), daemons, "round {round}: {served:?}");
    assert!(served.iter().all(|server| server["state"] == "serving"), "round {round}: {served:?}");
    // A control daemon and its server each.
    assert_eq!(world.daemons().len(), 2 * daemons, "round {round}");
    for (bundle, group) in started {
        assert_container(world, bundle, group, &leases[&bundle.id], &status);
    }
}

/// The elements of `leases` of each container.
fn by_container(status: &Value) -> BTreeMap<String, Vec<Value>> {
    let mut found: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for lease in status["leases"].as_array().expect("leases") {
        let id = lease["container_id"].as_str().expect("container_id").to_owned();
        found.entry(id).or_default().push(lease.clone());
    }
    found
}

fn assert_container(world: &World, bundle: &Bundle<'_>, group: &Group, leases: &[Value], status: &Value) {
    let id = &bundle.id;
    assert_eq!(leases.len(), group.devices, "{id}: {leases:?}");
    for lease in leases {
        assert_eq!((&lease["mode"], &lease["state"]), (&json!(group.mode), &json!("active")), "{id}");
        assert_eq!(lease["id"], leases[0]["id"], "{id}: taken together");
    }
    let config = bundle.config();
    assert_eq!(config["annotations"]["sublet.lease"], leases[0]["id"], "{id}");
    let env = environment(&config);
    let devices: Vec<&str> = leases.iter().filter_map(|lease| lease["device"].as_str()).collect();
    assert_eq!(env.get("SUBLET_DEVICES"), Some(&devices.join(",").as_str()), "{id}");
    let ordinals = if group.devices == 2 { "0,1" } else { "0" };
    assert_eq!(env.get("CUDA_VISIBLE_DEVICES"), Some(&ordinals), "{id}");
    assert_eq!(env.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT").copied(), group.memory, "{id}");
    if group.sm.is_some() || group.daemons == 0 {
        assert_eq!(env.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").copied(), group.sm, "{id}");
    }
    let pipe = (group.daemons > 0).then_some("/run/sublet/mps");
    assert_eq!(env.get("CUDA_MPS_PIPE_DIRECTORY").copied(), pipe, "{id}");
    assert_eq!(nodes(&config), minors(status, &devices), "{id}: the nodes are its devices'");
    let key = if group.mode == "mps" { devices[0] } else { leases[0]["id"].as_str().expect("id") };
    let public = world.state_dir().join("mps").join(key).join("public");
    let mounted = config["mounts"].as_array().expect("mounts").iter();
    let mounted = mounted.filter(|mount| mount["destination"] == "/run/sublet/mps");
    let sources: Vec<&str> = mounted.filter_map(|mount| mount["source"].as_str()).collect();
    let expected: Vec<&str> = pipe.and(public.to_str()).into_iter().collect();
    assert_eq!(sources, expected, "{id}: the daemon's directory");
}

/// Each name stands once.
fn environment(config: &Value) -> BTreeMap<&str, &str> {
    let entries = config["process"]["env"].as_array().expect("env");
    let env: BTreeMap<&str, &str> =
        entries.iter().filter_map(|entry| entry.as_str()?.split_once('=')).collect();
    assert_eq!(env.len(), entries.len(), "a name stands twice: {entries:?}");
    env
}

/// Minors of the GPUs whose nodes the container has, sorted.
fn nodes(config: &Value) -> Vec<u64> {
    let nodes = config["linux"]["devices"].as_array().expect("devices").iter();
    let gpus = nodes.filter_map(|node| node["path"].as_str()?.strip_prefix("/dev/nvidia")?.parse().ok());
    let mut minors: Vec<u64> = gpus.collect();
    minors.sort_unstable();
    minors
}

/// Minors of these devices, sorted.
fn minors(status: &Value, uuids: &[&str]) -> Vec<u64> {
    let devices = status["devices"].as_array().expect("devices").iter();
    let own = devices.filter(|device| uuids.iter().any(|uuid| device["uuid"] == *uuid));
    let mut minors: Vec<u64> = own.filter_map(|device| device["minor"].as_u64()).collect();
    minors.sort_unstable();
    minors
}

/// Each asks for more memory than the one before, so that the daemon's limits are raised up to forty times, one container
/// after the other.
#[test]
fn of_forty_that_raise_the_limits_of_one_daemon_all_start() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundles: Vec<Bundle<'_>> = (1..=40)
        .map(|n| {
            let memory = format!("{}MiB", 1024 + 64 * n);
            let share = [("sublet.sm", "2"), ("sublet.memory", memory.as_str())];
            world.bundle(&format!("c{n}"), &share, &["/bin/sleep", "600"])
        })
        .collect();
    let done = at_once(&bundles, |bundle| {
        let created = bundle.create();
        if created.ok { bundle.start() } else { created }
    });
    let refused: Vec<&String> = done.iter().filter(|done| !done.ok).map(|done| &done.stderr).collect();
    assert!(refused.is_empty(), "{} refused: {refused:#?}", refused.len());
    let status = world.status();
    assert_eq!(status["mps"].as_array().map(Vec::len), Some(1), "{status}");
    assert_eq!(status["mps"][0]["state"], "serving", "{status}");
    at_once(&bundles, Bundle::down);
    world.assert_empty();
}
