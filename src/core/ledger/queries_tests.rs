//! Tests of queries and changes, and of the leftovers of ended containers.

use super::*;

mod lookup_tests {
    use super::fixture::lease;
    use super::*;
    use crate::inventory::GpuProcess;
    use crate::ledger::Init;
    use crate::process::Process;

    fn ledger(leases: Vec<Lease>) -> Ledger {
        Ledger { leases, ..Ledger::empty("boot") }
    }

    #[test]
    fn containers_without_an_id_yet_are_not_each_other() {
        let mut ledger = Ledger::empty("boot");
        for n in 1..=2 {
            let mut unnamed = lease(n, "GPU-a");
            (unnamed.container.id, unnamed.container.bundle) = (String::new(), "".into());
            ledger.insert(unnamed).unwrap();
        }
        assert_eq!(ledger.leases.len(), 2);
    }

    #[test]
    fn a_live_lease_is_never_replaced_and_freeing_twice_is_no_error() {
        let mut ledger = ledger(vec![lease(1, "GPU-a")]);
        let again = Lease { id: lease(2, "GPU-a").id, ..lease(1, "GPU-a") };
        let doubled = ledger.insert(again.clone()).unwrap_err();
        assert_eq!(doubled.lease.as_str(), "0000000000000001");
        assert!(ledger.insert(lease(1, "GPU-b")).is_err(), "the same lease id twice");
        let other_bundle =
            Lease { container: Container { bundle: "/b".into(), ..again.container.clone() }, ..again };
        ledger.insert(other_bundle).unwrap();
        let id = LeaseId::parse("0000000000000001").unwrap();
        assert_eq!(ledger.remove(&id).map(|lease| lease.id), Some(id.clone()));
        assert_eq!(ledger.remove(&id), None);
        assert_eq!(ledger.leases.len(), 1);
    }

    #[test]
    fn a_container_is_named_by_user_id_and_record() {
        let ledger = ledger(vec![lease(1, "GPU-a"), lease(2, "GPU-b")]);
        let record = Path::new("/nonexistent/runc/container-1");
        assert!(ledger.find_by_record(0, "container-1", record).is_some());
        assert!(ledger.find_by_record(0, "container-1", Path::new("/run/crun/container-1")).is_none());
        assert!(ledger.find_by_record(1000, "container-1", record).is_none());
        assert_eq!(ledger.on_device("GPU-b").count(), 1);
    }

    #[test]
    fn the_ceiling_is_the_largest_lease_and_none_where_one_has_none() {
        let key = DaemonKey("GPU-a".into());
        let with = |n, sm: Option<u32>| Lease {
            daemon: Some(key.clone()),
            sm: sm.map(Percent::from_thousandths),
            ..lease(n, "GPU-a")
        };
        let mut ledger = ledger(vec![]);
        assert_eq!(ledger.wanted_default_limits(&key), None);
        let wanted = |ledger: &Ledger| {
            let default_limits = ledger.wanted_default_limits(&key).unwrap();
            (default_limits.sm.thousandths(), default_limits.memory)
        };
        let memory = |n, bytes| Lease { memory_bytes: Some(bytes), processes: 2, ..with(n, Some(25_000)) };
        ledger.leases = vec![memory(1, 4 << 30), Lease { processes: 1, ..memory(2, 3 << 30) }];
        assert_eq!(
            wanted(&ledger),
            (25_000, DefaultMemoryLimit::Mebibytes(3072)),
            "each process has 2 GiB of the 4"
        );
        ledger.leases.push(with(3, Some(60_000)));
        assert_eq!(wanted(&ledger), (60_000, DefaultMemoryLimit::Unlimited));
        ledger.leases.push(Lease { sm: None, ..memory(4, 8 << 30) });
        ledger.leases.remove(2);
        assert_eq!(wanted(&ledger), (100_000, DefaultMemoryLimit::Mebibytes(4096)));
    }

    #[test]
    fn a_server_of_its_own_has_the_part_of_one_process_as_ceiling() {
        let key = |text: &str| Some(DaemonKey(text.into()));
        let (sm, processes) = (Some(Percent::from_thousandths(25_000)), 2);
        let memory_bytes = Some(8 << 30);
        let own = Lease { daemon: key("0000000000000001"), sm, memory_bytes, processes, ..lease(1, "GPU-a") };
        let memory = DefaultMemoryLimit::Mebibytes(4096);
        assert_eq!(own.default_limits(), DefaultLimits { sm: Percent::from_thousandths(12_500), memory });
        let shared = Lease { daemon: key("GPU-a"), ..own.clone() };
        assert_eq!(shared.default_limits(), DefaultLimits { sm: Percent::from_thousandths(25_000), memory });
        assert_eq!(Lease { sm: None, memory_bytes: None, ..own }.default_limits(), DefaultLimits::NONE);
    }

