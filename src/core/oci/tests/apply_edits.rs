//! Edits to specs, against literals and against arbitrary JSON.

use std::path::PathBuf;

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::grant::{Environment, Grant, GrantedNode, Mount};
use crate::inventory::Node;
use crate::oci::apply_edits::edit_within;
use crate::oci::{JsonFile, SpecError, annotations, edit_environment, environment_value};

fn pair(name: &str, value: &str) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

fn grant() -> Grant {
    Grant {
        lease: "0123456789abcdef".to_owned(),
        record: r#"{"id":"0123456789abcdef"}"#.to_owned(),
        no_checkpoint: "/run/sublet/no-checkpoint.conf".into(),
        nodes: vec![GrantedNode {
            node: Node { path: "/dev/nvidia0".into(), major: 195, minor: 0 },
            source: "/sim/dev/nvidia0".into(),
        }],
        mounts: vec![Mount {
            source: "/host/libcuda.so.580".into(),
            destination: "/usr/lib/libcuda.so.1".into(),
        }],
        env: Environment {
            set: vec![pair("CUDA_VISIBLE_DEVICES", "0"), pair("CUDA_MPS_PIPE_DIRECTORY", "/run/sublet/mps")],
            default: vec![pair("TRITON_LIBCUDA_PATH", "/usr/lib")],
            remove_prefixes: vec!["CUDA_MPS_".to_owned()],
        },
        masked_paths: vec![PathBuf::from("/proc/driver/nvidia/gpus/0000:86:00.0")],
        warnings: Vec::new(),
    }
}

fn edited(spec: &Value, nested: bool) -> Value {
    let mut spec = spec.clone();
    edit_within(&mut spec, &grant(), nested).unwrap();
    spec
}

