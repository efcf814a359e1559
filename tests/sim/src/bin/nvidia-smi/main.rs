//! `nvidia-smi` of the simulated driver: the commands that sublet runs, and common ones that people type.
//!
//! Texts and exit codes follow the real program as far as they are known. The output of `compute-policy` is not known.

mod mig;
mod raw;

use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use nvidia_ml::layout::state_file::State;
use nvidia_ml::layout::topology::Topology;
use nvidia_ml::layout::{Root, health};
use nvml_wrapper::enum_wrappers::device::ComputeMode;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

/// nvml-wrapper has no name for it.
const INSUFFICIENT_RESOURCES: u32 = 23;

const USAGE: &str = "nvidia-smi (simulated): -L | [-i ID] -c MODE | [-i ID] [--query-gpu=F,… --format=csv[,…]] \
                     | --query-compute-apps=pid,used_memory --format=csv,noheader,nounits \
                     | compute-policy [-i ID] --set-timeslice 0..3 | compute-policy [-i ID] --list \
                     | [-i ID] -mig 0|1 | [-i ID] --gpu-reset | mig [-i ID] [-gi N] [-ci N] \
                     -lgip | -lgipp | -lgi | -lci | -lcip | -cgi PROFILES [-C] | -dgi | -cci [PROFILES] | -dci";

/// The options on the command line.
#[derive(Default)]
struct Options {
    id: Option<String>,
    list: bool,
    compute_mode: Option<String>,
    query: Option<String>,
    query_apps: Option<String>,
    format: String,
    policy: bool,
    timeslice: Option<u32>,
    mig_mode: Option<bool>,
    reset: bool,
    mig: Option<mig::Options>,
}

fn main() -> ExitCode {
    let options = match Options::parse() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error:#}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match nvml().map_err(anyhow::Error::from).and_then(|nvml| run(&nvml, &options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

/// NVML's text for an error.
fn text_of(error: &NvmlError) -> &'static str {
    match error {
        NvmlError::NotSupported => "Not Supported",
        NvmlError::NoPermission => "Insufficient Permissions",
        NvmlError::InUse => "In use by another client",
        NvmlError::UnexpectedVariant(INSUFFICIENT_RESOURCES) => "Insufficient Resources",
        NvmlError::InvalidArg => "Invalid Argument",
        NvmlError::ResetRequired => "Reset Required",
        NvmlError::NotFound => "Not Found",
        _ => "Unknown Error",
    }
}

/// Exit codes of nvidia-smi(1) are NVML's numbers, as far as they are known: 3 not supported, 4 no permission, 6 not
/// found, 9 no driver. 18 was seen for a version mismatch.
fn fail(error: &anyhow::Error) -> ExitCode {
    let by_mig = error.to_string().starts_with("Failed to");
    match error.downcast_ref::<NvmlError>() {
        Some(nvml) if by_mig => {
            println!("{error}: {}", text_of(nvml));
            ExitCode::from(match nvml {
                NvmlError::NotSupported => 3,
                NvmlError::NoPermission => 4,
                NvmlError::InUse => 19,
                NvmlError::UnexpectedVariant(INSUFFICIENT_RESOURCES) => 23,
                _ => 2,
            })
        }
        Some(NvmlError::DriverNotLoaded | NvmlError::LibloadingError(_)) => {
            println!(
                "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. \
                 Make sure that the latest NVIDIA driver is installed and running.\n"
            );
            ExitCode::from(9)
        }
        Some(NvmlError::LibRmVersionMismatch) => {
            println!("Failed to initialize NVML: Driver/library version mismatch");
            ExitCode::from(18)
        }
        Some(NvmlError::NoPermission) => {
            println!("{error:#}: Insufficient Permissions\nTerminating early due to previous errors.");
            ExitCode::from(4)
        }
        Some(NvmlError::NotFound) => {
            println!("No devices were found");
            ExitCode::from(6)
        }
        _ => {
            println!("{error:#}");
            ExitCode::from(2)
        }
    }
}

