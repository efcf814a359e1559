//! sublet installed as by a package (`target/installed`, by `make install`), on the machine that tests/engines/systemd
//! boots.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::bundle::by_systemd;
use crate::world::World;

/// The exit status that makes tests/engines/systemd reboot the machine and run the test again.
pub const REBOOT: i32 = 75;
/// The same, without a shutdown.
pub const POWER_CUT: i32 = 76;

/// Settings for a machine that is itself a container.
const CONTAINERS: &str = "[containers]\ndefault_ulimits = [\"nofile=1024:1024\", \"nproc=4096:4096\"]\n\
    pids_limit = 0\nnetns = \"none\"\nlog_driver = \"k8s-file\"\n[engine]\nevents_logger = \"file\"\n\
    lock_type = \"file\"\n";
const STORAGE: &str = "[storage]\ndriver = \"vfs\"\nrunroot = \"/run/containers/storage\"\n\
    graphroot = \"/var/lib/containers/storage\"\n";
const DOCKER: &str = r#"{"iptables": false, "ip6tables": false, "bridge": "none", "storage-driver": "vfs",
    "runtimes": {"sublet": {"path": "/usr/bin/sublet-runtime"}}}"#;

/// Whether to skip the test because there is no machine to install on. Prints that it was skipped.
#[must_use]
pub fn skip_unless_installed() -> bool {
    let skips = !by_systemd() || !tree().exists();
    if skips {
        eprintln!("skipped: runs below tests/engines/systemd");
    }
    skips
}

fn tree() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/installed")
}

/// Installs sublet with the world's driver in its configuration, and with the default state directory.
pub fn install(world: &World) {
    let own = format!("state_dir = \"{}\"", world.state_dir().display());
    let text = std::fs::read_to_string(&world.config).expect("config.toml");
    let text = text.replace(&own, "state_dir = \"/run/sublet\"");
    std::fs::write(&world.config, &text).expect("config.toml");
    done(Command::new("cp").arg("-a").arg(tree().join(".")).arg("/"));
    write("/etc/sublet/config.toml", &text);
    let drop_in = std::fs::read_to_string("/usr/share/sublet/containers.conf").expect("it is installed");
    write("/etc/containers/containers.conf.d/sublet.conf", &drop_in);
}

/// Docker and Podman that keep their data over a reboot, each with the world's image as `probe`.
pub fn engines(world: &World) {
    write("/etc/containers/containers.conf", CONTAINERS);
    write("/etc/containers/storage.conf", STORAGE);
    write("/etc/docker/daemon.json", DOCKER);
    let image = world.dir.path().join("image.tar");
    world.rootfs.archive(&image);
    systemctl(&["enable", "--quiet", "docker.service"]);
    systemctl(&["restart", "docker.service"]);
    done(Command::new("docker").arg("import").arg(&image).arg("probe"));
    done(Command::new("podman").args(["import", "--quiet"]).arg(&image).arg("probe"));
}

/// Writes a file and creates its directories.
pub fn write(path: &str, text: &str) {
    std::fs::create_dir_all(Path::new(path).parent().expect("a directory")).expect("a directory");
    std::fs::write(path, text).expect("it is written");
}

/// Runs a command that must succeed, and returns its output.
pub fn done(command: &mut Command) -> String {
    let output = command.output().expect("it runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// `systemctl ARGS`, which must succeed.
pub fn systemctl(args: &[&str]) {
    let _ = done(Command::new("systemctl").args(args));
}

/// A property of a unit.
#[must_use]
pub fn show(unit: &str, property: &str) -> String {
    done(Command::new("systemctl").args(["show", "--value", "-p", property, unit])).trim().to_owned()
}
