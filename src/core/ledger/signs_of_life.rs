//! Why a lease is not freed, for a user who wants to free it.

use std::path::Path;

use super::Lease;
use super::cgroup::find_sign_of_life;
use super::liveness::has_processes;
use super::runtime_record::Record;
use crate::text::safe;

impl Lease {
    /// Evidence that its container may be alive, for a user who wants the lease to be freed. It names each place that
    /// was checked.
    #[must_use]
    pub fn signs_of_life(&self) -> Vec<String> {
        let path = |path: &Path| safe(&path.to_string_lossy());
        let mut signs = Vec::new();
        match &self.init {
            Some(init) if init.process.is_alive() => {
                signs.push(format!("its process {} runs", init.process.pid));
            }
            Some(init) if has_processes(init) => {
                let (pid, cgroup) = (init.process.pid, init.cgroup.as_deref().map(path).unwrap_or_default());
                signs.push(format!(
                    "its first process {pid} has ended, but its cgroup {cgroup} still has processes"
                ));
            }
            _ => {}
        }
        if self.init.is_none() && self.owner.is_alive() && !self.is_overdue() {
            signs.push(format!("process {} is starting it", self.owner.pid));
        }
        if self.init.is_none() && !self.brokered {
            signs.extend(self.signs_without_init());
        }
        signs
    }

    fn signs_without_init(&self) -> Option<String> {
        let path = |path: &Path| safe(&path.to_string_lossy());
        match Record::read(&self.container.record) {
            Ok(None) => match find_sign_of_life(&self.container) {
                Ok(sign) => sign.map(|sign| format!("its runtime has no record of it, but {sign}")),
                Err(error) => Some(format!(
                    "its runtime has no record of it, and its config.json in {} cannot be read ({}), so \
                     sublet cannot tell whether it runs",
                    path(&self.container.bundle),
                    safe(&error.to_string())
                )),
            },
            Ok(Some(_)) => None,
            Err(error) => Some(format!(
                "its runtime's record {} cannot be read ({}), so sublet cannot tell whether it runs; the \
                 process that started it, {}, is {}",
                path(&self.container.record),
                safe(&error.to_string()),
                self.owner.pid,
                if self.owner.is_alive() { "there still" } else { "gone" },
            )),
        }
    }
}
