//! Why no device can serve a request now, and the advice: another GPU, or `sublet.isolation=dedicated`, and on which
//! container.

use std::num::NonZeroU32;

use super::bookings::{SERVER_BYTES, bookings, use_of};
use super::select::{slots, wants_mig};
use super::{Misfit, World, find};
use crate::config::Config;
use crate::inventory::Device;
use crate::ledger::{DaemonKey, Lease, LeaseId, Ledger};
use crate::request::Request;
use crate::share::{Devices, Isolation, MIB, Memory, Mode, Percent, show_bytes};
use crate::text::{self, safe};

/// A message names this many devices, and holders of each, and counts the rest.
const NAMED: usize = 4;

/// A request that no device can serve now.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// One line: the request, each device's room and holders; of [`super::place`] also advice.
    pub message: String,
    /// Whether waiting could help.
    pub temporary: bool,
    /// It depends on NVML's last report, so a refresh may change it.
    pub refresh_first: bool,
    /// Whether the GPU asked for is left out of the inventory.
    pub left_out: bool,
    /// The devices, by UUID, that may have more room later; `None` if that does not help.
    pub(super) open: Option<Vec<String>>,
}

impl Refusal {
    /// A refusal that waiting does not change.
    pub(super) fn never(request: &Request, why: &str) -> Self {
        let message = format!("no place for {}: {why}", describe_request(request));
        Self { message, temporary: false, refresh_first: false, left_out: false, open: None }
    }
}

/// The room on the `open` devices.
pub(super) fn describe_rooms(open: &[String], world: World<'_>) -> String {
    let devices = open.iter().filter_map(|uuid| world.inventory.device(uuid));
    let room: Vec<String> =
        devices.filter_map(|device| describe_room(device, world.ledger, world.config)).collect();
    let room = if room.is_empty() { "nothing".to_owned() } else { list_some(room.into_iter(), ", or ") };
    format!("would fit now: {room}; sublet.wait=60s waits for a place")
}

/// Why each device does not serve it. A reason of several devices is given once.
pub(super) fn describe_misfits(misfits: &[(&Device, &Misfit)], world: World<'_>) -> String {
    let mut said: Vec<(String, Vec<String>)> = Vec::new();
    for (device, misfit) in misfits {
        let why = describe(device, misfit, world);
        match said.iter_mut().find(|(known, _)| *known == why) {
            Some((_, devices)) => devices.push(device.label()),
            None => said.push((why, vec![device.label()])),
        }
    }
    let each = said.into_iter().map(|(why, mut devices)| {
        let first = devices.remove(0);
        let others = list_some(devices.into_iter(), ", ");
        let others = if others.is_empty() { others } else { format!(" (the same on {others})") };
        format!("{first} {why}{others}")
    });
    list_some(each, "; ")
}

/// As `mps, 60 % SM, 8 GiB on any GPU`.
fn describe_request(request: &Request) -> String {
    let mut parts = vec![request.mode.map_or_else(|| "a GPU".to_owned(), |mode| mode.to_string())];
    parts.extend((request.isolation == Isolation::Dedicated).then(|| "dedicated".to_owned()));
    parts.extend(request.sm.map(|sm| format!("{sm} % SM")));
    parts.extend(request.memory.map(|memory| match memory {
        Memory::Bytes(bytes) => show_bytes(bytes),
        Memory::Share(share) => format!("{share} % of the memory"),
    }));
    parts.extend((request.processes.get() > 1).then(|| format!("{} processes", request.processes)));
    parts.extend(request.mig.as_deref().map(safe));
    let kind = if wants_mig(request) { "MIG device" } else { "GPU" };
    let devices = match &request.devices {
        Devices::Any(count) if count.get() == 1 => format!("any {kind}"),
        Devices::Any(count) => format!("any {count} {kind}s"),
        Devices::All => format!("all {kind}s"),
        Devices::These(selectors) if selectors.len() == 1 => format!("the {kind} named"),
        Devices::These(selectors) => format!("the {} {kind}s named", selectors.len()),
    };
    format!("{} on {devices}", parts.join(", "))
}

/// In messages it follows the device's name.
fn describe(device: &Device, misfit: &Misfit, world: World<'_>) -> String {
    let text = format!("({}) {}", safe(device.kind()), misfit.reason);
    if !misfit.temporary {
        return text;
    }
    let bookings = bookings(device, world.ledger, world.config);
    let holders: Vec<String> = world.ledger.on_device(&device.uuid).map(describe_holder).collect();
    let held = if holders.is_empty() { String::new() } else { "; held by ".to_owned() };
    let holders = list_some(holders.into_iter(), ", ");
    format!("{text} [left: {} % SM, {}{held}{holders}]", bookings.sm_free, show_bytes(bookings.memory_free))
}

