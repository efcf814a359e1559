//! What each stage of the hook may do: capabilities(7).

use std::io;

use caps::{CapSet, Capability, CapsHashSet};

/// The rights that one kind of work needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// The ledger and /proc, and mount points that are removed from root filesystems: binding a lease, ending one.
    Ledger,
    /// A share is taken and config.json edited: device nodes that are missing are made on the host besides.
    Share,
    /// A share is given to a container that exists: its mount namespace is entered, its device cgroup changed.
    Container,
}

/// Files of any owner: images', bundles', and users' below them.
const FILES: [Capability; 3] =
    [Capability::CAP_DAC_OVERRIDE, Capability::CAP_DAC_READ_SEARCH, Capability::CAP_FOWNER];

/// What the namespaces, environment and root of a process with more rights are read by (proc(5)); ptrace(2) itself is
/// refused by the filter.
const PROCESSES: [Capability; 1] = [Capability::CAP_SYS_PTRACE];

/// Device nodes of the host.
const NODES: [Capability; 2] = [Capability::CAP_MKNOD, Capability::CAP_CHOWN];

/// setns(2) asks for both of the first; files are made as the root of the container's user namespace (setfsuid(2)); a
/// device program is attached with `NET_ADMIN` before Linux 6.9 (kernel/bpf/syscall.c, `bpf_prog_attach`).
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

    /// Whether mounts, other namespaces and the cgroup's programs are a matter of this work.
    pub(super) fn is_container(self) -> bool {
        self == Self::Container
    }

    /// Keeps these capabilities, as far as there are any: nothing brings the others back.
    pub(super) fn keep(self) -> io::Result<()> {
        let failed = |error: caps::errors::CapsError| io::Error::other(error.to_string());
        let permitted = caps::read(None, CapSet::Permitted).map_err(failed)?;
        let kept = permitted.intersection(&self.capabilities()).copied().collect();
        caps::set(None, CapSet::Inheritable, &CapsHashSet::new()).map_err(failed)?;
        // Effective ones first: they have to be permitted.
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
        // Capabilities are a thread's own.
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
