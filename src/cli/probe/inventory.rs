//! Builds the inventory from NVML, /proc, /dev and the library directories, without the GPUs that cannot be served. Only
//! the program `sublet` does this.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{fs, io};

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use super::driver_files::{self, Found, Machine};
use super::nvml::{self, Processes};
use crate::sick_gpus;
use sublet_core::config::{Config, Inject};
use sublet_core::fs::{read_proc_devices, under};
use sublet_core::inventory::cache::{self, KernelModule, Seen};
use sublet_core::inventory::{
    Device, Driver, FileDirectory, Inventory, InventoryError, LeftOut, Link, Majors, MigGpus,
    MissingPrograms, MpsPrograms, Node, NodeError, SCHEMA, check_node, device_nodes, programs,
};
use sublet_core::text::safe;

/// The oldest supported driver branch: MPS was measured with it, and it has every NVML call made here.
pub(crate) const OLDEST_BRANCH: u32 = 535;

/// Minor of `/dev/nvidiactl` (`NV_CTL_DEVICE_MINOR` in the kernel module's nv.h).
const CTL_MINOR: u32 = 255;

/// Why the driver could not be read.
#[allow(missing_docs, reason = "the message says what the fields are")]
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// Jetson GPUs have another driver.
    #[error("this is a Jetson ({} without /dev/nvidiactl): sublet serves PCI GPUs only", .path.display())]
    Jetson { path: PathBuf },
    /// GPUs under Windows have another driver.
    #[error("this is WSL2 ({}): sublet serves Linux hosts only", .path.display())]
    Wsl { path: PathBuf },
    /// There is no driver, or its /proc and /sys files cannot be read.
    #[error(transparent)]
    Driver(#[from] InventoryError),
    /// The driver is older than any version known to work.
    #[error(
        "NVIDIA driver {version} is too old: sublet needs {OLDEST_BRANCH} or later; install a newer driver"
    )]
    TooOld { version: String },
    /// The driver was upgraded, and the old module is still loaded.
    #[error(
        "the loaded NVIDIA kernel module is {loaded}, but the driver's files are {installed}: reboot, or \
         reload the modules"
    )]
    Mismatch { loaded: String, installed: String },
    /// A driver library is not installed.
    #[error("{library} of driver {version} is not in any library directory below {}; {package}", .root.display())]
    NoLibrary { library: &'static str, version: String, root: PathBuf, package: &'static str },
    /// The library named by `[driver] nvml` does not exist.
    #[error("NVML is missing: [driver] nvml names {}, which does not exist; {package}", .library.display())]
    NoNvml { library: PathBuf, package: &'static str },
    /// A module is not loaded: /proc/devices has no major for it.
    #[error("the kernel module {module} is not loaded (no {module} in {}); {remedy}", .path.display())]
    NoMajor { module: &'static str, path: PathBuf, remedy: &'static str },
    /// A device node is missing or is another kind of file.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// A file cannot be read.
    #[error("cannot read {}: {source}", .path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    /// The driver is loaded, and lists no GPU.
    #[error("NVIDIA driver {version} is loaded, but it has no GPU; see `dmesg | grep -i nvrm`")]
    NoGpu { version: String },
    /// NVML reported an error.
    #[error("NVML ({}) failed to {action}: {why}", .library.display())]
    Nvml { library: PathBuf, action: String, why: String },
}

