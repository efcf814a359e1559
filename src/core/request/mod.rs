//! A container's request: annotations and configuration in, [`Request`] out. No I/O, and nothing about the devices of
//! this host.
//!
//! Keys that differ from sublet's only in case, separator or prefix were probably meant for sublet: they are refused,
//! with the key that was meant.

mod rules;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::{Config, VisibleDevices};
use crate::share::{
    self, Capabilities, Capability, DURATION_ALLOWED, Devices, Guarding, Isolation, Memory, MigCapability,
    Mode, Percent, Priority, SELECTORS_ALLOWED, Suspend, parse_devices,
};
use crate::text::safe;
use rules::{KEYS, Keys, PREFIX, one_word};
use strum::VariantArray as _;

pub use rules::RequestError;
pub(crate) use rules::default_isolation;

/// One container's request, complete and free of contradictions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// Which devices may serve it.
    pub devices: Devices,
    /// The mode asked for, or `None`: the device's configured `use`, else [`Request::default_mode`].
    pub mode: Option<Mode>,
    /// The mode where neither the container nor the device's configuration names one.
    pub default_mode: Mode,
    /// The device's shared MPS server, or a dedicated one.
    pub isolation: Isolation,
    /// The limit on the share of the streaming multiprocessors, for the whole container.
    pub sm: Option<Percent>,
    /// Device memory for the whole container.
    pub memory: Option<Memory>,
    /// MIG profile, as `1g.18gb` or `1c.2g.35gb`.
    pub mig: Option<String>,
    /// Which access it gets to all MIG instances, in addition to its own.
    pub mig_caps: Vec<MigCapability>,
    /// MPS client priority.
    pub priority: Priority,
    /// CUDA processes expected at once. MPS limits are per process, so each process gets its part.
    pub processes: NonZeroU32,
    /// Which driver files the container gets.
    pub capabilities: Capabilities,
    /// Words of the image's `NVIDIA_DRIVER_CAPABILITIES` that are not granted, if the image chooses.
    pub not_served: Vec<String>,
    /// How long to wait for a free share before refusing.
    pub wait: Duration,
    /// The guard's action on this container's processes, if the container or its named share sets it.
    pub guard: Option<Guarding>,
    /// Whether its GPU state may be put into host memory.
    pub suspend: Suspend,
    /// How `CUDA_VISIBLE_DEVICES` names the devices, if the named share sets it.
    pub visible_devices: Option<VisibleDevices>,
    /// Whether the MPS directory is also at CUDA's default place.
    pub default_directory: bool,
    /// Whom it is for, as the container or its named share says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
}

impl Request {
    /// `config` with the named share's settings.
    pub fn over<'c>(&self, config: &'c Config) -> Cow<'c, Config> {
        let Some(visible) = self.visible_devices else { return Cow::Borrowed(config) };
        let mut config = config.clone();
        config.grant.visible_devices = Some(visible);
        Cow::Owned(config)
    }
}

/// Whether any of `annotations` is for sublet: a key that begins with `sublet.`, or a misspelt one, which [`parse`]
/// refuses. A pause container may have such annotations and still asks for no share ([`is_sandbox`]).
pub fn has_sublet_annotations(annotations: &BTreeMap<String, String>) -> bool {
    annotations.keys().any(|key| key.starts_with(PREFIX) || find_intended(key).is_some())
}

/// A warning of the `labels` that begin with `sublet.`: annotations are written as `place` says.
pub fn warn_of_labels(labels: &BTreeMap<String, String>, place: &str) -> Option<String> {
    let ours = labels.iter().filter(|(key, _)| key.starts_with(PREFIX));
    let ours = ours.map(|(key, value)| safe(&format!("{key}={value}"))).collect::<Vec<_>>().join(", ");
    (!ours.is_empty()).then(|| format!("labels are not annotations: write {place} {ours}"))
}

