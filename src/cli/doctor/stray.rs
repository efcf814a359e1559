//! MPS daemons that are not sublet's: sublet does not count their clients.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Host, Outcome, pass, shown, warn};
use crate::proc::{namespace, processes};

/// CUDA's default pipe directory.
const DEFAULT_PIPE: &str = "/tmp/nvidia-mps";

/// Finds every control daemon on this host (outside containers) whose pipe directory is not sublet's.
pub(super) fn daemons(host: &Host<'_>) -> Outcome {
    let own = namespaces(&host.at("/proc/self"));
    let strays: Vec<(i32, PathBuf)> = processes(&host.at("/proc"))
        .into_iter()
        .map(|pid| (pid, host.at(&format!("/proc/{pid}"))))
        .filter(|(_, process)| own.is_some() && namespaces(process) == own)
        .filter_map(|(pid, process)| Some((pid, pipe(&process)?)))
        .filter(|(_, pipe)| !pipe.starts_with(&host.config.state_dir))
        .collect();
    let Some((_, pipe)) = strays.first() else { return pass("none") };
    let found = strays.iter().map(|(pid, pipe)| format!("pid {pid} on {}", shown(pipe)));
    let found = found.collect::<Vec<_>>().join(", ");
    warn(
        format!("an MPS daemon that is not sublet's runs: {found}; sublet does not count its clients"),
        quit(pipe),
    )
}

/// The command to type. A path with special characters is not repeated in it: the daemon's owner chose the path, and a
/// shell might run it.
fn quit(pipe: &Path) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_./-".contains(&byte);
    match pipe.to_str().filter(|path| path.bytes().all(plain)) {
        Some(path) => format!("echo quit | CUDA_MPS_PIPE_DIRECTORY={path} nvidia-cuda-mps-control"),
        None => "end that process".to_owned(),
    }
}

/// Mount and PID namespaces. A process that shares both with sublet is in no container; a container's files and
/// command lines are not the host's.
fn namespaces(process: &Path) -> Option<(u64, u64)> {
    Some((namespace(process, "mnt")?, namespace(process, "pid")?))
}

/// The pipe directory, if the process is an MPS control daemon. The program file decides, because a process can choose
/// its own name. An environment that may not be read counts as the default.
fn pipe(process: &Path) -> Option<PathBuf> {
    let program = fs::read_link(process.join("exe")).ok()?;
    // For a program that was upgraded meanwhile the kernel reports the file as deleted (proc(5)).
    let name = program.file_name()?.to_str()?;
    if name.strip_suffix(" (deleted)").unwrap_or(name) != "nvidia-cuda-mps-control" {
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
    use super::super::fake_host::{Fake, passed, told};
    use super::*;

    fn daemon(fake: &Fake, pid: u32, mounts: u64, environment: &str) {
        let path = |name: &str| format!("/proc/{pid}/{name}");
        fake.link(&path("exe"), "/usr/bin/nvidia-cuda-mps-control").file(&path("environ"), environment);
        fake.link(&path("ns/mnt"), format!("mnt:[{mounts}]")).link(&path("ns/pid"), "pid:[2]");
    }

    fn this_host() -> Fake {
        let fake = Fake::new();
        fake.link("/proc/self/ns/mnt", "mnt:[1]").link("/proc/self/ns/pid", "pid:[2]");
        fake
    }

    #[test]
    fn a_daemon_on_cudas_default_is_stray_and_sublets_is_not() {
        let fake = this_host();
        let ours = fake.path("/run/sublet/mps/GPU-0/pipe");
        daemon(&fake, 7, 1, &format!("A=b\0CUDA_MPS_PIPE_DIRECTORY={}\0", ours.display()));
        assert_eq!(passed(daemons(&fake.host())), "none");
        daemon(&fake, 9, 1, "");
        let (found, fix) = told(daemons(&fake.host()), Warn);
        assert!(found.contains("pid 9 on /tmp/nvidia-mps"), "{found}");
        assert_eq!(fix, "echo quit | CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps nvidia-cuda-mps-control");
    }

    #[test]
    fn nothing_of_a_containers_is_taken_and_nothing_of_anybodys_typed() {
        let fake = this_host();
        daemon(&fake, 7, 8, "CUDA_MPS_PIPE_DIRECTORY=/tmp/a\0");
        fake.file("/proc/8/cmdline", "nvidia-cuda-mps-control\0-d\0").link("/proc/8/exe", "/usr/bin/bash");
        fake.link("/proc/8/ns/mnt", "mnt:[1]").link("/proc/8/ns/pid", "pid:[2]");
        assert_eq!(passed(daemons(&fake.host())), "none");
        daemon(&fake, 9, 1, "CUDA_MPS_PIPE_DIRECTORY=/tmp/a;reboot\0");
        assert_eq!(told(daemons(&fake.host()), Warn).1, "end that process");
    }
}
