//! A JSON file of an engine's, of which single members are read and edited. What is not edited keeps its layout.

use jsonc_parser::ParseOptions;
use jsonc_parser::cst::{CstInputValue, CstObject, CstObjectProp, CstRootNode};
use serde_json::{Value, json};

use super::SetupError;

/// A file that says nothing.
const EMPTY: &str = "{\n}\n";

/// One JSON object.
pub(super) struct JsonFile {
    root: CstRootNode,
    object: CstObject,
}

impl JsonFile {
    /// That of `text`. White space says as little as an empty object.
    ///
    /// # Errors
    /// The text is incomplete, has comments, or is of another type.
    pub fn parse(text: &str) -> Result<Self, SetupError> {
        let text = if text.trim().is_empty() { EMPTY } else { text };
        let unparsable = |why| SetupError::Unparsable { language: "JSON", why };
        // The editor's parser takes more than engines do.
        serde_json::from_str::<Value>(text).map_err(|error| {
            let is_comment = |line: &str| ["//", "#", "/*"].iter().any(|mark| line.starts_with(mark));
            let has_comment = text.lines().any(|line| is_comment(line.trim_start()));
            unparsable(format!("{error}{}", if has_comment { "; JSON has no comments" } else { "" }))
        })?;
        let root = CstRootNode::parse(text, &ParseOptions::default());
        let root = root.map_err(|error| unparsable(error.to_string()))?;
        let object = root.object_value().ok_or_else(|| no_object("the file".to_owned()))?;
        Ok(Self { root, object })
    }

    /// The value at `path`.
    ///
    /// # Errors
    /// A name on the way occurs twice, or its value is not an object.
    pub fn get(&self, path: &[&str]) -> Result<Option<Value>, SetupError> {
        Ok(self.property(path)?.and_then(|property| property.to_serde_value()))
    }

    /// Puts `value` at `path`, with the objects that are missing. A new member comes first in its object.
    pub fn set(&self, path: &[&str], value: &Value) -> Result<(), SetupError> {
        let Some((name, parents)) = path.split_last() else { return Ok(()) };
        match (self.property(path)?, self.object_at(parents)?) {
            (Some(there), _) if there.to_serde_value().as_ref() == Some(value) => {}
            (Some(there), _) => there.set_value(input(value)),
            (None, Some(object)) => drop(object.insert(0, name, input(value))),
            (None, None) => self.set(parents, &json!({ *name: value }))?,
        }
        Ok(())
    }

    /// Puts `value` at `path`; `None`: takes away what is there.
    pub fn put_back(&self, path: &[&str], value: Option<&Value>) -> Result<(), SetupError> {
        match (value, self.property(path)?) {
            (Some(value), _) => self.set(path, value)?,
            (None, Some(property)) => property.remove(),
            (None, None) => {}
        }
        Ok(())
    }

    /// Whether it says nothing.
    pub fn is_empty(&self) -> bool {
        self.object.properties().is_empty()
    }

    fn object_at(&self, path: &[&str]) -> Result<Option<CstObject>, SetupError> {
        if path.is_empty() {
            return Ok(Some(self.object.clone()));
        }
        let property = self.property(path)?;
        property.map(|property| property.object_value().ok_or_else(|| no_object(path.join(".")))).transpose()
    }

    fn property(&self, path: &[&str]) -> Result<Option<CstObjectProp>, SetupError> {
        let Some((name, parents)) = path.split_last() else { return Ok(None) };
        let Some(object) = self.object_at(parents)? else { return Ok(None) };
        let is_named = |property: &CstObjectProp| property.decoded_name().as_deref() == Some(*name);
        let mut named = object.properties().into_iter().filter(is_named);
        let property = named.next();
        if named.next().is_some() { Err(SetupError::Twice(path.join("."))) } else { Ok(property) }
    }
}

impl std::fmt::Display for JsonFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.root.fmt(f)
    }
}

fn no_object(what: String) -> SetupError {
    SetupError::Shape { what, found: "no object", expected: "{ … }" }
}

fn input(value: &Value) -> CstInputValue {
    match value {
        Value::Null => CstInputValue::Null,
        Value::Bool(value) => CstInputValue::Bool(*value),
        Value::Number(number) => CstInputValue::Number(number.to_string()),
        Value::String(text) => CstInputValue::String(text.clone()),
        Value::Array(elements) => CstInputValue::Array(elements.iter().map(input).collect()),
        Value::Object(members) => {
            CstInputValue::Object(members.iter().map(|(name, value)| (name.clone(), input(value))).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edited(text: &str, edit: fn(&JsonFile) -> Result<(), SetupError>) -> String {
        let file = JsonFile::parse(text).unwrap();
        edit(&file).unwrap();
        file.to_string()
    }

    #[test]
    fn a_member_comes_first_in_the_layout_of_the_others() {
        let set = |text: &str| edited(text, |file| file.set(&["a", "b"], &json!(1)));
        assert_eq!(set("{\n\t\"x\" : [ 1 ]\n}\n"), "{\n\t\"a\": {\n\t\t\"b\": 1\n\t},\n\t\"x\" : [ 1 ]\n}\n");
        assert_eq!(set("{\n}\n"), "{\n  \"a\": {\n    \"b\": 1\n  }\n}\n");
        assert_eq!(set(" \n"), set("{\n}\n"));
        assert_eq!(set(r#"{ "a": { "b" : 2 } }"#), r#"{ "a": { "b" : 1 } }"#);
        assert_eq!(set(r#"{"a":{"b":1},"c":"}, \" {"}"#), r#"{"a":{"b":1},"c":"}, \" {"}"#);
    }

    #[test]
    fn a_member_goes_wherever_it_stands() {
        let gone = |text: &str| edited(text, |file| file.put_back(&["b"], None));
        assert_eq!(gone("{\n  \"b\": 1,\n  \"c\": 2\n}"), "{\n  \"c\": 2\n}");
        assert_eq!(gone(r#"{ "a": 1, "b": {"b": 2}, "c": 3 }"#), r#"{ "a": 1, "c": 3 }"#);
        assert_eq!(gone(r#"{ "b": 1 }"#), "{}");
        assert_eq!(gone(r#"{ "a": 1 }"#), r#"{ "a": 1 }"#);
    }

    #[test]
    fn what_is_no_object_is_not_edited() {
        let why =
            |text: &str| JsonFile::parse(text).unwrap().set(&["a", "b"], &json!(1)).unwrap_err().to_string();
        assert_eq!(
            why(r#"{"a": [1]}"#),
            "a is no object, not { … }: correct it, then try again; nothing was changed"
        );
        assert!(why(r#"{"a": {}, "a": {}}"#).starts_with("a occurs twice"));
        let why = |text: &str| JsonFile::parse(text).err().unwrap().to_string();
        assert!(why("{\"a\": 1,\n").contains("EOF while parsing"), "{}", why("{\"a\": 1,\n"));
        assert!(why("{\n  // nvidia\n}").contains("line 2 column 3; JSON has no comments"));
        assert!(why("[1]").starts_with("the file is no object"));
    }
}
