//! Starts the daemon's process (under systemd if it runs), finds it, ends it, and reads its logs.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use std::{fs, io};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};

use super::detach::{self, Left};
use super::{Daemon, Warnings};
use sublet_core::ledger::DaemonKey;
use sublet_core::mps::control::Control;
use sublet_core::mps::{MpsError, dirs};
use sublet_core::process::child::{self, ChildError};
use sublet_core::process::sublet::PATH;
use sublet_core::process::{Process, unless_gone};
use sublet_core::text::safe;

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
        let is_under_systemd = geteuid().is_root() && sd_notify::booted().unwrap_or(false);
        if self.left.host_mounts && is_under_systemd && self.start_unit() {
            return Ok(Vec::new());
        }
        let Left { deadly, warnings, .. } = self.left;
        if !deadly.is_empty() {
            return Err(MpsError::Limits { device: self.devices.join(", "), limits: deadly.join(", ") });
        }
        let warnings = warnings.iter().cloned().chain(detach::leave_cgroups()).collect();
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
        run.args(["--quiet", "--collect", "--unit", &unit]);
        run.arg(format!("--description=CUDA MPS for {}", self.devices.join(", ")));
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
    if words.next()?.ends_with(b"nvidia-cuda-mps-server") {
        return Some(Kind::Server);
    }
    words.any(|word| word == b"-d" || word == b"-f").then_some(Kind::Daemon)
}

/// Ends the daemon of `key` and its servers: the recorded process and all other daemons with that pipe directory. With
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
    while processes.iter().any(Process::is_alive) {
        if Instant::now() >= deadline {
            return false;
        }
        sleep(Duration::from_millis(2));
    }
    true
}

// The log lines of a daemon and its servers since a start, to find out why they do not run.

/// Standard output and error of the control program, and the logs that it and its servers keep.
const NAMES: [&str; 3] = [dirs::OUTPUT, "control.log", "server.log"];

/// More than the log of a daemon that is asked two hundred times a second for `[mps] start_timeout`.
const MOST: u64 = 1 << 18;

/// How many lines at the end of each file a message repeats.
const LINES: usize = 2;

/// The daemon writes one of these for each command that it receives.
const NOISE: [&str; 2] = ["Accepting connection...", "User did not send valid credentials"];

/// The logs of one daemon, from a start on.
pub(super) struct Logs<'a> {
    key: &'a DaemonKey,
    state_dir: &'a Path,
    /// The lengths of the files at the start; the text before belongs to earlier daemons.
    from: [u64; NAMES.len()],
}

impl<'a> Logs<'a> {
    pub fn from_now_on(key: &'a DaemonKey, state_dir: &'a Path) -> Self {
        let length = |name| fs::metadata(dirs::log(key, state_dir).join(name)).map_or(0, |log| log.len());
        Self { key, state_dir, from: NAMES.map(length) }
    }

    fn text(&self, at: usize) -> String {
        dirs::log_since(self.key, self.state_dir, NAMES[at], self.from[at], MOST)
    }

    /// The pid of a server that has ended, and how it ended.
    pub fn ended(&self) -> Option<(i32, String)> {
        self.text(1).lines().find_map(ended)
    }

    /// Whether the daemon has logged that its server `pid` is ready.
    pub fn is_ready(&self, pid: i32) -> bool {
        let ready = format!("NEW SERVER {pid}: Ready");
        self.text(1).lines().any(|line| words(line) == ready)
    }

    /// The last lines of the logs, for a message; safe for terminals.
    pub fn ends(&self) -> String {
        let ends: Vec<String> = (0..NAMES.len()).filter_map(|at| tail(NAMES[at], &self.text(at))).collect();
        if ends.is_empty() {
            return format!("; nothing in {}", dirs::log(self.key, self.state_dir).display());
        }
        format!("; {}", ends.join("; "))
    }
}

fn tail(name: &str, text: &str) -> Option<String> {
    let is_news = |line: &&str| !line.is_empty() && !NOISE.contains(line);
    let mut last: Vec<String> = text.lines().rev().map(words).filter(is_news).take(LINES).map(safe).collect();
    last.reverse();
    (!last.is_empty()).then(|| format!("{name}: {}", last.join(" | ")))
}

/// A line without its prefix, such as `[2026-02-06 09:34:17.770 Control   261] `.
fn words(line: &str) -> &str {
    line.starts_with('[').then(|| line.split_once("] ")).flatten().map_or(line, |(_, words)| words).trim()
}

/// Parses `Server 95 exited with status 1`, the daemon's text (docs/evidence; driver 535: NVIDIA/k8s-device-plugin,
/// issue 685).
fn ended(line: &str) -> Option<(i32, String)> {
    let (pid, how) = words(line).strip_prefix("Server ")?.split_once(' ')?;
    how.starts_with("exited").then_some(())?;
    Some((pid.parse().ok()?, safe(how)))
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
        // EISDIR, in place of an error that lasts only for a moment.
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

    const CONTROL: &str = "\
[2024-04-29 11:22:10.421 Control    73] Starting new server 95 for user 0
[2024-04-29 11:22:10.425 Control    73] Accepting connection...
[2024-04-29 11:22:10.446 Control    73] Server 95 exited with status 1
[2024-04-29 11:22:10.447 Control    73] Accepting connection...
";

    #[test]
    fn log_lines_from_before_a_start_are_not_of_it() {
        let state = tempfile::tempdir().unwrap();
        let key = DaemonKey("GPU-1".into());
        dirs::make(&key, state.path()).unwrap();
        let dir = dirs::log(&key, state.path());
        let append = |name: &str, text: &str| {
            let before = fs::read_to_string(dir.join(name)).unwrap_or_default();
            fs::write(dir.join(name), before + text).unwrap();
        };
        append("control.log", CONTROL);
        let logs = Logs::from_now_on(&key, state.path());
        assert_eq!((logs.ended(), logs.ends()), (None, format!("; nothing in {}", dir.display())));
        append("control.log", &CONTROL.replace("95", "96"));
        append(
            "server.log",
            "[2024-04-29 11:22:10.425 Other    96] Startup\n[x] Failed to start : a\u{1b}[2J\n",
        );
        assert_eq!(logs.ended(), Some((96, "exited with status 1".into())));
        assert_eq!(
            logs.ends(),
            "; control.log: Starting new server 96 for user 0 | Server 96 exited with status 1; \
             server.log: Startup | Failed to start : a\\u{1b}[2J"
        );
        append("control.log", "[2026-02-06 09:34:36.400 Control   261] NEW SERVER 337: Ready\n");
        assert!(logs.is_ready(337) && !logs.is_ready(33));
    }

    #[test]
    fn other_lines_are_no_end_of_a_server() {
        for line in ["Server 7 is fine", "Server x exited with status 1", "Server", "", "[ ] Exiting"] {
            assert_eq!(ended(line), None, "{line}");
        }
        assert_eq!(ended("Server 7 exited with status 139"), Some((7, "exited with status 139".into())));
    }
}
