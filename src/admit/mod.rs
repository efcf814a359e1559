//! The one way through, for every door: from a container's spec to a lease and an edited spec, and back.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::config::Config;
use crate::ledger::{Container, LeaseId};
use crate::process::Process;

/// Why a container is not started.
#[derive(Debug, thiserror::Error)]
pub enum AdmitError {}

/// A container that a door brings.
#[derive(Debug)]
pub struct Candidate<'a> {
    /// Whose it is.
    pub container: Container,
    /// The process whose end without a container means that the lease is gone: the low-level runtime's.
    pub owner: Process,
    /// The share that the door's name means (`sublet-<share>`).
    pub share: Option<&'a str>,
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

/// Finds the container its share and edits `spec` for it.
///
/// # Errors
/// Any reason not to start it; nothing is left behind then.
pub fn admit(
    _candidate: &Candidate<'_>,
    _spec: &mut Value,
    _config: &Config,
) -> Result<Admission, AdmitError> {
    todo!()
}

/// Gives `lease` back before its container ever existed.
///
/// # Errors
/// The ledger cannot be written.
pub fn withdraw(_lease: &LeaseId, _config: &Config) -> Result<(), AdmitError> {
    todo!()
}

/// The container with this lease is gone: frees it once its cgroup is empty, then settles its server.
/// Unknown ids are no error: late ends come twice.
///
/// # Errors
/// The ledger cannot be read or written, or its processes do not go.
pub fn end(_lease: &LeaseId, _config: &Config) -> Result<(), AdmitError> {
    todo!()
}

/// Marks the lease of container `id` (of `uid`) as ending; the state it had comes back by [`unmark`].
///
/// # Errors
/// The ledger cannot be written.
pub fn mark_ending(
    _uid: u32,
    _id: &str,
    _record: &Path,
    _config: &Config,
) -> Result<Option<LeaseId>, AdmitError> {
    todo!()
}

/// A failed delete leaves the lease as it was.
///
/// # Errors
/// The ledger cannot be written.
pub fn unmark(_lease: &LeaseId, _config: &Config) -> Result<(), AdmitError> {
    todo!()
}

/// The environment edit that exec'd processes of container `id` need, or `None` when it has no lease.
///
/// # Errors
/// Ledger or inventory cannot be read.
pub fn exec_environment(
    _uid: u32,
    _id: &str,
    _record: &Path,
    _config: &Config,
) -> Result<Option<crate::grant::Environment>, AdmitError> {
    todo!()
}

/// Path of the `sublet` program that belongs to this build.
#[must_use]
pub fn sublet_program() -> PathBuf {
    todo!()
}
