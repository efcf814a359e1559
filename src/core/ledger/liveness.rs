//! Whether a lease's container is still alive: its processes, its runtime's record, its cgroup.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use super::cgroup::{self, find_sign_of_life, is_populated};
use super::runtime_record::{Record, pid_namespace};
use super::{Freed, Init, Lease, LeaseId, LeaseState, Ledger, Leftover};
use crate::process::{Process, pidfd_await_end};
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
}

/// The result of a scan, a moment ago.
#[derive(Default)]
pub(super) struct Seen {
    /// First processes of containers that ran, in order. A lease that is kept because of them is freed by the next full scan.
    alive: Vec<Process>,
    /// The lease of a container that had ended. Nothing brings one back.
    gone: Option<LeaseId>,
}

impl Seen {
    /// Scans the containers of `ledger`.
    pub(super) fn of(ledger: &Ledger, scan: Scan) -> Self {
        let first = ledger.leases.iter().filter_map(|lease| lease.init.as_ref());
        let is_alive = match scan {
            Scan::Full => Process::is_alive,
            Scan::Brief => Process::has_pid,
        };
        let mut alive: Vec<_> = first.map(|init| init.process).filter(is_alive).collect();
        alive.sort_unstable();
        Self { alive, gone: None }
    }

    pub(super) fn with_gone(self, gone: Option<LeaseId>) -> Self {
        Self { gone, ..self }
    }

    fn has(&self, process: Process) -> bool {
        self.alive.binary_search(&process).is_ok()
    }
}

/// Updates the state of every lease and removes the leases whose containers have ended. Those of `seen` have not.
pub(super) fn reclaim(ledger: &mut Ledger, seen: &Seen) -> Freed {
    let gone: Vec<bool> = ledger.leases.iter_mut().map(|lease| is_gone(lease, seen)).collect();
    let mut freed = Freed::new();
    // To move hundreds takes longer than to look at them.
    if gone.contains(&true) {
        for (lease, is_gone) in std::mem::take(&mut ledger.leases).into_iter().zip(gone) {
            if is_gone {
                freed.push(lease);
            } else {
                ledger.leases.push(lease);
            }
        }
    }
    ledger.mig.end_change_of_dead_process();
    ledger.mig.forget_dead_waiters();
    for lease in &freed {
        ledger.note_leftovers(lease);
    }
    freed
}

/// Whether its container has ended. Otherwise its state is updated.
fn is_gone(lease: &mut Lease, seen: &Seen) -> bool {
    match fate(lease, seen) {
        Fate::Gone => return true,
        Fate::Exists(init) => lease.note_container(init),
        Fate::Ending(init) => lease.note_first_process_gone(init),
        Fate::Unchanged if was_not_deleted(lease) => lease.note_not_deleted(),
        Fate::Unchanged => {}
    }
    false
}

/// A `delete` that was killed leaves a lease marked as ending. If the runtime still has a record of the container, it
/// may still be alive.
fn was_not_deleted(lease: &Lease) -> bool {
    let Some(init) = lease.init.as_ref().filter(|_| lease.state == LeaseState::Ending) else { return false };
    init.process.is_alive() && !lease.owner.is_alive() && !lease.was_deleted()
}

fn fate(lease: &Lease, seen: &Seen) -> Fate {
    match &lease.init {
        _ if seen.gone.as_ref() == Some(&lease.id) => Fate::Gone,
        Some(_) if lease.is_of_job() => {
            if lease.has_processes() {
                Fate::Unchanged
            } else {
                Fate::Gone
            }
        }
        Some(init) if seen.has(init.process) || init.process.is_alive() => Fate::Unchanged,
        Some(init) if has_processes(init) => Fate::Ending(None),
        Some(_) => Fate::Gone,
        None => fate_without_init(lease),
    }
}

/// The owner is checked before the record. In the other order, a container that was created, and whose owner ended,
/// between the two checks would seem never to have existed.
fn fate_without_init(lease: &Lease) -> Fate {
    let owned = lease.owner.is_alive() && !lease.is_overdue();
    if lease.brokered {
        // Only its hook binds such a lease. A user controls what the record contains and how long reading it takes.
        return if owned { Fate::Unchanged } else { Fate::Gone };
    }
    let record = match Record::read(&lease.container.record) {
        Ok(None) if !owned => return fate_without_record(lease),
        Ok(record) => record.filter(|record| is_of(record, lease)),
        Err(error) => {
            warn(lease, &lease.container.record, &error);
            return Fate::Unchanged;
        }
    };
    let Some(record) = record else {
        return if owned { Fate::Unchanged } else { Fate::Gone };
    };
    match (record.init.is_alive(), owned) {
        (true, _) => Fate::Exists(init_of(&record)),
        (false, true) => Fate::Unchanged,
        (false, false) if record.cgroup.as_deref().is_some_and(may_be_populated) => {
            Fate::Ending(Some(init_of(&record)))
        }
        (false, false) => Fate::Gone,
    }
}

