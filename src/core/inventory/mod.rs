//! The host's driver, its files, its devices, and which of the files a container gets. `sublet refresh` writes the
//! inventory with NVML. The shim and the hook read it and check with a few file reads that it is up to date, and that the nodes
//! of a share are there.
//!
//! MIG devices are compute instances: each is a device of its own and part of a GPU. Ids of destroyed instances are reused, and
//! /proc then looks the same, so only NVML shows the difference. `sublet serve` confirms with a record that the inventory has
//! the driver's present MIG devices. While it does, other programs need not ask NVML before each container.

pub mod cache;
pub mod device_nodes;
#[cfg(any(test, feature = "fixtures"))]
pub mod fixture;
mod links;
pub mod programs;

pub use cache::{FileDirectory, InventoryError, SCHEMA};
pub(crate) use cache::{NO_CHECKPOINT_FILE, is_watched, load_beside, no_checkpoint};
pub use cache::{can_do_mig, fingerprint, last, load, path as cache_path, store, unwatch, watch};
pub use device_nodes::NodeError;
use device_nodes::{NODES, make_cap_node};
pub use links::{Join, Link};
pub use programs::{MissingPrograms, MpsPrograms};

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::{fs, io};

use nix::sys::stat::{major, minor};
use serde::{Deserialize, Serialize};

use crate::config::Inject;
use crate::share::{Capabilities, Capability, MigCapability, Percent};
use crate::text::{safe, safe_long};

/// `inventory.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Inventory {
    /// `sublet.inventory/1`.
    pub schema: String,
    /// Must be unchanged for the rest to be up to date.
    pub fingerprint: Fingerprint,
    /// When NVML was asked, in seconds since the epoch.
    pub probed_at: u64,
    /// How many changes of MIG layouts had ended before (`MigChanges::count` of the ledger).
    pub mig_changes: u64,
    /// The driver.
    pub driver: Driver,
    /// Every GPU, by NVML index, each followed by its MIG devices.
    pub devices: Vec<Device>,
    /// The GPUs that the driver or the host cannot serve now. They are not among the devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<LeftOut>,
    /// How each two of the GPUs are joined, in order, as far as the driver tells.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<Link>,
    /// The driver's files, each with the name under which it is mounted.
    pub files: Vec<DriverFile>,
    /// Their directories, as far as they show that no file is missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub directories: Vec<FileDirectory>,
}

/// Values that are cheap to read again, without NVML. The inventory is out of date as soon as one of them differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot_id: String,
    /// Version of the loaded kernel module.
    pub driver_version: String,
    /// Bus ids under `/proc/driver/nvidia/gpus`, sorted.
    pub gpus: Vec<String>,
    /// `gpu<minor>/gi<G>/ci<C>` present under `/proc/driver/nvidia/capabilities`, sorted.
    pub mig: Vec<String>,
}

/// The driver as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Driver {
    /// As `580.159.04`.
    pub version: String,
    /// The CUDA version that the driver supports, as (13, 0); (0, 0): NVML does not tell.
    pub cuda: (u32, u32),
    /// Whether the kernel module reports that it is simulated.
    pub simulated: bool,
    /// `nvidia-cuda-mps-control`, if both it and its server program are installed.
    pub mps_control: Option<PathBuf>,
    /// Which MPS program is missing, if only one of the two is installed.
    pub mps_missing: Option<String>,
    /// `nvidia-smi`, if it is installed.
    pub smi: Option<PathBuf>,
    /// Majors from /proc/devices.
    pub majors: Majors,
    /// The nodes for monitoring and changing all MIG instances: `monitor` and `config`.
    pub mig_caps: [Option<Node>; 2],
}

/// Character device majors; `None` if the module is not loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Majors {
    /// `nvidia` or `nvidia-frontend`: nvidiactl and the GPUs.
    pub nvidia: Option<u32>,
    /// `nvidia-uvm`.
    pub uvm: Option<u32>,
    /// `nvidia-caps`.
    pub caps: Option<u32>,
}

