//! The real driver, through NVML.

use std::cmp::Reverse;
use std::collections::btree_map::{BTreeMap, Entry};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml as Library};
use nvml_wrapper_sys::bindings::{NVML_COMPUTE_INSTANCE_PROFILE_COUNT, NVML_GPU_INSTANCE_PROFILE_COUNT};

use super::{Answer, Compute, ComputeProfile, Driver, Gpu, Instance, Mode, Profile, Running, Span};
use crate::nvml_mig::{self, Gi, instance_ids};
use crate::probe::{self, MigIds, ProbeError, unless_unsupported};
use sublet_core::config::Config;
use sublet_core::inventory::Inventory;
use sublet_core::ledger::Ledger;
use sublet_core::process::Process;
use sublet_core::process::child::{self, ChildError};
use sublet_core::text::safe;

/// An answer of NVML.
type NvmlResult<T> = Result<T, NvmlError>;

/// A reset of a large GPU takes some ten seconds.
const RESET_LIMIT: Duration = Duration::from_secs(120);

/// Architectures from this compute capability on change MIG mode without a reset (MIG User Guide, "MIG mode
/// is persistent until reset" and the text behind it: Ampere needs one, Hopper and later do not).
const NO_RESET_FROM: i32 = 9;

/// NVML, and nvidia-smi for a reset.
pub struct Nvml {
    /// `None` only while a GPU is reset, because an open NVML prevents that.
    library: Option<Library>,
    path: PathBuf,
    smi: Option<PathBuf>,
    /// By GPU.
    known: BTreeMap<String, Known>,
}

/// The possible profiles of a GPU. They are asked for once, because no step changes them.
#[derive(Default)]
struct Known {
    profiles: Vec<Profile>,
    /// By id of the GPU instance's profile.
    kinds: BTreeMap<u32, Vec<ComputeProfile>>,
}

impl Nvml {
    /// Loads and initializes NVML.
    pub fn open(config: &Config, inventory: &Inventory) -> Result<Self, ProbeError> {
        let (library, path) = probe::connect(config)?;
        Ok(Self { library: Some(library), path, smi: inventory.driver.smi.clone(), known: BTreeMap::new() })
    }

    /// The GPUs of the inventory, as far as they are [`super::answering`].
    pub fn gpus(&mut self, inventory: &Inventory) -> Answer<Vec<Gpu>> {
        super::answering(inventory.gpus().map(|device| &*device.uuid), self)
    }

    /// The same, with the users of their instances.
    pub fn seen(&mut self, inventory: &Inventory, ledger: &Ledger) -> Answer<Vec<Gpu>> {
        let mut gpus = self.gpus(inventory)?;
        for gpu in &mut gpus {
            // The server of a daemon without leases does not count: it ends before a layout changes.
            gpu.running.retain(|running| !waits(running.pid, ledger));
            gpu.mark(ledger);
        }
        Ok(gpus)
    }

    fn on<T>(&self, gpu: &str, action: &str, ask: impl FnOnce(&Device<'_>) -> NvmlResult<T>) -> Answer<T> {
        let library = self.library.as_ref().ok_or_else(|| failed(action, &NvmlError::Uninitialized))?;
        probe::device_by_uuid(library, gpu)
            .and_then(|device| ask(&device))
            .map_err(|error| failed(action, &error))
    }
}

/// Whether `pid` is the server of a daemon that serves no lease.
fn waits(pid: u32, ledger: &Ledger) -> bool {
    let parent = i32::try_from(pid).ok().and_then(Process::find).and_then(|process| process.parent());
    let unused = ledger.daemons.iter().filter(|server| ledger.on_daemon(&server.key).next().is_none());
    parent.is_some() && unused.filter_map(|server| server.process).any(|daemon| Some(daemon.pid) == parent)
}

fn failed(action: &str, error: &NvmlError) -> anyhow::Error {
    let why = match error {
        NvmlError::NoPermission => format!("{error}; run as root"),
        NvmlError::InUse => {
            format!("{error}; a process has it open: `nvidia-smi` and `fuser -v /dev/nvidia*` show which")
        }
        NvmlError::UnexpectedVariant(NO_ROOM) => "there is no room for it".to_owned(),
        NvmlError::UnexpectedVariant(code) => format!("NVML error {code}"),
        other => safe(&other.to_string()),
    };
    anyhow!("NVML, {action}: {why}")
}

/// `NVML_ERROR_INSUFFICIENT_RESOURCES` (nvml.h), which nvml-wrapper has no name for.
const NO_ROOM: u32 = 23;

impl Driver for Nvml {
    fn gpu(&mut self, gpu: &str) -> Answer<Gpu> {
        self.on(gpu, &format!("looking at {gpu}"), describe)
    }

