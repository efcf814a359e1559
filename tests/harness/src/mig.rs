//! Containers on MIG devices of `a100x2-mig`: two A100-40GB. The first has 4g.20gb (GPU instance 2), 2g.10gb with two
//! compute instances (GPU instance 3), and 1g.5gb (GPU instance 9).

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::{Bundle, World};

/// A program that holds a context.
pub const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
/// A program without a context.
pub const SLEEP: &[&str] = &["/bin/sleep", "120"];

/// The 4g.20gb.
pub const LARGE: &str = "MIG-5b1e7000-0000-5000-8000-000000000a01";
/// The first compute instance of the 2g.10gb.
pub const FIRST: &str = "MIG-5b1e7000-0000-5000-8000-000000000a02";
/// The second compute instance of the 2g.10gb.
pub const SECOND: &str = "MIG-5b1e7000-0000-5000-8000-000000000a03";
/// The 1g.5gb.
pub const SMALL: &str = "MIG-5b1e7000-0000-5000-8000-000000000a04";

/// UUID, capabilities, SMs and MiB; for a compute instance, the MiB of its GPU instance.
pub const DEVICES: [(&str, [u32; 2], u32, u64); 4] = [
    (LARGE, [21, 22], 56, 20_096),
    (FIRST, [30, 31], 14, 9_984),
    (SECOND, [30, 32], 14, 9_984),
    (SMALL, [84, 85], 14, 4_864),
];

/// An entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// `sublet-runtime`.
    Shim,
    /// Podman's hook.
    Precreate,
    /// A hook that runs for the live container.
    Prestart,
}

/// The host, with `extra` added to the configuration.
#[must_use]
pub fn world(extra: &str) -> World {
    World::simulated("a100x2-mig", extra)
}

/// The same host with another line in its topology.
#[must_use]
pub fn altered(dir: &tempfile::TempDir, change: impl Fn(String) -> String, extra: &str) -> World {
    let shipped = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../sim/topologies/a100x2-mig.toml");
    let text = change(std::fs::read_to_string(shipped).expect("the topology"));
    let file = dir.path().join("topology.toml");
    std::fs::write(&file, text).expect("written");
    World::simulated(file.to_str().expect("UTF-8"), extra)
}

/// A running container that got its share through `by`.
#[must_use]
pub fn created<'a>(
    world: &'a World,
    id: &str,
    by: By,
    annotations: &[(&str, &str)],
    args: &[&str],
) -> Bundle<'a> {
    let mut bundle = world.bundle(id, annotations, args);
    match by {
        By::Shim => {}
        By::Precreate => bundle.precreate(),
        By::Prestart => bundle.hook(&["prestart", "poststop"]),
    }
    bundle.up();
    bundle
}

/// A running container with a context, started through the shim.
#[must_use]
pub fn up<'a>(world: &'a World, id: &str, annotations: &[(&str, &str)]) -> Bundle<'a> {
    let bundle = created(world, id, By::Shim, annotations, HOLD);
    let info = bundle.event("info");
    assert_eq!(info["error"], Value::Null, "{id}: {info}");
    bundle
}

/// The devices of all leases.
#[must_use]
pub fn devices(world: &World) -> Vec<String> {
    let device = |lease: &Value| lease["device"].as_str().expect("a UUID").to_owned();
    world.leases().iter().map(device).collect()
}

/// The message with which a container is refused.
#[must_use]
pub fn refused(world: &World, annotations: &[(&str, &str)]) -> String {
    world.bundle("refused", annotations, HOLD).refused()
}

