//! Finds, reads, merges and checks the configuration files: `/etc/sublet/config.toml` with its `conf.d` directories,
//! and `containers.toml`. Without any file the defaults apply.

mod containers;
mod load;

use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use crate::text::{nearest, safe_path};

#[cfg(feature = "fixtures")]
pub use containers::parse as parse_containers;
pub use containers::{ContainerRule, Containers, Known, containers_path, load_containers, read_containers};
#[cfg(feature = "fixtures")]
pub use load::of_text;
pub use load::{ConfigFiles, OneFile, ParsedFiles, each, load, load_files, sources, sources_with};

/// Why the configuration cannot be used. It names the file and, if there is one, the line.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file or directory that exists and cannot be read.
    #[error("configuration {} cannot be read: {}", safe_path(.0), .1)]
    Unreadable(PathBuf, #[source] std::io::Error),
    /// Invalid TOML, an unknown key, or a value that its key does not accept: the file, line and column, the fault and the
    /// remedy.
    #[error("configuration {0}")]
    Invalid(String),
}

impl ConfigError {
    fn invalid(path: &Path, text: &str, span: Option<std::ops::Range<usize>>, message: &str) -> Self {
        let (line, column) = position(text, span.map_or(0, |span| span.start));
        Self::Invalid(format!("{}:{line}:{column}: {message}", safe_path(path)))
    }

    fn toml(path: &Path, text: &str, error: &toml::de::Error) -> Self {
        Self::invalid(path, text, error.span(), &explain(text, error))
    }
}

/// Line and column (in characters) of the byte at `offset`, both from 1 on.
pub fn position(text: &str, offset: usize) -> (usize, usize) {
    let before = text.get(..offset).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

/// The fault in `text`, on one line: the key and the value that it demands, or the nearest spelling of an unknown
/// word.
pub fn explain(text: &str, error: &toml::de::Error) -> String {
    let (document, _) = DeTable::parse_recoverable(text);
    let key = error.span().and_then(|span| key_at(document.get_ref(), span.start));
    describe(error.message(), key.as_deref())
}

/// [`explain`], where it is not known which text it is about.
fn describe(message: &str, key: Option<&str>) -> String {
    let quoted: Vec<_> = message.split('`').skip(1).step_by(2).collect();
    let hint = match quoted.as_slice() {
        [unknown, known @ ..] if message.starts_with("unknown ") => nearest(unknown, known.iter().copied()),
        _ => None,
    };
    let hint = hint.map(|word| format!(", did you mean {word}?")).unwrap_or_default();
    crate::parse_errors::plain(message, key).replacen(", expected", &format!("{hint}; why: expected"), 1)
}

/// The key in `table` whose value begins at the byte `offset`, as `limits.reserve`. Elements of arrays are given by number.
fn key_at(table: &DeTable<'_>, offset: usize) -> Option<String> {
    table.iter().find_map(|(name, value)| key_in(name.get_ref(), value, offset))
}

/// [`key_at`] for `value`, which is called `name`, and the values in it.
fn key_in(name: &str, value: &toml::Spanned<DeValue<'_>>, offset: usize) -> Option<String> {
    if value.span().start == offset {
        return Some(name.to_owned());
    }
    let key = match value.get_ref() {
        DeValue::Table(table) => key_at(table, offset),
        DeValue::Array(values) => {
            values.iter().enumerate().find_map(|(at, value)| key_in(&at.to_string(), value, offset))
        }
        _ => None,
    };
    key.map(|key| format!("{name}.{key}"))
}
