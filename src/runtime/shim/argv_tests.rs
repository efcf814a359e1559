//! Command lines as engines and people write them, with the readings of runc 1.1.5 and crun 1.8.1.

use std::os::unix::ffi::OsStringExt as _;
use std::path::Path;

use proptest::prelude::*;

use super::*;
use Dialect::{Crun, Runc};

fn words(line: &str) -> Vec<OsString> {
    line.split_ascii_whitespace().map(OsString::from).collect()
}

fn command_of(line: &str, dialect: Dialect) -> (Option<OsString>, Command) {
    let line = parse(&words(line), dialect);
    (line.id, line.command)
}

const OTHER: (Option<OsString>, Command) = (None, Command::Other);

fn start_of(bundle: Option<&str>, config: Option<&str>) -> Start {
    Start { bundle: bundle.map(Into::into), config: config.map(Into::into) }
}

fn create(id: &str, bundle: &str) -> (Option<OsString>, Command) {
    (Some(id.into()), Command::Create(start_of(Some(bundle), None)))
}

fn delete(id: &str, force: bool) -> (Option<OsString>, Command) {
    (Some(id.into()), Command::Delete { force })
}

#[test]
fn a_signal_comes_behind_the_id() {
    let kill = |id: Option<&str>, signal: Option<&str>, all| {
        (id.map(OsString::from), Command::Kill { signal: signal.map(Into::into), all })
    };
    for dialect in [Runc, Crun] {
        assert_eq!(command_of("kill c1", dialect), kill(Some("c1"), None, false));
        assert_eq!(command_of("--root /r kill c1 15", dialect), kill(Some("c1"), Some("15"), false));
        assert_eq!(command_of("kill --all c1 KILL", dialect), kill(Some("c1"), Some("KILL"), true));
        assert_eq!(command_of("kill", dialect), kill(None, None, false));
        assert_eq!(command_of("kill --new c1 KILL", dialect), OTHER);
        assert_eq!(command_of("kill --help", dialect), OTHER);
    }
    assert_eq!(command_of("kill --regex c.* KILL", Crun), OTHER);
}

#[test]
fn command_lines_of_docker_containerd_and_podman_are_read() {
    let docker = "--root /var/run/docker/runtime-runc/moby --log /run/c/log.json --log-format json \
                  --systemd-cgroup create --bundle /run/c --pid-file /run/c/init.pid --console-socket /tmp/p c1";
    for dialect in [Runc, Crun] {
        let line = parse(&words(docker), dialect);
        assert_eq!((line.id, line.command), create("c1", "/run/c"));
        assert_eq!(line.global.root.as_deref(), Some(Path::new("/var/run/docker/runtime-runc/moby")));
        assert_eq!(line.global.log.as_deref(), Some(Path::new("/run/c/log.json")));
        assert!(line.global.log_json && !line.global.debug);
    }
    let podman = "--systemd-cgroup --root=/run/crun create --bundle /b --pid-file /p c2";
    assert_eq!(command_of(podman, Crun), create("c2", "/b"));
    let exec =
        "--root /r --log /l --log-format json exec --process /tmp/runc-process1 --detach --pid-file /p c1";
    for dialect in [Runc, Crun] {
        let (id, Command::Exec(exec)) = command_of(exec, dialect) else { panic!() };
        assert_eq!(
            (id, Exec { options_end: 0, ..exec }),
            (Some("c1".into()), Exec { process: Some("/tmp/runc-process1".into()), ..Exec::default() })
        );
    }
    // runc refuses `--env` beside `-e`.
    for (line, letters) in
        [("exec -e A=1 --cwd -p c1", vec!["env"]), ("exec -p=f --env A=1 c1", vec!["process"])]
    {
        let (_, Command::Exec(exec)) = command_of(line, Runc) else { panic!() };
        assert_eq!(exec.letters, letters, "{line}");
    }
    assert_eq!(command_of("--root /r delete --force c1", Runc), delete("c1", true));
    for other in ["features", "--version", "-v list", "--help create c", "start c", "ps create", ""] {
        assert_eq!(command_of(other, Runc), OTHER, "{other}");
        assert_eq!(command_of(other, Crun), OTHER, "{other}");
    }
}

