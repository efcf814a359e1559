//! The shim killed with SIGKILL while its MPS daemon comes up, and the next command over before it has: that
//! command alone puts everything right, for the start itself sees that nobody wants its daemon any more.

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
        [&ledger["daemons"], &ledger["compute_modes"]].iter().all(|all| **all == json!([]))
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
