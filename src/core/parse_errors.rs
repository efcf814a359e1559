//! The messages of serde's parsers (TOML and JSON) in words for people, without names of Rust types.

use crate::text::safe;

/// `message` on one line. `key` is the key whose value it is about, if that is known.
pub fn plain(message: &str, key: Option<&str>) -> String {
    let (message, place) = split_place(message);
    if let Some((found, expected)) = split_mismatch(message) {
        let names = if place.is_empty() { ["a table", "an array"] } else { ["an object", "an array"] };
        let key = key.map_or_else(|| "a value".to_owned(), safe);
        return format!(
            "{key} must be {}, not {}{place}",
            describe_expected(expected, names),
            describe_found(found, names)
        );
    }
    // The lists of keys, which may be long, are sublet's own. Only the unknown word is foreign.
    let parts: Vec<_> = message.split('`').map(safe).collect();
    let mut text = parts.join("`");
    for (word, plain) in [
        ("unknown field", "unknown key"),
        ("missing field", "missing key"),
        ("duplicate field", "duplicate key"),
        ("unknown variant", "unknown value"),
    ] {
        if let Some(rest) = text.strip_prefix(word) {
            text = format!("{plain}{rest}");
        }
    }
    let of_value = text.starts_with('"') || text.starts_with("unknown value");
    match key.filter(|_| of_value) {
        Some(key) => format!("{}: {text}{place}", safe(key)),
        None => format!("{text}{place}"),
    }
}

/// `serde_json`'s suffix: ` at line 1 column 5`.
fn split_place(message: &str) -> (&str, &str) {
    let at = message.rfind(" at line ").filter(|at| {
        let numbers = message[at + " at line ".len()..].split_once(" column ");
        let number = |text: &str| text.parse::<u64>().is_ok();
        numbers.is_some_and(|(line, column)| number(line) && number(column))
    });
    message.split_at(at.unwrap_or(message.len()))
}

/// Splits `invalid type: map, expected a string` and the like into found and expected.
fn split_mismatch(message: &str) -> Option<(&str, &str)> {
    let kinds = ["invalid type: ", "invalid value: ", "invalid length "];
    kinds.iter().find_map(|kind| message.strip_prefix(kind))?.rsplit_once(", expected ")
}

fn describe_expected<'a>(expected: &'a str, [table, array]: [&'a str; 2]) -> &'a str {
    match expected {
        "a boolean" => "true or false",
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "u64" | "u128" | "usize" => "a whole number, 0 or more",
        "i8" | "i16" | "i32" | "i64" | "i128" | "isize" => "a whole number",
        "f32" | "f64" => "a number",
        "a sequence" => array,
        "a map" => table,
        "path string" => "a path",
        "string or table" => "a word",
        _ if expected.starts_with("struct ") || expected.contains("tagged enum ") => table,
        _ if expected.starts_with("enum ") => "a word",
        _ if expected.starts_with("a tuple") || expected.starts_with("tuple ") => array,
        _ => expected,
    }
}

/// The value itself if the parser has it, otherwise its kind.
fn describe_found(found: &str, [table, array]: [&str; 2]) -> String {
    let quoted = found.split_once('`').and_then(|(_, rest)| rest.strip_suffix('`'));
    match found {
        "map" => table.to_owned(),
        "sequence" => array.to_owned(),
        "unit value" => "null".to_owned(),
        _ if found.parse::<u64>().is_ok() => format!("{array} of {found}"),
        _ => safe(quoted.or(found.strip_prefix("string ")).unwrap_or(found)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_message_names_a_type_of_rust() {
        let key = Some("gpu.0.mig");
        for (message, expected) in [
            (
                "invalid type: string \"yes\", expected a boolean",
                "gpu.0.mig must be true or false, not \"yes\"",
            ),
            (
                "invalid value: integer `-1`, expected u32",
                "gpu.0.mig must be a whole number from 0 to 4294967295, not -1",
            ),
            (
                "invalid type: string \"a, expected b at line 1\", expected struct Instance",
                "gpu.0.mig must be a table, not \"a, expected b at line 1\"",
            ),
            ("invalid type: map, expected a string", "gpu.0.mig must be a string, not a table"),
            ("unknown variant `x`, expected `a` or `b`", "gpu.0.mig: unknown value `x`, expected `a` or `b`"),
            ("\"60\" must be 0", "gpu.0.mig: \"60\" must be 0"),
            ("missing field `match`", "missing key `match`"),
            ("unclosed table, expected `]`", "unclosed table, expected `]`"),
        ] {
            assert_eq!(plain(message, key), expected);
        }
        for (message, expected) in [
            (
                "invalid length 0, expected struct State with 5 elements at line 1 column 2",
                "a value must be an object, not an array of 0 at line 1 column 2",
            ),
            (
                "invalid type: null, expected a map at line 1 column 4",
                "a value must be an object, not null at line 1 column 4",
            ),
            ("missing field `v` at line 1 column 2", "missing key `v` at line 1 column 2"),
        ] {
            assert_eq!(plain(message, None), expected);
        }
    }
}
