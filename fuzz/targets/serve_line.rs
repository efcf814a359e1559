//! A line that a user without root sends to `sublet serve`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sublet_core::broker::protocol::{Ask, line, parse};

fuzz_target!(|text: &[u8]| {
    let Some(ask) = sublet_fuzz::ok(parse::<Ask>(text)) else { return };
    let written = line(&ask).expect("it came as a line");
    assert_eq!(parse::<Ask>(&written).expect("we wrote it"), ask);
});
