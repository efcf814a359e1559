//! The rules between the keys of a request: which mode they imply and which of them contradict each other.

use super::error::{RequestError, Setting};
use super::keys::Keys;
use crate::config::{Config, Required};
use crate::share::{Action, Devices, Guarding, Isolation, MigCapability, Mode, Selector};

/// The mode that the keys name or imply, once nothing contradicts it. `None`: the device's
/// configuration decides.
pub(super) fn check(
    keys: &Keys<'_>,
    mode: Option<Mode>,
    devices: &Devices,
    isolation: Option<Isolation>,
    require: &[Required],
) -> Result<Option<Mode>, RequestError> {
    let mode = mode.or_else(|| implied_mode(keys, devices));
    if let Some(mode) = mode {
        check_mode(keys, mode, devices, isolation)?;
    }
    if are_several(devices) {
        check_several_devices(keys, mode, isolation)?;
    }
    check_required(keys, mode, require)?;
    Ok(mode)
}

/// Access beyond a container's own MIG device is possible only if root has allowed it.
pub(super) fn mig_caps(
    keys: &Keys<'_>,
    wanted: &[MigCapability],
    allowed: &[MigCapability],
) -> Result<(), RequestError> {
    if wanted.iter().all(|cap| allowed.contains(cap)) {
        return Ok(());
    }
    let with = "[mig] allow_caps of this host's configuration".to_owned();
    contradiction(
        keys.setting("mig-caps"),
        with,
        "it gives access to all MIG instances, so root has to allow it there",
    )
}

/// A container may choose a stricter guard for itself. Only root may choose a milder one.
pub(super) fn guarding(keys: &Keys<'_>, action: Action) -> Result<Guarding, RequestError> {
    if keys.is_of_share("guard") {
        return Ok(Guarding::Exactly(action));
    }
    if action == Action::Report {
        let with = "[guard] of this host's configuration".to_owned();
        contradiction(
            keys.setting("guard"),
            with,
            "a container cannot make the guard less strict on itself; root can do that in a [share]",
        )?;
    }
    Ok(Guarding::AtLeast(action))
}

/// The configured isolation, if the mode has one. A container with several devices has a dedicated MPS server.
pub(super) fn default_isolation(mode: Option<Mode>, devices: &Devices, config: &Config) -> Isolation {
    match mode {
        Some(Mode::Mps) if are_several(devices) => Isolation::Dedicated,
        Some(Mode::Exclusive | Mode::Mig) => Isolation::Shared,
        Some(Mode::Mps | Mode::TimeSlice) | None => config.defaults.isolation,
    }
}

fn implied_mode(keys: &Keys<'_>, devices: &Devices) -> Option<Mode> {
    if ["sm", "priority", "processes"].iter().any(|key| keys.has(key)) {
        Some(Mode::Mps)
    } else if keys.has("mig") || names_mig(devices) {
        Some(Mode::Mig)
    } else {
        None
    }
}

fn names_mig(devices: &Devices) -> bool {
    matches!(devices, Devices::These(selectors) if selectors.iter().any(Selector::is_mig))
}

/// Whether it can be more than one device. `all` counts as several, so that a request means the same on every host.
fn are_several(devices: &Devices) -> bool {
    match devices {
        Devices::Any(count) => count.get() > 1,
        Devices::All => true,
        Devices::These(selectors) => selectors.len() > 1,
    }
}

fn check_mode(
    keys: &Keys<'_>,
    mode: Mode,
    devices: &Devices,
    isolation: Option<Isolation>,
) -> Result<(), RequestError> {
    let refuse = |key: &str, remedy| contradiction(keys.setting(key), name(keys, mode), remedy);
    if !matches!(mode, Mode::Mps | Mode::Mig) {
        refuse("sm", "only MPS limits SMs; write sublet.mode=mps or leave sublet.sm out")?;
    }
    if mode != Mode::Mps {
        refuse("priority", "only MPS has priorities; write sublet.mode=mps or leave sublet.priority out")?;
        refuse(
            "processes",
            "only MPS counts processes; write sublet.mode=mps or leave sublet.processes out",
        )?;
    }
    if mode == Mode::Exclusive {
        refuse(
            "memory",
            "the container has the whole device; write sublet.mode=mps or leave sublet.memory out",
        )?;
        refuse("mig", "sublet.mode=mig gives the container an instance of its own")?;
        if names_mig(devices) {
            refuse("gpu", "sublet.mode=mig gives the container the whole MIG device")?;
        }
    }
    // Without a profile, `sublet.sm` and `sublet.memory` give the minimum size of the instance.
    if mode == Mode::Mig && (keys.has("mig") || names_mig(devices)) {
        refuse("memory", "an instance has the memory of its profile; leave sublet.memory out")?;
        refuse("sm", "an instance has the SMs of its profile; write sublet.mode=mps or leave sublet.sm out")?;
    }
    if isolation == Some(Isolation::Dedicated) && !matches!(mode, Mode::Mps | Mode::TimeSlice) {
        refuse("isolation", "it needs sublet.mode=mps or sublet.mode=time-slice; leave it out")?;
    }
    Ok(())
}

/// A process connects to one MPS daemon, so a dedicated daemon serves all devices of such a container. Modes without a
/// daemon have no isolation to choose.
fn check_several_devices(
    keys: &Keys<'_>,
    mode: Option<Mode>,
    isolation: Option<Isolation>,
) -> Result<(), RequestError> {
    let has_servers = !matches!(mode, Some(Mode::Exclusive | Mode::Mig));
    match keys.setting("gpu").filter(|_| has_servers && isolation == Some(Isolation::Shared)) {
        Some(gpu) => contradiction(
            keys.setting("isolation"),
            gpu.to_string(),
            "a process connects to one MPS daemon, and a shared daemon has one device; leave \
             sublet.isolation out, because several devices get their own daemon",
        ),
        None => Ok(()),
    }
}

/// A MIG instance limits both by itself.
fn check_required(keys: &Keys<'_>, mode: Option<Mode>, require: &[Required]) -> Result<(), RequestError> {
    for required in require.iter().filter(|_| mode != Some(Mode::Mig)) {
        let (key, remedy) = match required {
            Required::Memory => ("memory", "add it, for example sublet.memory=8GiB"),
            Required::Sm => ("sm", "add it with sublet.mode=mps, for example sublet.sm=25"),
        };
        if !keys.has(key) {
            return Err(RequestError::Missing { key, remedy });
        }
    }
    Ok(())
}

/// The mode as the user gave it, or the key that implies it.
fn name(keys: &Keys<'_>, mode: Mode) -> String {
    if let Some(setting) = keys.setting("mode") {
        return setting.to_string();
    }
    let because = ["sm", "priority", "processes", "mig", "gpu"].into_iter().find_map(|key| keys.setting(key));
    match because {
        Some(setting) => format!("mode {mode}, which {setting} implies"),
        None => format!("mode {mode}"),
    }
}

fn contradiction(setting: Option<Setting>, with: String, remedy: &'static str) -> Result<(), RequestError> {
    match setting {
        Some(setting) => Err(RequestError::Contradiction { setting, with, remedy }),
        None => Ok(()),
    }
}
