//! What NVML says of the GPU while a cell runs: energy, clock, memory.

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::Clock;

use super::result::Machine;
use crate::probe::{connect, device_by_uuid};
use sublet_core::config::Config;
use sublet_core::inventory::{Device, Inventory};

/// Asks about one GPU. Whatever the driver does not tell is `None`.
pub struct Meter {
    nvml: Option<Nvml>,
    uuid: String,
}

impl Meter {
    /// For the GPU with this UUID.
    pub fn new(uuid: &str, config: &Config) -> Self {
        Self { nvml: connect(config).ok().map(|(nvml, _)| nvml), uuid: uuid.to_owned() }
    }

    fn device(&self) -> Option<nvml_wrapper::Device<'_>> {
        device_by_uuid(self.nvml.as_ref()?, &self.uuid).ok()
    }

    /// Since the driver was loaded, in millijoules.
    pub fn energy(&self) -> Option<u64> {
        self.device()?.total_energy_consumption().ok()
    }

    /// Memory in use on the whole GPU, in bytes.
    pub fn memory(&self) -> Option<u64> {
        self.device()?.memory_info().ok().map(|memory| memory.used)
    }

    /// The clock of the SMs, in MHz.
    pub fn sm_mhz(&self) -> Option<u32> {
        self.device()?.clock_info(Clock::SM).ok()
    }

    /// The machine, as far as this host tells.
    pub fn machine(&self, gpu: &Device, inventory: &Inventory, engine: Option<String>) -> Machine {
        let device = self.device();
        Machine {
            gpu: gpu.name.clone(),
            uuid: Some(gpu.uuid.clone()),
            memory_bytes: Some(gpu.memory_bytes),
            sms: gpu.sm_count,
            driver: Some(inventory.driver.version.clone()),
            max_sm_mhz: device.as_ref().and_then(|device| device.max_clock_info(Clock::SM).ok()),
            power_limit_milliwatts: device.as_ref().and_then(|device| device.enforced_power_limit().ok()),
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease")
                .ok()
                .map(|text| text.trim().to_owned()),
            processors: std::thread::available_parallelism().ok().map(usize::from),
            sublet: Some(env!("CARGO_PKG_VERSION").to_owned()),
            engine,
        }
    }
}
