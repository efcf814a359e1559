//! Docker's `daemon.json`: the runtime, the default runtime, CDI devices (docs.docker.com, "dockerd").
//!
//! JSON has no comments that could mark sublet's members. So a setup records what it adds and what it replaces in a
//! file beside it (the record). An undo reverts that, and nothing that others have written since.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::docker_resources::{self as resources, PATH as RESOURCES};
use super::{NAME, SetupError, Wish, json_edit, quoted};

pub(crate) use super::docker_resources::{RESOURCE, advertised};

const RUNTIME: [&str; 2] = ["runtimes", NAME];
const DEFAULT: [&str; 1] = ["default-runtime"];
const CDI: [&str; 2] = ["features", "cdi"];

/// An empty configuration.
const EMPTY: &str = "{\n}\n";

/// What setups have added. Keys are joined with dots.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Record {
    /// Whether there was no file before.
    #[serde(default)]
    made_file: bool,
    /// The file's content before, if it was white space.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    blank: Option<String>,
    /// Objects that did not exist before.
    #[serde(default)]
    made: BTreeSet<String>,
    /// The values that sublet's replaced, as JSON text; `None` if there was none.
    #[serde(default)]
    replaced: BTreeMap<String, Option<String>>,
}

impl Record {
    fn parse(text: &str) -> Result<Self, SetupError> {
        serde_json::from_str(text).map_err(|error| SetupError::Altered {
            why: format!(
                "its record beside the file cannot be read ({error}): remove the record, and sublet's \
                 lines by hand"
            ),
        })
    }

    /// `text` with `value` at `path`; the previous value is recorded.
    fn put(&mut self, text: &str, path: &[&str], value: &str) -> Result<String, SetupError> {
        let was = json_edit::get(text, path)?.map(str::to_owned);
        let parents = &path[..path.len() - 1];
        if json_edit::get(text, parents)?.is_none() {
            self.made.insert(parents.join("."));
        }
        self.replaced.insert(path.join("."), was);
        json_edit::set(text, path, value)
    }

    /// [`Self::put`], after which an undo still finds what was there before sublet's first value.
    fn put_again(&mut self, text: &str, path: &[&str], value: &str) -> Result<String, SetupError> {
        let first = self.replaced.get(&path.join(".")).cloned();
        let text = self.put(text, path, value)?;
        self.replaced.extend(first.map(|first| (path.join("."), first)));
        Ok(text)
    }

    /// Whether a setup has set `path`.
    fn knows(&self, path: &[&str]) -> bool {
        self.replaced.contains_key(&path.join("."))
    }

    /// The previous value at `path`.
    fn was(&self, path: &[&str]) -> Option<&str> {
        self.replaced.get(&path.join("."))?.as_deref()
    }
}

/// `daemon.json` with sublet, and the record of the changes. `found` is its current text, `record` that of an earlier
/// setup, if any.
///
/// # Errors
/// The file is no JSON object, has another `runtimes.sublet`, or has the default runtime `sublet` without defining it.
pub fn set_up(
    found: Option<&str>,
    record: Option<&str>,
    wish: &Wish,
) -> Result<(String, String), SetupError> {
    let blank = found.filter(|found| is_blank(found));
    let mut text = found.map_or(EMPTY, object).to_owned();
    let mut record = match record.filter(|_| is_set_up(&text) == Ok(true)) {
        Some(record) => Record::parse(record)?,
        // An existing record belongs to a setup that was undone by hand.
        None => Record { made_file: found.is_none(), blank: blank.map(str::to_owned), ..Record::default() },
    };
    json_edit::check(&text)?;
    // Reads everything that an undo will read, so that a file that an undo could not read is refused now.
    let (default, cdi) = (is_default(&text)?, has_cdi(&text)?);
    let runtime = format!("{{ \"path\": {} }}", quoted(&wish.runtime)?);
    match json_edit::get(&text, &RUNTIME)? {
        Some(there) if !same(there, &runtime) => {
            return Err(SetupError::Taken { what: RUNTIME.join(".") });
        }
        Some(_) => {}
        // An undo removes a default named sublet, whoever set it.
        None if default => return Err(SetupError::Orphan),
        None => text = record.put(&text, &RUNTIME, &runtime)?,
    }
    if wish.default && !default {
        text = record.put(&text, &DEFAULT, &format!("\"{NAME}\""))?;
    }
    if wish.cdi && !cdi {
        text = record.put(&text, &CDI, "true")?;
    }
    let there = resources::read(json_edit::get(&text, &RESOURCES)?)?;
    if let Some(value) = wish.resources.as_ref().and_then(|ours| resources::with(&there, ours)) {
        text = record.put_again(&text, &RESOURCES, &value)?;
    }
    json_edit::check(&text)?;
    let record = serde_json::to_string(&record).unwrap_or_default();
    Ok((text, format!("{record}\n")))
}

