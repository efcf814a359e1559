//! What one container of a stack asks for, read as sublet would when it starts.

use serde_json::{Value, json};

use super::{NotPlaced, Service};
use crate::cdi_spec;
use sublet_core::admit::{RequestSource, request_by_cdi, request_of};
use sublet_core::config::Config;
use sublet_core::config_files::{Containers, Known};
use sublet_core::inventory::Inventory;
use sublet_core::oci::cdi::KIND;
use sublet_core::request::{Request, has_sublet_annotations};
use sublet_core::text::safe;

/// The request of `service`; `None` if it asks for no share.
pub fn asked(
    service: &Service,
    containers: Option<&Containers>,
    inventory: &Inventory,
    config: &Config,
) -> Result<Option<Request>, NotPlaced> {
    let mut source = RequestSource { annotations: service.annotations.clone(), share: None };
    let spec = spec(service);
    let prefix = format!("{KIND}=");
    if let Some(name) = service.devices.iter().find_map(|device| device.strip_prefix(&prefix)) {
        let listing = cdi_spec::list(config, inventory).map_err(|error| NotPlaced::Cdi(error.to_string()))?;
        let without =
            listing.without.into_iter().find(|without| without.name == name).map(|without| without.why);
        let why = without.unwrap_or_else(|| "`sublet cdi list` shows those there are".to_owned());
        let named = listing.devices.into_iter().find(|named| named.name == name);
        let named = named
            .ok_or_else(|| NotPlaced::Cdi(format!("there is no CDI device {prefix}{}: {why}", safe(name))))?;
        let request = request_by_cdi(&source, &spec, &named.asked, || Ok(inventory.clone()), config)?;
        return Ok(Some(request));
    }
    let has_annotations = has_sublet_annotations(&service.annotations);
    if let Some(version) = service.annotations_dropped_by.as_ref().filter(|_| has_annotations) {
        return Err(NotPlaced::Dropped(version.clone()));
    }
    let runtime = service.runtime.as_deref().map(Runtime::of);
    match runtime {
        Some(Runtime::Another(name)) if has_annotations && !service.by_hook => {
            return Err(NotPlaced::Runtime(safe(name)));
        }
        Some(Runtime::Named(share)) => source.share = Some(share.to_owned()),
        Some(Runtime::Plain) if !has_annotations && !service.by_hook => {
            source.share = mapped(service, containers)?;
        }
        _ => {}
    }
    if !has_annotations && source.share.is_none() {
        return Ok(None);
    }
    Ok(Some(request_of(&source, &spec, config)?))
}

/// An OCI runtime, by its name or path.
enum Runtime<'a> {
    /// sublet's.
    Plain,
    /// sublet's, under the name of a share.
    Named(&'a str),
    Another(&'a str),
}

impl<'a> Runtime<'a> {
    fn of(runtime: &'a str) -> Self {
        let name = runtime.rsplit('/').next().unwrap_or(runtime);
        match name.strip_prefix("sublet") {
            Some("" | "-runtime") => Self::Plain,
            Some(share) if share.starts_with('-') => Self::Named(&share[1..]),
            _ => Self::Another(name),
        }
    }
}

/// What containers.toml gives it.
fn mapped(service: &Service, containers: Option<&Containers>) -> Result<Option<String>, NotPlaced> {
    let Some(containers) = containers else { return Ok(None) };
    let (name, image) = service.called.clone().ok_or(NotPlaced::Unnamed)?;
    Ok(containers.share(&Known { name, image, service: None }).map(str::to_owned))
}

/// A config.json like that which the engine would write, as far as it could contradict a share.
fn spec(service: &Service) -> Value {
    let nodes = service.devices.iter().filter(|device| device.starts_with('/'));
    let nodes: Vec<Value> =
        nodes.map(|device| json!({"path": device.split(':').next(), "type": "c"})).collect();
    let cdi = service.devices.iter().filter(|device| device.starts_with("nvidia.com/"));
    let mut annotations = json!(service.annotations);
    for device in cdi {
        annotations["cdi.k8s.io/explained"] = json!(device);
    }
    let mut spec = json!({"annotations": annotations, "process": {"env": []}, "linux": {"devices": nodes}});
    if service.gpus {
        spec["hooks"] = json!({"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook"}]});
        spec["process"]["env"] = json!(["NVIDIA_VISIBLE_DEVICES=all"]);
    }
    if service.privileged {
        spec["linux"]["resources"] = json!({"devices": [{"allow": true, "access": "rwm"}]});
    }
    spec
}