    fn process(pid: i32, pid_namespace: u64, cgroup: &str) -> GpuProcess {
        GpuProcess {
            pid,
            name: "python".into(),
            memory_bytes: 1,
            pid_namespace,
            cgroups: vec![cgroup.into()],
            mps_server: false,
        }
    }

    #[test]
    fn a_server_is_idle_from_its_last_lease_to_its_next() {
        let served = |n| Lease { daemon: Some(DaemonKey("GPU-a".into())), ..lease(n, "GPU-a") };
        let mut ledger = ledger(vec![served(1)]);
        ledger.daemons.push(MpsDaemon {
            key: DaemonKey("GPU-a".into()),
            devices: vec!["GPU-a".into()],
            process: None,
            state: DaemonState::Serving,
            default_limits: crate::ledger::DefaultLimits::NONE,
            answered_at: 0,
            idle_since: None,
            mode_left: false,
        });
        let mut seen = Vec::new();
        let mut at = |ledger: &mut Ledger, now| {
            ledger.note_idle(|| now);
            seen.push((ledger.daemons[0].idle_since, ledger.daemons[0].mode_left));
        };
        at(&mut ledger, 1);
        let lease = ledger.leases.pop();
        at(&mut ledger, 2);
        at(&mut ledger, 3);
        ledger.leases.extend(lease);
        at(&mut ledger, 4);
        assert_eq!(seen, [(None, false), (Some(2), true), (Some(2), true), (None, true)]);
        let other = Lease { daemon: None, ..served(2) };
        assert_eq!(ledger.conflicting_daemons(&other).count(), 0, "it serves");
        ledger.leases.clear();
        assert_eq!(ledger.conflicting_daemons(&other).count(), 1);
        assert_eq!(ledger.conflicting_daemons(&served(3)).count(), 0, "its own");
        assert_eq!(ledger.conflicting_daemons(&Lease { devices: vec!["GPU-b".into()], ..other }).count(), 0);
    }

    #[test]
    fn processes_are_joined_by_pid_then_cgroup_then_pid_namespace() {
        let with = |n, pid, pid_namespace, cgroup: &str| Lease {
            init: Some(Init {
                process: Process { pid, start_time: 9 },
                pid_namespace,
                cgroup: Some(cgroup.into()),
                cgroup_inode: None,
            }),
            ..lease(n, "GPU-a")
        };
        let ledger = ledger(vec![
            with(1, 100, 7, "/sys/fs/cgroup/docker/one"),
            with(2, 200, 7, "/sys/fs/cgroup/devices/docker/two"),
            with(3, 300, 0, "/sys/fs/cgroup/devices"),
        ]);
        let found = |process| ledger.lease_of_process(&process).map(|lease| lease.id.as_str().to_owned());
        assert_eq!(found(process(200, 7, "/docker/one")).unwrap(), "0000000000000002");
        assert_eq!(found(process(5, 7, "/docker/two/sub")).unwrap(), "0000000000000002");
        assert_eq!(found(process(5, 7, "/elsewhere")).unwrap(), "0000000000000001");
        assert_eq!(found(process(5, 8, "/docker/one-more")), None);
        assert_eq!(found(process(5, 0, "/")), None);
    }
}

mod leftovers_tests {
    use std::path::Path;

    use super::*;
    use crate::ledger::fixture::lease;

    fn ledger(leases: Vec<Lease>) -> Ledger {
        Ledger { leases, ..Ledger::empty("boot") }
    }

    #[test]
    fn a_container_that_starts_again_and_again_leaves_its_things_once() {
        let mut ledger = ledger(Vec::new());
        for file in ["/lib/a", "/lib/b", "/lib/a"] {
            let lease = Lease { mount_points: vec![file.into()].into(), ..lease(1, "GPU-a") };
            let id = lease.id.clone();
            ledger.insert(lease).unwrap();
            ledger.remove(&id);
        }
        assert_eq!(ledger.leftovers.len(), 1);
        assert_eq!(ledger.leftovers[0].mount_points, [Path::new("/lib/a"), Path::new("/lib/b")]);
    }

