//! Runs a program below ptrace(2), writes down its system calls, and makes one of them fail, or ends the process there.
//!
//! Followed are the program and the processes and threads that it makes, each until it becomes another program by
//! execve: what that does is for a test of its own. Once the fault has happened, nothing is followed any more, and the
//! rest runs undisturbed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::scene::Files;
use crate::table::Table;

/// A run that takes longer hangs. The longest wait of the programs themselves is one of 10 s.
const LIMIT: Duration = Duration::from_secs(40);

/// What befalls a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It fails.
    Error(Errno),
    /// Its process is killed before the kernel carries it out.
    Kill,
}

/// The nth call of its name in a process.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// Of the program and the processes that it made the how manyeth; of a service, the name of a thread.
    pub process: String,
    pub name: &'static str,
    pub nth: usize,
}

/// One call of an undisturbed run.
#[derive(Clone, Debug)]
pub struct Call {
    pub key: Key,
    /// The file that it names, if it names one.
    pub path: String,
    /// The only errors that can come of it, if they are fewer than its name's.
    pub only: Option<&'static [Errno]>,
}

/// The program as which the first process goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Became {
    pub arguments: Vec<String>,
    /// What is in the files among them that are the process's own descriptors.
    pub files: Vec<String>,
}

/// What was seen of a run.
#[derive(Default)]
pub struct Seen {
    pub calls: Vec<Call>,
    /// The call that the fault befell.
    pub hit: Option<Call>,
    /// Exit code, or the signal that ended the process.
    pub code: Option<i32>,
    pub signal: Option<Signal>,
    pub became: Option<Became>,
    pub timed_out: bool,
    /// Whether it befell the loader or Rust's own start, which first looks at the three descriptors by poll(2).
    pub before_main: bool,
    /// Calls that the table does not know.
    pub unknown: Vec<u64>,
}

/// What is done at the exit of a call that fails.
enum Failing {
    Error(Errno),
    /// Its first argument is given back, which no call changes.
    Argument(u64),
}

#[derive(Default)]
struct Tracee {
    process: String,
    /// How the call that it is in fails.
    failing: Option<Failing>,
}

