//! Builds the inventory from NVML, /proc, /dev and the library directories. Only the program `sublet` does this.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use super::cache::KernelModule;
use super::cache::SCHEMA;
use super::cache::Seen;
use super::device_nodes::{NodeError, check_node};
use super::driver_files::{Found, Machine};
use super::left_out::{LeftOutGpus, Silent};
use super::programs::{self, MissingPrograms, MpsPrograms};
use super::{
    Device, Driver, FileDirectory, Inventory, InventoryError, LeftOut, Majors, MigGpus, Node, cache,
    device_nodes, driver_files, mig_capabilities, nvml, under,
};
use sublet_core::config::{self, Config, Inject};
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
    let module = module(root)?;
    // Read before NVML is asked: a change in between makes the result stale, but not wrong.
    let seen = cache::read_seen(root)?;
    let found = driver_files::find(&config.driver, &module.version, Machine::HOST);
    check_libraries(config, &module, &found)?;
    let majors = majors(root)?;
    let asked = Asked { library: nvml_library(config, &module, &found)?, module: &module, root };
    let nvml = asked.init()?;
    let cuda = nvml::cuda_version(&nvml).unwrap_or_else(|error| {
        tracing::warn!("NVML does not tell CUDA's version: {error}");
        (0, 0)
    });
    let (devices, left_out) = asked.devices(&nvml, &seen, majors, before(config, &seen).as_ref())?;
    let (mps_control, mps_missing) = mps_programs(&config.driver);
    Ok(Inventory {
        schema: SCHEMA.to_owned(),
        fingerprint: seen.fingerprint,
        probed_at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        mig_changes: 0,
        driver: Driver {
            version: module.version.clone(),
            cuda,
            simulated: module.simulated,
            mps_control,
            mps_missing,
            smi: programs::program(&config.driver, "nvidia-smi"),
            majors: majors.all,
            mig_caps: mig_capabilities::privileged(root, majors.all.caps).map_err(unreadable)?,
        },
        devices,
        left_out,
        directories: FileDirectory::of(&found.files),
        files: found.files,
    })
}

/// What was known of the GPUs of this boot.
fn before(config: &Config, seen: &Seen) -> Option<Inventory> {
    let known = |before: &Inventory| before.fingerprint.boot_id == seen.fingerprint.boot_id;
    cache::last(config).ok().filter(known)
}

/// The GPUs that a refresh would leave out now.
pub(crate) fn left_out(config: &Config) -> Result<Vec<LeftOut>, ProbeError> {
    let root = &config.driver.root;
    let seen = cache::read_seen(root)?;
    let module = module(root)?;
    let found = driver_files::find(&config.driver, &module.version, Machine::HOST);
    let asked = Asked { library: nvml_library(config, &module, &found)?, module: &module, root };
    Ok(asked.devices(&asked.init()?, &seen, majors(root)?, before(config, &seen).as_ref())?.1)
}

fn unreadable((path, source): (PathBuf, io::Error)) -> ProbeError {
    ProbeError::Unreadable { path, source }
}

/// The control program if its server exists too; otherwise a warning if only one of them exists.
fn mps_programs(driver: &config::Driver) -> (Option<PathBuf>, Option<String>) {
    match MpsPrograms::find(driver).both(driver) {
        Ok((control, _)) => (Some(control.to_owned()), None),
        Err(MissingPrograms::Control { .. }) => (None, None),
        Err(missing) => (None, Some(missing.to_string())),
    }
}

/// GPUs in MIG mode and their MIG devices, read from NVML only.
pub(crate) fn mig_gpus(config: &Config) -> Result<MigGpus, ProbeError> {
    let (nvml, library) = connect(config)?;
    nvml::mig_gpus(&nvml).map_err(|error| ProbeError::Nvml {
        library,
        what: "list the MIG devices".to_owned(),
        why: safe(&error.to_string()),
    })
}

/// NVML of this host, and the library it is in.
pub(crate) fn connect(config: &Config) -> Result<(Nvml, PathBuf), ProbeError> {
    let root = &config.driver.root;
    let module = module(root)?;
    let found = driver_files::find(&config.driver, &module.version, Machine::HOST);
    let asked = Asked { library: nvml_library(config, &module, &found)?, module: &module, root };
    Ok((asked.init()?, asked.library))
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

fn module(root: &Path) -> Result<KernelModule, ProbeError> {
    let path = under(root, cache::VERSION_FILE);
    let module = match cache::loaded_kernel_module(root) {
        Ok(Some(module)) => module,
        Ok(None) => return Err(InventoryError::NoDriver { path }.into()),
        Err(source) => return Err(InventoryError::Unreadable { path, source }.into()),
    };
    let branch = module.version.split('.').next().and_then(|branch| branch.parse::<u32>().ok());
    if branch.is_some_and(|branch| branch < OLDEST_BRANCH) {
        return Err(ProbeError::TooOld { version: module.version });
    }
    Ok(module)
}

/// An upgrade without a reload of the module leaves only files of another version. NVML would refuse with
/// `NVML_ERROR_LIB_RM_VERSION_MISMATCH`, and CUDA in every container after it.
fn check_libraries(config: &Config, module: &KernelModule, found: &Found) -> Result<(), ProbeError> {
    if !found.other_versions.is_empty() {
        return Err(mismatch(module, &found.other_versions));
    }
    if config.driver.inject == Inject::None {
        return Ok(());
    }
    if found.library("libcuda.so.1").is_none() {
        let package = "Debian: apt install libcuda1, Red Hat: dnf install nvidia-driver-cuda-libs";
        return Err(no_library("libcuda.so.1", package, config, module));
    }
    if found.library("libnvidia-ptxjitcompiler.so.1").is_none() {
        tracing::warn!("libnvidia-ptxjitcompiler.so.1 is not installed, so PTX kernels fail in containers");
    }
    Ok(())
}

fn mismatch(module: &KernelModule, installed: &BTreeSet<String>) -> ProbeError {
    let installed = installed.iter().map(String::as_str).collect::<Vec<_>>().join(" and ");
    ProbeError::Mismatch { loaded: module.version.clone(), installed }
}

fn no_library(
    library: &'static str,
    package: &'static str,
    config: &Config,
    module: &KernelModule,
) -> ProbeError {
    ProbeError::NoLibrary {
        library,
        version: module.version.clone(),
        root: config.driver.root.clone(),
        package,
    }
}

/// The configured library, or the one below the root. If the root is the host's own, otherwise whatever its loader
/// finds by name.
fn nvml_library(config: &Config, module: &KernelModule, found: &Found) -> Result<PathBuf, ProbeError> {
    let library = "libnvidia-ml.so.1";
    if let Some(configured) = &config.driver.nvml {
        return Ok(configured.clone());
    }
    if let Some(found) = found.library(library) {
        return Ok(found.to_owned());
    }
    if config.driver.root == Path::new("/") {
        return Ok(library.into());
    }
    Err(no_library(library, NVML_PACKAGE, config, module))
}

const NVML_PACKAGE: &str = "Debian: apt install libnvidia-ml1, Red Hat: dnf install nvidia-driver-cuda-libs";

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
    library: PathBuf,
    module: &'a KernelModule,
    root: &'a Path,
}

