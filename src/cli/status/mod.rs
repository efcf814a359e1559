//! Who has which GPU, how much of it, and what they use: the document that `sublet status`, `sublet top`, its page and
//! `sublet metrics` show. Schema `sublet.status/1`: keys may be added, never changed.

mod listed;

use schemars::JsonSchema;
use serde::Serialize;

use crate::guard::{self, Event, Sight};
use crate::mps_daemons::Listed;
use crate::names::{Names, Owner, by_engine};
use crate::sick_gpus;
use crate::usage::Usage;
use sublet_core::config::Config;
use sublet_core::inventory::{Inventory, LeftOut};
use sublet_core::ledger::{DaemonState, DynamicInstance, LeaseState, Ledger, Waiter};
use sublet_core::oci;
use sublet_core::place::{describe_request, places, why_kept_away};
use sublet_core::text::{add_why, safe, timestamp};

pub use crate::usage::{DeviceUsed, LeaseUsed, OutsideProcess};
pub use listed::{Gpu, Health, LeaseOnDevice, MigInstance, Room};

/// How many processes without a lease are named for each device.
const NAMED: usize = 3;

/// The state of this host.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Status {
    /// `sublet.status/1`.
    pub schema: &'static str,
    /// When it was read: RFC 3339.
    pub time: String,
    /// The driver.
    pub driver: Driver,
    /// The GPUs, by index, each with its MIG devices.
    pub devices: Vec<Gpu>,
    /// One element per container and device; the elements of one container have the same lease id.
    pub leases: Vec<LeaseOnDevice>,
    /// MPS control daemons.
    pub mps: Vec<Listed>,
    /// The guard.
    pub guard: Guard,
    /// MIG instances that were created for a container.
    pub mig_made: Vec<MadeInstance>,
    /// Who waits for a share, in the order in which they came.
    pub waiting: Vec<Waiting>,
    /// What needs somebody's attention, a line each.
    pub warnings: Vec<String>,
}

/// The driver as a whole.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Driver {
    /// As `580.159.04`.
    pub version: String,
    /// Whether it is a simulated one, for tests.
    pub simulated: bool,
}

/// What the guard sees, and what it did.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Guard {
    /// Whether it checks every leased device.
    pub watching: bool,
    /// How long ago it looked last, in seconds; null: not since boot.
    pub last_look_seconds: Option<u64>,
    /// Devices that it cannot check, each with the reason.
    pub blind: Vec<String>,
    /// What it did last, oldest first.
    pub events: Vec<GuardEvent>,
}

/// As it is shown.
pub type GuardEvent = Event<String>;

/// A MIG instance that was created for a container.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MadeInstance {
    /// UUID of its GPU.
    pub gpu: String,
    /// Its profile, such as `1g.18gb`.
    pub profile: String,
    /// First memory slice, and how many it has.
    pub placement: (u32, u32),
    /// UUID of the MIG device; null while it is created.
    pub uuid: Option<String>,
    /// `making`, `awaited` by its container, `leased`, `left` by it, or `going`.
    pub state: &'static str,
    /// Why it cannot be destroyed.
    pub error: Option<String>,
}

/// Somebody who waits for a share.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Waiting {
    /// The container's id; null for `sublet wait`.
    pub container_id: Option<String>,
    /// Its engine's name for it; null if that is not known.
    pub name: Option<String>,
    /// The process that waits; null: the container was refused, and `sublet serve` starts it again.
    pub pid: Option<i32>,
    /// The user whose container or `sublet wait` it is, or whose engine's.
    pub uid: u32,
    /// Whom it is for.
    #[serde(skip)]
    pub owner: Option<Owner>,
    /// Its place among those for whom one of the same devices may do: 1 is served first.
    pub place: usize,
    /// What for, such as `mps, 40 % SM, 8 GiB`; null if another version wrote it.
    pub asks: Option<String>,
    /// Since when: RFC 3339.
    pub since: String,
    /// Why there is no share for it yet, or why it was refused: one line.
    pub why: String,
    /// The same in seconds since the epoch.
    #[serde(skip)]
    pub began: u64,
}

