//! A job's allocation on this node, as root's prolog found it: one file a job in the state directory. It is the upper
//! limit of the job's programs and containers. Beside it is the directory of the job's user.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, lchown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::fs::{is_trusted_owner, make_trusted_directory, parse_json, read_trusted, replace, unless_absent};
use crate::share::{Mode, Percent};
use crate::text::safe;

/// [`JobRecord::schema`] of this build.
const SCHEMA: &str = "sublet.slurm-job/1";

/// How names of copies of leases end.
const LEASE: &str = "lease";

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
    /// The cluster's name. Jobs of two clusters may have the same id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<String>,
    /// Its allocation; `None`: it asked for no GPU.
    pub share: Option<JobShare>,
    /// Why the prolog could not determine its allocation. Its tasks are then refused with this.
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
    /// It cannot be read, and why.
    #[error("the record of job {0} cannot be used: {1}: run the prolog again, or cancel the job")]
    Unusable(u64, String),
}

impl JobRecord {
    /// The record of `job` of user `uid`, in `cluster` if that is known.
    pub fn new(job: u64, uid: u32, cluster: Option<String>, share: Result<Option<JobShare>, String>) -> Self {
        let (share, problem) = match share {
            Ok(share) => (share, None),
            Err(problem) => (None, Some(problem)),
        };
        Self { schema: SCHEMA.to_owned(), job, uid, cluster, share, problem }
    }

    /// Writes it, in place of an earlier one. One of another cluster stays, and becomes a problem: tasks of both jobs are
    /// refused, because they cannot be distinguished.
    ///
    /// # Errors
    /// The state directory is not to be trusted, or the file cannot be written.
    pub fn write(&self, state_dir: &Path) -> io::Result<()> {
        let dir = directory(state_dir);
        make_trusted_directory(state_dir)
            .and_then(|_| make_trusted_directory(&dir))
            .map_err(io::Error::other)?;
        let earlier = Self::read(state_dir, self.job).ok();
        let kept = earlier.filter(|earlier| !earlier.is_of(self.cluster.as_deref()));
        let kept = kept.map(|earlier| earlier.met(self, state_dir));
        let record = kept.as_ref().unwrap_or(self);
        replace(&file(state_dir, self.job), &serde_json::to_vec(record)?, 0o644)
    }

    /// Whether it is of `cluster`, as far as that is known.
    fn is_of(&self, cluster: Option<&str>) -> bool {
        self.cluster.as_deref().zip(cluster).is_none_or(|(own, other)| own == other)
    }

    /// This record when the prolog of another cluster's job of the same id ran.
    fn met(mut self, other: &Self, state_dir: &Path) -> Self {
        let name = |record: &Self| record.cluster.clone().unwrap_or_default();
        self.share = None;
        self.problem = Some(format!(
            "the clusters {} and {} both have a job {} on this node, and sublet cannot tell them apart: cancel one and \
             submit it again; if the job of {} has ended, remove {}",
            name(&self),
            name(other),
            self.job,
            name(&self),
            file(state_dir, self.job).display()
        ));
        self
    }

    /// Reads the record of `job`.
    pub fn read(state_dir: &Path, job: u64) -> Result<Self, RecordError> {
        let unusable = |why: String| RecordError::Unusable(job, safe(&why));
        let content = read_trusted(&file(state_dir, job), LARGEST)
            .map_err(|error| unusable(error.to_string()))?
            .ok_or(RecordError::Missing(job))?
            .map_err(unusable)?;
        let record: Self = parse_json(&content).map_err(|error| unusable(error.to_string()))?;
        if record.schema != SCHEMA {
            let found = record.schema;
            return Err(unusable(format!(
                "its schema is {found}, and this version of sublet reads {SCHEMA}"
            )));
        }
        if record.job != job {
            return Err(unusable(format!("it is of job {}", record.job)));
        }
        Ok(record)
    }

    /// Removes the record of `job`, the copy of its lease and the directory for its containers, if they are there. `false`:
    /// they are of a job of another cluster than `cluster`, and stay.
    pub fn remove(state_dir: &Path, job: u64, cluster: Option<&str>) -> io::Result<bool> {
        if Self::read(state_dir, job).is_ok_and(|record| !record.is_of(cluster)) {
            return Ok(false);
        }
        let gone = |removed: io::Result<()>| match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        gone(fs::remove_dir_all(containers_of(state_dir, job)))?;
        gone(fs::remove_file(lease_file(state_dir, job)))?;
        // The record goes last: as long as it is there, an epilog removes the rest.
        gone(fs::remove_file(file(state_dir, job)))?;
        Ok(true)
    }

