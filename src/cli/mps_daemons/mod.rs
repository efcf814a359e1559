//! Starts, stops and lists MPS control daemons, for `sublet mps` and `sublet serve`. The shim runs these commands when
//! it needs them; its own part is in [`sublet_core::mps`].

mod below_runtime;
mod compute_mode;
mod daemon_list;
mod detach;
mod launch;
mod logs;
mod service_defaults;
mod service_syscalls;
mod start;
mod stop;

pub(crate) use below_runtime::await_end;
pub use daemon_list::{Listed, list, logs};
pub(crate) use daemon_list::{list_unasked, terminate_client};
pub use start::start;
pub use stop::rest;
pub use stop::{exists, stop};
