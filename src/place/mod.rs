//! Which device serves a request: [`Request`], [`Inventory`] and [`Ledger`] in, [`Placement`] out. Pure.

mod account;
mod refusal;
mod select;

use crate::config::Config;
use crate::inventory::Inventory;
use crate::ledger::{LeaseId, Ledger};
use crate::mps::ServerKey;
use crate::request::{Isolation, Mode, Percent, Priority, Request};

pub use account::{Account, account};
pub use refusal::Refusal;

/// Where a request finds its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// Device UUIDs in the order the container sees them.
    pub devices: Vec<String>,
    /// The mode in force.
    pub mode: Mode,
    /// Shared or dedicated.
    pub isolation: Isolation,
    /// The MPS server it needs: mode mps, or time-slice with memory.
    pub server: Option<ServerKey>,
    /// SM ceiling of the whole container.
    pub sm: Option<Percent>,
    /// Memory of the whole container on each device, in bytes (whole MiB).
    pub memory_bytes: Option<u64>,
    /// CUDA processes expected at once.
    pub processes: u32,
    /// MPS client priority.
    pub priority: Priority,
    /// Memory was so near to what NVML last reported free that a refresh should come first.
    pub refresh_first: bool,
    /// One line each, for whoever starts the container.
    pub warnings: Vec<String>,
}

/// Finds `request` a place. `id` is the lease id that it will have (it names a dedicated server).
///
/// # Errors
/// [`Refusal`]: what was asked, what each device has left, who holds it, what would fit now.
pub fn place(
    _request: &Request,
    _id: &LeaseId,
    _inventory: &Inventory,
    _ledger: &Ledger,
    _config: &Config,
) -> Result<Placement, Box<Refusal>> {
    todo!()
}
