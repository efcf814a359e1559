//! MPS as docs/evidence measured it: the control daemon, its server, and what a CUDA program that meets them
//! sees. Three programs are made of this: `nvidia-cuda-mps-control`, `nvidia-cuda-mps-server`, `cuda-probe`.
//!
//! All speak JSON, one value a packet, over SEQPACKET sockets ([`wire`], [`message`]). A client connects to
//! `control` in the pipe directory; the daemon answers with its end of a socket to the server. It holds
//! both: the daemon's to be known, the server's to ask for memory. Where either ends, its work ends.

pub mod client;
mod command;
pub mod control;
mod daemon;
pub mod device;
mod driver;
pub mod exclusive;
mod limits;
mod log;
pub mod message;
pub mod probe;
pub mod server;
mod servers;
pub mod wire;

use std::path::PathBuf;

/// `CUDA_MPS_PIPE_DIRECTORY`, or CUDA's default.
#[must_use]
pub fn pipe_directory() -> PathBuf {
    std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").map_or_else(|| "/tmp/nvidia-mps".into(), PathBuf::from)
}

/// Memory of an MPS server on each of its devices, in MiB (docs/evidence).
pub const SERVER_MIB: u64 = 66;

/// Memory of a context that sees so many SMs, in MiB: 28.6 and 3.68 an SM (docs/evidence).
#[must_use]
pub fn context_mib(sm: u32) -> u64 {
    (2860 + u64::from(sm) * 368) / 100
}
