//! NVML's report about each GPU.

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::path::Path;

use nvml_wrapper::enum_wrappers::device::{
    ComputeMode as NvmlComputeMode, GpuVirtualizationMode, P2pCapabilitiesIndex, P2pStatus, TopologyLevel,
};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try};
use nvml_wrapper::struct_wrappers::device::{MemoryInfo, ProcessInfo};
use nvml_wrapper::{Device as NvmlDevice, Nvml, cuda_driver_version_major, cuda_driver_version_minor};
use nvml_wrapper_sys::bindings::{nvmlGpuFabricInfo_t, nvmlReturn_enum_NVML_SUCCESS as SUCCESS};

use super::processes::{self, compute_processes, mps_clients};
use crate::nvml_mig::{self, instance_ids};
use sublet_core::inventory::{
    ComputeMode, Device, Fact, GpuProcess, Inventory, Join, MigDevice, MigGpus, Node, Unknown,
    Virtualization, device_nodes,
};

/// Loads and initializes the library, even if some GPUs do not answer.
pub(crate) fn init(library: &Path) -> Result<Nvml, NvmlError> {
    Nvml::builder().lib_path(library.as_os_str()).init()
}

/// CUDA's version: 13.0 for NVML's 13000.
pub(super) fn cuda_version(nvml: &Nvml) -> Result<(u32, u32), NvmlError> {
    let version = nvml.sys_cuda_driver_version()?;
    let part = |number: i32| u32::try_from(number).unwrap_or(0);
    Ok((part(cuda_driver_version_major(version)), part(cuda_driver_version_minor(version))))
}

/// The PCI address in the kernel's notation.
pub(super) fn bus_id(device: &NvmlDevice<'_>) -> Result<String, NvmlError> {
    Ok(kernel_bus_id(&device.pci_info()?.bus_id))
}

/// NVML writes eight domain digits and capitals, the kernel at least four digits and lower case.
fn kernel_bus_id(nvml: &str) -> String {
    let lower = nvml.to_ascii_lowercase();
    let (domain, rest) = lower.split_once(':').unwrap_or_default();
    u32::from_str_radix(domain, 16).map_or_else(|_| lower.clone(), |domain| format!("{domain:04x}:{rest}"))
}

/// The handle of the GPU or MIG device with this UUID. NVML's own search fails if any GPU has fallen off the bus or is
/// otherwise inaccessible (nvml.h, `nvmlDeviceGetHandleByUUID`), so then each GPU that answers is asked for its own.
pub(crate) fn device_by_uuid<'n>(nvml: &'n Nvml, uuid: &str) -> Result<NvmlDevice<'n>, NvmlError> {
    let failed = match nvml.device_by_uuid(uuid) {
        Err(error) if !matches!(error, NvmlError::NotFound) => error,
        found => return found,
    };
    let has_it = |device: &NvmlDevice<'_>| device.uuid().is_ok_and(|own| own == uuid);
    for gpu in (0..nvml.device_count()?).filter_map(|index| nvml.device_by_index(index).ok()) {
        if has_it(&gpu) {
            return Ok(gpu);
        }
        if let Some(mig) = mig_handles(&gpu).unwrap_or_default().into_iter().find(has_it) {
            return Ok(mig);
        }
    }
    Err(failed)
}

/// How far a GPU is with joining its `NVLink` fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fabric {
    /// It has not joined yet.
    Joining,
    /// It has.
    Joined,
    /// It could not.
    Failed,
}

/// `NVML_GPU_FABRIC_STATE_IN_PROGRESS` and `_COMPLETED`.
const JOINING: u8 = 2;
const JOINED: u8 = 3;

/// `None`: it is in no fabric, or the driver does not tell.
#[allow(unsafe_code, reason = "NVML by its C ABI")]
pub(crate) fn fabric(device: &NvmlDevice<'_>) -> Option<Fabric> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetGpuFabricInfo.as_ref()).ok()?;
    let mut info = MaybeUninit::<nvmlGpuFabricInfo_t>::zeroed();
    // SAFETY: the handle is valid as long as the device, and NVML writes one such struct of numbers, for which zeros are
    // valid, too.
    let info = unsafe {
        nvml_try(call(device.handle(), info.as_mut_ptr())).ok()?;
        info.assume_init()
    };
    match info.state {
        JOINING => Some(Fabric::Joining),
        JOINED if info.status == SUCCESS => Some(Fabric::Joined),
        JOINED => Some(Fabric::Failed),
        _ => None,
    }
}

