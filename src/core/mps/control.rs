//! Talks to an MPS control daemon: `connect()` checks that it listens, `nvidia-cuda-mps-control` sends commands. Its servers
//! are processes that it started, as /proc shows them.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::MpsError;
use super::dirs::{self, wait_for_turn};
use crate::config::Config;
use crate::inventory::{Inventory, MissingPrograms, MpsPrograms};
use crate::ledger::{DaemonKey, DefaultLimits, DefaultMemoryLimit};
use crate::process::child::{ChildError, ProcessorWait};
use crate::process::{Process, confine, kernel_file, listener, listens};
use crate::share::Percent;
use crate::text::safe;

/// The time limit for an answer. A running daemon answers in 3 ms (docs/evidence), a stopped one never does. Time in
/// which the daemon or the program that asks it waits for a processor does not count.
pub(super) const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// The control program's message if the daemon speaks with another one. It speaks with one at a time, and closes other
/// connections (docs/evidence/2026-11-25-mps-control.md).
const UNSENT: &str = "cannot send command";

/// The time between two attempts to send a command.
const AGAIN: Duration = Duration::from_millis(10);

/// Words with which the control program refuses a command. It exits with 0 all the same (docs/evidence).
const REFUSALS: [&str; 6] =
    ["insufficient priv", "not enough priv", "cannot find", "failed to", "invalid", "unknown command"];

/// Why a command got no answer.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum AskError {
    /// No answer came in time: the daemon is stopped or hangs.
    #[error("it does not answer")]
    Silent,
    /// There is no daemon. The text is the program's or the system's.
    #[error("{0}")]
    Gone(String),
    /// It spoke with another program all the time.
    #[error("it speaks with one program at a time, and another kept it")]
    Taken,
    /// The daemon refused.
    #[error("it refused `{command}`: {answer}")]
    Refused { command: String, answer: String },
    /// The program cannot be run.
    #[error("nvidia-cuda-mps-control cannot be run: {0}")]
    Program(io::Error),
}

/// The control program, for one daemon.
#[derive(Debug)]
pub struct Control {
    key: String,
    program: PathBuf,
    programs: MpsPrograms,
    pipe: PathBuf,
}

impl Control {
    /// # Errors
    /// The driver's control program is not installed. The server program is not needed to send commands to a running
    /// daemon.
    pub fn new(key: &DaemonKey, config: &Config) -> Result<Self, MpsError> {
        let driver = &config.driver;
        let programs = MpsPrograms::find(driver);
        let missing = || MissingPrograms::Control { driver: Box::new(driver.clone()) };
        let program = programs.control.clone().ok_or_else(missing)?;
        Ok(Self { key: key.0.clone(), program, programs, pipe: dirs::pipe(key, &config.state_dir) })
    }

    /// [`Control::new`] with the program that a refresh has found, if it is still there: looking for it takes two hundred
    /// system calls.
    ///
    /// # Errors
    /// As [`Control::new`]'s.
    pub(super) fn with_known_program(
        key: &DaemonKey,
        inventory: Option<&Inventory>,
        config: &Config,
    ) -> Result<Self, MpsError> {
        let known = inventory.and_then(|inventory| inventory.driver.mps_control.clone());
        let program = known.filter(|program| program.is_file());
        let Some(program) = program else { return Self::new(key, config) };
        let programs = MpsPrograms { control: Some(program.clone()), ..MpsPrograms::default() };
        Ok(Self { key: key.0.clone(), program, programs, pipe: dirs::pipe(key, &config.state_dir) })
    }

    /// The server program that a daemon started now finds first.
    ///
    /// # Errors
    /// The server program is missing: the daemon would answer and never have a server.
    pub fn server_program(&self, config: &Config) -> Result<&Path, MpsError> {
        Ok(self.programs.both(&config.driver)?.1)
    }

