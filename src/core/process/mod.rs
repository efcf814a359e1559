//! Processes: identifying one by pid and start time, so that a reused pid is not mistaken for it; running commands;
//! inheritance; and dropping rights. Also the kernel's reports about this boot and this process's namespaces and cgroups: it is
//! asked in one place, so that all callers get the same answer. And whether a process listens on a socket.
//!
//! The first thread of a process may end while other threads go on: any program can do so (`syscall(SYS_exit, 0)`). Its
//! `/proc/PID` then says that it is a zombie without memory, and shows no program, no environment, no open file, no
//! mounts and no network, and in cgroup v1 the root cgroup.

pub mod cgroups;
pub mod child;
pub mod confine;
#[cfg(any(test, feature = "fixtures"))]
pub mod fixture;
pub mod inheritance;
pub mod sockets;
pub mod sublet;
#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::libc::{ENOSYS, ESRCH};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use crate::text::safe;

/// A process of this boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Process {
    /// Its id in this process's PID namespace.
    pub pid: i32,
    /// When it started, in clock ticks since boot: field 22 of `/proc/PID/stat` (proc(5)).
    pub start_time: u64,
}

/// The answer of [`own_pid`]; 0: nothing yet.
static OWN_PID: AtomicU32 = AtomicU32::new(0);

/// The pid of this process. The C library would ask the kernel each time.
pub(crate) fn own_pid() -> u32 {
    if OWN_PID.load(Ordering::Relaxed) == 0 {
        OWN_PID.store(std::process::id(), Ordering::Relaxed);
    }
    OWN_PID.load(Ordering::Relaxed)
}

/// For a child that goes on with this program's code: it has a pid of its own.
pub(crate) fn forget_own_pid() {
    OWN_PID.store(0, Ordering::Relaxed);
}

impl Process {
    /// The running process `pid`; `None` if there is none.
    pub fn find(pid: i32) -> Option<Self> {
        Self::examine(pid).ok().flatten()
    }

    /// The running process `pid`; `None` if there is none.
    pub fn examine(pid: i32) -> io::Result<Option<Self>> {
        Ok(Stat::of(pid)?.map(|stat| stat.process))
    }

    /// The pid of its parent; `None` if the process has ended.
    pub fn parent(&self) -> Option<i32> {
        Stat::of(self.pid).ok()?.filter(|stat| stat.process == *self).map(|stat| stat.parent)
    }

    /// This process.
    ///
    /// # Errors
    /// /proc is not mounted, or hides this process.
    pub fn current() -> std::io::Result<Self> {
        let pid = i32::try_from(own_pid()).unwrap_or(i32::MAX);
        Self::find(pid).ok_or_else(|| std::io::Error::other(format!("/proc/{pid}/stat cannot be read")))
    }

    /// Whether it was started with this variable. `false` also if this process has no right to read its environment.
    ///
    /// # Errors
    /// Its environment cannot be read for another reason.
    pub fn has_environment(&self, name: &str, value: &Path) -> io::Result<bool> {
        let wanted = [name.as_bytes(), b"=", value.as_os_str().as_bytes()].concat();
        let environment = read_if_allowed(&live_proc_dir_of(self.pid).join("environ"))?;
        Ok(environment.split(|byte| *byte == 0).any(|entry| entry == wanted) && self.is_alive())
    }

    /// Whether a process with the id `pid` runs, or cannot be examined.
    pub(crate) fn may_run(pid: i32) -> bool {
        Stat::of(pid).map_or(true, |stat| stat.is_some_and(|stat| !stat.has_ended()))
    }

    /// Whether a thread of this same process still runs, the first one or another. A zombie does not count as running,
    /// because it holds no resources. A process that cannot be examined, for example because no file descriptor is left,
    /// counts as running.
    pub fn is_alive(&self) -> bool {
        Stat::of(self.pid).map_or(true, |stat| stat.is_some_and(|stat| self.is_alive_in(&stat)))
    }

    /// Whether this same process still runs, by `/proc/PID/stat`.
    fn is_alive_in(&self, stat: &Stat) -> bool {
        stat.process == *self && !stat.has_ended()
    }

