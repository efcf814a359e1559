//! `delete`: the only command that the shim waits for, because the lease may be freed only after it succeeded.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use nix::sys::signal::{self, SigSet, SigmaskHow, Signal};
use nix::unistd::{Pid, getpid, getppid};

use super::Call;
use super::kill::find_without_first_thread;
use sublet_core::admit::Leases;
use sublet_core::ledger::LeaseId;
use sublet_core::process::inheritance::{self, effective_user};
use sublet_core::process::{pidfd_await_end, pidfd_kill};

/// The time limit for the end of a first process that is killed here.
const FIRST_PROCESS: Duration = Duration::from_secs(5);

/// Marks the lease as ending, deletes the container, frees the lease or leaves it as it was.
///
/// An error of the ledger never keeps a container from being deleted. The next command sees that the container has
/// ended.
/// With `force`, a first process whose first thread has ended is killed here: the runtime takes it for ended.
pub(super) fn delete(
    call: &Call<'_>,
    force: bool,
    container: Option<(&str, PathBuf)>,
) -> anyhow::Result<i32> {
    let found = container.and_then(|container| Some((container, call.config_with_leases()?)));
    let Some(((id, record), config)) = found else { return call.pass_on() };
    let leases = Leases::of(&config);
    let marked = leases.mark_ending(effective_user(), id, &record).unwrap_or_else(|error| {
        call.warn(&format!("container {}: {error}", sublet_core::text::safe(id)));
        None
    });
    let Some(lease) = marked else { return call.pass_on() };
    let first = if force { find_without_first_thread(&record) } else { None };
    if let Some(first) = first.filter(|first| pidfd_kill(first).is_ok()) {
        pidfd_await_end(first, FIRST_PROCESS);
    }
    let status = match run(&call.low_level.program, call.args) {
        Ok(status) => status,
        Err(error) => {
            unmark(call, &leases, &lease);
            return Err(call.cannot_run(&error));
        }
    };
    if !status.success() {
        unmark(call, &leases, &lease);
    } else if let Err(error) = leases.end(&lease) {
        call.warn(&format!("lease {lease} is not free yet: {error}"));
    }
    Ok(exit_like(status))
}

fn unmark(call: &Call<'_>, leases: &Leases<'_>, lease: &LeaseId) {
    if let Err(error) = leases.unmark(lease) {
        call.warn(&format!("lease {lease} stays marked as ending: {error}"));
    }
}

/// Signals that are passed on.
const FORWARDED: [Signal; 6] =
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2];

/// Runs the low-level runtime `program` with `args` to its end, and passes signals on to it.
fn run(program: &Path, args: &[OsString]) -> io::Result<ExitStatus> {
    let mut signals: SigSet = FORWARDED.into_iter().collect();
    signals.add(Signal::SIGCHLD);
    inheritance::reset_sigchld()?;
    let before = signals.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let status = spawn(program, args, before).and_then(|child| wait(child, &signals));
    before.thread_set_mask()?;
    status
}

/// Starts it with the signal mask `before`. It is killed when this process is killed.
#[allow(unsafe_code, reason = "a fork hook")]
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
fn exit_like(status: ExitStatus) -> i32 {
    let Some(number) = status.signal() else { return status.code().unwrap_or(1) };
    // The signal is not fatal if it was inherited as ignored. The shell's exit code for it is used then.
    if let Ok(signal) = Signal::try_from(number) {
        let _ = signal::raise(signal);
    }
    128 + number
}
