//! From selectors to devices: which devices a request may have, and which of those it takes. Then whether one device can serve a
//! request: first the rules that waiting for other containers does not change (the administrator's, the mode's, the driver's and
//! the hardware's), then the room that other leases leave.

use std::collections::BTreeMap;

use super::bookings::{
    Account, Bookings, SERVER_BYTES, bookable, check_memory, check_room, check_use, client_limit, use_of,
};
use super::{Misfit, Want, World};
use crate::config::{Config, DeviceRule, Policy, Use};
use crate::inventory::{
    ComputeMode, Device, Driver, Fact, Inventory, LeftOut, Virtualization, context_bytes,
};
use crate::ledger::{DaemonKey, Lease, LeaseId, LeasedMigDevice, Ledger};
use crate::request::Request;
use crate::share::{
    Devices, Isolation, MIB, Mode, Percent, Priority, Selector, bytes_of_process, glob_matches, show_bytes,
    sm_of_process,
};
use crate::text::{list_some, safe};

/// The first rule of the configuration that matches `device`.
pub fn rule<'a>(device: &Device, config: &'a Config) -> Option<&'a DeviceRule> {
    config.device.iter().find(|rule| rule_matches(&rule.matches, device))
}

/// `[[device]] match`: a selector as in `sublet.gpu`, or `all`. A match of a GPU does not match its MIG
/// devices.
fn rule_matches(text: &str, device: &Device) -> bool {
    let text = text.trim();
    if device.is_mig() {
        return Selector::parse(text).is_some_and(|selector| selector.is_mig() && is_part(&selector, device));
    }
    if let Some(glob) = text.strip_prefix("model:") {
        return glob_matches(glob, &device.name);
    }
    text == "all"
        || text.parse().is_ok_and(|index: u32| index == device.index)
        || (text.starts_with("GPU-") && starts_with(&device.uuid, text))
        || Selector::parse(text) == Some(Selector::BusId(device.bus_id.clone()))
}

/// Whether `request` is for MIG devices. Other selectors then name the GPUs to which the MIG devices belong.
pub fn wants_mig(request: &Request) -> bool {
    let named = matches!(&request.devices, Devices::These(these) if these.iter().any(Selector::is_mig));
    named || request.mig.is_some() || request.mode == Some(Mode::Mig)
}

/// For each device that the container gets, the indices into `inventory.devices` of the possible ones.
///
/// # Errors
/// One line: the selector that matches no device or several.
pub(super) fn slots(request: &Request, world: World<'_>) -> Result<Vec<Vec<usize>>, String> {
    let (mig, inventory) = (wants_mig(request), world.inventory);
    let all = indices(inventory, |device| device.is_mig() == mig);
    if all.is_empty() {
        return Err(if mig { no_mig_message(inventory) } else { "this host has no GPU".to_owned() });
    }
    let fitting = filter_profile(&all, request.mig.as_deref(), inventory)?;
    let kinds = if mig { "MIG devices" } else { "GPUs" };
    let (asked, have) = match &request.devices {
        Devices::All => (0, 0),
        Devices::Any(count) => (usize::try_from(count.get()).unwrap_or(usize::MAX), fitting.len()),
        Devices::These(selectors) => (selectors.len(), inventory.devices.len()),
    };
    if asked > have {
        return Err(format!("{asked} {kinds} requested, {have} present"));
    }
    let slots = match &request.devices {
        Devices::All => fitting.iter().map(|index| vec![*index]).collect(),
        Devices::Any(_) => vec![fitting; asked],
        Devices::These(selectors) => {
            let slot = |selector| {
                let found = slot(selector, mig, world)?;
                filter_profile(&found, request.mig.as_deref(), inventory)
            };
            selectors.iter().map(slot).collect::<Result<_, _>>()?
        }
    };
    describe_duplicate(&slots, inventory).map_or(Ok(slots), Err)
}

/// The GPUs whose MIG devices `request` may get, if it names at most one device, and no MIG device.
pub(super) fn mig_hosts<'a>(request: &Request, inventory: &'a Inventory, config: &Config) -> Vec<&'a Device> {
    let Devices::These(selectors) = &request.devices else { return inventory.gpus().collect() };
    let named = selectors.iter().flat_map(|one| matching(one, false, inventory, config));
    named.map(|index| &inventory.devices[index]).filter(|device| !device.is_mig()).collect()
}

