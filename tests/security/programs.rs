//! A5, A6 and A8: a container must not change sublet's programs, sublet must not run the image's programs, and the
//! image's environment must not reach sublet.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use sublet_e2e::hooked::{HOSTILE_ENVIRONMENT, precreated};
use sublet_e2e::{Bundle, World, bin_dir, programs, skip_unless_root};

const WHOLE: &[(&str, &str)] = &[("sublet.gpu", "0")];
const SHARE: &[(&str, &str)] = &[("sublet.sm", "25")];
const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const SLEEP: &[&str] = &["/bin/sleep", "120"];

/// For each process of sublet that it sees, opens the program and writes to it as soon as no process runs it (until
/// then the kernel refuses with ETXTBSY, open(2)).
const OVERWRITE: &str = r#"
while :; do
    for exe in /proc/[0-9]*/exe; do
        seen=$((seen + 1))
        case $(busybox readlink "$exe") in *sublet*) ;; *) continue ;; esac
        (exec 3<"$exe" && echo opened && for i in 1 2 3 4 5; do
            echo overwritten >>/proc/self/fd/3 && echo written && break
            sleep 0.1
        done) &
    done 2>/dev/null
    echo "{\"event\":\"round\",\"seen\":$seen}"
done"#;

#[test]
fn a5_a_container_cannot_write_to_our_programs() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let programs = ["sublet", "sublet-runtime", "sublet-hook"];
    let read = || programs.map(|program| fs::read(bin_dir().join(program)).expect(program));
    let before = read();
    let mut hostile = world.bundle("hostile", WHOLE, &["/bin/sh", "-c", OVERWRITE]);
    // It sees every process of the host: docker run --pid=host.
    let namespaces = hostile.spec["linux"]["namespaces"].as_array_mut().expect("namespaces");
    namespaces.retain(|namespace| namespace["type"] != "pid");
    hostile.up();
    hostile.event("round");
    for number in 0..10 {
        let mut victim = world.bundle(&format!("victim{number}"), WHOLE, SLEEP);
        if number % 2 == 0 {
            victim.hook(&["createRuntime", "poststop"]);
        }
        victim.up();
        assert!(victim.exec(&["/bin/true"]).ok);
        victim.down();
    }
    let said = hostile.output();
    let rounds = said.lines().filter(|line| line.contains("round")).count();
    assert!(rounds > 1 && hostile.event("round")["seen"].as_u64() > Some(1), "it did not try: {said}");
    hostile.down();
    assert!(!said.contains("written"), "{said}");
    assert!(before == read(), "a program of ours was changed");
    world.assert_empty();
}

/// Calls by which a program runs others or reads files.
const CALLS: &str = "trace=execve,execveat,open,openat,openat2,chroot,pivot_root,clone,clone3,fork,vfork";

/// Tools in the image that report when they run, and loader files that name files outside the image.
fn trap(world: &World, bundle: &Bundle<'_>) -> PathBuf {
    let rootfs = bundle.dir.join("rootfs");
    let told = world.dir.path().join("told");
    let script = format!("echo $0 >>{0} 2>/dev/null; echo $0 >>/told\n", told.display());
    let tools = ["sbin/ldconfig", "sbin/ldconfig.real", "usr/sbin/ldconfig", "usr/bin/nvidia-smi"];
    let more = ["usr/bin/nvidia-container-cli", "usr/bin/nvidia-cuda-mps-control", "usr/bin/nvidia-modprobe"];
    for tool in tools.iter().chain(&more) {
        let tool = rootfs.join(tool);
        fs::create_dir_all(tool.parent().expect("a directory")).expect("directories");
        programs::script(&tool, &script);
    }
    let outside = world.dir.path().join("outside");
    fs::create_dir_all(&outside).expect("a directory");
    fs::write(outside.join("libcuda.so.1"), "of the host").expect("a file");
    let out = format!("{}{}", "../".repeat(20), &outside.display().to_string()[1..]);
    fs::create_dir_all(rootfs.join("etc/ld.so.conf.d")).expect("a directory");
    let include = format!("include {out}/*.conf\n{}\n", outside.display());
    fs::write(rootfs.join("etc/ld.so.conf"), &include).expect("a file");
    fs::write(rootfs.join("etc/ld.so.conf.d/x.conf"), &include).expect("a file");
    let cache = format!(
        "glibc-ld.so.cache1.1\0libcuda.so.1\0/{out}/libcuda.so.1\0{}/libcuda.so.1\0",
        outside.display()
    );
    fs::write(rootfs.join("etc/ld.so.cache"), cache).expect("a file");
    symlink(outside.join("libcuda.so.1"), rootfs.join("etc/nvidia-container-runtime")).expect("a link");
    told
}

/// The programs that the traced processes ran and the files that they opened, up to the first program that is not
/// sublet's: the low-level runtime. `logs` has a file for each process. The shim's children are not traced, because
/// strace would wait for its daemon and container. It has no other children here.
fn traced(logs: &Path, followed: bool) -> (Vec<String>, Vec<String>) {
    let (mut ran, mut opened) = (Vec::new(), Vec::new());
    for log in fs::read_dir(logs).expect("strace writes its logs").flatten() {
        let log = fs::read_to_string(log.path()).expect("a log");
        read(&log, followed, &mut ran, &mut opened);
    }
    (ran, opened)
}

