//! Whether one device can serve a request: first what no waiting changes, then what others hold.

use super::account::{Account, SERVER_BYTES, account, bookable, by_accounts, by_driver, daemons, use_of};
use super::select::rule;
use crate::config::{Config, Policy};
use crate::inventory::context_bytes;
use crate::inventory::{ComputeMode, Device, Driver, Inventory, Virtualization};
use crate::ledger::DaemonKey;
use crate::ledger::{DaemonState, Lease, LeaseId, LeasedPart, Ledger};
use crate::request::Request;
use crate::share::units::{MIB, show_bytes};
use crate::share::{Isolation, Mode, Percent, Priority, bytes_of_process, sm_of_process};
use crate::text::safe;

/// The first driver branch with which a process sees several MIG devices (MIG User Guide, "CUDA visible
/// devices").
const SEVERAL_MIG_DEVICES: u32 = 570;

/// A share that the driver rounds to fewer SMs than this starts no context.
const FEWEST_SMS: u64 = 2;

/// All that is looked at.
#[derive(Clone, Copy)]
pub(super) struct World<'a> {
    pub inventory: &'a Inventory,
    pub ledger: &'a Ledger,
    pub config: &'a Config,
}

/// What a request comes to on one device.
#[derive(Clone, Debug)]
pub(super) struct Fit {
    pub mode: Mode,
    pub isolation: Isolation,
    pub daemon: Option<DaemonKey>,
    pub memory_bytes: Option<u64>,
    pub refresh_first: bool,
    /// Whether the device is in that use already.
    in_use: bool,
    /// The scarcest of what is left of it, in thousandths.
    left: u64,
    /// Memory left by the accounts, in bytes.
    memory_left: u64,
    /// Memory in bytes and SMs of a MIG device that the container gets whole: the smallest that fits is best.
    size: Option<(u64, u64)>,
    index: u32,
}

/// Why a device does not serve.
#[derive(Clone, Debug)]
pub(super) struct Misfit {
    /// Follows the device's name.
    pub reason: String,
    /// Whether waiting could help.
    pub temporary: bool,
    /// Whether a refresh of the inventory could help.
    pub refresh: bool,
}

impl Misfit {
    fn never(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), temporary: false, refresh: false }
    }

    fn now(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), temporary: true, refresh: false }
    }

    fn as_reported(reason: impl Into<String>) -> Self {
        Self { refresh: true, ..Self::now(reason) }
    }
}

/// A request on one device, with what that device's configuration decides.
struct Want<'a> {
    request: &'a Request,
    device: &'a Device,
    mode: Mode,
    isolation: Isolation,
    /// Row of the accounts that it will be in.
    used_as: Mode,
    daemon: Option<DaemonKey>,
    memory: Option<u64>,
    /// Bytes that it adds to the accounts, a new server's included.
    books: u64,
    /// One of several devices of the container.
    several: bool,
}

impl Want<'_> {
    /// Memory of idle shared servers that end for this use of their device ([`Ledger::in_the_way`]).
    fn making_way(&self, ledger: &Ledger) -> u64 {
        let shared = ledger.daemons.iter().filter(|daemon| {
            let uuid = &self.device.uuid;
            daemon.serves(uuid) && daemon.key.0 == *uuid && daemon.state != DaemonState::Down
        });
        let unused = shared.filter(|daemon| ledger.on_daemon(&daemon.key).next().is_none());
        SERVER_BYTES * unused.filter(|daemon| self.daemon.as_ref() != Some(&daemon.key)).count() as u64
    }
}

