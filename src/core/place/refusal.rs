//! Why no device can serve a request now, in a line that stands alone and one that says more; and which request would be
//! served in its place: less, another GPU or mode, or `sublet.isolation=dedicated`, and on which container.

use std::cmp::Reverse;

use super::bookings::{SERVER_BYTES, bookings, use_of};
use super::select::wants_mig;
use super::{Allows, Misfit, World, find};
use crate::config::Config;
use crate::inventory::{Device, Inventory};
use crate::ledger::{ANOTHER_USERS, DaemonKey, Lease, LeaseId};
use crate::request::{Request, default_isolation};
use crate::share::{Devices, Isolation, MIB, Memory, Mode, Priority, Selector, show_bytes};
use crate::text::{self, add_why, first_line, list_some, safe};

/// How long a first line is, in characters: as a terminal of 80 has room for behind `sublet: `.
const FIRST_LINE: usize = 72;

/// A request that no device can serve now.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// The refusal and its reason, as [`text::in_lines`] takes it apart; of [`super::place_within`] also the ways out.
    pub message: String,
    /// Each device that could have served it, and why it does not.
    pub candidates: Vec<String>,
    /// Whether waiting could help.
    pub temporary: bool,
    /// It depends on NVML's last report, so a refresh may change it.
    pub refresh_first: bool,
    /// Whether the GPU asked for is left out of the inventory.
    pub left_out: bool,
}

impl Refusal {
    /// A refusal that waiting does not change.
    pub(crate) fn never(message: String) -> Self {
        Self { message, candidates: Vec::new(), temporary: false, refresh_first: false, left_out: false }
    }

    /// It tells of the `allowed` devices, where a user's policy leaves fewer than the host has.
    #[must_use]
    pub fn of_policy(mut self: Box<Self>, allowed: &Inventory, host: &Inventory) -> Box<Self> {
        let are_fewer = allowed.devices.len() < host.devices.len();
        if let Some((none, what)) = self.message.split_once(" of this host ").filter(|_| are_fewer) {
            let what = what.replacen("; why: it has ", "; why: it allows ", 1);
            self.message = format!("{none} that your policy allows {what}");
        }
        self
    }
}

/// The reason that decides, the share that is left there, and the other reasons. Devices with one reason are named
/// together.
pub(super) fn describe_misfits(
    request: &Request,
    misfits: &[(&Device, &Misfit)],
    temporary: bool,
    world: World<'_>,
) -> String {
    let mut groups: Vec<(&Misfit, Vec<&Device>)> = Vec::new();
    for &(device, misfit) in misfits {
        let is_same = |(known, devices): &&mut (&Misfit, Vec<&Device>)| {
            let of_gpu = |device: &Device| device.is_mig().then_some(device.index);
            first_line(&known.reason) == first_line(&misfit.reason) && of_gpu(devices[0]) == of_gpu(device)
        };
        match groups.iter_mut().find(is_same) {
            Some((_, devices)) => devices.push(device),
            None => groups.push((misfit, vec![device])),
        }
    }
    // The device that lacks least, among those for which waiting helps as it helps the request.
    groups.sort_by_cached_key(|(misfit, devices)| {
        let left = bookings(devices[0], world.ledger, world.config);
        (misfit.temporary != temporary, Reverse((left.sm_free, left.memory_free, devices.len())))
    });
    let Some(((misfit, devices), rest)) = groups.split_first() else { return String::new() };
    let said = |(misfit, devices): &(&Misfit, Vec<&Device>)| {
        format!("{} {}", name_together(devices), first_line(&misfit.reason))
    };
    let [of_request, alone] =
        if temporary { ["no room for", "no room"] } else { ["cannot serve", "refused"] };
    let decides = said(&groups[0]);
    let mut message = format!("{of_request} {}: {decides}", describe_request(request));
    if message.chars().count() > FIRST_LINE {
        message = format!("{alone}: {decides}");
    }
    message += &misfit.reason[first_line(&misfit.reason).len()..];
    let room = Some(describe_room(devices, world)).filter(|room| misfit.temporary && !room.is_empty());
    let rest = match rest {
        [] => None,
        [other] => Some(said(other)),
        _ => Some("the other devices have other reasons".to_owned()),
    };
    room.into_iter().chain(rest).fold(message, |message, why| add_why(&message, &why))
}

/// As `GPU 0`, or `each of 7 MIG devices of GPU 0`.
fn name_together(devices: &[&Device]) -> String {
    match (devices[0], devices.len()) {
        (one, 1) => one.label(),
        (first, count) if first.is_mig() => format!("each of {count} MIG devices of GPU {}", first.index),
        (_, count) => format!("each of {count} GPUs"),
    }
}

