//! The keys that a container and its named share set, with one value each, and the rules between them: which mode they
//! imply and which of them contradict each other. A refusal is one line that names the key, the value and the remedy.

use std::collections::BTreeMap;

use crate::config::{Config, Required};
use crate::share::{Action, Devices, Guarding, Isolation, MigCapability, Mode, Selector, Suspend};
use crate::text::{nearest, safe};

type Result<T, E = RequestError> = std::result::Result<T, E>;

/// The mode that the keys name or imply, once nothing contradicts it. `None`: the device's
/// configuration decides.
pub(super) fn check(
    keys: &Keys<'_>,
    mode: Option<Mode>,
    devices: &Devices,
    isolation: Option<Isolation>,
    config: &Config,
) -> Result<Option<Mode>> {
    let mode = mode.or_else(|| implied_mode(keys, devices));
    if let Some(mode) = mode {
        check_mode(keys, mode, devices, isolation)?;
    }
    if are_several(devices) {
        check_several_devices(keys, mode, isolation)?;
    }
    check_required(keys, mode, config)?;
    Ok(mode)
}

/// Access beyond a container's own MIG device is possible only if root has allowed it.
pub(super) fn mig_caps(keys: &Keys<'_>, wanted: &[MigCapability], allowed: &[MigCapability]) -> Result<()> {
    if wanted.iter().all(|cap| allowed.contains(cap)) {
        return Ok(());
    }
    let remedy = "it gives access to all MIG instances, so root has to allow it there";
    keys.contradiction("mig-caps", "[mig] allow_caps of this host's configuration", remedy)
}

/// A container may choose a stricter guard for itself. Only root may choose a milder one.
pub(super) fn guarding(keys: &Keys<'_>, action: Action) -> Result<Guarding> {
    if keys.0.get("guard").is_some_and(|given| given.share.is_some()) {
        return Ok(Guarding::Exactly(action));
    }
    if action == Action::Report {
        let remedy =
            "a container cannot make the guard less strict on itself; fix: root can do that in a [share]";
        keys.contradiction("guard", "[guard] of this host's configuration", remedy)?;
    }
    Ok(Guarding::AtLeast(action))
}

/// The driver suspends processes that have one whole GPU, without MPS (docs/suspend.md).
pub(super) fn suspend(
    keys: &Keys<'_>,
    suspend: Suspend,
    mode: Option<Mode>,
    devices: &Devices,
    isolation: Option<Isolation>,
) -> Result<()> {
    if suspend.is_never() {
        return Ok(());
    }
    if let Some(mode) = mode.filter(|mode| !matches!(mode, Mode::TimeSlice | Mode::Exclusive)) {
        let remedy = "the driver suspends nothing under MPS or on a MIG device; fix: write sublet.mode=time-slice, or \
                      leave sublet.suspend out";
        keys.contradiction("suspend", &name(keys, mode), remedy)?;
    }
    if are_several(devices) {
        let gpu = keys.setting("gpu").unwrap_or_default();
        let remedy = "the driver loses a process that uses several GPUs; fix: name one GPU, or leave sublet.suspend out";
        keys.contradiction("suspend", &gpu, remedy)?;
    }
    if isolation == Some(Isolation::Dedicated) {
        let remedy = "the driver suspends nothing under MPS; fix: leave one of them out";
        keys.contradiction("isolation", &keys.setting("suspend").unwrap_or_default(), remedy)?;
    }
    Ok(())
}

/// The configured isolation, if the mode has one. A container with several devices has a dedicated MPS server.
pub(crate) fn default_isolation(mode: Option<Mode>, devices: &Devices, config: &Config) -> Isolation {
    match mode {
        Some(Mode::Mps) if are_several(devices) => Isolation::Dedicated,
        Some(Mode::Exclusive | Mode::Mig) => Isolation::Shared,
        Some(Mode::Mps | Mode::TimeSlice) | None => config.defaults.isolation,
    }
}

