//! Which leases an entry point is about: leases on this host's disk, which this process changes itself ([`Local`]), or
//! leases of `sublet serve`, which is asked to do so ([`super::remote`]).
//!
//! Then admission if the state is on this host's disk: takes the lease, edits the spec and makes the MPS daemon ready. Also the
//! service's side of it: users describe their containers, and only they may change their leases.

use std::path::Path;

use serde_json::Value;

use super::end_left::Owns;
use super::job_share::JobError;
use super::local::{Local, is_same_container, read};
use super::remote::Remote;
use super::request_of_spec::{
    RequestSource, explain_gone_cdi_device, is_of_bundle, remove_earlier_grant, request_of,
};
use super::take_lease::{self, Taken, Terms};
use super::{Admission, AdmitError, Candidate, is_remote, last_refusals, refresh};
use crate::broker::policy_limits::PolicyLimit;
use crate::broker::protocol::{Admit, Answer, Ask, ContainerNames, Granted};
use crate::config::Config;
use crate::grant::{self, Grant};
use crate::inventory::{self, Inventory};
use crate::ledger::{
    self, Binding, Container, Init, LEASE_ANNOTATION, Lease, LeaseId, Ledger, Leftover, Store,
};
use crate::oci::{self, container_root};
use crate::process::Process;
use crate::request::{self, Request};
use crate::{log, mps};

/// The leases of a configuration, for an entry point. Whether they are local is decided once, by [`Leases::of`].
pub struct Leases<'a> {
    local: Local<'a>,
    /// Who is asked instead, if this process does not change the ledger itself.
    remote: Option<Remote<'a>>,
}

impl<'a> Leases<'a> {
    /// Decides whether this process changes the ledger itself.
    pub fn of(config: &'a Config) -> Self {
        Self { local: Local::for_engine(config), remote: is_remote(config).then_some(Remote { config }) }
    }

    /// Whether `sublet serve` has them.
    pub const fn are_remote(&self) -> bool {
        self.remote.is_some()
    }

    /// `container` with the path at which its root filesystem can be read now. config.json may name a place where it is
    /// mounted only later.
    ///
    /// # Errors
    /// The root filesystem cannot be found. `sublet status --last-error` shows this.
    pub fn locate_rootfs(
        &self,
        container: Container,
        spec: &Value,
        bundle: &Path,
    ) -> Result<Container, AdmitError> {
        let rootfs = container_root::podman_root_filesystem(container.rootfs.clone(), spec, bundle)
            .map_err(AdmitError::from)
            .inspect_err(|error| self.record_refusal(&container, error, None))?;
        Ok(Container { rootfs, ..container })
    }

    /// Takes a share for the container and edits `spec` for it.
    ///
    /// # Errors
    /// Any reason not to start the container. Nothing is then left behind, and `sublet status --last-error` shows the
    /// reason.
    pub fn admit(
        &self,
        candidate: &Candidate<'_>,
        source: &RequestSource,
        spec: &mut Value,
    ) -> Result<Admission, AdmitError> {
        let container = &candidate.container;
        let checked = oci::check_mount_namespace(spec).map_err(AdmitError::from);
        // It can see the mounts of another entry point.
        let state_dir = &self.local.config.state_dir;
        let checked = checked.and_then(|()| Ok(oci::check_uncovered(spec, &container.rootfs, state_dir)?));
        let admitted = checked.and_then(|()| match &self.remote {
            None => self.local.admit(candidate, source, spec),
            Some(remote) => remote.admit(candidate, source, spec),
        });
        admitted.inspect_err(|error| self.record_refusal(container, error, source.owner(self.local.config)))
    }

    /// Frees `lease`, whose container was never created.
    pub fn withdraw(&self, lease: &LeaseId) -> Result<(), AdmitError> {
        let Some(remote) = &self.remote else { return self.local.free(lease, &self.local.store()?) };
        remote.ask_free(&Ask::Withdraw { lease: lease.clone() })
    }

    /// Frees the lease of an ended container once its cgroup is empty, then adjusts or ends its MPS server. Unknown ids are
    /// no error, because an end may be reported twice.
    ///
    /// # Errors
    /// The ledger cannot be read or written, or the container's processes do not end.
    pub fn end(&self, lease: &LeaseId) -> Result<(), AdmitError> {
        self.remote.as_ref().map_or_else(|| self.local.end(lease), |remote| remote.end(lease))
    }

    /// Removes the leftovers of an ended container of a rootless user whose annotation has the lease `record`, whichever
    /// process has freed the lease. Leftovers of root's containers are removed when their lease is freed.
    pub fn clear_after(&self, record: &str) {
        if let (Some(remote), Some(lease)) = (&self.remote, Lease::from_annotation(record)) {
            remote.clear_after(&lease);
        }
    }

    /// Frees the lease that `owner`, an engine that starts container `id` of `uid` again, still holds from a failed start.
    pub fn abandon(&self, uid: u32, id: &str, owner: Process) -> Result<(), AdmitError> {
        let Some(remote) = &self.remote else { return self.local.abandon(uid, id, owner) };
        remote.abandon(id, owner)
    }

    /// Makes `owner` responsible for `lease` until it is bound. If `owner` ends without a container, or binding takes too
    /// long, the lease is freed.
    pub fn hand_over(&self, lease: &LeaseId, owner: Process) -> Result<(), AdmitError> {
        let Some(remote) = &self.remote else { return self.local.hand_over(lease, owner) };
        remote.ask_done(&Ask::HandOver { lease: lease.clone(), owner: owner.pid })
    }

