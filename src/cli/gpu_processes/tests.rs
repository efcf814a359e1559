//! Whose processes are, and how long lists of them count.

use nvml_wrapper::enums::device::UsedGpuMemory;

use super::*;
use sublet_core::ledger::LeaseState;
use sublet_core::ledger::fixture::lease;

fn process(pid: i32, pid_namespace: u64, cgroup: &str) -> GpuProcess {
    let name = "python3".to_owned();
    GpuProcess {
        pid,
        name,
        memory_bytes: 0,
        pid_namespace,
        cgroups: vec![cgroup.to_owned()],
        mps_server: false,
    }
}

fn held(n: u64, init: Process, pid_namespace: u64, cgroup: Option<&str>) -> Lease {
    let init =
        Some(Init { process: init, pid_namespace, cgroup: cgroup.map(Into::into), cgroup_inode: None });
    Lease { init, state: LeaseState::Active, ..lease(n, "GPU-1") }
}

fn ledger(leases: Vec<Lease>) -> Ledger {
    Ledger { leases, ..Ledger::empty("boot") }
}

#[test]
fn a_process_belongs_to_a_lease_only_if_that_is_certain() {
    let alive = Process::current().unwrap();
    let dead = Process { start_time: alive.start_time + 1, ..alive };
    let other = Process { pid: 4_000_000, start_time: 9 };
    let id = |of: Process, process: &GpuProcess, leases: &[Lease]| {
        ledger(leases.to_vec()).certain_lease_of(of, process).map(|lease| lease.id.to_string())
    };
    let with_cgroup = held(1, alive, 77, Some("/sys/fs/cgroup/c1"));
    let ours = Some(with_cgroup.id.to_string());
    assert_eq!(id(other, &process(5, 99, "/c1"), std::slice::from_ref(&with_cgroup)), ours, "its cgroup");
    assert_eq!(id(other, &process(5, 99, "/c1/below"), std::slice::from_ref(&with_cgroup)), ours);
    assert_eq!(id(alive, &process(alive.pid, 77, "/x"), std::slice::from_ref(&with_cgroup)), ours, "init");
    // Outsiders: a process that has joined the PID namespace, and one with the reused pid of an init that has
    // ended.
    assert_eq!(id(other, &process(5, 77, "/other"), std::slice::from_ref(&with_cgroup)), None);
    assert_eq!(id(alive, &process(alive.pid, 5, "/x"), &[held(1, dead, 77, None)]), None);
    // Without a cgroup the PID namespace decides, while the first process lives and only one lease has that
    // namespace.
    let without = held(2, alive, 77, None);
    assert_eq!(id(other, &process(5, 77, "/"), std::slice::from_ref(&without)), Some(without.id.to_string()));
    assert_eq!(id(other, &process(5, 77, "/"), &[held(2, dead, 77, None)]), None, "its number is free");
    assert_eq!(id(other, &process(5, 77, "/"), &[without.clone(), held(3, alive, 77, None)]), None);
    assert_eq!(id(other, &process(5, 0, "/"), &[held(2, alive, 0, None)]), None, "the host's");
}

#[test]
fn an_ended_process_is_forgotten_before_its_pid_means_another() {
    let start = || std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let (mut one, mut two) = (start(), start());
    let pid = |child: &std::process::Child| i32::try_from(child.id()).unwrap();
    let nothing = ledger(Vec::new());
    let mut looker = Looker::default();
    for (child, hold) in [(&one, true), (&two, false)] {
        looker.known.insert(pid(child), Known::of(pid(child), hold, &nothing).unwrap());
    }
    // Like a process whose pid was reused between two checks.
    let me = Process::current().unwrap();
    let mine = Known::of(me.pid, false, &nothing).unwrap();
    let before = Process { start_time: me.start_time - 1, ..me };
    looker.known.insert(me.pid, Known { process: before, ..mine });
    looker.forget_ended();
    assert_eq!(looker.known.keys().copied().collect::<BTreeSet<_>>(), [pid(&one), pid(&two)].into());
    for child in [&mut one, &mut two] {
        child.kill().and_then(|()| child.wait().map(drop)).unwrap();
    }
    looker.forget_ended();
    assert!(looker.known.is_empty());
}

#[test]
fn a_container_has_gone_with_its_first_process_and_not_before() {
    let alive = Process::current().unwrap();
    let dead = Process { start_time: alive.start_time + 1, ..alive };
    let has_gone = |state: LeaseState, init: Process, its: bool| {
        let lease = Lease { state, ..held(1, init, 77, None) };
        let holder = Holder {
            process: Process { pid: 4_000_000, start_time: 9 },
            name: String::new(),
            memory_bytes: Some(1),
            is_server: false,
            is_client: false,
            lease: its.then(|| lease.id.clone()),
        };
        !gone(&[holder], "GPU-1", &ledger(vec![lease])).is_empty()
    };
    for state in [LeaseState::Active, LeaseState::Ending] {
        assert!(has_gone(state, dead, true) && !has_gone(state, alive, true), "{state:?}");
    }
    assert!(!has_gone(LeaseState::Active, dead, false), "nobody is left");
}

