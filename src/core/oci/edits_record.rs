//! The record of sublet's edits in an annotation of config.json, so that they can be removed again.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config;
use crate::grant::Grant;
use crate::inventory::Node;
use crate::ledger::LEASE_EDITS_ANNOTATION;

/// The edits that cannot be distinguished from the engine's own entries, as compact JSON in `sublet.lease.edits`. Most
/// variables are recognized by their names.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Edits {
    /// Destinations of the mounts.
    pub mounts: Vec<PathBuf>,
    pub nodes: Vec<Node>,
    pub masks: Vec<PathBuf>,
    /// Variables that were absent, with the values that sublet set.
    pub defaults: Vec<(String, String)>,
}

impl Edits {
    /// Reads the record in `spec`.
    pub fn recorded(spec: &Value) -> Option<Self> {
        let text = spec.pointer("/annotations")?.get(LEASE_EDITS_ANNOTATION)?.as_str()?;
        serde_json::from_str(text).ok()
    }

    /// Whether sublet set the variable `entry`, a `NAME=VALUE`.
    pub fn is_variable(&self, entry: &str) -> bool {
        let is_default = |(name, value): &(String, String)| entry.split_once('=') == Some((name, value));
        config::is_own_name(name_of(entry)) || self.defaults.iter().any(is_default)
    }

    /// The edits of `grant` to `root`, which is still unedited.
    pub fn of(grant: &Grant, root: &Map<String, Value>) -> Self {
        let spec = |pointer: &[&str]| {
            let found = pointer.iter().try_fold(None::<&Value>, |at, key| {
                at.map_or_else(|| root.get(*key), |value| value.get(*key)).map(Some)
            });
            found.flatten().and_then(Value::as_array).map_or(&[][..], Vec::as_slice)
        };
        let env = spec(&["process", "env"]);
        let is_set = |name: &str| env.iter().filter_map(Value::as_str).any(|entry| name_of(entry) == name);
        let masked = spec(&["linux", "maskedPaths"]);
        let is_masked = |path: &Path| masked.iter().any(|old| old.as_str().map(Path::new) == Some(path));
        Self {
            mounts: grant.mounts.iter().map(|mount| mount.destination.clone()).collect(),
            nodes: grant.nodes.iter().map(|granted| granted.node.clone()).collect(),
            masks: grant.masked_paths.iter().filter(|path| !is_masked(path)).cloned().collect(),
            defaults: grant.env.default.iter().filter(|(name, _)| !is_set(name)).cloned().collect(),
        }
    }
}

/// The name of the variable that `NAME=VALUE` sets.
pub(super) fn name_of(entry: &str) -> &str {
    entry.split('=').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stored_record_is_read_and_written_again_alike() {
        let stored = include_str!("../../../tests/formats/every-key/edits.json");
        let stored: serde_json::Value = serde_json::from_str(stored).unwrap();
        let read: Edits = serde_json::from_value(stored.clone()).unwrap();
        assert_eq!(serde_json::to_value(read).unwrap(), stored);
    }
}
