//! The device filter that is put in front of a container's own, a few eBPF instructions; and the result of such a program.
//! Pure.
//!
//! A cgroup's device program is given `struct bpf_cgroup_dev_ctx` (linux/bpf.h) in r1: access in the upper
//! and type in the lower half of the first word, then major and minor. It returns 1 to allow.

use crate::inventory::Node;

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

/// `before`, with instructions in front that allow reading and writing `nodes`. Jumps are relative, and r1 holds what
/// `before` expects.
pub(super) fn allow(nodes: &[&Node], before: &[u64]) -> Vec<u64> {
    let body: Vec<u64> = nodes.iter().flat_map(|node| allow_one(node)).collect();
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
    program.extend(before);
    program
}

fn allow_one(node: &Node) -> [u64; 4] {
    [
        instruction(JUMP_UNLESS, 3, 0, 3, number(node.major)),
        instruction(JUMP_UNLESS, 4, 0, 2, number(node.minor)),
        instruction(SET, 0, 0, 0, 1),
        instruction(EXIT, 0, 0, 0, 0),
    ]
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
        // The original program returns 7, so that its answers differ from those of the added instructions.
        let old = [instruction(SET, 0, 0, 0, 7), instruction(EXIT, 0, 0, 0, 0)];
        let program = allow(&nodes, &old);
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
        assert_eq!(run(&allow(&[], &old), 2, 6, 195, 0), 7);
        assert_eq!(allows(&program, nodes[0]), Some(true));
        assert_eq!(
            allows(&[instruction(SET, 0, 0, 0, 0), instruction(EXIT, 0, 0, 0, 0)], nodes[0]),
            Some(false)
        );
        // A call, and a jump to itself.
        assert_eq!(allows(&[instruction(0x85, 0, 0, 0, 1)], nodes[0]), None);
        assert_eq!(allows(&[instruction(0x05, 0, 0, -1, 0)], nodes[0]), None);
    }
}
