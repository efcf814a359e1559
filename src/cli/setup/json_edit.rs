//! Adds, changes or removes one member of a JSON text; all other bytes stay the same.
//!
//! Parsing and printing would lose the author's layout. These functions need text that `serde_json` has found valid.

use std::ops::Range;

use super::SetupError;

/// A member of an object; its value as a byte range of the text.
struct Member {
    name: String,
    value: Range<usize>,
}

/// Checks that `text` is one JSON object.
///
/// # Errors
/// The text is incomplete, has comments, or is of another type.
pub(super) fn check(text: &str) -> Result<(), SetupError> {
    let unparsable = |why| SetupError::Unparsable { language: "JSON", why };
    if text.trim().is_empty() {
        return Err(unparsable("it is empty".to_owned()));
    }
    let value: serde_json::Value = serde_json::from_str(text).map_err(|error| {
        let hint = if has_comment(text) { "; JSON has no comments" } else { "" };
        unparsable(format!("{error}{hint}"))
    })?;
    if value.is_object() {
        return Ok(());
    }
    Err(SetupError::Shape { what: "the file".to_owned(), found: "no object", expected: "{ … }" })
}

fn has_comment(text: &str) -> bool {
    text.lines().any(|line| ["//", "#", "/*"].iter().any(|mark| line.trim_start().starts_with(mark)))
}

/// The value at `path`, as text.
///
/// # Errors
/// A name on the way occurs twice, or its value is not an object.
pub(super) fn get<'t>(text: &'t str, path: &[&str]) -> Result<Option<&'t str>, SetupError> {
    Ok(value_at(text, path)?.map(|range| &text[range]))
}

/// `text` with `value` at `path`; missing objects are created. A new member comes first in its object, so that a
/// removal takes everything up to the next member.
pub(super) fn set(text: &str, path: &[&str], value: &str) -> Result<String, SetupError> {
    if let Some(range) = value_at(text, path)? {
        return Ok(spliced(text, range, value));
    }
    let Some((name, parents)) = path.split_last() else { return Ok(text.to_owned()) };
    let Some(object) = value_at(text, parents)? else {
        return set(text, parents, &format!("{{ \"{name}\": {value} }}"));
    };
    let inside = object.start + 1;
    let space = &text[inside..skip_space(text, inside)];
    let (lead, comma) = match members(text, object.start).first() {
        Some(_) => (space.to_owned(), ","),
        None => (indented(space), ""),
    };
    Ok(spliced(text, inside..inside, &format!("{lead}\"{name}\": {value}{comma}")))
}

/// The text before the first member of an object that contained only `space`.
fn indented(space: &str) -> String {
    space.rfind('\n').map(|line| format!("\n{}  ", &space[line + 1..])).unwrap_or_default()
}

/// `text` without the member at `path`.
pub(super) fn remove(text: &str, path: &[&str]) -> Result<String, SetupError> {
    if value_at(text, path)?.is_none() {
        return Ok(text.to_owned());
    }
    let Some((name, parents)) = path.split_last() else { return Ok(text.to_owned()) };
    let Some(object) = value_at(text, parents)? else { return Ok(text.to_owned()) };
    let members = members(text, object.start);
    let Some(index) = members.iter().position(|member| member.name == *name) else {
        return Ok(text.to_owned());
    };
    let mut gone = object.start + 1..members[index].value.end;
    if index > 0 {
        gone.start = members[index - 1].value.end;
    } else {
        let next = skip_space(text, gone.end);
        gone.end = if text[next..].starts_with(',') { next + 1 } else { gone.end };
    }
    Ok(spliced(text, gone, ""))
}

/// Whether the value at `path` is an object without members.
pub(super) fn is_empty(text: &str, path: &[&str]) -> Result<bool, SetupError> {
    let Some(range) = value_at(text, path)? else { return Ok(false) };
    Ok(text[range.clone()].starts_with('{') && members(text, range.start).is_empty())
}

fn spliced(text: &str, range: Range<usize>, new: &str) -> String {
    [&text[..range.start], new, &text[range.end..]].concat()
}

fn value_at(text: &str, path: &[&str]) -> Result<Option<Range<usize>>, SetupError> {
    let start = skip_space(text, 0);
    let mut range = start..end_of(text, start);
    for (depth, name) in path.iter().enumerate() {
        if !text[range.clone()].starts_with('{') {
            let what = path[..depth].join(".");
            return Err(SetupError::Shape { what, found: "no object", expected: "{ … }" });
        }
        let mut named = members(text, range.start).into_iter().filter(|member| member.name == *name);
        let Some(member) = named.next() else { return Ok(None) };
        if named.next().is_some() {
            return Err(SetupError::Twice(path[..=depth].join(".")));
        }
        range = member.value;
    }
    Ok(Some(range))
}

