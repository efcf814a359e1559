//! A node of eight H200, and what it has given away.

use sublet_core::config::{Config, Placement as Policies, Policy};
use sublet_core::inventory::{Device, Inventory};
use sublet_core::ledger::fixture::lease;
use sublet_core::ledger::{Lease, LeaseId, Ledger};
use sublet_core::place::fixture::{GIB, device, host, request};
use sublet_core::place::place;
use sublet_core::request::Request;
use sublet_core::share::MIB;
use sublet_core::share::{Memory, Mode, Percent};

use crate::jobs::Job;
use crate::mig;

/// GPUs of a node.
pub const GPUS: u32 = 8;

/// What NVML says of an H200's memory.
const MEMORY_MIB: u64 = 143_771;

/// How a fleet gives GPUs to jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Each job has a GPU of its own.
    Whole,
    /// A MIG instance for each job.
    Mig,
    /// sublet's shares, `[placement] policy = "binpack"`; the cluster fills nodes, too.
    Binpack,
    /// sublet's shares, `[placement] policy = "spread"`; the cluster spreads, too.
    Spread,
}

impl Way {
    /// All of them, in the order of the table.
    pub const ALL: [Self; 4] = [Self::Whole, Self::Mig, Self::Binpack, Self::Spread];

    /// In table and picture.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Whole => "whole GPUs",
            Self::Mig => "MIG on demand",
            Self::Binpack => "sublet, binpack",
            Self::Spread => "sublet, spread",
        }
    }

    /// Whether the cluster's scheduler counts percents of SMs, and nodes decide.
    pub const fn counts(self) -> bool {
        matches!(self, Self::Binpack | Self::Spread)
    }
}

/// A running job.
struct Running {
    id: u64,
    gpu: usize,
    sm: u32,
    span: mig::Span,
}

/// One node.
pub struct Node {
    way: Way,
    running: Vec<Running>,
    inventory: Inventory,
    ledger: Ledger,
    config: Config,
}

impl Node {
    /// An empty one.
    pub fn new(way: Way) -> Self {
        let bytes = MEMORY_MIB * MIB;
        let gpu = |n| Device { memory_bytes: bytes, memory_free_bytes: bytes, ..device(n) };
        let policy = if way == Way::Spread { Policy::Spread } else { Policy::Binpack };
        Self {
            way,
            running: Vec::new(),
            inventory: host((0..GPUS).map(gpu).collect()),
            ledger: Ledger::empty("boot"),
            config: Config { placement: Policies { policy }, ..Config::default() },
        }
    }

    /// What the cluster's scheduler counts as free: percents of SMs of all its GPUs.
    pub fn counted_free(&self) -> u32 {
        GPUS * 100 - self.used()
    }

    /// Percents of SMs that its jobs asked for.
    pub fn used(&self) -> u32 {
        self.running.iter().map(|one| one.sm).sum()
    }

    /// Starts `job`, if there is room.
    pub fn start(&mut self, id: u64, job: &Job) -> bool {
        let found = match self.way {
            Way::Whole => self.idle().map(|gpu| (gpu, (0, 0))),
            Way::Mig => self.instance(job),
            Way::Binpack | Way::Spread => self.share(id, job).map(|gpu| (gpu, (0, 0))),
        };
        let Some((gpu, span)) = found else { return false };
        self.running.push(Running { id, gpu, sm: job.sm, span });
        let on_gpu: u32 = self.running.iter().filter(|one| one.gpu == gpu).map(|one| one.sm).sum();
        assert!(on_gpu <= 100, "GPU {gpu} is over-committed: {on_gpu} %");
        true
    }

    /// Ends the job `id`.
    pub fn end(&mut self, id: u64) {
        self.running.retain(|one| one.id != id);
        let lease = lease_id(id);
        self.ledger.leases.retain(|held| held.id != lease);
    }

    fn on(&self, gpu: usize) -> impl Iterator<Item = &Running> {
        self.running.iter().filter(move |one| one.gpu == gpu)
    }

    fn idle(&self) -> Option<usize> {
        (0..GPUS as usize).find(|gpu| self.on(*gpu).next().is_none())
    }

    /// The smallest instance that serves, on the fullest GPU that has a place for it.
    fn instance(&self, job: &Job) -> Option<(usize, mig::Span)> {
        let taken: Vec<Vec<mig::Span>> =
            (0..GPUS as usize).map(|gpu| self.on(gpu).map(|one| one.span).collect()).collect();
        mig::serving(job).into_iter().find_map(|profile| {
            let open = (0..).zip(&taken).filter(|(_, taken)| mig::fits(taken, profile));
            let (gpu, taken) = open.max_by_key(|(_, taken)| taken.iter().map(|span| span.1).sum::<u32>())?;
            Some((gpu, mig::spot(taken, profile)?))
        })
    }

    /// Asks the product where the share goes, and books it.
    fn share(&mut self, id: u64, job: &Job) -> Option<usize> {
        let wanted = if job.sm == 100 { request(Mode::Exclusive) } else { mps(job) };
        let lease_id = lease_id(id);
        let placed = place(&wanted, &lease_id, &self.inventory, &self.ledger, &self.config).ok()?;
        let uuid = placed.devices.first()?;
        self.ledger.leases.push(Lease {
            mode: placed.mode,
            isolation: placed.isolation,
            daemon: placed.daemon,
            sm: placed.sm,
            memory_bytes: placed.memory_bytes,
            ..lease(id, uuid)
        });
        self.inventory.devices.iter().position(|device| device.uuid == *uuid)
    }
}

fn mps(job: &Job) -> Request {
    Request {
        sm: Some(Percent::from_thousandths(job.sm * 1000)),
        memory: Some(Memory::Bytes(job.gib * GIB)),
        ..request(Mode::Mps)
    }
}

fn lease_id(id: u64) -> LeaseId {
    LeaseId::parse(&format!("{id:016x}")).unwrap()
}
