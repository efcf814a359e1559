//! Leases without containers, and users of GPUs without a lease: containers, MPS daemons that are not sublet's, NVIDIA's
//! Container Toolkit.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use super::{Host, Outcome, joined, pass, skip, warn};
use crate::proc::{namespace, processes};
use crate::setup::engine_files::drop_ins;
use sublet_core::ledger::{Lease, Ledger};
use sublet_core::text::{safe, safe_path};

/// Reports leases whose containers have ended, which the next command frees, if there is one, and those that are kept by
/// processes of a container that was deleted, or whose engine takes it for ended.
pub(super) fn without_containers(host: &Host<'_>) -> Outcome {
    let Ok(ledger) = &host.ledger else { return skip("unknown without a ledger") };
    // A container's first process may be recorded only by the runtime until a command looks for it.
    let (settled, gone) = ledger.preview_reclaim();
    let unended = |lease: &Lease| {
        let why = settled.describe_unended(lease, &host.config.state_dir)?;
        Some(format!("container {}: {why}", safe(&lease.container.name())))
    };
    let unended = joined(settled.leases.iter().filter_map(unended), "; ");
    let gone = gone.iter().map(|lease| format!("{} of {}", lease.id, lease.container.name()));
    let gone = safe(&joined(gone, ", "));
    match (gone.is_empty(), unended.is_empty()) {
        (false, _) => warn(format!("the containers of these leases have ended: {gone}")).fix("sublet gc"),
        (_, false) => {
            warn(unended).fix("sublet gc; what it does not end is named with the command that does")
        }
        _ => pass(format!("{}, each with a container that runs", settled.leases.len())),
    }
}

/// Reports running containers whose device cgroup does not allow their GPU any more.
pub(super) fn without_nodes(host: &Host<'_>) -> Outcome {
    let (Ok(ledger), Ok(inventory)) = (&host.ledger, &host.inventory) else {
        return skip("unknown without a ledger and an inventory");
    };
    let lost = |lease: &Lease| {
        let why = sublet_core::oci::lost_node(lease, inventory)?;
        Some(format!("container {}: {why}", safe(&lease.container.name())))
    };
    let lost = joined(ledger.preview_reclaim().0.leases.iter().filter_map(lost), "; ");
    if lost.is_empty() {
        return pass("every container may use its devices");
    }
    warn(lost).fix("restart these containers; give limits at `podman run`, not by `podman update`")
}

/// Reports running containers with GPUs that no lease covers.
pub(super) fn containers_without(host: &Host<'_>) -> Outcome {
    let Ok(ledger) = &host.ledger else { return skip("unknown without a ledger") };
    let proc = host.at("/proc");
    let own = namespace(&proc.join("self"), "mnt");
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    let leased = &leased(ledger) | &leased(&ledger.preview_reclaim().0);
    for pid in processes(&proc) {
        let process = sublet_core::process::live_proc_dir(proc.join(pid.to_string()));
        let in_container = namespace(&process, "mnt").is_some_and(|mounts| Some(mounts) != own);
        if let Some((container, node)) = in_container.then(|| user(&process)).flatten() {
            // Containers that share a PID namespace are distinguished by the id in the cgroup's name.
            let is_its = |lease: &Lease| lease.container.id.starts_with(&container);
            let pid_namespace = namespace(&process, "pid").unwrap_or(0);
            if !leased.contains(&pid_namespace) && !ledger.leases.iter().any(is_its) {
                let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
                let user = format!("{} (pid {pid} {}, {node})", safe(&container), safe(name.trim()));
                found.entry(container).or_insert(user);
            }
        }
    }
    if found.is_empty() {
        return pass("no container has a GPU without a lease");
    }
    warn(format!("containers with a GPU and no lease: {}", joined(found.into_values(), ", ")))
        .fix("start them with sublet.* annotations and without --gpus or --device (docs/docker.md)")
}

/// The PID namespaces of containers with leases.
fn leased(ledger: &Ledger) -> BTreeSet<u64> {
    ledger.leases.iter().filter_map(|lease| lease.init.as_ref()).map(|init| init.pid_namespace).collect()
}

