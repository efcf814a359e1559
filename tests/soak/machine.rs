//! What there is on the machine of one world: processes and mounts, read from /proc alone.

use std::collections::BTreeSet;
use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sublet_e2e::World;

fn read(pid: Pid, name: &str) -> String {
    let text = std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
    String::from_utf8_lossy(&text).replace('\0', " ")
}

fn all() -> impl Iterator<Item = Pid> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).map(Pid::from_raw)
}

fn is_of(world: &World, pid: Pid) -> bool {
    let dir = world.dir.path().to_string_lossy();
    read(pid, "cmdline").contains(&*dir) || read(pid, "environ").contains(&*dir)
}

/// This world's processes whose program is named `name`.
pub fn named(world: &World, name: &str) -> Vec<Pid> {
    let short: String = name.chars().take(15).collect();
    let own = Pid::this();
    all()
        .filter(|pid| *pid != own && read(*pid, "comm").trim_end() == short)
        // dockerd's world is in its environment, its shim's in that of dockerd's.
        .filter(|pid| is_of(world, *pid) && sublet_e2e::is_alive(*pid))
        .collect()
}

/// MPS processes of this world of one kind: `mps-control`, `mps-server`.
pub fn daemons(world: &World, kind: &str) -> Vec<Pid> {
    let mut found = named(world, "nvidia-cuda-mps");
    found.retain(|pid| read(*pid, "cmdline").contains(kind));
    found
}

/// Ends what is left of a `crun create` that was killed before it wrote its record: a process that waits for a `start`
/// that nobody can give.
pub fn end_orphan(world: &World, container: &str) {
    for pid in named(world, "crun") {
        let waits = read(pid, "cmdline").split(' ').any(|argument| argument == "create");
        if waits && read(pid, "cgroup").lines().any(|path| path.ends_with(&format!("-{container}"))) {
            println!("soak: process {pid}, which crun has left, is ended");
            let _ = kill(pid, Signal::SIGKILL);
        }
    }
}

/// Processes of sublet's own programs, with the seconds that they have run.
pub fn of_sublet(world: &World) -> Vec<(Pid, String, u64)> {
    let uptime = uptime();
    let mut found = Vec::new();
    for name in ["sublet", "sublet-runtime", "sublet-hook"] {
        for pid in named(world, name) {
            let stat = read(pid, "stat");
            let began =
                stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(19)?.parse::<u64>().ok());
            let seconds = uptime.saturating_sub(began.unwrap_or(0) / 100);
            found.push((pid, read(pid, "cmdline"), seconds));
        }
    }
    found
}

/// Seconds since boot.
pub fn uptime() -> u64 {
    uptime_milliseconds() / 1000
}

/// To a hundredth of a second, rounded down, as sublet's events have it.
pub fn uptime_milliseconds() -> u64 {
    let text = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
    let hundredths = text.split(' ').next().unwrap_or_default().replace('.', "");
    hundredths.parse::<u64>().unwrap_or(0) * 10
}

/// Mounts of this mount namespace with something of sublet's: files of the driver, the daemons' directories.
pub fn mounts(world: &World) -> BTreeSet<String> {
    let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let world = world.dir.path().file_name().expect("a name").to_string_lossy().into_owned();
    let ours = |line: &&str| {
        let mut fields = line.split(' ').skip(3);
        let (root, target) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        // Engines mount what is their own.
        [root, target].iter().any(|path| path.contains(&format!("{world}/sim")) || path.contains("/nvidia"))
    };
    // Without the ids, which change when the state directory comes back.
    text.lines().filter(ours).filter_map(|line| line.split(' ').nth(4)).map(str::to_owned).collect()
}

/// Thaws the cgroups whose names end so, all by an empty one: a runtime that is killed between freezing and thawing a
/// container leaves it frozen. Frozen processes do not end, nor does a start into such a cgroup.
pub fn thaw(cgroup: &Path, name: &str) {
    for (file, frozen, thawed) in [("freezer.state", "FROZEN", "THAWED"), ("cgroup.freeze", "1", "0")] {
        let file = cgroup.join(file);
        let is_its = cgroup.to_string_lossy().ends_with(name);
        if is_its && std::fs::read_to_string(&file).is_ok_and(|state| state.trim() == frozen) {
            println!("soak: {} is thawed", cgroup.display());
            let _ = std::fs::write(&file, thawed);
        }
    }
    let below = std::fs::read_dir(cgroup).into_iter().flatten().flatten();
    below
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .for_each(|entry| thaw(&entry.path(), name));
}
