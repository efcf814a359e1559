//! Applies edits to config.json as a `serde_json::Value`. Every existing field stays, in its order.
//!
//! A record of the edits is in an annotation. By it they are removed again where a bundle with a share is run again
//! after its container has ended, or was never created. The file may have been changed meanwhile; everything but the
//! edits stays.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use oci_spec::OciSpecError;
use oci_spec::runtime::{
    LinuxDeviceBuilder, LinuxDeviceCgroupBuilder, LinuxDeviceType, MountBuilder as OciMountBuilder,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json, to_value};

use super::conflict::{entries, has_default_rule, member, text};
use crate::grant::{Environment, Grant, GrantedNode, Mount, refused_beside};
use crate::inventory::Node;
use crate::ledger::{LEASE_ANNOTATION, LEASE_EDITS_ANNOTATION, LEASE_RECORD_ANNOTATION};
use crate::{config, inventory, process};

/// The annotation by which runc and crun get criu's configuration file.
pub(super) const CRIU_ANNOTATION: &str = "org.criu.config";
/// The options of read-only mounts. `bind`, not `rbind`, so that mounts below a source are not included.
pub(super) const MOUNT_OPTIONS: [&str; 5] = ["bind", "ro", "nosuid", "nodev", "rprivate"];
/// How a device node of the host is brought into a user namespace: `nodev` would close it.
pub(super) const NODE_OPTIONS: [&str; 4] = ["bind", "nosuid", "noexec", "rprivate"];

/// A spec that does not have the form of the OCI runtime specification. It names the field.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// A field of another type.
    #[error(
        "the container's spec: `{field}` is {found}, but the OCI runtime specification has {wanted}: the \
         program that wrote the file is at fault; try the container without its other hooks and wrappers"
    )]
    Type {
        /// As `linux.resources.devices`.
        field: &'static str,
        /// As the specification demands.
        wanted: &'static str,
        /// The present value.
        found: &'static str,
    },
    /// An environment can only be given to a process.
    #[error("the container's spec has no `process`: a container without one cannot be given a GPU share")]
    NoProcess,
    /// [`own_annotations`](super::own_annotations) cannot decide whose it is.
    #[error(
        "annotation {annotation} is for one container of a pod, and it cannot be told whether that is this one: \
         write {key}/{whole}"
    )]
    Addressed {
        /// `KEY/NAME`.
        annotation: String,
        /// KEY.
        key: String,
        /// The name that decides it.
        whole: String,
    },
    /// A path to be written that cannot be JSON.
    #[error("cannot write a device or mount into the container's spec: {0}")]
    Fragment(String),
}

fn fragment(error: impl std::error::Error) -> SpecError {
    SpecError::Fragment(crate::text::safe(&error.to_string()))
}

/// The spec's annotations.
///
/// # Errors
/// They are not an object of strings.
pub fn annotations(spec: &Value) -> Result<BTreeMap<String, String>, SpecError> {
    let entries = match spec.get("annotations") {
        None | Some(Value::Null) => return Ok(BTreeMap::new()),
        Some(Value::Object(entries)) => entries,
        Some(other) => return Err(wrong("annotations", "an object", other)),
    };
    let entry = |(key, value): (&String, &Value)| match value {
        Value::String(text) => Ok((key.clone(), text.clone())),
        other => Err(wrong("annotations.*", "a string", other)),
    };
    entries.iter().map(entry).collect()
}

/// Applies all of `grant`.
///
/// # Errors
/// A field to be edited has another type than in the specification. `spec` may then be partly edited, so it must not be
/// used.
pub fn edit(spec: &mut Value, grant: &Grant) -> Result<(), SpecError> {
    edit_within(spec, grant, process::is_nested())
}

