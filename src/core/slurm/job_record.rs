//! What a job got from Slurm on this node, as root's prolog found it: one file a job in the state directory. It is the
//! upper limit of what the job's programs and containers get.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::fs::{atomic, trusted};
use crate::share::{Mode, Percent};
use crate::text::safe;

/// [`JobRecord::schema`] of what this build writes and reads.
const SCHEMA: &str = "sublet.slurm-job/1";

/// The longest record, in bytes.
const LARGEST: u64 = 64 << 10;

/// `slurm/<job>.json` in the state directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    schema: String,
    /// The job's id.
    pub job: u64,
    /// The job's user.
    pub uid: u32,
    /// What it got; `None`: it asked for no GPU.
    pub share: Option<JobShare>,
    /// Why the prolog could not say what it got. Its tasks are then refused with this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// A job's share of this node's GPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobShare {
    /// UUIDs of the devices that Slurm chose.
    pub devices: Vec<String>,
    /// Mode mps, or exclusive for whole GPUs.
    pub mode: Mode,
    /// SM limit; `None`: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm: Option<Percent>,
    /// Memory limit on each device, in bytes; `None`: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}

/// Why a job's record is not to be had.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The prolog did not run, or the epilog did.
    #[error(
        "job {0} has no record on this node, so sublet does not know what it got from Slurm: slurm.conf needs \
         Prolog=/usr/libexec/sublet/slurm/prolog and PrologFlags=Alloc,Contain (docs/slurm.md)"
    )]
    Missing(u64),
    /// It cannot be read.
    #[error("the record of job {job} cannot be used: {why}: run the prolog again, or cancel the job")]
    Unusable {
        /// The job.
        job: u64,
        /// Why.
        why: String,
    },
}

impl JobRecord {
    /// The record of `job` of user `uid`.
    #[must_use]
    pub fn new(job: u64, uid: u32, share: Result<Option<JobShare>, String>) -> Self {
        let (share, problem) = match share {
            Ok(share) => (share, None),
            Err(problem) => (None, Some(problem)),
        };
        Self { schema: SCHEMA.to_owned(), job, uid, share, problem }
    }

    /// Writes it, in place of an earlier one.
    ///
    /// # Errors
    /// The state directory is not to be trusted, or the file cannot be written.
    pub fn write(&self, state_dir: &Path) -> io::Result<()> {
        let dir = directory(state_dir);
        trusted::make(state_dir).and_then(|()| trusted::make(&dir)).map_err(io::Error::other)?;
        atomic::replace(&file(state_dir, self.job), &serde_json::to_vec(self)?, 0o644)
    }

    /// Reads the record of `job`.
    ///
    /// # Errors
    /// There is none, or it cannot be read.
    pub fn read(state_dir: &Path, job: u64) -> Result<Self, RecordError> {
        let unusable = |why: String| RecordError::Unusable { job, why: safe(&why) };
        let content = trusted::read(&file(state_dir, job), LARGEST)
            .map_err(|error| unusable(error.to_string()))?
            .ok_or(RecordError::Missing(job))?
            .map_err(unusable)?;
        let record: Self = serde_json::from_slice(&content).map_err(|error| unusable(error.to_string()))?;
        if record.schema != SCHEMA || record.job != job {
            return Err(unusable(format!("it is of {} and of job {}", record.schema, record.job)));
        }
        Ok(record)
    }

    /// Removes the record of `job`, if there is one.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn remove(state_dir: &Path, job: u64) -> io::Result<()> {
        match fs::remove_file(file(state_dir, job)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Whether the prolog has run on this node since boot: whether Slurm's jobs are bounded here.
    #[must_use]
    pub fn are_kept(state_dir: &Path) -> bool {
        directory(state_dir).is_dir()
    }
}

pub(super) fn directory(state_dir: &Path) -> PathBuf {
    state_dir.join("slurm")
}

fn file(state_dir: &Path, job: u64) -> PathBuf {
    directory(state_dir).join(format!("{job}.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written_and_gone_when_it_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!JobRecord::are_kept(dir.path()));
        let share = JobShare {
            devices: vec!["GPU-a".into()],
            mode: Mode::Mps,
            sm: Some(Percent::from_thousandths(25_000)),
            memory_bytes: Some(1 << 30),
        };
        for share in [Ok(Some(share)), Ok(None), Err("which GPU?".to_owned())] {
            let record = JobRecord::new(7, 1000, share);
            record.write(dir.path()).unwrap();
            assert_eq!(JobRecord::read(dir.path(), 7).unwrap(), record);
        }
        assert!(JobRecord::are_kept(dir.path()));
        JobRecord::remove(dir.path(), 7).unwrap();
        JobRecord::remove(dir.path(), 7).unwrap();
        assert!(matches!(JobRecord::read(dir.path(), 7), Err(RecordError::Missing(7))));
    }

    #[test]
    fn a_record_that_is_none_is_never_taken_for_an_empty_one() {
        let dir = tempfile::tempdir().unwrap();
        JobRecord::new(8, 0, Ok(None)).write(dir.path()).unwrap();
        let other = fs::read_to_string(file(dir.path(), 8)).unwrap();
        for text in ["", "{", "null", &other, &other.replace("/1", "/2").replace(":8", ":7")] {
            fs::write(file(dir.path(), 7), text).unwrap();
            assert!(matches!(JobRecord::read(dir.path(), 7), Err(RecordError::Unusable { .. })), "{text}");
        }
    }
}
