//! Layout files, in TOML and mig-parted's, right and wrong.

use super::*;

fn parsed(text: &str) -> Vec<Entry> {
    Layout::parse(Path::new("/l.toml"), text, None).unwrap().entries
}

fn refused(text: &str) -> String {
    Layout::parse(Path::new("/l.toml"), text, None).unwrap_err().to_string()
}

#[test]
fn the_shipped_example_is_one() {
    let entries = parsed(include_str!("../../../config/mig.toml"));
    assert!(entries.len() > 1, "{entries:?}");
}

#[test]
fn everything_a_layout_can_say() {
    let entries = parsed(
        "[[gpu]]\nmatch = \"0, GPU-8d2e5f1a\"\nmig = true\ninstances = [\n  { profile = \"1g.18gb\", count = 4 },\n  \
         { profile = \"2g.35gb\", start = 4, compute = [\"1c\", \"1c.2g.35gb\"] },\n]\n[[gpu]]\nmatch = \
         \"model:*A30*\"\nmig = false\n",
    );
    let wish = |line, profile: &str, count, start, compute| Wish {
        line,
        profile: profile.into(),
        count,
        start,
        compute,
    };
    let cut = vec!["1c".to_owned(), "1c.2g.35gb".to_owned()];
    assert_eq!(
        entries,
        [
            Entry {
                line: 1,
                devices: vec!["0".into(), "GPU-8d2e5f1a".into()],
                pci_devices: None,
                mig: true,
                instances: vec![wish(5, "1g.18gb", 4, None, None), wish(6, "2g.35gb", 1, Some(4), Some(cut))],
            },
            Entry {
                line: 8,
                devices: vec!["model:*A30*".into()],
                pci_devices: None,
                mig: false,
                instances: vec![]
            },
        ]
    );
    assert_eq!(parsed("gpu = []\n"), []);
}

#[test]
fn errors_name_file_line_and_remedy() {
    let gpu = "[[gpu]]\nmatch = \"0\"\nmig = true\n";
    let with = |line: &str| refused(&format!("{gpu}instances = [\n  {line},\n]\n"));
    let cases = [
        (refused("[[gpu]]\nmatch = \"0\"\n"), "layout /l.toml:1: missing key `mig`"),
        (refused(""), "layout /l.toml:1: missing key `gpu`"),
        (
            refused("[[gpu]]\nmatch = \"0\"\nmig = \"yes\"\n"),
            "layout /l.toml:3: gpu.0.mig must be true or false, not \"yes\"",
        ),
        (
            refused("[[gpu]]\nmach = \"0\"\nmig = true\n"),
            "layout /l.toml:2: unknown key `mach`, did you mean match?; why: expected one of `match`, `mig`, `instances`",
        ),
        (
            refused("[[gpu]]\nmatch = \"0\"\nmig = false\ninstances = [{ profile = \"1g.18gb\" }]\n"),
            "layout /l.toml:4: instances need MIG mode: set mig = true",
        ),
        (
            with("{ profile = \"1g.18gb\", count = -1 }"),
            "layout /l.toml:5: gpu.0.instances.0.count must be a whole number, 0 or more, not -1",
        ),
        (
            with("{ profile = \"1g.18gb\", count = 0 }"),
            "layout /l.toml:5: 0 × 1g.18gb: the count must be between 1 and what the GPU offers",
        ),
        (
            with("{ profile = \"1g.18gb\", count = 4000000000 }"),
            "layout /l.toml:5: 4000000000 × 1g.18gb: the count must be between 1 and what the GPU offers",
        ),
        (
            with("{ profile = \"1g.18gb\", count = 2, start = 1 }"),
            "layout /l.toml:5: 2 instances cannot all start at 1",
        ),
        (with("{ profile = 19 }"), "layout /l.toml:5: gpu.0.instances.0.profile must be a string, not 19"),
        (with("\"1g.18gb\""), "layout /l.toml:5: gpu.0.instances.0 must be a table, not \"1g.18gb\""),
        (refused("gpu = { match = \"0\" }\n"), "layout /l.toml:1: gpu must be an array, not a table"),
    ];
    for (found, expected) in cases {
        assert_eq!(found, expected);
    }
    let named = Layout::parse(Path::new("/l.toml"), "gpu = []", Some("x")).unwrap_err().to_string();
    assert_eq!(named, "layout /l.toml:1: --name is for mig-parted's YAML only: a TOML file has one layout");
    let absent = Layout::read(Path::new("/nonexistent/l.toml"), None).unwrap_err().to_string();
    assert!(absent.starts_with("layout /nonexistent/l.toml cannot be read: No such file"), "{absent}");
}