/// The indices of the devices that are as `fits` says.
fn indices(inventory: &Inventory, fits: impl Fn(&Device) -> bool) -> Vec<usize> {
    (0..).zip(&inventory.devices).filter(|(_, device)| fits(device)).map(|(index, _)| index).collect()
}

fn no_mig_message(inventory: &Inventory) -> String {
    let capable = if inventory.gpus().any(|gpu| gpu.mig_enabled) {
        "no GPU of this host has any; fix: `sublet mig apply` creates them (root)"
    } else {
        "no GPU of this host is in MIG mode; fix: `sublet mig apply` switches it on (root); or share a whole GPU, \
         with sublet.sm and sublet.memory"
    };
    format!("this needs a MIG device, and {capable}")
}

/// The `devices` with the requested profile.
fn filter_profile(
    devices: &[usize],
    profile: Option<&str>,
    inventory: &Inventory,
) -> Result<Vec<usize>, String> {
    let Some(profile) = profile else { return Ok(devices.to_vec()) };
    let fits = |index: &&usize| inventory.devices[**index].kind() == profile;
    let found: Vec<usize> = devices.iter().filter(fits).copied().collect();
    if !found.is_empty() {
        return Ok(found);
    }
    let have = profiles(devices.iter().map(|index| &inventory.devices[*index]));
    Err(format!("no MIG device is a {}; why: {have}", safe(profile)))
}

/// As `0:1 and 5 more are 1g.18gb, 0:0 is a 2g.35gb`.
fn profiles<'a>(devices: impl Iterator<Item = &'a Device>) -> String {
    let mut of_kinds: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    devices.for_each(|device| of_kinds.entry(device.kind()).or_default().push(device.number()));
    let each = of_kinds.into_iter().map(|(kind, numbers)| match &numbers[..] {
        [first, rest @ ..] if !rest.is_empty() => {
            format!("{first} and {} more are {}", rest.len(), safe(kind))
        }
        one => format!("{} is a {}", one.concat(), safe(kind)),
    });
    list_some(each, ", ")
}

/// The devices that `text` names: a selector as in `sublet.gpu`, or `all` GPUs.
pub fn named<'a>(text: &str, inventory: &'a Inventory, config: &Config) -> Vec<&'a Device> {
    if text == "all" {
        return inventory.gpus().collect();
    }
    Selector::parse(text).map(|selector| selected(&selector, inventory, config)).unwrap_or_default()
}

/// The devices that a user means: as [`named`], or with the alias `text`. None is no error.
///
/// # Errors
/// `text` is the beginning of several UUIDs. The message lists the devices.
pub fn meant<'a>(text: &str, inventory: &'a Inventory, config: &Config) -> Result<Vec<&'a Device>, String> {
    let found = named(text, inventory, config);
    let several_do = text == "all" || text.starts_with("name:") || text.starts_with("model:");
    if found.len() > 1 && !several_do {
        return Err(ambiguous(text, &found));
    }
    let is_alias = config.device.iter().any(|rule| rule.name.as_deref() == Some(text));
    if found.is_empty() && is_alias {
        return Ok(named(&format!("name:{text}"), inventory, config));
    }
    Ok(found)
}

/// The message about `text` that names several devices where it may name only one.
pub fn ambiguous(text: &str, found: &[&Device]) -> String {
    format!(
        "{} matches {} devices; why: {}; fix: write more of it",
        safe(text),
        found.len(),
        list(found.iter().copied())
    )
}

/// `request` for the device `uuid` only, as a CDI device of a share means it.
///
/// # Errors
/// It is not for one device, or not for this one. In messages the text follows the name of either.
pub fn only(
    request: &Request,
    uuid: &str,
    inventory: &Inventory,
    config: &Config,
) -> Result<Request, String> {
    let Some(at) = inventory.devices.iter().position(|device| device.uuid == uuid) else {
        return Err("which this host does not have".to_owned());
    };
    let mig = wants_mig(request);
    if inventory.devices[at].is_mig() != mig {
        let (own, other) = if mig { ("MIG devices", "a GPU") } else { ("GPUs", "a MIG device") };
        return Err(format!("it is for {own}, but this is {other}"));
    }
    if !request.mig_caps.is_empty() {
        return Err("it has sublet.mig-caps, which CDI devices do not support: use annotations".to_owned());
    }
    let one = match &request.devices {
        Devices::Any(count) => count.get() == 1,
        Devices::All => inventory.devices.iter().filter(|device| device.is_mig() == mig).count() == 1,
        Devices::These(selectors) => selectors.len() == 1,
    };
    if !one {
        return Err("it needs several GPUs, and a CDI device has one".to_owned());
    }
    match &request.devices {
        Devices::These(named) if !matching(&named[0], mig, inventory, config).contains(&at) => {
            Err("its sublet.gpu names other GPUs".to_owned())
        }
        _ => {
            let uuid = uuid.to_owned();
            let this = if mig { Selector::MigUuid(uuid) } else { Selector::Uuid(uuid) };
            Ok(Request { devices: Devices::These(vec![this]), ..request.clone() })
        }
    }
}

