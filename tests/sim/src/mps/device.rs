//! Devices in CUDA's order: by bus id; a GPU in MIG mode only as its MIG devices; filtered by `CUDA_VISIBLE_DEVICES`.
//!
//! A process sees no whole GPU beside MIG devices. Up to driver R550 it sees one MIG device only; from R570 on, one
//! compute instance of each GPU instance (NVIDIA's MIG User Guide, "CUDA visible devices").

use crate::layout::contexts::On;
use crate::layout::topology::{Gpu, Mig, MigMode, Topology};

/// A GPU or a MIG device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// `GPU-…` or `MIG-…`.
    pub uuid: String,
    /// The device of its contexts.
    pub on: On,
    /// Its nodes below /dev.
    pub nodes: Vec<String>,
    /// Streaming multiprocessors.
    pub sm: u32,
    /// Total memory as CUDA sees it, in MiB.
    pub total_mib: u64,
    /// The most clients that an MPS server may have on it.
    pub clients: usize,
    /// Whether MPS has limits on it (from Volta on).
    pub limits: bool,
    /// A MIG device's other name, `MIG-GPU-<uuid>/<gi>/<ci>`.
    old_name: Option<String>,
    /// Whether a process may see several MIG devices.
    several: bool,
    bus_id: String,
}

/// The first driver with which a process may see several MIG devices.
const SEVERAL_MIG_DEVICES: u32 = 570;

/// All devices of a host, in CUDA's order.
#[must_use]
pub fn all(topology: &Topology) -> Vec<Device> {
    let mut devices: Vec<Device> = topology
        .gpu
        .iter()
        .flat_map(|gpu| match gpu.mig_mode {
            MigMode::Enabled => gpu.mig.iter().map(|mig| part(topology, gpu, mig)).collect(),
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
        old_name: None,
        several: topology.driver_branch() >= SEVERAL_MIG_DEVICES,
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
        old_name: Some(format!("MIG-{}/{}/{}", gpu.uuid, mig.gi, mig.ci)),
        ..parent
    }
}

/// 48 up to CUDA 13.0, 60 from 13.1 (CUDA MPS documentation).
fn clients(topology: &Topology) -> usize {
    let version = topology.cuda.split_once('.');
    let version = version.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    if version.is_some_and(|version: (u32, u32)| version >= (13, 1)) { 60 } else { 48 }
}

/// The devices that a process sees: all, or those in `CUDA_VISIBLE_DEVICES` up to its first invalid entry, without
/// devices that cannot be seen together.
#[must_use]
pub fn visible(devices: &[Device], named: Option<&str>) -> Vec<Device> {
    let mut found: Vec<Device> = Vec::new();
    let Some(named) = named else {
        let (parts, whole): (Vec<_>, Vec<_>) =
            devices.iter().partition(|device| device.on.instance.is_some());
        for device in parts.into_iter().chain(whole) {
            if device.may_join(&found) {
                found.push(device.clone());
            }
        }
        return found;
    };
    for entry in named.split(',').map(str::trim) {
        match select(devices, entry) {
            Some(device) if found.contains(device) => break,
            Some(device) if device.may_join(&found) => found.push(device.clone()),
            Some(_) => {}
            None => break,
        }
    }
    found
}

impl Device {
    fn may_join(&self, others: &[Self]) -> bool {
        let instance = |device: &Self| device.on.instance.map(|(gi, _)| (device.on.minor, gi));
        others.iter().all(|other| match (instance(self), instance(other)) {
            (None, None) => true,
            (Some(own), Some(of_other)) => self.several && own != of_other,
            _ => false,
        })
    }
}

/// Finds a device by ordinal, by UUID or a prefix of it, or a MIG device by `MIG-GPU-<uuid>/<gi>/<ci>`.
fn select<'a>(devices: &'a [Device], entry: &str) -> Option<&'a Device> {
    if let Ok(ordinal) = entry.parse::<usize>() {
        return devices.get(ordinal);
    }
    let prefixed = entry.len() > 4 && (entry.starts_with("GPU-") || entry.starts_with("MIG-"));
    let is_it =
        |device: &&Device| device.uuid.starts_with(entry) || device.old_name.as_deref() == Some(entry);
    devices.iter().find(is_it).filter(|_| prefixed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(uuid: &str, minor: u32, instance: Option<(u32, u32)>) -> Device {
        let old_name = instance.map(|(gi, ci)| format!("MIG-GPU-a1/{gi}/{ci}"));
        Device {
            uuid: uuid.to_owned(),
            on: On { minor, instance },
            nodes: vec![],
            sm: 132,
            total_mib: 1,
            clients: 48,
            limits: true,
            old_name,
            several: true,
            bus_id: String::new(),
        }
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

    fn parts(several: bool) -> Vec<Device> {
        let part = |uuid, gi, ci| Device { several, ..device(uuid, 0, Some((gi, ci))) };
        vec![part("MIG-a", 1, 0), part("MIG-b", 1, 1), part("MIG-c", 2, 0), device("GPU-b2", 1, None)]
    }

    #[test]
    fn of_mig_devices_one_is_seen_up_to_r550() {
        let parts = parts(false);
        assert_eq!(seen(&parts, None), ["MIG-a"]);
        assert_eq!(seen(&parts, Some("MIG-b")), ["MIG-b"]);
        assert_eq!(seen(&parts, Some("MIG-GPU-a1/2/0,MIG-a,GPU-b2")), ["MIG-c"]);
    }

    #[test]
    fn of_mig_devices_one_of_each_gpu_instance_is_seen_from_r570() {
        let parts = parts(true);
        assert_eq!(seen(&parts, None), ["MIG-a", "MIG-c"]);
        assert_eq!(seen(&parts, Some("MIG-c,MIG-b,MIG-a")), ["MIG-c", "MIG-b"]);
        assert_eq!(seen(&parts, Some("GPU-b2,MIG-c")), ["GPU-b2"]);
    }
}
