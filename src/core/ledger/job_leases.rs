//! Copies of the leases of Slurm's jobs, one beside each job's record. No runtime has a record of a job, so a lost ledger
//! is rebuilt from these.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::error::failed;
use super::runtime_record::LARGEST;
use super::runtime_record::skip_absent;
use super::{Lease, LeaseId, LedgerError};
use crate::fs::{atomic, trusted};
use crate::host;
use crate::slurm;

/// What such a file holds.
#[derive(Serialize, Deserialize)]
struct Copy {
    /// That of the boot in which the job runs.
    boot_id: String,
    lease: Lease,
}

impl Lease {
    /// Writes down a job's lease, until the job's record is removed. That of a container in a job has no copy: it books
    /// nothing beside the job's.
    pub(crate) fn write_copy(&self, state_dir: &Path) -> io::Result<()> {
        let Some(job) = self.job.as_ref().filter(|_| self.is_of_job()) else { return Ok(()) };
        let copy = Copy { boot_id: host::read_boot_id()?.to_owned(), lease: self.clone() };
        atomic::replace(&slurm::lease_file(state_dir, job.id), &serde_json::to_vec(&copy)?, 0o600)
    }
}

/// The leases of jobs that still have processes. Only leases that were granted have been written down, and a job that was
/// requeued has another cgroup.
///
/// # Errors
/// A copy cannot be read. The job may still run.
pub(super) fn read_live_jobs(state_dir: &Path) -> Result<Vec<Lease>, LedgerError> {
    let files = slurm::lease_files(state_dir).map_err(|error| failed("read", state_dir, error))?;
    let mut leases = Vec::new();
    for file in files {
        let trusted = skip_absent(&file, trusted::read(&file, LARGEST))?.flatten().and_then(Result::ok);
        leases.extend(trusted.as_deref().and_then(parse_copy));
    }
    leases.retain(|lease| lease.is_of_job() && lease.has_processes());
    Ok(leases)
}

fn parse_copy(text: &[u8]) -> Option<Lease> {
    let copy: Copy = serde_json::from_slice(text).ok()?;
    LeaseId::parse(copy.lease.id.as_str())?;
    (Some(&*copy.boot_id) == host::read_boot_id().ok()).then_some(copy.lease)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt as _;

    use super::super::fixture::lease;
    use super::super::rebuild::{find_trace, rebuild};
    use super::*;
    use crate::ledger::{Init, Job};
    use crate::process::Process;
    use crate::slurm::JobRecord;

    #[test]
    fn a_lost_ledger_has_the_leases_of_jobs_with_processes() {
        let (state, cgroup) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let populated = |is: u8| {
            fs::write(cgroup.path().join("cgroup.events"), format!("populated {is}\n")).unwrap();
        };
        populated(1);
        JobRecord::new(7, 1000, None, Ok(None)).write(state.path()).unwrap();
        let job = |inode| Job { id: 7, step: None, uid: 1000, cgroup_inode: inode };
        let inode = fs::metadata(cgroup.path()).unwrap().ino();
        let (process, cgroup) = (Process::current().unwrap(), Some(cgroup.path().to_owned()));
        let init = Some(Init { process, pid_namespace: 0, cgroup, cgroup_inode: None });
        let held = Lease { job: Some(job(inode)), init, ..lease(1, "GPU-a") };
        let rebuilt = || rebuild(state.path(), None, "boot", None).unwrap().leases;
        held.write_copy(state.path()).unwrap();
        assert_eq!(rebuilt(), std::slice::from_ref(&held));
        assert!(find_trace(state.path(), None).unwrap().unwrap().contains("job 7"));
        let within = Lease { within: Some(held.id.clone()), ..held.clone() };
        within.write_copy(state.path()).unwrap();
        assert_eq!(rebuilt(), std::slice::from_ref(&held), "a container's is not written");
        Lease { job: Some(job(inode + 1)), ..held.clone() }.write_copy(state.path()).unwrap();
        assert!(rebuilt().is_empty(), "the job was requeued");
        held.write_copy(state.path()).unwrap();
        let file = slurm::lease_file(state.path(), 7);
        let written = fs::read_to_string(&file).unwrap();
        fs::write(&file, written.replace(host::read_boot_id().unwrap(), "earlier")).unwrap();
        assert!(rebuilt().is_empty(), "of an earlier boot");
        fs::write(&file, written).unwrap();
        assert_eq!(rebuilt(), std::slice::from_ref(&held));
        populated(0);
        assert!(rebuilt().is_empty(), "the job has ended");
        assert_eq!(find_trace(state.path(), None).unwrap(), None);
        populated(1);
        JobRecord::remove(state.path(), 7, None).unwrap();
        assert!(rebuilt().is_empty(), "its copy goes with its record");
    }

    #[test]
    fn copies_that_cannot_be_read_may_be_of_jobs_that_run() {
        let state = tempfile::tempdir().unwrap();
        assert!(read_live_jobs(state.path()).unwrap().is_empty(), "there is no directory");
        // What a command without descriptors left gets there: ELOOP stands for it.
        let directory = state.path().join("slurm");
        std::os::unix::fs::symlink("slurm", &directory).unwrap();
        for error in [
            read_live_jobs(state.path()).unwrap_err(),
            rebuild(state.path(), None, "boot", None).unwrap_err(),
            find_trace(state.path(), None).unwrap_err(),
        ] {
            assert!(error.to_string().contains("cannot be read"), "{error}");
        }
    }
}
