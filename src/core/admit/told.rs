//! The service's side of admission: containers as their users describe them, leases that only their users may change.

use std::path::Path;
use std::time::Duration;

use super::take::{self, Rootfs, Terms};
use super::{AdmitError, Candidate, free, give_back, granted_still, mark, read, ready};
use crate::broker::caps::Cap;
use crate::broker::protocol::{Admit, Answer, ContainerNames, Granted};
use crate::config::Config;
use crate::ledger::{Binding, Init, LEASE_ANNOTATION, Lease, LeaseId, Ledger, Leftover, Store, VolumeFiles};
use crate::process::Process;
use crate::request;

/// A share for `candidate` as its user's `told` describes it, within `cap`. Looks once.
///
/// # Errors
/// Any reason not to start it.
pub fn admit_told(
    candidate: &Candidate<'_>,
    told: &Admit,
    cap: Option<Cap<'_>>,
    config: &Config,
) -> Result<Answer, AdmitError> {
    match told.annotations.get(LEASE_ANNOTATION) {
        Some(id) => granted_still(id, &candidate.container, config).map(Answer::AlreadyGranted),
        None => grant(candidate, told, cap, config),
    }
}

fn grant(
    candidate: &Candidate<'_>,
    told: &Admit,
    cap: Option<Cap<'_>>,
    config: &Config,
) -> Result<Answer, AdmitError> {
    let mut request =
        request::parse(&told.annotations, candidate.share, told.capabilities.as_deref(), config)?;
    request.wait = Duration::ZERO;
    let store = Store::open(&config.state_dir)?;
    let terms = Terms { rootfs: Rootfs::Told(&told.image), cap };
    let taken = take::take(candidate, &request, terms, &store, config)?;
    let served = super::grant(&taken, &request, config)
        .and_then(|grant| ready(&taken, &grant, &store, config).map(|warnings| (grant, warnings)));
    match served {
        Ok((grant, warnings)) => {
            let lease = taken.lease.id;
            Ok(Answer::Granted(Box::new(Granted { lease, grant, warnings })))
        }
        Err(error) => {
            give_back(&taken.lease, &store, config);
            Err(error)
        }
    }
}

/// Frees `lease` of `uid` if none of its processes is left; what is left of it for the user to clear. One
/// that is not in the ledger is no error: late ends come twice.
///
/// # Errors
/// It is somebody else's, it has processes, or the ledger cannot be written.
pub fn free_told(uid: u32, lease: &LeaseId, config: &Config) -> Result<Option<Leftover>, AdmitError> {
    let store = Store::open(&config.state_dir)?;
    let ledger = read(&store)?;
    let Some(held) = ledger.lease(lease) else { return Ok(None) };
    if held.container.uid != uid || !held.brokered {
        return Err(AdmitError::NoLease(lease.clone()));
    }
    if held.has_processes() {
        let container = held.container.id.clone();
        return Err(AdmitError::StillRunning { lease: lease.clone(), container });
    }
    free(lease, &store, config)?;
    let rootfs = &held.container.rootfs;
    let in_use = ledger.leases.iter().any(|other| other.id != *lease && other.container.rootfs == *rootfs);
    Ok((!in_use).then(|| Leftover {
        bundle: held.container.bundle.clone(),
        rootfs: rootfs.clone(),
        mount_points: held.mount_points.clone(),
        volumes: free_volumes(held, &ledger),
    }))
}

/// What the user is to remove from volumes that no other container with a share has.
fn free_volumes(held: &Lease, ledger: &Ledger) -> Vec<VolumeFiles> {
    let others = ledger.leases.iter().filter(|other| other.id != held.id);
    let used: Vec<u64> = others.flat_map(|other| &other.volumes).map(|volume| volume.device).collect();
    held.made_in_volumes().into_iter().filter(|volume| !used.contains(&volume.device)).collect()
}

/// As [`super::mark_ending`], where `deleter` deletes the container.
///
/// # Errors
/// The ledger cannot be written.
pub fn mark_ending_by(
    deleter: Process,
    uid: u32,
    id: &str,
    record: &Path,
    config: &Config,
) -> Result<Option<LeaseId>, AdmitError> {
    mark(uid, id, record, Some(deleter), config)
}

/// As [`super::bind`], to `process`, which has been found to be the user's; `beside` is who told.
///
/// # Errors
/// The lease is gone or another container's, or the ledger cannot be written.
pub fn bind_told(
    lease: &LeaseId,
    names: &ContainerNames,
    process: Process,
    beside: i32,
    config: &Config,
) -> Result<(), AdmitError> {
    let binding = Binding {
        id: names.id.clone(),
        bundle: names.bundle.clone(),
        record: names.record.clone(),
        init: Init::beside(process, beside),
    };
    super::bind::bind_here(lease, &binding, config)
}
