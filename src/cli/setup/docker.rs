//! Docker's `daemon.json`: the runtime, the default runtime, CDI devices (docs.docker.com, "dockerd").

use serde_json::{Value, json};

use super::engine_files::{Record, undo_by_record, with_record};
use super::json_file::JsonFile;
use super::{NAME, SetupError, Wish, plain};

const RUNTIME: [&str; 2] = ["runtimes", NAME];
const DEFAULT: [&str; 1] = ["default-runtime"];
const CDI: [&str; 2] = ["features", "cdi"];

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
    let after = put_in(found.unwrap_or_default(), wish)?;
    with_record(found, record, (is_set_up(found.unwrap_or_default())?, after), take_out)
}

/// `daemon.json` without sublet; `None` if there is no such file. `record` is the one from [`set_up`], if it still
/// exists. Without it only members that name sublet are removed.
///
/// # Errors
/// The file is no JSON object, or the record is none.
pub fn undo(found: Option<&str>, record: Option<&str>) -> Result<Option<String>, SetupError> {
    undo_by_record(found, record, take_out)
}

fn put_in(found: &str, wish: &Wish) -> Result<String, SetupError> {
    let file = JsonFile::parse(found)?;
    let runtime = json!({ "path": plain(&wish.runtime)? });
    // Reads everything that an undo will read, so that a file that an undo could not read is refused now.
    let (there, is_default) = (file.get(&RUNTIME)?, file.get(&DEFAULT)? == Some(NAME.into()));
    let (_, resources) = (file.get(&CDI)?, resources_in(file.get(&RESOURCES)?)?);
    match there {
        Some(there) if there != runtime => return Err(SetupError::Taken { what: RUNTIME.join(".") }),
        // An undo removes a default named sublet, whoever set it.
        None if is_default => return Err(SetupError::Orphan),
        _ => file.set(&RUNTIME, &runtime)?,
    }
    if wish.default {
        file.set(&DEFAULT, &NAME.into())?;
    }
    if wish.cdi {
        file.set(&CDI, &true.into())?;
    }
    if let Some(ours) = &wish.resources {
        let wanted = [others(&resources), ours.clone()].concat();
        if wanted != resources {
            file.set(&RESOURCES, &wanted.into())?;
        }
    }
    Ok(file.to_string())
}

fn take_out(found: &str, record: Option<&Record>) -> Result<Option<String>, SetupError> {
    // dockerd treats a file of white space as an empty configuration (seen with `dockerd --validate`, 26.1).
    if is_blank(found) {
        return Ok(Some(found.to_owned()));
    }
    let file = JsonFile::parse(found)?;
    let before = record.and_then(|record| record.before.as_deref());
    let before = JsonFile::parse(before.unwrap_or_default())?;
    let after = JsonFile::parse(record.map_or("", |record| &record.after))?;
    file.put_back(&RUNTIME, None)?;
    if file.get(&DEFAULT)? == Some(NAME.into()) {
        // Whoever set it: without the runtime dockerd would not start.
        file.put_back(&DEFAULT, before.get(&DEFAULT)?.as_ref())?;
    }
    let is_on = Some(Value::Bool(true));
    if after.get(&CDI)? == is_on && file.get(&CDI)? == is_on {
        file.put_back(&CDI, before.get(&CDI)?.as_ref())?;
    }
    if record.is_none() || after.get(&RESOURCES)? != before.get(&RESOURCES)? {
        let (left, was) = (others(&resources_in(file.get(&RESOURCES)?)?), before.get(&RESOURCES)?);
        let is_as_before = left == others(&resources_in(was.clone())?);
        let left = if is_as_before { was } else { (!left.is_empty()).then(|| left.into()) };
        file.put_back(&RESOURCES, left.as_ref())?;
    }
    for parent in [&RUNTIME[..1], &CDI[..1]] {
        let is_ours = before.get(parent)?.is_none() && (record.is_none() || after.get(parent)?.is_some());
        if is_ours && file.get(parent)? == Some(json!({})) {
            file.put_back(parent, None)?;
        }
    }
    match record {
        Some(Record { before, .. }) if file.is_empty() && before.as_deref().is_none_or(is_blank) => {
            Ok(before.clone())
        }
        _ => Ok(Some(file.to_string())),
    }
}

fn is_blank(text: &str) -> bool {
    text.trim().is_empty()
}

/// The program of the runtime `sublet`, if that runtime exists.
///
/// # Errors
/// The file is no JSON object.
pub fn runtime(text: &str) -> Result<Option<String>, SetupError> {
    string(text, &[RUNTIME[0], RUNTIME[1], "path"])
}

