//! One table of requests through every entry point. What each request gives is a literal, and each container reports
//! from inside what it got: by its first process, an exec'd one, a health check and one with `env -i`. What an entry
//! point cannot offer is in its [`Column`] and nowhere else. Eight H200: 132 SMs, 143155 MiB.
//!
//! Plain bundles run everywhere; the engines need the root that tests/engines/enter provides.

pub mod table;

use std::path::Path;

use serde_json::{Value, json};
use sublet_e2e::docker::skip_unless_engines;
use sublet_e2e::entry_point::{
    Asked, By, Column, EntryPoint, How, OfContainerd, OfDocker, OfPodman, OfRootless, Plain, Report, Request,
    traces,
};
use sublet_e2e::{World, eventually, skip_unless_root};

use table::{Cuda, Gets, MADE_BY_ITSELF, ROWS, Row, Server, Share, WHOLE_MIB};

/// A named share for each row that may be one.
fn world() -> World {
    let shares = ROWS.iter().filter(|row| row.share).map(|row| row.request);
    let shares: String = shares.chain(beside()).map(|share| share.to_config()).collect();
    World::simulated("h200x8", &format!("[[policy]]\nuser = \"tester\"\n{shares}"))
}

/// Containers that run in addition to those of the rows.
fn beside() -> impl Iterator<Item = Request> {
    ROWS.iter().filter_map(|row| row.beside)
}

/// What the table says for this entry point.
fn expected(row: &Row, column: Column) -> Gets {
    let share = row.request.share();
    let is_share = ROWS.iter().any(|row| row.share && row.request.name == share);
    match row.gets {
        Gets::Refused(_) | Gets::Share(_) if !column.annotations && !is_share => Gets::Refused(share),
        gets if !column.any_share && gets.fits_no_one() => Gets::Refused(share),
        _ if !column.environment => row.late.unwrap_or(row.gets).dedicated(),
        _ if !column.device_cgroup => row.rootless.unwrap_or(row.gets),
        gets => gets,
    }
}

/// The whole table. After each row nothing is left.
fn all_rows(entry_point: &dyn EntryPoint) {
    let column = entry_point.column();
    for row in ROWS {
        eprintln!("{}", row.request.name);
        if let Some(beside) = &row.beside {
            entry_point.start(beside, &["/bin/sleep", "600"]).expect("there is room");
        }
        let expected = expected(row, column);
        if let Gets::Undecided(why) = expected {
            eprintln!("not asked here: {why}");
            continue;
        }
        let started = entry_point.start(&row.request, &Report::PROGRAM);
        match expected {
            Gets::Undecided(_) => {}
            Gets::Refused(why) => refused(entry_point, row, started, why),
            Gets::Nothing => {
                started.expect("it needs nothing of ours");
                nothing(&Report::of(entry_point, &row.request), entry_point.world());
                entry_point.stop(&row.request);
            }
            Gets::Share(share) => {
                started.unwrap_or_else(|why| panic!("{}: {why}", row.request.name));
                leases(entry_point.world(), &row.request, &share);
                check(&Report::of(entry_point, &row.request), &share, column, row.request.name);
                entry_point.stop(&row.request);
            }
        }
        if let Some(beside) = &row.beside {
            entry_point.stop(beside);
            entry_point.remove(beside);
        }
        gone(entry_point, &row.request);
    }
}

fn refused(entry_point: &dyn EntryPoint, row: &Row, started: Result<(), String>, why: &str) {
    let name = row.request.name;
    let said = started.expect_err(name);
    let last = entry_point.world().sublet(&["status", "--last-error"]);
    let last = String::from_utf8_lossy(&last.stdout).into_owned();
    if entry_point.column().says_why {
        assert!(said.contains(why), "{name}: {why:?} is not in: {said}");
    } else {
        // The engine itself may have refused the request before sublet saw it.
        assert!(
            said.contains(why) || last.contains(why),
            "{name}: {why:?} is not in status --last-error: {last}, and not in: {said}"
        );
    }
}

fn nothing(report: &Report, world: &World) {
    assert_ne!(report.first["error"], Value::Null, "{report:?}");
    assert_eq!((&report.dev, &report.files), (&vec![], &vec![]), "{report:?}");
    assert!(report.made.values().all(|result| result == "EPERM"), "{report:?}");
    assert!(!report.environment.iter().any(|line| line.contains("SUBLET")), "{report:?}");
    assert_eq!(world.leases(), Vec::<Value>::new());
}

