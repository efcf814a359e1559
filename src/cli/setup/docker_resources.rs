//! `node-generic-resources` of Docker's `daemon.json`: what a node tells Swarm, as `"sublet-small=4"`.

use serde_json::Value;

use super::SetupError;
use super::json_file::JsonFile;

pub(super) const PATH: [&str; 1] = ["node-generic-resources"];

/// How sublet's resources begin; a share's name follows.
pub(crate) const RESOURCE: &str = "sublet-";

/// The resources in `text` (a daemon.json) that are sublet's.
///
/// # Errors
/// The file is no JSON object, or they are no list of strings.
pub(crate) fn advertised(text: &str) -> Result<Vec<String>, SetupError> {
    let mut all = read(JsonFile::parse(text)?.get(&PATH)?)?;
    all.retain(|resource| is_ours(resource));
    Ok(all)
}

/// The resources in a value; none if there is no value.
pub(super) fn read(value: Option<Value>) -> Result<Vec<String>, SetupError> {
    let Some(value) = value else { return Ok(Vec::new()) };
    serde_json::from_value(value).map_err(|_| SetupError::Shape {
        what: PATH.join("."),
        found: "something else",
        expected: "a list of strings",
    })
}

/// Those of `there` with `ours` in place of sublet's earlier ones; `None` if `there` is that already.
pub(super) fn with(there: &[String], ours: &[String]) -> Option<Vec<String>> {
    let mut wanted = others(there);
    wanted.extend(ours.iter().cloned());
    (wanted != there).then_some(wanted)
}

/// The value without sublet's resources; `None` if there is to be none. `was` is what there was before sublet.
pub(super) fn without(now: Option<Value>, was: Option<Value>) -> Result<Option<Value>, SetupError> {
    let left = others(&read(now)?);
    if left == others(&read(was.clone())?) {
        return Ok(was);
    }
    Ok((!left.is_empty()).then(|| left.into()))
}

fn others(all: &[String]) -> Vec<String> {
    all.iter().filter(|resource| !is_ours(resource)).cloned().collect()
}

fn is_ours(resource: &str) -> bool {
    resource.starts_with(RESOURCE)
}

#[cfg(test)]
mod tests {
    use super::super::docker::{set_up, undo};
    use super::super::{Wish, wish};
    use super::*;

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
