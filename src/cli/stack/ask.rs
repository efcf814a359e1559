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
        let Some(named) = listing.devices.iter().find(|named| named.name == name) else {
            let without = listing.without.iter().find(|without| without.name == name);
            let why = without.map_or("`sublet cdi list` shows those there are", |without| &without.why);
            return Err(NotPlaced::Cdi(format!("there is no CDI device {prefix}{}: {why}", safe(name))));
        };
        let request = request_by_cdi(&source, &spec, &named.asked, || Ok(inventory.clone()), config)?;
        return Ok(Some(request));
    }
    let has_annotations = has_sublet_annotations(&service.annotations);
    if let Some(version) = service.annotations_dropped_by.as_ref().filter(|_| has_annotations) {
        return Err(NotPlaced::Dropped(version.clone()));
    }
    // A runtime of sublet's may have the name of a share.
    let runtime = service.runtime.as_deref().map(|path| path.rsplit('/').next().unwrap_or(path));
    match (runtime, runtime.and_then(|name| name.strip_prefix("sublet"))) {
        (_, Some("" | "-runtime")) if has_annotations || service.by_hook => {}
        (_, Some("" | "-runtime")) => {
            if let Some(containers) = containers {
                let (name, image) = service.called.clone().ok_or(NotPlaced::Unnamed)?;
                source.share = containers.share(&Known { name, image, service: None }).map(str::to_owned);
            }
        }
        (_, Some(share)) if share.starts_with('-') => source.share = Some(share[1..].to_owned()),
        (Some(name), _) if has_annotations && !service.by_hook => {
            return Err(NotPlaced::Runtime(safe(name)));
        }
        _ => {}
    }
    if !has_annotations && source.share.is_none() {
        return Ok(None);
    }
    Ok(Some(request_of(&source, &spec, config)?))
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
