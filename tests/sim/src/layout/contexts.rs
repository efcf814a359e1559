//! The contexts on a simulated GPU. A process announces its context with an open memfd whose name gives GPU, kind and
//! memory. NVML finds it through /proc, in any container, as long as /proc shows the process.
//!
//! The name: `sublet-sim:<tag>:<minor>:<C|M|M+C>:<MiB>:<pid>`; on a MIG device `<minor>.<gi>.<ci>`. The pid is the process's
//! own for itself: a child has the descriptor too until it runs another program, and has no context.
//!
//! For measurements, the file `DIR/sim/contexts` replaces this, with lines `<pid> <minor>:<kind>:<MiB>`. Reading /proc
//! takes longer than a real driver's answer.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::str::FromStr;

use super::Root;
use nix::sys::memfd::{MFdFlags, memfd_create};

/// The kind of a process with a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A process without MPS: `C`.
    Compute,
    /// An MPS server: `M`.
    Server,
    /// An MPS client: `M+C`.
    Client,
}

/// The device a context is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct On {
    /// Device minor of the GPU.
    pub minor: u32,
    /// GPU instance and compute instance, on a MIG device.
    pub instance: Option<(u32, u32)>,
}

/// One process's context on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The pid in this process's /proc.
    pub pid: i32,
    /// The device.
    pub on: On,
    /// The kind of process.
    pub kind: Kind,
    /// Device memory in MiB.
    pub mib: u64,
}

/// Announces that this process holds a context, for as long as the descriptor is open. If its memory changes, announce
/// the new context first, then drop the old one.
pub fn announce(tag: &str, on: On, kind: Kind, mib: u64) -> io::Result<OwnedFd> {
    let name = format!("sublet-sim:{tag}:{}:{}:{mib}:{}", on.text(), kind.as_str(), std::process::id());
    Ok(memfd_create(name.as_str(), MFdFlags::MFD_CLOEXEC)?)
}

/// Every context of the simulated driver `tag` that /proc shows, by pid.
#[must_use]
pub fn list(tag: &str) -> Vec<Held> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut held: Vec<Held> = processes
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .flat_map(|pid| of_process(tag, pid))
        .collect();
    held.sort_by_key(|held| held.pid);
    held
}

/// Every context of the simulated driver `tag` below `root`, as NVML reports it.
#[must_use]
pub fn told(tag: &str, root: Option<&Root>) -> Vec<Held> {
    let written = root.and_then(|root| fs::read_to_string(root.join("sim/contexts")).ok());
    let Some(written) = written else { return list(tag) };
    let line = |line: &str| {
        let (pid, held) = line.split_once(' ')?;
        of_text(pid.parse().ok()?, held)
    };
    written.lines().filter_map(line).collect()
}

/// A process that is changing its announcement shows both. The larger one counts.
fn of_process(tag: &str, pid: i32) -> Vec<Held> {
    let mut found: Vec<Held> = Vec::new();
    let open = |shown: &str| -> Vec<fs::DirEntry> {
        fs::read_dir(format!("/proc/{pid}/{shown}")).into_iter().flatten().flatten().collect()
    };
    let mut fds = open("fd");
    if fds.is_empty() {
        // A first thread that has ended shows none, also where others go on.
        let others =
            open("task").into_iter().map(|thread| thread.file_name().into_string().unwrap_or_default());
        fds = others.flat_map(|thread| open(&format!("task/{thread}/fd"))).collect();
    }
    for fd in fds {
        let link = fs::read_link(fd.path()).ok();
        let Some((held, own)) = link.and_then(|link| parse(tag, pid, link.to_str()?)) else { continue };
        if own_pid(pid) != Some(own) {
            continue;
        }
        match found.iter_mut().find(|other| other.on == held.on) {
            Some(other) if other.mib < held.mib => *other = held,
            Some(_) => {}
            None => found.push(held),
        }
    }
    found
}