fn slot(selector: &Selector, mig: bool, world: World<'_>) -> Result<Vec<usize>, String> {
    let World { inventory, config, .. } = world;
    let found = matching(selector, mig, inventory, config);
    let of_gpu = mig && !selector.is_mig();
    let several_do = of_gpu || matches!(selector, Selector::Name(_) | Selector::Model(_));
    let kind = if mig { "MIG device" } else { "GPU" };
    if found.is_empty() {
        return Err(format!(
            "no {kind} of this host is {}{}; why: it has {}",
            if of_gpu { "on the GPU " } else { "" },
            describe(selector),
            list(inventory.devices.iter().filter(|device| device.is_mig() == mig))
        ));
    }
    if found.len() > 1 && !several_do {
        let found: Vec<&Device> = found.iter().map(|index| &inventory.devices[*index]).collect();
        return Err(ambiguous(&describe(selector), &found));
    }
    Ok(found)
}

/// The devices that `selector` names.
pub(crate) fn selected<'a>(
    selector: &Selector,
    inventory: &'a Inventory,
    config: &Config,
) -> Vec<&'a Device> {
    let found = matching(selector, selector.is_mig(), inventory, config);
    found.into_iter().map(|index| &inventory.devices[index]).collect()
}

/// The devices that `selector` names. With `mig`, the MIG devices that it names or whose GPU it names.
fn matching(selector: &Selector, mig: bool, inventory: &Inventory, config: &Config) -> Vec<usize> {
    let has = |device: &Device| is_named_by(selector, device, config);
    let fits = |device: &Device| match selector {
        Selector::MigUuid(_) | Selector::MigIndex(..) => is_part(selector, device),
        // An alias may name either.
        Selector::Name(_) if has(device) => true,
        Selector::Name(_) => device.is_mig() && mig && inventory.device(device.gpu()).is_some_and(has),
        _ => device.is_mig() == mig && has(device),
    };
    let found = indices(inventory, fits);
    // A complete UUID names its own device, even if another UUID begins with it.
    let whole = |index: &usize| match (selector, &inventory.devices[*index]) {
        (Selector::Uuid(uuid), device) => device.gpu().eq_ignore_ascii_case(uuid),
        (Selector::MigUuid(uuid), device) => device.uuid.eq_ignore_ascii_case(uuid),
        _ => false,
    };
    if found.iter().any(whole) { found.into_iter().filter(whole).collect() } else { found }
}

/// Whether `selector` names `device`, or its GPU by the GPU's properties.
fn is_named_by(selector: &Selector, device: &Device, config: &Config) -> bool {
    match selector {
        Selector::Index(index) => device.index == *index,
        Selector::Uuid(uuid) => starts_with(device.gpu(), uuid),
        Selector::BusId(id) => *id == device.bus_id,
        Selector::Model(glob) => glob_matches(glob, &device.name),
        Selector::MigIndex(gpu, _) => device.index == *gpu,
        Selector::MigUuid(_) => device.mig_enabled,
        Selector::Name(name) => rule(device, config).is_some_and(|rule| rule.name.as_ref() == Some(name)),
    }
}

/// The left-out GPUs that `request` could have.
pub(super) fn left_out<'a>(request: &Request, world: World<'a>) -> impl Iterator<Item = &'a LeftOut> {
    world.inventory.left_out.iter().filter(move |gone| match &request.devices {
        Devices::Any(_) | Devices::All => gone.gpu.mig_enabled || !wants_mig(request),
        Devices::These(selectors) => {
            selectors.iter().any(|selector| is_named_by(selector, &gone.gpu, world.config))
        }
    })
}