struct Tracer<'t> {
    table: &'t Table,
    wanted: Option<(&'t Key, Fault)>,
    /// The first process; its end is the end of the run.
    first: Pid,
    tracees: BTreeMap<Pid, Tracee>,
    /// Those that have shown themselves before their makers said so. They may have been let go since.
    early: BTreeSet<Pid>,
    /// How often each process, or the threads of one name, made each call.
    counts: BTreeMap<(String, &'static str), usize>,
    made: usize,
    /// Whether processes are named by number. Otherwise they are a service's threads, which have names.
    numbered: bool,
    letting_go: bool,
    seen: Seen,
}

const OPTIONS: ptrace::Options = ptrace::Options::PTRACE_O_TRACESYSGOOD
    .union(ptrace::Options::PTRACE_O_TRACEFORK)
    .union(ptrace::Options::PTRACE_O_TRACEVFORK)
    .union(ptrace::Options::PTRACE_O_TRACECLONE)
    .union(ptrace::Options::PTRACE_O_TRACEEXEC);

/// Runs `command` to its end.
#[expect(clippy::zombie_processes, reason = "the tracer waits for it, as for all that it follows")]
pub fn run(table: &Table, command: &Command, files: &Files, wanted: Option<(&Key, Fault)>) -> Seen {
    // A shell stops itself, so that it can be followed from the first call of the program that it then becomes.
    let mut stopped = Command::new("/bin/sh");
    stopped.args(["-c", "kill -STOP $$; exec \"$@\"", "sh"]);
    stopped.arg(command.get_program()).args(command.get_args()).process_group(0);
    stopped.env("RUST_BACKTRACE", "0");
    for (name, value) in command.get_envs() {
        value.map(|value| stopped.env(name, value));
    }
    let open = |path: &std::path::Path| fs::File::create(path).expect("a file for its output");
    stopped.stdin(fs::File::open(&files.stdin).expect("its input"));
    stopped.stdout(open(&files.stdout)).stderr(open(&files.stderr));
    let child = stopped.spawn().expect("/bin/sh runs");
    let first = Pid::from_raw(i32::try_from(child.id()).expect("a pid"));
    waitpid(first, Some(WaitPidFlag::WUNTRACED)).expect("the shell stops");
    ptrace::seize(first, OPTIONS | ptrace::Options::PTRACE_O_EXITKILL).expect("it can be followed");
    kill(first, Signal::SIGCONT).expect("it is there");
    until_exec(first);
    let mut tracer = Tracer::new(table, wanted, first, true);
    tracer.add(first);
    let _ = ptrace::syscall(first, None);
    let (done, timeout) = mpsc::channel::<()>();
    let late = Arc::new(AtomicBool::new(false));
    let watch = late.clone();
    let watchdog = std::thread::spawn(move || {
        if timeout.recv_timeout(LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
            watch.store(true, Ordering::SeqCst);
            let _ = killpg(first, Signal::SIGKILL);
        }
    });
    tracer.follow(&|| false);
    // Others of its group are its children. Daemons and containers are in sessions of their own.
    while killpg(first, None).is_ok() {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(done);
    watchdog.join().expect("the watchdog ends");
    tracer.seen.timed_out = late.load(Ordering::SeqCst);
    tracer.seen
}

/// Runs `request` while the process `service` is followed, until the request has ended.
pub fn serve(
    table: &Table,
    service: Pid,
    wanted: Option<(&Key, Fault)>,
    request: impl FnOnce() + Send,
) -> Seen {
    let mut tracer = Tracer::new(table, wanted, service, false);
    let threads = fs::read_dir(format!("/proc/{service}/task")).expect("the service runs");
    for thread in threads.flatten() {
        let Some(thread) = thread.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let thread = Pid::from_raw(thread);
        if ptrace::seize(thread, OPTIONS).is_ok() {
            tracer.add(thread);
            let _ = ptrace::interrupt(thread);
        }
    }
    let (done, late) = (AtomicBool::new(false), AtomicBool::new(false));
    let (over, timeout) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let (done, late) = (&done, &late);
        scope.spawn(move || {
            request();
            done.store(true, Ordering::SeqCst);
            // Ignored by it, and seen here: the end of the wait.
            let _ = kill(service, Signal::SIGURG);
            if timeout.recv_timeout(LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
                late.store(true, Ordering::SeqCst);
                let _ = kill(service, Signal::SIGKILL);
            }
        });
        tracer.follow(&|| done.load(Ordering::SeqCst));
        drop(over);
    });
    tracer.seen.timed_out = late.into_inner();
    tracer.seen
}

/// What can come of a call of these arguments, where that is less than what can come of others of its name.
fn only(pid: Pid, name: &str, registers: &libc::user_regs_struct) -> Option<&'static [Errno]> {
    match name {
        // ENOENT says that the directory has been removed, and the C library then ends its list (getdents(2)). Those of
        // the driver and of its GPUs are there as long as the driver is; those of an MPS daemon are removed only by who
        // holds its lock, as their readers do.
        "getdents64" if stays(&named_file(pid, name, registers)) => Some(&[Errno::EIO, Errno::ENOMEM]),
        // LOCK_UN needs no memory and waits for nothing (flock(2)).
        "flock" if registers.rsi == 8 => Some(&[]),
        // Rust's own socket between fork and exec, by which a child reports eight bytes: one without a time limit, of
        // a peer that is there (std::process::Command).
        "recvfrom" if registers.rdx == 8 => Some(&[Errno::EINTR]),
        _ => None,
    }
}

/// Whether nobody removes this directory while it is read.
fn stays(path: &str) -> bool {
    ["/proc/driver/nvidia/", "/sys/bus/pci/devices/", "/run/mps/"].iter().any(|part| path.contains(part))
}

/// Lets the shell run until it has become the program.
fn until_exec(first: Pid) {
    loop {
        match waitpid(first, Some(WaitPidFlag::__WALL)) {
            Ok(WaitStatus::PtraceEvent(_, _, libc::PTRACE_EVENT_EXEC)) => return,
            Ok(WaitStatus::Stopped(_, Signal::SIGCONT) | WaitStatus::PtraceEvent(..)) => {
                let _ = ptrace::cont(first, None);
            }
            Ok(WaitStatus::Stopped(_, signal)) => {
                let _ = ptrace::cont(first, signal);
            }
            other => panic!("the program does not start: {other:?}"),
        }
    }
}

