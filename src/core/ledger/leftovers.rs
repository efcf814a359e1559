//! Files that ended containers left in places that outlive them, until they are removed.
//!
//! `clearing.lock` is held meanwhile. Unlinking a file removes every mount on it, in all namespaces. So a container
//! that has just got its lease in the same root filesystem, or with a volume on the same file system, must not be
//! created while a process that looked into the ledger before that lease was written still removes files there.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::Flock;

use super::{Container, Lease, Ledger, Leftover, Store, VolumeFiles, lock};

impl Ledger {
    /// Records what `lease`, which has ended, may have left behind.
    ///
    /// A rootless user removes what their container left. Root removes nothing at a path that a user names.
    pub(super) fn note_leftovers(&mut self, lease: &Lease) {
        let volumes = lease.volumes_with_files();
        let nothing = lease.mount_points.is_empty() && volumes.is_empty();
        if lease.brokered || lease.init.is_some() && nothing {
            return;
        }
        let Container { bundle, rootfs, .. } = &lease.container;
        // A container that is started repeatedly leaves the same files each time.
        let known = self.leftovers.iter_mut().find(|left| left.bundle == *bundle && left.rootfs == *rootfs);
        match known {
            Some(left) => {
                add_missing(&mut left.mount_points, lease.mount_points.to_vec());
                add_missing(&mut left.volumes, volumes);
            }
            None => self.leftovers.push(Leftover {
                bundle: bundle.clone(),
                rootfs: rootfs.clone(),
                mount_points: lease.mount_points.to_vec(),
                volumes,
            }),
        }
    }

    /// Leftovers whose root filesystem no live container of root's uses, without the volumes that those use.
    pub(crate) fn clearable(&self) -> Vec<Leftover> {
        let roots = || self.leases.iter().filter(|lease| lease.is_believed_by(0));
        let in_use = |left: &&Leftover| roots().any(|lease| lease.container.rootfs == left.rootfs);
        // A container may have the same volume at another path. A volume on the same file system counts as the same.
        let used: Vec<u64> = roots().flat_map(|lease| &lease.volumes).map(|volume| volume.device).collect();
        let free = |left: &Leftover| {
            let volumes = left.volumes.iter().filter(|volume| !used.contains(&volume.device));
            let free = Leftover { volumes: volumes.cloned().collect(), ..left.clone() };
            let waits = free.volumes.is_empty() && free.mount_points.is_empty() && !left.volumes.is_empty();
            (!waits).then_some(free)
        };
        self.leftovers.iter().filter(|left| !in_use(left)).filter_map(free).collect()
    }

    /// Of `found`, empty files in `rootfs`, those that a runtime made for a container that has or had a lease. The rest are
    /// the image's own.
    pub(crate) fn filter_mount_points<'p>(&self, rootfs: &Path, found: &'p [PathBuf]) -> Vec<&'p PathBuf> {
        let leases = self.leases.iter().filter(|lease| lease.container.rootfs == rootfs);
        let left = self.leftovers.iter().filter(|left| left.rootfs == rootfs);
        let made: Vec<&PathBuf> = leases
            .flat_map(|lease| lease.mount_points.iter())
            .chain(left.flat_map(|left| &left.mount_points))
            .collect();
        found.iter().filter(|path| made.contains(path)).collect()
    }

    /// Whether files may be removed where `lease`'s container has its root filesystem or a volume: those that a container
    /// left, or will leave when it ends.
    pub(crate) fn has_files_to_clear(&self, lease: &Lease) -> bool {
        let shares = |volumes: &[VolumeFiles]| {
            volumes.iter().any(|theirs| lease.volumes.iter().any(|mine| mine.device == theirs.device))
        };
        let beside =
            |rootfs: &Path, volumes: &[VolumeFiles]| rootfs == lease.container.rootfs || shares(volumes);
        // A user removes what their containers left by themselves, without this lock.
        let mut roots = self.leases.iter().filter(|other| other.id != lease.id && other.is_believed_by(0));
        roots.any(|other| beside(&other.container.rootfs, &other.volumes))
            || self.leftovers.iter().any(|left| beside(&left.rootfs, &left.volumes))
    }

    /// Forgets leftovers that were removed.
    pub fn forget(&mut self, cleared: &[Leftover]) {
        self.leftovers.retain_mut(|left| {
            let same = |other: &&Leftover| other.bundle == left.bundle && other.rootfs == left.rootfs;
            let Some(done) = cleared.iter().find(same) else { return true };
            left.mount_points.retain(|path| !done.mount_points.contains(path));
            left.volumes.retain(|volume| !done.volumes.contains(volume));
            !left.mount_points.is_empty() || !left.volumes.is_empty()
        });
    }
}

fn add_missing<T: PartialEq>(to: &mut Vec<T>, from: Vec<T>) {
    let new: Vec<T> = from.into_iter().filter(|one| !to.contains(one)).collect();
    to.extend(new);
}

impl Lease {
    /// Whether its root filesystem and volumes count for leftovers of `uid`'s containers. A user may report any to
    /// `sublet serve`, and could so keep leftovers of other users' containers.
    pub(crate) fn is_believed_by(&self, uid: u32) -> bool {
        !self.brokered || self.container.uid == uid
    }

