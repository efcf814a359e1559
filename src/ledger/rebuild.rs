//! A ledger that cannot be read is rebuilt from its copy and from what runs: containers by their runtimes'
//! records, MPS daemons by their directories. What none of them explains keeps its device closed.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::alive::{has_processes, init_of};
use super::record::{LARGEST, Record, read_bounded};
use super::{Lease, LeaseId, LeaseState, Ledger, Server, ServerState};
use crate::inventory::{Device, GpuProcess, Inventory};
use crate::mps::ServerKey;
use crate::process::Process;
use crate::request::Percent;
use crate::text::safe;

/// Where root's runtimes keep their records: `ROOT/ID`. A `*` ends a component and stands for its rest.
///
/// Users' own roots below /run/user are left out: what a user can write must not take a share.
const ROOTS: [&str; 4] = [
    // runc(8), `--root`.
    "/run/runc",
    // crun(1), `--root`; Podman and CRI-O leave it so.
    "/run/crun",
    // dockerd: <exec-root>/runtime-<name>, with containerd's namespace below.
    "/run/docker/runtime-*/*",
    // containerd's runc.v2 shim: one for each namespace (`k8s.io`, `default`, `moby`).
    "/run/containerd/runc/*",
];

/// The file in the state directory that names further roots, one in a line.
const FURTHER_ROOTS: &str = "roots";

/// The ledger as far as `last`, its copy, and the running system tell it. Whether the leases of the copy
/// still live is for the caller to see, as with any ledger.
pub(super) fn rebuild(state_dir: &Path, boot_id: &str, last: Option<Ledger>) -> Ledger {
    let mut ledger = last.unwrap_or_else(|| Ledger::empty(boot_id));
    for lease in roots(state_dir).iter().flat_map(|root| leases_in(root)) {
        if ledger.lease(&lease.id).is_some() {
            continue;
        }
        if let Err(doubled) = ledger.insert(lease) {
            tracing::warn!("rebuilding the ledger: {doubled}");
        }
    }
    for server in servers(state_dir, &ledger) {
        if !ledger.servers.iter().any(|known| known.key == server.key) {
            ledger.servers.push(server);
        }
    }
    ledger.unexplained = unexplained(state_dir, &ledger);
    ledger
}

/// Devices on which something runs that no lease of `ledger` explains, by UUID.
pub(super) fn unexplained(state_dir: &Path, ledger: &Ledger) -> Vec<String> {
    let devices =
        inventory(state_dir, &ledger.boot_id).map(|inventory| inventory.devices).unwrap_or_default();
    let stray: Vec<&Server> = ledger.servers.iter().filter(|server| is_stray(server, ledger)).collect();
    // A server without a device may be on any.
    let anywhere = stray.iter().any(|server| server.device.is_empty());
    let closed = |device: &&Device| {
        anywhere || device.processes.iter().any(|process| !is_explained(process, device, ledger))
    };
    let mut uuids: Vec<String> = devices.iter().filter(closed).map(|device| device.uuid.clone()).collect();
    uuids.extend(stray.iter().map(|server| server.device.clone()).filter(|uuid| !uuid.is_empty()));
    uuids.sort();
    uuids.dedup();
    uuids
}

/// A daemon that runs and serves no lease.
fn is_stray(server: &Server, ledger: &Ledger) -> bool {
    server.daemon.is_some_and(|daemon| daemon.is_alive()) && ledger.on_server(&server.key).next().is_none()
}

fn is_explained(process: &GpuProcess, device: &Device, ledger: &Ledger) -> bool {
    let served =
        |server: &Server| server.device == device.uuid && ledger.on_server(&server.key).next().is_some();
    ledger.lease_of_process(process).is_some()
        || (process.mps_server && ledger.servers.iter().any(served))
        || Process::find(process.pid).is_none_or(|process| !process.is_alive())
}

/// The inventory of this boot, however old: it says which devices there are and who was on them.
fn inventory(state_dir: &Path, boot_id: &str) -> Option<Inventory> {
    let content = crate::state_dir::read_if_trusted(&state_dir.join("inventory.json"), LARGEST)?;
    let inventory: Inventory = serde_json::from_slice(&content).ok()?;
    (inventory.fingerprint.boot_id.trim() == boot_id).then_some(inventory)
}

fn leases_in(root: &Path) -> Vec<Lease> {
    let Ok(entries) = fs::read_dir(root) else { return Vec::new() };
    entries.flatten().filter_map(|entry| restore(&entry.path())).collect()
}

