//! Processes of a simulated driver: the host's processes that hold contexts, and how `down` ends all processes.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, pause};
use nvidia_ml::layout::Root;
use nvidia_ml::layout::contexts::{self, Kind, On};
use nvidia_ml::layout::topology::{Process, Topology};

const PATIENCE: Duration = Duration::from_secs(5);

/// Starts the host's processes and waits until their contexts are seen.
pub fn start(root: &Root, topology: &Topology) -> Result<()> {
    for process in &topology.process {
        let child = spawn(root, &topology.tag, process).with_context(|| process.name.clone())?;
        wait(|| contexts::list(&topology.tag).iter().any(|held| held.pid.unsigned_abs() == child))
            .with_context(|| format!("{}: its context is not seen", process.name))?;
    }
    Ok(())
}

fn spawn(root: &Root, tag: &str, process: &Process) -> Result<u32> {
    let program = root.join("sim/bin").join(&process.name);
    fs::create_dir_all(root.join("sim/bin"))?;
    fs::copy(std::env::current_exe()?, &program)?;
    let (minor, mib) = (process.gpu.to_string(), process.mib.to_string());
    let mut command = Command::new(program);
    command.args(["hold", tag, &minor, &mib]).current_dir("/").process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(command.spawn()?.id())
}

/// Holds a context until the process is ended. [`start`]'s processes run this.
pub fn hold(tag: &str, minor: &str, mib: &str) -> Result<()> {
    let on = On { minor: minor.parse()?, instance: None };
    let _held = contexts::announce(tag, on, Kind::Compute, mib.parse()?)?;
    loop {
        pause();
    }
}

/// Ends every process whose program is below the root, with SIGTERM first and then SIGKILL.
pub fn end(root: &Root) -> Result<()> {
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        for pid in below(root.dir()) {
            let _ = kill(Pid::from_raw(pid), signal);
        }
        if wait(|| below(root.dir()).is_empty()).is_ok() {
            return Ok(());
        }
    }
    bail!("processes {:?} of {} do not end", below(root.dir()), root.dir().display())
}

/// Zombies do not count, because they no longer have a program.
fn below(dir: &Path) -> Vec<i32> {
    let me = std::process::id();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| pid.unsigned_abs() != me)
        .filter(|pid| fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe.starts_with(dir)))
        .collect()
}

fn wait(done: impl Fn() -> bool) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !done() {
        if Instant::now() > end {
            bail!("not within {PATIENCE:?}");
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
