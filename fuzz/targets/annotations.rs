//! Annotations as a container brings them, on a host that has shares: one `key=value` a line, the first line
//! the entry point's share, the second the image's capabilities.
#![no_main]

use std::collections::BTreeMap;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use sublet_core::config::Config;
use sublet_core::config_files::of_text;
use sublet_core::request::{has_sublet_annotations, is_podman_infra, is_sandbox, parse};
use sublet_core::share::LONGEST_WAIT;
use sublet_core::share::{Devices, Memory, MigCapability};
use sublet_core::share::{MIB, Percent, parse_duration, parse_percent, show_duration};

static CONFIG: LazyLock<Config> = LazyLock::new(|| {
    let text = "[share.small]\nmode = \"mps\"\nsm = \"25\"\nmemory = \"8GiB\"\n\
                [share.part]\nmig = \"1g.18gb\"\n[mig]\nallow_caps = [\"monitor\"]\n";
    of_text(text).0.expect("a good configuration")
});

fuzz_target!(|text: &str| {
    let mut lines = text.lines();
    let share = lines.next().filter(|share| !share.is_empty());
    let image = lines.next();
    let annotations: BTreeMap<String, String> =
        lines.filter_map(|line| line.split_once('=')).map(|(k, v)| (k.to_owned(), v.to_owned())).collect();
    let _ =
        (has_sublet_annotations(&annotations), is_sandbox(&annotations), is_podman_infra(&annotations, &[]));
    let Some(request) = sublet_fuzz::ok(parse(&annotations, share, image, &CONFIG)) else { return };
    let in_range = |share: Percent| share > Percent::default() && share <= Percent::WHOLE;
    if let Some(sm) = request.sm {
        assert!(in_range(sm), "{sm}");
        assert_eq!(parse_percent(&format!("{sm}%")).expect("what is shown can be read"), sm);
    }
    match request.memory {
        Some(Memory::Bytes(bytes)) => assert!(bytes >= MIB),
        Some(Memory::Share(share)) => assert!(in_range(share)),
        None => {}
    }
    assert!(request.wait <= LONGEST_WAIT);
    assert_eq!(
        parse_duration(&show_duration(request.wait), LONGEST_WAIT).expect("as it is shown"),
        request.wait
    );
    assert!(!request.mig_caps.contains(&MigCapability::Config), "not allowed here");
    assert!(!request.capabilities.0.is_empty() || annotations.contains_key("sublet.capabilities"));
    assert!(!matches!(&request.devices, Devices::These(list) if list.is_empty()));
});
