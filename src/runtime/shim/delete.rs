//! `delete`: the only command that the shim waits for, because the lease may be freed only after it succeeded.

use std::path::{Path, PathBuf};

use std::time::Duration;

use super::kill::find_without_first_thread;
use super::{Call, RuntimeError, runtime_child};
use sublet_core::admit::Leases;
use sublet_core::ledger::LeaseId;
use sublet_core::process::inheritance::effective_user;
use sublet_core::process::{pidfd_await_end, pidfd_kill};

/// The time limit for the end of a first process that is killed here.
const FIRST_PROCESS: Duration = Duration::from_secs(5);

/// Marks the lease as ending, deletes the container, frees the lease or leaves it as it was.
///
/// An error of the ledger never keeps a container from being deleted. The next command sees that the container has
/// ended.
/// With `force`, a first process whose first thread has ended is killed here: the runtime takes it for ended.
pub(super) fn delete(
    call: &Call<'_>,
    force: bool,
    container: Option<(&str, PathBuf)>,
) -> Result<u8, RuntimeError> {
    let found = container.and_then(|container| Some((container, call.config_with_leases()?)));
    let Some(((id, record), config)) = found else { return call.pass_on() };
    let leases = Leases::of(&config);
    let Some(lease) = mark_ending(call, &leases, id, &record) else { return call.pass_on() };
    if force {
        end_without_first_thread(&record);
    }
    let status = match runtime_child::run(&call.low_level.program, call.args) {
        Ok(status) => status,
        Err(source) => {
            unmark(call, &leases, &lease);
            return Err(call.cannot_run(source));
        }
    };
    if !status.success() {
        unmark(call, &leases, &lease);
    } else if let Err(error) = leases.end(&lease) {
        call.warn(&format!("lease {lease} is not free yet: {error}"));
    }
    Ok(runtime_child::exit_like(status))
}

fn end_without_first_thread(record: &Path) {
    if let Some(first) = find_without_first_thread(record).filter(|first| pidfd_kill(first).is_ok()) {
        pidfd_await_end(first, FIRST_PROCESS);
    }
}

fn mark_ending(call: &Call<'_>, leases: &Leases<'_>, id: &str, record: &Path) -> Option<LeaseId> {
    leases.mark_ending(effective_user(), id, record).unwrap_or_else(|error| {
        call.warn(&format!("container {}: {error}", sublet_core::text::safe(id)));
        None
    })
}

fn unmark(call: &Call<'_>, leases: &Leases<'_>, lease: &LeaseId) {
    if let Err(error) = leases.unmark(lease) {
        call.warn(&format!("lease {lease} stays marked as ending: {error}"));
    }
}
