//! Keeps a process that joins a container from using its device nodes. The nodes exist in the container, and its cgroup
//! may allow them to be opened. But drivers are used through ioctl(2), and a seccomp filter refuses that.
//!
//! NVIDIA's driver looks at a request's number and size, not at its type, and each of its requests has a size
//! (open-gpu-kernel-modules, `nvidia_ioctl` in kernel-open/nvidia/nv.c, `RmIoctl` in escape.c; UVM's `UVM_INITIALIZE`
//! is 0x30000001). So requests with a size are refused. The exceptions are a few that shells make on terminals and
//! files; none of them has a number and size that the driver uses. Most requests to terminals and sockets have no size.
#![allow(unsafe_code, reason = "one system call, wrapped here and nowhere else")]

use std::io;

use nix::libc::{self, sock_filter};

use super::seccomp_filter::{ALLOW, ARCH, ARCHITECTURE, NUMBER, REFUSE, load, number, ret, set, step, when};

/// The offset of the second argument's lower half in `struct seccomp_data`. The kernel uses only this half of a
/// request.
const REQUEST: u32 = 24;

/// The size in a request (asm-generic/ioctl.h).
const SIZE: u32 = 0x3fff_0000;

/// Requests with a size that have nothing to do with a GPU.
const HARMLESS: [u32; 9] = [
    0x8004_5430, // TIOCGPTN: the number of a new terminal
    0x4004_5431, // TIOCSPTLCK
    0x8004_5439, // TIOCGPTLCK
    0x802c_542a, // TCGETS2
    0x402c_542b, // TCSETS2
    0x402c_542c, // TCSETSW2
    0x402c_542d, // TCSETSF2
    0x8008_6601, // FS_IOC_GETFLAGS
    0x4004_9409, // FICLONE, as cp makes it
];

/// The number of ioctl(2) in 32-bit programs, the same for x86 and Arm.
const IOCTL_32: u32 = 54;

/// The number in x86-64's x32 interface (`asm/unistd_x32.h`).
#[cfg(target_arch = "x86_64")]
const IOCTL_X32: u32 = 0x4000_0000 + 514;
#[cfg(not(target_arch = "x86_64"))]
const IOCTL_X32: u32 = u32::MAX;

/// Refuses driver requests of this process and of every program that it starts or becomes by exec. This cannot be
/// undone.
///
/// # Errors
/// EACCES without the right (`CAP_SYS_ADMIN` in its user namespace), EINVAL from a kernel without seccomp.
pub fn refuse_drivers() -> io::Result<()> {
    set(&mut program())
}

fn program() -> Vec<sock_filter> {
    let ioctl = number(libc::SYS_ioctl);
    let most = u8::try_from(HARMLESS.len()).unwrap_or(u8::MAX);
    // The number of ioctl(2) differs between architectures.
    let mut program = vec![
        load(ARCHITECTURE),
        when(ARCH, 0, 4),
        load(NUMBER),
        when(ioctl, 4, 0),
        when(IOCTL_X32, 3, 0),
        ret(ALLOW),
        load(NUMBER),
        when(IOCTL_32, 0, 3 + most),
        load(REQUEST),
        step(libc::BPF_JMP | libc::BPF_JSET, SIZE, 0, 1 + most),
    ];
    // Each one jumps over those after it and over the refusal.
    program.extend(HARMLESS.iter().zip((1..=most).rev()).map(|(request, left)| when(*request, left, 0)));
    program.extend([ret(REFUSE), ret(ALLOW)]);
    program
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    /// The results of requests in a thread with the filter, on a file that supports none of them.
    fn answers(requests: &'static [u32]) -> Vec<i32> {
        let asked = std::thread::spawn(move || {
            rustix::thread::set_no_new_privs(true).unwrap();
            refuse_drivers().unwrap();
            let null = std::fs::File::open("/dev/null").unwrap();
            let ask = |request: &u32| {
                // SAFETY: /dev/null answers none of these requests, so nothing is read or written by the null pointer.
                let done =
                    unsafe { libc::ioctl(null.as_raw_fd(), (*request).into(), std::ptr::null_mut::<u8>()) };
                if done < 0 { io::Error::last_os_error().raw_os_error().unwrap_or(0) } else { 0 }
            };
            requests.iter().map(ask).collect()
        });
        asked.join().unwrap()
    }

    #[test]
    fn what_a_driver_is_asked_for_is_refused_whatever_its_type() {
        // NV_ESC_CHECK_VERSION_STR, NV_ESC_RM_ALLOC and NV_ESC_RM_CONTROL, the last as a terminal's and without a
        // direction, and UVM_INITIALIZE.
        let all: &[u32] = &[0xc048_46d2, 0xc030_462b, 0xc020_462a, 0xc020_542a, 0x0020_462a, 0x3000_0001];
        assert_eq!(answers(all), [libc::EPERM; 6]);
    }

    #[test]
    fn terminals_and_files_are_asked_as_before() {
        // TCGETS, TIOCGWINSZ, FIONREAD, SIOCGIFCONF, FIFREEZE's neighbour FICLONE, and the rest of the list.
        assert_eq!(answers(&[0x5401, 0x5413, 0x541b, 0x8912]), [libc::ENOTTY; 4]);
        assert!(answers(&HARMLESS).iter().all(|answer| *answer != libc::EPERM));
        let listed = std::thread::spawn(|| {
            rustix::thread::set_no_new_privs(true).unwrap();
            refuse_drivers().unwrap();
            std::process::Command::new("ls").arg("/proc/self/fd").output().unwrap().status.success()
        });
        assert!(listed.join().unwrap());
    }
}
