//! The low-level runtime is killed with SIGKILL before and after each of sublet's hooks in a plain bundle, whose
//! config.json is not edited. The next sublet command alone restores everything.

use std::fs::File;
use std::process::Stdio;

use serde_json::{Value, json};
use sublet_e2e::killing::{assert_no_daemons, contained, end, end_all, engine, mount_points};
use sublet_e2e::{Bundle, Stopping, World, eventually, skip_unless_root};

const SHARE: &[(&str, &str)] = &[("sublet.sm", "25"), ("sublet.memory", "1GiB")];

/// A hook that stops at `stage` until it is released. It reads its input as every hook must: crun 1.8 writes the state
/// to it and dies of SIGPIPE if the hook does not read.
fn stop_here(world: &World, stage: &str) -> Value {
    let dir = world.dir.path().display();
    let script = format!(
        "cat >/dev/null\n[ \"$(cat {dir}/stop-at 2>/dev/null)\" = {stage} ] || exit 0\n\
         : >{dir}/stopped\nwhile [ -e {dir}/stop-at ]; do sleep 0.05; done"
    );
    json!({"path": "/bin/sh", "args": ["sh", "-c", script], "env": ["PATH=/usr/bin:/bin"]})
}

/// A bundle with sublet's hooks at `stage` and poststop, and with a hook that stops before and after each.
fn bundle<'a>(world: &'a World, stage: &str) -> Bundle<'a> {
    let mut bundle = world.bundle("victim", SHARE, &["/bin/sleep", "600"]);
    bundle.hook(&[stage, "poststop"]);
    for (hook, name) in [(stage, "mounts"), ("poststop", "poststop")] {
        let hooks = bundle.spec["hooks"][hook].as_array_mut().expect("our hook");
        hooks.insert(0, stop_here(world, &format!("before-{name}")));
        hooks.push(stop_here(world, &format!("after-{name}")));
    }
    bundle
}

/// `daemon`: the lease is written down, nothing is mounted yet.
fn killed(bundle: &Bundle<'_>, stopping: &Stopping, stage: &str, victim: Option<&str>) {
    let world = bundle.world();
    let at = format!("{stage}, {} killed", victim.unwrap_or("all"));
    let mut command = bundle.runtime();
    if stage.ends_with("poststop") {
        bundle.up();
        command.args(["delete", "--force", "victim"]);
    } else {
        bundle.write();
        command.arg("create").arg("--bundle").arg(&bundle.dir).arg("victim");
    }
    stopping.at(stage);
    let output = || File::create(bundle.dir.join("err")).expect("a file");
    command.stdin(Stdio::null()).stdout(output()).stderr(output());
    let mut runtime = command.spawn().expect("the runtime runs");
    assert!(eventually(|| stopping.has_stopped()), "{at}: it was not reached");
    end(&engine(world, victim));
    stopping.go_on();
    let _ = runtime.wait();
    // Without its runtime none starts; one whose delete was killed has ended.
    assert!(eventually(|| contained(world).is_empty() || world.leases().len() == 1), "{at}: unaccounted");
    end_all(world);
    // What was killed is in its cgroup for a moment after it has let go of everything else.
    let freed = || {
        let gc = world.sublet(&["gc"]);
        assert!(gc.status.success(), "{at}: {gc:?}");
        world.booked().is_empty()
    };
    assert!(eventually(freed), "{at}: {:?}", world.booked());
    assert_no_daemons(world, &at);
    world.assert_empty();
    assert_eq!(mount_points(&bundle.dir), "", "{at}: mount points are left in the root filesystem");
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("/proc");
    let dir = world.driver_root.as_ref().expect("simulated").display().to_string();
    assert!(!mounts.lines().any(|line| line.contains(&dir)), "{at}: mounts are left: {mounts}");
    // The runtime's own record of it.
    let deleted = bundle.runtime().args(["delete", "--force", "victim"]).output().expect("the runtime runs");
    assert!(deleted.status.success(), "{at}: {deleted:?}");
}

fn killed_everywhere(stage: &str) {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let stopping = Stopping::install(&world);
    let bundle = bundle(&world, stage);
    for point in ["before-mounts", "daemon", "after-mounts", "before-poststop", "after-poststop"] {
        for victim in [Some(world.engine.program()), None] {
            eprintln!("{point} {victim:?}");
            killed(&bundle, &stopping, point, victim);
        }
    }
    bundle.up();
    assert_eq!(world.leases().len(), 1);
    bundle.down();
    world.assert_empty();
}

#[test]
fn around_prestart() {
    killed_everywhere("prestart");
}

#[test]
fn around_create_runtime() {
    killed_everywhere("createRuntime");
}

/// On one GPU eight servers of their own take turns (`time_slice_max`).
#[test]
fn of_twenty_at_once_those_start_that_fit() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundles: Vec<_> = (0..20)
        .map(|number| {
            let mut bundle = world.bundle(&format!("c{number}"), SHARE, &["/bin/sleep", "600"]);
            bundle.hook(&["createRuntime", "poststop"]);
            bundle
        })
        .collect();
    let created: Vec<bool> = std::thread::scope(|scope| {
        let threads: Vec<_> = bundles.iter().map(|bundle| scope.spawn(|| bundle.create().ok)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    assert_eq!(created.iter().filter(|created| **created).count(), 8);
    let leases = world.leases();
    assert_eq!(leases.len(), 8);
    assert!(leases.iter().all(|lease| lease["state"] == "active"), "{leases:?}");
    for (bundle, created) in bundles.iter().zip(created) {
        if created {
            bundle.down();
        }
    }
    world.assert_empty();
    assert_eq!(mount_points(&world.dir.path().join("bundles")), "");
}
