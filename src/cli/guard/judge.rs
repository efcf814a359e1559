//! Finds processes on a device that exceed their leases or have none. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::gpu_processes::{Holder, Look};
use sublet_core::config::Guard;
use sublet_core::ledger::{Lease, LeaseId, Ledger};
use sublet_core::process::Process;
use sublet_core::share::{Action, Mode};

/// How long a container may take to start. A new process on its devices meanwhile may be its own.
const STARTING: Duration = Duration::from_secs(60);

/// A breach of its lease by a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[derive(strum::Display, strum::VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Offence {
    /// The container's processes together have more memory than `sublet.memory`.
    Memory,
    /// The process computes outside its MPS server, and so without limits.
    Bypass,
    /// The container has more MPS clients than `sublet.processes`, and this is one of them.
    Clients,
    /// The container has ended.
    Left,
    /// The container is suspended, and the process has begun to use the GPU: its room may be another's.
    Suspended,
    /// The process computes on a GPU from which its container was moved, or to which it is not yet.
    Elsewhere,
    /// The process is not attributable to any lease on this device.
    Stranger,
    /// The MPS server that the container used has ended. Not the container's own offence.
    Server,
    /// The process has connected to an MPS daemon and says nothing, and the daemon waits.
    Silent,
}

/// The verdict on one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Verdict {
    pub offence: Offence,
    pub action: Action,
    pub device: String,
    pub holder: Holder,
    /// For [`Offence::Memory`]: what the container has on the device and what it may have, in bytes. For
    /// [`Offence::Clients`]: the same in clients.
    pub used: u64,
    pub allowed: u64,
}

/// A finding of the check before: device, offence, lease and process (no process for memory).
type Suspicion = (String, Offence, Option<LeaseId>, Option<Process>);

/// The state between two checks.
#[derive(Debug, Default)]
pub(super) struct Judge {
    /// Memory of each process on each device.
    memory: BTreeMap<(String, Process), u64>,
    suspicions: BTreeSet<Suspicion>,
    /// The devices of suspicions that are new. Their lists have to be read again.
    pub unsure: BTreeSet<String>,
    /// The leases of root's whose first processes are not known, and when that was seen first. A user's is bound before
    /// its container computes, and whoever never binds it must not hide anybody.
    starting: BTreeMap<LeaseId, Instant>,
}

impl Judge {
    /// Whether it need not judge the same again: nobody is suspected, and nobody is spared for a time.
    pub fn is_quiet(&self) -> bool {
        self.suspicions.is_empty() && self.starting.is_empty()
    }

    /// Returns the offences in `looks` that the check before found too. A process that starts or ends between
    /// two of NVML's answers is in only one of them.
    pub fn judge(&mut self, looks: &[Look], ledger: &Ledger, rules: &Guard) -> Vec<Verdict> {
        let now = Instant::now();
        let starting = ledger.leases.iter().filter(|lease| lease.init.is_none() && !lease.brokered);
        let since = |id: &LeaseId| self.starting.get(id).copied().unwrap_or(now);
        self.starting = starting.map(|lease| (lease.id.clone(), since(&lease.id))).collect();
        let found: Vec<Verdict> = looks.iter().flat_map(|look| self.of_device(look, ledger, rules)).collect();
        let all = looks.iter().flat_map(|look| look.holders.iter().map(move |holder| (look, holder)));
        self.memory =
            all.map(|(look, holder)| ((look.device.clone(), holder.process), memory(holder))).collect();
        let before = std::mem::replace(&mut self.suspicions, found.iter().map(suspicion).collect());
        self.unsure = self.suspicions.difference(&before).map(|(device, ..)| device.clone()).collect();
        found.into_iter().filter(|verdict| before.contains(&suspicion(verdict))).collect()
    }

