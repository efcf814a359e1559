//! `make demo` where Docker runs: its lines are copied into `make demo-shell`, and do there what they did in the demo.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::json;
use sublet_e2e::docker::{Docker, skip_unless_engines};
use sublet_e2e::{World, bin_dir};

/// What `tests/demo/run` prints when it is to do `what`, and `typed` is typed.
fn demo(docker: &Docker, what: &str, typed: &str) -> String {
    let mut demo = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/run"));
    demo.args([what, "simulated"]).env("SUBLET_BIN_DIR", bin_dir()).env("LC_ALL", "C.UTF-8");
    demo.env("DOCKER_HOST", format!("unix://{}", docker.socket().display()));
    let mut demo =
        demo.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
    let mut stdin = demo.stdin.take().expect("piped");
    // The demo itself reads nothing.
    let _ = stdin.write_all(typed.as_bytes());
    drop(stdin);
    let output = demo.wait_with_output().expect("it ends");
    let [shown, told] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{shown}{told}");
    shown + &told
}

#[test]
fn the_lines_of_the_demo_are_copied_into_its_shell() {
    if skip_unless_engines() {
        return;
    }
    let docker = Docker::up(World::simulated("h200", ""), &json!({}));
    let shown = demo(&docker, "show", "");
    let (_, lines) =
        shown.split_once("\nThe same with Docker, to be copied into make demo-shell\n").expect("lines");
    let (lines, _) = lines.split_once("\nNext\n").expect("an end");
    assert!(lines.lines().all(|line| line.chars().count() <= 80), "{lines}");
    let done = demo(&docker, "shell", lines);
    assert!(done.lines().any(|line| line == "32 of 132 SMs, 8,046 MiB, through MPS"), "{done}");
    assert!(done.contains("no room for mps, 50 % SM, 8 GiB: GPU 0"), "{done}");
    assert!(done.contains("process cuda-probe (pid "), "{done}");
    assert!(done.contains("of 4096 MiB): it was ended"), "{done}");
    // Of the shell's containers, and of no other.
    assert_eq!(docker.ask(&["ps", "--all", "--quiet"]), "");
}