/// One GPU, or one MIG device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// `GPU-…` or `MIG-…`.
    pub uuid: String,
    /// NVML's index of the GPU.
    pub index: u32,
    /// The number in `/dev/nvidia<minor>`.
    pub minor: u32,
    /// As /proc/driver/nvidia/gpus spells it: `0000:3b:00.0`, lower case.
    pub bus_id: String,
    /// As `NVIDIA H200`. A MIG device has its GPU's name.
    pub name: String,
    /// As (9, 0).
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors, if NVML reports them.
    pub sm_count: Option<u32>,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Memory that was free at the last refresh, in bytes.
    pub memory_free_bytes: u64,
    /// Whether this is the host's memory, because the chip has no other.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub memory_of_host: bool,
    /// Facts that NVML does not report.
    #[serde(default, skip_serializing_if = "Unknown::is_empty")]
    pub unknown: Unknown,
    /// Whether MIG mode is on. The GPU is then used only through its MIG devices.
    pub mig_enabled: bool,
    /// Compute mode as found.
    pub compute_mode: ComputeMode,
    /// Whether it drives a display.
    pub display_active: bool,
    /// How it is virtualized.
    pub virtualization: Virtualization,
    /// Its own nodes under /dev/dri, for `graphics`.
    pub dri_nodes: Vec<Node>,
    /// Its nodes: `nvidia<minor>`, and the two capabilities of a MIG device.
    pub nodes: Vec<Node>,
    /// Processes that had contexts at the last refresh, including MPS servers and clients.
    pub processes: Vec<GpuProcess>,
    /// Of a MIG device; `None`: a whole GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig_device: Option<MigDevice>,
}

/// A character device node of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Its path in host and container, as `/dev/nvidia0`: without the driver root.
    pub path: PathBuf,
    /// Device major.
    pub major: u32,
    /// Device minor.
    pub minor: u32,
}

/// NVML's compute mode, in the words of NVML and nvidia-smi.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
#[strum(serialize_all = "SCREAMING_SNAKE_CASE")]
pub enum ComputeMode {
    /// Any number of contexts.
    #[default]
    Default,
    /// No contexts at all.
    Prohibited,
    /// One process; the MPS server counts as one.
    ExclusiveProcess,
}

/// NVML's GPU virtualization mode, as far as it matters here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Virtualization {
    /// Bare metal.
    #[default]
    None,
    /// The whole GPU is passed through to this virtual machine.
    Passthrough,
    /// A vGPU in this virtual machine.
    Vgpu,
    /// A host that provides vGPUs.
    Host,
}

/// A process that had a context at the last refresh.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcess {
    /// Host pid.
    pub pid: i32,
    /// Its command name, for messages.
    pub name: String,
    /// Device memory in bytes.
    pub memory_bytes: u64,
    /// Inode of its PID namespace, by which it is attributed to a lease; 0 if it could not be read.
    pub pid_namespace: u64,
    /// Its cgroup paths in all hierarchies, each once and without roots. They also attribute it to a lease.
    pub cgroups: Vec<String>,
    /// Whether it is an MPS server.
    pub mps_server: bool,
}

/// One file of the driver's that containers may get.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverFile {
    /// The real file on the host, driver root included.
    pub source: PathBuf,
    /// How the container uses it.
    pub kind: FileKind,
    /// Which capability brings it.
    pub capability: Capability,
    /// A file that an image must have, too, for this one to be of use: a program's loader, where that is not the usual
    /// one, or the library that a description names by its path. Both are so on `NixOS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub needs: Option<PathBuf>,
}

/// How the container uses a driver file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum FileKind {
    /// A library, mounted under its soname into the directory of the container's libc.
    Library {
        /// As `libcuda.so.1`.
        soname: String,
        /// Further names under which it must be found, as `libcuda.so`.
        also: Vec<String>,
    },
    /// A program, mounted into /usr/bin.
    Program {
        /// As `nvidia-smi`.
        name: String,
    },
    /// Data, mounted at its own path: ICD and EGL descriptions, firmware.
    Data {
        /// Its path in the container.
        path: PathBuf,
    },
}

/// UUIDs of the GPUs in MIG mode, each with its MIG devices: UUID, GPU instance, compute instance.
pub type MigGpus = BTreeMap<String, BTreeSet<(String, u32, u32)>>;

impl Inventory {
    /// Its GPUs in MIG mode.
    pub fn mig_gpus(&self) -> MigGpus {
        let parts = |gpu: &Device| {
            self.mig_devices_of(&gpu.uuid)
                .map(|(device, part)| (device.uuid.clone(), part.gi, part.ci))
                .collect()
        };
        self.gpus().filter(|gpu| gpu.mig_enabled).map(|gpu| (gpu.uuid.clone(), parts(gpu))).collect()
    }