/// As `mps, 60 % SM, 8 GiB`.
pub fn describe_request(request: &Request) -> String {
    let mut parts = vec![request.mode.map_or_else(|| "a share".to_owned(), |mode| mode.to_string())];
    parts.extend((request.isolation == Isolation::Dedicated).then(|| "dedicated".to_owned()));
    parts.extend(request.sm.map(|sm| format!("{sm} % SM")));
    parts.extend(request.memory.map(|memory| match memory {
        Memory::Bytes(bytes) => show_bytes(bytes),
        Memory::Share(share) => format!("{share} % of the memory"),
    }));
    parts.extend((request.processes.get() > 1).then(|| format!("{} processes", request.processes)));
    parts.extend(request.mig.as_deref().map(safe));
    let kind = if wants_mig(request) { "MIG devices" } else { "GPUs" };
    let devices = match &request.devices {
        Devices::Any(count) if count.get() > 1 => format!(" on {count} {kind}"),
        Devices::All => format!(" on all {kind}"),
        Devices::These(selectors) if selectors.len() > 1 => {
            format!(" on the {} {kind} named", selectors.len())
        }
        Devices::Any(_) | Devices::These(_) => String::new(),
    };
    parts.join(", ") + &devices
}

/// One of [`Refusal::candidates`].
pub(super) fn describe((device, misfit): &(&Device, &Misfit), world: World<'_>) -> String {
    let text = format!("{} ({}) {}", device.label(), safe(device.kind()), misfit.reason);
    if misfit.temporary { format!("{text} [{}]", describe_room(&[device], world)) } else { text }
}

/// The room of a device, and who holds the rest of it or of several.
fn describe_room(devices: &[&Device], world: World<'_>) -> String {
    let is_there = |lease: &&Lease| devices.iter().any(|device| lease.books(&device.uuid));
    let holders = list_some(world.ledger.leases.iter().filter(is_there).map(describe_holder), ", ");
    let held = if holders.is_empty() { holders } else { format!("held by {holders}") };
    let [device] = devices else { return held };
    let bookings = bookings(device, world.ledger, world.config);
    let left = format!("{}, {} left", bookings.sm_left(), show_bytes(bookings.memory_free));
    if held.is_empty() { left } else { format!("{left}; {held}") }
}

/// As `3f2a9c1b2d4e (mps, 25 % SM, 8 GiB)`.
fn describe_holder(lease: &Lease) -> String {
    let mut parts = vec![lease.mode.to_string()];
    parts.extend(lease.sm.map(|sm| format!("{sm} % SM")));
    parts.extend(lease.memory_bytes.map(show_bytes));
    format!("{} ({})", name_holder(lease), parts.join(", "))
}

/// By its id, in place of which people are shown its name ([`crate::names`]).
fn name_holder(lease: &Lease) -> String {
    let id = &lease.container.id;
    text::short_id(if id.is_empty() { "a container that starts" } else { id })
}

/// The ways out of a refusal, each of which has been tried. None of them takes a running container's share away.
pub(super) fn advice(request: &Request, id: &LeaseId, world: World<'_>, allows: Allows<'_>) -> Vec<String> {
    let fits = |(changed, _): &Way| find(changed, id, world).is_ok_and(|placement| allows(&placement));
    let devices = || world.inventory.devices.iter();
    let amount = |(changed, _): &Way| (changed.sm, changed.memory.map(|memory| memory.on(u64::MAX)));
    let less = devices().filter_map(|device| less(request, device, world)).filter(&fits).max_by_key(amount);
    let elsewhere = other_gpus(request, world).into_iter().find(&fits);
    let alone = (Request { isolation: Isolation::Dedicated, ..request.clone() }, ALONE.to_owned());
    let alone = Some(alone).filter(|way| request.isolation == Isolation::Shared && fits(way));
    let other_mode = modes(request, world.config).into_iter().find(&fits);
    let apart = alone.is_none().then(|| advise_dedicated_for_holders(request, id, world, allows)).flatten();
    let ways = [less, elsewhere, alone, other_mode].into_iter().flatten().take(MOST_WAYS);
    ways.map(|(_, text)| text).chain(apart).collect()
}

/// A request in place of the one that is refused, and its text in the message: first the annotations that make it.
type Way = (Request, String);

/// At most so many of them are in a message.
const MOST_WAYS: usize = 2;

