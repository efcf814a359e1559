//! Enters a container's mount namespace and returns.

use std::fs::File;
use std::os::fd::OwnedFd;

use nix::sched::{CloneFlags, setns};

use super::{NamespaceError, failed};

/// This process is in a container's mount namespace for as long as this lives.
pub(super) struct Inside {
    home: File,
}

impl Inside {
    /// The kernel refuses processes with several threads (setns(2)).
    pub fn enter(namespace: &OwnedFd) -> Result<Self, NamespaceError> {
        let enter = || {
            let home = File::open("/proc/self/ns/mnt")?;
            setns(namespace, CloneFlags::CLONE_NEWNS)?;
            Ok::<_, std::io::Error>(Self { home })
        };
        enter().map_err(|error| failed("enter its mount namespace", error))
    }

    /// Returns to the host. A process that cannot return ends, because it would mistake the container's files for the
    /// host's. The container then does not start, and its lease ends with it.
    pub fn leave(self) {
        if setns(&self.home, CloneFlags::CLONE_NEWNS).is_err() {
            std::process::abort();
        }
    }
}