/// Whether `device` is the MIG device that `selector` names.
fn is_part(selector: &Selector, device: &Device) -> bool {
    let Some(mig_device) = &device.mig_device else { return false };
    match selector {
        Selector::MigIndex(gpu, index) => (device.index, mig_device.index) == (*gpu, *index),
        Selector::MigUuid(text) => match text.strip_prefix("MIG-GPU-") {
            Some(_) => text[4..]
                .eq_ignore_ascii_case(&format!("{}/{}/{}", mig_device.gpu, mig_device.gi, mig_device.ci)),
            None => starts_with(&device.uuid, text),
        },
        _ => false,
    }
}

/// The message about a device that is the only choice of two selectors, or about two devices that no process sees
/// together.
fn describe_duplicate(slots: &[Vec<usize>], inventory: &Inventory) -> Option<String> {
    let mut named: Vec<usize> = slots.iter().filter(|slot| slot.len() == 1).map(|slot| slot[0]).collect();
    named.sort_unstable();
    let devices: Vec<&Device> = named.iter().map(|index| &inventory.devices[*index]).collect();
    if let Some(pair) = devices.windows(2).find(|pair| pair[0].uuid == pair[1].uuid) {
        return Some(format!("{} is named twice", pair[0].label()));
    }
    if devices.iter().any(|device| device.is_mig()) && devices.iter().any(|device| !device.is_mig()) {
        return Some("a process sees either GPUs or MIG devices: name one kind".to_owned());
    }
    // Compute instances of one GPU instance are adjacent.
    let instance = |device: &Device| {
        device.mig_device.as_ref().map(|mig_device| (mig_device.gpu.clone(), mig_device.gi))
    };
    let pair = devices.windows(2).find(|pair| pair[0].is_mig() && instance(pair[0]) == instance(pair[1]))?;
    Some(format!(
        "{} and {} are compute instances of one GPU instance; why: a process sees only one of these",
        pair[0].label(),
        pair[1].label()
    ))
}

fn describe(selector: &Selector) -> String {
    match selector {
        Selector::Index(index) => format!("number {index}"),
        Selector::MigIndex(gpu, mig) => format!("{gpu}:{mig}"),
        Selector::Uuid(text) | Selector::BusId(text) | Selector::MigUuid(text) => safe(text),
        Selector::Name(name) => format!("name:{} (see [[device]] in the configuration)", safe(name)),
        Selector::Model(glob) => format!("model:{}", safe(glob)),
    }
}

fn list<'a>(devices: impl Iterator<Item = &'a Device>) -> String {
    let name =
        |device: &Device| format!("{} ({}, {})", device.label(), safe(device.kind()), safe(&device.uuid));
    list_some(devices.map(name), ", ")
}

fn starts_with(text: &str, beginning: &str) -> bool {
    text.get(..beginning.len()).is_some_and(|start| start.eq_ignore_ascii_case(beginning))
}

/// Gives each slot a different device, preferring those early in `ranked`; `None` if that is impossible.
///
/// Bipartite matching by augmenting paths: overlapping selectors do not take each other's only choice.
pub(super) fn assign(slots: &[Vec<usize>], ranked: &[usize]) -> Option<Vec<usize>> {
    let choices: Vec<Vec<usize>> = slots
        .iter()
        .map(|slot| ranked.iter().copied().filter(|device| slot.contains(device)).collect())
        .collect();
    let mut holder: Vec<(usize, usize)> = Vec::with_capacity(slots.len());
    for slot in 0..slots.len() {
        if !augment(slot, &choices, &mut holder, &mut Vec::new()) {
            return None;
        }
    }
    holder.sort_unstable_by_key(|(_, slot)| *slot);
    Some(holder.into_iter().map(|(device, _)| device).collect())
}

/// Finds a device for `slot`, moving earlier slots that have another choice. `holder`: (device, slot).
fn augment(
    slot: usize,
    choices: &[Vec<usize>],
    holder: &mut Vec<(usize, usize)>,
    seen: &mut Vec<usize>,
) -> bool {
    for device in &choices[slot] {
        if seen.contains(device) {
            continue;
        }
        seen.push(*device);
        match holder.iter().position(|(held, _)| held == device) {
            None => {
                holder.push((*device, slot));
                return true;
            }
            Some(at) => {
                let other = holder[at].1;
                if augment(other, choices, holder, seen) {
                    // `other` pushed its new device: this one is now `slot`'s.
                    holder[at].1 = slot;
                    return true;
                }
            }
        }
    }
    false
}

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

