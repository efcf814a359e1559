//! Finding, reading, merging and checking the configuration files.
//!
//! From weakest to strongest: built-in defaults, `/usr/lib/sublet/conf.d/*.toml`,
//! `/etc/sublet/config.toml`, `/etc/sublet/conf.d/*.toml`; within a directory by name. A file in
//! `/etc/sublet/conf.d` hides the one of the same name in `/usr/lib`, as with systemd's drop-ins. Tables
//! are merged key by key and a stronger value replaces a weaker one; only the `[[device]]` and `[[policy]]`
//! rules of all files are kept, the stronger files' first, because the first that matches counts.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

use super::{ConfigError, describe};
use crate::config::{Config, DeviceRule, Grant, Limits, NOT_OF_GPUS, PolicyRule, Runtime, is_own_name};
use crate::share::{Action, LONGEST_WAIT, Selector};
use crate::text::safe;

/// The merged configuration. Without any file, the defaults.
///
/// # Errors
/// A file that cannot be read or parsed, an unknown key, a value out of its range.
pub fn load() -> Result<Config, ConfigError> {
    load_files(&sources()?)
}

/// `files` merged, the weakest first.
pub fn load_files(files: &[PathBuf]) -> Result<Config, ConfigError> {
    merge(&parse_files(&read(files)?))
}

/// One of the configuration files by itself, for checks that go beyond its text.
pub struct OneFile {
    file: File,
    /// Its values; defaults for the rest.
    pub config: Config,
}

impl OneFile {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// The values that it sets, by their keys.
    pub fn values(&self) -> toml::Table {
        self.file.text.parse().unwrap_or_default()
    }

    /// A message about the value at `keys`, with file, line and key. Elements of arrays are given by number.
    pub fn about(&self, keys: &[&str], message: &str) -> ConfigError {
        let message = format!("{}: {message}", keys.join("."));
        let key = keys.iter().map(|&key| key.to_owned()).collect();
        locate(&[&self.file], &Problem { key, message })
    }
}

/// Each of `files` by itself, in their order.
pub fn each(files: &[PathBuf]) -> Result<Vec<OneFile>, ConfigError> {
    let alone = |file: File| Ok(OneFile { config: Parsed::of(&file).alone()?, file });
    read(files)?.into_iter().map(alone).collect()
}

/// The text of the files that [`load`] reads, read once by a program that may need all of it; `None`: not all can be read,
/// and those who ask get the reason.
pub struct ConfigFiles(Option<Vec<File>>);

impl ConfigFiles {
    /// Reads them.
    pub fn read() -> Self {
        Self(sources().and_then(|paths| read(&paths)).ok())
    }

    /// Parses them.
    pub fn parse(&self) -> ParsedFiles<'_> {
        ParsedFiles(self.0.as_deref().map(parse_files))
    }
}

/// [`ConfigFiles`], parsed once.
pub struct ParsedFiles<'f>(Option<Vec<Parsed<'f>>>);

impl ParsedFiles<'_> {
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
        self.0.as_deref().map_or_else(|| merge_runtime(&parse_files(&read(&sources()?)?)), merge_runtime)
    }
}

