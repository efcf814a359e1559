//! Whether a file is a library or program for this machine, by the first 20 bytes of its ELF header.

use std::fs::File;
use std::io::{self, ErrorKind, Read as _};
use std::path::Path;

use sublet_core::fs::looked_for::there;

/// Up to and with `e_machine`.
const HEADER: u64 = 20;

/// A machine for which drivers exist, always in its 64-bit little-endian form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::probe) enum Machine {
    X86_64,
    Aarch64,
}

impl Machine {
    /// The machine that sublet runs on.
    pub const HOST: Self = if cfg!(target_arch = "aarch64") { Self::Aarch64 } else { Self::X86_64 };

    /// Debian's name for its library directory (Multi-Arch specification).
    pub const fn triplet(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64-linux-gnu",
            Self::Aarch64 => "aarch64-linux-gnu",
        }
    }

    /// `e_machine`: `EM_X86_64`, `EM_AARCH64` (elf.h).
    const fn number(self) -> u8 {
        match self {
            Self::X86_64 => 62,
            Self::Aarch64 => 183,
        }
    }

    /// Whether `path` is a 64-bit little-endian ELF file for this machine (`e_ident` and `e_machine`).
    pub fn made(self, path: &Path) -> bool {
        let header = there(path, || header(path)).unwrap_or_default();
        header.starts_with(b"\x7fELF\x02\x01") && header.get(18..) == Some(&[self.number(), 0])
    }
}

/// The first bytes of a file; none of a directory.
fn header(path: &Path) -> io::Result<Vec<u8>> {
    let mut header = Vec::new();
    match File::open(path)?.take(HEADER).read_to_end(&mut header) {
        Err(error) if error.kind() == ErrorKind::IsADirectory => Ok(Vec::new()),
        read => read.map(|_| header),
    }
}
