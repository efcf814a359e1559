//! Descriptors of processes. One never refers to a later process with the same pid, and is readable once the last thread
//! of its process has ended (`pidfd_open(2)`).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use super::Process;
use super::Stat;
use super::require_call;

impl Process {
    /// A descriptor of this same process; `None` if it has ended.
    ///
    /// # Errors
    /// It cannot be opened, or the process cannot be examined.
    pub fn hold(&self) -> io::Result<Option<OwnedFd>> {
        let held = pidfd_open(self.pid);
        // Read afterwards: if the pid was reused in between, this is another process.
        let lives = Stat::of(self.pid)?.is_some_and(|stat| self.is_alive_in(&stat));
        if lives { held.map(Some) } else { Ok(None) }
    }
}

/// A descriptor for process `pid` (closed on exec).
///
/// # Errors
/// There is no such process, or the kernel is too old.
pub fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    use rustix::process::{Pid, PidfdFlags};
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    rustix::process::pidfd_open(pid, PidfdFlags::empty()).map_err(|error| require_call("pidfd_open", error))
}

/// Sends SIGKILL to the process that `pidfd` refers to, and to no other (`pidfd_send_signal(2)`, Linux 5.1).
///
/// # Errors
/// It has ended, or this process has no permission to end it.
pub fn pidfd_kill(pidfd: impl AsFd) -> io::Result<()> {
    Ok(rustix::process::pidfd_send_signal(pidfd, rustix::process::Signal::KILL)?)
}

/// As [`pidfd_kill`], with another signal.
pub fn pidfd_signal(pidfd: impl AsFd, signal: Signal) -> io::Result<()> {
    let signal = rustix::process::Signal::from_named_raw(signal as i32).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::pidfd_send_signal(pidfd, signal)?)
}

/// Waits up to `longest` for the end of the process that `pidfd` refers to, and says whether it has ended.
pub fn pidfd_await_end(pidfd: impl AsFd, longest: Duration) -> bool {
    let mut awaited = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    poll(&mut awaited, PollTimeout::try_from(longest).unwrap_or(PollTimeout::MAX))
        .is_ok_and(|ready| ready > 0)
}