/// The runtime of containers that name none, if it is set.
///
/// # Errors
/// The file is no JSON object, or a key occurs twice.
pub(crate) fn default_runtime(text: &str) -> Result<Option<String>, SetupError> {
    string(text, &DEFAULT)
}

/// The string at `path`.
pub(super) fn string(text: &str, path: &[&str]) -> Result<Option<String>, SetupError> {
    let value = JsonFile::parse(text)?.get(path)?;
    Ok(value.as_ref().and_then(Value::as_str).map(str::to_owned))
}

/// Whether CDI devices are enabled.
///
/// # Errors
/// The file is no JSON object, or a key occurs twice.
pub(crate) fn has_cdi(text: &str) -> Result<bool, SetupError> {
    Ok(JsonFile::parse(text)?.get(&CDI)? == Some(Value::Bool(true)))
}

/// Whether sublet is among the runtimes.
///
/// # Errors
/// The file is no JSON object.
pub fn is_set_up(text: &str) -> Result<bool, SetupError> {
    Ok(JsonFile::parse(text)?.get(&RUNTIME)?.is_some())
}

// `node-generic-resources` of Docker's `daemon.json`: what a node tells Swarm, as `"sublet-small=4"`.

const RESOURCES: [&str; 1] = ["node-generic-resources"];

/// How sublet's resources begin; a share's name follows.
pub(crate) const RESOURCE: &str = "sublet-";

/// The resources in `text` (a daemon.json) that are sublet's.
///
/// # Errors
/// The file is no JSON object, or they are no list of strings.
pub(crate) fn advertised(text: &str) -> Result<Vec<String>, SetupError> {
    let mut all = resources_in(JsonFile::parse(text)?.get(&RESOURCES)?)?;
    all.retain(|resource| resource.starts_with(RESOURCE));
    Ok(all)
}

/// The resources in a value; none if there is no value.
fn resources_in(value: Option<Value>) -> Result<Vec<String>, SetupError> {
    let Some(value) = value else { return Ok(Vec::new()) };
    serde_json::from_value(value).map_err(|_| SetupError::Shape {
        what: RESOURCES.join("."),
        found: "something else",
        expected: "a list of strings",
    })
}

