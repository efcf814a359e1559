//! Shared objects with only a soname. A program that only mounts them needs nothing else.

const PROGRAM_HEADERS: u16 = 3;
const STRINGS_AT: u64 = 64 + 56 * PROGRAM_HEADERS as u64;

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_GNU_STACK: u32 = 0x6474_e551;
const DT_HASH: u64 = 4;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_STRSZ: u64 = 10;
const DT_SYMENT: u64 = 11;
const DT_SONAME: u64 = 14;

/// An ELF64 shared object for this machine that dlopen accepts: program headers, a dynamic section, an empty symbol
/// table with its hash (gABI, chapters 4 and 5). Its segment is readable and writable, because older glibc relocates
/// the dynamic section in place. It has a stack header, because newer glibc refuses objects that need an executable
/// stack.
pub fn shared_object(soname: &str) -> Vec<u8> {
    let mut strings = [b"\0".as_slice(), soname.as_bytes(), b"\0"].concat();
    let string_bytes = strings.len() as u64;
    strings.resize(strings.len().next_multiple_of(8), 0);
    let symbols_at = STRINGS_AT + strings.len() as u64;
    let hash_at = symbols_at + 24;
    let dynamic_at = hash_at + 16;
    let dynamic = [
        (DT_SONAME, 1),
        (DT_STRTAB, STRINGS_AT),
        (DT_SYMTAB, symbols_at),
        (DT_STRSZ, string_bytes),
        (DT_SYMENT, 24),
        (DT_HASH, hash_at),
        (0, 0),
    ];
    let dynamic_size = 16 * dynamic.len() as u64;
    let end = dynamic_at + dynamic_size;

    let mut file = header();
    segment(&mut file, PT_LOAD, 0, end, 0x10000);
    segment(&mut file, PT_DYNAMIC, dynamic_at, dynamic_size, 8);
    segment(&mut file, PT_GNU_STACK, 0, 0, 16);
    file.extend(strings);
    file.extend([0; 24]);
    file.extend([1_u32, 1, 0, 0].iter().flat_map(|word| word.to_ne_bytes()));
    file.extend(dynamic.iter().flat_map(|(tag, value)| [*tag, *value]).flat_map(u64::to_ne_bytes));
    file
}

fn header() -> Vec<u8> {
    let machine: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
    let mut file = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    file.extend([3, machine].iter().flat_map(|half| half.to_ne_bytes()));
    file.extend(1_u32.to_ne_bytes());
    file.extend([0_u64, 64, 0].iter().flat_map(|word| word.to_ne_bytes()));
    file.extend(0_u32.to_ne_bytes());
    let sizes = [64_u16, 56, PROGRAM_HEADERS, 64, 0, 0];
    file.extend(sizes.iter().flat_map(|half| half.to_ne_bytes()));
    file
}

fn segment(file: &mut Vec<u8>, kind: u32, at: u64, size: u64, align: u64) {
    const READ_WRITE: u32 = 6;
    file.extend([kind, READ_WRITE].iter().flat_map(|word| word.to_ne_bytes()));
    file.extend([at, at, at, size, size, align].iter().flat_map(|word| word.to_ne_bytes()));
}