/// The sources of a [`Status`].
pub(crate) struct Sources<'a> {
    pub inventory: &'a Inventory,
    pub ledger: &'a Ledger,
    pub names: &'a Names,
    pub usage: &'a Usage,
    pub config: &'a Config,
}

impl Status {
    /// The state that the sources and the list of MPS daemons have.
    pub(crate) fn of(sources: &Sources<'_>, mps: Vec<Listed>) -> Self {
        let Sources { inventory, ledger, config, .. } = *sources;
        let (driver, sight) = (&inventory.driver, guard::sight(config));
        let watching = sight == Sight::All;
        let mut devices: Vec<Gpu> = inventory.gpus().map(|device| Gpu::of(device, sources)).collect();
        devices.extend(inventory.left_out.iter().map(|gone| Gpu::left_out(gone, sources)));
        devices.sort_by_key(|gpu| gpu.index);
        let dynamic = &ledger.mig.dynamic_instances;
        // Whether other containers are started again is not known yet.
        let is_known = |waiter: &&Waiter| waiter.retry.as_ref().is_none_or(|retry| retry.confirmed);
        let waiters: Vec<&Waiter> = ledger.waiters.iter().filter(is_known).collect();
        let places = places(waiters.iter().copied(), inventory, config);
        let waiters = waiters.into_iter().zip(places);
        let held =
            ledger.leases.iter().flat_map(|lease| lease.devices.iter().map(move |device| (lease, device)));
        let event = |Event { time, offence, action, container_id, uid, device, pid, name, text }| {
            let time = timestamp(time);
            Event { time, offence, action, container_id, uid, device, pid, name, text }
        };
        let mut status = Self {
            schema: "sublet.status/1",
            time: timestamp(sublet_core::process::epoch_seconds()),
            driver: Driver { version: driver.version.clone(), simulated: driver.simulated },
            devices,
            leases: held.map(|(lease, device)| LeaseOnDevice::of(lease, device, sources)).collect(),
            mps,
            guard: Guard {
                watching,
                last_look_seconds: guard::last_look(config),
                blind: if let Sight::Blind(why) = sight { why } else { Vec::new() },
                events: guard::events(config).into_iter().map(event).collect(),
            },
            mig_made: dynamic.iter().map(|made| MadeInstance::of(made, ledger)).collect(),
            waiting: waiters
                .map(|(waiter, place)| Waiting::of(waiter, place, sources).kept_away(waiter, sources))
                .collect(),
            warnings: Vec::new(),
        };
        status.warnings = inventory.left_out.iter().map(LeftOut::sentence).collect();
        status.warnings.extend(inventory.costs());
        let noted = sick_gpus::read(config);
        status.warnings.extend(noted.as_ref().err().map(|error| format!("health.json: {error}")));
        for (uuid, texts) in noted.unwrap_or_default().warnings {
            let number = status.number(&uuid).into_owned();
            status.warnings.extend(texts.iter().map(|text| format!("GPU {number}: {text}")));
        }
        status.warnings.extend(warnings(&status, sources));
        status
    }

    /// Leaves out all devices, leases and daemons but those that `devices`, by UUIDs, and `leases` choose. Who waits stays.
    pub(crate) fn only(
        &mut self,
        devices: &dyn Fn(&str) -> bool,
        leases: Option<&dyn Fn(&LeaseOnDevice) -> bool>,
    ) {
        self.leases.retain(|held| devices(&held.device) && leases.is_none_or(|leases| leases(held)));
        let held: Vec<String> = self.leases.iter().map(|held| held.device.clone()).collect();
        let shown = |uuid: &str| devices(uuid) && (leases.is_none() || held.iter().any(|held| held == uuid));
        for gpu in &mut self.devices {
            if !shown(&gpu.uuid) {
                gpu.mig.retain(|part| shown(&part.uuid));
            }
        }
        self.devices.retain(|gpu| shown(&gpu.uuid) || !gpu.mig.is_empty());
        self.mps.retain(|daemon| daemon.devices.iter().any(|uuid| shown(uuid)));
        self.mig_made.retain(|made| self.devices.iter().any(|gpu| gpu.uuid == made.gpu));
    }

