//! A cgroup's device programs: the five calls of `bpf(2)` with which they are read and replaced, the filter that is put in
//! front of a container's own, a few eBPF instructions, and the result of such a program.
//!
//! A device program is given `struct bpf_cgroup_dev_ctx` (linux/bpf.h) in r1: access in the upper and type in the lower
//! half of the first word, then major and minor. It returns 1 to allow.
//!
//! No crate is used: aya and libbpf-rs load programs from ELF objects and have no public way to attach raw instructions
//! with `BPF_F_REPLACE`, and libbpf needs a C library. A hundred lines are enough here.
#![allow(unsafe_code, reason = "one system call, wrapped here and nowhere else")]

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use nix::libc;

use super::Access;
use crate::inventory::Node;

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
    unsafe { Ok(OwnedFd::from_raw_fd(call(PROG_GET_FD_BY_ID, &mut ById { id, next: 0, flags: 0 })?)) }
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
    unsafe { Ok(OwnedFd::from_raw_fd(call(PROG_LOAD, &mut load)?)) }
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

/// `BPF_DEVCG_DEV_CHAR`.
const CHARACTER: u32 = 2;
/// `BPF_DEVCG_ACC_READ` and `BPF_DEVCG_ACC_WRITE`.
const READ_WRITE: u32 = 6;
/// All bits but `BPF_DEVCG_ACC_READ` and `BPF_DEVCG_ACC_WRITE`: the container may not create these nodes by mknod.
const NOT_READ_WRITE: i32 = !6;

/// Codes of the instructions in use (linux/bpf.h, `linux/bpf_common.h`).
const LOAD_WORD: u8 = 0x61;
const COPY: u8 = 0xbf;
const SET: u8 = 0xb7;
const AND: u8 = 0x57;
const SHIFT_RIGHT: u8 = 0x77;
const JUMP_UNLESS: u8 = 0x55;
const EXIT: u8 = 0x95;
/// Classes of instructions.
const LOAD: u8 = 1;
const ALU_32: u8 = 4;
const JUMP: u8 = 5;
const JUMP_32: u8 = 6;
const ALU_64: u8 = 7;

/// `before`, with instructions in front that allow reading and writing `nodes`, or forbid it. Jumps are relative, and r1
/// holds the argument of `before`. Instructions that an earlier call has put there are merged, so that a program does not grow
/// each time that a container moves.
pub(super) fn decide(nodes: &[&Node], access: Access, before: &[u64]) -> Vec<u64> {
    let (mut decided, rest) = split(before);
    for node in nodes {
        let of_node = [number(node.major), number(node.minor)];
        decided.retain(|(of, _)| *of != of_node);
        decided.push((of_node, i32::from(access == Access::Open)));
    }
    [&front(&decided), rest].concat()
}

/// What [`front`] decides: nodes by major and minor, and the program's answer.
type Decided = Vec<([i32; 2], i32)>;

/// How many instructions [`front`] has before those of its nodes, and for each.
const HEAD: usize = 9;
const EACH: usize = 4;

/// What an earlier [`decide`] has put in front of `program`, and the rest.
fn split(program: &[u64]) -> (Decided, &[u64]) {
    let immediate = |instruction: u64| {
        let [.., i0, i1, i2, i3] = instruction.to_le_bytes();
        i32::from_le_bytes([i0, i1, i2, i3])
    };
    let each = program.get(HEAD..).unwrap_or_default().chunks_exact(EACH);
    let mut decided: Decided =
        each.map(|own| ([immediate(own[0]), immediate(own[1])], immediate(own[2]))).collect();
    // How many they are is in a jump over them. Another program's instructions are not like ours.
    while !decided.is_empty() {
        let ours = front(&decided);
        if program.starts_with(&ours) {
            return (decided, &program[ours.len()..]);
        }
        decided.pop();
    }
    (decided, program)
}

/// The instructions for these nodes, which fall through for all else.
fn front(decided: &Decided) -> Vec<u64> {
    let decide_one = |([major, minor], answer): &([i32; 2], i32)| {
        [
            instruction(JUMP_UNLESS, 3, 0, 3, *major),
            instruction(JUMP_UNLESS, 4, 0, 2, *minor),
            instruction(SET, 0, 0, 0, *answer),
            instruction(EXIT, 0, 0, 0, 0),
        ]
    };
    let body: Vec<u64> = decided.iter().flat_map(decide_one).collect();
    // After the two tests: the other test (3 instructions), the loads and the body.
    let past_body = i16::try_from(body.len()).unwrap_or(i16::MAX);
    let mut program = vec![
        instruction(LOAD_WORD, 2, 1, 0, 0),
        instruction(COPY, 3, 2, 0, 0),
        instruction(AND, 3, 0, 0, 0xffff),
        instruction(JUMP_UNLESS, 3, 0, past_body.saturating_add(5), number(CHARACTER)),
        instruction(SHIFT_RIGHT, 2, 0, 0, 16),
        instruction(AND, 2, 0, 0, NOT_READ_WRITE),
        instruction(JUMP_UNLESS, 2, 0, past_body.saturating_add(2), 0),
        instruction(LOAD_WORD, 3, 1, 4, 0),
        instruction(LOAD_WORD, 4, 1, 8, 0),
    ];
    program.extend(body);
    program
}

/// Whether `program` lets a process read and write `node`; `None`: it has an instruction that is not known here.
pub(super) fn allows(program: &[u64], node: &Node) -> Option<bool> {
    Some(answer(program, [READ_WRITE << 16 | CHARACTER, node.major, node.minor])? != 0)
}

