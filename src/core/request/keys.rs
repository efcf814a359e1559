//! The keys that a container and its named share set, with one value each.

use std::collections::BTreeMap;

use super::error::{KEYS, KEYS_OF_SHARES, RequestError, Setting, nearest_key};
use crate::config::Config;
use crate::slurm::JOB_SHARE;
use crate::text::nearest;

/// The prefix of sublet's annotation keys.
pub(super) const PREFIX: &str = "sublet.";

/// The settings of the container and its named share, with one value for each key.
pub(super) struct Keys<'a>(BTreeMap<&'a str, Given<'a>>);

#[derive(Clone, Copy)]
struct Given<'a> {
    value: &'a str,
    share: Option<&'a str>,
}

impl<'a> Keys<'a> {
    pub(super) fn gather(
        annotations: &'a BTreeMap<String, String>,
        entry_point: Option<&'a str>,
        config: &'a Config,
    ) -> Result<Self, RequestError> {
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

    fn add_share(&mut self, name: &'a str, config: &'a Config) -> Result<(), RequestError> {
        // `sublet serve` limits it to the job's allocation.
        if name == JOB_SHARE {
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

    fn add(&mut self, key: &'a str, given: Given<'a>, allowed: &[&'static str]) -> Result<(), RequestError> {
        if allowed.contains(&key) {
            self.0.insert(key, given);
            return Ok(());
        }
        Err(RequestError::UnknownKey {
            setting: Setting::new(key, given.value, given.share),
            nearest: nearest_key(key).filter(|key| allowed.contains(key)).map(str::to_owned),
            allowed: allowed.to_vec(),
        })
    }

    /// How a message shows `key`, if it is set.
    pub(super) fn setting(&self, key: &str) -> Option<Setting> {
        self.0.get(key).map(|given| Setting::new(key, given.value, given.share))
    }

    /// Whether `key` is set by a named share and not by the container itself.
    pub(super) fn is_of_share(&self, key: &str) -> bool {
        self.0.get(key).is_some_and(|given| given.share.is_some())
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
    ) -> Result<Option<T>, RequestError> {
        let Some(given) = self.0.get(key) else { return Ok(None) };
        parse(given.value).map(Some).map_err(|hint| RequestError::Value {
            setting: Setting::new(key, given.value, given.share),
            allowed: allowed.to_owned(),
            hint,
        })
    }

    pub(super) fn word<T: Copy>(&self, key: &str, words: &[(&str, T)]) -> Result<Option<T>, RequestError> {
        self.read(key, &one_of(words), |text| one_word(text, words))
    }
}

fn one_of<T>(words: &[(&str, T)]) -> String {
    let words: Vec<_> = words.iter().map(|(word, _)| *word).collect();
    format!("one of {}", words.join(", "))
}

pub(super) fn one_word<T: Copy>(text: &str, words: &[(&str, T)]) -> Result<T, Option<String>> {
    words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value).ok_or_else(|| {
        nearest(text, words.iter().map(|(word, _)| *word)).map(|word| format!("did you mean {word}?"))
    })
}

fn unknown_share(name: &str, config: &Config) -> RequestError {
    let names: Vec<_> = config.share.keys().map(String::as_str).collect();
    let allowed = match names.as_slice() {
        [] => "a share, but this host's configuration has no [share.<name>]".to_owned(),
        names => format!("a share of this host's configuration: {}", crate::text::safe(&names.join(", "))),
    };
    let hint = nearest(name, names).map(|name| format!("did you mean {}?", crate::text::safe(name)));
    RequestError::Value { setting: Setting::new("share", name, None), allowed, hint }
}
