//! Finding, reading and merging the configuration files.
//!
//! From weakest to strongest: built-in defaults, `/usr/lib/sublet/conf.d/*.toml`,
//! `/etc/sublet/config.toml`, `/etc/sublet/conf.d/*.toml`; within a directory by name. A file in
//! `/etc/sublet/conf.d` hides the one of the same name in `/usr/lib`, as with systemd's drop-ins. Tables
//! are merged key by key and a stronger value replaces a weaker one; only the `[[device]]` and `[[policy]]`
//! rules of all files are kept, the stronger files' first, because the first that matches counts.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

use super::ConfigError;
use super::check::{self, Problem};
use crate::config::{Config, Grant, Runtime};
use crate::process::environment::honoured_config;
use crate::reading::regular_file;

/// The merged configuration. Without any file, the defaults.
///
/// # Errors
/// A file that cannot be read or parsed, an unknown key, a value out of its range.
pub fn load() -> Result<Config, ConfigError> {
    load_files(&sources()?)
}

/// `files` merged, the weakest first.
pub fn load_files(files: &[PathBuf]) -> Result<Config, ConfigError> {
    merge(&read(files)?)
}

/// One of the configuration files by itself, for checks that go beyond its text.
pub struct OneFile {
    file: File,
    /// Its values; defaults for the rest.
    pub config: Config,
}

impl OneFile {
    /// A message about the value at `keys`, with file, line and key. Elements of arrays are given by number.
    #[must_use]
    pub fn about(&self, keys: &[&str], message: &str) -> ConfigError {
        let message = format!("{}: {message}", keys.join("."));
        let key = keys.iter().map(|&key| key.to_owned()).collect();
        locate(&[&self.file], &Problem { key, message })
    }
}

/// Each of `files` by itself, in their order.
pub fn each(files: &[PathBuf]) -> Result<Vec<OneFile>, ConfigError> {
    let alone =
        |file: File| Ok(OneFile { config: of_table(document(&file)?).map_err(|e| file.problem(&e))?, file });
    read(files)?.into_iter().map(alone).collect()
}

/// The text of the files that [`load`] reads, read once by a program that may need all of it; `None`: not all can be read,
/// and those who ask are told why.
pub struct ConfigFiles(Option<Vec<File>>);

impl ConfigFiles {
    /// Reads them.
    #[must_use]
    pub fn read() -> Self {
        Self(sources().and_then(|paths| read(&paths)).ok())
    }

    /// As [`load`].
    ///
    /// # Errors
    /// As [`load`].
    pub fn config(&self) -> Result<Config, ConfigError> {
        self.0.as_deref().map_or_else(load, merge)
    }

    /// Only `[runtime]`: an error elsewhere in the files must not stop containers that ask for no share.
    ///
    /// # Errors
    /// As [`load`], for `[runtime]`.
    pub fn runtime(&self) -> Result<Runtime, ConfigError> {
        self.0.as_deref().map_or_else(|| merge_runtime(&read(&sources()?)?), merge_runtime)
    }
}

/// The files that [`load`] reads, the weakest first.
pub fn sources() -> Result<Vec<PathBuf>, ConfigError> {
    if let Some(file) = honoured_config() {
        return Ok(vec![file]);
    }
    sources_with(Path::new("/etc/sublet"))
}

/// The files that would be read if `etc` were `/etc/sublet`, the weakest first.
pub fn sources_with(etc: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    files(etc, Path::new("/usr/lib/sublet"))
}

fn files(etc: &Path, vendor: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let mut packaged = drop_ins(&vendor.join("conf.d"))?;
    let local = drop_ins(&etc.join("conf.d"))?;
    packaged.retain(|name, _| !local.contains_key(name));
    let main = etc.join("config.toml");
    // If it cannot be examined, reading it gives an error that names it.
    let main = main.try_exists().unwrap_or(true).then_some(main);
    Ok(packaged.into_values().chain(main).chain(local.into_values()).collect())
}

/// The `*.toml` files in `directory`, sorted by name; none if the directory does not exist.
fn drop_ins(directory: &Path) -> Result<BTreeMap<OsString, PathBuf>, ConfigError> {
    let unreadable = |source| ConfigError::Unreadable { path: directory.to_owned(), source };
    let mut found = BTreeMap::new();
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(found);
        }
        Err(error) => return Err(unreadable(error)),
    };
    for entry in entries {
        let entry = entry.map_err(unreadable)?;
        let path = entry.path();
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if !hidden && path.extension().is_some_and(|extension| extension == "toml") {
            found.insert(entry.file_name(), path);
        }
    }
    Ok(found)
}

