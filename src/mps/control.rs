//! Speaking to a control daemon: `connect()` to see that somebody listens, `nvidia-cuda-mps-control` to ask.

use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

use super::{MpsError, ServerKey, dirs};
use crate::child::ChildError;
use crate::config::{self, Config};
use crate::own::PATH;
use crate::request::Percent;
use crate::text::safe;
use crate::{confine, inventory};

/// A daemon that lives answers in 3 ms (docs/evidence); a stopped one never does.
pub(super) const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// Words by which the control program says no; it exits 0 all the same (docs/evidence).
const REFUSALS: [&str; 6] =
    ["insufficient priv", "not enough priv", "cannot find", "failed to", "invalid", "unknown command"];

/// Whether anybody listens at `control`, a SEQPACKET socket. Costs microseconds and does the daemon no harm;
/// the listener may be stopped all the same.
pub(super) fn listens(control: &Path) -> bool {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let Ok(fd) = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None) else { return false };
    let Ok(address) = UnixAddr::new(control) else { return false };
    connect(fd.as_raw_fd(), &address) == Ok(())
}

/// Why a question has no answer.
#[derive(Debug)]
pub(super) enum AskError {
    /// Nothing came in time: the daemon is stopped or hangs.
    Silent,
    /// There is no daemon: its words or the system's.
    Gone(String),
    /// It said no.
    Refused { command: String, answer: String },
    /// The program cannot be run.
    Program(io::Error),
}

impl std::fmt::Display for AskError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Silent => f.write_str("it does not answer"),
            Self::Gone(words) => f.write_str(words),
            Self::Refused { command, answer } => write!(f, "it refused `{command}`: {answer}"),
            Self::Program(error) => write!(f, "nvidia-cuda-mps-control cannot be run: {error}"),
        }
    }
}

/// The control program, for one daemon.
#[derive(Debug)]
pub(super) struct Control {
    key: String,
    program: PathBuf,
    pipe: PathBuf,
}

impl Control {
    /// # Errors
    /// The driver's MPS programs are not installed.
    pub fn new(key: &ServerKey, config: &Config) -> Result<Self, MpsError> {
        Ok(Self { key: key.0.clone(), program: installed(config)?, pipe: dirs::pipe(key, &config.state_dir) })
    }

    /// The program's absolute path.
    #[cfg(feature = "cli")]
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// The program as it asks: commands are its input.
    fn asking(&self) -> Command {
        let mut program = Command::new(&self.program);
        program.env_clear().env("PATH", PATH).env("CUDA_MPS_PIPE_DIRECTORY", &self.pipe).current_dir("/");
        program
    }

    /// One command and its answer, trimmed.
    pub fn ask(&self, command: &str, limit: Duration) -> Result<String, AskError> {
        let words = ["nvidia-cuda-mps-control", &self.key];
        match confine::run(&words, || self.asking(), &format!("{command}\n"), limit) {
            Ok(finished) => judge(command, finished.status.success(), &finished.stdout, &finished.stderr),
            Err(ChildError::Timeout) => Err(AskError::Silent),
            Err(ChildError::Io(error)) => Err(AskError::Program(error)),
        }
    }

    /// A real answer: the ceiling for servers that start from now on.
    pub fn ceiling(&self) -> Result<Percent, AskError> {
        let command = "get_default_active_thread_percentage";
        let answer = self.ask(command, ANSWER_LIMIT)?;
        parse_percent(&answer)
            .ok_or_else(|| AskError::Refused { command: command.into(), answer: safe(&answer) })
    }

    /// Pids of the servers that run now.
    pub fn servers(&self) -> Result<Vec<i32>, AskError> {
        self.ask("get_server_list", ANSWER_LIMIT).map(|answer| parse_pids(&answer))
    }

    /// Pids of a server's clients.
    #[cfg(feature = "cli")]
    pub fn clients(&self, server: i32) -> Result<Vec<i32>, AskError> {
        self.ask(&format!("get_client_list {server}"), ANSWER_LIMIT).map(|answer| parse_pids(&answer))
    }

    /// Clients of all its servers.
    #[cfg(feature = "cli")]
    pub fn count_clients(&self) -> Result<usize, AskError> {
        let mut count = 0;
        for server in self.servers()? {
            count += self.clients(server)?.len();
        }
        Ok(count)
    }

