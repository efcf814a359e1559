//! Kills parts of an engine by SIGKILL, and finds what is left of it. A world's processes are recognized by the path
//! of its directory on their command line, in their environment or as their root.

use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::processes::{self, is_alive};
use crate::world::{World, eventually};

/// The processes of the world's containers: they have their own PID namespace, and their root is in the world's
/// directory. (Before the root is set, their mount table is a copy of the host's and has other worlds' mounts in it.)
#[must_use]
pub fn contained(world: &World) -> Vec<Pid> {
    let own = std::fs::read_link("/proc/self/ns/pid").expect("/proc");
    let name = world.dir.path().file_name().expect("a name").to_string_lossy().into_owned();
    let elsewhere =
        |pid: &Pid| std::fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|theirs| theirs != own);
    // mountinfo, proc(5): id, parent, device, root within the filesystem, mount point.
    let is_root = |line: &str| {
        let fields: Vec<&str> = line.split(' ').collect();
        fields.get(4) == Some(&"/") && fields[3].contains(&name)
    };
    alive().filter(|pid| elsewhere(pid) && processes::read(*pid, "mountinfo").lines().any(is_root)).collect()
}

/// The world's engine processes whose program is named `program`, or all of them: engines, low-level runtimes, hooks
/// and shims. Processes that serve several containers, such as MPS daemons, are left out.
#[must_use]
pub fn engine(world: &World, program: Option<&str>) -> Vec<Pid> {
    let dir = world.dir.path().to_string_lossy().into_owned();
    let contained = contained(world);
    let ours = |pid: &Pid| {
        let (line, name) = (processes::read(*pid, "cmdline"), processes::read(*pid, "comm"));
        let daemon = name.starts_with("nvidia-cuda") && !line.starts_with("/bin/sh");
        let others = daemon || ["sublet\n", "catatonit\n"].contains(&name.as_str());
        let wanted = program.is_none_or(|program| name.trim_end() == program);
        wanted && !others && (line.contains(&dir) || processes::read(*pid, "environ").contains(&dir))
    };
    alive().filter(|pid| *pid != Pid::this() && !contained.contains(pid) && ours(pid)).collect()
}

/// Running helpers of this world: `sublet` commands called by an entry point or another command.
#[must_use]
pub fn helpers(world: &World) -> Vec<Pid> {
    let config = world.config.to_string_lossy().into_owned();
    let ours = |pid: &Pid| {
        processes::read(*pid, "comm") == "sublet\n" && processes::read(*pid, "environ").contains(&config)
    };
    alive().filter(ours).collect()
}

/// Kills the processes and waits until they are gone.
pub fn end(pids: &[Pid]) {
    for pid in pids {
        let _ = kill(*pid, Signal::SIGKILL);
    }
    assert!(eventually(|| !pids.iter().any(|pid| is_alive(*pid))), "killed and not gone");
}

/// Kills all processes of the world's engine and containers, until none is left.
pub fn end_all(world: &World) {
    let all = || [engine(world, None), contained(world)].concat();
    let gone = || {
        end(&all());
        all().is_empty()
    };
    assert!(eventually(gone), "they come again and again");
}

/// Checks that no MPS daemon is left. A stop in progress blocks other commands, on a busy machine for longer than they
/// wait, and may itself be killed half way. Then the next command ends the daemon.
pub fn assert_no_daemons(world: &World, at: &str) {
    world.stop_waiting();
    let mut said = Vec::new();
    let gone = || {
        let left = !world.daemons().is_empty();
        if left {
            said.push(world.sublet(&["gc"]));
        }
        !left
    };
    let gone = eventually(gone);
    assert!(gone, "{at}: {:?}; {} {:?}", world.daemons(), world.status(), said.last());
    if !said.is_empty() {
        eprintln!(
            "{at}: daemons outlived the first command; {} more, the first said {:?}",
            said.len(),
            said[0]
        );
    }
}

/// Empty files with names of driver files below `dir`: mount points that were not removed.
#[must_use]
pub fn mount_points(dir: &Path) -> String {
    let found = std::process::Command::new("find")
        .arg(dir)
        .args(["-type", "f", "-size", "0", "(", "-name", "libcuda*", "-o", "-name", "*nvidia*", ")"])
        .output()
        .expect("find runs");
    String::from_utf8_lossy(&found.stdout).into_owned()
}

fn alive() -> impl Iterator<Item = Pid> {
    processes::all().filter(|pid| is_alive(*pid))
}
