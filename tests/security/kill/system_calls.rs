//! The system calls of a run under strace, and at which of them it is killed.

use std::collections::BTreeMap;

/// Calls that leave nothing behind when their process dies.
const HARMLESS: &[&str] = &[
    "access",
    "arch_prctl",
    "brk",
    "clock_nanosleep",
    "close",
    "dup",
    "exit_group",
    "fcntl",
    "fstat",
    "fstatfs",
    "futex",
    "getcwd",
    "getppid",
    "getdents64",
    "getegid",
    "geteuid",
    "getgid",
    "getpid",
    "getrandom",
    "getresgid",
    "getresuid",
    "getsockopt",
    "gettid",
    "getuid",
    "lseek",
    "lstat",
    "mmap",
    "mprotect",
    "mremap",
    "munmap",
    "newfstatat",
    "pidfd_getfd",
    "pidfd_open",
    "pipe2",
    "poll",
    "ppoll",
    "prctl",
    "pread64",
    "prlimit64",
    "read",
    "readlink",
    "readlinkat",
    "recvfrom",
    "restart_syscall",
    "rseq",
    "rt_sigaction",
    "rt_sigprocmask",
    "rt_sigtimedwait",
    "sched_getaffinity",
    "set_robust_list",
    "set_tid_address",
    "sigaltstack",
    "socket",
    "socketpair",
    "stat",
    "statx",
    "uname",
    "utimensat",
    "wait4",
    "waitid",
];

/// Calls that may leave something behind.
const CHANGING: &[&str] = &[
    "chmod",
    "chown",
    "clone",
    "clone3",
    "connect",
    "execve",
    "fchmod",
    "fchmodat",
    "fchown",
    "fchownat",
    "flock",
    "fsync",
    "ftruncate",
    "kill",
    "link",
    "linkat",
    "mkdir",
    "mkdirat",
    "open",
    "openat",
    "openat2",
    "pidfd_send_signal",
    "pwrite64",
    "rename",
    "renameat",
    "renameat2",
    "rmdir",
    "sendto",
    "symlink",
    "tgkill",
    "umask",
    "unlink",
    "unlinkat",
    "vfork",
    "write",
    "writev",
];

/// One system call of a traced run.
#[derive(Clone, Debug)]
pub struct Call {
    pub name: String,
    /// The how manyeth of its name: what strace counts by.
    pub nth: usize,
    pub line: String,
    pub changes: bool,
    /// How many changing calls came before it.
    pub before: usize,
}

/// The calls in strace's log, without the execve by which strace itself started the program. Where the
/// shim becomes the low-level runtime they end with that runtime's first.
pub fn calls(log: &str) -> Vec<Call> {
    let mut counts = BTreeMap::new();
    let mut found = Vec::new();
    for line in log.lines().skip(1) {
        let Some((name, arguments)) = line.split_once('(') else { continue };
        if name.starts_with(['-', '+']) {
            continue;
        }
        let nth: &mut usize = counts.entry(name.to_owned()).or_default();
        *nth += 1;
        let became_another = found.last().is_some_and(|last: &Call| last.name == "execve");
        let changes = !became_another && changes(name, arguments);
        let before = found.iter().filter(|call| call.changes).count();
        found.push(Call { name: name.to_owned(), nth: *nth, line: line.to_owned(), changes, before });
        if became_another {
            break;
        }
    }
    found
}

/// Whether the call changes anything outside its process.
fn changes(name: &str, arguments: &str) -> bool {
    let known = HARMLESS.contains(&name) || CHANGING.contains(&name);
    assert!(known, "{name} is a new system call: put it into HARMLESS or CHANGING: {name}({arguments}");
    match name {
        "open" | "openat" | "openat2" => {
            ["O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC"].iter().any(|flag| arguments.contains(flag))
        }
        "write" | "writev" => !arguments.starts_with("1,") && !arguments.starts_with("2,"),
        _ => CHANGING.contains(&name),
    }
}

/// The calls to be killed at: each that changes something, and the one that follows it.
pub fn points(calls: &[Call]) -> Vec<Call> {
    let follows = |index: usize| index > 0 && calls[index - 1].changes;
    let chosen = (0..calls.len()).filter(|index| calls[*index].changes || follows(*index));
    chosen.map(|index| calls[index].clone()).collect()
}
