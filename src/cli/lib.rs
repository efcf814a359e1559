//! The program `sublet`: what people and systemd run, and all that needs NVML.

pub mod cdi_spec;
pub mod commands;
pub mod doctor;
pub mod guard;
pub mod mig;
pub mod mps_daemons;
mod preview;
pub mod probe;
pub mod serve;
pub mod setup;