fn read(log: &str, followed: bool, ran: &mut Vec<String>, opened: &mut Vec<String>) {
    for line in log.lines() {
        if line.starts_with("execve(") && line.contains(" = 0") {
            let program = line.split('"').nth(1).expect("a path").to_owned();
            let name = program.rsplit('/').next().expect("a name").to_owned();
            ran.push(program);
            if !name.starts_with("sublet") {
                break;
            }
        } else if line.starts_with("open") {
            opened.push(line.to_owned());
        } else {
            let is_child = ["clone", "fork", "vfork"].iter().any(|call| line.starts_with(call));
            let is_end = line.starts_with("+++") || line.starts_with("---");
            assert!(is_end || line.contains("exec") || followed && is_child, "{line}");
        }
    }
}

fn assert_untouched(what: &str, logs: &Path, followed: bool, bundle: &Bundle<'_>) {
    let (ran, opened) = traced(logs, followed);
    let rootfs = bundle.dir.join("rootfs").display().to_string();
    let of_the_image = |path: &&String| path.contains(&rootfs) || !path.starts_with('/');
    assert_eq!(ran.iter().find(of_the_image), None, "{what}: {ran:?}");
    assert!(opened.iter().any(|line| line.contains(&rootfs)), "{what}: it did not look into the image");
    let parsed = |line: &&String| line.contains("ld.so.conf");
    assert_eq!(opened.iter().find(parsed), None, "{what}");
    let outside = |line: &&String| line.rsplit(" = ").next().is_some_and(|found| found.contains("/outside/"));
    assert_eq!(opened.iter().find(outside), None, "{what}");
}

#[test]
fn a6_nothing_of_the_image_is_run_or_parsed() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    assert!(world.sublet(&["refresh"]).status.success());
    let options = ["-y", "-s", "500", "-e", CALLS];
    for late in [false, true] {
        let mut bundle = world.bundle(if late { "hook" } else { "shim" }, WHOLE, HOLD);
        let told = trap(&world, &bundle);
        let logs = world.dir.path().join(if late { "of-the-hook" } else { "of-the-shim" });
        fs::create_dir(&logs).expect("a directory");
        let log = logs.join("strace");
        let created = if late {
            bundle.hook(&["createRuntime", "poststop"]);
            let hook = &mut bundle.spec["hooks"]["createRuntime"][0];
            let mut args = vec![json!("strace"), json!("-ff"), json!("-o"), json!(log)];
            args.extend(options.iter().map(|option| json!(option)));
            args.extend([json!("--"), hook["path"].clone(), json!("createRuntime")]);
            hook["args"] = json!(args);
            hook["path"] = json!("/usr/bin/strace");
            bundle.create().ok
        } else {
            bundle.write();
            let shim = world.runtime();
            let mut command = Command::new("strace");
            command.arg("-o").arg(&log).args(options).arg("--").arg(shim.get_program()).args(shim.get_args());
            command.envs(shim.get_envs().filter_map(|(name, value)| Some((name, value?))));
            command.arg("create").arg("--bundle").arg(&bundle.dir).arg(&bundle.id);
            let out = fs::File::create(bundle.dir.join("out")).expect("output file");
            command.stdin(Stdio::null()).stdout(out).status().expect("strace is installed").success()
        };
        assert!(created && bundle.start().ok, "late: {late}");
        assert_untouched(if late { "hook" } else { "shim" }, &logs, late, &bundle);
        let info = bundle.event("info");
        assert_eq!(info["error"], Value::Null, "the driver's libraries are found without ldconfig: {info}");
        bundle.down();
        let inside = bundle.dir.join("rootfs/told");
        assert!(!told.exists() && !inside.exists(), "a program of the image's ran: {:?}", fs::read(inside));
    }
    world.assert_empty();
}

/// Programs of this build in a separate directory. `sublet-hook` and `sublet`, which sublet calls there, are shell
/// scripts that record their environment and then run the real programs.
struct Own(PathBuf);

impl Own {
    fn new(world: &World) -> Self {
        let dir = world.dir.path().join("own");
        fs::create_dir(&dir).expect("a directory");
        programs::copy(&bin_dir().join("sublet-runtime"), &dir.join("sublet-runtime"));
        for program in ["sublet-hook", "sublet"] {
            let real = bin_dir().join(program);
            let script = format!(
                "{{ busybox tr '\\0' '\\n' </proc/$$/environ; echo; }} >>{0}/{program}.environment\n\
                 pwd >>{0}/{program}.directory\nexec {1} \"$@\"\n",
                dir.display(),
                real.display()
            );
            programs::script(&dir.join(program), &script);
        }
        Self(dir)
    }

    /// The shim, or the hook: the same program by another name.
    fn command(&self, world: &World, name: &str) -> Command {
        let mut command = world.command(self.0.join("sublet-runtime").to_str().expect("UTF-8"));
        command.arg0(name);
        command
    }

