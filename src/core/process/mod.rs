//! Processes: identifying one by pid and start time, so that a reused pid is not mistaken for it; running commands;
//! what a process inherits; and giving up rights.

pub mod auxiliary_vector;
pub mod child;
pub mod confine;
pub mod environment;
pub mod inheritance;
pub(crate) mod processor_wait;
pub mod sockets;
pub mod sublet;

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use nix::errno::Errno;
use nix::libc::ESRCH;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// A process of this boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Process {
    /// Its id in this process's PID namespace.
    pub pid: i32,
    /// When it started, in clock ticks since boot: field 22 of `/proc/PID/stat` (proc(5)).
    pub start_time: u64,
}

impl Process {
    /// The running process `pid`; `None` if there is none.
    #[must_use]
    pub fn find(pid: i32) -> Option<Self> {
        stat(pid).ok()?.map(|stat| Self { pid, start_time: stat.start_time })
    }

    /// The running process `pid`; `None` if there is none.
    ///
    /// # Errors
    /// It cannot be examined.
    pub fn examine(pid: i32) -> io::Result<Option<Self>> {
        Ok(stat(pid)?.map(|stat| Self { pid, start_time: stat.start_time }))
    }

    /// The pid of its parent; `None` if the process has ended.
    #[must_use]
    pub fn parent(&self) -> Option<i32> {
        stat(self.pid).ok()?.filter(|stat| stat.start_time == self.start_time).map(|stat| stat.parent)
    }

    /// This process.
    ///
    /// # Errors
    /// /proc is not mounted, or hides this process.
    pub fn current() -> std::io::Result<Self> {
        let pid = i32::try_from(std::process::id()).unwrap_or(i32::MAX);
        Self::find(pid).ok_or_else(|| std::io::Error::other(format!("/proc/{pid}/stat cannot be read")))
    }

    /// Whether it was started with this variable. `false` also if this process has no right to read its environment.
    ///
    /// # Errors
    /// Its environment cannot be read for another reason.
    pub fn has_environment(&self, name: &str, value: &Path) -> io::Result<bool> {
        let wanted = [name.as_bytes(), b"=", value.as_os_str().as_bytes()].concat();
        let environment = match std::fs::read(format!("/proc/{}/environ", self.pid)) {
            Err(error) if is_gone(&error) || error.kind() == io::ErrorKind::PermissionDenied => {
                return Ok(false);
            }
            environment => environment?,
        };
        Ok(environment.split(|byte| *byte == 0).any(|entry| entry == wanted) && self.is_alive())
    }

    /// Whether a process with the id `pid` runs, or cannot be examined.
    #[must_use]
    pub(crate) fn may_run(pid: i32) -> bool {
        stat(pid).map_or(true, |stat| stat.is_some_and(|stat| !stat.has_ended()))
    }

    /// Whether this same process still runs. A zombie does not count as running, because it holds no resources. A
    /// process that cannot be examined, for example because no file descriptor is left, counts as running.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let runs = |stat: Stat| stat.start_time == self.start_time && !stat.has_ended();
        stat(self.pid).map_or(true, |stat| stat.is_some_and(runs))
    }

    /// Whether its pid exists, perhaps as another process or as a zombie. `true` if that cannot be found out.
    #[must_use]
    pub(crate) fn has_pid(&self) -> bool {
        self.pid > 0 && kill(Pid::from_raw(self.pid), None) != Err(Errno::ESRCH)
    }

    /// Whether this same process is being ended. Its memory goes first, and its sockets take connections until its files
    /// are closed (`do_exit` in the kernel's kernel/exit.c).
    #[must_use]
    pub(crate) fn is_ending(&self) -> bool {
        let ending = |stat: Stat| stat.start_time == self.start_time && stat.memory == 0;
        stat(self.pid).ok().flatten().is_some_and(ending)
    }

    /// Whether this same process is stopped, by a signal or by a tracer (proc(5)).
    #[must_use]
    pub(crate) fn is_stopped(&self) -> bool {
        stat(self.pid)
            .ok()
            .flatten()
            .is_some_and(|stat| stat.start_time == self.start_time && matches!(stat.state, 'T' | 't'))
    }
}

