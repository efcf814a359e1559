//! Who computes on a device now: NVML's two lists, and /proc of each process that is on them.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use super::judge::{Holder, Look};
use crate::inventory::{self, GpuProcess, Inventory, listed, listed_if_known};
use crate::ledger::{Lease, LeaseId, LeaseState, Ledger};
use crate::place::client_limit;
use crate::process::Process;
use crate::text::safe;

/// Looks again and again. What /proc says of a process is read once, and whose it is, asked once for each ledger:
/// whoever acts upon it asks again.
#[derive(Default)]
pub(super) struct Looker {
    known: BTreeMap<Process, Known>,
    ledger: Option<Rc<Ledger>>,
}

/// A process that was seen.
struct Known {
    told: GpuProcess,
    lease: Option<LeaseId>,
}

impl Looker {
    /// Every leased device, and why some could not be looked at.
    pub fn look(
        &mut self,
        nvml: &Nvml,
        ledger: &Rc<Ledger>,
        inventory: &Inventory,
    ) -> (Vec<Look>, BTreeSet<String>) {
        if !self.ledger.as_ref().is_some_and(|before| Rc::ptr_eq(before, ledger)) {
            for (process, known) in &mut self.known {
                known.lease = lease_of(*process, &known.told, ledger).map(|lease| lease.id.clone());
            }
            self.ledger = Some(Rc::clone(ledger));
        }
        let devices: BTreeSet<&String> = ledger.leases.iter().flat_map(|lease| &lease.devices).collect();
        let (mut looks, mut failures) = (Vec::new(), BTreeSet::new());
        let mut seen = BTreeMap::new();
        for device in devices {
            match self.of_device(nvml, device, ledger, &mut seen) {
                Ok(mut look) => {
                    let known = inventory.device(device);
                    look.most_clients = known.map(|known| client_limit(known, &inventory.driver));
                    looks.push(look);
                }
                // A MIG device that was destroyed under its lease: nobody computes there.
                Err(NvmlError::NotFound) => {}
                Err(error) => drop(failures.insert(format!("{}: {error}", safe(device)))),
            }
        }
        self.known = seen;
        (looks, failures)
    }

    fn of_device(
        &mut self,
        nvml: &Nvml,
        device: &str,
        ledger: &Ledger,
        seen: &mut BTreeMap<Process, Known>,
    ) -> Result<Look, NvmlError> {
        let handle = nvml.device_by_uuid(device)?;
        // Clients last: one that has connected meanwhile is on their list, and is not taken for one beside MPS.
        let running = listed(|| handle.running_compute_processes())?;
        let clients = listed_if_known(|| handle.mps_running_compute_processes())?;
        let knows_clients = clients.is_some();
        let clients = clients.unwrap_or_default();
        let client_pids: BTreeSet<u32> = clients.iter().map(|client| client.pid).collect();
        let mut holder = |(pid, memory_bytes): (u32, u64)| {
            let process = Process::find(i32::try_from(pid).ok()?)?;
            let known = match seen.remove(&process).or_else(|| self.known.remove(&process)) {
                Some(known) => known,
                None => Known::of(process, ledger)?,
            };
            let (name, lease) = (known.told.name.clone(), known.lease.clone());
            // A container may call its program what it likes.
            let is_server = known.told.mps_server && lease.is_none();
            let is_client = client_pids.contains(&pid);
            seen.insert(process, known);
            Some(Holder { process, name, memory_bytes, is_server, is_client, lease })
        };
        let holders =
            inventory::joined(running.iter().chain(&clients)).into_iter().filter_map(&mut holder).collect();
        let here = ledger.leases.iter().filter(|lease| lease.devices.iter().any(|own| own == device));
        let gone = here.filter(|lease| has_gone(lease)).map(|lease| lease.id.clone()).collect();
        Ok(Look { device: device.to_owned(), most_clients: None, knows_clients, gone, holders })
    }
}

impl Known {
    /// `None`: it has gone meanwhile.
    fn of(process: Process, ledger: &Ledger) -> Option<Self> {
        let told = inventory::describe(process.pid, 0)?;
        let lease = lease_of(process, &told, ledger).map(|lease| lease.id.clone());
        Some(Self { told, lease })
    }
}

