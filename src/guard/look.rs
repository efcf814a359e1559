//! Who computes on a device now: NVML's two lists, and /proc of each process that is on them.

use std::collections::BTreeMap;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use super::judge::{Holder, Look};
use crate::inventory::{self, GpuProcess, Inventory, listed};
use crate::ledger::{LeaseId, Ledger};
use crate::place::client_limit;
use crate::process::Process;

/// Looks again and again; what /proc says of a process is read once.
#[derive(Default)]
pub(super) struct Looker {
    known: BTreeMap<Process, GpuProcess>,
}

impl Looker {
    /// Every leased device, and why some could not be looked at.
    pub fn look(&mut self, nvml: &Nvml, ledger: &Ledger, inventory: &Inventory) -> (Vec<Look>, Vec<String>) {
        let mut devices: Vec<&String> = ledger.leases.iter().flat_map(|lease| &lease.devices).collect();
        devices.sort();
        devices.dedup();
        let (mut looks, mut failures) = (Vec::new(), Vec::new());
        let mut seen = BTreeMap::new();
        for device in devices {
            match self.of_device(nvml, device, ledger, &mut seen) {
                Ok(holders) => {
                    let known = inventory.device(device);
                    let most = known.map_or(u32::MAX, |known| client_limit(known, &inventory.driver));
                    looks.push(Look { device: device.to_owned(), most_clients: most, holders });
                }
                Err(error) => failures.push(format!("{device}: {error}")),
            }
        }
        self.known = seen;
        (looks, failures)
    }

    fn of_device(
        &self,
        nvml: &Nvml,
        device: &str,
        ledger: &Ledger,
        seen: &mut BTreeMap<Process, GpuProcess>,
    ) -> Result<Vec<Holder>, NvmlError> {
        let handle = nvml.device_by_uuid(device)?;
        // Clients last: one that has connected meanwhile is on their list, and is not taken for one beside MPS.
        let running = listed(|| handle.running_compute_processes())?;
        let clients = listed(|| handle.mps_running_compute_processes())?;
        let is_client = |pid: u32| clients.iter().any(|client| client.pid == pid);
        let holder = |(pid, memory_bytes): (u32, u64)| {
            let process = Process::find(i32::try_from(pid).ok()?)?;
            let told = match seen.get(&process).or_else(|| self.known.get(&process)) {
                Some(told) => told.clone(),
                None => inventory::describe(process.pid, 0)?,
            };
            let lease = lease_of(&told, ledger);
            let holder = Holder {
                process,
                name: told.name.clone(),
                memory_bytes,
                is_server: told.mps_server,
                is_client: is_client(pid),
                lease,
            };
            seen.insert(process, told);
            Some(holder)
        };
        Ok(inventory::joined(running.iter().chain(&clients)).into_iter().filter_map(holder).collect())
    }
}

/// The lease of a process; `None` where nobody can tell whose it is: of two containers in one PID namespace each
/// has a cgroup, and a process in neither is nobody's.
pub(super) fn lease_of(process: &GpuProcess, ledger: &Ledger) -> Option<LeaseId> {
    let found = ledger.lease_of_process(process)?;
    let init = found.init.as_ref()?;
    let shared = ledger
        .leases
        .iter()
        .filter(|lease| lease.init.as_ref().is_some_and(|other| other.pid_namespace == init.pid_namespace));
    let certain = init.process.pid == process.pid || found.has_in_cgroup(process) || shared.count() == 1;
    certain.then(|| found.id.clone())
}