/// One lease, an entry for each device.
fn leases(world: &World, request: &Request, share: &Share) {
    let leases = world.leases();
    let beside = usize::from(leases.iter().any(|lease| lease["id"] != leases[0]["id"]));
    assert_eq!(leases.len(), share.minors.len() + beside, "{}: {leases:?}", request.name);
    assert!(leases.iter().all(|lease| lease["state"] == "active"), "{}: {leases:?}", request.name);
}

fn check(report: &Report, share: &Share, column: Column, name: &str) {
    let said = format!("{name}: {report:#?}");
    let by_server = share.cuda.map(|cuda| cuda.by_server(share.server));
    let by_environment = if column.exec_environment { share.cuda } else { by_server };
    for (process, cuda) in [
        (&report.first, share.cuda),
        (&report.exec, by_environment),
        (&report.health, by_environment),
        (&report.bare, by_server),
    ] {
        sees(process, cuda, share, &said);
    }
    let mut nodes: Vec<String> = share.minors.iter().map(|minor| format!("nvidia{minor}")).collect();
    nodes.extend(["nvidia-uvm", "nvidia-uvm-tools", "nvidiactl"].map(str::to_owned));
    nodes.extend(share.more_nodes.iter().map(|&node| node.to_owned()));
    nodes.sort();
    assert_eq!(report.dev, nodes, "{said}");
    // The device cgroup allows it, but there is no driver behind the node.
    assert!(report.given.values().all(|result| result == "ENXIO"), "{said}");
    assert_eq!(report.made.len(), if column.device_cgroup { MADE_BY_ITSELF } else { 0 }, "{said}");
    for (minor, result) in &report.made {
        let opens = share.minors.contains(minor);
        assert_eq!(result, if opens { "ENXIO" } else { "EPERM" }, "nvidia{minor} of {said}");
    }
    assert_eq!(report.files, share.files, "{said}");
    for line in share.environment {
        let there = report.environment.iter().any(|has| has == line);
        assert_eq!(there, column.environment, "{line} of {said}");
    }
}

fn sees(process: &Value, cuda: Option<Cuda>, share: &Share, said: &str) {
    let Some(cuda) = cuda else {
        assert_ne!(process["error"], Value::Null, "{said}");
        return;
    };
    let count = if share.server == Server::None { share.minors.len() } else { 1 };
    assert_eq!((&process["error"], &process["count"]), (&Value::Null, &json!(count)), "{said}");
    assert_eq!(process["mps"], json!(share.server != Server::None), "{said}");
    assert_eq!(process["sm"], json!(cuda.sm), "{said}");
    // The sizes of contexts are the driver's.
    let free = process["free_mib"].as_u64().expect("free_mib");
    let most = if cuda.mib == WHOLE_MIB { WHOLE_MIB } else { cuda.mib + 64 };
    assert!((cuda.mib - cuda.mib / 50..=most).contains(&free), "{free} MiB are no {} of {said}", cuda.mib);
}

/// No lease, daemon, mount, process or file may be left, neither while its root filesystem exists nor afterwards.
fn gone(entry_point: &dyn EntryPoint, request: &Request) {
    let world = entry_point.world();
    assert!(eventually(|| world.leases().is_empty()), "{}: {:?}", request.name, world.leases());
    world.stop_waiting();
    assert!(eventually(|| world.daemons().is_empty()), "{}: {:?}", request.name, world.daemons());
    assert!(eventually(|| traces(world).is_empty()), "{}: {:#?}", request.name, traces(world));
    entry_point.remove(request);
    world.assert_empty();
    assert_eq!(traces(world), Vec::<String>::new(), "{}", request.name);
}

/// `spec` without what differs from one start to the next: the container's id, the lease and the hooks that
/// bind it.
fn normal(mut spec: Value) -> Value {
    spec.as_object_mut().expect("an object").remove("hooks");
    let annotations = spec["annotations"].as_object_mut().expect("annotations");
    assert!(annotations.remove("sublet.lease.record").is_some());
    assert!(annotations.remove("sublet.lease.edits").is_some());
    let lease = annotations.remove("sublet.lease").expect("a lease");
    // Podman 4's.
    annotations.remove("io.kubernetes.cri-o.Created");
    let text = spec.to_string().replace(lease.as_str().expect("an id"), "LEASE");
    let is_id = |word: &&str| word.len() == 64 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    let ids = text.split(|c: char| !c.is_ascii_alphanumeric()).filter(is_id);
    let without = ids.fold(text.clone(), |text, id| text.replace(id, "ID"));
    serde_json::from_str(&without).expect("JSON")
}