/// The files that [`load`] reads, the weakest first.
pub fn sources() -> Result<Vec<PathBuf>, ConfigError> {
    if let Some(file) = crate::process::inheritance::honoured_config() {
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
    let unreadable = |error| ConfigError::Unreadable(directory.to_owned(), error);
    let mut found = BTreeMap::new();
    let entries = crate::fs::unless_absent(std::fs::read_dir(directory)).map_err(unreadable)?;
    for entry in entries.into_iter().flatten() {
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
pub(super) struct File {
    pub(super) path: PathBuf,
    pub(super) text: String,
}

impl File {
    fn problem(&self, error: &toml::de::Error) -> ConfigError {
        ConfigError::toml(&self.path, &self.text, error)
    }

    /// An error in this file merged over the weaker ones. Which of them has it is not known.
    fn merged(&self, error: &toml::de::Error) -> ConfigError {
        ConfigError::invalid(&self.path, &self.text, None, &describe(error.message(), None))
    }
}

fn read(paths: &[PathBuf]) -> Result<Vec<File>, ConfigError> {
    paths.iter().map(|path| Ok(File { path: path.clone(), text: text(path)? })).collect()
}

/// More bytes than any configuration has.
const LARGEST: u64 = 1 << 20;

/// The content of a configuration file. Every container's creation reads it, so reading never waits and never goes on
/// without end. /dev/null is accepted as an empty file, because it is commonly used for that.
pub(super) fn text(path: &Path) -> Result<String, ConfigError> {
    read_bounded(path).map_err(|error| ConfigError::Unreadable(path.to_owned(), error))
}

fn read_bounded(path: &Path) -> std::io::Result<String> {
    let file = std::fs::OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path)?;
    let meta = file.metadata()?;
    let is_null =
        || std::fs::metadata("/dev/null").is_ok_and(|null| null.rdev() == meta.rdev() && meta.rdev() != 0);
    if !meta.is_file() && !is_null() {
        return Err(std::io::Error::other("it is not a regular file"));
    }
    let bytes = crate::fs::regular_file(file, meta.len(), LARGEST)?;
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
    let parsed = parse_files(&files);
    (merge(&parsed), merge_runtime(&parsed))
}

/// A file, the part of it that could be parsed, and why not all of it.
struct Parsed<'f> {
    file: &'f File,
    table: DeTable<'f>,
    errors: Vec<toml::de::Error>,
}

fn parse_files(files: &[File]) -> Vec<Parsed<'_>> {
    files.iter().map(Parsed::of).collect()
}

impl<'f> Parsed<'f> {
    fn of(file: &'f File) -> Self {
        let (document, errors) = DeTable::parse_recoverable(&file.text);
        Self { file, table: document.into_inner(), errors }
    }

    /// Its values, and defaults for the rest.
    fn alone(&self) -> Result<Config, ConfigError> {
        let config = match self.errors.first() {
            None => of_table(self.table.clone()),
            Some(error) => Err(error.clone()),
        };
        config.map_err(|error| self.file.problem(&error))
    }

    /// Its `[runtime]`. It is valid by itself, whatever the rest of the file contains.
    fn runtime(&self) -> Result<Option<DeTable<'f>>, ConfigError> {
        let text = &self.file.text;
        let Some(table) = self.table.get("runtime") else {
            let swallowed = text.lines().any(is_runtime_header);
            let error = self.errors.first().filter(|_| swallowed);
            return error.map_or(Ok(None), |error| Err(self.file.problem(error)));
        };
        if let Some(error) = self.errors.iter().find(|error| in_runtime(text, error)) {
            return Err(self.file.problem(error));
        }
        let alone = Runtime::deserialize(ValueDeserializer::from(table.clone()))
            .map_err(|error| self.file.problem(&error))?;
        check_runtime(&alone).map_err(|problem| locate(&[self.file], &problem))?;
        Ok(table.get_ref().as_table().cloned())
    }
}

fn merge(files: &[Parsed]) -> Result<Config, ConfigError> {
    let mut merged = DeTable::new();
    for parsed in files {
        // Each file by itself first, because only then does an error have its line.
        check_values(&parsed.alone()?).map_err(|problem| locate(&[parsed.file], &problem))?;
        overlay(&mut merged, parsed.table.clone());
    }
    let mut config = match files {
        [] => Config::default(),
        [.., last] => of_table(merged).map_err(|error| last.file.merged(&error))?,
    };
    // `[grant.env]` is merged over the built-in one as over any weaker file's. An empty value removes a variable.
    for (name, template) in Grant::default().env {
        config.grant.env.entry(name).or_insert(template);
    }
    config.grant.env.retain(|_, template| !template.is_empty());
    // Values that are valid by themselves may contradict each other in one share.
    let strongest_first: Vec<_> = files.iter().rev().map(|parsed| parsed.file).collect();
    check_values(&config).map_err(|problem| locate(&strongest_first, &problem))?;
    Ok(config)
}

