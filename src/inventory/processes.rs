//! Processes with contexts: what /proc of this host says of each that NVML lists.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use super::GpuProcess;

/// The MPS server's program.
const MPS_SERVER: &str = "nvidia-cuda-mps-server";

/// As much of it as a command name holds (`TASK_COMM_LEN` less one, proc(5)).
const MPS_SERVER_COMM: &str = "nvidia-cuda-mps";

/// The process `pid` with `memory_bytes` on a device; `None` when it has gone meanwhile.
pub(crate) fn describe(pid: i32, memory_bytes: u64) -> Option<GpuProcess> {
    let proc = Path::new("/proc").join(pid.to_string());
    let comm = fs::read(proc.join("comm")).ok()?;
    let name = String::from_utf8_lossy(&comm).trim_end().to_owned();
    let pid_namespace = pid_namespace(&proc);
    let cgroup = fs::read_to_string(proc.join("cgroup")).map(|text| cgroup(&text)).unwrap_or_default();
    // A tenant can call its program what it likes, but not put it into the host's PID namespace.
    let ours = pid_namespace == 0 || pid_namespace == self::pid_namespace(Path::new("/proc/self"));
    let mps_server = ours && is_mps_server(fs::read_link(proc.join("exe")).ok().as_deref(), &name);
    Some(GpuProcess { pid, name, memory_bytes, pid_namespace, cgroup, mps_server })
}

/// Inode of a process's PID namespace; 0 where we may not look.
fn pid_namespace(proc: &Path) -> u64 {
    fs::metadata(proc.join("ns/pid")).map_or(0, |namespace| namespace.ino())
}

/// By the program file; the cut command name counts where we may not read that link.
fn is_mps_server(exe: Option<&Path>, comm: &str) -> bool {
    match exe.and_then(Path::file_name) {
        Some(name) => name.to_string_lossy().trim_end_matches(" (deleted)") == MPS_SERVER,
        None => comm == MPS_SERVER_COMM,
    }
}

/// The cgroup path in the text of `/proc/PID/cgroup` (cgroups(7)): the v2 line `0::PATH`, or on v1 and
/// hybrid hosts, where that line says `/`, the one of the devices hierarchy.
fn cgroup(text: &str) -> String {
    let fields = || {
        text.lines().filter_map(|line| {
            let mut parts = line.splitn(3, ':');
            Some((parts.next()?, parts.next()?, parts.next()?))
        })
    };
    let unified = fields().find(|&(id, _, _)| id == "0").map(|(_, _, path)| path);
    let devices = fields()
        .find(|(_, controllers, _)| controllers.split(',').any(|controller| controller == "devices"))
        .map(|(_, _, path)| path);
    unified.filter(|&path| path != "/").or(devices).or(unified).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_of_v2_v1_and_hybrid_hosts() {
        let cases = [
            ("0::/system.slice/docker-abc.scope\n", "/system.slice/docker-abc.scope"),
            ("12:pids:/x\n5:cpu,devices:/docker/abc\n", "/docker/abc"),
            ("5:devices:/docker/abc\n1:name=systemd:/s\n0::/\n", "/docker/abc"),
            ("5:devices:/old\n0::/system.slice/a:b.scope\n", "/system.slice/a:b.scope"),
            ("0::/\n", "/"),
            ("garbage\n", ""),
        ];
        for (text, expected) in cases {
            assert_eq!(cgroup(text), expected, "{text}");
        }
    }

    #[test]
    fn the_mps_server_is_known_by_its_program() {
        let exe = |path: &str| is_mps_server(Some(Path::new(path)), "anything");
        assert!(exe("/usr/bin/nvidia-cuda-mps-server"));
        assert!(exe("/usr/bin/nvidia-cuda-mps-server (deleted)"));
        assert!(!exe("/usr/bin/nvidia-cuda-mps-control"));
        assert!(!is_mps_server(Some(Path::new("/tmp/python3")), "nvidia-cuda-mps"));
        assert!(is_mps_server(None, "nvidia-cuda-mps"));
        assert!(!is_mps_server(None, "python3"));
    }

    #[test]
    fn describes_this_process() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let found = describe(pid, 42).unwrap();
        let link = fs::read_link("/proc/self/ns/pid").unwrap();
        assert_eq!(link.to_str().unwrap(), format!("pid:[{}]", found.pid_namespace));
        assert_eq!((found.pid, found.memory_bytes, found.mps_server), (pid, 42, false));
        assert!(!found.name.is_empty() && !found.name.ends_with('\n'));
    }

    #[test]
    fn a_process_that_left_is_not_listed() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert_eq!(describe(i32::try_from(child.id()).unwrap(), 0), None);
    }
}
