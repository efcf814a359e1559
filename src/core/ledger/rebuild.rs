//! Rebuilds an unreadable ledger from its copy and from what runs: containers by their runtimes' records, MPS daemons
//! by their directories, jobs of Slurm's by the copies of their leases. A device with other processes takes no new lease until they end.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::job_leases::of_live_jobs;
use super::liveness::{has_processes, init_of};
use super::runtime_record::{LARGEST, Record, read_bounded};
use super::{DaemonState, Lease, LeaseId, Ledger, MpsDaemon};
use crate::inventory::{Device, GpuProcess, Inventory};
use crate::ledger::DaemonKey;
use crate::process::Process;
use crate::text::safe;

/// Where root's runtimes keep their records: `ROOT/ID`. A `*` at the end of a component matches the rest of its name.
///
/// Users' own roots below /run/user are not included: a file that a user can write must not take a share.
const ROOTS: [&str; 4] = [
    // runc(8), `--root`.
    "/run/runc",
    // crun(1), `--root`. Podman and CRI-O use this default.
    "/run/crun",
    // dockerd: <exec-root>/runtime-<name>, with containerd's namespace below.
    "/run/docker/runtime-*/*",
    // containerd's runc.v2 shim: one for each namespace (`k8s.io`, `default`, `moby`).
    "/run/containerd/runc/*",
];

/// Where a daemon writes its pid, in its directory below `mps/`.
const PID_FILE: &str = "pipe/nvidia-cuda-mps-control.pid";

/// `nvidia-cuda-mps-control` as the kernel truncates it (proc(5), comm).
const MPS_COMM: &[u8] = b"nvidia-cuda-mps";

/// The file in the state directory that names further roots, one per line.
const FURTHER_ROOTS: &str = "roots";

/// The ledger as far as it can be rebuilt from `last`, its copy, and the running system. As with any ledger, the caller
/// checks whether the leases are still alive. `root` is one more place where a runtime keeps its records.
pub(super) fn rebuild(state_dir: &Path, root: Option<&Path>, boot_id: &str, last: Option<Ledger>) -> Ledger {
    let mut ledger = last.unwrap_or_else(|| Ledger::empty(boot_id));
    let of_containers = roots(state_dir, root);
    let of_containers = of_containers.iter().flat_map(|root| leases_in(root, state_dir));
    for lease in of_containers.chain(of_live_jobs(state_dir)) {
        if ledger.lease(&lease.id).is_some() {
            continue;
        }
        if let Err(doubled) = ledger.insert(lease) {
            tracing::warn!("rebuilding the ledger: {doubled}");
        }
    }
    for daemon in daemons(state_dir, &ledger) {
        if !ledger.daemons.iter().any(|known| known.key == daemon.key) {
            ledger.daemons.push(daemon);
        }
    }
    ledger.unexplained = unexplained(state_dir, &ledger);
    ledger
}

/// Evidence that there was a ledger since boot, although there is none now: it was lost. Without such evidence, there
/// was none yet.
pub(super) fn trace(state_dir: &Path, root: Option<&Path>) -> Option<String> {
    let name = |path: &Path| safe(&path.to_string_lossy());
    let further = state_dir.join(FURTHER_ROOTS);
    match further_roots(state_dir) {
        Ok(roots) if roots.is_empty() => {}
        Ok(_) => return Some(format!("{} is there", name(&further))),
        Err(error) => return Some(format!("{} cannot be read: {error}", name(&further))),
    }
    // The directories alone prove nothing, because a command that only asks creates them for their lock. A daemon also
    // writes its pid.
    let started = |entry: &fs::DirEntry| fs::symlink_metadata(entry.path().join(PID_FILE)).is_ok();
    if let Some(entry) = fs::read_dir(state_dir.join("mps")).into_iter().flatten().flatten().find(started) {
        return Some(format!("{} belonged to an MPS daemon", name(&entry.path())));
    }
    if let Some((_, daemon)) = running_daemons(state_dir).first() {
        return Some(format!("its MPS daemon {} runs", daemon.pid));
    }
    if let Some(job) = of_live_jobs(state_dir).into_iter().find_map(|lease| lease.job) {
        return Some(format!("there is a copy of the lease of job {}, which runs", job.id));
    }
    let ours = |dir: &PathBuf| {
        let record = Record::read(dir).ok().flatten();
        record.is_some_and(|record| record.lease.is_some() && is_of(&record, state_dir))
    };
    let record = roots(state_dir, root).iter().flat_map(|root| records_in(root)).find(ours)?;
    Some(format!("{} is the record of a container with a share", name(&record)))
}

