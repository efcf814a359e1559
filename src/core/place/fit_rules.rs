//! The rules that waiting for other containers does not change: the administrator's, the mode's, the driver's and the
//! hardware's.

use super::bookings::bookable;
use super::select::rule;
use super::want::{Misfit, Want, World};
use crate::config::Config;
use crate::inventory::{ComputeMode, Device, Driver, Fact, Inventory, Virtualization, context_bytes};
use crate::ledger::{Lease, LeasedMigDevice, Ledger};
use crate::request::Request;
use crate::share::units::{MIB, show_bytes};
use crate::share::{Isolation, Mode, Percent, Priority, bytes_of_process, sm_of_process};
use crate::text::safe;

/// The first driver branch in which a process sees several MIG devices (MIG User Guide, "CUDA visible devices").
const SEVERAL_MIG_DEVICES: u32 = 570;

/// With a share that the driver rounds to fewer SMs than this, no context starts.
const FEWEST_SMS: u64 = 2;

/// The administrator's decisions, and changes of MIG layouts.
pub(super) fn check_closed(want: &Want<'_>, world: World<'_>) -> Result<(), Misfit> {
    let (uuid, gpu) = (&want.device.uuid, want.device.gpu());
    if let Some(change) = world.ledger.mig_change(gpu) {
        return Err(Misfit::now(format!(
            "is unavailable while process {} changes its MIG layout",
            change.owner.pid
        )));
    }
    check_kind(want, world)?;
    if world.ledger.drained.iter().any(|drained| drained == uuid || drained == gpu) {
        return Err(Misfit::never("is drained: `sublet undrain` ends that"));
    }
    let fixed = rule(want.device, world.config).and_then(|rule| rule.fixed_use);
    match fixed {
        Some(fixed) if fixed != want.used_as => Err(Misfit::never(format!(
            "is reserved for {fixed} by [[device]] use{}",
            if want.mode == want.used_as {
                ""
            } else if want.several {
                ", and an MPS server for several devices takes turns (time-slice)"
            } else {
                ", and dedicated MPS servers take turns (time-slice)"
            }
        ))),
        _ if world.ledger.unexplained.contains(uuid) => Err(Misfit::as_reported(
            "takes no new lease: the ledger was lost, and processes without a lease run on it; end them, \
             then run `sublet gc`",
        )),
        _ => Ok(()),
    }
}

/// GPUs in MIG mode are used only through their MIG devices, and MIG devices only in modes that they support.
fn check_kind(want: &Want<'_>, world: World<'_>) -> Result<(), Misfit> {
    let Some(mig_device) = &want.device.mig_device else {
        return match (want.device.mig_enabled, want.mode) {
            (true, _) => Err(in_mig_mode(want.device, world.inventory)),
            (false, Mode::Mig) => Err(Misfit::never("has no MIG devices: `sublet mig apply` creates them")),
            (false, _) => Ok(()),
        };
    };
    if let Some(fault) = &mig_device.fault {
        return Err(Misfit::as_reported(format!("cannot be used: {}", safe(fault))));
    }
    if want.mode == Mode::Exclusive {
        return Err(Misfit::never("is a MIG device: to have it alone, write sublet.mode=mig"));
    }
    let held = |lease: &&Lease| {
        let same = |old: &LeasedMigDevice| {
            (&old.gpu, old.gi, old.ci) == (&mig_device.gpu, mig_device.gi, mig_device.ci)
        };
        lease.mig_devices.iter().any(|old| same(old) && old.uuid != want.device.uuid)
    };
    match world.ledger.leases.iter().find(held) {
        Some(lease) => Err(Misfit::now(format!(
            "has the device nodes of a destroyed instance, which container {} still holds: end that \
             container first",
            safe(&lease.container.id)
        ))),
        None => Ok(()),
    }
}

fn in_mig_mode(gpu: &Device, inventory: &Inventory) -> Misfit {
    let profiles: Vec<String> = inventory
        .mig_devices_of(&gpu.uuid)
        .map(|(device, part)| format!("sublet.gpu={} is a {}", device.number(), safe(&part.profile)))
        .collect();
    let way_out = if profiles.is_empty() {
        "it has none: `sublet mig apply` creates them".to_owned()
    } else {
        format!("{}; sublet.mig=<profile> takes a free one", profiles.join(", "))
    };
    // If there are no instances, only NVML shows whether another tool has switched MIG mode off since.
    Misfit {
        refresh: profiles.is_empty(),
        ..Misfit::never(format!("is in MIG mode, so only its MIG devices can be used ({way_out})"))
    }
}