    fn of_device(&self, look: &Look, ledger: &Ledger, rules: &Guard) -> Vec<Verdict> {
        let leases = ledger.leases.iter().filter(|lease| lease.devices.contains(&look.device));
        let mut found: Vec<Verdict> =
            leases.flat_map(|lease| self.of_lease(lease, look, ledger, rules)).collect();
        found.extend(elsewhere(look, ledger));
        found.extend(clients(look, ledger, rules));
        let is_starting =
            |lease: &Lease| self.starting.get(&lease.id).is_some_and(|since| since.elapsed() < STARTING);
        if !ledger.on_device(&look.device).any(is_starting) {
            found.extend(strangers(look, ledger, rules));
        }
        found
    }

    fn of_lease(&self, lease: &Lease, look: &Look, ledger: &Ledger, rules: &Guard) -> Vec<Verdict> {
        let own: Vec<&Holder> = of(lease, look).collect();
        let tell = |offence, configured, holder: &Holder| {
            verdict(offence, action(lease, configured), &look.device, holder)
        };
        if look.gone.contains(&lease.id) {
            return own.into_iter().map(|holder| tell(Offence::Left, rules.left, holder)).collect();
        }
        if let Some(suspension) = lease.suspension.as_ref().filter(|_| lease.is_suspended()) {
            // NVML's lists may be from before.
            let new = own.into_iter().filter(|holder| !suspension.has(holder.process));
            return new.map(|holder| tell(Offence::Suspended, Action::Terminate, holder)).collect();
        }
        let served = look.knows_clients && lease.daemon.is_some();
        let outside = own.iter().filter(|holder| served && !holder.is_client);
        let mut found: Vec<Verdict> =
            outside.map(|holder| tell(Offence::Bypass, rules.bypass, holder)).collect();
        found.extend(self.memory(lease, &with_containers(lease, look, ledger), look, rules));
        found
    }

    /// If the container exceeds its share, its processes to act on: first those that have grown since the check
    /// before, which a limit in the kernel would have stopped, then the rest, largest first, until the rest is
    /// within the share. On MIG devices the instance itself limits the container.
    fn memory(&self, lease: &Lease, own: &[&Holder], look: &Look, rules: &Guard) -> Vec<Verdict> {
        let Some(allowed) = lease.memory_bytes.filter(|_| lease.mode != Mode::Mig) else { return Vec::new() };
        let used: u64 = own.iter().map(|holder| memory(holder)).sum();
        if used <= allowed.saturating_add(rules.memory_tolerance) {
            return Vec::new();
        }
        let before = |holder: &Holder| self.memory.get(&(look.device.clone(), holder.process)).copied();
        let grew = |holder: &Holder| memory(holder) > before(holder).unwrap_or(0);
        let mut order = own.to_vec();
        order.sort_by_key(|holder| {
            std::cmp::Reverse((grew(holder), memory(holder), holder.process.start_time))
        });
        let mut left = used;
        let crossed = order.into_iter().take_while(|holder| {
            let past = left > allowed;
            left = left.saturating_sub(memory(holder));
            past
        });
        let found = crossed.map(|holder| Verdict {
            used,
            allowed,
            ..verdict(Offence::Memory, action(lease, rules.memory), &look.device, holder)
        });
        found.collect()
    }
}

/// For each container with more clients than its lease allows: the youngest clients to act on, as many as other
/// containers lack of the places that they booked, or all surplus clients if the rules are strict. If surplus clients
/// may stay, the first of them is only reported.
fn clients(look: &Look, ledger: &Ledger, rules: &Guard) -> Vec<Verdict> {
    let leases: Vec<&Lease> = ledger
        .leases
        .iter()
        .filter(|lease| lease.daemon.is_some() && lease.devices.contains(&look.device))
        .filter(|lease| !ledger.is_booked_with_job(lease))
        .collect();
    let clients =
        |lease: &Lease| with_containers(lease, look, ledger).into_iter().filter(|holder| holder.is_client);
    let connected = |lease: &Lease| clients(lease).count();
    let all = look.holders.iter().filter(|holder| holder.is_client).count();
    let booked: usize =
        leases.iter().map(|lease| (lease.processes as usize).saturating_sub(connected(lease))).sum();
    let most = look.most_clients.map_or(usize::MAX, |most| most as usize);
    let mut missing = if rules.strict_clients { usize::MAX } else { (all + booked).saturating_sub(most) };
    let mut found = Vec::new();
    for lease in leases {
        let mut own: Vec<&Holder> = clients(lease).collect();
        own.sort_by_key(|holder| std::cmp::Reverse((holder.process.start_time, holder.process.pid)));
        let surplus = own.len().saturating_sub(lease.processes as usize);
        let acted = surplus.min(missing);
        missing -= acted;
        let tell = |holder: &&Holder, action| Verdict {
            used: own.len() as u64,
            allowed: u64::from(lease.processes),
            ..verdict(Offence::Clients, action, &look.device, holder)
        };
        found.extend(own.iter().take(acted).map(|holder| tell(holder, action(lease, rules.clients))));
        found.extend(own[acted..surplus].last().map(|holder| tell(holder, Action::Report)));
    }
    found
}

