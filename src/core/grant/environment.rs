//! The environment of a container with a lease: the variables that CUDA, MPS and programs that choose their own size
//! read.

use std::path::Path;

use super::{Environment, MPS_DIR};
use crate::config::{Config, OWN_PREFIXES, VisibleDevices};
use crate::inventory::context_bytes;
use crate::inventory::{Device, Inventory};
use crate::ledger::Lease;
use crate::share::units::MIB;
use crate::share::{Percent, Priority};

/// The number of SMs to assume if NVML does not report it: as many as any GPU has, so that the memory fraction is
/// rather too small than too large.
const MOST_SMS: u64 = 192;

/// Names that a framework refuses together. If one is set, sublet does not set the other.
///
/// From version 0.4.33, jaxlib raises `ValueError`, and JAX then computes on the CPU. An empty value counts as unset
/// (`generate_pjrt_gpu_plugin_options` in `jaxlib/xla_client.py`; docs/recipes.md, "What the frameworks read").
const REFUSED_TOGETHER: [[&str; 2]; 1] = [["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"]];

/// The name that frameworks refuse together with `name`.
#[must_use]
pub fn refused_beside(name: &str) -> Option<&'static str> {
    REFUSED_TOGETHER.iter().find_map(|[one, other]| match name {
        name if name == *one => Some(*other),
        name if name == *other => Some(*one),
        _ => None,
    })
}

/// Variables with these prefixes that are not in a share's environment are removed.
#[must_use]
pub(crate) fn own_prefixes() -> Vec<String> {
    OWN_PREFIXES.map(str::to_owned).to_vec()
}

/// Sets libcuda's directory for Triton, unless the image or the user does.
pub(crate) const TRITON_PATH: &str = "TRITON_LIBCUDA_PATH";

/// The edit for `lease`; `library_dir` is where the driver's libraries are mounted, if they are. `neighbours` is the
/// number of other leases on its devices, if it is known.
pub(super) fn environment(
    lease: &Lease,
    neighbours: Option<usize>,
    library_dir: Option<&Path>,
    inventory: &Inventory,
    config: &Config,
) -> Environment {
    // MIG devices have no ordinal of their own (CUDA C++ Programming Guide, "CUDA Environment Variables").
    let mig = lease.devices.iter().any(|uuid| uuid.starts_with("MIG-"));
    let default = if mig { VisibleDevices::Uuid } else { VisibleDevices::Ordinal };
    let mut set = vec![
        pair("CUDA_VISIBLE_DEVICES", listed(lease, config.grant.visible_devices.unwrap_or(default))),
        pair(
            "NVIDIA_VISIBLE_DEVICES",
            config.grant.nvidia_visible_devices.map_or("void".into(), |form| listed(lease, form)),
        ),
        pair("SUBLET_DEVICES", lease.devices.join(",")),
        pair("SUBLET_MODE", lease.mode.to_string()),
        pair("SUBLET_PROCESSES", lease.processes.to_string()),
    ];
    if let Some(neighbours) = neighbours.filter(|_| config.grant.tell_neighbours) {
        set.push(pair("SUBLET_NEIGHBOURS", neighbours.to_string()));
    }
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

/// The devices of `lease`, for a program that sees only these. Ordinals count the devices that CUDA enumerates. These are the
/// ones with a node, so the ordinals always begin at 0 and have no gaps.
fn listed(lease: &Lease, form: VisibleDevices) -> String {
    match form {
        VisibleDevices::Uuid => lease.devices.join(","),
        VisibleDevices::Ordinal => {
            (0..lease.devices.len()).map(|ordinal| ordinal.to_string()).collect::<Vec<_>>().join(",")
        }
    }
}

/// The variables that an MPS client reads. The pinned device memory limit has only one entry: if the driver cannot
/// parse an entry, or the client does not see its device, the driver drops every limit. So a lease of several devices
/// has no such variable: a worker that sets `CUDA_VISIBLE_DEVICES` to one of them would have no limit. The server has
/// the limit instead.
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

/// For programs that choose their own size: the memory of one CUDA process on each device. MPS shows them the whole
/// GPU.
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

/// (`bytes` − the context's) ÷ the device's total, rounded down to thousandths; `None` if that is zero.
fn fraction(bytes: u64, sm: Option<Percent>, device: &Device) -> Option<u128> {
    let visible = device.sms_at(sm.unwrap_or(Percent::WHOLE)).unwrap_or(MOST_SMS);
    let usable = bytes.saturating_sub(context_bytes(visible));
    let total = u128::from(device.memory_bytes);
    let thousandths = (u128::from(usable) * 1000).checked_div(total)?.min(1000);
    (thousandths > 0).then_some(thousandths)
}

/// `template` with each `${NAME}` replaced from `set`; `None` if a name is missing.
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
