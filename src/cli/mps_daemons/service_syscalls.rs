//! The system calls of [`super::detach`] that neither nix nor rustix has.
#![allow(unsafe_code, reason = "system calls; each block says why it is sound")]

use std::io;
use std::ptr::{null, null_mut};

use nix::libc::{self, c_int, c_long};

fn done(result: c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// `SCHED_OTHER`, for children too.
pub(super) fn schedule_normally() -> io::Result<()> {
    let normal = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel reads one sched_param, which lives until the call returns.
    done(unsafe { libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const normal) }.into())
}

/// `MPOL_DEFAULT`: memory from the nearest node.
pub(super) fn any_memory() -> io::Result<()> {
    // SAFETY: without nodes the kernel reads no memory of this process; existing pages stay where they are.
    done(unsafe {
        libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_DEFAULT, null::<libc::c_ulong>(), 0_usize)
    })
}

/// `IOPRIO_CLASS_NONE`: I/O priority follows the nice value.
pub(super) fn no_io_priority() -> io::Result<()> {
    const IOPRIO_WHO_PROCESS: c_int = 1;
    // SAFETY: only numbers are passed.
    done(unsafe { libc::syscall(libc::SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, 0) })
}

/// A new session keyring: `KEYCTL_JOIN_SESSION_KEYRING` without a name.
pub(super) fn own_keyring() -> io::Result<()> {
    const KEYCTL_JOIN_SESSION_KEYRING: c_int = 1;
    // SAFETY: without a name the kernel reads no memory of this process.
    done(unsafe { libc::syscall(libc::SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, null::<libc::c_char>()) })
}

/// Resets every ignored signal but SIGPIPE. This program ignores that one itself, and the standard library resets it
/// in every child. The kernel is asked directly, because the C library hides two signals.
pub(super) fn heed_signals() -> io::Result<()> {
    for signal in (1..=SIGNALS).filter(|signal| *signal != libc::SIGPIPE) {
        let mut now = Action::default();
        let none = null_mut::<Action>();
        // SAFETY: nothing is changed, and there is room for the answer.
        done(unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, none, &raw mut now, SIGNALS / 8) })?;
        if now[0] == SIG_IGN {
            let default = Action::default();
            // SAFETY: ignored signals become SIG_DFL, so no code of this program runs in signal context.
            done(unsafe {
                libc::syscall(libc::SYS_rt_sigaction, signal, &raw const default, none, SIGNALS / 8)
            })?;
        }
    }
    Ok(())
}

/// The number of signals on the supported machines (signal(7)).
const SIGNALS: c_int = 64;

/// The kernel's `struct sigaction`: the handler comes first, and zeros mean `SIG_DFL`.
type Action = [u64; 4];

/// The value for an ignored signal (signal.h).
const SIG_IGN: u64 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    /// These settings belong to the calling thread and end with it.
    #[test]
    fn keyring_memory_policy_and_io_priority_of_this_thread() {
        let keyring = || {
            // SAFETY: KEYCTL_GET_KEYRING_ID of the session keyring (-3), created if missing; only numbers are passed.
            unsafe { libc::syscall(libc::SYS_keyctl, 0, -3, 1) }
        };
        let io_priority = || {
            // SAFETY: only numbers are passed.
            unsafe { libc::syscall(libc::SYS_ioprio_get, 1, 0) }
        };
        let memory = || {
            let mut policy: c_int = -1;
            let nodes = null::<libc::c_ulong>();
            // SAFETY: the kernel writes one int and no nodes.
            done(unsafe {
                libc::syscall(libc::SYS_get_mempolicy, &raw mut policy, nodes, 0_usize, 0_usize, 0)
            })
            .map(|()| policy)
        };
        let before = keyring();
        own_keyring().unwrap();
        assert!(before > 0 && keyring() > 0 && keyring() != before);
        // IOPRIO_CLASS_BE (2), level 5.
        let best_effort = (2 << 13) | 5;
        // SAFETY: only numbers are passed.
        done(unsafe { libc::syscall(libc::SYS_ioprio_set, 1, 0, best_effort) }).unwrap();
        assert_eq!(io_priority(), best_effort);
        no_io_priority().unwrap();
        assert_ne!(io_priority(), best_effort);
        let (node, bits): (libc::c_ulong, usize) = (1, 64);
        // SAFETY: the kernel reads one word of nodes, which lives until the call returns.
        done(unsafe { libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_BIND, &raw const node, bits) })
            .unwrap();
        assert_eq!(memory().unwrap(), libc::MPOL_BIND);
        any_memory().unwrap();
        assert_eq!(memory().unwrap(), libc::MPOL_DEFAULT);
    }
}
