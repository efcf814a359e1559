//! The inheritance of a program from its caller: descriptors, environment, rights, and a limit on the size of files; and
//! which program it is, with the other programs of its build that are installed.
//!
//! Of the environment sublet's programs read one variable, the name of a configuration file, and only if the caller has
//! the same rights as the program. The kernel's answer is in the auxiliary vector (getauxval(3)), in the
//! process's own memory: reading it cannot fail for lack of a descriptor, as reading /proc/self/auxv can.
#![allow(
    unsafe_code,
    reason = "descriptors that nobody owns, fork hooks, the process's environment, a signal"
)]

use std::ffi::{CStr, OsStr};
use std::io;
use std::os::fd::{AsFd as _, IntoRawFd as _, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction, signal};
use nix::sys::stat::Mode;
use nix::unistd::{ForkResult, geteuid};

/// Closes every descriptor except standard input, output and error. For a program that has just started and gets no
/// descriptor by number.
pub(crate) fn close_descriptors() {
    for fd in descriptors() {
        // SAFETY: this program has not opened anything yet, so no value owns the descriptor.
        unsafe { libc::close(fd) };
    }
}

/// Marks every descriptor except standard input, output and error close-on-exec.
///
/// This process inherits the engine's logs, sockets and pipes through a container runtime. If a daemon kept one of them
/// open, the engine would wait for the daemon to end.
pub fn set_cloexec_on_all() {
    for fd in descriptors() {
        // SAFETY: F_SETFD changes a flag in the descriptor table and no memory of this process. On a number that is no
        // longer a descriptor it fails with EBADF. Nothing in this process relies on the flag being off.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

fn descriptors() -> Vec<RawFd> {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(|fd| *fd > 2).collect()
}

/// Makes `command` inherit only standard input, output and error. This process keeps the other descriptors open for the
/// program that it will become by exec (runc's `--preserve-fds`, listening sockets).
///
/// Before Linux 5.11, which cannot mark all of them at once, the child has them as long as it runs.
pub(crate) fn set_cloexec_in_child(command: &mut Command) {
    let mark = || {
        // SAFETY: close_range(2) takes only numbers and changes flags in the child's own descriptor table.
        unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes one system call, allocates nothing and takes no lock.
    unsafe { command.pre_exec(mark) };
}

/// Makes `command` a daemon, in a session of its own and no child of this process, which may become another program. The
/// spawned child ends at once, and has to be waited for.
pub(crate) fn daemonize(command: &mut Command) {
    let leave = || {
        nix::unistd::setsid()?;
        // SAFETY: this child has one thread, and has made only system calls since it was forked.
        match unsafe { nix::unistd::fork() }? {
            ForkResult::Child => Ok(()),
            // SAFETY: _exit(2) ends this process and runs nothing of it.
            ForkResult::Parent { .. } => unsafe { libc::_exit(0) },
        }
    };
    // SAFETY: between fork and exec the closure makes three system calls, allocates nothing and takes no lock.
    unsafe { command.pre_exec(leave) };
}

/// Makes the kernel keep the exit status of a child until this process waits for it. A caller that ignores SIGCHLD
/// leaves it ignored here; the kernel then reaps the child, and waiting fails with ECHILD (waitpid(2), "NOTES").
pub fn reset_sigchld() -> std::io::Result<()> {
    // SAFETY: no handler is installed, so no code of this program runs in signal context.
    unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) }?;
    Ok(())
}

/// Removes every variable except [`VARIABLE`] from the environment of this process, which has one thread.
pub(crate) fn clear_environment() {
    for (name, _) in std::env::vars_os() {
        if name != VARIABLE {
            // SAFETY: there is no other thread that could read the environment meanwhile.
            unsafe { std::env::remove_var(name) };
        }
    }
}

/// The first step of a program whose `main` is C's, as of the standard library's before its own `main`: opens closed standard
/// streams, because another file would get such a number and messages be written into it, and ignores SIGPIPE (until exec,
/// for which the standard library resets it).
pub fn init_process() {
    open_standard_streams();
    // SAFETY: no handler is installed, so no code of this program runs in signal context.
    let _ = unsafe { signal(Signal::SIGPIPE, SigHandler::SigIgn) };
    handle_sigxfsz();
}

/// Opens /dev/null in place of closed standard streams.
fn open_standard_streams() {
    let (input, output, error) = (io::stdin(), io::stdout(), io::stderr());
    let streams = [input.as_fd(), output.as_fd(), error.as_fd()];
    let mut streams = streams.map(|stream| PollFd::new(stream, PollFlags::empty()));
    // A transient failure (no memory) is tried again.
    let _ = poll(&mut streams, PollTimeout::ZERO).or_else(|_| poll(&mut streams, PollTimeout::ZERO));
    let is_closed =
        |stream: &&PollFd| stream.revents().is_some_and(|seen| seen.contains(PollFlags::POLLNVAL));
    for _ in streams.iter().filter(is_closed) {
        // The lowest number that is free (open(2)). The program that this one becomes has it, too.
        match open("/dev/null", OFlag::O_RDWR, Mode::empty()) {
            Ok(null) => drop(null.into_raw_fd()),
            Err(_) => std::process::abort(),
        }
    }
}

/// Makes a write beyond the caller's `RLIMIT_FSIZE` fail as on a full disk. Otherwise SIGXFSZ would end this process in
/// the middle of its work. Programs that this process starts, or becomes by exec, have the signal as the caller left
/// it: handlers do not outlive exec, and an ignored signal stays ignored.
pub fn handle_sigxfsz() {
    extern "C" fn nothing(_: libc::c_int) {}
    let handler = SigAction::new(SigHandler::Handler(nothing), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handler does nothing, so it may run at any moment.
    let before = unsafe { sigaction(Signal::SIGXFSZ, &handler) };
    if let Some(before) = before.ok().filter(|before| matches!(before.handler(), SigHandler::SigIgn)) {
        // SAFETY: no handler is installed.
        let _ = unsafe { sigaction(Signal::SIGXFSZ, &before) };
    }
}

/// The path that was given to execve(2).
pub fn executed() -> Option<&'static Path> {
    let address = get(libc::AT_EXECFN).filter(|address| *address != 0)?;
    // SAFETY: getauxval(3): the kernel put a string there, at the top of this process's stack, and nothing moves or
    // changes it.
    let path = unsafe { CStr::from_ptr(address as *const libc::c_char) };
    Some(Path::new(OsStr::from_bytes(path.to_bytes())))
}

/// This process's program file. A failure is tried again: after a transient error, such as a lack of memory, the programs
/// beside it would count as missing, and different ones be taken for them.
pub(super) fn own_program() -> Option<PathBuf> {
    std::env::current_exe().or_else(|_| std::env::current_exe()).ok()
}

/// A further program of this build: in the directory of this program, or where `make install` puts it for the same
/// prefix, otherwise where packages put it.
pub(crate) fn installed(name: &str) -> Option<PathBuf> {
    let own = own_program();
    let beside = own.as_deref().map(|own| own.with_file_name(name));
    let prefix = own.as_deref().and_then(|own| own.parent()?.parent());
    let same_prefix = prefix.map(|prefix| prefix.join("libexec/sublet").join(name));
    let packaged = ["/usr/libexec/sublet", "/usr/bin"].map(|directory| Path::new(directory).join(name));
    beside.into_iter().chain(same_prefix).chain(packaged).find(|program| may_be_there(program))
}

/// Whether it is a file, or could not be examined: another program of this name may belong to another build, and without
/// any the end of a container of `run` is not noticed.
fn may_be_there(program: &Path) -> bool {
    match std::fs::metadata(program) {
        Ok(found) => found.is_file(),
        Err(error) => !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory),
    }
}

