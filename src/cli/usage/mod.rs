//! The current use according to the driver: of each device, of each process on it, and so of each lease. Sources:
//! nvml.h, and measurements on an H200 (docs/evidence/2026-11-23-h200-used.md).

mod gpm;
mod of_lease;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device as NvmlDevice, Nvml};
use schemars::JsonSchema;
use serde::Serialize;

use crate::gpu_processes::{Holder, Look, Looker};
use crate::probe;
use sublet_core::config::Config;
use sublet_core::inventory::{Device, Inventory};
use sublet_core::ledger::{Ledger, Store};
use sublet_core::text::safe;

pub use of_lease::LeaseUsed;

/// Five times a second the driver records one of the computing processes. For each process it reports the share of
/// these samples since a given time (H200, driver 580; docs/evidence/2026-11-23-h200-used.md). A process that computes
/// all the time beside others may have no sample in one second. Over five seconds the steps are 4 %.
const SAMPLED_MICROSECONDS: u64 = 5_000_000;

/// How long [`once`] waits for the driver.
const LIMIT: Duration = Duration::from_secs(5);

/// What the driver reports about all devices.
#[derive(Clone, Debug, Default)]
pub(crate) struct Usage {
    /// By UUID: GPUs and MIG devices.
    pub devices: BTreeMap<String, DeviceUse>,
    /// Devices that the driver reports nothing about, each with the reason.
    pub failures: BTreeMap<String, String>,
    /// Why it reports nothing at all.
    pub error: Option<String>,
}

impl Usage {
    /// Nothing, for this reason.
    pub fn failed(error: String) -> Self {
        Self { error: Some(error), ..Self::default() }
    }
}

/// What the driver reports about one device. Nothing is 0 because it is not known.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct DeviceUse {
    pub used: DeviceUsed,
    /// Processes with contexts; in MIG mode those of a GPU are listed under its MIG devices.
    pub processes: Vec<ProcessUse>,
}

/// What the driver says is used. Null where it does not say so.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct DeviceUsed {
    /// Memory, in bytes, the driver's own included.
    pub memory_bytes: Option<u64>,
    /// Percent of the time in which a kernel ran.
    pub busy_percent: Option<u32>,
    /// Percent of the SMs with work (GPM, Hopper and later), since it was asked before.
    pub sm_percent: Option<f64>,
    /// Percent of the warps that the SMs have room for (GPM).
    pub occupancy_percent: Option<f64>,
    /// Percent of the tensor cores' time (GPM).
    pub tensor_percent: Option<f64>,
    /// Percent of the memory's bandwidth (GPM).
    pub dram_percent: Option<f64>,
    /// Bytes a second over `PCIe`: transmitted by the GPU, and received (GPM).
    pub pcie_bytes_per_second: [Option<f64>; 2],
    /// Bytes a second over all `NVLinks`: transmitted by the GPU, and received (GPM).
    pub nvlink_bytes_per_second: [Option<f64>; 2],
    /// In watts.
    pub power_watts: Option<f64>,
    /// The limit in force, in watts.
    pub power_limit_watts: Option<f64>,
    /// In degrees Celsius.
    pub temperature_celsius: Option<u32>,
    /// Processes that belong to no lease.
    pub outside: Vec<OutsideProcess>,
}

/// A process with a context on a device, and no lease.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct OutsideProcess {
    /// On the host.
    pub pid: i32,
    /// Its command name.
    pub name: String,
    /// Its memory on the device, in bytes; null if the driver does not report it.
    pub memory_bytes: Option<u64>,
}

/// A process with a context on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProcessUse {
    /// The process, and whose it is.
    pub holder: Holder,
    /// Percent of the time it computed in the last seconds. The driver reports an MPS server and not its clients.
    pub sm_percent: Option<u32>,
}

/// Asks the driver again and again.
pub(crate) struct Meter<'n> {
    nvml: &'n Nvml,
    looker: Looker,
    activities: gpm::Activities<'n>,
}

impl<'n> Meter<'n> {
    /// Asks by `nvml`.
    pub fn new(nvml: &'n Nvml) -> Self {
        Self { nvml, looker: Looker::default(), activities: gpm::Activities::default() }
    }

