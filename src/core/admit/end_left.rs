//! Ends what a container that was deleted has left: each process by its pid, checked through a pidfd.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::local::Local;
use super::{AdmitError, EMPTY_CGROUP};
use crate::events::{self, Event, Kind};
use crate::ledger::{Lease, LeaseId, Ledger, LedgerError, Store};
use crate::process::{Process, confine, is_gone, name_of, pidfd_kill, sublet};
use crate::text::safe;

/// Whether a process belongs to the user with this uid.
pub type Owns<'a> = &'a dyn Fn(Process, u32) -> bool;

/// For an engine's own process: it ends nothing of users, which `sublet serve` does.
const NOBODYS: Owns<'static> = &|_, _| false;

/// How soon to look again: a process may have started another one before it was ended.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// What this process has told: `sublet serve` looks every two seconds, and a user may ask without end.
static TOLD: Mutex<BTreeSet<(LeaseId, String)>> = Mutex::new(BTreeSet::new());

impl Local<'_> {
    /// Ends what containers have left whose `delete` is gone. `owns` decides for users' containers. Returns what it did, or
    /// why it did not, a line each that is new.
    pub fn end_left(&self, owns: Owns<'_>) -> Result<Vec<String>, LedgerError> {
        let store = self.store()?;
        let ledger = store.read()?;
        told().retain(|(lease, _)| ledger.lease(lease).is_some());
        let left = ledger.leases.iter().filter(|lease| lease.was_deleted() && lease.has_processes());
        let lines: Vec<String> = left.flat_map(|lease| self.end_once(lease, &ledger, owns)).collect();
        Ok(lines)
    }

    /// Waits until the container of `held` has no process any more, and ends those that it has left if it was deleted.
    pub(super) fn await_end(&self, held: &Lease, store: &Store) -> Result<(), AdmitError> {
        let deadline = Instant::now() + EMPTY_CGROUP;
        while held.has_processes() {
            if held.may_be_ended() {
                self.end_or_ask(held, store)?;
            }
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return Err(self.still_running(held, &store.read()?));
            }
            held.await_change(rest.min(LOOK_AGAIN));
        }
        Ok(())
    }

    /// [`Local::end_once`], by a process of its own where this one may send no signal.
    fn end_or_ask(&self, held: &Lease, store: &Store) -> Result<(), AdmitError> {
        if confine::is_confined() {
            sublet::run(&["gc", "--deleted", held.id.as_str()], 2 * EMPTY_CGROUP)?;
            return Ok(());
        }
        // If this process is killed, others go on.
        if let Some(own) = Process::current().ok().filter(|own| *own != held.owner) {
            store.mark_deleted(&held.id, own)?;
        }
        for line in self.end_once(held, &store.read()?, NOBODYS) {
            tracing::warn!("{line}");
        }
        Ok(())
    }

    /// What the error says of a container whose processes stay.
    pub(super) fn still_running(&self, held: &Lease, ledger: &Ledger) -> AdmitError {
        let left = ledger.left_of(held, &self.config.state_dir);
        AdmitError::StillRunning {
            lease: held.id.clone(),
            container: held.container.id.clone(),
            left: left.to_string(),
        }
    }

    /// Ends what the container of `lease` has left now, and tells it.
    pub(super) fn end_once(&self, lease: &Lease, ledger: &Ledger, owns: Owns<'_>) -> Vec<String> {
        let mut events = Vec::new();
        let whose = safe(&lease.container.name());
        let mut say = |kind, text: String| {
            if told().insert((lease.id.clone(), text.clone())) {
                events.push(event(kind, lease, text));
            }
        };
        // A pid that was read from the cgroup may have become another process before it is held. One that is held, and in
        // the cgroup afterwards, is the same.
        let held: Vec<(Process, OwnedFd)> = ledger
            .left_of(lease, &self.config.state_dir)
            .own
            .into_iter()
            .filter_map(|process| Some((process, process.hold().ok()??)))
            .collect();
        let left = ledger.left_of(lease, &self.config.state_dir);
        for (process, pidfd) in held.iter().filter(|(process, _)| left.own.contains(process)) {
            let (pid, name) = (process.pid, name_of(process.pid));
            let which = format!("process {pid} ({name}), which container {whose} has left");
            if lease.brokered && !owns(*process, lease.container.uid) {
                let uid = lease.container.uid;
                say(Kind::LeftRunning, format!("{which}, is not ended: it does not belong to uid {uid}"));
                continue;
            }
            match pidfd_kill(pidfd) {
                Ok(()) => say(Kind::LeftEnded, format!("{which}, was ended")),
                Err(error) if is_gone(&error) => {}
                Err(error) => say(Kind::LeftRunning, format!("{which}, cannot be ended: {error}")),
            }
        }
        if let Some(kept) = left.kept {
            say(Kind::LeftRunning, format!("container {whose} was deleted, and {kept}"));
        }
        events::tell(&self.config.state_dir, &events);
        events.into_iter().map(|event| event.text).collect()
    }
}

fn told() -> std::sync::MutexGuard<'static, BTreeSet<(LeaseId, String)>> {
    TOLD.lock().unwrap_or_else(PoisonError::into_inner)
}

fn event(kind: Kind, lease: &Lease, text: String) -> Event {
    Event {
        uid: lease.container.uid,
        container_id: lease.container.name().into_owned(),
        lease: lease.id.to_string(),
        devices: lease.devices.clone(),
        text,
        ..Event::now(kind)
    }
}
