//! What a container's spec asks for.

use std::collections::BTreeMap;

use serde_json::Value;

use super::AdmitError;
use crate::apply;
use crate::config::Config;
use crate::request::{self, Request};

/// Whether the container is ours: by its annotations, or by the name the shim was called by. The pause
/// container of a pod never is, though engines copy the pod's annotations to it.
pub(super) fn is_ours(spec: &Value, annotations: &BTreeMap<String, String>, share: Option<&str>) -> bool {
    let asked = share.is_some() || request::is_ours(annotations);
    asked && !request::is_sandbox(annotations) && !request::is_podman_infra(annotations, &arguments(spec))
}

fn arguments(spec: &Value) -> Vec<&str> {
    let args = spec.pointer("/process/args").and_then(Value::as_array);
    args.into_iter().flatten().filter_map(Value::as_str).collect()
}

/// Reads the request out of `spec`.
///
/// # Errors
/// Annotations that make no request, a spec that contradicts it.
pub fn wish(spec: &Value, share: Option<&str>, config: &Config) -> Result<Request, AdmitError> {
    let annotations = apply::annotations(spec)?;
    let capabilities = apply::environment_value(spec, "NVIDIA_DRIVER_CAPABILITIES");
    let request = request::parse(&annotations, share, capabilities.as_deref(), config)?;
    apply::conflict(spec, config)?;
    Ok(request)
}
