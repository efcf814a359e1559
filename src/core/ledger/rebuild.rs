//! Rebuilds an unreadable ledger from its copy and from the running system: containers by their runtimes' records, MPS
//! daemons by their directories, jobs of Slurm's by the copies of their leases, which are written here, too. A device with other processes takes no
//! new lease until they end.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

use nix::libc::{EACCES, ELOOP};
use serde::{Deserialize, Serialize};

use super::error::failed;
use super::liveness::{has_processes, init_of};
use super::runtime_record::{
    FURTHER_ROOTS, LARGEST, Record, further_roots, list_directory, read_bounded, roots, skip_absent,
};
use super::{DaemonKey, DaemonState, Lease, LeaseId, Ledger, LedgerError, MpsDaemon};
use crate::fs::{is_absent, parse_json, read_trusted, replace};
use crate::inventory::{Device, GpuProcess, Inventory};
use crate::process::{self, Process};
use crate::slurm;
use crate::text::{safe, safe_path};

/// Where a daemon writes its pid, in its directory below `mps/`.
const PID_FILE: &str = "pipe/nvidia-cuda-mps-control.pid";

/// `nvidia-cuda-mps-control` as the kernel truncates it (proc(5), comm).
const MPS_COMM: &[u8] = b"nvidia-cuda-mps";

/// The ledger as far as it can be rebuilt from `last`, its copy, and the running system. As with any ledger, the caller
/// checks whether the leases are still alive. `root` is one more place where a runtime keeps its records.
///
/// # Errors
/// A place where a lease or a daemon may be recorded, or a process, cannot be examined.
pub(super) fn rebuild(
    state_dir: &Path,
    root: Option<&Path>,
    boot_id: &str,
    last: Option<Ledger>,
) -> Result<Ledger, LedgerError> {
    let mut ledger = last.unwrap_or_else(|| Ledger::empty(boot_id));
    let mut found = Vec::new();
    for root in roots(state_dir, root)? {
        found.extend(leases_in(&root, state_dir)?);
    }
    for lease in found.into_iter().chain(read_live_jobs(state_dir)?) {
        if ledger.lease(&lease.id).is_some() {
            continue;
        }
        if let Err(doubled) = ledger.insert(lease) {
            tracing::warn!("rebuilding the ledger: {doubled}");
        }
    }
    for daemon in daemons(state_dir, &ledger)? {
        if !ledger.daemons.iter().any(|known| known.key == daemon.key) {
            ledger.daemons.push(daemon);
        }
    }
    ledger.unexplained = unexplained(state_dir, &ledger)?;
    Ok(ledger)
}

/// Keeps the settings in a ledger of another version, as far as they can be read.
pub(super) fn salvage(path: &Path, ledger: &mut Ledger) {
    let content = crate::fs::read_if_trusted(path, LARGEST).unwrap_or_default();
    let Ok(serde_json::Value::Object(mut old)) = parse_json(&content) else { return };
    let mut list = |name| old.remove(name).unwrap_or_default();
    ledger.drained = serde_json::from_value(list("drained")).unwrap_or_default();
    ledger.drains = serde_json::from_value(list("drains")).unwrap_or_default();
    if list("boot_id") == ledger.boot_id.as_str() {
        ledger.compute_modes = serde_json::from_value(list("compute_modes")).unwrap_or_default();
        ledger.mig = serde_json::from_value(list("mig")).unwrap_or_default();
    }
}

/// Finds evidence of a ledger since boot, if neither it nor its copy or lock exists now.
///
/// # Errors
/// As [`rebuild`].
pub(super) fn find_trace(state_dir: &Path, root: Option<&Path>) -> Result<Option<String>, LedgerError> {
    let further = state_dir.join(FURTHER_ROOTS);
    if !further_roots(state_dir).map_err(|error| failed("read", &further, error))?.is_empty() {
        return Ok(Some(format!("the containers' roots in {}", safe_path(&further))));
    }
    // The directories alone prove nothing, because a command that only asks creates them for their lock. A daemon also
    // writes its pid.
    for daemon in list_directory(&state_dir.join("mps"))? {
        let written = fs::symlink_metadata(daemon.join(PID_FILE));
        if !written.is_err_and(|error| is_absent(&error)) {
            return Ok(Some(format!("the MPS daemon of {}", safe_path(&daemon))));
        }
    }
    if let Some(job) = read_live_jobs(state_dir)?.into_iter().find_map(|lease| lease.job) {
        return Ok(Some(format!("job {}, which runs", job.id)));
    }
    find_running(state_dir, root)
}

