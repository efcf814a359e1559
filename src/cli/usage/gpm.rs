//! GPU performance monitoring (GPM, nvml.h; Hopper and later): how busy the units of a device are, between two samples.

use std::collections::BTreeMap;

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::{GpmSample, gpm_metrics_get};

use super::DeviceUsed;
use sublet_core::inventory::Device;

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

/// The sample before of each device.
#[derive(Default)]
pub(super) struct Activities<'n> {
    before: BTreeMap<String, GpmSample<'n>>,
    /// Whether a GPU has GPM.
    supported: BTreeMap<String, bool>,
}

impl<'n> Activities<'n> {
    /// What `device` did since it was asked before; `None` at first, and where there is no GPM.
    pub fn of(&mut self, handle: &NvmlDevice<'n>, device: &Device) -> Option<DeviceUsed> {
        let now = self.sample(handle, device)?;
        let before = self.before.remove(&device.uuid);
        let activity = before.and_then(|before| between(handle, &before, &now).ok());
        self.before.insert(device.uuid.clone(), now);
        activity
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
        let supported = self.supported.entry(gpu.to_owned());
        *supported.or_insert_with(|| handle.gpm_support().unwrap_or(false))
    }
}

fn between(
    handle: &NvmlDevice<'_>,
    before: &GpmSample<'_>,
    now: &GpmSample<'_>,
) -> Result<DeviceUsed, NvmlError> {
    let mut told = gpm_metrics_get(handle.nvml(), before, now, &METRICS)?.into_iter();
    let mut next = || told.next().and_then(Result::ok).filter(|metric| metric.value.is_finite());
    let mut percents = [None; 4];
    percents.fill_with(|| next().map(|metric| metric.value));
    let mut rates = [None; 4];
    rates.fill_with(|| next().and_then(|metric| bytes(metric.value, &metric.metric_info.unit)));
    let [sm_percent, occupancy_percent, tensor_percent, dram_percent] = percents;
    Ok(DeviceUsed {
        sm_percent,
        occupancy_percent,
        tensor_percent,
        dram_percent,
        pcie_bytes_per_second: [rates[0], rates[1]],
        nvlink_bytes_per_second: [rates[2], rates[3]],
        ..DeviceUsed::default()
    })
}

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

    #[test]
    fn rates_are_in_bytes_a_second() {
        assert_eq!(bytes(2.0, "MiB/s"), Some(2_097_152.0));
        assert_eq!(bytes(2.0, "MiB/sec"), Some(2_097_152.0));
        assert_eq!(bytes(3.0, "KB/s"), Some(3_000.0));
        assert_eq!((bytes(1.0, ""), bytes(1.0, "furlongs")), (None, None));
    }
}