#[test]
fn of_two_names_that_jax_refuses_together_one_is_set() {
    let names = ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"];
    let env = |own: &[&str], default: &[&str]| {
        let default = default.iter().map(|name| pair(name, "0.1")).collect();
        let mut process = json!({ "env": own });
        edit_environment(&mut process, &Environment { default, ..Environment::default() }).unwrap();
        process["env"].to_string()
    };
    assert_eq!(env(&[], &names), r#"["XLA_CLIENT_MEM_FRACTION=0.1"]"#);
    assert_eq!(env(&[], &names[1..]), r#"["XLA_PYTHON_CLIENT_MEM_FRACTION=0.1"]"#);
    for own in
        ["XLA_CLIENT_MEM_FRACTION=0.9", "XLA_PYTHON_CLIENT_MEM_FRACTION=0.9", "XLA_CLIENT_MEM_FRACTION="]
    {
        assert_eq!(env(&[own], &names), json!([own]).to_string());
    }
}

#[test]
fn everything_is_made_in_a_bare_spec() {
    // As text: the order of fields counts too.
    assert_eq!(
        edited(&json!({"process": {}}), false).to_string(),
        concat!(
            r#"{"process":{"env":["CUDA_VISIBLE_DEVICES=0","CUDA_MPS_PIPE_DIRECTORY=/run/sublet/mps","#,
            r#""TRITON_LIBCUDA_PATH=/usr/lib"]},"#,
            r#""linux":{"devices":[{"path":"/dev/nvidia0","type":"c","major":195,"minor":0,"fileMode":438,"#,
            r#""uid":0,"gid":0}],"#,
            r#""resources":{"devices":[{"allow":false,"access":"rwm"},{"allow":true,"type":"c","major":195,"minor":0,"access":"rw"}]},"#,
            r#""maskedPaths":["/proc/driver/nvidia/gpus/0000:86:00.0"]},"#,
            r#""mounts":[{"destination":"/usr/lib/libcuda.so.1","type":"bind","source":"/host/libcuda.so.580","#,
            r#""options":["bind","ro","nosuid","nodev","rprivate"]}],"#,
            r#""annotations":{"sublet.lease":"0123456789abcdef","#,
            r#""sublet.lease.record":"{\"id\":\"0123456789abcdef\"}","#,
            r#""sublet.lease.edits":"{\"mounts\":[\"/usr/lib/libcuda.so.1\"],"#,
            r#"\"nodes\":[{\"path\":\"/dev/nvidia0\",\"major\":195,\"minor\":0}],"#,
            r#"\"masks\":[\"/proc/driver/nvidia/gpus/0000:86:00.0\"],"#,
            r#"\"defaults\":[[\"TRITON_LIBCUDA_PATH\",\"/usr/lib\"]]}","#,
            r#""org.criu.config":"/run/sublet/no-checkpoint.conf"}}"#,
        )
    );
}

#[test]
fn ours_come_after_the_engines() {
    let spec = json!({
        "process": {"env": []},
        "mounts": [{"destination": "/proc"}],
        "annotations": {"sublet.sm": "25"},
        "linux": {
            "devices": [{"path": "/dev/fuse"}],
            "resources": {"pids": {}, "devices": [{"allow": false, "access": "rwm"}]},
            "maskedPaths": ["/proc/kcore"]
        }
    });
    let spec = edited(&spec, false);
    assert_eq!(spec["mounts"][0]["destination"], "/proc");
    assert_eq!(spec["mounts"][1]["destination"], "/usr/lib/libcuda.so.1");
    assert_eq!(spec["linux"]["devices"][1]["path"], "/dev/nvidia0");
    assert_eq!(spec["linux"]["resources"]["devices"][0], json!({"allow": false, "access": "rwm"}));
    assert_eq!(spec["linux"]["resources"]["devices"][1]["major"], 195);
    assert_eq!(spec["linux"]["resources"]["pids"], json!({}));
    assert_eq!(spec["linux"]["maskedPaths"][0], "/proc/kcore");
    assert_eq!(spec["annotations"]["sublet.sm"], "25");
}

#[test]
fn user_namespaces_get_the_real_node_and_a_rule() {
    let spec = json!({"process": {}, "linux": {"namespaces": [{"type": "mount"}, {"type": "user"}]}});
    let spec = edited(&spec, false);
    assert_eq!(
        spec["mounts"][0],
        json!({"destination": "/dev/nvidia0", "type": "bind", "source": "/sim/dev/nvidia0",
               "options": ["bind", "nosuid", "noexec", "rprivate"]})
    );
    assert_eq!(spec["linux"].get("devices"), None);
    assert_eq!(spec["linux"]["resources"]["devices"][1]["access"], "rw");
}

#[test]
fn inside_a_user_namespace_rules_go_only_where_there_are_resources() {
    let bare = edited(&json!({"process": {}}), true);
    assert_eq!(bare["mounts"][0]["source"], "/sim/dev/nvidia0");
    assert_eq!(bare["linux"], json!({"maskedPaths": ["/proc/driver/nvidia/gpus/0000:86:00.0"]}));
    let limited = edited(&json!({"process": {}, "linux": {"resources": {}}}), true);
    assert_eq!(limited["linux"]["resources"]["devices"][0]["minor"], 0);
}

#[test]
fn a_device_that_no_rule_names_is_denied_first() {
    let deny = json!({"allow": false, "access": "rwm"});
    let rules = |rules: Value, nested| {
        let spec = json!({"process": {}, "linux": {"resources": {"devices": rules}}});
        edited(&spec, nested)["linux"]["resources"]["devices"].clone()
    };
    for lacking in [
        json!(null),
        json!([]),
        json!([{"allow": false, "type": "b"}]),
        json!([{"allow": true, "type": "c", "major": 1}]),
    ] {
        let before = lacking.as_array().map_or(0, Vec::len);
        let written = rules(lacking.clone(), false);
        assert_eq!(written[0], deny, "{lacking}");
        assert_eq!(written.as_array().unwrap().len(), before + 2, "{lacking}");
        assert_eq!(rules(lacking, true).as_array().unwrap().len(), before + 1, "rootless: no device cgroup");
    }
    // `--privileged`, where the configuration allows it, stays that.
    let all = json!([{"allow": true, "access": "rwm"}]);
    assert_eq!(rules(all.clone(), false)[0], all[0]);
}

#[test]
fn a_node_that_is_there_is_not_made_twice() {
    let spec = json!({"process": {}, "linux": {"devices": [{"path": "/dev/nvidia0", "x": 1}]}});
    assert_eq!(edited(&spec, false)["linux"]["devices"], json!([{"path": "/dev/nvidia0", "x": 1}]));
}

#[test]
fn null_counts_as_absent() {
    let spec = json!({"process": {"env": null}, "mounts": null, "annotations": null, "linux": null});
    assert_eq!(edited(&spec, false)["mounts"].as_array().unwrap().len(), 1);
    assert_eq!(annotations(&spec).unwrap().len(), 0);
}

fn env_of(entries: &Value) -> Value {
    let mut process = json!({"env": entries, "cwd": "/"});
    edit_environment(&mut process, &grant().env).unwrap();
    assert_eq!(process["cwd"], "/");
    process["env"].clone()
}

#[test]
fn each_of_our_names_stands_once_in_the_first_ones_place() {
    let entries = json!([
        "A=1",
        "CUDA_VISIBLE_DEVICES=3",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=garbage",
        "B=2",
        "CUDA_VISIBLE_DEVICES=4",
        "CUDA_VISIBLE_DEVICES_NOT=5",
        "CUDA_MPS_X",
        "TRITON_LIBCUDA_PATH="
    ]);
    let expected = json!([
        "A=1",
        "CUDA_VISIBLE_DEVICES=0",
        "B=2",
        "CUDA_VISIBLE_DEVICES_NOT=5",
        "TRITON_LIBCUDA_PATH=",
        "CUDA_MPS_PIPE_DIRECTORY=/run/sublet/mps"
    ]);
    assert_eq!(env_of(&entries), expected);
}

#[test]
fn the_same_edit_twice_changes_nothing_more() {
    let once = env_of(&json!(["A=1=2", "A=3"]));
    assert_eq!(once[0], "A=1=2");
    assert_eq!(env_of(&once), once);
}

#[test]
fn values_are_read_as_the_container_would() {
    let spec = json!({"process": {"env": ["A=1", "B=x=y", "A=2", "C", 5]}});
    assert_eq!(environment_value(&spec, "A").as_deref(), Some("2"));
    assert_eq!(environment_value(&spec, "B").as_deref(), Some("x=y"));
    assert_eq!(environment_value(&spec, "C"), None);
}

#[test]
fn wrong_shapes_are_named() {
    let cases = [
        (json!([]), "the spec"),
        (json!({"process": 1}), "process"),
        (json!({"process": {"env": {}}}), "process.env"),
        (json!({"process": {"env": ["A=1", 2]}}), "process.env[]"),
        (json!({"process": {}, "linux": "x"}), "linux"),
        (json!({"process": {}, "linux": {"devices": {}}}), "linux.devices"),
        (json!({"process": {}, "linux": {"resources": []}}), "linux.resources"),
        (json!({"process": {}, "linux": {"resources": {"devices": 1}}}), "linux.resources.devices"),
        (json!({"process": {}, "linux": {"maskedPaths": "x"}}), "linux.maskedPaths"),
        (json!({"process": {}, "mounts": {}}), "mounts"),
        (json!({"process": {}, "annotations": []}), "annotations"),
    ];
    for (mut spec, expected) in cases {
        match edit_within(&mut spec, &grant(), false) {
            Err(SpecError::Type { field, .. }) => assert_eq!(field, expected),
            other => panic!("{expected}: {other:?}"),
        }
    }
    let error = edit_within(&mut json!({}), &grant(), false).unwrap_err();
    assert!(matches!(error, SpecError::NoProcess));
    assert!(annotations(&json!({"annotations": {"a": 1}})).is_err());
    assert!(annotations(&json!({"annotations": 1})).is_err());
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((".{0,6}", inner), 0..4)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

/// Unknown fields, in any order around those that we edit.
fn object_with(known: Vec<(&'static str, Option<Value>)>) -> impl Strategy<Value = Value> {
    let unknown = prop::collection::vec(("x[a-zA-Z.]{0,6}", any_json()), 0..4);
    unknown.prop_flat_map(move |unknown| {
        let known = known.clone().into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
        let fields: Vec<_> = unknown.into_iter().chain(known).collect();
        Just(fields).prop_shuffle().prop_map(|fields| Value::Object(fields.into_iter().collect()))
    })
}

fn maybe_list(entry: impl Strategy<Value = Value> + 'static) -> impl Strategy<Value = Option<Value>> {
    prop::option::of(prop::collection::vec(entry, 0..4).prop_map(Value::from))
}

/// A spec with every field of ours present or not, unknown ones at every level.
fn any_spec() -> impl Strategy<Value = Value> {
    let env = maybe_list("[a-z]{0,3}=.{0,5}".prop_map(Value::from));
    let process = env.prop_flat_map(|env| object_with(vec![("env", env)]));
    let resources = maybe_list(any_json()).prop_flat_map(|rules| object_with(vec![("devices", rules)]));
    let linux = (maybe_list(any_json()), maybe_list(any_json()), prop::option::of(resources)).prop_flat_map(
        |(devices, masked, resources)| {
            object_with(vec![("devices", devices), ("maskedPaths", masked), ("resources", resources)])
        },
    );
    let annotations = object_with(vec![]);
    let parts = (process, maybe_list(any_json()), prop::option::of(linux), prop::option::of(annotations));
    parts.prop_flat_map(|(process, mounts, linux, annotations)| {
        let known = [("process", Some(process)), ("mounts", mounts), ("linux", linux)];
        object_with(known.into_iter().chain([("annotations", annotations)]).collect())
    })
}

/// Takes `count` entries off the end of `object[key]`, and the key itself if it was not there before.
fn take_back(object: &mut Map<String, Value>, before: Option<&Value>, key: &str, count: usize) {
    let entries = object[key].as_array_mut().unwrap();
    entries.truncate(entries.len() - count);
    drop_new(object, before, key);
}

fn drop_new(object: &mut Map<String, Value>, before: Option<&Value>, key: &str) {
    if before.and_then(|before| before.get(key)).is_none() {
        assert!(matches!(object.shift_remove(key), Some(value) if value == json!([]) || value == json!({})));
    }
}

/// Exactly the edits of [`edited`], taken away again by hand.
fn undo(spec: &mut Value, before: &Value) {
    let spec = spec.as_object_mut().unwrap();
    take_back(spec["process"].as_object_mut().unwrap(), before.get("process"), "env", 3);
    take_back(spec, Some(before), "mounts", 1);
    let old = before.get("linux");
    let linux = spec["linux"].as_object_mut().unwrap();
    take_back(linux, old, "devices", 1);
    take_back(linux, old, "maskedPaths", 1);
    let resources = linux["resources"].as_object_mut().unwrap();
    let rules = resources["devices"].as_array_mut().unwrap();
    if !before
        .pointer("/linux/resources/devices")
        .and_then(Value::as_array)
        .is_some_and(|all| all.first() == rules.first())
    {
        assert_eq!(rules.remove(0), json!({"allow": false, "access": "rwm"}));
    }
    take_back(resources, old.and_then(|old| old.get("resources")), "devices", 1);
    drop_new(linux, old, "resources");
    drop_new(spec, Some(before), "linux");
    let annotations = spec["annotations"].as_object_mut().unwrap();
    annotations.shift_remove("sublet.lease").unwrap();
    annotations.shift_remove("sublet.lease.record").unwrap();
    annotations.shift_remove("sublet.lease.edits").unwrap();
    annotations.shift_remove("org.criu.config").unwrap();
    drop_new(spec, Some(before), "annotations");
}

/// With its environment in order: variables that were replaced in their place come last the second time.
fn sorted(spec: &Value) -> Value {
    let mut spec = spec.clone();
    let env = spec.pointer_mut("/process/env").and_then(Value::as_array_mut).unwrap();
    env.sort_by_key(ToString::to_string);
    spec
}

#[test]
fn nothing_of_the_engines_is_taken_for_ours() {
    let mut spec = json!({
        "process": {"env": ["PATH=/bin", "CUDA_VISIBLE_DEVICES=0", "TRITON_LIBCUDA_PATH=/mine"]},
        "mounts": [
            {"destination": "/usr/lib/libcuda.so.1", "source": "/a", "options": ["rbind", "ro"]},
            {"destination": "/data", "source": "/b", "options": ["bind", "ro", "nosuid", "nodev", "rprivate"]},
        ],
        "linux": {"maskedPaths": ["/proc/kcore", "/proc/driver/nvidia/gpus/0000:86:00.0"]},
        "annotations": {"sublet.sm": "25", "org.criu.config": "/etc/criu/mine.conf", "sublet.lease.edits":
            json!({"mounts": ["/usr/lib/libcuda.so.1"], "nodes": [], "masks": ["/proc/kcore", "/proc/driver/nvidia/gpus/0000:86:00.0"],
                "defaults": [["TRITON_LIBCUDA_PATH", "/usr/lib"]]}).to_string()},
    });
    let mounts = spec["mounts"].clone();
    assert!(crate::oci::undo_edits(&mut spec));
    assert_eq!(spec["process"]["env"], json!(["PATH=/bin", "TRITON_LIBCUDA_PATH=/mine"]));
    assert_eq!(spec["mounts"], mounts);
    assert_eq!(spec["linux"]["maskedPaths"], json!(["/proc/kcore"]));
    assert_eq!(spec["annotations"], json!({"sublet.sm": "25", "org.criu.config": "/etc/criu/mine.conf"}));
}

fn comes_back(spec: &Value) {
    let text = spec.to_string();
    let file = JsonFile { path: PathBuf::new(), text: text.clone().into_bytes() };
    let mut value = file.parse().unwrap();
    assert_eq!(value.to_string(), text);
    edit_within(&mut value, &grant(), false).unwrap();
    undo(&mut value, spec);
    assert_eq!(value.to_string(), text);
}

#[test]
fn an_empty_process_comes_back() {
    comes_back(&json!({"process": {}}));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn json_in_is_json_out_but_for_our_edit(spec in any_spec()) {
        comes_back(&spec);
    }

    #[test]
    fn edits_are_taken_back(spec in any_spec(), nested: bool) {
        let mut value = spec.clone();
        edit_within(&mut value, &grant(), nested).unwrap();
        let once = value.clone();
        prop_assert!(crate::oci::undo_edits(&mut value));
        prop_assert!(!value.to_string().contains("sublet"), "{}", value);
        prop_assert!(!crate::oci::undo_edits(&mut value), "it says nothing any more");
        // Granted anew it is as it was when it was granted first.
        edit_within(&mut value, &grant(), nested).unwrap();
        prop_assert_eq!(sorted(&value), sorted(&once));
    }

    #[test]
    fn arbitrary_json_does_no_harm(spec in any_json(), nested: bool) {
        let _ = edit_within(&mut spec.clone(), &grant(), nested);
        let _ = edit_environment(&mut spec.clone(), &grant().env);
        let _ = annotations(&spec);
        let _ = crate::oci::conflict(&spec, &[], &crate::config::Config::default());
        let wrapped = json!({"process": {}, "linux": spec, "mounts": [spec], "hooks": spec, "annotations": spec});
        let _ = edit_within(&mut wrapped.clone(), &grant(), nested);
        let _ = crate::oci::conflict(&wrapped, &[], &crate::config::Config::default());
    }

    #[test]
    fn arbitrary_bytes_do_no_harm(text in prop::collection::vec(any::<u8>(), 0..64)) {
        let file = JsonFile { path: PathBuf::new(), text };
        let _ = file.mentions_sublet();
        let _ = file.parse();
    }
}