/// [`edit`]. `nested` says that this process itself runs in a user namespace, as under rootless engines.
pub fn edit_within(spec: &mut Value, grant: &Grant, nested: bool) -> Result<(), SpecError> {
    let edits = serde_json::to_string(&Edits::of(grant, spec)).map_err(fragment)?;
    let root = object(spec, "the spec")?;
    let process = root.get_mut("process").ok_or(SpecError::NoProcess)?;
    edit_environment(process, &grant.env)?;
    devices(root, &grant.nodes, nested)?;
    let bind_mount = |mount: &Mount| bind(&mount.source, &mount.destination, &MOUNT_OPTIONS);
    let mounts = grant.mounts.iter().map(bind_mount).collect::<Result<Vec<_>, _>>()?;
    if !mounts.is_empty() {
        // New entries come last. Mounts and rules apply in order, so none of the engine's entries overrides them.
        array(root, "mounts", "mounts")?.extend(mounts);
    }
    mask(root, &grant.masked_paths)?;
    let annotations = child(root, "annotations", "annotations")?;
    annotations.insert(LEASE_ANNOTATION.to_owned(), Value::from(grant.lease.as_str()));
    if !grant.record.is_empty() {
        annotations.insert(LEASE_RECORD_ANNOTATION.to_owned(), Value::from(grant.record.as_str()));
    }
    annotations.insert(LEASE_EDITS_ANNOTATION.to_owned(), Value::from(edits));
    // With Podman's hook, sublet takes no part in checkpoint and restore, and crun runs no hooks at a restore.
    if let Some(file) = grant.no_checkpoint.to_str().filter(|file| !file.is_empty()) {
        annotations.insert(CRIU_ANNOTATION.to_owned(), Value::from(file));
    }
    Ok(())
}

/// Applies the environment to a process object (`process` of config.json, or exec's process file).
///
/// # Errors
/// `env` is not an array of strings.
pub fn edit_environment(process: &mut Value, environment: &Environment) -> Result<(), SpecError> {
    let process = object(process, "process")?;
    let env = array(process, "env", "process.env")?;
    let mut seen = BTreeSet::new();
    let mut out = Vec::with_capacity(env.len() + environment.set.len() + environment.default.len());
    for entry in env.drain(..) {
        let Value::String(text) = &entry else { return Err(wrong("process.env[]", "a string", &entry)) };
        let name = name_of(text).to_owned();
        if let Some((_, value)) = environment.set.iter().find(|(ours, _)| *ours == name) {
            if seen.insert(name.clone()) {
                out.push(Value::from(format!("{name}={value}")));
            }
        } else if !environment.remove_prefixes.iter().any(|prefix| name.starts_with(prefix.as_str())) {
            seen.insert(name);
            out.push(entry);
        }
    }
    for (name, value) in environment.set.iter().chain(&environment.default) {
        let is_refused = refused_beside(name).is_some_and(|other| seen.contains(other));
        if !is_refused && seen.insert(name.clone()) {
            out.push(Value::from(format!("{name}={value}")));
        }
    }
    *env = out;
    Ok(())
}

