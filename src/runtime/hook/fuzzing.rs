//! For the fuzz targets: the hook's standard input, and its edits to config.json.

use std::path::Path;

use serde_json::Value;

use super::{State, parse_lease, precreate};
use sublet_core::oci::hooks::{self, BadHooks, Stage};

/// Parses the container's state as a stage does: its lease and its annotations.
///
/// # Errors
/// It is not a state, or its lease is malformed.
pub fn state(text: &[u8]) -> Result<(), String> {
    let state = State::parse(text).map_err(|error| error.to_string())?;
    parse_lease(&state).map_err(|error| error.to_string())?;
    let _ = (state.annotations().count(), state.has_sublet_annotations(), state.lease_record());
    Ok(())
}

/// Adds all of sublet's hooks, and a refusal, to `spec`. Also checks that the container's id as precreate reads it is
/// hex digits.
///
/// # Errors
/// `hooks` has another shape.
///
/// # Panics
/// The id is anything else.
pub fn hooks(spec: &mut Value) -> Result<(), BadHooks> {
    let id = precreate::id(spec);
    assert!(id.is_empty() || id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{id:?}");
    for stage in [Stage::CreateRuntime, Stage::Poststop] {
        hooks::add(spec, stage, "/usr/libexec/sublet/sublet-hook", Some(Path::new("/etc/x.toml")))?;
    }
    hooks::add_refusal(spec, "no")?;
    Ok(())
}
