//! sublet: NVIDIA GPU shares for plain Docker and Podman containers.
//!
//! All entry points take the same steps, with a module for each:
//!
//! ```text
//! annotations → Request → Placement → Lease → Grant → edits → exec
//!   request      place       ledger    grant    apply     the runtime's shim | hook
//! ```
//!
//! [`admit`] takes these steps for every entry point. `request`, `place` and `grant` do no I/O.

pub mod admit;
pub mod apply;
pub mod broker;
pub mod cdi;
pub mod child;
pub mod config;
pub mod confine;
pub mod engine;
pub mod glob;
pub mod grant;
pub mod hooks;
pub mod inherited;
pub mod inventory;
pub mod ledger;
pub mod log;
pub mod mapped;
pub mod mps;
pub mod own;
pub mod place;
pub mod process;
pub mod replace;
pub mod request;
pub mod selinux;
pub mod state_dir;
pub mod storage;
pub mod text;
