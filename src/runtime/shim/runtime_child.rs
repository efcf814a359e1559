//! The low-level runtime as a child process: it gets our signals, dies with us, and we end with its exit
//! status. The system calls between fork and exec, and the disposition of SIGCHLD, need `unsafe`.
#![allow(unsafe_code, reason = "fork hooks and signal dispositions")]

use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus};

use nix::sys::signal::{self, SigHandler, SigSet, SigmaskHow, Signal};
use nix::unistd::{Pid, getpid, getppid};

/// Signals that are passed on.
const FORWARDED: [Signal; 6] =
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2];

/// Runs `program` with `args` to its end.
pub(super) fn run(program: &Path, args: &[OsString]) -> io::Result<ExitStatus> {
    let mut signals: SigSet = FORWARDED.into_iter().collect();
    signals.add(Signal::SIGCHLD);
    // An ignored SIGCHLD, inherited, would take the exit status away from us.
    // SAFETY: no handler is installed, so no code of ours runs in signal context.
    unsafe { signal::signal(Signal::SIGCHLD, SigHandler::SigDfl) }?;
    let before = signals.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let status = spawn(program, args, before).and_then(|child| wait(child, &signals));
    before.thread_set_mask()?;
    status
}

/// Starts it with the signal mask `before` ours, to be killed when we are.
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

/// Waits for the end, passing signals on. Until it is reaped the child's pid cannot mean another process.
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

/// Our own end after the child's: its exit code, or the signal that ended it.
pub(super) fn exit_like(status: ExitStatus) -> ExitCode {
    let Some(number) = status.signal() else {
        return ExitCode::from(u8::try_from(status.code().unwrap_or(1)).unwrap_or(1));
    };
    // Not fatal where we inherited it as ignored: then the shell's code for it must do.
    if let Ok(signal) = Signal::try_from(number) {
        let _ = signal::raise(signal);
    }
    ExitCode::from(u8::try_from(128 + number).unwrap_or(1))
}
