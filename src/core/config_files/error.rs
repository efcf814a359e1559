//! Why the configuration cannot be used: one line with file, line and remedy.

use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::parse_errors::plain;
use crate::text::nearest;
use crate::text::safe;

/// Why the configuration cannot be used. It names the file and, if there is one, the line.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file or directory that exists and cannot be read.
    #[error("configuration {} cannot be read: {source}", safe(&path.to_string_lossy()))]
    Unreadable {
        /// The file or directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Invalid TOML, an unknown key, or a value that its key does not accept.
    #[error("configuration {}:{line}:{column}: {message}", safe(&path.to_string_lossy()))]
    Invalid {
        /// The file.
        path: PathBuf,
        /// From 1 on.
        line: usize,
        /// In characters, from 1 on.
        column: usize,
        /// The fault and the remedy.
        message: String,
    },
}

impl ConfigError {
    pub(super) fn invalid(path: &Path, text: &str, span: Option<Range<usize>>, message: String) -> Self {
        let (line, column) = position(text, span.map_or(0, |span| span.start));
        Self::Invalid { path: path.to_owned(), line, column, message }
    }

    pub(super) fn toml(path: &Path, text: &str, error: &toml::de::Error) -> Self {
        Self::invalid(path, text, error.span(), explain(text, error))
    }
}

/// Line and column of the byte at `offset`, both from 1 on.
pub fn position(text: &str, offset: usize) -> (usize, usize) {
    let before = text.get(..offset).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

/// The fault in `text`, on one line: the key and what its value must be, or the nearest spelling of an unknown
/// word.
pub fn explain(text: &str, error: &toml::de::Error) -> String {
    let key = error.span().and_then(|span| key_at(text, span.start));
    describe(error.message(), key.as_deref())
}

/// [`explain`], where it is not known which text it is about.
pub(super) fn describe(message: &str, key: Option<&str>) -> String {
    let quoted: Vec<_> = message.split('`').skip(1).step_by(2).collect();
    let hint = match quoted.as_slice() {
        [unknown, known @ ..] if message.starts_with("unknown ") => {
            let nearest = nearest(unknown, known.iter().copied());
            nearest.map(|word| format!("; did you mean {word}?")).unwrap_or_default()
        }
        _ => String::new(),
    };
    format!("{}{hint}", plain(message, key))
}

/// The key whose value begins at the byte `offset`, as `limits.reserve`. Elements of arrays are given by number.
fn key_at(text: &str, offset: usize) -> Option<String> {
    let (document, _) = DeTable::parse_recoverable(text);
    let mut path = Vec::new();
    in_table(document.get_ref(), offset, &mut path).then(|| path.join("."))
}

fn in_table(table: &DeTable<'_>, offset: usize, path: &mut Vec<String>) -> bool {
    table.iter().any(|(name, value)| contains_offset(name.get_ref(), value, offset, path))
}

/// Whether `value`, which has this name, begins at `offset` or contains a value that does. `path` then ends in it.
fn contains_offset(name: &str, value: &Spanned<DeValue<'_>>, offset: usize, path: &mut Vec<String>) -> bool {
    path.push(name.to_owned());
    let found = value.span().start == offset
        || match value.get_ref() {
            DeValue::Table(table) => in_table(table, offset, path),
            DeValue::Array(values) => (0..)
                .zip(values.iter())
                .any(|(at, value): (usize, _)| contains_offset(&at.to_string(), value, offset, path)),
            _ => false,
        };
    if !found {
        path.pop();
    }
    found
}
