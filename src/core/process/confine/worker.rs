//! The two processes of a hook: the one that the engine started, which waits, and its child, which does the work.
#![allow(unsafe_code, reason = "fork(2)")]

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::libc::{EAGAIN, EMFILE, ENFILE, ENOMEM};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, getpid, getppid};

use super::super::{forget_own_pid, inheritance};
use super::{Commands, Rights, command_requests, seccomp_filter};

/// The process that started the hook, if a child does the work.
static ENGINE: OnceLock<Pid> = OnceLock::new();

/// The process that started this hook, by its pid.
pub fn engine() -> i32 {
    ENGINE.get().copied().unwrap_or_else(getppid).as_raw()
}

/// Which of the two processes this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The child, which is to do the work.
    Worker,
    /// The process that the engine started; its child has ended, and this is whether it succeeded.
    Waited(bool),
}

/// Makes a child with `rights` alone, which may ask for `commands`, and returns in it. Returns in the process that
/// called it once the child has ended. Before there are threads.
///
/// # Errors
/// No process can be made, or it was killed.
pub fn fork_worker(rights: Rights, commands: Commands) -> io::Result<Side> {
    let (outside, inside) = UnixStream::pair()?;
    let (engine, parent) = (getppid(), getpid());
    inheritance::reset_sigchld()?;
    // SAFETY: hooks have one thread, so no other thread can hold a lock that the child would need.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => {
            drop(inside);
            command_requests::serve(&outside, commands);
            // If the child could not be heard or answered any more, it must not wait for an answer.
            drop(outside);
            await_worker(child).map(Side::Waited)
        }
        ForkResult::Child => {
            drop(outside);
            forget_own_pid();
            let _ = ENGINE.set(engine);
            command_requests::set_outside(inside);
            if !confine(rights, parent) {
                std::process::exit(1);
            }
            Ok(Side::Worker)
        }
    }
}

/// Gives up everything except `rights`. `false`: the parent that would wait for this process has ended, or the kernel has
/// no memory for it.
///
/// A kernel that does not support this has worked without it until now: a warning is printed, and the container starts.
fn confine(rights: Rights, parent: Pid) -> bool {
    let confined = rustix::thread::set_no_new_privs(true)
        .map_err(io::Error::from)
        .and_then(|()| rights.keep())
        .and_then(|()| seccomp_filter::install(rights));
    if let Err(error) = confined {
        tracing::warn!("the hook could not drop rights that it does not need: {error}");
        // A kernel that supports it had no room for it at that moment.
        if error.raw_os_error().is_some_and(|errno| [EAGAIN, EMFILE, ENFILE, ENOMEM].contains(&errno)) {
            return false;
        }
    }
    // An engine whose timeout ends kills the process that it started. This call is the last, because a change of rights
    // may reset it (prctl(2)).
    if let Err(errno) = set_pdeathsig(Signal::SIGKILL) {
        tracing::warn!(
            "the hook could not make sure that it ends with the process that it works for: {errno}"
        );
        return false;
    }
    getppid() == parent
}

fn await_worker(child: Pid) -> io::Result<bool> {
    loop {
        match waitpid(child, None) {
            Ok(WaitStatus::Exited(_, code)) => return Ok(code == 0),
            Ok(WaitStatus::Signaled(_, signal, _)) => {
                return Err(io::Error::other(format!("its work was ended by {signal}")));
            }
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