/// `daemon.json` without sublet; `None` if there is no such file. `record` is the one from [`set_up`], if it still
/// exists. Without it only members that name sublet are removed.
///
/// # Errors
/// The file is no JSON object, or an added member is no longer what it was.
pub fn undo(found: Option<&str>, record: Option<&str>) -> Result<Option<String>, SetupError> {
    let Some(found) = found else { return Ok(None) };
    if is_blank(found) {
        return Ok(Some(found.to_owned()));
    }
    json_edit::check(found)?;
    let known = record.is_some();
    let record = record.map_or(Ok(Record::default()), Record::parse)?;
    let mut text = json_edit::remove(found, &RUNTIME)?;
    if is_default(&text)? {
        // Whoever set it: without the runtime dockerd would not start.
        text = put_back(&text, &DEFAULT, record.was(&DEFAULT))?;
    }
    if record.knows(&CDI) && has_cdi(&text)? {
        text = put_back(&text, &CDI, record.was(&CDI))?;
    }
    if !known || record.knows(&RESOURCES) {
        let left = resources::without(json_edit::get(&text, &RESOURCES)?, record.was(&RESOURCES))?;
        text = put_back(&text, &RESOURCES, left.as_deref())?;
    }
    for parent in [&RUNTIME[..1], &CDI[..1]] {
        let ours = !known || record.made.contains(&parent.join("."));
        if ours && json_edit::is_empty(&text, parent)? {
            text = json_edit::remove(&text, parent)?;
        }
    }
    json_edit::check(&text)?;
    if !json_edit::is_empty(&text, &[])? {
        return Ok(Some(text));
    }
    Ok(if record.made_file { None } else { record.blank.or(Some(text)) })
}

/// dockerd treats a file of white space as an empty configuration (seen with `dockerd --validate`, 26.1).
fn is_blank(text: &str) -> bool {
    text.trim().is_empty()
}

pub(super) fn object(text: &str) -> &str {
    if is_blank(text) { EMPTY } else { text }
}

/// The program of the runtime `sublet`, if that runtime exists.
///
/// # Errors
/// The file is no JSON object.
pub fn runtime(text: &str) -> Result<Option<String>, SetupError> {
    let text = object(text);
    json_edit::check(text)?;
    let path = json_edit::get(text, &["runtimes", NAME, "path"])?;
    Ok(path.and_then(|path| serde_json::from_str(path).ok()))
}

/// The runtime of containers that name none, if it is set.
///
/// # Errors
/// A key occurs twice.
pub(crate) fn default_runtime(text: &str) -> Result<Option<String>, SetupError> {
    Ok(json_edit::get(object(text), &DEFAULT)?.and_then(|value| serde_json::from_str(value).ok()))
}

/// Whether CDI devices are enabled.
///
/// # Errors
/// A key occurs twice.
pub(crate) fn has_cdi(text: &str) -> Result<bool, SetupError> {
    Ok(json_edit::get(object(text), &CDI)? == Some("true"))
}

