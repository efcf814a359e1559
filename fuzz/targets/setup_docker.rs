//! Docker's `daemon.json`, told of sublet and made to forget it again. The wish is in the file's length.
#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use sublet::setup::docker::{is_set_up, set_up, undo};
use sublet::setup::{NAME, Wish};
use sublet_fuzz::ok;

fuzz_target!(|found: &str| {
    let wish = Wish {
        runtime: "/usr/bin/sublet-runtime".into(),
        hooks_dir: "/usr/share/sublet/hooks.d".into(),
        default: found.len() % 2 == 0,
        cdi: found.len() % 3 == 0,
        resources: None,
    };
    ok(undo(Some(found), None));
    let known = ok(is_set_up(found)).unwrap_or(true);
    let Some((text, record)) = ok(set_up(Some(found), None, &wish)) else { return };
    let again = set_up(Some(&text), Some(&record), &wish).map(|(text, _)| text);
    assert_eq!(again.as_ref(), Ok(&text), "a second time changes nothing");
    let edited: Value = serde_json::from_str(&text).expect("Docker can read it");
    assert_eq!(edited["runtimes"][NAME]["path"], "/usr/bin/sublet-runtime");
    assert!(!wish.default || edited["default-runtime"] == NAME);
    assert!(!wish.cdi || edited["features"]["cdi"] == true);
    if !known {
        assert_eq!(undo(Some(&text), Some(&record)), Ok(Some(found.to_owned())));
    }
});
