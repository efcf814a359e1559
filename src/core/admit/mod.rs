//! Admission, for every entry point: from a container's spec to a lease and an edited spec, and back.
//!
//! [`admit`] takes a lease when a container starts, [`end`] frees it when the container ends. A step
//! that fails undoes those before it. After a crash the next command cleans up,
//! because a lease is on disk before anything that depends on it exists.
//!
//! In a rootless engine, which may not change the state, each function asks `sublet serve` instead. Here it only
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

use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::config::Config;
use crate::ledger::{Binding, Container, Lease, LeaseId};
use crate::oci;
use crate::oci::engine::Engine;
use crate::oci::podman_storage;
use crate::process::Process;

use local_or_remote::State;
use remote::Remote;

use current_inventory::fresh_inventory_beside;

pub use current_inventory::{confirmed_inventory, fresh_inventory, refresh};
pub use dynamic_mig::{Answer as MakeAnswer, Ask as MakeAsk, PutOff};
pub use end_left::Owns;
pub use error::AdmitError;
pub use exec_share::{EnterError, Share, enter, may_have_share, share_of};
pub use grant_at_prestart::{Late, end_of, late};
pub use in_job::job_share;
pub use job_error::{JobError, Widened};
pub use last_refusals::{RefusalRecord, record_told, refusals};
pub use left_mount_points::clear_unbound;
pub use local::Local;
pub use local_or_remote::is_remote;
pub use reconcile::read;
pub use remote::own_status;
pub use request_of_spec::{RequestSource, asks_for_job_share, request_by_cdi, request_of, undo};
pub use take_lease::lease_for;

/// How long the last processes of an ended container may take to go.
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

    /// Waits before the next look for a share.
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
    /// `spec` was edited and must be written. If that fails, call [`withdraw`].
    Granted {
        /// The new lease.
        lease: LeaseId,
        /// For stderr and the log, one line each.
        warnings: Vec<String>,
    },
}

/// The state that `config` names.
fn state(config: &Config) -> Box<dyn State + '_> {
    if is_remote(config) { Box::new(Remote::new(config)) } else { Box::new(Local::for_engine(config)) }
}

/// `container` with the path at which its root filesystem can be read now. config.json may name a place where it is
/// mounted only later.
///
/// # Errors
/// The root filesystem cannot be found. `sublet status --last-error` shows this.
pub fn located(
    container: Container,
    spec: &Value,
    bundle: &Path,
    config: &Config,
) -> Result<Container, AdmitError> {
    let found =
        podman_storage::root_filesystem(container.rootfs.clone(), spec, bundle).map_err(AdmitError::from);
    if let Err(error) = &found {
        state(config).record_refusal(&container.name(), error);
    }
    Ok(Container { rootfs: found?, ..container })
}

/// Takes a share for the container and edits `spec` for it.
///
/// # Errors
/// Any reason not to start the container. Nothing is then left behind, and `sublet status --last-error` shows the
/// reason.
pub fn admit(
    candidate: &Candidate<'_>,
    source: &RequestSource,
    spec: &mut Value,
    config: &Config,
) -> Result<Admission, AdmitError> {
    let state = state(config);
    let admitted = has_place_for_mounts(spec, &candidate.container, config)
        .and_then(|()| state.admit(candidate, source, spec));
    if let Err(error) = &admitted {
        state.record_refusal(&candidate.container.name(), error);
    }
    admitted
}

/// Checks that the container has its own mount namespace, and that it can see what another entry point has mounted.
fn has_place_for_mounts(spec: &Value, container: &Container, config: &Config) -> Result<(), AdmitError> {
    oci::own_mount_namespace(spec)?;
    Ok(oci::uncovered(spec, &container.rootfs, &config.state_dir)?)
}

/// Frees `lease`, whose container was never created.
pub fn withdraw(lease: &LeaseId, config: &Config) -> Result<(), AdmitError> {
    state(config).withdraw(lease)
}

/// Frees the lease of an ended container once its cgroup is empty, then adjusts or ends its MPS server. Unknown ids are
/// no error, because an end may be reported twice.
///
/// # Errors
/// The ledger cannot be read or written, or the container's processes do not end.
pub fn end(lease: &LeaseId, config: &Config) -> Result<(), AdmitError> {
    state(config).end(lease)
}

/// After the end of a container whose annotation has the lease `record`, a rootless user removes what it left in the
/// user's own files, whichever process has freed the lease.
pub fn clear_after(record: &str, config: &Config) {
    if let Some(lease) = Lease::from_annotation(record) {
        state(config).clear_after(&lease);
    }
}

/// Frees the lease that `owner`, an engine that starts container `id` of `uid` again, still holds from a failed start.
pub fn abandon(uid: u32, id: &str, owner: Process, config: &Config) -> Result<(), AdmitError> {
    state(config).abandon(uid, id, owner)
}

/// Makes `owner` responsible for `lease` until it is bound. If `owner` ends without a container, or binding takes too
/// long, the lease is freed.
pub fn hand_over(lease: &LeaseId, owner: Process, config: &Config) -> Result<(), AdmitError> {
    state(config).hand_over(lease, owner)
}

/// Binds `lease` to its container, which now exists.
///
/// # Errors
/// The lease was freed or belongs to another container, so this container must not start. Or the ledger cannot be
/// written.
pub fn bind(lease: &LeaseId, binding: &Binding, config: &Config) -> Result<(), AdmitError> {
    let state = state(config);
    let bound = state.bind(lease, binding);
    if let Err(error) = &bound {
        state.record_refusal(&binding.id, error);
    }
    bound
}

/// Marks the lease of container `id` (of `uid`) as ending. [`unmark`] restores its earlier state.
pub fn mark_ending(
    uid: u32,
    id: &str,
    record: &Path,
    config: &Config,
) -> Result<Option<LeaseId>, AdmitError> {
    state(config).mark_ending(uid, id, record)
}

/// A failed delete leaves the lease as it was.
pub fn unmark(lease: &LeaseId, config: &Config) -> Result<(), AdmitError> {
    state(config).unmark(lease)
}