    /// The program that runs as `daemon`, if no other is known to be installed.
    pub fn of(key: &DaemonKey, config: &Config, daemon: Process) -> Option<Self> {
        let program = std::fs::read_link(format!("/proc/{}/exe", daemon.pid)).ok()?;
        let installed = program.is_file() && daemon.is_alive();
        let (programs, pipe) = (MpsPrograms::find(&config.driver), dirs::pipe(key, &config.state_dir));
        installed.then(|| Self { key: key.0.clone(), program, programs, pipe })
    }

    /// Asks through the directory that clients see, if this process is not root and has no other way. The daemon
    /// answers read-only commands there, too (docs/evidence).
    pub(crate) fn or_public(mut self, public: &Path) -> Self {
        if std::fs::symlink_metadata(self.pipe.join("control")).is_err() {
            public.clone_into(&mut self.pipe);
        }
        self
    }

    /// The program's absolute path.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// The program as it sends commands, which are its input.
    fn control_command(&self) -> Command {
        let mut program = Command::new(&self.program);
        program
            .env_clear()
            .env("PATH", self.path())
            .env("CUDA_MPS_PIPE_DIRECTORY", &self.pipe)
            .current_dir("/");
        program
    }

    /// PATH for the daemon, which finds its server program only by it.
    pub fn path(&self) -> String {
        self.programs.path()
    }

    /// Sends one command or several, one per line, and returns the answer, trimmed. All that sublet sends may be sent
    /// again: it is, while the daemon speaks with another program.
    pub fn ask(&self, commands: &str, limit: Duration) -> Result<String, AskError> {
        let _turn = self.pipe.parent().and_then(|own| wait_for_turn(own, limit / 2));
        // The wait for the turn does not make the answer late.
        let daemon = listener(&self.pipe.join("control")).unwrap_or_default();
        let wait = ProcessorWait::from_now_on(daemon);
        let left = || wait.remaining(limit);
        let mut was_taken = false;
        loop {
            match self.ask_once(commands, left()) {
                Err(AskError::Taken) if !listens(&self.pipe.join("control")) => {
                    return Err(AskError::Gone("it ended while it was asked".to_owned()));
                }
                Err(AskError::Taken) if left() > AGAIN => {
                    was_taken = true;
                    std::thread::sleep(AGAIN);
                }
                // Both had little of a processor: the program was ended, and the daemon is not to blame.
                Err(AskError::Silent) if left() > AGAIN => {}
                // The last attempt had no time left.
                Err(AskError::Silent) if was_taken => return Err(AskError::Taken),
                asked => return asked,
            }
        }
    }

    fn ask_once(&self, commands: &str, limit: Duration) -> Result<String, AskError> {
        let words = ["nvidia-cuda-mps-control", &self.key];
        match confine::run(&words, || self.control_command(), &format!("{commands}\n"), limit) {
            Ok(finished) => {
                check_answer(commands, finished.status.success(), &finished.stdout, &finished.stderr)
            }
            Err(ChildError::Timeout) => Err(AskError::Silent),
            Err(ChildError::Io(error)) => Err(AskError::Program(error)),
        }
    }

    /// Asks for the default SM limit of servers that start from now on. This is a real answer of the daemon.
    pub fn default_limits(&self) -> Result<Percent, AskError> {
        let command = "get_default_active_thread_percentage";
        let mut answer = self.ask(command, ANSWER_LIMIT)?;
        if answer.is_empty() {
            // A daemon that ends while it is asked says nothing (docs/evidence/2026-11-24-h100-cycles.md).
            if !listens(&self.pipe.join("control")) {
                return Err(AskError::Gone("it ended while it was asked".to_owned()));
            }
            answer = self.ask(command, ANSWER_LIMIT)?;
        }
        parse_percent(&answer)
            .ok_or_else(|| AskError::Refused { command: command.into(), answer: safe(&answer) })
    }

    /// Pids of the servers that run now.
    pub fn servers(&self) -> Result<Vec<i32>, AskError> {
        self.ask("get_server_list", ANSWER_LIMIT).map(|answer| parse_pids(&answer))
    }

