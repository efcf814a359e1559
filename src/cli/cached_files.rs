//! Copies of the ledger and the inventory, for programs that read them repeatedly. The files are parsed again only when
//! they are replaced, and a caller can wait for a change.

use std::fs;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

/// Device, inode, change time and size: a file that was replaced or changed differs in at least one of them.
type Stamp = (u64, u64, i64, i64, u64);

/// The parsed content of a file.
#[derive(Debug)]
pub(crate) struct Kept<T>(Option<(Stamp, Rc<T>)>);

impl<T> Default for Kept<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T> Kept<T> {
    /// The value that `read` returns for `file`, from now or from the last call if the file has not changed.
    pub fn get<E>(&mut self, file: &Path, read: impl FnOnce() -> Result<T, E>) -> Result<Rc<T>, E> {
        // Taken before the file is read: a change in between makes the next call read it again.
        let now = stamp(file);
        if let Some((_, value)) = self.0.as_ref().filter(|(before, _)| Some(*before) == now) {
            return Ok(Rc::clone(value));
        }
        self.0 = None;
        let value = Rc::new(read()?);
        self.0 = now.map(|now| (now, Rc::clone(&value)));
        Ok(value)
    }
}

fn stamp(file: &Path) -> Option<Stamp> {
    let meta = fs::symlink_metadata(file).ok()?;
    Some((meta.dev(), meta.ino(), meta.ctime(), meta.ctime_nsec(), meta.len()))
}

/// Reports when a file in a directory is replaced.
#[derive(Debug, Default)]
pub(crate) struct Changes(Option<Inotify>);

impl Changes {
    /// From now on a change in `dir` ends the next wait.
    pub fn follow(&mut self, dir: &Path) {
        let flags = InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK;
        let inotify = self.0.take().or_else(|| Inotify::init(flags).ok());
        // The call returns the same watch if it is the same directory (`inotify_add_watch(2)`).
        self.0 = inotify.filter(|inotify| inotify.add_watch(dir, AddWatchFlags::IN_MOVED_TO).is_ok());
        while self.0.as_ref().is_some_and(|inotify| inotify.read_events().is_ok()) {}
    }

    /// Waits for a change, for at most `longest`; for `blind` if the kernel does not report changes.
    pub fn wait(&self, longest: Duration, blind: Duration) {
        let Some(inotify) = &self.0 else { return std::thread::sleep(blind) };
        let timeout = PollTimeout::try_from(longest).unwrap_or(PollTimeout::MAX);
        // A signal ends the wait like an event does: the guard checks once more than needed.
        let _ = poll(&mut [PollFd::new(inotify.as_fd(), PollFlags::POLLIN)], timeout);
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::time::Instant;

    use super::*;
    use sublet_core::fs::replace;

    #[test]
    fn a_file_is_read_again_only_when_it_was_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        let mut kept = Kept::default();
        let mut read = || kept.get(&file, || fs::read(&file)).map(|value| value.to_vec());
        assert!(read().is_err());
        replace(&file, b"one", 0o644).unwrap();
        assert_eq!(read().unwrap(), b"one");
        replace(&file, b"two", 0o644).unwrap();
        assert_eq!(read().unwrap(), b"two");
        let again = kept.get(&file, || Err(io::Error::other("it is not read")));
        assert_eq!(*again.unwrap(), b"two");
        fs::remove_file(&file).unwrap();
        assert!(kept.get(&file, || fs::read(&file)).is_err());
    }

    #[test]
    fn a_wait_ends_with_a_change_since_the_directory_was_followed() {
        let dir = tempfile::tempdir().unwrap();
        let mut changes = Changes::default();
        changes.follow(dir.path());
        replace(&dir.path().join("ledger.json"), b"x", 0o644).unwrap();
        let began = Instant::now();
        changes.wait(Duration::from_secs(600), Duration::from_secs(600));
        assert!(began.elapsed() < Duration::from_secs(300));
        // Earlier changes are forgotten, and a directory that does not exist cannot be waited for.
        changes.follow(dir.path());
        changes.wait(Duration::ZERO, Duration::from_secs(600));
        changes.follow(&dir.path().join("none"));
        changes.wait(Duration::from_secs(600), Duration::ZERO);
    }
}
