//! Refuses the system calls that no hook needs, with a seccomp(2) filter program; and, with another, driver requests of a
//! process that joins a container ([`refuse_drivers`]).
//!
//! The list names refused calls, not allowed ones. The calls that the C library makes change with its version and
//! with the kernel, and a hook that fails on a new call would keep every container from starting. Calls that would give
//! a hijacked process more rights than it has are refused with EPERM: starting programs, acting on other processes,
//! kernel modules, networks, and, in stages that do not need them, mounts and namespaces.
#![allow(unsafe_code, reason = "one system call, wrapped here and nowhere else")]

use std::io;

use nix::libc::{self, c_long, sock_filter, sock_fprog};

use super::Rights;

/// For every stage.
const NEVER: [&[c_long]; 16] = [
    // Programs and processes.
    &[libc::SYS_execve, libc::SYS_execveat, libc::SYS_clone, libc::SYS_clone3],
    // Other processes: a hook only reads /proc.
    &[libc::SYS_ptrace, libc::SYS_process_vm_readv, libc::SYS_process_vm_writev, libc::SYS_process_madvise],
    &[libc::SYS_pidfd_getfd, libc::SYS_pidfd_send_signal, libc::SYS_kill, libc::SYS_tkill],
    &[libc::SYS_rt_sigqueueinfo, libc::SYS_rt_tgsigqueueinfo, libc::SYS_kcmp],
    &[libc::SYS_migrate_pages, libc::SYS_move_pages],
    // User and group ids.
    &[libc::SYS_setuid, libc::SYS_setgid, libc::SYS_setreuid, libc::SYS_setregid],
    &[libc::SYS_setresuid, libc::SYS_setresgid, libc::SYS_setgroups, libc::SYS_personality],
    // The kernel and the machine.
    &[libc::SYS_init_module, libc::SYS_finit_module, libc::SYS_delete_module],
    &[libc::SYS_kexec_load, libc::SYS_kexec_file_load, libc::SYS_reboot],
    &[libc::SYS_swapon, libc::SYS_swapoff, libc::SYS_acct, libc::SYS_quotactl, libc::SYS_syslog],
    &[libc::SYS_settimeofday, libc::SYS_clock_settime, libc::SYS_clock_adjtime, libc::SYS_adjtimex],
    &[libc::SYS_sethostname, libc::SYS_setdomainname, libc::SYS_perf_event_open, libc::SYS_userfaultfd],
    &[libc::SYS_add_key, libc::SYS_request_key, libc::SYS_keyctl],
    // Ways around this filter.
    &[libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register],
    // Ways out of a root directory.
    &[libc::SYS_open_by_handle_at, libc::SYS_chroot, libc::SYS_pivot_root],
    &[libc::SYS_unshare, libc::SYS_mount],
];

/// For every stage, where the architecture has them: more ways to make processes, and the machine's ports and segments.
#[cfg(target_arch = "x86_64")]
const NEVER_HERE: &[c_long] =
    &[libc::SYS_fork, libc::SYS_vfork, libc::SYS_iopl, libc::SYS_ioperm, libc::SYS_modify_ldt];
#[cfg(not(target_arch = "x86_64"))]
const NEVER_HERE: &[c_long] = &[];

/// Refused in stages that do not enter a container that runs: also a way out of a root directory.
const RUNNING: &[c_long] = &[libc::SYS_umount2];

/// Refused in stages that do not enter a container.
const CONTAINER: &[c_long] = &[
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_setns,
    libc::SYS_bpf,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_mount_setattr,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
];

/// Calls that are allowed only with one value of their first argument: sockets on this host only.
const WITH: [(c_long, c_long); 2] =
    [(libc::SYS_socket, libc::AF_UNIX as c_long), (libc::SYS_socketpair, libc::AF_UNIX as c_long)];

/// The architecture that the kernel must report (linux/audit.h). On other architectures the numbers mean other calls.
#[cfg(target_arch = "x86_64")]
const ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCH: u32 = 0xc000_00b7;

