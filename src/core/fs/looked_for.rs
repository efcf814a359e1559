//! Looking for files in the places of all distributions. Most of these places do not exist, and some may be on file
//! systems that answer badly.

use std::io::{self, ErrorKind};
use std::path::Path;

use crate::text::safe;

/// The result of `ask` for `path`; `None` if there is no such file.
///
/// A failure is tried again, because a file must not be taken as absent for a transient error, such as a lack of memory or
/// of descriptors. If it fails again, it counts as absent, with a warning: a broken mount where the file could
/// have been must not keep it from being found elsewhere.
pub fn examine<T>(path: &Path, ask: impl Fn() -> io::Result<T>) -> Option<T> {
    let again = |error: io::Error| if is_absent(&error) { Err(error) } else { ask() };
    match ask().or_else(again) {
        Ok(found) => Some(found),
        Err(error) => {
            if !is_absent(&error) {
                tracing::warn!(
                    "{} cannot be examined and is taken as absent: {error}",
                    safe(&path.to_string_lossy())
                );
            }
            None
        }
    }
}

/// Whether the error says that there is no such file.
pub(crate) fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use nix::libc::{EIO, EMFILE, ENOENT, ENOMEM, ENOTDIR};

    use super::*;

    /// What is found if the kernel gives these errors one after the other (0: none), and how often it was asked.
    fn asked(errors: &[i32]) -> (Option<()>, usize) {
        let left = RefCell::new(errors.iter());
        let ask = || match left.borrow_mut().next() {
            Some(0) => Ok(()),
            errno => Err(io::Error::from_raw_os_error(*errno.expect("asked no more often"))),
        };
        let found = examine(Path::new("/x"), ask);
        (found, errors.len() - left.borrow().len())
    }

    #[test]
    fn an_error_of_the_moment_is_no_absence() {
        assert_eq!(asked(&[0]), (Some(()), 1));
        assert_eq!(asked(&[EMFILE, 0]), (Some(()), 2));
        assert_eq!(asked(&[ENOMEM, ENOENT]), (None, 2));
        assert_eq!(asked(&[EIO, EIO]), (None, 2));
        for absent in [ENOENT, ENOTDIR] {
            assert_eq!(asked(&[absent]), (None, 1));
        }
    }
}
