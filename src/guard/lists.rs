//! NVML's two lists of who computes on a device, asked for only where something may have changed: they are nearly all
//! that a look costs (docs/evidence/2026-11-21-guard-cost.md).

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use nvml_wrapper::Device;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;

use crate::inventory;

/// What was told before counts for so long: a process may leave MPS by execve(2), with its pid and as much memory.
const FRESH: Duration = Duration::from_secs(2);

/// The lists of each device by its UUID, as they were told last.
#[derive(Default)]
pub(super) struct Lists(BTreeMap<String, Told>);

/// What was told of one device.
pub(super) struct Told {
    /// Processes with compute contexts.
    pub running: Vec<ProcessInfo>,
    /// MPS clients; `None` where the driver has no such list.
    pub clients: Option<Vec<ProcessInfo>>,
    /// When the clients were asked for.
    since: Instant,
    /// The device's used memory before; `None` where the driver cannot tell.
    used: Option<u64>,
}

impl Lists {
    /// They are asked for anew: something was wrong for the first time, or a process has ended and its number may mean another.
    pub fn forget(&mut self) {
        self.0.clear();
    }

    /// The lists of `device`, whose UUID is `uuid`.
    ///
    /// # Errors
    /// NVML's.
    pub fn of(&mut self, uuid: &str, device: &Device<'_>) -> Result<&Told, NvmlError> {
        // Every context takes memory of the device.
        let used = device.memory_info().ok().map(|memory| memory.used);
        let before = self.0.remove(uuid).filter(|told| told.since.elapsed() < FRESH);
        let told = match before {
            Some(told) if used.is_some() && used == told.used => told,
            before => ask(device, used, before)?,
        };
        Ok(self.0.entry(uuid.to_owned()).or_insert(told))
    }
}

/// The clients are asked for last: one that has connected meanwhile is on their list, and is not taken for one beside
/// MPS. And only where processes came or went: none changes sides.
fn ask(device: &Device<'_>, used: Option<u64>, before: Option<Told>) -> Result<Told, NvmlError> {
    let running = inventory::compute_processes(device)?;
    let (clients, since) = match before {
        Some(told) if pids(&told.running) == pids(&running) => (told.clients, told.since),
        _ => (inventory::mps_clients(device)?, Instant::now()),
    };
    Ok(Told { running, clients, since, used })
}

fn pids(list: &[ProcessInfo]) -> BTreeSet<u32> {
    list.iter().map(|process| process.pid).collect()
}