    /// Whether a server has had a fault and takes no new client: NVIDIA's manual calls that `FAULT`
    /// (`get_server_status`; docs.nvidia.com/deploy/mps).
    pub fn is_faulted(&self, server: i32) -> Result<bool, AskError> {
        Ok(self.ask(&format!("get_server_status {server}"), ANSWER_LIMIT)?.eq_ignore_ascii_case("fault"))
    }

    /// Pids of a server's clients.
    pub fn clients(&self, server: i32) -> Result<Vec<i32>, AskError> {
        self.list(&format!("get_client_list {server}"))
    }

    /// The pids with which the daemon answers the last of `commands`. One that ends while it is asked says nothing, too
    /// (docs/evidence/2026-11-24-h100-cycles.md): that it has none is believed once it has answered another question.
    fn list(&self, commands: &str) -> Result<Vec<i32>, AskError> {
        let mut answer = self.ask(commands, ANSWER_LIMIT)?;
        if answer.is_empty() {
            self.default_limits()?;
            answer = self.ask(commands, ANSWER_LIMIT)?;
        }
        Ok(parse_pids(&answer))
    }

    /// Clients of all its servers.
    pub fn count_clients(&self) -> Result<usize, AskError> {
        let mut count = 0;
        for server in self.list("get_server_list")? {
            count += self.clients(server)?.len();
        }
        Ok(count)
    }

    /// Ends the client `pid`, on whichever server it is, without harm to the server's other clients (docs/evidence).
    pub fn terminate(&self, pid: i32) -> Result<(), AskError> {
        for server in self.servers()? {
            if self.clients(server)?.contains(&pid) {
                self.ask(&format!("terminate_client {server} {pid}"), ANSWER_LIMIT)?;
            }
        }
        Ok(())
    }

    /// Sets the default limits for clients that connect from now on, to running servers and to those that start later.
    ///
    /// The daemon's defaults are set first, so that a server that starts after servers were listed already has them.
    /// `known` are servers that are expected to run: the same run of the program, which takes 3 ms (docs/evidence),
    /// sets theirs. A second one sets the limits of further servers that the daemon lists.
    pub fn set_default_limits(
        &self,
        default_limits: DefaultLimits,
        devices: usize,
        known: &[i32],
    ) -> Result<(), AskError> {
        let of = |server: i32| limit_commands(Some(server), devices, default_limits);
        let mut commands = limit_commands(None, devices, default_limits);
        commands.extend(known.iter().flat_map(|server| of(*server)));
        commands.push("get_server_list".to_owned());
        let listed = match self.list(&commands.join("\n")) {
            // One of them has ended, and the daemon does not know it any more.
            Err(AskError::Refused { .. }) if !known.is_empty() => {
                return self.set_default_limits(default_limits, devices, &[]);
            }
            listed => listed?,
        };
        let new_servers =
            listed.into_iter().filter(|server| !known.contains(server) && may_be_server(*server));
        let mut of_new: Vec<String> = new_servers.flat_map(of).collect();
        if of_new.is_empty() {
            return Ok(());
        }
        of_new.push("get_server_list".to_owned());
        self.list(&of_new.join("\n")).map(drop)
    }
}

/// The commands that set `default_limits` on `server`; `None`: on servers that start later. Memory is set for each
/// ordinal of `devices`.
fn limit_commands(server: Option<i32>, devices: usize, default_limits: DefaultLimits) -> Vec<String> {
    let (of_all, of_one) = server.map_or(("_default", String::new()), |pid| ("", format!("{pid} ")));
    let memory = match default_limits.memory {
        DefaultMemoryLimit::Mebibytes(amount) => format!("{amount}M"),
        // 0 removes an earlier limit (docs/evidence).
        DefaultMemoryLimit::Unlimited => "0".to_owned(),
    };
    let sm = format!("set{of_all}_active_thread_percentage {of_one}{}", default_limits.sm);
    let limit = |ordinal| format!("set{of_all}_device_pinned_mem_limit {of_one}{ordinal} {memory}");
    std::iter::once(sm).chain((0..devices).map(limit)).collect()
}

