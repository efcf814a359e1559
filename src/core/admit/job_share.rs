//! A container's request within its job's share. Pure.

use super::job_error::JobError;
use crate::config::Config;
use crate::inventory::Inventory;
use crate::ledger::{Lease, Ledger};
use crate::place::{Placement, selected};
use crate::request::Request;
use crate::share::{Devices, Isolation, MIB, Mode, Percent};

/// The placement that `lease` has.
pub(super) fn placement_of(lease: &Lease) -> Placement {
    Placement {
        devices: lease.devices.clone(),
        mig_devices: lease.mig_devices.clone(),
        mode: lease.mode,
        isolation: lease.isolation,
        daemon: lease.daemon.clone(),
        sm: lease.sm,
        memory_bytes: lease.memory_bytes,
        processes: lease.processes,
        priority: lease.priority,
        guard: lease.guard,
        mig_caps: Vec::new(),
        refresh_first: false,
        neighbours: None,
        warnings: Vec::new(),
    }
}

/// The placement of `request` within `job`, the lease of its job, beside the job's other containers in `ledger`. A limit
/// that the container does not ask for is the job's.
///
/// # Errors
/// It asks for something else, or for more.
pub(super) fn place_in_job(
    request: &Request,
    job: &Lease,
    ledger: &Ledger,
    inventory: &Inventory,
    config: &Config,
) -> Result<Placement, JobError> {
    let other = |key| JobError::Other { job: job_number(job), has: describe_job(job), key };
    if request.mode.is_some_and(|mode| mode != job.mode) {
        return Err(other("mode"));
    }
    if request.isolation != job.isolation && request.isolation == Isolation::Dedicated {
        return Err(other("isolation"));
    }
    if request.mig.is_some() || !request.mig_caps.is_empty() {
        return Err(other("mig"));
    }
    let devices = select_devices(request, job, inventory, config).ok_or_else(|| other("gpu"))?;
    let total = |uuid: &String| inventory.device(uuid).map(|device| device.memory_bytes);
    let smallest = devices.iter().filter_map(total).min().unwrap_or(0);
    let limited = job.mode != Mode::Exclusive;
    if !limited && (request.sm.is_some() || request.memory.is_some()) {
        return Err(other(if request.sm.is_some() { "sm" } else { "memory" }));
    }
    let sm = request.sm.or(job.sm);
    let memory_bytes = request.memory.map(|memory| memory.on(smallest)).or(job.memory_bytes);
    let beside: Vec<&Lease> =
        ledger.leases.iter().filter(|lease| lease.within.as_ref() == Some(&job.id)).collect();
    let sms = |sm: Option<Percent>| sm.map(|sm| u64::from(sm.thousandths()));
    let each = |of: fn(&Lease) -> Option<u64>| beside.iter().filter_map(|lease| of(lease)).sum::<u64>();
    let held = each(|lease| lease.sm.map(|sm| sm.thousandths().into()));
    check_within(job, "sm", (sms(sm), held, sms(job.sm)), percent)?;
    check_within(job, "memory", (memory_bytes, each(|lease| lease.memory_bytes), job.memory_bytes), mib)?;
    Ok(Placement {
        devices,
        sm,
        memory_bytes,
        processes: request.processes.get(),
        priority: request.priority,
        guard: request.guard.or(job.guard),
        ..placement_of(job)
    })
}

/// The devices, if all of them are the job's.
fn select_devices(
    request: &Request,
    job: &Lease,
    inventory: &Inventory,
    config: &Config,
) -> Option<Vec<String>> {
    let own = |uuid: &String| job.devices.contains(uuid);
    match &request.devices {
        // One is the default, too, and means all of the job's.
        Devices::Any(many) if many.get() == 1 => Some(job.devices.clone()),
        Devices::Any(many) => job.devices.get(..many.get() as usize).map(<[String]>::to_vec),
        Devices::All => None,
        Devices::These(selectors) => {
            let found = selectors.iter().map(|selector| {
                let mut meant = selected(selector, inventory, config).into_iter().map(|device| &device.uuid);
                meant.find(|uuid| own(uuid)).cloned()
            });
            let mut found = found.collect::<Option<Vec<String>>>()?;
            let many = found.len();
            found.sort();
            found.dedup();
            (found.len() == many).then_some(found)
        }
    }
}

/// Checks a limit: (asked for, held by the job's other containers, the job's).
fn check_within(
    job: &Lease,
    key: &'static str,
    (asked, held, all): (Option<u64>, u64, Option<u64>),
    words: fn(u64) -> String,
) -> Result<(), JobError> {
    let (Some(asked), Some(all)) = (asked, all) else { return Ok(()) };
    if asked > all {
        return Err(JobError::More { job: job_number(job), has: words(all), asked: words(asked) });
    }
    if asked.saturating_add(held) > all {
        let (has, held, asked) = (words(all), words(held), words(asked));
        return Err(JobError::Full { job: job_number(job), key, has, held, asked });
    }
    Ok(())
}

fn job_number(job: &Lease) -> u64 {
    job.job.as_ref().map_or(0, |job| job.id)
}

fn describe_job(job: &Lease) -> String {
    let limits = [job.sm.map(|sm| percent(sm.thousandths().into())), job.memory_bytes.map(mib)];
    let limits: Vec<String> = limits.into_iter().flatten().collect();
    [vec![job.mode.to_string(), job.devices.join(",")], limits].concat().join(", ")
}

fn percent(thousandths: u64) -> String {
    format!("{} % SM", Percent::from_thousandths(u32::try_from(thousandths).unwrap_or(u32::MAX)))
}

fn mib(bytes: u64) -> String {
    format!("{} MiB of memory", bytes / MIB)
}