    /// Containers that share a volume: its files are removed after the last of them, those in the root filesystem at
    /// once.
    #[test]
    fn leftovers_in_a_volume_wait_for_every_container_with_the_volume() {
        let volume = |device, file: &str| VolumeFiles {
            directory: "/srv/v".into(),
            device,
            inode: 7,
            files: vec![file.into()],
        };
        let with =
            |n, volumes| Lease { volumes, mount_points: vec!["/lib/a".into()].into(), ..lease(n, "GPU-a") };
        let first = with(1, vec![volume(1, "x"), volume(2, "y")]);
        let other =
            with(2, vec![VolumeFiles { directory: "/alias".into(), files: Vec::new(), ..volume(2, "") }]);
        let mut ledger = ledger(vec![first.clone(), other.clone()]);
        ledger.remove(&first.id);
        let clearable = ledger.clearable();
        assert_eq!((clearable.len(), &clearable[0].volumes[..]), (1, &[volume(1, "x")][..]));
        assert_eq!(clearable[0].mount_points, [Path::new("/lib/a")]);
        ledger.forget(&clearable);
        assert!(ledger.clearable().is_empty(), "nothing to do until the other has ended");
        ledger.remove(&other.id);
        let clearable = ledger.clearable();
        assert!(clearable.iter().any(|left| left.volumes == [volume(2, "y")]), "{clearable:?}");
        ledger.forget(&clearable);
        assert_eq!(ledger.leftovers, []);
    }

    #[test]
    fn a_users_lease_does_not_keep_roots_leftovers() {
        let volumes =
            vec![VolumeFiles { directory: "/srv/v".into(), device: 1, inode: 7, files: vec!["x".into()] }];
        let roots = Lease { volumes, mount_points: vec!["/lib/a".into()].into(), ..lease(1, "GPU-a") };
        let mut users = Lease { id: lease(2, "GPU-a").id, brokered: true, ..roots.clone() };
        users.container.uid = 1001;
        let mut ledger = ledger(vec![roots.clone(), users.clone()]);
        assert!(!ledger.has_files_to_clear(&roots));
        ledger.remove(&roots.id);
        assert_eq!(ledger.clearable(), ledger.leftovers);
        assert!(users.is_believed_by(1001) && !users.is_believed_by(1002) && roots.is_believed_by(1002));
    }

    #[test]
    fn an_empty_file_of_the_images_is_nobodys_mount_point() {
        let made = |n, file: &str| Lease { mount_points: vec![file.into()].into(), ..lease(n, "GPU-a") };
        let (mut ledger, id) = (ledger(vec![made(1, "/lib/a"), made(2, "/lib/b")]), lease(2, "GPU-a").id);
        ledger.remove(&id);
        let found = ["/lib/a", "/lib/b", "/lib/own"].map(PathBuf::from);
        let rootfs = lease(1, "GPU-a").container.rootfs;
        let left = lease(2, "GPU-a").container.rootfs;
        assert_eq!(ledger.filter_mount_points(&rootfs, &found)[0], &found[0]);
        assert_eq!(ledger.filter_mount_points(&left, &found).last(), Some(&&found[1]));
        assert!(ledger.filter_mount_points(Path::new("/elsewhere"), &found).is_empty());
    }
}

mod clearing_tests {
    use super::*;
    use crate::ledger::Leftover;
    use crate::ledger::fixture::lease;

    #[test]
    fn leftovers_in_the_same_root_filesystem_or_volume_are_to_be_cleared() {
        let mine = lease(1, "GPU-a");
        let left = Leftover {
            bundle: "/other".into(),
            rootfs: "/elsewhere".into(),
            mount_points: vec!["/lib/a".into()],
            volumes: Vec::new(),
        };
        let with = |left: Leftover| Ledger { leftovers: vec![left], ..Ledger::empty("boot") };
        assert!(!with(left.clone()).has_files_to_clear(&mine));
        let beside = |other: Lease| Ledger { leases: vec![mine.clone(), other], ..Ledger::empty("boot") };
        let mut other = lease(2, "GPU-b");
        other.container.rootfs = "/elsewhere".into();
        assert!(!beside(other.clone()).has_files_to_clear(&mine));
        other.container.rootfs.clone_from(&mine.container.rootfs);
        assert!(beside(other).has_files_to_clear(&mine), "it may end now");
        assert!(
            with(Leftover { rootfs: mine.container.rootfs.clone(), ..left.clone() })
                .has_files_to_clear(&mine)
        );
        let volume = |directory: &str| VolumeFiles {
            directory: directory.into(),
            device: 7,
            inode: 1,
            files: vec!["a".into()],
        };
        let shares = Lease { volumes: vec![volume("/srv")], ..mine };
        assert!(with(Leftover { volumes: vec![volume("/alias")], ..left }).has_files_to_clear(&shares));
    }

    #[test]
    fn one_process_clears_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let held = store.clearing().unwrap();
        assert!(store.clearing().is_err());
        drop(held);
        assert!(store.clearing().is_ok());
    }
}
