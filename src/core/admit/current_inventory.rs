//! An inventory that is up to date: the cached one, or a new one from `sublet refresh`.

use std::time::{Duration, Instant};

use super::{AdmitError, is_remote, state};
use crate::config::Config;
use crate::inventory::{self, Inventory, InventoryError};
use crate::process::sublet;

/// The time limit of a refresh. NVML may have to load firmware on a machine without the persistence daemon.
const REFRESH_LIMIT: Duration = Duration::from_secs(60);

/// How long to repeat a refresh if the inventory is out of date as soon as it is written.
const SETTLING: Duration = Duration::from_secs(10);

/// The cached inventory if it is up to date, otherwise a refreshed one.
///
/// # Errors
/// A fault of the driver, in the driver's words.
pub fn fresh_inventory(config: &Config) -> Result<Inventory, AdmitError> {
    match inventory::load(config) {
        Err(error) if error.wants_refresh() => state(config).new_inventory(),
        loaded => Ok(loaded?),
    }
}

/// [`fresh_inventory`] for commands that show the devices. Only NVML knows of MIG devices that another tool has
/// destroyed and created again.
///
/// # Errors
/// As [`fresh_inventory`].
pub fn confirmed_inventory(config: &Config) -> Result<Inventory, AdmitError> {
    let inventory = fresh_inventory(config)?;
    let mig = inventory.gpus().any(|gpu| gpu.mig_enabled);
    if !mig || inventory::is_watched(config) || is_remote(config) { Ok(inventory) } else { refresh(config) }
}

/// Runs `sublet refresh` by absolute path with a clean environment, and reads what it wrote.
///
/// # Errors
/// The error of `sublet refresh`.
pub fn refresh(config: &Config) -> Result<Inventory, AdmitError> {
    let began = Instant::now();
    loop {
        for warning in sublet::run(&["refresh", "--quiet"], REFRESH_LIMIT)? {
            tracing::warn!("{warning}");
        }
        match inventory::load(config) {
            // MIG instances are being created or destroyed, for other containers or by `sublet mig apply`.
            Err(InventoryError::Stale { .. }) if began.elapsed() < SETTLING => {}
            loaded => return Ok(loaded?),
        }
    }
}
