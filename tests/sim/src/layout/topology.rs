//! The hardware of the simulated host. It is read from a TOML file, resolved, and written as JSON for all programs.

use std::collections::BTreeSet;
use std::hash::Hash;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::Root;
use crate::nvml::profiles;

/// A host with its GPUs. TOML and JSON have the same keys; the JSON has all of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Eight hex digits that distinguish the contexts of one root from those of another. Set by `up`.
    #[serde(default)]
    pub tag: String,
    /// Version of the kernel module, such as `580.159.04`.
    pub driver: String,
    /// Version of the driver's files, if it differs from the kernel module's.
    #[serde(default)]
    pub file_version: Option<String>,
    /// CUDA version, such as `13.0`.
    pub cuda: String,
    /// Device majors.
    #[serde(default)]
    pub majors: Majors,
    /// Whether capability nodes are made, as on a host with nvidia-modprobe.
    #[serde(default = "yes")]
    pub cap_nodes: bool,
    /// The GPUs, sorted by index once resolved.
    pub gpu: Vec<Gpu>,
    /// Processes of the host that hold contexts.
    #[serde(default)]
    pub process: Vec<Process>,
}

const fn yes() -> bool {
    true
}

/// Character device majors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Majors {
    /// nvidiactl, the GPUs, nvidia-modeset.
    pub nvidia: u32,
    /// nvidia-uvm and nvidia-uvm-tools.
    pub uvm: u32,
    /// nvidia-caps.
    pub caps: u32,
}

impl Default for Majors {
    fn default() -> Self {
        Self { nvidia: 195, uvm: 510, caps: 241 }
    }
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// NVML's index.
    pub index: u32,
    /// N of `/dev/nvidia<N>`.
    pub minor: u32,
    /// `GPU-…`.
    pub uuid: String,
    /// Its name, such as `NVIDIA H200`.
    pub name: String,
    /// Its PCI bus id, such as `0000:3b:00.0`.
    pub bus_id: String,
    /// Total memory as NVML reports it, in MiB.
    pub memory_mib: u64,
    /// Total memory as CUDA reports it, in MiB.
    pub cuda_total_mib: u64,
    /// Streaming multiprocessors.
    pub sm_count: u32,
    /// Such as `9.0`.
    pub compute_capability: String,
    /// The architecture's name in nvml.h's `NVML_DEVICE_ARCH_*`.
    pub arch: Arch,
    /// Whether this is a vGPU guest.
    #[serde(default)]
    pub virtualization: Virtualization,
    /// Whether it drives a display.
    #[serde(default)]
    pub display: bool,
    /// Whether it has nodes under /dev/dri.
    #[serde(default)]
    pub dri: bool,
    /// GPUs with the same number are joined by `NVLink`.
    #[serde(default)]
    pub nvlink: Option<u32>,
    /// GPUs with the same number are below one `PCIe` switch.
    #[serde(default)]
    pub pcie_switch: Option<u32>,
    /// Its NUMA node. GPUs of one are below one host bridge.
    #[serde(default)]
    pub numa_node: u32,
    /// MIG mode.
    #[serde(default)]
    pub mig_mode: MigMode,
    /// The name of its table of MIG profiles ([`profiles::table`]). Required unless `mig_mode` is none.
    #[serde(default)]
    pub mig_table: Option<String>,
    /// MIG devices that exist at the start.
    #[serde(default)]
    pub mig: Vec<Mig>,
}

/// One MIG device: a compute instance in a GPU instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mig {
    /// `MIG-…`.
    pub uuid: String,
    /// Such as `1g.5gb` or, if it is only part of the GPU instance, `1c.2g.10gb`.
    pub profile: String,
    /// GPU instance id.
    pub gi: u32,
    /// Compute instance id.
    pub ci: u32,
    /// N of the GPU instance's `nvidia-cap<N>`; computed.
    #[serde(default)]
    pub gi_cap: u32,
    /// N of the compute instance's `nvidia-cap<N>`; computed.
    #[serde(default)]
    pub ci_cap: u32,
    /// Streaming multiprocessors; computed from the profile.
    #[serde(default)]
    pub sm_count: u32,
    /// Memory in MiB; computed from the profile.
    #[serde(default)]
    pub memory_mib: u64,
}