/// As `3f2a9c1b2d4e (mps, 25 % SM, 8 GiB)`.
fn describe_holder(lease: &Lease) -> String {
    let mut parts = vec![lease.mode.to_string()];
    parts.extend(lease.sm.map(|sm| format!("{sm} % SM")));
    parts.extend(lease.memory_bytes.map(show_bytes));
    format!("{} ({})", text::short_id(&lease.container.id), parts.join(", "))
}

fn describe_room(device: &Device, ledger: &Ledger, config: &Config) -> Option<String> {
    // It is kept for a container that is being started, or is being destroyed.
    if ledger.dynamic_instance(device).is_some_and(|instance| instance.going || instance.awaited.is_some()) {
        return None;
    }
    let bookings = bookings(device, ledger, config);
    let (on, memory) = (device.label(), |bytes: u64| show_bytes(bytes / MIB * MIB));
    let beside_server = memory(bookings.memory_free.saturating_sub(SERVER_BYTES));
    let turns = (config.limits.time_slice_max as usize).saturating_sub(bookings.leases);
    match bookings.used_as {
        Some(Mode::Mps) => {
            let sm = bookings.sm_free.min(Percent::WHOLE);
            Some(format!("mps with at most {sm} % SM and {} on {on}", memory(bookings.memory_free)))
        }
        Some(Mode::TimeSlice) if turns > 0 => {
            Some(format!("time-slice with at most {beside_server} on {on}"))
        }
        None => Some(format!("mps or time-slice with at most {beside_server} on {on}")),
        Some(_) => None,
    }
}

/// The first few of `texts`, and the number of the rest.
pub(super) fn list_some(texts: impl Iterator<Item = String>, between: &str) -> String {
    let mut texts: Vec<String> = texts.collect();
    let others = texts.len().saturating_sub(NAMED);
    texts.truncate(NAMED);
    let named = texts.join(between);
    if others == 0 { named } else { format!("{named}{between}and {others} more") }
}

/// The ways out of a refusal, each of which has been tried. None of them takes a running container's share away.
pub(super) fn advice(request: &Request, id: &LeaseId, world: World<'_>) -> Vec<String> {
    let isolation =
        || advise_dedicated(request, id, world).or_else(|| advise_dedicated_for_holders(request, id, world));
    advise_other_gpu(request, id, world).into_iter().chain(isolation()).collect()
}

/// A GPU that would take the request, if the GPU that the request names exists and does not take it.
fn advise_other_gpu(request: &Request, id: &LeaseId, world: World<'_>) -> Option<String> {
    let Devices::These(named) = &request.devices else { return None };
    if named.len() != 1 || wants_mig(request) {
        return None;
    }
    slots(request, world).ok()?;
    let anywhere = Request { devices: Devices::Any(NonZeroU32::MIN), ..request.clone() };
    let found = find(&anywhere, id, world).ok()?;
    let device = world.inventory.device(found.devices.first()?)?;
    Some(format!("{} would take it: name that one, or leave out sublet.gpu", device.label()))
}

/// Where an MPS server of its own would fit and the device's common one does not.
fn advise_dedicated(request: &Request, id: &LeaseId, world: World<'_>) -> Option<String> {
    let alone = Request { isolation: Isolation::Dedicated, ..request.clone() };
    let fits = request.isolation == Isolation::Shared && find(&alone, id, world).is_ok();
    fits.then(|| "with sublet.isolation=dedicated it would fit, in turns with the others there".to_owned())
}

/// Where it would fit if the containers on a shared MPS server had servers of their own.
fn advise_dedicated_for_holders(request: &Request, id: &LeaseId, world: World<'_>) -> Option<String> {
    let mut apart = world.ledger.clone();
    for lease in apart.leases.iter_mut().filter(|lease| is_on_shared_server(lease)) {
        lease.isolation = Isolation::Dedicated;
        lease.daemon = Some(DaemonKey(lease.id.to_string()));
    }
    let found = find(request, id, World { ledger: &apart, ..world }).ok()?;
    let beside = |lease: &&Lease| {
        is_on_shared_server(lease) && lease.devices.iter().any(|uuid| found.devices.contains(uuid))
    };
    let others = world.ledger.leases.iter().filter(beside);
    let others: Vec<String> = others.map(|lease| text::short_id(&lease.container.id)).collect();
    let (those, them) = match others.len() {
        0 => return None,
        1 => ("that container", "it"),
        _ => ("those containers", "them"),
    };
    let named = list_some(others.into_iter(), ", ");
    Some(format!(
        "beside {named} it would fit if {those} had sublet.isolation=dedicated, in turns with {them}"
    ))
}

fn is_on_shared_server(lease: &Lease) -> bool {
    lease.daemon.is_some() && use_of(lease.mode, lease.isolation) == Mode::Mps
}