impl<'t> Tracer<'t> {
    fn new(table: &'t Table, wanted: Option<(&'t Key, Fault)>, first: Pid, numbered: bool) -> Self {
        let (tracees, counts, seen) = (BTreeMap::new(), BTreeMap::new(), Seen::default());
        let early = BTreeSet::new();
        Self { table, wanted, first, tracees, early, counts, made: 0, numbered, letting_go: false, seen }
    }

    fn add(&mut self, pid: Pid) {
        let process = if self.numbered {
            self.made.to_string()
        } else {
            // Whichever of several workers it is.
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            name.trim_end_matches(|letter: char| !letter.is_alphabetic()).to_owned()
        };
        self.made += 1;
        self.tracees.insert(pid, Tracee { process, ..Tracee::default() });
    }

    /// Until the first process and those that are followed have ended, or were let go after `done`.
    fn follow(&mut self, done: &dyn Fn() -> bool) {
        loop {
            let status = match waitpid(None, Some(WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD)) {
                Ok(status) => status,
                Err(Errno::EINTR) => continue,
                Err(_) => return,
            };
            if done() {
                self.let_go();
            }
            match status {
                WaitStatus::Exited(pid, code) => self.ended(pid, Some(code), None),
                WaitStatus::Signaled(pid, signal, _) => self.ended(pid, None, Some(signal)),
                WaitStatus::PtraceSyscall(pid) => self.at_call(pid),
                WaitStatus::PtraceEvent(pid, _, event) => self.at_event(pid, event),
                WaitStatus::Stopped(pid, Signal::SIGURG) if !self.numbered => self.go_on(pid, None),
                WaitStatus::Stopped(pid, signal) => self.go_on(pid, Some(signal)),
                _ => {}
            }
            let over = if self.numbered { self.has_ended() } else { self.letting_go };
            if over && self.tracees.is_empty() {
                return;
            }
        }
    }

    fn has_ended(&self) -> bool {
        self.seen.code.is_some() || self.seen.signal.is_some()
    }

    fn ended(&mut self, pid: Pid, code: Option<i32>, signal: Option<Signal>) {
        self.tracees.remove(&pid);
        if pid == self.first {
            (self.seen.code, self.seen.signal) = (code, signal);
        }
    }

    fn at_event(&mut self, pid: Pid, event: i32) {
        if !self.tracees.contains_key(&pid) {
            self.early.insert(pid);
            if !self.letting_go {
                self.add(pid);
            }
        }
        if matches!(event, libc::PTRACE_EVENT_FORK | libc::PTRACE_EVENT_VFORK | libc::PTRACE_EVENT_CLONE) {
            self.add_made_by(pid);
        }
        if event == libc::PTRACE_EVENT_EXEC {
            if pid == self.first && self.numbered {
                self.seen.became = Some(became(pid));
            }
            let _ = ptrace::detach(pid, None);
            self.tracees.remove(&pid);
            return;
        }
        self.go_on(pid, None);
    }

    fn go_on(&mut self, pid: Pid, signal: Option<Signal>) {
        if self.letting_go && self.numbered && pid == self.first {
            // Still to be seen is what it becomes.
            let _ = ptrace::cont(pid, signal);
        } else if self.letting_go {
            let _ = ptrace::detach(pid, signal);
            self.tracees.remove(&pid);
        } else {
            let _ = ptrace::syscall(pid, signal);
        }
    }

    /// It may show itself later than its maker says so, or before.
    fn add_made_by(&mut self, maker: Pid) {
        let Ok(made) = ptrace::getevent(maker) else { return };
        let made = Pid::from_raw(i32::try_from(made).unwrap_or(0));
        if !self.early.remove(&made) && !self.tracees.contains_key(&made) {
            self.add(made);
        }
    }

    /// Every process that runs is stopped once, to be left alone from there.
    fn let_go(&mut self) {
        if !self.letting_go {
            self.letting_go = true;
            for pid in self.tracees.keys() {
                let _ = ptrace::interrupt(*pid);
            }
        }
    }

    /// At the entry or the exit of a call.
    fn at_call(&mut self, pid: Pid) {
        let Ok(mut registers) = ptrace::getregs(pid) else { return };
        let is_entry = ptrace::syscall_info(pid).is_ok_and(|info| info.op == libc::PTRACE_SYSCALL_INFO_ENTRY);
        if is_entry {
            if self.entered(pid, &mut registers) {
                // It stays followed until the call's exit.
                let _ = ptrace::syscall(pid, None);
                return;
            }
        } else if let Some(failing) = self.tracees.get_mut(&pid).and_then(|tracee| tracee.failing.take()) {
            match failing {
                Failing::Error(errno) => {
                    registers.rax = u64::from_ne_bytes((-i64::from(errno as i32)).to_ne_bytes());
                }
                Failing::Argument(first) => registers.rdi = first,
            }
            let _ = ptrace::setregs(pid, registers);
            self.let_go();
        }
        self.go_on(pid, None);
    }

    /// Counts the call; whether it is the wanted one, which will then fail.
    fn entered(&mut self, pid: Pid, registers: &mut libc::user_regs_struct) -> bool {
        let Some(tracee) = self.tracees.get_mut(&pid) else { return false };
        let process = tracee.process.clone();
        if self.letting_go {
            return false;
        }
        let Some(row) = self.table.call(registers.orig_rax) else {
            self.seen.unknown.push(registers.orig_rax);
            return false;
        };
        let nth = self.counts.entry((process.clone(), row.name)).or_default();
        *nth += 1;
        let key = Key { process, name: row.name, nth: *nth };
        let Some((wanted, fault)) = self.wanted else {
            let path = named_file(pid, row.name, registers);
            self.seen.calls.push(Call { key, path, only: only(pid, row.name, registers) });
            return false;
        };
        // In another order of things it may be a call to which this cannot happen.
        let cannot = |only: &[Errno]| matches!(fault, Fault::Error(errno) if !only.contains(&errno));
        if *wanted != key || only(pid, row.name, registers).is_some_and(cannot) {
            return false;
        }
        let path = named_file(pid, row.name, registers);
        self.seen.before_main = self.numbered && !self.counts.contains_key(&("0".to_owned(), "poll"));
        self.seen.hit = Some(Call { key, path, only: None });
        match fault {
            Fault::Kill => {
                let _ = kill(pid, Signal::SIGKILL);
                self.let_go();
                false
            }
            Fault::Error(errno) => {
                match row.name {
                    // The kernel closes the descriptor even if it then reports an error (close(2)).
                    "close" => tracee.failing = Some(Failing::Error(errno)),
                    // brk(2): it fails by leaving the end of the heap, which it returns, as asking for it does.
                    "brk" => {
                        tracee.failing = Some(Failing::Argument(registers.rdi));
                        registers.rdi = 0;
                    }
                    _ => {
                        registers.orig_rax = u64::MAX;
                        tracee.failing = Some(Failing::Error(errno));
                    }
                }
                let _ = ptrace::setregs(pid, *registers);
                true
            }
        }
    }
}

