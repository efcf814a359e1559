//! A hook works in a process that can do little else: it has only the Linux capabilities of its stage, starts
//! no program, and is refused the system calls that no hook needs.
//!
//! Children keep a seccomp filter for ever, also MPS daemons, and with `no_new_privs` they cannot regain dropped
//! rights. So the process that the engine started keeps its rights, and only waits and
//! runs the few commands that the child asks for ([`errand`]). The child does the work.

mod drivers;
mod errand;
mod filter;
mod rights;
mod split;

pub use drivers::refuse as refuse_drivers;
pub use errand::run;
pub use rights::Rights;
pub use split::{engine, work};

/// What a hook reads of its environment; the rest may be the image's (CVE-2025-23266).
const KEPT: [&str; 1] = [crate::config::VARIABLE];

/// Rids this process of what its caller left it: descriptors but the first three, and variables that it does not
/// read. Before anything is opened, and before there are threads.
pub fn clean() {
    crate::inherited::close();
    if !cfg!(sublet_without = "a8-child") {
        crate::inherited::forget_environment(&KEPT);
    }
}

/// Gives up the rights that this work turns out not to need.
pub fn narrow(rights: Rights) {
    if let Err(error) = rights.keep() {
        tracing::warn!("the hook could not drop rights that it does not need: {error}");
    }
}
