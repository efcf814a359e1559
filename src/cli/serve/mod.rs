//! `sublet serve`: the broker between users without root and the ledger, and the client's side of it.
//!
//! A user without root can neither write the ledger nor start MPS daemons. What an entry point would do to the
//! files it asks of this service instead, over a Unix socket that everybody may open: one JSON object a
//! line each way ([`protocol`]). The service believes nothing of it but the kernel: who asks is told by
//! `SO_PEERCRED`, and a process that is named is held by a pidfd while it is checked ([`peer`]). Paths are
//! kept as names and never opened, so that no file system of a user's can hold the service or be changed by
//! it; looking into the root filesystem and editing the spec is the client's own work, with its own rights.
//!
//! One thread does all input and output, without ever waiting for a client; two do what takes time, a third
//! has MIG instances made and destroyed, and one is the guard ([`crate::guard`]). All state is on disk: the
//! service can end at any moment and start again, and no container notices.

mod broker;
mod connection;
mod handed_over;
mod listen;
mod mig_watch;
mod policy_of_user;
mod pool;
mod server;

pub(crate) use policy_of_user::rule_of;
pub use server::{ServeError, serve};

use sublet_core::broker::{policy_limits, protocol, socket};