/// Finds a running MPS daemon or container with its lease in a ledger of `state_dir`.
///
/// # Errors
/// As [`rebuild`].
pub(super) fn find_running(state_dir: &Path, root: Option<&Path>) -> Result<Option<String>, LedgerError> {
    match running_daemons(state_dir)?.first() {
        Some((_, daemon)) => Ok(Some(format!("MPS daemon {}", daemon.pid))),
        None => running_container(state_dir, root, |_| true),
    }
}

/// Such a container, if its record `is_meant`.
///
/// # Errors
/// As [`rebuild`].
pub(super) fn running_container(
    state_dir: &Path,
    root: Option<&Path>,
    is_meant: impl Fn(&Record) -> bool,
) -> Result<Option<String>, LedgerError> {
    for root in roots(state_dir, root)? {
        for dir in list_directory(&root)? {
            let Some(record) = trusted_record(&dir)?.filter(|record| record.lease.is_some()) else {
                continue;
            };
            let runs = || record.init.is_alive() || has_processes(&init_of(&record));
            if is_of(&record, state_dir) && is_meant(&record) && runs() {
                return Ok(Some(format!("the container of {}", safe_path(&dir))));
            }
        }
    }
    Ok(None)
}

/// UUIDs of devices with processes that are not attributable to any lease of `ledger`.
pub(super) fn unexplained(state_dir: &Path, ledger: &Ledger) -> Result<Vec<String>, LedgerError> {
    let devices =
        last_inventory(state_dir, &ledger.boot_id)?.map(|inventory| inventory.devices).unwrap_or_default();
    let stray: Vec<&MpsDaemon> = ledger.daemons.iter().filter(|daemon| is_stray(daemon, ledger)).collect();
    // A server whose device is unknown may be on any of them.
    let anywhere = stray.iter().any(|daemon| daemon.devices.is_empty());
    let closed = |device: &&Device| {
        anywhere
            || !device.knows_processes()
            || device.processes.iter().any(|process| !is_explained(process, device, ledger))
    };
    let mut uuids: Vec<String> = devices.iter().filter(closed).map(|device| device.uuid.clone()).collect();
    uuids.extend(stray.iter().flat_map(|daemon| daemon.devices.iter().cloned()));
    uuids.sort();
    uuids.dedup();
    Ok(uuids)
}

/// A daemon that runs and serves no lease.
fn is_stray(daemon: &MpsDaemon, ledger: &Ledger) -> bool {
    daemon.process.is_some_and(|daemon| daemon.is_alive()) && ledger.on_daemon(&daemon.key).next().is_none()
}

fn is_explained(process: &GpuProcess, device: &Device, ledger: &Ledger) -> bool {
    let served =
        |daemon: &MpsDaemon| daemon.serves(&device.uuid) && ledger.on_daemon(&daemon.key).next().is_some();
    // Of a container that was moved, a rebuilt lease has the device that it began on.
    let is_there = |lease: &Lease| lease.suspend.is_never() || lease.devices.contains(&device.uuid);
    ledger.lease_of_process(process).is_some_and(is_there)
        || (process.mps_server && ledger.daemons.iter().any(served))
        || !Process::may_run(process.pid)
}

/// The inventory of this boot, however old. It has the devices and the processes that were on them.
pub(super) fn last_inventory(state_dir: &Path, boot_id: &str) -> Result<Option<Inventory>, LedgerError> {
    let file = state_dir.join("inventory.json");
    let trusted = skip_absent(&file, crate::fs::read_trusted(&file, LARGEST))?.flatten().and_then(Result::ok);
    let inventory: Option<Inventory> = trusted.and_then(|text| parse_json(&text).ok());
    Ok(inventory.filter(|inventory| inventory.fingerprint.boot_id.trim() == boot_id))
}

/// The leases of the containers whose records are in `root`.
fn leases_in(root: &Path, state_dir: &Path) -> Result<Vec<Lease>, LedgerError> {
    let mut found = Vec::new();
    for dir in list_directory(root)? {
        found.extend(trusted_record(&dir)?.and_then(|record| restore(record, &dir, state_dir)));
    }
    Ok(found)
}

