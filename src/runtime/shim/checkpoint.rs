//! `checkpoint` and `restore`. The state of a GPU cannot be saved, so both are refused for a container with a share.

use std::convert::Infallible;
use std::path::PathBuf;

use super::{Call, RuntimeError, Start, create};
use sublet_core::admit;
use sublet_core::process::auxiliary_vector::effective_user;

/// Refuses a container with a share.
pub(super) fn checkpoint(
    call: &Call<'_>,
    container: Option<(&str, PathBuf)>,
) -> Result<Infallible, RuntimeError> {
    let Some((id, record)) = container else { return call.pass_on() };
    if !admit::may_have_share(&record)? {
        return call.pass_on();
    }
    match admit::share_of(effective_user(), id, &record, &call.files.config())? {
        Some(_) => Err(RuntimeError::NoCheckpoint("checkpoint")),
        None => call.pass_on(),
    }
}

/// Refuses a bundle that asks for a share.
pub(super) fn restore(call: &Call<'_>, start: &Start) -> Result<Infallible, RuntimeError> {
    match create::asking_container(call, start)? {
        Some(_) => Err(RuntimeError::NoCheckpoint("restore")),
        None => call.pass_on(),
    }
}