/// Processes of containers on GPUs whose nodes these have for the time of a step only.
fn elsewhere(look: &Look, ledger: &Ledger) -> Vec<Verdict> {
    let mut found = Vec::new();
    for lease in ledger.leases.iter().filter(|lease| is_elsewhere(lease, &look.device)) {
        let moves = |holder: &&Holder| lease.suspension.as_ref().is_some_and(|own| own.has(holder.process));
        let computing = of(lease, look).filter(|holder| !moves(holder));
        let tell =
            |holder| verdict(Offence::Elsewhere, action(lease, Action::Terminate), &look.device, holder);
        found.extend(computing.map(tell));
    }
    found
}

/// Whether processes of `lease` may have the node of `device` without a right to compute there.
pub(super) fn is_elsewhere(lease: &Lease, device: &str) -> bool {
    lease.known.iter().any(|known| known == device) || lease.destination() == Some(device)
}

/// Processes not attributable to any lease on this device.
fn strangers(look: &Look, ledger: &Ledger, rules: &Guard) -> Vec<Verdict> {
    let has = |lease: &&Lease| lease.devices.contains(&look.device) || is_elsewhere(lease, &look.device);
    let here: BTreeSet<&LeaseId> = ledger.leases.iter().filter(has).map(|lease| &lease.id).collect();
    let explained =
        |holder: &Holder| holder.is_server || holder.lease.as_ref().is_some_and(|own| here.contains(own));
    let strangers = look.holders.iter().filter(|holder| !explained(holder));
    strangers.map(|holder| verdict(Offence::Stranger, rules.strangers, &look.device, holder)).collect()
}

fn of<'a>(lease: &Lease, look: &'a Look) -> impl Iterator<Item = &'a Holder> + use<'a> {
    let id = lease.id.clone();
    look.holders.iter().filter(move |holder| !holder.is_server && holder.lease.as_ref() == Some(&id))
}

/// The processes of `lease`, and for the lease of a job its containers', too: they share its limits.
fn with_containers<'a>(lease: &Lease, look: &'a Look, ledger: &Ledger) -> Vec<&'a Holder> {
    let within = ledger.leases.iter().filter(|inner| inner.within.as_ref() == Some(&lease.id));
    of(lease, look).chain(within.flat_map(|inner| of(inner, look))).collect()
}

/// The action for a process of `lease`, whose share may override `[guard]`.
pub(super) fn action(lease: &Lease, configured: Action) -> Action {
    lease.guard.map_or(configured, |own| own.over(configured))
}

pub(super) fn verdict(offence: Offence, action: Action, device: &str, holder: &Holder) -> Verdict {
    Verdict { offence, action, device: device.to_owned(), holder: holder.clone(), used: 0, allowed: 0 }
}

/// Its memory by the driver, in bytes. Nobody is stopped for memory that the driver does not report.
fn memory(holder: &Holder) -> u64 {
    holder.memory_bytes.unwrap_or(0)
}

/// Memory suspicions are of the container, not of one process: at the next check another of its processes may have
/// grown.
fn suspicion(verdict: &Verdict) -> Suspicion {
    let process = (verdict.offence != Offence::Memory).then_some(verdict.holder.process);
    (verdict.device.clone(), verdict.offence, verdict.holder.lease.clone(), process)
}

#[cfg(test)]
#[path = "judge_tests.rs"]
mod tests;
