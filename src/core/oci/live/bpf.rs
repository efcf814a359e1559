//! The five calls of `bpf(2)` with which a cgroup's device programs are read and replaced.
//!
//! No crate is used: aya and libbpf-rs load programs from ELF objects and have no public way to attach raw instructions
//! with `BPF_F_REPLACE`, and libbpf needs a C library. A hundred lines are enough here.
#![allow(unsafe_code, reason = "one system call, wrapped here and nowhere else")]

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use nix::libc;

/// Commands (linux/bpf.h, `enum bpf_cmd`).
const PROG_LOAD: libc::c_int = 5;
const PROG_ATTACH: libc::c_int = 8;
const PROG_GET_FD_BY_ID: libc::c_int = 13;
const OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const PROG_QUERY: libc::c_int = 16;
/// `BPF_PROG_TYPE_CGROUP_DEVICE`.
const TYPE: u32 = 15;
/// `BPF_CGROUP_DEVICE`.
const ATTACH_TYPE: u32 = 6;
/// `BPF_F_ALLOW_MULTI`: several programs on one cgroup, all of which must allow.
const ALLOW_MULTI: u32 = 2;
/// `BPF_F_QUERY_EFFECTIVE`: also programs of the cgroups above.
pub(super) const EFFECTIVE: u32 = 1;
/// `BPF_F_REPLACE`, Linux 5.6.
const REPLACE: u32 = 4;
/// `BPF_CGROUP_MAX_PROGS` (kernel/bpf/cgroup.c).
const MOST_PROGRAMS: u32 = 64;
/// `BPF_MAXINSNS` for loads without special rights: many times the size of engines' programs.
const MOST_INSTRUCTIONS: u32 = 4096;
/// `struct bpf_insn`, in bytes.
const INSTRUCTION: u32 = 8;

/// The programs of one cgroup.
#[derive(Clone)]
pub(super) struct Attached {
    flags: u32,
    /// Program ids.
    pub programs: Vec<u32>,
}

/// The device programs attached to `cgroup` itself (`asked` is 0), or all that processes in it are subject to ([`EFFECTIVE`]).
pub(super) fn query(cgroup: BorrowedFd<'_>, asked: u32) -> io::Result<Attached> {
    #[repr(C)]
    struct Query {
        target: i32,
        attach_type: u32,
        asked: u32,
        flags: u32,
        ids: u64,
        count: u32,
        padding: u32,
    }
    let mut ids = [0_u32; MOST_PROGRAMS as usize];
    let mut query = Query {
        target: cgroup.as_raw_fd(),
        attach_type: ATTACH_TYPE,
        asked,
        flags: 0,
        ids: ids.as_mut_ptr() as u64,
        count: MOST_PROGRAMS,
        padding: 0,
    };
    // SAFETY: `ids` has room for `count` ids and outlives the call.
    unsafe { call(PROG_QUERY, &mut query) }?;
    let count = query.count.min(MOST_PROGRAMS) as usize;
    Ok(Attached { flags: query.flags, programs: ids[..count].to_vec() })
}

/// The program with this id.
pub(super) fn program(id: u32) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct ById {
        id: u32,
        next: u32,
        flags: u32,
    }
    // SAFETY: the structure holds no pointers; the kernel returns a new descriptor that no other value owns.
    unsafe {
        let fd = call(PROG_GET_FD_BY_ID, &mut ById { id, next: 0, flags: 0 })?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// The instructions of a program. Device programs access only their context, so the kernel returns them as they were
/// loaded.
pub(super) fn instructions(program: &OwnedFd) -> io::Result<Vec<u64>> {
    #[repr(C)]
    struct InfoByFd {
        fd: i32,
        length: u32,
        info: u64,
    }
    let mut instructions = vec![0_u64; MOST_INSTRUCTIONS as usize];
    let bytes = MOST_INSTRUCTIONS * INSTRUCTION;
    let mut info = Info { xlated_length: bytes, xlated: instructions.as_mut_ptr() as u64, ..Info::default() };
    let mut by_fd = InfoByFd { fd: program.as_raw_fd(), length: INFO, info: (&raw mut info) as u64 };
    // SAFETY: `info` is as long as said, `instructions` holds the `bytes` that `info` says; both outlive the call.
    unsafe { call(OBJ_GET_INFO_BY_FD, &mut by_fd) }?;
    if info.xlated_length == 0 || info.xlated_length > bytes {
        return Err(io::Error::other(
            "the kernel does not show the instructions of the program that is there",
        ));
    }
    instructions.truncate((info.xlated_length / INSTRUCTION) as usize);
    Ok(instructions)
}

/// Size of [`Info`] in bytes.
const INFO: u32 = 40;
const _: () = assert!(size_of::<Info>() == INFO as usize);

/// The beginning of `struct bpf_prog_info`.
#[repr(C)]
#[derive(Default)]
struct Info {
    kind: u32,
    id: u32,
    tag: [u8; 8],
    jited_length: u32,
    xlated_length: u32,
    jited: u64,
    xlated: u64,
}

/// Loads a device program.
pub(super) fn load(instructions: &[u64]) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Load {
        kind: u32,
        count: u32,
        instructions: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log: u64,
    }
    let mut load = Load {
        kind: TYPE,
        count: u32::try_from(instructions.len()).map_err(io::Error::other)?,
        instructions: instructions.as_ptr() as u64,
        license: c"Apache".as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log: 0,
    };
    // SAFETY: `instructions` holds `count` of them, the license is a C string, and the kernel reads both
    // during the call; it returns a new descriptor that no other value owns.
    unsafe {
        let fd = call(PROG_LOAD, &mut load)?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Replaces `old` with `new` on `cgroup`.
pub(super) fn replace(
    cgroup: BorrowedFd<'_>,
    attached: &Attached,
    old: &OwnedFd,
    new: &OwnedFd,
) -> io::Result<()> {
    #[repr(C)]
    struct Attach {
        target: i32,
        program: i32,
        kind: u32,
        flags: u32,
        replaced: i32,
    }
    // If only one program may be attached, attaching a second one replaces it.
    let several = attached.flags & ALLOW_MULTI != 0;
    let mut attach = Attach {
        target: cgroup.as_raw_fd(),
        program: new.as_raw_fd(),
        kind: ATTACH_TYPE,
        flags: if several { ALLOW_MULTI | REPLACE } else { attached.flags },
        replaced: if several { old.as_raw_fd() } else { 0 },
    };
    // SAFETY: the structure holds no pointers.
    unsafe { call(PROG_ATTACH, &mut attach) }.map(drop)
}

/// bpf(2).
///
/// # Safety
/// `attributes` has the type for `command`, and its pointers are valid for their lengths.
unsafe fn call<T>(command: libc::c_int, attributes: &mut T) -> io::Result<i32> {
    // SAFETY: the structure outlives the call and its true size is given; the rest is the caller's word.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attributes), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { i32::try_from(result).map_err(io::Error::other) }
}