/// Settings that contradict a mode that comes from the device's configuration.
pub(super) fn check_settings(want: &Want<'_>) -> Result<(), Misfit> {
    let exclusive = want.mode == Mode::Exclusive;
    if want.several && want.daemon.is_some() && want.device.is_mig() {
        return Err(Misfit::never(
            "cannot be one of several devices under MPS, because an MPS server can use only one MIG \
             device: name one, or whole GPUs",
        ));
    }
    if exclusive && (want.memory.is_some() || want.request.sm.is_some()) {
        return Err(Misfit::never(
            "is given as a whole in mode exclusive: leave out sublet.sm and sublet.memory",
        ));
    }
    if want.mode == Mode::Mig {
        return check_size(want);
    }
    if exclusive && want.isolation == Isolation::Dedicated {
        return Err(Misfit::never("is given as a whole in mode exclusive: leave out sublet.isolation"));
    }
    Ok(())
}

/// With mode mig, `sublet.memory` and `sublet.sm` are the minimum for the MIG device. Percentages are of the GPU.
fn check_size(want: &Want<'_>) -> Result<(), Misfit> {
    let (device, Some(mig_device)) = (want.device, &want.device.mig_device) else { return Ok(()) };
    let own = device.part_of(device.memory_bytes);
    if let Some(least) = want.request.memory.map(|memory| memory.on(mig_device.gpu_memory_bytes)) {
        if own < least {
            return Err(Misfit::never(format!("has {}, {} needed", show_bytes(own), show_bytes(least))));
        }
    }
    let sms = device.sm_count.unwrap_or(0);
    match (want.request.sm, mig_device.gpu_sm_count) {
        (Some(sm), Some(all)) if u64::from(sms) < sm.of(all.into()) => {
            Err(Misfit::never(format!("has {sms} of the GPU's {all} SMs, {sm} % needed")))
        }
        (Some(sm), None) => Err(Misfit::never(format!(
            "is on a GPU whose number of SMs is not known, so {sm} % of them is not known either: leave \
             out sublet.sm, or name a profile (sublet.mig)"
        ))),
        _ => Ok(()),
    }
}

/// The driver's and the hardware's features.
pub(super) fn check_driver(want: &Want<'_>, inventory: &Inventory, config: &Config) -> Result<(), Misfit> {
    if want.several && want.device.is_mig() && branch(&inventory.driver) < SEVERAL_MIG_DEVICES {
        return Err(Misfit::never(format!(
            "cannot be one of several devices: with driver {} a process sees only one MIG device; several \
             need R{SEVERAL_MIG_DEVICES} or later",
            safe(&inventory.driver.version)
        )));
    }
    if let Some(answer) = want.device.unknown.get(&Fact::Memory).filter(|_| want.memory.is_some()) {
        return Err(Misfit::not_reported(format!(
            "has memory of which NVML does not tell ({}), so none can be booked: leave out sublet.memory",
            safe(answer)
        )));
    }
    if want.daemon.is_none() {
        return Ok(());
    }
    if inventory.driver.mps_control.is_none() {
        let missing = inventory.driver.mps_missing.as_deref();
        return Err(Misfit::never(format!(
            "needs an MPS server, and {}",
            missing
                .unwrap_or("nvidia-cuda-mps-control is not installed (Debian: apt install nvidia-cuda-mps)")
        )));
    }
    if want.device.virtualization == Virtualization::Vgpu && !config.mps.allow_vgpu {
        return Err(Misfit::never(
            "is a vGPU, where MPS works with some profiles only: set [mps] allow_vgpu = true to try it, or \
             use time-slice",
        ));
    }
    let limits =
        want.request.sm.is_some() || want.memory.is_some() || want.request.priority != Priority::Normal;
    if let Some(answer) = want.device.unknown.get(&Fact::ComputeCapability).filter(|_| limits) {
        return Err(Misfit::not_reported(format!(
            "does not tell whether its MPS has limits (NVML, of its compute capability: {}): leave out sublet.sm, \
             memory and priority",
            safe(answer)
        )));
    }
    if want.device.is_before_volta() && limits {
        return Err(Misfit::never(
            "is older than Volta, where MPS has no limits: leave out sublet.sm, memory and priority",
        ));
    }
    Ok(())
}

