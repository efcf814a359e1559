//! `make demo`: what a newcomer sees, that the README shows the same, and that nothing is left, whenever it is stopped.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use sublet_e2e::{bin_dir, eventually, skip_unless_root};

use crate::screens::normal;

fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Ctrl-C reaches it, as on a terminal: what a script starts in its background, as these tests, ignores SIGINT.
fn demo() -> Command {
    let mut demo = Command::new("env");
    demo.arg("--default-signal=INT").arg(checkout().join("tests/demo/run")).args(["show", "simulated"]);
    demo.stdin(Stdio::null());
    demo.env("SUBLET_BIN_DIR", bin_dir()).env("LC_ALL", "C.UTF-8");
    demo
}

/// Mounts, directories and cgroups on this machine. A cgroup is there as long as a process is in it.
fn left() -> BTreeSet<String> {
    let names = |at: &str| {
        let entries = fs::read_dir(at).into_iter().flatten().flatten();
        entries.map(|entry| entry.path().display().to_string()).collect::<Vec<_>>()
    };
    let hierarchies = names("/sys/fs/cgroup");
    let cgroups = hierarchies.iter().flat_map(|hierarchy| names(hierarchy)).chain(hierarchies.clone());
    let ours = cgroups.chain(names("/var/tmp")).filter(|path| path.contains("/sublet-"));
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("/proc");
    ours.chain(mounts.lines().map(str::to_owned)).collect()
}

/// The lines that the README shows of it: the indented block that has the guard in it.
fn readme() -> String {
    let text = fs::read_to_string(checkout().join("README.md")).expect("the README");
    let parts: Vec<&str> = text.split("\n\n").collect();
    let mut blocks = parts.split(|part| !part.starts_with("    ")).map(|parts| parts.join("\n"));
    blocks.find(|block| block.contains("    guard: ")).expect("a block with the guard")
}

fn is_target(makefile: &str, name: &str) -> bool {
    let targets = makefile.lines().filter_map(|line| line.split_once(':').map(|(targets, _)| targets));
    targets.flat_map(str::split_whitespace).any(|target| target == name)
}

fn check_what_is_shown(shown: &str) {
    for line in shown.lines() {
        assert!(line.chars().count() <= 80, "{line}");
        assert!(!line.contains(['{', '"']), "JSON: {line}");
    }
    for line in ["  small: 32 of 132 SMs, 8,046 MiB, through MPS", "  asked: sublet.sm=25 sublet.memory=8GiB"]
    {
        assert!(shown.lines().any(|shown| shown == line), "{line}: {shown}");
    }
    let words = normal(shown);
    assert!(words.contains("third: sublet"), "{shown}");
    assert!(words.contains("no room for mps, 50 % SM, 8 GiB: GPU 0"), "{shown}");
    let ended = "guard: … guard cheat on GPU 0 process cuda-probe (pid … of container cheat on GPU-";
    assert!(words.contains(ended) && words.contains("(52072 of 4096 MiB): it was ended"), "{shown}");
    assert!(words.contains("after: … seconds; small and large go on"), "{shown}");
    assert!(words.contains("left: No leases."), "{shown}");
    assert!(words.contains(&normal(&readme())), "the README shows something else than:\n{shown}");
}

fn check_next(shown: &str) {
    let makefile = fs::read_to_string(checkout().join("Makefile")).expect("the Makefile");
    let (_, next) = shown.split_once("\nNext\n").expect("what is next");
    assert_eq!(next.lines().count(), 3, "{next}");
    for line in next.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        assert!(words[0] == "make" && is_target(&makefile, words[1]), "{line}");
    }
}

/// One after the other: what is left would not be told apart.
#[test]
fn it_is_read_by_a_stranger_and_leaves_nothing_whenever_it_is_stopped() {
    if skip_unless_root() {
        return;
    }
    let before = left();
    let output = demo().output().expect("it runs");
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && told.is_empty(), "{shown}{told}");
    check_what_is_shown(&shown);
    check_next(&shown);
    assert_eq!(left(), before);
    for moment in [None, Some("The machine"), Some("Two at the same time"), Some("One that cheats")] {
        stop_at(moment, &before);
        assert_eq!(left(), before, "stopped at {moment:?}");
    }
}

/// Ctrl-C, when the line that begins with `moment` is shown, or as soon as there is more than `before`.
fn stop_at(moment: Option<&str>, before: &BTreeSet<String>) {
    let mut demo = demo();
    let mut demo =
        demo.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
    let mut lines = BufReader::new(demo.stdout.take().expect("piped")).lines();
    let is_there = match moment {
        Some(moment) => lines.any(|line| line.expect("text").starts_with(moment)),
        None => eventually(|| left() != *before),
    };
    assert!(is_there, "{moment:?} never is");
    let group = Pid::from_raw(i32::try_from(demo.id()).expect("a pid"));
    killpg(group, Signal::SIGINT).expect("it runs");
    let mut told = String::new();
    demo.stderr.take().expect("piped").read_to_string(&mut told).expect("text");
    let status = demo.wait().expect("it ends");
    let line = "demo: stopped: everything that it had started has ended, and nothing is left";
    assert_eq!((status.code(), told.trim()), (Some(130), line), "at {moment:?}");
}