/// The members of the object that begins at `start`.
fn members(text: &str, start: usize) -> Vec<Member> {
    let mut found = Vec::new();
    let mut at = skip_space(text, start + 1);
    while text[at..].starts_with('"') {
        let end = end_of(text, at);
        let name = serde_json::from_str(&text[at..end]).unwrap_or_default();
        // After the colon.
        let value = skip_space(text, skip_space(text, end) + 1);
        let value = value..end_of(text, value);
        let next = skip_space(text, value.end);
        found.push(Member { name, value });
        if !text[next..].starts_with(',') {
            break;
        }
        at = skip_space(text, next + 1);
    }
    found
}

fn skip_space(text: &str, from: usize) -> usize {
    let rest = text.get(from..).unwrap_or_default();
    from + (rest.len() - rest.trim_start_matches([' ', '\t', '\n', '\r']).len())
}

/// The end of the value that begins at `from`.
fn end_of(text: &str, from: usize) -> usize {
    let (mut depth, mut quoted, mut escaped) = (0_usize, false, false);
    for (offset, byte) in text.as_bytes()[from..].iter().enumerate() {
        let end = from + offset;
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' if quoted && depth == 0 => return end + 1,
            b'"' => quoted = !quoted,
            _ if quoted => {}
            b'{' | b'[' => depth += 1,
            b'}' | b']' if depth == 1 => return end + 1,
            b'}' | b']' if depth > 0 => depth -= 1,
            b',' | b'}' | b']' | b' ' | b'\t' | b'\n' | b'\r' if depth == 0 => return end,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_comes_first_in_the_layout_of_the_others() {
        let set = |text: &str| set(text, &["a", "b"], "1").unwrap();
        assert_eq!(set("{\n\t\"x\" : [ 1 ]\n}\n"), "{\n\t\"a\": { \"b\": 1 },\n\t\"x\" : [ 1 ]\n}\n");
        assert_eq!(set(r#"{"a":{"c":"}, \" {"}}"#), r#"{"a":{"b": 1,"c":"}, \" {"}}"#);
        assert_eq!(set("{}"), r#"{"a": { "b": 1 }}"#);
        assert_eq!(set("{\n}\n"), "{\n  \"a\": { \"b\": 1 }\n}\n");
        assert_eq!(set(r#"{ "a": { "b" : 2 } }"#), r#"{ "a": { "b" : 1 } }"#);
    }

    #[test]
    fn a_member_goes_wherever_it_stands() {
        let gone = |text: &str| remove(text, &["b"]).unwrap();
        assert_eq!(gone(r#"{ "b": 1 , "c": 2 }"#), r#"{ "c": 2 }"#);
        assert_eq!(gone(r#"{ "a": 1, "b": 1 }"#), r#"{ "a": 1 }"#);
        assert_eq!(gone(r#"{ "a": 1, "b": {"b": 2}, "c": 3 }"#), r#"{ "a": 1, "c": 3 }"#);
        assert_eq!(gone(r#"{ "b": 1 }"#), r"{ }");
        assert_eq!(gone(r#"{ "a": 1 }"#), r#"{ "a": 1 }"#);
        remove(r#"{ "a": ["b", "c"] }"#, &["a", "b"]).unwrap_err();
        remove(r#"{ "b": 1, "b": 2 }"#, &["b"]).unwrap_err();
    }

    #[test]
    fn what_is_no_object_is_not_edited() {
        let why = |text: &str| set(text, &["a", "b"], "1").unwrap_err().to_string();
        assert_eq!(
            why(r#"{"a": [1]}"#),
            "a is no object, not { … }: correct it, then try again; nothing was changed"
        );
        assert!(why(r#"{"a": {}, "a": {}}"#).starts_with("a occurs twice"));
        let why = |text: &str| check(text).unwrap_err().to_string();
        assert!(why(" \n").starts_with("it is not valid JSON (it is empty)"));
        assert!(why("{\"a\": 1,\n").contains("EOF while parsing"), "{}", why("{\"a\": 1,\n"));
        assert!(why("{\n  // nvidia\n}").contains("line 2 column 3; JSON has no comments"));
        assert!(why("[1]").starts_with("the file is no object"));
    }
}
