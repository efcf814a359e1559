//! `sublet suspend`, `resume` and `move` of Podman's containers, of root and of a user without it.

use std::os::unix::fs::PermissionsExt;

use sublet_e2e::docker::skip_unless_engines;
use sublet_e2e::kept::{ALLOW, KEEP, Kept, OPEN_NODES, gpu};
use sublet_e2e::podman::Podman;
use sublet_e2e::rootless::{Rootless, done, text};
use sublet_e2e::{Finished, World, eventually};

/// A whole life of a container with these options.
fn lives(podman: &Podman, options: &[&str]) {
    let started = podman.run("kept", ALLOW, options, KEEP);
    assert!(started.ok, "podman run {options:?}: {}", started.stderr);
    let kept = Kept::of(&podman.world, || podman.cli(&["logs", "kept"]));
    kept.done(&["suspend", "kept"]);
    kept.is_suspended();
    podman.done(&["exec", "kept", "true"]);
    kept.done(&["resume", "kept"]);
    kept.is_on(0);
    kept.done(&["move", "kept", "--gpu", "2"]);
    kept.is_on(2);
    assert_eq!(podman.done(&["exec", "kept", "sh", "-c", OPEN_NODES]), "/dev/nvidia3");
    assert_eq!(podman.exec_info("kept", &[])["uuid"], gpu(2));
    kept.done(&["suspend", "kept"]);
    podman.done(&["stop", "-t0", "kept"]);
    podman.assert_empty();
    podman.done(&["start", "kept"]);
    kept.is_on(0);
    kept.done(&["suspend", "kept"]);
    podman.done(&["rm", "-f", "-t0", "kept"]);
    podman.assert_empty();
}

#[test]
fn of_root_by_the_hook_and_by_the_runtime() {
    if skip_unless_engines() {
        return;
    }
    let podman = Podman::up(World::simulated("h200x8", ""));
    lives(&podman, &[]);
    std::fs::remove_file(podman.world.dir.path().join("hooks/sublet.json")).expect("no hook");
    let shim = podman.world.dir.path().join("bin/sublet-runtime");
    let started = Podman::arguments(&["run", "-d"], "kept", ALLOW, &[], KEEP);
    podman.done(&[&["--runtime", shim.to_str().expect("UTF-8")], &started[..]].concat());
    let kept = Kept::of(&podman.world, || podman.cli(&["logs", "kept"]));
    kept.done(&["move", "kept", "--gpu", "2"]);
    kept.is_on(2);
    podman.done(&["rm", "-f", "-t0", "kept"]);
    podman.assert_empty();
}

/// The container's root is nobody outside, and its nodes come by mounts.
#[test]
fn in_a_user_namespace() {
    if skip_unless_engines() {
        return;
    }
    let world = World::simulated("h200x8", "");
    std::fs::set_permissions(world.dir.path(), PermissionsExt::from_mode(0o711)).expect("chmod");
    lives(&Podman::up(world), &["--uidmap=0:100000:65536"]);
}

#[test]
fn of_a_user_where_the_policy_allows_it() {
    if skip_unless_engines() {
        return;
    }
    let policy = "[[policy]]\nuser = \"tester\"\nsuspend = true\n";
    let rootless = Rootless::serving(World::simulated("h200x8", policy));
    let started = rootless.run("mine", &[], ALLOW, KEEP);
    assert!(started.status.success(), "{}", text(&started.stderr));
    let log = || Finished::of(&rootless.podman(&["logs", "mine"]).output().expect("podman runs"));
    let kept = Kept::of(&rootless.world, log);
    for (arguments, said) in [
        (&["suspend", "mine"][..], "Suspended mine: "),
        (&["resume", "mine"], "Resumed mine: "),
        (&["move", "mine", "--gpu", "2"], "Moved mine: "),
    ] {
        let heard = rootless.sublet(arguments);
        assert!(heard.starts_with(said), "{heard}");
        match arguments[0] {
            "suspend" => kept.is_suspended(),
            "resume" => kept.is_on(0),
            _ => kept.is_on(2),
        }
    }
    let nodes = ["exec", "mine", "sh", "-c", OPEN_NODES];
    assert_eq!(done(rootless.podman(&nodes)).trim(), "/dev/nvidia3");
    assert_eq!(rootless.info("mine", &["exec", "mine", "cuda-probe", "info"])["uuid"], gpu(2));
    let heard = rootless.sublet(&["suspend", "mine"]);
    assert!(heard.starts_with("Suspended"), "{heard}");
    done(rootless.podman(&["rm", "-f", "-t0", "mine"]));
    assert!(eventually(|| rootless.world.leases().is_empty()), "{:?}", rootless.world.leases());
    rootless.world.assert_empty();
}
