//! The program `sublet`, which users and systemd run, and all code that needs NVML.

// Layers, the lowest first: a module uses only modules that stand above it here (`make lint`).

mod cached_files;
mod http;
mod known_faults;
mod libcuda;
mod nvml_mig;
mod own_root;
mod peer;
mod policy_rule;
mod proc;
mod svg;
mod terminal;
mod yaml;

mod load;

pub mod names;

mod sick_gpus;

pub mod probe;

mod gpu_processes;

mod usage;

pub mod mig;

mod cdi_spec;
pub mod mps_daemons;

pub mod refresh;

mod suspend;

pub mod guard;

pub mod events;

pub mod status;

mod shown;

mod accounting;

mod metrics;

mod bench;

mod top;

mod preview;

pub mod serve;

mod slurm;

pub mod setup;

mod stack;

mod advise;

pub mod doctor;

pub mod commands;
