//! Taking and freeing shares if the state is on this host's disk, and removing mount points that were left by a
//! container whose lease is already freed, or that never started.

use std::path::Path;

use serde_json::Value;

use super::job_error::JobError;
use super::reconcile::Local;
use super::reconcile::{clear_before_freeing, read};
use super::request_of_spec::{
    RequestSource, explain_gone_cdi_device, is_of_bundle, remove_earlier_grant, request_of,
};
use super::take_lease::{Rootfs, Terms};
use super::{Admission, AdmitError, Candidate, last_refusals, take_lease};
use crate::config::Config;
use crate::grant::Grant;
use crate::ledger::{Binding, Container, LEASE_ANNOTATION, LEASE_RECORD_ANNOTATION, Lease, LeaseId, Store};
use crate::oci::{JsonFile, container_root};
use crate::process::Process;
use crate::request::Request;
use crate::{grant, inventory, ledger, mps, oci};

impl Local<'_> {
    /// Handles a spec with a lease: another entry point has already admitted the container, or its bundle is run again.
    fn admit_again(
        &self,
        id: &str,
        candidate: &Candidate<'_>,
        source: &RequestSource,
        spec: &mut Value,
    ) -> Result<Admission, AdmitError> {
        match self.resume_granted(id, &candidate.container) {
            Ok(lease) => Ok(Admission::AlreadyGranted(lease)),
            Err(error @ AdmitError::ForgedLease { .. }) => {
                if !is_of_bundle(id, spec, &candidate.container) {
                    return Err(error);
                }
                remove_earlier_grant(spec)?;
                self.admit_new(candidate, &source.without_lease(), spec)
            }
            Err(error) => Err(error),
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
        let terms = Terms { rootfs: Rootfs::OfSpec(spec), limit: None };
        let taken = take_lease::take(candidate, &request, terms, &store, *self)
            .map_err(|error| explain_gone_cdi_device(error, spec, self.config))?;
        let served = self.grant(&taken, &request, &store).and_then(|grant| {
            taken.check_mount_points(spec, &grant)?;
            oci::check_node_modes(spec, &grant.nodes, source.keeps_groups())?;
            oci::edit(spec, &grant)?;
            self.make_daemon_ready(&taken, &grant, &store)
        });
        if served.is_err() {
            self.free_or_warn(&taken.lease, &store);
        }
        let (lease, warnings) = (taken.lease.id.clone(), served?);
        // This process ends or becomes the low-level runtime now, and the kernel closes all at once.
        std::mem::forget(taken);
        Ok(Admission::Granted { lease, warnings })
    }

    pub(super) fn grant(
        &self,
        taken: &take_lease::Taken,
        request: &Request,
        store: &Store,
    ) -> Result<Grant, AdmitError> {
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
        taken: &take_lease::Taken,
        grant: &Grant,
        store: &Store,
    ) -> Result<Vec<String>, AdmitError> {
        let mut warnings = mps::end_conflicting(&taken.conflicting_daemons, store)?;
        if taken.lease.daemon.is_some() {
            warnings.extend(mps::make_ready(&taken.lease, store, self.config)?);
        }
        warnings.extend(grant.warnings.iter().cloned());
        last_refusals::record_warnings(&taken.lease, &warnings, &taken.image.warnings(), self.config);
        Ok(warnings)
    }

    /// As [`super::Leases::mark_ending`], where `deleter` deletes the container.
    pub fn mark_ending(
        &self,
        uid: u32,
        id: &str,
        record: &Path,
        deleter: Option<Process>,
    ) -> Result<Option<LeaseId>, AdmitError> {
        let store = self.store()?;
        // This is read in any namespace, because containers without a share must not fail. For others the change below
        // is refused.
        let ledger = store.peek().or_else(|_| read(&store))?;
        let Some(lease) = ledger.find_by_record(uid, id, record) else {
            self.clear_pending(&ledger, &store);
            return Ok(None);
        };
        // In other namespaces the container may only seem to have ended.
        let is_of_here = ledger.is_of_here();
        let (cleared, has_ended) =
            if is_of_here { clear_before_freeing(&lease.id, &store, false) } else { (Vec::new(), false) };
        let gone = has_ended.then(|| lease.id.clone());
        let (marked, freed) = store.mark_ending(uid, id, record, deleter, (&cleared, gone))?;
        self.clean_up(&freed, &store);
        Ok(marked)
    }
}

/// Whether `lease` belongs to `container`. Other entry points may run between the hook that took an unbound lease and
/// the container's creation. The lease is that container's also for an entry point that knows more of its names.
fn is_lease_of(lease: &Lease, container: &Container) -> bool {
    let held = &lease.container;
    let awaited = lease.is_unbound() && held.uid == container.uid;
    is_same_container(held, container) || awaited && (held.id.is_empty() || held.id == container.id)
}

pub(super) fn is_same_container(a: &Container, b: &Container) -> bool {
    (a.uid, &a.id, &a.bundle) == (b.uid, &b.id, &b.bundle)
}