/// If the cgroup of `process` is a container's and it can reach a GPU's device node: the container, by the first 64 hex
/// digits in the cgroup's path, as Docker, Podman, containerd and CRI-O name containers, and the node.
fn user(process: &Path) -> Option<(String, String)> {
    let cgroup = fs::read_to_string(process.join("cgroup")).ok()?;
    let hex = |word: &&str| word.len() == 64 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    let container = cgroup.split(|c: char| !c.is_ascii_alphanumeric()).find(hex)?;
    Some((container[..12].to_owned(), node(process)?))
}

/// A GPU's device node that the process has open or that is in its /dev.
fn node(process: &Path) -> Option<String> {
    let is_gpu = |path: &Path| {
        let rest = path.to_str().and_then(|path| path.strip_prefix("/dev/nvidia"));
        rest.is_some_and(|minor| !minor.is_empty() && minor.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let entries = |path: PathBuf| fs::read_dir(path).into_iter().flatten().flatten();
    let open =
        entries(process.join("fd")).filter_map(|fd| fs::read_link(fd.path()).ok()).find(|path| is_gpu(path));
    let standing = || {
        let nodes = entries(process.join("root/dev"))
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_char_device()));
        nodes.map(|entry| Path::new("/dev").join(entry.file_name())).find(|path| is_gpu(path))
    };
    open.or_else(standing).map(|path| path.to_string_lossy().into_owned())
}

// Programs that give out GPUs without sublet's count.

/// CUDA's default pipe directory.
const DEFAULT_PIPE: &str = "/tmp/nvidia-mps";