/// The control program for the daemon of `key`, with the present configuration; `None` if there is none.
pub fn command(key: &str) -> Option<Command> {
    let key = DaemonKey(key.to_owned());
    dirs::check_key(&key).ok()?;
    Control::new(&key, &crate::config_files::load().ok()?).ok().map(|control| control.control_command())
}

fn check_answer(command: &str, success: bool, stdout: &str, stderr: &str) -> Result<String, AskError> {
    let (answer, complaint) = (stdout.trim(), stderr.trim());
    let words = if complaint.is_empty() { answer } else { complaint };
    let lower = format!("{answer}\n{complaint}").to_lowercase();
    // Sometimes it only fails (docs/evidence/2026-11-25-mps-control.md).
    if lower.contains(UNSENT) || !success && words.is_empty() {
        return Err(AskError::Taken);
    }
    if lower.contains("cannot find mps control daemon") || !success {
        return Err(AskError::Gone(safe(words)));
    }
    if REFUSALS.iter().any(|refusal| lower.contains(refusal)) {
        return Err(AskError::Refused { command: command.replace('\n', "; "), answer: safe(words) });
    }
    Ok(answer.to_owned())
}

/// `25`, `25.0`, `12.5%`, or the last word of a sentence that ends so.
fn parse_percent(answer: &str) -> Option<Percent> {
    let word = answer.split_whitespace().last()?.trim_end_matches(['%', '.']);
    let number: f64 = word.parse().ok()?;
    (0.0..=100.0).contains(&number).then(|| Percent::nearest(number))
}

/// One pid per line. Other lines are headings or remarks.
fn parse_pids(answer: &str) -> Vec<i32> {
    answer.lines().filter_map(|line| line.trim().parse().ok()).filter(|pid| *pid > 0).collect()
}

/// The driver's MPS programs, as the kernel truncates their names (proc(5), `comm`).
const PROGRAM_NAME: &str = "nvidia-cuda-mps";

/// Pids of the servers that `daemon` has started. The list may be incomplete or outdated: only the daemon knows.
pub(super) fn list_servers(daemon: Process) -> Vec<i32> {
    let threads = std::fs::read_dir(format!("/proc/{}/task", daemon.pid)).into_iter().flatten().flatten();
    let children = |thread: std::fs::DirEntry| {
        std::fs::read_to_string(thread.path().join("children")).unwrap_or_default()
    };
    let all: String = threads.map(children).collect();
    all.split_whitespace().filter_map(|pid| pid.parse().ok()).filter(|pid| may_be_server(*pid)).collect()
}

