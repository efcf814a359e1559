//! The request of a container's spec.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::{AdmitError, fresh_inventory, is_remote};
use crate::config::Config;
use crate::grant::{Grant, nodes_of};
use crate::inventory::{self, Inventory};
use crate::ledger::{Container, LEASE_ANNOTATION, LEASE_RECORD_ANNOTATION, Lease};
use crate::oci::cdi::{self, Asked, CdiError};
use crate::oci::{self, Conflict, SpecError, entries, hooks, text};
use crate::place::only;
use crate::request::{self, Request};
use crate::slurm::JOB_SHARE;
use crate::text::safe;

/// The source of a container's request: its config.json, read once, and the share that its entry point names.
#[derive(Clone, Debug, Default)]
pub struct RequestSource {
    /// All annotations of the container, as [`oci::own_annotations`] gives them.
    pub annotations: BTreeMap<String, String>,
    /// The share that the entry point's name means (`sublet-<share>`), or that `containers.toml` gives.
    pub share: Option<String>,
}

impl RequestSource {
    /// Of the container with config.json `spec` in `bundle`; `None`: it asks for no share.
    pub fn of(spec: &Value, bundle: &Path, share: Option<&str>) -> Result<Option<Self>, SpecError> {
        let annotations = oci::own_annotations(spec, bundle)?;
        let asks = asks_for_a_share(spec, &annotations, share);
        Ok(asks.then(|| Self { annotations, share: share.map(str::to_owned) }))
    }

    /// Whom it is for, as far as that is said in a way that can be read.
    pub(super) fn owner(&self, config: &Config) -> Option<String> {
        request::parse(&self.annotations, self.share.as_deref(), None, config).ok()?.owner
    }

    /// Whether the container's processes keep the groups of its starter.
    pub(super) fn keeps_groups(&self) -> bool {
        self.annotations.contains_key(oci::KEEP_GROUPS)
    }

    /// Whether it asks for the share of its job of Slurm's.
    pub(super) fn is_of_job(&self) -> bool {
        asks_for_job_share(&self.annotations, self.share.as_deref())
    }

    /// Refuses a share that only `sublet-runtime` can give: it alone brings the share's environment to processes that
    /// join the container.
    ///
    /// # Errors
    /// The named share has `default_directory = false`.
    pub fn check_without_shim(&self, config: &Config) -> Result<(), AdmitError> {
        let name = self.annotations.get("sublet.share").or(self.share.as_ref());
        let share = name.and_then(|name| config.share.get(name));
        let is_off = share.and_then(|share| share.get("default_directory")).is_some_and(|on| on == "false");
        if is_off { Err(AdmitError::NeedsShim) } else { Ok(()) }
    }

    /// Without an earlier run's lease, which [`remove_earlier_grant`] removes from config.json.
    pub(super) fn without_lease(&self) -> Self {
        let mut source = self.clone();
        source.annotations.retain(|key, _| key != LEASE_ANNOTATION && !key.starts_with("sublet.lease."));
        source
    }
}

/// The CDI device of sublet's that an engine has added to `spec`. It is recognized by its hook, which no image can add.
///
/// # Errors
/// There are two different ones, or the arguments are not those that sublet writes.
pub(super) fn find_cdi_device(spec: &Value) -> Result<Option<Asked>, CdiError> {
    let mut found: Option<Asked> = None;
    for arguments in entries(spec, "/hooks/createRuntime").iter().filter_map(arguments_of_ours) {
        let asked = Asked::parse(arguments.into_iter())?;
        match &found {
            Some(first) if *first != asked => return Err(CdiError::Several(first.name(), asked.name())),
            _ => found = Some(asked),
        }
    }
    Ok(found)
}

/// The arguments after the stage, if `hook` is sublet's hook at that stage.
fn arguments_of_ours(hook: &Value) -> Option<Vec<&str>> {
    let program = Path::new(text(hook, "path")?).file_name()?;
    let arguments: Vec<&str> = entries(hook, "/args").iter().filter_map(Value::as_str).collect();
    (program == "sublet-hook" && arguments.get(1) == Some(&cdi::STAGE)).then(|| arguments[2..].to_vec())
}

