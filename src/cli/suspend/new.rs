//! A process that begins to use the GPU while its container is suspended: the guard has it suspended, too, by a child of this
//! program, `sublet suspend-new`. So its step has a process of its own, beside those that the service takes, and is put right
//! like any other where that is killed.

use std::time::Duration;

use anyhow::Context as _;

use super::driver::copying;
use super::suspend_new;
use sublet_core::config_files;
use sublet_core::ledger::LeaseId;
use sublet_core::process::{Process, sublet};

/// For all that copies nothing: three calls of the driver's, and nodes that are given and taken.
const LIMIT: Duration = Duration::from_secs(150);

/// What the child says of a process that it has suspended.
const SUSPENDED: &str = "suspended";

/// Arguments of `sublet suspend-new`, which is no command for people.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    lease: String,
    pid: i32,
    start_time: u64,
}

/// Has a child suspend process `new` of the suspended lease `id`, which has `bytes` of memory on the GPU. Whether it used the GPU
/// still.
///
/// # Errors
/// Why it is not suspended. It was ended, if the step could begin.
pub(crate) fn have_suspended(id: &LeaseId, new: Process, bytes: u64) -> Result<bool, String> {
    let [pid, start_time] = [new.pid.to_string(), new.start_time.to_string()];
    let words = ["suspend-new", id.as_str(), &pid, &start_time];
    let answer = sublet::ask(&words, "", LIMIT + copying(bytes)).map_err(|error| error.to_string())?;
    Ok(answer.0.trim() == SUSPENDED)
}

/// The child. Says whether it has suspended the process; nothing, if that does not use the GPU any more.
///
/// # Errors
/// It is not suspended.
pub fn run(arguments: &Arguments) -> anyhow::Result<Option<&'static str>> {
    let id = LeaseId::parse(&arguments.lease).context("no lease id")?;
    let new = Process { pid: arguments.pid, start_time: arguments.start_time };
    Ok(suspend_new(&id, new, &config_files::load()?)?.then_some(SUSPENDED))
}
