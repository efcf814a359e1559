//! MIG devices: compute instances. Each is a device of its own and part of a GPU.
//!
//! Ids of destroyed instances are reused, and /proc then looks the same, so only NVML shows the difference. `sublet serve`
//! confirms with a record that the inventory has the driver's present MIG devices. While it does, other programs need not
//! ask NVML before each container.

use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Device, Driver, GpuProcess, Inventory, Node};
use crate::config::Config;
use crate::fs::trusted;
use crate::process;
use crate::process::uptime_seconds;
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
        let siblings = self.mig_device.iter().flat_map(|mig_device| &mig_device.sibling_processes);
        self.processes.iter().chain(siblings)
    }

    /// Its part of `bytes` of memory that it shares with the other compute instances of its GPU instance, in proportion
    /// to its compute slices.
    pub(crate) fn part_of(&self, bytes: u64) -> u64 {
        let sharing = self.mig_device.as_ref().filter(|mig_device| !mig_device.siblings.is_empty());
        let Some(MigDevice { slices: (own, all), .. }) = sharing else { return bytes };
        let (own, all) = (u64::from(*own), u64::from(*all).max(1));
        (bytes / all).saturating_mul(own.min(all))
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

/// A confirmation older than this, in seconds, does not count. The service renews it every two seconds.
const LIMIT: u64 = 5;

/// A boot id and a number, in bytes.
const LONGEST: u64 = 100;

/// Whether the service has compared them recently.
pub(crate) fn is_watched(config: &Config) -> bool {
    let word = trusted::read_if_trusted(&path(config), LONGEST).unwrap_or_default();
    is_recent(&String::from_utf8_lossy(&word), process::read_boot_id().unwrap_or_default(), uptime_seconds())
}

/// Confirms that they were equal at `since`, in seconds since boot.
pub fn watch(config: &Config, since: u64) -> std::io::Result<()> {
    let record = format!("{} {since}\n", process::read_boot_id().unwrap_or_default());
    crate::fs::replace(&path(config), record.as_bytes(), 0o644)
}

/// Withdraws the confirmation.
pub fn unwatch(config: &Config) {
    let _ = fs::remove_file(path(config));
}

fn path(config: &Config) -> PathBuf {
    config.state_dir.join("mig-watched")
}

fn is_recent(text: &str, boot_id: &str, now: u64) -> bool {
    let Some((boot, since)) = text.trim().split_once(' ') else { return false };
    let since = since.parse::<u64>().ok();
    !boot_id.is_empty() && boot == boot_id && since.is_some_and(|since| since <= now && now - since <= LIMIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_holds_for_this_boot_and_a_few_seconds() {
        assert!(is_recent("boot 100\n", "boot", 100) && is_recent("boot 100\n", "boot", 105));
        for (text, now) in [("boot 100", 106), ("boot 100", 99), ("other 100", 100), ("boot x", 100), ("", 0)]
        {
            assert!(!is_recent(text, "boot", now), "{text}");
        }
        assert!(!is_recent(" 100", "", 100));
    }
}
