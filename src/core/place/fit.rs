//! Whether one device can serve a request: first the rules that waiting for other containers does not change (the
//! administrator's, the mode's, the driver's and the hardware's), then the room that other leases leave.

use super::bookings::{Account, Bookings, SERVER_BYTES, bookable, use_of};
use super::bookings::{check_memory, check_room, check_use, client_limit};
use super::select::rule;
use super::{Misfit, Want, World};
use crate::config::{Config, Policy};
use crate::inventory::{ComputeMode, Device, Driver, Fact, Inventory, Virtualization, context_bytes};
use crate::ledger::{DaemonKey, Lease, LeaseId, LeasedMigDevice, Ledger};
use crate::request::Request;
use crate::share::{Isolation, MIB, Mode, Percent, Priority, bytes_of_process, show_bytes, sm_of_process};
use crate::text::safe;

/// A request's part of one device.
#[derive(Clone, Debug)]
pub(super) struct Fit {
    pub mode: Mode,
    pub isolation: Isolation,
    pub daemon: Option<DaemonKey>,
    pub memory_bytes: Option<u64>,
    pub refresh_first: bool,
    /// Whether the device already has this use.
    in_use: bool,
    /// The rest of its scarcest resource, in thousandths.
    left: u64,
    /// Memory left by the bookings, in bytes.
    memory_left: u64,
    /// Memory in bytes and SMs of a MIG device that the container gets whole. The smallest that fits is chosen.
    size: Option<(u64, u64)>,
    index: u32,
}

/// Fits `request` on `device`, which may be one of `several`.
pub(super) fn fit(
    request: &Request,
    id: &LeaseId,
    device: &Device,
    several: bool,
    world: World<'_>,
) -> Result<Fit, Misfit> {
    let want = build_want(request, id, device, several, world);
    check_closed(&want, world)?;
    world.ledger.explain_kept(id, device).map_or(Ok(()), |why| Err(Misfit::now(why)))?;
    check_settings(&want)?;
    check_driver(&want, world.inventory, world.config)?;
    check_compute_mode(&want, world.ledger)?;
    check_share(&want, &world.inventory.driver, world.config)?;
    let bookings = want.account.bookings();
    check_use(&want, &bookings, world)?;
    check_room(&want, &bookings, world)?;
    let refresh_first = check_memory(&want, world)?;
    Ok(build_fit(want, &bookings, refresh_first, world))
}

fn build_want<'a>(
    request: &'a Request,
    id: &LeaseId,
    device: &'a Device,
    several: bool,
    world: World<'a>,
) -> Want<'a> {
    let fixed = rule(device, world.config).and_then(|rule| rule.fixed_use);
    let default = if device.is_mig() { Mode::Mig } else { request.default_mode };
    let mode = request.mode.or(fixed).unwrap_or(default);
    let limited_turns = mode == Mode::TimeSlice && request.memory.is_some();
    // A process connects to one daemon, so a dedicated daemon serves all its devices.
    let own_server = limited_turns || several && mode == Mode::Mps;
    let isolation = if own_server { Isolation::Dedicated } else { request.isolation };
    let daemon = (mode == Mode::Mps || limited_turns).then(|| match isolation {
        Isolation::Dedicated => DaemonKey(id.to_string()),
        Isolation::Shared => DaemonKey(device.uuid.clone()),
    });
    let memory = match mode {
        Mode::Mig => shared_part(device, world.config),
        _ => request.memory.map(|memory| memory.on(device.memory_bytes)),
    };
    let account = Account::of(device, world.ledger, world.config);
    let new_server = daemon.as_ref().is_some_and(|key| !account.daemons().contains(key));
    let books = memory.unwrap_or(0).saturating_add(if new_server { SERVER_BYTES } else { 0 });
    let used_as = use_of(mode, isolation);
    Want { request, device, mode, isolation, used_as, daemon, memory, books, account, several }
}

/// The memory that is booked for a compute instance that one container has but that shares its memory with other instances.
/// Nothing enforces this part.
fn shared_part(device: &Device, config: &Config) -> Option<u64> {
    let shares = device.mig_device.as_ref().is_some_and(|mig_device| !mig_device.siblings.is_empty());
    shares.then(|| device.part_of(bookable(device, config)) / MIB * MIB)
}

fn build_fit(want: Want<'_>, bookings: &Bookings, refresh_first: bool, world: World<'_>) -> Fit {
    let World { inventory, config, .. } = world;
    let thousandths = |left: u64, all: u64| left.saturating_mul(1000) / all.max(1);
    let memory_left = want.account.left_by_bookings();
    let by_use = match want.used_as {
        Mode::Mps => {
            let limit = client_limit(want.device, &inventory.driver);
            let sms =
                thousandths(bookings.sm_free.thousandths().into(), config.sm_bookable().thousandths().into());
            sms.min(thousandths(limit.saturating_sub(bookings.processes).into(), limit.into()))
        }
        Mode::TimeSlice => {
            let turns = config.limits.time_slice_max;
            thousandths(u64::from(turns).saturating_sub(bookings.leases as u64), turns.into())
        }
        Mode::Exclusive | Mode::Mig => 1000,
    };
    let sms = u64::from(want.device.sm_count.unwrap_or(0));
    let size = (want.mode == Mode::Mig).then(|| (want.device.part_of(want.device.memory_bytes), sms));
    Fit {
        size,
        in_use: bookings.used_as.is_some(),
        left: by_use.min(thousandths(memory_left, bookable(want.device, config))),
        memory_left,
        index: want.device.index,
        mode: want.mode,
        isolation: want.isolation,
        daemon: want.daemon,
        memory_bytes: want.memory,
        refresh_first,
    }
}

impl Fit {
    /// The sort key: the device with the smallest one is taken first.
    pub(super) fn rank(&self, policy: Policy) -> (bool, u64, u64, u32) {
        if let Some((memory, sms)) = self.size {
            return (false, memory, sms, self.index);
        }
        match policy {
            Policy::Binpack => (!self.in_use, self.left, self.memory_left, self.index),
            Policy::Spread => {
                let most = |left: u64| u64::MAX - left;
                (false, most(self.left), most(self.memory_left), self.index)
            }
        }
    }
}

/// The first driver branch in which a process sees several MIG devices (MIG User Guide, "CUDA visible devices").
const SEVERAL_MIG_DEVICES: u32 = 570;

/// With a share that the driver rounds to fewer SMs than this, no context starts.
const FEWEST_SMS: u64 = 2;

/// The administrator's decisions, and changes of MIG layouts.
pub(super) fn check_closed(want: &Want<'_>, world: World<'_>) -> Result<(), Misfit> {
    let (uuid, gpu) = (&want.device.uuid, want.device.gpu());
    if let Some(change) = world.ledger.mig_change(gpu) {
        let pid = change.owner.pid;
        return Err(Misfit::now(format!("is unavailable while process {pid} changes its MIG layout")));
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
    let branch = inventory.driver.version.split('.').next().and_then(|branch| branch.parse().ok());
    if want.several && want.device.is_mig() && branch.unwrap_or(0) < SEVERAL_MIG_DEVICES {
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
    if found == ComputeMode::Default
        || found == ComputeMode::ExclusiveProcess && want.used_as != Mode::TimeSlice
    {
        return Ok(());
    }
    let uuid = safe(&want.device.uuid);
    let reason = format!("has compute mode {found}: `nvidia-smi -i {uuid} -c DEFAULT` resets it");
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
        let most = config.sm_bookable();
        if want.used_as == Mode::Mps && sm > most {
            return Err(Misfit::never(format!("gives at most {most} % SM ([limits] sm_overcommit)")));
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
