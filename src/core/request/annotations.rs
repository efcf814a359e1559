//! From annotations to a [`Request`]: keys, values, defaults and the rules between them.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use super::Request;
use super::error::RequestError;
use super::keys::{Keys, PREFIX, one_word};
use super::{misspelt, rules};
use crate::config::{Config, VisibleDevices};
use crate::share::{
    Action, Capabilities, Capability, Devices, Isolation, LONGEST_WAIT, Memory, MigCapability, Mode, Percent,
    Priority, SELECTORS_ALLOWED, parse_devices, units,
};

/// Whether any of `annotations` is for sublet: a key that begins with `sublet.`, or a misspelt one, which [`parse`]
/// refuses. A pause container may have such annotations and still asks for no share ([`is_sandbox`]).
#[must_use]
pub fn has_sublet_annotations(annotations: &BTreeMap<String, String>) -> bool {
    annotations.keys().any(|key| key.starts_with(PREFIX) || misspelt::find_intended(key).is_some())
}

/// Whether this is a pod's pause container, which containerd's CRI and CRI-O mark as such. It never gets a share.
/// Podman does not mark its own with an annotation: see [`is_podman_infra`].
#[must_use]
pub fn is_sandbox(annotations: &BTreeMap<String, String>) -> bool {
    ["io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType"]
        .iter()
        .any(|key| annotations.get(*key).is_some_and(|kind| kind == "sandbox"))
}

/// Whether this is the infra container of a Podman pod, which never gets a share.
///
/// Podman gives it no annotation of its own (`pkg/specgen/generate/pod_create.go`), but it always runs the program
/// `/catatonit -P` of the pause image. Annotations for sublet can reach it through containers.conf.
#[must_use]
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
    if let Some(error) = misspelt::find(annotations) {
        return Err(error);
    }
    let keys = Keys::gather(annotations, share, config)?;
    let sm = keys.read("sm", units::PERCENT_ALLOWED, percent)?;
    let memory = keys.read("memory", units::MEMORY_ALLOWED, memory)?;
    let mig = keys.read("mig", "a MIG profile such as 1g.18gb or 1c.2g.35gb", mig_profile)?;
    let mig_caps = keys.read("mig-caps", MIG_CAPS_ALLOWED, mig_caps)?.unwrap_or_default();
    rules::mig_caps(&keys, &mig_caps, &config.mig.allow_caps)?;
    let devices = keys.read("gpu", SELECTORS_ALLOWED, parse_devices)?;
    let devices = devices.unwrap_or(Devices::Any(NonZeroU32::MIN));
    let mode = keys.word("mode", &MODES)?;
    let isolation = keys.word("isolation", &ISOLATIONS)?;
    let priority = keys.word("priority", &PRIORITIES)?;
    let processes = keys.read("processes", "a whole number, 1 or more", processes)?;
    let (capabilities, not_served) = match keys.read("capabilities", CAPABILITIES_ALLOWED, capabilities)? {
        Some(capabilities) => (capabilities, Vec::new()),
        None => of_image(image_capabilities.unwrap_or_default(), &config.limits.capabilities),
    };
    let guard = keys.word("guard", &ACTIONS)?.map(|action| rules::guarding(&keys, action)).transpose()?;
    let visible_devices = keys.word("visible_devices", &VISIBLE_DEVICES)?;
    let default_directory = keys.word("default_directory", &[("true", true), ("false", false)])?;
    let wait = keys.read("wait", WAIT_ALLOWED, wait)?.unwrap_or(config.defaults.wait);
    let mode = rules::check(&keys, mode, &devices, isolation, &config.limits.require)?;
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
        wait,
        guard,
        visible_devices,
        default_directory: default_directory.unwrap_or(true),
    })
}

const MODES: [(&str, Mode); 4] =
    [("time-slice", Mode::TimeSlice), ("mps", Mode::Mps), ("mig", Mode::Mig), ("exclusive", Mode::Exclusive)];
