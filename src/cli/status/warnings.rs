//! What in the state of this host needs somebody's attention.

use super::{DeviceUsed, Sources, Status};
use crate::guard::{self, Sight};
use sublet_core::config::Config;
use sublet_core::ledger::{DaemonState, LeaseState};
use sublet_core::oci;
use sublet_core::text::safe;

/// How many processes without a lease are named for each device.
const NAMED: usize = 3;

/// One line each, without a full stop.
pub(super) fn of(status: &Status, sources: &Sources<'_>) -> Vec<String> {
    let Sources { inventory, ledger, usage, config, .. } = *sources;
    let mut lines = guard(config);
    if let Some(error) = &usage.error {
        lines.push(format!("what is used is not known: {}", safe(error)));
    }
    for gpu in &status.devices {
        let mut device = |uuid: &str, label: &str, unknown: Option<&String>, used: Option<&DeviceUsed>| {
            if let Some(why) = unknown {
                lines.push(format!("{label}: what is used is not known: {}", safe(why)));
            }
            lines.extend(used.and_then(|used| outside(uuid, label, used, status)));
        };
        device(&gpu.uuid, &format!("GPU {}", gpu.index), gpu.unknown.as_ref(), gpu.used.as_ref());
        for part in &gpu.mig {
            let label = format!("MIG device {}", part.number);
            device(&part.uuid, &label, part.unknown.as_ref(), part.used.as_ref());
        }
    }
    lines.extend(status.mps.iter().filter_map(|daemon| {
        let (state, then) = match daemon.state {
            DaemonState::Fault => ("does not answer", "`sublet mps logs` may say why"),
            DaemonState::Down => ("does not run", "`sublet gc` starts it again if a lease needs it"),
            _ => return None,
        };
        Some(format!("MPS daemon {} {state}: {then}", daemon.key))
    }));
    let lost = status.leases.iter().filter(|lease| lease.state == LeaseState::Lost);
    lines.extend(lost.map(|lease| {
        let container = lease.name.as_deref().unwrap_or(&lease.called);
        format!("container {}: its lease {} is lost; end the container", safe(container), lease.id)
    }));
    lines.extend(ledger.leases.iter().filter_map(|lease| {
        let unended =
            ledger.describe_unended(lease, &config.state_dir).or_else(|| oci::lost_node(lease, inventory))?;
        let shown = status.leases.iter().find(|shown| shown.id == lease.id.as_str());
        let name = shown.map(|shown| shown.name.as_deref().unwrap_or(&shown.called));
        Some(format!("container {}: {unended}", safe(name.unwrap_or(&lease.container.name()))))
    }));
    lines.extend(status.mig_made.iter().filter_map(|made| {
        let (why, (start, size)) = (made.error.as_ref()?, made.placement);
        Some(format!(
            "MIG instance {} at {start}:{size} of GPU {} was created for a container that has ended, and cannot be \
             destroyed yet: {}; every sublet command tries again",
            made.profile,
            safe(&made.gpu),
            safe(why)
        ))
    }));
    lines
}

fn guard(config: &Config) -> Vec<String> {
    let off = "GUARD OFF: programs that tamper with their MPS limits are not stopped";
    match guard::sight(config) {
        Sight::All => Vec::new(),
        Sight::Blind(why) => why,
        Sight::None if config.guard.enabled => {
            vec![format!("{off}; run `systemctl enable --now sublet.service`")]
        }
        Sight::None => vec![format!("{off}; the configuration has [guard] enabled = false")],
    }
}

/// Processes on a device that belong to no lease. Those of a container that is starting are not known yet.
fn outside(uuid: &str, label: &str, used: &DeviceUsed, status: &Status) -> Option<String> {
    let starts = status.leases.iter().any(|lease| lease.device == uuid && lease.pid.is_none());
    if used.outside.is_empty() || starts {
        return None;
    }
    let named = used.outside.iter().take(NAMED).map(|process| {
        let memory = process.memory_bytes.map_or_else(String::new, |bytes| format!(", {} MiB", bytes >> 20));
        format!("{} (pid {}{memory})", process.name, process.pid)
    });
    let more = used.outside.len().saturating_sub(NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    Some(format!("{label}: used without a lease by {}{more}", named.collect::<Vec<_>>().join(", ")))
}
