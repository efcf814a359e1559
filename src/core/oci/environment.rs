//! The variables that a config.json gives the process.

use serde_json::Value;

/// The value of `name` in `process.env`, the last one if it stands several times.
#[must_use]
pub(crate) fn environment_value(spec: &Value, name: &str) -> Option<String> {
    let entries = spec.get("process")?.get("env")?.as_array()?;
    let value = |entry: &Value| {
        let (key, value) = entry.as_str()?.split_once('=')?;
        (key == name).then(|| value.to_owned())
    };
    entries.iter().rev().find_map(value)
}
