//! MIG devices: compute instances. Each is a device of its own and part of a GPU.

use serde::{Deserialize, Serialize};

use super::{Device, Driver, GpuProcess, Inventory, Node};
use crate::share::MigCapability;

/// A MIG device's GPU and its place in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigDevice {
    /// `GPU-…` of the GPU.
    pub gpu: String,
    /// NVML's index among the GPU's MIG devices: M of `G:M`.
    pub index: u32,
    /// As `1g.18gb` or `1c.2g.35gb`.
    pub profile: String,
    /// GPU instance id. A later instance may get the same one.
    pub gi: u32,
    /// Compute instance id. A later instance may get the same one.
    pub ci: u32,
    /// The place of the GPU instance: its first memory slice, and how many it has; `None` if NVML does not report it.
    pub placement: Option<(u32, u32)>,
    /// Compute slices of it, and of its GPU instance.
    pub slices: (u32, u32),
    /// Streaming multiprocessors of the GPU, if NVML reports them.
    pub gpu_sm_count: Option<u32>,
    /// Memory of the GPU in bytes.
    pub gpu_memory_bytes: u64,
    /// UUIDs of the other compute instances in its GPU instance, which share its memory.
    pub siblings: Vec<String>,
    /// Processes that had contexts on those at the last refresh.
    pub sibling_processes: Vec<GpuProcess>,
    /// Why no container can use it.
    pub fault: Option<String>,
}

impl Device {
    /// Whether it is a MIG device rather than a GPU.
    pub const fn is_mig(&self) -> bool {
        self.mig_device.is_some()
    }

    /// UUID of the GPU: its own, or that of the GPU of which it is a part.
    pub fn gpu(&self) -> &str {
        self.mig_device.as_ref().map_or(&self.uuid, |mig_device| &mig_device.gpu)
    }

    /// The number that names it in `sublet.gpu`: `0`, or `0:2`.
    pub fn number(&self) -> String {
        match &self.mig_device {
            Some(part) => format!("{}:{}", self.index, part.index),
            None => self.index.to_string(),
        }
    }

    /// Its name in messages: `GPU 0`, or `MIG device 0:2`.
    pub fn label(&self) -> String {
        format!("{} {}", if self.is_mig() { "MIG device" } else { "GPU" }, self.number())
    }

    /// The GPU's name, or the MIG device's profile.
    pub fn kind(&self) -> &str {
        self.mig_device.as_ref().map_or(&self.name, |mig_device| &mig_device.profile)
    }

    /// UUIDs of all devices that use its memory: itself, and the other compute instances of its GPU instance.
    pub(crate) fn sharing_memory(&self) -> impl Iterator<Item = &str> {
        let siblings = self.mig_device.iter().flat_map(|mig_device| &mig_device.siblings);
        std::iter::once(&self.uuid).chain(siblings).map(String::as_str)
    }

    /// Processes that had contexts on any of these at the last refresh.
    pub(crate) fn memory_users(&self) -> impl Iterator<Item = &GpuProcess> {
        self.processes
            .iter()
            .chain(self.mig_device.iter().flat_map(|mig_device| &mig_device.sibling_processes))
    }

    /// Its part of `bytes` of memory that it shares with the other compute instances of its GPU instance, in proportion
    /// to its compute slices.
    pub(crate) fn part_of(&self, bytes: u64) -> u64 {
        match self.mig_device.as_ref().filter(|mig_device| !mig_device.siblings.is_empty()) {
            Some(mig_device) => {
                let (own, all) = (u64::from(mig_device.slices.0), u64::from(mig_device.slices.1));
                (bytes / all.max(1)).saturating_mul(own.min(all.max(1)))
            }
            None => bytes,
        }
    }
}

impl Driver {
    /// The node of a capability for all MIG instances.
    pub(crate) const fn mig_cap(&self, cap: MigCapability) -> Option<&Node> {
        let [monitor, config] = &self.mig_caps;
        match cap {
            MigCapability::Monitor => monitor.as_ref(),
            MigCapability::Config => config.as_ref(),
        }
    }
}

impl Inventory {
    /// The GPUs, whole.
    pub fn gpus(&self) -> impl Iterator<Item = &Device> {
        self.devices.iter().filter(|device| !device.is_mig())
    }

    /// The MIG devices of the GPU with this UUID.
    pub fn mig_devices_of<'a>(&'a self, gpu: &'a str) -> impl Iterator<Item = (&'a Device, &'a MigDevice)> {
        let of_gpu = move |device: &'a Device| Some((device, device.mig_device.as_ref()?));
        self.devices.iter().filter_map(of_gpu).filter(move |(_, mig_device)| mig_device.gpu == gpu)
    }
}