/// Whether the process `pid` may be a server.
fn may_be_server(pid: i32) -> bool {
    match kernel_file(format!("/proc/{pid}/comm")) {
        Ok(name) => name.starts_with(PROGRAM_NAME),
        Err(error) => error.kind() != std::io::ErrorKind::NotFound,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_as_daemons_write_them() {
        assert_eq!(parse_percent("100.0"), Some(Percent::WHOLE));
        assert_eq!(parse_percent("12.5"), Some(Percent::from_thousandths(12_500)));
        assert_eq!(parse_percent("30"), Some(Percent::from_thousandths(30_000)));
        assert_eq!(parse_percent("16.1"), Some(Percent::from_thousandths(16_100)));
        assert_eq!(
            parse_percent("Default active thread percentage: 25.0%"),
            Some(Percent::from_thousandths(25_000))
        );
        for bad in ["", "nan", "-1", "101", "1e9", "what?"] {
            assert_eq!(parse_percent(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_ceiling_is_set_for_every_ordinal_and_lifted_by_0() {
        let memory = DefaultMemoryLimit::Mebibytes(2730);
        let default_limits = DefaultLimits { sm: Percent::from_thousandths(12_500), memory };
        assert_eq!(
            limit_commands(None, 2, default_limits),
            [
                "set_default_active_thread_percentage 12.5",
                "set_default_device_pinned_mem_limit 0 2730M",
                "set_default_device_pinned_mem_limit 1 2730M"
            ]
        );
        assert_eq!(
            limit_commands(Some(77), 1, DefaultLimits::NONE),
            ["set_active_thread_percentage 77 100", "set_device_pinned_mem_limit 77 0 0"]
        );
    }

    #[test]
    fn pids_line_by_line() {
        assert_eq!(parse_pids("1234\n 77 \n\nServer list:\n-3\n99999999999\n"), [1234, 77]);
        assert!(parse_pids("").is_empty());
    }

    #[test]
    fn a_no_is_heard_although_the_program_exits_zero() {
        let said = |answer: &str| check_answer("quit", true, answer, "");
        assert!(matches!(said("Insufficient privileges"), Err(AskError::Refused { .. })));
        assert!(matches!(said("Not enough privilege to quit"), Err(AskError::Refused { .. })));
        assert!(matches!(said("Cannot find MPS control daemon process"), Err(AskError::Gone(_))));
        assert_eq!(said(" 25.0\n").unwrap(), "25.0");
        assert_eq!(said("").unwrap(), "");
        assert!(matches!(check_answer("x", false, "", "no such thing"), Err(AskError::Gone(_))));
        let unsent = "Cannot send command to MPS control daemon process";
        assert!(matches!(check_answer("x", false, "", unsent), Err(AskError::Taken)));
        assert!(matches!(check_answer("x", false, "", ""), Err(AskError::Taken)));
    }

    #[test]
    fn a_daemon_that_ends_while_it_is_asked_is_gone() {
        use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
        use std::os::fd::AsRawFd as _;
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("nvidia-cuda-mps-control");
        std::fs::write(&program, "#!/bin/sh\ncat >/dev/null\n").unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let (programs, pipe) = (MpsPrograms::default(), dir.path().to_owned());
        let control = Control { key: "GPU-1".to_owned(), program, programs, pipe };
        assert!(matches!(control.default_limits(), Err(AskError::Gone(_))));
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
        bind(fd.as_raw_fd(), &UnixAddr::new(&dir.path().join("control")).unwrap()).unwrap();
        listen(&fd, Backlog::new(4).unwrap()).unwrap();
        assert!(matches!(control.default_limits(), Err(AskError::Refused { .. })), "it is there");
    }

    /// Without turns the ones that are sent away try again, all at the same time.
    #[test]
    fn processes_take_turns_to_ask() {
        use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
        use std::os::fd::AsRawFd as _;
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let (pipe, one, away) = (dir.path().join("pipe"), dir.path().join("one"), dir.path().join("away"));
        std::fs::create_dir(&pipe).unwrap();
        std::fs::write(dir.path().join(dirs::ASKING), "").unwrap();
        let program = dir.path().join("nvidia-cuda-mps-control");
        let script = format!(
            "#!/bin/sh\nmkdir {one} 2>/dev/null || {{ touch {away}; echo Cannot send command; exit 1; }}\n\
             /bin/sleep 0.02; /bin/rmdir {one}; echo 100.0\n",
            one = one.display(),
            away = away.display()
        );
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
        bind(fd.as_raw_fd(), &UnixAddr::new(&pipe.join("control")).unwrap()).unwrap();
        listen(&fd, Backlog::new(64).unwrap()).unwrap();
        let control = || Control {
            key: "GPU-1".to_owned(),
            program: program.clone(),
            programs: MpsPrograms::default(),
            pipe: pipe.clone(),
        };
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| assert_eq!(control().ask("x", Duration::from_secs(60)).unwrap(), "100.0"));
            }
        });
        assert!(!away.exists(), "one was sent away");
        std::fs::create_dir(&one).unwrap();
        let begun = std::time::Instant::now();
        assert!(matches!(control().ask("x", Duration::from_millis(200)), Err(AskError::Taken)));
        assert!(begun.elapsed() < Duration::from_secs(20), "it is not waited for without end");
    }
}
