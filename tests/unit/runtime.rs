//! The shim as engines call it, before a low-level runtime that only writes down what it was given.

use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use proptest::prelude::*;
use sublet_core::ledger::{Lease, LeaseState, Ledger, Store};
use sublet_core::process::Process;

/// A host: a low-level runtime, a configuration, and a bundle without annotations.
struct Host {
    dir: tempfile::TempDir,
}

/// Without annotations, but not without the word; spaced so that any rewriting shows.
const PLAIN: &str = r#"{ "ociVersion":"1.0.2" , "process":{"args":["sublet.sm"]},
  "root":{"path":"rootfs"}, "annotations":{"org.sublet.x":"1"} }"#;

impl Host {
    fn new() -> Self {
        let host = Self { dir: tempfile::tempdir().unwrap() };
        let config = format!(
            "state_dir = \"{0}/state\"\n[runtime]\nlow_level = [\"{0}/low-level\"]\nlog = \"{0}/own.log\"\n",
            host.dir.path().display()
        );
        fs::write(host.path("config.toml"), config).unwrap();
        fs::create_dir_all(host.path("bundle/rootfs")).unwrap();
        fs::write(host.path("bundle/config.json"), PLAIN).unwrap();
        host.low_level("printf '%s\\0' \"$@\" > \"${0%/*}/argv\"");
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn low_level(&self, script: &str) {
        let program = self.path("low-level");
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    }

    fn command(&self, args: &[OsString]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sublet-runtime"));
        command.args(args).env("SUBLET_CONFIG", self.path("config.toml"));
        command.current_dir(self.path("bundle")).stdin(Stdio::null());
        command
    }

    fn run(&self, line: &str) -> Output {
        let args: Vec<OsString> = line.split_ascii_whitespace().map(OsString::from).collect();
        self.command(&args).output().unwrap()
    }

    /// What the low-level runtime was given.
    fn argv(&self) -> Vec<OsString> {
        let text = fs::read(self.path("argv")).unwrap();
        let mut args: Vec<_> =
            text.split(|byte| *byte == 0).map(|arg| OsString::from_vec(arg.to_vec())).collect();
        args.pop();
        args
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn what_is_not_ours_passes_unchanged() {
    let host = Host::new();
    for line in [
        "--root /r --log /dev/null --log-format json create --bundle BUNDLE --pid-file /p create",
        "run -b BUNDLE c",
        "exec -p /nothing/there c",
        "exec -e A=1 c sh -c true",
        "delete --force c",
        "restore --bundle BUNDLE c",
        "checkpoint c",
        "features",
        "--version",
        "--no-such-option frobnicate -- x",
    ] {
        let line = line.replace("BUNDLE", host.path("bundle").to_str().unwrap());
        let output = host.run(&line);
        assert!(output.status.success(), "{line}: {}", stderr(&output));
        assert_eq!(stderr(&output), "", "{line}");
        assert_eq!(host.argv(), line.split(' ').map(OsString::from).collect::<Vec<_>>());
    }
    assert_eq!(fs::read_to_string(host.path("bundle/config.json")).unwrap(), PLAIN);
    assert_eq!(fs::read_dir(host.path("bundle")).unwrap().count(), 2);
    assert!(!host.path("state").exists());
}

/// A socket cannot be opened, as a file cannot for want of descriptors or memory; another program then might.
#[test]
fn a_config_json_that_cannot_be_read_may_ask_for_a_share() {
    let host = Host::new();
    fs::remove_file(host.path("bundle/config.json")).unwrap();
    let line = format!("create --bundle {} c", host.path("bundle").display());
    assert!(host.run(&line).status.success(), "the runtime says that there is none");
    fs::remove_file(host.path("argv")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(host.path("bundle/config.json")).unwrap();
    let output = host.run(&line);
    let expected =
        format!("sublet-runtime: container c: cannot read {}", host.path("bundle/config.json").display());
    assert!(!output.status.success() && stderr(&output).starts_with(&expected), "{}", stderr(&output));
    assert!(!host.path("argv").exists(), "the runtime was called");
}

#[test]
fn the_low_level_runtime_stands_in_our_place() {
    let host = Host::new();
    host.low_level("grep -E '^Sig(Ign|Blk)' /proc/self/status; echo $$; exit 42");
    let child = host.command(&["state".into(), "c".into()]).stdout(Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(42));
    // Inherited settings stay. SIGPIPE alone is ignored by every Rust program, including these.
    let standard = |status: &str| {
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:\t")).unwrap();
        u64::from_str_radix(ignored, 16).unwrap() & ((1 << 31) - 1)
    };
    let own = standard(&fs::read_to_string("/proc/self/status").unwrap()) & !(1 << 12);
    let output = String::from_utf8(output.stdout).unwrap();
    assert_eq!(standard(&output), own);
    assert!(output.starts_with("SigBlk:\t0000000000000000\n"), "{output}");
    assert!(output.ends_with(&format!("\n{pid}\n")), "{output}");
    host.low_level("kill -KILL $$");
    assert_eq!(host.run("state c").status.signal(), Some(9));
}

#[test]
fn streams_that_the_caller_has_closed_are_open_and_one_that_nobody_reads_ends_nothing() {
    let host = Host::new();
    // Not by a redirection, which the shell makes in its own process.
    host.low_level(
        "seen=$(readlink /proc/$$/fd/0 /proc/$$/fd/1 /proc/$$/fd/2); echo \"$seen\" > \"${0%/*}/streams\"",
    );
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", "exec \"$0\" state c <&- >&- 2>&-", env!("CARGO_BIN_EXE_sublet-runtime")]);
    assert!(shell.env("SUBLET_CONFIG", host.path("config.toml")).status().unwrap().success());
    assert_eq!(fs::read_to_string(host.path("streams")).unwrap(), "/dev/null\n".repeat(3));
    fs::remove_file(host.path("low-level")).unwrap();
    let (reader, writer) = std::os::unix::net::UnixStream::pair().unwrap();
    drop(reader);
    let mut refused = host.command(&["state".into(), "c".into()]);
    let status = refused.stderr(std::os::fd::OwnedFd::from(writer)).status().unwrap();
    assert_eq!(status.code(), Some(1));
}

#[test]
fn an_error_stands_on_stderr_and_in_both_logs() {
    let host = Host::new();
    let log = host.path("engine.log");
    fs::remove_file(host.path("low-level")).unwrap();
    let output = host.run(&format!("--log {} --log-format json create c7", log.display()));
    assert_eq!(output.status.code(), Some(1));
    let low_level = host.path("low-level");
    let message = format!(
        "sublet-runtime: container c7: missing {0}: no executable {0} found; install runc or crun, or set [runtime] low_level",
        low_level.display()
    );
    assert_eq!(stderr(&output), format!("{message}\n"));
    let line: serde_json::Value = serde_json::from_slice(&fs::read(log).unwrap()).unwrap();
    assert_eq!((line["level"].as_str(), line["msg"].as_str()), (Some("error"), Some(message.as_str())));
}

#[test]
fn a_container_without_a_share_runs_is_warned_of_or_refused_as_the_configuration_says() {
    let host = Host::new();
    let config = fs::read_to_string(host.path("config.toml")).unwrap();
    let engine = host.path("engine.log");
    let create = |without_share: &str, spec: &str| {
        fs::write(host.path("config.toml"), format!("{config}{without_share}")).unwrap();
        fs::write(host.path("bundle/config.json"), spec).unwrap();
        for log in ["own.log", "engine.log", "argv"] {
            let _ = fs::remove_file(host.path(log));
        }
        let output = host.run(&format!("--log {} --log-format json create c", engine.display()));
        let logs =
            ["engine.log", "own.log"].map(|log| fs::read_to_string(host.path(log)).unwrap_or_default());
        (output.status.code(), stderr(&output), logs.concat(), host.path("argv").exists())
    };
    let nothing = || (Some(0), String::new(), String::new(), true);
    assert_eq!(create("without_share = \"run\"\n", PLAIN), nothing());
    // In the logs alone: stderr is the container's.
    let (code, stderr, logs, started) = create("", PLAIN);
    assert_eq!((code, stderr.as_str(), started, logs.lines().count()), (Some(0), "", true, 2), "{logs}");
    assert!(logs.lines().all(|line| line.contains("container c: no sublet.* annotation")), "{logs}");
    assert!(logs.starts_with("{\"level\":\"warning\"") && logs.contains(" level=warning "), "{logs}");
    let (code, stderr, _, started) = create("without_share = \"refuse\"\n", PLAIN);
    assert!(code == Some(1) && stderr.contains("without_share refuses") && !started, "{stderr}");
    let pause = r#"{"annotations":{"io.kubernetes.cri.container-type":"sandbox"}}"#;
    for without_share in ["", "without_share = \"refuse\"\n"] {
        assert_eq!(create(without_share, pause), nothing(), "{without_share}");
    }
}

/// Docker's record is read where containers.toml is there, and nowhere else.
#[test]
fn labels_in_dockers_record_are_told_in_the_log() {
    let host = Host::new();
    let id = "452325ed5f7f35588a551450be5d67fde0f40a94317f3f8f8a275a3aebf20f2a";
    let record = host.path("docker/containers").join(id);
    fs::create_dir_all(&record).unwrap();
    let labels = r#"{"Name": "/web", "Config": {"Image": "x", "Labels": {"a": "b", "sublet.sm": "25"}}}"#;
    fs::write(record.join("config.v2.json"), labels).unwrap();
    let told = || {
        let _ = fs::remove_file(host.path("own.log"));
        let log = host.path("engine.log");
        let line = format!("--log {} create --bundle {} {id}", log.display(), host.path("bundle").display());
        let output = host.run(&line);
        assert!(output.status.success() && stderr(&output).is_empty(), "{}", stderr(&output));
        let log = fs::read_to_string(host.path("own.log")).unwrap_or_default();
        log.lines().filter(|line| line.contains("labels")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(told(), Vec::<String>::new());
    let root = format!("docker_root = \"{}\"\n", host.path("docker").display());
    fs::write(host.path("containers.toml"), root).unwrap();
    let lines = told();
    let said = "container web: labels are not annotations: write as --annotation sublet.sm=25";
    assert!(lines.len() == 1 && lines[0].contains(said), "{lines:?}");
    fs::write(record.join("config.v2.json"), labels.replace("sublet.sm", "other")).unwrap();
    assert_eq!(told(), Vec::<String>::new());
}

#[test]
fn an_annotated_bundle_is_not_restored() {
    let host = Host::new();
    fs::write(host.path("bundle/config.json"), r#"{"annotations":{"sublet.sm":"25"}}"#).unwrap();
    let output = host.run("restore c");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        stderr(&output),
        "sublet-runtime: container c: restore of a container with a GPU share is not possible, because the \
         GPU's state cannot be saved: recreate the container instead\n"
    );
    assert!(!host.path("argv").exists());
}

#[test]
fn a_pods_pause_container_is_ours_at_no_entry_point() {
    let host = Host::new();
    let spec = r#"{"annotations":{"sublet.sm":"25","io.kubernetes.cri.container-type":"sandbox"}}"#;
    fs::write(host.path("bundle/config.json"), spec).unwrap();
    for line in ["restore c", "create c", "run c"] {
        let output = host.run(line);
        assert!(output.status.success(), "{line}: {}", stderr(&output));
        assert_eq!(host.argv(), line.split(' ').map(OsString::from).collect::<Vec<_>>());
    }
    assert_eq!(fs::read_to_string(host.path("bundle/config.json")).unwrap(), spec);
}

#[test]
fn a_bundle_named_by_nothing_is_where_runc_is() {
    let host = Host::new();
    let spec = r#"{ "annotations":{"sublet.colour":"red"}, "root":{"path":"rootfs"},
        "linux":{"namespaces":[{"type":"mount"}]} }"#;
    fs::write(host.path("bundle/config.json"), spec).unwrap();
    let args = ["create", "--bundle", "", "c"].map(OsString::from);
    let output = host.command(&args).output().unwrap();
    assert!(stderr(&output).contains("sublet.colour=red: unknown key"), "{}", stderr(&output));
}

#[test]
fn a_bundle_whose_name_is_no_text_is_named_as_that() {
    let host = Host::new();
    let bundle = host.dir.path().join(std::ffi::OsStr::from_bytes(b"b\xff"));
    fs::create_dir_all(bundle.join("rootfs")).unwrap();
    let spec = r#"{ "annotations":{"sublet.sm":"25"}, "root":{"path":"rootfs"}, "process":{} }"#;
    fs::write(bundle.join("config.json"), spec).unwrap();
    let args = ["create".into(), "--bundle".into(), bundle.clone().into_os_string(), "c".into()];
    let output = host.command(&args).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let line = stderr(&output);
    assert!(
        line.contains("is not UTF-8: give the container with a share a directory with another name"),
        "{line}"
    );
    assert_eq!(fs::read_to_string(bundle.join("config.json")).unwrap(), spec);
}

#[test]
fn a_lock_that_is_no_file_is_named_as_that() {
    let host = Host::new();
    let store = Store::open(&host.path("state")).unwrap();
    nix::unistd::mkfifo(&host.path("state/lock"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let error = store.update(|_| Ok::<_, ()>(())).unwrap_err().to_string();
    assert!(error.contains("it is not a regular file: remove it") && !error.contains("made it"), "{error}");
}

/// What is no file is neither waited for nor read without end, for whatever container.
#[test]
fn a_configuration_that_is_no_file_holds_nobody_up() {
    let host = Host::new();
    let pipe = host.path("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    for config in [pipe.as_path(), Path::new("/dev/zero"), host.dir.path()] {
        let began = std::time::Instant::now();
        let args = ["create".into(), "c".into()];
        let output = host.command(&args).env("SUBLET_CONFIG", config).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{config:?}");
        assert!(stderr(&output).contains("it is not a regular file"), "{}", stderr(&output));
        assert!(began.elapsed() < std::time::Duration::from_secs(5), "{config:?}");
    }
}

#[test]
fn an_annotated_bundle_without_an_id_is_refused_and_untouched() {
    let host = Host::new();
    let spec = r#"{ "annotations":{"sublet.sm":"25"}, "root":{"path":"rootfs"} }"#;
    fs::write(host.path("bundle/config.json"), spec).unwrap();
    for line in ["create --new-option x c", "create", "create a/b", "run .."] {
        let output = host.run(line);
        assert_eq!(output.status.code(), Some(1), "{line}");
        assert!(stderr(&output).contains("does not name one container"), "{}", stderr(&output));
    }
    assert_eq!(fs::read_to_string(host.path("bundle/config.json")).unwrap(), spec);
    assert!(!host.path("argv").exists());
}

impl Host {
    /// A lease for container `c`, whose owner lives as long as this test.
    fn lease(&self) {
        // As in the file: this test does not care for what else a lease may hold.
        let lease: Lease = serde_json::from_value(serde_json::json!({
            "id": "0123456789abcdef",
            "container": {
                "uid": nix::unistd::geteuid().as_raw(),
                "id": "c",
                "bundle": self.path("bundle"),
                "rootfs": self.path("bundle/rootfs"),
                "record": self.path("root/c"),
            },
            "devices": ["GPU-none"],
            "mode": "time-slice",
            "isolation": "shared",
            "daemon": null,
            "sm": null,
            "memory_bytes": null,
            "processes": 1,
            "priority": "normal",
            "state": "pending",
            "owner": Process::current().unwrap(),
            "init": null,
            "since": 0,
            "mount_points": [],
        }))
        .unwrap();
        let store = Store::open(&self.path("state")).unwrap();
        let change = |ledger: &mut Ledger| {
            ledger.leases.push(lease);
            Ok::<_, ()>(())
        };
        store.update(change).unwrap().0.unwrap();
    }

    /// The states of all leases.
    fn states(&self) -> Vec<LeaseState> {
        let ledger = Store::open(&self.path("state")).unwrap().read().unwrap();
        ledger.leases.iter().map(|lease| lease.state).collect()
    }

    fn delete(&self) -> String {
        format!("--root {} delete c", self.path("root").display())
    }
}

#[test]
fn a_delete_that_succeeds_frees_the_lease() {
    let host = Host::new();
    host.lease();
    host.low_level("grep -o ending \"${0%/*}/state/ledger.json\"");
    let output = host.run(&host.delete());
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(output.stdout, b"ending\n", "marked before the runtime runs");
    assert_eq!(host.states(), []);
}

/// Signals that we wait for meanwhile are not blocked for it, nor for the hooks that it runs.
#[test]
fn the_runtime_that_deletes_has_the_callers_signal_mask() {
    let host = Host::new();
    host.lease();
    // Where sh is dash it clears its mask as it begins.
    fs::write(host.path("low-level"), "#!/bin/bash\ngrep SigBlk /proc/self/status\n").unwrap();
    let output = host.run(&host.delete());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "SigBlk:\t0000000000000000\n");
    assert_eq!(host.states(), []);
}

#[test]
fn a_delete_that_fails_leaves_the_lease_as_it_was() {
    let host = Host::new();
    host.lease();
    host.low_level("exit 3");
    assert_eq!(host.run(&host.delete()).status.code(), Some(3));
    assert_eq!(host.states(), [LeaseState::Pending]);
    host.low_level("kill -KILL $$");
    assert_eq!(host.run(&host.delete()).status.signal(), Some(9));
    assert_eq!(host.states(), [LeaseState::Pending]);
    fs::remove_file(host.path("low-level")).unwrap();
    assert_eq!(host.run(&host.delete()).status.code(), Some(1));
    assert_eq!(host.states(), [LeaseState::Pending]);
}

#[test]
fn a_delete_of_another_users_or_runtimes_container_is_not_ours() {
    let host = Host::new();
    host.lease();
    assert!(host.run("--root /elsewhere delete c").status.success());
    assert!(host.run(&format!("{}2", host.delete())).status.success());
    assert_eq!(host.states(), [LeaseState::Pending]);
}

#[test]
fn signals_reach_the_runtime_that_deletes() {
    let host = Host::new();
    host.lease();
    for (signal, code) in [("TERM", 11), ("INT", 12), ("HUP", 13), ("USR1", 14), ("USR2", 15)] {
        // The runtime is a child of the shim: $PPID.
        host.low_level(&format!(
            "trap 'exit {code}' {signal}; kill -{signal} $PPID; while :; do sleep 0.01; done"
        ));
        // A shell cannot trap what was ignored before it started, as SIGINT is in background jobs.
        let mut command = Command::new("env");
        command.arg("--default-signal").arg(env!("CARGO_BIN_EXE_sublet-runtime"));
        command.args(host.delete().split(' ')).env("SUBLET_CONFIG", host.path("config.toml"));
        assert_eq!(command.status().unwrap().code(), Some(code), "{signal}");
    }
    assert_eq!(host.states(), [LeaseState::Pending]);
}

#[test]
fn the_runtime_that_deletes_dies_with_the_shim() {
    let host = Host::new();
    host.lease();
    host.low_level("kill -KILL $PPID; sleep 0.3; : > \"${0%/*}/survived\"");
    assert_eq!(host.run(&host.delete()).status.signal(), Some(9));
    std::thread::sleep(std::time::Duration::from_millis(600));
    assert!(!host.path("survived").exists());
}

/// The hook is the shim by another name.
fn hook(args: &[&str], input: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sublet-runtime"));
    command
        .arg0("sublet-hook")
        .args(args)
        .stdin(fs::File::open(input).unwrap())
        .env("SUBLET_CONFIG", "/dev/null")
        .output()
        .unwrap()
}

#[test]
fn the_hook_frees_nothing_that_is_not_ours_and_refuses_nonsense() {
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("state");
    let poststop = |text: &[u8]| {
        fs::write(&input, text).unwrap();
        hook(&["poststop"], &input)
    };
    let output = poststop(br#"{"id":"c","status":"stopped","annotations":{"a":"b"}}"#);
    assert!(output.status.success() && stderr(&output).is_empty(), "{}", stderr(&output));
    let output = poststop(b"");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(stderr(&output), "sublet-hook: the container's state on standard input: it is empty\n");
    let output = poststop(&vec![b' '; (1 << 20) + 1]);
    assert_eq!(
        stderr(&output),
        "sublet-hook: the container's state on standard input: it is longer than 1 MiB\n"
    );
    let output = poststop(br#"{"id":"c","status":"stopped","annotations":{"sublet.lease":"x\ny"}}"#);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        stderr(&output),
        "sublet-hook: container c: sublet.lease=x\\ny is not a lease id of 16 hex digits\n"
    );
    for stage in ["prestart", "createRuntime"] {
        fs::write(&input, r#"{"id":"c","status":"creating","pid":1}"#).unwrap();
        let output = hook(&[stage], &input);
        assert_eq!(output.status.code(), Some(1));
        let expected =
            "sublet-hook: container c: `bundle` in the state on standard input is not an absolute path\n";
        assert_eq!(stderr(&output), expected);
    }
    fs::write(&input, "").unwrap();
    let output = hook(&["precreate"], &input);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(stderr(&output), "sublet-hook: config.json on standard input: it is empty\n");
    assert_eq!(hook(&[], &input).status.code(), Some(1));
}

#[test]
fn the_hook_is_known_by_its_path_whatever_its_first_argument_is() {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("sublet-hook");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_sublet-runtime"), &link).unwrap();
    for name in ["sublet-hook", "/x/sublet-hook", "hook", "sublet-runtime", ""] {
        let mut command = Command::new(&link);
        command.arg0(name).arg("nonsense").env("SUBLET_CONFIG", "/dev/null");
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{name}");
        assert!(
            stderr(&output).starts_with("sublet-hook: unknown stage nonsense: "),
            "{name}: {}",
            stderr(&output)
        );
    }
}

/// What no shell would write, and pieces of what engines do write.
fn argument() -> impl Strategy<Value = OsString> {
    let pieces =
        vec!["create", "run", "exec", "delete", "-b", "--bundle", "--", "-p", "--root", "--x", "c", ""];
    prop_oneof![
        proptest::sample::select(pieces).prop_map(OsString::from),
        proptest::collection::vec(1..=255_u8, 0..5).prop_map(OsString::from_vec),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_arguments_reach_the_low_level_runtime(args in proptest::collection::vec(argument(), 1..8)) {
        // A log would be written where the arguments say.
        prop_assume!(!args.iter().any(|arg| arg.as_encoded_bytes().starts_with(b"-l")));
        let host = Host::new();
        let output = host.command(&args).output().unwrap();
        prop_assert!(output.status.success(), "{}", stderr(&output));
        prop_assert_eq!(host.argv(), args);
        prop_assert_eq!(fs::read(host.path("bundle/config.json")).unwrap(), PLAIN.as_bytes());
    }
}

#[test]
fn the_programs_of_engines_say_what_they_are() {
    // The same program, by the name of its link.
    let runtime = || Command::new(env!("CARGO_BIN_EXE_sublet-runtime"));
    let hook = |argument| runtime().arg0("sublet-hook").arg(argument).output().unwrap();
    let help = hook("--help");
    assert_eq!((help.status.code(), help.stderr.as_slice()), (Some(0), &[][..]));
    let help = String::from_utf8_lossy(&help.stdout);
    assert!(help.starts_with("The OCI hook of sublet") && help.contains("sublet-hook STAGE"), "{help}");
    assert_eq!(
        String::from_utf8_lossy(&hook("--version").stdout),
        format!("sublet-hook {}\n", env!("CARGO_PKG_VERSION"))
    );
    let runtime = runtime().arg("--help").output().unwrap();
    assert_eq!((runtime.status.code(), runtime.stderr.as_slice()), (Some(0), &[][..]));
    let runtime = String::from_utf8_lossy(&runtime.stdout);
    assert!(runtime.starts_with("The OCI runtime shim of sublet"), "{runtime}");
    let fits = |text: &str| text.lines().all(|line| line.len() <= 80) && !text.contains('`');
    assert!(fits(&help) && fits(&runtime), "{help}{runtime}");
}