pub(super) fn build_want<'a>(
    request: &'a Request,
    id: &LeaseId,
    device: &'a Device,
    several: bool,
    world: World<'a>,
) -> Want<'a> {
    let fixed = rule(device, world.config).and_then(|rule| rule.fixed_use?.mode());
    let default = if device.is_mig() { Mode::Mig } else { request.default_mode };
    let mode = request.mode.or(fixed).unwrap_or(default);
    // The driver suspends nothing under MPS: the guard then watches the memory.
    let limited_turns = mode == Mode::TimeSlice && request.memory.is_some() && request.suspend.is_never();
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
        return Err(Misfit::now(format!("is unavailable; why: process {pid} changes its MIG layout")));
    }
    check_kind(want, world)?;
    if let Some(drained) = world.ledger.drained.iter().find(|one| *one == uuid || *one == gpu) {
        let number = if drained == uuid { want.device.number() } else { want.device.index.to_string() };
        let why = world.ledger.drain_of(drained).map(|drain| format!("; why: {}", drain.words()));
        let why = why.unwrap_or_default();
        return Err(Misfit::never(format!(
            "is drained{why}; fix: `sublet undrain {number}` ends that (root)"
        )));
    }
    let of_gpu = world.inventory.device(gpu).and_then(|gpu| rule(gpu, world.config));
    let fixed = rule(want.device, world.config).and_then(|rule| rule.fixed_use);
    if [fixed, of_gpu.and_then(|rule| rule.fixed_use)].contains(&Some(Use::None)) {
        return Err(Misfit::never("is kept from containers; why: [[device]] use = \"none\""));
    }
    match fixed {
        Some(fixed) if fixed.mode() != Some(want.used_as) => Err(Misfit::never(format!(
            "is reserved for {fixed} by [[device]] use{}",
            if want.mode == want.used_as {
                ""
            } else if want.several {
                "; why: an MPS server for several devices takes turns (time-slice)"
            } else {
                "; why: dedicated MPS servers take turns (time-slice)"
            }
        ))),
        _ if world.ledger.unexplained.contains(uuid) => Err(Misfit::as_reported(
            "takes no new lease; why: the ledger was lost, and processes without a lease run on it; fix: end \
             them, then run `sublet gc` (root)",
        )),
        _ => Ok(()),
    }
}

/// GPUs in MIG mode are used only through their MIG devices, and MIG devices only in modes that they support.
fn check_kind(want: &Want<'_>, world: World<'_>) -> Result<(), Misfit> {
    let Some(mig_device) = &want.device.mig_device else {
        return match (want.device.mig_enabled, want.mode) {
            (true, _) => Err(in_mig_mode(want.device, world.inventory)),
            (false, Mode::Mig) => {
                Err(Misfit::never("has no MIG devices; fix: `sublet mig apply` creates them (root)"))
            }
            (false, _) => Ok(()),
        };
    };
    if let Some(fault) = &mig_device.fault {
        return Err(Misfit::as_reported(format!("cannot be used; why: {}", safe(fault))));
    }
    if want.mode == Mode::Exclusive {
        return Err(Misfit::never("is a MIG device; fix: to have it alone, write sublet.mode=mig"));
    }
    let held = |lease: &&Lease| {
        let same = |old: &LeasedMigDevice| {
            (&old.gpu, old.gi, old.ci) == (&mig_device.gpu, mig_device.gi, mig_device.ci)
        };
        lease.mig_devices.iter().any(|old| same(old) && old.uuid != want.device.uuid)
    };
    match world.ledger.leases.iter().find(held) {
        Some(lease) => Err(Misfit::now(format!(
            "has a destroyed instance's nodes; why: container {} still holds them; fix: end that container \
             first",
            safe(&lease.container.id)
        ))),
        None => Ok(()),
    }
}

fn in_mig_mode(gpu: &Device, inventory: &Inventory) -> Misfit {
    let profiles = profiles(inventory.mig_devices_of(&gpu.uuid).map(|(device, _)| device));
    let more = if profiles.is_empty() {
        "why: it has none; fix: `sublet mig apply` creates them (root)".to_owned()
    } else {
        format!("why: {profiles}; fix: name one (sublet.gpu) or a profile (sublet.mig)")
    };
    // If there are no instances, only NVML shows whether another tool has switched MIG mode off since.
    Misfit {
        refresh: profiles.is_empty(),
        ..Misfit::never(format!("is in MIG mode, so only its MIG devices can be used; {more}"))
    }
}

