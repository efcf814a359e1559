//! Which processes compute on a device now, and whose they are: NVML's two lists, and /proc of each process on them.

mod lists;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd as _, OwnedFd};
use std::rc::Rc;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use crate::probe;
use lists::Lists;

use sublet_core::inventory::{GpuProcess, Inventory};
use sublet_core::ledger::{Init, Lease, LeaseId, Ledger};
use sublet_core::place::client_limit;
use sublet_core::process::{Process, pidfd_open};

/// A process with a context on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pub process: Process,
    /// The process's command name.
    pub name: String,
    /// Its memory on the device; `None` if the driver does not report it.
    pub memory_bytes: Option<u64>,
    /// Whether it is an MPS server, which belongs to no container.
    pub is_server: bool,
    /// Whether it computes through an MPS server.
    pub is_client: bool,
    /// The lease it belongs to; `None` if that is no lease, or several whose containers share a PID namespace.
    pub lease: Option<LeaseId>,
}

/// All processes on one device, at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Look {
    pub device: String,
    /// The number of MPS clients that the device takes, if known.
    pub most_clients: Option<u32>,
    /// Whether the driver tells MPS clients from other processes.
    pub knows_clients: bool,
    /// Leases whose containers have ended.
    pub gone: BTreeSet<LeaseId>,
    pub holders: Vec<Holder>,
}

/// This many processes are held by a pidfd. For further ones /proc is read each time.
const HELD: usize = 1000;

/// Reads the processes on devices again and again. /proc is read once per process, and its lease is determined
/// once per ledger. Code that acts on a process determines the lease again.
#[derive(Default)]
pub(crate) struct Looker {
    known: BTreeMap<i32, Known>,
    lists: Lists,
    ledger: Option<Rc<Ledger>>,
}

/// A process that an earlier check found.
struct Known {
    process: Process,
    told: GpuProcess,
    lease: Option<LeaseId>,
    /// One poll(2) over all of these tells which processes have ended.
    pidfd: Option<OwnedFd>,
}

impl Looker {
    /// Checks `devices`; the second value says why some could not be checked, by UUID. Growth of less than `tolerance`
    /// bytes may be noticed later ([`Lists`]).
    pub fn look(
        &mut self,
        nvml: &Nvml,
        devices: &BTreeSet<&str>,
        ledger: &Rc<Ledger>,
        inventory: &Inventory,
        tolerance: u64,
    ) -> (Vec<Look>, BTreeMap<String, NvmlError>) {
        if !self.ledger.as_ref().is_some_and(|before| Rc::ptr_eq(before, ledger)) {
            for known in self.known.values_mut() {
                known.lease =
                    ledger.certain_lease_of(known.process, &known.told).map(|lease| lease.id.clone());
            }
            self.ledger = Some(Rc::clone(ledger));
        }
        self.forget_ended();
        self.lists.tolerance = tolerance;
        let (mut looks, mut failures) = (Vec::new(), BTreeMap::new());
        let mut seen = BTreeMap::new();
        for &device in devices {
            match self.of_device(nvml, device, ledger, &mut seen) {
                Ok(mut look) => {
                    let known = inventory.device(device);
                    look.most_clients = known.map(|known| client_limit(known, &inventory.driver));
                    looks.push(look);
                }
                // The MIG device was destroyed under its lease, so no process computes on it.
                Err(NvmlError::NotFound) if device.starts_with("MIG-") => {}
                Err(error) => drop(failures.insert(device.to_owned(), error)),
            }
        }
        self.known = seen;
        (looks, failures)
    }

    /// The next check reads the lists of `device` from NVML again, however new they are.
    pub fn forget_lists(&mut self, device: &str) {
        self.lists.told.remove(device);
    }

    /// Drops processes that have ended: their pids may be reused.
    fn forget_ended(&mut self) {
        // A pidfd is readable once its process has ended (`pidfd_open(2)`).
        let held = self.known.values().filter_map(|known| known.pidfd.as_ref());
        let mut fds: Vec<_> = held.map(|pidfd| PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)).collect();
        if poll(&mut fds, PollTimeout::ZERO).is_err() {
            // It is unknown which have ended, so all of them are looked up again.
            return self.known.clear();
        }
        let ended: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(true)).collect();
        let (mut ended, mut gone) = (ended.into_iter(), BTreeSet::new());
        self.known.retain(|pid, known| {
            let lives = match &known.pidfd {
                Some(_) => !ended.next().unwrap_or(true),
                None => known.process.is_alive(),
            };
            gone.extend((!lives).then_some(pid.unsigned_abs()));
            lives
        });
        if !gone.is_empty() {
            self.lists.drop_ended(&gone);
        }
    }

    fn of_device(
        &mut self,
        nvml: &Nvml,
        device: &str,
        ledger: &Ledger,
        seen: &mut BTreeMap<i32, Known>,
    ) -> Result<Look, NvmlError> {
        let told = self.lists.of(device, &probe::device_by_uuid(nvml, device)?)?;
        let knows_clients = told.clients.is_some();
        let clients = told.clients.as_deref().unwrap_or_default();
        let client_pids: BTreeSet<u32> = clients.iter().map(|client| client.pid).collect();
        let mut gone_since = BTreeSet::new();
        let mut holder = |(number, memory_bytes): (u32, Option<u64>)| {
            let is_client = client_pids.contains(&number);
            let pid = i32::try_from(number).ok()?;
            let before = seen.remove(&pid).or_else(|| self.known.remove(&pid));
            let Some(known) = before.or_else(|| Known::of(pid, seen.len() < HELD, ledger)) else {
                gone_since.insert(number);
                return None;
            };
            let (process, name, lease) = (known.process, known.told.name.clone(), known.lease.clone());
            // A container may give its program any name.
            let is_server = known.told.mps_server && lease.is_none();
            seen.insert(pid, known);
            Some(Holder { process, name, memory_bytes, is_server, is_client, lease })
        };
        let holders: Vec<Holder> =
            probe::joined(told.running.iter().chain(clients)).into_iter().filter_map(&mut holder).collect();
        self.lists.drop_ended(&gone_since);
        let gone = gone(&holders, device, ledger);
        Ok(Look { device: device.to_owned(), most_clients: None, knows_clients, gone, holders })
    }
}