/// The nodes with their cgroup rules. In a user namespace mknod is not allowed, so the real nodes are bind-mounted
/// there. The cgroup, if there is one, still needs its rules.
fn devices(root: &mut Map<String, Value>, nodes: &[GrantedNode], nested: bool) -> Result<(), SpecError> {
    if nodes.is_empty() {
        return Ok(());
    }
    let is_user = |namespace: &Value| text(namespace, "type") == Some("user");
    let has_own = root.get("linux").is_some_and(|linux| entries(linux, "/namespaces").iter().any(is_user));
    if nested || has_own {
        let bind_node = |granted: &GrantedNode| bind(&granted.source, &granted.node.path, &NODE_OPTIONS);
        let mounts = nodes.iter().map(bind_node).collect::<Result<Vec<_>, _>>()?;
        array(root, "mounts", "mounts")?.extend(mounts);
        // A CDI device has added them. The runtime would bind-mount the host's nodes, so they are
        // replaced.
        if let Some(linux) = root.get_mut("linux").filter(|linux| linux.get("devices").is_some()) {
            let present = array(object(linux, "linux")?, "devices", "linux.devices")?;
            present.retain(|entry| !nodes.iter().any(|granted| is_at(entry, granted)));
        }
    } else {
        let linux = child(root, "linux", "linux")?;
        let present = array(linux, "devices", "linux.devices")?;
        for granted in nodes {
            if !present.iter().any(|entry| is_at(entry, granted)) {
                let Node { path, major, minor } = granted.node.clone();
                let node = LinuxDeviceBuilder::default().path(path).typ(LinuxDeviceType::C);
                let node = node.major(i64::from(major)).minor(i64::from(minor));
                present.push(value(node.file_mode(0o666_u32).uid(0_u32).gid(0_u32).build())?);
            }
        }
    }
    let linux = child(root, "linux", "linux")?;
    if nested && !linux.get("resources").is_some_and(Value::is_object) {
        return Ok(());
    }
    let resources = child(linux, "resources", "linux.resources")?;
    let rules = array(resources, "devices", "linux.resources.devices")?;
    // All other devices are denied first, as engines do and as runc does by itself.
    if !nested && !has_default_rule(rules) {
        rules.insert(0, value(LinuxDeviceCgroupBuilder::default().allow(false).access("rwm").build())?);
    }
    for granted in nodes {
        rules.push(rule_value(&granted.node)?);
    }
    Ok(())
}

/// Whether `entry` of linux.devices has the path of `granted`.
fn is_at(entry: &Value, granted: &GrantedNode) -> bool {
    is_path(&entry["path"], &granted.node.path)
}

/// Without `m`, because the runtime creates the node and not the container.
fn rule_value(Node { major, minor, .. }: &Node) -> Result<Value, SpecError> {
    let rule = LinuxDeviceCgroupBuilder::default().allow(true).typ(LinuxDeviceType::C);
    value(rule.major(i64::from(*major)).minor(i64::from(*minor)).access("rw").build())
}

fn bind(source: &Path, destination: &Path, options: &[&str]) -> Result<Value, SpecError> {
    let options: Vec<String> = options.iter().map(|&option| option.to_owned()).collect();
    let mount = OciMountBuilder::default().destination(destination).typ("bind").source(source);
    value(mount.options(options).build())
}

/// A part of a spec as JSON.
fn value(part: Result<impl Serialize, OciSpecError>) -> Result<Value, SpecError> {
    to_value(part.map_err(fragment)?).map_err(fragment)
}

fn mask(root: &mut Map<String, Value>, paths: &[PathBuf]) -> Result<(), SpecError> {
    if paths.is_empty() {
        return Ok(());
    }
    let masked = array(child(root, "linux", "linux")?, "maskedPaths", "linux.maskedPaths")?;
    for path in paths {
        let path = to_value(path).map_err(fragment)?;
        if !masked.contains(&path) {
            masked.push(path);
        }
    }
    Ok(())
}

/// The array `key`, created if it is absent.
fn array<'a>(
    parent: &'a mut Map<String, Value>,
    key: &str,
    field: &'static str,
) -> Result<&'a mut Vec<Value>, SpecError> {
    match member(parent, key, json!([])) {
        Value::Array(entries) => Ok(entries),
        other => Err(wrong(field, "an array", other)),
    }
}

/// As [`array`], for an object.
fn child<'a>(
    parent: &'a mut Map<String, Value>,
    key: &str,
    field: &'static str,
) -> Result<&'a mut Map<String, Value>, SpecError> {
    object(member(parent, key, json!({})), field)
}

fn object<'a>(value: &'a mut Value, field: &'static str) -> Result<&'a mut Map<String, Value>, SpecError> {
    match value {
        Value::Object(entries) => Ok(entries),
        other => Err(wrong(field, "an object", other)),
    }
}