/// `text` as a `T`, by the one deserializer that all configuration is read by.
pub(super) fn parse<'f, T: Deserialize<'f>>(text: &'f str) -> Result<T, toml::de::Error> {
    DeTable::parse(text).and_then(|table| of_table(table.into_inner()))
}

/// Every configuration is read by this one deserializer. Each further one would add as much code again.
fn of_table<'f, T: Deserialize<'f>>(table: DeTable<'f>) -> Result<T, toml::de::Error> {
    T::deserialize(ValueDeserializer::from(Spanned::new(0..0, DeValue::Table(table))))
}

/// `stronger` over `weaker`.
fn overlay<'f>(weaker: &mut DeTable<'f>, stronger: DeTable<'f>) {
    for (key, mut value) in stronger {
        match (weaker.get_mut(&key).map(Spanned::get_mut), value.get_mut()) {
            (Some(DeValue::Table(old)), DeValue::Table(new)) => overlay(old, std::mem::take(new)),
            (Some(DeValue::Array(old)), DeValue::Array(new))
                if matches!(key.get_ref().as_ref(), "device" | "policy") =>
            {
                std::mem::swap(old, new);
                new.iter().for_each(|rule| old.push(rule.clone()));
            }
            _ => {
                weaker.insert(key, value);
            }
        }
    }
}

/// Names the first of `files` that has the key, or the longest part of it that any of them has.
pub(super) fn locate(files: &[&File], problem: &Problem) -> ConfigError {
    let found = |file: &&File| descend(&DeTable::parse_recoverable(&file.text).0, &problem.key);
    // Of several that are as deep the last one counts, so the first file comes last.
    let best = files.iter().rev().map(|file| (found(file), *file)).max_by_key(|((depth, _), _)| *depth);
    match best {
        Some(((_, span), file)) => ConfigError::invalid(&file.path, &file.text, Some(span), &problem.message),
        // The defaults are valid, so some file has the key.
        None => ConfigError::invalid(Path::new("built-in"), "", None, &problem.message),
    }
}

