//! MPS daemons that are not sublet's: their clients are in no account.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Host, Outcome, pass, shown, warn};

/// CUDA's default.
const DEFAULT_PIPE: &str = "/tmp/nvidia-mps";

/// Every control daemon whose pipe directory is not ours.
pub(super) fn daemons(host: &Host<'_>) -> Outcome {
    let strays: Vec<(i32, PathBuf)> = processes(&host.at("/proc"))
        .into_iter()
        .filter_map(|pid| Some((pid, pipe(&host.at(&format!("/proc/{pid}")))?)))
        .filter(|(_, pipe)| !pipe.starts_with(&host.config.state_dir))
        .collect();
    let Some((_, pipe)) = strays.first() else { return pass("none") };
    let found = strays.iter().map(|(pid, pipe)| format!("pid {pid} on {}", shown(pipe)));
    let fix = format!("echo quit | CUDA_MPS_PIPE_DIRECTORY={} nvidia-cuda-mps-control", shown(pipe));
    let found = found.collect::<Vec<_>>().join(", ");
    warn(format!("an MPS daemon that is not sublet's: {found}; its clients are in no account"), fix)
}

/// The pids in a /proc.
pub(super) fn processes(proc: &Path) -> Vec<i32> {
    let entries = fs::read_dir(proc).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// The pipe directory, if it is an MPS control daemon; what may not be read is taken for the default.
fn pipe(process: &Path) -> Option<PathBuf> {
    let cmdline = fs::read(process.join("cmdline")).ok()?;
    let program = cmdline.split(|byte| *byte == 0).next().unwrap_or_default();
    if !program.ends_with(b"nvidia-cuda-mps-control") {
        return None;
    }
    let environment = fs::read(process.join("environ")).unwrap_or_default();
    let named = environment
        .split(|byte| *byte == 0)
        .find_map(|entry| entry.strip_prefix(b"CUDA_MPS_PIPE_DIRECTORY="))
        .map(|value| PathBuf::from(String::from_utf8_lossy(value).into_owned()));
    Some(named.unwrap_or_else(|| PathBuf::from(DEFAULT_PIPE)))
}

#[cfg(test)]
mod tests {
    use super::super::Verdict::Warn;
    use super::super::fixture::{Fake, passed, told};
    use super::*;

    #[test]
    fn a_daemon_on_cudas_default_is_a_stray_and_ours_is_none() {
        let fake = Fake::new();
        let ours = fake.path("/run/sublet/mps/GPU-0/pipe");
        fake.file("/proc/7/cmdline", "/usr/bin/nvidia-cuda-mps-control\0-d\0");
        fake.file("/proc/7/environ", &format!("A=b\0CUDA_MPS_PIPE_DIRECTORY={}\0", ours.display()));
        fake.file("/proc/8/cmdline", "bash\0nvidia-cuda-mps-control\0");
        assert_eq!(passed(daemons(&fake.host())), "none");
        fake.file("/proc/9/cmdline", "nvidia-cuda-mps-control\0-d\0").file("/proc/9/environ", "");
        let (found, fix) = told(daemons(&fake.host()), Warn);
        assert!(found.contains("pid 9 on /tmp/nvidia-mps"), "{found}");
        assert_eq!(fix, "echo quit | CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps nvidia-cuda-mps-control");
    }
}
