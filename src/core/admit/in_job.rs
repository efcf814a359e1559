//! Programs and containers in a job of Slurm's: they get the job's allocation on this node, or less. The first of them takes
//! the job's lease, which books its share once. Containers have leases of their own within it.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use super::job_share::{JobError, place_in_job, placement_of};
use super::local::{Local, read};
use super::take_lease::{self, Terms, lease_for};
use super::{AdmitError, Candidate, EMPTY_CGROUP, fresh_inventory};
use crate::broker::protocol::{Admit, Answer, Granted, JobEnvironment};
use crate::config::Config;
use crate::fs::under;
use crate::grant::{self, Image};
use crate::inventory::Inventory;
use crate::ledger::{Container, Init, Job, LEASE_ANNOTATION, Lease, LeaseId, Store};
use crate::place::Placement;
use crate::process::Process;
use crate::request::{self, Request};
use crate::share::{Capabilities, Devices, Isolation, Memory, Mode, Priority, Selector, Suspend};
use crate::slurm::{JobCgroup, JobGpu, JobRecord, JobShare};
use crate::{mps, oci};

impl Local<'_> {
    /// The share of `process` of user `uid` in the job's `cgroup`; `None`: the job asked for no GPU. Takes the job's lease if
    /// there is none yet, and makes its MPS daemon ready.
    ///
    /// # Errors
    /// The job has no record, or there is no room for its share.
    pub fn job_environment(
        &self,
        cgroup: &JobCgroup,
        process: Process,
        uid: u32,
    ) -> Result<Option<JobEnvironment>, AdmitError> {
        let Some(lease) = self.ensure_job_lease(cgroup, process, uid)? else { return Ok(None) };
        let inventory = fresh_inventory(self.config)?;
        let (placement, image) = (placement_of(&lease), Image::default());
        let grant =
            grant::grant(&placement, &lease, &Capabilities::default(), &image, &inventory, self.config);
        // A program outside containers sees all the host's nodes and directories.
        let daemon = || lease.daemon.as_ref()?.public(&self.config.state_dir).to_str().map(str::to_owned);
        let set = grant.env.set.into_iter().filter_map(|(name, value)| {
            let value = match name.as_str() {
                "CUDA_VISIBLE_DEVICES" => lease.devices.join(","),
                "CUDA_MPS_PIPE_DIRECTORY" => daemon()?,
                // For NVIDIA's container runtimes.
                "NVIDIA_VISIBLE_DEVICES" => return None,
                _ => value,
            };
            Some((name, value))
        });
        let (set, remove_prefixes) = (set.collect(), grant.env.remove_prefixes);
        let gpu = |uuid: &String| {
            let node = inventory.device(uuid)?.nodes.first()?.path.to_str()?;
            Some(JobGpu { uuid: uuid.clone(), node: under(&self.config.driver.root, node) })
        };
        let gpus = lease.devices.iter().filter_map(gpu).collect();
        Ok(Some(JobEnvironment { lease: lease.id, set, remove_prefixes, gpus }))
    }

    /// Takes a share for `candidate`, whose user described it in `ask`, within that of the job in `cgroup`.
    pub fn admit_in_job(
        &self,
        candidate: &Candidate<'_>,
        ask: &Admit,
        cgroup: &JobCgroup,
    ) -> Result<Answer, AdmitError> {
        if let Some(id) = ask.annotations.get(LEASE_ANNOTATION) {
            return self.resume_granted(id, &candidate.container).map(Answer::AlreadyGranted);
        }
        let job = self.ensure_job_lease(cgroup, candidate.owner, candidate.container.uid)?;
        let mut job = job.ok_or(JobError::NoGpu(cgroup.job))?;
        job.devices.retain(|uuid| !ask.forbidden.contains(uuid));
        if job.devices.is_empty() {
            return Err(JobError::Forbidden(cgroup.job).into());
        }
        let capabilities = ask.capabilities.as_deref();
        let request = request::parse(&ask.annotations, ask.share.as_deref(), capabilities, self.config)?;
        let inventory = fresh_inventory(self.config)?;
        let (lease, placement) = self.insert_within(candidate, &request, ask, (cgroup, &job), &inventory)?;
        let capabilities = &request.capabilities;
        let config = request.over(self.config);
        let mut grant = grant::grant(&placement, &lease, capabilities, &ask.image, &inventory, &config);
        let store = self.store()?;
        let ready =
            self.check_nodes(&mut grant).and_then(|()| Ok(mps::make_ready(&lease, &store, self.config)?));
        let mut warnings = ready.inspect_err(|_| self.free_or_warn(&lease, &store))?;
        warnings.extend(grant.warnings.iter().cloned());
        Ok(Answer::Granted(Box::new(Granted { lease: lease.id, grant, warnings })))
    }

    /// Frees the leases of `job`, whose processes its scheduler has ended, once they are gone. Returns the ids of the freed
    /// ones. A process that still runs keeps its lease until a later command sees that it has ended.
    pub fn end_job(&self, job: u64) -> Result<Vec<LeaseId>, AdmitError> {
        let deadline = Instant::now() + EMPTY_CGROUP;
        let of_job = |lease: &&Lease| lease.job.as_ref().is_some_and(|own| own.id == job);
        let mut freed = Vec::new();
        loop {
            let done = self.reconcile(|_| Ok(()))?;
            freed.extend(done.freed.iter().filter(of_job).map(|lease| lease.id.clone()));
            let ledger = read(&self.store()?)?;
            if !ledger.leases.iter().any(|lease| of_job(&lease)) || Instant::now() > deadline {
                return Ok(freed);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Takes the lease of a container in a job.
    fn insert_within(
        &self,
        candidate: &Candidate<'_>,
        request: &Request,
        ask: &Admit,
        (cgroup, job): (&JobCgroup, &Lease),
        inventory: &Inventory,
    ) -> Result<(Lease, Placement), AdmitError> {
        let id = LeaseId::random().map_err(AdmitError::Random)?;
        self.update(|ledger| {
            let placement = place_in_job(request, job, ledger, inventory, self.config)?;
            let of_job = whole_job(cgroup, candidate.container.uid);
            ledger.check_unbound(candidate.container.uid)?;
            oci::check_no_other_daemon(&ask.image, placement.daemon.is_some())?;
            let lease = Lease {
                job: Some(Job { step: cgroup.step.clone(), ..of_job }),
                within: Some(job.id.clone()),
                ..lease_for(&candidate.container, candidate.owner, &placement, &ask.image, id, self.config)
                    .brokered()
            };
            ledger.insert(lease.clone())?;
            Ok((lease, placement))
        })?
    }

    /// The job's lease, with its MPS daemon serving. It is taken if there is none yet, for `first`, a process of the job.
    fn ensure_job_lease(
        &self,
        cgroup: &JobCgroup,
        first: Process,
        uid: u32,
    ) -> Result<Option<Lease>, AdmitError> {
        let Some(share) = job_share(cgroup.job, uid, self.config)? else { return Ok(None) };
        let store = self.store()?;
        let held = |store: &Store| -> Result<Option<Lease>, AdmitError> {
            let (ledger, _) = read(store)?.preview_reclaim();
            let is_same =
                |lease: &&Lease| lease.job.as_ref().is_some_and(|job| job.cgroup_inode == cgroup.inode);
            Ok(ledger.find_job_lease(cgroup.job).filter(is_same).cloned())
        };
        if let Some(lease) = held(&store)? {
            mps::make_ready(&lease, &store, self.config)?;
            return Ok(Some(lease));
        }
        match self.take_job_lease(&share, cgroup, first, uid, &store) {
            // Another process of the job was faster.
            Err(AdmitError::Doubled(doubled)) => held(&store)?.map(Some).ok_or_else(|| doubled.into()),
            taken => taken.map(Some),
        }
    }

    fn take_job_lease(
        &self,
        share: &JobShare,
        cgroup: &JobCgroup,
        first: Process,
        uid: u32,
        store: &Store,
    ) -> Result<Lease, AdmitError> {
        let id = format!("slurm-{}", cgroup.job);
        let container = Container { uid, id, ..Container::default() };
        let candidate = Candidate { container, rootfs: None, owner: first, engine: None };
        let (dir, cgroup_inode) = (Some(cgroup.dir.clone()), Some(cgroup.inode));
        let init = Init { process: first, pid_namespace: 0, cgroup: dir, cgroup_inode };
        let job = whole_job(cgroup, uid);
        let request = job_request(share);
        let terms = Terms::OfJob(&job, &init);
        let taken = take_lease::take(&candidate, &request, terms, store, *self).map_err(|error| {
            // Advice for a container's user does not help a job's: its share is as Slurm allocated it.
            let AdmitError::Refused(refusal) = error else { return error };
            let (whole, temporary) = (share.mode == Mode::Exclusive, refusal.temporary);
            JobError::NoPlace { job: cgroup.job, whole, temporary, why: refusal.message }.into()
        })?;
        let ready = self
            .grant(&taken, &request, store)
            .and_then(|grant| self.make_daemon_ready(&taken, &grant, store));
        let copy_failed = |error| AdmitError::from(JobError::Copy { job: cgroup.job, error });
        let ready = ready.and_then(|_| taken.lease.write_copy(&self.config.state_dir).map_err(copy_failed));
        ready.inspect_err(|_| self.free_or_warn(&taken.lease, store))?;
        Ok(taken.lease)
    }
}

/// The share of `job` of user `uid` on this node; `None`: it asked for no GPU.
///
/// # Errors
/// It has no record, it is another user's, or the prolog could not determine its GPUs.
pub fn job_share(job: u64, uid: u32, config: &Config) -> Result<Option<JobShare>, JobError> {
    let record = JobRecord::read(&config.state_dir, job)?;
    if record.uid != uid {
        return Err(JobError::Foreign(job));
    }
    match record.problem {
        Some(why) => Err(JobError::Problem { job, why }),
        None => Ok(record.share),
    }
}

fn whole_job(cgroup: &JobCgroup, uid: u32) -> Job {
    Job { id: cgroup.job, step: None, uid, cgroup_inode: cgroup.inode }
}

/// The request for exactly the job's devices.
fn job_request(share: &JobShare) -> Request {
    let upper = |uuid: &String| uuid.to_ascii_lowercase().replace("gpu-", "GPU-").replace("mig-", "MIG-");
    let devices = share.devices.iter().filter_map(|uuid| Selector::parse(&upper(uuid))).collect();
    Request {
        devices: Devices::These(devices),
        mode: Some(share.mode),
        default_mode: share.mode,
        isolation: Isolation::Shared,
        sm: share.sm,
        memory: share.memory_bytes.map(Memory::Bytes),
        mig: None,
        mig_caps: Vec::new(),
        priority: Priority::Normal,
        processes: NonZeroU32::MIN,
        capabilities: Capabilities::default(),
        not_served: Vec::new(),
        wait: Duration::ZERO,
        guard: None,
        suspend: Suspend::Never,
        visible_devices: None,
        default_directory: true,
        owner: None,
    }
}
