//! A hook works in a process that can do little else: it has only the Linux capabilities of its stage, starts
//! no program, and is refused the system calls that no hook needs.
//!
//! Children keep a seccomp filter for ever, also MPS daemons, and with `no_new_privs` they cannot regain dropped
//! rights. So the process that the engine started keeps its rights, and only waits and
//! runs the few commands that the child asks for ([`command_requests`]). The child does the work.

mod command_requests;
mod refuse_drivers;
mod seccomp_filter;
mod stage_capabilities;
mod worker;

use std::process::Command;

use super::{environment, inheritance};

pub use command_requests::run;
pub use refuse_drivers::refuse_drivers;
pub use stage_capabilities::Rights;
pub use worker::{Side, engine, split};

/// What a hook reads of its environment; the rest may be the image's (CVE-2025-23266).
const KEPT: [&str; 1] = [environment::VARIABLE];

/// The command that these words (the program's name, and what makes this command of it) ask for; `None`: it is not one
/// that a hook runs.
pub type Commands = fn(&[&str]) -> Option<Command>;

/// Rids this process of what its caller left it: descriptors but the first three, and variables that it does not
/// read. Before anything is opened, and before there are threads.
pub fn clean() {
    inheritance::close();
    inheritance::forget_environment(&KEPT);
}

/// Gives up the rights that this work turns out not to need.
pub fn narrow(rights: Rights) {
    if let Err(error) = rights.keep() {
        tracing::warn!("the hook could not drop rights that it does not need: {error}");
    }
}
