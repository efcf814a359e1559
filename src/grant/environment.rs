//! The environment of a container with a lease: what CUDA, MPS and programs that size themselves read.

use std::path::Path;

use super::{Environment, MPS_DIR};
use crate::config::{Config, VisibleDevices};
use crate::inventory::context_bytes;
use crate::inventory::{Device, Inventory};
use crate::ledger::Lease;
use crate::request::units::MIB;
use crate::request::{Percent, Priority};

/// Where NVML does not say how many SMs there are: as many as any GPU has, so that the memory fraction is
/// rather too small.
const MOST_SMS: u64 = 192;

/// Names that are ours alone: what the image or the user set under them would contradict the lease.
/// With no MPS server too, since a stray `CUDA_MPS_*` could lead the container to somebody's daemon.
const OURS: [&str; 3] = ["CUDA_MPS_", "SUBLET_MEMORY_", "SUBLET_SM_"];

/// The edit for `lease`; `library_dir` is where the driver's libraries are mounted, if they are.
pub(super) fn environment(
    lease: &Lease,
    library_dir: Option<&Path>,
    inventory: &Inventory,
    config: &Config,
) -> Environment {
    let mut set = vec![
        pair("CUDA_VISIBLE_DEVICES", visible_devices(lease, config)),
        pair("NVIDIA_VISIBLE_DEVICES", "void"),
        pair("SUBLET_DEVICES", lease.devices.join(",")),
    ];
    if lease.server.is_some() {
        set.extend(mps(lease));
    }
    set.extend(sizes(lease, inventory));
    let mut default: Vec<_> =
        config.grant.env.iter().filter_map(|(name, text)| Some(pair(name, fill(text, &set)?))).collect();
    if let Some(dir) = library_dir.and_then(Path::to_str) {
        default.push(pair("TRITON_LIBCUDA_PATH", dir));
    }
    Environment { set, default, remove_prefixes: OURS.map(str::to_owned).to_vec() }
}

fn pair(name: &str, value: impl Into<String>) -> (String, String) {
    (name.to_owned(), value.into())
}

/// Ordinals count what CUDA enumerates, and that is what has a node: always 0 to n − 1. MIG devices have
/// no ordinal of their own (CUDA C++ Programming Guide, "CUDA Environment Variables"); who wants one all the
/// same says so.
fn visible_devices(lease: &Lease, config: &Config) -> String {
    let mig = lease.devices.iter().any(|uuid| uuid.starts_with("MIG-"));
    let default = if mig { VisibleDevices::Uuid } else { VisibleDevices::Ordinal };
    match config.grant.visible_devices.unwrap_or(default) {
        VisibleDevices::Uuid => lease.devices.join(","),
        VisibleDevices::Ordinal => {
            (0..lease.devices.len()).map(|ordinal| ordinal.to_string()).collect::<Vec<_>>().join(",")
        }
    }
}

/// The share of one CUDA process: MPS holds its limits for each client process, not for the container.
fn sm_of_one(lease: &Lease) -> Option<Percent> {
    let part = |sm: Percent| Percent::from_thousandths(sm.thousandths() / lease.processes.max(1));
    lease.sm.map(part)
}

/// As [`sm_of_one`], in bytes, whole MiB.
fn memory_of_one(lease: &Lease) -> Option<u64> {
    lease.memory_bytes.map(|bytes| bytes / u64::from(lease.processes.max(1)) / MIB * MIB)
}

/// What an MPS client reads. The pinned limit has one entry only: a single one that the driver cannot
/// parse, or for a device that the client does not see, drops every limit.
fn mps(lease: &Lease) -> Vec<(String, String)> {
    let mut set = vec![pair("CUDA_MPS_PIPE_DIRECTORY", MPS_DIR)];
    if let Some(sm) = sm_of_one(lease) {
        set.push(pair("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", sm.to_string()));
    }
    if let Some(bytes) = memory_of_one(lease) {
        set.push(pair("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", format!("0={}M", bytes / MIB)));
    }
    if lease.priority == Priority::Low {
        set.push(pair("CUDA_MPS_CLIENT_PRIORITY", "1"));
    }
    set
}

/// For programs that size themselves: what one CUDA process may take. MPS shows them the whole GPU.
fn sizes(lease: &Lease, inventory: &Inventory) -> Vec<(String, String)> {
    let mut set = Vec::new();
    if let Some(bytes) = memory_of_one(lease) {
        set.push(pair("SUBLET_MEMORY_BYTES", bytes.to_string()));
        let device = lease.devices.first().and_then(|uuid| inventory.device(uuid));
        if let Some(fraction) = device.and_then(|device| fraction(bytes, sm_of_one(lease), device)) {
            set.push(pair("SUBLET_MEMORY_FRACTION", fraction));
        }
    }
    if let Some(sm) = sm_of_one(lease) {
        set.push(pair("SUBLET_SM_PERCENT", sm.to_string()));
    }
    set
}

/// (`bytes` − the context's own) ÷ the device's total, rounded down to thousandths; `None` for nothing.
fn fraction(bytes: u64, sm: Option<Percent>, device: &Device) -> Option<String> {
    let visible = device.sms_at(sm.unwrap_or(Percent::WHOLE)).unwrap_or(MOST_SMS);
    let usable = bytes.saturating_sub(context_bytes(visible));
    let total = u128::from(device.memory_bytes);
    let thousandths = (u128::from(usable) * 1000).checked_div(total)?.min(1000);
    (thousandths > 0).then(|| format!("{}.{:03}", thousandths / 1000, thousandths % 1000))
}

/// `template` with each `${NAME}` replaced from `set`; `None` where a name is not there.
fn fill(template: &str, set: &[(String, String)]) -> Option<String> {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some((before, after)) = rest.split_once("${") {
        let (name, behind) = after.split_once('}')?;
        out.push_str(before);
        out.push_str(&set.iter().find(|(known, _)| known == name)?.1);
        rest = behind;
    }
    out.push_str(rest);
    Some(out)
}
