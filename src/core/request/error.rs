//! Why annotations are refused: one line that names the key, the value and the remedy.

use std::fmt;

use crate::text::{nearest, safe};

/// Keys that a container may have, without the prefix. `lease` is not among them: only sublet writes it.
pub(super) const KEYS: [&str; 13] = [
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
    "share",
];

/// Keys that only a named share may have: they concern programs that sublet does not know.
pub(super) const KEYS_OF_SHARES: [&str; 2] = ["visible_devices", "default_directory"];

/// Why annotations do not make a request. Every message names the key, the value and the allowed ones.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// A key that does not exist, or is not allowed in this place.
    #[error("{setting}: unknown key; the keys are {}{}", list_keys(allowed), suggest(nearest.as_deref()))]
    UnknownKey {
        /// The key and its value.
        setting: Setting,
        /// The key that was probably meant, without the prefix.
        nearest: Option<String>,
        /// The keys that would do, without the prefix.
        allowed: Vec<&'static str>,
    },
    /// A misspelt key, which was probably meant for sublet.
    #[error(
        "{key}={value}: sublet's keys are in lower case, with a dot and without a prefix: write \
         sublet.{right}={value}"
    )]
    Misspelt {
        /// The key as it was written, safe to print.
        key: String,
        /// Its value, safe to print.
        value: String,
        /// The key that was meant, without the prefix.
        right: &'static str,
    },
    /// A value that its key does not accept.
    #[error("{setting}: must be {allowed}{}", after_semicolon(hint.as_deref()))]
    Value {
        /// The key and its value.
        setting: Setting,
        /// The accepted values.
        allowed: String,
        /// The suggestion.
        hint: Option<String>,
    },
    /// A key that contradicts another setting.
    #[error("{setting} cannot be combined with {with}: {remedy}")]
    Contradiction {
        /// The key and its value.
        setting: Setting,
        /// The setting that it contradicts.
        with: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// `[limits] require` demands a key that is missing.
    #[error(
        "sublet.{key} is missing, and this host's configuration requires it ([limits] require): {remedy}"
    )]
    Missing {
        /// The key, without the prefix.
        key: &'static str,
        /// The remedy.
        remedy: &'static str,
    },
}

impl RequestError {
    /// The key and value it is about; `None` where a key is missing.
    #[must_use]
    pub const fn setting(&self) -> Option<&Setting> {
        match self {
            Self::UnknownKey { setting, .. }
            | Self::Value { setting, .. }
            | Self::Contradiction { setting, .. } => Some(setting),
            Self::Misspelt { .. } | Self::Missing { .. } => None,
        }
    }
}

/// A key with its value as a message shows them, and the named share that brought them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    key: String,
    value: String,
    share: Option<String>,
}

impl Setting {
    /// `key` is without the prefix. All three may be foreign text.
    pub(super) fn new(key: &str, value: &str, share: Option<&str>) -> Self {
        Self { key: safe(key), value: safe(value), share: share.map(safe) }
    }

    /// The key without the prefix, safe to print.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sublet.{}={}", self.key, self.value)?;
        match &self.share {
            Some(share) => write!(f, " (from [share.{share}])"),
            None => Ok(()),
        }
    }
}

fn suggest(nearest: Option<&str>) -> String {
    nearest.map(|key| format!("; did you mean sublet.{key}?")).unwrap_or_default()
}

fn after_semicolon(hint: Option<&str>) -> String {
    hint.map(|hint| format!("; {hint}")).unwrap_or_default()
}

fn list_keys(keys: &[&str]) -> String {
    let shown =
        |key: &&str| if KEYS_OF_SHARES.contains(key) { (*key).to_owned() } else { format!("sublet.{key}") };
    keys.iter().map(shown).collect::<Vec<_>>().join(", ")
}

/// The key that `wrong` probably stands for: first by other tools' words, then by the nearest spelling.
pub(super) fn nearest_key(wrong: &str) -> Option<&'static str> {
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
