//! Which device serves a request: [`Request`], [`Inventory`] and [`Ledger`] in, [`Placement`] out. Pure.

#[cfg(test)]
pub mod accounts_tests;
mod bookings;
mod closest;
mod dynamic_mig_order;
#[cfg(any(test, feature = "fixtures"))]
pub mod fixture;
mod make_room;
#[cfg(test)]
mod messages_tests;
#[cfg(test)]
mod mig_tests;
#[cfg(test)]
mod pairs_tests;
mod refusal;
mod resume;
mod select;
#[cfg(test)]
mod several_tests;
#[cfg(test)]
pub mod tests;

use std::collections::BTreeSet;

use crate::config::Config;
use crate::inventory::{Device, Inventory, LeftOut};
use crate::ledger::{DaemonKey, Lease, LeaseId, LeasedMigDevice, Ledger, Waiter};
use crate::request::Request;
use crate::share::{Devices, Guarding, Isolation, Memory, MigCapability, Mode, Percent, Priority, Suspend};
use crate::text::{add_fix, add_why, list_some};
use bookings::Account;
use select::Fit;

pub use bookings::{Bookings, SERVER_BYTES, bookings, client_limit};
pub use dynamic_mig_order::{Most, Order, Site, Size};
pub use make_room::may_make_room;
pub(crate) use make_room::{Suspendable, whom_to_suspend};
pub use refusal::{Refusal, describe_request};
pub use resume::{check_resume, why_kept_away};
pub(crate) use select::selected;
pub use select::{ambiguous, meant, named, only, rule, wants_mig};

/// The devices and the mode chosen for a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// Device UUIDs in the order the container sees them.
    pub devices: Vec<String>,
    /// The MIG devices among them.
    pub mig_devices: Vec<LeasedMigDevice>,
    /// The mode in force.
    pub mode: Mode,
    /// Shared or dedicated.
    pub isolation: Isolation,
    /// The MPS server it needs: mode mps, or time-slice with memory.
    pub daemon: Option<DaemonKey>,
    /// SM limit of the whole container.
    pub sm: Option<Percent>,
    /// Memory of the whole container on each device, in bytes (whole MiB).
    pub memory_bytes: Option<u64>,
    /// CUDA processes expected at once.
    pub processes: u32,
    /// MPS client priority.
    pub priority: Priority,
    /// The guard's action on its processes, if the container or its named share sets it.
    pub guard: Option<Guarding>,
    /// Whether its GPU state may be put into host memory.
    pub suspend: Suspend,
    /// Which access it gets to all MIG instances, in addition to its own.
    pub mig_caps: Vec<MigCapability>,
    /// The requested memory is so close to the free memory that NVML last reported that a refresh should come first.
    pub refresh_first: bool,
    /// How many other leases are on its devices, where the ledger was looked at.
    pub neighbours: Option<usize>,
    /// Warnings for the user, one line each.
    pub warnings: Vec<String>,
}

/// [`place_within`] of root's.
///
/// # Errors
/// As [`place_within`].
#[cfg(any(test, feature = "fixtures"))]
pub fn place(
    request: &Request,
    id: &LeaseId,
    inventory: &Inventory,
    ledger: &Ledger,
    config: &Config,
) -> Result<Placement, Box<Refusal>> {
    place_within(request, id, inventory, ledger, config, &|_| true)
}

/// Whether a user's policy allows a placement.
type Allows<'a> = &'a dyn Fn(&Placement) -> bool;

/// Chooses devices for `request`. `id` is the lease id that it will have, which also names a dedicated server. Only
/// placements that a policy `allows` are advised.
///
/// # Errors
/// [`Refusal`]: the request, the reason that decides, and advice.
pub fn place_within(
    request: &Request,
    id: &LeaseId,
    inventory: &Inventory,
    ledger: &Ledger,
    config: &Config,
    allows: Allows<'_>,
) -> Result<Placement, Box<Refusal>> {
    let world = World { inventory, ledger, config };
    find(request, id, world).map_err(|mut refusal| {
        if let Some(left_out) = describe_left_out(request, world).filter(|_| !refusal.left_out) {
            refusal.message = add_why(&refusal.message, &left_out);
        }
        let waits = refusal.temporary && !refusal.left_out;
        let wait = waits.then(|| advise_waiting(request, config)).flatten();
        let advice = refusal::advice(request, id, world, allows).into_iter().chain(wait);
        refusal.message = advice.fold(refusal.message, |message, way| add_fix(&message, &way));
        refusal
    })
}