/// UUIDs of devices with processes that are not attributable to any lease of `ledger`.
pub(super) fn unexplained(state_dir: &Path, ledger: &Ledger) -> Vec<String> {
    let devices =
        inventory(state_dir, &ledger.boot_id).map(|inventory| inventory.devices).unwrap_or_default();
    let stray: Vec<&MpsDaemon> = ledger.daemons.iter().filter(|daemon| is_stray(daemon, ledger)).collect();
    // A server whose device is unknown may be on any of them.
    let anywhere = stray.iter().any(|daemon| daemon.devices.is_empty());
    let closed = |device: &&Device| {
        anywhere || device.processes.iter().any(|process| !is_explained(process, device, ledger))
    };
    let mut uuids: Vec<String> = devices.iter().filter(closed).map(|device| device.uuid.clone()).collect();
    uuids.extend(stray.iter().flat_map(|daemon| daemon.devices.iter().cloned()));
    uuids.sort();
    uuids.dedup();
    uuids
}

/// A daemon that runs and serves no lease.
fn is_stray(daemon: &MpsDaemon, ledger: &Ledger) -> bool {
    daemon.process.is_some_and(|daemon| daemon.is_alive()) && ledger.on_daemon(&daemon.key).next().is_none()
}

fn is_explained(process: &GpuProcess, device: &Device, ledger: &Ledger) -> bool {
    let served =
        |daemon: &MpsDaemon| daemon.serves(&device.uuid) && ledger.on_daemon(&daemon.key).next().is_some();
    ledger.lease_of_process(process).is_some()
        || (process.mps_server && ledger.daemons.iter().any(served))
        || !Process::may_run(process.pid)
}

/// The inventory of this boot, however old. It has the devices and the processes that were on them.
pub(super) fn inventory(state_dir: &Path, boot_id: &str) -> Option<Inventory> {
    let content = crate::fs::trusted::read_if_trusted(&state_dir.join("inventory.json"), LARGEST)?;
    let inventory: Inventory = serde_json::from_slice(&content).ok()?;
    (inventory.fingerprint.boot_id.trim() == boot_id).then_some(inventory)
}

fn leases_in(root: &Path, state_dir: &Path) -> Vec<Lease> {
    records_in(root).iter().filter_map(|dir| restore(dir, state_dir)).collect()
}

/// Whether the container's lease belongs to the ledger of `state_dir`, and not to another one on this host.
pub(super) fn is_of(record: &Record, state_dir: &Path) -> bool {
    record.restorable.as_deref().is_none_or(|text| Lease::is_annotation_of(text, state_dir))
}

/// The directories of a runtime's records.
pub(super) fn records_in(root: &Path) -> Vec<PathBuf> {
    match fs::read_dir(root) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()).collect(),
        Err(error) => {
            let root = safe(&root.to_string_lossy());
            tracing::warn!("rebuilding the ledger: containers in {root} cannot be listed: {error}");
            Vec::new()
        }
    }
}

/// The lease of the container whose record is in `dir`, if it has one and is alive.
fn restore(dir: &Path, state_dir: &Path) -> Option<Lease> {
    let trusted = fs::symlink_metadata(dir)
        .is_ok_and(|meta| meta.is_dir() && crate::fs::trusted::is_trusted_owner(meta.uid()));
    let record = match Record::read(dir) {
        Ok(record) => record.filter(|_| trusted)?,
        Err(error) => {
            let dir = safe(&dir.to_string_lossy());
            tracing::warn!("rebuilding the ledger: {dir} cannot be read: {}", safe(&error.to_string()));
            return None;
        }
    };
    if !is_of(&record, state_dir) {
        return None;
    }
    let id = LeaseId::parse(record.lease.as_deref()?)?;
    let mut lease = Lease::from_annotation(record.restorable.as_deref()?)?;
    let init = init_of(&record);
    let runs = init.process.is_alive();
    if !runs && !has_processes(&init) {
        return None;
    }
    lease.restore(init, runs);
    dir.clone_into(&mut lease.container.record);
    // A hook writes the annotation before it knows these names.
    if lease.container.bundle.as_os_str().is_empty() {
        dir.file_name()?.to_str()?.clone_into(&mut lease.container.id);
        lease.container.bundle = record.bundle.unwrap_or_default();
    }
    (lease.id == id).then_some(lease)
}

