//! Which processes compute on a device now, and whose they are: NVML's two lists, and /proc of each process on them.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd as _, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::{Device, Nvml};

use crate::probe;
use sublet_core::inventory::{GpuProcess, Inventory};
use sublet_core::ledger::{Init, Lease, LeaseId, Ledger};
use sublet_core::process::{Process, pidfd_open};

/// A process with a context on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pub process: Process,
    /// The process's command name.
    pub name: String,
    /// Its memory on the device; `None` if the driver does not report it.
    pub memory_bytes: Option<u64>,
    /// Whether it is an MPS server, which belongs to no container.
    pub is_server: bool,
    /// Whether it computes through an MPS server.
    pub is_client: bool,
    /// The lease it belongs to; `None` if that is no lease, or several whose containers share a PID namespace.
    pub lease: Option<LeaseId>,
}

/// All processes on one device, at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Look {
    pub device: String,
    /// The number of MPS clients that the device takes, if known.
    pub most_clients: Option<u32>,
    /// Whether the driver tells MPS clients from other processes.
    pub knows_clients: bool,
    /// Leases whose containers have ended.
    pub gone: BTreeSet<LeaseId>,
    pub holders: Vec<Holder>,
}

/// This many processes are held by a pidfd. For further ones /proc is read each time.
const HELD: usize = 1000;

/// Reads the processes on devices again and again. /proc is read once per process, and its lease is determined
/// once per ledger. Code that acts on a process determines the lease again.
#[derive(Default)]
pub(crate) struct Looker {
    known: BTreeMap<i32, Known>,
    lists: Lists,
    ledger: Option<Rc<Ledger>>,
}

/// A process that an earlier check found.
struct Known {
    process: Process,
    description: GpuProcess,
    lease: Option<LeaseId>,
    /// One poll(2) over all of these tells which processes have ended.
    pidfd: Option<OwnedFd>,
}

impl Looker {
    /// Checks `devices`; the second value says why some could not be checked, by UUID. Growth of less than `tolerance`
    /// bytes may be noticed later ([`Lists`]).
    pub fn look(
        &mut self,
        nvml: &Nvml,
        devices: &BTreeSet<&str>,
        ledger: &Rc<Ledger>,
        inventory: &Inventory,
        tolerance: u64,
    ) -> (Vec<Look>, BTreeMap<String, NvmlError>) {
        if !self.ledger.as_ref().is_some_and(|before| Rc::ptr_eq(before, ledger)) {
            for known in self.known.values_mut() {
                known.lease =
                    ledger.certain_lease_of(known.process, &known.description).map(|lease| lease.id.clone());
            }
            self.ledger = Some(Rc::clone(ledger));
        }
        self.forget_ended();
        self.lists.tolerance = tolerance;
        let (mut looks, mut failures) = (Vec::new(), BTreeMap::new());
        let mut seen = BTreeMap::new();
        for &device in devices {
            match self.of_device(nvml, device, ledger, inventory, &mut seen) {
                Ok(look) => looks.push(look),
                // The MIG device was destroyed under its lease, so no process computes on it.
                Err(NvmlError::NotFound) if device.starts_with("MIG-") => {}
                Err(error) => drop(failures.insert(device.to_owned(), error)),
            }
        }
        self.known = seen;
        (looks, failures)
    }

    /// The next check reads the lists of `device` from NVML again, however new they are.
    pub fn forget_lists(&mut self, device: &str) {
        self.lists.by_uuid.remove(device);
    }

    /// Drops processes that have ended: their pids may be reused.
    fn forget_ended(&mut self) {
        // A pidfd is readable once its process has ended (`pidfd_open(2)`).
        let held = self.known.values().filter_map(|known| known.pidfd.as_ref());
        let mut fds: Vec<_> = held.map(|pidfd| PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)).collect();
        if poll(&mut fds, PollTimeout::ZERO).is_err() {
            // It is unknown which have ended, so all of them are looked up again.
            return self.known.clear();
        }
        let ended: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(true)).collect();
        let (mut ended, mut gone) = (ended.into_iter(), BTreeSet::new());
        self.known.retain(|pid, known| {
            let lives = match &known.pidfd {
                Some(_) => !ended.next().unwrap_or(true),
                None => known.process.is_alive(),
            };
            gone.extend((!lives).then_some(pid.unsigned_abs()));
            lives
        });
        self.lists.drop_ended(&gone);
    }

    fn of_device(
        &mut self,
        nvml: &Nvml,
        device: &str,
        ledger: &Ledger,
        inventory: &Inventory,
        seen: &mut BTreeMap<i32, Known>,
    ) -> Result<Look, NvmlError> {
        let lists = self.lists.of(device, &probe::device_by_uuid(nvml, device)?)?;
        let knows_clients = lists.clients.is_some();
        let clients = lists.clients.as_deref().unwrap_or_default();
        let client_pids: BTreeSet<u32> = clients.iter().map(|client| client.pid).collect();
        let mut gone_since = BTreeSet::new();
        let mut holder = |(number, memory_bytes): (u32, Option<u64>)| {
            let is_client = client_pids.contains(&number);
            let pid = i32::try_from(number).ok()?;
            let before = seen.remove(&pid).or_else(|| self.known.remove(&pid));
            let Some(known) = before.or_else(|| Known::of(pid, seen.len() < HELD, ledger)) else {
                gone_since.insert(number);
                return None;
            };
            let (process, name, lease) = (known.process, known.description.name.clone(), known.lease.clone());
            // A container may give its program any name.
            let is_server = known.description.mps_server && lease.is_none();
            seen.insert(pid, known);
            Some(Holder { process, name, memory_bytes, is_server, is_client, lease })
        };
        let holders: Vec<Holder> =
            probe::joined(lists.running.iter().chain(clients)).into_iter().filter_map(&mut holder).collect();
        self.lists.drop_ended(&gone_since);
        let (gone, known) = (gone(&holders, device, ledger), inventory.device(device));
        let most_clients = known.map(|known| sublet_core::place::client_limit(known, &inventory.driver));
        Ok(Look { device: device.to_owned(), most_clients, knows_clients, gone, holders })
    }
}

