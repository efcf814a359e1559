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

/// A process holds the lock only for a few file reads and one write. If the ledger stays as it is for 5 s and the lock is
/// not free, something is wrong.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Where hundreds of containers start at once on few processors, their processes hold it in turns for longer than 5 s. A
/// ledger that changes all the time is waited for this long.
const BUSY_TIMEOUT: Duration = Duration::from_secs(60);
/// The shortest and the longest wait between two attempts to take the lock.
const SHORTEST_NAP: Duration = Duration::from_millis(1);
const LONGEST_NAP: Duration = Duration::from_millis(20);

/// The lock at `path` of the ledger in `ledger`. It is released when it is dropped. The descriptor is closed on exec.
pub(super) fn take(path: &Path, ledger: &Path) -> Result<Flock<File>, LedgerError> {
    let mut file = open(path).map_err(|error| failed("locked", path, error))?;
    let begun = Instant::now();
    // Looked at only where the lock is not free.
    let (mut seen, mut since) = (None, begun);
    let mut nap = SHORTEST_NAP;
    loop {
        file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((file, Errno::EWOULDBLOCK | Errno::EINTR)) => file,
            Err((_, errno)) => return Err(failed("locked", path, errno.into())),
        };
        let now = Some(version(ledger));
        if now != seen {
            (seen, since) = (now, Instant::now());
        }
        if since.elapsed() >= TIMEOUT || begun.elapsed() >= BUSY_TIMEOUT {
            return Err(LedgerError::Locked { path: text(path), seconds: begun.elapsed().as_secs() });
        }
        std::thread::sleep(nap);
        nap = (nap * 2).min(LONGEST_NAP);
    }
}

/// Differs after each write, which replaces the file.
fn version(ledger: &Path) -> Option<(u64, i64, i64)> {
    std::fs::metadata(ledger).ok().map(|meta| (meta.ino(), meta.mtime(), meta.mtime_nsec()))
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
