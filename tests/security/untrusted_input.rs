//! C1, C2 and C7: the content of annotations, of config.json and of the runtime's command line. (How engines' command
//! lines are parsed: `src/runtime/shim/argv_tests.rs`, `tests/unit/runtime.rs`.)

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::process::Command;

use serde_json::{Value, json};
use sublet_e2e::{Bundle, Engine, Finished, World, assert_lines, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const SLEEP: &[&str] = &["/bin/sleep", "120"];
const SHARE: &[(&str, &str)] = &[("sublet.sm", "25")];

fn bad<'a>(world: &'a World, annotations: &[(&str, &str)]) -> Bundle<'a> {
    world.bundle("bad", annotations, HOLD)
}

/// Whatever an annotation contains, the message is short and safe to print on a terminal.
#[test]
fn c1_hostile_annotations() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let megabyte = "9".repeat(1 << 20);
    let hostile = [
        megabyte.as_str(),
        "25\0",
        "25\u{1b}[2J\u{1b}]0;owned\u{7}",
        "../../../etc/passwd",
        "25\nsublet.mode=exclusive",
        "٢٥",
        "1e309",
        "-1",
        "99999999999999999999GiB",
        "17179869185GiB", // 2^64 bytes and one GiB
        "\u{202e}52",
    ];
    for value in hostile {
        for key in ["sublet.sm", "sublet.memory", "sublet.gpu", "sublet.wait", "sublet.mig", "sublet.share"] {
            let line = bad(&world, &[(key, value)]).refused();
            assert!(
                line.contains(key)
                    || ["no room", "cannot serve", "refused: "].iter().any(|known| line.starts_with(known)),
                "{key}: {line}"
            );
            assert!(line.len() < 1000, "{key}: {} bytes", line.len());
            assert!(!line.chars().any(|c| c.is_control() || c == '\u{202e}'), "{key}: {line:?}");
        }
    }
    world.assert_empty();
}

/// Input that no engine writes.
#[test]
fn c2_specs_that_are_damaged() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = bad(&world, SHARE);
    let whole = serde_json::to_string(&bundle.spec).expect("JSON");
    let with = |edit: fn(&mut Value)| {
        let mut spec = bundle.spec.clone();
        edit(&mut spec);
        serde_json::to_string(&spec).expect("JSON")
    };
    let texts = [
        whole[..whole.len() - 20].to_owned(),
        whole.replacen('{', &format!("{{\"deep\":{}{},", "[".repeat(400), "]".repeat(400)), 1),
        whole.replacen(r#""annotations":"#, r#""annotations":{},"annotations":"#, 1),
        with(|spec| spec["annotations"]["sublet.sm"] = json!(25)),
        with(|spec| spec["process"] = Value::Null),
        with(|spec| spec["process"]["env"] = json!("PATH=/bin")),
        with(|spec| spec["root"] = Value::Null),
        with(|spec| spec["root"]["path"] = json!("elsewhere")),
        with(|spec| spec["linux"]["resources"]["devices"] = json!({})),
        with(|spec| spec["mounts"] = json!("none")),
    ];
    let seen: Vec<_> = texts
        .iter()
        .map(|text| {
            std::fs::write(bundle.dir.join("config.json"), text).expect("config.json");
            let line = bundle.refused_as_written(&["create"]);
            match line.split_once(" at line 1 column ") {
                Some((what, rest)) => {
                    format!("{what}{}", rest.trim_start_matches(|c: char| c.is_ascii_digit()))
                }
                None => line,
            }
        })
        .collect();
    assert_lines(
        &seen,
        &[
            "cannot edit $DIR/bundles/bad/config.json: EOF while parsing a string; the file was not \
             changed, and the program that wrote it is at fault",
            "cannot edit $DIR/bundles/bad/config.json: recursion limit exceeded; the file was not changed, \
             and the program that wrote it is at fault",
            "cannot edit $DIR/bundles/bad/config.json: the key `annotations` occurs twice in one object; \
             the file was not changed, and the program that wrote it is at fault",
            "the container's spec: `annotations.*` is a number, but the OCI runtime specification has a \
             string: the program that wrote the file is at fault; try the container without its other \
             hooks and wrappers",
            "the container's spec: `process` is null, but the OCI runtime specification has an object: the \
             program that wrote the file is at fault; try the container without its other hooks and \
             wrappers",
            "the container's spec: `process.env` is a string, but the OCI runtime specification has an \
             array: the program that wrote the file is at fault; try the container without its other hooks \
             and wrappers",
            "config.json has no root.path, which the OCI runtime specification requires: recreate the \
             container",
            "root.path $DIR/bundles/bad/elsewhere cannot be used: No such file or directory (os error 2)",
            "the container's spec: `linux.resources.devices` is an object, but the OCI runtime \
             specification has an array: the program that wrote the file is at fault; try the container \
             without its other hooks and wrappers",
            "the container's spec: `mounts` is a string, but the OCI runtime specification has an array: \
             the program that wrote the file is at fault; try the container without its other hooks and \
             wrappers",
        ],
    );
    world.assert_empty();
}