/// Reads everything again. GPUs that cannot be served are left out ([`Inventory::left_out`]).
///
/// # Errors
/// There is no driver, no NVML or no GPU, the driver's files and kernel module differ, a node that all GPUs need is
/// missing, or the platform is not supported.
pub fn probe(config: &Config) -> Result<Inventory, ProbeError> {
    let root = &config.driver.root;
    refuse_platforms(root)?;
    let host = Host::of(config)?;
    // Read before NVML is asked: a change in between makes the result stale, but not wrong.
    let seen = cache::read_seen(root)?;
    host.check_libraries()?;
    let known @ (.., majors) = majors(root)?;
    let asked = host.ask()?;
    let (devices, left_out) = asked.devices(&seen, known, Processes::With)?;
    // The control program if its server exists too; otherwise a warning if only one of them exists.
    let (mps_control, mps_missing) = match MpsPrograms::find(&config.driver).both(&config.driver) {
        Ok((control, _)) => (Some(control.to_owned()), None),
        Err(MissingPrograms::Control { .. }) => (None, None),
        Err(missing) => (None, Some(missing.to_string())),
    };
    Ok(Inventory {
        schema: SCHEMA.to_owned(),
        fingerprint: seen.fingerprint,
        probed_at: sublet_core::process::epoch_seconds(),
        mig_changes: 0,
        driver: Driver {
            version: host.module.version.clone(),
            cuda: nvml::cuda_version(&asked.nvml).unwrap_or_default(),
            simulated: host.module.simulated,
            mps_control,
            mps_missing,
            smi: programs::program(&config.driver, "nvidia-smi"),
            majors,
            mig_caps: device_nodes::privileged_nodes(root, majors.caps).unwrap_or_else(|(path, error)| {
                tracing::warn!(
                    "{}: {error}: no container gets a MIG device or sublet.mig-caps",
                    path.display()
                );
                [None, None]
            }),
        },
        links: asked.links(&devices),
        devices,
        left_out,
        directories: FileDirectory::of(&host.found.files),
        files: host.found.files,
    })
}

/// The GPUs that a refresh would leave out now.
pub(crate) fn left_out(config: &Config) -> Result<Vec<LeftOut>, ProbeError> {
    let root = &config.driver.root;
    let seen = cache::read_seen(root)?;
    Ok(Host::of(config)?.ask()?.devices(&seen, majors(root)?, Processes::Without)?.1)
}

/// GPUs in MIG mode and their MIG devices, read from NVML only.
pub(crate) fn mig_gpus(config: &Config) -> Result<MigGpus, ProbeError> {
    let (nvml, library) = connect(config)?;
    nvml::mig_gpus(&nvml).map_err(|error| failed(&library, "list the MIG devices", &error))
}

/// NVML of this host, and the library it is in.
pub(crate) fn connect(config: &Config) -> Result<(Nvml, PathBuf), ProbeError> {
    Host::of(config)?.ask().map(|asked| (asked.nvml, asked.library))
}

fn refuse_platforms(root: &Path) -> Result<(), ProbeError> {
    let there = |path: &str| Some(under(root, path)).filter(|path| path.exists());
    if let Some(path) = there("/dev/dxg") {
        return Err(ProbeError::Wsl { path });
    }
    let jetson = there("/dev/nvmap").filter(|_| there("/dev/nvidiactl").is_none());
    jetson.map_or(Ok(()), |path| Err(ProbeError::Jetson { path }))
}

const NVML: &str = "libnvidia-ml.so.1";
const NVML_PACKAGE: &str = "Debian: apt install libnvidia-ml1, Red Hat: dnf install nvidia-driver-cuda-libs";

/// The driver, without the facts from NVML.
struct Host<'a> {
    config: &'a Config,
    module: KernelModule,
    found: Found,
}

impl<'a> Host<'a> {
    fn of(config: &'a Config) -> Result<Self, ProbeError> {
        let module = cache::loaded_kernel_module(&config.driver.root)?;
        let branch = module.version.split('.').next().and_then(|branch| branch.parse::<u32>().ok());
        if branch.is_some_and(|branch| branch < OLDEST_BRANCH) {
            return Err(ProbeError::TooOld { version: module.version });
        }
        let found = driver_files::find(&config.driver, &module.version, Machine::HOST);
        Ok(Self { config, module, found })
    }

