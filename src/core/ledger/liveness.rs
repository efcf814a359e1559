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

use super::runtime_record::{Record, pid_namespace, read_bounded, table};
use super::{Container, Freed, Init, Lease, LeaseState, Ledger, Leftover};
use crate::fs::is_absent;
use crate::process::kernel_file;
use crate::process::{CGROUP_MOUNT, has_unified_cgroups};
use crate::process::{Process, is_gone, pidfd_await_end};
use crate::text::safe;

/// What happened to a lease's container.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    /// Nothing changed, or this is unknown.
    Unchanged,
    /// The runtime's record shows it.
    Exists(Init),
    /// Its first process has ended, others have not.
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
    /// Not at all: the change is of one lease.
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
        // Only its hook binds such a lease. A user controls what the record contains and how long reading it takes.
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
/// process. So if there is no record, a process in the container's cgroup keeps the lease.
fn fate_without_record(lease: &Lease) -> Fate {
    match find_sign_of_life(&lease.container) {
        Ok(None) => return Fate::Gone,
        Ok(Some(sign)) => {
            let (name, id) = (safe(&lease.container.name()), &lease.id);
            tracing::warn!("container {name}: its runtime has no record of it, but {sign}: lease {id} stays");
        }
        Err(error) => warn(lease, &lease.container.bundle, &error),
    }
    Fate::Unchanged
}

/// Whether `record` is of the container for which `lease` was taken, and not of another container with the same id. If
/// the record does not name a lease, its container must be younger than the process that creates it.
fn is_of(record: &Record, lease: &Lease) -> bool {
    match &record.lease {
        Some(id) => id == lease.id.as_str(),
        None => record.init.start_time >= lease.owner.start_time,
    }
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

    /// Waits up to `longest` until [`Lease::has_processes`] may have changed.
    pub fn await_change(&self, longest: Duration) {
        let Some(init) = &self.init else { return };
        if let Some(pidfd) = init.process.hold().ok().flatten() {
            pidfd_await_end(&pidfd, longest);
            return;
        }
        // cgroup v2 reports changes by `cgroup.events` (cgroups(7)).
        let events = init.cgroup.as_deref().map(|dir| fs::File::open(dir.join("cgroup.events")));
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
        let cgroup = safe(&cgroup.to_string_lossy());
        tracing::warn!("cgroup {cgroup} cannot be read ({error}): its lease stays");
        true
    })
}