/// The record in `dir`; `None` if there is none, if another user may have written it, or if it is no record of a runtime's.
///
/// # Errors
/// It cannot be read. It may be that of a container with a share.
fn trusted_record(dir: &Path) -> Result<Option<Record>, LedgerError> {
    match fs::symlink_metadata(dir) {
        Ok(meta) if meta.is_dir() && crate::fs::is_trusted_owner(meta.uid()) => {}
        Err(error) if !is_absent(&error) => return Err(failed("read", dir, error)),
        _ => return Ok(None),
    }
    Record::read(dir).or_else(|error| {
        // Without a number the error is about the content. ELOOP: it is a link.
        let cannot_be_read = error.raw_os_error().is_some_and(|number| ![EACCES, ELOOP].contains(&number));
        if cannot_be_read {
            return Err(failed("read", dir, error));
        }
        let dir = safe_path(dir);
        tracing::warn!("{dir} is taken for no container's record: {}", safe(&error.to_string()));
        Ok(None)
    })
}

/// Whether the container's lease belongs to the ledger of `state_dir`, and not to another one on this host.
fn is_of(record: &Record, state_dir: &Path) -> bool {
    record.restorable.as_deref().is_none_or(|text| Lease::is_annotation_of(text, state_dir))
}

/// The lease of the container whose `record` is in `dir`, if it has one and is alive.
fn restore(record: Record, dir: &Path, state_dir: &Path) -> Option<Lease> {
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

/// The daemons that run. One may be there twice.
fn daemons(state_dir: &Path, ledger: &Ledger) -> Result<Vec<MpsDaemon>, LedgerError> {
    let mut found = Vec::new();
    for dir in list_directory(&state_dir.join("mps"))? {
        let Some(key) = dir.file_name().and_then(|name| name.to_str()) else { continue };
        found.extend(find_daemon_process(&dir)?.map(|process| (DaemonKey(key.to_owned()), process)));
    }
    found.extend(running_daemons(state_dir)?);
    Ok(found.into_iter().map(|(key, process)| new_record(key, process, ledger)).collect())
}

/// Daemons that were started for a directory in `state_dir`. The directory may have been removed since.
///
/// # Errors
/// A process cannot be examined.
fn running_daemons(state_dir: &Path) -> Result<Vec<(DaemonKey, Process)>, LedgerError> {
    let ours = state_dir.join("mps");
    let mut found = Vec::new();
    for entry in list_directory(Path::new("/proc"))? {
        let pid = entry.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse::<i32>().ok());
        let Some(pid) = pid else { continue };
        if !read_proc(pid, "comm")?.starts_with(MPS_COMM) {
            continue;
        }
        // Only the control program has the options `-d` and `-f`. Servers end with it.
        let is_option = |word: &[u8]| matches!(word, b"-d" | b"-f");
        if !read_proc(pid, "cmdline")?.split(|byte| *byte == 0).any(is_option) {
            continue;
        }
        let pipe = read_variable(pid, "CUDA_MPS_PIPE_DIRECTORY=")?.map(PathBuf::from);
        let key = pipe.as_deref().and_then(|pipe| pipe.strip_prefix(&ours).ok()?.parent()?.to_str());
        let Some(key) = key.filter(|key| !key.is_empty()) else { continue };
        let process = Process::examine(pid).map_err(|error| failed("read", &entry, error))?;
        found.extend(process.filter(Process::is_alive).map(|process| (DaemonKey(key.to_owned()), process)));
    }
    Ok(found)
}

/// The record of a running daemon. Its default limits are unknown. The `Default` value causes them to be set again.
fn new_record(key: DaemonKey, process: Process, ledger: &Ledger) -> MpsDaemon {
    let lease = ledger.on_daemon(&key).next().map(|lease| lease.devices.clone());
    let devices = if key.0.starts_with("GPU-") { Some(vec![key.0.clone()]) } else { lease };
    let devices = devices.unwrap_or_else(|| visible_devices(process.pid));
    MpsDaemon { process: Some(process), state: DaemonState::Serving, ..MpsDaemon::starting(key, devices) }
}

/// The control daemon that wrote its pid into the directory `dir`, and not another process that got the same pid.
fn find_daemon_process(dir: &Path) -> Result<Option<Process>, LedgerError> {
    let file = dir.join(PID_FILE);
    let unread = |error| failed("read", &file, error);
    let text = read_bounded(&file).map_err(unread)?.unwrap_or_default();
    let Some(pid) = std::str::from_utf8(&text).ok().and_then(|text| text.trim().parse().ok()) else {
        return Ok(None);
    };
    let Some(process) = Process::examine(pid).map_err(unread)? else { return Ok(None) };
    // With a wrapper the program may have any name.
    let ours = read_proc(pid, "comm")?.starts_with(MPS_COMM)
        || process.has_environment("CUDA_MPS_PIPE_DIRECTORY", &dir.join("pipe")).map_err(unread)?;
    Ok((process.is_alive() && ours).then_some(process))
}

