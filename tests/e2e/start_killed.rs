//! The shim killed with SIGKILL while its MPS daemon comes up, and the next command over before it has: that
//! command alone puts everything right, for the start itself sees that nobody wants its daemon any more. And a daemon
//! that ends while a start asks it.

use std::process::Stdio;

use serde_json::{Value, json};
use sublet_e2e::{Stopping, World, eventually, skip_unless_root};

/// The ledger as it stands, without any command that would put it right first.
fn ledger(world: &World) -> Value {
    let text = std::fs::read(world.state_dir().join("ledger.json")).expect("a ledger");
    serde_json::from_slice(&text).expect("JSON")
}

const ONE: &[(&str, &str)] = &[("sublet.sm", "25")];
const TWO: &[(&str, &str)] = &[("sublet.gpu", "any:2"), ("sublet.sm", "25"), ("sublet.memory", "8GiB")];

/// `comes_up`: once the next command is over; else the start gives up in its own time.
fn killed(share: &[(&str, &str)], comes_up: bool) {
    let world = World::simulated("h200x8", "");
    let stopping = Stopping::install(&world);
    let bundle = world.bundle("victim", share, &["/bin/sleep", "600"]);
    bundle.write();
    stopping.at("daemon");
    let mut command = bundle.runtime();
    command.arg("create").arg("--bundle").arg(&bundle.dir).arg("victim");
    let mut shim = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().expect("the shim runs");
    assert!(eventually(|| stopping.has_stopped()), "no daemon is started");
    shim.kill().expect("SIGKILL");
    shim.wait().expect("it is ours");
    let gc = world.sublet(&["gc"]);
    assert!(gc.status.success(), "{gc:?}");
    assert_eq!(ledger(&world)["leases"], json!([]));
    if comes_up {
        stopping.go_on();
    }
    // From here on no command: each would stop an idle daemon.
    let settled = || {
        let ledger = ledger(&world);
        [&ledger["servers"], &ledger["compute_modes"]].iter().all(|all| **all == json!([]))
    };
    assert!(
        eventually(|| settled() && world.daemons().is_empty()),
        "{:#} {:?}",
        ledger(&world),
        world.daemons()
    );
    world.assert_empty();
    if !comes_up {
        stopping.go_on();
    }
    bundle.up();
    bundle.down();
    world.assert_empty();
}

#[test]
fn a_daemon_that_comes_up_for_nobody_ends() {
    if !skip_unless_root() {
        killed(ONE, true);
        killed(TWO, true);
    }
}

#[test]
fn a_daemon_that_does_not_come_up_for_nobody_is_forgotten() {
    if !skip_unless_root() {
        killed(ONE, false);
        killed(TWO, false);
    }
}

/// A control program whose daemon ends when it is to be told the limits of its servers, and which then says what the
/// real one said (docs/evidence/2026-11-25-h100-real.md).
const ENDS_WHILE_TOLD: &str = "\
    PATH=$PATH:/usr/bin:/bin\n\
    case $1 in -*) exec @aside \"$@\" ;; esac\n\
    told=$(cat)\n\
    case $told in *set_default*) if rm @once 2>/dev/null; then\n\
    kill -9 $(cat $CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid); sleep 0.3\n\
    echo Cannot send command to MPS control daemon process; exit 1; fi ;; esac\n\
    echo \"$told\" | @aside\n";

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];

#[test]
fn a_daemon_that_ends_while_its_limits_are_raised_is_started_anew() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let usr = world.driver_root.as_ref().expect("simulated").join("usr");
    let (program, once) = (usr.join("bin/nvidia-cuda-mps-control"), world.dir.path().join("once"));
    let aside = usr.join("aside/nvidia-cuda-mps-control");
    std::fs::create_dir(usr.join("aside")).expect("a directory");
    std::fs::rename(&program, &aside).expect("it was there");
    let script =
        ENDS_WHILE_TOLD.replace("@aside", &aside.to_string_lossy()).replace("@once", &once.to_string_lossy());
    sublet_e2e::programs::script(&program, &script);
    let first = world.bundle("first", &[("sublet.sm", "10")], HOLD);
    first.up();
    let daemon = world.status()["mps"][0]["pid"].clone();
    std::fs::write(&once, "").expect("written");
    let second = world.bundle("second", &[("sublet.sm", "50")], HOLD);
    second.up();
    assert!(!once.exists(), "the daemon ended on the way");
    assert_eq!(second.event("info")["mps"], true);
    assert_ne!(world.status()["mps"][0]["pid"], daemon);
    second.down();
    first.down();
    world.assert_empty();
}
