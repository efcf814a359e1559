//! The guard: limits containers to their shares from the host, because MPS limits only honest programs.
//!
//! `sublet serve` checks every leased device a few times a second ([`watch`]). NVML tells which processes compute there,
//! and with how much memory; the kernel tells which container each belongs to ([`look`]). [`judge`] compares that
//! with the leases, without I/O. The guard acts on what it finds in two checks in a row ([`act`]) and records it
//! ([`book`]). It restarts an MPS daemon that died, and reports the containers that lost GPU work ([`served`]).
//! The guard holds no lock, and keeps NVML open only while there is a lease.

mod act;
mod book;
mod files;
mod judge;
mod lists;
mod look;
mod served;
mod watch;

pub use book::{Event, Sight, events, sight};
pub use judge::Offence;
pub(crate) use watch::start;
