//! The devices of the status document, what is booked on each, and what the driver says is used; and its leases: the
//! container that holds each, its limits, and what it uses.

use schemars::JsonSchema;
use serde::Serialize;

use super::Sources;
use crate::names::{self, Engine, Name, Owner};
use crate::usage::{DeviceUsed, LeaseUsed, ProcessUse};
use sublet_core::config::Use;
use sublet_core::inventory::{Device, Inventory, LeftOut, MigDevice};
use sublet_core::ledger::{Drain, Lease, LeaseState, Suspension};
use sublet_core::place::{Bookings, bookings, rule};
use sublet_core::share::{Isolation, Mode, Percent};
use sublet_core::text::timestamp;

/// A GPU.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Gpu {
    /// `GPU-…`.
    pub uuid: String,
    /// NVML's index.
    pub index: u32,
    /// The number in `/dev/nvidia<minor>`.
    pub minor: u32,
    /// Its PCI bus id, as `0000:3b:00.0`.
    pub bus_id: String,
    /// As `NVIDIA H200`.
    pub name: String,
    /// `idle`, `time-slice`, `mps`, `exclusive`; `mig`: it is used through its MIG devices alone.
    pub mode: &'static str,
    /// Whether containers get it.
    pub health: Health,
    /// Its memory, in bytes; 0 if the driver does not report it.
    pub memory_bytes: u64,
    /// Whether that is the host's memory, because the chip has no other.
    pub memory_of_host: bool,
    /// Its SMs; null if the driver does not report them.
    pub sm_count: Option<u32>,
    /// What a new lease may still take.
    pub free: Room,
    /// What leases have taken.
    pub booked: Room,
    /// What is used; null if the driver reports nothing, see `unknown`.
    pub used: Option<DeviceUsed>,
    /// Why the driver reports no use.
    pub unknown: Option<String>,
    /// How many leases there are on it.
    pub lease_count: usize,
    /// Whether MIG mode is on.
    pub mig_enabled: bool,
    /// Its MIG devices.
    pub mig: Vec<MigInstance>,
    /// Whether it takes no new lease.
    pub drained: bool,
    /// By whom, since when, until when and why, in one line; null: it is not drained, or nobody said.
    pub drain: Option<String>,
    /// What `[[device]] use` reserves it for.
    #[serde(skip)]
    pub reserved: Option<Use>,
}

/// Whether containers get a GPU.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Health {
    /// `ok`; `lost`: it is gone from the bus; `unhealthy`: it does not answer as it should, or reported a fault. Only the
    /// first is served.
    pub state: &'static str,
    /// Why it is not served; null: it is.
    pub reason: Option<String>,
}

/// A part of a device.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct Room {
    /// In percent of its SMs.
    pub sm_percent: f64,
    /// In bytes.
    pub memory_bytes: u64,
}

/// A MIG device: a compute instance.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MigInstance {
    /// `MIG-…`.
    pub uuid: String,
    /// As `1g.18gb` or `1c.2g.35gb`.
    pub profile: String,
    /// GPU instance id.
    pub gi: u32,
    /// Compute instance id.
    pub ci: u32,
    /// Whether it has no lease.
    pub free: bool,
    /// As in `sublet.gpu`: `0:2`.
    pub number: String,
    /// As that of a GPU.
    pub mode: &'static str,
    /// Memory of its GPU instance, in bytes.
    pub memory_bytes: u64,
    /// Its SMs; null if the driver does not report them.
    pub sm_count: Option<u32>,
    /// What a new lease may still take of its SMs, in percent.
    pub sm_percent_free: f64,
    /// What a new lease may still take of the memory, in bytes.
    pub memory_bytes_free: u64,
    /// What leases have taken: of its SMs, and of the memory that it shares with the instances in `shares_memory_with`.
    pub booked: Room,
    /// What is used; null if the driver reports nothing, see `unknown`.
    pub used: Option<DeviceUsed>,
    /// Why the driver reports no use.
    pub unknown: Option<String>,
    /// How many leases there are on it.
    pub lease_count: usize,
    /// The numbers of the other compute instances of its GPU instance.
    pub shares_memory_with: Vec<String>,
    /// Whether it takes no new lease.
    pub drained: bool,
    /// By whom, since when, until when and why, in one line; null: it is not drained, or nobody said.
    pub drain: Option<String>,
    /// Why no container can use it.
    pub fault: Option<String>,
    /// Whether it was created for a container.
    pub dynamic: bool,
    /// As that of a GPU.
    #[serde(skip)]
    pub reserved: Option<Use>,
}

