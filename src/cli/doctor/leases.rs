//! Leases without containers, and containers without leases.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use super::{Host, Outcome, pass, skip, warn};
use crate::proc::{namespace, processes};
use sublet_core::ledger::{Lease, Ledger};
use sublet_core::oci;
use sublet_core::process::live_proc_dir;
use sublet_core::text::safe;

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
    let unended: Vec<String> = settled.leases.iter().filter_map(unended).collect();
    let gone = gone.iter().map(|lease| format!("{} of {}", lease.id, lease.container.name()));
    let gone = gone.collect::<Vec<_>>().join(", ");
    match (gone.is_empty(), unended.is_empty()) {
        (false, _) => {
            warn(format!("the containers of these leases have ended: {}", safe(&gone)), "sublet gc")
        }
        (true, false) => {
            warn(unended.join("; "), "sublet gc; what it does not end is named with the command that does")
        }
        (true, true) => pass(format!("{}, each with a container that runs", settled.leases.len())),
    }
}

/// Reports running containers whose device cgroup does not allow their GPU any more.
pub(super) fn without_nodes(host: &Host<'_>) -> Outcome {
    let (Ok(ledger), Ok(inventory)) = (&host.ledger, &host.inventory) else {
        return skip("unknown without a ledger and an inventory");
    };
    let lost = |lease: &Lease| {
        let why = oci::lost_node(lease, inventory)?;
        Some(format!("container {}: {why}", safe(&lease.container.name())))
    };
    let lost: Vec<String> = ledger.preview_reclaim().0.leases.iter().filter_map(lost).collect();
    if lost.is_empty() {
        return pass("every container may use its devices");
    }
    warn(lost.join("; "), "restart these containers; give limits at `podman run`, not by `podman update`")
}

/// A process in a container that can use a GPU.
struct User {
    pid: i32,
    name: String,
    node: String,
    container: String,
    pid_namespace: u64,
}

/// Reports running containers with GPUs that no lease covers.
pub(super) fn containers_without(host: &Host<'_>) -> Outcome {
    let Ok(ledger) = &host.ledger else { return skip("unknown without a ledger") };
    let proc = host.at("/proc");
    let own = namespace(&proc.join("self"), "mnt");
    let mut found: BTreeMap<String, User> = BTreeMap::new();
    let leased = &leased(ledger) | &leased(&ledger.preview_reclaim().0);
    for pid in processes(&proc) {
        let process = live_proc_dir(proc.join(pid.to_string()));
        let in_container = namespace(&process, "mnt").is_some_and(|mounts| Some(mounts) != own);
        if let Some(user) = in_container.then(|| user(pid, &process)).flatten() {
            // Containers that share a PID namespace are told apart by the id in the cgroup's name.
            let is_its = |lease: &Lease| lease.container.id.starts_with(&user.container);
            if !leased.contains(&user.pid_namespace) && !ledger.leases.iter().any(is_its) {
                found.entry(user.container.clone()).or_insert(user);
            }
        }
    }
    if found.is_empty() {
        return pass("no container has a GPU without a lease");
    }
    let describe = |User { pid, name, node, container, .. }: &User| {
        format!("{} (pid {pid} {}, {node})", safe(container), safe(name))
    };
    let names: Vec<String> = found.values().map(describe).collect();
    warn(
        format!("containers with a GPU and no lease: {}", names.join(", ")),
        "start them with sublet.* annotations and without --gpus or --device (docs/docker.md)",
    )
}

/// The PID namespaces of containers with leases.
fn leased(ledger: &Ledger) -> BTreeSet<u64> {
    ledger.leases.iter().filter_map(|lease| lease.init.as_ref()).map(|init| init.pid_namespace).collect()
}

/// Describes `process` if its cgroup is a container's and it can reach a GPU's device node.
fn user(pid: i32, process: &Path) -> Option<User> {
    let cgroup = fs::read_to_string(process.join("cgroup")).ok()?;
    let container = id(&cgroup)?;
    let node = node(process)?;
    let name = fs::read_to_string(process.join("comm")).unwrap_or_default().trim().to_owned();
    Some(User { pid, name, node, container, pid_namespace: namespace(process, "pid").unwrap_or(0) })
}

/// The first 64 hex digits in a cgroup's path: how Docker, Podman, containerd and CRI-O name containers.
fn id(cgroup: &str) -> Option<String> {
    let hex = |word: &&str| word.len() == 64 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    let word = cgroup.split(|c: char| !c.is_ascii_alphanumeric()).find(hex)?;
    Some(word[..12].to_owned())
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
            .filter(|entry| is_gpu(&Path::new("/dev").join(entry.file_name())));
        let mut nodes = nodes.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_char_device()));
        nodes.next().map(|entry| Path::new("/dev").join(entry.file_name()))
    };
    open.or_else(standing).map(|path| path.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::super::Verdict::Warn;
    use super::super::fake_host::{Fake, passed, told};
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
        let (found, fix) = told(without_containers(&host), Warn);
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
        let (found, _) = told(containers_without(&fake.host()), Warn);
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
            format!("7 (python3) {state} 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 2 0 42 {memory}\n")
        };
        fake.file("/proc/7/stat", &stat('Z', 0)).file("/proc/7/cgroup", "5:devices:/\n");
        fake.file("/proc/7/task/7/stat", &stat('Z', 0)).file("/proc/7/task/9/stat", &stat('S', 4096));
        process_in(&fake, "/proc/7/task/9", 200, &format!("/system.slice/docker-{ID}.scope"));
        fake.link("/proc/7/task/9/fd/3", "/dev/nvidia1");
        let (found, _) = told(containers_without(&fake.host()), Warn);
        assert!(found.ends_with("d55c611b20c2 (pid 7 python3, /dev/nvidia1)"), "{found}");
    }
}