fn others(all: &[String]) -> Vec<String> {
    all.iter().filter(|resource| !resource.starts_with(RESOURCE)).cloned().collect()
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

    fn json(text: &str) -> Value {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_new_file_is_whole_and_goes_again() {
        let (text, record) = set_up(None, None, &wish()).unwrap();
        assert_eq!(
            text,
            "{\n  \"runtimes\": {\n    \"sublet\": {\n      \"path\": \"/usr/bin/sublet-runtime\"\n    }\n  }\n}\n"
        );
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
            assert_eq!(json(&undo(Some(&edited), Some(&record)).unwrap().unwrap()), json!({"debug": true}));
        }
    }

    #[test]
    fn what_is_there_stays_as_it_is() {
        let found = "{\n    \"default-runtime\" : \"nvidia\",\n    \"runtimes\": {\n        \
                     \"nvidia\": {\"args\":[],\"path\": \"nvidia-container-runtime\"}\n    }\n}";
        let (text, record) = set_up(Some(found), None, &all()).unwrap();
        let expected = "{\n    \"node-generic-resources\": [\"sublet-small=4\"],\n    \
                        \"features\": {\n        \"cdi\": true\n    },\n    \"default-runtime\" : \"sublet\",\n    \
                        \"runtimes\": {\n        \"sublet\": {\n            \"path\": \"/usr/bin/sublet-runtime\"\n        \
                        },\n        \"nvidia\": {\"args\":[],\"path\": \"nvidia-container-runtime\"}\n    }\n}";
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
            .replace("\"sublet\": {", "\"kata\": {\"path\": \"kata\"}, \"sublet\": {");
        let left = undo(Some(&edited), Some(&record)).unwrap().unwrap();
        assert!(left.contains(r#""kata": {"path": "kata"}"#), "{left}");
        assert!(left.contains(r#""debug": true, "log-level": "warn""#), "{left}");
        let expected = json!({"runtimes": {"kata": {"path": "kata"}}, "debug": true, "log-level": "warn"});
        assert_eq!(json(&left), expected);
    }

    #[test]
    fn an_undo_removes_only_what_setups_added() {
        let before = r#"{"debug": true}"#;
        let (text, record) = set_up(Some(before), None, &wish()).unwrap();
        let theirs = text.replace("\"debug\"", "\"features\": {\"cdi\": true}, \"debug\"");
        let left = undo(Some(&theirs), Some(&record)).unwrap().unwrap();
        assert_eq!(json(&left), json!({"features": {"cdi": true}, "debug": true}));
        let kata = text.replace("\"debug\"", "\"default-runtime\": \"kata\", \"debug\"");
        let (text, record) = set_up(Some(&kata), Some(&record), &all()).unwrap();
        let left = undo(Some(&text), Some(&record)).unwrap().unwrap();
        assert_eq!(json(&left), json!({"default-runtime": "kata", "debug": true}));
        let emptied = text.replace("\"debug\": true", "\"default-runtime\": \"x\", \"debug\": true");
        assert!(undo(Some(&emptied), Some(&record)).unwrap_err().to_string().contains("occurs twice"));
        for broken in ["{", before] {
            let why = undo(Some(&text), Some(broken)).unwrap_err().to_string();
            assert!(why.contains("its record beside the file cannot be read"), "{why}");
        }
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
        assert_eq!(json(&left), json!({"features": {"cdi": true}, "debug": true}));
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
        let torn = JsonFile::parse(&text).unwrap();
        torn.put_back(&["runtimes"], None).unwrap();
        let torn = torn.to_string();
        assert_eq!(set_up(Some(&torn), Some(&record), &all()), Err(SetupError::Orphan));
        let mended = undo(Some(&torn), Some(&record)).unwrap();
        assert_eq!(json(&mended.unwrap()), json!({"default-runtime": "kata"}), "what the message says to do");
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
            // Edited since, so that it is taken out piece by piece.
            let left = undo(Some(&format!("{text} ")), Some(&record)).unwrap().unwrap();
            prop_assert_eq!(json(&left), json(&found), "{}", left);
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

    fn counting(resources: &[&str]) -> Wish {
        Wish { resources: Some(resources.iter().map(|one| (*one).to_owned()).collect()), ..wish() }
    }

    #[test]
    fn others_resources_stay_and_a_new_count_replaces_the_old_one() {
        let found = "{\n  \"node-generic-resources\": [\n    \"fpga=2\"\n  ]\n}\n";
        let small = counting(&["sublet-small=4"]);
        let (text, record) = set_up(Some(found), None, &small).unwrap();
        assert!(text.contains(r#""node-generic-resources": ["fpga=2", "sublet-small=4"]"#), "{text}");
        assert_eq!(advertised(&text).unwrap(), ["sublet-small=4"]);
        assert_eq!(set_up(Some(&text), Some(&record), &small).unwrap(), (text.clone(), record.clone()));
        let (text, record) = set_up(Some(&text), Some(&record), &wish()).unwrap();
        assert_eq!(advertised(&text).unwrap(), ["sublet-small=4"], "a setup without --swarm leaves them");
        let (text, record) = set_up(Some(&text), Some(&record), &counting(&["sublet-tiny=8"])).unwrap();
        assert!(text.contains(r#"["fpga=2", "sublet-tiny=8"]"#), "{text}");
        assert_eq!(undo(Some(&text), Some(&record)).unwrap().as_deref(), Some(found));
        let edited = text.replace("fpga=2", "fpga=3");
        let left = undo(Some(&edited), Some(&record)).unwrap().unwrap();
        assert!(left.contains(r#""node-generic-resources": ["fpga=3"]"#), "{left}");
        let left = undo(Some(&text), None).unwrap().unwrap();
        assert!(left.contains(r#"["fpga=2"]"#), "without the record too: {left}");
    }

    #[test]
    fn a_list_of_sublets_alone_goes_whole() {
        let (text, record) = set_up(None, None, &counting(&["sublet-a=1", "sublet-b=2"])).unwrap();
        assert_eq!(undo(Some(&text), Some(&record)).unwrap(), None);
        assert_eq!(undo(Some(&text), None).unwrap().as_deref(), Some("{}\n"));
        let (none, _) = set_up(None, None, &counting(&[])).unwrap();
        assert!(!none.contains("node-generic"), "{none}");
    }

    #[test]
    fn a_list_that_dockerd_would_refuse_is_refused() {
        for value in ["\"fpga=2\"", "[1]", "{}"] {
            let found = format!("{{\"node-generic-resources\": {value}}}");
            let why = set_up(Some(&found), None, &counting(&["sublet-a=1"])).unwrap_err().to_string();
            assert!(why.starts_with("node-generic-resources is something else, not a list"), "{why}");
            assert!(advertised(&found).is_err(), "{found}");
        }
        assert_eq!(advertised(" \n").unwrap(), Vec::<String>::new());
    }
}