fn is_default(text: &str) -> Result<bool, SetupError> {
    Ok(default_runtime(text)?.as_deref() == Some(NAME))
}

/// Whether sublet is among the runtimes.
///
/// # Errors
/// The file is no JSON object.
pub fn is_set_up(text: &str) -> Result<bool, SetupError> {
    let text = object(text);
    json_edit::check(text)?;
    Ok(json_edit::get(text, &RUNTIME)?.is_some())
}

fn put_back(text: &str, path: &[&str], was: Option<&str>) -> Result<String, SetupError> {
    match was {
        Some(value) => json_edit::set(text, path, value),
        None => json_edit::remove(text, path),
    }
}

/// Whether two JSON texts have the same value.
fn same(one: &str, other: &str) -> bool {
    let value = |text: &str| serde_json::from_str::<serde_json::Value>(text).ok();
    value(one).is_some() && value(one) == value(other)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::wish;
    use super::*;

    fn all() -> Wish {
        let resources = Some(vec!["sublet-small=4".to_owned()]);
        Wish { default: true, cdi: true, resources, ..wish() }
    }

    #[test]
    fn a_new_file_is_whole_and_goes_again() {
        let (text, record) = set_up(None, None, &wish()).unwrap();
        assert_eq!(text, "{\n  \"runtimes\": { \"sublet\": { \"path\": \"/usr/bin/sublet-runtime\" } }\n}\n");
        assert_eq!(undo(Some(&text), Some(&record)).unwrap(), None);
        let (text, record) = set_up(None, None, &all()).unwrap();
        assert_eq!(undo(Some(&text), Some(&record)).unwrap(), None);
        assert_eq!(undo(None, None).unwrap(), None);
    }

    #[test]
    fn a_file_of_white_space_is_one_that_says_nothing() {
        for found in ["", " \n", "\n\n\t"] {
            assert_eq!((is_set_up(found), runtime(found), has_cdi(found)), (Ok(false), Ok(None), Ok(false)));
            assert_eq!(undo(Some(found), None).unwrap().as_deref(), Some(found));
            let (text, record) = set_up(Some(found), None, &all()).unwrap();
            assert_eq!(text, set_up(None, None, &all()).unwrap().0);
            assert_eq!(undo(Some(&text), Some(&record)).unwrap().as_deref(), Some(found));
            let (again, record) = set_up(Some(&text), Some(&record), &all()).unwrap();
            assert_eq!(again, text);
            let edited = again.replacen('{', "{ \"debug\": true,", 1);
            assert_eq!(undo(Some(&edited), Some(&record)).unwrap().unwrap(), "{ \"debug\": true\n}\n");
        }
    }

    #[test]
    fn what_is_there_stays_as_it_is() {
        let found = "{\n    \"default-runtime\" : \"nvidia\",\n    \"runtimes\": {\n        \
                     \"nvidia\": {\"args\":[],\"path\": \"nvidia-container-runtime\"}\n    }\n}";
        let (text, record) = set_up(Some(found), None, &all()).unwrap();
        let expected = "{\n    \"node-generic-resources\": [\"sublet-small=4\"],\n    \
                        \"features\": { \"cdi\": true },\n    \"default-runtime\" : \"sublet\",\n    \
                        \"runtimes\": {\n        \"sublet\": { \"path\": \"/usr/bin/sublet-runtime\" },\n        \
                        \"nvidia\": {\"args\":[],\"path\": \"nvidia-container-runtime\"}\n    }\n}";
        assert_eq!(text, expected);
        let again = set_up(Some(&text), Some(&record), &all()).unwrap();
        assert_eq!(again, (text.clone(), record.clone()), "a second time changes nothing");
        assert_eq!(undo(Some(&text), Some(&record)).unwrap().as_deref(), Some(found));
    }

    #[test]
    fn later_edits_of_others_outlive_the_undo() {
        let before = r#"{"debug": false}"#;
        let (text, record) = set_up(Some(before), None, &all()).unwrap();
        let edited = text
            .replace("\"debug\": false", "\"debug\": true, \"log-level\": \"warn\"")
            .replace("{ \"sublet\"", "{ \"kata\": {\"path\": \"kata\"}, \"sublet\"");
        let left = undo(Some(&edited), Some(&record)).unwrap().unwrap();
        assert_eq!(left, r#"{"runtimes": { "kata": {"path": "kata"} },"debug": true, "log-level": "warn"}"#);
    }

    #[test]
    fn an_undo_removes_only_what_setups_added() {
        let before = r#"{"debug": true}"#;
        let (text, record) = set_up(Some(before), None, &wish()).unwrap();
        let theirs = text.replace("\"debug\"", "\"features\": {\"cdi\": true}, \"debug\"");
        let left = undo(Some(&theirs), Some(&record)).unwrap().unwrap();
        assert_eq!(left, r#"{"features": {"cdi": true}, "debug": true}"#);
        let kata = text.replace("\"debug\"", "\"default-runtime\": \"kata\", \"debug\"");
        let (text, record) = set_up(Some(&kata), Some(&record), &all()).unwrap();
        let left = undo(Some(&text), Some(&record)).unwrap().unwrap();
        assert_eq!(left, r#"{"default-runtime": "kata", "debug": true}"#);
        let emptied = text.replace("\"debug\": true", "\"default-runtime\": \"x\", \"debug\": true");
        assert!(undo(Some(&emptied), Some(&record)).unwrap_err().to_string().contains("occurs twice"));
        assert!(undo(Some(&text), Some(before)).is_ok() && undo(Some(&text), Some("{")).is_err());
    }

    #[test]
    fn a_record_of_a_setup_that_was_undone_by_hand_says_nothing() {
        let (_, old) = set_up(None, None, &all()).unwrap();
        let found = r#"{"default-runtime": "kata"}"#;
        let (text, record) = set_up(Some(found), Some(&old), &all()).unwrap();
        assert_eq!(undo(Some(&text), Some(&record)).unwrap().as_deref(), Some(found));
    }

    #[test]
    fn without_the_record_only_members_that_name_sublet_are_removed() {
        let (text, _) = set_up(Some(r#"{"debug": true}"#), None, &all()).unwrap();
        let left = undo(Some(&text), None).unwrap().unwrap();
        assert_eq!(left, r#"{"features": { "cdi": true },"debug": true}"#);
    }

    #[test]
    fn another_sublet_is_refused() {
        let found = r#"{"runtimes": {"sublet": {"path": "/opt/sublet-runtime"}}}"#;
        assert_eq!(
            set_up(Some(found), None, &wish()).unwrap_err().to_string(),
            "runtimes.sublet already exists and differs from what sublet writes: remove it, then try again"
        );
    }

    #[test]
    fn a_default_without_its_runtime_is_refused() {
        let found = r#"{ "default-runtime": "sublet", "features": { "cdi": true } }"#;
        assert_eq!(set_up(Some(found), None, &wish()), Err(SetupError::Orphan));
        let (text, record) = set_up(Some(r#"{"default-runtime": "kata"}"#), None, &all()).unwrap();
        let torn = json_edit::remove(&text, &["runtimes"]).unwrap();
        assert_eq!(set_up(Some(&torn), Some(&record), &all()), Err(SetupError::Orphan));
        let mended = undo(Some(&torn), Some(&record)).unwrap();
        assert_eq!(mended.as_deref(), Some(r#"{"default-runtime": "kata"}"#), "what the message says to do");
    }

    #[test]
    fn what_an_undo_could_not_read_is_refused_at_once() {
        for found in [r#"{"features": {}, "features": {}}"#, r#"{"features": 1}"#] {
            assert!(set_up(Some(found), None, &wish()).is_err(), "{found}");
        }
        let twice = r#"{"default-runtime": "runc", "default-runtime": "runc"}"#;
        assert_eq!(set_up(Some(twice), None, &wish()), Err(SetupError::Twice("default-runtime".into())));
    }

    /// A JSON object as people write it: keys in any order, any white space.
    fn file() -> impl Strategy<Value = String> {
        let space = || "[ \t\n]{0,4}";
        let scalar = prop_oneof![
            Just("true".to_owned()),
            Just("-1.50e3".to_owned()),
            Just("\"a \\\"}, \\\\\"".to_owned()),
            Just("[ {\"sublet\": 1}, [] ]".to_owned()),
            Just("\"gr\u{f6}\u{df}e\"".to_owned()),
        ];
        let member = move |name: String, value: BoxedStrategy<String>| {
            (space(), space(), space(), space(), value)
                .prop_map(move |(a, b, c, d, value)| format!("{a}\"{name}\"{b}:{c}{value}{d}"))
                .boxed()
        };
        let object = move |members: Vec<BoxedStrategy<String>>| {
            let count = members.len();
            (Just(members), 0..=count, space()).prop_flat_map(|(members, count, empty)| {
                Just(members).prop_shuffle().prop_flat_map(move |members| {
                    let empty = empty.clone();
                    members.into_iter().take(count).collect::<Vec<_>>().prop_map(move |members| {
                        if members.is_empty() {
                            format!("{{{empty}}}")
                        } else {
                            format!("{{{}}}", members.join(","))
                        }
                    })
                })
            })
        };
        let inner = |names: &[&str]| {
            let members = names.iter().map(|name| member((*name).to_owned(), scalar.clone().boxed()));
            object(members.collect()).boxed()
        };
        let features = object(vec![
            member("buildkit".into(), Just("true".to_owned()).boxed()),
            member("cdi".into(), prop_oneof![Just("true".to_owned()), Just("false".to_owned())].boxed()),
        ]);
        let outer = object(vec![
            member("debug".into(), scalar.clone().boxed()),
            member("default-runtime".into(), Just("\"nvidia\"".to_owned()).boxed()),
            member("runtimes".into(), inner(&["nvidia", "kata"])),
            member("features".into(), features.boxed()),
            member("log-opts".into(), inner(&["max-size", "\\\"runtimes\\\""])),
        ]);
        (space(), outer, space()).prop_map(|(before, object, after)| format!("{before}{object}{after}"))
    }

    proptest! {
        #[test]
        fn an_undo_gives_back_every_byte(found in file(), default: bool, cdi: bool, in_steps: bool) {
            let wish = Wish { default, cdi, ..wish() };
            let plain = Wish { default: false, cdi: false, ..wish.clone() };
            let first = in_steps.then(|| set_up(Some(&found), None, &plain).unwrap()).unzip();
            let now = first.0.as_deref().unwrap_or(&found);
            let (text, record) = set_up(Some(now), first.1.as_deref(), &wish).unwrap();
            prop_assert!(is_set_up(&text).unwrap());
            prop_assert!(serde_json::from_str::<serde_json::Value>(&text).is_ok(), "{text}");
            let again = set_up(Some(&text), Some(&record), &wish).unwrap();
            prop_assert_eq!(&again, &(text.clone(), record.clone()));
            prop_assert_eq!(undo(Some(&text), Some(&record)).unwrap(), Some(found));
        }

        #[test]
        fn a_torn_file_is_refused(found in file(), cut: prop::sample::Index) {
            let upto = found.trim_end().len();
            let cut = (0..=cut.index(upto)).rev().find(|at| found.is_char_boundary(*at));
            let torn = &found[..cut.unwrap_or(0)];
            prop_assert_eq!(set_up(Some(torn), None, &wish()).is_err(), !is_blank(torn));
        }
    }
}