const ISOLATIONS: [(&str, Isolation); 2] =
    [("shared", Isolation::Shared), ("dedicated", Isolation::Dedicated)];
const PRIORITIES: [(&str, Priority); 2] = [("normal", Priority::Normal), ("low", Priority::Low)];
const VISIBLE_DEVICES: [(&str, VisibleDevices); 2] =
    [("ordinal", VisibleDevices::Ordinal), ("uuid", VisibleDevices::Uuid)];
const ACTIONS: [(&str, Action); 3] =
    [("report", Action::Report), ("terminate", Action::Terminate), ("container", Action::Container)];
const CAPABILITIES: [(&str, Capability); 4] = [
    ("compute", Capability::Compute),
    ("utility", Capability::Utility),
    ("graphics", Capability::Graphics),
    ("video", Capability::Video),
];
const CAPABILITIES_ALLOWED: &str = "a list of compute, utility, graphics, video, or all";
const MIG_CAPS_ALLOWED: &str = "monitor, config, or both";
const WAIT_ALLOWED: &str = "0 or a whole number of ms, s or m up to 60s, such as 10s";

fn percent(text: &str) -> Result<Percent, Option<String>> {
    units::parse_percent(text).map_err(|malformed| malformed.hint)
}

fn memory(text: &str) -> Result<Memory, Option<String>> {
    units::parse_memory(text).map_err(|malformed| malformed.hint)
}

fn wait(text: &str) -> Result<Duration, Option<String>> {
    units::parse_duration(text, LONGEST_WAIT).map_err(|malformed| malformed.hint)
}

fn processes(text: &str) -> Result<NonZeroU32, Option<String>> {
    // `parse` alone would accept a leading `+`.
    if text.starts_with('+') { Err(None) } else { text.parse().map_err(|_| None) }
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
    let words = MigCapability::ALL.map(|cap| (cap.as_str(), cap));
    let chosen = text.split(',').map(|word| one_word(word.trim_matches(' '), &words));
    let chosen: Vec<MigCapability> = chosen.collect::<Result<_, _>>()?;
    Ok(MigCapability::ALL.into_iter().filter(|cap| chosen.contains(cap)).collect())
}

fn capabilities(text: &str) -> Result<Capabilities, Option<String>> {
    let mut chosen = Vec::new();
    for word in text.split(',').map(|word| word.trim_matches(' ')) {
        match word {
            "all" => chosen.extend(Capability::ALL),
            word => chosen.push(one_word(word, &CAPABILITIES)?),
        }
    }
    Ok(in_order(|capability| chosen.contains(&capability)))
}

/// The image's choice, and the rest of its words: also capabilities that only other tools know (`compat32`, `display`).
/// If nothing allowed is left, the image is treated as if it had not named anything.
fn of_image(text: &str, allowed: &[Capability]) -> (Capabilities, Vec<String>) {
    let words: Vec<_> = text.split(',').map(|word| word.trim_matches(' ')).collect();
    let mut chosen = in_order(|capability| {
        let named = CAPABILITIES.iter().any(|(word, value)| *value == capability && words.contains(word));
        allowed.contains(&capability) && (named || words.contains(&"all"))
    });
    if chosen.0.is_empty() {
        chosen = Capabilities::default();
    }
    let is_served = |word: &str| match word {
        "" | "all" => true,
        // `graphics` has its library.
        "ngx" => chosen.has(Capability::Graphics),
        _ => CAPABILITIES.iter().any(|(known, value)| *known == word && chosen.has(*value)),
    };
    let not_served = words.into_iter().filter(|word| !is_served(word)).map(str::to_owned).collect();
    (chosen, not_served)
}

fn in_order(wanted: impl Fn(Capability) -> bool) -> Capabilities {
    Capabilities(Capability::ALL.into_iter().filter(|capability| wanted(*capability)).collect())
}

#[cfg(test)]
#[path = "annotations_tests.rs"]
mod tests;