    /// What every device of `inventory` is used for now.
    pub fn read(&mut self, ledger: &Rc<Ledger>, inventory: &Inventory) -> Usage {
        let with_processes = inventory.devices.iter().filter(|device| device.is_mig() || !device.mig_enabled);
        let uuids: BTreeSet<&str> = with_processes.map(|device| device.uuid.as_str()).collect();
        let (looks, failures) = self.looker.look(self.nvml, &uuids, ledger, inventory, 0);
        let mut looks: BTreeMap<String, Look> =
            looks.into_iter().map(|look| (look.device.clone(), look)).collect();
        let mut usage = Usage {
            failures: failures.into_iter().map(|(uuid, error)| (uuid, error.to_string())).collect(),
            ..Usage::default()
        };
        for device in &inventory.devices {
            let look = looks.remove(&device.uuid);
            match self.of_device(device, look) {
                Ok(found) => drop(usage.devices.insert(device.uuid.clone(), found)),
                Err(error) => drop(usage.failures.insert(device.uuid.clone(), error.to_string())),
            }
        }
        usage
    }

    /// Each call that fails costs what it tells; of a GPU that is lost there is nothing to tell.
    fn of_device(&mut self, device: &Device, look: Option<Look>) -> Result<DeviceUse, NvmlError> {
        let handle = probe::device_by_uuid(self.nvml, &device.uuid)?;
        let memory_bytes = match handle.memory_info() {
            Err(error @ (NvmlError::GpuLost | NvmlError::ResetRequired)) => return Err(error),
            memory => memory.ok().map(|memory| memory.used),
        };
        let samples = if device.is_mig() { BTreeMap::new() } else { samples(&handle) };
        let process = |holder: Holder| {
            let sm_percent =
                u32::try_from(holder.process.pid).ok().and_then(|pid| samples.get(&pid).copied());
            ProcessUse { holder, sm_percent }
        };
        // Compute instances of one GPU instance share its memory.
        let mut used = DeviceUsed { memory_bytes, ..self.activities.of(&handle, device).unwrap_or_default() };
        if !device.is_mig() {
            let watts = |milliwatts: Result<u32, NvmlError>| Some(f64::from(milliwatts.ok()?) / 1000.0);
            used.busy_percent = handle.utilization_rates().ok().map(|rates| rates.gpu);
            used.power_watts = watts(handle.power_usage());
            used.power_limit_watts = watts(handle.enforced_power_limit());
            used.temperature_celsius = handle.temperature(TemperatureSensor::Gpu).ok();
        }
        let processes = look.into_iter().flat_map(|look| look.holders).map(process).collect();
        let mut found = DeviceUse { used, processes };
        let outside = |process: &ProcessUse| OutsideProcess {
            pid: process.holder.process.pid,
            name: safe(&process.holder.name),
            memory_bytes: process.holder.memory_bytes,
        };
        found.used.outside = found.of_nobody().map(outside).collect();
        Ok(found)
    }
}

/// The percentage of the last seconds in which each process computed. A process without an entry was in no sample, or
/// is a client of an MPS server, whose clients the driver does not report separately.
fn samples(device: &NvmlDevice<'_>) -> BTreeMap<u32, u32> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let since = u64::try_from(now.as_micros()).unwrap_or(u64::MAX).saturating_sub(SAMPLED_MICROSECONDS);
    let mut found = device.process_utilization_stats(since).unwrap_or_default();
    found.sort_by_key(|sample| sample.timestamp);
    found.into_iter().map(|sample| (sample.pid, sample.sm_util)).collect()
}

/// What is used now. In other namespaces the driver's pids are none of the ledger's.
pub(crate) fn of_host(ledger: &Ledger, inventory: &Inventory, config: &Config) -> Usage {
    match Store::open(&config.state_dir).and_then(|store| store.is_of_here()) {
        Ok(()) => once(ledger, inventory, config),
        Err(error) => Usage::failed(error.to_string()),
    }
}

/// Asks once. If the driver does not answer within [`LIMIT`], the result is unknown, and the thread that asks ends with
/// the process.
fn once(ledger: &Ledger, inventory: &Inventory, config: &Config) -> Usage {
    let (tell, told) = mpsc::channel();
    let (ledger, inventory, config) = (ledger.clone(), inventory.clone(), config.clone());
    let asking = thread::Builder::new().name("nvml".to_owned()).spawn(move || {
        let usage = match crate::probe::connect(&config) {
            Ok((nvml, _)) => Meter::new(&nvml).read(&Rc::new(ledger), &inventory),
            Err(error) => Usage::failed(error.to_string()),
        };
        // Nobody listens any more once the limit is over.
        let _ = tell.send(usage);
    });
    match asking {
        Ok(_) => told.recv_timeout(LIMIT).unwrap_or_else(|_| {
            Usage::failed(format!("the driver did not answer within {} s", LIMIT.as_secs()))
        }),
        Err(error) => Usage::failed(format!("no thread can be started: {error}")),
    }
}
