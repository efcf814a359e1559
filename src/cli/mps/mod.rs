//! Starts, stops and lists MPS control daemons, for `sublet mps` and `sublet serve`. The shim runs these
//! commands when it needs them; what it does itself is in [`sublet_core::mps`].

mod compute_mode;
mod detach;
mod launch;
mod list;
mod logs;
mod mounted;
mod rest;
mod service;
mod service_calls;
mod start;
mod stop;

pub use sublet_core::mps::*;

pub use list::{Listed, list, logs, terminate_client};
pub use rest::rest;
pub use start::start;
pub use stop::{exists, stop};
