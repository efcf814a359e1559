//! Whether a lease's container is still alive: its processes, its runtime's record, its cgroup; which cgroup that is if
//! no record names it; and why a lease is not freed, for a user who wants to free it.

use std::collections::BTreeSet;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use nix::libc::{ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Deserialize;

use super::runtime_record::{Record, parse, pid_namespace, read_bounded, table};
use super::{Container, Freed, Init, Lease, LeaseState, Ledger, Leftover, Waiter};
use crate::log;
use crate::process::{CGROUP_MOUNT, Process, has_unified_cgroups, kernel_file, pidfd_await_end, unless_gone};
use crate::text::{safe, safe_path};

/// The fate of a lease's container.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    /// Nothing changed, or this is unknown.
    Unchanged,
    /// The runtime's record shows it.
    Exists(Init),
    /// Its first process has ended, other ones have not.
    Ending(Option<Init>),
    /// Nothing of it is left.
    Gone,
}

/// How carefully an update looks for containers that have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scan {
    /// Every first process is looked for in /proc.
    Full,
    /// A first process whose pid exists counts as running, which is ten times cheaper. So the lease of a container that
    /// has ended may stay until the next full scan: if its first process is a zombie, or its pid is another process's.
    Brief,
    /// Not at all: the change is of one lease, whose fate is known.
    None,
}

/// The first processes of `ledger`'s containers that run, in order. A lease that is kept because of them is freed by the next
/// full scan.
pub(super) fn running_first(ledger: &Ledger, scan: Scan) -> Vec<Process> {
    let is_alive = match scan {
        Scan::Full => Process::is_alive,
        Scan::Brief => Process::has_pid,
        Scan::None => return Vec::new(),
    };
    let first = ledger.leases.iter().filter_map(|lease| lease.init.as_ref());
    let mut running: Vec<_> = first.map(|init| init.process).filter(is_alive).collect();
    running.sort_unstable();
    running
}

/// Updates the state of every lease and removes the leases whose containers have ended. Those with a first process among
/// `running`, which is in order, have not.
pub(super) fn reclaim(ledger: &mut Ledger, running: &[Process]) -> Freed {
    let gone: Vec<bool> = ledger.leases.iter_mut().map(|lease| is_lease_gone(lease, running)).collect();
    let mut freed = Freed::new();
    // To move hundreds takes longer than to look at them.
    if gone.contains(&true) {
        for (lease, is_gone) in std::mem::take(&mut ledger.leases).into_iter().zip(gone) {
            if is_gone { &mut freed } else { &mut ledger.leases }.push(lease);
        }
    }
    ledger.mig.forget_dead_processes();
    ledger.waiters.retain(Waiter::is_there);
    for lease in &freed {
        ledger.note_leftovers(lease);
    }
    freed
}

/// Whether its container has ended. Otherwise its state is updated.
fn is_lease_gone(lease: &mut Lease, running: &[Process]) -> bool {
    match fate(lease, running) {
        Fate::Gone => return true,
        Fate::Exists(init) => lease.note_container(init),
        Fate::Ending(init) => lease.note_first_process_gone(init),
        // A `delete` that was killed leaves a lease marked as ending. If the runtime still has a record of the container, it
        // may still be alive.
        Fate::Unchanged => {
            let marked = lease.init.as_ref().filter(|_| lease.state == LeaseState::Ending);
            let is_alive = marked.is_some_and(|init| init.process.is_alive());
            if is_alive && !lease.owner.is_alive() && !lease.was_deleted() {
                lease.note_not_deleted();
            }
        }
    }
    false
}

fn fate(lease: &Lease, running: &[Process]) -> Fate {
    let Some(init) = &lease.init else { return fate_without_init(lease) };
    let goes_on = if lease.is_of_job() {
        lease.has_processes()
    } else {
        running.binary_search(&init.process).is_ok() || init.process.is_alive()
    };
    if goes_on {
        Fate::Unchanged
    } else if !lease.is_of_job() && has_processes(init) {
        Fate::Ending(None)
    } else {
        Fate::Gone
    }
}