    /// An upgrade without a reload of the module leaves only files of another version. NVML would refuse with
    /// `NVML_ERROR_LIB_RM_VERSION_MISMATCH`, and CUDA in every container after it.
    fn check_libraries(&self) -> Result<(), ProbeError> {
        if !self.found.other_versions.is_empty() {
            let found: Vec<&str> = self.found.other_versions.iter().map(String::as_str).collect();
            return Err(self.mismatch(found.join(" and ")));
        }
        if self.config.driver.inject == Inject::None {
            return Ok(());
        }
        if self.found.library("libcuda.so.1").is_none() {
            let package = "Debian: apt install libcuda1, Red Hat: dnf install nvidia-driver-cuda-libs";
            return Err(self.no_library("libcuda.so.1", package));
        }
        if self.found.library("libnvidia-ptxjitcompiler.so.1").is_none() {
            tracing::warn!(
                "libnvidia-ptxjitcompiler.so.1 is not installed, so PTX kernels fail in containers"
            );
        }
        Ok(())
    }

    fn mismatch(&self, installed: String) -> ProbeError {
        ProbeError::Mismatch { loaded: self.module.version.clone(), installed }
    }

    fn no_library(&self, library: &'static str, package: &'static str) -> ProbeError {
        let (version, root) = (self.module.version.clone(), self.config.driver.root.clone());
        ProbeError::NoLibrary { library, version, root, package }
    }

    /// Connects to NVML: the configured library, or the one below the root. If the root is the host's own, otherwise
    /// whatever its loader finds by name.
    fn ask(&self) -> Result<Connection<'_>, ProbeError> {
        let driver = &self.config.driver;
        let by_name = (driver.root == Path::new("/")).then_some(Path::new(NVML));
        let library = driver.nvml.as_deref().or_else(|| self.found.library(NVML)).or(by_name);
        let library = library.ok_or_else(|| self.no_library(NVML, NVML_PACKAGE))?.to_owned();
        match nvml::init(&library) {
            Ok(nvml) => Ok(Connection { nvml, library, host: self }),
            Err(NvmlError::LibRmVersionMismatch) => {
                Err(self.mismatch(format!("another version ({})", library.display())))
            }
            // The bare name: it is neither below the root nor where the host's loader looks.
            Err(NvmlError::LibloadingError(_)) if library.is_relative() => {
                Err(self.no_library(NVML, NVML_PACKAGE))
            }
            // The loader only says that a file is missing; this message names the package.
            Err(NvmlError::LibloadingError(_)) if !library.exists() => {
                Err(ProbeError::NoNvml { library, package: NVML_PACKAGE })
            }
            Err(error @ NvmlError::LibloadingError(_)) => Err(failed(&library, "load", &error)),
            Err(error) => Err(failed(&library, "initialize", &error)),
        }
    }
}

fn failed(library: &Path, action: &str, error: &NvmlError) -> ProbeError {
    ProbeError::Nvml { library: library.to_owned(), action: action.to_owned(), why: safe(&error.to_string()) }
}

/// The majors of nvidia and nvidia-uvm, which are required, and all of them.
type KnownMajors = (u32, u32, Majors);

fn majors(root: &Path) -> Result<KnownMajors, ProbeError> {
    let path = under(root, "/proc/devices");
    let text =
        read_proc_devices(root).map_err(|source| ProbeError::Unreadable { path: path.clone(), source })?;
    let all = Majors::parse(&text);
    let missing = |module, remedy| ProbeError::NoMajor { module, path: path.clone(), remedy };
    let nvidia = all.nvidia.ok_or_else(|| missing("nvidia", "run `modprobe nvidia`"))?;
    let load_uvm = "run `modprobe nvidia-uvm`, then `nvidia-modprobe -u -c0`";
    let uvm = all.uvm.ok_or_else(|| missing("nvidia-uvm", load_uvm))?;
    Ok((nvidia, uvm, all))
}

/// A connection to NVML, and the names for its errors.
struct Connection<'a> {
    nvml: Nvml,
    library: PathBuf,
    host: &'a Host<'a>,
}

