//! Which user a client is and which user a process belongs to, as reported by the kernel and not by the client.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::libc;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

use sublet_core::admit::Owns;
use sublet_core::ledger::Lease;
use sublet_core::process::{Process, pidfd_await_end, pidfd_kill, pidfd_open};

/// User namespaces are nested 32 deep at most (`user_namespaces(7)`).
const DEEPEST: usize = 33;

/// The process that opened the connection (`SO_PEERCRED`, `unix(7)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    /// Its pid in this PID namespace; 0 if it is not visible here.
    pub pid: i32,
    /// Its effective uid in this user namespace.
    pub uid: u32,
}

impl Peer {
    pub(crate) fn of(stream: &UnixStream) -> io::Result<Self> {
        let credentials = getsockopt(stream, PeerCredentials)?;
        Ok(Self { pid: credentials.pid(), uid: credentials.uid() })
    }
}

/// Why a process that a client names is not accepted as the client's.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Foreign {
    #[error("there is no process {0}, or it has ended")]
    Gone(i32),
    #[error("process {pid} does not belong to uid {uid}")]
    Other { pid: i32, uid: u32 },
    #[error("cannot read process {pid}: {source}")]
    Unknown { pid: i32, source: io::Error },
}

/// A process that belongs to a user, held by a pidfd so that its pid cannot be reused unnoticed.
#[derive(Debug)]
pub(crate) struct Pinned {
    pub process: Process,
    pidfd: OwnedFd,
}

impl Pinned {
    /// Process `pid`, if it belongs to `uid`: it runs as `uid` only, or in a user namespace that `uid` created, or in
    /// one below such a namespace.
    ///
    /// Call it again before acting on a process that was checked earlier.
    ///
    /// # Errors
    /// The process belongs to another user, or has ended.
    pub(crate) fn of(pid: i32, uid: u32) -> Result<Self, Foreign> {
        // Elsewhere 0 and -1 mean groups of processes.
        if pid <= 0 {
            return Err(Foreign::Gone(pid));
        }
        let unknown = |source: io::Error| match source.raw_os_error() {
            Some(libc::ESRCH | libc::ENOENT) => Foreign::Gone(pid),
            _ => Foreign::Unknown { pid, source },
        };
        let pidfd = pidfd_open(pid).map_err(unknown)?;
        let process = Process::find(pid).ok_or(Foreign::Gone(pid))?;
        if !is_of(pid, uid).map_err(unknown)? {
            return Err(Foreign::Other { pid, uid });
        }
        let pinned = Self { process, pidfd };
        // The facts read under this pid belong to the process only if it has not ended since.
        if pinned.is_alive() { Ok(pinned) } else { Err(Foreign::Gone(pid)) }
    }

    fn is_alive(&self) -> bool {
        !pidfd_await_end(&self.pidfd, Duration::ZERO)
    }
}

/// [`owns`], for processes of users' containers that are ended.
pub(crate) const OWNS: Owns<'static> = &|process, uid| owns(process.pid, uid);

/// Whether process `pid` belongs to `uid`, by the rules of [`Pinned::of`].
pub(crate) fn owns(pid: i32, uid: u32) -> bool {
    Pinned::of(pid, uid).is_ok()
}

/// Whether a process of `lease` may be ended: of a lease without root, the user names the container's processes.
pub(crate) fn is_theirs(process: Process, lease: Option<&Lease>) -> bool {
    lease.is_none_or(|lease| !lease.brokered || owns(process.pid, lease.container.uid))
}

/// Ends the container by its first process: the kernel then ends all other processes in its PID namespace
/// (`pid_namespaces(7)`).
pub(crate) fn end_container(lease: &Lease) -> Option<String> {
    let init = lease.init.as_ref()?.process;
    let pidfd = init.hold().ok()??;
    let ended = is_theirs(init, Some(lease)).then(|| pidfd_kill(pidfd))?;
    Some(match ended {
        Ok(()) => "its container was ended".to_owned(),
        Err(error) => format!("its container cannot be ended: {error}"),
    })
}

/// Whether process `pid` is in a user namespace of its own.
pub(crate) fn has_user_namespace(pid: i32) -> bool {
    let namespace = |who: &str| File::open(format!("/proc/{who}/ns/user")).and_then(|file| identity(&file));
    matches!((namespace(&pid.to_string()), namespace("self")), (Ok(its), Ok(ours)) if its != ours)
}

