//! The current use according to the driver: of each device, of each process on it, and so of each lease. Sources:
//! nvml.h, and measurements on an H200 (docs/evidence/2026-11-23-h200-used.md).

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::{GpmSample, gpm_metrics_get};
use nvml_wrapper::{Device as NvmlDevice, Nvml};
use schemars::JsonSchema;
use serde::Serialize;

use crate::gpu_processes::{Holder, Look, Looker};
use crate::probe;
use sublet_core::config::Config;
use sublet_core::inventory::{Device, Inventory};
use sublet_core::ledger::{DaemonKey, Lease, Ledger, Store};
use sublet_core::share::Mode;
use sublet_core::text::safe;

/// Five times a second the driver records one of the computing processes. For each process it reports the share of
/// these samples since a given time (H200, driver 580; docs/evidence/2026-11-23-h200-used.md). A process that computes
/// all the time beside other programs may have no sample in one second. Over five seconds the steps are 4 %.
pub(crate) const SAMPLED: Duration = Duration::from_secs(5);

/// How long [`once`] waits for the driver.
const LIMIT: Duration = Duration::from_secs(5);

/// How many threads of one process wait for a driver that does not answer: the service asks again and again.
const MOST_ASKING: usize = 4;

/// The driver's report about all devices.
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

    /// The use that `lease` makes of `device`, a UUID.
    pub fn of_lease(&self, lease: &Lease, device: &str, ledger: &Ledger) -> LeaseUsed {
        let Some(used) = self.devices.get(device).filter(|_| !self.failures.contains_key(device)) else {
            return LeaseUsed::default();
        };
        let own: Vec<&ProcessUse> = used.of_lease(lease).collect();
        let (sm_percent, server_sm_percent) = load(lease, &own, used, ledger);
        LeaseUsed {
            memory_bytes: own.iter().map(|process| process.holder.memory_bytes).sum(),
            processes: Some(own.len()),
            sm_percent,
            server_sm_percent,
        }
    }
}

/// What a container uses of a device. Null where the driver does not report it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct LeaseUsed {
    /// Memory of its processes, in bytes.
    pub memory_bytes: Option<u64>,
    /// Its processes with contexts.
    pub processes: Option<usize>,
    /// What it computes, in percent of the device's SMs.
    pub sm_percent: Option<u32>,
    /// What all containers of the MPS server that it shares compute: the driver does not tell them apart.
    pub server_sm_percent: Option<u32>,
}

/// The driver's report about one device. Nothing is 0 because it is not known.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct DeviceUse {
    pub used: DeviceUsed,
    /// Processes with contexts; in MIG mode the processes of a GPU are listed under its MIG devices.
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
    /// The sample before of each device.
    before: BTreeMap<String, GpmSample<'n>>,
    /// Whether a GPU has GPM.
    supported: BTreeMap<String, bool>,
    /// What processes computed is averaged over so long.
    window: Duration,
}

impl<'n> Meter<'n> {
    /// Asks by `nvml`.
    pub fn new(nvml: &'n Nvml, window: Duration) -> Self {
        Self { nvml, looker: Looker::default(), before: BTreeMap::new(), supported: BTreeMap::new(), window }
    }

