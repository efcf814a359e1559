//! Asking NVML, /proc, /dev and the library directories. `sublet` alone does this.

use super::Inventory;
use crate::config::Config;

/// Why the driver could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {}

/// Looks at everything afresh.
///
/// # Errors
/// No driver, no NVML, a driver whose files and kernel module differ, an unsupported platform.
pub fn probe(_config: &Config) -> Result<Inventory, ProbeError> {
    todo!()
}
