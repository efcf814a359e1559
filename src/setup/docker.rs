//! Docker's `daemon.json`: the runtime, the default runtime, CDI devices (docs.docker.com, "dockerd").
//!
//! JSON has no comments to mark our members with. So the file as it was found is kept beside it (`before`):
//! an undo asks it which objects and which `features.cdi` were there.

use super::{NAME, SetupError, Wish, json, quoted};

const RUNTIME: [&str; 2] = ["runtimes", NAME];
const DEFAULT: [&str; 1] = ["default-runtime"];
const CDI: [&str; 2] = ["features", "cdi"];

/// `daemon.json` that knows sublet; `found` is what it says now.
///
/// # Errors
/// It is no JSON object, or its `runtimes.sublet` is another one.
pub fn set_up(found: Option<&str>, wish: &Wish) -> Result<String, SetupError> {
    let mut text = found.unwrap_or("{\n}\n").to_owned();
    json::check(&text)?;
    // All that an undo looks at: what it could not read then is refused now.
    let (default, cdi) = (is_default(&text)?, has_cdi(&text)?);
    let runtime = format!("{{ \"path\": {} }}", quoted(&wish.runtime)?);
    match json::get(&text, &RUNTIME)? {
        Some(there) if !same(there, &runtime) => {
            return Err(SetupError::Taken { what: RUNTIME.join(".") });
        }
        Some(_) => {}
        None => text = json::set(&text, &RUNTIME, &runtime)?,
    }
    if wish.default && !default {
        text = json::set(&text, &DEFAULT, &format!("\"{NAME}\""))?;
    }
    if wish.cdi && !cdi {
        text = json::set(&text, &CDI, "true")?;
    }
    Ok(text)
}

/// `daemon.json` without sublet; `None`: no such file. `before` is what [`set_up`] found first, where that is
/// still known: an empty one where there was no file.
///
/// # Errors
/// It is no JSON object.
pub fn undo(found: Option<&str>, before: Option<&str>) -> Result<Option<String>, SetupError> {
    let Some(found) = found else { return Ok(None) };
    json::check(found)?;
    if let Some(before) = before.filter(|text| !text.is_empty()) {
        json::check(before)?;
    }
    let was = |path: &[&str]| match before {
        Some("") | None => Ok(None),
        Some(before) => json::get(before, path),
    };
    let mut text = json::remove(found, &RUNTIME)?;
    if is_default(&text)? {
        text = put_back(&text, &DEFAULT, was(&DEFAULT)?)?;
    }
    if before.is_some() && has_cdi(&text)? {
        text = put_back(&text, &CDI, was(&CDI)?)?;
    }
    for parent in [&RUNTIME[..1], &CDI[..1]] {
        if was(parent)?.is_none() && json::is_empty(&text, parent)? {
            text = json::remove(&text, parent)?;
        }
    }
    Ok(if before == Some("") && json::is_empty(&text, &[])? { None } else { Some(text) })
}

/// The program of the runtime sublet, where there is that runtime.
///
/// # Errors
/// It is no JSON object.
pub fn runtime(text: &str) -> Result<Option<String>, SetupError> {
    json::check(text)?;
    let path = json::get(text, &["runtimes", NAME, "path"])?;
    Ok(path.and_then(|path| serde_json::from_str(path).ok()))
}

/// The runtime of containers that name none, where one is set.
///
/// # Errors
/// A key that stands twice.
pub fn default_runtime(text: &str) -> Result<Option<String>, SetupError> {
    Ok(json::get(text, &DEFAULT)?.and_then(|value| serde_json::from_str(value).ok()))
}

/// Whether the daemon is to take CDI devices.
///
/// # Errors
/// A key that stands twice.
pub fn has_cdi(text: &str) -> Result<bool, SetupError> {
    Ok(json::get(text, &CDI)? == Some("true"))
}

fn is_default(text: &str) -> Result<bool, SetupError> {
    Ok(default_runtime(text)?.as_deref() == Some(NAME))
}

/// Whether sublet stands among the runtimes.
///
/// # Errors
/// It is no JSON object.
pub fn is_set_up(text: &str) -> Result<bool, SetupError> {
    json::check(text)?;
    Ok(json::get(text, &RUNTIME)?.is_some())
}

fn put_back(text: &str, path: &[&str], was: Option<&str>) -> Result<String, SetupError> {
    match was {
        Some(value) => json::set(text, path, value),
        None => json::remove(text, path),
    }
}

