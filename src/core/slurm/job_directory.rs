//! Where a job's user keeps the state of the job's containers: the `--root` of oci.conf. A job has no session, and so no
//! `XDG_RUNTIME_DIR`; and Slurm 22.05 can name the job there, but not the uid.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, lchown};
use std::path::{Path, PathBuf};

use super::job_record::directory;
use crate::fs::trusted;

/// `slurm/<job>` in the state directory, made by root's prolog and the user's own.
pub struct JobDirectory(PathBuf);

impl JobDirectory {
    /// That of `job`.
    pub fn of(state_dir: &Path, job: u64) -> Self {
        Self(directory(state_dir).join(job.to_string()))
    }

    /// Makes it for `uid`, if it is not there: a prolog may run twice.
    ///
    /// # Errors
    /// It cannot be made, or is not that user's.
    pub fn make(&self, uid: u32) -> io::Result<()> {
        match DirBuilder::new().mode(0o700).create(&self.0) {
            Ok(()) => return lchown(&self.0, Some(uid), None),
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            Err(_) => {}
        }
        let meta = fs::symlink_metadata(&self.0)?;
        if meta.is_dir() && meta.uid() == uid {
            return Ok(());
        }
        // The prolog was killed in between.
        if meta.is_dir() && trusted::is_trusted_owner(meta.uid()) {
            return lchown(&self.0, Some(uid), None);
        }
        Err(io::Error::other(format!("{} is another user's", self.0.display())))
    }

    /// Removes empty directories of jobs that have no record any more. slurmstepd may end a container, as root, after the
    /// epilog, and runc and crun then make their `--root` again (seen on a machine under load).
    pub fn remove_strays(state_dir: &Path) {
        let entries = fs::read_dir(directory(state_dir)).into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()) {
            // The prolog writes the record first, and the epilog removes it last.
            let is_stray = path.extension().is_none() && !path.with_extension("json").exists();
            if is_stray && fs::remove_dir(&path).is_ok() {
                tracing::debug!("removed {}, which was made after its job's end", path.display());
            }
        }
    }

    /// Removes it and its content.
    pub(super) fn remove(&self) -> io::Result<()> {
        match fs::remove_dir_all(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slurm::JobRecord;
    use std::os::unix::fs::symlink;

    fn state() -> (tempfile::TempDir, JobDirectory, u32) {
        let state = tempfile::tempdir().unwrap();
        let uid = nix::unistd::geteuid().as_raw();
        JobRecord::new(7, uid, None, Ok(None)).write(state.path()).unwrap();
        let directory = JobDirectory::of(state.path(), 7);
        (state, directory, uid)
    }

    #[test]
    fn it_is_the_users_and_goes_with_all_that_is_in_it() {
        let (_state, directory, uid) = state();
        directory.make(uid).unwrap();
        directory.make(uid).unwrap();
        let meta = fs::metadata(&directory.0).unwrap();
        assert_eq!((meta.uid(), meta.mode() & 0o7777), (uid, 0o700));
        let outside = tempfile::tempdir().unwrap();
        symlink(outside.path(), directory.0.join("link")).unwrap();
        directory.remove().unwrap();
        directory.remove().unwrap();
        assert!(!directory.0.exists() && outside.path().exists());
    }

    #[test]
    fn empty_directories_without_a_record_are_removed_and_no_others() {
        let (state, directory, uid) = state();
        directory.make(uid).unwrap();
        let [stray, full] = [8, 9].map(|job| JobDirectory::of(state.path(), job));
        stray.make(uid).unwrap();
        full.make(uid).unwrap();
        fs::write(full.0.join("state"), "").unwrap();
        JobDirectory::remove_strays(state.path());
        assert_eq!([&directory, &stray, &full].map(|directory| directory.0.exists()), [true, false, true]);
    }

    #[test]
    fn what_is_no_directory_of_the_users_is_not_given() {
        let (_state, directory, uid) = state();
        symlink("/tmp", &directory.0).unwrap();
        assert!(directory.make(uid).is_err(), "a link");
    }
}
