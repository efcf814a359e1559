//! The actions of the guard on a process: report it, end it, or end its container.

use crate::{mps_daemons, probe};
use std::os::fd::OwnedFd;

use super::Event;
use super::judge::{self, Offence, Verdict};
use crate::peer::{end_container, is_theirs};
use crate::suspend::have_suspended;
use sublet_core::config::Config;
use sublet_core::ledger::{DaemonKey, Lease, LeaseId, Ledger, Store};
use sublet_core::process::{is_gone, pidfd_kill};
use sublet_core::share::Action;
use sublet_core::text::safe;

/// What an action waits for, while the looks at devices go on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Awaited {
    /// The MPS daemon that is asked to end its client. It may not answer.
    Daemon(DaemonKey),
    /// The steps by which a process of this suspended lease is suspended, too.
    Suspended(LeaseId),
}

/// Carries out the verdicts of one check.
#[derive(Clone)]
pub(super) struct Acting {
    config: Config,
    /// Read again, because a lease may have ended since the check.
    ledger: Ledger,
    /// Whether MPS daemons are still asked in this check. After one fails to answer, only the signal ends clients.
    asks: bool,
}

impl Acting {
    /// `None` if the ledger cannot be read now.
    pub fn begin(store: &Store, config: &Config) -> Option<Self> {
        Some(Self { config: config.clone(), ledger: store.read().ok()?, asks: true })
    }

    /// What is waited for before `verdict` is carried out.
    pub fn awaited(&self, verdict: &Verdict) -> Option<Awaited> {
        let holder = &verdict.holder;
        let id = holder.lease.as_ref().filter(|_| verdict.action != Action::Report)?;
        if verdict.offence == Offence::Suspended {
            return Some(Awaited::Suspended(id.clone()));
        }
        let lease = self.ledger.lease(id).filter(|_| holder.is_client)?;
        lease.daemon.clone().map(Awaited::Daemon)
    }

    /// As [`Acting::act`], for all of `verdicts`.
    pub fn act_on(mut self, verdicts: &[Verdict]) -> Vec<Event> {
        verdicts.iter().filter_map(|verdict| self.act(verdict)).collect()
    }

    /// Does what `verdict` says and returns the event. `None` if the process has ended, or no longer belongs to that
    /// lease.
    fn act(&mut self, verdict: &Verdict) -> Option<Event> {
        let process = verdict.holder.process;
        let held = process.hold();
        let lease = self.ledger.certain_lease_of(process, &probe::describe(process.pid, 0)?).cloned();
        // The facts read under this pid belong to the process only if it is still the same process.
        if lease.as_ref().map(|lease| &lease.id) != verdict.holder.lease.as_ref() || !process.is_alive() {
            return None;
        }
        let lease = lease.as_ref();
        if verdict.offence == Offence::Suspended && !lease.is_some_and(Lease::is_suspended) {
            return None;
        }
        let is_there = |lease: &Lease| judge::is_elsewhere(lease, &verdict.device);
        if verdict.offence == Offence::Elsewhere && !lease.is_some_and(is_there) {
            return None;
        }
        let done = match (verdict.action, held) {
            (_, Ok(None)) => return None,
            (Action::Report, _) => "reported only".to_owned(),
            (_, Err(error)) => format!("it cannot be ended: {error}"),
            // For a lease without root the user names the container's processes. Root ends only those that belong to
            // that user.
            (_, Ok(Some(_))) if !is_theirs(process, lease) => {
                "it was not ended, because it does not belong to the container's user".to_owned()
            }
            (action, Ok(Some(pidfd))) => {
                let why = match lease.filter(|_| verdict.offence == Offence::Suspended) {
                    None => String::new(),
                    Some(lease) => match suspend(verdict, lease) {
                        Ok(false) => return None,
                        Ok(true) => {
                            // Nothing was ended.
                            let verdict = &Verdict { action: Action::Report, ..verdict.clone() };
                            let done = "it was suspended, too, and comes back with the others";
                            return Some(event(verdict, Some(lease), done));
                        }
                        Err(_) if !self.is_suspended(&lease.id) => return None,
                        Err(why) => format!(", because it cannot be suspended: {why}"),
                    },
                };
                let ended = self.end(&pidfd, verdict, lease);
                let container = lease.filter(|_| action == Action::Container).and_then(end_container);
                format!("{}{why}", container.unwrap_or(ended))
            }
        };
        Some(event(verdict, lease, &done))
    }