impl Local<'_> {
    pub(super) fn admit(
        &self,
        candidate: &Candidate<'_>,
        source: &RequestSource,
        spec: &mut Value,
    ) -> Result<Admission, AdmitError> {
        match source.annotations.get(LEASE_ANNOTATION) {
            None if source.is_of_job() => Err(JobError::Root.into()),
            Some(id) => self.admit_again(id, candidate, source, spec),
            None => self.admit_new(candidate, source, spec),
        }
    }

    pub(super) fn withdraw(&self, lease: &LeaseId) -> Result<(), AdmitError> {
        self.free(lease, &self.store()?)
    }

    pub(super) fn end(&self, lease: &LeaseId) -> Result<(), AdmitError> {
        let store = self.store()?;
        let ledger = read(&store)?;
        let Some(held) = ledger.lease(lease).cloned() else {
            self.finish_pending(&ledger, &store);
            return Ok(());
        };
        self.await_end(&held, &store)?;
        self.free(lease, &store)
    }

    /// As [`super::Leases::abandon`].
    pub fn abandon(&self, uid: u32, id: &str, owner: Process) -> Result<(), AdmitError> {
        let store = self.store()?;
        if read(&store)?.abandon(uid, id, owner).is_empty() {
            return Ok(());
        }
        let freed = store.abandon(uid, id, owner)?;
        self.clean_up(&freed, &store);
        Ok(())
    }

    /// As [`super::Leases::hand_over`].
    pub fn hand_over(&self, lease: &LeaseId, owner: Process) -> Result<(), AdmitError> {
        Ok(self.store()?.change_without_scan(|ledger| ledger.hand_over(lease, owner))?)
    }

    pub(super) fn bind(&self, lease: &LeaseId, binding: &Binding) -> Result<(), AdmitError> {
        Ok(self.store()?.update_without_scan(|ledger| ledger.bind(lease, binding))??)
    }

    /// As [`super::Leases::unmark`].
    pub fn unmark(&self, lease: &LeaseId) -> Result<(), AdmitError> {
        let store = self.store()?;
        let freed = store.unmark_ending(lease)?;
        self.clean_up(&freed, &store);
        Ok(())
    }
}

/// Removes the mount points that the runtime created in the root filesystem of a container that [`super::Leases::bind`]
/// refused. The runtime now gives the container up and runs no poststop hook, and the process that freed the lease
/// looked before the files existed. Errors are ignored, because the container does not start in any case.
pub fn clear_refused(bundle: &Path, config: &Config) {
    let spec = JsonFile::read(&bundle.join("config.json")).and_then(|file| file.parse()).unwrap_or_default();
    let Some(root) = spec.pointer("/root/path").and_then(Value::as_str) else { return };
    let Ok(root) = bundle.join(root).canonicalize() else { return };
    let rootfs = container_root::podman_root_filesystem(root, &spec, bundle);
    let record = spec.pointer("/annotations").and_then(|all| all.get(LEASE_RECORD_ANNOTATION));
    let lease = record.and_then(Value::as_str).and_then(Lease::from_annotation);
    let (Ok(rootfs), Some(lease)) = (rootfs, lease) else { return };
    if may_be_in_use(&rootfs, &lease, config) {
        return;
    }
    oci::cleanup_mount_points(&rootfs, &lease.mount_points);
    clear_volumes(&lease, config);
}

/// Removes the mount points that the runtime created in volumes of the container that had `lease`, unless another lease
/// has a volume on the same file system.
pub(super) fn clear_volumes(lease: &Lease, config: &Config) {
    let volumes = lease.volumes_with_files();
    if volumes.is_empty() {
        return;
    }
    let Some(leases) = leases_beside(lease, config) else { return };
    let used: Vec<u64> = leases
        .iter()
        .flat_map(|lease| lease["volumes"].as_array().into_iter().flatten())
        .filter_map(|volume| volume["device"].as_u64())
        .collect();
    volumes.iter().filter(|volume| !used.contains(&volume.device)).for_each(|volume| {
        oci::clear_volume(volume);
    });
}

/// Whether a lease uses the root filesystem of the container that had `lease`.
pub(super) fn may_be_in_use(rootfs: &Path, lease: &Lease, config: &Config) -> bool {
    let uses = |other: &Value| other["container"]["rootfs"].as_str().map(Path::new) == Some(rootfs);
    leases_beside(lease, config).is_none_or(|leases| leases.iter().any(uses))
}

/// The leases whose containers may share the root filesystem or volumes of the container that had `lease`
/// ([`Lease::is_believed_by`]); `None`: unknown. Users who may not open the store may read the ledger's file.
fn leases_beside(lease: &Lease, config: &Config) -> Option<Vec<Value>> {
    let mut ledger: Value = serde_json::from_slice(&ledger::read_text(&config.state_dir)).ok()?;
    let Value::Array(mut leases) = ledger["leases"].take() else { return None };
    let uid = u64::from(lease.container.uid);
    leases.retain(|other| other["brokered"] != true || other["container"]["uid"] == uid);
    Some(leases)
}
