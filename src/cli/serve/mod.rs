//! `sublet serve`: the broker between users without root and the ledger.
//!
//! A user without root can neither write the ledger nor start MPS daemons. Entry points ask this service instead,
//! over a Unix socket that every user may open, with one JSON object per line in each direction ([`protocol`]). The
//! service does not trust clients: `SO_PEERCRED` tells it which user asks, and it holds a process that a client names
//! by a pidfd while it checks it ([`peer`]). It never opens paths of users, so that a user's file system can neither
//! block it nor be changed by it. The client reads the root filesystem and edits the spec, with its own rights.
//!
//! One thread does all input and output, without ever waiting for a client. Two do slow work, a third
//! creates and destroys MIG instances and makes room by suspending containers ([`room`]), a fourth makes reports, and one is
//! the guard ([`crate::guard`]). All state is on disk: the service can end and start again at any moment, and containers do not
//! notice. Another thread ([`retry`]) starts refused containers of Docker's again, and two watch the health of GPUs
//! ([`health`]).

mod broker;
mod connection;
mod gpu_watch;
mod health;
mod pool;
mod retry;
mod room;
mod server;

pub(crate) use connection::inherited_socket;
pub use server::serve;

use sublet_core::broker::{policy_limits, protocol, socket};