    /// Every record that can be read and was written at least `age` ago.
    pub fn older_than(age: Duration, state_dir: &Path) -> io::Result<Vec<Self>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(directory(state_dir))?.filter_map(Result::ok) {
            let job = entry.file_name().to_str().and_then(|name| name.strip_suffix(".json")?.parse().ok());
            let is_old = entry.metadata()?.modified()?.elapsed().is_ok_and(|passed| passed >= age);
            found.extend(job.filter(|_| is_old).and_then(|job| Self::read(state_dir, job).ok()));
        }
        Ok(found)
    }

    /// Whether the prolog has run on this node since boot: whether Slurm's jobs are bounded here.
    pub fn are_kept(state_dir: &Path) -> bool {
        directory(state_dir).is_dir()
    }
}

fn directory(state_dir: &Path) -> PathBuf {
    state_dir.join("slurm")
}

fn file(state_dir: &Path, job: u64) -> PathBuf {
    directory(state_dir).join(format!("{job}.json"))
}

/// Where the copy of the lease of `job` is, beside its record.
pub(crate) fn lease_file(state_dir: &Path, job: u64) -> PathBuf {
    directory(state_dir).join(format!("{job}.{LEASE}"))
}

/// Every such file.
pub(crate) fn lease_files(state_dir: &Path) -> io::Result<Vec<PathBuf>> {
    let Some(entries) = unless_absent(fs::read_dir(directory(state_dir)))? else { return Ok(Vec::new()) };
    let is_lease = |path: &PathBuf| path.extension().is_some_and(|end| end == LEASE);
    let paths: io::Result<Vec<PathBuf>> = entries.map(|entry| Ok(entry?.path())).collect();
    Ok(paths?.into_iter().filter(is_lease).collect())
}

/// Where a job's user keeps the state of the job's containers: the `--root` of oci.conf. `slurm/<job>` in the state directory,
/// made by root's prolog and the user's own. A job has no session, and so no `XDG_RUNTIME_DIR`; and Slurm 22.05 can name the
/// job there, but not the uid.
fn containers_of(state_dir: &Path, job: u64) -> PathBuf {
    directory(state_dir).join(job.to_string())
}

/// Makes the directory of `job` for `uid`, if it is not there: a prolog may run twice.
///
/// # Errors
/// It cannot be made, or is not that user's.
pub fn make_directory(state_dir: &Path, job: u64, uid: u32) -> io::Result<()> {
    let path = containers_of(state_dir, job);
    match DirBuilder::new().mode(0o700).create(&path) {
        Ok(()) => return lchown(&path, Some(uid), None),
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        Err(_) => {}
    }
    let meta = fs::symlink_metadata(&path)?;
    if meta.is_dir() && meta.uid() == uid {
        return Ok(());
    }
    // The prolog was killed in between.
    if meta.is_dir() && is_trusted_owner(meta.uid()) {
        return lchown(&path, Some(uid), None);
    }
    Err(io::Error::other(format!("{} is another user's", path.display())))
}