fn is_of(pid: i32, uid: u32) -> io::Result<bool> {
    let own = identity(&File::open("/proc/self/ns/user")?)?;
    let mut namespace = OwnedFd::from(File::open(format!("/proc/{pid}/ns/user"))?);
    if identity(&namespace)? == own {
        return runs_as(pid, uid);
    }
    for _ in 0..DEEPEST {
        if owner_of(namespace.as_fd())? == uid {
            return Ok(true);
        }
        namespace = parent_of(namespace.as_fd())?;
        if identity(&namespace)? == own {
            break;
        }
    }
    Ok(false)
}

fn identity(namespace: &impl AsFd) -> io::Result<(u64, u64)> {
    let found = File::from(namespace.as_fd().try_clone_to_owned()?).metadata()?;
    Ok((found.dev(), found.ino()))
}

/// Whether its real, effective, saved and filesystem uids are all `uid`. A set-user-ID program that the user started
/// does not belong to the user.
fn runs_as(pid: i32, uid: u32) -> io::Result<bool> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    let mut uids = uids.split_ascii_whitespace().map(str::parse).peekable();
    Ok(uids.peek().is_some() && uids.all(|found| found == Ok(uid)))
}

/// `NS_GET_PARENT` and `NS_GET_OWNER_UID` of linux/nsfs.h: `_IO(0xb7, 2)` and `_IO(0xb7, 4)`.
const NS_GET_PARENT: libc::Ioctl = 0xb702;
const NS_GET_OWNER_UID: libc::Ioctl = 0xb704;

/// The uid, in this user namespace, of the user who created `namespace` (`ioctl_ns(2)`).
#[allow(unsafe_code, reason = "a system call, for which no library has a safe function")]
fn owner_of(namespace: BorrowedFd<'_>) -> io::Result<u32> {
    let mut uid: libc::uid_t = 0;
    // SAFETY: the request writes one uid_t through the pointer, which is that of a live uid_t.
    let done = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_OWNER_UID, &raw mut uid) };
    if done == 0 { Ok(uid) } else { Err(io::Error::last_os_error()) }
}

/// The user namespace in which `namespace` was created (`ioctl_ns(2)`); EPERM if that is outside this one.
#[allow(unsafe_code, reason = "a system call, for which no library has a safe function")]
fn parent_of(namespace: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: the request takes no argument and touches no memory of this process.
    let fd = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_PARENT) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    struct Running(Child);

    impl Running {
        fn start(program: &str, args: &[&str]) -> Self {
            Self(Command::new(program).args(args).stdin(Stdio::null()).spawn().unwrap())
        }

        fn pid(&self) -> i32 {
            i32::try_from(self.0.id()).unwrap()
        }
    }

    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn us() -> u32 {
        nix::unistd::geteuid().as_raw()
    }

    #[test]
    fn the_kernel_says_who_asks() {
        let (one, _other) = UnixStream::pair().unwrap();
        let pid = i32::try_from(std::process::id()).unwrap();
        assert_eq!(Peer::of(&one).unwrap(), Peer { pid, uid: us() });
    }

    #[test]
    fn a_process_of_this_user_belongs_to_no_other() {
        let sleep = Running::start("sleep", &["60"]);
        assert_eq!(Pinned::of(sleep.pid(), us()).unwrap().process.pid, sleep.pid());
        let error = Pinned::of(sleep.pid(), us() + 4242).unwrap_err();
        assert!(matches!(error, Foreign::Other { .. }), "{error}");
        let pid = sleep.pid();
        drop(sleep);
        assert!(matches!(Pinned::of(pid, us()).unwrap_err(), Foreign::Gone(_)));
        for pid in [0, -1, i32::MIN] {
            assert!(matches!(Pinned::of(pid, us()).unwrap_err(), Foreign::Gone(_)));
        }
    }

    #[test]
    fn a_process_that_has_ended_since_it_was_held_is_not_alive() {
        let mut sleep = Running::start("sleep", &["60"]);
        let pinned = Pinned::of(sleep.pid(), us()).unwrap();
        assert!(pinned.is_alive());
        sleep.0.kill().unwrap();
        sleep.0.wait().unwrap();
        assert!(!pinned.is_alive());
    }

    #[test]
    fn processes_in_namespaces_that_a_user_made_are_the_users() {
        // Two levels deep: the inner one is created by root of the outer one, who is this user.
        let inner = Running::start("unshare", &["-Ur", "unshare", "-Ur", "sleep", "60"]);
        let pid = inner.pid();
        let deep = || {
            let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            comm.trim() == "sleep"
        };
        for _ in 0..500 {
            if deep() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert!(Pinned::of(pid, us()).is_ok());
        assert!(matches!(Pinned::of(pid, us() + 4242).unwrap_err(), Foreign::Other { .. }));
        let own = i32::try_from(std::process::id()).unwrap();
        assert_eq!([pid, own, -1].map(has_user_namespace), [true, false, false]);
    }
}
