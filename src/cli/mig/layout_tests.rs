//! Layout files in TOML, right and wrong.

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
            "layout /l.toml:2: unknown key `mach`, expected one of `match`, `mig`, `instances`; did you mean match?",
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
