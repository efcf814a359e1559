//! What one container uses of one device.

use super::{DeviceUse, ProcessUse, Usage};
use sublet_core::ledger::{Lease, Ledger};
use sublet_core::share::Mode;

/// What one container uses of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeaseUse {
    /// Memory of its processes, in bytes; `None` if the driver does not report that of each.
    pub memory_bytes: Option<u64>,
    /// Its processes with contexts; `None` if the driver does not list them.
    pub processes: Option<usize>,
    /// What it computes.
    pub load: Load,
}

/// What a container computes, in percent of the device's SMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Load {
    /// Its own.
    Own(u32),
    /// Of the MPS server that it shares: the driver does not tell the clients of a server apart (H200, driver 580;
    /// docs/evidence/2026-11-26-h200-real.md).
    Server(u32),
    /// The driver does not report it, as on MIG devices.
    Unknown,
}

impl Load {
    /// Its own percentage.
    pub fn own(self) -> Option<u32> {
        if let Self::Own(percent) = self { Some(percent) } else { None }
    }
}

impl Usage {
    /// What `lease` uses of `device`, a UUID.
    pub fn of_lease(&self, lease: &Lease, device: &str, ledger: &Ledger) -> LeaseUse {
        let unknown = LeaseUse { memory_bytes: None, processes: None, load: Load::Unknown };
        let Some(used) = self.devices.get(device).filter(|_| !self.failures.contains_key(device)) else {
            return unknown;
        };
        let own: Vec<&ProcessUse> = used.of_lease(lease).collect();
        LeaseUse {
            memory_bytes: own.iter().map(|process| process.holder.memory_bytes).sum(),
            processes: Some(own.len()),
            load: load(lease, &own, used, ledger),
        }
    }
}

impl DeviceUse {
    /// The processes of the container.
    pub fn of_lease(&self, lease: &Lease) -> impl Iterator<Item = &ProcessUse> {
        let is_its = |process: &&ProcessUse| process.holder.lease.as_ref() == Some(&lease.id);
        self.processes.iter().filter(move |process| is_its(process) && !process.holder.is_server)
    }

    /// The processes that belong to no lease and are no MPS server.
    pub fn of_nobody(&self) -> impl Iterator<Item = &ProcessUse> {
        self.processes.iter().filter(|process| process.holder.lease.is_none() && !process.holder.is_server)
    }
}

fn load(lease: &Lease, own: &[&ProcessUse], used: &DeviceUse, ledger: &Ledger) -> Load {
    if lease.mode == Mode::Mig || own.iter().any(|process| process.holder.is_client) && lease.daemon.is_none()
    {
        return Load::Unknown;
    }
    if own.is_empty() {
        return Load::Own(0);
    }
    match &lease.daemon {
        Some(key) => {
            let Some(percent) = server(used, key, ledger) else { return Load::Unknown };
            if key.0 == lease.id.as_str() { Load::Own(percent) } else { Load::Server(percent) }
        }
        // The driver may not report a process, so a missing sample does not mean 0.
        None => {
            own.iter().map(|process| process.sm_percent).sum::<Option<u32>>().map_or(Load::Unknown, Load::Own)
        }
    }
}

/// What the server of daemon `key` computes: it is the daemon's child.
fn server(used: &DeviceUse, key: &sublet_core::ledger::DaemonKey, ledger: &Ledger) -> Option<u32> {
    let daemon = ledger.daemons.iter().find(|daemon| daemon.key == *key)?.process?;
    let servers = used.processes.iter().filter(|process| process.holder.is_server);
    let mut its = servers.filter(|process| process.holder.process.parent() == Some(daemon.pid));
    its.next()?.sm_percent
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu_processes::Holder;
    use sublet_core::ledger::LeaseId;
    use sublet_core::ledger::fixture::lease;
    use sublet_core::process::Process;

    const GPU: &str = "GPU-1";

    fn process(lease: Option<&LeaseId>, memory_bytes: Option<u64>, sm_percent: Option<u32>) -> ProcessUse {
        let holder = Holder {
            process: Process { pid: 4_000_000, start_time: 1 },
            name: "python3".to_owned(),
            memory_bytes,
            is_server: false,
            is_client: false,
            lease: lease.cloned(),
        };
        ProcessUse { holder, sm_percent }
    }

    fn usage(processes: Vec<ProcessUse>) -> Usage {
        let used = DeviceUse { processes, ..DeviceUse::default() };
        Usage { devices: [(GPU.to_owned(), used)].into(), ..Usage::default() }
    }

    fn of(lease: &Lease, processes: Vec<ProcessUse>) -> LeaseUse {
        usage(processes).of_lease(lease, GPU, &Ledger::empty("boot"))
    }

    #[test]
    fn the_processes_of_a_container_count_and_no_others() {
        let (ours, other) = (lease(1, GPU), lease(2, GPU));
        let all = vec![
            process(Some(&ours.id), Some(100), Some(40)),
            process(Some(&ours.id), Some(20), Some(5)),
            process(Some(&other.id), Some(7), Some(7)),
            process(None, Some(9), Some(9)),
        ];
        let used = of(&ours, all.clone());
        assert_eq!(used, LeaseUse { memory_bytes: Some(120), processes: Some(2), load: Load::Own(45) });
        assert_eq!(usage(all).devices[GPU].of_nobody().count(), 1);
    }

    #[test]
    fn what_the_driver_does_not_report_is_unknown_and_not_0() {
        let ours = lease(1, GPU);
        let used =
            of(&ours, vec![process(Some(&ours.id), None, None), process(Some(&ours.id), Some(1), Some(1))]);
        assert_eq!(used, LeaseUse { memory_bytes: None, processes: Some(2), load: Load::Unknown });
        let mig = Lease { mode: Mode::Mig, ..lease(1, GPU) };
        assert_eq!(of(&mig, vec![process(Some(&mig.id), Some(1), Some(1))]).load, Load::Unknown);
        let unread = Usage { failures: [(GPU.to_owned(), "lost".to_owned())].into(), ..usage(Vec::new()) };
        assert_eq!(unread.of_lease(&ours, GPU, &Ledger::empty("boot")).processes, None);
    }

    #[test]
    fn a_container_without_processes_uses_nothing() {
        let idle = LeaseUse { memory_bytes: Some(0), processes: Some(0), load: Load::Own(0) };
        assert_eq!(of(&lease(1, GPU), Vec::new()), idle);
    }
}
