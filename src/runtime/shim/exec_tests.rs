//! Tests of the share of a process that joins a container, and of its grant.

use std::os::fd::AsRawFd as _;

use serde_json::json;
use sublet_core::ledger::fixture::lease;
use sublet_core::share::Suspend;

use super::*;

fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn share() -> Environment {
    Environment {
        set: pairs(&[("CUDA_VISIBLE_DEVICES", "0")]),
        default: pairs(&[("XLA", "0.1"), ("XLB", "0.2")]),
        remove_prefixes: Vec::new(),
    }
}

#[test]
fn options_for_the_command_line() {
    let (share, given) = (share(), ["XLA=0.9".into(), "CUDA_VISIBLE_DEVICES=3".into()]);
    let with = |dialect| options(&share, &share, &given, dialect, "--env");
    assert_eq!(with(Dialect::Runc), ["--env", "CUDA_VISIBLE_DEVICES=0"]);
    assert_eq!(with(Dialect::Crun), ["--env", "CUDA_VISIBLE_DEVICES=0", "--env", "XLB=0.2"]);
    for dialect in [Dialect::Runc, Dialect::Crun] {
        assert!(options(&share, &share, &[], dialect, "--env").is_empty(), "config.json has it");
    }
}

#[test]
fn a_process_in_a_container_that_was_moved_gets_its_gpu_of_now() {
    let old = Lease { suspend: Suspend::Allow, ..lease(1, "GPU-a") };
    let moved = Lease { devices: vec!["GPU-b".into()], known: vec!["GPU-a".into()], ..old.clone() };
    let spec =
        |of: &Lease| json!({"annotations": {LEASE_RECORD_ANNOTATION: of.to_annotation(Path::new("/s"))}});
    let set = pairs(&[("CUDA_VISIBLE_DEVICES", "0"), ("SUBLET_DEVICES", "GPU-a")]);
    let environment = Environment { set, ..share() };
    let now = since_move(&environment, &spec(&old), &moved).unwrap();
    assert_eq!(now.set[1], ("SUBLET_DEVICES".to_owned(), "GPU-b".to_owned()));
    assert_eq!((&now.set[0], &now.default), (&environment.set[0], &environment.default));
    let given = options(&now, &environment, &[], Dialect::Runc, "--env");
    assert_eq!(given[..4], ["--env", "CUDA_VISIBLE_DEVICES=0", "--env", "SUBLET_DEVICES=GPU-b"]);
    assert_eq!(since_move(&environment, &spec(&old), &old), None);
    // The ledger is not looked into for others.
    let never = Lease { suspend: Suspend::Never, ..old.clone() };
    assert_eq!([&old, &never].map(|of| may_have_moved(&spec(of))), [true, false]);
}

#[test]
fn without_a_gpu_no_device_is_seen_and_all_else_is_as_before() {
    let share = share();
    let without = options(&without_gpu(&share), &share, &[], Dialect::Runc, "--env");
    assert_eq!(without, ["--env", "CUDA_VISIBLE_DEVICES="]);
}

#[test]
fn a_process_file_is_read_and_never_written() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("process.json");
    let text = r#"{"env":["A=1"],"args":["x"]}"#;
    std::fs::write(&file, text).unwrap();
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let copy = write_edited_copy(&link, &share()).unwrap();
    let expected = r#"{"env":["A=1","CUDA_VISIBLE_DEVICES=0","XLA=0.1","XLB=0.2"],"args":["x"]}"#;
    assert_eq!(std::fs::read_to_string(&copy).unwrap(), expected);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
    let number: i32 = Path::new(&copy).file_name().unwrap().to_str().unwrap().parse().unwrap();
    assert!(number >= HIGH);
    nix::unistd::close(number).unwrap();
    let error = write_edited_copy(dir.path(), &share()).unwrap_err().to_string();
    assert!(error.starts_with("the process file ") && error.contains(" cannot be used: "), "{error}");
}