    /// The same devices, without their current use.
    pub fn idle(&self) -> Self {
        let part = |part: &MigDevice| MigDevice { sibling_processes: Vec::new(), ..part.clone() };
        let idle = |device: &Device| Device {
            memory_free_bytes: device.memory_bytes,
            compute_mode: ComputeMode::Default,
            processes: Vec::new(),
            mig_device: device.mig_device.as_ref().map(part),
            ..device.clone()
        };
        Self { devices: self.devices.iter().map(idle).collect(), ..self.clone() }
    }

    /// A line for each fact that NVML does not tell, with what its lack costs.
    pub fn costs(&self) -> impl Iterator<Item = String> + '_ {
        let cost =
            "no image is warned of that needs a newer CUDA, and a GPU is taken for at most 48 MPS clients";
        let untold = (self.driver.cuda == (0, 0))
            .then(|| format!("nvmlSystemGetCudaDriverVersion_v2 does not answer: {cost}"));
        untold.into_iter().chain(self.devices.iter().flat_map(Device::costs))
    }

    /// With the left-out GPUs among the devices, for settings that may still name them.
    pub fn with_left_out(&self) -> Self {
        let left_out = self.left_out.iter().map(|gone| gone.gpu.clone());
        Self { devices: self.devices.iter().cloned().chain(left_out).collect(), ..self.clone() }
    }

    /// The device with this UUID.
    pub fn device(&self, uuid: &str) -> Option<&Device> {
        self.devices.iter().find(|device| device.uuid == uuid)
    }

    /// The driver's files for `capabilities` with their mount points, libraries in `library_dir`; each mount point
    /// once.
    pub(crate) fn mounted_files(
        &self,
        library_dir: &Path,
        capabilities: &Capabilities,
        inject: Inject,
    ) -> Vec<(&DriverFile, PathBuf)> {
        let mut mounted: Vec<(&DriverFile, PathBuf)> = Vec::new();
        if inject == Inject::None {
            return mounted;
        }
        for file in self.files.iter().filter(|file| wanted(file, capabilities)) {
            for destination in destinations(&file.kind, library_dir, capabilities) {
                // Each with each: to compare them by their parts takes ten times as long.
                if !mounted.iter().any(|(_, taken)| taken.as_os_str() == destination.as_os_str()) {
                    mounted.push((file, destination));
                }
            }
        }
        mounted
    }
}

/// SMs are assigned in pairs, and a context sees at least this many (H200; docs/evidence).
const FEWEST_SMS: u64 = 8;

impl Device {
    /// The SMs that a context sees at an MPS active thread percentage: whole pairs, rounded down, and at least the
    /// driver's minimum (measured, docs/evidence). `None` if NVML does not report the number of SMs.
    pub fn sms_at(&self, share: Percent) -> Option<u64> {
        let all = u64::from(self.sm_count?);
        Some((share.of(all) / 2 * 2).max(FEWEST_SMS.min(all)))
    }

    /// Whether MPS has no limits on this GPU (CUDA MPS documentation, "Volta MPS").
    pub(crate) fn is_before_volta(&self) -> bool {
        self.compute_capability < (7, 0)
    }

    /// Whether NVML reports its processes.
    pub(crate) fn knows_processes(&self) -> bool {
        !self.unknown.contains_key(&Fact::Processes) && !self.unknown.contains_key(&Fact::Clients)
    }

    /// As `GPU 0: nvmlDeviceGetMemoryInfo_v2 answers "Not Supported": sublet.memory is refused`.
    fn costs(&self) -> impl Iterator<Item = String> + '_ {
        FACTS.iter().filter_map(|(fact, function, cost)| {
            let answer = safe(self.unknown.get(fact)?);
            Some(format!("{}: {function} answers \"{answer}\": {cost}", self.label()))
        })
    }
}

/// The approximate memory that a CUDA context seeing `sms` takes of its limit: 29 MiB plus 3.7 MiB for each SM (H200,
/// driver 580, docs/evidence: 58 MiB at 8 SMs, 145 at 32, 514 at 132).
pub(crate) const fn context_bytes(sms: u64) -> u64 {
    (29_000 + sms * 3_700) * (1 << 20) / 1000
}

