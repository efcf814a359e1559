//! MIG layouts in mig-parted's YAML, of whose configurations the first line names one if it is a comment.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let chosen = text.lines().next().and_then(|line| line.strip_prefix('#'));
    sublet_fuzz::ok(sublet::mig::fuzzing::layout("/l.yaml", text, chosen));
});
