//! Why a program or a container of a job of Slurm's gets no share.

use crate::slurm::RecordError;

/// The advice for a job with whole GPUs of which other jobs have a part.
const WHOLE: &str = "submit it again when that GPU is free, or for another node with --exclude; Slurm 22.05 needs nodes of \
                     their own for whole GPUs (docs/slurm.md)";

/// Why a job's share is not to be had.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// It has no record.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The prolog could not determine its GPUs.
    #[error("job {job}: {why}")]
    Problem {
        /// The job.
        job: u64,
        /// Why.
        why: String,
    },
    /// Its record is of another user's job.
    #[error("job {0} belongs to another user")]
    Foreign(u64),
    /// The container asks for the share of its job.
    #[error(
        "sublet.share=slurm is the share of the job that the container runs in, and this process is in no job of \
         Slurm's on this node: start it with srun or sbatch"
    )]
    NotInJob,
    /// Root's processes are not bounded by a job.
    #[error("sublet.share=slurm is for the containers of a job's user, and this is root's: name its share")]
    Root,
    /// A container in a job that asked for no GPU asks for a share.
    #[error("job {0} asked Slurm for no GPU on this node: submit it with --gres")]
    NoGpu(u64),
    /// The job's GPUs are taken.
    #[error(
        "{why}; Slurm gave it to job {job} all the same: {}",
        if *.whole { WHOLE } else { "submit it again when there is room, or for another node with --exclude" }
    )]
    NoPlace {
        /// The job.
        job: u64,
        /// By whom.
        why: String,
        /// Whether the job got whole GPUs.
        whole: bool,
        /// Whether waiting may help.
        temporary: bool,
    },
    /// The container's step or task got none of the job's GPUs.
    #[error(
        "Slurm lets this step or task of job {0} open none of the job's GPUs: start it with srun --gres, or leave out \
         --gres=none"
    )]
    Forbidden(u64),
    /// The copy of its lease cannot be written.
    #[error("the lease of job {job} cannot be written beside its record: {error}")]
    Copy {
        /// The job.
        job: u64,
        /// The system's answer.
        error: std::io::Error,
    },
    /// /proc or the cgroups cannot be read.
    #[error("cannot find out in which job of Slurm's the container runs: {0}")]
    Cgroup(std::io::Error),
    /// A container asks for another mode, GPU or server than its job has, or for a limit that the job does not have.
    #[error(
        "job {job} got {has} from Slurm, and this container asks for sublet.{key}: leave that out, or ask Slurm \
         for another share"
    )]
    Other {
        /// The job.
        job: u64,
        /// Its share.
        has: String,
        /// The annotation's key.
        key: &'static str,
    },
    /// A container asks for more than all that the job has.
    #[error(
        "job {job} got {has} from Slurm, and this container asks for {asked}: ask for less, or ask Slurm for more"
    )]
    More {
        /// The job.
        job: u64,
        /// Its share.
        has: String,
        /// The container's request.
        asked: String,
    },
    /// A container asks for more than the job's other containers leave.
    #[error(
        "job {job} got {has} from Slurm, its containers hold {held}, and this one asks for {asked}: say with \
         sublet.{key} how much each takes, or wait for one to end"
    )]
    Full {
        /// The job.
        job: u64,
        /// The annotation's key.
        key: &'static str,
        /// The job's share.
        has: String,
        /// The sum of its containers' shares.
        held: String,
        /// The container's request.
        asked: String,
    },
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
