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

use crate::gpu_processes::{Holder, Look, Looker};
use crate::probe;
use sublet_core::config::Config;
use sublet_core::inventory::{Device, Inventory};
use sublet_core::ledger::{Ledger, Store};

pub use gpm::Activity;
pub(crate) use of_lease::{LeaseUse, Load};

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
    /// Memory in use, in bytes; compute instances of one GPU instance share it.
    pub memory_bytes: Option<u64>,
    /// Percent of the time in which a kernel ran (`nvmlUtilization_t`); in MIG mode the driver reports none.
    pub busy_percent: Option<u32>,
    /// In milliwatts.
    pub power_milliwatts: Option<u32>,
    /// In milliwatts.
    pub power_limit_milliwatts: Option<u32>,
    /// In degrees Celsius.
    pub temperature: Option<u32>,
    /// From Hopper on, once two samples have been taken.
    pub activity: Option<Activity>,
    /// Processes with contexts; in MIG mode those of a GPU are listed under its MIG devices.
    pub processes: Vec<ProcessUse>,
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
        let processes = look.into_iter().flat_map(|look| look.holders).map(process).collect();
        let activity = self.activities.of(&handle, device);
        if device.is_mig() {
            return Ok(DeviceUse { memory_bytes, activity, processes, ..DeviceUse::default() });
        }
        Ok(DeviceUse {
            memory_bytes,
            busy_percent: handle.utilization_rates().ok().map(|rates| rates.gpu),
            power_milliwatts: handle.power_usage().ok(),
            power_limit_milliwatts: handle.enforced_power_limit().ok(),
            temperature: handle.temperature(TemperatureSensor::Gpu).ok(),
            activity,
            processes,
        })
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
