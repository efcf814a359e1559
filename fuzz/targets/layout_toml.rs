//! MIG layouts in TOML: read, applied to GPUs in memory, exported and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    sublet_fuzz::ok(sublet::mig::fuzzing::layout("/l.toml", text, None));
});
