//! A hook does its work in a confined process: it has only the Linux capabilities of its stage, starts no programs, and
//! may not make the system calls that no hook needs.
//!
//! Child processes, including MPS daemons, keep a seccomp filter for ever, and with `no_new_privs` they cannot regain
//! dropped rights. So the process that the engine started keeps its rights; it only waits and runs the few commands
//! that its child asks for ([`command_requests`]). The child does the work.
#![allow(unsafe_code, reason = "fork(2)")]

mod command_requests;
mod seccomp_filter;

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;

use caps::Capability::{
    CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER, CAP_MKNOD, CAP_NET_ADMIN, CAP_SETGID,
    CAP_SETUID, CAP_SYS_ADMIN, CAP_SYS_CHROOT, CAP_SYS_PTRACE,
};
use caps::{CapSet, CapsHashSet};
use nix::libc::{EAGAIN, EMFILE, ENFILE, ENOMEM};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, getpid, getppid};

use super::{forget_own_pid, inheritance};

pub(crate) use command_requests::is_confined;
pub use command_requests::{run, start};
pub use seccomp_filter::refuse_drivers;

/// The command that these words (the program's name and its arguments) ask for; `None` if hooks do not run it.
pub type Commands = fn(&[&str]) -> Option<std::process::Command>;

/// Closes inherited descriptors except the first three, and removes the variables that a hook does not read: they may come
/// from the image (CVE-2025-23266). To be called before anything is opened and before there are threads.
pub fn clean() {
    inheritance::close_descriptors();
    inheritance::clear_environment();
}

/// The rights that one kind of work needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// For binding and ending a lease: the ledger, /proc, and removing mount points from root filesystems.
    Ledger,
    /// For taking a lease and editing config.json: in addition, missing device nodes are created on the host.
    Share,
    /// For giving a share to an existing container: in addition, its mount namespace is entered and its device cgroup
    /// changed.
    Container,
    /// For giving a running container the nodes of another GPU: in addition, mounts are taken away there.
    Running,
}

impl Rights {
    /// The Linux capabilities (capabilities(7)).
    fn capabilities(self) -> CapsHashSet {
        // The first three are for files of any owner: in images, in bundles, and files of users below them. The last is for
        // reading the namespaces, environment and root of a process with more rights (proc(5)); the filter refuses ptrace(2)
        // itself.
        let ledger = [CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER, CAP_SYS_PTRACE];
        // For creating device nodes on the host.
        let share = [CAP_MKNOD, CAP_CHOWN];
        // setns(2) requires the first two. Files are created as the root of the container's user namespace (setfsuid(2)).
        // Attaching a device program requires `NET_ADMIN` before Linux 6.9 (kernel/bpf/syscall.c, `bpf_prog_attach`).
        let container = [CAP_SYS_ADMIN, CAP_SYS_CHROOT, CAP_SETUID, CAP_SETGID, CAP_NET_ADMIN];
        let (share, container): (&[_], &[_]) = match self {
            Self::Ledger => (&[], &[]),
            Self::Share => (&share, &[]),
            Self::Container | Self::Running => (&share, &container),
        };
        [&ledger, share, container].into_iter().flatten().copied().collect()
    }

    /// Keeps these capabilities, as far as this process has them. The rest cannot be regained.
    fn keep(self) -> io::Result<()> {
        let failed = |error: caps::errors::CapsError| io::Error::other(error.to_string());
        let permitted = caps::read(None, CapSet::Permitted).map_err(failed)?;
        let kept = permitted.intersection(&self.capabilities()).copied().collect();
        caps::set(None, CapSet::Inheritable, &CapsHashSet::new()).map_err(failed)?;
        // The effective set first, because it must be a subset of the permitted set.
        [CapSet::Effective, CapSet::Permitted]
            .into_iter()
            .try_for_each(|set| caps::set(None, set, &kept))
            .map_err(failed)
    }
}

/// Gives up the rights that this work does not need after all.
pub fn drop_rights(rights: Rights) {
    if let Err(error) = rights.keep() {
        tracing::warn!("the hook could not drop rights that it does not need: {error}");
    }
}

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
            let _ = command_requests::OUTSIDE.set(inside);
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
    if let Err(errno) = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL) {
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
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_once_given_up_do_not_come_back() {
        let have = |set| caps::read(None, set).unwrap();
        // Capabilities belong to a thread.
        let seen = std::thread::spawn(move || {
            let before = have(CapSet::Permitted);
            Rights::Share.keep().unwrap();
            Rights::Ledger.keep().unwrap();
            let after = (have(CapSet::Permitted), have(CapSet::Effective));
            Rights::Container.keep().unwrap();
            assert!(have(CapSet::Inheritable).is_empty());
            (before, after, (have(CapSet::Permitted), have(CapSet::Effective)))
        });
        let (before, after, last) = seen.join().unwrap();
        let ledger: CapsHashSet = before.intersection(&Rights::Ledger.capabilities()).copied().collect();
        assert_eq!(after, (ledger.clone(), ledger));
        assert_eq!(after, last);
    }
}