/// Settings that contradict a mode that comes from the device's configuration.
pub(super) fn check_settings(want: &Want<'_>) -> Result<(), Misfit> {
    let exclusive = want.mode == Mode::Exclusive;
    let may_be_suspended = matches!(want.mode, Mode::TimeSlice | Mode::Exclusive) && !want.device.is_mig();
    if !want.request.suspend.is_never() && !may_be_suspended {
        return Err(Misfit::never(format!(
            "is shared by {}, where the driver suspends nothing; fix: leave out sublet.suspend",
            want.mode
        )));
    }
    if want.several && want.daemon.is_some() && want.device.is_mig() {
        return Err(Misfit::never(
            "cannot be one of several devices under MPS; why: an MPS server can use only one MIG device; fix: \
             name one, or whole GPUs",
        ));
    }
    if exclusive && (want.memory.is_some() || want.request.sm.is_some()) {
        return Err(Misfit::never(
            "is given as a whole in mode exclusive; fix: leave out sublet.sm and sublet.memory",
        ));
    }
    if want.mode == Mode::Mig {
        return check_size(want);
    }
    if exclusive && want.isolation == Isolation::Dedicated {
        return Err(Misfit::never("is given as a whole in mode exclusive; fix: leave out sublet.isolation"));
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
            "is on a GPU of unknown SM count; why: {sm} % of it is not known either; fix: leave out sublet.sm, or \
             name a profile (sublet.mig)"
        ))),
        _ => Ok(()),
    }
}

/// The driver's and the hardware's features.
pub(super) fn check_driver(want: &Want<'_>, inventory: &Inventory, config: &Config) -> Result<(), Misfit> {
    let branch = inventory.driver.version.split('.').next().and_then(|branch| branch.parse().ok());
    if want.several && want.device.is_mig() && branch.unwrap_or(0) < SEVERAL_MIG_DEVICES {
        return Err(Misfit::never(format!(
            "cannot be one of several devices; why: with driver {} a process sees only one MIG device, and several \
             need R{SEVERAL_MIG_DEVICES} or later",
            safe(&inventory.driver.version)
        )));
    }
    if let Some(answer) = want.device.unknown.get(&Fact::Memory).filter(|_| want.memory.is_some()) {
        return Err(Misfit::not_reported(format!(
            "has memory of which NVML does not tell; why: it answers {}, so none can be booked; fix: leave out \
             sublet.memory",
            safe(answer)
        )));
    }
    if want.daemon.is_none() {
        return Ok(());
    }
    if inventory.driver.mps_control.is_none() {
        let missing = inventory.driver.mps_missing.as_deref();
        return Err(Misfit::never(format!(
            "needs an MPS server; why: {}",
            missing
                .unwrap_or("nvidia-cuda-mps-control is not installed (Debian: apt install nvidia-cuda-mps)")
        )));
    }
    if want.device.virtualization == Virtualization::Vgpu && !config.mps.allow_vgpu {
        return Err(Misfit::never(
            "is a vGPU, where MPS works with some profiles only; fix: set [mps] allow_vgpu = true to try it (root), \
             or use time-slice",
        ));
    }
    let limits =
        want.request.sm.is_some() || want.memory.is_some() || want.request.priority != Priority::Normal;
    if let Some(answer) = want.device.unknown.get(&Fact::ComputeCapability).filter(|_| limits) {
        return Err(Misfit::not_reported(format!(
            "does not tell whether its MPS has limits; why: NVML, of its compute capability: {}; fix: leave out \
             sublet.sm, memory and priority",
            safe(answer)
        )));
    }
    if want.device.is_before_volta() && limits {
        return Err(Misfit::never(
            "is older than Volta, where MPS has no limits; fix: leave out sublet.sm, memory and priority",
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
    let reason = format!("has compute mode {found}; fix: `nvidia-smi -i {uuid} -c DEFAULT` resets it (root)");
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
                "has too few SMs; why: {sm} % for {processes} process(es) is less than 2 SMs each"
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
            "needs {least} MiB for the CUDA context(s); why: {processes} process(es) at that SM share have no room \
             in {}",
            show_bytes(memory)
        )));
    }
    if want.books > bookable(device, config) {
        return Err(Misfit::never(format!(
            "has {}, of which {} can be booked; why: {} asked; [limits] reserve, memory_overcommit",
            show_bytes(device.memory_bytes),
            show_bytes(bookable(device, config)),
            show_bytes(memory)
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

#[cfg(test)]
#[path = "select_tests.rs"]
mod tests;
