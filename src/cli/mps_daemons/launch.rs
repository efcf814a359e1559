//! Starts the daemon's process (under systemd if it runs), finds it, and ends it.

use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};

use super::detach::{self, Left};
use super::logs::Logs;
use super::{Daemon, Warnings};
use sublet_core::ledger::DaemonKey;
use sublet_core::mps::control::Control;
use sublet_core::mps::{MpsError, dirs};
use sublet_core::process::child::{self, ChildError};
use sublet_core::process::sublet::PATH;
use sublet_core::process::{Process, is_gone};

/// A launch that takes longer has failed: both kinds of launch return as soon as the daemon runs.
const LAUNCH_LIMIT: Duration = Duration::from_secs(5);

/// How long `quit` may take; it waits for running clients.
const QUIT_LIMIT: Duration = Duration::from_secs(5);

/// The parameters of a daemon's start.
pub(super) struct Launch<'a> {
    pub daemon: Daemon<'a>,
    /// The devices in the order in which its clients count them.
    pub devices: &'a [String],
    pub control: &'a Control,
    /// The logs from this start on.
    pub logs: Logs<'a>,
    /// In the host's mount namespace systemd sees the same state directory.
    pub left: &'a Left,
}

impl Launch<'_> {
    /// Starts the daemon: as a systemd unit if systemd runs, otherwise as a detached process. Returns warnings.
    pub fn start(&self) -> Warnings {
        let may_start_unit =
            self.left.host_mounts && geteuid().is_root() && sd_notify::booted().unwrap_or(false);
        if may_start_unit && self.start_unit() {
            return Ok(Vec::new());
        }
        let kept = &self.left.kept;
        if !kept.deadly.is_empty() {
            return Err(MpsError::Limits { device: self.devices.join(", "), limits: kept.deadly.join(", ") });
        }
        let mut warnings = kept.warnings.clone();
        warnings.extend(detach::leave_cgroups());
        let (program, Daemon { key, config, .. }) = (self.control.program(), self.daemon);
        let mut daemon = Command::new(program);
        daemon.arg("-d").args(multiuser()).env_clear().envs(self.environment()).current_dir("/");
        let output = || dirs::output(key, &config.state_dir).map_or_else(Stdio::null, Stdio::from);
        daemon.stdout(output()).stderr(output());
        let failed = |why: &str| self.not_up(LAUNCH_LIMIT, format!("{}: {why}", program.display()));
        match child::run_with_own_output(&mut daemon, LAUNCH_LIMIT) {
            Ok(status) if status.success() => Ok(warnings),
            Ok(status) => Err(failed(&status.to_string())),
            Err(ChildError::Timeout) => Err(failed("nvidia-cuda-mps-control -d did not end")),
            Err(ChildError::Io(source)) => {
                Err(MpsError::Io { attempt: format!("cannot run {}", program.display()), source })
            }
        }
    }

    /// Starts a transient unit in the foreground, which systemd ends only at shutdown.
    fn start_unit(&self) -> bool {
        let unit = format!("sublet-mps-{}.service", self.daemon.key);
        let mut stop = Command::new("systemctl");
        stop.args(["--quiet", "stop", &unit]);
        let _ = child::run_without_output(stop.env_clear().env("PATH", PATH), LAUNCH_LIMIT);
        let mut run = Command::new("systemd-run");
        run.args(["--quiet", "--collect", "--unit", &unit])
            .arg(format!("--description=CUDA MPS for {}", self.devices.join(", ")));
        for property in ["KillMode=mixed", "TimeoutStopSec=5", "StandardOutput=null", "StandardError=null"] {
            run.arg(format!("--property={property}"));
        }
        run.args(self.environment().map(|(name, value)| format!("--setenv={name}={value}")));
        run.arg("--").arg(self.control.program()).arg("-f").args(multiuser());
        let started =
            child::run_without_output(run.env_clear().env("PATH", PATH).current_dir("/"), LAUNCH_LIMIT);
        matches!(started, Ok(status) if status.success())
    }

    fn environment(&self) -> [(&'static str, String); 4] {
        let log = dirs::log(self.daemon.key, &self.daemon.config.state_dir);
        [
            ("PATH", self.control.path()),
            ("CUDA_MPS_PIPE_DIRECTORY", self.daemon.pipe().display().to_string()),
            ("CUDA_MPS_LOG_DIRECTORY", log.display().to_string()),
            ("CUDA_VISIBLE_DEVICES", self.devices.join(",")),
        ]
    }

    /// See [`MpsError::NotUp`].
    pub fn not_up(&self, limit: Duration, why: String) -> MpsError {
        MpsError::NotUp {
            device: self.devices.join(", "),
            seconds: limit.as_secs(),
            why,
            log: self.logs.ends(),
        }
    }
}

/// `-M` serves clients of all uids at once and needs root. Without it clients of different uids wait for each other.
fn multiuser() -> Option<&'static str> {
    geteuid().is_root().then_some("-M")
}

/// The role of an MPS process of a pipe directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Daemon,
    Server,
}

/// The daemon and the servers of this pipe directory, found by their environment: a start that was killed left no
/// record of them.
///
/// # Errors
/// /proc or one of its processes cannot be examined: a daemon that was overlooked would be taken for one that has ended.
pub(super) fn find(pipe: &Path) -> Result<Vec<(Process, Kind)>, MpsError> {
    let attempt = "cannot look for the processes of MPS in /proc".to_owned();
    find_in(Path::new("/proc"), pipe).map_err(|source| MpsError::Io { attempt, source })
}