/// Whether two JSON texts say the same.
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
        Wish { default: true, cdi: true, ..wish() }
    }

    #[test]
    fn a_new_file_is_whole_and_goes_again() {
        let text = set_up(None, &wish()).unwrap();
        assert_eq!(text, "{\n  \"runtimes\": { \"sublet\": { \"path\": \"/usr/bin/sublet-runtime\" } }\n}\n");
        assert_eq!(undo(Some(&text), Some("")).unwrap(), None);
        let text = set_up(None, &all()).unwrap();
        assert_eq!(undo(Some(&text), Some("")).unwrap(), None);
        assert_eq!(undo(None, None).unwrap(), None);
    }

    #[test]
    fn what_is_there_stays_as_it_is() {
        let found = "{\n    \"default-runtime\" : \"nvidia\",\n    \"runtimes\": {\n        \
                     \"nvidia\": {\"args\":[],\"path\": \"nvidia-container-runtime\"}\n    }\n}";
        let text = set_up(Some(found), &all()).unwrap();
        let expected = "{\n    \"features\": { \"cdi\": true },\n    \"default-runtime\" : \"sublet\",\n    \
                        \"runtimes\": {\n        \"sublet\": { \"path\": \"/usr/bin/sublet-runtime\" },\n        \
                        \"nvidia\": {\"args\":[],\"path\": \"nvidia-container-runtime\"}\n    }\n}";
        assert_eq!(text, expected);
        assert_eq!(set_up(Some(&text), &all()).unwrap(), text, "a second time changes nothing");
        assert_eq!(undo(Some(&text), Some(found)).unwrap().as_deref(), Some(found));
    }

    #[test]
    fn later_edits_of_others_outlive_the_undo() {
        let before = r#"{"debug": false}"#;
        let text = set_up(Some(before), &all()).unwrap();
        let edited = text
            .replace("\"debug\": false", "\"debug\": true, \"log-level\": \"warn\"")
            .replace("{ \"sublet\"", "{ \"kata\": {\"path\": \"kata\"}, \"sublet\"");
        let left = undo(Some(&edited), Some(before)).unwrap().unwrap();
        assert_eq!(left, r#"{"runtimes": { "kata": {"path": "kata"} },"debug": true, "log-level": "warn"}"#);
    }

    #[test]
    fn without_the_file_of_before_only_what_names_us_goes() {
        let text = set_up(Some(r#"{"debug": true}"#), &all()).unwrap();
        let left = undo(Some(&text), None).unwrap().unwrap();
        assert_eq!(left, r#"{"features": { "cdi": true },"debug": true}"#);
    }

    #[test]
    fn another_sublet_is_refused() {
        let found = r#"{"runtimes": {"sublet": {"path": "/opt/sublet-runtime"}}}"#;
        assert_eq!(
            set_up(Some(found), &wish()).unwrap_err().to_string(),
            "runtimes.sublet is there already, and is not what this sublet would write: take it out, then try again"
        );
    }

    #[test]
    fn what_an_undo_could_not_read_is_refused_at_once() {
        for found in [r#"{"features": {}, "features": {}}"#, r#"{"features": 1}"#] {
            assert!(set_up(Some(found), &wish()).is_err(), "{found}");
        }
        let twice = r#"{"default-runtime": "runc", "default-runtime": "runc"}"#;
        assert_eq!(set_up(Some(twice), &wish()), Err(SetupError::Twice("default-runtime".into())));
    }

    /// A JSON object as people write it: any keys in any order, any white space.
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
        fn an_undo_gives_back_every_byte(found in file(), default: bool, cdi: bool) {
            let wish = Wish { default, cdi, ..wish() };
            let text = set_up(Some(&found), &wish).unwrap();
            prop_assert!(is_set_up(&text).unwrap());
            prop_assert!(serde_json::from_str::<serde_json::Value>(&text).is_ok(), "{text}");
            prop_assert_eq!(&set_up(Some(&text), &wish).unwrap(), &text);
            prop_assert_eq!(undo(Some(&text), Some(&found)).unwrap(), Some(found));
        }

        #[test]
        fn a_torn_file_is_refused(found in file(), cut: prop::sample::Index) {
            let upto = found.trim_end().len();
            let cut = (0..=cut.index(upto)).rev().find(|at| found.is_char_boundary(*at));
            prop_assert!(set_up(Some(&found[..cut.unwrap_or(0)]), &wish()).is_err());
        }
    }
}
