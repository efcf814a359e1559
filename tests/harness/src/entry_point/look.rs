//! What a container sees from inside, and what it leaves on the host.

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::Value;

use super::{EntryPoint, Request};
use crate::processes::{self, read};
use crate::world::{World, eventually};

/// The GPU device minors in a topology of eight GPUs.
const MINORS: std::ops::Range<u32> = 0..8;

/// The reports of four processes in a container.
#[derive(Debug)]
pub struct Report {
    /// The first process, after it has printed its environment.
    pub first: Value,
    /// That environment, one variable per line.
    pub environment: Vec<String>,
    /// A process that the engine execs.
    pub exec: Value,
    /// A process started with `env -i`.
    pub bare: Value,
    /// A process run as a health check.
    pub health: Value,
    /// Names in /dev and /dev/dri that belong to a GPU.
    pub dev: Vec<String>,
    /// The result of opening a node that the container created for each GPU, by device minor.
    pub made: BTreeMap<u32, String>,
    /// The result of opening each node that the container was given.
    pub given: BTreeMap<String, String>,
    /// Names of the driver's files.
    pub files: Vec<String>,
}

impl Report {
    /// The first process of a container that reports: it prints its environment, then opens a context if it may.
    pub const PROGRAM: [&'static str; 3] =
        ["/bin/sh", "-c", "env; /usr/bin/cuda-probe hold 600 || exec sleep 600"];

    /// Collects the reports of a container that runs [`Self::PROGRAM`]. Engines take long for each command, so
    /// everything runs in a single exec.
    #[must_use]
    pub fn of(entry_point: &dyn EntryPoint, request: &Request) -> Self {
        let (output, first) = waited(|| with_info(entry_point.output(request)))
            .unwrap_or_else(|| panic!("no report: {}", entry_point.output(request)));
        let environment = output.lines().filter(|line| line.contains('=') && !line.starts_with('{'));
        let (_, health) = waited(|| with_info(entry_point.health(request)))
            .unwrap_or_else(|| panic!("no health check: {}", entry_point.health(request)));
        let seen = entry_point.exec(request, &["/bin/sh", "-c", &script()]);
        let part = |name: &str| {
            let mut parts = seen.stdout.split("== ").filter_map(|part| part.split_once('\n'));
            parts.find(|part| part.0 == name).unwrap_or_else(|| panic!("no {name}: {seen:?}")).1
        };
        let info = |name| info(part(name)).unwrap_or_else(|| panic!("no report: {seen:?}"));
        let nodes = nodes(part("nodes"));
        Self {
            first,
            environment: environment.map(str::to_owned).collect(),
            exec: info("exec"),
            bare: info("bare"),
            health,
            dev: words(part("dev")),
            made: nodes.iter().filter_map(|(path, result)| Some((minor(path)?, result.clone()))).collect(),
            given: nodes.into_iter().filter(|(path, _)| minor(path).is_none()).collect(),
            files: words(part("files")),
        }
    }
}

/// The path at which the container creates a node.
const MADE: &str = "/tmp/gpu";

fn minor(path: &str) -> Option<u32> {
    path.strip_prefix(MADE)?.parse().ok()
}

/// The script to exec. Its output has parts that begin with a line `== NAME`: processes with their normal environment
/// and with none, the names in /dev, a created node of every GPU and each node opened, and the driver's files that are
/// not empty, wherever they are.
fn script() -> String {
    let minors: Vec<String> = MINORS.map(|minor| minor.to_string()).collect();
    format!(
        "echo '== exec'; /usr/bin/cuda-probe info
echo '== bare'; /bin/env -i /usr/bin/cuda-probe info
echo '== dev'; cd /dev; for n in nvidia* dri/*; do [ -c $n ] && echo $n; done
echo '== nodes'; for m in {}; do mknod {MADE}$m c 195 $m 2>/dev/null; done
cuda-probe noderights {MADE}* /dev/nvidia*
echo '== files'; busybox find /usr /lib /lib64 /etc -type f -size +0c '(' -name '*nvidia*' -o -name 'libcuda*' \
-o -name 'libnv*' ')' 2>/dev/null | while read f; do echo ${{f##*/}}; done",
        minors.join(" ")
    )
}

/// The result of opening each node, by its path.
fn nodes(text: &str) -> BTreeMap<String, String> {
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let nodes = lines.filter(|line| line["event"] == "node");
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let found: BTreeMap<_, _> = nodes.map(|line| (text(&line["path"]), text(&line["result"]))).collect();
    // A shell pattern without matches stays as it is.
    found.into_iter().filter(|(path, _)| !path.ends_with('*')).collect()
}

fn info(text: &str) -> Option<Value> {
    let mut lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.find(|line| line["event"] == "info")
}

fn with_info(text: String) -> Option<(String, Value)> {
    let info = info(&text)?;
    Some((text, info))
}

/// Waits up to ten seconds for `ask` to find something.
fn waited<T>(ask: impl Fn() -> Option<T>) -> Option<T> {
    let mut found = None;
    eventually(|| {
        found = ask();
        found.is_some()
    });
    found
}

fn words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
    words.sort();
    words
}

/// Traces that a failed clean-up of containers leaves: sublet's mounts and processes, and empty files that were mount
/// points for the driver's.
#[must_use]
pub fn traces(world: &World) -> Vec<String> {
    let driver = world.driver_root.as_ref().expect("simulated").display().to_string();
    let dir = world.dir.path().display().to_string();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("/proc");
    let state = world.state_dir().display().to_string();
    let mut found: Vec<String> = mounts
        .lines()
        .filter(|line| line.contains(&driver) || line.contains(&state))
        .map(str::to_owned)
        .collect();
    let files = Command::new("find")
        .arg(&dir)
        .args(["-path", &driver, "-prune", "-o", "-type", "f", "-size", "0"])
        .args(["(", "-name", "*nvidia*", "-o", "-name", "libcuda*", "-o", "-name", "libnv*", ")", "-print"])
        .output()
        .expect("find runs");
    found.extend(String::from_utf8_lossy(&files.stdout).lines().map(str::to_owned));
    found.extend(programs(&dir));
    found
}

/// Running sublet programs, except the service, and probes in containers.
fn programs(dir: &str) -> Vec<String> {
    let left = |pid| {
        let (comm, command) = (read(pid, "comm"), read(pid, "cmdline"));
        let ours = comm.starts_with("sublet") || comm.starts_with("cuda-probe");
        let root = std::fs::read_link(format!("/proc/{pid}/root")).unwrap_or_default();
        let of_world = read(pid, "environ").contains(dir) || root.starts_with(dir);
        let is_left = ours && of_world && !command.contains(" serve") && !command.is_empty();
        is_left.then(|| format!("process {pid}: {command}"))
    };
    processes::all().filter_map(left).collect()
}
