//! `sublet bench run` on the simulated driver, what it wrote, and what it left.

use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::processes;
use crate::world::{World, bin_dir};

/// `sublet bench run` with a temporary directory that [`nothing_is_left`] looks into, and a /dev that has the simulated
/// GPU's nodes: processes by hand look there.
#[must_use]
pub fn command(world: &World, file: &str) -> Command {
    let enter = "mount -t tmpfs tmpfs /mnt && cp -a /dev/null /dev/zero /dev/random /dev/urandom \"$0\"/dev/nvidia* /mnt && \
                 mount --move /mnt /dev && exec \"$@\"";
    let temporary = world.dir.path().join("tmp");
    std::fs::create_dir_all(&temporary).expect("a directory");
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", enter]).arg(world.driver_root.as_ref().expect("simulated"));
    command.arg(bin_dir().join("sublet")).args(["bench", "run", "--engine", "runtime", "--warm-up", "100ms"]);
    command.arg("--output").arg(world.dir.path().join(file));
    command.env("SUBLET_CONFIG", &world.config).env("TMPDIR", temporary).stdin(Stdio::null());
    command
}

/// A short measurement into `file` in the world's directory.
#[must_use]
pub fn bench(world: &World, file: &str, more: &[&str]) -> Output {
    command(world, file).args(["--time", "300ms"]).args(more).output().expect("it runs")
}

/// The document in `file` in the world's directory.
#[must_use]
pub fn result(world: &World, file: &str) -> Value {
    let path = world.dir.path().join(file);
    serde_json::from_slice(&std::fs::read(&path).expect("a result")).expect("JSON")
}

/// Standard error.
#[must_use]
pub fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Checks that no lease, no bundle, no container, no process and no MPS daemon is left.
pub fn nothing_is_left(world: &World) {
    let leases = world.sublet(&["lease", "list", "--format", "json"]);
    assert_eq!(serde_json::from_slice::<Value>(&leases.stdout).expect("JSON"), Value::Array(Vec::new()));
    let temporary = world.dir.path().join("tmp");
    let left: Vec<_> = std::fs::read_dir(&temporary).into_iter().flatten().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
    let temporary = temporary.to_str().expect("UTF-8");
    let list = Command::new(world.engine.program()).args(["list", "--format", "json"]).output();
    let containers = String::from_utf8_lossy(&list.expect("it runs").stdout).into_owned();
    assert!(!containers.contains(temporary), "{containers}");
    // The root of such a container is a mount of its own, from this directory.
    let inside = processes::all().filter(|pid| processes::read(*pid, "mountinfo").contains(temporary));
    let inside: Vec<String> = inside.map(|pid| processes::read(pid, "cmdline")).collect();
    assert_eq!(inside, Vec::<String>::new());
    assert_eq!(world.daemons(), Vec::<String>::new());
}
