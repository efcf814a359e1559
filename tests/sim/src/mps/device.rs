//! Devices as CUDA counts them: by bus, a GPU in MIG mode only through its instances, and of these what
//! `CUDA_VISIBLE_DEVICES` names.

use crate::layout::contexts::On;
use crate::layout::topology::{Gpu, Mig, MigMode, Topology};

/// A GPU or a MIG device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// `GPU-…` or `MIG-…`.
    pub uuid: String,
    /// Where its contexts are.
    pub on: On,
    /// Its nodes below /dev.
    pub nodes: Vec<String>,
    /// Streaming multiprocessors.
    pub sm: u32,
    /// Total memory as CUDA sees it, in MiB.
    pub total_mib: u64,
    /// How many clients an MPS server may have on it.
    pub clients: usize,
    /// Whether MPS has limits: from Volta on.
    pub limits: bool,
    bus_id: String,
}

/// All devices of a host, in CUDA's order, with these MIG devices on each GPU.
pub fn all(topology: &Topology, mig: impl Fn(&Gpu) -> Vec<Mig>) -> Vec<Device> {
    let mut devices: Vec<Device> = topology
        .gpu
        .iter()
        .flat_map(|gpu| match gpu.mig_mode {
            MigMode::Enabled => mig(gpu).iter().map(|mig| part(topology, gpu, mig)).collect(),
            _ => vec![whole(topology, gpu)],
        })
        .collect();
    devices.sort_by(|one, other| one.bus_id.cmp(&other.bus_id));
    devices
}

fn whole(topology: &Topology, gpu: &Gpu) -> Device {
    let volta = gpu.capability().is_some_and(|(major, _)| major >= 7);
    Device {
        uuid: gpu.uuid.clone(),
        on: On { minor: gpu.minor, instance: None },
        nodes: vec![format!("nvidia{}", gpu.minor)],
        sm: gpu.sm_count,
        total_mib: gpu.cuda_total_mib,
        clients: if volta { clients(topology) } else { 16 },
        limits: volta,
        bus_id: gpu.bus_id.clone(),
    }
}

fn part(topology: &Topology, gpu: &Gpu, mig: &Mig) -> Device {
    let parent = whole(topology, gpu);
    let clients = parent.clients * mig.sm_count as usize / (gpu.sm_count.max(1) as usize);
    let mut nodes = parent.nodes;
    nodes.extend([mig.gi_cap, mig.ci_cap].map(|cap| format!("nvidia-caps/nvidia-cap{cap}")));
    Device {
        uuid: mig.uuid.clone(),
        on: On { minor: gpu.minor, instance: Some((mig.gi, mig.ci)) },
        nodes,
        sm: mig.sm_count,
        total_mib: mig.memory_mib,
        clients: clients.max(1),
        ..parent
    }
}

/// 48 up to CUDA 13.0, 60 from 13.1 (CUDA MPS documentation).
fn clients(topology: &Topology) -> usize {
    let version = topology.cuda.split_once('.');
    let version = version.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    if version.is_some_and(|version: (u32, u32)| version >= (13, 1)) { 60 } else { 48 }
}

/// What a process sees of `devices`: all (of MIG devices the first alone), or what `CUDA_VISIBLE_DEVICES`
/// says, up to its first entry that names none of them.
pub fn visible(devices: &[Device], named: Option<&str>) -> Vec<Device> {
    let Some(named) = named else { return without_choice(devices) };
    let mut found = Vec::new();
    for entry in named.split(',').map(str::trim) {
        match select(devices, entry) {
            Some(device) if !found.contains(device) => found.push(device.clone()),
            _ => break,
        }
    }
    found
}

fn without_choice(devices: &[Device]) -> Vec<Device> {
    match devices.first() {
        Some(first) if first.on.instance.is_some() => vec![first.clone()],
        _ => devices.iter().filter(|device| device.on.instance.is_none()).cloned().collect(),
    }
}

/// By ordinal, by UUID or a beginning of it, or a MIG device by `MIG-GPU-<uuid>/<gi>/<ci>`.
fn select<'a>(devices: &'a [Device], entry: &str) -> Option<&'a Device> {
    if let Ok(ordinal) = entry.parse::<usize>() {
        return devices.get(ordinal);
    }
    let prefixed = entry.len() > 4 && (entry.starts_with("GPU-") || entry.starts_with("MIG-"));
    devices.iter().find(|device| prefixed && device.uuid.starts_with(entry))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(uuid: &str, minor: u32, instance: Option<(u32, u32)>) -> Device {
        let on = On { minor, instance };
        let (uuid, bus_id) = (uuid.to_owned(), String::new());
        Device { uuid, on, nodes: vec![], sm: 132, total_mib: 1, clients: 48, limits: true, bus_id }
    }

    fn seen(devices: &[Device], named: Option<&str>) -> Vec<String> {
        visible(devices, named).into_iter().map(|device| device.uuid).collect()
    }

    #[test]
    fn ordinals_and_uuids_name_devices_up_to_the_first_that_names_none() {
        let two = [device("GPU-a1", 0, None), device("GPU-b2", 1, None)];
        assert_eq!(seen(&two, None), ["GPU-a1", "GPU-b2"]);
        assert_eq!(seen(&two, Some("1,0")), ["GPU-b2", "GPU-a1"]);
        assert_eq!(seen(&two, Some("GPU-b2")), ["GPU-b2"]);
        assert_eq!(seen(&two, Some("0,7,1")), ["GPU-a1"]);
        assert_eq!(seen(&two, Some("")), Vec::<String>::new());
    }

    #[test]
    fn of_mig_devices_one_is_seen() {
        let parts = [device("MIG-a", 0, Some((1, 0))), device("MIG-b", 0, Some((2, 0)))];
        assert_eq!(seen(&parts, None), ["MIG-a"]);
        assert_eq!(seen(&parts, Some("MIG-b")), ["MIG-b"]);
    }
}