/// The whole GPUs for which the daemon `pid` was started; none if they are unknown.
fn visible_devices(pid: i32) -> Vec<String> {
    let value = read_variable(pid, "CUDA_VISIBLE_DEVICES=").ok().flatten().unwrap_or_default();
    let uuids: Vec<String> = value.split(',').map(str::to_owned).collect();
    // With any other value the daemon counts as unexplained, on an unknown device.
    if uuids.iter().all(|uuid| uuid.starts_with("GPU-")) { uuids } else { Vec::new() }
}

/// The value of `name` in the environment with which `pid` was started.
///
/// # Errors
/// The environment cannot be read.
fn read_variable(pid: i32, name: &str) -> Result<Option<String>, LedgerError> {
    let environment = read_proc(pid, "environ")?;
    let value = environment.split(|byte| *byte == 0).find_map(|entry| entry.strip_prefix(name.as_bytes()));
    Ok(value.and_then(|value| String::from_utf8(value.to_owned()).ok()))
}

/// The content of `file` in a process's /proc directory; empty if it has ended or this user may not examine it.
fn read_proc(pid: i32, file: &str) -> Result<Vec<u8>, LedgerError> {
    let path = PathBuf::from(format!("/proc/{pid}/{file}"));
    process::read_if_allowed(&path).map_err(|error| failed("read", &path, error))
}

/// A copy of a job's lease, beside the job's record. No runtime has a record of a job, so a lost ledger is rebuilt from
/// these.
#[derive(Serialize, Deserialize)]
struct Copy {
    /// That of the boot in which the job runs.
    boot_id: String,
    lease: Lease,
}

impl Lease {
    /// Writes down a job's lease, until the job's record is removed. That of a container in a job has no copy: it books
    /// nothing beside the job's.
    pub(crate) fn write_copy(&self, state_dir: &Path) -> io::Result<()> {
        let Some(job) = self.job.as_ref().filter(|_| self.is_of_job()) else { return Ok(()) };
        let copy = Copy { boot_id: process::read_boot_id()?.to_owned(), lease: self.clone() };
        replace(&slurm::lease_file(state_dir, job.id), &serde_json::to_vec(&copy)?, 0o600)
    }
}

/// The leases of jobs that still have processes. Only leases that were granted have been written down, and a job that was
/// requeued has another cgroup.
///
/// # Errors
/// A copy cannot be read. The job may still run.
fn read_live_jobs(state_dir: &Path) -> Result<Vec<Lease>, LedgerError> {
    let files = slurm::lease_files(state_dir).map_err(|error| failed("read", state_dir, error))?;
    let mut leases = Vec::new();
    for file in files {
        let trusted = skip_absent(&file, read_trusted(&file, LARGEST))?.flatten().and_then(Result::ok);
        leases.extend(trusted.as_deref().and_then(parse_copy));
    }
    leases.retain(|lease| lease.is_of_job() && lease.has_processes());
    Ok(leases)
}

fn parse_copy(text: &[u8]) -> Option<Lease> {
    let copy: Copy = parse_json(text).ok()?;
    LeaseId::parse(copy.lease.id.as_str())?;
    (Some(&*copy.boot_id) == process::read_boot_id().ok()).then_some(copy.lease)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::super::fixture::lease;
    use super::*;
    use crate::ledger::{Init, LeaseState};
    use crate::share::Suspend;

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
        let restored = |state_dir: &str| {
            let mut found = leases_in(root.path(), Path::new(state_dir)).unwrap();
            assert!(found.len() < 2);
            found.pop()
        };
        let lease = restored("/run/sublet").unwrap();
        assert_eq!(lease.devices, ["GPU-a"]);
        assert_eq!(lease.state, LeaseState::Active);
        assert_eq!(lease.container.record, dir);
        fs::write(dir.join("state.json"), state("0000000000000002").to_string()).unwrap();
        assert_eq!(restored("/run/sublet"), None, "the record is another lease's");
        fs::write(dir.join("state.json"), state("0000000000000001").to_string()).unwrap();
        assert_eq!(restored("/srv/sublet"), None, "it stands in another ledger");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(restored("/run/sublet"), None, "its container is gone");
    }

    #[test]
    fn a_process_that_was_moved_before_closes_the_device_that_it_is_on() {
        let me = Process::current().unwrap();
        let init = Some(Init { process: me, pid_namespace: 0, cgroup: None, cgroup_inode: None });
        let of = |suspend| {
            let leases = vec![Lease { suspend, init: init.clone(), ..lease(1, "GPU-a") }];
            Ledger { leases, ..Ledger::empty("boot") }
        };
        let (name, cgroups) = (String::new(), Vec::new());
        let process =
            GpuProcess { pid: me.pid, name, memory_bytes: 1, pid_namespace: 0, cgroups, mps_server: false };
        let explained = |uuid: &str, suspend| {
            let device = Device { uuid: uuid.to_owned(), ..Device::default() };
            is_explained(&process, &device, &of(suspend))
        };
        assert!(explained("GPU-a", Suspend::Allow) && explained("GPU-b", Suspend::Never));
        assert!(!explained("GPU-b", Suspend::Allow));
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
        let mut ledger = rebuild(state.path(), None, "boot", None).unwrap();
        assert_eq!(ledger.unexplained, ["GPU-a", "GPU-b", "GPU-c"]);
        assert_eq!(ledger.daemons.len(), 2);
        let daemon = Some(DaemonKey("GPU-a".into()));
        ledger.leases.push(Lease { daemon, ..lease(1, "GPU-a") });
        assert_eq!(unexplained(state.path(), &ledger).unwrap(), ["GPU-b", "GPU-c"]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(unexplained(state.path(), &ledger).unwrap().is_empty());
        std::os::unix::fs::symlink(".", state.path().join("inventory.json")).unwrap();
        assert!(unexplained(state.path(), &ledger).unwrap().is_empty(), "what is not trusted says nothing");
    }
}

