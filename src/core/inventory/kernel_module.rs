//! The loaded kernel module, from its text in /proc and /sys.

use std::io;
use std::path::Path;

use crate::fs::below::under;
use crate::reading::kernel_file;

/// The `nvidia` kernel module's report about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelModule {
    /// As `580.159.04`.
    pub version: String,
    /// Whether it reports that it is simulated.
    pub simulated: bool,
}

/// The file with the module's version.
pub const VERSION_FILE: &str = "/proc/driver/nvidia/version";

/// The module loaded on this host; `None` if there is none.
pub fn loaded(root: &Path) -> io::Result<Option<KernelModule>> {
    for path in [VERSION_FILE, "/sys/module/nvidia/version"] {
        match kernel_file(under(root, path)) {
            Ok(text) => return Ok(parse(&text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Two spellings are in use, and a bare version in /sys:
/// `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 …` and
/// `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build …`.
fn parse(text: &str) -> Option<KernelModule> {
    let first = text.lines().next()?;
    let version = first.split_ascii_whitespace().find(|word| is_driver_version(word))?;
    Some(KernelModule { version: version.to_owned(), simulated: first.contains("SIMULATED") })
}

/// Whether `text` has the form of a driver's version: `580.65`, `580.159.04`. Its first number has three digits or
/// more, unlike a library's own version, such as `1.1.13` of libnvidia-egl-wayland.
#[must_use]
pub fn is_driver_version(text: &str) -> bool {
    let parts: Vec<&str> = text.split('.').collect();
    let digits = |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    matches!(parts.len(), 2 | 3) && parts[0].len() >= 3 && parts.iter().all(digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_both_spellings_and_the_bare_version() {
        let cases = [
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n\
                 GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n",
                "535.129.03",
                false,
            ),
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86.15  Release Build  (dvs)",
                "570.86.15",
                false,
            ),
            ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  SIMULATED", "580.159.04", true),
            ("580.65\n", "580.65", false),
        ];
        for (text, version, simulated) in cases {
            assert_eq!(parse(text), Some(KernelModule { version: version.into(), simulated }), "{text}");
        }
    }

    #[test]
    fn no_version_is_no_module() {
        for text in ["", "\n", "NVRM version: NVIDIA UNIX x86_64 Kernel Module", "1.2.3", "580.", "5a0.1"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_library_version_is_no_driver_version() {
        assert!(is_driver_version("580.159.04"));
        for own in ["1", "4.0.0", "1.1.13", "580", "580.1.2.3", ""] {
            assert!(!is_driver_version(own), "{own}");
        }
    }
}