    /// Whether its first thread still runs. runc and crun take a container for stopped once that of its first process has
    /// ended. `true` if that cannot be found out.
    pub fn has_first_thread(&self) -> bool {
        let has = |stat: Stat| stat.process == *self && !stat.has_thread_ended();
        Stat::of(self.pid).map_or(true, |stat| stat.is_some_and(has))
    }

    /// Whether a thread of this same process is in uninterruptible sleep (state D, proc(5)).
    pub(crate) fn waits_in_kernel(&self) -> bool {
        let waits = |stat: Stat| stat.process == *self && stat.state == 'D';
        Stat::of_running_thread(self.pid).ok().flatten().is_some_and(waits)
    }

    /// Whether its pid exists, perhaps as another process or as a zombie. `true` if that cannot be found out.
    pub(crate) fn has_pid(&self) -> bool {
        self.pid > 0 && kill(Pid::from_raw(self.pid), None) != Err(nix::errno::Errno::ESRCH)
    }

    /// Whether this same process can serve its clients.
    pub(crate) fn condition(&self) -> Condition {
        let mut seen = Stat::of_running_thread(self.pid);
        // The kernel tells its flags before its pending signals: one that takes its SIGKILL in between shows neither, and runs.
        if matches!(seen, Ok(Some(Stat { state: 'R', .. }))) {
            seen = Stat::of_running_thread(self.pid);
        }
        match seen {
            // A process that cannot be examined counts as running.
            Err(_) => Condition::Running,
            Ok(Some(stat)) if self.is_alive_in(&stat) && stat.memory != 0 && !stat.is_killed => {
                match stat.state {
                    'T' | 't' => Condition::Stopped,
                    _ => Condition::Running,
                }
            }
            Ok(_) => Condition::Ending,
        }
    }

    /// Whether it is stopped, by a signal or by a tracer (proc(5)).
    pub fn is_stopped(&self) -> bool {
        self.condition() == Condition::Stopped
    }

    /// A descriptor of this same process; `None` if it has ended. It never refers to a later process with the same pid, and is
    /// readable once the last thread of its process has ended (`pidfd_open(2)`).
    ///
    /// # Errors
    /// It cannot be opened, or the process cannot be examined.
    pub fn hold(&self) -> io::Result<Option<OwnedFd>> {
        let held = pidfd_open(self.pid);
        // Read afterwards: if the pid was reused in between, this is another process.
        let lives = Stat::of(self.pid)?.is_some_and(|stat| self.is_alive_in(&stat));
        if lives { held.map(Some) } else { Ok(None) }
    }
}

/// A descriptor for process `pid` (closed on exec).
///
/// # Errors
/// There is no such process, or the kernel is too old.
pub fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    let pid = rustix::process::Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    let opened = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty());
    opened.map_err(|error| require_call("pidfd_open", error))
}

/// Sends SIGKILL to the process that `pidfd` refers to, and to no other (`pidfd_send_signal(2)`, Linux 5.1).
///
/// # Errors
/// It has ended, or this process has no permission to end it.
pub fn pidfd_kill(pidfd: impl AsFd) -> io::Result<()> {
    pidfd_signal(pidfd, Signal::SIGKILL)
}

/// As [`pidfd_kill`], with another signal.
pub fn pidfd_signal(pidfd: impl AsFd, signal: Signal) -> io::Result<()> {
    let signal = rustix::process::Signal::from_named_raw(signal as i32).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::pidfd_send_signal(pidfd, signal)?)
}

/// Waits up to `longest` for the end of the process that `pidfd` refers to, and says whether it has ended.
pub fn pidfd_await_end(pidfd: impl AsFd, longest: Duration) -> bool {
    let mut awaited = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    poll(&mut awaited, PollTimeout::try_from(longest).unwrap_or(PollTimeout::MAX))
        .is_ok_and(|ready| ready > 0)
}

/// Whether a process can serve its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    /// It can, or cannot be examined.
    Running,
    /// It is stopped, by a signal or by a tracer (proc(5)).
    Stopped,
    /// It has ended, is being ended or was killed. Its memory goes first, and its sockets take connections until its last thread
    /// has run and its files are closed (`do_exit` in the kernel's kernel/exit.c).
    Ending,
}

/// The command name of the process `pid`, safe to print; `?` if it has ended.
pub fn name_of(pid: i32) -> String {
    kernel_file(format!("/proc/{pid}/comm")).map_or_else(|_| "?".to_owned(), |name| safe(name.trim_end()))
}