/// The file that the call names, read from the process's memory.
fn named_file(pid: Pid, name: &str, registers: &libc::user_regs_struct) -> String {
    let address = match name {
        "open" | "access" | "stat" | "lstat" | "readlink" | "chdir" | "chroot" | "rename" | "unlink"
        | "mkdir" | "rmdir" | "chmod" | "chown" | "lchown" | "statfs" | "execve" => registers.rdi,
        "openat" | "openat2" | "faccessat" | "faccessat2" | "newfstatat" | "statx" | "readlinkat"
        | "renameat" | "renameat2" | "unlinkat" | "mkdirat" | "mknodat" | "fchmodat" | "fchmodat2"
        | "fchownat" => registers.rsi,
        "read" | "pread64" | "write" | "fstat" | "fsync" | "ftruncate" | "flock" | "getdents64" | "close"
        | "fcntl" | "fstatfs" | "ioctl" | "fchmod" | "fchown" => {
            let link = fs::read_link(format!("/proc/{pid}/fd/{}", registers.rdi)).unwrap_or_default();
            return link.to_string_lossy().into_owned();
        }
        _ => return String::new(),
    };
    let mut text = [0; 256];
    let memory = fs::File::open(format!("/proc/{pid}/mem"));
    let read = memory.and_then(|file| std::os::unix::fs::FileExt::read_at(&file, &mut text, address));
    let bytes = text[..read.unwrap_or(0)].split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(bytes).into_owned()
}

fn became(pid: Pid) -> Became {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let arguments: Vec<String> = line
        .split(|byte| *byte == 0)
        .map(|word| std::ffi::OsStr::from_bytes(word).to_string_lossy().into_owned())
        .collect();
    let own = |word: &String| {
        let number = word.strip_prefix("/proc/self/fd/")?;
        fs::read_to_string(format!("/proc/{pid}/fd/{number}")).ok()
    };
    let files = arguments.iter().filter_map(own).collect();
    Became { arguments, files }
}