/// Whether a GPU is described with the processes on it: /proc is read for each.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Processes {
    With,
    Without,
}

/// NVML's description of one GPU. `nvidia_major` is the major of its node.
///
/// # Errors
/// It is not known which GPU this is, or NVML says that it is lost or must be reset. Other facts without an answer are in
/// [`Device::unknown`].
pub(super) fn describe(
    device: &NvmlDevice<'_>,
    index: u32,
    nvidia_major: u32,
    processes: Processes,
) -> Result<Device, NvmlError> {
    let (bus_id, minor, uuid) = (bus_id(device)?, device.minor_number()?, device.uuid()?);
    let mig_enabled = is_mig_enabled(device)?;
    let mut facts = Facts::default();
    let capability = facts.of(Fact::ComputeCapability, device.cuda_compute_capability())?;
    let number = |part: i32| u32::try_from(part).unwrap_or(0);
    let compute_capability = capability.map_or((0, 0), |known| (number(known.major), number(known.minor)));
    let cores = facts.if_supported(Fact::Sms, device.num_cores())?;
    let (memory_bytes, memory_free_bytes, memory_of_host) =
        facts.memory(device.memory_info(), compute_capability)?;
    let mode = facts.if_supported(Fact::ComputeMode, device.compute_mode())?;
    let virtualization = facts.if_supported(Fact::Virtualization, device.virtualization_mode())?;
    Ok(Device {
        uuid,
        index,
        minor,
        name: facts.of(Fact::Name, device.name())?.unwrap_or_else(|| "NVIDIA GPU".to_owned()),
        compute_capability,
        sm_count: cores.and_then(|cores| sm_count(cores, compute_capability)),
        memory_bytes,
        memory_free_bytes,
        memory_of_host,
        mig_enabled,
        compute_mode: mode.map_or(ComputeMode::Default, compute_mode),
        display_active: facts.if_supported(Fact::Display, device.is_display_active())?.unwrap_or(false),
        virtualization: match virtualization {
            None | Some(GpuVirtualizationMode::Bare) => Virtualization::None,
            Some(GpuVirtualizationMode::PassThrough) => Virtualization::Passthrough,
            Some(GpuVirtualizationMode::Vgpu) => Virtualization::Vgpu,
            Some(GpuVirtualizationMode::HostVgpu | GpuVirtualizationMode::HostVsga) => Virtualization::Host,
        },
        nodes: vec![Node { path: format!("/dev/nvidia{minor}").into(), major: nvidia_major, minor }],
        // In MIG mode processes are listed under the MIG devices.
        processes: if mig_enabled || processes == Processes::Without {
            Vec::new()
        } else {
            facts.running(device)?
        },
        bus_id,
        unknown: facts.0,
        ..Device::default()
    })
}

/// The `known` inventory, which is up to date, with what NVML says of each GPU now: free memory, processes, compute mode.
///
/// # Errors
/// A GPU does not answer as it did.
pub(crate) fn renew(known: &Inventory, nvml: &Nvml) -> Result<Inventory, NvmlError> {
    let mut now = known.clone();
    for gpu in now.devices.iter_mut().filter(|device| !device.is_mig()) {
        let major = gpu.nodes.first().map_or(0, |node| node.major);
        let seen = describe(&device_by_uuid(nvml, &gpu.uuid)?, gpu.index, major, Processes::With)?;
        *gpu = Device { dri_nodes: std::mem::take(&mut gpu.dri_nodes), ..seen };
    }
    Ok(now)
}

/// How two GPUs are joined. NVML's common ancestor is that by `PCIe` alone: where all are joined by `NVLink`, it is the same for
/// each pair as without (seen on four H100s, driver 580).
pub(super) fn join(one: &NvmlDevice<'_>, other: NvmlDevice<'_>) -> Option<Join> {
    if matches!(one.p2p_status(&other, P2pCapabilitiesIndex::NvLink), Ok(P2pStatus::Ok)) {
        return Some(Join::Nvlink);
    }
    Some(match one.topology_common_ancestor(other).ok()? {
        TopologyLevel::Internal => Join::Board,
        TopologyLevel::Single => Join::Switch,
        TopologyLevel::Multiple => Join::Switches,
        TopologyLevel::HostBridge => Join::HostBridge,
        TopologyLevel::Node => Join::NumaNode,
        TopologyLevel::System => Join::System,
    })
}