fn implied_mode(keys: &Keys<'_>, devices: &Devices) -> Option<Mode> {
    if ["sm", "priority", "processes"].iter().any(|key| keys.has(key)) {
        Some(Mode::Mps)
    } else if keys.has("mig") || names_mig(devices) {
        Some(Mode::Mig)
    } else {
        None
    }
}

fn names_mig(devices: &Devices) -> bool {
    matches!(devices, Devices::These(selectors) if selectors.iter().any(Selector::is_mig))
}

/// Whether it can be more than one device. `all` counts as several, so that a request means the same on every host.
fn are_several(devices: &Devices) -> bool {
    match devices {
        Devices::Any(count) => count.get() > 1,
        Devices::All => true,
        Devices::These(selectors) => selectors.len() > 1,
    }
}

fn check_mode(keys: &Keys<'_>, mode: Mode, devices: &Devices, isolation: Option<Isolation>) -> Result<()> {
    let refuse = |key: &str, remedy: &str| keys.contradiction(key, &name(keys, mode), remedy);
    let of_mps = [("sm", "limits SMs"), ("priority", "has priorities"), ("processes", "counts processes")];
    for (key, what) in of_mps {
        if mode != Mode::Mps && (mode, key) != (Mode::Mig, "sm") {
            refuse(key, &format!("only MPS {what}; fix: write sublet.mode=mps or leave sublet.{key} out"))?;
        }
    }
    if mode == Mode::Exclusive {
        refuse(
            "memory",
            "the container has the whole device; fix: write sublet.mode=mps or leave sublet.memory out",
        )?;
        refuse("mig", "sublet.mode=mig gives the container an instance of its own")?;
        if names_mig(devices) {
            refuse("gpu", "sublet.mode=mig gives the container the whole MIG device")?;
        }
    }
    // Without a profile, `sublet.sm` and `sublet.memory` give the minimum size of the instance.
    if mode == Mode::Mig && (keys.has("mig") || names_mig(devices)) {
        refuse("memory", "an instance has the memory of its profile; fix: leave sublet.memory out")?;
        refuse(
            "sm",
            "an instance has the SMs of its profile; fix: write sublet.mode=mps or leave sublet.sm out",
        )?;
    }
    if isolation == Some(Isolation::Dedicated) && !matches!(mode, Mode::Mps | Mode::TimeSlice) {
        refuse("isolation", "it needs sublet.mode=mps or sublet.mode=time-slice; fix: leave it out")?;
    }
    Ok(())
}

/// A process connects to one MPS daemon, so a dedicated daemon serves all devices of such a container. Modes without a
/// daemon have no isolation to choose.
fn check_several_devices(keys: &Keys<'_>, mode: Option<Mode>, isolation: Option<Isolation>) -> Result<()> {
    let has_servers = !matches!(mode, Some(Mode::Exclusive | Mode::Mig));
    let gpu = keys.setting("gpu").filter(|_| has_servers && isolation == Some(Isolation::Shared));
    let remedy = "a process connects to one MPS daemon, and a shared daemon has one device; fix: leave sublet.isolation \
                  out, because several devices get their own daemon";
    gpu.map_or(Ok(()), |gpu| keys.contradiction("isolation", &gpu, remedy))
}

/// A MIG instance limits both by itself, and who has a whole device shares neither.
fn check_required(keys: &Keys<'_>, mode: Option<Mode>, config: &Config) -> Result<()> {
    if matches!(mode, Some(Mode::Mig | Mode::Exclusive)) {
        return Ok(());
    }
    // Without a mode the device's `use` decides. That is known only when it is placed, so the mode has to be written.
    let whole = match (mode, config.defaults.mode) {
        (None, mode @ (Mode::Mig | Mode::Exclusive)) => format!(", or write sublet.mode={mode}"),
        _ => String::new(),
    };
    for required in &config.limits.require {
        let (key, remedy) = match required {
            Required::Memory if whole.is_empty() => ("memory", "add it, for example sublet.memory=8GiB"),
            Required::Memory => ("memory", "add it with sublet.mode=mps, for example sublet.memory=8GiB"),
            Required::Sm => ("sm", "add it with sublet.mode=mps, for example sublet.sm=25"),
        };
        if !keys.has(key) {
            let message = format!(
                "sublet.{key} is missing, and this host requires it; why: [limits] require; fix: {remedy}{whole}"
            );
            return Err(RequestError { key: String::new(), message });
        }
    }
    Ok(())
}