/// The library of the same root, or in a container the one that the loader finds.
fn nvml() -> Result<Nvml, NvmlError> {
    let library = Root::of_program().map(|root| root.libraries().join("libnvidia-ml.so.1"));
    let library = library.unwrap_or_else(|| "libnvidia-ml.so.1".into());
    Nvml::builder().lib_path(library.as_os_str()).init()
}

impl Options {
    fn parse() -> Result<Self> {
        let mut options = Self::default();
        let all: Vec<String> = std::env::args().skip(1).collect();
        if let [first, rest @ ..] = &all[..] {
            if first == "mig" {
                let mig = mig::Options::parse(rest)?;
                return Ok(Self { id: mig.id.clone(), mig: Some(mig), ..Self::default() });
            }
        }
        let mut arguments = all.into_iter();
        while let Some(argument) = arguments.next() {
            let (name, value) = match argument.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (argument, None),
            };
            let mut value = || value.clone().or_else(|| arguments.next()).context("a value is missing");
            match name.as_str() {
                "compute-policy" => options.policy = true,
                "-L" | "--list-gpus" => options.list = true,
                "-l" | "--list" if options.policy => options.list = true,
                "-i" | "--id" => options.id = Some(value()?),
                "-c" | "--compute-mode" => options.compute_mode = Some(value()?),
                "-mig" | "--multi-instance-gpu" => {
                    options.mig_mode = Some(match value()?.as_str() {
                        "0" | "DISABLED" => false,
                        "1" | "ENABLED" => true,
                        other => bail!("MIG mode {other} is not 0 or 1"),
                    });
                }
                "-r" | "--gpu-reset" => options.reset = true,
                "--query-gpu" => options.query = Some(value()?),
                "--query-compute-apps" => options.query_apps = Some(value()?),
                "--format" => options.format = value()?,
                "--set-timeslice" => options.timeslice = Some(value()?.parse()?),
                other => bail!("Invalid combination of input arguments: {other}"),
            }
        }
        ensure!(options.timeslice.is_none_or(|slice| slice <= 3), "the timeslice is 0 to 3");
        ensure!(options.timeslice.is_none() || options.policy, "--set-timeslice belongs to compute-policy");
        Ok(options)
    }
}

fn run(nvml: &Nvml, options: &Options) -> Result<()> {
    let devices = devices(nvml, options.id.as_deref())?;
    if let Some(mig) = &options.mig {
        return mig::run(&devices, mig);
    }
    if let Some(query) = &options.query {
        return query_gpu(nvml, &devices, query, &options.format);
    }
    if let Some(query) = &options.query_apps {
        return query_compute_apps(&devices, query, &options.format);
    }
    let changes = options.compute_mode.is_some() || options.mig_mode.is_some() || options.reset;
    if !options.policy && !options.list && !changes {
        println!("NVIDIA-SMI {0}  Driver Version: {0}  SIMULATED", nvml.sys_driver_version()?);
    }
    for device in &devices {
        if let Some(slice) = options.timeslice {
            set_timeslice(device, slice)?;
        } else if options.policy {
            println!("GPU {}: timeslice {}", device.index()?, timeslice(device)?);
        } else if let Some(mode) = &options.compute_mode {
            set_compute_mode(device, mode)?;
        } else if let Some(on) = options.mig_mode {
            set_mig_mode(device, on)?;
        } else if options.reset {
            reset(device)?;
        } else if options.list {
            list(device)?;
        } else {
            row(device)?;
        }
    }
    Ok(())
}

