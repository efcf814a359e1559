//! What in a container's spec contradicts a share of ours.

use serde_json::Value;

use crate::config::Config;

/// Something in the spec that must go before we serve it; the message names the line to remove.
#[derive(Debug, thiserror::Error)]
pub enum Conflict {}

/// Finds an engine's own GPU request, an allow-all device rule, or NVIDIA nodes outside our grant.
///
/// # Errors
/// The first conflict found.
pub fn conflict(_spec: &Value, _config: &Config) -> Result<(), Conflict> {
    todo!()
}
