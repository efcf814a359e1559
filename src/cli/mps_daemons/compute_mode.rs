//! Compute mode `EXCLUSIVE_PROCESS` under a shared server, so that no process runs outside it: recorded, set and
//! restored. Also finds processes that run outside the server.

use std::{fmt, fs};

use anyhow::{Context as _, anyhow, bail};
use nvml_wrapper::enum_wrappers::device::ComputeMode as NvmlMode;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device as NvmlDevice, Nvml};

use super::Daemon;
use crate::probe;
use sublet_core::config::{Config, ExclusiveComputeMode};
use sublet_core::inventory::{self, ComputeMode};
use sublet_core::ledger::{ChangedComputeMode, DaemonKey, Lease, Ledger, Store};
use sublet_core::mps::{MpsError, limits_and_state};
use sublet_core::process::Process;
use sublet_core::text::safe;

/// The change of the compute mode before a start.
#[derive(Debug, Default)]
pub(super) struct Entered {
    /// It was changed now, so a failed start restores it.
    pub changed: bool,
    /// Why it was not changed although the configuration asks for it.
    pub warning: Option<String>,
    /// The driver refuses the change while the daemon's server has the GPU; without the server it may work.
    pub beside_server: bool,
}

/// Sets `EXCLUSIVE_PROCESS` for a shared server of a whole GPU as `[mps] exclusive_compute_mode` says.
///
/// # Errors
/// The policy is `always` and the mode cannot be set, or the GPU's mode allows no contexts at all.
pub(super) fn enter(daemon: Daemon<'_>) -> Result<Entered, MpsError> {
    let Daemon { key, store, config } = daemon;
    let policy = config.mps.exclusive_compute_mode;
    // It says whether this is a whole GPU. The lease for which the server starts was placed by an up-to-date one, and
    // meanwhile instances of other GPUs may have changed: it need not be up to date any more.
    let inventory = inventory::last(config)?;
    // Dedicated servers would exclude each other in this mode, and MIG devices have no compute mode of their own.
    let whole = inventory.device(&key.0).is_some_and(|device| !device.is_mig() && !device.mig_enabled);
    if policy == ExclusiveComputeMode::Never || !whole {
        return Ok(Entered::default());
    }
    let error = match try_enter(daemon) {
        Ok(changed) => return Ok(Entered { changed, ..Entered::default() }),
        Err(error) => error.downcast::<MpsError>().map_or_else(Ok, Err)?,
    };
    if error.is::<Refused>() && store.read()?.daemon(key).is_some_and(limits_and_state::is_alive) {
        return Ok(Entered { beside_server: true, ..Entered::default() });
    }
    if policy != ExclusiveComputeMode::Auto {
        return Err(MpsError::ComputeMode { device: key.0.clone(), why: error.to_string() });
    }
    let warning = format!(
        "the compute mode of {key} was not changed ({error}), so a container that leaves MPS is not limited by its \
         share; [mps] exclusive_compute_mode = \"never\" silences this warning"
    );
    Ok(Entered { warning: Some(warning), ..Entered::default() })
}

/// The driver refused the change itself.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refused(NvmlError);

/// Whether the mode was changed.
///
/// # Errors
/// [`Refused`]; an [`MpsError`] of the ledger; any other says why the mode stays as it is.
fn try_enter(Daemon { key, store, config }: Daemon<'_>) -> anyhow::Result<bool> {
    let policy = config.mps.exclusive_compute_mode;
    let nvml = open(config)?;
    let mut device = probe::device_by_uuid(&nvml, &key.0)?;
    let found = device.compute_mode().map(probe::compute_mode)?;
    if found == ComputeMode::ExclusiveProcess {
        return Ok(false);
    }
    let strangers = strangers(&device, key, &store.read().map_err(MpsError::from)?)?;
    let display = probe::unless_unsupported(device.is_display_active());
    let display = display.map_err(|error| anyhow!("whether it drives a display: {error}"))?;
    if let Some(why) = obstacle(policy, found, display.unwrap_or(false), &strangers) {
        bail!(why);
    }
    limits_and_state::change(store, |ledger| {
        // An older record holds the original mode: sublet itself set the current one.
        if !ledger.compute_modes.iter().any(|changed| changed.device == key.0) {
            ledger.compute_modes.push(ChangedComputeMode { device: key.0.clone(), found });
        }
        Ok(())
    })?;
    if let Err(error) = device.set_compute_mode(NvmlMode::ExclusiveProcess) {
        forget(&key.0, store)?;
        return Err(Refused(error).into());
    }
    Ok(true)
}

/// Why the mode must stay as it is; `None` if it may be changed.
fn obstacle(
    policy: ExclusiveComputeMode,
    found: ComputeMode,
    display: bool,
    strangers: &[String],
) -> Option<String> {
    if found == ComputeMode::Prohibited {
        return Some("it is PROHIBITED, which somebody has set to keep all work off this GPU".into());
    }
    if policy == ExclusiveComputeMode::Always && strangers.is_empty() {
        return None;
    }
    if display && policy == ExclusiveComputeMode::Auto {
        return Some("the GPU drives a display".into());
    }
    (!strangers.is_empty()).then(|| format!("it is used without a lease by {}", strangers.join(", ")))
}

