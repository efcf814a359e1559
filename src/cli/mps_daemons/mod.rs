//! MPS control daemons started, stopped, listed and left: what `sublet mps` and `sublet serve` do. The shim calls these
//! commands where it needs them; what it does itself is [`sublet_core::mps`].

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