impl Gpu {
    pub(super) fn of(device: &Device, sources: &Sources<'_>) -> Self {
        let Sources { inventory, ledger, usage, config, .. } = *sources;
        let bookings = bookings(device, ledger, config);
        let mig = |(device, part): (&Device, &MigDevice)| MigInstance::of(device, part, sources);
        Self {
            uuid: device.uuid.clone(),
            index: device.index,
            minor: device.minor,
            bus_id: device.bus_id.clone(),
            name: device.name.clone(),
            mode: mode(device, bookings.used_as),
            health: Health { state: "ok", reason: None },
            memory_bytes: device.memory_bytes,
            memory_of_host: device.memory_of_host,
            sm_count: device.sm_count,
            free: Room { sm_percent: bookings.sm_free.as_f64(), memory_bytes: bookings.memory_free },
            booked: booked(&bookings),
            used: usage.devices.get(&device.uuid).map(|found| found.used.clone()),
            unknown: usage.failures.get(&device.uuid).cloned(),
            lease_count: bookings.leases,
            mig_enabled: device.mig_enabled,
            mig: inventory.mig_devices_of(&device.uuid).map(mig).collect(),
            drained: ledger.drained.contains(&device.uuid),
            drain: ledger.drain_of(&device.uuid).map(Drain::words),
            reserved: rule(device, config).and_then(|rule| rule.fixed_use),
        }
    }

    /// One that is left out: leases on it are shown, and nobody gets anything of it.
    pub(super) fn left_out(gone: &LeftOut, sources: &Sources<'_>) -> Self {
        let mig = |device: &Device| {
            let part = device.mig_device.as_ref()?;
            let row = MigInstance { fault: Some(gone.sentence()), ..MigInstance::of(device, part, sources) };
            (row.lease_count > 0).then_some(row)
        };
        Self {
            health: Health { state: gone.state(), reason: Some(gone.reason()) },
            free: Room { sm_percent: 0.0, memory_bytes: 0 },
            mig: gone.mig.iter().filter_map(mig).collect(),
            ..Self::of(&gone.gpu, sources)
        }
    }
}

impl MigInstance {
    /// The free memory belongs to the GPU instance: its compute instances share its memory.
    fn of(device: &Device, part: &MigDevice, sources: &Sources<'_>) -> Self {
        let Sources { inventory, ledger, usage, config, .. } = *sources;
        let bookings = bookings(device, ledger, config);
        let sibling = |uuid: &String| inventory.device(uuid).map(Device::number);
        Self {
            uuid: device.uuid.clone(),
            profile: part.profile.clone(),
            gi: part.gi,
            ci: part.ci,
            free: bookings.leases == 0,
            number: device.number(),
            mode: mode(device, bookings.used_as),
            memory_bytes: device.memory_bytes,
            sm_count: device.sm_count,
            sm_percent_free: bookings.sm_free.as_f64(),
            memory_bytes_free: bookings.memory_free,
            booked: booked(&bookings),
            used: usage.devices.get(&device.uuid).map(|found| found.used.clone()),
            unknown: usage.failures.get(&device.uuid).cloned(),
            lease_count: bookings.leases,
            shares_memory_with: part.siblings.iter().filter_map(sibling).collect(),
            // A MIG device of a drained GPU is drained, too.
            drained: ledger.drained.iter().any(|uuid| *uuid == device.uuid || uuid == device.gpu()),
            drain: ledger.drain_of(&device.uuid).map(Drain::words),
            fault: part.fault.clone(),
            dynamic: ledger.dynamic_instance(device).is_some(),
            reserved: rule(device, config).and_then(|rule| rule.fixed_use),
        }
    }
}

fn booked(bookings: &Bookings) -> Room {
    Room { sm_percent: bookings.sm_booked.as_f64(), memory_bytes: bookings.memory_booked }
}

fn mode(device: &Device, used_as: Option<Mode>) -> &'static str {
    if device.mig_enabled && !device.is_mig() { "mig" } else { used_as.map_or("idle", Into::into) }
}

