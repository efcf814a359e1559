//! Builds the inventory from NVML, /proc, /dev and the library directories. Only the program `sublet` does this.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use super::cache::{KernelModule, SCHEMA, Seen};
use super::device_nodes::{NodeError, check_node};
use super::driver_files::{Found, Machine};
use super::left_out::{LeftOutGpus, Silent};
use super::programs::{self, MissingPrograms, MpsPrograms};
use super::{
    Device, Driver, FileDirectory, Inventory, InventoryError, LeftOut, Majors, MigGpus, Node, cache,
    device_nodes, driver_files, nvml, under,
};
use sublet_core::config::{Config, Inject};
use sublet_core::fs;
use sublet_core::text::safe;

/// The oldest supported driver branch: MPS was measured with it, and it has every NVML call made here.
const OLDEST_BRANCH: u32 = 535;

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
    #[error("NVML ({}) failed to {what}: {why}", .library.display())]
    Nvml { library: PathBuf, what: String, why: String },
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
    let majors = majors(root)?;
    let asked = host.ask()?;
    let cuda = nvml::cuda_version(&asked.nvml).unwrap_or_else(|error| {
        tracing::warn!("NVML does not tell CUDA's version: {error}");
        (0, 0)
    });
    let (devices, left_out) = asked.devices(&seen, majors)?;
    // The control program if its server exists too; otherwise a warning if only one of them exists.
    let (mps_control, mps_missing) = match MpsPrograms::find(&config.driver).both(&config.driver) {
        Ok((control, _)) => (Some(control.to_owned()), None),
        Err(MissingPrograms::Control { .. }) => (None, None),
        Err(missing) => (None, Some(missing.to_string())),
    };
    Ok(Inventory {
        schema: SCHEMA.to_owned(),
        fingerprint: seen.fingerprint,
        probed_at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        mig_changes: 0,
        driver: Driver {
            version: host.module.version.clone(),
            cuda,
            simulated: host.module.simulated,
            mps_control,
            mps_missing,
            smi: programs::program(&config.driver, "nvidia-smi"),
            majors: majors.all,
            mig_caps: device_nodes::privileged_nodes(root, majors.all.caps)
                .map_err(|(path, source)| ProbeError::Unreadable { path, source })?,
        },
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
    Ok(Host::of(config)?.ask()?.devices(&seen, majors(root)?)?.1)
}

/// GPUs in MIG mode and their MIG devices, read from NVML only.
pub(crate) fn mig_gpus(config: &Config) -> Result<MigGpus, ProbeError> {
    let host = Host::of(config)?;
    let asked = host.ask()?;
    nvml::mig_gpus(&asked.nvml).map_err(|error| failed(&asked.library, "list the MIG devices", &error))
}

/// NVML of this host, and the library it is in.
pub(crate) fn connect(config: &Config) -> Result<(Nvml, PathBuf), ProbeError> {
    let host = Host::of(config)?;
    let asked = host.ask()?;
    Ok((asked.nvml, asked.library))
}

fn refuse_platforms(root: &Path) -> Result<(), ProbeError> {
    let there = |path: &str| Some(under(root, path)).filter(|path| path.exists());
    if let Some(path) = there("/dev/dxg") {
        return Err(ProbeError::Wsl { path });
    }
    match there("/dev/nvmap") {
        Some(path) if there("/dev/nvidiactl").is_none() => Err(ProbeError::Jetson { path }),
        _ => Ok(()),
    }
}

const NVML: &str = "libnvidia-ml.so.1";
const NVML_PACKAGE: &str = "Debian: apt install libnvidia-ml1, Red Hat: dnf install nvidia-driver-cuda-libs";

/// The driver, without what NVML tells.
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
            let others: Vec<&str> = self.found.other_versions.iter().map(String::as_str).collect();
            return Err(self.mismatch(others.join(" and ")));
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
    fn ask(&self) -> Result<Asked<'_>, ProbeError> {
        let driver = &self.config.driver;
        let by_name = (driver.root == Path::new("/")).then_some(Path::new(NVML));
        let library = driver.nvml.as_deref().or_else(|| self.found.library(NVML)).or(by_name);
        let library = library.ok_or_else(|| self.no_library(NVML, NVML_PACKAGE))?.to_owned();
        match nvml::init(&library) {
            Ok(nvml) => Ok(Asked { nvml, library, host: self }),
            Err(NvmlError::LibRmVersionMismatch) => {
                Err(self.mismatch(format!("another version ({})", library.display())))
            }
            // The bare name: it is neither below the root nor where the host's loader looks.
            Err(NvmlError::LibloadingError(_)) if library.is_relative() => {
                Err(self.no_library(NVML, NVML_PACKAGE))
            }
            // The loader only says that a file is missing; this message says what installs it.
            Err(NvmlError::LibloadingError(_)) if !library.exists() => {
                Err(ProbeError::NoNvml { library, package: NVML_PACKAGE })
            }
            Err(error @ NvmlError::LibloadingError(_)) => Err(failed(&library, "load", &error)),
            Err(error) => Err(failed(&library, "initialize", &error)),
        }
    }
}

