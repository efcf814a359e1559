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
fn existing_settings_stay_as_they_are() {
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
fn later_edits_by_hand_outlive_the_undo() {
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
fn an_undo_removes_only_additions_of_setups() {
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
    let torn = torn.root.to_string();
    assert_eq!(set_up(Some(&torn), Some(&record), &all()), Err(SetupError::Orphan));
    let mended = undo(Some(&torn), Some(&record)).unwrap();
    assert_eq!(json(&mended.unwrap()), json!({"default-runtime": "kata"}), "what the message says to do");
}

#[test]
fn a_file_that_an_undo_could_not_read_is_refused_at_once() {
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
fn foreign_resources_stay_and_a_new_count_replaces_the_old_one() {
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

fn edited(text: &str, edit: fn(&JsonFile) -> Result<(), SetupError>) -> String {
    let file = JsonFile::parse(text).unwrap();
    edit(&file).unwrap();
    file.root.to_string()
}

#[test]
fn a_member_comes_first_in_the_layout_of_the_rest() {
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
fn a_value_that_is_no_object_is_not_edited() {
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

fn of(line: &str) -> Dockerd {
    Dockerd { flags: flags(&words(line), "the running dockerd") }
}

#[test]
fn flags_count_beside_the_file_and_before_it() {
    let text = r#"{"default-runtime": "kata", "data-root": "/data"}"#;
    let plain = of("/usr/bin/dockerd -H fd:// --containerd=/run/containerd/containerd.sock --debug");
    assert_eq!((plain.file(), plain.runtime()), (Path::new(FILE), None));
    assert_eq!(
        (plain.default_runtime(text).as_deref(), plain.data_root(text)),
        (Some("kata"), "/data".into())
    );
    assert_eq!((plain.default_runtime("{}"), plain.data_root("{}")), (None, "/var/lib/docker".into()));
    let dockerd = of("/usr/bin/dockerd --config-file /x.json --data-root=/d --add-runtime a=/b \
                   --add-runtime sublet=/usr/bin/sublet-runtime --default-runtime sublet");
    assert_eq!((dockerd.file(), dockerd.runtime()), (Path::new("/x.json"), Some("/usr/bin/sublet-runtime")));
    assert_eq!(
        (dockerd.default_runtime("{}").as_deref(), dockerd.data_root(text)),
        (Some("sublet"), "/d".into())
    );
}

#[test]
fn a_setting_that_would_stop_dockerd_at_its_next_start_is_refused_with_the_flag() {
    let dockerd = of("dockerd --default-runtime=runc --add-runtime x=/y");
    dockerd.starts_with(r#"{"runtimes": {"sublet": {"path": "/usr/bin/sublet-runtime"}}}"#).unwrap();
    let error = dockerd.starts_with(r#"{"default-runtime": "sublet"}"#).unwrap_err().to_string();
    assert!(error.contains("--default-runtime=runc") && error.contains("the running dockerd"), "{error}");
    let features = of("dockerd --feature=containerd-snapshotter=true");
    let error = features.starts_with(r#"{"features": {"cdi": true}}"#).unwrap_err().to_string();
    assert!(error.contains("--feature=containerd-snapshotter=true"), "{error}");
    let swarm = of("dockerd --node-generic-resource a=1");
    assert!(swarm.starts_with(r#"{"node-generic-resources": ["sublet-small=1"]}"#).is_err());
}

#[test]
fn the_process_and_the_unit_are_read() {
    let root = tempfile::tempdir().unwrap();
    let file = |path: &str, text: &str| {
        let path = under(root.path(), path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    file("/proc/7/comm", "containerd\n");
    file("/proc/6/comm", "dockerd\n");
    file("/proc/6/cmdline", "/usr/bin/dockerd\0--config-file=/other.json\0");
    file("/proc/8/comm", "dockerd\n");
    file("/proc/8/cmdline", "/usr/bin/dockerd\0--config-file=/x.json\0");
    file("/etc/sysconfig/docker", "# OPTIONS=\nOPTIONS=\"--default-ulimit nofile=1024 --data-root /d\"\n");
    let unit = |argv: &[&str]| {
        assert_eq!(argv[..3], ["systemctl", "show", "docker.service"]);
        let start = "ExecStart={ path=/usr/bin/dockerd ; argv[]=/usr/bin/dockerd -H fd:// $OPTIONS ${MORE} $NONE ; \
                     ignore_errors=no ; pid=0 }\nEnvironment=A=b \"MORE=--default-runtime runc\"\n\
                     EnvironmentFiles=/etc/sysconfig/docker (ignore_errors=yes)\n";
        Some(start.to_owned())
    };
    let dockerd = Dockerd::of(root.path(), unit, Some(Path::new("/x.json")));
    assert_eq!((dockerd.file(), dockerd.data_root("{}")), (Path::new("/x.json"), "/d".into()));
    let error = dockerd.starts_with(r#"{"default-runtime": "sublet"}"#).unwrap_err().to_string();
    assert!(error.contains("--default-runtime=runc of docker.service"), "{error}");
}
