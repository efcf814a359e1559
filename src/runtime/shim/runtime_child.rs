//! The low-level runtime as a child process. The shim passes its signals to the child and ends with the child's exit
//! status. If the shim is killed, the child is killed, too. The system calls between fork and exec need
//! `unsafe`.
#![allow(unsafe_code, reason = "fork hooks")]

use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};

use nix::sys::signal::{self, SigSet, SigmaskHow, Signal};
use nix::unistd::{Pid, getpid, getppid};
use sublet_core::process::inheritance;

/// Signals that are passed on.
const FORWARDED: [Signal; 6] =
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2];

/// Runs `program` with `args` to its end.
pub(super) fn run(program: &Path, args: &[OsString]) -> io::Result<ExitStatus> {
    let mut signals: SigSet = FORWARDED.into_iter().collect();
    signals.add(Signal::SIGCHLD);
    inheritance::reset_sigchld()?;
    let before = signals.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let status = spawn(program, args, before).and_then(|child| wait(child, &signals));
    before.thread_set_mask()?;
    status
}

/// Starts it with the signal mask `before`. It is killed when this process is killed.
fn spawn(program: &Path, args: &[OsString], before: SigSet) -> io::Result<Child> {
    let parent = getpid();
    let mut command = Command::new(program);
    command.args(args);
    let die_with_parent = move || {
        before.thread_set_mask()?;
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
        // The parent may have died before that.
        if getppid() == parent { Ok(()) } else { Err(io::Error::from(io::ErrorKind::NotFound)) }
    };
    // SAFETY: between fork and exec the closure makes three system calls, sigprocmask, prctl and getppid, all
    // async-signal-safe; it allocates nothing and takes no lock.
    unsafe { command.pre_exec(die_with_parent) };
    command.spawn()
}

/// Waits for the child's end and passes signals on. Until the child is reaped, its pid cannot mean another process.
fn wait(mut child: Child, signals: &SigSet) -> io::Result<ExitStatus> {
    let pid = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        match signals.wait() {
            Ok(Signal::SIGCHLD) | Err(nix::errno::Errno::EINTR) => {}
            Ok(signal) => signal::kill(pid, signal)?,
            Err(error) => return Err(error.into()),
        }
    }
}

/// Ends this process as the child ended: with the exit status that is returned, or by the signal that ended it.
pub(super) fn exit_like(status: ExitStatus) -> u8 {
    let Some(number) = status.signal() else {
        return u8::try_from(status.code().unwrap_or(1)).unwrap_or(1);
    };
    // The signal is not fatal if it was inherited as ignored. The shell's exit code for it is used then.
    if let Ok(signal) = Signal::try_from(number) {
        let _ = signal::raise(signal);
    }
    u8::try_from(128 + number).unwrap_or(1)
}