/// The lease of the container whose record is in `dir`, if it has one and lives.
fn restore(dir: &Path) -> Option<Lease> {
    let trusted =
        fs::symlink_metadata(dir).is_ok_and(|meta| meta.is_dir() && crate::state_dir::is_ours(meta.uid()));
    let record = match Record::read(dir) {
        Ok(record) => record.filter(|_| trusted)?,
        Err(error) => {
            let dir = safe(&dir.to_string_lossy());
            tracing::warn!("rebuilding the ledger: {dir} cannot be read: {}", safe(&error.to_string()));
            return None;
        }
    };
    let id = LeaseId::parse(record.lease.as_deref()?)?;
    let mut lease = Lease::from_annotation(record.restorable.as_deref()?)?;
    let init = init_of(&record);
    lease.state = match (init.process.is_alive(), has_processes(&init)) {
        (true, _) => LeaseState::Active,
        (false, true) => LeaseState::Ending,
        (false, false) => return None,
    };
    lease.init = Some(init);
    dir.clone_into(&mut lease.container.record);
    // A hook writes the annotation before it knows them.
    if lease.container.bundle.as_os_str().is_empty() {
        dir.file_name()?.to_str()?.clone_into(&mut lease.container.id);
        lease.container.bundle = record.bundle.unwrap_or_default();
    }
    (lease.id == id).then_some(lease)
}

fn servers(state_dir: &Path, ledger: &Ledger) -> Vec<Server> {
    let Ok(entries) = fs::read_dir(state_dir.join("mps")) else { return Vec::new() };
    entries.flatten().filter_map(|entry| server(&entry.path(), ledger)).collect()
}

/// The daemon of the directory `dir`, if it runs. Its ceiling is unknown: 0 has it set anew.
fn server(dir: &Path, ledger: &Ledger) -> Option<Server> {
    let key = ServerKey(dir.file_name()?.to_str()?.to_owned());
    let daemon = daemon(&dir.join("pipe/nvidia-cuda-mps-control.pid"))?;
    let lease = ledger.on_server(&key).next().and_then(|lease| lease.devices.first().cloned());
    let device = if key.0.starts_with("GPU-") { Some(key.0.clone()) } else { lease };
    let device = device.or_else(|| visible_device(daemon.pid)).unwrap_or_default();
    let ceiling = Percent::default();
    Some(Server { key, device, daemon: Some(daemon), state: ServerState::Serving, ceiling, answered_at: 0 })
}

/// The control daemon that wrote `pid_file`, and not another process that got its pid.
fn daemon(pid_file: &Path) -> Option<Process> {
    let text = String::from_utf8(read_bounded(pid_file).ok()??).ok()?;
    let process = Process::find(text.trim().parse().ok()?)?;
    let name = fs::read_to_string(format!("/proc/{}/comm", process.pid)).ok()?;
    // The kernel keeps 15 characters of `nvidia-cuda-mps-control`.
    (process.is_alive() && name.starts_with("nvidia-cuda-mps")).then_some(process)
}

/// The device that the daemon `pid` was started for.
fn visible_device(pid: i32) -> Option<String> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let value = environment
        .split(|byte| *byte == 0)
        .find_map(|entry| entry.strip_prefix(b"CUDA_VISIBLE_DEVICES="))?;
    std::str::from_utf8(value).ok().filter(|uuid| uuid.starts_with("GPU-")).map(str::to_owned)
}

/// Writes down where the runtimes of `ledger`'s leases keep their records, if it is no usual place.
///
/// # Errors
/// The file cannot be written.
pub(super) fn remember_roots(state_dir: &Path, ledger: &Ledger) -> io::Result<()> {
    let mut known: Option<Vec<PathBuf>> = None;
    let ours = ledger.leases.iter().filter(|lease| !lease.brokered);
    for root in ours.filter_map(|lease| lease.container.record.parent()) {
        let line = root.to_str().filter(|line| line.starts_with('/') && !line.contains('\n'));
        if line.is_none() || ROOTS.iter().any(|pattern| fits(pattern, root)) {
            continue;
        }
        let known = known.get_or_insert_with(|| further_roots(state_dir));
        if !known.iter().any(|old| old == root) {
            known.push(root.to_owned());
            let lines: Vec<&str> = known.iter().filter_map(|root| root.to_str()).collect();
            let lines = lines.join("\n");
            crate::replace::replace(&state_dir.join(FURTHER_ROOTS), lines.as_bytes(), 0o644)?;
        }
    }
    Ok(())
}

fn further_roots(state_dir: &Path) -> Vec<PathBuf> {
    let content =
        crate::state_dir::read_if_trusted(&state_dir.join(FURTHER_ROOTS), LARGEST).unwrap_or_default();
    let text = String::from_utf8_lossy(&content).into_owned();
    text.lines().filter(|line| line.starts_with('/')).map(PathBuf::from).collect()
}

/// Every root there is, each once whatever links lead to it.
fn roots(state_dir: &Path) -> Vec<PathBuf> {
    let usual = ROOTS.iter().flat_map(|pattern| expand(pattern));
    let mut roots: Vec<PathBuf> =
        usual.chain(further_roots(state_dir)).filter_map(|root| root.canonicalize().ok()).collect();
    roots.sort();
    roots.dedup();
    roots
}

fn fits(pattern: &str, path: &Path) -> bool {
    let (pattern, path) = (Path::new(pattern).components(), path.components());
    pattern.clone().count() == path.clone().count()
        && pattern.zip(path).all(|(pattern, part)| part_fits(pattern.as_os_str(), part.as_os_str()))
}