fn failed(library: &Path, what: &str, error: &NvmlError) -> ProbeError {
    ProbeError::Nvml { library: library.to_owned(), what: what.to_owned(), why: safe(&error.to_string()) }
}

/// The required majors, and those that may be missing.
#[derive(Clone, Copy)]
struct KnownMajors {
    nvidia: u32,
    uvm: u32,
    all: Majors,
}

fn majors(root: &Path) -> Result<KnownMajors, ProbeError> {
    let path = under(root, "/proc/devices");
    let text = fs::read_proc_devices(root)
        .map_err(|source| ProbeError::Unreadable { path: path.clone(), source })?;
    let all = Majors::parse(&text);
    let missing = |module, remedy| ProbeError::NoMajor { module, path: path.clone(), remedy };
    Ok(KnownMajors {
        nvidia: all.nvidia.ok_or_else(|| missing("nvidia", "run `modprobe nvidia`"))?,
        uvm: all.uvm.ok_or_else(|| {
            missing("nvidia-uvm", "run `modprobe nvidia-uvm`, then `nvidia-modprobe -u -c0`")
        })?,
        all,
    })
}

/// A connection to NVML, and what its errors have to name.
struct Asked<'a> {
    nvml: Nvml,
    library: PathBuf,
    host: &'a Host<'a>,
}

impl Asked<'_> {
    /// Every GPU that can be served, each followed by its MIG devices, and the others.
    fn devices(&self, seen: &Seen, majors: KnownMajors) -> Result<(Vec<Device>, Vec<LeftOut>), ProbeError> {
        let root = &self.host.config.driver.root;
        let node = |path: &str, major, minor| Node { path: path.into(), major, minor };
        check_node(root, &node("/dev/nvidiactl", majors.nvidia, CTL_MINOR))?;
        check_node(root, &node("/dev/nvidia-uvm", majors.uvm, 0))?;
        let count = self.nvml.device_count();
        let count = count.map_err(|error| failed(&self.library, "count the GPUs", &error))?;
        let (mut devices, mut silent) = (Vec::new(), Vec::new());
        for index in 0..count {
            match self.device(index, seen, majors) {
                Ok((gpu, parts)) => {
                    devices.push(gpu);
                    devices.extend(parts);
                }
                Err(why) => silent.push((index, why)),
            }
        }
        // What was known of the GPUs of this boot.
        let known = |before: &Inventory| before.fingerprint.boot_id == seen.fingerprint.boot_id;
        let before = cache::last(self.host.config).ok().filter(known);
        let left_out = LeftOutGpus { root, seen, before: before.as_ref() }.name(silent, &devices);
        if devices.is_empty() && left_out.is_empty() {
            return Err(ProbeError::NoGpu { version: self.host.module.version.clone() });
        }
        Ok((devices, left_out))
    }

    /// GPU `index` and its MIG devices, or why no container can have it.
    fn device(&self, index: u32, seen: &Seen, majors: KnownMajors) -> Result<(Device, Vec<Device>), Silent> {
        let root = &self.host.config.driver.root;
        let device = self.nvml.device_by_index(index).map_err(|error| Silent::of(&error, None))?;
        let bus_id = nvml::bus_id(&device).ok();
        let described = nvml::describe(&device, index, majors.nvidia).and_then(|gpu| {
            let parts = nvml::parts(&device, &gpu, root, majors.all.caps)?;
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

#[cfg(test)]
#[path = "inventory_tests.rs"]
mod tests;