#[test]
fn containers_named_like_commands() {
    for dialect in [Runc, Crun] {
        assert_eq!(command_of("delete create", dialect), delete("create", false));
        assert_eq!(command_of("state create", dialect), OTHER);
        assert_eq!(command_of("--root create state exec", dialect), OTHER);
        assert_eq!(command_of("create -b create create", dialect), create("create", "create"));
        assert_eq!(command_of("--log delete create -b b c", dialect), create("c", "b"));
    }
}

#[test]
fn runc_takes_one_dash_or_two_and_options_behind_the_id() {
    assert_eq!(command_of("-root /r create -bundle=/b c", Runc), create("c", "/b"));
    assert_eq!(command_of("-root=/r -debug=true create --b=/b c", Runc), create("c", "/b"));
    assert_eq!(command_of("create c --bundle /b", Runc), create("c", "/b"));
    assert_eq!(command_of("create c -b=/b --no-pivot", Runc), create("c", "/b"));
    assert_eq!(command_of("delete c -f", Runc), delete("c", true));
    assert_eq!(command_of("create c --help", Runc), OTHER);
    assert_eq!(command_of("create --bundle /a -b /b c", Runc), create("c", "/b"));
    assert_eq!(command_of("-- create -b /b -- c", Runc), create("c", "/b"));
    // A value may look like an option.
    assert_eq!(parse(&words("--root --debug state c"), Runc).global.root, Some("--debug".into()));
    let config = command_of("create -f /x -b /b c", Runc);
    assert_eq!(config, create("c", "/b"), "runc has no --config");
}

#[test]
fn crun_takes_abbreviations_clusters_and_its_own_config() {
    assert_eq!(command_of("--roo /r create --bun=/b c", Crun), create("c", "/b"));
    assert_eq!(command_of("create -b/b c", Crun), create("c", "/b"));
    assert_eq!(command_of("create -b=/b c", Crun), create("c", "=/b"));
    let run = || (Some("c".into()), Command::Run(start_of(Some("/b"), Some("/f"))));
    assert_eq!(command_of("run -df /f --bundle /b c", Crun), run());
    assert_eq!(command_of("run --keep -d --config=/f -b /b c", Crun), run());
    assert_eq!(command_of("create -- c", Crun), (Some("c".into()), Command::Create(start_of(None, None))));
    // crun reads in order and refuses arguments behind the id.
    assert_eq!(command_of("create c --bundle /b", Crun), (None, Command::Create(start_of(None, None))));
    assert_eq!(command_of("delete -rf c.*", Crun), OTHER);
    assert_eq!(command_of("delete --regex x", Crun), OTHER);
    assert_eq!(command_of("create -? c", Crun), OTHER);
    let (id, Command::Exec(exec)) = command_of("exec -tp /f c", Crun) else { panic!() };
    assert_eq!((id, exec.process), (Some("/f".into()), None), "-t has an optional value: p");
}

#[test]
fn exec_leaves_the_commands_own_options_alone() {
    for dialect in [Runc, Crun] {
        let (id, Command::Exec(exec)) =
            command_of("--debug exec -e A=1 --env B=2 --cwd / c sh -p x -e C=3", dialect)
        else {
            panic!()
        };
        assert_eq!(id, Some("c".into()));
        assert_eq!(exec.process, None);
        assert_eq!(exec.env, ["A=1", "B=2"]);
        assert_eq!(exec.options_end, 8);
        let (id, Command::Exec(exec)) = command_of("exec -d -- c true", dialect) else { panic!() };
        assert_eq!((id, exec.options_end), (Some("c".into()), 2));
    }
}

