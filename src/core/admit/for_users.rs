//! The service's side of admission. Users describe their containers, and only they may change their leases.

use std::path::Path;
use std::time::Duration;

use super::end_left::Owns;
use super::reconcile::Local;
use super::reconcile::read;
use super::take_lease::{self, Rootfs, Terms};
use super::{AdmitError, Candidate};
use crate::broker::policy_limits::PolicyLimit;
use crate::broker::protocol::{Admit, Answer, ContainerNames, Granted};
use crate::ledger::{Binding, Init, LEASE_ANNOTATION, Lease, LeaseId, Ledger, Leftover, VolumeFiles};
use crate::process::Process;
use crate::{mps, request};

impl Local<'_> {
    /// Takes a share for `candidate`, which its user described in `ask`, within `limit`. It tries once and does not wait.
    pub fn admit_for(
        &self,
        candidate: &Candidate<'_>,
        ask: &Admit,
        limit: Option<PolicyLimit<'_>>,
    ) -> Result<Answer, AdmitError> {
        match ask.annotations.get(LEASE_ANNOTATION) {
            Some(id) => self.resume_granted(id, &candidate.container).map(Answer::AlreadyGranted),
            None => self.grant_for(candidate, ask, limit),
        }
    }

    fn grant_for(
        &self,
        candidate: &Candidate<'_>,
        ask: &Admit,
        limit: Option<PolicyLimit<'_>>,
    ) -> Result<Answer, AdmitError> {
        let mut request =
            request::parse(&ask.annotations, ask.share.as_deref(), ask.capabilities.as_deref(), self.config)?;
        request.wait = Duration::ZERO;
        let store = self.store()?;
        let terms = Terms { rootfs: Rootfs::Reported(&ask.image), limit };
        let taken = take_lease::take(candidate, &request, terms, &store, *self)?;
        let served = self.grant(&taken, &request, &store).and_then(|grant| {
            self.make_daemon_ready(&taken, &grant, &store).map(|warnings| (grant, warnings))
        });
        match served {
            Ok((grant, warnings)) => {
                let lease = taken.lease.id;
                Ok(Answer::Granted(Box::new(Granted { lease, grant, warnings })))
            }
            Err(error) => {
                self.free_or_warn(&taken.lease, &store);
                Err(error)
            }
        }
    }

    /// [`Local::free_for`] for a deleted container of `uid`: kills the processes that it has left, if it `owns` them.
    pub fn end_for(&self, uid: u32, lease: &LeaseId, owns: Owns<'_>) -> Result<Option<Leftover>, AdmitError> {
        let ledger = read(&self.store()?)?;
        let own = ledger.lease(lease).filter(|held| held.brokered && held.container.uid == uid);
        if let Some(held) = own.filter(|held| held.may_be_ended() && held.has_processes()) {
            for line in self.kill_left(held, &ledger, owns) {
                tracing::warn!("{line}");
            }
        }
        self.free_for(uid, lease)
    }

    /// Frees `lease` of `uid` if none of its processes is left. Returns what the user has to remove. A lease that is
    /// not in the ledger is no error, because an end may be reported twice.
    ///
    /// # Errors
    /// The lease belongs to another user, it still has processes, or the ledger cannot be written.
    pub fn free_for(&self, uid: u32, lease: &LeaseId) -> Result<Option<Leftover>, AdmitError> {
        let store = self.store()?;
        let ledger = read(&store)?;
        let Some(held) = ledger.lease(lease) else { return Ok(None) };
        if held.container.uid != uid || !held.brokered {
            return Err(AdmitError::NoLease(lease.clone()));
        }
        if held.has_processes() {
            return Err(self.still_running(held, &ledger));
        }
        self.free(lease, &store)?;
        let rootfs = &held.container.rootfs;
        let in_use = other_leases(held, &ledger).any(|other| other.container.rootfs == *rootfs);
        Ok((!in_use).then(|| Leftover {
            bundle: held.container.bundle.clone(),
            rootfs: rootfs.clone(),
            mount_points: held.mount_points.to_vec(),
            volumes: clearable_volumes(held, &ledger),
        }))
    }

    /// As [`super::Leases::enter`] for container `id` of `uid`, who asks `sublet serve`. `false`: no lease of it is known here.
    pub fn enter_for(&self, uid: u32, id: &str, record: &Path) -> Result<bool, AdmitError> {
        let ledger = read(&self.store()?)?;
        let Some(lease) = ledger.find_by_record(uid, id, record) else { return Ok(false) };
        if let Some(key) = &lease.daemon {
            mps::ensure_answering(&key.public(&self.config.state_dir), self.config)?;
        }
        Ok(true)
    }

    /// As [`super::Leases::bind`], to `process`, which was verified to be the user's. `beside` is the process that reported it.
    ///
    /// # Errors
    /// The lease was freed or belongs to another container, or the ledger cannot be written.
    pub fn bind_for(
        &self,
        lease: &LeaseId,
        names: &ContainerNames,
        process: Process,
        beside: i32,
    ) -> Result<(), AdmitError> {
        let init = Init::beside(process, beside).map_err(|source| AdmitError::no_cgroup(lease, &source))?;
        let binding = Binding {
            id: names.id.clone(),
            bundle: names.bundle.clone(),
            record: names.record.clone(),
            init,
        };
        self.bind(lease, &binding)
    }
}

/// The leases of other containers, which may share `held`'s root filesystem or volumes.
fn other_leases<'l>(held: &'l Lease, ledger: &'l Ledger) -> impl Iterator<Item = &'l Lease> {
    ledger.leases.iter().filter(|other| other.id != held.id && other.is_believed_by(held.container.uid))
}

/// The files that the user has to remove from volumes that no other container with a share uses.
fn clearable_volumes(held: &Lease, ledger: &Ledger) -> Vec<VolumeFiles> {
    let volumes = other_leases(held, ledger).flat_map(|other| &other.volumes);
    let used: Vec<u64> = volumes.map(|volume| volume.device).collect();
    held.volumes_with_files().into_iter().filter(|volume| !used.contains(&volume.device)).collect()
}