/// How many of `keys`, each inside the one before, exist in the file, and the position of the innermost.
fn descend(document: &Spanned<DeTable<'_>>, keys: &[String]) -> (usize, std::ops::Range<usize>) {
    let (mut depth, mut span, mut value) = (0, document.span(), None::<&Spanned<DeValue<'_>>>);
    for key in keys {
        let table = value.map_or(Some(document.get_ref()), |value| value.get_ref().as_table());
        let inner = match (table, key.parse::<usize>()) {
            (Some(table), _) => table.get_key_value(key.as_str()).map(|(name, value)| (name.span(), value)),
            (None, Ok(index)) => {
                value.and_then(|value| value.get_ref().get(index)).map(|value| (value.span(), value))
            }
            (None, Err(_)) => None,
        };
        let Some((inner_span, inner)) = inner else { break };
        (depth, span, value) = (depth + 1, inner_span, Some(inner));
    }
    (depth, span)
}

fn merge_runtime(files: &[Parsed]) -> Result<Runtime, ConfigError> {
    let (mut merged, mut last) = (DeTable::new(), None);
    for parsed in files {
        let Some(table) = parsed.runtime()? else { continue };
        overlay(&mut merged, table);
        last = Some(parsed.file);
    }
    let Some(file) = last else { return Ok(Runtime::default()) };
    of_table(merged).map_err(|error| file.merged(&error))
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

/// The longest path to which a Unix socket can be bound (unix(7): 108 bytes with the NUL), minus the longest path below
/// the state directory: `/mps/GPU-<uuid>/pipe/control_privileged`.
const LONGEST_STATE_DIR: usize = 107 - "/mps/".len() - 40 - "/pipe/control_privileged".len();

/// A larger factor would limit nothing.
const LARGEST_OVERCOMMIT: f64 = 100.0;

/// A value out of its range: its place and the fault.
#[derive(Debug)]
pub(super) struct Problem {
    /// Keys from the top of the file. Elements of arrays are given by number.
    pub(super) key: Vec<String>,
    pub(super) message: String,
}

type Checked = Result<(), Problem>;

/// The first problem of `config`.
pub(super) fn check_values(config: &Config) -> Checked {
    require_absolute(&["state_dir"], &config.state_dir)?;
    let fits = config.state_dir.as_os_str().as_bytes().len() <= LONGEST_STATE_DIR;
    let help = format!(
        "must be at most {LONGEST_STATE_DIR} bytes long, because paths of MPS sockets below it may have 107"
    );
    require(fits, &["state_dir"], &help)?;
    check_runtime(&config.runtime)?;
    require_absolute(&["driver", "root"], &config.driver.root)?;
    for path in &config.driver.search {
        require_absolute(&["driver", "search"], Path::new(path))?;
    }
    let most = config.limits.wait_max;
    require(most <= LONGEST_WAIT, &["limits", "wait_max"], "must be at most 60m")?;
    require(config.defaults.wait <= most, &["defaults", "wait"], "must be at most [limits] wait_max")?;
    for (index, rule) in config.device.iter().enumerate() {
        check_device(index, rule)?;
    }
    check_overcommit("sm_overcommit", config.limits.sm_overcommit)?;
    check_overcommit("memory_overcommit", config.limits.memory_overcommit)?;
    require(config.limits.time_slice_max >= 1, &["limits", "time_slice_max"], "must be 1 or more")?;
    for path in &config.limits.allow_devices {
        let first = path.strip_prefix("/dev").ok().and_then(|below| below.iter().next()?.to_str());
        let fits = first.is_some_and(|first| NOT_OF_GPUS.iter().any(|name| first.starts_with(name)));
        let help = "may have /dev/nvidia-fs<N> and /dev/nvidia-caps-imex-channels, no GPU's node";
        require(fits, &["limits", "allow_devices"], help)?;
    }
    require(config.mps.start_timeout > Duration::ZERO, &["mps", "start_timeout"], "must be over 0")?;
    for name in config.grant.env.keys() {
        let fits = !name.is_empty() && !name.contains(|c: char| c == '=' || c.is_control());
        require(fits, &["grant", "env", name], "is not a valid name of an environment variable")?;
        let help = "is set by sublet itself: see [grant] visible_devices, nvidia_visible_devices and tell_neighbours";
        require(!is_own_name(name), &["grant", "env", name], help)?;
    }
    require_absolute(&["cdi", "spec"], &config.cdi.spec)?;
    let is_json = config.cdi.spec.extension().is_some_and(|extension| extension == "json");
    require(is_json, &["cdi", "spec"], "must end in .json: engines read no other files")?;
    for (index, rule) in config.policy.iter().enumerate() {
        check_policy(index, rule)?;
    }
    let period = config.guard.period;
    let fits = (Duration::from_millis(100)..=Duration::from_secs(10)).contains(&period);
    require(fits, &["guard", "period"], "must be from 100ms to 10s")?;
    let is_short = config.suspend.limit <= Duration::from_secs(3600);
    require(is_short, &["suspend", "limit"], "must be at most 60m: the engine waits with the start")?;
    let help = "must be \"report\" or \"terminate\": strangers have no container";
    require(config.guard.strangers != Action::Container, &["guard", "strangers"], help)?;
    config.mig.layout.as_deref().map_or(Ok(()), |layout| require_absolute(&["mig", "layout"], layout))?;
    config.share.keys().try_for_each(|name| check_share(name, config))
}

/// Checks only `[runtime]`.
pub(super) fn check_runtime(runtime: &Runtime) -> Checked {
    let names = !runtime.low_level.is_empty() && runtime.low_level.iter().all(|name| !name.is_empty());
    let help = "must name one low-level runtime or more, such as [\"runc\", \"crun\"]";
    require(names, &["runtime", "low_level"], help)?;
    runtime.log.as_deref().map_or(Ok(()), |log| require_absolute(&["runtime", "log"], log))
}

fn require(holds: bool, key: &[&str], message: &str) -> Checked {
    if holds {
        return Ok(());
    }
    let name: Vec<_> = key.iter().map(|part| safe(part)).collect();
    let message = format!("{} {message}", name.join("."));
    Err(Problem { key: key.iter().map(|part| (*part).to_owned()).collect(), message })
}

fn require_absolute(key: &[&str], path: &Path) -> Checked {
    require(path.is_absolute(), key, "must be an absolute path")
}

fn check_overcommit(key: &str, value: f64) -> Checked {
    require(value > 0.0 && value <= LARGEST_OVERCOMMIT, &["limits", key], "must be over 0 and at most 100")
}

fn check_device(index: usize, rule: &DeviceRule) -> Checked {
    let index = index.to_string();
    // An alias must not be defined by an alias.
    let matches = rule.matches == "all"
        || Selector::parse(&rule.matches).is_some_and(|selector| !matches!(selector, Selector::Name(_)));
    let help = "must be all, an index, GPU-<uuid>, PCI bus id, MIG-<uuid>, \"G:M\" or model:<glob>";
    require(matches, &["device", &index, "match"], help)?;
    let alias = |name: &str| Selector::parse(&format!("name:{name}")).is_some() && !name.contains([',', ' ']);
    let help = "must be a word without commas and spaces, at most 128 bytes long";
    require(rule.name.as_deref().is_none_or(alias), &["device", &index, "name"], help)
}

fn check_policy(index: usize, rule: &PolicyRule) -> Checked {
    let index = index.to_string();
    let name = |name: &Option<String>| name.as_deref().is_none_or(|name| !name.is_empty());
    let is_one = rule.user.is_some() != rule.group.is_some() && name(&rule.user) && name(&rule.group);
    require(is_one, &["policy", &index], "must name either a user (\"*\" for all) or a group")?;
    let has_modes = rule.modes.as_ref().is_none_or(|modes| !modes.is_empty());
    require(has_modes, &["policy", &index, "modes"], "is empty")?;
    let devices = rule.devices.iter().flatten();
    let known = devices.clone().all(|text| &**text == "all" || Selector::parse(text).is_some());
    let fits = known && rule.devices.as_ref().is_none_or(|devices| !devices.is_empty());
    let help = "must be a list of selectors as in sublet.gpu: indices, GPU-<uuid>, PCI bus ids, name:<alias>, model:<glob>";
    require(fits, &["policy", &index, "devices"], help)
}

/// A named share must be a valid request by itself. The container may add the limits that `[limits] require` demands.
fn check_share(name: &str, config: &Config) -> Checked {
    let word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let fits = name.chars().all(word) && name.starts_with(|c: char| c.is_ascii_alphanumeric());
    require(fits, &["share", name], "must be named with letters, digits, '-', '_' and '.'")?;
    let lenient = Config {
        share: config.share.get(name).map(|keys| (name.to_owned(), keys.clone())).into_iter().collect(),
        defaults: config.defaults.clone(),
        mig: config.mig.clone(),
        limits: Limits { wait_max: config.limits.wait_max, ..Limits::default() },
        ..Config::default()
    };
    crate::request::parse(&BTreeMap::new(), Some(name), None, &lenient).map(drop).map_err(|error| {
        let message = error.to_string();
        Problem { key: vec!["share".into(), name.into(), error.key], message }
    })
}

#[cfg(test)]
#[path = "load_tests.rs"]
mod tests;
