//! Values of the configuration files that serde has no types for: durations, amounts of memory, words written as
//! numbers.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::de::{Deserializer, Error, Visitor};
use serde::{Deserialize, Serializer};

use crate::share::{DURATION_ALLOWED, MIB, Percent, parse_bytes, parse_duration, show_duration};
use crate::text::safe;

/// A word that `parse` reads, or the error that it must be `allowed`.
fn parsed<'de, T, D: Deserializer<'de>>(
    deserializer: D,
    allowed: &str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<T, D::Error> {
    let text = word(deserializer)?;
    parse(&text).ok_or_else(|| D::Error::custom(format!("\"{}\" must be {allowed}", safe(&text))))
}

/// Durations as `0`, `500ms`, `10s`, `2m`.
pub(super) fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    parsed(deserializer, DURATION_ALLOWED, |text| parse_duration(text, Duration::MAX).ok())
}

pub(super) fn write_duration<S: Serializer>(value: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&show_duration(*value))
}

/// Amounts of memory such as `512MiB`, converted to bytes. Whole MiB, as everything that is booked.
pub(super) fn memory<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let bytes =
        |text: &str| if text == "0" { Some(0) } else { parse_bytes(text).map(|bytes| bytes / MIB * MIB) };
    parsed(deserializer, "an amount with a unit, such as 512MiB, or 0", bytes)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
pub(super) fn write_memory<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format!("{}MiB", value / MIB))
}

/// [`memory`] for a key that may be absent.
pub(super) fn some_memory<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    memory(deserializer).map(Some)
}

#[expect(clippy::ref_option, reason = "serde calls it so")]
pub(super) fn write_some_memory<S: Serializer>(
    value: &Option<u64>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    write_memory(&value.unwrap_or_default(), serializer)
}

/// A sum of percentages over several devices: `50`, `12.5`, `150%`.
pub(super) fn percent_sum<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Percent>, D::Error> {
    let sum = |text: &str| {
        let number: Option<f64> = text.strip_suffix('%').unwrap_or(text).trim().parse().ok();
        number.filter(|number| *number > 0.0 && *number <= 10_000.0).map(Percent::nearest)
    };
    parsed(deserializer, "a sum of percentages over 0, such as 50 or 150%", sum).map(Some)
}

#[expect(clippy::ref_option, clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
pub(super) fn write_percent<S: Serializer>(
    value: &Option<Percent>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&value.unwrap_or_default().to_string())
}

/// Accepts `sm = 25` as well as `sm = "25"`.
pub(super) fn word<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    deserializer.deserialize_any(WordVisitor)
}

/// [`word`] for a key that may be absent.
pub(super) fn some_word<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    word(deserializer).map(Some)
}

/// The named shares. Their values are words.
pub(super) fn shares<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, BTreeMap<String, String>>, D::Error> {
    let shares = BTreeMap::<String, BTreeMap<String, Word>>::deserialize(deserializer)?;
    let plain = |share: BTreeMap<String, Word>| share.into_iter().map(|(key, word)| (key, word.0)).collect();
    Ok(shares.into_iter().map(|(name, share)| (name, plain(share))).collect())
}

/// A word that may be written as a number.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(transparent)]
pub struct Word(String);

impl std::ops::Deref for Word {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl<'de> Deserialize<'de> for Word {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        word(deserializer).map(Self)
    }
}

struct WordVisitor;

impl Visitor<'_> for WordVisitor {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a number")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<String, E> {
        Ok(value.to_string())
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<String, E> {
        Ok(value.to_owned())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<String, E> {
        Ok(value.to_string())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<String, E> {
        Ok(value.to_string())
    }
}
