//! `config.toml` and `containers.toml`.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use sublet_core::config::written_out;
use sublet_core::config_files::{of_text, parse_containers};
use sublet_fuzz::ok;

fuzz_target!(|text: &str| {
    ok(parse_containers(Path::new("/etc/sublet/containers.toml"), text));
    let (config, runtime) = of_text(text);
    let (config, runtime) = (ok(config), ok(runtime));
    let Some(config) = config else { return };
    assert_eq!(runtime.as_ref(), Some(&config.runtime), "[runtime] alone says the same");
    let written = toml::to_string(&written_out(&config)).expect("it can be shown");
    let again = of_text(&written).0.unwrap_or_else(|error| panic!("{error}: {written}"));
    assert_eq!(again, config, "{written}");
});