    fn instances(&mut self, gpu: &str) -> Answer<Vec<Instance>> {
        let mut known = self.known.remove(gpu).unwrap_or_default();
        let found = self.on(gpu, "listing the instances", |device| {
            if known.profiles.is_empty() {
                known.profiles = profiles(device)?;
            }
            instances(device, &mut known)
        });
        self.known.insert(gpu.to_owned(), known);
        found
    }

    fn mode(&mut self, gpu: &str) -> Answer<Option<Mode>> {
        self.on(gpu, "asking for the MIG mode", mode)
    }

    fn set_mode(&mut self, gpu: &str, on: bool) -> Answer<()> {
        self.known.remove(gpu);
        // The result is read afterwards, because drivers return different codes here.
        self.on(gpu, "switching MIG mode", |device| device.set_mig_mode(on).map(drop))
    }

    fn reset(&mut self, gpu: &str) -> Answer<()> {
        let smi = self.smi.as_ref().context("nvidia-smi --gpu-reset: nvidia-smi is not installed")?;
        let mut command = std::process::Command::new(smi);
        command.env_clear().env("PATH", sublet_core::process::sublet::PATH).args(["--gpu-reset", "-i", gpu]);
        // A program that has the GPU open prevents its reset, and NVML has it open.
        self.library = None;
        let done = child::run(&mut command, "", RESET_LIMIT);
        let again = probe::open(&self.path).map_err(|error| failed("starting again", &error));
        self.library = Some(again?);
        let why = match done {
            Ok(done) if done.status.success() => return Ok(()),
            Ok(done) => safe(format!("{}{}", done.stdout, done.stderr).trim()),
            Err(ChildError::Timeout) => format!("it did not end within {} s", RESET_LIMIT.as_secs()),
            Err(ChildError::Io(why)) => why.to_string(),
        };
        bail!("nvidia-smi --gpu-reset: {why}")
    }

    fn create_instance(&mut self, gpu: &str, profile: u32, span: Span) -> Answer<u32> {
        self.on(gpu, "creating a GPU instance", |device| {
            Ok(nvml_mig::create_instance(device, profile, span)?.id)
        })
    }

    fn destroy_instance(&mut self, gpu: &str, gi: u32) -> Answer<()> {
        self.on(gpu, "destroying a GPU instance", |device| nvml_mig::instance(device, gi)?.destroy())
    }

    fn create_compute(&mut self, gpu: &str, gi: u32, slices: u32, span: Option<Span>) -> Answer<()> {
        self.on(gpu, "creating a compute instance", |device| {
            let gi = nvml_mig::instance(device, gi)?;
            let kind = kinds(&gi)?.into_iter().find(|kind| kind.slices == slices);
            gi.create(&kind.ok_or(NvmlError::NotSupported)?, span)
        })
    }