    /// The environments that `program` was run with: the names of their variables.
    fn environments(&self, program: &str) -> Vec<BTreeSet<String>> {
        let text = fs::read_to_string(self.0.join(format!("{program}.environment"))).unwrap_or_default();
        let names =
            |part: &str| part.lines().filter_map(|line| Some(line.split_once('=')?.0.to_owned())).collect();
        text.split("\n\n").filter(|part| !part.trim().is_empty()).map(names).collect()
    }

    fn assert_clean(&self, program: &str, at_least: usize, what: &str) {
        let clean = BTreeSet::from(["PATH".to_owned(), "SUBLET_CONFIG".to_owned()]);
        let seen = self.environments(program);
        assert!(seen.len() >= at_least, "{what}: {program} was run {} times", seen.len());
        for environment in &seen {
            assert_eq!(*environment, clean, "{what}: {program}");
        }
        let text = fs::read_to_string(self.0.join(format!("{program}.environment"))).unwrap_or_default();
        assert!(!text.contains("/proc/self/cwd"), "{what}: {program}: {text}");
    }
}

/// A container whose image sets all of [`HOSTILE_ENVIRONMENT`], with an x.so in its root and a configuration.
fn hostile<'a>(world: &'a World, id: &str, args: &[&str]) -> Bundle<'a> {
    let mut bundle = world.bundle(id, SHARE, args);
    bundle.spec["process"]["env"] = json!(HOSTILE_ENVIRONMENT);
    bundle.spec["root"]["path"] = json!(bundle.dir.join("rootfs"));
    for name in ["x.so", "config.toml", "sublet"] {
        fs::write(bundle.dir.join("rootfs").join(name), "[nonsense\n").expect("a file of the image's");
    }
    bundle
}

#[test]
fn a8_the_images_environment_reaches_no_hook() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "[share.small]\nsm = 25\n");
    let own = Own::new(&world);
    // Podman's: the hooks that precreate puts into config.json.
    let mut podmans = hostile(&world, "podmans", SLEEP);
    podmans.spec = precreated(own.command(&world, "sublet-hook"), &podmans.spec);
    podmans.plain = true;
    podmans.up();
    assert_eq!(world.leases().len(), 1);
    podmans.down();
    own.assert_clean("sublet-hook", 2, "precreate");
    // The hook that `run` adds.
    let alone = hostile(&world, "alone", &["/bin/true"]);
    alone.write();
    let mut run = own.command(&world, "sublet-runtime");
    let status = run.args(world.runtime().get_args()).arg("run").arg("--bundle").arg(&alone.dir).arg("alone");
    assert!(status.status().expect("it runs").success());
    own.assert_clean("sublet-hook", 3, "run");
    world.assert_empty();
    // The hooks of sublet's CDI devices.
    world.generate_cdi();
    let spec = fs::read(world.dir.path().join("cdi/sublet.json")).expect("the specification");
    let spec: Value = serde_json::from_slice(&spec).expect("JSON");
    for device in spec["devices"].as_array().expect("devices") {
        for hook in device["containerEdits"]["hooks"].as_array().expect("hooks") {
            assert!(hook["env"].as_array().is_some_and(|env| !env.is_empty()), "{hook}");
        }
    }
}

/// The second line of defence: if an engine passes the image's environment to a hook after all, the hook does not pass
/// it on.
#[test]
fn a8_a_hook_hands_no_environment_on_and_looks_at_no_working_directory() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let own = Own::new(&world);
    let bundle = hostile(&world, "handed", SLEEP);
    // It has no inventory yet: the hook calls `sublet`. And `sublet` starts the daemon of the container's share.
    let mut hook = own.command(&world, "sublet-hook");
    hook.current_dir(bundle.dir.join("rootfs"));
    for variable in HOSTILE_ENVIRONMENT.iter().filter(|variable| !variable.starts_with("SUBLET_CONFIG")) {
        let (name, value) = variable.split_once('=').expect("a variable");
        hook.env(name, value);
    }
    let edited = precreated(hook, &bundle.spec);
    assert!(edited["annotations"]["sublet.lease"].is_string(), "{edited}");
    own.assert_clean("sublet", 1, "called by the hook");
    let directories = fs::read_to_string(own.0.join("sublet.directory")).expect("it was called");
    assert!(directories.lines().all(|directory| directory == "/"), "{directories}");
    for daemon in daemons(&world) {
        let environment = String::from_utf8_lossy(&fs::read(daemon).unwrap_or_default()).into_owned();
        assert!(
            !environment.contains("/proc/self/cwd") && !environment.contains("RUST_LOG"),
            "{environment}"
        );
    }
}

/// The environments of this world's MPS processes, in /proc.
fn daemons(world: &World) -> Vec<PathBuf> {
    let pid = |server: &Value| PathBuf::from(format!("/proc/{}/environ", server["pid"]));
    world.status()["mps"].as_array().expect("mps").iter().map(pid).collect()
}
