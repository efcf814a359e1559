//! A container's request within its job's share, and why a program or a container of a job of Slurm's gets no share. Pure.

use crate::config::Config;
use crate::inventory::Inventory;
use crate::ledger::{Lease, Ledger};
use crate::place::{Placement, selected};
use crate::request::Request;
use crate::share::{Devices, Isolation, MIB, Mode, Percent};
use crate::slurm::RecordError;
use crate::text::{add_fix, add_why};

/// The advice for a job with whole GPUs of which other jobs have a part.
const WHOLE: &str = "submit it again when that GPU is free, or for another node with --exclude; Slurm 22.05 needs nodes of \
                     their own for whole GPUs (docs/slurm.md)";

/// The advice for one with parts of GPUs.
const PART: &str = "submit it again when there is room, or for another node with --exclude";

/// Why a job's share is not to be had.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum JobError {
    /// It has no record.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The prolog could not determine its GPUs.
    #[error("job {job}: {why}")]
    Problem { job: u64, why: String },
    /// Its record is of another user's job.
    #[error("job {0} belongs to another user")]
    Foreign(u64),
    /// The container asks for the share of its job.
    #[error("this process is in no job of Slurm's, for sublet.share=slurm; fix: use srun or sbatch")]
    NotInJob,
    /// Root's processes are not bounded by a job.
    #[error("sublet.share=slurm is for a job's user, and this container is root's; fix: name its share")]
    Root,
    /// A container in a job that asked for no GPU asks for a share.
    #[error("job {0} asked Slurm for no GPU on this node; fix: submit it with --gres")]
    NoGpu(u64),
    /// The job's GPUs are taken. It is `temporary` if waiting may help; the job got `whole` GPUs, or parts.
    #[error("{}", add_fix(&add_why(why, &format!("Slurm gave it to job {job} all the same")), if *.whole { WHOLE } else { PART }))]
    NoPlace { job: u64, why: String, whole: bool, temporary: bool },
    /// The container's step or task got none of the job's GPUs.
    #[error(
        "Slurm lets this step or task of job {0} open none of the job's GPUs; fix: use srun --gres, or leave out --gres=none"
    )]
    Forbidden(u64),
    /// The copy of its lease cannot be written.
    #[error("the lease of job {job} cannot be written beside its record: {error}")]
    Copy { job: u64, error: std::io::Error },
    /// /proc or the cgroups cannot be read.
    #[error("cannot find out in which job of Slurm's the container runs: {0}")]
    Cgroup(std::io::Error),
    /// A container asks for another mode, GPU or server than its job has, or for a limit that the job does not have.
    #[error(
        "job {job} got {has} from Slurm, and this container asks for sublet.{key}; fix: leave that out, or ask Slurm for another share"
    )]
    Other { job: u64, has: String, key: &'static str },
    /// A container asks for more than all that the job has.
    #[error(
        "job {job} got {has} from Slurm, and this container asks for {asked}; fix: ask for less, or ask Slurm for more"
    )]
    More { job: u64, has: String, asked: String },
    /// A container asks for more than the job's other containers leave, which hold `held` together.
    #[error(
        "job {job} got {has} from Slurm, and its containers hold {held}; why: this one asks for {asked}; fix: say \
         with sublet.{key} how much each takes, or wait for one to end"
    )]
    Full { job: u64, key: &'static str, has: String, held: String, asked: String },
}

impl JobError {
    /// Whether waiting may help.
    pub const fn is_temporary(&self) -> bool {
        match self {
            Self::Full { .. } => true,
            Self::NoPlace { temporary, .. } => *temporary,
            _ => false,
        }
    }
}

/// The placement that `lease` has.
pub(super) fn placement_of(lease: &Lease) -> Placement {
    Placement {
        devices: lease.devices.clone(),
        mig_devices: lease.mig_devices.clone(),
        mode: lease.mode,
        isolation: lease.isolation,
        daemon: lease.daemon.clone(),
        sm: lease.sm,
        memory_bytes: lease.memory_bytes,
        processes: lease.processes,
        priority: lease.priority,
        guard: lease.guard,
        suspend: lease.suspend,
        mig_caps: Vec::new(),
        refresh_first: false,
        neighbours: None,
        warnings: Vec::new(),
    }
}

