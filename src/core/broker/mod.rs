//! What a rootless engine's programs and `sublet serve` say to each other: one JSON object a line each way, over a Unix
//! socket that everybody may open; and the client's side of it.

pub mod client;
pub mod policy_limits;
pub mod protocol;

use std::path::PathBuf;

use crate::config::Config;

/// The service's socket.
#[must_use]
pub fn socket(config: &Config) -> PathBuf {
    config.state_dir.join("sublet.sock")
}
