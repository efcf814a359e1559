//! `checkpoint` and `restore`. The state of a GPU cannot be saved, so both are refused for a container with a share.

use std::path::PathBuf;

use super::{Call, RuntimeError, Start, create};

/// Refuses a container with a share.
pub(super) fn checkpoint(call: &Call<'_>, container: Option<(&str, PathBuf)>) -> Result<u8, RuntimeError> {
    match container {
        Some((id, record)) if call.has_share(id, &record)? => Err(RuntimeError::NoCheckpoint("checkpoint")),
        _ => call.pass_on(),
    }
}

/// Refuses a bundle that asks for a share.
pub(super) fn restore(call: &Call<'_>, start: &Start) -> Result<u8, RuntimeError> {
    match create::find_request(call, start)? {
        Some(_) => Err(RuntimeError::NoCheckpoint("restore")),
        None => call.pass_on(),
    }
}
