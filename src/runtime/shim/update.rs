//! `update`. An engine may pass a list of devices of its own with every change, as Podman 5.4 does. runc leaves devices as they
//! are then; crun closes all that the list has not, the container's GPU too.

use std::convert::Infallible;
use std::path::PathBuf;

use serde_json::Value;

use super::{Call, Dialect, RuntimeError, Update};
use sublet_core::admit;
use sublet_core::oci::JsonFile;
use sublet_core::process::auxiliary_vector::effective_user;

/// Refuses a change that would take the GPU away from a container with a share.
pub(super) fn update(
    call: &Call<'_>,
    update: &Update,
    container: Option<(&str, PathBuf)>,
) -> Result<Infallible, RuntimeError> {
    let (Some((id, record)), Some(file)) = (container, &update.resources) else { return call.pass_on() };
    if call.low_level.dialect == Dialect::Runc || !admit::may_have_share(&record)? {
        return call.pass_on();
    }
    // What crun cannot read either changes nothing. `-` is standard input, which belongs to crun.
    let resources = JsonFile::read(file).and_then(|file| file.parse()).unwrap_or_default();
    let devices = resources.get("devices").and_then(Value::as_array);
    if devices.is_none_or(Vec::is_empty) {
        return call.pass_on();
    }
    match admit::share_of(effective_user(), id, &record, &call.files.config())? {
        Some(_) => Err(RuntimeError::Devices),
        None => call.pass_on(),
    }
}