    /// The files to remove from volumes after it has ended.
    pub(crate) fn volumes_with_files(&self) -> Vec<VolumeFiles> {
        self.volumes.iter().filter(|volume| !volume.files.is_empty()).cloned().collect()
    }
}

/// Removing a dozen empty files takes well under a millisecond, on a slow file system longer.
const CLEARING_LIMIT: Duration = Duration::from_secs(2);

impl Store {
    /// Waits up to 2 s until no other process removes what containers left, and keeps others from it until what this
    /// returns is dropped. The kernel releases it if the process is killed.
    ///
    /// # Errors
    /// The lock cannot be opened, or is not free in time.
    pub(crate) fn clearing(&self) -> io::Result<Flock<File>> {
        let deadline = Instant::now() + CLEARING_LIMIT;
        let lock = lock::wait_for(&self.state_dir.join("clearing.lock"), || Instant::now() >= deadline)?;
        lock.ok_or_else(|| io::Error::other("another process has held it for 2 s"))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::ledger::fixture::lease;

    fn ledger(leases: Vec<Lease>) -> Ledger {
        Ledger { leases, ..Ledger::empty("boot") }
    }

    #[test]
    fn a_container_that_starts_again_and_again_leaves_its_things_once() {
        let mut ledger = ledger(Vec::new());
        for file in ["/lib/a", "/lib/b", "/lib/a"] {
            let lease = Lease { mount_points: vec![file.into()].into(), ..lease(1, "GPU-a") };
            let id = lease.id.clone();
            ledger.insert(lease).unwrap();
            ledger.remove(&id);
        }
        assert_eq!(ledger.leftovers.len(), 1);
        assert_eq!(ledger.leftovers[0].mount_points, [Path::new("/lib/a"), Path::new("/lib/b")]);
    }

    /// Containers that share a volume: its files are removed after the last of them, those in the root filesystem at
    /// once.
    #[test]
    fn what_is_left_in_a_volume_waits_for_whoever_has_the_volume_too() {
        let volume = |device, file: &str| VolumeFiles {
            directory: "/srv/v".into(),
            device,
            inode: 7,
            files: vec![file.into()],
        };
        let with =
            |n, volumes| Lease { volumes, mount_points: vec!["/lib/a".into()].into(), ..lease(n, "GPU-a") };
        let first = with(1, vec![volume(1, "x"), volume(2, "y")]);
        let other =
            with(2, vec![VolumeFiles { directory: "/alias".into(), files: Vec::new(), ..volume(2, "") }]);
        let mut ledger = ledger(vec![first.clone(), other.clone()]);
        ledger.remove(&first.id);
        let clearable = ledger.clearable();
        assert_eq!((clearable.len(), &clearable[0].volumes[..]), (1, &[volume(1, "x")][..]));
        assert_eq!(clearable[0].mount_points, [Path::new("/lib/a")]);
        ledger.forget(&clearable);
        assert!(ledger.clearable().is_empty(), "nothing to do until the other has ended");
        ledger.remove(&other.id);
        let clearable = ledger.clearable();
        assert!(clearable.iter().any(|left| left.volumes == [volume(2, "y")]), "{clearable:?}");
        ledger.forget(&clearable);
        assert_eq!(ledger.leftovers, []);
    }

    #[test]
    fn what_a_user_says_of_a_container_keeps_no_file_of_roots_where_it_is() {
        let volumes =
            vec![VolumeFiles { directory: "/srv/v".into(), device: 1, inode: 7, files: vec!["x".into()] }];
        let roots = Lease { volumes, mount_points: vec!["/lib/a".into()].into(), ..lease(1, "GPU-a") };
        let mut told = Lease { id: lease(2, "GPU-a").id, brokered: true, ..roots.clone() };
        told.container.uid = 1001;
        let mut ledger = ledger(vec![roots.clone(), told.clone()]);
        assert!(!ledger.has_files_to_clear(&roots));
        ledger.remove(&roots.id);
        assert_eq!(ledger.clearable(), ledger.leftovers);
        assert!(told.is_believed_by(1001) && !told.is_believed_by(1002) && roots.is_believed_by(1002));
    }

    #[test]
    fn an_empty_file_of_the_images_is_nobodys_mount_point() {
        let made = |n, file: &str| Lease { mount_points: vec![file.into()].into(), ..lease(n, "GPU-a") };
        let (mut ledger, id) = (ledger(vec![made(1, "/lib/a"), made(2, "/lib/b")]), lease(2, "GPU-a").id);
        ledger.remove(&id);
        let found = ["/lib/a", "/lib/b", "/lib/own"].map(PathBuf::from);
        let rootfs = lease(1, "GPU-a").container.rootfs;
        let left = lease(2, "GPU-a").container.rootfs;
        assert_eq!(ledger.filter_mount_points(&rootfs, &found)[0], &found[0]);
        assert_eq!(ledger.filter_mount_points(&left, &found).last(), Some(&&found[1]));
        assert!(ledger.filter_mount_points(Path::new("/elsewhere"), &found).is_empty());
    }
}

#[cfg(test)]
mod clearing_tests {
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
