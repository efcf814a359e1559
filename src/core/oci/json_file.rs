//! A JSON file of an engine's: config.json, exec's process file. Read with bounds, replaced atomically, and parsed so
//! that it can be written back unchanged: keys keep their order, none is dropped, and no number changes.

use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::{fmt, io};

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::text::{safe, safe_path};

/// Longest file that is read. Docker's and Podman's are some ten KiB.
const LONGEST: u64 = 16 << 20;

/// Why a file could not be read or replaced.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It could not be opened or read.
    #[error("cannot read {}: {}", safe_path(.0), .1)]
    Read(PathBuf, #[source] io::Error),
    /// A directory, a FIFO, a device.
    #[error("{} is not a regular file: the container's bundle is damaged, recreate the container", safe_path(.0))]
    NotRegular(PathBuf),
    /// More than any engine writes.
    #[error("{} is larger than 16 MiB, which no engine writes, and was not read: recreate the container",
        safe_path(.0))]
    TooLarge(PathBuf),
    /// Its content could not be written back unchanged: why, safe to print.
    #[error("cannot edit {}: {}; the file was not changed, and the program that wrote it is at fault",
        safe_path(.0), .1)]
    Json(PathBuf, String),
    /// It could not be written.
    #[error("cannot write {}, which was not changed: {}", safe_path(.0), .1)]
    Write(PathBuf, #[source] io::Error),
}

impl FileError {
    /// Whether there is no such file, for any program that looks for it.
    pub fn is_missing(&self) -> bool {
        use nix::libc::{ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR};
        let Self::Read(_, source) = self else { return false };
        source.raw_os_error().is_some_and(|errno| [ENOENT, ENOTDIR, ELOOP, ENAMETOOLONG].contains(&errno))
    }
}

/// A JSON file as read, with its fields in their order.
#[derive(Debug)]
pub struct JsonFile {
    /// Where it is; behind a symbolic link, the file itself.
    pub path: PathBuf,
    /// Its bytes as read.
    pub text: Vec<u8>,
}

impl JsonFile {
    /// Reads at most 16 MiB of a regular file.
    ///
    /// # Errors
    /// It is missing, larger, or no regular file.
    pub fn read(path: &Path) -> Result<Self, FileError> {
        let (path, file) = open(path).map_err(|error| FileError::Read(path.to_owned(), error))?;
        let read_error = |error| FileError::Read(path.clone(), error);
        let metadata = file.metadata().map_err(read_error)?;
        if !metadata.is_file() {
            return Err(FileError::NotRegular(path));
        }
        let text = crate::fs::regular_file(file, metadata.len(), LONGEST).map_err(read_error)?;
        if text.len() as u64 > LONGEST { Err(FileError::TooLarge(path)) } else { Ok(Self { path, text }) }
    }

    /// Whether the text may contain a `sublet.` annotation, a misspelt one, or the name `sublet-hook`. The text is
    /// scanned, not parsed.
    ///
    /// An escape that could stand for one of its characters counts as a hit.
    pub fn mentions_sublet(&self) -> bool {
        mentions(&self.text)
    }

    /// Whether the text may be that of a pod's pause container ([`crate::request::is_sandbox`],
    /// [`crate::request::is_podman_infra`]). It is scanned as [`JsonFile::mentions_sublet`] does.
    pub fn may_be_pause(&self) -> bool {
        let hit = |window: &[u8]| match window[0] {
            b's' => window.starts_with(b"sandbox"),
            b'c' => window.starts_with(b"cataton"),
            b'\\' => window[1..].starts_with(b"u00"),
            _ => false,
        };
        self.text.windows(WORD).any(hit)
    }

    /// The value, fields in their order; refuses text that could not be reproduced: keys that stand
    /// twice in one object, numbers that would change.
    ///
    /// # Errors
    /// That, or it is no JSON, or nested deeper than `serde_json`'s limit of 128.
    pub fn parse(&self) -> Result<Value, FileError> {
        parse_lossless(&self.text).map_err(|message| FileError::Json(self.path.clone(), message))
    }

