//! The two processes of a hook: one that the engine started and that waits, and its child that works.
#![allow(unsafe_code, reason = "fork(2)")]

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, getpid, getppid};

use super::{Commands, Rights, command_requests, seccomp_filter};

/// Who started the hook, where the work is a child's.
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

/// Makes a child with `rights` alone, which may ask for `commands`, and returns in it. Returns in the process that called
/// it once the child has ended. Before there are threads.
///
/// # Errors
/// No process can be made, or it was killed.
pub fn split(rights: Rights, commands: Commands) -> io::Result<Side> {
    let (outside, inside) = UnixStream::pair()?;
    let (engine, parent) = (getppid(), getpid());
    // SAFETY: hooks have one thread: no lock is held by another that the child would not have.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => {
            drop(inside);
            command_requests::serve(&outside, commands);
            end_of(child).map(Side::Waited)
        }
        ForkResult::Child => {
            drop(outside);
            let _ = ENGINE.set(engine);
            command_requests::ask_of(inside);
            if !confined(rights, parent) {
                std::process::exit(1);
            }
            Ok(Side::Worker)
        }
    }
}

/// Gives up what `rights` do not need. `false`: nobody waits for this process any more.
///
/// A kernel that cannot do it has done without until now: that is said, and the container starts.
fn confined(rights: Rights, parent: Pid) -> bool {
    let confined = rustix::thread::set_no_new_privs(true)
        .map_err(io::Error::from)
        .and_then(|()| rights.keep())
        .and_then(|()| seccomp_filter::install(rights));
    if let Err(error) = confined {
        tracing::warn!("the hook could not drop rights that it does not need: {error}");
    }
    // Engines that lose patience kill whom they started. Last: a change of rights may take it back (prctl(2)).
    set_pdeathsig(Signal::SIGKILL).is_ok() && getppid() == parent
}

fn end_of(child: Pid) -> io::Result<bool> {
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
