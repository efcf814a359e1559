//! The ledger's lock.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::libc::O_NOFOLLOW;

use super::LedgerError;
use super::error::{failed, text};
use crate::fs::trusted;

/// A process holds the lock only for a few file reads and one write. If it holds it for 5 s, something is wrong.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// The shortest and the longest wait between two attempts to take the lock.
const SHORTEST_NAP: Duration = Duration::from_millis(1);
const LONGEST_NAP: Duration = Duration::from_millis(20);

/// The lock. It is released when it is dropped. The descriptor is closed on exec.
pub(super) fn take(path: &Path) -> Result<Flock<File>, LedgerError> {
    let mut file = open(path).map_err(|error| failed("locked", path, error))?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    let mut nap = SHORTEST_NAP;
    loop {
        file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((file, Errno::EWOULDBLOCK | Errno::EINTR)) => file,
            Err((_, errno)) => return Err(failed("locked", path, errno.into())),
        };
        if Instant::now() >= deadline {
            return Err(LedgerError::Locked { path: text(path) });
        }
        std::thread::sleep(nap);
        nap = (nap * 2).min(LONGEST_NAP);
    }
}

/// A process that can open the lock can block every create. So only root may open it, also if its mode was changed. A
/// lock file of another user may be held for ever.
pub(super) fn open(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(O_NOFOLLOW)
        .open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(io::Error::other("it is not a regular file: remove it, and sublet creates it again"));
    }
    if !trusted::is_trusted_owner(meta.uid()) {
        return Err(io::Error::other(format!("it was created by uid {}: remove it", meta.uid())));
    }
    if meta.mode() & 0o077 != 0 {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    Ok(file)
}
