//! The base of the end-to-end tests: a driver (simulated or real), a root filesystem, and containers that real runc or
//! crun start through the built `sublet-runtime`.

#![expect(clippy::missing_panics_doc, reason = "a test ends by panicking, whatever of it fails")]

pub mod benched;
mod bundle;
pub mod chromium;
pub mod containerd;
pub mod copies;
pub mod cri;
pub mod docker;
pub mod entry_point;
pub mod frameworks;
pub mod guarded;
pub mod hooked;
pub mod installed;
pub mod kept;
pub mod killing;
pub mod measuring;
pub mod mig;
pub mod podman;
mod processes;
pub mod programs;
mod refused;
mod rootfs;
pub mod rootless;
pub mod slurm;
mod stopping;
pub mod swarm;
pub mod terminal;
pub mod user;
pub mod web;
mod world;

pub use bundle::{Bundle, Finished, by_systemd};
pub use processes::{is_alive, stop};
pub use refused::{assert_lines, in_one_line, tree};
pub use rootfs::{Rootfs, copy_program};
pub use stopping::Stopping;
pub use world::{Engine, World, bin_dir, eventually, skip_unless_root};