fn daemons(state_dir: &Path, ledger: &Ledger) -> Vec<MpsDaemon> {
    let entries = fs::read_dir(state_dir.join("mps")).into_iter().flatten().flatten();
    let written = entries.filter_map(|entry| {
        let key = DaemonKey(entry.file_name().to_str()?.to_owned());
        Some((key, process_of(&entry.path())?))
    });
    let mut found: Vec<(DaemonKey, Process)> = written.collect();
    for running in running_daemons(state_dir) {
        if !found.iter().any(|(key, _)| *key == running.0) {
            found.push(running);
        }
    }
    found.into_iter().map(|(key, process)| daemon(key, process, ledger)).collect()
}

/// Daemons that were started for a directory in `state_dir`. The directory may have been removed since.
pub(super) fn running_daemons(state_dir: &Path) -> Vec<(DaemonKey, Process)> {
    let ours = state_dir.join("mps");
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter_map(|pid| {
        // Only the control program has the options `-d` and `-f`. Servers end with it.
        let words = fs::read(format!("/proc/{pid}/comm"))
            .ok()
            .filter(|comm| comm.starts_with(MPS_COMM))
            .and(fs::read(format!("/proc/{pid}/cmdline")).ok())?;
        words.split(|byte| *byte == 0).find(|word| matches!(*word, b"-d" | b"-f"))?;
        let pipe = PathBuf::from(variable(pid, "CUDA_MPS_PIPE_DIRECTORY=")?);
        let key = pipe.strip_prefix(&ours).ok()?.parent()?.to_str().filter(|key| !key.is_empty())?;
        Some((DaemonKey(key.to_owned()), Process::find(pid).filter(Process::is_alive)?))
    })
    .collect()
}

/// The record of a running daemon. Its default limits are unknown. The `Default` value causes them to be set again.
fn daemon(key: DaemonKey, process: Process, ledger: &Ledger) -> MpsDaemon {
    let lease = ledger.on_daemon(&key).next().map(|lease| lease.devices.clone());
    let devices = if key.0.starts_with("GPU-") { Some(vec![key.0.clone()]) } else { lease };
    let devices = devices.unwrap_or_else(|| visible_devices(process.pid));
    let default_limits = super::DefaultLimits::default();
    let process = Some(process);
    let state = DaemonState::Serving;
    MpsDaemon {
        key,
        devices,
        process,
        state,
        default_limits,
        answered_at: 0,
        idle_since: None,
        mode_left: false,
    }
}

/// The control daemon that wrote its pid into the directory `dir`, and not another process that got the same pid.
fn process_of(dir: &Path) -> Option<Process> {
    let text = String::from_utf8(read_bounded(&dir.join(PID_FILE)).ok()??).ok()?;
    let process = Process::find(text.trim().parse().ok()?)?;
    let name = fs::read(format!("/proc/{}/comm", process.pid)).ok()?;
    // With a wrapper the program may have any name.
    let started_for = || process.has_environment("CUDA_MPS_PIPE_DIRECTORY", &dir.join("pipe"));
    let ours = name.starts_with(MPS_COMM) || started_for().unwrap_or(false);
    (process.is_alive() && ours).then_some(process)
}

/// The devices for which the daemon `pid` was started; none if they are unknown.
fn visible_devices(pid: i32) -> Vec<String> {
    variable(pid, "CUDA_VISIBLE_DEVICES=").map_or_else(Vec::new, |list| of_list(list.as_bytes()))
}

/// The value of `name` in the environment with which `pid` was started.
pub(super) fn variable(pid: i32, name: &str) -> Option<String> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let value = environment.split(|byte| *byte == 0).find_map(|entry| entry.strip_prefix(name.as_bytes()))?;
    String::from_utf8(value.to_owned()).ok()
}

/// Only UUIDs of whole GPUs. With any other value the daemon counts as unexplained, on an unknown device.
fn of_list(value: &[u8]) -> Vec<String> {
    let uuids: Vec<&str> = std::str::from_utf8(value).unwrap_or_default().split(',').collect();
    let known = uuids.iter().all(|uuid| uuid.starts_with("GPU-"));
    if known { uuids.into_iter().map(str::to_owned).collect() } else { Vec::new() }
}

