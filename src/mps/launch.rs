//! Starting the daemon's process where it belongs, finding it, and ending it.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};

use super::control::Control;
use super::{MpsError, ServerKey, detach, dirs};
use crate::child::{self, ChildError};
use crate::own::PATH;
use crate::process::Process;

/// A launch that takes longer than this has failed: both ways return as soon as the daemon runs.
const LAUNCH_LIMIT: Duration = Duration::from_secs(5);

/// How long `quit` may take; it waits for running clients.
const QUIT_LIMIT: Duration = Duration::from_secs(5);

/// Where and for whom a daemon runs.
pub(super) struct Launch<'a> {
    pub key: &'a ServerKey,
    pub device: &'a str,
    pub state_dir: &'a Path,
    pub control: &'a Control,
    /// We are in the host's mount namespace: systemd sees the same state directory.
    pub host_mounts: bool,
}

impl Launch<'_> {
    /// Starts the daemon: as a unit of its own where systemd runs, else detached. Returns warnings.
    pub fn start(&self) -> Result<Vec<String>, MpsError> {
        if self.systemd_runs() && self.start_unit() {
            return Ok(Vec::new());
        }
        let warnings = detach::leave_cgroups();
        let mut daemon = Command::new(self.control.program());
        daemon.arg("-d").args(multiuser()).env_clear().envs(self.environment()).current_dir("/");
        match child::run_deaf(&mut daemon, LAUNCH_LIMIT) {
            Ok(status) if status.success() => Ok(warnings),
            Ok(status) => Err(self.failed(&status.to_string())),
            Err(ChildError::Timeout) => Err(self.failed("nvidia-cuda-mps-control -d did not return")),
            Err(ChildError::Io(source)) => {
                let what = format!("cannot run {}", self.control.program().display());
                Err(MpsError::Io { what, source })
            }
        }
    }

    /// `sd_booted(3)`, and with the rights to start a unit of the system's.
    fn systemd_runs(&self) -> bool {
        self.host_mounts && geteuid().is_root() && Path::new("/run/systemd/system").is_dir()
    }

    /// A transient unit in the foreground: systemd ends it with the host, and with nothing else.
    fn start_unit(&self) -> bool {
        let unit = format!("sublet-mps-{}.service", self.key);
        let mut stop = Command::new("systemctl");
        stop.args(["--quiet", "stop", &unit]);
        let _ = child::run_deaf(stop.env_clear().env("PATH", PATH), LAUNCH_LIMIT);
        let mut run = Command::new("systemd-run");
        run.args(["--quiet", "--collect", "--unit", &unit])
            .arg(format!("--description=CUDA MPS for {}", self.device));
        for property in ["KillMode=mixed", "TimeoutStopSec=5", "StandardOutput=null", "StandardError=null"] {
            run.arg(format!("--property={property}"));
        }
        run.args(self.environment().map(|(name, value)| format!("--setenv={name}={value}")));
        run.arg("--").arg(self.control.program()).arg("-f").args(multiuser());
        let started = child::run_deaf(run.env_clear().env("PATH", PATH).current_dir("/"), LAUNCH_LIMIT);
        matches!(started, Ok(status) if status.success())
    }

    fn environment(&self) -> [(&'static str, String); 4] {
        [
            ("PATH", PATH.to_owned()),
            ("CUDA_MPS_PIPE_DIRECTORY", dirs::pipe(self.key, self.state_dir).display().to_string()),
            ("CUDA_MPS_LOG_DIRECTORY", dirs::log(self.key, self.state_dir).display().to_string()),
            ("CUDA_VISIBLE_DEVICES", self.device.to_owned()),
        ]
    }

    /// The daemon never came up; with the end of its log.
    pub fn failed(&self, why: &str) -> MpsError {
        not_up(self.key, self.device, self.state_dir, LAUNCH_LIMIT, why)
    }
}

/// See [`MpsError::NotUp`].
pub(super) fn not_up(
    key: &ServerKey,
    device: &str,
    state_dir: &Path,
    limit: Duration,
    why: &str,
) -> MpsError {
    let tail = dirs::log_tail(key, state_dir, "control.log", 400);
    let lines: Vec<String> = tail.lines().rev().take(3).map(crate::text::safe).collect();
    let log = if lines.is_empty() {
        format!("; its log {} is empty", dirs::log(key, state_dir).join("control.log").display())
    } else {
        format!("; its log ends: {}", lines.into_iter().rev().collect::<Vec<_>>().join(" | "))
    };
    MpsError::NotUp { device: device.to_owned(), seconds: limit.as_secs(), why: why.to_owned(), log }
}

/// `-M`: clients of every uid at once; it takes root. Without it they wait for one another.
fn multiuser() -> Option<&'static str> {
    geteuid().is_root().then_some("-M")
}

