//! The namespaces to which the process ids and start times of a ledger belong. In other namespaces a running container
//! would seem to have ended. A management container that shares the state directory has another PID namespace.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use super::{Ledger, LedgerError};
use crate::process::own_pid;

/// Inode of the initial PID namespace (Linux, `PROC_PID_INIT_INO`), which sees every process.
const FIRST_PID: u64 = 0xEFFF_FFFC;

/// Inode of the initial time namespace (Linux, `PROC_TIME_INIT_INO`).
const FIRST_TIME: u64 = 0xEFFF_FFFA;

/// The namespaces of a process that records other processes, by inode as in /proc/PID/ns (namespaces(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Namespaces {
    /// The namespace of process ids.
    pid: u64,
    /// The namespace whose clocks start times refer to (`time_namespaces(7)`); 0 if the kernel has no time namespaces.
    time: u64,
}

impl Namespaces {
    /// Of this process.
    ///
    /// # Errors
    /// /proc is not mounted, or is that of another PID namespace.
    pub(super) fn current() -> Result<Self, LedgerError> {
        static OURS: OnceLock<Namespaces> = OnceLock::new();
        if let Some(ours) = OURS.get() {
            return Ok(*ours);
        }
        // Looked up by this process's id. If /proc belongs to another PID namespace, it has no such thread of this
        // process.
        let us = format!("/proc/self/task/{}/ns", own_pid());
        let ours = Self::of(Path::new(&us)).map_err(|source| LedgerError::NoNamespaces { source })?;
        Ok(*OURS.get_or_init(|| ours))
    }

    /// Of the directory `ns` of a process.
    fn of(ns: &Path) -> io::Result<Self> {
        // Only the link's text is read. Following the link requires rights on the namespace's own file (SELinux,
        // nsfs_t).
        let inode = |name: &str| {
            let link = fs::read_link(ns.join(name))?;
            let digits = link.to_str().and_then(|link| link.split(['[', ']']).nth(1)?.parse().ok());
            digits.ok_or_else(|| io::Error::other(format!("{} does not name a namespace", link.display())))
        };
        let time = match inode("time") {
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            time => time?,
        };
        Ok(Self { pid: inode("pid")?, time })
    }

    /// Whether a process in them sees every process of the host, with its real start time.
    pub(super) fn are_the_first(self) -> bool {
        self.pid == FIRST_PID && matches!(self.time, 0 | FIRST_TIME)
    }

    /// Whether process ids recorded in them are valid in `ours`.
    ///
    /// # Errors
    /// [`LedgerError::Elsewhere`].
    pub(super) fn check(self, ours: Self) -> Result<(), LedgerError> {
        if self == ours {
            return Ok(());
        }
        Err(LedgerError::Elsewhere { theirs: self.to_string(), ours: ours.to_string() })
    }
}

impl fmt::Display for Namespaces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid:[{}], time:[{}]", self.pid, self.time)
    }
}

impl Ledger {
    /// Whether it names processes, whose ids differ in other namespaces.
    pub(super) fn names_processes(&self) -> bool {
        let mig = self.mig.under_way.is_some()
            || self.mig.dynamic_instances.iter().any(|instance| instance.awaited.is_some());
        mig || !(self.leases.is_empty() && self.daemons.is_empty() && self.unexplained.is_empty())
    }

    /// Whether its process ids are valid in this process's namespaces. `false` if that is unknown.
    #[must_use]
    pub(crate) fn is_of_here(&self) -> bool {
        Namespaces::current().is_ok_and(|ours| self.check_namespaces(ours).is_ok())
    }

    /// Whether its process ids are valid in `ours`. A ledger that names no process is valid everywhere.
    ///
    /// # Errors
    /// They belong to other namespaces, or to unknown ones.
    pub(super) fn check_namespaces(&self, ours: Namespaces) -> Result<(), LedgerError> {
        match self.namespaces {
            _ if !self.names_processes() => Ok(()),
            Some(theirs) => theirs.check(ours),
            None => Err(LedgerError::Elsewhere { theirs: "unknown ones".to_owned(), ours: ours.to_string() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::lease;
    use super::*;
    use crate::ledger::{Lease, Store};

    const HERE: Namespaces = Namespaces { pid: 5, time: 6 };

    fn ledger(leases: Vec<Lease>, namespaces: Option<Namespaces>) -> Ledger {
        Ledger { namespaces, leases, ..Ledger::empty("boot") }
    }

    #[test]
    fn process_ids_of_other_namespaces_are_not_believed() {
        let held = || vec![lease(1, "GPU-a")];
        let moved =
            [Namespaces { pid: 7, ..HERE }, Namespaces { time: 7, ..HERE }, Namespaces { time: 0, ..HERE }];
        assert!(ledger(held(), Some(HERE)).check_namespaces(HERE).is_ok());
        for theirs in moved {
            let checked = ledger(held(), Some(theirs)).check_namespaces(HERE);
            assert!(matches!(checked, Err(LedgerError::Elsewhere { .. })), "{theirs}");
            assert!(ledger(Vec::new(), Some(theirs)).check_namespaces(HERE).is_ok(), "it names no process");
        }
    }

    /// Whether anything of such a ledger still runs is only seen from a host's first namespaces, and only a person says
    /// that nothing does.
    #[test]
    fn a_ledger_of_namespaces_that_are_gone_is_refused_until_the_hosts_root_gives_it_up() {
        let dir = tempfile::tempdir().unwrap();
        let store = || Store::open(dir.path()).unwrap();
        let boot_id = store().peek().unwrap().boot_id;
        let nowhere = Namespaces { pid: 1, time: 0 };
        let left = Ledger {
            boot_id,
            drained: vec!["GPU-b".into()],
            ..ledger(vec![lease(1, "GPU-a")], Some(nowhere))
        };
        std::fs::write(dir.path().join("ledger.json"), serde_json::to_vec(&left).unwrap()).unwrap();
        let refused = store().change(|_| ()).unwrap_err();
        assert!(refused.is_elsewhere() && refused.to_string().contains("sublet gc --rebuild"), "{refused}");
        let unknown = Ledger { namespaces: None, ..left.clone() };
        assert!(unknown.check_namespaces(Namespaces::current().unwrap()).unwrap_err().is_elsewhere());
        let given_up = store().rebuilding().change(|_| ());
        if Namespaces::current().unwrap().are_the_first() {
            given_up.unwrap();
            let now = store().read().unwrap();
            assert_eq!((now.leases.len(), &now.drained[..], now.lost), (0, &["GPU-b".to_owned()][..], true));
        } else {
            assert!(given_up.unwrap_err().is_elsewhere());
            assert_eq!(store().peek().unwrap(), left);
        }
    }
}