/// A mode that sublet changed will be restored, so the original mode counts.
pub(super) fn check_compute_mode(want: &Want<'_>, ledger: &Ledger) -> Result<(), Misfit> {
    let changed = ledger.compute_modes.iter().find(|changed| changed.device == want.device.uuid);
    let found = changed.map_or(want.device.compute_mode, |changed| changed.found);
    let allowed = match found {
        ComputeMode::Default => true,
        ComputeMode::Prohibited => false,
        ComputeMode::ExclusiveProcess => want.used_as != Mode::TimeSlice,
    };
    if allowed {
        return Ok(());
    }
    let (mode, uuid) = (found.as_str(), &want.device.uuid);
    let reason = format!("has compute mode {mode}: `nvidia-smi -i {} -c DEFAULT` resets it", safe(uuid));
    // The inventory may be from a time when one of sublet's MPS servers had the device exclusively.
    Err(Misfit { refresh: true, ..Misfit::never(reason) })
}

/// A share too small to start a context in, or larger than the device.
pub(super) fn check_share(want: &Want<'_>, driver: &Driver, config: &Config) -> Result<(), Misfit> {
    let (device, processes) = (want.device, u64::from(want.request.processes.get()));
    let limit = client_limit(device, driver);
    if want.daemon.is_some() && want.request.processes.get() > limit {
        return Err(Misfit::never(format!("allows at most {limit} MPS clients, not {processes}")));
    }
    let each = |sm: Percent| sm_of_process(sm, want.request.processes.get());
    let all = want.device.sm_count.map(u64::from);
    if let Some(sm) = want.request.sm.filter(|_| want.mode == Mode::Mps) {
        if all.is_some_and(|all| each(sm).of(all) < FEWEST_SMS) {
            return Err(Misfit::never(format!(
                "has too few SMs: {sm} % for {processes} process(es) is less than 2 SMs each"
            )));
        }
        if want.used_as == Mode::Mps && sm > config.sm_bookable() {
            return Err(Misfit::never(format!(
                "gives at most {} % SM ([limits] sm_overcommit)",
                config.sm_bookable()
            )));
        }
    }
    let Some(memory) = want.memory else { return Ok(()) };
    let sms = want.device.sms_at(want.request.sm.map_or(Percent::WHOLE, each));
    let context = context_bytes(sms.unwrap_or(0));
    if bytes_of_process(memory, want.request.processes.get()) < context {
        let least = (context * processes).div_ceil(MIB);
        return Err(Misfit::never(format!(
            "needs {least} MiB for the CUDA context(s) of {processes} process(es) at that SM share, so {} \
             is too little",
            show_bytes(memory)
        )));
    }
    if want.books > bookable(device, config) {
        return Err(Misfit::never(format!(
            "has {}, of which {} can be booked ([limits] reserve, memory_overcommit)",
            show_bytes(device.memory_bytes),
            show_bytes(bookable(device, config))
        )));
    }
    Ok(())
}

/// A warning about an SM share that is below the driver's minimum: a process gets the minimum.
pub(super) fn warn_of_minimum(request: &Request, mode: Mode, device: &Device) -> Option<String> {
    let sm = request.sm.filter(|_| mode == Mode::Mps)?;
    let (each, all) = (sm_of_process(sm, request.processes.get()), u64::from(device.sm_count?));
    let given = device.sms_at(each)?;
    if given <= each.of(all) {
        return None;
    }
    let tenths = u64::from(each.thousandths()) * all / 10_000;
    let part = match request.processes.get() {
        1 => String::new(),
        count => format!(" for each of {count} processes"),
    };
    let (whole, tenth) = (tenths / 10, tenths % 10);
    Some(format!(
        "the driver gives at least {given} SMs; sm={sm} of {all} SMs is {whole}.{tenth} SMs{part}: the process \
         gets {given}"
    ))
}

/// The number of MPS clients that a device allows (CUDA MPS documentation, "Limitations": 16 before Volta, 48 since
/// Volta, 60 from CUDA 13.1; on a MIG device in proportion to its SMs).
#[must_use]
pub fn client_limit(device: &Device, driver: &Driver) -> u32 {
    let whole = match () {
        () if device.is_before_volta() => 16,
        () if driver.cuda >= (13, 1) => 60,
        () => 48,
    };
    let sms = device.mig_device.as_ref().and_then(|mig_device| device.sm_count.zip(mig_device.gpu_sm_count));
    sms.map_or(whole, |(own, all)| (whole * own / all.max(1)).max(1))
}

fn branch(driver: &Driver) -> u32 {
    driver.version.split('.').next().and_then(|branch| branch.parse().ok()).unwrap_or(0)
}