/// Seconds since the epoch; 0 if the clock is before it.
pub fn epoch_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Seconds since boot, on a clock that cannot be set (`clock_gettime(2)`).
pub fn uptime_seconds() -> u64 {
    since_boot().as_secs()
}

/// Milliseconds since boot, as [`uptime_seconds`].
pub fn uptime_milliseconds() -> u64 {
    u64::try_from(since_boot().as_millis()).unwrap_or(u64::MAX)
}

/// Every kernel has this clock, and shows it to a process in its own memory (vdso(7)): no system call is made.
fn since_boot() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map(Duration::from).unwrap_or_default()
}

/// Whether a file of /proc could not be read because its process has ended: if it ends while the file is open, reading
/// fails with ESRCH.
pub fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(ESRCH)
}

/// The text that was read of a process in /proc; `None` if it has ended.
pub fn unless_gone<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Err(error) if is_gone(&error) => Ok(None),
        read => read.map(Some),
    }
}

/// The content of a file of a process in /proc; empty if the process has ended, or this user may not examine it.
pub(crate) fn read_if_allowed(file: &Path) -> io::Result<Vec<u8>> {
    match std::fs::read(file) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(Vec::new()),
        content => Ok(unless_gone(content)?.unwrap_or_default()),
    }
}

/// `error` of a system call that every kernel from Linux 5.6 on has: a kernel or a seccomp filter without it is named.
pub(crate) fn require_call(call: &str, error: impl Into<io::Error>) -> io::Error {
    let error = error.into();
    if error.raw_os_error() != Some(ENOSYS) {
        return error;
    }
    let why =
        format!("this kernel has no {call}, or a seccomp filter hides it: sublet needs Linux 5.6 or later");
    io::Error::new(io::ErrorKind::Unsupported, why)
}

/// In field 9: killed by a signal (linux/sched.h). Before that, SIGKILL is among the pending signals of each thread, field 31,
/// from when the process is killed until the thread runs the next time. Its sockets take connections for as long.
const PF_SIGNALED: u64 = 0x400;
const SIGKILL_PENDING: u64 = 1 << 8;

/// A line of `/proc/PID/stat` or `/proc/PID/task/TID/stat` (proc(5)).
pub(crate) struct Stat {
    /// The process, or the thread TID.
    pub process: Process,
    /// The command name, of which the kernel keeps 15 bytes.
    pub name: String,
    /// Of the first thread, or of the thread TID.
    state: char,
    /// The pid of the parent.
    pub parent: i32,
    /// Virtual memory, in bytes (`vsize`); 0 once the thread has given it up.
    memory: u64,
    /// Whether it was killed. It ends when it runs the next time.
    is_killed: bool,
    /// Threads that have not been reaped. A first thread that has ended is not reaped before the last one.
    threads: u64,
}

impl Stat {
    /// Of the process `pid`; `None` if there is none.
    pub fn of(pid: i32) -> io::Result<Option<Self>> {
        Self::read(&Path::new("/proc").join(pid.to_string()))
    }

    /// [`Stat::of`], with what is said of a thread that runs, if the first one has ended.
    fn of_running_thread(pid: i32) -> io::Result<Option<Self>> {
        let proc = Path::new("/proc").join(pid.to_string());
        let first = match Self::read(&proc)? {
            Some(first) if first.has_only_first_thread_ended() => first,
            other => return Ok(other),
        };
        let running = running_thread(&proc).and_then(|thread| Self::read(&thread).ok().flatten());
        let Some(Self { state, memory, is_killed, .. }) = running else { return Ok(Some(first)) };
        Ok(Some(Self { state, memory, is_killed, ..first }))
    }

    fn read(proc: &Path) -> io::Result<Option<Self>> {
        // One read is enough: the line has at most 52 numbers and a command name of 15 bytes (proc(5)).
        let mut line = [0; 1024];
        let file = proc.join("stat");
        let length = unless_gone(File::open(&file).and_then(|mut file| file.read(&mut line)))?;
        let stat = length.map(|length| {
            Self::parse(&String::from_utf8_lossy(&line[..length]))
                .ok_or_else(|| io::Error::other(format!("{} does not describe a process", file.display())))
        });
        stat.transpose()
    }

