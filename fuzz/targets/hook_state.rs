//! The container's state on a hook's standard input.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    sublet_fuzz::ok(sublet_runtime::hook::fuzzing::state(text));
});
