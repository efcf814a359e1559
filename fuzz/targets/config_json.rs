//! A bundle's config.json: read, searched for contradictions, edited for both kinds of container.
#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value};
use sublet_core::config::{Config, Driver};
use sublet_core::grant::Grant;
use sublet_core::oci::{JsonFile, annotations, conflict, edit_within};
use sublet_fuzz::{is_safe, ok};
use sublet_runtime::hook::fuzzing::hooks;

static CONFIG: LazyLock<Config> = LazyLock::new(|| {
    let driver = Driver { root: PathBuf::from("/nonexistent"), ..Driver::default() };
    Config { driver, ..Config::default() }
});

static GRANT: LazyLock<Grant> =
    LazyLock::new(|| serde_json::from_str(include_str!("grant.json")).expect("a grant"));

fuzz_target!(|text: &[u8]| {
    let file = JsonFile { path: PathBuf::from("/b/config.json"), text: text.to_vec() };
    let Some(spec) = ok(file.parse()) else { return };
    let plain: Value = serde_json::from_slice(text).expect("it is JSON");
    assert_eq!(plain, spec);
    let written = serde_json::to_vec(&spec).expect("it can be written");
    assert_eq!(read(&written), spec);
    if annotations(&spec).is_ok_and(|all| sublet_core::request::has_sublet_annotations(&all)) {
        assert!(file.mentions_sublet(), "a share that would be overlooked");
    }
    ok(conflict(&spec, &[], &CONFIG));
    ok(hooks(&mut spec.clone()));
    for nested in [false, true] {
        let mut edited = spec.clone();
        if let Err(error) = edit_within(&mut edited, &GRANT, nested) {
            is_safe(error);
            continue;
        }
        assert_eq!(read(&serde_json::to_vec(&edited).expect("it can be written")), edited);
        stays("", &spec, &edited);
        environment(&edited);
    }
});

fn read(text: &[u8]) -> Value {
    JsonFile { path: PathBuf::from("/b/config.json"), text: text.to_vec() }.parse().expect("what we wrote")
}

/// Checks that `after` contains all of `before` in its order, followed by sublet's entries.
fn stays(path: &str, before: &Value, after: &Value) {
    match (before, after) {
        (Value::Null, _) => {}
        (Value::Object(before), Value::Object(after)) => members(path, before, after),
        (Value::Array(before), Value::Array(after)) => match path {
            "/process/env" => {
                assert_eq!(others(before), others(&after[..others_end(before, after)]), "{path}");
            }
            // What denies the rest comes first, where the spec had no such rule.
            "/linux/resources/devices" => {
                let denied = usize::from(after.first() != before.first() && is_deny(&after[0]));
                assert_eq!(before[..], after[denied..][..before.len()], "{path}");
            }
            "/mounts" | "/linux/maskedPaths" => {
                assert_eq!(before[..], after[..before.len()], "{path}");
            }
            // In a user namespace those that we mount instead are taken out.
            "/linux/devices" => {
                let ours = |entry: &&Value| {
                    !GRANT
                        .nodes
                        .iter()
                        .any(|node| entry["path"].as_str().map(std::path::Path::new) == Some(&node.node.path))
                };
                assert!(before.iter().filter(ours).eq(after.iter().filter(ours)), "{path}");
            }
            _ => assert_eq!(before, after, "{path}"),
        },
        _ => assert_eq!(before, after, "{path}"),
    }
}

fn is_deny(rule: &Value) -> bool {
    *rule == serde_json::json!({"allow": false, "access": "rwm"})
}

fn members(path: &str, before: &Map<String, Value>, after: &Map<String, Value>) {
    let kept: Vec<_> = after.keys().take(before.len()).collect();
    assert!(before.keys().eq(kept), "{path}");
    for (name, value) in before {
        let ours = path == "/annotations" && matches!(name.as_str(), "sublet.lease" | "sublet.lease.record");
        let edited = matches!(path, "" | "/process" | "/linux" | "/linux/resources" | "/annotations");
        match edited {
            true if !ours => stays(&format!("{path}/{name}"), value, &after[name]),
            true => {}
            false => assert_eq!(value, &after[name], "{path}/{name}"),
        }
    }
}

/// Whether the environment's `entry` is none that the grant sets or takes out.
fn is_other(entry: &Value) -> bool {
    let text = entry.as_str().expect("a string");
    let name = text.split_once('=').map_or(text, |(name, _)| name);
    !GRANT.env.set.iter().any(|(ours, _)| ours == name)
        && !GRANT.env.remove_prefixes.iter().any(|prefix| name.starts_with(prefix.as_str()))
}

fn others(env: &[Value]) -> Vec<&Value> {
    env.iter().filter(|entry| is_other(entry)).collect()
}

/// Defaults that were absent stand behind everything of the image's.
fn others_end(before: &[Value], after: &[Value]) -> usize {
    let count = others(before).len();
    let places: Vec<_> =
        after.iter().enumerate().filter(|(_, entry)| is_other(entry)).map(|(at, _)| at).collect();
    places.get(count).copied().unwrap_or(after.len())
}

/// Demands that what the grant sets stands there once, and what it takes out not at all.
fn environment(spec: &Value) {
    let env = spec["process"]["env"].as_array().expect("an environment");
    for (name, value) in &GRANT.env.set {
        let begin = format!("{name}=");
        let found: Vec<_> = env
            .iter()
            .filter_map(Value::as_str)
            .filter(|entry| entry.starts_with(&begin) || entry == name)
            .collect();
        assert_eq!(found, [format!("{begin}{value}")]);
    }
}