/// Whether this is a pod's pause container, which containerd's CRI and CRI-O mark as such. It never gets a share.
/// Podman does not mark its own with an annotation: see [`is_podman_infra`].
pub fn is_sandbox(annotations: &BTreeMap<String, String>) -> bool {
    ["io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType"]
        .iter()
        .any(|key| annotations.get(*key).is_some_and(|kind| kind == "sandbox"))
}

/// Whether this is the infra container of a Podman pod, which never gets a share.
///
/// Podman gives it no annotation of its own (`pkg/specgen/generate/pod_create.go`), but it always runs the program
/// `/catatonit -P` of the pause image. Annotations for sublet can reach it through containers.conf.
pub fn is_podman_infra(annotations: &BTreeMap<String, String>, process_args: &[&str]) -> bool {
    annotations.get("io.container.manager").is_some_and(|manager| manager == "libpod")
        && process_args == ["/catatonit", "-P"]
}

/// Reads `annotations` into a request. Keys other than `sublet.*` are skipped.
///
/// `share` is the named share that the entry point already knows (`sublet-<share>`). `sublet.share` and every other key
/// override it. `image_capabilities` is the image's `NVIDIA_DRIVER_CAPABILITIES`, which is used if
/// `sublet.capabilities` is absent. `sublet.lease` is skipped, because entry points look at it themselves.
///
/// # Errors
/// An unknown or misspelt key, a value that does not parse, a contradiction.
pub fn parse(
    annotations: &BTreeMap<String, String>,
    share: Option<&str>,
    image_capabilities: Option<&str>,
    config: &Config,
) -> Result<Request, RequestError> {
    if let Some(error) = find_misspelt(annotations) {
        return Err(error);
    }
    let keys = Keys::gather(annotations, share, config)?;
    let sm = keys.read("sm", share::PERCENT_ALLOWED, share::parse_percent)?;
    let memory = keys.read("memory", share::MEMORY_ALLOWED, share::parse_memory)?;
    let mig = keys.read("mig", "a MIG profile such as 1g.18gb or 1c.2g.35gb", mig_profile)?;
    let mig_caps = keys.read("mig-caps", MIG_CAPS_ALLOWED, mig_caps)?.unwrap_or_default();
    rules::mig_caps(&keys, &mig_caps, &config.mig.allow_caps)?;
    let devices = keys.read("gpu", SELECTORS_ALLOWED, parse_devices)?;
    let devices = devices.unwrap_or(Devices::Any(NonZeroU32::MIN));
    let mode = keys.word("mode", &words())?;
    let isolation = keys.word("isolation", &words())?;
    let priority = keys.word("priority", &words())?;
    let processes = keys.read("processes", "a whole number, 1 or more", processes)?;
    let (capabilities, not_served) = match keys.read("capabilities", CAPABILITIES_ALLOWED, capabilities)? {
        Some(capabilities) => (capabilities, Vec::new()),
        None => of_image(image_capabilities.unwrap_or_default(), &config.limits.capabilities),
    };
    let guard = keys.word("guard", &words())?.map(|action| rules::guarding(&keys, action)).transpose()?;
    let visible_devices = keys.word("visible_devices", &words())?;
    let default_directory = keys.word("default_directory", &[("true", true), ("false", false)])?;
    let most = config.limits.wait_max;
    let allowed = format!("{DURATION_ALLOWED}, at most {} ([limits] wait_max)", share::show_duration(most));
    let wait = keys.read("wait", &allowed, |text| share::parse_duration(text, most))?;
    let suspend = keys.word("suspend", &words())?.unwrap_or_default();
    let owner = keys.read("owner", OWNER_ALLOWED, owner_name)?;
    let mode = rules::check(&keys, mode, &devices, isolation, config)?;
    rules::suspend(&keys, suspend, mode, &devices, isolation)?;
    Ok(Request {
        isolation: isolation.unwrap_or_else(|| rules::default_isolation(mode, &devices, config)),
        devices,
        mode,
        default_mode: config.defaults.mode,
        sm,
        memory,
        mig,
        mig_caps,
        priority: priority.unwrap_or_default(),
        processes: processes.unwrap_or(NonZeroU32::MIN),
        capabilities,
        not_served,
        wait: wait.unwrap_or(config.defaults.wait),
        guard,
        suspend,
        visible_devices,
        default_directory: default_directory.unwrap_or(true),
        owner,
    })
}

