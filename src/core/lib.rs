//! sublet: NVIDIA GPU shares for plain Docker and Podman containers.
//!
//! All entry points take the same steps, with a module for each:
//!
//! ```text
//! annotations → Request → Placement → Lease → Grant → edits → exec
//!   request      place       ledger    grant     oci      the runtime's shim | hook
//! ```
//!
//! [`admit`] takes these steps for every entry point. `request`, `place` and `grant` do no I/O.

// Layers, the lowest first: a module uses only modules that stand above it here (`make lint`).

pub mod text;

pub mod bounded_input;

pub mod parse_errors;

pub mod log;

pub mod process;

pub mod fs;

pub mod share;

pub mod slurm;

pub mod config;

pub mod request;

pub mod config_files;

pub mod inventory;

pub mod events;

pub mod ledger;

pub mod place;

pub mod grant;

pub mod oci;

pub mod names;

pub mod mps;

pub mod broker;

pub mod admit;

// Compares the ledger with tests/model.
#[cfg(test)]
mod replay;