/// What `request` comes to on `device`; `several`: it is one of several.
pub(super) fn fit(
    request: &Request,
    id: &LeaseId,
    device: &Device,
    several: bool,
    world: World<'_>,
) -> Result<Fit, Misfit> {
    let want = want(request, id, device, several, world);
    closed(&want, world)?;
    world.ledger.kept_from(id, device).map_or(Ok(()), |why| Err(Misfit::now(why)))?;
    sense(&want)?;
    driver(&want, world.inventory, world.config)?;
    compute_mode(&want, world.ledger)?;
    share(&want, &world.inventory.driver, world.config)?;
    let account = account(device, world.ledger, world.config);
    present_use(&want, &account, world)?;
    room(&want, &account, world)?;
    let refresh_first = memory(&want, world)?;
    Ok(fitting(want, &account, refresh_first, world))
}

fn want<'a>(
    request: &'a Request,
    id: &LeaseId,
    device: &'a Device,
    several: bool,
    world: World<'_>,
) -> Want<'a> {
    let fixed = rule(device, world.config).and_then(|rule| rule.fixed_use);
    let default = if device.is_mig() { Mode::Mig } else { request.default_mode };
    let mode = request.mode.or(fixed).unwrap_or(default);
    let limited_turns = mode == Mode::TimeSlice && request.memory.is_some();
    // A process speaks to one daemon, so one of its own serves all its devices.
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
    let running = daemons(device, world.ledger);
    let new_server = daemon.as_ref().is_some_and(|key| !running.contains(key));
    let books = memory.unwrap_or(0).saturating_add(if new_server { SERVER_BYTES } else { 0 });
    let used_as = use_of(mode, isolation);
    Want { request, device, mode, isolation, used_as, daemon, memory, books, several }
}

/// The part that a compute instance, alone in the container, is booked of the memory that it shares with others.
/// Nothing enforces that part.
fn shared_part(device: &Device, config: &Config) -> Option<u64> {
    let shares = device.part.as_ref().is_some_and(|part| !part.siblings.is_empty());
    shares.then(|| device.part_of(bookable(device, config)) / MIB * MIB)
}