/// The owner is checked before the record. In the other order, a container that was created, and whose owner ended,
/// between the two checks would seem never to have existed.
fn fate_without_init(lease: &Lease) -> Fate {
    let owned = lease.owner.is_alive() && !lease.is_overdue();
    let unowned = if owned { Fate::Unchanged } else { Fate::Gone };
    if lease.brokered {
        // Only its hook binds such a lease. A user controls the content of the record and how long reading it takes.
        return unowned;
    }
    let record = match Record::read(&lease.container.record) {
        Ok(None) if !owned => return fate_without_record(lease),
        Ok(record) => record.filter(|record| is_of(record, lease)),
        Err(error) => {
            warn(lease, &lease.container.record, &error);
            return Fate::Unchanged;
        }
    };
    let Some(record) = record else { return unowned };
    if record.init.is_alive() {
        return Fate::Exists(init_of(&record));
    }
    let is_ending = !owned && record.cgroup.as_deref().is_some_and(may_be_populated);
    if is_ending { Fate::Ending(Some(init_of(&record))) } else { unowned }
}

/// In another time namespace, runc considers every container stopped: its `delete` removes the record and ends no
/// process. And a `crun create` that is killed before it writes its record leaves a process that waits for `start` for
/// ever (crun 1.8.1: tests/soak/README.md). So if there is no record, a process in the container's cgroup keeps the
/// lease.
fn fate_without_record(lease: &Lease) -> Fate {
    match find_sign_of_life(&lease.container) {
        Ok(None) => return Fate::Gone,
        Ok(Some(sign)) => {
            let (name, id) = (safe(&lease.container.name()), &lease.id);
            log::warn_once(format!(
                "container {name}: its runtime has no record of it, but {sign}: lease {id} stays until that ends"
            ));
        }
        Err(error) => warn(lease, &lease.container.bundle, &error),
    }
    Fate::Unchanged
}

/// Whether `record` is of the container for which `lease` was taken, and not of another container with the same id. If
/// the record does not name a lease, its container must be younger than the process that creates it.
fn is_of(record: &Record, lease: &Lease) -> bool {
    let is_younger = || record.init.start_time >= lease.owner.start_time;
    record.lease.as_ref().map_or_else(is_younger, |id| id == lease.id.as_str())
}

impl Ledger {
    /// The removable leftovers of `lease`, if its container has ended or `has_ended`; none, if that is not certain.
    pub(crate) fn leftovers_of(&self, lease: &Lease, has_ended: bool) -> Vec<Leftover> {
        if !has_ended && fate(lease, &[]) != Fate::Gone {
            return Vec::new();
        }
        let mut after = self.clone();
        after.remove(&lease.id);
        after.clearable()
    }

    /// The ledger after [`super::Store::update`], and the leases that it would free. Nothing is written.
    pub fn preview_reclaim(&self) -> (Self, Freed) {
        let mut ledger = self.clone();
        let freed = reclaim(&mut ledger, &[]);
        (ledger, freed)
    }
}

impl Lease {
    /// Whether its container's first process, or any process in its cgroup, still runs. The lease of a job is not
    /// kept by its first process: tasks come and go.
    pub fn has_processes(&self) -> bool {
        if let (Some(job), Some(init), None) = (&self.job, &self.init, &self.within) {
            return init.cgroup.as_deref().is_some_and(|dir| has_inode(dir, job.cgroup_inode))
                && has_processes(init);
        }
        self.init.as_ref().is_some_and(|init| init.process.is_alive() || has_processes(init))
    }

    /// Whether a child of its runtime, which was killed before it had a record of the container, goes on making it.
    pub(crate) fn is_still_made(&self) -> bool {
        let is_unrecorded = self.init.is_none() && !self.brokered && !self.owner.is_alive();
        is_unrecorded && find_sign_of_life(&self.container).is_ok_and(|sign| sign.is_some())
    }

