//! `clearing.lock`: held while files that ended containers left are removed.
//!
//! Unlinking a file removes every mount on it, in all namespaces. So a container that has just got its lease in the same
//! root filesystem, or with a volume on the same file system, must not be created while a process that looked into the
//! ledger before that lease was written still removes files there.

use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::lock;
use super::{Lease, Ledger, Store, VolumeFiles};

/// Removing a dozen empty files takes well under a millisecond, on a slow file system longer.
const LIMIT: Duration = Duration::from_secs(2);
const NAP: Duration = Duration::from_millis(1);

impl Store {
    /// Waits up to 2 s until no other process removes what containers left, and keeps others from it until what this
    /// returns is dropped. The kernel releases it if the process is killed.
    ///
    /// # Errors
    /// The lock cannot be opened, or is not free in time.
    pub(crate) fn clearing(&self) -> io::Result<Flock<File>> {
        let mut file = lock::open(&self.state_dir.join("clearing.lock"))?;
        let deadline = Instant::now() + LIMIT;
        loop {
            file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(lock),
                Err((file, Errno::EWOULDBLOCK | Errno::EINTR)) => file,
                Err((_, errno)) => return Err(errno.into()),
            };
            if Instant::now() >= deadline {
                return Err(io::Error::other("another process has held it for 2 s"));
            }
            std::thread::sleep(NAP);
        }
    }
}

impl Ledger {
    /// Whether files may be removed where `lease`'s container has its root filesystem or a volume: those that a container
    /// left, or will leave when it ends.
    #[must_use]
    pub(crate) fn has_files_to_clear(&self, lease: &Lease) -> bool {
        let shares = |volumes: &[VolumeFiles]| {
            volumes.iter().any(|theirs| lease.volumes.iter().any(|mine| mine.device == theirs.device))
        };
        let beside =
            |other: &Lease| other.container.rootfs == lease.container.rootfs || shares(&other.volumes);
        // A user removes what their containers left by themselves, without this lock.
        let roots = self.leases.iter().filter(|other| other.id != lease.id && other.is_believed_by(0));
        roots.into_iter().any(beside)
            || self
                .leftovers
                .iter()
                .any(|left| left.rootfs == lease.container.rootfs || shares(&left.volumes))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Leftover;
    use super::super::fixture::lease;
    use super::*;

    #[test]
    fn what_is_left_in_the_same_root_filesystem_or_volume_is_to_be_cleared() {
        let mine = lease(1, "GPU-a");
        let left = Leftover {
            bundle: "/other".into(),
            rootfs: "/elsewhere".into(),
            mount_points: vec!["/lib/a".into()],
            volumes: Vec::new(),
        };
        let with = |left: Leftover| Ledger { leftovers: vec![left], ..Ledger::empty("boot") };
        assert!(!with(left.clone()).has_files_to_clear(&mine));
        let beside = |other: Lease| Ledger { leases: vec![mine.clone(), other], ..Ledger::empty("boot") };
        let mut other = lease(2, "GPU-b");
        other.container.rootfs = "/elsewhere".into();
        assert!(!beside(other.clone()).has_files_to_clear(&mine));
        other.container.rootfs.clone_from(&mine.container.rootfs);
        assert!(beside(other).has_files_to_clear(&mine), "it may end now");
        assert!(
            with(Leftover { rootfs: mine.container.rootfs.clone(), ..left.clone() })
                .has_files_to_clear(&mine)
        );
        let volume = |directory: &str| VolumeFiles {
            directory: directory.into(),
            device: 7,
            inode: 1,
            files: vec!["a".into()],
        };
        let shares = Lease { volumes: vec![volume("/srv")], ..mine };
        assert!(with(Leftover { volumes: vec![volume("/alias")], ..left }).has_files_to_clear(&shares));
    }

    #[test]
    fn one_process_clears_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let held = store.clearing().unwrap();
        assert!(store.clearing().is_err());
        drop(held);
        assert!(store.clearing().is_ok());
    }
}
