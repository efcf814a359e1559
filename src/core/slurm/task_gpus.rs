//! Which of its job's GPUs a step or a task may open. With `ConstrainDevices` (cgroup.conf(5)) slurmd lets a step open
//! those that the step got, and with `--gpus-per-task` a task its own.

use std::path::PathBuf;

use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};
use serde::{Deserialize, Serialize};

/// A GPU of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobGpu {
    /// Its UUID.
    pub uuid: String,
    /// Its node on the host.
    pub node: PathBuf,
}

/// UUIDs of the `gpus` that the calling process must not open, by its cgroup.
///
/// access(2) asks the device controllers of cgroup v1 and v2 as open(2) does (`devcgroup_inode_permission` in Linux's
/// fs/namei.c), does not reach the driver, and says EPERM. A cgroup's devices.list does not show it: slurmd forbids one
/// device after the other, and it then says `a *:* rwm`. What cannot be known, such as a node that is not there, is not
/// said to be forbidden: the variables that follow from this only say what the kernel decides.
pub(crate) fn forbidden(gpus: &[JobGpu]) -> Vec<String> {
    let is_forbidden =
        |gpu: &&JobGpu| access(&gpu.node, AccessFlags::R_OK | AccessFlags::W_OK) == Err(Errno::EPERM);
    gpus.iter().filter(is_forbidden).map(|gpu| gpu.uuid.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_cgroup_forbids_or_is_not_there_is_not_forbidden() {
        let gpu = |node: &str| JobGpu { uuid: "GPU-a".into(), node: node.into() };
        assert!(forbidden(&[gpu("/dev/null"), gpu("/nonexistent"), gpu("/proc/version")]).is_empty());
    }
}
