//! sublet: NVIDIA GPU shares for plain Docker and Podman containers.
//!
//! One way through, and a module for each step:
//!
//! ```text
//! annotations → Request → Placement → Lease → Grant → edits → exec
//!   request      place       ledger    grant    apply     runtime | hook
//! ```
//!
//! [`admit`] walks that way for every door. `request`, `place` and `grant` do no I/O.

pub mod admit;
pub mod apply;
pub mod called;
pub mod cdi;
mod child;
#[cfg(feature = "cli")]
pub mod cli;
pub mod config;
mod confine;
#[cfg(feature = "cli")]
pub mod doctor;
mod engine;
mod glob;
pub mod grant;
#[cfg(feature = "cli")]
pub mod guard;
pub mod hook;
mod inherited;
pub mod inventory;
pub mod ledger;
#[cfg(feature = "cli")]
pub mod mig;
pub mod mps;
pub mod own;
pub mod place;
pub mod process;
pub mod replace;
pub mod request;
pub mod runtime;
mod selinux;
pub mod serve;
#[cfg(feature = "cli")]
pub mod setup;
mod state_dir;
mod storage;
pub mod text;