/// One file: its path and its content.
struct File {
    path: PathBuf,
    text: String,
}

impl File {
    fn problem(&self, error: &toml::de::Error) -> ConfigError {
        ConfigError::toml(&self.path, &self.text, error)
    }

    /// An error in this file merged over the weaker ones. Which of them has it is not known.
    fn merged(&self, error: &toml::de::Error) -> ConfigError {
        ConfigError::invalid(&self.path, &self.text, None, super::error::describe(error.message(), None))
    }
}

fn read(paths: &[PathBuf]) -> Result<Vec<File>, ConfigError> {
    let file = |path: &PathBuf| match text(path) {
        Ok(text) => Ok(File { path: path.clone(), text }),
        Err(source) => Err(ConfigError::Unreadable { path: path.clone(), source }),
    };
    paths.iter().map(file).collect()
}

/// More bytes than any configuration has.
const LARGEST: u64 = 1 << 20;

/// The content of a configuration file. Every container's creation reads it, so reading never waits and never goes on
/// without end. /dev/null is accepted as an empty file, because it is commonly used for that.
pub(super) fn text(path: &Path) -> std::io::Result<String> {
    let file = OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path)?;
    let meta = file.metadata()?;
    let is_null =
        || std::fs::metadata("/dev/null").is_ok_and(|null| null.rdev() == meta.rdev() && meta.rdev() != 0);
    if !meta.is_file() && !is_null() {
        return Err(std::io::Error::other("it is not a regular file"));
    }
    let bytes = regular_file(file, meta.len(), LARGEST)?;
    if bytes.len() as u64 > LARGEST {
        return Err(std::io::Error::other("it is larger than 1 MiB"));
    }
    // Bytes that are not UTF-8 become characters that no key has and that no parser takes for other ones.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The configuration of `text` as the only file: all of it, and only `[runtime]`.
#[cfg(feature = "fixtures")]
pub fn of_text(text: &str) -> (Result<Config, ConfigError>, Result<Runtime, ConfigError>) {
    let files = [File { path: PathBuf::from("/etc/sublet/config.toml"), text: text.to_owned() }];
    (merge(&files), merge_runtime(&files))
}

fn merge(files: &[File]) -> Result<Config, ConfigError> {
    let mut merged = DeTable::new();
    for file in files {
        // Each file by itself first, because only then does an error have its line.
        let table = document(file)?;
        let config: Config = of_table(table.clone()).map_err(|error| file.problem(&error))?;
        check::check(&config).map_err(|problem| locate(&[file], &problem))?;
        overlay(&mut merged, table);
    }
    let mut config = match files {
        [] => Config::default(),
        [.., last] => of_table(merged).map_err(|error| last.merged(&error))?,
    };
    shipped_environment(&mut config);
    // Values that are valid by themselves may contradict each other in one share.
    let strongest_first: Vec<_> = files.iter().rev().collect();
    check::check(&config).map_err(|problem| locate(&strongest_first, &problem))?;
    Ok(config)
}

/// `text` as a `T`, by the one deserializer that all configuration is read by.
pub(super) fn parse<'f, T: Deserialize<'f>>(text: &'f str) -> Result<T, toml::de::Error> {
    DeTable::parse(text).and_then(|table| of_table(table.into_inner()))
}

fn document(file: &File) -> Result<DeTable<'_>, ConfigError> {
    DeTable::parse(&file.text).map(Spanned::into_inner).map_err(|error| file.problem(&error))
}

/// Every configuration is read by this one deserializer. Each further one would add as much code again.
fn of_table<'f, T: Deserialize<'f>>(table: DeTable<'f>) -> Result<T, toml::de::Error> {
    T::deserialize(ValueDeserializer::from(Spanned::new(0..0, DeValue::Table(table))))
}

/// `stronger` over `weaker`.
fn overlay<'f>(weaker: &mut DeTable<'f>, stronger: DeTable<'f>) {
    for (key, value) in stronger {
        match (weaker.get_mut(&key).map(Spanned::get_mut), value.get_ref()) {
            (Some(DeValue::Table(old)), DeValue::Table(_)) => {
                if let DeValue::Table(new) = value.into_inner() {
                    overlay(old, new);
                }
            }
            (Some(DeValue::Array(old)), DeValue::Array(_))
                if matches!(key.get_ref().as_ref(), "device" | "policy") =>
            {
                if let DeValue::Array(new) = value.into_inner() {
                    let weaker = std::mem::replace(old, new);
                    weaker.into_iter().for_each(|rule| old.push(rule));
                }
            }
            _ => {
                weaker.insert(key, value);
            }
        }
    }
}

