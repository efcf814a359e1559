//! `sublet setup` on the configurations of real engines: with it containers get their share, after its undo
//! the engine knows nothing of sublet and the file is what it was.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use serde_json::json;
use sublet_e2e::docker::{self, Docker, skip_unless_engines};
use sublet_e2e::podman::{self, Podman};
use sublet_e2e::{World, bin_dir, eventually, programs, skip_unless_root};

const SHARE: [&str; 2] = ["sublet.sm=25", "sublet.memory=8GiB"];
const PROBE: [&str; 2] = ["cuda-probe", "info"];

/// `sublet setup`, which must succeed.
fn setup(world: &World, arguments: &[&str]) {
    let output = world.sublet(&[&["setup"], arguments].concat());
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn docker_knows_sublet_after_setup_and_not_after_its_undo() {
    if skip_unless_engines() {
        return;
    }
    let mut docker = Docker::up(World::simulated("h200", ""), &json!({"runtimes": {}, "features": {}}));
    let file = docker.world.dir.path().join("daemon.json");
    let found = fs::read(&file).expect("daemon.json");
    let path = file.to_str().expect("UTF-8").to_owned();
    let unknown = docker.run("early", &SHARE, &["--rm"], &PROBE);
    assert!(!unknown.ok && unknown.stderr.contains("unknown or invalid runtime name: sublet"), "{unknown:?}");
    setup(&docker.world, &["docker", "--config", &path]);
    docker.hang_up();
    assert!(eventually(|| docker.ask(&["info", "--format", "{{json .Runtimes}}"]).contains("\"sublet\"")));
    let held = docker.hold("held", &SHARE, &[]);
    assert_eq!(docker.event("held", "info")["sm"], json!(32));
    assert!(docker.lease(&held).is_some());
    docker.done(&["rm", "-f", "held"]);
    let default = |docker: &Docker| docker.ask(&["info", "--format", "{{.DefaultRuntime}}"]);
    setup(&docker.world, &["docker", "--config", &path, "--default"]);
    docker.hang_up();
    assert!(eventually(|| default(&docker) == "sublet"));
    let options =
        ["run", "--rm", "--network=none", "--annotation", SHARE[0], docker::IMAGE, PROBE[0], PROBE[1]];
    let info = docker.cli(&options);
    assert_eq!(info.json()[0]["sm"], json!(32), "{info:?}");
    // What only a restart puts in force.
    setup(&docker.world, &["docker", "--config", &path, "--default", "--cdi"]);
    docker.restart();
    assert!(docker.ask(&["info", "--format", "{{json .CDISpecDirs}}"]).contains("cdi"));
    setup(&docker.world, &["docker", "--config", &path, "--undo"]);
    assert_eq!(fs::read(&file).expect("daemon.json"), found, "every byte is as it was");
    assert!(!Path::new(&format!("{path}.before-sublet")).exists());
    docker.restart();
    assert_eq!(default(&docker), "runc");
    let gone = docker.run("late", &SHARE, &["--rm"], &PROBE);
    assert!(!gone.ok && gone.stderr.contains("unknown or invalid runtime name: sublet"), "{gone:?}");
    docker.world.assert_empty();
}

#[test]
fn podman_knows_sublet_after_setup_and_not_after_its_undo() {
    if skip_unless_engines() {
        return;
    }
    let podman = Podman::up(World::simulated("h200", ""));
    let dir = podman.world.dir.path();
    // As on a machine: the settings in /etc, the hook where packages put it.
    let text = fs::read_to_string(dir.join("containers.conf")).expect("containers.conf");
    let ours = |line: &&str| {
        !["hooks_dir", "runtime_supports", "[engine.run", "sublet"].iter().any(|at| line.starts_with(at))
    };
    let plain: Vec<&str> = text.lines().filter(ours).collect();
    fs::create_dir_all("/usr/share/sublet/hooks.d").expect("a directory");
    fs::create_dir_all("/etc/containers").expect("a directory");
    fs::write("/etc/containers/containers.conf", plain.join("\n")).expect("written");
    fs::write("/usr/share/sublet/hooks.d/sublet.json", podman.hook().to_string()).expect("written");
    let run = |options: &[&str]| {
        let mut command = podman.command();
        command.env_remove("CONTAINERS_CONF").args(["run", "--rm", "--annotation", SHARE[0]]).args(options);
        command.arg(podman::IMAGE).args(PROBE);
        sublet_e2e::Finished::of(&command.output().expect("podman runs"))
    };
    let no_share = |finished: &sublet_e2e::Finished| !finished.stdout.contains("\"sm\":32");
    assert!(no_share(&run(&[])), "no share before the setup");
    // The link of sublet-podman to a drop-in that is not enough: it names other programs than these.
    let (packaged, drop_in) =
        ("/usr/share/sublet/containers.conf", "/etc/containers/containers.conf.d/sublet.conf");
    let theirs = include_str!("../../hooks/containers.conf");
    fs::create_dir_all("/etc/containers/containers.conf.d").expect("a directory");
    fs::write(packaged, theirs).expect("written");
    std::os::unix::fs::symlink(packaged, drop_in).expect("a link");
    setup(&podman.world, &["podman"]);
    assert!(fs::symlink_metadata(drop_in).expect("a drop-in").is_file(), "a file in the link's place");
    assert_eq!(fs::read_to_string(packaged).expect("theirs"), theirs, "the package's file is not written");
    let info = run(&[]);
    assert_eq!(info.json()[0]["sm"], json!(32), "{info:?}");
    let mut known = podman.command();
    known.env_remove("CONTAINERS_CONF").args([
        "--runtime",
        "sublet",
        "info",
        "--format",
        "{{.Host.OCIRuntime.Path}}",
    ]);
    let path = String::from_utf8(known.output().expect("podman runs").stdout).expect("UTF-8");
    assert_eq!(path.trim_end(), bin_dir().join("sublet-runtime").to_str().expect("UTF-8"));
    setup(&podman.world, &["podman", "--undo"]);
    assert!(!Path::new(drop_in).exists());
    assert!(no_share(&run(&[])), "no share after the undo");
    podman.world.assert_empty();
}

#[test]
fn containerd_reads_what_setup_writes() {
    if skip_unless_engines() {
        return;
    }
    let world = World::simulated("h200", "");
    let file = world.dir.path().join("config.toml.containerd");
    let path = file.to_str().expect("UTF-8");
    let containerd = |arguments: &[&str]| {
        let output = Command::new("containerd").args(arguments).output().expect("containerd is installed");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let default = containerd(&["config", "default"]);
    fs::write(&file, &default).expect("written");
    setup(&world, &["containerd", "--config", path, "--default", "--cdi"]);
    let read = containerd(&["--config", path, "config", "dump"]);
    for line in [
        "default_runtime_name = \"sublet\"",
        "enable_cdi = true",
        "pod_annotations = [\"sublet.*\", \"sublet.*/*\"]",
        &format!("BinaryName = \"{}\"", bin_dir().join("sublet-runtime").display()),
    ] {
        assert!(read.contains(line), "{line} is not in {read}");
    }
    setup(&world, &["containerd", "--config", path, "--undo"]);
    assert_eq!(fs::read_to_string(&file).expect("config.toml"), default);
    assert!(!Path::new(&format!("{path}.before-sublet")).exists());
}

#[test]
fn a_file_that_dockerd_would_not_start_with_is_refused_with_the_flag() {
    if skip_unless_engines() {
        return;
    }
    let with_flag = ["sh", "-c", "exec \"$@\" --default-runtime=runc", "sh"].map(str::to_owned).to_vec();
    let docker = Docker::up_in(World::simulated("h200", ""), &json!({"runtimes": {}}), with_flag);
    let file = docker.world.dir.path().join("daemon.json");
    let before = fs::read_to_string(&file).expect("daemon.json");
    let path = file.to_str().expect("UTF-8").to_owned();
    let refused = docker.world.sublet(&["setup", "docker", "--default", "--config", &path]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("--default-runtime=runc of the running dockerd"), "{said}");
    assert_eq!(fs::read_to_string(&file).expect("daemon.json"), before);
    setup(&docker.world, &["docker", "--config", &path]);
    let after = fs::read_to_string(&file).expect("daemon.json");
    assert!(after.contains("sublet-runtime") && !after.contains("default-runtime"), "{after}");
    // It is right about dockerd.
    let valid = |text: &str| {
        let copy = docker.world.dir.path().join("copy.json");
        fs::write(&copy, text).expect("written");
        let mut dockerd = Command::new("dockerd");
        dockerd.args(["--validate", "--default-runtime=runc", "--config-file"]).arg(copy);
        dockerd.output().expect("dockerd").status.success()
    };
    assert!(valid(&after) && !valid(&after.replacen('{', "{\"default-runtime\": \"sublet\",", 1)));
}

#[test]
fn an_imported_file_that_replaces_sublets_table_is_named() {
    if skip_unless_engines() {
        return;
    }
    let world = World::simulated("h200", "");
    let dir = world.dir.path().join("containerd");
    fs::create_dir_all(dir.join("conf.d")).expect("a directory");
    let (main, drop_in) = (dir.join("config.toml"), dir.join("conf.d/99-nvidia.toml"));
    fs::write(&main, "version = 2\nimports = [\"conf.d/*.toml\"]\n").expect("written");
    let path = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let (main, drop_in) = (path(&main), path(&drop_in));
    let knows = || {
        let dump = Command::new("containerd")
            .args(["--config", &main, "config", "dump"])
            .output()
            .expect("containerd");
        String::from_utf8_lossy(&dump.stdout).contains("sublet-runtime")
    };
    // It adds, and replaces nothing.
    fs::write(&drop_in, "version = 2\n[metrics]\naddress = \"127.0.0.1:1338\"\n").expect("written");
    setup(&world, &["containerd", "--config", &main]);
    assert!(knows());
    setup(&world, &["containerd", "--config", &main, "--undo"]);
    let nvidia =
        "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\ndefault_runtime_name = \"runc\"\n";
    fs::write(&drop_in, nvidia).expect("written");
    let before = fs::read_to_string(&main).expect("config.toml");
    let refused = world.sublet(&["setup", "containerd", "--config", &main]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && said.contains("99-nvidia.toml"), "{said}");
    assert_eq!(fs::read_to_string(&main).expect("config.toml"), before);
    // As it says.
    setup(&world, &["containerd", "--config", &drop_in]);
    assert!(knows());
}

#[test]
fn a_read_only_etc_and_a_user_who_is_not_root_are_told_what_to_do() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let script = "mount --bind \"$1\" \"$1\" && mount -o remount,bind,ro \"$1\" && shift && exec \"$@\"";
    let file = world.dir.path().join("etc/daemon.json");
    fs::create_dir_all(file.parent().expect("a directory")).expect("a directory");
    fs::write(&file, "{}").expect("daemon.json");
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh"]).arg(file.parent().expect("a directory"));
    command.arg(bin_dir().join("sublet")).args(["setup", "docker", "--config"]).arg(&file);
    let refused = command.env("SUBLET_CONFIG", &world.config).output().expect("unshare runs");
    let line = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!((refused.status.code(), line.lines().count()), (Some(1), 1), "{line}");
    assert!(line.contains("read-only file system") && line.contains("--dry-run"), "{line}");
    let dry = command.arg("--dry-run").output().expect("unshare runs");
    assert!(dry.status.success() && String::from_utf8_lossy(&dry.stdout).contains("+{"), "{dry:?}");
    assert_eq!(fs::read_to_string(&file).expect("daemon.json"), "{}");
    // A user who runs Docker without root.
    let copy = world.dir.path().join("sublet");
    programs::copy(&bin_dir().join("sublet"), &copy);
    fs::set_permissions(world.dir.path(), fs::Permissions::from_mode(0o755)).expect("chmod");
    let user = Command::new(&copy).args(["setup", "docker"]).uid(1000).output().expect("it runs");
    let line = String::from_utf8_lossy(&user.stderr).into_owned();
    assert_eq!((user.status.code(), line.lines().count()), (Some(1), 1), "{line}");
    assert!(
        line.contains("rootless Docker reads another file: --config ~/.config/docker/daemon.json"),
        "{line}"
    );
    assert!(line.contains("CDI devices and containers.toml do not work"), "{line}");
}