#[cfg(test)]
mod job_tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;
    use crate::ledger::fixture::lease;
    use crate::ledger::{Init, Job};
    use crate::process::Process;
    use crate::slurm::JobRecord;

    #[test]
    fn a_lost_ledger_has_the_leases_of_jobs_with_processes() {
        let (state, cgroup) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let populated = |is: u8| {
            fs::write(cgroup.path().join("cgroup.events"), format!("populated {is}\n")).unwrap();
        };
        populated(1);
        JobRecord::new(7, 1000, None, Ok(None)).write(state.path()).unwrap();
        let job = |inode| Job { id: 7, step: None, uid: 1000, cgroup_inode: inode };
        let inode = fs::metadata(cgroup.path()).unwrap().ino();
        let (process, cgroup) = (Process::current().unwrap(), Some(cgroup.path().to_owned()));
        let init = Some(Init { process, pid_namespace: 0, cgroup, cgroup_inode: None });
        let held = Lease { job: Some(job(inode)), init, ..lease(1, "GPU-a") };
        let rebuilt = || rebuild(state.path(), None, "boot", None).unwrap().leases;
        held.write_copy(state.path()).unwrap();
        assert_eq!(rebuilt(), std::slice::from_ref(&held));
        assert!(find_trace(state.path(), None).unwrap().unwrap().contains("job 7"));
        let within = Lease { within: Some(held.id.clone()), ..held.clone() };
        within.write_copy(state.path()).unwrap();
        assert_eq!(rebuilt(), std::slice::from_ref(&held), "a container's is not written");
        Lease { job: Some(job(inode + 1)), ..held.clone() }.write_copy(state.path()).unwrap();
        assert!(rebuilt().is_empty(), "the job was requeued");
        held.write_copy(state.path()).unwrap();
        let file = slurm::lease_file(state.path(), 7);
        let written = fs::read_to_string(&file).unwrap();
        fs::write(&file, written.replace(process::read_boot_id().unwrap(), "earlier")).unwrap();
        assert!(rebuilt().is_empty(), "of an earlier boot");
        fs::write(&file, written).unwrap();
        assert_eq!(rebuilt(), std::slice::from_ref(&held));
        populated(0);
        assert!(rebuilt().is_empty(), "the job has ended");
        assert_eq!(find_trace(state.path(), None).unwrap(), None);
        populated(1);
        JobRecord::remove(state.path(), 7, None).unwrap();
        assert!(rebuilt().is_empty(), "its copy goes with its record");
    }

    #[test]
    fn copies_that_cannot_be_read_may_be_of_jobs_that_run() {
        let state = tempfile::tempdir().unwrap();
        assert!(read_live_jobs(state.path()).unwrap().is_empty(), "there is no directory");
        // The error of a command without descriptors left: ELOOP stands for it.
        let directory = state.path().join("slurm");
        std::os::unix::fs::symlink("slurm", &directory).unwrap();
        for error in [
            read_live_jobs(state.path()).unwrap_err(),
            rebuild(state.path(), None, "boot", None).unwrap_err(),
            find_trace(state.path(), None).unwrap_err(),
        ] {
            assert!(error.to_string().contains("cannot be read"), "{error}");
        }
    }
}