/// `[grant.env]` is merged over the built-in one as over any weaker file's. An empty value removes a variable.
fn shipped_environment(config: &mut Config) {
    for (name, template) in Grant::default().env {
        config.grant.env.entry(name).or_insert(template);
    }
    config.grant.env.retain(|_, template| !template.is_empty());
}

/// Names the first of `files` that has the key, or the longest part of it that any of them has.
fn locate(files: &[&File], problem: &Problem) -> ConfigError {
    let mut best: Option<(usize, &File, std::ops::Range<usize>)> = None;
    for file in files {
        let (document, _) = DeTable::parse_recoverable(&file.text);
        let (depth, span) = descend(&document, &problem.key);
        if best.as_ref().is_none_or(|(deepest, ..)| depth > *deepest) {
            best = Some((depth, file, span));
        }
    }
    match best {
        Some((_, file, span)) => {
            ConfigError::invalid(&file.path, &file.text, Some(span), problem.message.clone())
        }
        // The defaults are valid, so some file has the key.
        None => ConfigError::invalid(Path::new("built-in"), "", None, problem.message.clone()),
    }
}

/// How many of `keys`, each inside the one before, exist in the file, and the position of the innermost.
fn descend(document: &Spanned<DeTable<'_>>, keys: &[String]) -> (usize, std::ops::Range<usize>) {
    let (mut depth, mut span) = (0, document.span());
    let Some((first, rest)) = keys.split_first() else { return (depth, span) };
    let Some((name, mut value)) = document.get_ref().get_key_value(first.as_str()) else {
        return (depth, span);
    };
    (depth, span) = (1, name.span());
    for key in rest {
        let inner = match (value.get_ref().as_table(), key.parse::<usize>()) {
            (Some(table), _) => table.get_key_value(key.as_str()).map(|(name, value)| (name.span(), value)),
            (None, Ok(index)) => value.get_ref().get(index).map(|value| (value.span(), value)),
            (None, Err(_)) => None,
        };
        let Some((inner_span, inner)) = inner else { break };
        (depth, span, value) = (depth + 1, inner_span, inner);
    }
    (depth, span)
}

fn merge_runtime(files: &[File]) -> Result<Runtime, ConfigError> {
    let (mut merged, mut last) = (DeTable::new(), None);
    for file in files {
        let Some(table) = runtime_of(file)? else { continue };
        overlay(&mut merged, table);
        last = Some(file);
    }
    match last {
        None => Ok(Runtime::default()),
        Some(file) => of_table(merged).map_err(|error| file.merged(&error)),
    }
}

/// `[runtime]` of one file. It is valid by itself, whatever the rest of the file contains.
fn runtime_of(file: &File) -> Result<Option<DeTable<'_>>, ConfigError> {
    let (mut document, errors) = DeTable::parse_recoverable(&file.text);
    let Some(table) = document.get_mut().remove("runtime") else {
        let swallowed = file.text.lines().any(is_runtime_header);
        return errors.first().filter(|_| swallowed).map_or(Ok(None), |error| Err(file.problem(error)));
    };
    if let Some(error) = errors.iter().find(|error| in_runtime(&file.text, error)) {
        return Err(file.problem(error));
    }
    let alone =
        Runtime::deserialize(ValueDeserializer::from(table.clone())).map_err(|error| file.problem(&error))?;
    check::runtime(&alone).map_err(|problem| locate(&[file], &problem))?;
    match table.into_inner() {
        DeValue::Table(table) => Ok(Some(table)),
        _ => Ok(None),
    }
}

/// Whether `error` is about text under the header `[runtime]`.
fn in_runtime(text: &str, error: &toml::de::Error) -> bool {
    let start = error.span().map_or(0, |span| span.start);
    let upto = text.get(start..).and_then(|rest| rest.find('\n')).map_or(text.len(), |end| start + end);
    let before = text.get(..upto).unwrap_or(text);
    let header = before.lines().rev().find(|line| line.trim_start().starts_with('['));
    header.or(before.lines().last()).is_some_and(is_runtime_header)
}

fn is_runtime_header(line: &str) -> bool {
    line.trim_start().trim_start_matches('[').trim_start().starts_with("runtime")
}

#[cfg(test)]
#[path = "load_tests.rs"]
mod tests;