/// What a process of NVIDIA's MPS programs is to a pipe directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Daemon,
    Server,
}

/// The daemon and the servers of this pipe directory, by what they were started with: a start that was
/// killed left no record of them.
pub(super) fn find(pipe: &Path) -> Vec<(Process, Kind)> {
    let wanted = format!("CUDA_MPS_PIPE_DIRECTORY={}", pipe.display());
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter_map(|pid| {
        let read = |file: &str| fs::read(format!("/proc/{pid}/{file}")).ok();
        // The first 15 bytes of the program's name: proc(5).
        if read("comm")?.trim_ascii_end() != b"nvidia-cuda-mps" {
            return None;
        }
        let kind = kind(&read("cmdline")?)?;
        let has = read("environ")?.split(|byte| *byte == 0).any(|entry| entry == wanted.as_bytes());
        has.then(|| Process::find(pid)).flatten().map(|process| (process, kind))
    })
    .collect()
}

/// From the command line; a control program without `-d` or `-f` only asks.
fn kind(cmdline: &[u8]) -> Option<Kind> {
    let mut words = cmdline.split(|byte| *byte == 0);
    let program = words.next()?;
    if program.ends_with(b"nvidia-cuda-mps-server") {
        return Some(Kind::Server);
    }
    words.any(|word| word == b"-d" || word == b"-f").then_some(Kind::Daemon)
}

/// Ends the daemon of `key` and its servers: what is recorded, and whatever else has its pipe directory.
/// `gently` asks it first.
pub(super) fn end(
    key: &ServerKey,
    state_dir: &Path,
    recorded: Option<Process>,
    gently: Option<&Control>,
) -> Result<(), MpsError> {
    let pipe = dirs::pipe(key, state_dir);
    if let (Some(control), true) = (gently, recorded.is_some_and(|daemon| daemon.is_alive())) {
        let all = processes(&pipe, recorded);
        let _ = control.ask("quit", QUIT_LIMIT);
        if gone(&all, Duration::from_millis(500)) {
            return Ok(());
        }
    }
    for (signal, patience) in [(Signal::SIGTERM, 500), (Signal::SIGKILL, 2000)] {
        let left = processes(&pipe, recorded);
        for process in left.iter().filter(|process| process.is_alive()) {
            let _ = kill(Pid::from_raw(process.pid), signal);
        }
        if gone(&left, Duration::from_millis(patience)) && processes(&pipe, recorded).is_empty() {
            return Ok(());
        }
    }
    match processes(&pipe, recorded).first() {
        Some(process) => Err(MpsError::WontEnd { key: key.to_string(), pid: process.pid }),
        None => Ok(()),
    }
}

fn processes(pipe: &Path, recorded: Option<Process>) -> Vec<Process> {
    let mut all: Vec<Process> = find(pipe).into_iter().map(|(process, _)| process).collect();
    all.extend(recorded.filter(|daemon| !all.contains(daemon)));
    all.retain(Process::is_alive);
    all
}

fn gone(processes: &[Process], patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    loop {
        if !processes.iter().any(Process::is_alive) {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        sleep(Duration::from_millis(2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn daemons_servers_and_those_who_only_ask() {
        assert_eq!(kind(b"/usr/bin/nvidia-cuda-mps-control\0-d\0-M\0"), Some(Kind::Daemon));
        assert_eq!(kind(b"nvidia-cuda-mps-control\0-f\0"), Some(Kind::Daemon));
        assert_eq!(kind(b"nvidia-cuda-mps-server\0"), Some(Kind::Server));
        assert_eq!(kind(b"nvidia-cuda-mps-control\0"), None);
        assert_eq!(kind(b""), None);
    }

    #[test]
    fn ends_exactly_what_has_the_pipe_directory_and_what_is_recorded() {
        let (state, bin) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let key = ServerKey("GPU-1".into());
        dirs::make(&key, state.path()).unwrap();
        let program = bin.path().join("nvidia-cuda-mps-server");
        fs::copy("/bin/sleep", &program).unwrap();
        let start = |pipe: &Path| {
            Command::new(&program).arg("60").env("CUDA_MPS_PIPE_DIRECTORY", pipe).spawn().unwrap()
        };
        let (mut ours, mut other) = (start(&dirs::pipe(&key, state.path())), start(bin.path()));
        let mut recorded = Command::new("/bin/sleep").arg("60").spawn().unwrap();
        let process = |child: &std::process::Child| Process::find(child.id().try_into().unwrap()).unwrap();
        sleep(Duration::from_millis(100));
        assert_eq!(find(&dirs::pipe(&key, state.path())), [(process(&ours), Kind::Server)]);
        end(&key, state.path(), Some(process(&recorded)), None).unwrap();
        assert!(ours.try_wait().unwrap().is_some() && recorded.try_wait().unwrap().is_some());
        assert!(other.try_wait().unwrap().is_none());
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
