//! `sublet` where no GPU and no root is needed: closed pipes, what the other programs say of themselves.

use std::fs::{self, File};
use std::process::{Command, Output, Stdio};

/// A command of ours with a configuration and nothing else.
fn sublet(dir: &tempfile::TempDir, arguments: &[&str]) -> Command {
    let config = dir.path().join("config.toml");
    fs::write(&config, format!("state_dir = \"{}/run\"\n", dir.path().display())).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_sublet"));
    command.args(arguments).env("SUBLET_CONFIG", config).stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn ended(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), text(&output.stderr))
}

#[test]
fn a_reader_who_left_ends_a_listing_quietly() {
    let dir = tempfile::tempdir().unwrap();
    for arguments in [&["config", "show"][..], &["config", "check"], &["--help"]] {
        let (reader, writer) = nix::unistd::pipe().unwrap();
        drop(reader);
        let output = sublet(&dir, arguments).stdout(writer).output().unwrap();
        assert_eq!(ended(&output), (Some(0), String::new()), "{arguments:?}");
    }
}

#[test]
fn an_error_that_nobody_reads_is_no_panic() {
    let dir = tempfile::tempdir().unwrap();
    let (reader, writer) = nix::unistd::pipe().unwrap();
    drop(reader);
    let status = sublet(&dir, &["explain"]).stderr(writer).status().unwrap();
    assert_eq!(status.code(), Some(1));
}

#[test]
fn a_full_disk_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let output = sublet(&dir, &["config", "show"]).stdout(full).output().unwrap();
    let line = "sublet: cannot write to standard output: No space left on device (os error 28)\n";
    assert_eq!(ended(&output), (Some(1), line.to_owned()));
}

#[test]
fn the_programs_of_engines_say_what_they_are() {
    let hook = |argument| Command::new(env!("CARGO_BIN_EXE_sublet-hook")).arg(argument).output().unwrap();
    let help = hook("--help");
    assert_eq!(ended(&help), (Some(0), String::new()));
    let help = text(&help.stdout);
    assert!(help.starts_with("The OCI hook of sublet") && help.contains("sublet-hook STAGE"), "{help}");
    assert_eq!(text(&hook("--version").stdout), format!("sublet-hook {}\n", env!("CARGO_PKG_VERSION")));
    let runtime = Command::new(env!("CARGO_BIN_EXE_sublet-runtime")).arg("--help").output().unwrap();
    assert_eq!(ended(&runtime), (Some(0), String::new()));
    assert!(text(&runtime.stdout).starts_with("The OCI runtime shim of sublet"));
}
