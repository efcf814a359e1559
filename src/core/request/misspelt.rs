//! Annotation keys that differ from sublet's only in case, separator or prefix, and so were probably meant for sublet.

use std::collections::BTreeMap;

use super::error::{KEYS, RequestError};
use crate::text::safe;

/// The key that `key` was meant to be, without the prefix: `Sublet.sm`, `sublet_sm`, `sublet/sm` and `io.sublet.sm`
/// mean `sm`.
///
/// Exactly, in upper or lower case: an optional prefix of labels (letters, digits, `-`) joined by dots, none of them an
/// orchestrator's; then `sublet`; then one of `.` `-` `_` `/`; then a known key, with any of these separators for its
/// own `-`. A key that begins with `sublet.` is spelt correctly, and every other key is not meant for sublet. Behind the key
/// may stand `/NAME`, for one container of a pod.
pub(super) fn find_intended(key: &str) -> Option<&'static str> {
    whole(key).or_else(|| whole(key.rsplit_once('/')?.0))
}

/// The key and the name of `KEY/NAME`, where that is KEY for the container NAME of a pod, perhaps misspelt.
pub(crate) fn split_container_name(key: &str) -> Option<(&str, &str)> {
    let parts = key.rsplit_once('/')?;
    (parts.0.starts_with("sublet.") || whole(key).is_none() && whole(parts.0).is_some()).then_some(parts)
}

/// [`meant`] of a key without `/NAME`.
fn whole(key: &str) -> Option<&'static str> {
    if key.len() > LONGEST || key.starts_with("sublet.") {
        return None;
    }
    let key = key.to_ascii_lowercase();
    let at = key.rfind("sublet")?;
    let (prefix, name) = (&key[..at], key[at + "sublet".len()..].strip_prefix(SEPARATORS)?);
    if !prefix.is_empty() && !is_prefix(prefix.strip_suffix('.')?) {
        return None;
    }
    let name = name.replace(SEPARATORS, "-");
    KEYS.into_iter().find(|known| *known == name)
}

/// Kubernetes allows 253 + 1 + 63 (its "Annotations", syntax).
const LONGEST: usize = 317;

const SEPARATORS: [char; 4] = ['.', '-', '_', '/'];

/// Orchestrators. Their keys may end in the name of a user's container, which may be called `sublet.sm`.
const ORCHESTRATORS: [&str; 6] = ["kubernetes", "k8s", "cri-o", "containerd", "podman", "openshift"];

fn is_prefix(labels: &str) -> bool {
    let is_label = |label: &str| {
        let plain = label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        !label.is_empty() && plain && !ORCHESTRATORS.contains(&label)
    };
    labels.split('.').all(is_label)
}

/// The first of `annotations` whose key is misspelt.
pub(super) fn find(annotations: &BTreeMap<String, String>) -> Option<RequestError> {
    annotations.iter().find_map(|(key, value)| {
        let right = find_intended(key)?;
        Some(RequestError::Misspelt { key: safe(key), value: safe(value), right })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keys that are meant for sublet, and the key that each stands for.
    const OURS: [(&str, &str); 18] = [
        ("Sublet.sm", "sm"),
        ("SUBLET.SM", "sm"),
        ("sublet_sm", "sm"),
        ("sublet-sm", "sm"),
        ("sublet/sm", "sm"),
        ("SUBLET_GPU", "gpu"),
        ("io.sublet.sm", "sm"),
        ("com.sublet.sm", "sm"),
        ("com.example.sublet/memory", "memory"),
        ("Io.Sublet-Mode", "mode"),
        ("sublet_mig_caps", "mig-caps"),
        ("SUBLET.MIG.CAPS", "mig-caps"),
        ("a-b.sublet.share", "share"),
        ("sublet.sublet.sm", "sm"),
        ("org.sublet_wait", "wait"),
        ("Sublet.sm/web", "sm"),
        ("sublet/sm/web", "sm"),
        ("sublet_mig/caps", "mig-caps"),
    ];

    const OTHERS: [&str; 25] = [
        "",
        "sublet",
        "Sublet.",
        "sublet_",
        "io.foo.sublet.color",
        "sublette.sm",
        "mysublet.sm",
        "my-sublet.sm",
        "io.sublet.smm",
        "Sublet.lease",
        "subletsm",
        "sublet:sm",
        "Sublet.sm.x",
        ".sublet.sm",
        "io..sublet.sm",
        "example.com/sublet.sm",
        "example.com/sublet.sm/web",
        "container.apparmor.security.beta.kubernetes.io/sublet-gpu",
        "seccomp-profile.kubernetes.cri-o.io/sublet.gpu",
        "io.kubernetes.container.sublet.gpu",
        "io.podman.annotations.sublet.sm",
        "cdi.k8s.io/sublet_share",
        "io.kubernetes.cri-o.sublet.mode",
        "org.opencontainers.image.title",
        "sublet\u{17f}.sm",
    ];

    #[test]
    fn keys_that_mean_us_and_keys_of_others() {
        for (key, expected) in OURS {
            let expected = if key.starts_with("sublet.") { None } else { Some(expected) };
            assert_eq!(find_intended(key), expected, "{key}");
        }
        for key in OTHERS {
            assert_eq!(find_intended(key), None, "{key}");
        }
        for key in KEYS {
            assert_eq!(find_intended(&format!("sublet.{key}")), None);
            assert_eq!(find_intended(&format!("sublet_{key}")), Some(key));
        }
    }

    /// Engines call sublet's hooks by a pattern over annotation keys (RE2). The pattern matches every key of sublet's
    /// and every misspelt one.
    #[test]
    fn the_hooks_patterns_name_every_key() {
        let hooks = ["sublet.json", "prestart/sublet-createRuntime.json", "prestart/sublet-poststop.json"];
        for hook in hooks {
            let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../hooks").join(hook);
            let hook: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
            let patterns: Vec<&String> = hook["when"]["annotations"].as_object().unwrap().keys().collect();
            assert_eq!(patterns, [&pattern()], "all of several patterns would have to fit");
        }
    }

    fn pattern() -> String {
        let keys = KEYS.map(|key| key.replace('-', "[._/-]")).join("|");
        format!(r"^sublet\.|^(?i:([a-z0-9-]+\.)*sublet[._/-]({keys}))(/.*)?$")
    }
}