#[test]
fn a_pipe_is_a_process_file_too() {
    let (from, to) = nix::unistd::pipe().unwrap();
    std::fs::File::from(to).write_all(br#"{"env":[]}"#).unwrap();
    let path = format!("/proc/self/fd/{}", from.as_raw_fd());
    assert_eq!(read_process_file(Path::new(&path)).unwrap().text, br#"{"env":[]}"#);
}

#[test]
fn a_default_that_is_refused_beside_the_users_own_gives_way() {
    let default = pairs(&[("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.1")]);
    let share = Environment { default, ..Environment::default() };
    let given = ["XLA_CLIENT_MEM_FRACTION=0.5".into()];
    let runc = ["--env", "XLA_PYTHON_CLIENT_MEM_FRACTION="];
    let with = |dialect| options(&share, &share, &given, dialect, "--env");
    assert_eq!(with(Dialect::Runc), runc);
    assert!(with(Dialect::Crun).is_empty());
}

fn granted() -> Value {
    json!({
        "process": {"env": ["PATH=/bin", "CUDA_VISIBLE_DEVICES=0", "CUDA_MPS_PIPE_DIRECTORY=/run/sublet/mps",
            "SUBLET_DEVICES=GPU-1", "SUBLET_MEMORY_BYTES=9", "XLA_PYTHON_CLIENT_MEM_FRACTION=0.1", "MINE=1"]},
        "mounts": [{"destination": "/run/sublet/mps", "source": "/elsewhere"},
            {"destination": "/run/sublet/mps", "source": "/run/sublet/mps/GPU-1/public"}],
        "annotations": {"sublet.sm": "25", "sublet.lease": "0123456789abcdef"},
    })
}

#[test]
fn a_containers_own_config_json_tells_its_share() {
    let share = share_of_spec(&granted(), &default_names(Some(&Config::default())));
    let names = |pairs: &[(String, String)]| pairs.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(
        names(&share.environment.set),
        ["CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "SUBLET_DEVICES", "SUBLET_MEMORY_BYTES"]
    );
    assert_eq!(names(&share.environment.default), ["XLA_PYTHON_CLIENT_MEM_FRACTION"]);
    assert_eq!(share.daemon.as_deref(), Some(Path::new("/run/sublet/mps/GPU-1/public")));
}

fn record(lease: &str, bundle: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let labels = [format!("sublet.lease={lease}"), format!("bundle={}", bundle.display())];
    let state = json!({"init_process_pid": 1, "init_process_start": 1, "config": {"labels": labels}});
    std::fs::write(dir.path().join("state.json"), state.to_string()).unwrap();
    dir
}

#[test]
fn the_record_and_spec_of_a_container_have_to_be_its_own() {
    let (bundle, config) = (tempfile::tempdir().unwrap(), Ok(Config::default()));
    let of = |dir: &tempfile::TempDir| find_share(0, "c", dir.path(), &config);
    let speaks = |dir: &tempfile::TempDir| may_have_share(dir.path()).unwrap();
    let own = record("0123456789abcdef", bundle.path());
    assert!(matches!(of(&own), Err(EnterError::Spec(_))), "there is none");
    std::fs::write(bundle.path().join("config.json"), granted().to_string()).unwrap();
    assert!(speaks(&own) && of(&own).unwrap().unwrap().daemon.is_some());
    let other = record("00000000000000aa", bundle.path());
    assert!(matches!(of(&other), Err(EnterError::Changed { .. })));
    std::fs::write(own.path().join("state.json"), "{\"sublet.lease\":").unwrap();
    assert!(matches!(of(&own), Err(EnterError::Record { .. })));
    std::fs::write(own.path().join("state.json"), "{\"init_process_pid\":1}").unwrap();
    assert!(!speaks(&own));
    // A socket cannot be opened, as a record cannot for want of a descriptor.
    let unread = tempfile::tempdir().unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(unread.path().join("state.json")).unwrap();
    assert!(speaks(&unread), "it may have a share");
}