    /// The present use of every device of `inventory`.
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
            match self.of_device(device, looks.remove(&device.uuid)) {
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
        let samples = if device.is_mig() { BTreeMap::new() } else { samples(&handle, self.window) };
        let process = |holder: Holder| {
            let sm_percent =
                u32::try_from(holder.process.pid).ok().and_then(|pid| samples.get(&pid).copied());
            ProcessUse { holder, sm_percent }
        };
        // Compute instances of one GPU instance share its memory.
        let mut used = DeviceUsed { memory_bytes, ..self.activity(&handle, device).unwrap_or_default() };
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

    /// The activity of `device` since it was asked before; `None` at first, and where there is no GPM.
    fn activity(&mut self, handle: &NvmlDevice<'n>, device: &Device) -> Option<DeviceUsed> {
        let now = self.sample(handle, device)?;
        let before = self.before.remove(&device.uuid);
        let now = self.before.entry(device.uuid.clone()).or_insert(now);
        let mut metrics = gpm_metrics_get(handle.nvml(), &before?, now, &METRICS).ok()?.into_iter();
        let mut next = || metrics.next().and_then(Result::ok).filter(|metric| metric.value.is_finite());
        let mut percents = [None; 4];
        percents.fill_with(|| next().map(|metric| metric.value));
        let mut rates = [None; 4];
        rates.fill_with(|| next().and_then(|metric| bytes(metric.value, &metric.metric_info.unit)));
        let [sm_percent, occupancy_percent, tensor_percent, dram_percent] = percents;
        Some(DeviceUsed {
            sm_percent,
            occupancy_percent,
            tensor_percent,
            dram_percent,
            pcie_bytes_per_second: [rates[0], rates[1]],
            nvlink_bytes_per_second: [rates[2], rates[3]],
            ..DeviceUsed::default()
        })
    }

    /// Of a GPU in MIG mode the driver takes no sample; of a MIG device it takes that of its GPU instance, by the GPU.
    fn sample(&mut self, handle: &NvmlDevice<'n>, device: &Device) -> Option<GpmSample<'n>> {
        if device.mig_enabled && !device.is_mig() {
            return None;
        }
        let Some(part) = &device.mig_device else {
            return self.is_supported(device.gpu(), handle).then(|| handle.gpm_sample().ok())?;
        };
        let gpu = handle.mig_parent_device().ok()?;
        self.is_supported(device.gpu(), &gpu).then(|| gpu.gpm_mig_sample(part.gi).ok())?
    }

    fn is_supported(&mut self, gpu: &str, handle: &NvmlDevice<'_>) -> bool {
        *self.supported.entry(gpu.to_owned()).or_insert_with(|| handle.gpm_support().unwrap_or(false))
    }
}

/// The percentage of the last seconds in which each process computed. A process without an entry was in no sample, or
/// is a client of an MPS server, whose clients the driver does not report separately.
fn samples(device: &NvmlDevice<'_>, window: Duration) -> BTreeMap<u32, u32> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let since = u64::try_from(now.saturating_sub(window).as_micros()).unwrap_or(u64::MAX);
    let mut found = device.process_utilization_stats(since).unwrap_or_default();
    found.sort_by_key(|sample| sample.timestamp);
    found.into_iter().map(|sample| (sample.pid, sample.sm_util)).collect()
}

/// The present use, of processes averaged over `window`. In other namespaces the driver's pids are none of the ledger's.
pub(crate) fn of_host(ledger: &Ledger, inventory: &Inventory, window: Duration, config: &Config) -> Usage {
    match Store::open(&config.state_dir).and_then(|store| store.is_of_here()) {
        Ok(()) => {
            once(ledger.clone(), inventory.clone(), window, config.clone()).unwrap_or_else(Usage::failed)
        }
        Err(error) => Usage::failed(error.to_string()),
    }
}

/// Asks once. If the driver does not answer within [`LIMIT`], the result is unknown.
fn once(ledger: Ledger, inventory: Inventory, window: Duration, config: Config) -> Result<Usage, String> {
    static ASKING: LazyLock<Arc<()>> = LazyLock::new(Arc::default);
    within(LIMIT, &ASKING, move || {
        probe::connect(&config)
            .map(|(nvml, _)| Meter::new(&nvml, window).read(&Rc::new(ledger), &inventory))
            .map_err(|error| error.to_string())
    })
}

/// What the driver answers to `ask` within `limit`. A thread that it does not answer holds `all` and ends with the process.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    all: &Arc<()>,
    ask: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    if Arc::strong_count(all) > MOST_ASKING {
        return Err("the driver has not answered what it was asked before".to_owned());
    }
    let (asking, (sender, answers)) = (Arc::clone(all), std::sync::mpsc::channel());
    let run = move || {
        let answer = ask();
        drop(asking);
        // Nobody listens any more once the limit is over.
        let _ = sender.send(answer);
    };
    let started = std::thread::Builder::new().name("nvml".to_owned()).spawn(run);
    started.map_err(|error| format!("no thread can be started: {error}"))?;
    let late = |_| Err(format!("the driver did not answer within {} s", limit.as_secs()));
    answers.recv_timeout(limit).unwrap_or_else(late)
}

impl DeviceUse {
    /// The processes of the container.
    pub fn of_lease(&self, lease: &Lease) -> impl Iterator<Item = &ProcessUse> {
        let is_its = |process: &&ProcessUse| process.holder.lease.as_ref() == Some(&lease.id);
        self.processes.iter().filter(move |process| is_its(process) && !process.holder.is_server)
    }