/// Every GPU, or the one with this index, UUID or bus id.
fn devices<'nvml>(nvml: &'nvml Nvml, id: Option<&str>) -> Result<Vec<Device<'nvml>>> {
    let Some(id) = id else {
        return (0..nvml.device_count()?).map(|index| Ok(nvml.device_by_index(index)?)).collect();
    };
    let device = match id.parse() {
        Ok(index) if index >= nvml.device_count()? => Err(NvmlError::NotFound),
        Ok(index) => nvml.device_by_index(index),
        Err(_) if id.contains(':') => nvml.device_by_pci_bus_id(id),
        Err(_) => nvml.device_by_uuid(id),
    };
    Ok(vec![device?])
}

fn list(device: &Device<'_>) -> Result<()> {
    println!("GPU {}: {} (UUID: {})", device.index()?, device.name()?, device.uuid()?);
    for index in 0..device.mig_device_count()? {
        let Ok(mig) = device.mig_device_by_index(index) else { break };
        let name = mig.name()?;
        let profile = name.rsplit(' ').next().unwrap_or_default();
        println!("  MIG {profile:<11} Device {index:>2}: (UUID: {})", mig.uuid()?);
    }
    Ok(())
}

fn row(device: &Device<'_>) -> Result<()> {
    let memory = device.memory_info()?;
    println!(
        "| {:>3}  {:<28} {} | {:>7}MiB / {:>7}MiB | {:?} |",
        device.index()?,
        device.name()?,
        device.pci_info()?.bus_id,
        memory.used >> 20,
        memory.total >> 20,
        device.compute_mode()?
    );
    for process in device.running_compute_processes()? {
        println!("|      pid {:<10} {:?}", process.pid, process.used_gpu_memory);
    }
    Ok(())
}

fn set_compute_mode(device: &Device<'_>, word: &str) -> Result<()> {
    let (mode, name) = match word {
        "0" | "DEFAULT" => (ComputeMode::Default, "DEFAULT"),
        "2" | "PROHIBITED" => (ComputeMode::Prohibited, "PROHIBITED"),
        "3" | "EXCLUSIVE_PROCESS" => (ComputeMode::ExclusiveProcess, "EXCLUSIVE_PROCESS"),
        other => bail!("Compute mode {other} is not one of DEFAULT, PROHIBITED, EXCLUSIVE_PROCESS"),
    };
    let bus_id = device.pci_info()?.bus_id;
    // The wrapper's method needs a `&mut Device`, so this is a separate one.
    let mut own = device.nvml().device_by_uuid(device.uuid()?)?;
    own.set_compute_mode(mode)
        .with_context(|| format!("Unable to set the compute mode to {name} for GPU {bus_id}"))?;
    println!("Set compute mode to {name} for GPU {bus_id}.\nAll done.");
    Ok(())
}

fn set_mig_mode(device: &Device<'_>, on: bool) -> Result<()> {
    let bus_id = device.pci_info()?.bus_id;
    let (done, word) = if on { ("Enabled", "enable") } else { ("Disabled", "disable") };
    match raw::Mig::new(device)
        .set_mode(on)
        .with_context(|| format!("Unable to {word} MIG Mode for GPU {bus_id}"))?
    {
        Ok(()) => println!("{done} MIG Mode for GPU {bus_id}\nAll done."),
        Err(error) => {
            println!("Warning: MIG mode is in pending {word} state for GPU {bus_id}:{}", text_of(&error));
        }
    }
    Ok(())
}

/// NVML has no call for it. No process may have a context.
fn reset(device: &Device<'_>) -> Result<()> {
    ensure!(nix::unistd::geteuid().is_root(), NvmlError::NoPermission);
    let (uuid, bus_id) = (device.uuid()?, device.pci_info()?.bus_id);
    let processes = device.running_compute_processes()?;
    ensure!(processes.is_empty(), "GPU {bus_id} could not be reset: In use by another client");
    let root = Root::of_program().context("no simulated driver here")?;
    let topology = Topology::load(&root)?;
    let gpu = topology.gpu.iter().find(|gpu| gpu.uuid == uuid).context("no such GPU")?;
    State::change_mig(&root, &topology, |state| {
        state.reset(gpu);
        Ok::<_, anyhow::Error>(())
    })??;
    health::reset(&root, gpu.index)?;
    println!("GPU {bus_id} was successfully reset.\nAll done.");
    Ok(())
}