/// The bit that marks calls of the x32 interface; the other bits are the x86-64 number (asm/unistd.h).
#[cfg(target_arch = "x86_64")]
const X32: u32 = 0x4000_0000;

/// Offsets in `struct seccomp_data` (linux/seccomp.h): the call's number, the architecture, and the lower half of the
/// first argument.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENT: u32 = 16;

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const REFUSE: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;

/// Refuses this thread the calls that `rights` do not need. This cannot be undone. `no_new_privs` must be set.
///
/// # Errors
/// EINVAL from a kernel without seccomp.
pub(super) fn install(rights: Rights) -> io::Result<()> {
    set(&mut program(rights))
}

/// Makes `program` decide about every system call of this thread and of the programs that it starts or becomes by exec.
///
/// # Errors
/// EACCES without `no_new_privs` and without `CAP_SYS_ADMIN`, EINVAL from a kernel without seccomp.
fn set(program: &mut [sock_filter]) -> io::Result<()> {
    let length = u16::try_from(program.len()).map_err(io::Error::other)?;
    let program = sock_fprog { len: length, filter: program.as_mut_ptr() };
    // SAFETY: the program has as many instructions as its length says, and it outlives the call, which copies it. The
    // other arguments are numbers.
    let done = unsafe {
        libc::prctl(libc::PR_SET_SECCOMP, libc::c_ulong::from(libc::SECCOMP_MODE_FILTER), &raw const program)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn program(rights: Rights) -> Vec<sock_filter> {
    let mut program = vec![load(ARCHITECTURE), when(ARCH, 1, 0), ret(REFUSE), load(NUMBER)];
    #[cfg(target_arch = "x86_64")]
    program.extend([step(libc::BPF_JMP | libc::BPF_JGE, X32, 0, 1), ret(REFUSE)]);
    let (container, running): (&[c_long], &[c_long]) = match rights {
        Rights::Running => (&[], &[]),
        Rights::Container => (&[], RUNNING),
        Rights::Ledger | Rights::Share => (CONTAINER, RUNNING),
    };
    for &call in NEVER.into_iter().chain([NEVER_HERE, container, running]).flatten() {
        program.extend([when(number(call), 0, 1), ret(REFUSE)]);
    }
    for (call, value) in WITH.into_iter().chain([(libc::SYS_tgkill, own_pid())]) {
        program.extend([when(number(call), 0, 4), load(ARGUMENT), when(number(value), 0, 1)]);
        program.extend([ret(ALLOW), ret(REFUSE)]);
    }
    program.push(ret(ALLOW));
    program
}

/// Signals to itself: abort(3).
fn own_pid() -> c_long {
    c_long::from(nix::unistd::getpid().as_raw())
}

/// As the virtual machine sees it; numbers of calls are small.
fn number(call: c_long) -> u32 {
    u32::try_from(call).unwrap_or(u32::MAX)
}

/// Loads a word of `seccomp_data`.
fn load(offset: u32) -> sock_filter {
    step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset, 0, 0)
}

/// Jumps over `then` instructions if the word equals `value`, otherwise over `other`.
fn when(value: u32, then: u8, other: u8) -> sock_filter {
    step(libc::BPF_JMP | libc::BPF_JEQ, value, then, other)
}

fn ret(verdict: u32) -> sock_filter {
    step(libc::BPF_RET | libc::BPF_K, verdict, 0, 0)
}

/// An operation, which has 16 bits.
fn step(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: u16::try_from(code).unwrap_or_default(), jt, jf, k }
}

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
/// undone. It keeps a process that joins a container from using its device nodes: they exist in the container, and its cgroup
/// may allow them to be opened, but drivers are used through ioctl(2).
///
/// NVIDIA's driver looks at a request's number and size, not at its type, and each of its requests has a size
/// (open-gpu-kernel-modules, `nvidia_ioctl` in kernel-open/nvidia/nv.c, `RmIoctl` in escape.c; UVM's `UVM_INITIALIZE`
/// is 0x30000001). So requests with a size are refused. The exceptions are a few that shells make on terminals and
/// files; none of them has a number and size that the driver uses. Most requests to terminals and sockets have no size.
///
/// # Errors
/// EACCES without the right (`CAP_SYS_ADMIN` in its user namespace), EINVAL from a kernel without seccomp.
pub fn refuse_drivers() -> io::Result<()> {
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
    set(&mut program)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::unix::net::UnixDatagram;
    use std::process::Command;

    use super::*;

    /// The result of `attempt` in a thread with the filter of `rights`: a filter belongs to one thread.
    fn filtered<T: Send + 'static>(rights: Rights, attempt: fn() -> io::Result<T>) -> Option<i32> {
        let attempted = std::thread::spawn(move || {
            rustix::thread::set_no_new_privs(true).unwrap();
            install(rights).unwrap();
            attempt().err().map(|error| error.raw_os_error().unwrap_or(0))
        });
        attempted.join().unwrap()
    }

    /// A system call with two numbers and zeros.
    fn call(number: c_long, [one, two]: [c_long; 2]) -> io::Result<()> {
        // SAFETY: the calls of these tests take numbers, and null where a pointer may be.
        let done = unsafe { libc::syscall(number, one, two, 0, 0) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    #[test]
    fn programs_networks_and_other_processes_are_out_of_reach() {
        for rights in [Rights::Ledger, Rights::Share, Rights::Container, Rights::Running] {
            let refused = Some(libc::EPERM);
            assert_eq!(filtered(rights, || Command::new("/bin/true").status()), refused);
            assert_eq!(filtered(rights, || UdpSocket::bind("127.0.0.1:0")), refused);
            // Without the filter: no such process is traced by us.
            assert_eq!(
                filtered(rights, || call(libc::SYS_ptrace, [libc::PTRACE_PEEKTEXT.into(), 1])),
                refused
            );
            assert_eq!(filtered(rights, || Ok(nix::unistd::chroot("/")?)), refused);
            let signal = || Ok(nix::sys::signal::kill(nix::unistd::getppid(), None)?);
            assert_eq!(filtered(rights, signal), refused);
        }
    }

    #[test]
    fn a_namespace_is_entered_by_the_one_stage_that_must() {
        // A descriptor of another kind: a refused call is refused before that is examined.
        let enter = || {
            let file = std::fs::File::open("/dev/null")?;
            Ok(nix::sched::setns(file, nix::sched::CloneFlags::CLONE_NEWNS)?)
        };
        assert_eq!(filtered(Rights::Container, enter), Some(libc::EINVAL));
        assert_eq!(filtered(Rights::Share, enter), Some(libc::EPERM));
        assert_eq!(filtered(Rights::Ledger, enter), Some(libc::EPERM));
        // Without the filter: there is no such place.
        let unmount = || Ok(rustix::mount::unmount("/nonexistent", rustix::mount::UnmountFlags::DETACH)?);
        assert_eq!(filtered(Rights::Running, unmount), Some(libc::ENOENT));
        assert_eq!(filtered(Rights::Container, unmount), Some(libc::EPERM));
    }

    #[test]
    fn a_hooks_own_calls_go_on_as_before() {
        assert_eq!(filtered(Rights::Ledger, UnixDatagram::unbound), None);
        assert_eq!(filtered(Rights::Ledger, || tempfile::tempdir()?.close()), None);
        assert_eq!(filtered(Rights::Ledger, || std::fs::read_to_string("/proc/self/stat")), None);
        // Signal 0 to itself, as abort(3) sends another.
        let itself = || call(libc::SYS_tgkill, [own_pid(), nix::unistd::gettid().as_raw().into()]);
        assert_eq!(filtered(Rights::Ledger, itself), None);
    }
}

#[cfg(test)]
mod refuse_drivers_tests {
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
    fn requests_to_a_driver_are_refused_whatever_their_type() {
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
