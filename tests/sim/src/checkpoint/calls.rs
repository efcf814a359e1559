//! The caller's side: what libcuda's exported functions do.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::rules::{NOT_INITIALIZED, OPERATING_SYSTEM, State, UNKNOWN};
use super::{Ask, Call, Reply, THREAD, door};
use crate::layout::{Root, contexts, trailer};
use crate::mps::wire::Conn;
use crate::nvml::{Answer, faults, own_file};

/// Calls for a process: its state afterwards.
///
/// # Errors
/// A `CUresult`.
pub fn call(function: &str, pid: i32, call: Call) -> Answer<State> {
    let library = own_file().ok_or(UNKNOWN)?;
    let root = Root::of_library(&library).ok().flatten();
    let mut state = State::default();
    let answer = faults::around(root.as_ref(), faults::Call { function, gpu: None }, || {
        state = ask(&library, root.as_ref(), pid, call)?;
        Ok(())
    });
    if answer == Err(UNKNOWN) {
        ask(&library, root.as_ref(), pid, Call::Fail).ok();
    }
    answer.map(|()| state)
}

/// The thread that restores a process, as /proc numbers it here.
///
/// # Errors
/// A `CUresult`.
pub fn restore_thread(function: &str, pid: i32) -> Answer<i32> {
    call(function, pid, Call::GetState)?;
    let threads = fs::read_dir(format!("/proc/{pid}/task")).map_err(|_| OPERATING_SYSTEM)?;
    let is_it = |dir: &Path| fs::read_to_string(dir.join("comm")).is_ok_and(|name| name.trim() == THREAD);
    let found = threads.flatten().find(|thread| is_it(&thread.path()));
    found.and_then(|thread| thread.file_name().to_str()?.parse().ok()).ok_or(NOT_INITIALIZED)
}

fn ask(library: &Path, root: Option<&Root>, pid: i32, call: Call) -> Answer<State> {
    let tag = trailer::read(library).ok_or(UNKNOWN)?.tag;
    let door = door::find(&tag, pid)?;
    let ask = match call {
        Call::Checkpoint | Call::Restore(_) => Ask::seen_from_here(call, &tag, root, pid),
        _ => Ask { call, used_mib: BTreeMap::new(), host_mib: None, pace: pace(root) },
    };
    let (near, far) = Conn::pair().map_err(|_| OPERATING_SYSTEM)?;
    door.send_with(&ask, &far).map_err(|_| OPERATING_SYSTEM)?;
    drop(far);
    // A process that ends meanwhile answers nothing.
    let (reply, _) = near.recv::<Reply>().ok_or(OPERATING_SYSTEM)?;
    if reply.killed {
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
    reply.answer.map(|()| reply.state)
}

impl Ask {
    fn seen_from_here(call: Call, tag: &str, root: Option<&Root>, pid: i32) -> Self {
        let mut used_mib = BTreeMap::new();
        for held in contexts::told(tag, root) {
            *used_mib.entry(held.on.minor).or_default() += held.mib;
        }
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        Self { call, used_mib, host_mib: left(Path::new("/sys/fs/cgroup"), &groups), pace: pace(root) }
    }
}

/// Percent of the measured times.
fn pace(root: Option<&Root>) -> u64 {
    let pace = root.and_then(|root| fs::read_to_string(root.join("sim/checkpoint-pace")).ok());
    pace.and_then(|pace| pace.trim().parse().ok()).unwrap_or(100)
}

/// MiB that these cgroups (`/proc/PID/cgroup`) and those above them leave, of v2, or of v1's hierarchy for memory.
fn left(mounted: &Path, groups: &str) -> Option<u64> {
    let of_line = |line: &str| {
        let (controllers, group) = line.split_once(':')?.1.split_once(':')?;
        let (dir, files) = match controllers {
            "" => (mounted.to_owned(), ["memory.max", "memory.current"]),
            "memory" => (mounted.join("memory"), ["memory.limit_in_bytes", "memory.usage_in_bytes"]),
            _ => return None,
        };
        let of_group = |group: &Path| {
            let group = dir.join(group.strip_prefix("/").ok()?);
            let read = |name| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
            let [limit, used] = files.map(read);
            Some(limit?.saturating_sub(used?) >> 20)
        };
        Path::new(group).ancestors().filter_map(of_group).min()
    };
    groups.lines().filter_map(of_line).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_limit_of_either_version_counts() {
        let dir = tempfile::tempdir().unwrap();
        let group = |path: &str, files: [(&str, &str); 2]| {
            fs::create_dir_all(dir.path().join(path)).unwrap();
            for (name, text) in files {
                fs::write(dir.path().join(path).join(name), format!("{text}\n")).unwrap();
            }
        };
        let mib = |number: u64| (number << 20).to_string();
        group("pod", [("memory.max", &mib(300)), ("memory.current", &mib(100))]);
        group("pod/one", [("memory.max", "max"), ("memory.current", &mib(60))]);
        group("memory/old", [("memory.limit_in_bytes", &mib(64)), ("memory.usage_in_bytes", &mib(65))]);
        assert_eq!(left(dir.path(), "0::/pod/one\n"), Some(200));
        assert_eq!(left(dir.path(), "3:cpu:/pod\n0::/elsewhere\n"), None);
        assert_eq!(left(dir.path(), "9:memory:/old\n0::/pod\n"), Some(0));
    }
}
