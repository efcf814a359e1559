//! Kills the processes that a deleted container has left, each through a pidfd.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::local::Local;
use super::{AdmitError, EMPTY_CGROUP};
use crate::events::{self, Event, Kind};
use crate::ledger::{IN_STATE_D, Lease, LeaseId, Ledger, LedgerError, Scan, Store};
use crate::process::{Process, confine, is_gone, name_of, pidfd_await_end, pidfd_kill, sublet};
use crate::text::safe;

/// Whether a process belongs to the user with this uid.
pub type Owns<'a> = &'a dyn Fn(Process, u32) -> bool;

/// For an engine's own process: `sublet serve` kills the processes of users.
const OWNS_NONE: Owns<'static> = &|_, _| false;

/// The pause before the next attempt: a process may have started another one before it was killed.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// The reports of this process: `sublet serve` looks every two seconds, and a user may ask without end.
static REPORTED: Mutex<BTreeSet<(LeaseId, String)>> = Mutex::new(BTreeSet::new());

impl Local<'_> {
    /// Kills the processes that deleted containers have left, if their `delete` is gone. `owns` decides for users'
    /// containers. Returns a line for each process that was killed or left alone, if it is new.
    pub fn kill_left_processes(&self, store: &Store, owns: Owns<'_>) -> Result<Vec<String>, LedgerError> {
        let ledger = store.read()?;
        reported().retain(|(lease, _)| ledger.lease(lease).is_some());
        let left = ledger.leases.iter().filter(|lease| lease.was_deleted() && lease.has_processes());
        Ok(left.flat_map(|lease| self.kill_left(lease, &ledger, owns)).collect())
    }

    /// Waits until the container of `held` has no process any more, which could make mount points. If it was deleted, kills
    /// those that it has left.
    pub(super) fn await_end(&self, held: &Lease, store: &Store) -> Result<(), AdmitError> {
        let deadline = Instant::now() + EMPTY_CGROUP;
        while held.has_processes() || held.is_still_made() {
            if held.may_be_ended() {
                self.kill_left_or_delegate(held, store)?;
            }
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return Err(self.still_running(held, &store.read()?));
            }
            held.await_change(rest.min(RETRY_PAUSE));
        }
        Ok(())
    }

    /// [`Local::kill_left`], by another process if this one may send no signal.
    fn kill_left_or_delegate(&self, held: &Lease, store: &Store) -> Result<(), AdmitError> {
        if confine::is_confined() {
            sublet::run(&["gc", "--deleted", held.id.as_str()], 2 * EMPTY_CGROUP)?;
            return Ok(());
        }
        // If this process is killed, other commands see that the container was deleted.
        if let Some(own) = Process::current().ok().filter(|own| *own != held.owner) {
            store.change_with_scan(Scan::None, |ledger| ledger.mark_deleted(&held.id, own))?;
        }
        crate::log::warn(self.kill_left(held, &store.read()?, OWNS_NONE));
        Ok(())
    }

    pub(super) fn still_running(&self, held: &Lease, ledger: &Ledger) -> AdmitError {
        let left = match &held.init {
            Some(_) => ledger.find_left_processes(held, &self.config.state_dir).to_string(),
            None => held.signs_of_life().join(", "),
        };
        let (lease, container) = (held.id.clone(), held.container.id.clone());
        AdmitError::StillRunning { lease, container, left }
    }

    /// Kills the processes that the container of `lease` has left now, and reports it.
    pub(super) fn kill_left(&self, lease: &Lease, ledger: &Ledger, owns: Owns<'_>) -> Vec<String> {
        let mut events = Vec::new();
        let container = safe(&lease.container.name());
        let mut report = |kind, text: String| {
            if reported().insert((lease.id.clone(), text.clone())) {
                events.push(Event {
                    uid: lease.container.uid,
                    container_id: lease.container.name().into_owned(),
                    lease: lease.id.to_string(),
                    devices: lease.devices.clone(),
                    text,
                    ..Event::now(kind)
                });
            }
        };
        // A pid that was read from the cgroup may have become another process before it is held. One that is held, and in
        // the cgroup afterwards, is the same.
        let held: Vec<(Process, OwnedFd)> = ledger
            .find_left_processes(lease, &self.config.state_dir)
            .own
            .into_iter()
            .filter_map(|process| Some((process, process.hold().ok()??)))
            .collect();
        let left = ledger.find_left_processes(lease, &self.config.state_dir);
        let deadline = Instant::now() + RETRY_PAUSE;
        let ends = |pidfd| pidfd_await_end(pidfd, deadline.saturating_duration_since(Instant::now()));
        for (process, pidfd) in held.iter().filter(|(process, _)| left.own.contains(process)) {
            let (pid, name) = (process.pid, name_of(process.pid));
            let which = format!("process {pid} ({name}), which container {container} has left");
            if lease.brokered && !owns(*process, lease.container.uid) {
                let uid = lease.container.uid;
                report(Kind::LeftRunning, format!("{which}, is not ended: it does not belong to uid {uid}"));
                continue;
            }
            match pidfd_kill(pidfd) {
                Ok(()) if process.waits_in_kernel() && !ends(pidfd) => {
                    report(Kind::LeftRunning, format!("{which}, was killed and is {IN_STATE_D}"));
                }
                Ok(()) => report(Kind::LeftEnded, format!("{which}, was ended")),
                Err(error) if is_gone(&error) => {}
                Err(error) => report(Kind::LeftRunning, format!("{which}, cannot be ended: {error}")),
            }
        }
        if let Some(kept) = left.kept {
            report(Kind::LeftRunning, format!("container {container} was deleted, and {kept}"));
        }
        events::emit(&self.config.state_dir, &events);
        events.into_iter().map(|event| event.text).collect()
    }
}

fn reported() -> std::sync::MutexGuard<'static, BTreeSet<(LeaseId, String)>> {
    REPORTED.lock().unwrap_or_else(PoisonError::into_inner)
}
