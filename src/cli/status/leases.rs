//! The leases of the status document: the container that holds each, its limits, and what it uses.

use schemars::JsonSchema;
use serde::Serialize;

use super::Sources;
use crate::names::{self, Engine, Name};
use crate::usage::{LeaseUsed, ProcessUse};
use sublet_core::ledger::{Lease, LeaseState};
use sublet_core::share::{Isolation, Mode, Percent};
use sublet_core::text::timestamp;

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
    /// `pending`, `active`, `ending`; `lost`: the device or the container's record is gone.
    #[schemars(with = "String")]
    pub state: LeaseState,
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

/// One element per container and device.
pub(super) fn all(sources: &Sources<'_>) -> Vec<LeaseOnDevice> {
    let each = |lease| {
        let lease: &Lease = lease;
        lease.devices.iter().map(|device| LeaseOnDevice::of(lease, device, sources)).collect::<Vec<_>>()
    };
    sources.ledger.leases.iter().flat_map(each).collect()
}

impl LeaseOnDevice {
    fn of(lease: &Lease, device: &str, sources: &Sources<'_>) -> Self {
        let name = sources.names.of(lease);
        let text = |of: fn(&Name) -> &String| name.map(of).filter(|text| !text.is_empty()).cloned();
        // A lease whose device is gone is lost, whatever else it is.
        let is_there = sources.inventory.device(device).is_some();
        let on_device = sources.usage.devices.get(device);
        Self {
            id: lease.id.to_string(),
            container_id: lease.container.id.clone(),
            device: device.to_owned(),
            mode: lease.mode,
            isolation: lease.isolation,
            sm_percent: lease.sm.map(Percent::as_f64),
            memory_bytes: lease.memory_bytes,
            state: if is_there { lease.state } else { LeaseState::Lost },
            pid: lease.init.as_ref().map(|init| init.process.pid),
            since: timestamp(lease.since),
            engine: name.and_then(|name| name.engine),
            name: text(|name| &name.name),
            image: text(|name| &name.image),
            part_of: text(|name| &name.part_of),
            unit: text(|name| &name.unit),
            user: names::user(lease.container.uid),
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