/// The words of a value's kinds.
fn words<T: strum::VariantArray + Copy + Into<&'static str>>() -> Vec<(&'static str, T)> {
    T::VARIANTS.iter().map(|kind| ((*kind).into(), *kind)).collect()
}

const CAPABILITIES_ALLOWED: &str = "a list of compute, utility, graphics, video, or all";
const MIG_CAPS_ALLOWED: &str = "monitor, config, or both";
const OWNER_ALLOWED: &str = "a name of 1 to 64 visible characters, without blanks at its ends";

fn processes(text: &str) -> Result<NonZeroU32, Option<String>> {
    // `parse` alone would accept a leading `+`.
    if text.starts_with('+') { Err(None) } else { text.parse().map_err(|_| None) }
}

/// It stands in tables, labels and lines: nothing that [`safe`] would have to escape, nor that seems to be empty.
fn owner_name(text: &str) -> Result<String, Option<String>> {
    let fits = !text.is_empty() && text.chars().count() <= 64 && text.trim() == text;
    if fits && safe(text) == text { Ok(text.to_owned()) } else { Err(None) }
}

/// `[<c>c.]<g>g.<n>gb[+<attributes>]`, as `nvidia-smi mig -lgip` lists them (`+me`, `+gfx`, `-me`).
fn mig_profile(text: &str) -> Result<String, Option<String>> {
    let text = text.to_ascii_lowercase();
    let number = |part: &str, unit| {
        let digits = part.strip_suffix(unit).unwrap_or_default();
        (1..=4).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit())
    };
    let (size, attributes) = text.split_at(text.find(['+', '-']).unwrap_or(text.len()));
    let sizes = match size.split('.').collect::<Vec<_>>()[..] {
        [compute, slices, memory] => number(compute, "c") && number(slices, "g") && number(memory, "gb"),
        [slices, memory] => number(slices, "g") && number(memory, "gb"),
        _ => false,
    };
    let attributes = matches!(attributes, "" | "+me" | "-me" | "+me.all" | "+gfx");
    if sizes && attributes { Ok(text) } else { Err(None) }
}

fn mig_caps(text: &str) -> Result<Vec<MigCapability>, Option<String>> {
    let words = words();
    let chosen = text.split(',').map(|word| one_word(word.trim_matches(' '), &words));
    let chosen: Vec<MigCapability> = chosen.collect::<Result<_, _>>()?;
    Ok(MigCapability::VARIANTS.iter().copied().filter(|cap| chosen.contains(cap)).collect())
}

fn capabilities(text: &str) -> Result<Capabilities, Option<String>> {
    let mut chosen: Vec<Capability> = Vec::new();
    for word in text.split(',').map(|word| word.trim_matches(' ')) {
        match word {
            "all" => chosen.extend(Capability::VARIANTS),
            word => chosen.push(one_word(word, &words())?),
        }
    }
    Ok(in_order(|capability| chosen.contains(&capability)))
}