#[test]
fn unknown_options_cost_the_id_only_where_it_is_in_doubt() {
    for dialect in [Runc, Crun] {
        assert_eq!(command_of("create --new -b /b c", dialect), create("c", "/b"));
        assert_eq!(command_of("create --new=x -b /b c", dialect), create("c", "/b"));
        assert_eq!(command_of("--new create -b /b c", dialect), create("c", "/b"));
        assert_eq!(command_of("--new x create -b /b c", dialect), create("c", "/b"));
        assert_eq!(command_of("--new x --root /r frobnicate c", dialect), OTHER);
        let doubtful = command_of("exec --new x c true", dialect);
        assert!(matches!(doubtful, (None, Command::Exec(_))), "{doubtful:?}");
        let certain = command_of("exec --new -p /f c", dialect);
        assert!(matches!(&certain, (Some(id), Command::Exec(_)) if id == "c"), "{certain:?}");
        assert_eq!(command_of("delete --new x c", dialect), (None, Command::Delete { force: false }));
    }
    let doubtful = || (None, Command::Create(start_of(Some("/b"), None)));
    assert_eq!(command_of("create --new x -b /b c", Runc), doubtful());
    assert_eq!(command_of("create a b -b /b", Runc), doubtful());
}

#[test]
fn an_update_names_its_file() {
    for dialect in [Runc, Crun] {
        for line in ["update --resources=/f c", "update --resources /f c", "update -r /f c"] {
            let update = Command::Update { resources: Some("/f".into()) };
            assert_eq!(command_of(line, dialect), (Some("c".into()), update), "{line}");
        }
        let by_hand = command_of("update --memory 1g c", dialect);
        assert_eq!(by_hand, (None, Command::Update { resources: None }), "an unknown option: passed on");
    }
}

#[test]
fn restore_and_checkpoint() {
    for dialect in [Runc, Crun] {
        let restore = command_of("restore --image-path /i -d --bundle /b c", dialect);
        assert_eq!(restore, (Some("c".into()), Command::Restore(start_of(Some("/b"), None))));
        let checkpoint = command_of("checkpoint --work-path /w --leave-running c", dialect);
        assert_eq!(checkpoint, (Some("c".into()), Command::Checkpoint));
    }
}

#[test]
fn log_destinations() {
    let log = |line, dialect| parse(&words(line), dialect).global.log;
    assert_eq!(log("--log file:/l list", Crun), Some("/l".into()));
    assert_eq!(log("--log /l list", Crun), Some("/l".into()));
    assert_eq!(log("--log journald:x list", Crun), None);
    assert_eq!(log("--log file:/l list", Runc), Some("file:/l".into()));
    assert!(!parse(&words("--log-format json --log-format=text list"), Runc).global.log_json);
    assert!(!parse(&words("--debug --debug=false list"), Runc).global.debug);
    assert!(parse(&words("--log-level=debug list"), Crun).global.debug);
}

#[test]
fn arguments_that_are_no_text() {
    let bad = OsString::from_vec(vec![b'/', 0xff, b'=', 0xfe]);
    let mut attached = OsString::from("--bundle=");
    attached.push(&bad);
    let args = ["create".into(), attached, bad.clone()];
    for dialect in [Runc, Crun] {
        let line = parse(&args, dialect);
        let Command::Create(start) = line.command else { panic!() };
        assert_eq!(start.bundle, Some(bad.clone().into()));
        assert_eq!(line.id, Some(bad.clone()));
    }
    assert_eq!(parse(&[bad], Runc).command, Command::Other);
}

/// Pieces of real command lines, and bytes.
fn argument() -> impl Strategy<Value = OsString> {
    let pieces = proptest::sample::select(vec![
        "create",
        "run",
        "exec",
        "delete",
        "restore",
        "checkpoint",
        "--",
        "-",
        "",
        "--root",
        "--root=x",
        "-b",
        "--bundle",
        "-bx",
        "--bundle=x",
        "-f",
        "-t",
        "-tp",
        "-p",
        "--process",
        "-e",
        "A=1",
        "--unknown",
        "---",
        "--=",
        "-=",
        "=",
        "-?",
        "-rf",
        "id",
        "--lo",
        "--no",
    ]);
    prop_oneof![
        3 => pieces.prop_map(OsString::from),
        1 => proptest::collection::vec(any::<u8>(), 0..6).prop_map(OsString::from_vec),
    ]
}

proptest! {
    #[test]
    fn any_arguments_are_taken_apart(args in proptest::collection::vec(argument(), 0..10)) {
        for dialect in [Runc, Crun] {
            let line = parse(&args, dialect);
            if let Command::Exec(exec) = line.command {
                prop_assert!(exec.options_end <= args.len());
                prop_assert!(line.id.is_none_or(|id| args[exec.options_end..].contains(&id)));
            }
        }
    }
}
