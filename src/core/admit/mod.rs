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
mod error;
mod exec_share;
mod for_users;
mod grant_at_prestart;
mod left_mount_points;
mod local;
mod local_leases;
mod local_or_remote;
mod reconcile;
mod refusals;
mod remote;
mod request_of_spec;
pub mod take_lease;

use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::config::Config;
use crate::ledger::{Binding, Container, Lease, LeaseId};
use crate::oci::engine::Engine;
use crate::oci::podman_storage;
use crate::oci::{self, SpecError};
use crate::process::Process;

use local_or_remote::State;
use remote::Remote;

pub use current_inventory::{confirmed_inventory, fresh_inventory, refresh};
pub use dynamic_mig::{Answer as MakeAnswer, Ask as MakeAsk, PutOff};
pub use error::AdmitError;
pub use exec_share::{EnterError, Share, enter, may_have_share, share_of};
pub use grant_at_prestart::{Late, end_of, late};
pub use left_mount_points::clear_unbound;
pub use local::Local;
pub use local_or_remote::is_remote;
pub use reconcile::read;
pub use refusals::{RefusalRecord, record_told, refusals};
pub use remote::own_status;
pub use request_of_spec::request_of;
pub use take_lease::lease_for;

/// How long the last processes of an ended container may take to go.
const EMPTY_CGROUP: Duration = Duration::from_secs(5);

/// A container that an entry point brings.
#[derive(Debug)]
pub struct Candidate<'a> {
    /// Whose it is.
    pub container: Container,
    /// The process whose end without a container means that the lease is gone: the low-level runtime's.
    pub owner: Process,
    /// The share that the entry point's name means (`sublet-<share>`).
    pub share: Option<&'a str>,
    /// Who waits for it, where that can be told.
    pub engine: Option<&'a Engine>,
}

impl Candidate<'_> {
    /// Whether the engine still waits for it.
    ///
    /// # Errors
    /// [`AdmitError::NoEngine`].
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

/// What came of it.
#[derive(Debug)]
pub enum Admission {
    /// Not ours: nothing was touched.
    NotOurs,
    /// It carries a live lease of its own already: nothing was touched.
    AlreadyGranted(LeaseId),
    /// `spec` is edited and has to be written; on failure call [`withdraw`].
    Granted {
        /// The new lease.
        lease: LeaseId,
        /// For stderr and the log, one line each.
        warnings: Vec<String>,
    },
}

/// Where the state is that `config` names.
fn state(config: &Config) -> Box<dyn State + '_> {
    if is_remote(config) { Box::new(Remote::new(config)) } else { Box::new(Local::new(config)) }
}

/// Whether the container that `spec` describes asks for a share, or comes for `share` without saying so.
///
/// # Errors
/// Its annotations are none.
pub fn asks_for_a_share(spec: &Value, share: Option<&str>) -> Result<bool, SpecError> {
    Ok(request_of_spec::asks_for_a_share(spec, &oci::annotations(spec)?, share))
}

/// `container` with its root filesystem as it can be looked into now: config.json may name a place where it is mounted
/// later.
///
/// # Errors
/// Nobody says where it is; `sublet status --last-error` has it.
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

/// Finds the container its share and edits `spec` for it.
///
/// # Errors
/// Any reason not to start it; nothing is left behind then, and `sublet status --last-error` has it.
pub fn admit(candidate: &Candidate<'_>, spec: &mut Value, config: &Config) -> Result<Admission, AdmitError> {
    let annotations = oci::annotations(spec)?;
    if !request_of_spec::asks_for_a_share(spec, &annotations, candidate.share) {
        return Ok(Admission::NotOurs);
    }
    let state = state(config);
    let admitted = has_place_for_mounts(spec, &candidate.container, config)
        .and_then(|()| state.admit(candidate, &annotations, spec));
    if let Err(error) = &admitted {
        state.record_refusal(&candidate.container.name(), error);
    }
    admitted
}

/// Whether what is mounted for the container stays in it, and what another entry point has mounted is seen there.
fn has_place_for_mounts(spec: &Value, container: &Container, config: &Config) -> Result<(), AdmitError> {
    oci::own_mount_namespace(spec)?;
    Ok(oci::uncovered(spec, &container.rootfs, &config.state_dir)?)
}

/// Gives `lease` back before its container ever existed.
///
/// # Errors
/// The ledger cannot be written.
pub fn withdraw(lease: &LeaseId, config: &Config) -> Result<(), AdmitError> {
    state(config).withdraw(lease)
}

/// The container with this lease is gone: frees it once its cgroup is empty, then settles its server.
/// Unknown ids are no error: late ends come twice.
///
/// # Errors
/// The ledger cannot be read or written, or its processes do not go.
pub fn end(lease: &LeaseId, config: &Config) -> Result<(), AdmitError> {
    state(config).end(lease)
}

/// After the end of a container whose lease is `record` in its own annotations: a rootless user removes what
/// it left in the user's own files, whoever has freed the lease.
pub fn clear_after(record: &str, config: &Config) {
    if let Some(lease) = Lease::from_annotation(record) {
        state(config).clear_after(&lease);
    }
}

/// Gives up what `owner`, an engine that starts container `id` of `uid` anew, holds for it from a start
/// that came to nothing.
///
/// # Errors
/// The ledger cannot be read or written.
pub fn abandon(uid: u32, id: &str, owner: Process, config: &Config) -> Result<(), AdmitError> {
    state(config).abandon(uid, id, owner)
}

/// Makes `owner` answer for `lease` until it is bound: its end without a container, or too long a wait,
/// means that the lease is gone.
///
/// # Errors
/// The ledger cannot be written.
pub fn hand_over(lease: &LeaseId, owner: Process, config: &Config) -> Result<(), AdmitError> {
    state(config).hand_over(lease, owner)
}

/// Binds `lease` to its container, which exists now.
///
/// # Errors
/// The lease is gone or another container's: this one must not start. Or the ledger cannot be written.
pub fn bind(lease: &LeaseId, binding: &Binding, config: &Config) -> Result<(), AdmitError> {
    let state = state(config);
    let bound = state.bind(lease, binding);
    if let Err(error) = &bound {
        state.record_refusal(&binding.id, error);
    }
    bound
}

/// Marks the lease of container `id` (of `uid`) as ending; the state it had comes back by [`unmark`].
///
/// # Errors
/// The ledger cannot be written.
pub fn mark_ending(
    uid: u32,
    id: &str,
    record: &Path,
    config: &Config,
) -> Result<Option<LeaseId>, AdmitError> {
    state(config).mark_ending(uid, id, record)
}

/// A failed delete leaves the lease as it was.
///
/// # Errors
/// The ledger cannot be written.
pub fn unmark(lease: &LeaseId, config: &Config) -> Result<(), AdmitError> {
    state(config).unmark(lease)
}