/// For each who waits, its place among those for whom one of the same devices may do: 1 is served first.
pub fn places<'w>(
    waiters: impl IntoIterator<Item = &'w Waiter>,
    inventory: &Inventory,
    config: &Config,
) -> Vec<usize> {
    let ledger = &Ledger::default();
    let world = World { inventory, ledger, config };
    let mut before: Vec<BTreeSet<usize>> = Vec::new();
    let place = |waiter: &Waiter| {
        let slots = waiter.request().and_then(|request| select::slots(&request, world).ok());
        let devices: BTreeSet<usize> = slots.into_iter().flatten().flatten().collect();
        let place = 1 + before.iter().filter(|other| !other.is_disjoint(&devices)).count();
        before.push(devices);
        place
    };
    waiters.into_iter().map(place).collect()
}

/// The place of the one with entry `id`, as [`places`].
pub fn place_of(id: &LeaseId, waiters: &[Waiter], inventory: &Inventory, config: &Config) -> Option<usize> {
    let number = waiters.iter().position(|waiter| waiter.id == *id)?;
    places(waiters, inventory, config).get(number).copied()
}

/// The advice to wait, for a request that does not, as far as `[limits] wait_max` allows it.
pub(crate) fn advise_waiting(request: &Request, config: &Config) -> Option<String> {
    let seconds = config.limits.wait_max.as_secs().min(60);
    (request.wait.is_zero() && seconds > 0).then(|| format!("sublet.wait={seconds}s waits for room"))
}

/// How many leases but `id` are on the devices with these UUIDs.
pub(crate) fn count_neighbours(id: &LeaseId, devices: &[String], ledger: &Ledger) -> usize {
    let is_beside =
        |lease: &&Lease| lease.id != *id && lease.devices.iter().any(|uuid| devices.contains(uuid));
    ledger.leases.iter().filter(is_beside).count()
}

/// [`place_within`], with the bare reason, which is found in a fraction of the time.
pub(crate) fn find(request: &Request, id: &LeaseId, world: World<'_>) -> Result<Placement, Box<Refusal>> {
    let inventory = world.inventory;
    if let Some(cap) = request.mig_caps.iter().find(|cap| inventory.driver.mig_cap(**cap).is_none()) {
        let why = format!(
            "the driver tells of no MIG capability `{cap}` (/proc/driver/nvidia-caps/mig-minors); fix: leave out \
             sublet.mig-caps"
        );
        return Err(Box::new(Refusal::never(why)));
    }
    let slots = select::slots(request, world).map_err(|why| {
        let left_out = describe_left_out(request, world);
        let counted = matches!(request.devices, Devices::Any(_)) && !inventory.devices.is_empty();
        let why = match &left_out {
            None => why,
            Some(left_out) if counted => add_why(&why, left_out),
            Some(left_out) => format!("every GPU that could serve it is left out; why: {left_out}"),
        };
        let left_out = left_out.is_some();
        let refresh_first = left_out || wants_mig(request);
        Box::new(Refusal { refresh_first, left_out, temporary: left_out, ..Refusal::never(why) })
    })?;
    let mut verdicts = Vec::new();
    for smallest in smallest_sizes(request, &slots, inventory) {
        let mut amount = request.clone();
        amount.memory =
            request.memory.map(|memory| smallest.map_or(memory, |bytes| Memory::Bytes(memory.on(bytes))));
        verdicts = judge(&amount, id, &slots, smallest, world);
        let memory = |index: &usize| inventory.devices[*index].memory_bytes;
        let Some((devices, fits)) = choose(&slots, &verdicts, smallest, world) else { continue };
        // If all of these are larger, the percentage of their smallest did not fit before.
        if smallest.is_none() || devices.iter().map(memory).min() == smallest {
            let placement = placement(request, inventory, devices, &fits);
            let neighbours = Some(count_neighbours(id, &placement.devices, world.ledger));
            return Ok(Placement { neighbours, ..placement });
        }
    }
    let mut refusal = refuse(request, &slots, &verdicts, world);
    refusal.refresh_first |= describe_left_out(request, world).is_some();
    Err(Box::new(refusal))
}

/// The left-out GPUs that the request could have.
fn describe_left_out(request: &Request, world: World<'_>) -> Option<String> {
    let left_out = list_some(select::left_out(request, world).map(LeftOut::sentence), "; ");
    Some(left_out).filter(|text| !text.is_empty())
}