/// NVML has no call for it.
fn set_timeslice(device: &Device<'_>, slice: u32) -> Result<()> {
    ensure!(nix::unistd::geteuid().is_root(), NvmlError::NoPermission);
    let uuid = device.uuid()?;
    let root = Root::of_program().context("no simulated driver here")?;
    State::update(&root, |state| state.timeslice.insert(uuid, slice))?;
    println!("Set timeslice to {slice} for GPU {}.", device.pci_info()?.bus_id);
    Ok(())
}

fn timeslice(device: &Device<'_>) -> Result<u32> {
    let root = Root::of_program().context("no simulated driver here")?;
    Ok(State::read(&root)?.timeslice.get(&device.uuid()?).copied().unwrap_or(0))
}

fn query_gpu(nvml: &Nvml, devices: &[Device<'_>], query: &str, format: &str) -> Result<()> {
    let fields: Vec<&str> = query.split(',').map(str::trim).collect();
    let units = !format.contains("nounits");
    if !format.contains("noheader") {
        println!("{}", fields.join(", "));
    }
    for device in devices {
        let values: Result<Vec<_>> =
            fields.iter().map(|field| value_of(nvml, device, field, units)).collect();
        println!("{}", values?.join(", "));
    }
    Ok(())
}

/// The processes that NVML lists.
fn query_compute_apps(devices: &[Device<'_>], query: &str, format: &str) -> Result<()> {
    ensure!(
        query == "pid,used_memory" && format == "csv,noheader,nounits",
        "only --query-compute-apps=pid,used_memory --format=csv,noheader,nounits is simulated"
    );
    for device in devices {
        for process in device.running_compute_processes()? {
            let mib = match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => (bytes >> 20).to_string(),
                UsedGpuMemory::Unavailable => "[N/A]".to_owned(),
            };
            println!("{}, {mib}", process.pid);
        }
    }
    Ok(())
}

fn value_of(nvml: &Nvml, device: &Device<'_>, field: &str, units: bool) -> Result<String> {
    let mib = |bytes: u64| format!("{}{}", bytes >> 20, if units { " MiB" } else { "" });
    Ok(match field {
        "index" => device.index()?.to_string(),
        "uuid" | "gpu_uuid" => device.uuid()?,
        "name" | "gpu_name" => device.name()?,
        "pci.bus_id" | "gpu_bus_id" => device.pci_info()?.bus_id,
        "driver_version" => nvml.sys_driver_version()?,
        "count" => nvml.device_count()?.to_string(),
        "memory.total" => mib(device.memory_info()?.total),
        "memory.used" => mib(device.memory_info()?.used),
        "memory.free" => mib(device.memory_info()?.free),
        "compute_cap" => {
            let capability = device.cuda_compute_capability()?;
            format!("{}.{}", capability.major, capability.minor)
        }
        "compute_mode" => match device.compute_mode()? {
            ComputeMode::Default => "Default".into(),
            ComputeMode::ExclusiveProcess => "Exclusive_Process".into(),
            ComputeMode::Prohibited => "Prohibited".into(),
            ComputeMode::ExclusiveThread => "Exclusive_Thread".into(),
        },
        "mig.mode.pending" => match device.mig_mode() {
            Ok(mode) if mode.pending == 1 => "Enabled".into(),
            Ok(_) => "Disabled".into(),
            Err(_) => "[N/A]".into(),
        },
        "mig.mode.current" => match device.mig_mode() {
            Ok(mode) if mode.current == 1 => "Enabled".into(),
            Ok(_) => "Disabled".into(),
            Err(_) => "[N/A]".into(),
        },
        other => bail!("Field \"{other}\" is not a valid field to query."),
    })
}