/// Whether the container asks for a share: with annotations, with a CDI device, or with the name by which the shim was
/// called. The pause container of a pod never does, although engines copy the pod's annotations to it.
///
/// This is the one place where this is decided.
pub fn asks_for_a_share(spec: &Value, annotations: &BTreeMap<String, String>, share: Option<&str>) -> bool {
    let args = spec.pointer("/process/args").and_then(Value::as_array).into_iter().flatten();
    let args: Vec<&str> = args.filter_map(Value::as_str).collect();
    let asked =
        share.is_some() || request::has_sublet_annotations(annotations) || find_cdi_device(spec) != Ok(None);
    asked && !request::is_sandbox(annotations) && !request::is_podman_infra(annotations, &args)
}

/// Whether `annotations`, or else the entry point, name the share of the container's job of Slurm's.
pub fn asks_for_job_share(annotations: &BTreeMap<String, String>, entry_point: Option<&str>) -> bool {
    annotations.get("sublet.share").map(String::as_str).or(entry_point) == Some(JOB_SHARE)
}

/// Reads the request at `source`, of the container with config.json `spec`.
///
/// # Errors
/// The annotations are no valid request, or the spec contradicts it.
pub fn request_of(source: &RequestSource, spec: &Value, config: &Config) -> Result<Request, AdmitError> {
    if let Some(asked) = find_cdi_device(spec)? {
        if is_remote(config) {
            return Err(CdiError::Rootless.into());
        }
        return request_by_cdi(source, spec, &asked, || fresh_inventory(config), config);
    }
    let capabilities = oci::environment_value(spec, "NVIDIA_DRIVER_CAPABILITIES");
    let share = source.share.as_deref();
    let request = request::parse(&source.annotations, share, capabilities.as_deref(), config)?;
    oci::conflict(spec, &[], config)?;
    Ok(request)
}

/// The share of the CDI device `asked`, only on that device. Its nodes are already in the spec.
///
/// # Errors
/// The annotations ask for another share, the device is gone, or the spec contradicts the share.
pub fn request_by_cdi(
    source: &RequestSource,
    spec: &Value,
    asked: &Asked,
    inventory: impl FnOnce() -> Result<Inventory, AdmitError>,
    config: &Config,
) -> Result<Request, AdmitError> {
    let (said, entry_point) = (&source.annotations, source.share.as_deref());
    let mut annotations = said.clone();
    if let (Some(entry_point), false) = (entry_point, annotations.contains_key("sublet.share")) {
        annotations.insert("sublet.share".to_owned(), entry_point.to_owned());
    }
    let capabilities = oci::environment_value(spec, "NVIDIA_DRIVER_CAPABILITIES");
    let parse =
        |annotations| request::parse(annotations, Some(&asked.share), capabilities.as_deref(), config);
    let (request, alone) = (parse(&annotations)?, parse(&BTreeMap::new())?);
    // The wait and the driver capabilities may differ: they do not make it another share.
    let same = Request {
        wait: alone.wait,
        capabilities: alone.capabilities.clone(),
        not_served: alone.not_served.clone(),
        ..request.clone()
    } == alone;
    if !same {
        let ours = said.iter().filter(|(key, _)| key.starts_with("sublet."));
        let mut words: Vec<String> = ours.map(|(key, value)| format!("{key}={value}")).collect();
        if words.is_empty() {
            words.extend(entry_point.map(|entry_point| format!("the runtime sublet-{entry_point}")));
        }
        let annotations = safe(&words.join(", "));
        return Err(CdiError::Contradiction(safe(&asked.share), annotations).into());
    }
    let inventory = inventory()?;
    let request =
        only(&request, &asked.device, &inventory, config).map_err(|why| device_error(asked, why))?;
    let given = nodes_of(&asked.device, &inventory, config);
    match oci::conflict(spec, &given, config) {
        Err(conflict @ (Conflict::Node(_) | Conflict::Rule(_))) => {
            Err(CdiError::Conflict(safe(&asked.share), conflict).into())
        }
        checked => Ok(checked.map(|()| request)?),
    }
}

fn device_error(asked: &Asked, why: String) -> CdiError {
    CdiError::Device { share: safe(&asked.share), device: safe(&asked.device), why }
}

/// Replaces a refusal if the inventory shows that the MIG device of the CDI device was destroyed.
pub(super) fn explain_gone_cdi_device(error: AdmitError, spec: &Value, config: &Config) -> AdmitError {
    let Ok(Some(asked)) = find_cdi_device(spec) else { return error };
    let is_gone = inventory::last(config).is_ok_and(|now| now.device(&asked.device).is_none());
    if is_gone { device_error(&asked, "which this host no longer has".to_owned()).into() } else { error }
}

