//! `KEY/NAME`: KEY for the container NAME of a pod, as `podman kube generate` writes annotations. A pod's annotations reach
//! each of its containers.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::apply_edits::{SpecError, annotations};
use super::conflict::environment_value;
use super::container_root;
use crate::request::split_container_name;
use crate::text::safe;

/// A container of a pod.
enum Member {
    /// Its name in the pod.
    Named(String),
    /// By Podman's name of it, if its storage knows that: the pod's name, `-`, and its name in the pod. Podman gives it the
    /// pod's name as that of the host, unless the pod names another.
    Podmans { name: Option<String>, host: Option<String> },
}

/// The annotations of the container of `spec` and `bundle`. For a container of a pod, `KEY/NAME` stands as KEY where NAME
/// is its name, and is left out elsewhere.
///
/// # Errors
/// They are not an object of strings, or it is ambiguous whether one is for this container.
pub fn own_annotations(spec: &Value, bundle: &Path) -> Result<BTreeMap<String, String>, SpecError> {
    let mut all = annotations(spec)?;
    let for_one: Vec<String> =
        all.keys().filter(|key| split_container_name(key).is_some()).cloned().collect();
    // Without a pod there is no NAME, and the key is unknown.
    let member = (!for_one.is_empty()).then(|| Member::of(spec, &all, bundle)).flatten();
    let Some(member) = member else { return Ok(all) };
    for whole in for_one {
        let Some((value, (key, name))) = all.remove(&whole).zip(split_container_name(&whole)) else {
            continue;
        };
        if member.is_called(name).ok_or_else(|| member.ambiguous(&whole, key))? {
            all.insert(key.to_owned(), value);
        }
    }
    Ok(all)
}

impl Member {
    /// `None`: the container is in no pod.
    fn of(spec: &Value, annotations: &BTreeMap<String, String>, bundle: &Path) -> Option<Self> {
        let said = |key: &str| annotations.get(key).cloned();
        // containerd and CRI-O.
        let by_cri = ["io.kubernetes.cri.container-name", "io.kubernetes.container.name"];
        if let Some(name) = by_cri.into_iter().find_map(said) {
            return Some(Self::Named(name));
        }
        said("io.kubernetes.cri-o.SandboxID")?;
        let host = environment_value(spec, "HOSTNAME");
        Some(Self::Podmans { name: container_root::podman_name(spec, bundle), host })
    }

    /// Whether it is called `name` in its pod, or by its engine; `None`: that is ambiguous.
    fn is_called(&self, name: &str) -> Option<bool> {
        let (whole, host) = match self {
            Self::Named(own) => return Some(own == name),
            Self::Podmans { name, host } => (name.as_deref()?, host.as_deref()),
        };
        if whole == name {
            return Some(true);
        }
        let Some(pod) = whole.strip_suffix(name).and_then(|pod| pod.strip_suffix('-')) else {
            return Some(false);
        };
        // `web` or `a-web` of shop-a-web? A pod called shop or shop-a decides.
        let is_hosts = |host: &str| whole.strip_prefix(host).is_some_and(|rest| rest.starts_with('-'));
        match host {
            Some(host) if is_hosts(host) => Some(pod == host),
            _ => (!pod.contains('-')).then_some(true),
        }
    }

    fn ambiguous(&self, annotation: &str, key: &str) -> SpecError {
        let whole = match self {
            Self::Podmans { name: Some(name), .. } => name,
            _ => "NAME, as `podman ps` shows it",
        };
        SpecError::Addressed { annotation: safe(annotation), key: safe(key), whole: safe(whole) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_meant_by_a_name_in_a_pod() {
        let podmans =
            |name: &str, host: &str| Member::Podmans { name: Some(name.into()), host: Some(host.into()) };
        let told = [
            (podmans("shop-web", "shop"), "web", true),
            (podmans("shop-web", "shop"), "shop-web", true),
            (podmans("shop-a-web", "shop"), "web", false),
            (podmans("shop-a-web", "shop"), "a-web", true),
            (podmans("shop-a-web", "shop-a"), "web", true),
            (podmans("shop-web", "other"), "web", true),
            (podmans("shop-webs", "shop"), "web", false),
            (podmans("web", "shop"), "web", true),
            (podmans("shopweb", "shop"), "web", false),
            (Member::Named("web".into()), "web", true),
            (Member::Named("a-web".into()), "web", false),
        ];
        for (at, (member, name, expected)) in told.into_iter().enumerate() {
            assert_eq!(member.is_called(name), Some(expected), "{at}");
        }
        let ambiguous = podmans("shop-a-web", "other");
        assert_eq!(ambiguous.is_called("web"), None);
        assert_eq!(Member::Podmans { name: None, host: None }.is_called("web"), None);
        let line = ambiguous.ambiguous("sublet.gpu/web", "sublet.gpu").to_string();
        assert!(line.contains("sublet.gpu/shop-a-web"), "{line}");
    }

    #[test]
    fn a_key_for_one_container_of_a_pod_is_that_containers_alone() {
        let of = |name: &str| {
            let spec = serde_json::json!({"annotations": {"io.kubernetes.cri.container-name": name,
                "sublet.sm": "50", "sublet.sm/web": "25", "sublet.gpu/db": "0", "else/web": "x",
                "Sublet.sm/late": "25", "sublet/mode/late": "mps"}});
            let mut own = own_annotations(&spec, Path::new("/none")).unwrap();
            own.retain(|key, _| key.to_lowercase().starts_with("sublet"));
            own.into_iter().collect::<Vec<_>>()
        };
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(of("web"), [pair("sublet.sm", "25")]);
        assert_eq!(of("db"), [pair("sublet.gpu", "0"), pair("sublet.sm", "50")]);
        let misspelt = [pair("Sublet.sm", "25"), pair("sublet.sm", "50"), pair("sublet/mode", "mps")];
        assert_eq!(of("late"), misspelt, "the request refuses them");
        let spec = serde_json::json!({"annotations": {"sublet.sm/web": "25"}});
        let alone = own_annotations(&spec, Path::new("/none")).unwrap();
        assert!(alone.contains_key("sublet.sm/web"), "in no pod it is an unknown key");
    }
}
