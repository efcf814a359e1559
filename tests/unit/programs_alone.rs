//! `sublet` where no GPU and no root is needed: closed pipes, what the other programs say of themselves.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output, Stdio};

/// A sublet command with a configuration and nothing else.
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
fn help_is_a_command_too() {
    let dir = tempfile::tempdir().unwrap();
    let said = |arguments: &[&str]| text(&sublet(&dir, arguments).output().unwrap().stdout);
    assert_eq!(said(&["help"]), said(&["--help"]));
    assert_eq!(said(&["help", "drain"]), said(&["drain", "--help"]));
    assert_eq!(said(&["help", "mig", "plan"]), said(&["mig", "plan", "--help"]));
}

#[test]
fn only_the_configured_directory_of_cdi_is_created() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("cid");
    let file = missing.join("s.json").display().to_string();
    let refused = sublet(&dir, &["cdi", "generate", "--output", &file]).output().unwrap();
    let line =
        format!("sublet: there is no directory {}: create it, or name another file\n", missing.display());
    assert_eq!(ended(&refused), (Some(1), line));
    assert!(!missing.exists());
}

#[test]
fn setup_checks_whether_it_is_as_asked() {
    let dir = tempfile::tempdir().unwrap();
    runtime();
    let found = "{ \"default-runtime\": \"nvidia\", \"runtimes\": { \"nvidia\": {} } }";
    fs::write(dir.path().join("daemon.json"), found).unwrap();
    let checked = |options: &[&str]| {
        let output = setup(&dir, "docker", "daemon.json", &[&["--check"], options].concat());
        (output.status.code(), text(&output.stdout))
    };
    let file = fs::canonicalize(dir.path()).unwrap().join("daemon.json").display().to_string();
    let not = format!("{file}: not as asked; the same command with --dry-run shows the difference.\n");
    assert_eq!(checked(&[]), (Some(1), not.clone()));
    assert_eq!(checked(&["--undo"]), (Some(0), format!("{file}: as asked.\n")));
    assert_eq!(fs::read_to_string(dir.path().join("daemon.json")).unwrap(), found, "nothing was changed");
    let dry = ended(&setup(&dir, "docker", "daemon.json", &["--default", "--dry-run"])).1;
    assert!(dry.contains("no longer nvidia") && dry.contains("NVIDIA_VISIBLE_DEVICES"), "{dry}");
    setup(&dir, "docker", "daemon.json", &[]);
    assert_eq!(checked(&[]), (Some(0), format!("{file}: as asked.\n")));
    assert_eq!(checked(&["--default"]), (Some(1), not));
    let done = text(&setup(&dir, "docker", "daemon.json", &["--default"]).stdout);
    assert!(done.contains("--undo` restores it") && done.contains("`--runtime nvidia`"), "{done}");
    let (code, json) = checked(&["--default", "--format", "json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let expected = serde_json::json!(
        {"schema": "sublet.setup/1", "engine": "docker", "file": file, "as_asked": true}
    );
    assert_eq!((code, json), (Some(0), expected));
}

/// `sublet setup ENGINE --config FILE` with these options.
fn setup(dir: &tempfile::TempDir, engine: &str, file: &str, options: &[&str]) -> Output {
    let file = dir.path().join(file).display().to_string();
    let arguments = [&["setup", engine, "--config", &file], options].concat();
    sublet(dir, &arguments).output().unwrap()
}

/// What is to be done is said in words that this host knows.
fn has_systemd() -> bool {
    std::path::Path::new("/run/systemd/system").is_dir()
}

/// `sublet-runtime` as setup finds it: beside `sublet`. `make unit` builds it; `cargo test -p sublet` alone does not.
fn runtime() -> String {
    let beside = std::path::Path::new(env!("CARGO_BIN_EXE_sublet")).with_file_name("sublet-runtime");
    assert!(beside.is_file(), "cargo build -p sublet-runtime comes first");
    beside.display().to_string()
}

#[test]
fn setup_edits_daemon_json_and_undo_gives_back_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let (file, before) = (dir.path().join("daemon.json"), dir.path().join("daemon.json.before-sublet"));
    let found = "{\n\t\"debug\":true\n}";
    fs::write(&file, found).unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    let shown = setup(&dir, "docker", "daemon.json", &["--dry-run"]);
    let path = file.display();
    let expected = format!(
        "--- {path}\n+++ {path}\n@@ -1,3 +1,8 @@\n {{\n+\t\"runtimes\": {{\n+\t\t\"sublet\": {{\n+\t\t\t\"path\": \"{}\"\n+\t\t}}\n+\t}},\n \
         \t\"debug\":true\n }}\n\\ No newline at end of file\n",
        runtime()
    );
    assert_eq!((text(&shown.stdout), ended(&shown)), (expected, (Some(0), String::new())));
    assert_eq!(fs::read_to_string(&file).unwrap(), found);
    let done = setup(&dir, "docker", "daemon.json", &["--default"]);
    let force = if has_systemd() {
        "run `systemctl reload docker` to put it into effect"
    } else {
        "send dockerd SIGHUP to put it into effect (`kill -HUP $(cat /var/run/docker.pid)`)"
    };
    let line = format!("{path}: sublet is in; {force}.\n");
    assert_eq!((text(&done.stdout), ended(&done)), (line, (Some(0), String::new())));
    let record = serde_json::json!({"before": found, "after": fs::read_to_string(&file).unwrap()});
    assert_eq!(fs::read_to_string(&before).unwrap(), format!("{record}\n"));
    for file in [&file, &before] {
        assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o7777, 0o600);
    }
    let again = setup(&dir, "docker", "daemon.json", &["--default"]);
    assert_eq!(text(&again.stdout), format!("{path}: nothing to do.\n"));
    let undone = setup(&dir, "docker", "daemon.json", &["--undo"]);
    assert_eq!(ended(&undone), (Some(0), String::new()));
    assert_eq!(fs::read_to_string(&file).unwrap(), found);
    assert!(!before.exists());
    let undone = setup(&dir, "docker", "daemon.json", &["--undo"]);
    assert_eq!(text(&undone.stdout), format!("{path}: nothing to do.\n"));
}