    /// Binds `lease` to its container, which now exists.
    ///
    /// # Errors
    /// The lease was freed or belongs to another container, so this container must not start. Or the ledger cannot be
    /// written.
    pub fn bind(&self, lease: &LeaseId, binding: &Binding) -> Result<(), AdmitError> {
        let bound = match &self.remote {
            None => self.local.bind(lease, binding),
            Some(remote) => remote.bind(lease, binding),
        };
        let Binding { id, bundle, .. } = binding.clone();
        let container = Container { id, bundle, ..Container::default() };
        bound.inspect_err(|error| self.record_refusal(&container, error, None))
    }

    /// Marks the lease of container `id` (of `uid`) as ending. [`Leases::unmark`] restores its earlier state.
    pub fn mark_ending(&self, uid: u32, id: &str, record: &Path) -> Result<Option<LeaseId>, AdmitError> {
        match &self.remote {
            None => self.local.mark_ending(uid, id, record, Process::current().ok()),
            Some(remote) => remote.mark_ending(id, record),
        }
    }

    /// A failed delete leaves the lease as it was.
    pub fn unmark(&self, lease: &LeaseId) -> Result<(), AdmitError> {
        let Some(remote) = &self.remote else { return self.local.unmark(lease) };
        remote.ask_done(&Ask::Unmark { lease: lease.clone() })
    }

    /// A new inventory, if the cached one is out of date.
    pub(super) fn new_inventory(&self) -> Result<Inventory, AdmitError> {
        self.remote.as_ref().map_or_else(|| refresh(self.local.config), Remote::new_inventory)
    }

    /// The ledger, if it may have leases that no config.json names; `None` if there cannot be any. No hook gives a share to
    /// a rootless container that already exists.
    pub fn ledger_of_hooks(&self) -> Result<Option<Ledger>, AdmitError> {
        let may_be_there = self.remote.is_none() && ledger::is_there(&self.local.config.state_dir);
        if may_be_there { Ok(Some(read(&self.local.store()?)?)) } else { Ok(None) }
    }

    /// Has the service record a warning about the user's container `id`, which is being started.
    pub fn report_warning(&self, id: &str, warning: &str) {
        if let Some(remote) = &self.remote {
            remote.report(id, warning.to_owned(), Vec::new(), true);
        }
    }

    /// Records that `container`, which is for `owner`, was refused, for `sublet status --last-error`. A lost record is no
    /// reason to fail, because the caller reports the error itself.
    pub(super) fn record_refusal(&self, container: &Container, error: &AdmitError, owner: Option<String>) {
        match &self.remote {
            None => last_refusals::record(container, error, owner, self.local.config),
            Some(remote) => remote.record_refusal(&container.name(), error),
        }
    }
}

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
        let of_image = taken.image.warnings();
        if !warnings.is_empty() || !of_image.is_empty() {
            last_refusals::record_warnings(&taken.lease, &warnings, &of_image, self.config);
        }
        Ok(warnings)
    }

    /// Ends the idle MPS daemons on devices of `lease`, which uses them otherwise. They may have set their compute modes.
    ///
    /// # Errors
    /// One of them does not end.
    pub fn end_conflicting(&self, lease: &Lease) -> Result<(), AdmitError> {
        let store = self.store()?;
        let keys: Vec<_> = store.read()?.conflicting_daemons(lease).cloned().collect();
        mps::end_conflicting(&keys, &store)?;
        Ok(())
    }

    /// Takes a share for `candidate`, which its user described in `ask`, within `limit`. It tries once and does not wait:
    /// `asker`, the user's process, asks again.
    pub fn admit_for(
        &self,
        candidate: &Candidate<'_>,
        ask: &Admit,
        asker: Process,
        limit: Option<PolicyLimit<'_>>,
    ) -> Result<Answer, AdmitError> {
        if let Some(id) = ask.annotations.get(LEASE_ANNOTATION) {
            return self.resume_granted(id, &candidate.container).map(Answer::AlreadyGranted);
        }
        let request =
            request::parse(&ask.annotations, ask.share.as_deref(), ask.capabilities.as_deref(), self.config)?;
        let store = self.store()?;
        let terms = Terms::Reported(&ask.image, limit, asker);
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
            log::warn(self.kill_left(held, &ledger, owns));
        }
        self.free_for(uid, lease)
    }

    /// Frees `lease` of `uid` if none of its processes is left. Returns the files that the user has to remove. A lease that is
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
        let beside = || ledger.leases.iter().filter(|other| other.id != held.id && other.is_believed_by(uid));
        if beside().any(|other| other.container.rootfs == *rootfs) {
            return Ok(None);
        }
        let used: Vec<u64> = beside().flat_map(|other| &other.volumes).map(|volume| volume.device).collect();
        let volumes = held.volumes_with_files().into_iter();
        Ok(Some(Leftover {
            bundle: held.container.bundle.clone(),
            rootfs: rootfs.clone(),
            mount_points: held.mount_points.to_vec(),
            volumes: volumes.filter(|volume| !used.contains(&volume.device)).collect(),
        }))
    }

    /// As [`super::enter_remotely`] for container `id` of `uid`, who asks `sublet serve`. `false`: no lease of it is known here.
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