    /// The command name in field 2 may contain spaces and parentheses, so fields are counted from the last `)`.
    fn parse(text: &str) -> Option<Self> {
        let (begin, end) = (text.find('(')?, text.rfind(')')?);
        let mut fields = text[end + 1..].split_ascii_whitespace();
        let (state, parent) = (fields.next()?.chars().next()?, fields.next()?.parse().ok()?);
        // Behind fields 3 and 4: 9, 20, 22, 23 and 31.
        let mut behind = |skipped| fields.nth(skipped)?.parse::<u64>().ok();
        let (flags, threads, start_time) = (behind(4)?, behind(10)?, behind(1)?);
        let (memory, pending) = (behind(0)?, behind(7)?);
        Some(Self {
            process: Process { pid: text[..begin].trim_end().parse().ok()?, start_time },
            name: text.get(begin + 1..end)?.to_owned(),
            state,
            parent,
            memory,
            is_killed: flags & PF_SIGNALED != 0 || pending & SIGKILL_PENDING != 0,
            threads,
        })
    }

    /// Whether the process is a zombie: all its threads have ended, and it holds no resources.
    fn has_ended(&self) -> bool {
        self.has_thread_ended() && self.threads <= 1
    }

    fn has_only_first_thread_ended(&self) -> bool {
        self.has_thread_ended() && self.threads > 1
    }

    fn has_thread_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }
}

/// The directory of /proc with a process's files: `proc`, its `/proc/PID`, or a running thread's, if its first thread has
/// ended.
pub fn live_proc_dir(proc: PathBuf) -> PathBuf {
    let first = Stat::read(&proc).ok().flatten().filter(Stat::has_only_first_thread_ended);
    first.and_then(|_| running_thread(&proc)).unwrap_or(proc)
}

/// [`live_proc_dir`], of the process `pid`.
pub fn live_proc_dir_of(pid: i32) -> PathBuf {
    live_proc_dir(Path::new("/proc").join(pid.to_string()))
}

/// The text of `/proc/PID/cgroup` (cgroups(7)) of the process `pid`. In cgroup v1 a thread that has ended is shown in
/// the root of every hierarchy (`proc_cgroup_show` in the kernel's kernel/cgroup/cgroup.c): of a first thread that is,
/// another one's text is taken. In v2 its cgroup stays.
///
/// # Errors
/// It cannot be read, or the process has ended.
pub fn cgroup_table(pid: i32) -> io::Result<String> {
    let proc = Path::new("/proc").join(pid.to_string());
    let first = kernel_file(proc.join("cgroup"))?;
    if !is_in_every_root_of_v1(&first) {
        return Ok(first);
    }
    let tables = threads(&proc).filter_map(|thread| kernel_file(thread.join("cgroup")).ok());
    Ok(tables.into_iter().find(|table| !is_in_every_root_of_v1(table)).unwrap_or(first))
}

fn is_in_every_root_of_v1(table: &str) -> bool {
    let mut of_v1 = table.lines().filter(|line| !line.starts_with("0::")).peekable();
    of_v1.peek().is_some() && of_v1.all(|line| line.ends_with(":/"))
}

fn threads(proc: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(proc.join("task")).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// The directory of a thread that runs, of the process of `proc`; `None` if there is none any more.
fn running_thread(proc: &Path) -> Option<PathBuf> {
    let runs = |thread: &PathBuf| {
        Stat::read(thread).ok().flatten().is_some_and(|stat| !stat.has_thread_ended() && stat.memory != 0)
    };
    threads(proc).find(runs)
}

/// More than most files of the kernel have.
pub(crate) const PIECE: usize = 4 << 10;

/// A file of /proc or /sys whose text the kernel makes in one piece (`single_open` in the kernel's `fs/seq_file.c`, a sysctl,
/// an attribute of sysfs): one read gives all of it. A longer one than 4 KiB is read to its end.
///
/// # Errors
/// It cannot be opened or read.
pub(crate) fn kernel_file(path: impl AsRef<Path>) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut text = vec![0; PIECE];
    let length = once(&mut file, &mut text)?;
    text.truncate(length);
    if length == PIECE {
        file.read_to_end(&mut text)?;
    }
    String::from_utf8(text).map_err(|_| ErrorKind::InvalidData.into())
}

