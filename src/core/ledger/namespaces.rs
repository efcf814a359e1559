//! The namespaces to which the process ids and start times of a ledger belong. In other namespaces a running container
//! would seem to have ended. A management container that shares the state directory has another PID namespace.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use super::{Ledger, LedgerError};

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
    /// Those of this process.
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
        let us = format!("/proc/self/task/{}/ns", std::process::id());
        let ours = Self::of(Path::new(&us)).map_err(|source| LedgerError::NoNamespaces { source })?;
        Ok(*OURS.get_or_init(|| ours))
    }

    /// Those in the directory `ns` of a process.
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
    fn are_the_first(self) -> bool {
        self.pid == FIRST_PID && matches!(self.time, 0 | FIRST_TIME)
    }

    /// Whether no process is left in them, as far as `ours` shows. When the first process of a PID namespace ends, all
    /// others in it and below it end (`pid_namespaces(7)`).
    fn are_left_by_all(self, ours: Self) -> bool {
        let Ok(entries) = fs::read_dir("/proc") else { return false };
        if !ours.are_the_first() {
            return false;
        }
        let is_pid = |name: &[u8]| name.iter().all(u8::is_ascii_digit);
        entries
            .filter(|entry| entry.as_ref().map_or(true, |entry| is_pid(entry.file_name().as_encoded_bytes())))
            .all(|entry| match entry.and_then(|entry| Self::of(&entry.path().join("ns"))) {
                Ok(its) => its != self,
                // It ended meanwhile. A zombie has no namespaces either.
                Err(error) => error.kind() == io::ErrorKind::NotFound,
            })
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
    /// They belong to other namespaces, or this is unknown.
    pub(super) fn check_namespaces(&self, ours: Namespaces) -> Result<(), LedgerError> {
        if !self.names_processes() {
            return Ok(());
        }
        match self.namespaces {
            Some(theirs) => same(theirs, ours),
            // It was written by a version that did not record them, or rebuilt without its copy.
            None if ours.are_the_first() || self.has_living() => Ok(()),
            None => Err(LedgerError::Elsewhere { theirs: "unknown ones".to_owned(), ours: ours.to_string() }),
        }
    }

    /// Whether a process that it names runs here. It is very unlikely that another process has the same id and start
    /// time.
    fn has_living(&self) -> bool {
        let inits = self.leases.iter().filter_map(|lease| lease.init.as_ref()).map(|init| init.process);
        let owners = self.leases.iter().map(|lease| lease.owner);
        let daemons = self.daemons.iter().filter_map(|daemon| daemon.process);
        inits.chain(owners).chain(daemons).any(|process| process.is_alive())
    }
}

/// Whether what was recorded in `theirs` is valid in `ours`.
pub(super) fn same(theirs: Namespaces, ours: Namespaces) -> Result<(), LedgerError> {
    if theirs == ours || theirs.are_left_by_all(ours) {
        return Ok(());
    }
    Err(LedgerError::Elsewhere { theirs: theirs.to_string(), ours: ours.to_string() })
}

#[cfg(test)]
mod tests {
    use super::super::fixture::lease;
    use super::*;
    use crate::ledger::Lease;
    use crate::process::Process;

    const HERE: Namespaces = Namespaces { pid: 5, time: 6 };

    fn ledger(leases: Vec<Lease>, namespaces: Option<Namespaces>) -> Ledger {
        Ledger { namespaces, leases, ..Ledger::empty("boot") }
    }

    #[test]
    fn ours_are_told_and_those_of_the_host_are_left_by_nobody() {
        let ours = Namespaces::current().unwrap();
        assert!(ours.pid != 0);
        assert!(!ours.are_left_by_all(ours));
        // No namespace can have this inode. (If not every process may be examined, the answer is unknown.)
        let nowhere = Namespaces { pid: 1, time: 0 };
        assert!(!nowhere.are_left_by_all(ours) || ours.are_the_first());
        assert!(!nowhere.are_left_by_all(HERE), "who does not see all processes cannot tell");
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

    #[test]
    fn a_ledger_that_does_not_say_is_ours_where_something_in_it_lives_or_everything_can_be_seen() {
        let mut old = ledger(vec![lease(1, "GPU-a")], None);
        assert!(old.check_namespaces(HERE).is_err());
        assert!(old.check_namespaces(Namespaces { pid: FIRST_PID, time: FIRST_TIME }).is_ok());
        assert!(old.check_namespaces(Namespaces { pid: FIRST_PID, time: 7 }).is_err());
        old.leases[0].owner = Process::current().unwrap();
        assert!(old.check_namespaces(HERE).is_ok());
    }
}
