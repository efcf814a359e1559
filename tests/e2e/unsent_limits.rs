//! A daemon that does not take its new limits, because it ends or drops the command, while a container that needs them
//! starts: the container has its share all the same.

use serde_json::{Value, json};
use sublet_e2e::{World, skip_unless_root};

/// A control program that does `@instead` in place of a command to change limits, while the file `@once` exists.
const PROGRAM: &str = "\
    PATH=$PATH:/usr/bin:/bin\n\
    case $1 in -*) exec @aside \"$@\" ;; esac\n\
    told=$(cat)\n\
    case $told in *set_default*) if test -e @once; then @instead; fi ;; esac\n\
    echo \"$told\" | @aside\n";

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];

/// Starts one container, and beside it another whose limits are higher; `instead` is what the control program then does.
/// Returns the daemon's pid before and after.
fn raised_while(instead: &str) -> (Value, Value) {
    let world = World::simulated("h200", "");
    let usr = world.driver_root.as_ref().expect("simulated").join("usr");
    let (program, once) = (usr.join("bin/nvidia-cuda-mps-control"), world.dir.path().join("once"));
    let aside = usr.join("aside/nvidia-cuda-mps-control");
    std::fs::create_dir(usr.join("aside")).expect("a directory");
    std::fs::rename(&program, &aside).expect("it was there");
    let script = PROGRAM
        .replace("@instead", instead)
        .replace("@aside", &aside.to_string_lossy())
        .replace("@once", &once.to_string_lossy());
    sublet_e2e::programs::script(&program, &script);
    let daemon = || world.status()["mps"][0]["pid"].clone();
    let first = world.bundle("first", &[("sublet.sm", "10")], HOLD);
    first.up();
    let before = daemon();
    std::fs::write(&once, "").expect("written");
    let second = world.bundle("second", &[("sublet.sm", "50")], HOLD);
    second.up();
    assert!(!once.exists(), "the program did it");
    let info = second.event("info");
    let logs = world.sublet(&["mps", "logs", "0"]).stdout;
    let seen = (&info["error"], &info["mps"], &info["sm"]);
    assert_eq!(seen, (&Value::Null, &json!(true), &json!(66)), "{info}\n{}", String::from_utf8_lossy(&logs));
    let after = daemon();
    second.down();
    first.down();
    world.assert_empty();
    (before, after)
}

/// What the real program said (docs/evidence/2026-11-25-mps-control.md).
const CANNOT_SEND: &str = "echo Cannot send command to MPS control daemon process; exit 1";
const PID: &str = "pid=$(cat $CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid)";

#[test]
fn a_daemon_that_ends_is_started_anew() {
    if !skip_unless_root() {
        let (before, after) =
            raised_while(&format!("rm @once; {PID}; kill -9 $pid; sleep 0.3; {CANNOT_SEND}"));
        assert_ne!(before, after);
    }
}

#[test]
fn a_daemon_that_takes_a_while_to_end_is_started_anew() {
    if !skip_unless_root() {
        let kill = format!("touch @once-more; {PID}; (sleep 0.2; kill -9 $pid; rm @once) >/dev/null 2>&1 &");
        let (before, after) =
            raised_while(&format!("if ! test -e @once-more; then {kill}\nfi; {CANNOT_SEND}"));
        assert_ne!(before, after);
    }
}

#[test]
fn a_daemon_that_did_not_take_the_command_is_told_again() {
    if !skip_unless_root() {
        let (before, after) = raised_while(&format!("rm @once; {CANNOT_SEND}"));
        assert_eq!(before, after);
    }
}

/// So said the real program of a daemon that ended (docs/evidence/2026-11-24-h100-cycles.md).
#[test]
fn a_daemon_that_says_nothing_is_told_again() {
    if !skip_unless_root() {
        let (before, after) = raised_while("rm @once; exit 0");
        assert_eq!(before, after);
    }
}