/// The output of nvidia-smi.
#[must_use]
pub fn smi(world: &World, arguments: &[&str]) -> String {
    let program = world.driver_root.as_ref().expect("simulated").join("usr/bin/nvidia-smi");
    let output = Command::new(program).args(arguments).output().expect("nvidia-smi runs");
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Destroys the 1g.5gb and creates it again: same place and ids, another UUID.
pub fn remake_small(world: &World) {
    let _ = smi(world, &["mig", "-i", "0", "-dci", "-gi", "9", "-ci", "0"]);
    let _ = smi(world, &["mig", "-i", "0", "-dgi", "-gi", "9"]);
    let _ = smi(world, &["mig", "-i", "0", "-cgi", "1g.5gb", "-C"]);
}

/// The results of opening nodes that the container created, each (major, minor).
#[must_use]
pub fn rights(bundle: &Bundle<'_>, nodes: &[(u32, u32)]) -> Vec<String> {
    let made =
        nodes.iter().map(|(major, minor)| format!("mknod /tmp/n{major}-{minor} c {major} {minor} && "));
    let paths = nodes.iter().map(|(major, minor)| format!(" /tmp/n{major}-{minor}"));
    let script =
        format!("{}exec cuda-probe noderights{}", made.collect::<String>(), paths.collect::<String>());
    let seen = bundle.exec(&["/bin/sh", "-c", &script]);
    let results: Vec<_> = seen.json().into_iter().filter(|line| line["event"] == "node").collect();
    assert_eq!(results.len(), nodes.len(), "{seen:?}");
    results.iter().map(|line| line["result"].as_str().expect("a result").to_owned()).collect()
}

/// The nodes that the container was given.
#[must_use]
pub fn nodes(bundle: &Bundle<'_>) -> String {
    let script = "cd /dev; for n in nvidia* nvidia-caps/*; do [ -c $n ] && echo $n; done";
    bundle.exec(&["/bin/sh", "-c", script]).stdout.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The output of `sublet mig list` about a GPU.
#[must_use]
pub fn listed(world: &World, gpu: usize) -> Value {
    let output = world.sublet(&["mig", "list", "--format", "json"]);
    assert!(output.status.success(), "{output:?}");
    let all: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    all[gpu].clone()
}

/// The instances of a GPU, such as `4g.20gb@0 2g.10gb@4[1c,1c]`: profile, placement, and the compute instances if
/// there are several.
#[must_use]
pub fn shape(gpu: &Value) -> String {
    let one = |one: &Value| {
        let name = |value: &Value| value["profile"].as_str().unwrap_or_default().to_owned();
        let parts: Vec<_> = one["compute"].as_array().expect("compute").iter().map(name).collect();
        let short = |part: &String| part.split('.').next().unwrap_or_default().to_owned();
        let cut = if parts == [name(one)] {
            String::new()
        } else {
            format!("[{}]", parts.iter().map(short).collect::<Vec<_>>().join(","))
        };
        format!("{}@{}{cut}", name(one), one["placement"]["start"])
    };
    gpu["instances"].as_array().expect("instances").iter().map(one).collect::<Vec<_>>().join(" ")
}

/// A process on the host with a context on a MIG device.
#[must_use]
pub fn process_on(world: &World, mig: &str) -> Child {
    let root = world.driver_root.as_ref().expect("simulated");
    let libraries = root.join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH));
    let mut command = Command::new(root.join("usr/bin/cuda-probe"));
    command.args(["hold", "300"]).env("SUBLET_SIM_DEV", root.join("dev")).env("LD_LIBRARY_PATH", libraries);
    command.env("CUDA_VISIBLE_DEVICES", mig).env("CUDA_MPS_PIPE_DIRECTORY", "/nowhere");
    let mut child = command.stdout(Stdio::piped()).spawn().expect("it runs");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
    assert!(line.contains("\"error\":null"), "{line}");
    child
}

/// The instances of GPU 0 in the driver's /proc. No sublet command is used, because that would first correct them.
#[must_use]
pub fn bare(world: &World) -> Vec<String> {
    let dir = world.driver_root.as_ref().expect("simulated").join("proc/driver/nvidia/capabilities/gpu0/mig");
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.retain(|name| name.starts_with("gi"));
    names.sort();
    names
}

/// The ledger as recorded, without a sublet command that would first correct it.
#[must_use]
pub fn ledger(world: &World) -> Value {
    let text = std::fs::read(world.state_dir().join("ledger.json")).expect("a ledger");
    serde_json::from_slice(&text).expect("JSON")
}

/// Checks that there is no instance, no recorded instance and no change in progress.
pub fn assert_nothing_made(world: &World) {
    assert_eq!(bare(world), Vec::<String>::new());
    assert_eq!(ledger(world)["mig"]["dynamic_instances"], Value::Null);
    assert_eq!(ledger(world)["mig"]["under_way"], Value::Null);
}

/// Sets the results of the next NVML calls in all processes (tests/sim/src/nvml/faults.rs).
pub fn fail(world: &World, line: &str) {
    let file = world.driver_root.as_ref().expect("simulated").join("sim/fail");
    std::fs::write(file, format!("{line}\n")).expect("written");
}

/// Runs `sublet gc` and returns its output.
#[must_use]
pub fn gc(world: &World) -> String {
    let output = world.sublet(&["gc"]);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

/// This process's namespaces in the ledger's format, for ledgers that a test writes.
#[must_use]
pub fn namespaces() -> Value {
    let inode = |name: &str| -> u64 {
        let link = std::fs::read_link(format!("/proc/self/ns/{name}")).expect("a namespace");
        let digits = link.to_str().and_then(|link| link.split(['[', ']']).nth(1)?.parse().ok());
        digits.expect("an inode")
    };
    json!({"pid": inode("pid"), "time": inode("time")})
}
