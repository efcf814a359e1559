//! The locks of a daemon: `mps/<key>/lock`, held while it is started, adjusted or stopped, and `mps/<key>/asking`, held
//! while it is asked.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::libc;

use super::error::io_at;
use super::{MpsError, dirs};
use crate::ledger::DaemonKey;

/// Held until dropped. No other program inherits it: the descriptor is close-on-exec.
pub struct DaemonLock {
    _file: Flock<File>,
}

impl DaemonLock {
    /// Waits for the lock of `key`, for at most `limit`. Creates missing directories.
    ///
    /// # Errors
    /// [`MpsError::Busy`] if the lock is not free in time.
    pub fn take(key: &DaemonKey, state_dir: &Path, limit: Duration) -> Result<Self, MpsError> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(lock) = Self::try_take(key, state_dir)? {
                return Ok(lock);
            }
            if Instant::now() >= deadline {
                return Err(MpsError::Busy { key: key.to_string(), seconds: limit.as_secs() });
            }
            sleep(Duration::from_millis(5));
        }
    }

    /// The lock of `key`; `None` while another process holds it.
    pub(crate) fn try_take(key: &DaemonKey, state_dir: &Path) -> Result<Option<Self>, MpsError> {
        dirs::make(key, state_dir)?;
        let path = key.dir(state_dir).join("lock");
        match lock_now(&path, true) {
            Ok(file) => Ok(file.map(|file| Self { _file: file })),
            // A stop has just removed the directory of a dedicated daemon. The next round creates it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(io_at("lock", &path)(error)),
        }
    }
}

/// Waits for this process's turn to ask a daemon, which it has until the file is dropped. A daemon speaks with one program at
/// a time, and without turns most of sixteen that ask at once are sent away (docs/evidence/2026-11-25-mps-control.md).
///
/// It waits for at most `limit`: whoever is stopped while it asks must not keep all others waiting. Users who may not write
/// in `own`, the daemon's directory, have no turns. The file is not created here, where the daemon may be about to end and
/// its directory about to be removed (`dirs::make`).
pub(super) fn wait_for_turn(own: &Path, limit: Duration) -> Option<Flock<File>> {
    let (path, deadline) = (own.join(dirs::ASKING), Instant::now() + limit);
    loop {
        match lock_now(&path, false) {
            Ok(None) if Instant::now() < deadline => sleep(Duration::from_millis(2)),
            turn => return turn.ok().flatten(),
        }
    }
}

fn lock_now(path: &Path, create: bool) -> io::Result<Option<Flock<File>>> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(create).truncate(false).mode(0o600);
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC).open(path)?;
    let held = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(held) => held,
        Err((_, Errno::EWOULDBLOCK | Errno::EINTR)) => return Ok(None),
        Err((_, error)) => return Err(error.into()),
    };
    // The last holder may have removed the file. A lock on a removed file excludes no other process.
    let (ours, there) = (held.metadata()?, std::fs::symlink_metadata(path)?);
    Ok((ours.ino() == there.ino() && ours.dev() == there.dev()).then_some(held))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> DaemonKey {
        DaemonKey("GPU-11111111-2222-3333-4444-555555555555".into())
    }

    #[test]
    fn one_holder_at_a_time_and_a_limit_on_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let held = DaemonLock::take(&key(), dir.path(), Duration::from_secs(1)).unwrap();
        assert!(DaemonLock::try_take(&key(), dir.path()).unwrap().is_none());
        let begun = Instant::now();
        let refused = DaemonLock::take(&key(), dir.path(), Duration::from_millis(60));
        assert!(matches!(refused, Err(MpsError::Busy { .. })));
        assert!(begun.elapsed() < Duration::from_secs(2));
        drop(held);
        assert!(DaemonLock::try_take(&key(), dir.path()).unwrap().is_some());
    }

    #[test]
    fn a_lock_on_a_removed_file_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let held = DaemonLock::take(&key(), dir.path(), Duration::ZERO).unwrap();
        std::fs::remove_file(key().dir(dir.path()).join("lock")).unwrap();
        let second = DaemonLock::try_take(&key(), dir.path()).unwrap();
        assert!(second.is_some(), "the new file is another lock");
        drop(held);
    }
}