/// The result of a device program. Known are the instructions of runc's, crun's and systemd's programs, and of
/// [`allow`]: loads from the context, copies, AND, shifts to the right, and jumps if equal or not.
fn answer(program: &[u64], context: [u32; 3]) -> Option<u64> {
    let mut registers = [0_u64; 16];
    let mut at = 0_usize;
    // A program that jumps back ends, too, but is none of theirs.
    for _ in 0..program.len() {
        let [code, operands, o0, o1, i0, i1, i2, i3] = program.get(at)?.to_le_bytes();
        let (to, from) = (usize::from(operands & 15), usize::from(operands >> 4));
        let offset = i16::from_le_bytes([o0, o1]);
        // Sign-extended and then taken as bits, as the instruction set says.
        let immediate = u64::from_ne_bytes(i64::from(i32::from_le_bytes([i0, i1, i2, i3])).to_ne_bytes());
        // The lowest three bits are the class, the fourth says where the second operand is (linux/bpf_common.h).
        let (class, is_of_register) = (code & 7, code & 8 != 0);
        let whole = if class == ALU_64 || class == JUMP { u64::MAX } else { u64::from(u32::MAX) };
        let (left, right) =
            (registers[to] & whole, if is_of_register { registers[from] } else { immediate } & whole);
        at += 1;
        let jumps = match (class, code & 0xf0) {
            (LOAD, 0x60) => {
                let place = usize::try_from(offset).ok()?;
                let word = context.get(place / 4)? >> (place % 4 * 8);
                registers[to] = u64::from(match code & 0x18 {
                    0x00 => word,
                    0x08 => word & 0xffff,
                    0x10 => word & 0xff,
                    _ => return None,
                });
                false
            }
            (ALU_32 | ALU_64, operation) => {
                registers[to] = match operation {
                    0x50 => left & right,
                    0x70 => left.checked_shr(u32::try_from(right).ok()?)?,
                    0xb0 => right,
                    _ => return None,
                };
                false
            }
            (JUMP, 0x90) => return Some(registers[0]),
            (JUMP, 0x00) => true,
            (JUMP | JUMP_32, 0x10) => left == right,
            (JUMP | JUMP_32, 0x50) => left != right,
            _ => return None,
        };
        if jumps {
            at = at.checked_add_signed(offset.into())?;
        }
    }
    None
}

/// Majors have 12 bits and minors 20 (`MAJOR`, `MINOR` in `linux/kdev_t.h`).
fn number(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

/// `struct bpf_insn`, on a little-endian machine as all of NVIDIA's are.
fn instruction(code: u8, destination: u8, source: u8, offset: i16, immediate: i32) -> u64 {
    let [o0, o1] = offset.to_le_bytes();
    let [i0, i1, i2, i3] = immediate.to_le_bytes();
    u64::from_le_bytes([code, source << 4 | destination, o0, o1, i0, i1, i2, i3])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(program: &[u64], kind: u32, access: u32, major: u32, minor: u32) -> u64 {
        answer(program, [access << 16 | kind, major, minor]).unwrap()
    }

    #[test]
    fn only_the_nodes_are_opened_and_all_else_is_left_to_the_old_program() {
        let node = |major, minor| Node { path: "/dev/x".into(), major, minor };
        let nodes = [node(195, 255), node(195, 0), node(511, 1 << 19)];
        let nodes: Vec<&Node> = nodes.iter().collect();
        // The original program returns 7, so that its answers differ from the answers of the added instructions.
        let old = [instruction(SET, 0, 0, 0, 7), instruction(EXIT, 0, 0, 0, 0)];
        let program = decide(&nodes, Access::Open, &old);
        for (major, minor) in [(195, 255), (195, 0), (511, 1 << 19)] {
            for access in [0, 2, 4, 6] {
                assert_eq!(run(&program, 2, access, major, minor), 1, "{major}:{minor} {access}");
            }
            for access in [1, 3, 5, 7] {
                assert_eq!(run(&program, 2, access, major, minor), 7, "mknod of {major}:{minor}");
            }
            assert_eq!(run(&program, 1, 6, major, minor), 7, "a block device");
        }
        for (major, minor) in [(195, 1), (196, 255), (511, 0), (0, 0)] {
            assert_eq!(run(&program, 2, 6, major, minor), 7, "{major}:{minor}");
        }
        assert_eq!(run(&decide(&[], Access::Open, &old), 2, 6, 195, 0), 7);
        assert_eq!(allows(&program, nodes[0]), Some(true));
        assert_eq!(
            allows(&[instruction(SET, 0, 0, 0, 0), instruction(EXIT, 0, 0, 0, 0)], nodes[0]),
            Some(false)
        );
        let closed = decide(&nodes[1..2], Access::Closed, &program);
        assert_eq!((allows(&closed, nodes[1]), allows(&closed, nodes[0])), (Some(false), Some(true)));
        assert_eq!(run(&closed, 2, 1, 195, 0), 7, "mknod");
        // However often it moves, it has one answer for each node.
        let again = decide(&nodes[1..2], Access::Open, &closed);
        assert_eq!((again.len(), allows(&again, nodes[1])), (program.len(), Some(true)));
        assert_eq!(
            split(&program[..program.len() - 3]),
            (vec![], &program[..program.len() - 3]),
            "no whole one"
        );
        assert_eq!(split(&old), (vec![], &old[..]));
        // A call, and a jump to itself.
        assert_eq!(allows(&[instruction(0x85, 0, 0, 0, 1)], nodes[0]), None);
        assert_eq!(allows(&[instruction(0x05, 0, 0, -1, 0)], nodes[0]), None);
    }
}
