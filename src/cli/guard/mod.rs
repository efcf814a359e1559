//! The guard: holds containers to their shares from the host, for what MPS holds honest programs to only.
//!
//! `sublet serve` looks at every device that is leased, a few times a second ([`watch`]): who computes there and
//! with how much memory, by NVML, and whose processes these are, by the kernel ([`look`]). [`judge`] compares that
//! with the leases, without any I/O; what it finds in two looks in a row is acted upon ([`act`]) and written down
//! ([`book`]). An MPS daemon that died is started again, and whose work its server took with it is told ([`served`]).
//! Nothing here holds a lock, and NVML is open only while there is a lease.

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