    /// Whether it is now. One on its way back has its room, for a new process, too.
    fn is_suspended(&self, id: &LeaseId) -> bool {
        let now = Store::open(&self.config.state_dir).and_then(|store| store.read());
        now.is_ok_and(|ledger| ledger.lease(id).is_some_and(Lease::is_suspended))
    }

    /// MPS releases a client that it ends itself; the signal ends a client that continues. Neither affects other
    /// clients.
    fn end(&mut self, pidfd: &OwnedFd, verdict: &Verdict, lease: Option<&Lease>) -> String {
        let key = lease.and_then(|lease| lease.daemon.as_ref()).filter(|_| verdict.holder.is_client);
        if let Some(key) = key.filter(|_| self.asks) {
            if let Err(error) = mps_daemons::terminate_client(key, verdict.holder.process.pid, &self.config) {
                self.asks = false;
                tracing::debug!("terminate_client: {error}");
            }
        }
        match pidfd_kill(pidfd) {
            Err(error) if !is_gone(&error) => format!("it cannot be ended: {error}"),
            // It may have ended when its context did.
            _ => "it was ended".to_owned(),
        }
    }
}

/// Has the process suspended, as the rest of `lease` is.
fn suspend(Verdict { device, holder, .. }: &Verdict, lease: &Lease) -> Result<bool, String> {
    if lease.devices.first() != Some(device) {
        return Err("it is on another GPU than the container's".to_owned());
    }
    have_suspended(&lease.id, holder.process, holder.memory_bytes.unwrap_or(0))
}

fn event(verdict: &Verdict, lease: Option<&Lease>, done: &str) -> Event {
    let Verdict { offence, action, device, holder, .. } = verdict;
    let of = |lease: &Lease| format!("of container {}", safe(&lease.container.name()));
    let whose = lease.map_or_else(|| "of no lease".to_owned(), of);
    let (name, pid, at, did) = (safe(&holder.name), holder.process.pid, safe(device), did(verdict));
    let text = format!("process {name} (pid {pid}) {whose} on {at} {did}: {done}");
    Event::new((*offence, *action), lease, device, (pid, &holder.name), text)
}

fn did(verdict: &Verdict) -> String {
    let (used, allowed) = (verdict.used, verdict.allowed);
    match verdict.offence {
        Offence::Memory => {
            let own = verdict.holder.memory_bytes.unwrap_or(0);
            let [own, used, allowed] = [own, used, allowed].map(|bytes| bytes >> 20);
            format!(
                "has {own} MiB, with which its container exceeds its sublet.memory ({used} of {allowed} MiB)"
            )
        }
        Offence::Bypass => "computes outside its MPS server, without limits".to_owned(),
        Offence::Clients => format!("is one of {used} MPS clients, where sublet.processes says {allowed}"),
        Offence::Left => "has outlived its container".to_owned(),
        Offence::Suspended => "began to use the GPU while its container is suspended".to_owned(),
        Offence::Elsewhere => {
            "computes on a GPU that its container has been moved from, or is to be moved to".to_owned()
        }
        Offence::Stranger => "computes there without a lease".to_owned(),
        Offence::Server => "has ended".to_owned(),
        Offence::Silent => {
            "has connected to the MPS daemon and says nothing, so that the daemon waits, and no \
                            GPU program begins there"
                .to_owned()
        }
    }
}
