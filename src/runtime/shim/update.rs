//! `update`. An engine may pass a list of devices with every change, as Podman 5.4 does. runc then leaves devices as they
//! are; crun closes all that are not in the list, the container's GPU too.

use std::path::PathBuf;

use anyhow::bail;
use serde_json::Value;

use super::{Call, Dialect, Update};
use sublet_core::oci::JsonFile;

/// Refuses a change that would take the GPU away from a container with a share.
pub(super) fn update(
    call: &Call<'_>,
    update: &Update,
    container: Option<(&str, PathBuf)>,
) -> anyhow::Result<i32> {
    let (Some((id, record)), Some(file)) = (container, &update.resources) else { return call.pass_on() };
    if call.low_level.dialect == Dialect::Runc || !call.has_share(id, &record)? {
        return call.pass_on();
    }
    // If crun cannot read it either, nothing changes. `-` is standard input, which belongs to crun.
    let resources = JsonFile::read(file).and_then(|file| file.parse()).unwrap_or_default();
    let devices = resources.get("devices").and_then(Value::as_array);
    if devices.is_none_or(Vec::is_empty) {
        return call.pass_on();
    }
    bail!(
        "this update would take the container's GPU away: the engine passes a list of devices with it that lacks the \
         share's, and crun closes all others. Recreate the container with these settings, or put runc first in \
         `[runtime] low_level`, which leaves devices as they are"
    )
}
