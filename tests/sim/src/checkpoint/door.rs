//! How a process's driver is reached by another process, in any container, as long as /proc shows it: one end of a socket
//! stays open in the process, and a memfd there, as those of [`contexts`], says which descriptor it is. Who may trace the
//! process takes that end (`pidfd_getfd(2)`) and sends a call with a socket for the answer.
//!
//! The memfd's name: `sublet-sim:<tag>:door:<descriptor>:<pid>`.
#![allow(unsafe_code, reason = "two system calls that no library has")]

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;

use nix::libc::{self, c_long};
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::rules::{NOT_INITIALIZED, OPERATING_SYSTEM};
use crate::layout::contexts;
use crate::mps::wire::Conn;
use crate::nvml::Answer;

/// What the process keeps open.
#[derive(Debug)]
pub(crate) struct Door {
    _name: OwnedFd,
    _end: Conn,
}

impl Door {
    /// This process's, and the end at which calls arrive.
    pub fn open(tag: &str) -> io::Result<(Self, Conn)> {
        let (inside, end) = Conn::pair()?;
        let (number, own) = (end.as_fd().as_raw_fd(), std::process::id());
        let name =
            memfd_create(format!("sublet-sim:{tag}:door:{number}:{own}").as_str(), MFdFlags::MFD_CLOEXEC)?;
        Ok((Self { _name: name, _end: end }, inside))
    }
}

/// Another process's. Chosen are the errors of a process that does not exist, or is out of reach, and of one that does not
/// use CUDA: they were not measured.
pub(super) fn find(tag: &str, pid: i32) -> Answer<Conn> {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).map_err(|_| OPERATING_SYSTEM)?;
    let own = contexts::own_pid(pid);
    let mut links = open.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    let number = |link: PathBuf| {
        let (number, of) = parse(tag, link.to_str()?)?;
        // A child has the descriptors until it runs another program.
        (own == Some(of)).then_some(number)
    };
    let number = links.find_map(number).ok_or(NOT_INITIALIZED)?;
    take(pid, number).map(Conn::from).map_err(|_| OPERATING_SYSTEM)
}

fn parse(tag: &str, link: &str) -> Option<(RawFd, u32)> {
    let name = link.strip_prefix("/memfd:sublet-sim:")?.strip_suffix(" (deleted)")?;
    let (number, own) = name.strip_prefix(tag)?.strip_prefix(":door:")?.split_once(':')?;
    Some((number.parse().ok()?, own.parse().ok()?))
}

/// A copy of another process's descriptor.
fn take(pid: i32, number: RawFd) -> io::Result<OwnedFd> {
    const NO_FLAGS: c_long = 0;
    // SAFETY: the system call reads no memory.
    let process = owned(unsafe { libc::syscall(libc::SYS_pidfd_open, c_long::from(pid), NO_FLAGS) })?;
    let (of, number) = (c_long::from(process.as_raw_fd()), c_long::from(number));
    // SAFETY: as above.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_getfd, of, number, NO_FLAGS) })
}

/// What a system call returned that makes a descriptor.
fn owned(returned: c_long) -> io::Result<OwnedFd> {
    let made = RawFd::try_from(returned).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the kernel has just made it for this process, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(made) })
}