/// Removes empty directories of jobs that have no record any more. slurmstepd may end a container, as root, after the
/// epilog, and runc and crun then make their `--root` again (seen on a machine under load).
pub fn remove_stray_directories(state_dir: &Path) {
    let entries = fs::read_dir(directory(state_dir)).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()) {
        // The prolog writes the record first, and the epilog removes it last.
        let is_stray = path.extension().is_none() && !path.with_extension("json").exists();
        if is_stray && fs::remove_dir(&path).is_ok() {
            tracing::debug!("removed {}, which was made after its job's end", path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stored_record_is_read_and_written_again_alike() {
        let stored = include_str!("../../../tests/formats/every-key/slurm-job.json");
        let stored: serde_json::Value = serde_json::from_str(stored).unwrap();
        let read: JobRecord = serde_json::from_value(stored.clone()).unwrap();
        assert_eq!(serde_json::to_value(read).unwrap(), stored);
    }

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
            let record = JobRecord::new(7, 1000, Some("test".into()), share);
            record.write(dir.path()).unwrap();
            assert_eq!(JobRecord::read(dir.path(), 7).unwrap(), record);
        }
        assert!(JobRecord::are_kept(dir.path()));
        let old = |age| JobRecord::older_than(Duration::from_secs(age), dir.path()).unwrap().len();
        fs::write(directory(dir.path()).join("x.json"), "{}").unwrap();
        assert_eq!((old(0), old(60)), (1, 0));
        JobRecord::remove(dir.path(), 7, Some("test")).unwrap();
        JobRecord::remove(dir.path(), 7, Some("test")).unwrap();
        assert!(matches!(JobRecord::read(dir.path(), 7), Err(RecordError::Missing(7))));
    }

    #[test]
    fn jobs_of_two_clusters_with_one_id_are_both_refused() {
        let dir = tempfile::tempdir().unwrap();
        let of = |cluster: &str| JobRecord::new(7, 1000, Some(cluster.into()), Ok(None));
        let remove = |cluster| JobRecord::remove(dir.path(), 7, cluster).unwrap();
        of("a").write(dir.path()).unwrap();
        of("b").write(dir.path()).unwrap();
        let record = JobRecord::read(dir.path(), 7).unwrap();
        assert_eq!((record.cluster.as_deref(), &record.share), (Some("a"), &None));
        let problem = record.problem.unwrap();
        assert!(problem.starts_with("the clusters a and b both have a job 7 on this node"), "{problem}");
        assert!(problem.ends_with(&file(dir.path(), 7).display().to_string()), "{problem}");
        assert!(!remove(Some("b")) && JobRecord::read(dir.path(), 7).is_ok(), "the job of a runs");
        assert!(remove(Some("a")));
        of("b").write(dir.path()).unwrap();
        of("b").write(dir.path()).unwrap();
        assert_eq!(JobRecord::read(dir.path(), 7).unwrap(), of("b"), "the prolog may run twice");
        remove(None);
        assert!(matches!(JobRecord::read(dir.path(), 7), Err(RecordError::Missing(7))));
    }

    #[test]
    fn a_record_that_is_none_is_never_taken_for_an_empty_one() {
        let dir = tempfile::tempdir().unwrap();
        JobRecord::new(8, 0, None, Ok(None)).write(dir.path()).unwrap();
        let other = fs::read_to_string(file(dir.path(), 8)).unwrap();
        for text in ["", "{", "null", &other, &other.replace("/1", "/2").replace(":8", ":7")] {
            fs::write(file(dir.path(), 7), text).unwrap();
            assert!(matches!(JobRecord::read(dir.path(), 7), Err(RecordError::Unusable { .. })), "{text}");
        }
    }
}

#[cfg(test)]
mod directory_tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn state() -> (tempfile::TempDir, PathBuf, u32) {
        let state = tempfile::tempdir().unwrap();
        let uid = nix::unistd::geteuid().as_raw();
        JobRecord::new(7, uid, None, Ok(None)).write(state.path()).unwrap();
        let directory = containers_of(state.path(), 7);
        (state, directory, uid)
    }

    #[test]
    fn it_is_the_users_and_goes_with_all_that_is_in_it() {
        let (state, directory, uid) = state();
        make_directory(state.path(), 7, uid).unwrap();
        make_directory(state.path(), 7, uid).unwrap();
        let meta = fs::metadata(&directory).unwrap();
        assert_eq!((meta.uid(), meta.mode() & 0o7777), (uid, 0o700));
        let outside = tempfile::tempdir().unwrap();
        symlink(outside.path(), directory.join("link")).unwrap();
        JobRecord::remove(state.path(), 7, None).unwrap();
        JobRecord::remove(state.path(), 7, None).unwrap();
        assert!(!directory.exists() && outside.path().exists());
    }

    #[test]
    fn only_empty_directories_without_a_record_are_removed() {
        let (state, directory, uid) = state();
        let [stray, full] = [8, 9].map(|job| containers_of(state.path(), job));
        for job in [7, 8, 9] {
            make_directory(state.path(), job, uid).unwrap();
        }
        fs::write(full.join("state"), "").unwrap();
        remove_stray_directories(state.path());
        assert_eq!([&directory, &stray, &full].map(|directory| directory.exists()), [true, false, true]);
    }

    #[test]
    fn a_link_in_place_of_the_users_directory_is_not_given() {
        let (state, directory, uid) = state();
        symlink("/tmp", &directory).unwrap();
        assert!(make_directory(state.path(), 7, uid).is_err(), "a link");
    }
}