/// The cgroup directory that a runtime records, and what /proc reports for a process in the container and for one
/// just outside.
const LAYOUTS: [(&str, &str, &str, &str); 9] = [
    (
        "Docker, v2, systemd",
        "/sys/fs/cgroup/system.slice/docker-ab.scope",
        "0::/system.slice/docker-ab.scope",
        "0::/system.slice/docker.service",
    ),
    (
        "Docker, v1",
        "/sys/fs/cgroup/devices/docker/ab",
        "12:pids:/docker/ab\n5:devices:/docker/ab\n1:name=systemd:/docker/ab",
        "12:pids:/docker/abc\n5:devices:/docker/abc\n1:name=systemd:/docker/abc",
    ),
    (
        "Docker, hybrid, left in its engine's cgroup in v2",
        "/sys/fs/cgroup/devices/docker/ab",
        "5:cpu,devices:/docker/ab/init\n0::/system.slice/containerd.service",
        "5:cpu,devices:/system.slice/containerd.service\n0::/system.slice/containerd.service",
    ),
    (
        "Podman, crun, v2",
        "/sys/fs/cgroup/machine.slice/libpod-ab.scope/container",
        "0::/machine.slice/libpod-ab.scope/container",
        "0::/machine.slice/libpod-conmon-ab.scope",
    ),
    (
        "Podman without root, v2",
        "/sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-ab.scope",
        "0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-ab.scope/container",
        "0::/user.slice/user-1000.slice/user@1000.service/user.slice/podman-1.scope",
    ),
    (
        "Podman without root, hybrid",
        "/sys/fs/cgroup/systemd/user.slice/user-1000.slice/user@1000.service/libpod-ab.scope",
        "9:devices:/user.slice\n1:name=systemd:/user.slice/user-1000.slice/user@1000.service/libpod-ab.scope",
        "9:devices:/user.slice\n1:name=systemd:/user.slice/user-1000.slice/session-2.scope\n0::/user.slice",
    ),
    (
        "a pod's container, containerd, v2",
        "/sys/fs/cgroup/kubepods.slice/kubepods-burstable.slice/kubepods-pod1.slice/cri-containerd-ab.scope",
        "0::/kubepods.slice/kubepods-burstable.slice/kubepods-pod1.slice/cri-containerd-ab.scope",
        "0::/kubepods.slice/kubepods-burstable.slice/kubepods-pod1.slice/cri-containerd-cd.scope",
    ),
    (
        "a pod's container, CRI-O, v2",
        "/sys/fs/cgroup/kubepods.slice/kubepods-pod1.slice/crio-ab.scope",
        "0::/kubepods.slice/kubepods-pod1.slice/crio-ab.scope",
        "0::/kubepods.slice/kubepods-pod1.slice/crio-conmon-ab.scope",
    ),
    (
        "a pod's container, v1",
        "/sys/fs/cgroup/pids/kubepods/besteffort/pod1/ab",
        "12:pids:/kubepods/besteffort/pod1/ab\n5:devices:/kubepods/besteffort/pod1/ab",
        "12:pids:/kubepods/besteffort/pod1\n5:devices:/kubepods/besteffort/pod1",
    ),
];

#[test]
fn in_every_layout_of_cgroups_a_process_is_its_containers_and_no_neighbours() {
    let (alive, other) = (Process::current().unwrap(), Process { pid: 4_000_000, start_time: 9 });
    for (layout, recorded, inside, outside) in LAYOUTS {
        let ledger = ledger(vec![held(1, alive, 77, Some(recorded))]);
        // Both are in the container's PID namespace, which may be shared.
        let of = |text: &str| {
            let process = GpuProcess { cgroups: probe::cgroups(text), ..process(5, 77, "") };
            ledger.certain_lease_of(other, &process).is_some()
        };
        assert_eq!((of(inside), of(outside), of("")), (true, false, false), "{layout}");
    }
}

fn lists_of(pids: &[u32], used: Option<u64>) -> DeviceLists {
    let process = |pid: &u32| ProcessInfo {
        pid: *pid,
        used_gpu_memory: UsedGpuMemory::Used(1),
        gpu_instance_id: None,
        compute_instance_id: None,
    };
    let running: Vec<_> = pids.iter().map(process).collect();
    let now = Instant::now();
    DeviceLists { clients: Some(running.clone()), running, at: now, clients_at: now, used }
}

#[test]
fn the_lists_count_until_more_than_the_tolerance_has_been_taken_and_two_seconds_at_most() {
    let now = lists_of(&[1], Some(1000));
    for (used, counts) in [(Some(1000), true), (Some(10), true), (Some(1100), true), (Some(1101), false)] {
        assert_eq!(now.counts(used, 100), counts, "{used:?}");
    }
    assert!(
        !now.counts(None, 100) && !lists_of(&[1], None).counts(Some(1000), 100),
        "the driver cannot tell"
    );
    let before = DeviceLists { at: Instant::now().checked_sub(Duration::from_secs(2)).unwrap(), ..now };
    assert!(!before.counts(Some(1000), 100));
}

#[test]
fn an_ended_process_is_on_no_list() {
    let mut lists =
        Lists { tolerance: 0, by_uuid: [("GPU-1".to_owned(), lists_of(&[1, 2, 3], None))].into() };
    lists.drop_ended(&[2, 9].into());
    let left = &lists.by_uuid["GPU-1"];
    assert_eq!(pids(&left.running), [1, 3].into());
    assert_eq!(left.clients.as_deref().map(pids), Some([1, 3].into()));
}
