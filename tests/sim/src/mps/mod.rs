//! MPS as measured in docs/evidence: the control daemon, its servers, and a CUDA program's view of them. Three programs
//! use this module: `nvidia-cuda-mps-control`, `nvidia-cuda-mps-server`, `cuda-probe`.
//!
//! They exchange JSON, one value a packet, over SEQPACKET sockets ([`wire`], [`message`]). A client connects to
//! `control` in the pipe directory, and the daemon answers with one end of a socket to the server. The client keeps
//! both connections: with the daemon, which tracks it, and with the server, for memory. If either connection ends, its
//! work ends.

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
pub(crate) mod nodes;
pub mod probe;
pub mod program;
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

/// Memory of a context by the number of SMs that it sees, in MiB: 28.6 and 3.68 for each SM (docs/evidence).
#[must_use]
pub fn context_mib(sm: u32) -> u64 {
    (2860 + u64::from(sm) * 368) / 100
}