/// A process on the host, outside containers, that has a context from the start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Process {
    /// Device minor.
    pub gpu: u32,
    /// Its command name.
    pub name: String,
    /// Device memory in MiB.
    pub mib: u64,
}

/// NVML's architectures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the names say it")]
pub enum Arch {
    Pascal,
    Volta,
    Turing,
    Ampere,
    Ada,
    Hopper,
    Blackwell,
}

/// The simulated ones of NVML's virtualization modes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Virtualization {
    /// Bare metal.
    #[default]
    None,
    /// The whole GPU, passed through to this virtual machine.
    Passthrough,
    /// A vGPU in a guest.
    Vgpu,
}

/// Whether a GPU supports MIG and is in MIG mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MigMode {
    /// The GPU has no MIG.
    #[default]
    None,
    /// MIG is supported and off.
    Disabled,
    /// MIG is on.
    Enabled,
}

impl Topology {
    /// Reads a topology file and resolves it for the root at `dir`.
    ///
    /// # Errors
    /// The file cannot be read or parsed, or contradicts itself.
    pub fn from_toml(file: &Path, dir: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(file).with_context(|| format!("{}", file.display()))?;
        let mut topology: Self = toml::from_str(&text).with_context(|| format!("{}", file.display()))?;
        topology.resolve(dir).with_context(|| format!("{}", file.display()))?;
        Ok(topology)
    }