    /// Replaces the file atomically; mode and owner stay.
    ///
    /// # Errors
    /// It cannot be written; the old file is then untouched.
    pub fn replace(&self, value: &Value) -> Result<(), FileError> {
        let error = |error| FileError::Write(self.path.clone(), error);
        let mut text = Vec::with_capacity(self.text.len() + 16384);
        serde_json::to_writer(&mut text, value).map_err(|failed| error(failed.into()))?;
        if self.text.ends_with(b"\n") {
            text.push(b'\n');
        }
        // The mode applies only if the file was removed meanwhile. Engines create theirs for root only, or with 0644.
        crate::fs::replace(&self.path, &text, 0o600).map_err(error)
    }
}

/// Length of `sublet.`, `sandbox` and the part of `catatonit` that is looked for.
const WORD: usize = 7;

fn mentions(text: &[u8]) -> bool {
    let hit = |window: &[u8]| match window[0] {
        b's' | b'S' => {
            matches!(window[6], b'.' | b'-' | b'_' | b'/' | b'\\')
                && window[..6].eq_ignore_ascii_case(b"sublet")
        }
        b'\\' => window[1..].starts_with(b"u00") && matches!(window[4], b'2' | b'4' | b'5' | b'6' | b'7'),
        _ => false,
    };
    text.windows(WORD).any(hit)
}

/// [`JsonFile::mentions_sublet`] of a regular file that is too large to be edited; one that cannot be read may.
pub fn mentions_sublet(path: &Path) -> bool {
    let scan = || -> io::Result<bool> {
        let (_, mut file) = open(path)?;
        let mut part = vec![0; 1 << 20];
        let mut kept = 0;
        loop {
            let read = crate::process::once(&mut file, &mut part[kept..])?;
            // A word may extend over two parts.
            let end = kept + read;
            if read == 0 || mentions(&part[..end]) {
                return Ok(read > 0);
            }
            kept = end.min(WORD - 1);
            part.copy_within(end - kept..end, 0);
        }
    };
    scan().unwrap_or(true)
}

/// Opens the target of `path`, with the path under which it is replaced. A FIFO does not block.
fn open(path: &Path) -> io::Result<(PathBuf, File)> {
    let open = |path: &Path| {
        let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK | nix::libc::O_CLOEXEC;
        OpenOptions::new().read(true).custom_flags(flags).open(path)
    };
    match open(path) {
        Err(error) if error.raw_os_error() == Some(nix::libc::ELOOP) => {
            let path = path.canonicalize()?;
            open(&path).map(|file| (path, file))
        }
        other => other.map(|file| (path.to_owned(), file)),
    }
}

/// Parses `text`; the error is one line that is safe to print.
pub(super) fn parse_lossless(text: &[u8]) -> Result<Value, String> {
    let floats = Cell::new(false);
    let text = std::str::from_utf8(text).map_err(|error| error.to_string())?;
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = Faithful { floats: &floats, fields: true }
        .deserialize(&mut deserializer)
        .and_then(|value| deserializer.end().map(|()| value))
        .map_err(|error| safe(&error.to_string()))?;
    // Integers of up to 64 bits are kept exactly. The rare other numbers are compared one by one.
    match floats.get().then(|| changed_number(text)).flatten() {
        Some(number) => Err(format!("the number {} cannot be written back unchanged", safe(number))),
        None => Ok(value),
    }
}

/// Builds a [`Value`] and refuses duplicate keys, of which `serde_json` would silently keep the last.
#[derive(Clone, Copy)]
struct Faithful<'a> {
    /// Set if a number was not an integer of 64 bits.
    floats: &'a Cell<bool>,
    /// Whether the keys are defined by the specification, rather than chosen by the user.
    fields: bool,
}

