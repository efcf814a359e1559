//! Which GPUs are left out. One that does not answer does not tell which it is: the driver's /proc and the inventory before
//! do.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use nvml_wrapper::error::NvmlError;
use sublet_core::text::safe;

use super::cache::Seen;
use super::{Device, Inventory, LeftOut, under};

/// Why a GPU that NVML counts is not served.
pub(super) struct Silent {
    /// Its PCI address, if it tells.
    pub bus_id: Option<String>,
    pub lost: bool,
    pub why: String,
}

impl Silent {
    pub fn of(error: &NvmlError, bus_id: Option<String>) -> Self {
        let what_next = match error {
            NvmlError::GpuLost => "see `dmesg | grep -i xid`; a power cycle may bring it back",
            NvmlError::ResetRequired => "`nvidia-smi --gpu-reset` resets it once nothing uses it",
            NvmlError::NoPermission => "the driver does not let this user or machine use it",
            _ => "see `dmesg | grep -i nvrm`; `nvidia-smi --gpu-reset` or a reboot may help",
        };
        Self {
            bus_id,
            lost: matches!(error, NvmlError::GpuLost),
            why: format!("NVML answers \"{}\"; {what_next}", safe(&error.to_string())),
        }
    }
}

/// What tells which GPUs they are.
pub(super) struct LeftOutGpus<'a> {
    pub root: &'a Path,
    pub seen: &'a Seen,
    /// The inventory before, of this boot.
    pub before: Option<&'a Inventory>,
}

impl LeftOutGpus<'_> {
    /// The GPUs, by index. Of those that NVML counts and that do not tell their address, the first has the first address
    /// that is left, because NVML's order is that of the bus.
    pub fn name(&self, silent: Vec<(u32, Silent)>, served: &[Device]) -> Vec<LeftOut> {
        let listed = self.seen.fingerprint.gpus.iter().chain(&self.seen.lost).map(String::as_str);
        // What the administrator has excluded (NVreg_ExcludedGpus) is listed, and is nobody's to miss.
        let is_excluded =
            |bus_id: &&str| value(&self.information(bus_id), "GPU Excluded:").as_deref() == Some("Yes");
        let mut others: BTreeSet<&str> = listed.filter(|bus_id| !is_excluded(bus_id)).collect();
        others.extend(self.known().map(|gpu| gpu.bus_id.as_str()));
        for device in served {
            others.remove(device.bus_id.as_str());
        }
        let (told, untold): (Vec<_>, Vec<_>) =
            silent.into_iter().partition(|(_, silent)| silent.bus_id.is_some());
        let mut all = Vec::new();
        for (index, silent) in told {
            let bus_id = silent.bus_id.clone().unwrap_or_default();
            others.remove(bus_id.as_str());
            all.push(self.left_out(&bus_id, Some((index, silent))));
        }
        // What has left the bus may be counted or not.
        if others.len() > untold.len() {
            let (there, gone) =
                others.into_iter().partition::<BTreeSet<_>, _>(|bus_id| self.is_there(bus_id));
            all.extend(gone.into_iter().map(|bus_id| self.left_out(bus_id, None)));
            others = there;
        }
        let mut untold = untold.into_iter();
        all.extend(others.into_iter().map(|bus_id| self.left_out(bus_id, untold.next())));
        all.sort_by_key(|gone| gone.gpu.index);
        all
    }

    /// Whether the driver lists it and it answers on the bus.
    fn is_there(&self, bus_id: &str) -> bool {
        self.seen.fingerprint.gpus.iter().any(|there| there == bus_id)
    }

    fn known(&self) -> impl Iterator<Item = &Device> {
        let before = self.before.into_iter();
        before.flat_map(|before| before.gpus().chain(before.left_out.iter().map(|gone| &gone.gpu)))
    }

    fn left_out(&self, bus_id: &str, silent: Option<(u32, Silent)>) -> LeftOut {
        let index = silent.as_ref().map(|(index, _)| *index);
        let (lost, why) = match silent.map(|(_, silent)| silent) {
            _ if !self.is_there(bus_id) => {
                let why = "it fell off the bus; see `dmesg | grep -i xid`; a power cycle may bring it back";
                (true, why.to_owned())
            }
            Some(silent) => (silent.lost, silent.why),
            None => (false, "NVML does not count it; see `dmesg | grep -i nvrm`".to_owned()),
        };
        let gpu = self.gpu(bus_id, index);
        let before = self.before.into_iter();
        let devices =
            before.flat_map(|it| it.devices.iter().chain(it.left_out.iter().flat_map(|gone| &gone.mig)));
        let mig = devices.filter(|device| device.is_mig() && device.gpu() == gpu.uuid).cloned().collect();
        LeftOut { mig, gpu, lost, why }
    }

    fn information(&self, bus_id: &str) -> String {
        let file = under(self.root, &format!("/proc/driver/nvidia/gpus/{bus_id}/information"));
        fs::read_to_string(file).unwrap_or_default()
    }

    /// As known before, or as the driver's /proc tells.
    fn gpu(&self, bus_id: &str, index: Option<u32>) -> Device {
        if let Some(gpu) = self.known().find(|gpu| gpu.bus_id == bus_id).cloned() {
            return Device { index: index.unwrap_or(gpu.index), ..gpu };
        }
        let text = self.information(bus_id);
        let value = |key| value(&text, key);
        let minor = value("Device Minor:").and_then(|minor| minor.parse().ok());
        let index = index.or(minor).unwrap_or(u32::MAX);
        Device {
            uuid: value("GPU UUID:").unwrap_or_else(|| bus_id.to_owned()),
            index,
            minor: minor.unwrap_or(index),
            bus_id: bus_id.to_owned(),
            name: value("Model:").unwrap_or_else(|| "NVIDIA GPU".to_owned()),
            ..Device::default()
        }
    }
}

/// What /proc tells by this name.
fn value(text: &str, key: &str) -> Option<String> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    Some(line.trim().to_owned())
}
