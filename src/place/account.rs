//! What is booked on a device and what is left.

use crate::config::Config;
use crate::inventory::Device;
use crate::ledger::Ledger;
use crate::request::{Mode, Percent};

/// The accounts of one device.
#[derive(Clone, Debug, PartialEq)]
pub struct Account {
    /// Its present use; `None`: idle.
    pub used_as: Option<Mode>,
    /// Leases that share it.
    pub leases: usize,
    /// Sum of SM shares.
    pub sm_booked: Percent,
    /// SM share that a new lease may still take.
    pub sm_free: Percent,
    /// Sum of booked memory, MPS servers' own included, in bytes.
    pub memory_booked: u64,
    /// Memory that a new lease may still book, in bytes.
    pub memory_free: u64,
    /// Sum of expected CUDA processes.
    pub processes: u32,
}

/// The accounts of `device`.
#[must_use]
pub fn account(_device: &Device, _ledger: &Ledger, _config: &Config) -> Account {
    todo!()
}