impl Asked<'_> {
    fn init(&self) -> Result<Nvml, ProbeError> {
        nvml::init(&self.library).map_err(|error| match error {
            NvmlError::LibRmVersionMismatch => {
                let installed = BTreeSet::from([format!("another version ({})", self.library.display())]);
                mismatch(self.module, &installed)
            }
            // The bare name: it is neither below the root nor where the host's loader looks.
            NvmlError::LibloadingError(_) if self.library.is_relative() => ProbeError::NoLibrary {
                library: "libnvidia-ml.so.1",
                version: self.module.version.clone(),
                root: self.root.to_owned(),
                package: NVML_PACKAGE,
            },
            // The loader only says that a file is missing; this message says what installs it.
            NvmlError::LibloadingError(_) if !self.library.exists() => {
                ProbeError::NoNvml { library: self.library.clone(), package: NVML_PACKAGE }
            }
            NvmlError::LibloadingError(why) => self.failed("load", &NvmlError::LibloadingError(why)),
            other => self.failed("initialize", &other),
        })
    }

    fn failed(&self, what: impl Into<String>, error: &NvmlError) -> ProbeError {
        ProbeError::Nvml { library: self.library.clone(), what: what.into(), why: safe(&error.to_string()) }
    }

    /// Every GPU that can be served, each followed by its MIG devices, and the others.
    fn devices(
        &self,
        nvml: &Nvml,
        seen: &Seen,
        majors: KnownMajors,
        before: Option<&Inventory>,
    ) -> Result<(Vec<Device>, Vec<LeftOut>), ProbeError> {
        let node = |path: &str, major, minor| Node { path: path.into(), major, minor };
        check_node(self.root, &node("/dev/nvidiactl", majors.nvidia, CTL_MINOR))?;
        check_node(self.root, &node("/dev/nvidia-uvm", majors.uvm, 0))?;
        let count = nvml.device_count().map_err(|error| self.failed("count the GPUs", &error))?;
        let (mut devices, mut silent) = (Vec::new(), Vec::new());
        for index in 0..count {
            match self.device(nvml, index, seen, majors) {
                Ok((gpu, parts)) => {
                    devices.push(gpu);
                    devices.extend(parts);
                }
                Err(why) => silent.push((index, why)),
            }
        }
        let left_out = LeftOutGpus { root: self.root, seen, before }.name(silent, &devices);
        if devices.is_empty() && left_out.is_empty() {
            return Err(ProbeError::NoGpu { version: self.module.version.clone() });
        }
        Ok((devices, left_out))
    }

    /// GPU `index` and its MIG devices, or why no container can have it.
    fn device(
        &self,
        nvml: &Nvml,
        index: u32,
        seen: &Seen,
        majors: KnownMajors,
    ) -> Result<(Device, Vec<Device>), Silent> {
        let device = nvml.device_by_index(index).map_err(|error| Silent::of(&error, None))?;
        let bus_id = nvml::bus_id(&device).ok();
        let described = nvml::describe(&device, index, majors.nvidia).and_then(|gpu| {
            let parts = nvml::parts(&device, &gpu, self.root, majors.all.caps)?;
            Ok((gpu, parts))
        });
        let lost = bus_id.as_ref().is_some_and(|bus_id| seen.lost.contains(bus_id));
        let described = if lost { Err(NvmlError::GpuLost) } else { described };
        let (mut gpu, parts) = described.map_err(|error| Silent::of(&error, bus_id.clone()))?;
        gpu.dri_nodes =
            device_nodes::list_dri_nodes(self.root, &gpu.bus_id).unwrap_or_else(|(path, error)| {
                tracing::warn!("{}: {error}: GPU {index} gets no node below /dev/dri", path.display());
                Vec::new()
            });
        let node = gpu.nodes.iter().find_map(|node| check_node(self.root, node).err());
        node.map_or(Ok((gpu, parts)), |error| Err(Silent { bus_id, lost: false, why: error.to_string() }))
    }
}

#[cfg(test)]
#[path = "inventory_tests.rs"]
mod tests;
