//! NVML's two lists of processes on a device. They are asked for only if something may have changed, because they are
//! nearly the whole cost of a check (docs/evidence/2026-11-22-guard-cost.md).

use crate::probe;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use nvml_wrapper::Device;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;

/// Lists older than this are read again, whatever the device's used memory is: one process may have freed what another
/// has taken. Two seconds, less the time by which a check may come early.
const FRESH: Duration = Duration::from_millis(1_900);

/// The same for the list of clients while the processes are the same: a process may leave MPS by execve(2) and keep
/// its pid.
const CLIENTS_FRESH: Duration = Duration::from_millis(3_900);

/// The lists of each device as last read.
#[derive(Default)]
pub(super) struct Lists {
    /// If the device's used memory has grown by more than this, the lists are read again. A container may exceed its
    /// share by this much unnoticed.
    pub tolerance: u64,
    /// By UUID.
    pub told: BTreeMap<String, Told>,
}

/// The lists of one device.
pub(super) struct Told {
    /// Processes with compute contexts.
    pub running: Vec<ProcessInfo>,
    /// MPS clients; `None` if the driver has no such list.
    pub clients: Option<Vec<ProcessInfo>>,
    at: Instant,
    clients_at: Instant,
    /// The device's used memory at that time, in bytes; `None` if the driver does not report it.
    used: Option<u64>,
}

impl Lists {
    /// Removes processes that have ended: their pids may be reused.
    pub fn drop_ended(&mut self, ended: &BTreeSet<u32>) {
        for told in self.told.values_mut() {
            told.running.retain(|process| !ended.contains(&process.pid));
            told.clients.iter_mut().for_each(|list| list.retain(|process| !ended.contains(&process.pid)));
        }
    }

    /// The lists of `device`, whose UUID is `uuid`.
    pub fn of(&mut self, uuid: &str, device: &Device<'_>) -> Result<&Told, NvmlError> {
        // Every context takes memory of the device, so used memory shows new ones.
        let used = device.memory_info().ok().map(|memory| memory.used);
        let told = match self.told.remove(uuid) {
            Some(told) if told.counts(used, self.tolerance) => told,
            before => ask(device, used, before)?,
        };
        Ok(self.told.entry(uuid.to_owned()).or_insert(told))
    }
}

impl Told {
    /// Whether the lists are still valid when `used` bytes of the device are taken.
    fn counts(&self, used: Option<u64>, tolerance: u64) -> bool {
        let few = |(now, then): (u64, u64)| now <= then.saturating_add(tolerance);
        self.at.elapsed() < FRESH && used.zip(self.used).is_some_and(few)
    }
}

/// The clients are read last, so that a process that connects in between is not taken for one outside MPS. They are
/// read again only if there are other processes than before or the list is old: a process does not usually change
/// sides.
fn ask(device: &Device<'_>, used: Option<u64>, before: Option<Told>) -> Result<Told, NvmlError> {
    let (running, at) = (probe::compute_processes(device)?, Instant::now());
    let (clients, clients_at) = match before {
        Some(told) if told.clients_at.elapsed() < CLIENTS_FRESH && pids(&told.running) == pids(&running) => {
            (told.clients, told.clients_at)
        }
        _ => (probe::mps_clients(device)?, Instant::now()),
    };
    Ok(Told { running, clients, at, clients_at, used })
}

fn pids(list: &[ProcessInfo]) -> BTreeSet<u32> {
    list.iter().map(|process| process.pid).collect()
}

#[cfg(test)]
mod tests {
    use nvml_wrapper::enums::device::UsedGpuMemory;

    use super::*;

    fn told(pids: &[u32], used: Option<u64>) -> Told {
        let process = |pid: &u32| ProcessInfo {
            pid: *pid,
            used_gpu_memory: UsedGpuMemory::Used(1),
            gpu_instance_id: None,
            compute_instance_id: None,
        };
        let running: Vec<_> = pids.iter().map(process).collect();
        let now = Instant::now();
        Told { clients: Some(running.clone()), running, at: now, clients_at: now, used }
    }

    #[test]
    fn the_lists_count_until_more_than_the_tolerance_has_been_taken_and_two_seconds_at_most() {
        let now = told(&[1], Some(1000));
        for (used, counts) in [(Some(1000), true), (Some(10), true), (Some(1100), true), (Some(1101), false)]
        {
            assert_eq!(now.counts(used, 100), counts, "{used:?}");
        }
        assert!(
            !now.counts(None, 100) && !told(&[1], None).counts(Some(1000), 100),
            "the driver cannot tell"
        );
        let before = Told { at: Instant::now().checked_sub(Duration::from_secs(2)).unwrap(), ..now };
        assert!(!before.counts(Some(1000), 100));
    }

    #[test]
    fn who_has_ended_is_on_no_list() {
        let mut lists = Lists { tolerance: 0, told: [("GPU-1".to_owned(), told(&[1, 2, 3], None))].into() };
        lists.drop_ended(&[2, 9].into());
        let told = &lists.told["GPU-1"];
        assert_eq!(pids(&told.running), [1, 3].into());
        assert_eq!(told.clients.as_deref().map(pids), Some([1, 3].into()));
    }
}