/// The mode as the user gave it, or the key that implies it.
fn name(keys: &Keys<'_>, mode: Mode) -> String {
    if let Some(setting) = keys.setting("mode") {
        return setting;
    }
    let because = ["sm", "priority", "processes", "mig", "gpu"].into_iter().find_map(|key| keys.setting(key));
    match because {
        Some(setting) => format!("mode {mode}, which {setting} implies"),
        None => format!("mode {mode}"),
    }
}

/// The prefix of sublet's annotation keys.
pub(super) const PREFIX: &str = "sublet.";

/// The settings of the container and its named share, with one value for each key.
pub(super) struct Keys<'a>(BTreeMap<&'a str, Given<'a>>);

/// A value, and the named share that brought it. Both, and the key, may be foreign text.
#[derive(Clone, Copy)]
struct Given<'a> {
    value: &'a str,
    share: Option<&'a str>,
}

impl Given<'_> {
    /// As a message shows it, with `key`, which is without the prefix.
    fn show(self, key: &str) -> String {
        let from = self.share.map(|share| format!(" (from [share.{}])", safe(share)));
        format!("{PREFIX}{}={}{}", safe(key), safe(self.value), from.unwrap_or_default())
    }
}

impl<'a> Keys<'a> {
    pub(super) fn gather(
        annotations: &'a BTreeMap<String, String>,
        entry_point: Option<&'a str>,
        config: &'a Config,
    ) -> Result<Self> {
        let own: BTreeMap<_, _> = annotations
            .iter()
            .filter_map(|(key, value)| Some((key.strip_prefix(PREFIX)?, Given { value, share: None })))
            .filter(|(key, _)| !matches!(*key, "lease" | "lease.record" | "lease.edits"))
            .collect();
        let named = own.get("share").map(|given| given.value).or(entry_point);
        let mut keys = Self(BTreeMap::new());
        if let Some(name) = named {
            keys.add_share(name, config)?;
        }
        for (key, given) in own {
            keys.add(key, given, &KEYS)?;
        }
        Ok(keys)
    }

    fn add_share(&mut self, name: &'a str, config: &'a Config) -> Result<()> {
        // `sublet serve` limits it to the job's allocation.
        if name == crate::slurm::JOB_SHARE {
            return Ok(());
        }
        // A named share cannot be based on another one.
        let allowed = [&KEYS[..KEYS.len() - 1], &KEYS_OF_SHARES].concat();
        let share = config.share.get(name).ok_or_else(|| unknown_share(name, config))?;
        for (key, value) in share {
            self.add(key, Given { value, share: Some(name) }, &allowed)?;
        }
        Ok(())
    }