/// The image's choice, and the rest of its words: also capabilities that only other tools know (`compat32`, `display`).
/// If nothing allowed is left, the image is treated as if it had not named anything.
fn of_image(text: &str, allowed: &[Capability]) -> (Capabilities, Vec<String>) {
    let words: Vec<_> = text.split(',').map(|word| word.trim_matches(' ')).collect();
    let mut chosen = in_order(|capability| {
        let named = words.contains(&<&'static str>::from(capability)) || words.contains(&"all");
        allowed.contains(&capability) && named
    });
    if chosen.0.is_empty() {
        chosen = Capabilities::default();
    }
    let is_served = |word: &str| match word {
        "" | "all" => true,
        // `graphics` has its library.
        "ngx" => chosen.has(Capability::Graphics),
        _ => chosen.0.iter().any(|capability| word == <&str>::from(*capability)),
    };
    let not_served = words.into_iter().filter(|word| !is_served(word)).map(str::to_owned).collect();
    (chosen, not_served)
}

fn in_order(wanted: impl Fn(Capability) -> bool) -> Capabilities {
    Capabilities(Capability::VARIANTS.iter().copied().filter(|capability| wanted(*capability)).collect())
}

/// The key that `key` was meant to be, without the prefix: `Sublet.sm`, `sublet_sm`, `sublet/sm` and `io.sublet.sm`
/// mean `sm`.
///
/// Exactly, in upper or lower case: an optional prefix of labels (letters, digits, `-`) joined by dots, none of them an
/// orchestrator's; then `sublet`; then one of `.` `-` `_` `/`; then a known key, with any of these separators for its
/// own `-`. A key that begins with `sublet.` is spelt correctly, and every other key is not meant for sublet. Behind the key
/// may stand `/NAME`, for one container of a pod.
fn find_intended(key: &str) -> Option<&'static str> {
    whole(key).or_else(|| whole(key.rsplit_once('/')?.0))
}

/// The key and the name of `KEY/NAME`, where that is KEY for the container NAME of a pod, perhaps misspelt.
pub(crate) fn split_container_name(key: &str) -> Option<(&str, &str)> {
    let parts = key.rsplit_once('/')?;
    (parts.0.starts_with("sublet.") || whole(key).is_none() && whole(parts.0).is_some()).then_some(parts)
}

/// [`meant`] of a key without `/NAME`.
fn whole(key: &str) -> Option<&'static str> {
    if key.len() > LONGEST_KEY || key.starts_with("sublet.") {
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
const LONGEST_KEY: usize = 317;

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
fn find_misspelt(annotations: &BTreeMap<String, String>) -> Option<RequestError> {
    annotations.iter().find_map(|(key, value)| {
        let right = find_intended(key)?;
        let (key, value) = (safe(key), safe(value));
        let message = format!(
            "{key}={value}: write {PREFIX}{right}={value}; why: sublet's keys are in lower case, with a dot and \
             without a prefix"
        );
        Some(RequestError { key: String::new(), message })
    })
}

#[cfg(test)]
#[path = "annotations_tests.rs"]
mod annotations_tests;

#[cfg(test)]
mod misspelt_tests {
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

    const FOREIGN: [&str; 25] = [
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
    fn keys_that_mean_sublet_and_foreign_keys() {
        for (key, expected) in OURS {
            let expected = if key.starts_with("sublet.") { None } else { Some(expected) };
            assert_eq!(find_intended(key), expected, "{key}");
        }
        for key in FOREIGN {
            assert_eq!(find_intended(key), None, "{key}");
        }
        for key in KEYS {
            assert_eq!(find_intended(&format!("sublet.{key}")), None);
            assert_eq!(find_intended(&format!("sublet_{key}")), Some(key));
        }
    }

    #[test]
    fn labels_that_are_meant_as_annotations_are_reported() {
        let warning = |labels: &[(&str, &str)]| {
            let pair = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
            warn_of_labels(&labels.iter().map(pair).collect(), "as --annotation")
        };
        let labels = [("a", "b"), ("sublet.sm", "25"), ("sublet.memory", "\u{1b}[2J")];
        let said = "labels are not annotations: write as --annotation sublet.memory=\\u{1b}[2J, sublet.sm=25";
        assert_eq!(warning(&labels).as_deref(), Some(said));
        assert_eq!(warning(&[("example.com/sublet.sm", "25"), ("traefik.enable", "true")]), None);
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
