//! What a hook does happens in a process that can do little else: it has the capabilities of its stage alone, starts
//! no program, and is refused the system calls that no hook needs.
//!
//! A filter of system calls is inherited for good, by MPS daemons too, and so are lost rights where
//! `no_new_privs` is set. So the process that the engine started keeps what it has and does nothing but wait, and
//! run the few commands of ours that are asked of it ([`command_requests`]); the work is a child's.

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
pub use worker::{engine, work};

/// What a hook reads of its environment; the rest may be the image's (CVE-2025-23266).
const KEPT: [&str; 1] = [environment::VARIABLE];

/// The command that these words (the program's name, and what makes this command of it) ask for; `None`: it is not one
/// that a hook runs.
pub type Commands = fn(&[&str]) -> Option<Command>;

/// Rids this process of what its caller left it: descriptors but the first three, and variables that it does not
/// read. Before anything is opened, and before there are threads.
pub fn clean() {
    inheritance::close();
    if !cfg!(sublet_without = "a8-child") {
        inheritance::forget_environment(&KEPT);
    }
}

/// Gives up the rights that this work turns out not to need.
pub fn narrow(rights: Rights) {
    if let Err(error) = rights.keep() {
        tracing::warn!("the hook keeps rights that it does not need: {error}");
    }
}
