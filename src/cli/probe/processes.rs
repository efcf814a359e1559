//! Processes on a device: NVML lists them, and this host's /proc describes each.

use std::ffi::c_uint;
use std::path::Path;
use std::{fs, io};

use nix::libc::ESRCH;
use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try};
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlProcessInfo_t, nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE as INSUFFICIENT_SIZE,
    nvmlReturn_t,
};

use super::unless_unsupported;
use crate::proc::namespace;
use sublet_core::inventory::GpuProcess;
use sublet_core::process::{cgroup_table, live_proc_dir_of};

/// The MPS server's program.
const MPS_SERVER: &str = "nvidia-cuda-mps-server";

/// The part of that name that a command name holds (`TASK_COMM_LEN` less one, proc(5)).
const MPS_SERVER_COMM: &str = "nvidia-cuda-mps";

/// Process `pid` with `memory_bytes` on a device; `None` if it has ended. A process that cannot be examined has no
/// name and belongs to no container.
pub(crate) fn describe(pid: i32, memory_bytes: u64) -> Option<GpuProcess> {
    let proc = live_proc_dir_of(pid);
    let name = name(fs::read(proc.join("comm")))?;
    let pid_namespace = namespace(&proc, "pid").unwrap_or(0);
    let cgroups = cgroup_table(pid).map(|text| cgroups(&text)).unwrap_or_default();
    // A container can give its program any name, but cannot put it into the host's PID namespace.
    let ours = pid_namespace == 0 || namespace(Path::new("/proc/self"), "pid") == Some(pid_namespace);
    let mps_server = ours && is_mps_server(fs::read_link(proc.join("exe")).ok().as_deref(), &name);
    Some(GpuProcess { pid, name, memory_bytes, pid_namespace, cgroups, mps_server })
}

fn name(comm: io::Result<Vec<u8>>) -> Option<String> {
    match comm {
        Ok(comm) => Some(String::from_utf8_lossy(&comm).trim_end().to_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(ESRCH) => None,
        Err(_) => Some(String::new()),
    }
}

/// Judged by the program file; by the truncated command name if that link may not be read.
fn is_mps_server(exe: Option<&Path>, comm: &str) -> bool {
    match exe.and_then(Path::file_name) {
        Some(name) => name.to_string_lossy().trim_end_matches(" (deleted)") == MPS_SERVER,
        None => comm == MPS_SERVER_COMM,
    }
}

/// The cgroup paths in the text of `/proc/PID/cgroup` (cgroups(7)), each once. Which hierarchy has the container's own
/// cgroup differs: on hybrid hosts a runtime may leave the container in its engine's cgroup in v2, and rootless
/// runtimes leave it in the user's slice in v1. A root cgroup may contain any process.
pub(crate) fn cgroups(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for path in text.lines().filter_map(|line| line.splitn(3, ':').nth(2)) {
        if path != "/" && !found.iter().any(|known| known == path) {
            found.push(path.to_owned());
        }
    }
    found
}

// NVML's lists, each read with one call. nvml-wrapper asks for the length first, which costs about half as much again
// (docs/evidence/2026-11-22-guard-cost.md).

/// A function that lists processes of one device (`nvmlDeviceGet…RunningProcesses_v3`; nvml.h).
type GetList = unsafe extern "C" fn(nvmlDevice_t, *mut c_uint, *mut nvmlProcessInfo_t) -> nvmlReturn_t;

/// Initial room: the clients of one server, and some more.
const USUAL: usize = 128;

/// How often a list that grows between two calls is read.
const TRIES: usize = 6;

/// Processes with compute contexts: MPS servers, their clients, and processes outside MPS. This list and the other two
/// are empty if the driver has none.
pub(crate) fn compute_processes(device: &Device<'_>) -> Result<Vec<ProcessInfo>, NvmlError> {
    let call = device.nvml().lib().nvmlDeviceGetComputeRunningProcesses_v3.as_ref();
    Ok(unless_unsupported(nvml_sym(call).and_then(|call| ask(device, *call)))?.unwrap_or_default())
}

/// Clients of MPS servers; `None` if the driver has no such list.
pub(crate) fn mps_clients(device: &Device<'_>) -> Result<Option<Vec<ProcessInfo>>, NvmlError> {
    let call = device.nvml().lib().nvmlDeviceGetMPSComputeRunningProcesses_v3.as_ref();
    unless_unsupported(nvml_sym(call).and_then(|call| ask(device, *call)))
}

/// Processes with graphics contexts.
pub(crate) fn graphics_processes(device: &Device<'_>) -> Result<Vec<ProcessInfo>, NvmlError> {
    let call = device.nvml().lib().nvmlDeviceGetGraphicsRunningProcesses_v3.as_ref();
    Ok(unless_unsupported(nvml_sym(call).and_then(|call| ask(device, *call)))?.unwrap_or_default())
}

#[allow(unsafe_code, reason = "NVML by its C ABI")]
fn ask(device: &Device<'_>, call: GetList) -> Result<Vec<ProcessInfo>, NvmlError> {
    let empty = nvmlProcessInfo_t { pid: 0, usedGpuMemory: 0, gpuInstanceId: 0, computeInstanceId: 0 };
    let mut list = vec![empty; USUAL];
    for _ in 0..TRIES {
        let room = c_uint::try_from(list.len()).map_err(|_| NvmlError::InsufficientSize(None))?;
        let mut count = room;
        // SAFETY: an array of `count` elements of the struct that version 3 of the calls has; the handle comes from
        // `device`, which borrows the initialized library it belongs to.
        let answer = unsafe { call(device.handle(), &raw mut count, list.as_mut_ptr()) };
        if answer != INSUFFICIENT_SIZE {
            nvml_try(answer)?;
            list.truncate(count as usize);
            return Ok(list.into_iter().map(ProcessInfo::from).collect());
        }
        // `count` is the room that was needed just now.
        list.resize(count.max(room) as usize + USUAL, empty);
    }
    Err(NvmlError::InsufficientSize(None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroups_of_v2_v1_and_hybrid_hosts() {
        let cases: [(&str, &[&str]); 7] = [
            ("0::/system.slice/docker-abc.scope\n", &["/system.slice/docker-abc.scope"]),
            ("12:pids:/x\n5:cpu,devices:/docker/abc\n", &["/x", "/docker/abc"]),
            ("5:devices:/docker/abc\n1:name=systemd:/docker/abc\n0::/\n", &["/docker/abc"]),
            ("5:devices:/old\n0::/system.slice/a:b.scope\n", &["/old", "/system.slice/a:b.scope"]),
            ("0::/\n", &[]),
            ("garbage\n5:devices\n", &[]),
            ("", &[]),
        ];
        for (text, expected) in cases {
            assert_eq!(cgroups(text), expected, "{text}");
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
    fn a_process_that_cannot_be_looked_at_is_there() {
        let failed = |number| name(Err(io::Error::from_raw_os_error(number)));
        assert_eq!((failed(nix::libc::ENOENT), failed(ESRCH)), (None, None));
        assert_eq!(
            (failed(nix::libc::EMFILE), failed(nix::libc::EACCES)),
            (Some(String::new()), Some(String::new()))
        );
    }

    #[test]
    fn a_process_that_left_is_not_listed() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert_eq!(describe(i32::try_from(child.id()).unwrap(), 0), None);
    }
}
