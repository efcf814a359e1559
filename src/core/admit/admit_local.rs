//! Admission if the state is on this host's disk: takes the lease, edits the spec and makes the MPS daemon ready. Also the
//! service's side of it: users describe their containers, and only they may change their leases.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::end_left::Owns;
use super::job_share::JobError;
use super::local::{Local, is_same_container, read};
use super::request_of_spec::{
    RequestSource, explain_gone_cdi_device, is_of_bundle, remove_earlier_grant, request_of,
};
use super::take_lease::{self, Taken, Terms};
use super::{Admission, AdmitError, Candidate, last_refusals};
use crate::broker::policy_limits::PolicyLimit;
use crate::broker::protocol::{Admit, Answer, ContainerNames, Granted};
use crate::grant::{self, Grant};
use crate::ledger::{Binding, Container, Init, LEASE_ANNOTATION, Lease, LeaseId, Leftover, Store};
use crate::process::Process;
use crate::request::Request;
use crate::{inventory, mps, oci, request};

impl Local<'_> {
    pub(super) fn admit(
        &self,
        candidate: &Candidate<'_>,
        source: &RequestSource,
        spec: &mut Value,
    ) -> Result<Admission, AdmitError> {
        let Some(id) = source.annotations.get(LEASE_ANNOTATION) else {
            if source.is_of_job() {
                return Err(JobError::Root.into());
            }
            return self.admit_new(candidate, source, spec);
        };
        // Another entry point has already admitted the container, or its bundle is run again.
        match self.resume_granted(id, &candidate.container) {
            Err(AdmitError::ForgedLease { .. }) if is_of_bundle(id, spec, &candidate.container) => {
                remove_earlier_grant(spec)?;
                self.admit_new(candidate, &source.without_lease(), spec)
            }
            resumed => Ok(Admission::AlreadyGranted(resumed?)),
        }
    }

    /// [`Local::find_granted`]. Makes its daemon ready again: the lease may have been taken a while ago.
    pub(super) fn resume_granted(&self, id: &str, container: &Container) -> Result<LeaseId, AdmitError> {
        let lease = self.find_granted(id, container)?;
        if lease.daemon.is_some() {
            mps::make_ready(&lease, &self.store()?, self.config)?;
        }
        Ok(lease.id)
    }

    /// A spec with a lease id counts as granted only if the ledger has that live lease for this container. A lease
    /// whose container was never created does not count, although only the next command frees it.
    pub(super) fn find_granted(&self, id: &str, container: &Container) -> Result<Lease, AdmitError> {
        let (ledger, _) = read(&self.store()?)?.preview_reclaim();
        let granted =
            LeaseId::parse(id).and_then(|id| ledger.lease(&id).filter(|lease| is_lease_of(lease, container)));
        granted.cloned().ok_or_else(|| AdmitError::ForgedLease { id: id.to_owned() })
    }

    /// Takes a share for a container that has none.
    fn admit_new(
        &self,
        candidate: &Candidate<'_>,
        source: &RequestSource,
        spec: &mut Value,
    ) -> Result<Admission, AdmitError> {
        let request = request_of(source, spec, self.config)?;
        let store = self.store()?.beside(&candidate.container.record);
        let taken = take_lease::take(candidate, &request, Terms::OfSpec(spec), &store, *self)
            .map_err(|error| explain_gone_cdi_device(error, spec, self.config))?;
        let served = self.grant(&taken, &request, &store).and_then(|grant| {
            taken.check_mount_points(spec, &grant)?;
            oci::check_node_modes(spec, &grant.nodes, source.keeps_groups())?;
            oci::edit(spec, &grant)?;
            self.make_daemon_ready(&taken, &grant, &store)
        });
        let warnings = served.inspect_err(|_| self.free_or_warn(&taken.lease, &store))?;
        let lease = taken.lease.id.clone();
        // This process ends or becomes the low-level runtime now, and the kernel closes all at once.
        std::mem::forget(taken);
        Ok(Admission::Granted { lease, warnings })
    }

    pub(super) fn grant(&self, taken: &Taken, request: &Request, store: &Store) -> Result<Grant, AdmitError> {
        let mut grant = grant::grant(
            &taken.placement,
            &taken.lease,
            &request.capabilities,
            &taken.image,
            &taken.inventory,
            &request.over(self.config),
        );
        grant.record = store.annotation(&taken.lease);
        self.check_nodes(&mut grant)?;
        Ok(grant)
    }

    /// Makes sure that the nodes exist: without one the container would start and find no GPU. Optional ones are left out,
    /// with a warning.
    pub(super) fn check_nodes(&self, grant: &mut Grant) -> Result<(), AdmitError> {
        for granted in std::mem::take(&mut grant.nodes) {
            match inventory::ensure_node(&self.config.driver.root, &granted.node) {
                Err(error) if granted.node.is_optional() => {
                    grant.warnings.push(format!("{error}; the container starts without it"));
                }
                checked => {
                    checked?;
                    grant.nodes.push(granted);
                }
            }
        }
        Ok(())
    }

    /// Ends the daemons in its way and then starts its own daemon. This is the last step, so that no daemon is started
    /// for a container that cannot be served. Returns all warnings.
    pub(super) fn make_daemon_ready(
        &self,
        taken: &Taken,
        grant: &Grant,
        store: &Store,
    ) -> Result<Vec<String>, AdmitError> {
        let mut warnings = mps::end_conflicting(&taken.conflicting_daemons, store)?;
        warnings.extend(mps::make_ready(&taken.lease, store, self.config)?);
        warnings.extend(grant.warnings.iter().cloned());
        last_refusals::record_warnings(&taken.lease, &warnings, &taken.image.warnings(), self.config);
        Ok(warnings)
    }

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
        let terms = Terms::Reported(&ask.image, limit);
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

/// Whether `lease` belongs to `container`. Other entry points may run between the hook that took an unbound lease and
/// the container's creation. The lease is that container's also for an entry point that knows more of its names.
fn is_lease_of(lease: &Lease, container: &Container) -> bool {
    let held = &lease.container;
    let awaited = lease.is_unbound() && held.uid == container.uid;
    is_same_container(held, container) || awaited && (held.id.is_empty() || held.id == container.id)
}