fn find_in(proc: &Path, pipe: &Path) -> io::Result<Vec<(Process, Kind)>> {
    // A wrapper may give the program any name, so the daemon's own pid file counts too.
    let written = unless_gone(fs::read_to_string(pipe.join("nvidia-cuda-mps-control.pid")))?;
    let written = written.and_then(|text| text.trim().parse::<i32>().ok());
    let mut found = Vec::new();
    for entry in fs::read_dir(proc)? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let kind = if written == Some(pid) { Some(Kind::Daemon) } else { kind_of(&entry.path())? };
        let Some(kind) = kind else { continue };
        let Some(process) = Process::examine(pid)? else { continue };
        if process.has_environment("CUDA_MPS_PIPE_DIRECTORY", pipe)? {
            found.push((process, kind));
        }
    }
    Ok(found)
}

/// `None`: the file is not there, or its process has ended.
fn unless_gone<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Err(error) if is_gone(&error) => Ok(None),
        read => read.map(Some),
    }
}

/// The role of the process of this directory in /proc, by the command name: proc(5) gives the first 15 bytes of the file
/// name.
fn kind_of(process: &Path) -> io::Result<Option<Kind>> {
    let read = |file: &str| unless_gone(fs::read(process.join(file)));
    if read("comm")?.is_none_or(|name| name.trim_ascii_end() != b"nvidia-cuda-mps") {
        return Ok(None);
    }
    Ok(read("cmdline")?.and_then(|words| kind(&words)))
}

/// By the command line: a control program without `-d` or `-f` only sends commands.
fn kind(cmdline: &[u8]) -> Option<Kind> {
    let mut words = cmdline.split(|byte| *byte == 0);
    let program = words.next()?;
    if program.ends_with(b"nvidia-cuda-mps-server") {
        return Some(Kind::Server);
    }
    words.any(|word| word == b"-d" || word == b"-f").then_some(Kind::Daemon)
}

/// Ends the daemon of `key` and its servers: the recorded process and all others with that pipe directory. With
/// `gently` the daemon is first asked to quit.
pub(super) fn end(
    key: &DaemonKey,
    state_dir: &Path,
    recorded: Option<Process>,
    gently: Option<&Control>,
) -> Result<(), MpsError> {
    let pipe = dirs::pipe(key, state_dir);
    if let (Some(control), true) = (gently, recorded.is_some_and(|daemon| daemon.is_alive())) {
        let all = processes(&pipe, recorded)?;
        let _ = control.ask("quit", QUIT_LIMIT);
        if gone(&all, Duration::from_millis(500)) {
            return Ok(());
        }
    }
    for (signal, patience) in [(Signal::SIGTERM, 500), (Signal::SIGKILL, 2000)] {
        let left = processes(&pipe, recorded)?;
        for process in left.iter().filter(|process| process.is_alive()) {
            let _ = kill(Pid::from_raw(process.pid), signal);
        }
        if gone(&left, Duration::from_millis(patience)) && processes(&pipe, recorded)?.is_empty() {
            return Ok(());
        }
    }
    match processes(&pipe, recorded)?.first() {
        Some(process) => Err(MpsError::WontEnd { key: key.to_string(), pid: process.pid }),
        None => Ok(()),
    }
}

fn processes(pipe: &Path, recorded: Option<Process>) -> Result<Vec<Process>, MpsError> {
    let mut all: Vec<Process> = find(pipe)?.into_iter().map(|(process, _)| process).collect();
    all.extend(recorded.filter(|daemon| !all.contains(daemon)));
    all.retain(Process::is_alive);
    Ok(all)
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
    fn daemons_servers_and_programs_that_only_send_commands() {
        assert_eq!(kind(b"/usr/bin/nvidia-cuda-mps-control\0-d\0-M\0"), Some(Kind::Daemon));
        assert_eq!(kind(b"nvidia-cuda-mps-control\0-f\0"), Some(Kind::Daemon));
        assert_eq!(kind(b"nvidia-cuda-mps-server\0"), Some(Kind::Server));
        assert_eq!(kind(b"nvidia-cuda-mps-control\0"), None);
        assert_eq!(kind(b""), None);
    }

    #[test]
    fn a_process_that_cannot_be_examined_is_not_overlooked() {
        let proc = tempfile::tempdir().unwrap();
        let look = || find_in(proc.path(), Path::new("/nowhere"));
        assert!(find_in(&proc.path().join("7/comm/absent"), Path::new("/nowhere")).is_err(), "no /proc");
        fs::create_dir_all(proc.path().join("7")).unwrap();
        assert_eq!(look().unwrap(), [], "it has ended meanwhile");
        // EISDIR, in place of what lasts only for a moment.
        fs::create_dir(proc.path().join("7/comm")).unwrap();
        assert!(look().is_err());
    }

    #[test]
    fn ends_only_processes_with_the_pipe_directory_and_the_recorded_one() {
        let (state, bin) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let key = DaemonKey("GPU-1".into());
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
        assert_eq!(find(&dirs::pipe(&key, state.path())).unwrap(), [(process(&ours), Kind::Server)]);
        end(&key, state.path(), Some(process(&recorded)), None).unwrap();
        assert!(ours.try_wait().unwrap().is_some() && recorded.try_wait().unwrap().is_some());
        assert!(other.try_wait().unwrap().is_none());
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