impl Connection<'_> {
    /// Every GPU that can be served, each followed by its MIG devices, and the GPUs that are left out.
    fn devices(
        &self,
        seen: &Seen,
        majors: KnownMajors,
        processes: Processes,
    ) -> Result<(Vec<Device>, Vec<LeftOut>), ProbeError> {
        let (root, (nvidia, uvm, _)) = (&self.host.config.driver.root, majors);
        let node = |path: &str, major, minor| Node { path: path.into(), major, minor };
        check_node(root, &node("/dev/nvidiactl", nvidia, CTL_MINOR))?;
        check_node(root, &node("/dev/nvidia-uvm", uvm, 0))?;
        let count = self.nvml.device_count();
        let count = count.map_err(|error| failed(&self.library, "count the GPUs", &error))?;
        let (mut devices, mut silent) = (Vec::new(), Vec::new());
        for index in 0..count {
            match self.device(index, seen, majors, processes) {
                Ok((gpu, parts)) => {
                    devices.push(gpu);
                    devices.extend(parts);
                }
                Err(why) => silent.push((index, why)),
            }
        }
        // The last inventory of this boot.
        let known = |before: &Inventory| before.fingerprint.boot_id == seen.fingerprint.boot_id;
        let before = cache::last(self.host.config).ok().filter(known);
        let left_out = LeftOutGpus { root, seen, before: before.as_ref() }.name(silent, &devices);
        if devices.is_empty() && left_out.is_empty() {
            return Err(ProbeError::NoGpu { version: self.host.module.version.clone() });
        }
        // Those that reported a fault since boot.
        let sick = sick_gpus::read(self.host.config);
        let path = || sick_gpus::file(self.host.config);
        let sick = sick.map_err(|source| ProbeError::Unreadable { path: path(), source })?;
        Ok(sick.leave_out(devices, left_out))
    }

    /// How the GPUs among `devices` are joined, as far as NVML tells.
    fn links(&self, devices: &[Device]) -> Vec<Link> {
        let gpus = || devices.iter().filter(|device| !device.is_mig()).map(|gpu| gpu.index);
        let pairs =
            gpus().flat_map(|low| gpus().filter(move |high| low < *high).map(move |high| (low, high)));
        let handle = |index| self.nvml.device_by_index(index).ok();
        let link = |(low, high)| Some(Link(low, high, nvml::join(&handle(low)?, handle(high)?)?));
        pairs.filter_map(link).collect()
    }

    /// GPU `index` and its MIG devices, or why no container can have it.
    fn device(
        &self,
        index: u32,
        seen: &Seen,
        majors: KnownMajors,
        processes: Processes,
    ) -> Result<(Device, Vec<Device>), Silent> {
        let (root, (nvidia, _, all)) = (&self.host.config.driver.root, majors);
        let device = self.nvml.device_by_index(index).map_err(|error| Silent::of(&error, None))?;
        let bus_id = nvml::bus_id(&device).ok();
        let described = nvml::describe(&device, index, nvidia, processes).and_then(|gpu| {
            let parts = nvml::parts(&device, &gpu, root, all.caps)?;
            Ok((gpu, parts))
        });
        let lost = bus_id.as_ref().is_some_and(|bus_id| seen.lost.contains(bus_id));
        let described = if lost { Err(NvmlError::GpuLost) } else { described };
        let (mut gpu, parts) = described.map_err(|error| Silent::of(&error, bus_id.clone()))?;
        gpu.dri_nodes = device_nodes::list_dri_nodes(root, &gpu.bus_id).unwrap_or_else(|(path, error)| {
            tracing::warn!("{}: {error}: GPU {index} gets no node below /dev/dri", path.display());
            Vec::new()
        });
        let node = gpu.nodes.iter().find_map(|node| check_node(root, node).err());
        node.map_or(Ok((gpu, parts)), |error| Err(Silent { bus_id, lost: false, why: error.to_string() }))
    }
}