/// Whether the first thread of `pid` runs, or would if it had a processor (proc(5)).
fn is_ready(pid: i32) -> bool {
    stat(pid).ok().flatten().is_some_and(|stat| stat.state == 'R')
}

/// Seconds since the epoch; 0 if the clock is before it.
#[must_use]
pub fn epoch_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Seconds since boot, on a clock that cannot be set (proc(5), `/proc/uptime`); 0 without /proc.
#[must_use]
pub fn uptime_seconds() -> u64 {
    let text = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
    text.split('.').next().and_then(|seconds| seconds.parse().ok()).unwrap_or(0)
}

/// Milliseconds since boot, as [`uptime_seconds`]; the kernel writes hundredths.
#[must_use]
pub(crate) fn uptime_milliseconds() -> u64 {
    let text = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
    let Some((seconds, rest)) = text.split_once('.') else { return 0 };
    let hundredths: u64 = rest.get(..2).and_then(|digits| digits.parse().ok()).unwrap_or(0);
    seconds.parse().map_or(0, |seconds: u64| seconds.saturating_mul(1000) + hundredths * 10)
}

struct Stat {
    state: char,
    parent: i32,
    start_time: u64,
    /// Its virtual memory, in bytes (`vsize`); 0 once it has given it up.
    memory: u64,
}

impl Stat {
    fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }
}

/// `None`: there is no such process.
fn stat(pid: i32) -> io::Result<Option<Stat>> {
    // One read is enough: the line has at most 52 numbers and a command name of 15 bytes (proc(5)).
    let mut line = [0; 1024];
    match File::open(format!("/proc/{pid}/stat")).and_then(|mut file| file.read(&mut line)) {
        Ok(length) => parse_stat(&String::from_utf8_lossy(&line[..length]))
            .map(Some)
            .ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat does not describe a process"))),
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a file of /proc could not be read because its process has ended: if it ends while the file is open, reading
/// fails with ESRCH.
#[must_use]
pub fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(ESRCH)
}

/// The command name in field 2 may contain spaces and parentheses, so fields are counted from the last `)`.
fn parse_stat(text: &str) -> Option<Stat> {
    let mut fields = text[text.rfind(')')? + 1..].split_ascii_whitespace();
    Some(Stat {
        state: fields.next()?.chars().next()?,
        parent: fields.next()?.parse().ok()?,
        start_time: fields.nth(17)?.parse().ok()?,
        memory: fields.next()?.parse().ok()?,
    })
}

/// A descriptor for process `pid`, which never refers to a later process with the same pid (`pidfd_open(2)`, Linux 5.3;
/// closed on exec).
///
/// # Errors
/// There is no such process.
pub fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    use rustix::process::{Pid, PidfdFlags};
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}

/// Sends SIGKILL to the process that `pidfd` refers to, and to no other (`pidfd_send_signal(2)`, Linux 5.1).
///
/// # Errors
/// It has ended, or this process has no permission to end it.
pub fn pidfd_kill(pidfd: impl AsFd) -> io::Result<()> {
    Ok(rustix::process::pidfd_send_signal(pidfd, rustix::process::Signal::KILL)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_start_time_behind_a_hostile_command_name() {
        let stat =
            parse_stat("7 (a) R 1 (b) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20").unwrap();
        assert_eq!((stat.state, stat.parent, stat.start_time, stat.memory), ('S', 1, 4242, 20));
    }

    #[test]
    fn a_process_without_memory_is_ending() {
        let mut child = std::process::Command::new("/bin/sleep").arg("60").spawn().unwrap();
        let process = Process::find(i32::try_from(child.id()).unwrap()).unwrap();
        assert!(!process.is_ending());
        child.kill().unwrap();
        // It stays a zombie until it is waited for.
        while process.is_alive() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(process.is_ending());
        child.wait().unwrap();
        assert!(!process.is_ending(), "it is gone");
    }

    #[test]
    fn a_reused_pid_is_another_process() {
        let me = Process::current().unwrap();
        assert!(me.is_alive());
        assert!(!Process { start_time: me.start_time + 1, ..me }.is_alive());
    }
}
