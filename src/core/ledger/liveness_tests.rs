//! Tests of which leases are alive.

use super::*;

mod fate_tests {
    use std::fs;
    use std::process::{Child, Command};

    use super::*;
    use crate::ledger::Container;
    use crate::ledger::fixture::lease;

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
    fn leftovers_stay_written_down_until_nobody_has_the_rootfs() {
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
    fn a_process_left_in_the_cgroup_holds_the_lease() {
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

mod cgroup_tests {
    use super::*;
    use crate::ledger::fixture::lease;
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
    fn a_container_without_a_process_shows_no_life_and_an_unreadable_spec_is_an_error() {
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

    #[test]
    fn a_cgroup_whose_processes_are_of_another_pid_namespace_is_in_use() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("cgroup.threads"), "0\n").unwrap();
        assert!(live_processes(dir.path()).is_err());
        assert!(describe_use(dir.path()).starts_with("a process is in its cgroup "));
    }
}