/// Restores the mode that [`enter`] found, unless another program has changed it meanwhile.
///
/// # Errors
/// NVML cannot be used. The record stays then, and the next command tries again.
pub(super) fn restore(Daemon { key, store, config }: Daemon<'_>) -> Result<(), MpsError> {
    let ledger = store.read()?;
    let Some(changed) = ledger.compute_modes.iter().find(|changed| changed.device == key.0) else {
        return Ok(());
    };
    let set = || -> anyhow::Result<()> {
        let nvml = open(config)?;
        let mut device = match probe::device_by_uuid(&nvml, &key.0) {
            // The GPU is gone, and its mode with it.
            Err(NvmlError::NotFound) => return Ok(()),
            device => device?,
        };
        if device.compute_mode().map(probe::compute_mode)? == ComputeMode::ExclusiveProcess {
            device.set_compute_mode(to_nvml(changed.found))?;
        }
        Ok(())
    };
    set().map_err(|error| MpsError::ComputeMode { device: key.0.clone(), why: error.to_string() })?;
    forget(&key.0, store)
}

fn forget(device: &str, store: &Store) -> Result<(), MpsError> {
    limits_and_state::change(store, |ledger| {
        ledger.compute_modes.retain(|changed| changed.device != device);
        Ok(())
    })
}

/// Processes of `key`'s leases that compute on the GPU without MPS, because they lost their daemon and continued
/// without it. One line for each, or one that says why it is not known.
pub(super) fn beside_mps(key: &DaemonKey, device: &str, ledger: &Ledger, config: &Config) -> Vec<String> {
    let look = || -> anyhow::Result<Vec<String>> {
        let nvml = open(config)?;
        let device = probe::device_by_uuid(&nvml, device)?;
        let clients = probe::mps_clients(&device)?.context("the driver does not list MPS clients")?;
        let running = probe::compute_processes(&device)?;
        let alone = running.iter().filter(|process| !clients.iter().any(|client| client.pid == process.pid));
        let found = alone.filter_map(|process| {
            let lease = owner(process.pid, ledger).filter(|lease| lease.daemon.as_ref() == Some(key))?;
            let (process, container) = (described(process.pid), safe(&lease.container.id));
            Some(format!(
                "process {process} of container {container} runs on {key} outside MPS, without limits, because the \
                 MPS daemon was gone when it started: end it"
            ))
        });
        Ok(found.collect())
    };
    look().unwrap_or_else(|why| {
        vec![format!(
            "the MPS daemon of {key} was gone, and it is not known whether processes of its containers \
             started outside MPS meanwhile, without limits: {}",
            safe(&why.to_string())
        )]
    })
}

/// The processes without a lease that keep a server off a GPU in `EXCLUSIVE_PROCESS` mode. They are added to a
/// refusal, which is made anyway, so errors are ignored.
pub(super) fn holders(key: &DaemonKey, device: &str, ledger: &Ledger, config: &Config) -> Vec<String> {
    let look = || -> Option<Vec<String>> {
        let nvml = open(config).ok()?;
        let device = probe::device_by_uuid(&nvml, device).ok()?;
        let mode = device.compute_mode().map(probe::compute_mode).ok()?;
        (mode == ComputeMode::ExclusiveProcess).then(|| strangers(&device, key, ledger).ok())?
    };
    look().unwrap_or_default()
}

/// The processes with a context on the device but without a lease, such as `python3 (pid 7)`. The server of `key`'s
/// own daemon does not count. A process that cannot be examined does.
fn strangers(device: &NvmlDevice<'_>, key: &DaemonKey, ledger: &Ledger) -> anyhow::Result<Vec<String>> {
    let running = probe::compute_processes(device).map_err(|error| anyhow!("who is on it: {error}"))?;
    let daemon = ledger.daemon(key).and_then(|daemon| daemon.process);
    let pid_of_daemon = daemon.filter(Process::is_alive).map(|daemon| daemon.pid);
    let parent = |pid: u32| Process::find(i32::try_from(pid).ok()?)?.parent();
    let is_server = |pid: u32| pid_of_daemon.is_some() && parent(pid) == pid_of_daemon;
    let stranger = |pid: &u32| !is_server(*pid) && owner(*pid, ledger).is_none();
    let pids = running.iter().map(|process| process.pid);
    let mut names: Vec<String> = pids.filter(stranger).map(described).collect();
    if names.len() > 4 {
        let more = names.len() - 3;
        names.truncate(3);
        names.push(format!("{more} more"));
    }
    Ok(names)
}

/// A process, as `python3 (pid 7)`.
pub(super) fn described(pid: impl fmt::Display) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    format!("{} (pid {pid})", safe(name.trim_end()))
}

/// The lease that process `pid` belongs to.
fn owner(pid: u32, ledger: &Ledger) -> Option<&Lease> {
    ledger.lease_of_process(&probe::describe(i32::try_from(pid).ok()?, 0)?)
}

fn open(config: &Config) -> anyhow::Result<Nvml> {
    probe::connect(config).map(|(nvml, _)| nvml).map_err(|error| anyhow!("NVML: {error}"))
}

const fn to_nvml(mode: ComputeMode) -> NvmlMode {
    match mode {
        ComputeMode::Default => NvmlMode::Default,
        ComputeMode::Prohibited => NvmlMode::Prohibited,
        ComputeMode::ExclusiveProcess => NvmlMode::ExclusiveProcess,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_gives_way_to_displays_and_strangers_and_names_them() {
        use ExclusiveComputeMode::{Always, Auto};
        let python = ["python3 (pid 7)".to_owned()];
        let default = ComputeMode::Default;
        assert_eq!(obstacle(Auto, default, false, &[]), None);
        assert_eq!(obstacle(Auto, default, true, &[]).unwrap(), "the GPU drives a display");
        assert!(obstacle(Auto, default, false, &python).unwrap().contains("python3 (pid 7)"));
        assert_eq!(obstacle(Always, default, true, &[]), None);
        assert!(obstacle(Always, default, false, &python).is_some());
        assert!(obstacle(Always, ComputeMode::Prohibited, false, &[]).is_some());
    }
}
