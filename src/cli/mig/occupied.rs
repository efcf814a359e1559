//! Which instances stay where they are: those with a lease or a process, and those that are being
//! created or destroyed for a container.

use super::{DriverError, Gpu, Instance, Nvml, Span};
use sublet_core::inventory::Inventory;
use sublet_core::ledger::{DynamicInstance, Lease, Ledger};
use sublet_core::process::Process;
use sublet_core::text::{safe, short_id};

/// The host's GPUs, with the users of their instances.
pub fn seen(nvml: &mut Nvml, inventory: &Inventory, ledger: &Ledger) -> Result<Vec<Gpu>, DriverError> {
    let mut gpus = nvml.gpus(inventory)?;
    for gpu in &mut gpus {
        // The server of a daemon without leases does not count: it ends before a layout changes.
        gpu.running.retain(|running| !waits(running.pid, ledger));
        mark(gpu, ledger);
    }
    Ok(gpus)
}

/// Whether `pid` is the server of a daemon that serves no lease.
fn waits(pid: u32, ledger: &Ledger) -> bool {
    let parent = i32::try_from(pid).ok().and_then(Process::find).and_then(|process| process.parent());
    let unused = ledger.daemons.iter().filter(|server| ledger.on_daemon(&server.key).next().is_none());
    parent.is_some() && unused.filter_map(|server| server.process).any(|daemon| Some(daemon.pid) == parent)
}

/// Records in `gpu` which leases and processes use it and its instances.
pub fn mark(gpu: &mut Gpu, ledger: &Ledger) {
    for lease in &ledger.leases {
        for device in &lease.devices {
            if *device == gpu.uuid {
                gpu.held.push(named(lease));
            }
            let parts = gpu.instances.iter_mut().flat_map(|one| &mut one.compute);
            for part in parts.filter(|part| part.uuid == *device) {
                part.held = Some(named(lease));
            }
        }
    }
    for made in ledger.mig.dynamic_instances.iter().filter(|made| made.gpu == gpu.uuid) {
        let at = |one: &&mut Instance| (one.span.start, one.span.size) == made.placement;
        if let Some(one) = gpu.instances.iter_mut().find(at).filter(|one| one.holder().is_none()) {
            one.held = kept(made);
        }
    }
    for running in gpu.running.clone() {
        let who = || format!("process {}", running.pid);
        let instance = gpu.instances.iter_mut().find(|one| Some(one.gi) == running.gi);
        let Some(instance) = instance else {
            gpu.held.push(who());
            continue;
        };
        match instance.compute.iter_mut().find(|part| Some(part.ci) == running.ci) {
            Some(part) => _ = part.held.get_or_insert_with(who),
            None => _ = instance.held.get_or_insert_with(who),
        }
    }
}

/// The places of the instances of `gpu` that were created for containers.
pub fn made(gpu: &Gpu, ledger: &Ledger) -> Vec<Span> {
    let is = |made: &DynamicInstance, one: &Instance| {
        let same = made.gpu == gpu.uuid && (one.span.start, one.span.size) == made.placement;
        same && one.compute.iter().any(|part| Some(&part.uuid) == made.uuid.as_ref())
    };
    let ours = |one: &&Instance| ledger.mig.dynamic_instances.iter().any(|made| is(made, one));
    gpu.instances.iter().filter(ours).map(|one| one.span).collect()
}

/// Why an instance created for a container stays although no lease has it.
fn kept(made: &DynamicInstance) -> Option<String> {
    if let Some(awaited) = &made.awaited {
        return Some(format!("created for container {}, which is being started", safe(&awaited.container)));
    }
    made.going.then(|| "sublet, which is destroying it: `sublet gc` tries again".to_owned())
}

fn named(lease: &Lease) -> String {
    format!("lease {} of container {}", lease.id, short_id(&lease.container.id))
}

#[cfg(test)]
mod tests {
    use super::super::Running;
    use super::super::fake_driver::{Double, profile};
    use super::*;
    use sublet_core::ledger::fixture;

    #[test]
    fn leases_hold_their_instance_and_processes_theirs() {
        let mut gpu =
            Double::with(&[(profile("2g.35gb"), 0), (profile("2g.35gb"), 2), (profile("3g.71gb"), 4)])
                .gpus
                .remove(0);
        let mut ledger = Ledger::empty("boot");
        let mut lease = fixture::lease(0xaa, "GPU-9");
        lease.devices = vec![gpu.instances[1].compute[0].uuid.clone()];
        ledger.leases.push(lease);
        let in_part = Running { pid: 7, gi: Some(gpu.instances[0].gi), ci: Some(0) };
        let in_none = Running { pid: 8, gi: Some(gpu.instances[2].gi), ci: None };
        let nowhere = Running { pid: 9, gi: None, ci: None };
        gpu.running = vec![in_part, in_none, nowhere];
        mark(&mut gpu, &ledger);
        let holders: Vec<_> = gpu.instances.iter().map(|one| one.holder().unwrap_or("")).collect();
        assert_eq!(holders[0], "process 7");
        assert!(holders[1].starts_with("lease 00000000000000aa of container "), "{holders:?}");
        assert_eq!(holders[2], "process 8");
        assert_eq!(gpu.held, ["process 9"]);
    }
}
