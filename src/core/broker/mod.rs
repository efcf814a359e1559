//! The protocol between a rootless engine's programs and `sublet serve`, and its client side: one JSON object per line
//! in each direction, over a Unix socket that every user may open.

pub mod client;
pub mod policy_limits;
pub mod protocol;

use std::path::PathBuf;

use crate::config::Config;

/// The service's socket.
pub fn socket(config: &Config) -> PathBuf {
    config.state_dir.join("sublet.sock")
}
