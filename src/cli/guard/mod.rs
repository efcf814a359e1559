//! The guard: holds containers to their shares from the host, for what MPS holds honest programs to only.
//!
//! `sublet serve` looks at every device that is leased, a few times a second ([`guard_thread`]): who computes there and
//! with how much memory, by NVML, and whose processes these are, by the kernel ([`observe`]). [`judge`] compares that
//! with the leases, without any I/O; what it finds in two looks in a row is acted upon ([`enforce`]) and written down
//! ([`history`]). An MPS daemon that died is started again, and whose work its server took with it is told ([`mps_servers`]).
//! Nothing here holds a lock, and NVML is open only while there is a lease.

mod cached_files;
mod enforce;
mod guard_thread;
mod history;
mod judge;
mod mps_servers;
mod observe;
mod process_lists;

pub(crate) use guard_thread::start;
pub use history::{Event, Sight, events, sight};
pub use judge::Offence;
