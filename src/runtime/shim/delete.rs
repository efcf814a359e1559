//! `delete`: the only command that the shim waits for, because the lease may be freed only after it succeeded.

use std::path::PathBuf;
use std::process::ExitCode;

use super::{Call, RuntimeError, runtime_child, uid};
use sublet_core::admit;
use sublet_core::config::Config;
use sublet_core::ledger::LeaseId;

/// Marks the lease as ending, deletes the container, frees the lease or leaves it as it was.
///
/// An error of the ledger never keeps a container from being deleted. The next command sees that the container has
/// ended.
pub(super) fn delete(call: &Call<'_>, container: Option<(&str, PathBuf)>) -> Result<ExitCode, RuntimeError> {
    let Some((lease, config)) = container.and_then(|(id, record)| marked(call, id, &record)) else {
        let never = call.pass_on()?;
        match never {}
    };
    let status = match runtime_child::run(&call.low_level.program, call.args) {
        Ok(status) => status,
        Err(source) => {
            unmark(call, &lease, &config);
            return Err(call.cannot_run(source));
        }
    };
    if !status.success() {
        unmark(call, &lease, &config);
    } else if let Err(error) = admit::end(&lease, &config) {
        call.warn(&format!("lease {lease} is not free yet: {error}"));
    }
    Ok(runtime_child::exit_like(status))
}

fn marked(call: &Call<'_>, id: &str, record: &std::path::Path) -> Option<(LeaseId, Config)> {
    let config = call.config_with_leases()?;
    match admit::mark_ending(uid(), id, record, &config) {
        Ok(lease) => Some((lease?, config)),
        Err(error) => {
            call.warn(&format!("container {}: {error}", sublet_core::text::safe(id)));
            None
        }
    }
}

fn unmark(call: &Call<'_>, lease: &LeaseId, config: &Config) {
    if let Err(error) = admit::unmark(lease, config) {
        call.warn(&format!("lease {lease} stays marked as ending: {error}"));
    }
}
