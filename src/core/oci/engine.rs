//! Whether the engine that asked for a container still runs. Taking a lease may last as long as `sublet.wait`
//! says. If the engine has ended meanwhile, the container must not be created, because nothing would end it.

use std::cell::Cell;
use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::process::{Named, Process};

/// The variable with which conmon gets its end of a socket pair or pipe (conmon, `src/conmon.c`). Podman and CRI-O wait
/// at the other end for the container's pid, and no other process has that end.
const SYNC_PIPE: &[u8] = b"_OCI_SYNCPIPE=";

/// The process that started this program, and the engine behind it if a monitor is in between.
///
/// A monitor outlives its engine: Podman's conmon goes on creating the container of a `podman run` that was killed.
#[derive(Debug)]
pub struct Engine {
    caller: Process,
    /// It hangs up once the engine has ended.
    pipe: Option<OwnedFd>,
    waited: Cell<bool>,
}

impl Engine {
    /// The engine behind process `caller`, which started this process; `None` if `caller` has already ended.
    ///
    /// If the kernel (`pidfd_getfd(2)`, Linux 5.6) or missing rights prevent the check, the engine counts as running.
    #[must_use]
    pub fn of(caller: i32) -> Option<Self> {
        let caller = Named::find(caller)?;
        let pipe = sync_pipe(&caller).or_else(|| sync_pipe(&Named::find(caller.parent)?));
        let caller = caller.process;
        Some(Self { caller, pipe, waited: Cell::new(false) })
    }

    /// Waits before the next look for a share.
    pub fn wait(&self, pause: Duration) {
        self.waited.set(true);
        std::thread::sleep(pause);
    }

    /// Whether the engine has ended, or has given the container up. The caller's own end counts where the share had to
    /// be waited for: a shell that puts a container into the background ends at once.
    pub fn is_gone(&self) -> bool {
        self.waited.get() && !self.caller.is_alive() || self.pipe.as_ref().is_some_and(is_hung_up)
    }
}

/// The end of the sync pipe that a process has, if it is conmon.
fn sync_pipe(process: &Named) -> Option<OwnedFd> {
    let pid = process.process.pid;
    if process.name != "conmon" {
        return None;
    }
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let number = environment.split(|byte| *byte == 0).find_map(|entry| entry.strip_prefix(SYNC_PIPE))?;
    let number = std::str::from_utf8(number).ok()?.parse().ok()?;
    let conmon = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
    pidfd_getfd(conmon, number, PidfdGetfdFlags::empty()).ok()
}

/// Whether no process has the other end: a socket pair hangs up, and a pipe without a reader is broken.
fn is_hung_up(pipe: &OwnedFd) -> bool {
    let mut pipe = [PollFd::new(pipe.as_fd(), PollFlags::empty())];
    let ended = PollFlags::POLLHUP | PollFlags::POLLERR;
    poll(&mut pipe, PollTimeout::ZERO).is_ok() && pipe[0].revents().is_some_and(|seen| seen.intersects(ended))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    /// A program that is called conmon, with `pipe` as its end.
    fn conmon(dir: &std::path::Path, pipe: OwnedFd) -> Child {
        let program = dir.join("conmon");
        if !program.exists() {
            std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
        }
        // The standard library hands down what becomes standard input.
        let mut command = Command::new(program);
        command.arg("60").env("_OCI_SYNCPIPE", "0").stdin(pipe);
        command.spawn().unwrap()
    }

    fn eventually(holds: impl Fn() -> bool) -> bool {
        (0..500).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            holds()
        })
    }

    #[test]
    fn an_engine_is_gone_when_nobody_has_the_other_end_of_its_monitors_pipe() {
        let dir = tempfile::tempdir().unwrap();
        let socket = |kind| {
            let flags = nix::sys::socket::SockFlag::SOCK_CLOEXEC;
            nix::sys::socket::socketpair(nix::sys::socket::AddressFamily::Unix, kind, None, flags).unwrap()
        };
        for (engines, monitors) in [
            socket(nix::sys::socket::SockType::SeqPacket),
            nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap(),
        ] {
            let mut monitor = conmon(dir.path(), monitors);
            let pid = i32::try_from(monitor.id()).unwrap();
            assert!(eventually(|| sync_pipe(&Named::find(pid).unwrap()).is_some()));
            let engine = Engine::of(pid).unwrap();
            assert!(!engine.is_gone());
            drop(engines);
            assert!(eventually(|| engine.is_gone()));
            monitor.kill().unwrap();
            monitor.wait().unwrap();
        }
    }

    #[test]
    fn a_callers_end_counts_where_it_was_waited() {
        let mut caller = Command::new("sleep").arg("60").spawn().unwrap();
        let engine = Engine::of(i32::try_from(caller.id()).unwrap()).unwrap();
        engine.waited.set(true);
        assert!(!engine.is_gone());
        caller.kill().unwrap();
        assert!(eventually(|| engine.is_gone()), "a zombie waits for nobody");
        engine.waited.set(false);
        assert!(!engine.is_gone());
        caller.wait().unwrap();
    }
}