/// The context, and the pid that the process with it has for itself.
fn parse(tag: &str, pid: i32, link: &str) -> Option<(Held, u32)> {
    let name = link.strip_prefix("/memfd:sublet-sim:")?.strip_suffix(" (deleted)")?;
    let (text, own) = name.strip_prefix(tag)?.strip_prefix(':')?.rsplit_once(':')?;
    Some((of_text(pid, text)?, own.parse().ok()?))
}

/// The pid of `pid` in its own namespace (`NSpid` in /proc/PID/status, proc(5)).
pub(crate) fn own_pid(pid: i32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    pids.split_whitespace().next_back()?.parse().ok()
}

fn of_text(pid: i32, text: &str) -> Option<Held> {
    let mut parts = text.split(':');
    let on = parts.next()?.parse().ok()?;
    let kind = parts.next()?.parse().ok()?;
    let mib = parts.next()?.parse().ok()?;
    parts.next().is_none().then_some(Held { pid, on, kind, mib })
}

impl Kind {
    /// As nvidia-smi writes it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Compute => "C",
            Self::Server => "M",
            Self::Client => "M+C",
        }
    }
}

impl FromStr for Kind {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        [Self::Compute, Self::Server, Self::Client].into_iter().find(|kind| kind.as_str() == text).ok_or(())
    }
}

impl On {
    /// The memory that it uses: the GPU's, or that of the GPU instance, which all its compute instances
    /// share.
    #[must_use]
    pub fn memory(self) -> (u32, Option<u32>) {
        (self.minor, self.instance.map(|(gi, _)| gi))
    }

    fn text(self) -> String {
        match self.instance {
            Some((gi, ci)) => format!("{}.{gi}.{ci}", self.minor),
            None => self.minor.to_string(),
        }
    }
}

impl FromStr for On {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let parts: Result<Vec<u32>, _> = text.split('.').map(str::parse).collect();
        match parts.map_err(|_| ())?[..] {
            [minor] => Ok(Self { minor, instance: None }),
            [minor, gi, ci] => Ok(Self { minor, instance: Some((gi, ci)) }),
            _ => Err(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_back() {
        let held = |on, kind, mib| Some((Held { pid: 7, on, kind, mib }, 5));
        let whole = On { minor: 3, instance: None };
        let part = On { minor: 0, instance: Some((9, 1)) };
        let read = |link| parse("0d1e2f3a", 7, link);
        assert_eq!(read("/memfd:sublet-sim:0d1e2f3a:3:M+C:144:5 (deleted)"), held(whole, Kind::Client, 144));
        assert_eq!(read("/memfd:sublet-sim:0d1e2f3a:0.9.1:C:66:5 (deleted)"), held(part, Kind::Compute, 66));
        assert_eq!(read("/memfd:sublet-sim:ffffffff:3:M:66:5 (deleted)"), None);
        assert_eq!(read("/memfd:sublet-sim:0d1e2f3a:3:X:66:5 (deleted)"), None);
        assert_eq!(read("/memfd:sublet-sim:0d1e2f3a:3:M:66:1:5 (deleted)"), None);
        assert_eq!(read("/dev/null"), None);
    }

    #[test]
    fn an_announcement_is_found_until_it_is_dropped() {
        let tag = format!("t{:07x}", std::process::id());
        let on = On { minor: 1, instance: None };
        let old = announce(&tag, on, Kind::Compute, 516).unwrap();
        let new = announce(&tag, on, Kind::Compute, 1540).unwrap();
        let pid = i32::try_from(std::process::id()).unwrap();
        assert_eq!(list(&tag), [Held { pid, on, kind: Kind::Compute, mib: 1540 }]);
        drop(new);
        // As a process has it between fork and exec.
        nix::fcntl::fcntl(&old, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert_eq!(list(&tag), [Held { pid, on, kind: Kind::Compute, mib: 516 }]);
        child.kill().unwrap();
        child.wait().unwrap();
        drop(old);
        assert_eq!(list(&tag), []);
    }
}