impl Known {
    /// `None` if the process has ended.
    fn of(pid: i32, hold: bool, ledger: &Ledger) -> Option<Self> {
        // The pidfd is opened before /proc is read: if the pid is reused in between, the pidfd shows that the process
        // ended.
        let pidfd = if hold { pidfd_open(pid).ok() } else { None };
        let process = Process::find(pid)?;
        let description = probe::describe(pid, 0)?;
        let lease = ledger.certain_lease_of(process, &description).map(|lease| lease.id.clone());
        Some(Self { process, description, lease, pidfd })
    }
}

/// Leases on `device` that have processes there and whose containers have ended, judged by their first process. The
/// mark `ending` does not decide: a marked container may live on because its delete failed, and one without the mark
/// may have ended just now.
fn gone(holders: &[Holder], device: &str, ledger: &Ledger) -> BTreeSet<LeaseId> {
    let computes = |lease: &&Lease| {
        let here = lease.devices.iter().any(|own| own == device);
        here && holders.iter().any(|holder| holder.lease.as_ref() == Some(&lease.id))
    };
    let has_ended = |lease: &&Lease| {
        let ended = |init: &Init| {
            !holders.iter().any(|holder| holder.process == init.process) && !init.process.is_alive()
        };
        lease.init.as_ref().is_some_and(ended)
    };
    // A process in a job's cgroup belongs to a job that lives: its first process was its first task's.
    let contained = ledger.leases.iter().filter(|lease| !lease.is_of_job());
    contained.filter(computes).filter(has_ended).map(|lease| lease.id.clone()).collect()
}

// NVML's two lists are asked for only if something may have changed, because they are nearly the whole cost of a check
// (docs/evidence/2026-11-22-guard-cost.md).

/// Lists older than this are read again, whatever the device's used memory is: one process may have freed what another
/// has taken. Two seconds, less the time by which a check may come early.
const FRESH: Duration = Duration::from_millis(1_900);

/// The same for the list of clients while the processes are the same: a process may leave MPS by execve(2) and keep
/// its pid.
const CLIENTS_FRESH: Duration = Duration::from_millis(3_900);

/// The lists of each device as last read.
#[derive(Default)]
struct Lists {
    /// If the device's used memory has grown by more than this, the lists are read again. A container may exceed its
    /// share by this much unnoticed.
    tolerance: u64,
    by_uuid: BTreeMap<String, DeviceLists>,
}

/// The lists of one device.
struct DeviceLists {
    /// Processes with compute contexts.
    running: Vec<ProcessInfo>,
    /// MPS clients; `None` if the driver has no such list.
    clients: Option<Vec<ProcessInfo>>,
    at: Instant,
    clients_at: Instant,
    /// The device's used memory at that time, in bytes; `None` if the driver does not report it.
    used: Option<u64>,
}

impl Lists {
    /// Removes processes that have ended: their pids may be reused.
    fn drop_ended(&mut self, ended: &BTreeSet<u32>) {
        for lists in self.by_uuid.values_mut() {
            lists.running.retain(|process| !ended.contains(&process.pid));
            lists.clients.iter_mut().for_each(|list| list.retain(|process| !ended.contains(&process.pid)));
        }
    }

    /// The lists of `device`, whose UUID is `uuid`.
    fn of(&mut self, uuid: &str, device: &Device<'_>) -> Result<&DeviceLists, NvmlError> {
        // Every context takes memory of the device, so used memory shows new ones.
        let used = device.memory_info().ok().map(|memory| memory.used);
        let lists = match self.by_uuid.remove(uuid) {
            Some(lists) if lists.counts(used, self.tolerance) => lists,
            old => ask(device, used, old)?,
        };
        Ok(self.by_uuid.entry(uuid.to_owned()).or_insert(lists))
    }
}

impl DeviceLists {
    /// Whether the lists are still valid when `used` bytes of the device are taken.
    fn counts(&self, used: Option<u64>, tolerance: u64) -> bool {
        let few = |(now, then): (u64, u64)| now <= then.saturating_add(tolerance);
        self.at.elapsed() < FRESH && used.zip(self.used).is_some_and(few)
    }
}

/// The clients are read last, so that a process that connects in between is not taken for one outside MPS. They are
/// read again only if there are other processes than before or the list is old: a process does not usually change
/// sides.
fn ask(device: &Device<'_>, used: Option<u64>, old: Option<DeviceLists>) -> Result<DeviceLists, NvmlError> {
    let (running, at) = (probe::compute_processes(device)?, Instant::now());
    let (clients, clients_at) = match old {
        Some(old) if old.clients_at.elapsed() < CLIENTS_FRESH && pids(&old.running) == pids(&running) => {
            (old.clients, old.clients_at)
        }
        _ => (probe::mps_clients(device)?, Instant::now()),
    };
    Ok(DeviceLists { running, clients, at, clients_at, used })
}

fn pids(list: &[ProcessInfo]) -> BTreeSet<u32> {
    list.iter().map(|process| process.pid).collect()
}