fn part_fits(pattern: &std::ffi::OsStr, part: &std::ffi::OsStr) -> bool {
    let (pattern, part) = (pattern.as_encoded_bytes(), part.as_encoded_bytes());
    pattern.strip_suffix(b"*").map_or(pattern == part, |beginning| part.starts_with(beginning))
}

/// The directories that `pattern` stands for.
fn expand(pattern: &str) -> Vec<PathBuf> {
    let mut found = vec![PathBuf::new()];
    for component in Path::new(pattern).components() {
        let name = component.as_os_str();
        if !name.as_encoded_bytes().ends_with(b"*") {
            for path in &mut found {
                path.push(name);
            }
            continue;
        }
        let entries = found.iter().filter_map(|dir| fs::read_dir(dir).ok()).flatten().flatten();
        found =
            entries.filter(|entry| part_fits(name, &entry.file_name())).map(|entry| entry.path()).collect();
    }
    found
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::super::fixture::lease;
    use super::*;

    #[test]
    fn roots_are_matched_and_expanded_by_component() {
        assert!(fits("/run/docker/runtime-*/*", Path::new("/run/docker/runtime-runc/moby")));
        assert!(!fits("/run/docker/runtime-*/*", Path::new("/run/docker/runtime-runc")));
        assert!(!fits("/run/docker/runtime-*/*", Path::new("/run/docker/other/moby")));
        let dir = tempfile::tempdir().unwrap();
        for path in ["runtime-a/x", "runtime-a/y", "runtime-b/z", "other/w"] {
            fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        let mut found = expand(&format!("{}/runtime-*/*", dir.path().display()));
        found.sort();
        let below = |path: &str| dir.path().join(path);
        assert_eq!(found, [below("runtime-a/x"), below("runtime-a/y"), below("runtime-b/z")]);
    }

    #[test]
    fn unusual_roots_are_written_down_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut ledger = Ledger { leases: vec![lease(1, "GPU-a"), lease(2, "GPU-a")], ..Ledger::empty("b") };
        ledger.leases[1].container.record = "/run/runc/container-2".into();
        remember_roots(dir.path(), &ledger).unwrap();
        remember_roots(dir.path(), &ledger).unwrap();
        let written = fs::read_to_string(dir.path().join("roots")).unwrap();
        assert_eq!(written, "/nonexistent/runc");
    }

    #[test]
    fn a_lease_comes_back_from_its_record_while_its_container_lives() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("container-1");
        fs::create_dir(&dir).unwrap();
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let init = Process::find(i32::try_from(child.id()).unwrap()).unwrap();
        let state = |id: &str| {
            let annotation = lease(1, "GPU-a").to_annotation();
            let labels = [format!("sublet.lease={id}"), format!("sublet.lease.record={annotation}")];
            serde_json::json!({"init_process_pid": init.pid, "init_process_start": init.start_time,
                "config": {"labels": labels}})
        };
        fs::write(dir.join("state.json"), state("0000000000000001").to_string()).unwrap();
        let restored = leases_in(root.path());
        assert_eq!(restored.len(), 1);
        assert_eq!(restored[0].devices, ["GPU-a"]);
        assert_eq!(restored[0].state, LeaseState::Active);
        assert_eq!(restored[0].container.record, dir);
        fs::write(dir.join("state.json"), state("0000000000000002").to_string()).unwrap();
        assert!(leases_in(root.path()).is_empty(), "the record is another lease's");
        fs::write(dir.join("state.json"), state("0000000000000001").to_string()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(leases_in(root.path()).is_empty(), "its container is gone");
    }

    #[test]
    fn a_daemon_without_a_lease_closes_its_device_until_it_is_gone() {
        let state = tempfile::tempdir().unwrap();
        let program = state.path().join("nvidia-cuda-mps-control");
        // A link, not a copy: a copy just written may still be open for writing in a child of another test.
        std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
        let mut child =
            Command::new(&program).arg("600").env("CUDA_VISIBLE_DEVICES", "GPU-b").spawn().unwrap();
        // The parent goes on before the kernel has laid out the child's environment.
        while visible_device(i32::try_from(child.id()).unwrap()).is_none() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        for key in ["GPU-a", "00000000000000aa"] {
            let pipe = state.path().join("mps").join(key).join("pipe");
            fs::create_dir_all(&pipe).unwrap();
            fs::write(pipe.join("nvidia-cuda-mps-control.pid"), format!("{}\n", child.id())).unwrap();
        }
        let mut ledger = rebuild(state.path(), "boot", None);
        assert_eq!(ledger.unexplained, ["GPU-a", "GPU-b"]);
        assert_eq!(ledger.servers.len(), 2);
        let server = Some(ServerKey("GPU-a".into()));
        ledger.leases.push(Lease { server, ..lease(1, "GPU-a") });
        assert_eq!(unexplained(state.path(), &ledger), ["GPU-b"]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(unexplained(state.path(), &ledger).is_empty());
    }
}
