//! Admission, for every entry point: from a container's spec to a lease and an edited spec, and back.
//!
//! [`Leases::admit`] takes a lease when a container starts, [`Leases::end`] frees it when the container ends. A step
//! that fails undoes those before it. After a crash the next command cleans up,
//! because a lease is on disk before anything that depends on it exists.
//!
//! In a rootless engine, which may not change the state, each of them asks `sublet serve` instead. Here it only
//! does what concerns the container itself: reading its root filesystem, editing its spec.

mod current_inventory;
pub mod dynamic_mig;
mod end_left;
mod error;
mod exec_share;
mod for_users;
mod grant_at_prestart;
mod in_job;
mod job_error;
mod job_share;
mod last_refusals;
mod left_mount_points;
mod local;
mod local_leases;
mod local_or_remote;
pub mod reason;
mod reconcile;
mod remote;
mod request_of_spec;
pub mod take_lease;

use std::time::Duration;

use crate::ledger::{Container, LeaseId};
use crate::oci::engine::Engine;
use crate::process::Process;

use current_inventory::fresh_inventory_beside;

pub use current_inventory::{confirmed_inventory, fresh_inventory, refresh};
pub use dynamic_mig::{Answer as MakeAnswer, Ask as MakeAsk, PutOff};
pub use end_left::Owns;
pub use error::AdmitError;
pub use exec_share::{EnterError, Share, enter, find_share, may_have_share};
pub use grant_at_prestart::{LateAdmission, admit_late, find_ended_lease};
pub use in_job::job_share;
pub use job_error::{JobError, Widened};
pub use last_refusals::{RefusalRecord, record_reported, refusals};
pub use left_mount_points::clear_refused;
pub use local::Local;
pub use local_or_remote::{Leases, is_remote};
pub use reconcile::read;
pub use remote::own_status;
pub use request_of_spec::{
    RequestSource, asks_for_job_share, remove_earlier_grant, request_by_cdi, request_of,
};
pub use take_lease::lease_for;

/// The time limit for the end of an ended container's last processes.
const EMPTY_CGROUP: Duration = Duration::from_secs(5);

/// A container that an entry point wants to admit.
#[derive(Debug)]
pub struct Candidate<'a> {
    /// The container.
    pub container: Container,
    /// The low-level runtime's process. If it ends and there is no container, the lease is freed.
    pub owner: Process,
    /// The engine that waits for it, if known.
    pub engine: Option<&'a Engine>,
}

impl Candidate<'_> {
    /// Whether the engine still waits for it.
    pub fn check_wanted(&self) -> Result<(), AdmitError> {
        if self.engine.is_some_and(Engine::is_gone) { Err(AdmitError::NoEngine) } else { Ok(()) }
    }

    /// Waits before the next attempt.
    fn wait(&self, pause: Duration) {
        match self.engine {
            Some(engine) => engine.wait(pause),
            None => std::thread::sleep(pause),
        }
    }
}

/// The result.
#[derive(Debug)]
pub enum Admission {
    /// It already has a live lease. Nothing was changed.
    AlreadyGranted(LeaseId),
    /// It has the share of its job of Slurm's, which asked for no GPU. Nothing was changed.
    NoShare,
    /// `spec` was edited and must be written. If that fails, call [`Leases::withdraw`].
    Granted {
        /// The new lease.
        lease: LeaseId,
        /// For stderr and the log, one line each.
        warnings: Vec<String>,
    },
}