/// One read(2), begun again where a signal interrupts it.
pub(crate) fn once(file: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match file.read(buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}

/// The file in which the kernel gives the id of this boot (random(4)).
pub(crate) const BOOT_ID_FILE: &str = "/proc/sys/kernel/random/boot_id";

/// The id of this boot. No process, lease or lock outlives a boot.
pub fn read_boot_id() -> io::Result<&'static str> {
    static ID: OnceLock<String> = OnceLock::new();
    if let Some(id) = ID.get() {
        return Ok(id);
    }
    let id = kernel_file(BOOT_ID_FILE)?;
    Ok(ID.get_or_init(|| id.trim().to_owned()))
}

/// Where Linux systems mount cgroups (systemd, file-hierarchy(7)).
pub(crate) const CGROUP_MOUNT: &str = "/sys/fs/cgroup";

/// Whether `mount` has v2 only: a v2 hierarchy lists its controllers there (cgroups(7)).
pub(crate) fn has_unified_cgroups(mount: &Path) -> bool {
    // A transient failure (no memory) is tried again.
    let is_there = || mount.join("cgroup.controllers").try_exists();
    is_there().or_else(|_| is_there()).unwrap_or(false)
}

/// The path of the cgroup directory `dir` below its hierarchy's root.
pub(crate) fn below_hierarchy(dir: &Path) -> PathBuf {
    let below = dir.strip_prefix(CGROUP_MOUNT).unwrap_or(dir);
    below.components().skip(usize::from(!has_unified_cgroups(Path::new(CGROUP_MOUNT)))).collect()
}

/// The v2 hierarchy. In the hybrid layout it exists beside v1's.
pub(crate) fn unified_cgroups(mount: &Path) -> PathBuf {
    if has_unified_cgroups(mount) { mount.to_owned() } else { mount.join("unified") }
}

/// The path in the hierarchy `controller` in the text of /proc/PID/cgroup (cgroups(7)). That of v2 has no controller.
pub(crate) fn cgroup_line<'a>(text: &'a str, controller: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let controllers = parts.next()?;
        parts.next().filter(|_| controllers.split(',').any(|name| name == controller))
    })
}

/// Whether this process runs in a user namespace other than the initial one, which is the only one that maps every id
/// to itself (`user_namespaces(7)`). `true` if that is unknown: the process then does not act as the host's root.
///
/// The first answer holds for the process's life, so that a container is not given one half of its share as by root and
/// the other as by a user.
pub fn is_nested() -> bool {
    // No program of sublet's enters another user namespace, except in a child that becomes another program.
    static NESTED: OnceLock<bool> = OnceLock::new();
    // A transient failure (no descriptor left) is tried again.
    let read = || kernel_file("/proc/self/uid_map");
    *NESTED.get_or_init(|| is_nested_by(read().or_else(|_| read())))
}

/// Whether the first process that /proc shows runs in this process's user namespace, as in a system container. It does not
/// below a rootless engine; there nobody may look.
pub(crate) fn is_of_a_system() -> bool {
    let of = |who: &str| std::fs::read_link(format!("/proc/{who}/ns/user"));
    matches!((of("1"), of("self")), (Ok(first), Ok(own)) if first == own)
}

fn is_nested_by(map: io::Result<String>) -> bool {
    match map {
        Ok(map) => !map.split_ascii_whitespace().eq(["0", "0", "4294967295"]),
        // A kernel without user namespaces has no such file (fs/proc/base.c, CONFIG_USER_NS).
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

/// Whether a process listens on the file `path`, a SEQPACKET socket. The check takes microseconds and does not
/// disturb it. The listener may be a stopped process all the same.
pub fn listens(path: &Path) -> bool {
    connected(path).is_some()
}

/// The pid of the process that listens there (unix(7), `SO_PEERCRED`).
pub(crate) fn listener(path: &Path) -> Option<i32> {
    getsockopt(&connected(path)?, PeerCredentials).ok().map(|peer| peer.pid())
}

fn connected(path: &Path) -> Option<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).ok()?;
    connect(socket.as_raw_fd(), &UnixAddr::new(path).ok()?).ok().map(|()| socket)
}
