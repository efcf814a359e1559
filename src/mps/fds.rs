//! Descriptors that our caller left open: none of them may live on in a daemon.
#![allow(unsafe_code, reason = "fcntl on descriptors that nobody owns")]

use nix::libc;

/// Marks every descriptor but standard input, output and error close-on-exec.
///
/// The engine's logs, sockets and pipes come to us through a container runtime; a daemon that keeps one
/// open keeps the engine waiting for its end.
pub(super) fn keep_from_children() {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return };
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    for fd in numbers.filter(|fd| *fd > 2) {
        // SAFETY: F_SETFD changes a flag of the descriptor table and no memory of ours; on a number that is
        // no descriptor any more it fails with EBADF. Nothing in this process relies on the flag being off.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    #[test]
    fn a_descriptor_that_would_be_inherited_is_not() {
        let file = std::fs::File::open("/dev/null").unwrap();
        // dup(2) makes an inheritable copy.
        let copy = nix::unistd::dup(&file).unwrap();
        super::keep_from_children();
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", copy.as_raw_fd())).unwrap();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim().to_owned();
        // O_CLOEXEC is 02000000 in fdinfo's octal flags (proc(5)).
        assert_eq!(u32::from_str_radix(&flags, 8).unwrap() & 0o2_000_000, 0o2_000_000);
    }
}
