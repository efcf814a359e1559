//! The processes that a deleted container has left in its own cgroup. Which of them are certainly its own is decided only
//! here: their killer relies on it.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use super::liveness::{has_inode, live_processes};
use super::runtime_record::{Record, list_directory, roots};
use super::{Init, Lease, LeaseState, Ledger, LedgerError};
use crate::process::{Process, below_hierarchy, live_proc_dir_of, name_of, unless_gone};
use crate::slurm;
use crate::text::{safe, safe_path};

/// Why a process that was killed goes on.
pub(crate) const IN_STATE_D: &str = "in state D: it ends when what it waits for does";

/// How many processes are named.
const NAMED: usize = 3;

/// The processes that the container of a lease has left.
#[derive(Debug, Default)]
pub(crate) struct Left {
    /// Certainly its own.
    pub own: Vec<Process>,
    /// Why none in its cgroup may be ended, with a remedy: processes there may be somebody else's.
    pub kept: Option<String>,
}

impl fmt::Display for Left {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(kept) = &self.kept {
            return to.write_str(kept);
        }
        let named = self.own.iter().take(NAMED).map(|process| {
            let (pid, name) = (process.pid, name_of(process.pid));
            let state = if process.waits_in_kernel() { format!(", {IN_STATE_D}") } else { String::new() };
            format!("process {pid} ({name}{state})")
        });
        to.write_str(&named.collect::<Vec<_>>().join(", "))?;
        match self.own.len().saturating_sub(NAMED) {
            0 => write!(to, " still run{}", if self.own.len() == 1 { "s" } else { "" }),
            more => write!(to, " and {more} more still run"),
        }
    }
}

