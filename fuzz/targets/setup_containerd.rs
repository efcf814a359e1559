//! containerd's `config.toml`, told of sublet and made to forget it again, and containers.conf files that
//! Podman's drop-in repeats. The wish is in the file's length.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sublet::setup::Wish;
use sublet::setup::containerd::{is_set_up, set_up, undo};
use sublet::setup::drop_ins::podman;
use sublet_fuzz::ok;

fuzz_target!(|found: &str| {
    let wish = Wish {
        runtime: "/usr/bin/sublet-runtime".into(),
        hooks_dir: "/usr/share/sublet/hooks.d".into(),
        default: found.len() % 2 == 0,
        cdi: found.len() % 3 == 0,
        resources: None,
    };
    if let Some(drop_in) = ok(podman(None, &[found.to_owned()], &wish)) {
        toml::from_str::<toml::Table>(&drop_in).unwrap_or_else(|error| panic!("{error}: {drop_in}"));
    }
    ok(undo(Some(found), None));
    let Some((text, record)) = ok(set_up(Some(found), None, &wish)) else { return };
    toml::from_str::<toml::Table>(&text).expect("containerd can read it");
    let again = set_up(Some(&text), Some(&record), &wish).map(|(text, _)| text);
    assert_eq!(again.as_ref(), Ok(&text), "a second time changes nothing");
    let before = if is_set_up(found) { undo(Some(found), None) } else { Ok(Some(found.to_owned())) };
    assert_eq!(undo(Some(&text), Some(&record)), before);
    // Edited since.
    if let Some(left) = ok(undo(Some(&format!("{text}#")), Some(&record))).flatten() {
        assert!(!is_set_up(&left), "{left}");
    }
});
