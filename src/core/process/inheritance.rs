//! What a program inherits from its caller: descriptors, environment, a limit on the size of files.
#![allow(
    unsafe_code,
    reason = "descriptors that nobody owns, fork hooks, the process's environment, a signal"
)]

use std::os::fd::RawFd;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

/// Closes every descriptor but standard input, output and error: for a program that has just begun, and that is
/// given nothing by number.
pub fn close() {
    for fd in descriptors() {
        // SAFETY: nothing has been opened by this program yet, so nobody owns the descriptor.
        unsafe { libc::close(fd) };
    }
}

/// Marks every descriptor but standard input, output and error close-on-exec.
///
/// The engine's logs, sockets and pipes come to us through a container runtime; a daemon that keeps one
/// open keeps the engine waiting for its end.
pub fn keep_from_children() {
    for fd in descriptors() {
        // SAFETY: F_SETFD changes a flag of the descriptor table and no memory of ours; on a number that is
        // no descriptor any more it fails with EBADF. Nothing in this process relies on the flag being off.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

fn descriptors() -> Vec<RawFd> {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(|fd| *fd > 2).collect()
}

/// Has `command` get standard input, output and error alone, while this process keeps the rest open for the program
/// that it is to become (runc's `--preserve-fds`, listening sockets).
///
/// Before Linux 5.11, which cannot mark them all at once, the child has them for as long as it runs.
pub(crate) fn keep_from(command: &mut Command) {
    let mark = || {
        // SAFETY: close_range(2) takes numbers alone and changes flags in the child's own descriptor table.
        unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes one system call, allocates nothing and takes no lock.
    unsafe { command.pre_exec(mark) };
}

/// Takes every variable but `kept` out of the environment of this process, which has one thread.
pub(crate) fn forget_environment(kept: &[&str]) {
    for (name, _) in std::env::vars_os() {
        if !kept.iter().any(|kept| name == *kept) {
            // SAFETY: no other thread reads the environment meanwhile, for there is none.
            unsafe { std::env::remove_var(name) };
        }
    }
}

/// Has a write beyond the caller's `RLIMIT_FSIZE` fail, as on a full disk, where it would end this process in the middle
/// of its work (SIGXFSZ). Whatever it becomes by exec, or starts, has the signal as the caller left it: handlers do not
/// outlive exec, and a signal that is ignored stays so.
pub fn outlive_file_limit() {
    extern "C" fn nothing(_: libc::c_int) {}
    let handler = SigAction::new(SigHandler::Handler(nothing), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handler does nothing, so it may run at any moment.
    let before = unsafe { sigaction(Signal::SIGXFSZ, &handler) };
    if let Some(before) = before.ok().filter(|before| matches!(before.handler(), SigHandler::SigIgn)) {
        // SAFETY: no handler is installed.
        let _ = unsafe { sigaction(Signal::SIGXFSZ, &before) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;
    use std::process::Stdio;
    use std::sync::Mutex;

    use super::*;

    /// Both tests concern the one table of this process.
    static TABLE: Mutex<()> = Mutex::new(());

    #[test]
    fn a_descriptor_that_would_be_inherited_is_not() {
        let _alone = TABLE.lock().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        // dup(2) makes an inheritable copy.
        let copy = nix::unistd::dup(&file).unwrap();
        keep_from_children();
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
        keep_from(&mut list);
        let listed = String::from_utf8(list.output().unwrap().stdout).unwrap();
        // The fourth is the directory that ls reads.
        assert_eq!(listed.split_whitespace().collect::<Vec<_>>(), ["0", "1", "2", "3"]);
        let flags = nix::fcntl::fcntl(&copy, nix::fcntl::FcntlArg::F_GETFD).unwrap();
        assert_eq!(flags & libc::FD_CLOEXEC, 0);
    }
}
