//! Whether this process can be root on the host, or runs in another user namespace than the initial one.

use std::io;
use std::sync::OnceLock;

use crate::reading::kernel_file;

/// Whether this process runs in a user namespace other than the initial one, which is the only one that maps every id
/// to itself (`user_namespaces(7)`). `true` if that is unknown: the process then does not act as the host's root.
///
/// The first answer holds for the process's life, so that a container is not given one half of its share as by root and
/// the other as by a user.
#[must_use]
pub fn is_nested() -> bool {
    // No program of sublet's enters another user namespace, except in a child that becomes another program.
    static NESTED: OnceLock<bool> = OnceLock::new();
    // A transient failure (no descriptor left) is tried again.
    let read = || kernel_file("/proc/self/uid_map");
    *NESTED.get_or_init(|| is_nested_by(read().or_else(|_| read())))
}

/// Whether the first process that /proc shows runs in this process's user namespace, as in a system container. It does not
/// below a rootless engine; there nobody may look.
#[must_use]
pub(crate) fn is_of_a_system() -> bool {
    let of = |who: &str| std::fs::read_link(format!("/proc/{who}/ns/user"));
    matches!((of("1"), of("self")), (Ok(first), Ok(own)) if first == own)
}

fn is_nested_by(map: io::Result<String>) -> bool {
    match map {
        Ok(map) => !map.split_ascii_whitespace().eq(["0", "0", "4294967295"]),
        // A kernel without user namespaces has no such file (fs/proc/base.c, CONFIG_USER_NS).
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_read_is_no_host() {
        let map = |text: &str| Ok(text.to_owned());
        assert!(!is_nested_by(map("         0          0 4294967295\n")));
        assert!(!is_nested_by(Err(io::ErrorKind::NotFound.into())), "a kernel without user namespaces");
        for nested in ["0 1000 1\n1 100000 65536\n", "0 0 1\n", ""] {
            assert!(is_nested_by(map(nested)), "{nested}");
        }
        assert!(is_nested_by(Err(io::ErrorKind::PermissionDenied.into())));
    }
}