/// The error for a file that sublet cannot or will not read: sublet's, or the low-level runtime's.
#[test]
fn c2_files_that_no_engine_writes() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = bad(&world, SHARE);
    let file = bundle.dir.join("config.json");
    let whole = serde_json::to_vec(&bundle.spec).expect("JSON");
    // JSON cannot contain a path that is not UTF-8.
    let mut path = serde_json::to_string(&bundle.spec)
        .expect("JSON")
        .replacen("\"rootfs\"", "\"root?s\"", 1)
        .into_bytes();
    let at = path.windows(6).position(|six| six == b"root?s").expect("the path");
    path[at + 4] = 0xff;
    std::fs::write(&file, &path).expect("config.json");
    let line = bundle.refused_as_written(&["create"]);
    assert!(line.starts_with("cannot edit $DIR/bundles/bad/config.json: invalid utf-8"), "{line}");
    // 100 MB that ask for a share: sublet cannot edit that, and the container must not start without the share.
    let mut large = whole.clone();
    large.resize(100 << 20, b' ');
    std::fs::write(&file, &large).expect("config.json");
    let line = bundle.refused_as_written(&["create"]);
    assert_eq!(
        line,
        "$DIR/bundles/bad/config.json is larger than 16 MiB, which no engine writes, and was not read: \
         recreate the container"
    );
    // The same without a request for a share: sublet passes it on.
    let plain = world.bundle("plain", &[], SLEEP);
    let mut large = serde_json::to_vec(&plain.spec).expect("JSON");
    large.resize(17 << 20, b' ');
    std::fs::write(plain.dir.join("config.json"), &large).expect("config.json");
    let created = create(&plain);
    assert!(created.ok, "{created:?}");
    assert!(std::fs::read(plain.dir.join("config.json")).expect("config.json") == large, "it was edited");
    plain.down();
    // A pipe without a writer: neither sublet nor the runtime waits for it here.
    std::fs::remove_file(&file).expect("config.json");
    nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    let mut command = Command::new("timeout");
    let shim = world.runtime();
    command.arg("10").arg(shim.get_program()).args(shim.get_args());
    command.envs(shim.get_envs().filter_map(|(name, value)| Some((name, value?))));
    std::fs::write(&world.config, low_level_stub(&world)).expect("config.toml");
    let output = command.arg("create").arg("--bundle").arg(&bundle.dir).arg("bad").output().expect("it runs");
    assert_ne!(output.status.code(), Some(124), "it waits for the pipe");
}

