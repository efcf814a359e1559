//! Slurm's jobs on this node: the job to which a process belongs, by its cgroup, and the job's allocation, by the
//! record that root's prolog wrote (docs/slurm.md). Nothing is read here that the job's user could have written.

mod job_cgroup;
mod job_directory;
mod job_record;
mod task_gpus;

pub use job_cgroup::JobCgroup;
pub(crate) use job_cgroup::job_of_cgroup;
pub use job_directory::JobDirectory;
pub use job_record::{JobRecord, JobShare, RecordError};
pub(crate) use job_record::{lease_file, lease_files};
pub use task_gpus::JobGpu;
pub(crate) use task_gpus::forbidden;

/// The share that stands for the job's allocation: `sublet.share=slurm`, or the shim by the name `sublet-slurm`.
pub(crate) const JOB_SHARE: &str = "slurm";