    /// The number by which people name the device `uuid`, such as `0:2`; the UUID of a device that is gone.
    pub fn number<'a>(&'a self, uuid: &'a str) -> std::borrow::Cow<'a, str> {
        for gpu in &self.devices {
            if gpu.uuid == uuid {
                return gpu.index.to_string().into();
            }
            if let Some(part) = gpu.mig.iter().find(|part| part.uuid == uuid) {
                return part.number.as_str().into();
            }
        }
        uuid.into()
    }
}

impl Guard {
    /// In a few words.
    pub fn words(&self) -> &'static str {
        let is_off = self.blind.is_empty() || self.blind.iter().any(|why| why.starts_with(guard::OFF));
        match (self.watching, is_off) {
            (true, _) => "guard on",
            (false, true) => guard::OFF,
            (false, false) => "guard not on all GPUs",
        }
    }
}

impl MadeInstance {
    fn of(made: &DynamicInstance, ledger: &Ledger) -> Self {
        let state = match (&made.awaited, made.going) {
            (_, true) => "going",
            (Some(_), false) if made.uuid.is_none() => "making",
            (Some(_), false) => "awaited",
            (None, false) if ledger.needs(made) => "leased",
            (None, false) => "left",
        };
        Self {
            gpu: made.gpu.clone(),
            profile: made.name.clone(),
            placement: made.placement,
            uuid: made.uuid.clone(),
            state,
            error: made.stuck.clone(),
        }
    }
}

impl Waiting {
    fn of(waiter: &Waiter, place: usize, sources: &Sources<'_>) -> Self {
        let (names, labels) = (sources.names, &sources.config.accounting.owner_labels);
        let container = Some(&waiter.container).filter(|container| !container.id.is_empty());
        let name = container.and_then(|one| names.of_id(&one.id).cloned().or_else(|| by_engine(one, labels)));
        let (uid, request) = (waiter.container.uid, waiter.request());
        // One that was suspended has its own in its lease.
        let held = sources.ledger.lease(&waiter.id).and_then(|lease| lease.claimed_owner.as_deref());
        let claim = request.as_ref().and_then(|request| request.owner.as_deref()).or(held);
        Self {
            container_id: container.map(|container| container.id.clone()),
            pid: waiter.process.map(|process| process.pid),
            uid,
            owner: Owner::known(uid, claim.unwrap_or_default(), name.as_ref()),
            name: name.map(|name| name.name),
            place,
            asks: request.as_ref().map(describe_request),
            since: timestamp(waiter.since),
            why: names.replace_ids(&waiter.why),
            began: waiter.since,
        }
    }

    /// With what keeps a suspended container from its GPU, beside a lack of room.
    fn kept_away(self, waiter: &Waiter, of: &Sources<'_>) -> Self {
        let world = (of.inventory, of.ledger, of.config);
        let away = of.ledger.lease(&waiter.id).and_then(|lease| why_kept_away(lease, world));
        Self { why: away.map_or_else(|| self.why.clone(), |away| add_why(&self.why, &away)), ..self }
    }
}

