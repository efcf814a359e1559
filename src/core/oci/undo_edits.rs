//! Removes sublet's edits from a config.json, for a bundle with a share that is run again after its container has
//! ended, or was never created. The file may have been changed meanwhile; everything but the edits stays.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::apply_edits::{CRIU_ANNOTATION, MOUNT_OPTIONS, NODE_OPTIONS, rule_value};
use super::edits_record::Edits;
use crate::grant::GrantedNode;
use crate::inventory::{self, Node};
use crate::ledger::{LEASE_ANNOTATION, LEASE_EDITS_ANNOTATION, LEASE_RECORD_ANNOTATION};

/// The directory of sublet's masks. Masks elsewhere are the engine's, whatever an annotation says.
const MASKS: &str = "/proc/driver/nvidia/gpus";

/// Removes all edits of an earlier grant from `spec`. `false`: `spec` does not record them, and is unchanged.
#[must_use]
pub fn undo(spec: &mut Value) -> bool {
    let Some(edits) = Edits::recorded(spec) else { return false };
    retain(spec, "/process/env", |entry| !edits.is_variable(entry.as_str().unwrap_or_default()));
    let is_node = |path: &Value| edits.nodes.iter().any(|node| is_path(path, &node.path));
    retain(spec, "/mounts", |mount| {
        let of_file = has_options(mount, &MOUNT_OPTIONS)
            && edits.mounts.iter().any(|path| is_path(&mount["destination"], path));
        let of_node = has_options(mount, &NODE_OPTIONS) && is_node(&mount["destination"]);
        !of_file && !of_node
    });
    retain(spec, "/linux/devices", |device| !is_node(&device["path"]));
    let rule = |node: &Node| rule_value(&GrantedNode { node: node.clone(), source: PathBuf::new() }).ok();
    let rules: Vec<Value> = edits.nodes.iter().filter_map(rule).collect();
    retain(spec, "/linux/resources/devices", |entry| !rules.contains(entry));
    retain(spec, "/linux/maskedPaths", |path| {
        !edits.masks.iter().any(|mask| mask.starts_with(MASKS) && is_path(path, mask))
    });
    if let Some(annotations) = spec.get_mut("annotations").and_then(Value::as_object_mut) {
        for key in [LEASE_ANNOTATION, LEASE_RECORD_ANNOTATION, LEASE_EDITS_ANNOTATION] {
            annotations.shift_remove(key);
        }
        let criu = annotations.get(CRIU_ANNOTATION).and_then(Value::as_str);
        if criu.is_some_and(|file| Path::new(file).ends_with(inventory::NO_CHECKPOINT_FILE)) {
            annotations.shift_remove(CRIU_ANNOTATION);
        }
    }
    true
}

fn is_path(value: &Value, path: &Path) -> bool {
    value.as_str().map(Path::new) == Some(path)
}

fn has_options(mount: &Value, options: &[&str]) -> bool {
    let own = mount.get("options").and_then(Value::as_array);
    own.is_some_and(|own| own.iter().map(Value::as_str).eq(options.iter().map(|option| Some(*option))))
}

/// Keeps the elements that satisfy `keep` in the array at `pointer`, if it exists.
fn retain(spec: &mut Value, pointer: &str, keep: impl Fn(&Value) -> bool) {
    if let Some(entries) = spec.pointer_mut(pointer).and_then(Value::as_array_mut) {
        entries.retain(keep);
    }
}
