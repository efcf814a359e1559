//! Whether a file is a library or program for this machine, and which loader a program names, by its ELF headers.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Seek as _, SeekFrom};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use sublet_core::fs::examine;

/// Up to and with `e_machine`, in bytes.
const IDENTITY: u64 = 20;
/// The whole ELF header and one entry of the program header table, in bytes.
const HEADER: u64 = 64;
const ENTRY: u64 = 56;
/// The type of the entry for the path of the loader.
const PT_INTERP: u64 = 3;
/// More entries, and a longer path in bytes, than any program has.
const MOST_ENTRIES: u64 = 64;
const LONGEST_LOADER: u64 = 4096;

/// A machine for which drivers exist, always in its 64-bit little-endian form.
#[derive(Clone, Copy, Debug)]
pub(in crate::probe) struct Machine {
    /// Debian's name for its library directory (Multi-Arch specification).
    pub triplet: &'static str,
    /// `e_machine`: `EM_X86_64`, `EM_AARCH64` (elf.h).
    number: u8,
    /// The loader of this machine's programs (System V ABI, processor supplements).
    loader: &'static str,
}

impl Machine {
    pub const X86_64: Self =
        Self { triplet: "x86_64-linux-gnu", number: 62, loader: "/lib64/ld-linux-x86-64.so.2" };
    pub const AARCH64: Self =
        Self { triplet: "aarch64-linux-gnu", number: 183, loader: "/lib/ld-linux-aarch64.so.1" };
    /// The machine that sublet runs on.
    pub const HOST: Self = if cfg!(target_arch = "aarch64") { Self::AARCH64 } else { Self::X86_64 };

    /// Whether `path` is a 64-bit little-endian ELF file for this machine (`e_ident` and `e_machine`).
    pub fn made(self, path: &Path) -> bool {
        let header = examine(path, || read(path, 0, IDENTITY)).unwrap_or_default();
        header.starts_with(b"\x7fELF\x02\x01") && header.get(18..) == Some(&[self.number, 0])
    }

    /// The loader that the program at `path` names, unless it is the usual one. What is no sound program names none.
    pub fn unusual_loader(self, path: &Path) -> Option<PathBuf> {
        let named = interpreter(path).ok().flatten()?;
        (named != Path::new(self.loader)).then_some(named)
    }
}

/// The path in the segment `PT_INTERP` of a 64-bit little-endian ELF file (elf(5)).
fn interpreter(path: &Path) -> io::Result<Option<PathBuf>> {
    let header = read(path, 0, HEADER)?;
    let (table, size, count) = (number(&header, 32, 8), number(&header, 54, 2), number(&header, 56, 2));
    for entry in 0..count.min(MOST_ENTRIES) {
        let entry = read(path, table.saturating_add(entry * size), ENTRY)?;
        if number(&entry, 0, 4) == PT_INTERP {
            let text = read(path, number(&entry, 8, 8), number(&entry, 32, 8).min(LONGEST_LOADER))?;
            let text = text.split(|&byte| byte == 0).next().unwrap_or_default();
            return Ok((!text.is_empty()).then(|| OsStr::from_bytes(text).into()));
        }
    }
    Ok(None)
}

/// The little-endian number of `length` bytes at `at`; 0 where there are none.
fn number(bytes: &[u8], at: usize, length: usize) -> u64 {
    let bytes = bytes.get(at..at + length).unwrap_or_default();
    bytes.iter().rev().fold(0, |number, &byte| (number << 8) | u64::from(byte))
}

/// The bytes of a file from `offset` on, at most `length`; none of a directory.
pub(super) fn read(path: &Path, offset: u64, length: u64) -> io::Result<Vec<u8>> {
    let (mut file, mut bytes) = (File::open(path)?, Vec::new());
    file.seek(SeekFrom::Start(offset))?;
    match file.take(length).read_to_end(&mut bytes) {
        Err(error) if error.kind() == ErrorKind::IsADirectory => Ok(Vec::new()),
        read => read.map(|_| bytes),
    }
}
