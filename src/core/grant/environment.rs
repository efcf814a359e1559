//! The environment of a container with a lease: what CUDA, MPS and programs that size themselves read.

use std::path::Path;

use super::{Environment, MPS_DIR};
use crate::config::{Config, VisibleDevices};
use crate::inventory::context_bytes;
use crate::inventory::{Device, Inventory};
use crate::ledger::Lease;
use crate::share::units::MIB;
use crate::share::{Percent, Priority};

/// Where NVML does not say how many SMs there are: as many as any GPU has, so that the memory fraction is
/// rather too small.
const MOST_SMS: u64 = 192;

/// Names that are ours alone: what the image or the user set under them would contradict the lease.
/// Also without an MPS server, because a stray `CUDA_MPS_*` could connect the container to another daemon.
const OURS: [&str; 3] = ["CUDA_MPS_", "SUBLET_MEMORY_", "SUBLET_SM_"];

/// Names that a framework refuses together: where one stands, the other is not set.
///
/// jaxlib from 0.4.33 on raises `ValueError` and JAX computes on the CPU then; an empty value counts as none
/// (`generate_pjrt_gpu_plugin_options` in `jaxlib/xla_client.py`; docs/recipes.md, "What the frameworks read").
const REFUSED_TOGETHER: [[&str; 2]; 1] = [["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"]];

/// The name that no framework takes beside `name`.
#[must_use]
pub fn refused_beside(name: &str) -> Option<&'static str> {
    REFUSED_TOGETHER.iter().find_map(|[one, other]| match name {
        name if name == *one => Some(*other),
        name if name == *other => Some(*one),
        _ => None,
    })
}

/// Whether `name` is set by shares alone.
#[must_use]
pub(crate) fn is_own_name(name: &str) -> bool {
    OWN_NAMES.contains(&name) || OURS.iter().any(|prefix| name.starts_with(prefix))
}

/// Names that begin so and are not in a share's environment are taken away.
#[must_use]
pub(crate) fn own_prefixes() -> Vec<String> {
    OURS.map(str::to_owned).to_vec()
}

/// Tells Triton where libcuda is, unless the image or the user has.
pub(crate) const TRITON_PATH: &str = "TRITON_LIBCUDA_PATH";

/// What every share sets.
const OWN_NAMES: [&str; 3] = ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "SUBLET_DEVICES"];

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
    if lease.daemon.is_some() {
        set.extend(mps(lease));
    }
    set.extend(sizes(lease, inventory));
    let mut default: Vec<_> =
        config.grant.env.iter().filter_map(|(name, text)| Some(pair(name, fill(text, &set)?))).collect();
    if let Some(dir) = library_dir.and_then(Path::to_str) {
        default.push(pair(TRITON_PATH, dir));
    }
    Environment { set, default, remove_prefixes: own_prefixes() }
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

/// What an MPS client reads. The pinned limit has one entry only: a single one that the driver cannot
/// parse, or for a device that the client does not see, drops every limit. So a lease of several devices has none:
/// a worker that sets `CUDA_VISIBLE_DEVICES` to one of them would be bound by nothing. Its server has the limit.
fn mps(lease: &Lease) -> Vec<(String, String)> {
    let mut set = vec![pair("CUDA_MPS_PIPE_DIRECTORY", MPS_DIR)];
    if let Some(sm) = lease.sm_of_process() {
        set.push(pair("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", sm.to_string()));
    }
    if let Some(bytes) = lease.memory_of_process().filter(|_| lease.devices.len() == 1) {
        set.push(pair("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", format!("0={}M", bytes / MIB)));
    }
    if lease.priority == Priority::Low {
        set.push(pair("CUDA_MPS_CLIENT_PRIORITY", "1"));
    }
    set
}

/// For programs that size themselves: what one CUDA process may take, on each device. MPS shows them the whole GPU.
fn sizes(lease: &Lease, inventory: &Inventory) -> Vec<(String, String)> {
    let mut set = Vec::new();
    if let Some(bytes) = lease.memory_of_process() {
        set.push(pair("SUBLET_MEMORY_BYTES", bytes.to_string()));
        if let Some(thousandths) = fraction_of_all(bytes, lease, inventory) {
            let fraction = format!("{}.{:03}", thousandths / 1000, thousandths % 1000);
            set.push(pair("SUBLET_MEMORY_FRACTION", fraction));
        }
    }
    if let Some(sm) = lease.sm_of_process() {
        set.push(pair("SUBLET_SM_PERCENT", sm.to_string()));
    }
    set
}

/// The smallest [`fraction`] among the lease's devices: a framework applies one to all of them.
fn fraction_of_all(bytes: u64, lease: &Lease, inventory: &Inventory) -> Option<u128> {
    let each =
        lease.devices.iter().map(|uuid| fraction(bytes, lease.sm_of_process(), inventory.device(uuid)?));
    each.collect::<Option<Vec<_>>>()?.into_iter().min()
}

/// (`bytes` − the context's own) ÷ the device's total, rounded down to thousandths; `None` for nothing.
fn fraction(bytes: u64, sm: Option<Percent>, device: &Device) -> Option<u128> {
    let visible = device.sms_at(sm.unwrap_or(Percent::WHOLE)).unwrap_or(MOST_SMS);
    let usable = bytes.saturating_sub(context_bytes(visible));
    let total = u128::from(device.memory_bytes);
    let thousandths = (u128::from(usable) * 1000).checked_div(total)?.min(1000);
    (thousandths > 0).then_some(thousandths)
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