#[test]
fn setup_refuses_what_it_cannot_parse_and_touches_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("daemon.json");
    let path = file.display();
    for (found, why) in [
        ("{\n  \"debug\": tr", "it is not valid JSON (EOF while parsing a value at line 2 column 13)"),
        (
            "{\n  // by hand\n}",
            "it is not valid JSON (key must be a string at line 2 column 3; JSON has no comments)",
        ),
        ("[]", "the file is no object, not { … }"),
    ] {
        fs::write(&file, found).unwrap();
        for option in ["--default", "--undo"] {
            let refused = setup(&dir, "docker", "daemon.json", &[option]);
            let line = format!("sublet: {path}: {why}: correct it, then try again; nothing was changed\n");
            assert_eq!(ended(&refused), (Some(1), line));
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), found);
        assert!(!dir.path().join("daemon.json.before-sublet").exists());
    }
}

#[test]
fn an_empty_daemon_json_is_one_without_settings() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("daemon.json");
    for found in ["", " \n"] {
        fs::write(&file, found).unwrap();
        assert_eq!(ended(&setup(&dir, "docker", "daemon.json", &[])), (Some(0), String::new()));
        let expected = format!(
            "{{\n  \"runtimes\": {{\n    \"sublet\": {{\n      \"path\": \"{}\"\n    }}\n  }}\n}}\n",
            runtime()
        );
        assert_eq!(fs::read_to_string(&file).unwrap(), expected);
        assert_eq!(ended(&setup(&dir, "docker", "daemon.json", &["--undo"])), (Some(0), String::new()));
        assert_eq!(fs::read_to_string(&file).unwrap(), found);
        let again = setup(&dir, "docker", "daemon.json", &["--undo"]);
        assert!(text(&again.stdout).ends_with("nothing to do.\n"), "{again:?}");
    }
}

#[test]
fn setup_follows_a_link_and_takes_cdi_from_the_shares() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("real")).unwrap();
    std::os::unix::fs::symlink("real/daemon.json", dir.path().join("daemon.json")).unwrap();
    let lost = ended(&setup(&dir, "docker", "daemon.json", &[])).1;
    assert!(lost.contains("cannot read") && lost.contains("No such file"), "a link to nowhere: {lost}");
    fs::write(dir.path().join("real/daemon.json"), "{}").unwrap();
    let with_cdi = setup(&dir, "docker", "daemon.json", &["--cdi"]);
    let restart = if has_systemd() {
        "run `systemctl restart docker` to put it into effect"
    } else {
        "restart dockerd to put it into effect"
    };
    assert!(text(&with_cdi.stdout).contains(restart), "{with_cdi:?}");
    assert!(fs::symlink_metadata(dir.path().join("daemon.json")).unwrap().is_symlink());
    let is = fs::read_to_string(dir.path().join("real/daemon.json")).unwrap();
    let expected =
        serde_json::json!({"features": {"cdi": true}, "runtimes": {"sublet": {"path": runtime()}}});
    assert_eq!(serde_json::from_str::<serde_json::Value>(&is).unwrap(), expected);
    assert_eq!(ended(&setup(&dir, "docker", "daemon.json", &["--undo"])), (Some(0), String::new()));
    assert_eq!(fs::read_to_string(dir.path().join("real/daemon.json")).unwrap(), "{}");
}

#[test]
fn new_files_come_and_go() {
    let dir = tempfile::tempdir().unwrap();
    for (engine, file) in [
        ("docker", "docker/daemon.json"),
        ("containerd", "containerd/config.toml"),
        ("crio", "crio/crio.conf.d/sublet.conf"),
    ] {
        let made = setup(&dir, engine, file, &["--default"]);
        assert_eq!(ended(&made), (Some(0), String::new()), "{engine}");
        assert!(fs::read_to_string(dir.path().join(file)).unwrap().contains(&runtime()), "{engine}");
        assert_eq!(ended(&setup(&dir, engine, file, &["--undo"])), (Some(0), String::new()), "{engine}");
        assert!(!dir.path().join(file).exists(), "{engine}");
    }
    for file in ["docker/daemon.json", "containerd/config.toml"] {
        assert!(!dir.path().join(format!("{file}.before-sublet")).exists());
    }
    assert!(dir.path().join("containerd").exists() && !dir.path().join("crio/crio.conf.d").exists());
}

#[test]
fn a_directory_that_was_there_stays() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("crio.conf.d")).unwrap();
    for options in [&[][..], &["--default"], &["--undo"]] {
        assert_eq!(ended(&setup(&dir, "crio", "crio.conf.d/sublet.conf", options)), (Some(0), String::new()));
    }
    assert!(dir.path().join("crio.conf.d").exists() && !dir.path().join("crio.conf.d/sublet.conf").exists());
}

#[test]
fn a_directory_that_cannot_be_written_is_named() {
    let dir = tempfile::tempdir().unwrap();
    // No process can create a file in /proc, as in a read-only /etc.
    let made = sublet(&dir, &["setup", "docker", "--config", "/proc/self/daemon.json"]).output().unwrap();
    let (code, line) = ended(&made);
    assert_eq!(code, Some(1));
    assert!(line.starts_with("sublet: cannot write /proc/self/daemon.json.before-sublet: "), "{line}");
    assert!(line.ends_with("nothing was changed\n") && line.lines().count() == 1, "{line}");
}
