//! Parses JSON so that it can be written back unchanged: keys keep their order, none is dropped, and no number changes.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::text::safe;

/// Parses `text`; the error is one line that is safe to print.
pub(super) fn parse(text: &[u8]) -> Result<Value, String> {
    let floats = Cell::new(false);
    let mut deserializer = serde_json::Deserializer::from_slice(text);
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
const FIELDS: [&str; 47] = [
    "access",
    "allow",
    "annotations",
    "args",
    "bounding",
    "capabilities",
    "cgroupsPath",
    "createContainer",
    "createRuntime",
    "cwd",
    "destination",
    "devices",
    "effective",
    "env",
    "fileMode",
    "gid",
    "gidMappings",
    "hooks",
    "linux",
    "major",
    "maskedPaths",
    "minor",
    "mounts",
    "namespaces",
    "ociVersion",
    "options",
    "path",
    "permitted",
    "poststart",
    "poststop",
    "prestart",
    "process",
    "readonly",
    "readonlyPaths",
    "resources",
    "root",
    "rootfsPropagation",
    "seccomp",
    "source",
    "startContainer",
    "timeout",
    "type",
    "uid",
    "uidMappings",
    "user",
    "value",
    "weight",
];

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
    FIELDS.into_iter().find(|field| same(field)).filter(|field| *field != key)
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

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
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
            let value = access.next_value_seed(within)?;
            entries.insert(key, value);
        }
        Ok(Value::Object(entries))
    }
}

/// The first number in `text` that would be written differently after parsing. `text` is valid JSON.
fn changed_number(text: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(text).ok()?;
    let is_part = |byte: u8| matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E');
    let (mut at, mut in_string) = (0, false);
    while let Some(&byte) = text.as_bytes().get(at) {
        match byte {
            b'\\' if in_string => at += 1,
            b'"' => in_string = !in_string,
            b'-' | b'0'..=b'9' if !in_string => {
                let rest = &text[at..];
                let number = &rest[..rest.bytes().position(|byte| !is_part(byte)).unwrap_or(rest.len())];
                if !survives(number) {
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

fn survives(number: &str) -> bool {
    serde_json::from_str::<serde_json::Number>(number).is_ok_and(|parsed| parsed.to_string() == number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_what_both_runtimes_take_it_for() {
        for (text, field) in [
            (r#"{"Env":[]}"#, "env"),
            (r#"{"linux":{"resources":{"devices":[{"allow":false,"Allow":true}]}}}"#, "allow"),
            (r#"{"proceſs":{}}"#, "process"),
            (r#"{"mounts":[{"DESTINATION":"/"}]}"#, "destination"),
            (r#"{"MaskedPaths":[]}"#, "maskedPaths"),
        ] {
            let error = parse(text.as_bytes()).unwrap_err();
            assert!(error.contains(&format!("for `{field}`, crun does not")), "{error}");
        }
        let users =
            r#"{"annotations":{"Env":"1","env":"2","PATH":"3"},"linux":{"sysctl":{"Type":"x"}},"Other":{}}"#;
        assert_eq!(parse(users.as_bytes()).unwrap().to_string(), users);
    }
}
