//! What each stage of the hook may do: capabilities(7).

use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// The rights that one kind of work needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rights {
    /// The ledger and /proc, and mount points that are removed from root filesystems: binding a lease, ending one.
    Ledger,
    /// A share is taken and config.json edited: device nodes that are missing are made on the host besides.
    Share,
    /// A share is given to a container that exists: its mount namespace is entered, its device cgroup changed.
    Container,
}

/// Files of any owner: images', bundles', and users' below them.
const FILES: CapabilitySet =
    CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::DAC_READ_SEARCH).union(CapabilitySet::FOWNER);

impl Rights {
    const fn capabilities(self) -> CapabilitySet {
        // SYS_PTRACE is what the namespaces, environment and root of a process with more rights are read by
        // (proc(5)); ptrace(2) itself is refused by the filter.
        let ledger = FILES.union(CapabilitySet::SYS_PTRACE);
        let share = ledger.union(CapabilitySet::MKNOD).union(CapabilitySet::CHOWN);
        match self {
            Self::Ledger => ledger,
            Self::Share => share,
            // setns(2) asks for both of the first; files are made as the root of the container's user namespace
            // (setfsuid(2)); a device program is attached with NET_ADMIN before Linux 6.9
            // (kernel/bpf/syscall.c, bpf_prog_attach).
            Self::Container => share
                .union(CapabilitySet::SYS_ADMIN)
                .union(CapabilitySet::SYS_CHROOT)
                .union(CapabilitySet::SETUID)
                .union(CapabilitySet::SETGID)
                .union(CapabilitySet::NET_ADMIN),
        }
    }

    /// Whether mounts, other namespaces and the cgroup's programs are a matter of this work.
    pub(super) fn is_container(self) -> bool {
        self == Self::Container
    }

    /// Keeps these capabilities, as far as there are any: nothing brings the others back.
    pub(super) fn keep(self) -> io::Result<()> {
        let kept = capabilities(None)?.permitted.intersection(self.capabilities());
        let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
        Ok(set_capabilities(None, sets)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_once_given_up_do_not_come_back() {
        // Capabilities are a thread's own.
        let seen = std::thread::spawn(|| {
            let before = capabilities(None).unwrap().permitted;
            Rights::Share.keep().unwrap();
            Rights::Ledger.keep().unwrap();
            let after = capabilities(None).unwrap();
            Rights::Container.keep().unwrap();
            (before, after, capabilities(None).unwrap())
        });
        let (before, after, last) = seen.join().unwrap();
        let ledger = before.intersection(Rights::Ledger.capabilities());
        assert_eq!((after.permitted, after.effective), (ledger, ledger));
        assert_eq!(after, last);
        assert!(after.inheritable.is_empty());
    }
}
