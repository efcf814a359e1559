//! The hook by itself, with Podman's input: what it makes of a spec. (Bad input: tests/security/stdin.rs.)

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;

use serde_json::{Value, json};
use sublet_e2e::hooked::{PODMANS_ID, fed, precreated, refusal};
use sublet_e2e::{Finished, World, programs, skip_unless_root};

/// Runs a stage with `input`; a hook has its own environment.
fn hook(world: &World, stage: &str, input: &[u8], uid: Option<u32>) -> Finished {
    let mut command = world.command("sublet-hook");
    if let Some(uid) = uid {
        // Another user may not reach the directory that this was built in.
        command = world.command(&reachable(world, "sublet-hook"));
        command.uid(uid);
    }
    fed(command, stage, input)
}

/// A copy of a sublet program that every user may run; its path is absolute, so [`World::command`] uses it as it is.
fn reachable(world: &World, program: &str) -> String {
    let copy = world.dir.path().join(program);
    programs::copy(&sublet_e2e::bin_dir().join(program), &copy);
    std::fs::set_permissions(world.dir.path(), Permissions::from_mode(0o755)).expect("chmod");
    copy.to_string_lossy().into_owned()
}

fn precreate(world: &World, spec: &Value) -> Value {
    precreated(world.command("sublet-hook"), spec)
}

#[test]
fn what_is_none_of_ours_or_done_already_comes_back_byte_for_byte() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let text = br#" {"annotations": {"org.example": "sublet.x"},  "x": 1.5, "a":[]} "#;
    let plain = hook(&world, "precreate", text, None);
    assert!(plain.ok, "{plain:?}");
    assert_eq!(plain.stdout.as_bytes(), text);
    let bundle = world.bundle("twice", &[("sublet.sm", "25")], &["/bin/true"]);
    let once = precreate(&world, &bundle.podmans());
    assert_eq!(precreate(&world, &once), once, "a second hook changes nothing");
    assert_eq!(world.leases().len(), 1);
    // The same lease in another container's spec is no lease of that one.
    let mut stolen = once.clone();
    stolen["linux"]["cgroupsPath"] = json!(format!("/libpod-{}", PODMANS_ID.replace('4', "5")));
    assert!(refusal(&precreate(&world, &stolen)).contains("this container has no live lease"));
    // A later start of the same container by the same engine gives the first up.
    let again = precreate(&world, &bundle.podmans());
    assert_ne!(again["annotations"]["sublet.lease"], once["annotations"]["sublet.lease"]);
    assert_eq!(world.leases().len(), 1);
}

/// As programs do that never wait for a child. The hook waits for its own, and for the one that starts the daemon.
#[test]
fn a_caller_that_ignores_sigchld_gets_a_share_all_the_same() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let hook = world.command("sublet-hook");
    let mut by = std::process::Command::new("env");
    by.arg("--ignore-signal=CHLD").arg(hook.get_program()).env("SUBLET_CONFIG", &world.config);
    let bundle = world.bundle("first", &[("sublet.sm", "25")], &["/bin/true"]);
    let spec = precreated(by, &bundle.podmans());
    assert!(spec["annotations"]["sublet.lease"].is_string(), "{}", refusal(&spec));
    assert_eq!(world.daemon_pids("").len(), 2, "the daemon and its server");
}

#[test]
fn rootless_precreate_without_the_service_is_refused_with_what_to_do() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("rootless", &[("sublet.sm", "25")], &["/bin/true"]);
    let text = serde_json::to_vec(&bundle.podmans()).expect("JSON");
    let done = hook(&world, "precreate", &text, Some(1000));
    let spec: Value = serde_json::from_str(&done.stdout).expect("a spec");
    let what_to_do = "systemctl enable --now sublet.socket";
    assert!(refusal(&spec).contains("sublet serve is not running"), "{done:?}");
    assert!(refusal(&spec).contains(what_to_do), "{done:?}");
    assert_eq!(spec["annotations"], bundle.spec["annotations"]);
    // Its other containers start as before.
    let plain = hook(&world, "precreate", b"{\"annotations\":{}}", Some(1000));
    assert_eq!((plain.ok, plain.stdout.as_str()), (true, "{\"annotations\":{}}"));
}