/// Records where the runtimes of `ledger`'s leases keep their records, if that is not a usual place.
///
/// # Errors
/// The file cannot be read, so that the roots in it would be lost, or cannot be written.
pub(super) fn remember_roots(state_dir: &Path, ledger: &Ledger) -> io::Result<()> {
    let mut known: Option<Vec<PathBuf>> = None;
    let ours = ledger.leases.iter().filter(|lease| !lease.brokered);
    let mut seen: Vec<&[u8]> = Vec::new();
    for record in ours.map(|lease| &lease.container.record) {
        // Most leases have one of a few roots. To take paths apart takes much longer than texts.
        let text = record.as_os_str().as_bytes();
        let above = text.iter().rposition(|byte| *byte == b'/').map_or(text, |slash| &text[..slash]);
        if seen.contains(&above) {
            continue;
        }
        seen.push(above);
        let Some(root) = record.parent() else { continue };
        let line = root.to_str().filter(|line| line.starts_with('/') && !line.contains('\n'));
        if line.is_none() || ROOTS.iter().any(|pattern| fits(pattern, root)) {
            continue;
        }
        if known.is_none() {
            known = Some(further_roots(state_dir)?);
        }
        let known = known.get_or_insert_default();
        if !known.iter().any(|old| old == root) {
            known.push(root.to_owned());
            let lines: Vec<&str> = known.iter().filter_map(|root| root.to_str()).collect();
            let lines = lines.join("\n");
            crate::fs::atomic::replace(&state_dir.join(FURTHER_ROOTS), lines.as_bytes(), 0o644)?;
        }
    }
    Ok(())
}

fn further_roots(state_dir: &Path) -> io::Result<Vec<PathBuf>> {
    // One that is not trusted is written anew.
    let trusted = crate::fs::trusted::read(&state_dir.join(FURTHER_ROOTS), LARGEST)?.and_then(Result::ok);
    let text = String::from_utf8_lossy(&trusted.unwrap_or_default()).into_owned();
    Ok(text.lines().filter(|line| line.starts_with('/')).map(PathBuf::from).collect())
}

/// Every existing root, each once, whatever links lead to it.
pub(super) fn roots(state_dir: &Path, further: Option<&Path>) -> Vec<PathBuf> {
    let usual = ROOTS.iter().flat_map(|pattern| expand(pattern));
    let mut roots: Vec<PathBuf> = usual
        .chain(further_roots(state_dir).unwrap_or_default())
        .chain(further.map(Path::to_owned))
        .filter_map(|root| root.canonicalize().ok())
        .collect();
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

/// The directories that match `pattern`.
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
    use crate::ledger::LeaseState;

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
            let annotation = lease(1, "GPU-a").to_annotation(Path::new("/run/sublet"));
            let labels = [format!("sublet.lease={id}"), format!("sublet.lease.record={annotation}")];
            serde_json::json!({"init_process_pid": init.pid, "init_process_start": init.start_time,
                "config": {"labels": labels}})
        };
        fs::write(dir.join("state.json"), state("0000000000000001").to_string()).unwrap();
        let default = Path::new("/run/sublet");
        let restored = leases_in(root.path(), default);
        assert_eq!(restored.len(), 1);
        assert_eq!(restored[0].devices, ["GPU-a"]);
        assert_eq!(restored[0].state, LeaseState::Active);
        assert_eq!(restored[0].container.record, dir);
        fs::write(dir.join("state.json"), state("0000000000000002").to_string()).unwrap();
        assert!(leases_in(root.path(), default).is_empty(), "the record is another lease's");
        fs::write(dir.join("state.json"), state("0000000000000001").to_string()).unwrap();
        assert!(leases_in(root.path(), Path::new("/srv/sublet")).is_empty(), "it stands in another ledger");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(leases_in(root.path(), default).is_empty(), "its container is gone");
    }

    #[test]
    fn a_daemon_without_a_lease_closes_its_device_until_it_is_gone() {
        let state = tempfile::tempdir().unwrap();
        let program = state.path().join("nvidia-cuda-mps-control");
        // A link, not a copy, because a new copy may still be open for writing in a child of another test.
        std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
        let mut child =
            Command::new(&program).arg("600").env("CUDA_VISIBLE_DEVICES", "GPU-b,GPU-c").spawn().unwrap();
        // The parent may continue before the kernel has set up the child's environment.
        while visible_devices(i32::try_from(child.id()).unwrap()).is_empty() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        for key in ["GPU-a", "00000000000000aa"] {
            let pipe = state.path().join("mps").join(key).join("pipe");
            fs::create_dir_all(&pipe).unwrap();
            fs::write(pipe.join("nvidia-cuda-mps-control.pid"), format!("{}\n", child.id())).unwrap();
        }
        let mut ledger = rebuild(state.path(), None, "boot", None);
        assert_eq!(ledger.unexplained, ["GPU-a", "GPU-b", "GPU-c"]);
        assert_eq!(ledger.daemons.len(), 2);
        let daemon = Some(DaemonKey("GPU-a".into()));
        ledger.leases.push(Lease { daemon, ..lease(1, "GPU-a") });
        assert_eq!(unexplained(state.path(), &ledger), ["GPU-b", "GPU-c"]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(unexplained(state.path(), &ledger).is_empty());
    }
}