/// Whether its container has ended. One that is only marked as ending may live on: its delete may fail.
fn has_gone(lease: &Lease) -> bool {
    lease.state == LeaseState::Ending && lease.init.as_ref().is_some_and(|init| !init.process.is_alive())
}

/// The lease of a process, where that is certain: by its container's cgroup or first process. The PID namespace
/// tells only of containers that have no cgroup of their own and live: others may have joined it, and the number
/// of one that has ended is given to the next.
pub(super) fn lease_of<'l>(process: Process, told: &GpuProcess, ledger: &'l Ledger) -> Option<&'l Lease> {
    let is_init = |lease: &&Lease| lease.init.as_ref().is_some_and(|init| init.process == process);
    let in_cgroup = |lease: &&Lease| lease.has_in_cgroup(told);
    if let Some(lease) = ledger.leases.iter().find(is_init).or_else(|| ledger.leases.iter().find(in_cgroup)) {
        return Some(lease);
    }
    let in_namespace = |lease: &&Lease| {
        lease.init.as_ref().is_some_and(|init| {
            told.pid_namespace != 0 && init.pid_namespace == told.pid_namespace && init.process.is_alive()
        })
    };
    let mut found = ledger.leases.iter().filter(in_namespace);
    let lease = found.next().filter(|lease| lease.init.as_ref().is_some_and(|init| init.cgroup.is_none()))?;
    found.next().is_none().then_some(lease)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Init;
    use crate::ledger::fixture::lease;

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
        let init = Some(Init { process: init, pid_namespace, cgroup: cgroup.map(Into::into) });
        Lease { init, state: LeaseState::Active, ..lease(n, "GPU-1") }
    }

    fn ledger(leases: Vec<Lease>) -> Ledger {
        Ledger { leases, ..Ledger::empty("boot") }
    }

    #[test]
    fn a_process_is_a_leases_only_where_that_is_certain() {
        let alive = Process::current().unwrap();
        let dead = Process { start_time: alive.start_time + 1, ..alive };
        let other = Process { pid: 4_000_000, start_time: 9 };
        let id = |of: Process, told: &GpuProcess, leases: &[Lease]| {
            lease_of(of, told, &ledger(leases.to_vec())).map(|lease| lease.id.to_string())
        };
        let with_cgroup = held(1, alive, 77, Some("/sys/fs/cgroup/c1"));
        let ours = Some(with_cgroup.id.to_string());
        assert_eq!(id(other, &told(5, 99, "/c1"), std::slice::from_ref(&with_cgroup)), ours, "its cgroup");
        assert_eq!(id(other, &told(5, 99, "/c1/below"), std::slice::from_ref(&with_cgroup)), ours);
        assert_eq!(id(alive, &told(alive.pid, 77, "/x"), std::slice::from_ref(&with_cgroup)), ours, "init");
        // One that has joined the PID namespace, and one that has got the number of an init that is gone.
        assert_eq!(id(other, &told(5, 77, "/other"), std::slice::from_ref(&with_cgroup)), None);
        assert_eq!(id(alive, &told(alive.pid, 5, "/x"), &[held(1, dead, 77, None)]), None);
        // Without a cgroup the namespace tells, while its first process lives and one lease has it.
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
    fn a_container_marked_as_ending_has_not_gone_before_its_first_process() {
        let alive = Process::current().unwrap();
        let dead = Process { start_time: alive.start_time + 1, ..alive };
        let ending = |init| Lease { state: LeaseState::Ending, ..held(1, init, 77, None) };
        assert!(has_gone(&ending(dead)) && !has_gone(&ending(alive)) && !has_gone(&held(1, dead, 77, None)));
    }

    /// The cgroup directory that a runtime records, what /proc says of a process in the container, and of one that
    /// is outside of it and near.
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
            // In the container's PID namespace both: it may be shared.
            let of = |text: &str| {
                let told = GpuProcess { cgroups: inventory::cgroups(text), ..told(5, 77, "") };
                lease_of(other, &told, &ledger).is_some()
            };
            assert_eq!((of(inside), of(outside), of("")), (true, false, false), "{layout}");
        }
    }
}
