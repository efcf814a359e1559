//! The Linux capabilities of each stage of the hook (capabilities(7)).

use std::io;

use caps::{CapSet, Capability, CapsHashSet};

/// The rights that one kind of work needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// For binding and ending a lease: the ledger, /proc, and removing mount points from root filesystems.
    Ledger,
    /// For taking a lease and editing config.json: in addition, missing device nodes are created on the host.
    Share,
    /// For giving a share to an existing container: in addition, its mount namespace is entered and its device cgroup
    /// changed.
    Container,
}

/// For files of any owner: in images, in bundles, and those of users below them.
const FILES: [Capability; 3] =
    [Capability::CAP_DAC_OVERRIDE, Capability::CAP_DAC_READ_SEARCH, Capability::CAP_FOWNER];

/// For reading the namespaces, environment and root of a process with more rights (proc(5)). The filter refuses
/// ptrace(2) itself.
const PROCESSES: [Capability; 1] = [Capability::CAP_SYS_PTRACE];

/// For creating device nodes on the host.
const NODES: [Capability; 2] = [Capability::CAP_MKNOD, Capability::CAP_CHOWN];

/// setns(2) requires the first two. Files are created as the root of the container's user namespace (setfsuid(2)).
/// Attaching a device program requires `NET_ADMIN` before Linux 6.9 (kernel/bpf/syscall.c, `bpf_prog_attach`).
const NAMESPACES: [Capability; 5] = [
    Capability::CAP_SYS_ADMIN,
    Capability::CAP_SYS_CHROOT,
    Capability::CAP_SETUID,
    Capability::CAP_SETGID,
    Capability::CAP_NET_ADMIN,
];

impl Rights {
    fn capabilities(self) -> CapsHashSet {
        let (nodes, namespaces): (&[_], &[_]) = match self {
            Self::Ledger => (&[], &[]),
            Self::Share => (&NODES, &[]),
            Self::Container => (&NODES, &NAMESPACES),
        };
        let sets: [&[Capability]; 4] = [&FILES, &PROCESSES, nodes, namespaces];
        sets.into_iter().flatten().copied().collect()
    }

    /// Whether this work uses mounts, other namespaces and the cgroup's programs.
    pub(super) fn is_container(self) -> bool {
        self == Self::Container
    }

    /// Keeps these capabilities, as far as this process has them. The others cannot be regained.
    pub(super) fn keep(self) -> io::Result<()> {
        let failed = |error: caps::errors::CapsError| io::Error::other(error.to_string());
        let permitted = caps::read(None, CapSet::Permitted).map_err(failed)?;
        let kept = permitted.intersection(&self.capabilities()).copied().collect();
        caps::set(None, CapSet::Inheritable, &CapsHashSet::new()).map_err(failed)?;
        // The effective set first, because it must be a subset of the permitted set.
        [CapSet::Effective, CapSet::Permitted]
            .into_iter()
            .try_for_each(|set| caps::set(None, set, &kept))
            .map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_once_given_up_do_not_come_back() {
        let have = |set| caps::read(None, set).unwrap();
        // Capabilities belong to a thread.
        let seen = std::thread::spawn(move || {
            let before = have(CapSet::Permitted);
            Rights::Share.keep().unwrap();
            Rights::Ledger.keep().unwrap();
            let after = (have(CapSet::Permitted), have(CapSet::Effective));
            Rights::Container.keep().unwrap();
            assert!(have(CapSet::Inheritable).is_empty());
            (before, after, (have(CapSet::Permitted), have(CapSet::Effective)))
        });
        let (before, after, last) = seen.join().unwrap();
        let ledger: CapsHashSet = before.intersection(&Rights::Ledger.capabilities()).copied().collect();
        assert_eq!(after, (ledger.clone(), ledger));
        assert_eq!(after, last);
    }
}