impl Known {
    /// `None` if the process has ended.
    fn of(pid: i32, hold: bool, ledger: &Ledger) -> Option<Self> {
        // The pidfd is opened before /proc is read: if the pid is reused in between, the pidfd shows that the process
        // ended.
        let pidfd = if hold { pidfd_open(pid).ok() } else { None };
        let process = Process::find(pid)?;
        let told = probe::describe(pid, 0)?;
        let lease = ledger.certain_lease_of(process, &told).map(|lease| lease.id.clone());
        Some(Self { process, told, lease, pidfd })
    }
}

/// Leases on `device` that have processes there and whose containers have ended, judged by their first process. The
/// mark `ending` does not decide: a marked container may live on because its delete failed, and one without the mark
/// may have ended just now.
fn gone(holders: &[Holder], device: &str, ledger: &Ledger) -> BTreeSet<LeaseId> {
    let computes = |lease: &&Lease| {
        let here = lease.devices.iter().any(|own| own == device);
        here && holders.iter().any(|holder| holder.lease.as_ref() == Some(&lease.id))
    };
    let has_ended = |lease: &&Lease| {
        let ended = |init: &Init| {
            !holders.iter().any(|holder| holder.process == init.process) && !init.process.is_alive()
        };
        lease.init.as_ref().is_some_and(ended)
    };
    // What is in a job's cgroup belongs to a job that lives: its first process was its first task's.
    let contained = ledger.leases.iter().filter(|lease| !lease.is_of_job());
    contained.filter(computes).filter(has_ended).map(|lease| lease.id.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sublet_core::ledger::LeaseState;
    use sublet_core::ledger::fixture::lease;

    fn told(pid: i32, pid_namespace: u64, cgroup: &str) -> GpuProcess {
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
        let id = |of: Process, told: &GpuProcess, leases: &[Lease]| {
            ledger(leases.to_vec()).certain_lease_of(of, told).map(|lease| lease.id.to_string())
        };
        let with_cgroup = held(1, alive, 77, Some("/sys/fs/cgroup/c1"));
        let ours = Some(with_cgroup.id.to_string());
        assert_eq!(id(other, &told(5, 99, "/c1"), std::slice::from_ref(&with_cgroup)), ours, "its cgroup");
        assert_eq!(id(other, &told(5, 99, "/c1/below"), std::slice::from_ref(&with_cgroup)), ours);
        assert_eq!(id(alive, &told(alive.pid, 77, "/x"), std::slice::from_ref(&with_cgroup)), ours, "init");
        // Outsiders: a process that has joined the PID namespace, and one with the reused pid of an init that has
        // ended.
        assert_eq!(id(other, &told(5, 77, "/other"), std::slice::from_ref(&with_cgroup)), None);
        assert_eq!(id(alive, &told(alive.pid, 5, "/x"), &[held(1, dead, 77, None)]), None);
        // Without a cgroup the PID namespace decides, while the first process lives and only one lease has that
        // namespace.
        let without = held(2, alive, 77, None);
        assert_eq!(
            id(other, &told(5, 77, "/"), std::slice::from_ref(&without)),
            Some(without.id.to_string())
        );
        assert_eq!(id(other, &told(5, 77, "/"), &[held(2, dead, 77, None)]), None, "its number is free");
        assert_eq!(id(other, &told(5, 77, "/"), &[without.clone(), held(3, alive, 77, None)]), None);
        assert_eq!(id(other, &told(5, 0, "/"), &[held(2, alive, 0, None)]), None, "the host's");
    }

    #[test]
    fn what_has_ended_is_forgotten_before_its_number_means_another() {
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
                let told = GpuProcess { cgroups: probe::cgroups(text), ..told(5, 77, "") };
                ledger.certain_lease_of(other, &told).is_some()
            };
            assert_eq!((of(inside), of(outside), of("")), (true, false, false), "{layout}");
        }
    }
}
