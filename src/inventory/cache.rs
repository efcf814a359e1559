//! `inventory.json`: writing it, reading it, and whether it is still true.

use super::Inventory;
use crate::config::Config;

/// Why there is no usable inventory.
#[derive(Debug, thiserror::Error)]
pub enum InventoryError {}

/// The inventory as last refreshed, checked against the running system.
///
/// # Errors
/// [`InventoryError::Missing`] and `Stale` ask for `sublet refresh`; others are the driver's own trouble.
pub fn load(_config: &Config) -> Result<Inventory, InventoryError> {
    todo!()
}

/// Writes `inventory.json` atomically, mode 0644.
///
/// # Errors
/// The state directory cannot be written.
pub fn store(_config: &Config, _inventory: &Inventory) -> Result<(), InventoryError> {
    todo!()
}
