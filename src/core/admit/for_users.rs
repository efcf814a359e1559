//! The service's side of admission. Users describe their containers, and only they may change their leases.

use std::path::Path;
use std::time::Duration;

use super::end_left::Owns;
use super::local::{Local, read};
use super::take_lease::{self, Rootfs, Terms};
use super::{AdmitError, Candidate};
use crate::broker::policy_limits::PolicyLimit;
use crate::broker::protocol::{Admit, Answer, ContainerNames, Granted};
use crate::ledger::{Binding, Init, LEASE_ANNOTATION, LeaseId, Leftover};
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
        if let Some(id) = ask.annotations.get(LEASE_ANNOTATION) {
            return self.resume_granted(id, &candidate.container).map(Answer::AlreadyGranted);
        }
        let mut request =
            request::parse(&ask.annotations, ask.share.as_deref(), ask.capabilities.as_deref(), self.config)?;
        request.wait = Duration::ZERO;
        let store = self.store()?;
        let terms = Terms { rootfs: Rootfs::Reported(&ask.image), limit };
        let taken = take_lease::take(candidate, &request, terms, &store, *self)?;
        let served = self
            .grant(&taken, &request, &store)
            .and_then(|grant| Ok((self.make_daemon_ready(&taken, &grant, &store)?, grant)));
        let (warnings, grant) = served.inspect_err(|_| self.free_or_warn(&taken.lease, &store))?;
        Ok(Answer::Granted(Box::new(Granted { lease: taken.lease.id, grant, warnings })))
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
        // Other containers may share its root filesystem or volumes.
        let others = || ledger.leases.iter().filter(|other| other.id != held.id && other.is_believed_by(uid));
        if others().any(|other| other.container.rootfs == *rootfs) {
            return Ok(None);
        }
        let used: Vec<u64> = others().flat_map(|other| &other.volumes).map(|volume| volume.device).collect();
        let volumes = held.volumes_with_files().into_iter();
        Ok(Some(Leftover {
            bundle: held.container.bundle.clone(),
            rootfs: rootfs.clone(),
            mount_points: held.mount_points.to_vec(),
            volumes: volumes.filter(|volume| !used.contains(&volume.device)).collect(),
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
        let ContainerNames { id, bundle, record, .. } = names.clone();
        self.bind(lease, &Binding { id, bundle, record, init })
    }
}