    /// The resolved topology of a root.
    ///
    /// # Errors
    /// It cannot be read, or was not written by `up`.
    pub fn load(root: &Root) -> Result<Self> {
        let file = root.topology();
        let text = std::fs::read_to_string(&file).with_context(|| format!("{}", file.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{}", file.display()))
    }

    /// The GPU with this device minor.
    #[must_use]
    pub fn by_minor(&self, minor: u32) -> Option<&Gpu> {
        self.gpu.iter().find(|gpu| gpu.minor == minor)
    }

    /// The driver's branch, such as 580.
    #[must_use]
    pub fn driver_branch(&self) -> u32 {
        self.driver.split('.').next().and_then(|branch| branch.parse().ok()).unwrap_or(0)
    }

    /// Version of the driver's files.
    #[must_use]
    pub fn files(&self) -> &str {
        self.file_version.as_deref().unwrap_or(&self.driver)
    }

    fn resolve(&mut self, dir: &Path) -> Result<()> {
        self.tag = tag(dir);
        self.gpu.sort_by_key(|gpu| gpu.index);
        for gpu in &mut self.gpu {
            gpu.resolve().with_context(|| format!("gpu {}", gpu.index))?;
        }
        self.check()
    }

    fn check(&self) -> Result<()> {
        let indices: Vec<_> = self.gpu.iter().map(|gpu| gpu.index).collect();
        ensure!(indices == (0..).take(indices.len()).collect::<Vec<_>>(), "indices have a gap: {indices:?}");
        ensure!(distinct(self.gpu.iter().map(|gpu| gpu.minor)), "two GPUs have the same minor");
        ensure!(distinct(self.gpu.iter().map(|gpu| &gpu.uuid)), "two GPUs have the same uuid");
        ensure!(distinct(self.gpu.iter().map(|gpu| &gpu.bus_id)), "two GPUs have the same bus_id");
        for process in &self.process {
            ensure!(self.by_minor(process.gpu).is_some(), "process on minor {}: no such GPU", process.gpu);
        }
        Ok(())
    }
}

impl Gpu {
    /// `compute_capability` as two numbers.
    #[must_use]
    pub fn capability(&self) -> Option<(u32, u32)> {
        let (major, minor) = self.compute_capability.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    }

    /// CUDA cores in one SM: 64 in GP100, Volta, Turing and GA100, 128 in every other (CUDA C++ Programming Guide,
    /// "Compute Capabilities"). `nvmlDeviceGetNumGpuCores` is this times the SMs.
    #[must_use]
    pub fn cores_per_sm(&self) -> u32 {
        match self.capability() {
            Some((6 | 8, 0) | (7, _)) => 64,
            _ => 128,
        }
    }

    /// Whether MIG mode changes only with a reset of the GPU, and survives a reload of the driver. That is so on
    /// Ampere. Later GPUs switch while the driver runs, and lose the mode (NVIDIA's MIG User Guide, "MIG mode").
    #[must_use]
    pub const fn keeps_mig_mode(&self) -> bool {
        matches!(self.arch, Arch::Ampere)
    }

    fn resolve(&mut self) -> Result<()> {
        ensure!(self.capability().is_some(), "compute_capability {:?}", self.compute_capability);
        ensure!(self.mig.is_empty() || self.mig_mode == MigMode::Enabled, "MIG devices without MIG mode");
        if self.mig_mode == MigMode::None {
            return Ok(());
        }
        let name = self.mig_table.as_deref().unwrap_or_default();
        let table = profiles::table(name).with_context(|| format!("mig_table {name:?} is not known"))?;
        let slices = profiles::memory_slices(table);
        for mig in &mut self.mig {
            let (profile, compute) = profiles::find(table, &mig.profile).context(mig.profile.clone())?;
            let place = profiles::placement(slices, mig.gi).filter(|(_, size)| *size == profile.size);
            ensure!(
                place.is_some_and(|(start, _)| profile.starts.contains(&start)),
                "{} has not the id {}",
                mig.profile,
                mig.gi
            );
            (mig.sm_count, mig.memory_mib) = (compute.sm_count, profile.memory_mib);
            (mig.gi_cap, mig.ci_cap) = caps(self.minor, mig.gi, mig.ci);
        }
        Ok(())
    }
}

/// GPU instances that `mig-minors` numbers for each GPU.
pub const GPU_INSTANCES: u32 = 15;
/// Compute instances that `mig-minors` numbers for each GPU instance.
pub const COMPUTE_INSTANCES: u32 = 8;

/// N of `nvidia-cap<N>` for a GPU instance and one of its compute instances, as `mig-minors` counts them: 1 and 2 are
/// config and monitor, and then each possible instance of each possible GPU has a number.
#[must_use]
pub const fn caps(minor: u32, gi: u32, ci: u32) -> (u32, u32) {
    let each = 1 + COMPUTE_INSTANCES;
    let gi_cap = 3 + (minor * GPU_INSTANCES + gi) * each;
    (gi_cap, gi_cap + 1 + ci)
}

fn distinct<T: Ord + Hash>(values: impl Iterator<Item = T>) -> bool {
    let mut seen = BTreeSet::new();
    values.into_iter().all(|value| seen.insert(value))
}

/// FNV-1a of the path. It only has to differ between two roots.
fn tag(dir: &Path) -> String {
    let hash = dir
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .fold(0x811c_9dc5_u32, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    format!("{hash:08x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caps_are_those_of_the_worked_example() {
        assert_eq!(caps(0, 0, 0), (3, 4));
        assert_eq!(caps(0, 2, 0), (21, 22));
        assert_eq!(caps(0, 3, 1), (30, 32));
        assert_eq!(caps(0, 9, 0), (84, 85));
    }

    #[test]
    fn roots_have_different_tags() {
        assert_eq!(tag(Path::new("")), "811c9dc5");
        assert_ne!(tag(Path::new("/tmp/a")), tag(Path::new("/tmp/b")));
    }
}
