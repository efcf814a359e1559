//! What one container uses of one device.

use schemars::JsonSchema;
use serde::Serialize;

use super::{DeviceUse, ProcessUse, Usage};
use sublet_core::ledger::{DaemonKey, Lease, Ledger};
use sublet_core::share::Mode;

/// What a container uses of a device. Null where the driver does not report it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct LeaseUsed {
    /// Memory of its processes, in bytes.
    pub memory_bytes: Option<u64>,
    /// Its processes with contexts.
    pub processes: Option<usize>,
    /// What it computes, in percent of the device's SMs.
    pub sm_percent: Option<u32>,
    /// What all containers of the MPS server that it shares compute: the driver does not tell them apart.
    pub server_sm_percent: Option<u32>,
}

impl Usage {
    /// What `lease` uses of `device`, a UUID.
    pub fn of_lease(&self, lease: &Lease, device: &str, ledger: &Ledger) -> LeaseUsed {
        let Some(used) = self.devices.get(device).filter(|_| !self.failures.contains_key(device)) else {
            return LeaseUsed::default();
        };
        let own: Vec<&ProcessUse> = used.of_lease(lease).collect();
        let (sm_percent, server_sm_percent) = load(lease, &own, used, ledger);
        LeaseUsed {
            memory_bytes: own.iter().map(|process| process.holder.memory_bytes).sum(),
            processes: Some(own.len()),
            sm_percent,
            server_sm_percent,
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

/// What the container computes itself, or what the MPS server does that it shares: the driver does not tell the clients
/// of a server apart (H200, driver 580; docs/evidence/2026-11-26-h200-real.md). Neither: it is not reported, as on MIG
/// devices.
fn load(lease: &Lease, own: &[&ProcessUse], used: &DeviceUse, ledger: &Ledger) -> (Option<u32>, Option<u32>) {
    if lease.mode == Mode::Mig || own.iter().any(|process| process.holder.is_client) && lease.daemon.is_none()
    {
        return (None, None);
    }
    match &lease.daemon {
        _ if own.is_empty() => (Some(0), None),
        Some(key) if key.0 == lease.id.as_str() => (server(used, key, ledger), None),
        Some(key) => (None, server(used, key, ledger)),
        // The driver may not report a process, so a missing sample does not mean 0.
        None => (own.iter().map(|process| process.sm_percent).sum(), None),
    }
}

/// What the server of daemon `key` computes: it is the daemon's child.
fn server(used: &DeviceUse, key: &DaemonKey, ledger: &Ledger) -> Option<u32> {
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

    /// By itself.
    fn computing(sm_percent: Option<u32>) -> LeaseUsed {
        LeaseUsed { sm_percent, ..LeaseUsed::default() }
    }

    fn of(lease: &Lease, processes: Vec<ProcessUse>) -> LeaseUsed {
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
        let expected = LeaseUsed { memory_bytes: Some(120), processes: Some(2), ..computing(Some(45)) };
        assert_eq!(used, expected);
        assert_eq!(usage(all).devices[GPU].of_nobody().count(), 1);
    }

    #[test]
    fn what_the_driver_does_not_report_is_unknown_and_not_0() {
        let ours = lease(1, GPU);
        let used =
            of(&ours, vec![process(Some(&ours.id), None, None), process(Some(&ours.id), Some(1), Some(1))]);
        assert_eq!(used, LeaseUsed { processes: Some(2), ..computing(None) });
        let mig = Lease { mode: Mode::Mig, ..lease(1, GPU) };
        let of_mig = of(&mig, vec![process(Some(&mig.id), Some(1), Some(1))]);
        assert_eq!((of_mig.sm_percent, of_mig.server_sm_percent), (None, None));
        let unread = Usage { failures: [(GPU.to_owned(), "lost".to_owned())].into(), ..usage(Vec::new()) };
        assert_eq!(unread.of_lease(&ours, GPU, &Ledger::empty("boot")).processes, None);
    }

    #[test]
    fn a_container_without_processes_uses_nothing() {
        let idle = LeaseUsed { memory_bytes: Some(0), processes: Some(0), ..computing(Some(0)) };
        assert_eq!(of(&lease(1, GPU), Vec::new()), idle);
    }
}