    /// Waits up to `longest` until [`Lease::has_processes`] or [`Lease::is_still_made`] may have changed.
    pub fn await_change(&self, longest: Duration) {
        let init = self.init.as_ref();
        if let Some(pidfd) = init.and_then(|init| init.process.hold().ok().flatten()) {
            pidfd_await_end(&pidfd, longest);
            return;
        }
        // cgroup v2 reports changes by `cgroup.events` (cgroups(7)).
        let cgroup = init.and_then(|init| init.cgroup.as_deref());
        let events = cgroup.map(|dir| fs::File::open(dir.join("cgroup.events")));
        let Some(Ok(mut events)) = events else {
            std::thread::sleep(POLL_INTERVAL.min(longest));
            return;
        };
        // An event is one that comes after a read by the same descriptor.
        let mut text = String::new();
        if events.read_to_string(&mut text).is_ok() && text.lines().any(|line| line == "populated 1") {
            let mut awaited = [PollFd::new(events.as_fd(), PollFlags::POLLPRI)];
            let _ = poll(&mut awaited, PollTimeout::try_from(longest).unwrap_or(PollTimeout::MAX));
        }
    }
}

/// Whether the directory `dir` still is the one with this inode. `true` if that cannot be found out.
pub(super) fn has_inode(dir: &Path, inode: u64) -> bool {
    match dir.symlink_metadata() {
        Ok(meta) => meta.ino() == inode,
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

/// `record`'s container as a lease remembers it.
pub(super) fn init_of(record: &Record) -> Init {
    Init {
        process: record.init,
        pid_namespace: pid_namespace(record.init.pid),
        cgroup_inode: record.cgroup.as_ref().and_then(|dir| Some(dir.symlink_metadata().ok()?.ino())),
        cgroup: record.cgroup.clone(),
    }
}

/// Whether `init`'s cgroup holds processes. `true` if it cannot be read.
pub(super) fn has_processes(init: &Init) -> bool {
    init.cgroup.as_deref().filter(|_| init.has_its_cgroup()).is_some_and(may_be_populated)
}

fn may_be_populated(cgroup: &Path) -> bool {
    is_populated(cgroup).unwrap_or_else(|error| {
        let cgroup = safe_path(cgroup);
        log::warn_once(format!("cgroup {cgroup} cannot be read ({error}): its lease stays"));
        true
    })
}

fn warn(lease: &Lease, unread: &Path, error: &io::Error) {
    let (name, unread) = (safe(&lease.container.name()), safe_path(unread));
    let (error, id) = (safe(&error.to_string()), &lease.id);
    log::warn_once(format!(
        "container {name}: its record in {unread} cannot be read ({error}): lease {id} stays; if you know that the \
         container has ended, free it with `sublet lease release --force {id}`"
    ));
}

/// A cgroup with more cgroups than this below it is not walked through. In v1 it counts as populated.
const MOST_CGROUPS: usize = 1000;

/// The interval for cgroup v1, which reports no changes.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Whether a process runs in the cgroup `dir` or below. An absent cgroup is empty.
fn is_populated(dir: &Path) -> io::Result<bool> {
    match kernel_file(dir.join("cgroup.events")) {
        // cgroup v2 includes the descendants (cgroups(7)).
        Ok(events) => Ok(events.lines().any(|line| line == "populated 1")),
        Err(error) if crate::fs::is_absent(&error) => Ok(!live_processes(dir)?.is_empty()),
        Err(error) if is_removed(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The live processes in the cgroup `dir` and below. None of an absent cgroup.
///
/// # Errors
/// A cgroup or a process cannot be read, or there are too many cgroups.
pub(super) fn live_processes(dir: &Path) -> io::Result<Vec<Process>> {
    let mut pids = BTreeSet::new();
    let mut open = vec![dir.to_owned()];
    let mut seen = 0;
    while let Some(dir) = open.pop() {
        seen += 1;
        if seen > MOST_CGROUPS {
            return Err(io::Error::other(format!("there are more than {MOST_CGROUPS} cgroups in it")));
        }
        pids.extend(pids_in(&dir)?);
        let entries = match fs::read_dir(&dir) {
            Err(error) if is_removed(&error) => continue,
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                open.push(entry.path());
            }
        }
    }
    // v1 also lists zombies, which hold no resources.
    let found = pids.into_iter().map(|pid| Ok(Process::examine(pid)?.filter(Process::is_alive)));
    found.filter_map(io::Result::transpose).collect()
}

/// The processes in the cgroup `dir`. Of one whose first thread alone has ended, v2 lists only the threads.
fn pids_in(dir: &Path) -> io::Result<Vec<i32>> {
    let list = |name: &str| -> io::Result<_> {
        match read_bounded(&dir.join(name)) {
            Err(error) if is_removed(&error) => Ok(None),
            list => Ok(list?.map(|list| parse_pids(&list))),
        }
    };
    let Some(threads) = list("cgroup.threads")? else { return Ok(list("cgroup.procs")?.unwrap_or_default()) };
    threads.into_iter().filter_map(|thread| process_of_thread(thread).transpose()).collect()
}

fn parse_pids(text: &[u8]) -> Vec<i32> {
    String::from_utf8_lossy(text).lines().filter_map(|line| line.parse().ok()).collect()
}

/// The id of the process of a thread (`Tgid`, proc(5)); `None` if it has ended.
fn process_of_thread(thread: i32) -> io::Result<Option<i32>> {
    // v2 lists threads that this PID namespace does not show as 0.
    if thread <= 0 {
        return Err(io::Error::other("a process in it is of a PID namespace that is not seen from here"));
    }
    let status = unless_gone(fs::read_to_string(format!("/proc/{thread}/status")))?.unwrap_or_default();
    Ok(status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok()))
}

/// Reading a cgroup that was removed while open fails with ENODEV.
fn is_removed(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(nix::libc::ENODEV)
}

/// Evidence that processes run in `container`'s cgroup. That is the cgroup that its config.json requests. If it
/// requests none, it is one with the container's id in its name; to find that, every process is examined.
///
/// # Errors
/// config.json, cgroups or /proc cannot be read.
fn find_sign_of_life(container: &Container) -> io::Result<Option<String>> {
    // The bundle of a lease that is not bound yet is not known.
    let asked = if container.bundle.as_os_str().is_empty() { None } else { cgroups_path(&container.bundle)? };
    if let Some(below) = asked {
        let mount = Path::new(CGROUP_MOUNT);
        let mut possible = vec![mount.join(&below)];
        if !has_unified_cgroups(mount) {
            for hierarchy in fs::read_dir(mount)? {
                possible.push(hierarchy?.path().join(&below));
            }
        }
        // No cgroup can have such a name.
        let cannot_be = |error: io::Error| {
            [ENOENT, ENOTDIR, ENAMETOOLONG, ELOOP].map(Some).contains(&error.raw_os_error())
        };
        for dir in possible {
            if !dir.symlink_metadata().is_err_and(cannot_be) && is_populated(&dir)? {
                return Ok(Some(describe_use(&dir)));
            }
        }
        return Ok(None);
    }
    let pid = if container.id.is_empty() { None } else { process_named_for(&container.id)? };
    Ok(pid.map(|pid| format!("process {pid} is in its cgroup")))
}

/// That processes are in the cgroup `dir`. Which they are is for readers: where that cannot be told, they are there all the same.
fn describe_use(dir: &Path) -> String {
    let processes = live_processes(dir).unwrap_or_default();
    let first = processes.first().map_or("a process".to_owned(), |first| format!("process {}", first.pid));
    format!("{first} is in its cgroup {}", safe_path(dir))
}

fn process_named_for(id: &str) -> io::Result<Option<i32>> {
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let table = table(pid)?;
        let mut paths = table.lines().filter_map(|line| line.splitn(3, ':').nth(2));
        if paths.any(|path| path.split('/').any(|name| is_named_for(name, id))) && Process::may_run(pid) {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}

/// The cgroup that `bundle`'s config.json requests, below a hierarchy's root; `None` if it requests none or does not
/// exist.
fn cgroups_path(bundle: &Path) -> io::Result<Option<PathBuf>> {
    // The part of config.json that matters here. The rest is skipped.
    #[derive(Deserialize)]
    struct Config {
        linux: Option<Linux>,
    }
    #[derive(Deserialize)]
    struct Linux {
        #[serde(rename = "cgroupsPath")]
        cgroups_path: Option<String>,
    }
    let Some(config) = read_bounded(&bundle.join("config.json"))? else { return Ok(None) };
    let config: Config = parse(&config)?;
    Ok(config.linux.and_then(|linux| parse_cgroups_path(&linux.cgroups_path?)))
}

/// A path, or systemd's `SLICE:PREFIX:NAME`, which means the scope `PREFIX-NAME.scope` in that slice (runc's
/// documentation, "systemd cgroup driver").
fn parse_cgroups_path(path: &str) -> Option<PathBuf> {
    let parts: Vec<_> = path.split(':').collect();
    let asked = match parts[..] {
        [slice, "", name] => slice_path(slice).join(format!("{name}.scope")),
        [slice, prefix, name] => slice_path(slice).join(format!("{prefix}-{name}.scope")),
        _ => path.trim_matches('/').into(),
    };
    Some(asked).filter(|asked| !asked.as_os_str().is_empty())
}

/// `a-b.slice` is in `a.slice` (systemd.slice(5)). An empty name means runc's default.
fn slice_path(slice: &str) -> PathBuf {
    let name = match slice {
        "" => "system",
        slice => slice.strip_suffix(".slice").unwrap_or(slice),
    };
    let ends = name.match_indices('-').map(|(at, _)| at).filter(|at| *at > 0).chain([name.len()]);
    ends.filter(|_| name != "-").map(|end| format!("{}.slice", &name[..end])).collect()
}

/// Whether a cgroup is called `ID`, `ENGINE-ID` or `ENGINE-ID.scope`, as engines and systemd call them. Podman's
/// monitor, which is not part of the container, is in `libpod-conmon-ID.scope`.
fn is_named_for(name: &str, id: &str) -> bool {
    let engine = name.strip_suffix(".scope").unwrap_or(name).strip_suffix(id);
    engine.is_some_and(|engine| engine.is_empty() || engine.ends_with('-') && engine != "libpod-conmon-")
}

impl Lease {
    /// Evidence that its container may be alive, for a user who wants the lease to be freed. It names each place that
    /// was checked.
    pub fn signs_of_life(&self) -> Vec<String> {
        let Some(init) = &self.init else {
            let starts = self.owner.is_alive() && !self.is_overdue();
            let starts = starts.then(|| format!("process {} is starting it", self.owner.pid));
            let seen = if self.brokered { None } else { self.sign_without_init() };
            return starts.into_iter().chain(seen).collect();
        };
        let pid = init.process.pid;
        if init.process.is_alive() {
            return vec![format!("its process {pid} runs")];
        }
        let left = init.cgroup.as_deref().filter(|_| has_processes(init)).map(|cgroup| {
            let cgroup = safe_path(cgroup);
            format!("its first process {pid} has ended, but its cgroup {cgroup} still has processes")
        });
        left.into_iter().collect()
    }

    fn sign_without_init(&self) -> Option<String> {
        match Record::read(&self.container.record) {
            Ok(None) => match find_sign_of_life(&self.container) {
                Ok(sign) => sign.map(|sign| format!("its runtime has no record of it, but {sign}")),
                Err(error) => Some(format!(
                    "its runtime has no record of it, and its config.json in {} cannot be read ({}), so \
                     sublet cannot tell whether it runs",
                    safe_path(&self.container.bundle),
                    safe(&error.to_string())
                )),
            },
            Ok(Some(_)) => None,
            Err(error) => Some(format!(
                "its runtime's record {} cannot be read ({}), so sublet cannot tell whether it runs; the \
                 process that started it, {}, is {}",
                safe_path(&self.container.record),
                safe(&error.to_string()),
                self.owner.pid,
                if self.owner.is_alive() { "there still" } else { "gone" },
            )),
        }
    }
}

#[cfg(test)]
#[path = "liveness_tests.rs"]
mod tests;
