//! What a hook does happens in a process that can do little else: it has the capabilities of its stage alone, starts
//! no program, and is refused the system calls that no hook needs.
//!
//! A filter of system calls is inherited for good, by MPS daemons too, and so are lost rights where
//! `no_new_privs` is set. So the process that the engine started keeps what it has and does nothing but wait, and
//! run the few commands of ours that are asked of it ([`errand`]); the work is a child's.

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
    crate::inherited::forget_environment(&KEPT);
}

/// Gives up the rights that this work turns out not to need.
pub fn narrow(rights: Rights) {
    if let Err(error) = rights.keep() {
        tracing::warn!("the hook keeps rights that it does not need: {error}");
    }
}