/// An MPS server of its own fits where the device's common one does not.
const ALONE: &str = "sublet.isolation=dedicated fits now, in turns";

/// As much of it as is left on `device`.
fn less(request: &Request, device: &Device, world: World<'_>) -> Option<Way> {
    let left = bookings(device, world.ledger, world.config);
    let server = if left.used_as == Some(Mode::Mps) { 0 } else { SERVER_BYTES };
    let bytes = left.memory_free.saturating_sub(server) / MIB * MIB;
    let sm = request.sm.filter(|sm| *sm > left.sm_free).map(|_| left.sm_free);
    let memory = request.memory.filter(|memory| memory.on(device.memory_bytes) > bytes).map(|_| bytes);
    let settings = sm.map(|sm| format!("sublet.sm={sm}")).into_iter();
    let settings: Vec<String> =
        settings.chain(memory.map(|bytes| format!("sublet.memory={}MiB", bytes / MIB))).collect();
    // A smaller percentage would not be read, nor no memory.
    let is_read = sm.is_none_or(|sm| sm.thousandths() >= 1000) && memory != Some(0);
    let is_written = !settings.is_empty() && is_read;
    let memory = memory.map(Memory::Bytes).or(request.memory);
    let changed = Request { sm: sm.or(request.sm), memory, ..request.clone() };
    is_written.then(|| (changed, settings.join(" ") + " fits now"))
}

/// Each other GPU, if it names one.
fn other_gpus(request: &Request, world: World<'_>) -> Vec<Way> {
    let names_one = matches!(&request.devices, Devices::These(named) if named.len() == 1);
    let named = |gpu: &Device| {
        let devices = Devices::These(vec![Selector::Index(gpu.index)]);
        (Request { devices, ..request.clone() }, format!("sublet.gpu={} fits now", gpu.index))
    };
    let gpus = world.inventory.gpus().filter(|_| names_one && !wants_mig(request));
    gpus.map(named).collect()
}

/// The other modes in which GPUs are shared, if nothing of it belongs to its own.
fn modes(request: &Request, config: &Config) -> Vec<Way> {
    let of_mps = request.sm.is_some() || request.priority != Priority::Normal || request.processes.get() > 1;
    if of_mps || wants_mig(request) || !config.limits.require.is_empty() {
        return Vec::new();
    }
    let is_whole = request.mode == Some(Mode::Exclusive);
    let shared = if is_whole { ", shared with others" } else { "" };
    let default = |mode| default_isolation(mode, &request.devices, config);
    let other = |mode| {
        let is_default = request.isolation == default(request.mode);
        let isolation = if is_default { default(Some(mode)) } else { request.isolation };
        let text = format!("sublet.mode={mode} fits now{shared}");
        (Request { mode: Some(mode), isolation, ..request.clone() }, text)
    };
    [Mode::Mps, Mode::TimeSlice].map(other).into()
}

/// Where it would fit if the containers on a shared MPS server had servers of their own.
fn advise_dedicated_for_holders(
    request: &Request,
    id: &LeaseId,
    world: World<'_>,
    allows: Allows<'_>,
) -> Option<String> {
    let mut apart = world.ledger.clone();
    for lease in apart.leases.iter_mut().filter(|lease| is_on_shared_server(lease)) {
        lease.isolation = Isolation::Dedicated;
        lease.daemon = Some(DaemonKey(lease.id.to_string()));
    }
    let found = find(request, id, World { ledger: &apart, ..world }).ok().filter(allows)?;
    let beside = |lease: &&Lease| {
        is_on_shared_server(lease) && lease.devices.iter().any(|uuid| found.devices.contains(uuid))
    };
    let neighbours: Vec<&Lease> = world.ledger.leases.iter().filter(beside).collect();
    // The reader can change neither another user's container nor what Slurm gave to a job.
    let is_out_of_reach = |lease: &&Lease| lease.is_of_job() || lease.container.id == ANOTHER_USERS;
    let (those, them) = match neighbours.len() {
        _ if neighbours.iter().any(is_out_of_reach) => return None,
        0 => return None,
        1 => ("that container", "it"),
        _ => ("those containers", "them"),
    };
    let named = list_some(neighbours.into_iter().map(name_holder), ", ");
    Some(format!(
        "beside {named} it would fit if {those} had sublet.isolation=dedicated, in turns with {them}"
    ))
}

fn is_on_shared_server(lease: &Lease) -> bool {
    lease.daemon.is_some() && use_of(lease.mode, lease.isolation) == Mode::Mps
}