    /// The processes that belong to no lease and are no MPS server.
    pub fn of_nobody(&self) -> impl Iterator<Item = &ProcessUse> {
        self.processes.iter().filter(|process| process.holder.lease.is_none() && !process.holder.is_server)
    }
}

/// The load of the container itself, or of the MPS server that it shares: the driver does not tell the clients
/// of a server apart (H200, driver 580; docs/evidence/2026-11-26-h200-real.md). Neither: it is not reported, as on MIG
/// devices.
fn load(lease: &Lease, own: &[&ProcessUse], used: &DeviceUse, ledger: &Ledger) -> (Option<u32>, Option<u32>) {
    if lease.mode == Mode::Mig || own.iter().any(|process| process.holder.is_client) && lease.daemon.is_none()
    {
        return (None, None);
    }
    match &lease.daemon {
        _ if own.is_empty() => (Some(0), None),
        Some(key) if key.0 == lease.id.as_str() => (server(used, key, ledger), None),
        Some(key) => (None, server(used, key, ledger)),
        // The driver may not report a process, so a missing sample does not mean 0.
        None => (own.iter().map(|process| process.sm_percent).sum(), None),
    }
}

/// The load of the server of daemon `key`: it is the daemon's child.
fn server(used: &DeviceUse, key: &DaemonKey, ledger: &Ledger) -> Option<u32> {
    let daemon = ledger.daemons.iter().find(|daemon| daemon.key == *key)?.process?;
    let servers = used.processes.iter().filter(|process| process.holder.is_server);
    let mut its = servers.filter(|process| process.holder.process.parent() == Some(daemon.pid));
    its.next()?.sm_percent
}

// GPU performance monitoring (GPM, nvml.h; Hopper and later): how busy the units of a device are, between two samples.

/// In the order of [`DeviceUsed`]'s fields.
const METRICS: [GpmMetricId; 8] = [
    GpmMetricId::SmUtil,
    GpmMetricId::SmOccupancy,
    GpmMetricId::AnyTensorUtil,
    GpmMetricId::DramBwUtil,
    GpmMetricId::PcieTxPerSec,
    GpmMetricId::PcieRxPerSec,
    GpmMetricId::NvlinkTotalTxPerSec,
    GpmMetricId::NvlinkTotalRxPerSec,
];

/// `value` of `unit`, such as `MiB/sec`, in bytes a second; `None` of a unit that is not known. The driver names the
/// unit of each metric (`nvmlGpmMetric_t`).
fn bytes(value: f64, unit: &str) -> Option<f64> {
    let factor = match unit.split('/').next()?.trim() {
        "B" | "bytes" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        _ => return None,
    };
    Some(value * f64::from(factor))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu_processes::Holder;
    use sublet_core::ledger::LeaseId;
    use sublet_core::ledger::fixture::lease;
    use sublet_core::process::Process;

    const GPU: &str = "GPU-1";

    #[test]
    fn a_driver_that_never_answers_holds_a_few_threads_however_often_it_is_asked() {
        let all = Arc::default();
        let (sender, answers) = std::sync::mpsc::channel::<()>();
        let answers = Arc::new(std::sync::Mutex::new(answers));
        for _ in 0..10 {
            let answers = Arc::clone(&answers);
            let hang = move || answers.lock().unwrap().recv().map_err(|error| error.to_string());
            assert!(within(Duration::from_millis(1), &all, hang).is_err());
        }
        assert_eq!(Arc::strong_count(&all), 1 + MOST_ASKING);
        drop(sender);
        let answers = || within(LIMIT, &all, || Ok(()));
        while answers().is_err() {
            std::thread::yield_now();
        }
    }

    fn process(lease: Option<&LeaseId>, memory_bytes: Option<u64>, sm_percent: Option<u32>) -> ProcessUse {
        let holder = Holder {
            process: Process { pid: 4_000_000, start_time: 1 },
            name: "python3".to_owned(),
            memory_bytes,
            is_server: false,
            is_client: false,
            lease: lease.cloned(),
        };
        ProcessUse { holder, sm_percent }
    }

    fn usage(processes: Vec<ProcessUse>) -> Usage {
        let used = DeviceUse { processes, ..DeviceUse::default() };
        Usage { devices: [(GPU.to_owned(), used)].into(), ..Usage::default() }
    }

    /// By itself.
    fn computing(sm_percent: Option<u32>) -> LeaseUsed {
        LeaseUsed { sm_percent, ..LeaseUsed::default() }
    }

    fn of(lease: &Lease, processes: Vec<ProcessUse>) -> LeaseUsed {
        usage(processes).of_lease(lease, GPU, &Ledger::empty("boot"))
    }

    #[test]
    fn only_the_processes_of_a_container_count() {
        let (ours, other) = (lease(1, GPU), lease(2, GPU));
        let all = vec![
            process(Some(&ours.id), Some(100), Some(40)),
            process(Some(&ours.id), Some(20), Some(5)),
            process(Some(&other.id), Some(7), Some(7)),
            process(None, Some(9), Some(9)),
        ];
        let used = of(&ours, all.clone());
        let expected = LeaseUsed { memory_bytes: Some(120), processes: Some(2), ..computing(Some(45)) };
        assert_eq!(used, expected);
        assert_eq!(usage(all).devices[GPU].of_nobody().count(), 1);
    }

    #[test]
    fn values_that_the_driver_does_not_report_are_unknown_and_not_0() {
        let ours = lease(1, GPU);
        let used =
            of(&ours, vec![process(Some(&ours.id), None, None), process(Some(&ours.id), Some(1), Some(1))]);
        assert_eq!(used, LeaseUsed { processes: Some(2), ..computing(None) });
        let mig = Lease { mode: Mode::Mig, ..lease(1, GPU) };
        let of_mig = of(&mig, vec![process(Some(&mig.id), Some(1), Some(1))]);
        assert_eq!((of_mig.sm_percent, of_mig.server_sm_percent), (None, None));
        let unread = Usage { failures: [(GPU.to_owned(), "lost".to_owned())].into(), ..usage(Vec::new()) };
        assert_eq!(unread.of_lease(&ours, GPU, &Ledger::empty("boot")).processes, None);
    }

    #[test]
    fn a_container_without_processes_uses_nothing() {
        let idle = LeaseUsed { memory_bytes: Some(0), processes: Some(0), ..computing(Some(0)) };
        assert_eq!(of(&lease(1, GPU), Vec::new()), idle);
    }

    #[test]
    fn rates_are_in_bytes_a_second() {
        assert_eq!(bytes(2.0, "MiB/s"), Some(2_097_152.0));
        assert_eq!(bytes(2.0, "MiB/sec"), Some(2_097_152.0));
        assert_eq!(bytes(3.0, "KB/s"), Some(3_000.0));
        assert_eq!((bytes(1.0, ""), bytes(1.0, "furlongs")), (None, None));
    }
}