    fn destroy_compute(&mut self, gpu: &str, gi: u32, ci: u32) -> Answer<()> {
        self.on(gpu, "destroying a compute instance", |device| {
            nvml_mig::instance(device, gi)?.destroy_compute(ci)
        })
    }
}

fn describe(device: &Device<'_>) -> NvmlResult<Gpu> {
    let mode = mode(device)?;
    let profiles = if mode.is_some() { profiles(device)? } else { Vec::new() };
    let mut known = Known { profiles, kinds: BTreeMap::new() };
    let on = mode.is_some_and(|mode| mode.current);
    let instances = if on { instances(device, &mut known)? } else { Vec::new() };
    Ok(Gpu {
        uuid: device.uuid()?,
        index: device.index()?,
        name: device.name()?,
        pci_device: device.pci_info()?.pci_device_id,
        mode,
        resets: device.cuda_compute_capability()?.major < NO_RESET_FROM,
        profiles: known.profiles,
        instances,
        running: running(device)?,
        held: Vec::new(),
    })
}

fn mode(device: &Device<'_>) -> NvmlResult<Option<Mode>> {
    let mode = unless_unsupported(device.mig_mode())?;
    Ok(mode.map(|mode| Mode { current: mode.current == 1, pending: mode.pending == 1 }))
}

/// Any one GPU lacks most entries of such a list, and older drivers lack later entries and calls.
fn unless_unknown<T>(answer: NvmlResult<T>) -> NvmlResult<Option<T>> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(
            NvmlError::InvalidArg
            | NvmlError::NotSupported
            | NvmlError::FunctionNotFound
            | NvmlError::FailedToLoadSymbol(_),
        ) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The profiles of the GPU, largest first.
fn profiles(device: &Device<'_>) -> NvmlResult<Vec<Profile>> {
    let mut found: Vec<Profile> = Vec::new();
    for index in 0..NVML_GPU_INSTANCE_PROFILE_COUNT {
        let Some(mut profile) = unless_unknown(nvml_mig::profile(device, index))? else { continue };
        profile.placements = unless_unknown(nvml_mig::placements(device, profile.id))?.unwrap_or_default();
        // For display only: planning does not use it, so a driver that does not report it is no error.
        profile.free = nvml_mig::remaining(device, profile.id).unwrap_or(0);
        found.push(profile);
    }
    found.sort_by_cached_key(|one| (Reverse((one.slices, one.memory_mib)), one.name.clone()));
    Ok(found)
}

fn instances(device: &Device<'_>, known: &mut Known) -> NvmlResult<Vec<Instance>> {
    let uuids = probe::mig_ids(device)?;
    let mut found = Vec::new();
    for profile in &known.profiles {
        for gi in unless_unknown(nvml_mig::instances(device, profile))?.unwrap_or_default() {
            let kinds = match known.kinds.entry(gi.profile) {
                Entry::Occupied(kinds) => kinds.into_mut(),
                Entry::Vacant(none) => none.insert(kinds(&gi)?),
            };
            found.push(instance(&gi, kinds, &uuids)?);
        }
    }
    found.sort_by_key(|one: &Instance| one.span);
    Ok(found)
}

/// The kinds of compute instance, each once: some drivers list the same one under two indexes.
fn kinds(gi: &Gi<'_>) -> NvmlResult<Vec<ComputeProfile>> {
    let mut found: Vec<ComputeProfile> = Vec::new();
    for index in 0..NVML_COMPUTE_INSTANCE_PROFILE_COUNT {
        let Some(mut kind) = unless_unknown(gi.profile_at(index))? else { continue };
        if !found.iter().any(|known| known.id == kind.id) {
            kind.placements = unless_unknown(gi.placements(&kind))?.unwrap_or_default();
            found.push(kind);
        }
    }
    Ok(found)
}

fn instance(gi: &Gi<'_>, kinds: &[ComputeProfile], uuids: &[MigIds]) -> NvmlResult<Instance> {
    let mut compute = Vec::new();
    for kind in kinds {
        for (ci, span) in gi.compute(kind)? {
            let known = uuids.iter().find(|(_, g, c)| (*g, *c) == (gi.id, ci));
            let uuid = known.map(|(uuid, ..)| uuid.clone()).unwrap_or_default();
            compute.push(Compute { ci, slices: kind.slices, span, uuid, held: None });
        }
    }
    compute.sort_by_key(|one| one.span);
    let kinds = kinds.to_vec();
    Ok(Instance { gi: gi.id, profile: gi.profile, span: gi.span, held: None, kinds, compute })
}

/// The processes of the GPU and of each MIG device. Without privileges only the MIG devices list any.
fn running(device: &Device<'_>) -> NvmlResult<Vec<Running>> {
    let mut found = Vec::new();
    let whole = [probe::compute_processes(device)?, probe::graphics_processes(device)?];
    for process in whole.into_iter().flatten() {
        let (gi, ci) = (process.gpu_instance_id, process.compute_instance_id);
        found.push(Running { pid: process.pid, gi, ci });
    }
    for mig in probe::mig_handles(device)? {
        let (gi, ci) = instance_ids(&mig)?;
        for process in probe::compute_processes(&mig)? {
            found.push(Running { pid: process.pid, gi: Some(gi), ci: Some(ci) });
        }
    }
    // The GPU may list the same process again without its instance.
    let located: Vec<u32> = found.iter().filter(|one| one.ci.is_some()).map(|one| one.pid).collect();
    found.retain(|one| one.ci.is_some() || !located.contains(&one.pid));
    found.sort_by_key(|one| (one.pid, one.gi, one.ci));
    found.dedup();
    Ok(found)
}
