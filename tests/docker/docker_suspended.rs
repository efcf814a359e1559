//! `sublet suspend`, `resume` and `move` of Docker's containers: Docker's commands work meanwhile, and what ends, ends.

use serde_json::json;
use sublet_e2e::docker::{Docker, skip_unless_engines};
use sublet_e2e::kept::{ALLOW, KEEP, Kept, OPEN_NODES, gpu};
use sublet_e2e::{World, eventually};

fn up(topology: &str) -> Docker {
    Docker::up(World::simulated(topology, ""), &json!({}))
}

fn start<'a>(docker: &'a Docker, name: &'a str, options: &[&str]) -> Kept<'a> {
    let started = docker.run(name, ALLOW, options, KEEP);
    assert!(started.ok, "docker run {name}: {}\n{}", started.stderr, docker.log());
    Kept::of(&docker.world, move || docker.cli(&["logs", name]))
}

fn assert_no_lease(docker: &Docker) {
    assert!(eventually(|| docker.world.leases().is_empty()), "leases are left: {:?}", docker.world.leases());
}

/// The GPUs' nodes, seen from inside.
fn nodes(docker: &Docker, name: &str) -> String {
    docker.ask(&["exec", name, "sh", "-c", OPEN_NODES])
}

#[test]
fn docker_works_while_a_container_is_suspended_and_the_container_comes_back() {
    if skip_unless_engines() {
        return;
    }
    let docker = up("h200");
    let kept = start(&docker, "kept", &[]);
    docker.done(&["pause", "kept"]);
    assert_eq!(kept.refused(&["suspend", "kept"]), "paused");
    docker.done(&["unpause", "kept"]);
    kept.goes_on();
    kept.done(&["suspend", "kept"]);
    kept.is_suspended();
    docker.done(&["exec", "kept", "true"]);
    docker.done(&["pause", "kept"]);
    assert_eq!(kept.refused(&["resume", "kept"]), "paused");
    docker.done(&["unpause", "kept"]);
    kept.is_suspended();
    kept.done(&["resume", "kept"]);
    kept.goes_on();
    assert_eq!(docker.exec_info("kept", &[])["error"], json!(null));
    docker.done(&["rm", "-f", "kept"]);
    docker.world.assert_empty();
}

#[test]
fn a_suspended_container_ends_and_starts_again_as_any_other() {
    if skip_unless_engines() {
        return;
    }
    let docker = up("h200");
    let kept = start(&docker, "kept", &[]);
    let before = kept.lease()["id"].clone();
    kept.done(&["suspend", "kept"]);
    docker.done(&["restart", "-t", "0", "kept"]);
    kept.goes_on();
    assert_ne!(kept.lease()["id"], before, "another start, another lease");
    assert_eq!(kept.lease()["state"], "active");
    for end in [&["stop", "-t", "0", "kept"][..], &["kill", "kept"], &["rm", "-f", "kept"]] {
        kept.done(&["suspend", "kept"]);
        kept.is_suspended();
        docker.done(end);
        assert_no_lease(&docker);
        if end[0] != "rm" {
            docker.done(&["start", "kept"]);
            kept.goes_on();
        }
    }
    docker.world.assert_empty();
}

#[test]
fn a_container_moves_and_what_joins_it_follows() {
    if skip_unless_engines() {
        return;
    }
    let docker = up("h200x8");
    let without_rights = ["--user=1000:1000", "--cap-drop=ALL", "--security-opt=no-new-privileges"];
    for (name, options) in [("root", &[][..]), ("user", &without_rights)] {
        let kept = start(&docker, name, options);
        kept.is_on(0);
        for (to, node) in [("2", "/dev/nvidia3"), ("1", "/dev/nvidia1"), ("2", "/dev/nvidia3")] {
            kept.done(&["move", name, "--gpu", to]);
            kept.is_on(to.parse().expect("a number"));
            assert_eq!(nodes(&docker, name), node);
        }
        let info = docker.exec_info(name, &[]);
        assert_eq!((&info["uuid"], &info["count"]), (&gpu(2), &json!(1)), "{info}");
        // It knows the GPUs on which it was.
        kept.done(&["suspend", name]);
        assert_eq!(nodes(&docker, name), "/dev/nvidia3");
        kept.done(&["resume", name]);
        kept.is_on(2);
        // It is placed anew.
        docker.done(&["restart", "-t", "0", name]);
        kept.is_on(0);
        docker.done(&["rm", "-f", name]);
        assert_no_lease(&docker);
    }
    docker.world.assert_empty();
}
