//! `kill`, `update` and `delete` of a container that exists.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::str::FromStr as _;
use std::time::Duration;

use nix::sys::signal::{self, SigSet, SigmaskHow, Signal};
use nix::unistd::{Pid, getpid, getppid};

use super::{Call, Dialect};
use sublet_core::admit::Leases;
use sublet_core::ledger::Record;
use sublet_core::oci::JsonFile;
use sublet_core::process::inheritance::{self, effective_user};
use sublet_core::process::{pidfd_await_end, pidfd_kill, pidfd_signal};
use sublet_core::text::safe;

/// Sends the signal to the first process itself where the runtime would not. With `--all` the runtime runs, too.
///
/// Its first process may go on after its first thread has ended, as any program can have it. runc and crun take such a
/// container for stopped and send it no signal, and an engine waits for its end for ever.
pub(super) fn kill(call: &Call<'_>, signal: Option<&OsStr>, all: bool) -> anyhow::Result<i32> {
    let signal = signal.map_or(Some(Signal::SIGTERM), parse_signal);
    let first = call.container().and_then(|(_, record)| find_without_first_thread(&record));
    let sent = signal.zip(first).is_some_and(|(signal, first)| pidfd_signal(first, signal).is_ok());
    if sent && !all { Ok(nix::libc::EXIT_SUCCESS) } else { call.pass_on() }
}

/// The first process of the container with a share and this `record`, if only its first thread has ended.
fn find_without_first_thread(record: &Path) -> Option<OwnedFd> {
    let first = Record::read(record).ok()?.filter(|record| record.lease.is_some())?.init;
    if first.has_first_thread() { None } else { first.hold().ok()? }
}

/// As runc and crun parse it: a number, or a name with or without `SIG`.
fn parse_signal(word: &OsStr) -> Option<Signal> {
    let word = word.to_str()?;
    if let Ok(number) = word.parse::<i32>() {
        return Signal::try_from(number).ok();
    }
    let name = word.to_ascii_uppercase();
    Signal::from_str(&if name.starts_with("SIG") { name } else { format!("SIG{name}") }).ok()
}

/// Refuses a change that would take the GPU away from a container with a share.
///
/// An engine may pass a list of devices with every change, as Podman 5.4 does. runc then leaves devices as they are; crun
/// closes all that are not in the list, the container's GPU too.
pub(super) fn update(call: &Call<'_>, resources: Option<&Path>) -> anyhow::Result<i32> {
    let (Some((id, record)), Some(file)) = (call.container(), resources) else { return call.pass_on() };
    if call.low_level.dialect == Dialect::Runc || !call.has_share(id, &record)? {
        return call.pass_on();
    }
    // If crun cannot read it either, nothing changes. `-` is standard input, which belongs to crun.
    let resources = JsonFile::read(file).and_then(|file| file.parse()).unwrap_or_default();
    let devices = resources.get("devices").and_then(serde_json::Value::as_array);
    if devices.is_none_or(Vec::is_empty) {
        return call.pass_on();
    }
    anyhow::bail!(
        "this update would take the container's GPU away: the engine passes a list of devices with it that lacks the \
         share's, and crun closes all others. Recreate the container with these settings, or put runc first in \
         `[runtime] low_level`, which leaves devices as they are"
    )
}

/// The time limit for the end of a first process that is killed here.
const FIRST_PROCESS: Duration = Duration::from_secs(5);

/// The only command that the shim waits for, because the lease may be freed only after it succeeded.
///
/// Marks the lease as ending, deletes the container, frees the lease or leaves it as it was.
///
/// An error of the ledger never keeps a container from being deleted. The next command sees that the container has
/// ended.
/// With `force`, a first process whose first thread has ended is killed here: the runtime takes it for ended.
pub(super) fn delete(call: &Call<'_>, force: bool) -> anyhow::Result<i32> {
    let found = call.container().and_then(|container| Some((container, call.config_with_leases()?)));
    let Some(((id, record), config)) = found else { return call.pass_on() };
    let leases = Leases::of(&config);
    let marked = leases.mark_ending(effective_user(), id, &record).unwrap_or_else(|error| {
        call.warn(&format!("container {}: {error}", safe(id)));
        None
    });
    let Some(lease) = marked else { return call.pass_on() };
    let first = if force { find_without_first_thread(&record) } else { None };
    if let Some(first) = first.filter(|first| pidfd_kill(first).is_ok()) {
        pidfd_await_end(first, FIRST_PROCESS);
    }
    let status = run(&call.low_level.program, call.args);
    if !status.as_ref().is_ok_and(ExitStatus::success) {
        if let Err(error) = leases.unmark(&lease) {
            call.warn(&format!("lease {lease} stays marked as ending: {error}"));
        }
    } else if let Err(error) = leases.end(&lease) {
        call.warn(&format!("lease {lease} is not free yet: {error}"));
    }
    Ok(exit_like(status.map_err(|error| call.cannot_run(&error))?))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_has_a_number_or_a_name() {
        for word in ["15", "TERM", "SIGTERM", "term"] {
            assert_eq!(parse_signal(word.as_ref()), Some(Signal::SIGTERM), "{word}");
        }
        for word in ["", "0", "-9", "99", "RTMIN+3", "SIG", "KILL "] {
            assert_eq!(parse_signal(word.as_ref()), None, "{word}");
        }
    }
}