/// Why a cgroup, or a process in it, is not known to be a container's own.
#[derive(Debug, thiserror::Error)]
enum NotOwn {
    #[error("{0}")]
    Because(String),
    #[error("it cannot be told whose it is: {}", safe(&.0.to_string()))]
    Unread(#[from] io::Error),
    #[error("it cannot be told whose it is: {0}")]
    Unknown(#[from] LedgerError),
}

impl Lease {
    /// Whether its container was deleted, so that its processes are to be killed: a `delete` had marked the lease and
    /// is gone, and the runtime has no record of the container any more. Where a user's runtime may have one, which root
    /// does not read, the container's first thread has ended, which a runtime takes for its end. Where it is not known
    /// which record it has, as of a prestart hook's, its end alone is no `delete`: its engine may yet leave it alone.
    pub(crate) fn was_deleted(&self) -> bool {
        let ending = self.init.as_ref().filter(|_| self.state == LeaseState::Ending);
        let Some(init) = ending else { return false };
        // The process that marks it is younger than the container; the one that took it is older.
        let is_marked = || self.owner.start_time > init.process.start_time;
        let is_over = || {
            if self.brokered {
                !init.process.has_first_thread()
            } else if self.container.record.as_os_str().is_empty() {
                is_marked()
            } else {
                // One of a later container of the same name is not its own. One that cannot be read may be.
                let record = Record::read(&self.container.record);
                record.is_ok_and(|record| record.is_none_or(|record| record.init != init.process))
            }
        };
        !self.is_of_job() && !self.owner.is_alive() && is_over()
    }

    /// Whether a process that reports its deletion may end its container: it is being deleted, or a runtime takes it for
    /// ended.
    pub(crate) fn may_be_ended(&self) -> bool {
        let is_over = |init: &Init| self.state == LeaseState::Ending || !init.process.has_first_thread();
        !self.is_of_job() && self.init.as_ref().is_some_and(is_over)
    }
}

impl Ledger {
    /// One line with a remedy, if the container of `lease` goes on and its engine takes it for ended. `state_dir` is the
    /// ledger's directory.
    pub fn describe_unended(&self, lease: &Lease, state_dir: &Path) -> Option<String> {
        let init = lease.init.as_ref()?;
        let pid = init.process.pid;
        if lease.was_deleted() {
            let left = self.find_left_processes(lease, state_dir);
            return (lease.has_processes()).then(|| format!("its container was deleted, and {left}"));
        }
        let goes_on = !lease.is_of_job() && init.process.is_alive() && !init.process.has_first_thread();
        goes_on.then(|| {
            format!(
                "the first thread of its first process {pid} ({}) has ended and others go on, so that its runtime takes \
                 the container for stopped; where its engine cannot end it, `kill -KILL {pid}` does",
                name_of(pid)
            )
        })
    }

    /// The processes that the deleted container of `lease` has left.
    pub(crate) fn find_left_processes(&self, lease: &Lease, state_dir: &Path) -> Left {
        let Some(init) = &lease.init else { return Left::default() };
        let first = Some(init.process).filter(Process::is_alive);
        match (self.find_in_own_cgroup(lease, init, state_dir), first) {
            (Ok(mut own), first) => {
                own.extend(first.filter(|first| !own.contains(first)));
                Left { own, kept: None }
            }
            // It is known by its pid and start time, wherever it is. The rest may go with it (pid_namespaces(7)).
            (Err(_), Some(first)) => Left { own: vec![first], kept: None },
            (Err(kept), None) => Left { own: Vec::new(), kept: Some(kept) },
        }
    }

    fn find_in_own_cgroup(
        &self,
        lease: &Lease,
        init: &Init,
        state_dir: &Path,
    ) -> Result<Vec<Process>, String> {
        let Some(dir) = init.cgroup.as_deref().filter(|_| init.has_its_cgroup()) else {
            return Ok(Vec::new());
        };
        let kept = |Process { pid, .. }, why: NotOwn| {
            format!(
                "process {pid} ({}) is left in its cgroup {} and is not ended, because {why}; if it is the container's, end \
                 it with `kill -KILL {pid}`",
                name_of(pid),
                safe_path(dir)
            )
        };
        let found = live_processes(dir).map_err(|error| kept(init.process, error.into()))?;
        if let Some(first) = found.first() {
            self.check_cgroup(lease, dir)
                .and_then(|below| check_records(lease, init, &below, state_dir))
                .and_then(|()| check_processes(&found, init, self))
                .map_err(|why| kept(*first, why))?;
        }
        Ok(found)
    }

    /// Checks that `dir` is a cgroup such as containers have, and that no other lease has it. Returns its path below its
    /// hierarchy.
    fn check_cgroup(&self, lease: &Lease, dir: &Path) -> Result<PathBuf, NotOwn> {
        let not_own = |why: &str| Err(NotOwn::Because(why.to_owned()));
        if lease.init.as_ref().is_none_or(|init| init.cgroup_inode.is_none()) {
            return not_own("it is not known whether that is still the cgroup that the container had");
        }
        let below = below_hierarchy(dir);
        let is_unit = below.extension().is_some_and(|kind| kind == "slice" || kind == "service");
        if is_unit || below.file_name().is_none() {
            // systemd makes scopes for containers, and neither slices nor services.
            return not_own("that is the root, a slice or a service, which is more than one container");
        }
        if let Some(job) = slurm::job_of_cgroup(&below) {
            return not_own(&format!("that cgroup is of job {job} of Slurm's, which ends it with the job"));
        }
        let mut other_leases = self.leases.iter().filter(|other| other.id != lease.id);
        match other_leases.find(|other| may_share_cgroup(other, lease, &below)) {
            Some(other) => {
                not_own(&format!("container {} has that cgroup, too", safe(&other.container.name())))
            }
            None => Ok(below),
        }
    }
}

/// Containers without a share have no lease, and may have the cgroup, too. The record of a user's container is not opened:
/// its path is the user's, and reading it may take any time.
fn check_records(lease: &Lease, init: &Init, below: &Path, state_dir: &Path) -> Result<(), NotOwn> {
    let known = Some(&lease.container.record).filter(|_| !lease.brokered);
    for root in roots(state_dir, known.and_then(|record| record.parent()))? {
        for record in list_directory(&root)? {
            let Some(found) = Record::read(&record)? else { continue };
            // While a poststop hook runs, crun still has its record.
            let is_other = found.init != init.process;
            if is_other && found.cgroup.is_some_and(|dir| is_nested(&below_hierarchy(&dir), below)) {
                let record = safe_path(&record);
                return Err(NotOwn::Because(format!("the container of {record} has that cgroup, too")));
            }
        }
    }
    Ok(())
}

/// Whether `other` has the cgroup `below` of `lease`, or one above or below it, or may get it: it is of a container of
/// the same name that is being created.
fn may_share_cgroup(other: &Lease, lease: &Lease, below: &Path) -> bool {
    match &other.init {
        Some(init) => init.cgroup.as_deref().is_some_and(|dir| is_nested(&below_hierarchy(dir), below)),
        None => (other.container.uid, &other.container.id) == (lease.container.uid, &lease.container.id),
    }
}

fn is_nested(one: &Path, other: &Path) -> bool {
    one.starts_with(other) || other.starts_with(one)
}

/// Checks that none of `found` is the host's, and that all are where the container was. A container always has a mount
/// namespace of its own (`admit`).
fn check_processes(found: &[Process], init: &Init, ledger: &Ledger) -> Result<(), NotOwn> {
    let ours = known_pids(ledger);
    let [own, hosts] = ["self", "1"].map(|who| namespace_inode(&Path::new("/proc").join(who), "mnt"));
    let own = own?;
    let pids = match init.pid_namespace {
        0 => namespace_inode(Path::new("/proc/self"), "pid")?,
        its => Some(its),
    };
    for process in found {
        let shown = live_proc_dir_of(process.pid);
        let mounts = namespace_inode(&shown, "mnt")?;
        let is_in = |namespace: Option<u64>| mounts.is_some() && mounts == namespace;
        let not_own = |where_it_is: &str| {
            let (pid, name) = (process.pid, name_of(process.pid));
            Err(NotOwn::Because(format!("process {pid} ({name}) there is {where_it_is}")))
        };
        // An engine, sublet or an MPS daemon is in it, or another process of the host.
        let of_host = "the host's own, of an engine or of sublet";
        if ours.contains(&process.pid) || is_in(own) {
            return not_own(of_host);
        }
        match &hosts {
            Ok(hosts) if is_in(*hosts) => return not_own(of_host),
            Ok(_) => {}
            Err(error) => return Err(io::Error::other(format!("process 1: {error}")).into()),
        }
        let its = namespace_inode(&shown, "pid")?;
        if its.is_some() && its != pids {
            return not_own("in another PID namespace than the container was");
        }
    }
    Ok(())
}

/// This process and those above it, of which one is the engine, and those that the ledger names.
fn known_pids(ledger: &Ledger) -> Vec<i32> {
    let mut above: Vec<i32> = vec![1];
    let mut next = Process::current().ok();
    while let Some(process) = next.filter(|process| process.pid > 1) {
        above.push(process.pid);
        next = process.parent().and_then(Process::find);
    }
    above.extend(ledger.keeper.map(|keeper| keeper.pid));
    above.extend(ledger.daemons.iter().filter_map(|daemon| daemon.process).map(|process| process.pid));
    above
}

/// The inode of a namespace of the process that /proc shows in `shown`; `None` if it is ending.
fn namespace_inode(shown: &Path, which: &str) -> io::Result<Option<u64>> {
    Ok(unless_gone(fs::metadata(shown.join("ns").join(which)))?.map(|meta| meta.ino()))
}

impl Init {
    /// Whether its cgroup is still there, and not another one of the same name. `true` if that cannot be found out.
    pub(super) fn has_its_cgroup(&self) -> bool {
        match (&self.cgroup, self.cgroup_inode) {
            (Some(dir), Some(inode)) => has_inode(dir, inode),
            (Some(_), None) => true,
            (None, _) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::lease;
    use super::*;
    use crate::process::CGROUP_MOUNT;
    use crate::process::fixture::without_first_thread;

    fn in_cgroup(n: u64, path: &str) -> Lease {
        let process = Process { pid: i32::MAX, start_time: n };
        let cgroup = Some(Path::new(CGROUP_MOUNT).join("devices").join(path));
        let init = Some(Init { process, pid_namespace: 0, cgroup, cgroup_inode: Some(n) });
        Lease { init, state: LeaseState::Ending, ..lease(n, "GPU-a") }
    }

    fn refused(lease: &Lease, other_leases: &[Lease]) -> String {
        let ledger = Ledger { leases: other_leases.to_vec(), ..Ledger::empty("boot") };
        let dir = lease.init.as_ref().and_then(|init| init.cgroup.clone()).unwrap();
        ledger
            .check_cgroup(lease, &dir)
            .map_or_else(|why| why.to_string(), |below| below.display().to_string())
    }

    #[test]
    fn a_cgroup_is_a_containers_own_unless_something_says_that_it_may_be_another_ones() {
        let own = in_cgroup(1, "system.slice/docker-a.scope");
        assert!(refused(&own, std::slice::from_ref(&own)).ends_with("system.slice/docker-a.scope"));
        for unit in ["system.slice", "machine.slice/x.slice", "docker.service"] {
            assert!(refused(&in_cgroup(1, unit), &[]).starts_with("that is the root"), "{unit}");
        }
        let job = refused(&in_cgroup(1, "system.slice/slurmstepd.scope/job_7/step_0/user/task_0"), &[]);
        assert!(job.contains("job 7 of Slurm's"), "{job}");
        for shared in ["system.slice/docker-a.scope", "system.slice/docker-a.scope/b", "system.slice"] {
            let why = refused(&own, &[own.clone(), in_cgroup(2, shared)]);
            assert_eq!(why, "container container-2 has that cgroup, too", "{shared}");
        }
        assert!(refused(&own, &[in_cgroup(2, "system.slice/docker-ab.scope")]).ends_with("docker-a.scope"));
        let restarted = Lease { container: own.container.clone(), ..lease(2, "GPU-a") };
        assert!(refused(&own, &[restarted]).contains("has that cgroup, too"), "it is being created");
        let mut unknown = own;
        unknown.init.as_mut().unwrap().cgroup_inode = None;
        assert!(refused(&unknown, &[]).starts_with("it is not known whether"));
    }

    #[test]
    fn a_process_of_the_host_is_no_containers() {
        let me = Process::current().unwrap();
        let init = Init { process: me, pid_namespace: 0, cgroup: None, cgroup_inode: None };
        let ledger = Ledger::empty("boot");
        let is_hosts = |refused: Result<(), NotOwn>| {
            refused.unwrap_err().to_string().ends_with("there is the host's own, of an engine or of sublet")
        };
        assert!(is_hosts(check_processes(&[me], &init, &ledger)));
        let other = std::process::Command::new("sleep").arg("60").spawn();
        let mut other = other.unwrap();
        let found = Process::find(i32::try_from(other.id()).unwrap()).unwrap();
        let refused = check_processes(&[found], &init, &ledger);
        other.kill().unwrap();
        other.wait().unwrap();
        assert!(is_hosts(refused), "it is in our mount namespace");
    }

    #[test]
    fn a_container_of_a_hooks_was_not_deleted_because_its_first_process_has_ended() {
        let cgroup = tempfile::tempdir().unwrap();
        let left = Process::current().unwrap();
        std::fs::write(cgroup.path().join("cgroup.procs"), format!("{}\n", left.pid)).unwrap();
        let mut lease = in_cgroup(7, "a");
        let init = lease.init.as_mut().unwrap();
        init.cgroup = Some(cgroup.path().to_owned());
        init.cgroup_inode = Some(std::fs::metadata(cgroup.path()).unwrap().ino());
        (lease.owner, lease.state, lease.container.record) =
            (init.process, LeaseState::Active, PathBuf::new());
        let (mut ledger, _) =
            Ledger { leases: vec![lease.clone()], ..Ledger::empty("boot") }.preview_reclaim();
        assert_eq!(ledger.leases[0].state, LeaseState::Ending);
        assert!(!ledger.leases[0].was_deleted());
        ledger.mark_deleted(&lease.id, Process { pid: i32::MAX, start_time: 8 });
        assert!(ledger.leases[0].was_deleted(), "poststop was killed");
    }

    #[test]
    fn where_a_user_says_that_records_are_is_not_looked_at() {
        let (records, state_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let other = records.path().join("other");
        std::fs::create_dir(&other).unwrap();
        let state = r#"{"init_process_pid":7,"init_process_start":7,
            "cgroup_paths":{"devices":"/sys/fs/cgroup/devices/a"}}"#;
        std::fs::write(other.join("state.json"), state).unwrap();
        let mut lease = in_cgroup(1, "a");
        lease.container.record = records.path().join("own");
        let has_found = |lease: &Lease| {
            let init = lease.init.as_ref().unwrap();
            let below = below_hierarchy(init.cgroup.as_deref().unwrap());
            let checked = check_records(lease, init, &below, state_dir.path());
            let there = format!("the container of {}/", records.path().canonicalize().unwrap().display());
            checked.is_err_and(|why| why.to_string().starts_with(&there))
        };
        assert!(has_found(&lease));
        lease.brokered = true;
        assert!(!has_found(&lease));
    }

    #[test]
    fn a_container_was_deleted_when_its_runtime_has_forgotten_it_and_who_marked_it_is_gone() {
        let (started, records) = (without_first_thread(), tempfile::tempdir().unwrap());
        let process = started.process();
        let init = Some(Init { process, pid_namespace: 0, cgroup: None, cgroup_inode: None });
        let marked = Lease { init, ..in_cgroup(1, "a") };
        let with = |change: fn(&mut Lease)| {
            let mut lease = marked.clone();
            change(&mut lease);
            lease.was_deleted()
        };
        assert!(with(|_| {}));
        assert!(!with(|lease| lease.state = LeaseState::Active));
        assert!(!with(|lease| lease.owner = Process::current().unwrap()), "it is being deleted");
        assert!(with(|lease| lease.brokered = true), "a runtime takes it for ended");
        assert!(!with(|lease| {
            lease.brokered = true;
            lease.init.as_mut().unwrap().process = Process::current().unwrap();
        }));
        let mut recorded = marked.clone();
        recorded.container.record = records.path().to_owned();
        let state = |start_time: u64| {
            let text = format!(r#"{{"init_process_pid":{},"init_process_start":{start_time}}}"#, process.pid);
            std::fs::write(records.path().join("state.json"), text).unwrap();
        };
        state(process.start_time);
        assert!(!recorded.was_deleted());
        state(process.start_time + 1);
        assert!(recorded.was_deleted(), "the record is of a later container of that name");
        std::fs::write(records.path().join("state.json"), "garbage").unwrap();
        assert!(!recorded.was_deleted(), "what cannot be read may be its record");
    }
}