/// The effective user as which this process was started. No program of sublet's becomes another one.
pub fn effective_user() -> u32 {
    get(libc::AT_EUID).and_then(|user| u32::try_from(user).ok()).unwrap_or_else(|| geteuid().as_raw())
}

/// Whether this process gained rights by being executed: through setuid, setgid, file capabilities or a security module.
/// `true` if that is unknown. The kernel says so when the program begins, by user, group and capabilities
/// (`cap_bprm_creds_from_file` in its security/commoncap.c), and sublet's programs never change user or group.
fn is_secure() -> bool {
    get(libc::AT_SECURE) != Some(0)
}

/// One value; `None` if the kernel gave none.
fn get(key: libc::c_ulong) -> Option<libc::c_ulong> {
    Errno::clear();
    // SAFETY: the only argument is a number, and no memory of this process is involved.
    let value = unsafe { libc::getauxval(key) };
    (value != 0 || Errno::last_raw() != libc::ENOENT).then_some(value)
}

/// The variable that names one configuration file instead of all other files.
pub(crate) const VARIABLE: &str = "SUBLET_CONFIG";

/// The value of [`VARIABLE`], made absolute, if it is honoured: never when this process has more rights than its
/// caller.
pub fn honoured_config() -> Option<PathBuf> {
    let file = std::env::var_os(VARIABLE).filter(|file| !file.is_empty())?;
    if is_secure() {
        tracing::warn!("{VARIABLE} is ignored in a program with more rights than its caller");
        return None;
    }
    std::path::absolute(file).ok()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;
    use std::process::Stdio;
    use std::sync::Mutex;

    use super::*;

    /// Both tests change the descriptor table of this process.
    static TABLE: Mutex<()> = Mutex::new(());

    #[test]
    fn a_descriptor_that_would_be_inherited_is_not() {
        let _alone = TABLE.lock().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        // dup(2) makes an inheritable copy.
        let copy = nix::unistd::dup(&file).unwrap();
        set_cloexec_on_all();
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", copy.as_raw_fd())).unwrap();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim().to_owned();
        // O_CLOEXEC is 02000000 in fdinfo's octal flags (proc(5)).
        assert_eq!(u32::from_str_radix(&flags, 8).unwrap() & 0o2_000_000, 0o2_000_000);
    }

    #[test]
    fn a_child_gets_three_descriptors_and_we_keep_ours() {
        let _alone = TABLE.lock().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let copy = nix::unistd::dup(&file).unwrap();
        let mut list = Command::new("ls");
        list.arg("/proc/self/fd").stdout(Stdio::piped());
        set_cloexec_in_child(&mut list);
        let listed = String::from_utf8(list.output().unwrap().stdout).unwrap();
        // The fourth is the directory that ls reads.
        assert_eq!(listed.split_whitespace().collect::<Vec<_>>(), ["0", "1", "2", "3"]);
        let flags = nix::fcntl::fcntl(&copy, nix::fcntl::FcntlArg::F_GETFD).unwrap();
        assert_eq!(flags & libc::FD_CLOEXEC, 0);
    }
}

#[cfg(test)]
mod auxiliary_vector_tests {
    use super::*;

    #[test]
    fn a_test_runs_with_its_callers_rights() {
        assert!(!is_secure());
        assert_eq!(effective_user(), geteuid().as_raw());
        assert_eq!(get(0x7fff_fff0), None, "no such key");
        assert!(executed().unwrap().file_name().is_some());
    }

    #[test]
    fn a_program_that_cannot_be_examined_may_be_there() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("file"), "").unwrap();
        std::os::unix::fs::symlink("loop", at("loop")).unwrap();
        assert!(may_be_there(&at("file")));
        assert!(may_be_there(&at("loop")), "ELOOP stands for every error of the moment");
        for absent in ["none", "none/below", "file/below", ""] {
            assert!(!may_be_there(&at(absent)), "{absent}");
        }
    }
}
