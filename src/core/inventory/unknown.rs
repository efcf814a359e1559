//! Facts that NVML does not report of a GPU that is served all the same, and the GPUs that are left out.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Device;
use crate::text::safe;

/// A fact that a refresh asks of a GPU or MIG device, beyond its identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs, reason = "FACTS says it")]
pub enum Fact {
    Name,
    ComputeCapability,
    Sms,
    Memory,
    ComputeMode,
    Display,
    Virtualization,
    Processes,
    Clients,
}

/// Each fact, its NVML function, and the cost of its failure. Nothing else is lost by it. Where the handle,
/// UUID, PCI address, minor or MIG mode cannot be had, or the answer is that the GPU is lost or must be reset, the GPU is
/// left out ([`LeftOut`]).
pub const FACTS: [(Fact, &str, &str); 9] = [
    (Fact::Name, "nvmlDeviceGetName", "no rule or selector finds it by its model"),
    (
        Fact::ComputeCapability,
        "nvmlDeviceGetCudaComputeCapability",
        "sublet.sm, memory and priority are refused under MPS",
    ),
    (Fact::Sms, "nvmlDeviceGetNumGpuCores", "the SMs of a share are not told"),
    (Fact::Memory, "nvmlDeviceGetMemoryInfo_v2", "sublet.memory is refused"),
    (Fact::ComputeMode, "nvmlDeviceGetComputeMode", "it is taken for DEFAULT"),
    (Fact::Display, "nvmlDeviceGetDisplayActive", "it is taken to drive none"),
    (Fact::Virtualization, "nvmlDeviceGetVirtualizationMode", "it is taken for none"),
    (
        Fact::Processes,
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "mode exclusive is refused, and the guard does not watch it",
    ),
    (
        Fact::Clients,
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        "mode exclusive is refused, and the guard does not watch it",
    ),
];

/// The facts that NVML does not report, each with its answer.
pub type Unknown = BTreeMap<Fact, String>;

/// A GPU that no container gets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// The GPU as it was known last.
    pub gpu: Device,
    /// Its MIG devices as they were known last: containers may still have them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mig: Vec<Device>,
    /// Whether it is gone from the bus; otherwise it does not answer as it should.
    pub lost: bool,
    /// Why, and the advice.
    pub why: String,
}

impl LeftOut {
    /// As `GPU 3 is left out: Unknown Error; …`.
    #[must_use]
    pub fn sentence(&self) -> String {
        format!("{} is left out: {}", self.gpu.label(), safe(&self.why))
    }

    /// `lost` or `unhealthy`.
    #[must_use]
    pub const fn state(&self) -> &'static str {
        if self.lost { "lost" } else { "unhealthy" }
    }
}

impl Device {
    /// Whether NVML reports its processes.
    #[must_use]
    pub(crate) fn knows_processes(&self) -> bool {
        !self.unknown.contains_key(&Fact::Processes) && !self.unknown.contains_key(&Fact::Clients)
    }

    /// A line for each fact that is not known: `GPU 0: NVML does not tell its memory (Not Supported), so …`.
    pub fn costs(&self) -> impl Iterator<Item = String> + '_ {
        FACTS.iter().filter_map(|(fact, function, cost)| {
            let answer = safe(self.unknown.get(fact)?);
            Some(format!("{}: {function} answers \"{answer}\": {cost}", self.label()))
        })
    }
}