/// Libraries of `compute` that `libGLX_nvidia` and `libEGL_nvidia` load, too (seen with driver 580).
const OF_GRAPHICS_TOO: [&str; 2] = ["libnvidia-gpucomp.so.", "libnvidia-allocator.so."];

/// The description files of EGL, Vulkan and `OpenCL` belong to both `video` and `graphics`.
fn wanted(file: &DriverFile, capabilities: &Capabilities) -> bool {
    let shared = |soname: &str| OF_GRAPHICS_TOO.iter().any(|name| soname.starts_with(name));
    let other = match &file.kind {
        FileKind::Library { soname, .. } if shared(soname) => Capability::Graphics,
        FileKind::Data { .. } if file.capability == Capability::Graphics => Capability::Video,
        _ => file.capability,
    };
    capabilities.has(file.capability) || capabilities.has(other)
}

fn destinations(kind: &FileKind, library_dir: &Path, capabilities: &Capabilities) -> Vec<PathBuf> {
    match kind {
        FileKind::Library { soname, also } => {
            let mut names = vec![soname.as_str()];
            // Those in a directory of their own are plugins of graphics libraries.
            let fits = |name: &&str| !name.contains('/') || capabilities.has(Capability::Graphics);
            names.extend(also.iter().map(String::as_str).filter(fits));
            if soname == "libcuda.so.1" {
                // Triton and torch.compile link with -lcuda.
                names.push("libcuda.so");
            }
            names.into_iter().map(|name| library_dir.join(name)).collect()
        }
        FileKind::Program { name } => vec![Path::new("/usr/bin").join(name)],
        FileKind::Data { path } => vec![path.clone()],
    }
}

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
    Attributes,
}

/// Each fact, its NVML function, and the cost of its failure. Nothing else is lost by it. Where the handle,
/// UUID, PCI address, minor or MIG mode cannot be had, or the handle, index or ids of a MIG device, or the answer is that the
/// GPU is lost or must be reset, the GPU is left out ([`LeftOut`]).
pub const FACTS: [(Fact, &str, &str); 10] = [
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
    (Fact::Attributes, "nvmlDeviceGetAttributes_v2", "no container gets it"),
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

/// The longest reason that is shown, in characters.
const LONGEST_WHY: usize = 600;

impl LeftOut {
    /// As `GPU 3 is left out: Unknown Error; …`.
    pub fn sentence(&self) -> String {
        format!("{} is left out: {}", self.gpu.label(), self.reason())
    }

    /// Why, safe to print.
    pub fn reason(&self) -> String {
        safe_long(&self.why, LONGEST_WHY)
    }

    /// `lost` or `unhealthy`.
    pub const fn state(&self) -> &'static str {
        if self.lost { "lost" } else { "unhealthy" }
    }
}

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

/// Checks that `node` is on this host and as in the inventory.
///
/// # Errors
/// It is missing, or something else is in its place.
pub fn check_node(root: &Path, node: &Node) -> Result<(), NodeError> {
    let path = crate::fs::under(root, &node.path.to_string_lossy());
    let there = match fs::metadata(&path) {
        Ok(there) => there,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(NodeError::Missing { path }),
        Err(source) => return Err(NodeError::Unreadable { path, source }),
    };
    let found = if there.file_type().is_char_device() {
        let device = there.rdev();
        if (major(device), minor(device)) == (u64::from(node.major), u64::from(node.minor)) {
            return Ok(());
        }
        format!("the character device {}:{}", major(device), minor(device))
    } else {
        "no character device".to_owned()
    };
    Err(NodeError::Other { path, found, major: node.major, minor: node.minor })
}

/// [`check_node`], which also creates a missing nvidia-caps node. nvidia-modprobe creates these nodes only on request,
/// and engines do not request it.
///
/// # Errors
/// As [`check_node`], or the node cannot be created.
pub(crate) fn ensure_node(root: &Path, node: &Node) -> Result<(), NodeError> {
    match check_node(root, node) {
        Err(NodeError::Missing { path }) if node.path.starts_with(NODES) => {
            let made = make_cap_node(root, node);
            made.map_err(|(file, source)| NodeError::Unmade { path, file, source })?;
            check_node(root, node)
        }
        checked => checked,
    }
}