fn warn(lease: &Lease, unread: &Path, error: &io::Error) {
    let (name, unread) = (safe(&lease.container.name()), safe(&unread.to_string_lossy()));
    let (error, id) = (safe(&error.to_string()), &lease.id);
    tracing::warn!(
        "container {name}: its record in {unread} cannot be read ({error}): lease {id} stays; if you know that the \
         container has ended, free it with `sublet lease release --force {id}`"
    );
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
        Err(error) if is_absent(&error) => Ok(!live_processes(dir)?.is_empty()),
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
    match fs::read_to_string(format!("/proc/{thread}/status")) {
        Err(error) if is_gone(&error) => Ok(None),
        status => Ok(status?.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok())),
    }
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
                return Ok(Some(format!("processes are in its cgroup {}", safe(&dir.to_string_lossy()))));
            }
        }
        return Ok(None);
    }
    let pid = if container.id.is_empty() { None } else { process_named_for(&container.id)? };
    Ok(pid.map(|pid| format!("process {pid} is in its cgroup")))
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
    let config: Config = serde_json::from_slice(&config)?;
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
    let name = name.strip_suffix(".scope").unwrap_or(name);
    let engine = name.strip_suffix(id);
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
            let cgroup = safe(&cgroup.to_string_lossy());
            format!("its first process {pid} has ended, but its cgroup {cgroup} still has processes")
        });
        left.into_iter().collect()
    }

    fn sign_without_init(&self) -> Option<String> {
        let path = |path: &Path| safe(&path.to_string_lossy());
        match Record::read(&self.container.record) {
            Ok(None) => match find_sign_of_life(&self.container) {
                Ok(sign) => sign.map(|sign| format!("its runtime has no record of it, but {sign}")),
                Err(error) => Some(format!(
                    "its runtime has no record of it, and its config.json in {} cannot be read ({}), so \
                     sublet cannot tell whether it runs",
                    path(&self.container.bundle),
                    safe(&error.to_string())
                )),
            },
            Ok(Some(_)) => None,
            Err(error) => Some(format!(
                "its runtime's record {} cannot be read ({}), so sublet cannot tell whether it runs; the \
                 process that started it, {}, is {}",
                path(&self.container.record),
                safe(&error.to_string()),
                self.owner.pid,
                if self.owner.is_alive() { "there still" } else { "gone" },
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::{Child, Command};

    use super::super::fixture::lease;
    use super::*;
    use crate::ledger::Container;

    fn reclaimed(ledger: &mut Ledger) -> Freed {
        reclaim(ledger, &[])
    }

    fn fate_of(lease: &Lease) -> Fate {
        fate(lease, &[])
    }

    /// A process that runs until it is dropped.
    struct Running(Child);

    impl Running {
        fn start() -> Self {
            Self(Command::new("sleep").arg("600").spawn().unwrap())
        }

        fn process(&self) -> Process {
            Process::find(i32::try_from(self.0.id()).unwrap()).unwrap()
        }
    }

    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn dead() -> Process {
        Running::start().process()
    }

    fn with_record(dir: &Path, owner: Process) -> Lease {
        let plain = lease(1, "GPU-a");
        Lease { container: Container { record: dir.to_owned(), ..plain.container.clone() }, owner, ..plain }
    }

    fn write_state(dir: &Path, init: Process, label: &str) {
        let state = format!(
            r#"{{"init_process_pid":{},"init_process_start":{},"config":{{"labels":["{label}"]}}}}"#,
            init.pid, init.start_time
        );
        fs::write(dir.join("state.json"), state).unwrap();
    }

    #[test]
    fn a_pending_lease_lives_with_its_owner() {
        let (dir, owner) = (tempfile::tempdir().unwrap(), Running::start());
        assert_eq!(fate_of(&with_record(dir.path(), owner.process())), Fate::Unchanged);
        let reused = Process { start_time: owner.process().start_time - 1, ..owner.process() };
        assert_eq!(fate_of(&with_record(dir.path(), reused)), Fate::Gone, "the pid is another process now");
        assert_eq!(fate_of(&with_record(dir.path(), dead())), Fate::Gone);
    }

    #[test]
    fn who_was_seen_a_moment_ago_is_kept_until_the_next_look() {
        let bound = |number: u64, process: Process| {
            let init = Init { process, pid_namespace: 0, cgroup: None, cgroup_inode: None };
            Lease { init: Some(init), state: LeaseState::Active, ..lease(number, "GPU-a") }
        };
        let (runs, ended) = (Running::start(), Running::start());
        let leases = vec![bound(1, ended.process()), bound(2, runs.process()), bound(3, dead())];
        let mut ledger = Ledger { leases, ..Ledger::empty("boot") };
        let seen = running_first(&ledger, Scan::Full);
        drop(ended);
        assert_eq!(reclaim(&mut ledger, &seen).len(), 1, "only who had ended before");
        let seen = running_first(&ledger, Scan::Full);
        assert_eq!(reclaim(&mut ledger, &seen).len(), 1);
        assert_eq!(ledger.leases.len(), 1);
    }

    #[test]
    fn a_brief_look_keeps_a_lease_whose_pid_is_another_process_and_a_full_one_does_not() {
        let bound = |number: u64, process: Process| {
            let init = Init { process, pid_namespace: 0, cgroup: None, cgroup_inode: None };
            Lease { init: Some(init), state: LeaseState::Active, ..lease(number, "GPU-a") }
        };
        let runs = Running::start();
        let reused = Process { start_time: runs.process().start_time - 1, ..runs.process() };
        let leases = vec![bound(1, reused), bound(2, runs.process()), bound(3, dead())];
        let mut ledger = Ledger { leases, ..Ledger::empty("boot") };
        let seen = running_first(&ledger, Scan::Brief);
        let freed: Vec<_> = reclaim(&mut ledger, &seen).into_iter().map(|lease| lease.id).collect();
        assert_eq!(freed, [lease(3, "GPU-a").id]);
        let seen = running_first(&ledger, Scan::Full);
        let freed: Vec<_> = reclaim(&mut ledger, &seen).into_iter().map(|lease| lease.id).collect();
        assert_eq!(freed, [lease(1, "GPU-a").id]);
    }

    #[test]
    fn the_record_of_a_live_container_makes_it_active() {
        let (dir, gone, init) = (tempfile::tempdir().unwrap(), dead(), Running::start());
        write_state(dir.path(), init.process(), "sublet.lease=0000000000000001");
        let mut ledger = Ledger { leases: vec![with_record(dir.path(), gone)], ..Ledger::empty("boot") };
        assert!(reclaimed(&mut ledger).is_empty());
        assert_eq!(ledger.leases[0].state, LeaseState::Active);
        assert_eq!(ledger.leases[0].init.as_ref().unwrap().process, init.process());
        drop(init);
        assert_eq!(reclaimed(&mut ledger).len(), 1);
        assert!(ledger.leases.is_empty());
    }

    #[test]
    fn the_record_of_another_container_with_this_id_counts_for_nothing() {
        let (dir, gone, init) = (tempfile::tempdir().unwrap(), dead(), Running::start());
        write_state(dir.path(), init.process(), "sublet.lease=0000000000000002");
        assert_eq!(fate_of(&with_record(dir.path(), gone)), Fate::Gone);
        write_state(dir.path(), init.process(), "bundle=/b");
        assert!(matches!(fate_of(&with_record(dir.path(), gone)), Fate::Exists(_)));
        let younger = Process { start_time: init.process().start_time + 1, ..gone };
        assert_eq!(fate_of(&with_record(dir.path(), younger)), Fate::Gone, "older than its creator");
    }

    #[test]
    fn a_living_owner_does_not_keep_a_lease_that_nothing_was_bound_to_in_time() {
        let nowhere = Path::new("");
        let owner = Process::current().unwrap();
        let late = Lease { bind_by: Some(0), ..with_record(nowhere, owner) };
        assert_eq!(fate_of(&late), Fate::Gone);
        let in_time = Lease { bind_by: Some(crate::process::uptime_seconds() + 30), ..late };
        assert_eq!(fate_of(&in_time), Fate::Unchanged);
    }

    #[test]
    fn a_record_that_cannot_be_read_keeps_the_lease() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("state.json"), "garbage").unwrap();
        assert_eq!(fate_of(&with_record(dir.path(), dead())), Fate::Unchanged);
    }

    #[test]
    fn a_config_that_cannot_be_read_is_a_sign_that_keeps_the_lease() {
        let dir = tempfile::tempdir().unwrap();
        let mut lease = with_record(&dir.path().join("none"), dead());
        lease.container.bundle = dir.path().to_owned();
        fs::write(dir.path().join("config.json"), "{").unwrap();
        assert_eq!(fate_of(&lease), Fate::Unchanged);
        assert!(lease.signs_of_life()[0].contains("config.json"), "{:?}", lease.signs_of_life());
        fs::remove_file(dir.path().join("config.json")).unwrap();
        assert_eq!((fate_of(&lease), lease.signs_of_life()), (Fate::Gone, vec![]));
    }

    #[test]
    fn a_lease_that_a_delete_marked_stays_ending() {
        let (dir, init) = (tempfile::tempdir().unwrap(), Running::start());
        write_state(dir.path(), init.process(), "bundle=/b");
        let marked = Lease { state: LeaseState::Ending, ..with_record(dir.path(), init.process()) };
        let mut ledger = Ledger { leases: vec![marked], ..Ledger::empty("boot") };
        reclaimed(&mut ledger);
        assert_eq!(ledger.leases[0].state, LeaseState::Ending);
        assert!(ledger.leases[0].init.is_some());
    }

    #[test]
    fn a_delete_that_was_killed_leaves_an_active_lease() {
        let (dir, container, deleter) = (tempfile::tempdir().unwrap(), Running::start(), Running::start());
        let init = Init { process: container.process(), pid_namespace: 0, cgroup: None, cgroup_inode: None };
        let marked = with_record(dir.path(), deleter.process());
        let marked = Lease { init: Some(init), state: LeaseState::Ending, ..marked };
        let mut ledger = Ledger { leases: vec![marked], ..Ledger::empty("boot") };
        reclaimed(&mut ledger);
        assert_eq!(ledger.leases[0].state, LeaseState::Ending);
        drop(deleter);
        reclaimed(&mut ledger);
        assert_eq!(ledger.leases[0].state, LeaseState::Ending, "its runtime has forgotten it");
        write_state(dir.path(), container.process(), "bundle=/b");
        reclaimed(&mut ledger);
        assert_eq!(ledger.leases[0].state, LeaseState::Active);
    }

    #[test]
    fn what_it_left_behind_stays_written_down_until_nobody_has_its_rootfs() {
        let mut gone = lease(1, "GPU-a");
        (gone.owner, gone.mount_points) = (dead(), vec!["/usr/lib/libcuda.so.1".into()].into());
        let init =
            Init { process: Running::start().process(), pid_namespace: 0, cgroup: None, cgroup_inode: None };
        gone.init = Some(init);
        let mut neighbour = lease(2, "GPU-a");
        neighbour.container.rootfs = gone.container.rootfs.clone();
        neighbour.owner = Process::current().unwrap();
        let mut ledger = Ledger { leases: vec![gone, neighbour], ..Ledger::empty("boot") };
        assert_eq!(reclaimed(&mut ledger).len(), 1);
        assert_eq!(ledger.leftovers[0].mount_points, [Path::new("/usr/lib/libcuda.so.1")]);
        assert!(ledger.clearable().is_empty());
        let id = ledger.leases[0].id.clone();
        ledger.remove(&id);
        assert_eq!(ledger.clearable().len(), 2);
    }

    #[test]
    fn what_is_left_in_the_cgroup_holds_the_lease() {
        let (cgroup, left) = (tempfile::tempdir().unwrap(), Running::start());
        let below = cgroup.path().join("a/b");
        fs::create_dir_all(&below).unwrap();
        fs::write(below.join("cgroup.procs"), format!("{}\n", left.process().pid)).unwrap();
        let init = Init {
            process: dead(),
            pid_namespace: 0,
            cgroup: Some(cgroup.path().to_owned()),
            cgroup_inode: None,
        };
        let active = Lease { state: LeaseState::Active, init: Some(init), ..lease(1, "GPU-a") };
        assert_eq!(fate_of(&active), Fate::Ending(None));
        drop(left);
        assert_eq!(fate_of(&active), Fate::Gone);
        fs::write(cgroup.path().join("cgroup.events"), "populated 1\nfrozen 0\n").unwrap();
        assert_eq!(fate_of(&active), Fate::Ending(None));
        let inode = fs::metadata(cgroup.path()).unwrap().ino();
        for (inode, expected) in [(inode, Fate::Ending(None)), (inode + 1, Fate::Gone)] {
            let mut known = active.clone();
            known.init.as_mut().unwrap().cgroup_inode = Some(inode);
            assert_eq!(fate_of(&known), expected, "a later cgroup of that name is another's");
        }
        fs::write(cgroup.path().join("cgroup.events"), "populated 0\nfrozen 1\n").unwrap();
        assert_eq!(fate_of(&active), Fate::Gone);
        fs::remove_dir_all(cgroup.path()).unwrap();
        assert_eq!(fate_of(&active), Fate::Gone);
    }
}

#[cfg(test)]
mod cgroup_tests {
    use super::super::fixture::lease;
    use super::*;
    use crate::process::{fixture, pidfd_await_end};

    #[test]
    fn a_process_whose_first_thread_has_ended_is_in_its_cgroup_of_v1_until_its_last_has() {
        let dir = tempfile::tempdir().unwrap();
        let mut started = fixture::without_first_thread();
        let process = started.process();
        fs::write(dir.path().join("cgroup.procs"), format!("{}\n", process.pid)).unwrap();
        assert!(is_populated(dir.path()).unwrap());
        let held = process.hold().unwrap().unwrap();
        started.end();
        assert!(pidfd_await_end(&held, Duration::from_secs(60)));
        assert!(!is_populated(dir.path()).unwrap(), "a zombie is left");
    }

    #[test]
    fn cgroups_are_named_for_containers_in_every_engines_way() {
        for name in ["c1", "docker-c1.scope", "libpod-c1.scope", "libpod-payload-c1"] {
            assert!(is_named_for(name, "c1"), "{name}");
        }
        for name in ["", "c12", "xc1", "libpod-conmon-c1.scope", "c1.slice"] {
            assert!(!is_named_for(name, "c1"), "{name}");
        }
    }

    #[test]
    fn a_config_asks_for_a_cgroup_by_path_or_by_systemds_words() {
        let asked = [
            ("/docker/c1", Some("docker/c1")),
            ("system.slice:docker:c1", Some("system.slice/docker-c1.scope")),
            ("machine.slice::c1", Some("machine.slice/c1.scope")),
            ("a-b.slice:x:c1", Some("a.slice/a-b.slice/x-c1.scope")),
            (":x:c1", Some("system.slice/x-c1.scope")),
            ("-.slice:x:c1", Some("x-c1.scope")),
            ("", None),
            ("/", None),
        ];
        for (path, expected) in asked {
            assert_eq!(parse_cgroups_path(path).as_deref(), expected.map(Path::new), "{path}");
        }
    }

    #[test]
    fn without_a_process_there_is_nothing_in_it_and_what_cannot_be_read_is_an_error() {
        let bundle = tempfile::tempdir().unwrap();
        let container = Container { bundle: bundle.path().to_owned(), ..lease(1, "GPU-a").container };
        let none = Container { id: String::new(), ..container.clone() };
        assert_eq!(find_sign_of_life(&none).unwrap(), None);
        let file = bundle.path().join("config.json");
        fs::write(&file, r#"{"linux": {"cgroupsPath": "/sublet-test-of-no-container"}}"#).unwrap();
        assert_eq!(find_sign_of_life(&none).unwrap(), None);
        fs::write(&file, "{").unwrap();
        assert!(find_sign_of_life(&container).is_err());
    }
}