/// Podman writes its own part in any order, and some of it behind what a hook has added.
fn sorted(mut spec: Value) -> Value {
    for pointer in ["/process/env", "/mounts", "/linux/maskedPaths"] {
        let all = spec.pointer_mut(pointer).and_then(Value::as_array_mut).expect(pointer);
        all.sort_by_key(Value::to_string);
    }
    spec
}

/// Both ways must make the same config.json of the same container, but for what [`normal`] takes away.
fn same_edits<D: EntryPoint>(entry_point: &mut D, ways: [fn(&mut D); 2], look: fn(Value) -> Value) {
    for row in ROWS.iter().filter(|row| matches!(row.gets, Gets::Share(_))) {
        let [first, second] = ways.map(|way| {
            way(entry_point);
            entry_point.start(&row.request, &["/bin/sleep", "600"]).expect("there is room");
            let config = look(normal(entry_point.config(&row.request)));
            entry_point.stop(&row.request);
            gone(entry_point, &row.request);
            config
        });
        assert_eq!(first, second, "{}", row.request.name);
    }
}

#[test]
fn a_bundle_by_the_shim() {
    if !skip_unless_root() {
        all_rows(&Plain::new(world(), How::Shim));
    }
}

#[test]
fn a_bundle_edited_by_precreate() {
    if !skip_unless_root() {
        all_rows(&Plain::new(world(), How::Precreate));
    }
}

#[test]
fn a_bundle_with_a_prestart_hook() {
    if !skip_unless_root() {
        all_rows(&Plain::new(world(), How::Late("prestart")));
    }
}

#[test]
fn a_bundle_with_a_create_runtime_hook() {
    if !skip_unless_root() {
        all_rows(&Plain::new(world(), How::Late("createRuntime")));
    }
}

#[test]
fn shim_and_precreate_write_the_same_config() {
    if !skip_unless_root() {
        let ways: [fn(&mut Plain); 2] =
            [|entry_point| entry_point.go_by(How::Shim), |entry_point| entry_point.go_by(How::Precreate)];
        same_edits(&mut Plain::new(world(), How::Shim), ways, |spec| spec);
    }
}

/// Whether this root has no Docker: Debian 12's has Podman alone.
fn skip_unless_docker() -> bool {
    let skip = skip_unless_engines() || !Path::new("/usr/sbin/dockerd").exists();
    if skip {
        eprintln!("skipped: no dockerd here");
    }
    skip
}

fn docker(asked: Asked) -> OfDocker {
    let names: Vec<&str> =
        ROWS.iter().map(|row| row.request).chain(beside()).map(|share| share.name).collect();
    OfDocker::up(world(), asked, &names)
}

#[test]
fn docker_by_runtime_sublet() {
    if !skip_unless_docker() {
        all_rows(&docker(Asked::Runtime));
    }
}

#[test]
fn docker_by_runtimes_named_after_shares() {
    if !skip_unless_docker() {
        all_rows(&docker(Asked::Named));
    }
}

#[test]
fn docker_by_cdi_devices() {
    if !skip_unless_docker() {
        all_rows(&docker(Asked::Device));
    }
}

#[test]
fn containerd_by_ctr_run() {
    if !skip_unless_docker() {
        all_rows(&OfContainerd::up(world()));
    }
}

#[test]
fn podman_by_the_hook() {
    if !skip_unless_engines() {
        all_rows(&OfPodman::up(world(), By::Hook));
    }
}

#[test]
fn podman_by_runtime_sublet() {
    if !skip_unless_engines() {
        all_rows(&OfPodman::up(world(), By::Runtime));
    }
}

#[test]
fn podman_by_cdi_devices() {
    if !skip_unless_engines() {
        all_rows(&OfPodman::up(world(), By::Device));
    }
}

#[test]
fn rootless_podman_by_the_hook() {
    if !skip_unless_engines() {
        all_rows(&OfRootless::up(world(), true));
    }
}

#[test]
fn rootless_podman_by_the_shim() {
    if !skip_unless_engines() {
        all_rows(&OfRootless::up(world(), false));
    }
}

#[test]
fn podmans_hook_and_runtime_write_the_same_config() {
    if !skip_unless_engines() {
        let ways: [fn(&mut OfPodman); 2] =
            [|entry_point| entry_point.go_by(By::Hook), |entry_point| entry_point.go_by(By::Runtime)];
        same_edits(&mut OfPodman::up(world(), By::Hook), ways, sorted);
    }
}