    /// Ends the client `pid`, whichever server it is at, without harm to the server's others (docs/evidence).
    #[cfg(feature = "cli")]
    pub fn terminate(&self, pid: i32) -> Result<(), AskError> {
        for server in self.servers()? {
            if self.clients(server)?.contains(&pid) {
                self.ask(&format!("terminate_client {server} {pid}"), ANSWER_LIMIT)?;
            }
        }
        Ok(())
    }

    /// Ceiling for clients that connect from now on, to servers that run and to those that start later.
    pub fn set_ceiling(&self, ceiling: Percent) -> Result<(), AskError> {
        self.ask(&format!("set_default_active_thread_percentage {ceiling}"), ANSWER_LIMIT)?;
        for server in self.servers()? {
            self.ask(&format!("set_active_thread_percentage {server} {ceiling}"), ANSWER_LIMIT)?;
        }
        Ok(())
    }
}

/// The program that asks the daemon of `key`, by the configuration in force; `None`: there is none.
pub(crate) fn command(key: &str) -> Option<Command> {
    let key = ServerKey(key.to_owned());
    dirs::check_key(&key).ok()?;
    Control::new(&key, &config::load().ok()?).ok().map(|control| control.asking())
}

/// `nvidia-cuda-mps-control` as the inventory found it, else where packages put it.
fn installed(config: &Config) -> Result<PathBuf, MpsError> {
    let known = inventory::load(config).ok().and_then(|inventory| inventory.driver.mps_control);
    let usual = || Some(inventory::under(&config.driver.root, "/usr/bin/nvidia-cuda-mps-control"));
    known
        .or_else(usual)
        .filter(|program| program.is_file())
        .ok_or_else(|| MpsError::NotInstalled { root: config.driver.root.clone() })
}

fn judge(command: &str, success: bool, stdout: &str, stderr: &str) -> Result<String, AskError> {
    let (answer, complaint) = (stdout.trim(), stderr.trim());
    let words = if complaint.is_empty() { answer } else { complaint };
    let lower = format!("{answer}\n{complaint}").to_lowercase();
    if lower.contains("cannot find mps control daemon") || !success {
        return Err(AskError::Gone(safe(if words.is_empty() { "the daemon is not running" } else { words })));
    }
    if REFUSALS.iter().any(|refusal| lower.contains(refusal)) {
        return Err(AskError::Refused { command: command.to_owned(), answer: safe(words) });
    }
    Ok(answer.to_owned())
}

/// `25`, `25.0`, `12.5%`, or the last word of a sentence that ends so.
fn parse_percent(answer: &str) -> Option<Percent> {
    let word = answer.split_whitespace().last()?.trim_end_matches(['%', '.']);
    let number: f64 = word.parse().ok()?;
    // Rounded, not cut: 16.1 times 1000 may be a little less than 16100.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "in range, nothing is lost")]
    (0.0..=100.0).contains(&number).then(|| Percent::from_thousandths((number * 1000.0).round() as u32))
}

/// One pid a line; lines that hold anything else are headings or remarks.
fn parse_pids(answer: &str) -> Vec<i32> {
    answer.lines().filter_map(|line| line.trim().parse().ok()).filter(|pid| *pid > 0).collect()
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
    fn pids_line_by_line() {
        assert_eq!(parse_pids("1234\n 77 \n\nServer list:\n-3\n99999999999\n"), [1234, 77]);
        assert!(parse_pids("").is_empty());
    }

    #[test]
    fn a_no_is_heard_although_the_program_exits_zero() {
        let said = |answer: &str| judge("quit", true, answer, "");
        assert!(matches!(said("Insufficient privileges"), Err(AskError::Refused { .. })));
        assert!(matches!(said("Not enough privilege to quit"), Err(AskError::Refused { .. })));
        assert!(matches!(said("Cannot find MPS control daemon process"), Err(AskError::Gone(_))));
        assert_eq!(said(" 25.0\n").unwrap(), "25.0");
        assert_eq!(said("").unwrap(), "");
        assert!(matches!(judge("x", false, "", ""), Err(AskError::Gone(_))));
    }

    #[test]
    fn a_socket_without_a_listener_is_nobody() {
        use nix::sys::socket::{Backlog, bind, listen};
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        assert!(!listens(&path));
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
        bind(fd.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        assert!(!listens(&path));
        listen(&fd, Backlog::new(4).unwrap()).unwrap();
        assert!(listens(&path));
        drop(fd);
        assert!(path.exists() && !listens(&path));
    }
}
