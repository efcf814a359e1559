//! Who has which GPU, how much of it, and what they use: the document that `sublet status`, `sublet top`, its page and
//! `sublet metrics` show. Schema `sublet.status/1`: keys may be added, never changed.

mod devices;
mod leases;
mod warnings;

use schemars::JsonSchema;
use serde::Serialize;

use crate::guard::{self, Event, Offence, Sight};
use crate::mps_daemons::Listed;
use crate::names::Names;
use crate::usage::Usage;
use sublet_core::config::Config;
use sublet_core::inventory::{Device, Inventory, LeftOut};
use sublet_core::ledger::{DynamicInstance, Ledger};
use sublet_core::process::epoch_seconds;
use sublet_core::share::Action;
use sublet_core::text::timestamp;

pub use crate::usage::{DeviceUsed, LeaseUsed, OutsideProcess};
pub use devices::{Gpu, Health, MigInstance, Room};
pub use leases::LeaseOnDevice;

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
    /// One element per container and device; those of one container have the same lease id.
    pub leases: Vec<LeaseOnDevice>,
    /// MPS control daemons.
    pub mps: Vec<Listed>,
    /// The guard.
    pub guard: Guard,
    /// MIG instances that were created for a container.
    pub mig_made: Vec<MadeInstance>,
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

/// An offence that the guard found, and what it did about it.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct GuardEvent {
    /// RFC 3339.
    pub time: String,
    /// What the process did.
    #[schemars(with = "String")]
    pub offence: Offence,
    /// What was done about it.
    #[schemars(with = "String")]
    pub action: Action,
    /// The container; null if the process belonged to no lease.
    pub container_id: Option<String>,
    /// The uid of the container's engine.
    pub uid: u32,
    /// UUID of the device.
    pub device: String,
    /// The process, on the host.
    pub pid: i32,
    /// Its command name.
    pub name: String,
    /// The event in one line.
    pub text: String,
}

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

/// What a [`Status`] is made from.
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
        let mut status = Self {
            schema: "sublet.status/1",
            time: timestamp(epoch_seconds()),
            driver: Driver { version: driver.version.clone(), simulated: driver.simulated },
            devices,
            leases: leases::all(sources),
            mps,
            guard: Guard {
                watching,
                last_look_seconds: guard::last_look(config),
                blind: if let Sight::Blind(why) = sight { why } else { Vec::new() },
                events: guard::events(config).into_iter().map(GuardEvent::of).collect(),
            },
            mig_made: dynamic.iter().map(|made| MadeInstance::of(made, ledger)).collect(),
            warnings: Vec::new(),
        };
        status.warnings = inventory.left_out.iter().map(LeftOut::sentence).collect();
        status.warnings.extend(inventory.devices.iter().flat_map(Device::costs));
        status.warnings.extend(warnings::of(&status, sources));
        status
    }

    /// Leaves out all devices, leases and daemons but those that `device`, a UUID, and `lease`, an id, name.
    pub(crate) fn only(&mut self, devices: &dyn Fn(&str) -> bool, lease: Option<&str>) {
        self.leases.retain(|held| devices(&held.device) && lease.is_none_or(|lease| held.id == lease));
        let held: Vec<String> = self.leases.iter().map(|held| held.device.clone()).collect();
        let shown = |uuid: &str| devices(uuid) && (lease.is_none() || held.iter().any(|held| held == uuid));
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
        match () {
            () if self.watching => "guard on",
            () if self.blind.is_empty() || self.blind.iter().any(|why| why.starts_with(guard::OFF)) => {
                guard::OFF
            }
            () => "guard not on all GPUs",
        }
    }
}

impl GuardEvent {
    fn of(event: Event) -> Self {
        let Event { time, offence, action, container_id, uid, device, pid, name, text } = event;
        Self { time: timestamp(time), offence, action, container_id, uid, device, pid, name, text }
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
