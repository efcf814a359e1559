//! Why the configuration cannot be used: one line with file, line and remedy.

use std::ops::Range;
use std::path::{Path, PathBuf};

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
        /// What is wrong and what would be right.
        message: String,
    },
}

impl ConfigError {
    pub(super) fn invalid(path: &Path, text: &str, span: Option<Range<usize>>, message: String) -> Self {
        let (line, column) = position(text, span.map_or(0, |span| span.start));
        Self::Invalid { path: path.to_owned(), line, column, message }
    }

    pub(super) fn toml(path: &Path, text: &str, error: &toml::de::Error) -> Self {
        Self::invalid(path, text, error.span(), explain(error.message()))
    }
}

/// Line and column of the byte at `offset`, both from 1 on.
#[must_use]
pub fn position(text: &str, offset: usize) -> (usize, usize) {
    let before = text.get(..offset).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

/// serde's message on one line, with the nearest spelling of an unknown word.
pub fn explain(message: &str) -> String {
    let quoted: Vec<_> = message.split('`').skip(1).step_by(2).collect();
    let hint = match quoted.as_slice() {
        [unknown, known @ ..] if message.starts_with("unknown ") => {
            let nearest = nearest(unknown, known.iter().copied());
            nearest.map(|word| format!("; did you mean {word}?")).unwrap_or_default()
        }
        _ => String::new(),
    };
    // The lists of keys, which may be long, are sublet's own. Only the unknown word is foreign.
    let message: Vec<_> = message.split('`').map(safe).collect();
    format!("{}{hint}", message.join("`").replace("unknown field", "unknown key"))
}