/// Collects facts. One without an answer is noted, so that it costs no more than that.
#[derive(Default)]
struct Facts(Unknown);

/// Chips without memory of their own, by compute capability: Orin, Thor, GB10 (CUDA C++ Programming Guide, "Compute
/// Capabilities"; developer.nvidia.com/blog/understanding-memory-management-on-hardware-coherent-platforms).
const WITH_MEMORY_OF_HOST: [(u32, u32); 3] = [(8, 7), (11, 0), (12, 1)];

impl Facts {
    /// The value. An error that is about the whole GPU is returned.
    fn of<T>(&mut self, fact: Fact, answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
        match answer {
            Ok(value) => Ok(Some(value)),
            Err(error @ (NvmlError::GpuLost | NvmlError::ResetRequired)) => Err(error),
            Err(error) => {
                self.0.insert(fact, error.to_string());
                Ok(None)
            }
        }
    }

    /// As [`Self::of`], of a fact that not every GPU or driver has.
    fn if_supported<T>(&mut self, fact: Fact, answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
        let answer = unless_unsupported(answer).transpose();
        answer.map_or(Ok(None), |answer| self.of(fact, answer))
    }

    /// Of a device: all and free, in bytes, and whether it is the host's.
    fn memory(
        &mut self,
        answer: Result<MemoryInfo, NvmlError>,
        compute_capability: (u32, u32),
    ) -> Result<(u64, u64, bool), NvmlError> {
        let is_hosts = matches!(answer, Err(NvmlError::NotSupported))
            && WITH_MEMORY_OF_HOST.contains(&compute_capability);
        if let Some((total, free)) = is_hosts.then(memory_of_host).flatten() {
            return Ok((total, free, true));
        }
        let memory = self.of(Fact::Memory, answer)?;
        Ok(memory.map_or((0, 0, false), |memory| (memory.total, memory.free, false)))
    }

    /// Processes with compute contexts, each once. The compute list has MPS servers and processes outside MPS; the MPS
    /// list has MPS clients. Some drivers name the clients in the first list as well.
    fn running(&mut self, device: &NvmlDevice<'_>) -> Result<Vec<GpuProcess>, NvmlError> {
        let compute = self.of(Fact::Processes, compute_processes(device))?.unwrap_or_default();
        let mps = self.of(Fact::Clients, mps_clients(device))?.flatten().unwrap_or_default();
        let found = joined(compute.iter().chain(&mps)).into_iter();
        let describe = |(pid, memory): (u32, Option<u64>)| {
            processes::describe(i32::try_from(pid).ok()?, memory.unwrap_or(0))
        };
        Ok(found.filter_map(describe).collect())
    }
}

/// All of the host's memory and its available part (proc(5), `/proc/meminfo`: in units of 1024 bytes), in bytes.
pub(crate) fn memory_of_host() -> Option<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let bytes = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
    };
    Some((bytes("MemTotal:")?, bytes("MemAvailable:")?))
}

/// `None` if this device or driver does not support the call.
pub(crate) fn unless_unsupported<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(
            NvmlError::NotSupported
            | NvmlError::FunctionNotFound
            | NvmlError::FailedToLoadSymbol(_)
            | NvmlError::UnexpectedVariant(_),
        ) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The SMs of a GPU with this many CUDA cores, by how many an SM of its compute capability has: `_ConvertSMVer2Cores` of
/// NVIDIA's CUDA samples (`Common/helper_cuda.h`). `None` for a generation that is not in that table.
fn sm_count(cores: u32, compute_capability: (u32, u32)) -> Option<u32> {
    let per_sm = match compute_capability {
        (3, 0 | 2 | 5 | 7) => 192,
        (6 | 8, 0) | (7, 0 | 2 | 5) => 64,
        (5, 0 | 2 | 3) | (6, 1 | 2) | (8, 6 | 7 | 9) | (9 | 11, 0) | (10, 0 | 1 | 3) | (12, 0 | 1) => 128,
        _ => return None,
    };
    Some(cores / per_sm).filter(|&count| count > 0)
}

