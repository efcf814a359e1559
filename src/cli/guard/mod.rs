//! The guard: limits containers to their shares from the host, because MPS limits only honest programs.
//!
//! `sublet serve` checks every leased device a few times a second ([`guard_thread`]). NVML tells which processes
//! compute there, and with how much memory; the kernel tells which container each belongs to (`gpu_processes`).
//! [`judge`] compares that with the leases, without I/O. The guard acts on what it finds in two checks in a row
//! ([`enforce`]) and records it ([`history`]). It restarts an MPS daemon that died, and reports the containers that
//! lost GPU work ([`mps_servers`]). It ends a server that takes no new client after a fault ([`faulted_servers`]), and who keeps
//! a daemon waiting ([`silent_connections`]). The guard holds no lock, and keeps NVML open only while there is a lease.

mod enforce;
mod faulted_servers;
mod guard_thread;
mod history;
mod judge;
mod mps_servers;
mod silent_connections;
mod unix_peer;

pub(crate) use guard_thread::start;
pub use history::{Event, Sight, events, sight};
pub(crate) use history::{OFF, last_look};
pub use judge::Offence;