/// In another time namespace, runc considers every container stopped: its `delete` removes the record and ends no
/// process. So if there is no record, a process in the container's cgroup keeps the lease.
fn fate_without_record(lease: &Lease) -> Fate {
    match find_sign_of_life(&lease.container) {
        Ok(None) => return Fate::Gone,
        Ok(Some(sign)) => tracing::warn!(
            "container {}: its runtime has no record of it, but {sign}: lease {} stays",
            safe(&lease.container.name()),
            lease.id
        ),
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
    #[must_use]
    pub(crate) fn leftovers_of(&self, lease: &Lease, has_ended: bool) -> Vec<Leftover> {
        if !has_ended && fate(lease, &Seen::default()) != Fate::Gone {
            return Vec::new();
        }
        let mut after = self.clone();
        after.remove(&lease.id);
        after.clearable()
    }

    /// The ledger after [`super::Store::update`], and the leases that it would free. Nothing is written.
    #[must_use]
    pub fn preview_reclaim(&self) -> (Self, Freed) {
        let mut ledger = self.clone();
        let freed = reclaim(&mut ledger, &Seen::default());
        (ledger, freed)
    }
}

impl Lease {
    /// Whether its container's first process, or any process in its cgroup, still runs. The lease of a job is not
    /// kept by its first process: tasks come and go.
    #[must_use]
    pub fn has_processes(&self) -> bool {
        if let (Some(job), Some(init), None) = (&self.job, &self.init, &self.within) {
            return init.cgroup.as_deref().is_some_and(|dir| has_inode(dir, job.cgroup_inode))
                && has_processes(init);
        }
        self.init.as_ref().is_some_and(|init| init.process.is_alive() || has_processes(init))
    }
}

impl Lease {
    /// Waits up to `longest` until [`Lease::has_processes`] may have changed.
    pub fn await_change(&self, longest: Duration) {
        let Some(init) = &self.init else { return };
        match init.process.hold().ok().flatten() {
            Some(pidfd) => drop(pidfd_await_end(&pidfd, longest)),
            None => match &init.cgroup {
                Some(dir) => cgroup::await_change(dir, longest),
                None => std::thread::sleep(cgroup::POLL_INTERVAL.min(longest)),
            },
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
        cgroup_inode: record
            .cgroup
            .as_deref()
            .and_then(|dir| dir.symlink_metadata().ok())
            .map(|meta| meta.ino()),
        cgroup: record.cgroup.clone(),
    }
}

/// Whether `init`'s cgroup holds processes. `true` if it cannot be read.
pub(super) fn has_processes(init: &Init) -> bool {
    init.cgroup.as_deref().filter(|_| init.has_its_cgroup()).is_some_and(may_be_populated)
}

fn may_be_populated(cgroup: &Path) -> bool {
    is_populated(cgroup).unwrap_or_else(|error| {
        tracing::warn!(
            "cgroup {} cannot be read ({error}): its lease stays",
            safe(&cgroup.to_string_lossy())
        );
        true
    })
}

fn warn(lease: &Lease, unread: &Path, error: &io::Error) {
    tracing::warn!(
        "container {}: its record in {} cannot be read ({}): lease {} stays; if you know that the \
         container has ended, free it with `sublet lease release --force {}`",
        safe(&lease.container.name()),
        safe(&unread.to_string_lossy()),
        safe(&error.to_string()),
        lease.id,
        lease.id
    );
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::{Child, Command};

    use super::super::fixture::lease;
    use super::*;
    use crate::ledger::Container;

    fn reclaimed(ledger: &mut Ledger) -> Freed {
        reclaim(ledger, &Seen::default())
    }

    fn fate_of(lease: &Lease) -> Fate {
        fate(lease, &Seen::default())
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
        let seen = Seen::of(&ledger, Scan::Full);
        drop(ended);
        assert_eq!(reclaim(&mut ledger, &seen).len(), 1, "only who had ended before");
        let seen = Seen::of(&ledger, Scan::Full);
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
        let seen = Seen::of(&ledger, Scan::Brief);
        let freed: Vec<_> = reclaim(&mut ledger, &seen).into_iter().map(|lease| lease.id).collect();
        assert_eq!(freed, [lease(3, "GPU-a").id]);
        let seen = Seen::of(&ledger, Scan::Full);
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
