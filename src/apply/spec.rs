//! Edits to config.json as a `serde_json::Value`: every field that was there stays, in its order.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::grant::{Environment, Grant};

/// A spec whose shape is not what the OCI runtime specification says; names the field.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {}

/// The spec's annotations.
///
/// # Errors
/// They are no object of strings.
pub fn annotations(_spec: &Value) -> Result<BTreeMap<String, String>, SpecError> {
    todo!()
}

/// The value of `name` in `process.env`, the last one if it stands several times.
#[must_use]
pub fn environment_value(_spec: &Value, _name: &str) -> Option<String> {
    todo!()
}

/// Applies all of `grant`.
///
/// # Errors
/// A field we edit has another type than the specification's; `spec` may then be half edited: drop it.
pub fn edit(_spec: &mut Value, _grant: &Grant) -> Result<(), SpecError> {
    todo!()
}

/// Applies the environment to a process object (`process` of config.json, or exec's process file).
///
/// # Errors
/// `env` is no array of strings.
pub fn edit_environment(_process: &mut Value, _environment: &Environment) -> Result<(), SpecError> {
    todo!()
}
