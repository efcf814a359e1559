//! An inventory that is up to date: the cached one, or a new one from `sublet refresh`.

use std::time::{Duration, Instant};

use super::take_lease::SHORTEST_PAUSE;
use super::{AdmitError, Leases, is_remote};
use crate::config::Config;
use crate::inventory::{self, Inventory, InventoryError};
use crate::ledger::{self, Store};
use crate::process::sublet;

/// The time limit of a refresh. NVML may have to load firmware on a machine without the persistence daemon.
const REFRESH_LIMIT: Duration = Duration::from_secs(60);

/// How long to repeat a refresh if the inventory is out of date as soon as it is written.
const SETTLING: Duration = Duration::from_secs(10);

/// The cached inventory if it is up to date, otherwise a refreshed one.
pub fn fresh_inventory(config: &Config) -> Result<Inventory, AdmitError> {
    refresh_if_stale(load(config, inventory::load(config)), config)
}

/// [`fresh_inventory`] beside a store, which is opened in a trusted directory only.
pub(super) fn fresh_inventory_beside(_: &Store, config: &Config) -> Result<Inventory, AdmitError> {
    refresh_if_stale(load(config, inventory::load_beside(config, &[])), config)
}

fn refresh_if_stale(
    loaded: Result<Inventory, InventoryError>,
    config: &Config,
) -> Result<Inventory, AdmitError> {
    match loaded {
        Err(error) if error.wants_refresh() => Leases::of(config).new_inventory(),
        loaded => Ok(loaded?),
    }
}

/// The cached inventory. While a MIG layout changes, the instances of its GPUs may be others than those in it: these GPUs
/// take no lease, and a lease that is taken after the change needs a newer inventory ([`crate::ledger::MigChanges::count`]).
fn load(config: &Config, loaded: Result<Inventory, InventoryError>) -> Result<Inventory, InventoryError> {
    match loaded {
        Err(InventoryError::Stale { path, changed }) => {
            let stale = InventoryError::Stale { path, changed };
            let changing = ledger::gpus_under_change(&config.state_dir);
            if changing.is_empty() { Err(stale) } else { inventory::load_beside(config, &changing) }
        }
        loaded => loaded,
    }
}

/// [`fresh_inventory`] for commands that show the devices. Only NVML knows of MIG devices that another tool has
/// destroyed and created again.
pub fn confirmed_inventory(config: &Config) -> Result<Inventory, AdmitError> {
    let inventory = fresh_inventory(config)?;
    let mig = inventory.gpus().any(|gpu| gpu.mig_enabled);
    if !mig || inventory::is_watched(config) || is_remote(config) { Ok(inventory) } else { refresh(config) }
}

/// Runs `sublet refresh` by absolute path with a clean environment, and reads what it wrote.
pub fn refresh(config: &Config) -> Result<Inventory, AdmitError> {
    let began = Instant::now();
    loop {
        for warning in sublet::run(&["refresh", "--quiet"], REFRESH_LIMIT)? {
            tracing::warn!("{warning}");
        }
        match load(config, inventory::load(config)) {
            // MIG instances are being created or destroyed, for other containers or by `sublet mig apply`.
            Err(InventoryError::Stale { .. }) if began.elapsed() < SETTLING => {
                std::thread::sleep(SHORTEST_PAUSE);
            }
            loaded => return Ok(loaded?),
        }
    }
}
