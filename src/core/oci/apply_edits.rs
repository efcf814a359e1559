//! Applies edits to config.json as a `serde_json::Value`. Every existing field stays, in its order.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use oci_spec::OciSpecError;
use oci_spec::runtime::{
    LinuxDeviceBuilder, LinuxDeviceCgroupBuilder, LinuxDeviceType, MountBuilder as OciMountBuilder,
};
use serde_json::{Map, Value};

use super::conflict;
use super::edits_record::Edits;
use crate::grant::{Environment, Grant, GrantedNode, Mount, refused_beside};
use crate::host::user_namespace;
use crate::ledger::{LEASE_ANNOTATION, LEASE_EDITS_ANNOTATION, LEASE_RECORD_ANNOTATION};

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

impl From<OciSpecError> for SpecError {
    fn from(error: OciSpecError) -> Self {
        Self::Fragment(crate::text::safe(&error.to_string()))
    }
}

impl From<serde_json::Error> for SpecError {
    fn from(error: serde_json::Error) -> Self {
        Self::Fragment(crate::text::safe(&error.to_string()))
    }
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
    edit_within(spec, grant, user_namespace::is_nested())
}

/// [`edit`]. `nested` says that this process itself runs in a user namespace, as under rootless engines.
pub fn edit_within(spec: &mut Value, grant: &Grant, nested: bool) -> Result<(), SpecError> {
    let root = object(spec, "the spec")?;
    let edits = serde_json::to_string(&Edits::of(grant, root))?;
    let process = root.get_mut("process").ok_or(SpecError::NoProcess)?;
    edit_environment(process, &grant.env)?;
    devices(root, &grant.nodes, nested)?;
    let bind_mount = |mount: &Mount| bind(&mount.source, &mount.destination, &MOUNT_OPTIONS);
    let mounts = grant.mounts.iter().map(bind_mount).collect::<Result<Vec<_>, _>>()?;
    append(root, "mounts", "mounts", mounts)?;
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
        let name = text.split_once('=').map_or(text.as_str(), |(name, _)| name).to_owned();
        if let Some((_, value)) = environment.set.iter().find(|(ours, _)| *ours == name) {
            if seen.insert(name.clone()) {
                out.push(Value::from(format!("{name}={value}")));
            }
        } else if !environment.remove_prefixes.iter().any(|prefix| name.starts_with(prefix.as_str())) {
            seen.insert(name);
            out.push(entry);
        }
    }
    for (name, value) in &environment.set {
        if seen.insert(name.clone()) {
            out.push(Value::from(format!("{name}={value}")));
        }
    }
    for (name, value) in &environment.default {
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
    if nested || has_user_namespace(root) {
        let bind_node = |granted: &GrantedNode| bind(&granted.source, &granted.node.path, &NODE_OPTIONS);
        let mounts = nodes.iter().map(bind_node).collect::<Result<Vec<_>, _>>()?;
        append(root, "mounts", "mounts", mounts)?;
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
                present.push(device_value(granted)?);
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
    if !nested && !conflict::has_default_rule(rules) {
        rules.insert(0, deny_rule()?);
    }
    for granted in nodes {
        rules.push(rule_value(granted)?);
    }
    Ok(())
}

/// Whether `entry` of linux.devices has the path of `granted`.
fn is_at(entry: &Value, granted: &GrantedNode) -> bool {
    entry.get("path").and_then(Value::as_str).map(Path::new) == Some(granted.node.path.as_path())
}

fn has_user_namespace(root: &Map<String, Value>) -> bool {
    let namespaces = root.get("linux").and_then(|linux| linux.get("namespaces")).and_then(Value::as_array);
    let is_user = |entry: &Value| entry.get("type").and_then(Value::as_str) == Some("user");
    namespaces.is_some_and(|entries| entries.iter().any(is_user))
}

fn device_value(granted: &GrantedNode) -> Result<Value, SpecError> {
    let device = LinuxDeviceBuilder::default()
        .path(granted.node.path.clone())
        .typ(LinuxDeviceType::C)
        .major(i64::from(granted.node.major))
        .minor(i64::from(granted.node.minor))
        .file_mode(0o666_u32)
        .uid(0_u32)
        .gid(0_u32)
        .build()?;
    Ok(serde_json::to_value(device)?)
}

/// The rule for every device that no later rule names.
fn deny_rule() -> Result<Value, SpecError> {
    let rule = LinuxDeviceCgroupBuilder::default().allow(false).access("rwm").build()?;
    Ok(serde_json::to_value(rule)?)
}

/// Without `m`, because the runtime creates the node and not the container.
pub(super) fn rule_value(granted: &GrantedNode) -> Result<Value, SpecError> {
    let rule = LinuxDeviceCgroupBuilder::default()
        .allow(true)
        .typ(LinuxDeviceType::C)
        .major(i64::from(granted.node.major))
        .minor(i64::from(granted.node.minor))
        .access("rw")
        .build()?;
    Ok(serde_json::to_value(rule)?)
}

fn bind(source: &Path, destination: &Path, options: &[&str]) -> Result<Value, SpecError> {
    let mount = OciMountBuilder::default()
        .destination(destination)
        .typ("bind")
        .source(source)
        .options(options.iter().map(|&option| option.to_owned()).collect::<Vec<_>>())
        .build()?;
    Ok(serde_json::to_value(mount)?)
}

fn mask(root: &mut Map<String, Value>, paths: &[PathBuf]) -> Result<(), SpecError> {
    if paths.is_empty() {
        return Ok(());
    }
    let masked = array(child(root, "linux", "linux")?, "maskedPaths", "linux.maskedPaths")?;
    for path in paths {
        let path = serde_json::to_value(path)?;
        if !masked.contains(&path) {
            masked.push(path);
        }
    }
    Ok(())
}

/// New entries come last. Mounts and rules apply in order, so none of the engine's entries overrides them.
fn append(
    parent: &mut Map<String, Value>,
    key: &str,
    field: &'static str,
    values: Vec<Value>,
) -> Result<(), SpecError> {
    if !values.is_empty() {
        array(parent, key, field)?.extend(values);
    }
    Ok(())
}

/// The array `key`, created if it is absent. `null`, which is Go's nil, counts as absent.
fn array<'a>(
    parent: &'a mut Map<String, Value>,
    key: &str,
    field: &'static str,
) -> Result<&'a mut Vec<Value>, SpecError> {
    let value = parent.entry(key).or_insert(Value::Null);
    if value.is_null() {
        *value = Value::Array(Vec::new());
    }
    match value {
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
    let value = parent.entry(key).or_insert(Value::Null);
    if value.is_null() {
        *value = Value::Object(Map::new());
    }
    object(value, field)
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
