//! A JSON file of an engine's: config.json, exec's process file. Read with bounds, replaced atomically.

use std::path::{Path, PathBuf};

use serde_json::Value;

/// Why a file could not be read or replaced.
#[derive(Debug, thiserror::Error)]
pub enum FileError {}

/// A JSON file as read, with its fields in their order.
#[derive(Debug)]
pub struct JsonFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its bytes as read.
    pub text: Vec<u8>,
}

impl JsonFile {
    /// Reads at most 16 MiB of a regular file.
    ///
    /// # Errors
    /// It is missing, larger, or no regular file.
    pub fn read(_path: &Path) -> Result<Self, FileError> {
        todo!()
    }

    /// Whether the text may hold a `sublet.` annotation at all: a scan, no parse.
    #[must_use]
    pub fn mentions_sublet(&self) -> bool {
        todo!()
    }

    /// The value, fields in their order; refuses duplicate keys on the way to what we edit.
    ///
    /// # Errors
    /// It is no JSON, or nested deeper than serde_json's limit.
    pub fn parse(&self) -> Result<Value, FileError> {
        todo!()
    }

    /// Replaces the file atomically; mode and owner stay.
    ///
    /// # Errors
    /// It cannot be written; the old file is then untouched.
    pub fn replace(&self, _value: &Value) -> Result<(), FileError> {
        todo!()
    }
}