const FILE: &str = r#"version: v1
mig-configs:
  all-disabled:
    - devices: all
      mig-enabled: false

  custom:
    - devices: [0,1]
      mig-enabled: true
      mig-devices:
        "1g.18gb": 2
        "1c.2g.35gb": 3
    - device-filter: ["0x233510DE", "0x20B010DE"]
      devices: all
      mig-enabled: true
      mig-devices: {}
"#;

#[test]
fn a_part_larger_than_all_there_is_fills_an_instance_alone() {
    let text = FILE.replace("1c.2g.35gb", "4294967295c.2g.35gb");
    let instances = &from_yaml(&text, Some("custom")).unwrap()[0].instances;
    let parts = instances.iter().filter(|wish| wish.compute.is_some());
    assert_eq!(parts.count(), 3);
}

fn refused_yaml(text: &str, name: Option<&str>) -> (usize, String) {
    from_yaml(text, name).unwrap_err()
}

#[test]
fn a_configuration_becomes_entries() {
    let wish = |line, profile: &str, count, compute: Option<&[&str]>| Wish {
        line,
        profile: profile.into(),
        count,
        start: None,
        compute: compute.map(|parts| parts.iter().map(|part| (*part).to_owned()).collect()),
    };
    let entries = from_yaml(FILE, Some("custom")).unwrap();
    assert_eq!((entries[0].line, &entries[0].devices), (8, &vec!["0".to_owned(), "1".into()]));
    assert_eq!(
        entries[0].instances,
        [
            wish(11, "1g.18gb", 2, None),
            wish(12, "2g.35gb", 1, Some(&["1c", "1c"])),
            wish(12, "2g.35gb", 1, Some(&["1c"]))
        ]
    );
    assert_eq!(entries[1].pci_devices, Some(vec![0x2335_10de, 0x20b0_10de]));
    assert!(!from_yaml(FILE, Some("all-disabled")).unwrap()[0].mig);
}

#[test]
fn the_only_configuration_needs_no_name() {
    let one = "version: v1\nmig-configs:\n  x:\n  - devices: all\n    mig-enabled: false\n";
    assert_eq!(from_yaml(one, None).unwrap().len(), 1);
    assert_eq!(
        refused_yaml(FILE, None),
        (3, "there are several configurations: choose one with --name: all-disabled, custom".into())
    );
    assert_eq!(
        refused_yaml(FILE, Some("costum")),
        (3, "there is no configuration costum: choose one of all-disabled, custom".into())
    );
}

#[test]
fn errors_of_mig_parteds_files_name_their_line() {
    let with = |entry: &str| refused_yaml(&format!("version: v1\nmig-configs:\n  x:\n  - {entry}\n"), None);
    let cases = [
        (refused_yaml("", None), (1, "the file is empty")),
        (refused_yaml("version: v2\n", None), (1, "version v2: only v1 is known")),
        (refused_yaml("mig-configs: {}\n", None), (1, "version: v1 is missing")),
        (refused_yaml("version: v1\n", None), (1, "mig-configs is missing")),
        (with("devices: some\n    mig-enabled: true"), (4, "must be all or a list of indexes")),
        (with("devices: [a]\n    mig-enabled: true"), (4, "a: must be an index, a whole number")),
        (with("devices: all"), (4, "mig-enabled is missing")),
        (with("devices: all\n    mig-enabled: yes"), (5, "yes: must be true or false")),
        (
            with("devices: all\n    mig-enabled: false\n    mig-devices: {1g.18gb: 1}"),
            (6, "instances need MIG mode: set mig = true"),
        ),
        (
            with("devices: all\n    mig-enabled: true\n    mig-devices: {1g.18gb: -1}"),
            (6, "-1: must be a count, a whole number"),
        ),
        (
            with("devices: all\n    mig-enabled: true\n    mig-devices: {1g.18gb: 1, 1g.18gb: 2}"),
            (6, "1g.18gb stands twice"),
        ),
        (
            with("devices: all\n    mig-enabled: true\n    other: 1"),
            (6, "unknown key other: the keys are devices, device-filter, mig-enabled, mig-devices"),
        ),
        (
            with("device-filter: H200\n    devices: all\n    mig-enabled: true"),
            (4, "H200 is not a PCI id such as 0x233510DE"),
        ),
        (
            with("devices: *all\n    mig-enabled: true"),
            (4, "YAML aliases are not supported: write the value out"),
        ),
    ];
    for ((line, message), (wanted_line, wanted)) in cases {
        // The YAML parser itself refuses an alias without an anchor.
        assert!(message == wanted || message.starts_with("no YAML: "), "{message}");
        assert_eq!(line, wanted_line, "{message}");
    }
    assert!(refused_yaml("a: [1\n", None).1.starts_with("no YAML: "));
    assert_eq!(refused_yaml(&"[".repeat(100), None), (1, "it is nested too deeply".into()));
}