/// Keys that runc matches without regard to case, and crun does not.
#[test]
fn c2_keys_in_another_case() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let bundle = bad(&world, SHARE);
    let whole = serde_json::to_string(&bundle.spec).expect("JSON");
    let rule =
        r#"{"Allow":true,"Type":"c","Major":195,"Minor":5,"Access":"rw"},{"allow":false,"access":"rwm"}"#;
    let texts = [
        whole.replacen(r#"{"allow":false,"access":"rwm"}"#, rule, 1),
        whole.replacen(r#""mounts":["#, r#""Mounts":[],"mounts":["#, 1),
        whole.replacen(r#""env":["#, r#""ENV":["CUDA_MPS_PIPE_DIRECTORY=/nowhere"],"env":["#, 1),
        whole.replacen(r#""annotations":"#, r#""Annotations":"#, 1),
        whole.replacen(r#""process":"#, "\"proce\u{17f}s\":{},\"process\":", 1),
    ];
    for (text, key) in texts.iter().zip(["Allow", "Mounts", "ENV", "Annotations", "proce"]) {
        assert_ne!(*text, whole, "{key}");
        std::fs::write(bundle.dir.join("config.json"), text).expect("config.json");
        let line = bundle.refused_as_written(&["create"]);
        assert!(line.contains(&format!("runc takes the key `{key}")), "{line}");
    }
    world.assert_empty();
}

/// `config.toml` with a low-level runtime that does nothing.
fn low_level_stub(world: &World) -> String {
    let text = std::fs::read_to_string(&world.config).expect("config.toml");
    text.replace(&format!("{:?}", [world.engine.program()]), "[\"/bin/true\"]")
}

/// A low-level runtime that cannot be run. sublet finds that out when it has already taken the lease.
#[test]
fn c2_an_edit_is_taken_back_where_the_runtime_does_not_run() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let runtime = world.dir.path().join("runtime");
    sublet_e2e::programs::script(&runtime, "");
    std::fs::write(&runtime, "#!/nowhere/sh\n").expect("a program without its interpreter");
    let text = std::fs::read_to_string(&world.config).expect("config.toml");
    let text = text.replace(&format!("{:?}", [world.engine.program()]), &format!("{:?}", [&runtime]));
    std::fs::write(&world.config, text).expect("config.toml");
    let line = bad(&world, &[("sublet.gpu", "0")]).refused();
    assert_lines(&[line], &["cannot run $DIR/runtime: No such file or directory (os error 2)"]);
    world.assert_empty();
}

/// `create` with this config.json.
fn create(bundle: &Bundle<'_>) -> Finished {
    let mut command = bundle.runtime();
    command.arg("create").arg("--bundle").arg(&bundle.dir).arg(&bundle.id);
    detached(command)
}

/// Standard output is not captured, because a container would keep it open.
fn detached(mut command: Command) -> Finished {
    let null = || std::process::Stdio::null();
    let status = command.stdin(null()).stdout(null()).stderr(null()).status().expect("it runs");
    Finished { ok: status.success(), code: status.code(), stdout: String::new(), stderr: String::new() }
}

#[test]
fn c7_containers_named_like_commands() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    for id in ["create", "run", "delete", "exec", "state", "checkpoint"] {
        let bundle = world.bundle(id, SHARE, SLEEP);
        bundle.up();
        assert_eq!(world.booked(), [json!(id)]);
        let seen = bundle.exec(&["/usr/bin/cuda-probe", "info"]);
        assert_eq!(seen.json()[0]["sm"], json!(32), "{id}: {seen:?}");
        assert!(bundle.kill("KILL").ok, "{id}");
        assert!(sublet_e2e::eventually(|| bundle.delete().ok), "{id}");
        assert_eq!(world.booked(), Vec::<Value>::new(), "{id}: its lease ends with delete");
    }
    world.assert_empty();
}

#[test]
fn c7_the_bundle_is_the_one_that_the_runtime_takes() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let other = world.bundle("other", &[], SLEEP);
    other.write();
    let bundle = world.bundle("c", SHARE, SLEEP);
    let (dir, elsewhere) = (bundle.dir.display().to_string(), other.dir.display().to_string());
    let mut forms = vec![
        vec![format!("--bundle={dir}"), "c".into()],
        vec!["-b".into(), dir.clone(), "c".into()],
        vec!["--bundle".into(), elsewhere.clone(), "--bundle".into(), dir.clone(), "c".into()],
        vec!["--bundle".into(), dir.clone(), "--pid-file".into(), format!("{dir}/create"), "c".into()],
        vec!["--bundle".into(), dir.clone(), "--".into(), "c".into()],
    ];
    forms.extend(match world.engine {
        Engine::Runc => {
            vec![vec![format!("-bundle={dir}"), "c".into()], vec!["c".into(), "--bundle".into(), dir]]
        }
        Engine::Crun => vec![
            vec![format!("-b{dir}"), "c".into()],
            vec![format!("--bun={dir}"), "c".into()],
            vec![format!("--bundle={elsewhere}"), "-b".into(), dir, "c".into()],
        ],
    });
    for form in forms {
        bundle.write();
        let mut command = world.runtime();
        command.arg("--log").arg(bundle.dir.join("create")).arg("create").args(&form);
        let created = detached(command);
        assert!(created.ok, "{form:?}");
        assert_eq!(world.booked(), [json!("c")], "{form:?}");
        assert!(bundle.config()["annotations"]["sublet.lease"].is_string(), "{form:?}");
        assert_eq!(other.config(), other.spec, "{form:?}");
        bundle.down();
    }
    world.assert_empty();
}

/// A command line that sublet does not understand has the same effect as without sublet.
#[test]
fn c7_what_nobody_knows_passes_unchanged() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("c", SHARE, SLEEP);
    bundle.write();
    let dir = bundle.dir.display().to_string();
    let bad = OsStr::from_bytes(b"\xff\xfe").to_owned();
    let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
    let lines = [
        words("frobnicate create"),
        words("--no-such-option create c"),
        words("state nobody"),
        words(""),
        words("create -b /nowhere nobody"),
        words("delete a b"),
        words("exec"),
        vec!["state".into(), bad.clone()],
        vec!["create".into(), "--bundle".into(), bad.clone(), "nobody".into()],
        vec!["--root".into(), bad, "state".into(), "nobody".into()],
    ];
    let path = std::env::var_os("PATH").expect("PATH");
    let mut places = std::env::split_paths(&path).map(|dir| dir.join(world.engine.program()));
    let program = places.find(|program| program.exists()).expect("it is installed");
    for line in lines {
        // There, because a runtime creates its root.
        let run = |mut command: Command| {
            Finished::of(&command.args(&line).current_dir(&bundle.dir).output().expect("it runs"))
        };
        let (with, without) = (run(world.command("sublet-runtime")), run(Command::new(&program)));
        // runc's messages have the time in them.
        let said = |finished: &Finished| {
            let of_a_line = |line: &str| line.find(" level=").map_or(line, |at| &line[at..]).to_owned();
            finished.stderr.lines().map(of_a_line).collect::<Vec<_>>()
        };
        assert_eq!((with.code, &with.stdout), (without.code, &without.stdout), "{line:?}");
        assert_eq!(said(&with), said(&without), "{line:?}");
    }
    // If it is unclear which container is meant, the command is refused and the file stays unchanged.
    let before = std::fs::read(bundle.dir.join("config.json")).expect("config.json");
    for line in [format!("create --bundle {dir} --new-option x c"), format!("create --bundle {dir}")] {
        let mut command = world.runtime();
        let refused = Finished::of(&command.args(line.split(' ')).output().expect("it runs"));
        assert!(!refused.ok && refused.stderr.contains("does not name one container"), "{line}: {refused:?}");
        assert_eq!(std::fs::read(bundle.dir.join("config.json")).expect("config.json"), before, "{line}");
    }
    world.assert_empty();
}