/// The fields that sublet reads or writes.
const FIELDS: &str = "access allow annotations args bounding capabilities cgroupsPath createContainer \
                      createRuntime cwd destination devices effective env fileMode gid gidMappings hooks \
                      linux major maskedPaths minor mounts namespaces ociVersion options path permitted \
                      poststart poststop prestart process readonly readonlyPaths resources root \
                      rootfsPropagation seccomp source startContainer timeout type uid uidMappings user \
                      value weight";

/// Fields whose keys the user chooses.
const MAPS: [&str; 5] = ["annotations", "rdma", "sysctl", "timeOffsets", "unified"];

/// The field that `key` means to runc but not to crun. Go's encoding/json looks for a field in the same case first, and
/// then in any case (`foldName` in its fold.go; two letters beyond ASCII fold to an ASCII letter).
fn mistaken(key: &str) -> Option<&'static str> {
    let fold = |letter: char| match letter {
        '\u{17f}' => 's',
        '\u{212a}' => 'k',
        letter => letter.to_ascii_lowercase(),
    };
    let same = |field: &str| key.chars().map(fold).eq(field.chars().map(fold));
    FIELDS.split(' ').find(|field| same(field)).filter(|field| *field != key)
}

impl<'de> DeserializeSeed<'de> for Faithful<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Faithful<'_> {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        self.floats.set(true);
        Ok(Value::from(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = access.next_element_seed(self)? {
            entries.push(entry);
        }
        Ok(Value::Array(entries))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut entries = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            if entries.contains_key(&key) {
                return Err(A::Error::custom(format!("the key `{}` occurs twice in one object", safe(&key))));
            }
            if let Some(field) = mistaken(&key).filter(|_| self.fields) {
                let key = safe(&key);
                return Err(A::Error::custom(format!(
                    "runc takes the key `{key}` for `{field}`, crun does not"
                )));
            }
            let within = Self { fields: self.fields && !MAPS.contains(&key.as_str()), ..self };
            entries.insert(key, access.next_value_seed(within)?);
        }
        Ok(Value::Object(entries))
    }
}

/// The first number in `text` that would be written differently after parsing. `text` is valid JSON.
fn changed_number(text: &str) -> Option<&str> {
    let is_part = |byte: u8| matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E');
    let (mut at, mut in_string) = (0, false);
    while let Some(&byte) = text.as_bytes().get(at) {
        match byte {
            b'\\' if in_string => at += 1,
            b'"' => in_string = !in_string,
            b'-' | b'0'..=b'9' if !in_string => {
                let rest = &text[at..];
                let number = &rest[..rest.bytes().position(|byte| !is_part(byte)).unwrap_or(rest.len())];
                let parsed = serde_json::from_str::<serde_json::Number>(number);
                if !parsed.is_ok_and(|parsed| parsed.to_string() == number) {
                    return Some(number);
                }
                at += number.len() - 1;
            }
            _ => {}
        }
        at += 1;
    }
    None
}

#[cfg(test)]
mod lossless_json_tests {
    use super::*;

    #[test]
    fn a_key_that_only_one_runtime_takes_for_a_field_is_refused() {
        for (text, field) in [
            (r#"{"Env":[]}"#, "env"),
            (r#"{"linux":{"resources":{"devices":[{"allow":false,"Allow":true}]}}}"#, "allow"),
            (r#"{"proceſs":{}}"#, "process"),
            (r#"{"mounts":[{"DESTINATION":"/"}]}"#, "destination"),
            (r#"{"MaskedPaths":[]}"#, "maskedPaths"),
        ] {
            let error = parse_lossless(text.as_bytes()).unwrap_err();
            assert!(error.contains(&format!("for `{field}`, crun does not")), "{error}");
        }
        let users =
            r#"{"annotations":{"Env":"1","env":"2","PATH":"3"},"linux":{"sysctl":{"Type":"x"}},"Other":{}}"#;
        assert_eq!(parse_lossless(users.as_bytes()).unwrap().to_string(), users);
    }
}
