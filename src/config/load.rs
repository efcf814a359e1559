//! Finding, reading and merging the configuration files.

use super::{Config, Runtime};

/// Why the configuration cannot be used; names the file and, where there is one, the line.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {}

/// The merged configuration.
///
/// # Errors
/// A file that cannot be read or parsed, an unknown key, a value out of its range.
pub fn load() -> Result<Config, ConfigError> {
    todo!()
}

/// `[runtime]` alone: an error elsewhere in the files must not stop containers that are not ours.
///
/// # Errors
/// As [`load`], for `[runtime]`.
pub fn load_runtime() -> Result<Runtime, ConfigError> {
    todo!()
}

/// Durations as `0`, `10s`, `2m`.
pub(super) mod duration {
    use std::time::Duration;

    use serde::{Deserializer, Serializer};

    pub fn serialize<S: Serializer>(_value: &Duration, _serializer: S) -> Result<S::Ok, S::Error> {
        todo!()
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(_deserializer: D) -> Result<Duration, D::Error> {
        todo!()
    }
}

/// Amounts of memory as `512MiB`.
pub(super) mod memory {
    use serde::{Deserializer, Serializer};

    pub fn serialize<S: Serializer>(_value: &u64, _serializer: S) -> Result<S::Ok, S::Error> {
        todo!()
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(_deserializer: D) -> Result<u64, D::Error> {
        todo!()
    }
}