/// Faults of this host that need somebody's attention: one line each, without a full stop.
fn warnings(status: &Status, sources: &Sources<'_>) -> Vec<String> {
    let Sources { inventory, ledger, usage, config, .. } = *sources;
    let mut lines = status.guard.blind.clone();
    if !status.guard.watching && lines.is_empty() {
        let (start, off) =
            ("run `systemctl enable --now sublet.service`", "the configuration has [guard] enabled = false");
        let why = if config.guard.enabled { start } else { off };
        lines.push(format!("GUARD OFF: programs that tamper with their MPS limits are not stopped; {why}"));
    }
    lines.extend(usage.error.iter().map(|error| format!("what is used is not known: {}", safe(error))));
    for gpu in &status.devices {
        let mut device = |uuid: &str, label: &str, unknown: Option<&String>, used: Option<&DeviceUsed>| {
            lines.extend(unknown.map(|why| format!("{label}: what is used is not known: {}", safe(why))));
            lines.extend(used.and_then(|used| outside(uuid, label, used, status)));
        };
        device(&gpu.uuid, &format!("GPU {}", gpu.index), gpu.unknown.as_ref(), gpu.used.as_ref());
        for part in &gpu.mig {
            let label = format!("MIG device {}", part.number);
            device(&part.uuid, &label, part.unknown.as_ref(), part.used.as_ref());
        }
    }
    lines.extend(status.mps.iter().filter_map(|daemon| {
        let (state, then) = match daemon.state {
            DaemonState::Fault => ("does not answer", "`sublet mps logs` may say why"),
            DaemonState::Down => ("does not run", "`sublet gc` starts it again if a lease needs it"),
            _ => return None,
        };
        Some(format!("MPS daemon {} {state}: {then}", daemon.key))
    }));
    let lost = status.leases.iter().filter(|lease| lease.state == LeaseState::Lost);
    lines.extend(lost.map(|lease| {
        let container = lease.name.as_deref().unwrap_or(&lease.called);
        format!("container {}: its lease {} is lost; end the container", safe(container), lease.id)
    }));
    lines.extend(ledger.leases.iter().filter_map(|lease| {
        let unended =
            ledger.describe_unended(lease, &config.state_dir).or_else(|| oci::lost_node(lease, inventory))?;
        let shown = status.leases.iter().find(|shown| shown.id == lease.id.as_str());
        let name = shown.map(|shown| shown.name.as_deref().unwrap_or(&shown.called));
        Some(format!("container {}: {unended}", safe(name.unwrap_or(&lease.container.name()))))
    }));
    lines.extend(status.mig_made.iter().filter_map(|made| {
        let (why, (start, size)) = (made.error.as_ref()?, made.placement);
        Some(format!(
            "MIG instance {} at {start}:{size} of GPU {} was created for a container that has ended, and cannot be \
             destroyed yet: {}; every sublet command tries again",
            made.profile,
            safe(&made.gpu),
            safe(why)
        ))
    }));
    lines
}

/// Processes on a device that belong to no lease. Processes of a container that is starting are not known yet.
fn outside(uuid: &str, label: &str, used: &DeviceUsed, status: &Status) -> Option<String> {
    let starts = status.leases.iter().any(|lease| lease.device == uuid && lease.pid.is_none());
    if used.outside.is_empty() || starts {
        return None;
    }
    let named = used.outside.iter().take(NAMED).map(|process| {
        let memory = process.memory_bytes.map_or_else(String::new, |bytes| format!(", {} MiB", bytes >> 20));
        format!("{} (pid {}{memory})", process.name, process.pid)
    });
    let more = used.outside.len().saturating_sub(NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    Some(format!("{label}: used without a lease by {}{more}", named.collect::<Vec<_>>().join(", ")))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use sublet_core::ledger::fixture::lease;
    use sublet_core::place::fixture::host;
    use sublet_core::request;

    use super::*;
    use crate::names::Name;

    #[test]
    fn waiting_containers_and_their_reasons_have_names_in_place_of_ids() {
        let mut held = lease(1, "GPU-0");
        held.container.id = "0123456789ab".to_owned();
        let names = Names::for_test(&held, Name { name: "web".into(), ..Name::default() });
        let request = request::parse(&BTreeMap::new(), None, None, &Config::default()).unwrap();
        // Refused ones are known by their own ids.
        let mut container = held.container.clone();
        container.id = held.id.to_string();
        let waiter = Waiter::new(&held.id, &container, &request, "no room; why: held by 0123456789ab", None);
        let (inventory, ledger) = (host(Vec::new()), Ledger::empty("boot"));
        let (usage, config) = (Usage::default(), Config::default());
        let sources =
            Sources { inventory: &inventory, ledger: &ledger, names: &names, usage: &usage, config: &config };
        let waiting = Waiting::of(&waiter, 2, &sources);
        assert_eq!((waiting.name.as_deref(), &*waiting.why), (Some("web"), "no room; why: held by web"));
        assert_eq!((waiting.place, waiting.asks.as_deref()), (2, Some("a share")));
    }
}