// Which GPUs are left out. One that does not answer does not tell which it is: the driver's /proc and the inventory before
// do.

/// Why a GPU that NVML counts is not served.
struct Silent {
    /// Its PCI address, if it tells.
    bus_id: Option<String>,
    lost: bool,
    why: String,
}

impl Silent {
    fn of(error: &NvmlError, bus_id: Option<String>) -> Self {
        let remedy = match error {
            NvmlError::GpuLost => "see `dmesg | grep -i xid`; a power cycle may bring it back",
            NvmlError::ResetRequired => "`nvidia-smi --gpu-reset` resets it once nothing uses it",
            NvmlError::NoPermission => "the driver does not let this user or machine use it",
            _ => "see `dmesg | grep -i nvrm`; `nvidia-smi --gpu-reset` or a reboot may help",
        };
        Self {
            bus_id,
            lost: matches!(error, NvmlError::GpuLost),
            why: format!("NVML answers \"{}\"; {remedy}", safe(&error.to_string())),
        }
    }
}

/// The sources that identify GPUs which are left out.
struct LeftOutGpus<'a> {
    root: &'a Path,
    seen: &'a Seen,
    /// The inventory before, of this boot.
    before: Option<&'a Inventory>,
}

impl LeftOutGpus<'_> {
    /// The GPUs, by index. Of those that NVML counts and that do not tell their address, the first has the first address
    /// that is left, because NVML's order is that of the bus.
    fn name(&self, silent: Vec<(u32, Silent)>, served: &[Device]) -> Vec<LeftOut> {
        let listed = self.seen.fingerprint.gpus.iter().chain(&self.seen.lost).map(String::as_str);
        // A GPU that the administrator has excluded (NVreg_ExcludedGpus) is listed, and is nobody's to miss.
        let is_excluded =
            |bus_id: &&str| value(&self.information(bus_id), "GPU Excluded:").as_deref() == Some("Yes");
        let mut missing: BTreeSet<&str> = listed.filter(|bus_id| !is_excluded(bus_id)).collect();
        missing.extend(self.known().map(|gpu| gpu.bus_id.as_str()));
        for device in served {
            missing.remove(device.bus_id.as_str());
        }
        let (addressed, anonymous): (Vec<_>, Vec<_>) =
            silent.into_iter().partition(|(_, silent)| silent.bus_id.is_some());
        let mut all = Vec::new();
        for (index, silent) in addressed {
            let bus_id = silent.bus_id.clone().unwrap_or_default();
            missing.remove(bus_id.as_str());
            all.push(self.left_out(&bus_id, Some((index, silent))));
        }
        // A GPU that has left the bus may be counted or not.
        if missing.len() > anonymous.len() {
            let (there, gone) =
                missing.into_iter().partition::<BTreeSet<_>, _>(|bus_id| self.is_there(bus_id));
            all.extend(gone.into_iter().map(|bus_id| self.left_out(bus_id, None)));
            missing = there;
        }
        let mut anonymous = anonymous.into_iter();
        all.extend(missing.into_iter().map(|bus_id| self.left_out(bus_id, anonymous.next())));
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
            // Of a GPU that could not be initialized the driver writes `GPU-????????-…`, of each the same.
            uuid: value("GPU UUID:").filter(|uuid| !uuid.contains('?')).unwrap_or_else(|| bus_id.to_owned()),
            index,
            minor: minor.unwrap_or(index),
            bus_id: bus_id.to_owned(),
            name: value("Model:").unwrap_or_else(|| "NVIDIA GPU".to_owned()),
            ..Device::default()
        }
    }
}

/// The value of /proc by this name.
fn value(text: &str, key: &str) -> Option<String> {
    Some(text.lines().find_map(|line| line.strip_prefix(key))?.trim().to_owned())
}

#[cfg(test)]
#[path = "inventory_tests.rs"]
mod tests;