    fn add(&mut self, key: &'a str, given: Given<'a>, allowed: &[&'static str]) -> Result<()> {
        if allowed.contains(&key) {
            self.0.insert(key, given);
            return Ok(());
        }
        let shown = |key: &&str| format!("{}{key}", if KEYS_OF_SHARES.contains(key) { "" } else { PREFIX });
        let listed: Vec<_> = allowed.iter().map(shown).collect();
        let nearest = nearest_key(key).filter(|key| allowed.contains(key));
        let hint = nearest.map(|key| format!(", did you mean {PREFIX}{key}?")).unwrap_or_default();
        let problem = format!("unknown key{hint}; why: the keys are {}", listed.join(", "));
        Err(RequestError::about(key, given, &problem))
    }

    /// How a message shows `key`, if it is set.
    fn setting(&self, key: &str) -> Option<String> {
        self.0.get(key).map(|given| given.show(key))
    }

    /// Refuses `key`, if it is set, because it contradicts `with`.
    fn contradiction(&self, key: &str, with: &str, remedy: &str) -> Result<()> {
        let Some(shown) = self.setting(key) else { return Ok(()) };
        let message = format!("{shown} cannot be combined with {with}; why: {remedy}");
        Err(RequestError { key: safe(key), message })
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    /// The value of `key`, read by `parse`, whose error is a hint.
    pub(super) fn read<T>(
        &self,
        key: &str,
        allowed: &str,
        parse: impl FnOnce(&str) -> Result<T, Option<String>>,
    ) -> Result<Option<T>> {
        let Some(given) = self.0.get(key) else { return Ok(None) };
        parse(given.value).map(Some).map_err(|hint| RequestError::value(key, *given, allowed, hint))
    }

    pub(super) fn word<T: Copy>(&self, key: &str, words: &[(&str, T)]) -> Result<Option<T>> {
        let listed: Vec<_> = words.iter().map(|(word, _)| *word).collect();
        self.read(key, &format!("one of {}", listed.join(", ")), |text| one_word(text, words))
    }
}

pub(super) fn one_word<T: Copy>(text: &str, words: &[(&str, T)]) -> Result<T, Option<String>> {
    words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value).ok_or_else(|| {
        nearest(text, words.iter().map(|(word, _)| *word)).map(|word| format!("did you mean {word}?"))
    })
}

fn unknown_share(name: &str, config: &Config) -> RequestError {
    let names: Vec<_> = config.share.keys().map(String::as_str).collect();
    let given = Given { value: name, share: None };
    if names.is_empty() {
        let none = "this host has no named share; why: its configuration has no [share.<name>]";
        return RequestError::about("share", given, none);
    }
    let allowed = format!("a share of this host's configuration: {}", safe(&names.join(", ")));
    let hint = nearest(name, names).map(|name| format!("did you mean {}?", safe(name)));
    RequestError::value("share", given, &allowed, hint)
}

/// Keys that a container may have, without the prefix. `lease` is not among them: only sublet writes it.
pub(super) const KEYS: [&str; 15] = [
    "gpu",
    "mode",
    "sm",
    "memory",
    "mig",
    "mig-caps",
    "isolation",
    "priority",
    "processes",
    "capabilities",
    "wait",
    "guard",
    "suspend",
    "owner",
    "share",
];

/// Keys that only a named share may have: they concern programs that sublet does not know.
const KEYS_OF_SHARES: [&str; 2] = ["visible_devices", "default_directory"];

/// Why annotations do not make a request. Every message names the key, the value and the allowed ones, and a remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RequestError {
    /// The key it is about, without the prefix and safe to print; empty where a key is missing or misspelt.
    pub key: String,
    pub(super) message: String,
}

impl RequestError {
    fn about(key: &str, given: Given<'_>, problem: &str) -> Self {
        Self { key: safe(key), message: format!("{}: {problem}", given.show(key)) }
    }

    /// A value that `key` does not accept.
    fn value(key: &str, given: Given<'_>, allowed: &str, hint: Option<String>) -> Self {
        let hint = hint.unwrap_or_else(|| "not a possible value".to_owned());
        Self::about(key, given, &format!("{hint}; why: it must be {allowed}"))
    }
}

/// The key that `wrong` probably stands for: first by other tools' words, then by the nearest spelling.
fn nearest_key(wrong: &str) -> Option<&'static str> {
    match wrong.to_ascii_lowercase().as_str() {
        "compute" | "cores" | "percent" | "sms" => Some("sm"),
        "vram" | "mem" => Some("memory"),
        "gpus" | "device" | "devices" => Some("gpu"),
        word => KEYS
            .into_iter()
            .find(|key| *key == word.replace(['.', '_', '/'], "-"))
            .or_else(|| nearest(wrong, KEYS)),
    }
}