/// What an administrator has decided.
fn closed(want: &Want<'_>, world: World<'_>) -> Result<(), Misfit> {
    let (uuid, gpu) = (&want.device.uuid, want.device.gpu());
    if let Some(change) = world.ledger.mig_change(gpu) {
        return Err(Misfit::now(format!(
            "is unavailable while process {} changes its MIG layout",
            change.owner.pid
        )));
    }
    kinds(want, world)?;
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

/// GPUs in MIG mode are used through their MIG devices, and those as what they are.
fn kinds(want: &Want<'_>, world: World<'_>) -> Result<(), Misfit> {
    let Some(part) = &want.device.part else {
        return match (want.device.mig_enabled, want.mode) {
            (true, _) => Err(in_mig_mode(want.device, world.inventory)),
            (false, Mode::Mig) => Err(Misfit::never("has no MIG devices: `sublet mig apply` creates them")),
            (false, _) => Ok(()),
        };
    };
    if let Some(fault) = &part.fault {
        return Err(Misfit::as_reported(format!("cannot be used: {}", safe(fault))));
    }
    if want.mode == Mode::Exclusive {
        return Err(Misfit::never("is a MIG device: to have it alone, write sublet.mode=mig"));
    }
    let held = |lease: &&Lease| {
        let same = |old: &LeasedPart| (&old.gpu, old.gi, old.ci) == (&part.gpu, part.gi, part.ci);
        lease.parts.iter().any(|old| same(old) && old.uuid != want.device.uuid)
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
        .parts(&gpu.uuid)
        .map(|(device, part)| format!("sublet.gpu={} is a {}", device.number(), safe(&part.profile)))
        .collect();
    let way_out = if profiles.is_empty() {
        "it has none: `sublet mig apply` creates them".to_owned()
    } else {
        format!("{}; sublet.mig=<profile> takes a free one", profiles.join(", "))
    };
    // Without any instance, that another tool has switched it off since shows in NVML alone.
    Misfit {
        refresh: profiles.is_empty(),
        ..Misfit::never(format!("is in MIG mode, so only its MIG devices can be used ({way_out})"))
    }
}

/// What contradicts the mode that the device's configuration has brought in.
fn sense(want: &Want<'_>) -> Result<(), Misfit> {
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
        return large_enough(want);
    }
    if exclusive && want.isolation == Isolation::Dedicated {
        return Err(Misfit::never("is given as a whole in mode exclusive: leave out sublet.isolation"));
    }
    Ok(())
}

/// With mode mig `sublet.memory` and `sublet.sm` say what the MIG device must have at least; percentages are
/// of the GPU.
fn large_enough(want: &Want<'_>) -> Result<(), Misfit> {
    let (device, Some(part)) = (want.device, &want.device.part) else { return Ok(()) };
    let own = device.part_of(device.memory_bytes);
    if let Some(least) = want.request.memory.map(|memory| memory.on(part.gpu_memory_bytes)) {
        if own < least {
            return Err(Misfit::never(format!("has {}, {} needed", show_bytes(own), show_bytes(least))));
        }
    }
    let sms = device.sm_count.unwrap_or(0);
    match (want.request.sm, part.gpu_sm_count) {
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

/// What driver and hardware cannot do.
fn driver(want: &Want<'_>, inventory: &Inventory, config: &Config) -> Result<(), Misfit> {
    if want.several && want.device.is_mig() && branch(&inventory.driver) < SEVERAL_MIG_DEVICES {
        return Err(Misfit::never(format!(
            "cannot be one of several devices: with driver {} a process sees only one MIG device; several \
             need R{SEVERAL_MIG_DEVICES} or later",
            safe(&inventory.driver.version)
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
    if want.device.is_before_volta() && limits {
        return Err(Misfit::never(
            "is older than Volta, where MPS has no limits: leave out sublet.sm, memory and priority",
        ));
    }
    Ok(())
}

/// A mode that we changed ourselves will be put back: what was found counts.
fn compute_mode(want: &Want<'_>, ledger: &Ledger) -> Result<(), Misfit> {
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
    // The inventory may be of a time when an MPS server of ours had the device to itself.
    Err(Misfit { refresh: true, ..Misfit::never(reason) })
}

/// A share too small to start a context in, or larger than the device.
fn share(want: &Want<'_>, driver: &Driver, config: &Config) -> Result<(), Misfit> {
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
        if want.used_as == Mode::Mps && sm > config.sm_ceiling() {
            return Err(Misfit::never(format!(
                "gives at most {} % SM ([limits] sm_overcommit)",
                config.sm_ceiling()
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

/// MPS clients that a device takes (CUDA MPS documentation, "Limitations": 16 before Volta, 48 since, 60
/// from CUDA 13.1; a MIG device in proportion to its SMs).
#[must_use]
pub fn client_limit(device: &Device, driver: &Driver) -> u32 {
    let whole = match () {
        () if device.is_before_volta() => 16,
        () if driver.cuda >= (13, 1) => 60,
        () => 48,
    };
    let sms = device.part.as_ref().and_then(|part| device.sm_count.zip(part.gpu_sm_count));
    sms.map_or(whole, |(own, all)| (whole * own / all.max(1)).max(1))
}

fn branch(driver: &Driver) -> u32 {
    driver.version.split('.').next().and_then(|branch| branch.parse().ok()).unwrap_or(0)
}

/// One use at a time; and no other process beside an exclusive lease, with or without a lease.
fn present_use(want: &Want<'_>, account: &Account, world: World<'_>) -> Result<(), Misfit> {
    match account.used_as {
        Some(Mode::Exclusive | Mode::Mig) => return Err(Misfit::now("is taken whole")),
        Some(used) if used != want.used_as => {
            let turns = if want.several && want.daemon.is_some() {
                ", and an MPS server for several devices takes turns (time-slice)"
            } else {
                ""
            };
            return Err(Misfit::now(format!("is in use as {used}{turns}")));
        }
        _ => {}
    }
    if !matches!(want.mode, Mode::Exclusive | Mode::Mig) {
        return Ok(());
    }
    let ours = world.ledger.daemons.iter().any(|daemon| daemon.serves(&want.device.uuid));
    let mut others = want.device.processes.iter().filter(|process| !(process.mps_server && ours));
    match others.find(|process| world.ledger.lease_of_process(process).is_none()) {
        Some(process) => Err(Misfit::as_reported(format!(
            "cannot be given to one container alone: process {} ({}) has a CUDA context on it without a \
             lease; end it first",
            process.pid,
            safe(&process.name)
        ))),
        None => Ok(()),
    }
}

/// Turns, SMs and clients.
fn room(want: &Want<'_>, account: &Account, world: World<'_>) -> Result<(), Misfit> {
    let turns = world.config.limits.time_slice_max;
    if want.used_as == Mode::TimeSlice && account.leases >= turns as usize {
        let reason =
            format!("has {} containers taking turns ([limits] time_slice_max = {turns})", account.leases);
        return Err(if turns == 0 { Misfit::never(reason) } else { Misfit::now(reason) });
    }
    let sm = want.request.sm.filter(|_| want.used_as == Mode::Mps).unwrap_or_default();
    if sm > account.sm_free {
        return Err(Misfit::now(format!("has {} % SM left", account.sm_free)));
    }
    let limit = client_limit(want.device, &world.inventory.driver);
    let processes = account.processes.saturating_add(want.request.processes.get());
    if want.daemon.is_some() && processes > limit {
        let left = limit.saturating_sub(account.processes);
        return Err(Misfit::now(format!("has {left} of {limit} MPS clients left")));
    }
    Ok(())
}

/// Memory by the accounts and by what NVML last reported; within 10 % of the latter wants a fresh look.
fn memory(want: &Want<'_>, world: World<'_>) -> Result<bool, Misfit> {
    let World { ledger, config, .. } = world;
    if want.books == 0 {
        return Ok(false);
    }
    // What servers hold that end before the container starts.
    let ending = want.making_way(ledger);
    let accounts = by_accounts(want.device, ledger, config).saturating_add(ending);
    if want.books > accounts {
        return Err(Misfit::now(format!(
            "has {} left to book, {} needed",
            show_bytes(accounts),
            show_bytes(want.books)
        )));
    }
    if want.mode == Mode::Mig {
        return Ok(false);
    }
    let free = by_driver(want.device, ledger, config).saturating_add(ending);
    if want.books > free {
        return Err(Misfit::as_reported(format!(
            "has {} free according to the driver, {} needed",
            show_bytes(free),
            show_bytes(want.books)
        )));
    }
    Ok(want.books > free / 10 * 9)
}

fn fitting(want: Want<'_>, account: &Account, refresh_first: bool, world: World<'_>) -> Fit {
    let World { inventory, ledger, config } = world;
    let part = |left: u64, all: u64| left.saturating_mul(1000) / all.max(1);
    let memory_left = by_accounts(want.device, ledger, config);
    let by_use = match want.used_as {
        Mode::Mps => {
            let limit = client_limit(want.device, &inventory.driver);
            let sms = part(account.sm_free.thousandths().into(), config.sm_ceiling().thousandths().into());
            sms.min(part(limit.saturating_sub(account.processes).into(), limit.into()))
        }
        Mode::TimeSlice => {
            let turns = config.limits.time_slice_max;
            part(u64::from(turns).saturating_sub(account.leases as u64), turns.into())
        }
        Mode::Exclusive | Mode::Mig => 1000,
    };
    let sms = u64::from(want.device.sm_count.unwrap_or(0));
    let size = (want.mode == Mode::Mig).then(|| (want.device.part_of(want.device.memory_bytes), sms));
    Fit {
        size,
        in_use: account.used_as.is_some(),
        left: by_use.min(part(memory_left, bookable(want.device, config))),
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
    /// Sorts the device to take first first.
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
