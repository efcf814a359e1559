//! Starts, stops and lists MPS control daemons, for `sublet mps` and `sublet serve`. The shim runs these
//! commands when it needs them; what it does itself is in [`sublet_core::mps`].

mod compute_mode;
mod containers_by_mount;
mod detach;
mod launch;
mod list;
mod logs;
mod rest;
mod service_defaults;
mod service_syscalls;
mod start;
mod stop;

pub(crate) use list::terminate_client;
pub use list::{Listed, list, logs};
pub use rest::rest;
pub use start::start;
pub use stop::{exists, stop};
