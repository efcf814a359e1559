//! A hook does its work in a confined process: it has only the Linux capabilities of its stage, starts no programs, and
//! may not make the system calls that no hook needs.
//!
//! Child processes, including MPS daemons, keep a seccomp filter for ever, and with `no_new_privs` they cannot regain
//! dropped rights. So the process that the engine started keeps its rights; it only waits and runs the few commands
//! that its child asks for ([`command_requests`]). The child does the work.

mod command_requests;
mod seccomp_filter;
mod stage_capabilities;
mod worker;

use std::process::Command;

use super::inheritance;

pub(crate) use command_requests::is_confined;
pub use command_requests::{run, start};
pub use seccomp_filter::refuse_drivers;
pub use stage_capabilities::Rights;
pub use worker::{Side, engine, fork_worker};

/// The variables that a hook reads. The others may come from the image (CVE-2025-23266).
const KEPT: [&str; 1] = [inheritance::VARIABLE];

/// The command that these words (the program's name and its arguments) ask for; `None` if hooks do not run it.
pub type Commands = fn(&[&str]) -> Option<Command>;

/// Closes inherited descriptors except the first three, and removes the variables that it does not read. To be called
/// before anything is opened and before there are threads.
pub fn clean() {
    inheritance::close_descriptors();
    inheritance::clear_environment(&KEPT);
}

/// Gives up the rights that this work does not need after all.
pub fn drop_rights(rights: Rights) {
    if let Err(error) = rights.keep() {
        tracing::warn!("the hook could not drop rights that it does not need: {error}");
    }
}
