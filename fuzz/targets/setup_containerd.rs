//! containerd's `config.toml`, told of sublet and made to forget it again, and containers.conf files that
//! Podman's drop-in repeats. The wish is in the file's length.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sublet::setup::containerd::{set_up, undo};
use sublet::setup::{Wish, podman};
use sublet_fuzz::ok;

fuzz_target!(|found: &str| {
    let wish = Wish {
        runtime: "/usr/bin/sublet-runtime".into(),
        hooks_dir: "/usr/share/sublet/hooks.d".into(),
        default: found.len() % 2 == 0,
        cdi: found.len() % 3 == 0,
        resources: None,
    };
    if let Some(drop_in) = ok(podman::set_up(None, &[found.to_owned()], &wish)) {
        toml::from_str::<toml::Table>(&drop_in).unwrap_or_else(|error| panic!("{error}: {drop_in}"));
    }
    ok(undo(Some(found)));
    let Some(text) = ok(set_up(Some(found), &wish)) else { return };
    toml::from_str::<toml::Table>(&text).expect("containerd can read it");
    assert_eq!(set_up(Some(&text), &wish).as_ref(), Ok(&text), "a second time changes nothing");
    // Existing lines of sublet are removed together with the added ones.
    assert_eq!(undo(Some(&text)), undo(Some(found)));
    let ours = ["# sublet setup", "# >>> sublet setup", "# <<< sublet setup"];
    if !ours.iter().any(|mark| found.contains(mark)) {
        assert_eq!(undo(Some(&text)), Ok(Some(found.to_owned())));
    }
});