/// One container's share of one device.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct LeaseOnDevice {
    /// Sixteen hex digits.
    pub id: String,
    /// The engine's id of the container.
    pub container_id: String,
    /// UUID of the device.
    pub device: String,
    /// How the device is shared.
    #[schemars(with = "String")]
    pub mode: Mode,
    /// Whether the container has an MPS server of its own.
    #[schemars(with = "String")]
    pub isolation: Isolation,
    /// SM limit of the whole container, in percent; null: none.
    pub sm_percent: Option<f64>,
    /// Memory limit of the whole container on the device, in bytes; null: none.
    pub memory_bytes: Option<u64>,
    /// `pending`, `active`, `suspending`, `suspended`, `resuming`, `ending`; `lost`: its device or record is gone.
    #[schemars(with = "String")]
    pub state: LeaseState,
    /// GPU memory that is in host memory, or on its way, in bytes; null: it is not suspended.
    pub suspended_bytes: Option<u64>,
    /// The container's first process, on the host; null until it runs.
    pub pid: Option<i32>,
    /// When it was taken: RFC 3339.
    pub since: String,
    /// The engine; null: none that is known has the container.
    #[schemars(with = "Option<String>")]
    pub engine: Option<Engine>,
    /// The engine's name for the container.
    pub name: Option<String>,
    /// What it was started from.
    pub image: Option<String>,
    /// `PROJECT/SERVICE` of Compose, or `NAMESPACE/POD`.
    pub part_of: Option<String>,
    /// The systemd unit that it runs in.
    pub unit: Option<String>,
    /// The user whose engine it is.
    pub user: String,
    /// Whom it is for; null: nothing says that.
    pub owner: Option<Owner>,
    /// The job of Slurm's that it is for; null: none.
    pub job: Option<JobOfLease>,
    /// What it uses of the device.
    pub used: LeaseUsed,
    /// Whether its MPS server is its own.
    pub own_server: bool,
    /// The MPS control daemon that serves it.
    pub daemon: Option<String>,
    /// When it was taken, in seconds since the epoch.
    #[serde(skip)]
    pub taken: u64,
    /// What stands for its name where it has none.
    #[serde(skip)]
    pub called: String,
    /// Its processes on the device.
    #[serde(skip)]
    pub(crate) processes: Vec<ProcessUse>,
}

/// A job of Slurm's, by the names that `squeue` and `sacct` have for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct JobOfLease {
    /// The job's id.
    pub id: u64,
    /// The step in which the container runs; null: the lease is the job's, for all its programs and containers.
    pub step: Option<String>,
}

impl LeaseOnDevice {
    pub(super) fn of(lease: &Lease, device: &str, sources: &Sources<'_>) -> Self {
        let name = sources.names.of(lease);
        let text = |of: fn(&Name) -> &String| name.map(of).filter(|text| !text.is_empty()).cloned();
        // A lease whose device is gone is lost, whatever else it is.
        let Inventory { left_out, .. } = sources.inventory;
        let is_part = |gone: &LeftOut| gone.mig.iter().any(|part| part.uuid == device);
        let runs_on = |gone: &LeftOut| !gone.lost && (gone.gpu.uuid == device || is_part(gone));
        let is_there = sources.inventory.device(device).is_some() || left_out.iter().any(runs_on);
        let on_device = sources.usage.devices.get(device);
        Self {
            id: lease.id.to_string(),
            container_id: lease.container.id.clone(),
            device: device.to_owned(),
            mode: lease.mode,
            isolation: lease.isolation,
            sm_percent: lease.sm.map(Percent::as_f64),
            memory_bytes: lease.memory_bytes,
            state: if is_there { lease.shown_state() } else { LeaseState::Lost },
            suspended_bytes: lease.suspension.as_ref().map(Suspension::bytes),
            pid: lease.init.as_ref().map(|init| init.process.pid),
            since: timestamp(lease.since),
            engine: name.and_then(|name| name.engine),
            name: text(|name| &name.name),
            image: text(|name| &name.image),
            part_of: text(|name| &name.part_of),
            unit: text(|name| &name.unit),
            user: names::user(lease.container.uid),
            owner: Owner::known(
                lease.container.uid,
                lease.claimed_owner.as_deref().unwrap_or_default(),
                name,
            ),
            job: lease.job.as_ref().map(|job| JobOfLease { id: job.id, step: job.step.clone() }),
            used: sources.usage.of_lease(lease, device, sources.ledger),
            own_server: lease.isolation == Isolation::Dedicated && lease.daemon.is_some(),
            daemon: lease.daemon.as_ref().map(ToString::to_string),
            taken: lease.since,
            called: lease.container.name().into_owned(),
            processes: on_device.into_iter().flat_map(|on| on.of_lease(lease)).cloned().collect(),
        }
    }
}