/// The possible memory sizes, the largest first, of the device with the least memory among several: a percentage refers to
/// it, so that the amount is the same on all. `[None]`: one device, or no percentage.
fn smallest_sizes(request: &Request, slots: &[Vec<usize>], inventory: &Inventory) -> Vec<Option<u64>> {
    if slots.len() < 2 || wants_mig(request) || !matches!(request.memory, Some(Memory::Share(_))) {
        return vec![None];
    }
    let sizes = slots.iter().flatten().filter_map(|index| inventory.devices.get(*index));
    let sizes: BTreeSet<u64> = sizes.map(|device| device.memory_bytes).collect();
    sizes.into_iter().rev().map(Some).collect()
}

/// Fits `request` on each permitted device; if `smallest` is given, only on devices with at least that many bytes.
fn judge(
    request: &Request,
    id: &LeaseId,
    slots: &[Vec<usize>],
    smallest: Option<u64>,
    world: World<'_>,
) -> Vec<Option<Result<Fit, Misfit>>> {
    let several = slots.len() > 1;
    let verdict = |(index, device): (usize, &Device)| {
        let large_enough = smallest.is_none_or(|smallest| device.memory_bytes >= smallest);
        let wanted = large_enough && slots.iter().any(|slot| slot.contains(&index));
        wanted.then(|| select::fit(request, id, device, several, world))
    };
    (0..).zip(&world.inventory.devices).map(verdict).collect()
}

/// The placement on a MIG device that does not exist yet, as far as it does not depend on the device's size; for the rest
/// see [`Size::within`].
pub fn expected(request: &Request) -> Placement {
    let mode = request.mode.unwrap_or(Mode::Mig);
    let memory = request.memory.filter(|_| mode != Mode::Mig).map(|memory| memory.on(0));
    Placement {
        devices: vec![String::new()],
        mig_devices: Vec::new(),
        mode,
        isolation: request.isolation,
        daemon: None,
        sm: request.sm,
        memory_bytes: memory,
        processes: request.processes.get(),
        priority: request.priority,
        guard: request.guard,
        suspend: request.suspend,
        mig_caps: request.mig_caps.clone(),
        refresh_first: false,
        neighbours: None,
        warnings: Vec::new(),
    }
}

/// The best devices for all slots, all in one mode, with their fits. If possible, a device with `smallest` bytes is among
/// them, because the amount is a percentage of that.
fn choose<'a>(
    slots: &[Vec<usize>],
    verdicts: &'a [Option<Result<Fit, Misfit>>],
    smallest: Option<u64>,
    world: World<'_>,
) -> Option<(Vec<usize>, Vec<&'a Fit>)> {
    let fit_of = |index: usize| verdicts[index].as_ref().and_then(|verdict| verdict.as_ref().ok());
    let mut fits: Vec<(usize, &Fit)> =
        (0..verdicts.len()).filter_map(|index| Some((index, fit_of(index)?))).collect();
    let larger =
        |index: usize| smallest.is_some_and(|bytes| world.inventory.devices[index].memory_bytes > bytes);
    fits.sort_by_key(|(index, fit)| (larger(*index), fit.rank(world.config.placement.policy)));
    if slots.len() > 1 {
        // A process sees one compute instance of each GPU instance (MIG User Guide, "CUDA visible devices").
        let mut seen = BTreeSet::new();
        fits.retain(|(index, _)| {
            let device = &world.inventory.devices[*index];
            device.mig_device.as_ref().is_none_or(|part| seen.insert((device.gpu(), part.gi)))
        });
    }
    // Several GPUs, each of which may be any of the same.
    let is_gpu = |index: &usize| !world.inventory.devices[*index].is_mig();
    let any = slots.len() > 1 && slots.iter().all(|slot| *slot == slots[0]) && slots[0].iter().all(is_gpu);
    let alike = |(index, fit): &(usize, &Fit)| {
        let (used, left, memory, _) = fit.rank(world.config.placement.policy);
        ((larger(*index), used, left, memory), *index)
    };
    fits.iter().find_map(|(_, best)| {
        let of_mode = fits.iter().filter(|(_, fit)| fit.mode == best.mode);
        let ranked: Vec<usize> = if any {
            closest::prefer_joined(&of_mode.map(alike).collect::<Vec<_>>(), slots.len(), world.inventory)
        } else {
            of_mode.map(|(index, _)| *index).collect()
        };
        let devices = select::assign(slots, &ranked)?;
        let chosen = devices.iter().filter_map(|index| fit_of(*index)).collect();
        Some((devices, chosen))
    })
}