pub(crate) const fn compute_mode(mode: NvmlComputeMode) -> ComputeMode {
    match mode {
        NvmlComputeMode::Default => ComputeMode::Default,
        NvmlComputeMode::Prohibited => ComputeMode::Prohibited,
        NvmlComputeMode::ExclusiveThread | NvmlComputeMode::ExclusiveProcess => ComputeMode::ExclusiveProcess,
    }
}

/// Each pid once, with the larger of its memory figures; `None` if there is none.
pub(crate) fn joined<'p>(listed: impl Iterator<Item = &'p ProcessInfo>) -> BTreeMap<u32, Option<u64>> {
    listed.fold(BTreeMap::new(), |mut found, process| {
        let known = found.entry(process.pid).or_default();
        if let UsedGpuMemory::Used(bytes) = process.used_gpu_memory {
            *known = Some(bytes).max(*known);
        }
        found
    })
}

/// The MIG devices of a GPU; none if MIG mode is off or unknown. Their indexes have gaps.
pub(crate) fn mig_handles<'n>(device: &NvmlDevice<'n>) -> Result<Vec<NvmlDevice<'n>>, NvmlError> {
    let mut found = Vec::new();
    for index in 0..unless_unsupported(device.mig_device_count())?.unwrap_or(0) {
        match device.mig_device_by_index(index) {
            Ok(mig) => found.push(mig),
            Err(NvmlError::NotFound | NvmlError::InvalidArg) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// A MIG device: UUID, GPU instance, compute instance.
pub(crate) type MigIds = (String, u32, u32);

/// The MIG devices of a GPU.
pub(crate) fn mig_ids(device: &NvmlDevice<'_>) -> Result<Vec<MigIds>, NvmlError> {
    let ids = |mig: NvmlDevice<'_>| {
        let (gi, ci) = instance_ids(&mig)?;
        Ok((mig.uuid()?, gi, ci))
    };
    mig_handles(device)?.into_iter().map(ids).collect()
}

/// [`MigGpus`] as NVML reports them, of the GPUs that answer.
pub(super) fn mig_gpus(nvml: &Nvml) -> Result<MigGpus, NvmlError> {
    let of = |index| {
        let device = nvml.device_by_index(index).ok()?;
        let is_enabled = is_mig_enabled(&device).unwrap_or(false);
        is_enabled.then(|| Some((device.uuid().ok()?, mig_ids(&device).ok()?.into_iter().collect())))?
    };
    Ok((0..nvml.device_count()?).filter_map(of).collect())
}

fn is_mig_enabled(device: &NvmlDevice<'_>) -> Result<bool, NvmlError> {
    Ok(unless_unsupported(device.mig_mode())?.is_some_and(|mode| mode.current == 1))
}

/// The MIG devices of `gpu`. `caps_major` is the major of the nvidia-caps nodes.
pub(super) fn parts(
    device: &NvmlDevice<'_>,
    gpu: &Device,
    root: &Path,
    caps_major: Option<u32>,
) -> Result<Vec<Device>, NvmlError> {
    if !gpu.mig_enabled {
        return Ok(Vec::new());
    }
    let found = mig_handles(device)?;
    let mut parts =
        found.iter().map(|mig| part(device, mig, gpu, root, caps_major)).collect::<Result<Vec<_>, _>>()?;
    let known = parts.clone();
    for device in &mut parts {
        let Some(part) = &mut device.mig_device else { continue };
        let sibling = |other: &&Device| {
            other.uuid != device.uuid && other.mig_device.as_ref().is_some_and(|other| other.gi == part.gi)
        };
        let siblings: Vec<&Device> = known.iter().filter(sibling).collect();
        part.siblings = siblings.iter().map(|sibling| sibling.uuid.clone()).collect();
        part.sibling_processes = siblings.iter().flat_map(|sibling| sibling.processes.clone()).collect();
    }
    Ok(parts)
}

fn part(
    device: &NvmlDevice<'_>,
    mig: &NvmlDevice<'_>,
    gpu: &Device,
    root: &Path,
    caps_major: Option<u32>,
) -> Result<Device, NvmlError> {
    let (gi, ci) = instance_ids(mig)?;
    let (mut facts, mut nodes) = (Facts::default(), gpu.nodes.clone());
    let name = facts.of(Fact::Name, mig.name())?.unwrap_or_default();
    let attributes = facts.of(Fact::Attributes, mig.attributes())?;
    let (memory_bytes, memory_free_bytes, _) = facts.memory(mig.memory_info(), gpu.compute_capability)?;
    let fault = match device_nodes::instance_nodes(root, caps_major, gpu.minor, gi, ci) {
        Ok(caps) => {
            nodes.extend(caps);
            // It is chosen and booked by its size and its profile.
            facts.0.values().next().map(|answer| format!("NVML does not describe it ({answer})"))
        }
        Err(why) => Some(why),
    };
    let part = MigDevice {
        gpu: gpu.uuid.clone(),
        // The index that nvmlDeviceGetMigDeviceHandleByIndex takes (nvml.h).
        index: mig.index()?,
        profile: profile(&name).to_ascii_lowercase(),
        gi,
        ci,
        // nvml.h: only root may read it.
        placement: nvml_mig::instance(device, gi).ok().map(|gi| (gi.span.start, gi.span.size)),
        slices: attributes.as_ref().map_or((0, 0), |attributes| {
            (attributes.compute_instance_slice_count, attributes.gpu_instance_slice_count)
        }),
        gpu_sm_count: gpu.sm_count,
        gpu_memory_bytes: gpu.memory_bytes,
        siblings: Vec::new(),
        sibling_processes: Vec::new(),
        fault,
    };
    Ok(Device {
        uuid: mig.uuid()?,
        sm_count: attributes.map(|attributes| attributes.multiprocessor_count),
        memory_bytes,
        memory_free_bytes,
        // In MIG mode there is none (nvml.h, nvmlDeviceSetComputeMode).
        compute_mode: ComputeMode::Default,
        display_active: false,
        dri_nodes: Vec::new(),
        nodes,
        processes: facts.running(mig)?,
        mig_device: Some(part),
        unknown: facts.0,
        ..gpu.clone()
    })
}

/// `1g.5gb` of `NVIDIA A100-SXM4-40GB MIG 1g.5gb`.
fn profile(name: &str) -> &str {
    name.rsplit_once("MIG ").map_or(name, |(_, profile)| profile)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sm_counts_of_known_gpus() {
        assert_eq!(sm_count(16_896, (9, 0)), Some(132), "H200");
        assert_eq!(sm_count(6912, (8, 0)), Some(108), "A100");
        assert_eq!(sm_count(5120, (7, 0)), Some(80), "V100");
        assert_eq!(sm_count(3584, (6, 0)), Some(56), "P100");
        assert_eq!(sm_count(16_384, (8, 9)), Some(128), "RTX 4090");
        assert_eq!(sm_count(16_896, (99, 0)), None);
        assert_eq!(sm_count(0, (9, 0)), None);
    }

    #[test]
    fn bus_ids_become_the_kernels() {
        assert_eq!(kernel_bus_id("00000000:3B:00.0"), "0000:3b:00.0");
        assert_eq!(kernel_bus_id("00010000:AF:00.0"), "10000:af:00.0");
        assert_eq!(kernel_bus_id("0000:3b:00.0"), "0000:3b:00.0");
    }

    #[test]
    fn mig_profiles_are_taken_from_names() {
        assert_eq!(profile("NVIDIA A100-SXM4-40GB MIG 1g.5gb"), "1g.5gb");
        assert_eq!(profile("NVIDIA H200 MIG 1c.2g.35gb"), "1c.2g.35gb");
        assert_eq!(profile("MIG 1g.18gb+me"), "1g.18gb+me");
    }

    #[test]
    fn a_process_in_both_lists_counts_once() {
        let process = |(pid, memory)| ProcessInfo {
            pid,
            used_gpu_memory: UsedGpuMemory::Used(memory),
            gpu_instance_id: None,
            compute_instance_id: None,
        };
        let found = joined([(7, 66), (9, 500), (9, 0), (4, 1)].map(process).iter());
        assert_eq!(found.into_iter().collect::<Vec<_>>(), [(4, Some(1)), (7, Some(66)), (9, Some(500))]);
    }
}