fn wrong(field: &'static str, wanted: &'static str, value: &Value) -> SpecError {
    let found = match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    };
    SpecError::Type { field, wanted, found }
}

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
        serde_json::from_str(spec.pointer("/annotations")?.get(LEASE_EDITS_ANNOTATION)?.as_str()?).ok()
    }

    /// Whether sublet set the variable `entry`, a `NAME=VALUE`.
    pub fn is_variable(&self, entry: &str) -> bool {
        let is_default = |(name, value): &(String, String)| entry.split_once('=') == Some((name, value));
        config::is_own_name(name_of(entry)) || self.defaults.iter().any(is_default)
    }

    /// The edits of `grant` to `spec`, which is still unedited.
    pub fn of(grant: &Grant, spec: &Value) -> Self {
        let env = entries(spec, "/process/env");
        let is_set = |name: &str| env.iter().filter_map(Value::as_str).any(|entry| name_of(entry) == name);
        let masked = entries(spec, "/linux/maskedPaths");
        let is_masked = |path: &Path| masked.iter().any(|old| is_path(old, path));
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

/// sublet's edits in a config.json.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct EditsShown {
    /// The variables, as `NAME=VALUE`.
    pub environment: Vec<String>,
    /// The device nodes.
    pub nodes: Vec<Node>,
}

/// That of `spec`; `None` if it records no edits of sublet's.
pub fn edits_shown(spec: &Value) -> Option<EditsShown> {
    let edits = Edits::recorded(spec)?;
    let environment = entries(spec, "/process/env").iter().filter_map(Value::as_str);
    let environment = environment.filter(|entry| edits.is_variable(entry));
    Some(EditsShown { environment: environment.map(str::to_owned).collect(), nodes: edits.nodes })
}

/// The directory of sublet's masks. Masks elsewhere are the engine's, whatever an annotation says.
const MASKS: &str = "/proc/driver/nvidia/gpus";

/// Removes all edits of an earlier grant from `spec`. `false`: `spec` does not record them, and is unchanged.
pub(crate) fn undo_edits(spec: &mut Value) -> bool {
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
    let rules: Vec<Value> = edits.nodes.iter().filter_map(|node| rule_value(node).ok()).collect();
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
pub(super) fn retain(spec: &mut Value, pointer: &str, keep: impl Fn(&Value) -> bool) {
    if let Some(entries) = spec.pointer_mut(pointer).and_then(Value::as_array_mut) {
        entries.retain(keep);
    }
}

#[cfg(test)]
mod edits_record_tests {
    use super::*;

    #[test]
    fn a_stored_record_is_read_and_written_again_alike() {
        let stored = include_str!("../../../tests/formats/every-key/edits.json");
        let stored: serde_json::Value = serde_json::from_str(stored).unwrap();
        let read: Edits = serde_json::from_value(stored.clone()).unwrap();
        assert_eq!(serde_json::to_value(read).unwrap(), stored);
    }
}

#[cfg(test)]
mod edits_shown_tests {
    use serde_json::json;

    use super::*;
    use crate::ledger::LEASE_EDITS_ANNOTATION;

    #[test]
    fn only_variables_that_sublet_set_are_shown() {
        let edits = r#"{"mounts":["/x"],"nodes":[{"path":"/dev/nvidia0","major":195,"minor":0}],"masks":[],
            "defaults":[["XLA_PYTHON_CLIENT_PREALLOCATE","false"]]}"#;
        let env = [
            "PATH=/bin",
            "CUDA_VISIBLE_DEVICES=0",
            "XLA_PYTHON_CLIENT_PREALLOCATE=false",
            "SUBLET_SM_PERCENT=25",
        ];
        let spec = json!({"process": {"env": env}, "annotations": {LEASE_EDITS_ANNOTATION: edits}});
        let shown = edits_shown(&spec).unwrap();
        assert_eq!(shown.environment, env[1..]);
        assert_eq!(shown.nodes[0].path.to_str(), Some("/dev/nvidia0"));
        assert_eq!(edits_shown(&json!({"process": {"env": env}})), None);
    }
}