fn mig_devices(inventory: &Inventory, devices: &[usize]) -> Vec<LeasedMigDevice> {
    let leased = |index: &usize| {
        let device = &inventory.devices[*index];
        let mig_device = device.mig_device.as_ref()?;
        Some(LeasedMigDevice {
            uuid: device.uuid.clone(),
            gpu: mig_device.gpu.clone(),
            gi: mig_device.gi,
            ci: mig_device.ci,
            placement: mig_device.placement,
            sm: mig_device.gpu_sm_count.zip(device.sm_count).map(|(all, own)| Percent::of_all(own, all)),
            memory_bytes: Some(device.part_of(device.memory_bytes)),
        })
    };
    devices.iter().filter_map(leased).collect()
}

fn placement(request: &Request, inventory: &Inventory, mut devices: Vec<usize>, fits: &[&Fit]) -> Placement {
    if matches!(request.devices, Devices::Any(_)) {
        devices.sort_unstable();
    }
    let first = fits.first();
    let mode = first.map_or(request.default_mode, |fit| fit.mode);
    let least = |index: &usize| select::warn_of_minimum(request, mode, &inventory.devices[*index]);
    Placement {
        warnings: devices.iter().find_map(least).into_iter().collect(),
        mig_devices: mig_devices(inventory, &devices),
        devices: devices.iter().map(|index| inventory.devices[*index].uuid.clone()).collect(),
        mode,
        isolation: first.map_or(request.isolation, |fit| fit.isolation),
        daemon: first.and_then(|fit| fit.daemon.clone()),
        // With mode mig it only helped to choose the device and sets no limit.
        sm: request.sm.filter(|_| mode != Mode::Mig),
        memory_bytes: first.and_then(|fit| fit.memory_bytes),
        refresh_first: fits.iter().any(|fit| fit.refresh_first),
        ..expected(request)
    }
}

/// Waiting helps if the request would fit once all temporary reasons are gone.
fn refuse(
    request: &Request,
    slots: &[Vec<usize>],
    verdicts: &[Option<Result<Fit, Misfit>>],
    world: World<'_>,
) -> Refusal {
    let devices = &world.inventory.devices;
    let (mut misfits, mut in_time): (Vec<(&Device, &Misfit)>, Vec<usize>) = (Vec::new(), Vec::new());
    for (index, verdict) in verdicts.iter().enumerate() {
        match verdict {
            Some(Err(misfit)) => {
                misfits.push((&devices[index], misfit));
                in_time.extend(misfit.temporary.then_some(index));
            }
            Some(Ok(_)) => in_time.push(index),
            None => {}
        }
    }
    if misfits.is_empty() {
        let why = "the devices' modes differ; why: [[device]] use says so; fix: name sublet.mode";
        return Refusal::never(why.to_owned());
    }
    let temporary = select::assign(slots, &in_time).is_some();
    Refusal {
        temporary,
        refresh_first: misfits.iter().any(|(_, misfit)| misfit.refresh),
        candidates: misfits.iter().map(|misfit| refusal::describe(misfit, world)).collect(),
        ..Refusal::never(refusal::describe_misfits(request, &misfits, temporary, world))
    }
}

/// The inventory, ledger and configuration that a request is compared with.
#[derive(Clone, Copy)]
pub(crate) struct World<'a> {
    pub inventory: &'a Inventory,
    pub ledger: &'a Ledger,
    pub config: &'a Config,
}

/// Why a device cannot serve the request.
#[derive(Clone, Debug)]
struct Misfit {
    /// The reason, which may have more to it ([`crate::text::in_lines`]). In messages it follows the device's name.
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

    /// NVML does not report it, and waiting does not change that.
    fn not_reported(reason: impl Into<String>) -> Self {
        Self { refresh: true, ..Self::never(reason) }
    }

    fn as_reported(reason: impl Into<String>) -> Self {
        Self { refresh: true, ..Self::now(reason) }
    }
}

/// A request on one device, completed by that device's configuration.
struct Want<'a> {
    pub request: &'a Request,
    pub device: &'a Device,
    pub mode: Mode,
    pub isolation: Isolation,
    /// The use of the device that it will have in the bookings.
    pub used_as: Mode,
    pub daemon: Option<DaemonKey>,
    pub memory: Option<u64>,
    /// Bytes that it adds to the bookings, including the bytes of a new server.
    pub books: u64,
    pub account: Account<'a>,
    /// One of several devices of the container.
    pub several: bool,
}
