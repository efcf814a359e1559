//! The state of the machine before a case, and what the case leaves behind.

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use sublet_e2e::is_alive;

use super::frame::Stage;

/// How long processes may take to end.
const PATIENCE: Duration = Duration::from_secs(5);

/// The machine before a case.
pub struct Before {
    state: PathBuf,
    config: Vec<u8>,
    containers: Vec<String>,
    leases: Option<Vec<Value>>,
    daemons: Vec<Pid>,
    mounts: Vec<String>,
}

impl Before {
    pub fn look(stage: &dyn Stage) -> Self {
        let dir = stage.world().state_dir();
        Self {
            config: std::fs::read(&stage.world().config).expect("config.toml"),
            containers: stage.containers(),
            leases: leases(&dir),
            daemons: daemons(stage),
            mounts: mounts(),
            state: dir,
        }
    }

    /// What a refused command has changed, although it must change nothing.
    pub fn changed(&self, stage: &dyn Stage) -> Vec<String> {
        let mut problems = Vec::new();
        let containers = stage.containers();
        if containers != self.containers {
            problems.push(format!("containers {containers:?}"));
        }
        // A ledger that cannot be read is checked after it has been repaired.
        match leases(&self.state) {
            Some(leases) if Some(&leases) != self.leases.as_ref() => {
                problems.push(format!("leases {leases:?}"));
            }
            _ => {}
        }
        problems
    }

    /// What is left after every container except the neighbour's is removed, and whether the neighbour is unharmed.
    pub fn left(&self, stage: &dyn Stage, harmed: bool) -> Vec<String> {
        let mut problems = Vec::new();
        let kept = stage.neighbour_id();
        for id in stage.containers().iter().filter(|id| **id != kept) {
            problems.extend(stage.remove(id).err());
        }
        let _ = stage.world().sublet(&["gc"]);
        // Where the case ended its daemon, this brings it back.
        let neighbour = stage.neighbour_share().check(&stage.neighbour());
        problems.extend(neighbour.err().map(|error| format!("the neighbour: {error}")));
        problems.extend(within_patience(|| self.unsettled(stage, harmed, &kept)));
        let strays = within_patience(|| strays(stage));
        if !strays.is_empty() {
            problems.push(format!("processes {strays:?}"));
        }
        let left: Vec<_> = mounts().into_iter().filter(|mount| !self.mounts.contains(mount)).collect();
        if !left.is_empty() {
            problems.push(format!("mounts {left:?}"));
        }
        problems
    }

    /// What `sublet gc` leaves in the ledger and of daemons. A hook goes on when its runtime has been killed, and only then ends
    /// what it began: it drops its environment, so it is none of the strays.
    fn unsettled(&self, stage: &dyn Stage, harmed: bool, kept: &str) -> BTreeSet<String> {
        let mut problems = BTreeSet::new();
        let gc = stage.world().sublet(&["gc"]);
        if !gc.status.success() {
            problems.insert(format!("sublet gc: {}", String::from_utf8_lossy(&gc.stderr)));
        }
        if leases(&self.state) != Some(vec![json!(kept)]) {
            problems.insert(format!("leases {:?}", leases(&self.state)));
        }
        let now = daemons(stage);
        if !harmed && now != self.daemons || now.len() != self.daemons.len() {
            problems.insert(format!("MPS processes {now:?}, before {:?}", self.daemons));
        }
        problems
    }
}

/// Undoes the case's changes to the machine: moved files, configuration, stopped processes.
pub fn put_back(stage: &dyn Stage, before: &Before) {
    for pid in daemons(stage) {
        let _ = kill(pid, Signal::SIGCONT);
    }
    // A container that a killed runtime has half created waits for ever. It runs the runtime's program, not yet its
    // own.
    let half_made = format!("{} --root", stage.world().engine.program());
    for (pid, line) in strays(stage) {
        if line.contains(&half_made) || line.contains(" create --bundle ") || line.ends_with("runc init") {
            let _ = kill(pid, Signal::SIGKILL);
        }
    }
    put_back_asides(stage.world().dir.path(), 6);
    let _ = std::fs::remove_file(&stage.world().config);
    std::fs::write(&stage.world().config, &before.config).expect("config.toml");
    std::fs::set_permissions(&stage.world().config, Permissions::from_mode(0o644)).expect("chmod");
    let _ = std::fs::create_dir(&before.state);
    chown(&before.state, Some(0), Some(0)).expect("chown");
    std::fs::set_permissions(&before.state, Permissions::from_mode(0o755)).expect("chmod");
}

/// Removes what is in the place of a file that was moved aside.
fn put_back_asides(dir: &Path, depth: usize) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "aside") {
            let place = path.with_extension("");
            let _ = std::fs::remove_file(&place).or_else(|_| std::fs::remove_dir_all(&place));
            std::fs::rename(&path, place).expect("it is put back");
        } else if depth > 0 && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            put_back_asides(&path, depth - 1);
        }
    }
}

/// The containers in the current ledger.
fn leases(state: &Path) -> Option<Vec<Value>> {
    let ledger: Value = serde_json::from_slice(&std::fs::read(state.join("ledger.json")).ok()?).ok()?;
    Some(ledger["leases"].as_array()?.iter().map(|lease| lease["container"]["id"].clone()).collect())
}

fn daemons(stage: &dyn Stage) -> Vec<Pid> {
    let mut pids = stage.world().daemon_pids("");
    pids.sort();
    pids
}

fn mounts() -> Vec<String> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
    table.lines().filter_map(|line| line.split(' ').nth(4)).map(str::to_owned).collect()
}

/// Processes of a case: those with its shell's variable, or in a container of this world.
fn strays(stage: &dyn Stage) -> BTreeSet<(Pid, String)> {
    let world = stage.world().dir.path().display().to_string();
    let kept = stage.neighbour_id();
    let (of_stage, of_neighbour) = (stage.cgroups(), stage.neighbour_cgroup());
    let read = |pid: i32, name: &str| {
        let text = std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        String::from_utf8_lossy(&text).replace('\0', " ").trim().to_owned()
    };
    let is_of_case = |pid: &i32| {
        let (cgroup, environ) = (read(*pid, "cgroup"), read(*pid, "environ"));
        let marked = environ.contains("SUBLET_CASE=") && environ.contains(&world);
        let inside = cgroup.contains(&of_stage) && !cgroup.contains(&of_neighbour);
        let line = read(*pid, "cmdline");
        let monitors = line.contains("conmon ") && line.contains(&world) && !line.contains(&kept);
        (marked || inside || monitors) && is_alive(Pid::from_raw(*pid))
    };
    let entries = std::fs::read_dir("/proc").expect("/proc").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(is_of_case).map(|pid| (Pid::from_raw(pid), read(pid, "cmdline"))).collect()
}

/// Waits until a list is empty, and returns what is left.
fn within_patience<T>(mut look: impl FnMut() -> BTreeSet<T>) -> BTreeSet<T> {
    let end = Instant::now() + PATIENCE;
    loop {
        let seen = look();
        if seen.is_empty() || Instant::now() > end {
            return seen;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