/// Checks that the environment of `spec` is that of `grant`, which has the limits for a shared MPS server.
///
/// Docker puts a CDI device's variables after the image's variables of the same name, and runc and crun set them in
/// order, so the last one counts.
pub(super) fn check_environment(spec: &Value, asked: &Asked, grant: &Grant) -> Result<(), CdiError> {
    let (share, env) = (safe(&asked.share), &grant.env);
    let differs =
        |(name, value): &&(String, String)| oci::environment_value(spec, name).as_ref() != Some(value);
    if let Some((name, _)) = env.set.iter().find(differs) {
        return Err(CdiError::Environment(share, safe(name)));
    }
    let entries = spec.pointer("/process/env").and_then(Value::as_array).into_iter().flatten();
    let mut names = entries.filter_map(|entry| Some(entry.as_str()?.split_once('=')?.0));
    let is_strange = |name: &&str| {
        let is_set = env.set.iter().any(|(set, _)| set == name);
        !is_set && env.remove_prefixes.iter().any(|prefix| name.starts_with(prefix.as_str()))
    };
    match names.find(is_strange) {
        Some(name) => Err(CdiError::Strange(share, safe(name))),
        None => Ok(()),
    }
}

/// Whether lease `id` in `spec` was written for this same bundle.
pub(super) fn is_of_bundle(id: &str, spec: &Value, container: &Container) -> bool {
    let lease = spec["annotations"][LEASE_RECORD_ANNOTATION].as_str().and_then(Lease::from_annotation);
    let bundle = &container.bundle;
    !bundle.as_os_str().is_empty()
        && lease.is_some_and(|lease| lease.id.as_str() == id && lease.container.bundle == *bundle)
}

/// Removes the grant to an earlier run of its bundle from `spec`.
///
/// # Errors
/// `spec` lacks the annotation with that grant.
pub fn remove_earlier_grant(spec: &mut Value) -> Result<(), AdmitError> {
    if !oci::undo_edits(spec) {
        return Err(AdmitError::Edited);
    }
    hooks::remove(spec);
    Ok(())
}

#[cfg(test)]
mod cdi_device_tests {
    use serde_json::json;

    use super::*;

    fn hook(share: &str, device: &str) -> Value {
        let asked = Asked { share: share.into(), device: device.into() };
        json!({"path": "/usr/libexec/sublet/sublet-hook", "args": asked.arguments(cdi::STAGE)})
    }

    fn of(hooks: &[Value]) -> Result<Option<Asked>, CdiError> {
        find_cdi_device(&json!({"hooks": {"createRuntime": hooks}}))
    }

    #[test]
    fn the_hook_in_the_spec_tells_which_share_is_meant() {
        let small = Asked { share: "small".into(), device: "GPU-a".into() };
        let other = json!({"path": "/usr/bin/other-hook", "args": ["sublet-hook", "cdi", "--share", "x"]});
        let bind = json!({"path": "/x/sublet-hook", "args": ["sublet-hook", "createRuntime"]});
        assert_eq!(find_cdi_device(&json!({})), Ok(None));
        assert_eq!(find_cdi_device(&json!({"hooks": {"createRuntime": {"a": 1}}})), Ok(None));
        assert_eq!(of(&[other.clone(), bind.clone(), json!({"path": 1}), json!(null)]), Ok(None));
        assert_eq!(of(&[other, hook("small", "GPU-a"), bind]), Ok(Some(small.clone())));
        assert_eq!(of(&[hook("small", "GPU-a"), hook("small", "GPU-a")]), Ok(Some(small)));
    }

    #[test]
    fn two_shares_and_strange_arguments_are_refused() {
        for other in [hook("small", "GPU-b"), hook("large", "GPU-a")] {
            assert!(matches!(of(&[hook("small", "GPU-a"), other]), Err(CdiError::Several(..))));
        }
        let with = |arguments: &[&str]| of(&[json!({"path": "/sublet-hook", "args": arguments})]);
        for arguments in [
            &["sublet-hook", "cdi"][..],
            &["sublet-hook", "cdi", "--share", "small"],
            &["sublet-hook", "cdi", "--share", "", "--device", "GPU-a"],
            &["sublet-hook", "cdi", "--device", "GPU-a", "--share", "small"],
            &["sublet-hook", "cdi", "--share", "small", "--device", "GPU-a", "--device", "GPU-b"],
        ] {
            assert_eq!(with(arguments), Err(CdiError::Arguments), "{arguments:?}");
        }
    }
}