/// Finds every control daemon on this host (outside containers) whose pipe directory is not sublet's.
pub(super) fn stray_daemons(host: &Host<'_>) -> Outcome {
    let own = namespaces(&host.at("/proc/self"));
    let stray = |pid: i32| {
        let process = host.at(&format!("/proc/{pid}"));
        let is_hosts = own.is_some() && namespaces(&process) == own;
        let pipe = is_hosts.then(|| pipe(&process))??;
        (!pipe.starts_with(&host.config.state_dir)).then_some((pid, pipe))
    };
    let strays: Vec<(i32, PathBuf)> = processes(&host.at("/proc")).into_iter().filter_map(stray).collect();
    let Some((_, pipe)) = strays.first() else { return pass("none") };
    let found = joined(strays.iter().map(|(pid, pipe)| format!("pid {pid} on {}", safe_path(pipe))), ", ");
    let found =
        format!("an MPS daemon that is not sublet's runs: {found}; sublet does not count its clients");
    // A path with special characters is not repeated: the daemon's owner chose the path, and a shell might run it.
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_./-".contains(&byte);
    match pipe.to_str().filter(|path| path.bytes().all(plain)) {
        Some(path) => {
            warn(found).fix(format!("echo quit | CUDA_MPS_PIPE_DIRECTORY={path} nvidia-cuda-mps-control"))
        }
        None => warn(found).fix("end that process"),
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
    let mut entries = environment.split(|byte| *byte == 0);
    let named = entries.find_map(|entry| entry.strip_prefix(b"CUDA_MPS_PIPE_DIRECTORY="));
    Some(named.map_or(DEFAULT_PIPE.into(), |value| String::from_utf8_lossy(value).into_owned().into()))
}

/// Where CDI specifications are.
const CDI: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// Reports the setup of NVIDIA's Container Toolkit.
pub(super) fn toolkit(host: &Host<'_>) -> Outcome {
    let (mut found, mut fix) = (Vec::new(), Vec::new());
    // Other programs' specifications that mount an MPS pipe directory.
    let files = CDI.iter().flat_map(|dir| {
        let dir = host.at(dir);
        [drop_ins(&dir, "json"), drop_ins(&dir, "yaml")].concat()
    });
    let mounts = |text: String| text.contains("/nvidia-mps") && !text.contains("sublet/share");
    for file in files.filter(|file| fs::read_to_string(file).is_ok_and(mounts)) {
        let spec = safe_path(&Path::new("/").join(file.strip_prefix(&host.root).unwrap_or(&file)));
        found.push(format!("CDI specification {spec} mounts an MPS directory with its control sockets"));
        fix.push(format!(
            "nvidia-ctk cdi generate --output={spec}, while no MPS daemon uses /tmp/nvidia-mps"
        ));
    }
    let (dockerd, text) = host.dockerd();
    if dockerd.default_runtime(&text).as_deref() == Some("nvidia") {
        found.push(
            "nvidia is Docker's default runtime: images with NVIDIA_VISIBLE_DEVICES get whole GPUs"
                .to_owned(),
        );
        fix.push("sublet setup docker --default".to_owned());
    }
    let legacy = "/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json";
    if host.at(legacy).exists() {
        found.push(format!(
            "{legacy} gives Podman's containers whole GPUs if their environment asks for them"
        ));
        fix.push(format!("rm {legacy}"));
    }
    if !found.is_empty() {
        return warn(found.join("; ")).fix(fix.join(" && "));
    }
    let there = ["nvidia-container-runtime", "nvidia-ctk"].iter().find_map(|name| host.program(name));
    let Some(program) = there.map(|program| safe_path(&program)) else { return skip("not installed") };
    pass(format!("{program} does not interfere; sublet does not count the GPUs that it gives to containers"))
}

#[cfg(test)]
mod tests {
    use super::super::Verdict::Warn;
    use super::super::fake_host::{Fake, finding, passed, skipped};
    use super::*;
    use sublet_core::ledger::Init;
    use sublet_core::ledger::fixture::lease;
    use sublet_core::process::Process;

    #[test]
    fn a_lease_whose_owner_is_gone_is_named() {
        let fake = Fake::new();
        let mut host = fake.host();
        assert_eq!(passed(without_containers(&host)), "0, each with a container that runs");
        let mut held = lease(1, "GPU-0");
        held.owner = Process::current().unwrap();
        host.ledger.as_mut().unwrap().leases = vec![held, lease(2, "GPU-0")];
        let (found, fix) = finding(without_containers(&host), Warn);
        assert_eq!(found, "the containers of these leases have ended: 0000000000000002 of container-2");
        assert_eq!(fix, "sublet gc");
        host.ledger.as_mut().unwrap().leases.pop();
        passed(without_containers(&host));
    }

    #[test]
    fn a_container_that_only_its_runtime_has_recorded_is_not_ended() {
        let fake = Fake::new();
        let us = Process::current().unwrap();
        let status =
            format!(r#"{{"pid": {}, "process-start-time": {}, "cgroup-path": "/x"}}"#, us.pid, us.start_time);
        fake.file("/run/crun/c/status", &status);
        let mut lease = lease(1, "GPU-0");
        lease.container.record = fake.path("/run/crun/c");
        let mut host = fake.host();
        host.ledger.as_mut().unwrap().leases.push(lease);
        assert_eq!(passed(without_containers(&host)), "1, each with a container that runs");
    }

    const ID: &str = "d55c611b20c2aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

    fn process(fake: &Fake, pid: u32, mounts: u64, cgroup: &str) {
        process_in(fake, &format!("/proc/{pid}"), mounts, cgroup);
    }

    fn process_in(fake: &Fake, proc: &str, mounts: u64, cgroup: &str) {
        let path = |name: &str| format!("{proc}/{name}");
        fake.file(&path("cgroup"), &format!("0::{cgroup}\n")).file(&path("comm"), "python3\n");
        fake.link(&path("ns/mnt"), format!("mnt:[{mounts}]"));
        fake.link(&path("ns/pid"), format!("pid:[{}]", mounts + 1));
    }

    #[test]
    fn a_container_with_a_gpu_needs_a_lease() {
        let fake = Fake::new();
        fake.link("/proc/self/ns/mnt", "mnt:[100]");
        process(&fake, 1, 100, "/init.scope");
        fake.link("/proc/1/fd/3", "/dev/nvidia0");
        process(&fake, 7, 200, &format!("/system.slice/docker-{ID}.scope"));
        fake.link("/proc/7/fd/3", "/dev/nvidiactl");
        process(&fake, 8, 300, "/user.slice/sandboxed");
        fake.link("/proc/8/fd/3", "/dev/nvidia0");
        passed(containers_without(&fake.host()));
        fake.link("/proc/7/fd/4", "/dev/nvidia1");
        let (found, _) = finding(containers_without(&fake.host()), Warn);
        assert_eq!(found, "containers with a GPU and no lease: d55c611b20c2 (pid 7 python3, /dev/nvidia1)");
        let mut host = fake.host();
        let mut ours = lease(1, "GPU-0");
        ours.init = Some(Init {
            process: Process { pid: 7, start_time: 1 },
            pid_namespace: 201,
            cgroup: None,
            cgroup_inode: None,
        });
        host.ledger.as_mut().unwrap().leases.push(ours);
        passed(containers_without(&host));
        host.ledger.as_mut().unwrap().leases[0].init = None;
        host.ledger.as_mut().unwrap().leases[0].container.id = ID.to_owned();
        passed(containers_without(&host));
    }

    #[test]
    fn a_container_whose_first_thread_has_ended_needs_one_too() {
        let fake = Fake::new();
        fake.link("/proc/self/ns/mnt", "mnt:[100]");
        let stat = |state: char, memory: u64| {
            format!("7 (python3) {state} 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 2 0 42 {memory} 0 0 0 0 0 0 0 0\n")
        };
        fake.file("/proc/7/stat", &stat('Z', 0)).file("/proc/7/cgroup", "5:devices:/\n");
        fake.file("/proc/7/task/7/stat", &stat('Z', 0)).file("/proc/7/task/9/stat", &stat('S', 4096));
        process_in(&fake, "/proc/7/task/9", 200, &format!("/system.slice/docker-{ID}.scope"));
        fake.link("/proc/7/task/9/fd/3", "/dev/nvidia1");
        let (found, _) = finding(containers_without(&fake.host()), Warn);
        assert!(found.ends_with("d55c611b20c2 (pid 7 python3, /dev/nvidia1)"), "{found}");
    }

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
        assert_eq!(passed(stray_daemons(&fake.host())), "none");
        daemon(&fake, 9, 1, "");
        let (found, fix) = finding(stray_daemons(&fake.host()), Warn);
        assert!(found.contains("pid 9 on /tmp/nvidia-mps"), "{found}");
        assert_eq!(fix, "echo quit | CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps nvidia-cuda-mps-control");
    }

    #[test]
    fn nothing_of_a_containers_is_taken_and_nothing_of_anybodys_typed() {
        let fake = this_host();
        daemon(&fake, 7, 8, "CUDA_MPS_PIPE_DIRECTORY=/tmp/a\0");
        fake.file("/proc/8/cmdline", "nvidia-cuda-mps-control\0-d\0").link("/proc/8/exe", "/usr/bin/bash");
        fake.link("/proc/8/ns/mnt", "mnt:[1]").link("/proc/8/ns/pid", "pid:[2]");
        assert_eq!(passed(stray_daemons(&fake.host())), "none");
        daemon(&fake, 9, 1, "CUDA_MPS_PIPE_DIRECTORY=/tmp/a;reboot\0");
        assert_eq!(finding(stray_daemons(&fake.host()), Warn).1, "end that process");
    }

    #[test]
    fn other_tools_that_give_gpus_are_named() {
        let fake = Fake::new();
        assert_eq!(skipped(toolkit(&fake.host())), "not installed");
        fake.file("/usr/bin/nvidia-ctk", "");
        assert!(passed(toolkit(&fake.host())).contains("does not interfere"));
        fake.file("/var/run/cdi/sublet.json", r#"{"kind": "sublet/share", "m": "/tmp/nvidia-mps"}"#);
        passed(toolkit(&fake.host()));
        fake.file("/etc/cdi/nvidia.yaml", "mounts:\n- hostPath: /tmp/nvidia-mps\n");
        let (found, _) = finding(toolkit(&fake.host()), Warn);
        assert!(found.starts_with("CDI specification /etc/cdi/nvidia.yaml mounts"), "{found}");
        fake.file("/etc/docker/daemon.json", r#"{"default-runtime": "nvidia"}"#);
        let (found, fix) = finding(toolkit(&fake.host()), Warn);
        assert!(found.contains("nvidia is Docker's default runtime"), "{found}");
        assert!(fix.ends_with("sublet setup docker --default"), "{fix}");
    }

    #[test]
    fn the_legacy_hook_is_named() {
        let fake = Fake::new();
        fake.file("/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json", "{}");
        assert!(finding(toolkit(&fake.host()), Warn).1.starts_with("rm /usr/share"));
    }
}
