//! Refuses the system calls that no hook needs, with a seccomp(2) filter program.
//!
//! The list says what is refused, not what is allowed. The calls that the C library makes change with its version and
//! with the kernel, and a hook that fails on a new call would keep every container from starting. Calls that would give
//! a hijacked process more rights than it has are refused with EPERM: starting programs, acting on other processes,
//! kernel modules, networks, and, in stages that do not need them, mounts and namespaces.
#![allow(unsafe_code, reason = "one system call, wrapped here and nowhere else")]

use std::io;

use nix::libc::{self, c_long, sock_filter, sock_fprog};

use super::Rights;

/// For every stage.
const NEVER: &[c_long] = &[
    // Programs and processes.
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_clone,
    libc::SYS_clone3,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_fork,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_vfork,
    // Other processes: a hook only reads /proc.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_kcmp,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    // User and group ids.
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setgroups,
    libc::SYS_personality,
    // The kernel and the machine.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
    // Ways around this filter.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    // Ways out of a root directory.
    libc::SYS_open_by_handle_at,
    libc::SYS_chroot,
    libc::SYS_pivot_root,
    libc::SYS_unshare,
    libc::SYS_mount,
    libc::SYS_umount2,
];

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
pub(super) const ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
pub(super) const ARCH: u32 = 0xc000_00b7;

/// The bit that marks calls of the x32 interface; the other bits are the x86-64 number (asm/unistd.h).
#[cfg(target_arch = "x86_64")]
const X32: u32 = 0x4000_0000;

/// Offsets in `struct seccomp_data` (linux/seccomp.h): the call's number, the architecture, and the lower half of the
/// first argument.
pub(super) const NUMBER: u32 = 0;
pub(super) const ARCHITECTURE: u32 = 4;
const ARGUMENT: u32 = 16;

pub(super) const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
pub(super) const REFUSE: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;

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
pub(super) fn set(program: &mut [sock_filter]) -> io::Result<()> {
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
    let mut program = vec![
        load(ARCHITECTURE),
        when(ARCH, 0, 1),
        step(libc::BPF_JMP | libc::BPF_JA, 1, 0, 0),
        ret(REFUSE),
        load(NUMBER),
    ];
    #[cfg(target_arch = "x86_64")]
    program.extend([step(libc::BPF_JMP | libc::BPF_JGE, X32, 0, 1), ret(REFUSE)]);
    let container: &[c_long] = if rights.is_container() { &[] } else { CONTAINER };
    for &call in NEVER.iter().chain(container) {
        program.extend([when(number(call), 0, 1), ret(REFUSE)]);
    }
    for (call, value) in WITH.into_iter().chain([(libc::SYS_tgkill, own_pid())]) {
        let known = [when(number(call), 0, 4), load(ARGUMENT), when(number(value), 0, 1), ret(ALLOW)];
        program.extend(known);
        program.push(ret(REFUSE));
    }
    program.push(ret(ALLOW));
    program
}

/// Signals to itself: abort(3).
fn own_pid() -> c_long {
    c_long::from(nix::unistd::getpid().as_raw())
}

/// As the virtual machine sees it; numbers of calls are small.
pub(super) fn number(call: c_long) -> u32 {
    u32::try_from(call).unwrap_or(u32::MAX)
}

/// Loads a word of `seccomp_data`.
pub(super) fn load(offset: u32) -> sock_filter {
    step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset, 0, 0)
}

/// Jumps over `then` instructions if the word equals `value`, otherwise over `other`.
pub(super) fn when(value: u32, then: u8, other: u8) -> sock_filter {
    step(libc::BPF_JMP | libc::BPF_JEQ, value, then, other)
}

pub(super) fn ret(verdict: u32) -> sock_filter {
    step(libc::BPF_RET | libc::BPF_K, verdict, 0, 0)
}

/// An operation, which has 16 bits.
pub(super) fn step(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: u16::try_from(code).unwrap_or_default(), jt, jf, k }
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
        for rights in [Rights::Ledger, Rights::Share, Rights::Container] {
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
        // A descriptor of another kind: what is refused is refused before that is looked at.
        let enter = || {
            let file = std::fs::File::open("/dev/null")?;
            Ok(nix::sched::setns(file, nix::sched::CloneFlags::CLONE_NEWNS)?)
        };
        assert_eq!(filtered(Rights::Container, enter), Some(libc::EINVAL));
        assert_eq!(filtered(Rights::Share, enter), Some(libc::EPERM));
        assert_eq!(filtered(Rights::Ledger, enter), Some(libc::EPERM));
    }

    #[test]
    fn what_a_hook_does_goes_on_as_before() {
        assert_eq!(filtered(Rights::Ledger, UnixDatagram::unbound), None);
        assert_eq!(filtered(Rights::Ledger, || tempfile::tempdir()?.close()), None);
        assert_eq!(filtered(Rights::Ledger, || std::fs::read_to_string("/proc/self/stat")), None);
        // Signal 0 to itself, as abort(3) sends another.
        let itself = || call(libc::SYS_tgkill, [own_pid(), nix::unistd::gettid().as_raw().into()]);
        assert_eq!(filtered(Rights::Ledger, itself), None);
    }
}