/// The placement of `request` within `job`, the lease of its job, beside the job's other containers in `ledger`. A limit
/// that the container does not ask for is the job's.
///
/// # Errors
/// It asks for something else, or for more.
pub(super) fn place_in_job(
    request: &Request,
    job: &Lease,
    ledger: &Ledger,
    inventory: &Inventory,
    config: &Config,
) -> Result<Placement, JobError> {
    let other = |key| JobError::Other { job: job_number(job), has: describe_job(job), key };
    if request.mode.is_some_and(|mode| mode != job.mode) {
        return Err(other("mode"));
    }
    if request.isolation != job.isolation && request.isolation == Isolation::Dedicated {
        return Err(other("isolation"));
    }
    if request.mig.is_some() || !request.mig_caps.is_empty() {
        return Err(other("mig"));
    }
    let devices = select_devices(request, job, inventory, config).ok_or_else(|| other("gpu"))?;
    let total = |uuid: &String| inventory.device(uuid).map(|device| device.memory_bytes);
    let smallest = devices.iter().filter_map(total).min().unwrap_or(0);
    let limited = job.mode != Mode::Exclusive;
    if !limited && (request.sm.is_some() || request.memory.is_some()) {
        return Err(other(if request.sm.is_some() { "sm" } else { "memory" }));
    }
    let sm = request.sm.or(job.sm);
    let memory_bytes = request.memory.map(|memory| memory.on(smallest)).or(job.memory_bytes);
    let beside: Vec<&Lease> =
        ledger.leases.iter().filter(|lease| lease.within.as_ref() == Some(&job.id)).collect();
    let sms = |sm: Option<Percent>| sm.map(|sm| u64::from(sm.thousandths()));
    let each = |of: fn(&Lease) -> Option<u64>| beside.iter().filter_map(|lease| of(lease)).sum::<u64>();
    let held = each(|lease| lease.sm.map(|sm| sm.thousandths().into()));
    check_within(job, "sm", (sms(sm), held, sms(job.sm)), percent)?;
    check_within(job, "memory", (memory_bytes, each(|lease| lease.memory_bytes), job.memory_bytes), mib)?;
    Ok(Placement {
        devices,
        sm,
        memory_bytes,
        processes: request.processes.get(),
        priority: request.priority,
        guard: request.guard.or(job.guard),
        ..placement_of(job)
    })
}

/// The devices, if all of them are the job's.
fn select_devices(
    request: &Request,
    job: &Lease,
    inventory: &Inventory,
    config: &Config,
) -> Option<Vec<String>> {
    let own = |uuid: &String| job.devices.contains(uuid);
    match &request.devices {
        // One is the default, too, and means all of the job's.
        Devices::Any(many) if many.get() == 1 => Some(job.devices.clone()),
        Devices::Any(many) => job.devices.get(..many.get() as usize).map(<[String]>::to_vec),
        Devices::All => None,
        Devices::These(selectors) => {
            let found = selectors.iter().map(|selector| {
                let mut meant = selected(selector, inventory, config).into_iter().map(|device| &device.uuid);
                meant.find(|uuid| own(uuid)).cloned()
            });
            let mut found = found.collect::<Option<Vec<String>>>()?;
            let many = found.len();
            found.sort();
            found.dedup();
            (found.len() == many).then_some(found)
        }
    }
}

/// Checks a limit: (asked for, held by the job's other containers, the job's).
fn check_within(
    job: &Lease,
    key: &'static str,
    (asked, held, all): (Option<u64>, u64, Option<u64>),
    words: fn(u64) -> String,
) -> Result<(), JobError> {
    let (Some(asked), Some(all)) = (asked, all) else { return Ok(()) };
    if asked > all {
        return Err(JobError::More { job: job_number(job), has: words(all), asked: words(asked) });
    }
    if asked.saturating_add(held) > all {
        let (has, held, asked) = (words(all), words(held), words(asked));
        return Err(JobError::Full { job: job_number(job), key, has, held, asked });
    }
    Ok(())
}

fn job_number(job: &Lease) -> u64 {
    job.job.as_ref().map_or(0, |job| job.id)
}

fn describe_job(job: &Lease) -> String {
    let limits = [job.sm.map(|sm| percent(sm.thousandths().into())), job.memory_bytes.map(mib)];
    let limits: Vec<String> = limits.into_iter().flatten().collect();
    [vec![job.mode.to_string(), job.devices.join(",")], limits].concat().join(", ")
}

fn percent(thousandths: u64) -> String {
    format!("{} % SM", Percent::from_thousandths(u32::try_from(thousandths).unwrap_or(u32::MAX)))
}

fn mib(bytes: u64) -> String {
    format!("{} MiB of memory", bytes / MIB)
}
