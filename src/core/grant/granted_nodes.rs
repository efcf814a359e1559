//! The device nodes that a container gets.

use std::path::Path;

use super::GrantedNode;
use crate::config::Config;
use crate::fs::below::under;
use crate::inventory::{Device, Inventory, Node};
use crate::share::{Capabilities, Capability, MigCapability};

/// Minor of /dev/nvidiactl (nvidia-modprobe-utils.h, `NV_CTL_DEVICE_MINOR`).
const CTL_MINOR: u32 = 255;
/// Minor of /dev/nvidia-modeset (nvidia-modprobe-utils.h, `NV_MODESET_MINOR_DEVICE_NUM`).
const MODESET_MINOR: u32 = 254;

/// The devices with these UUIDs.
pub(super) fn devices<'a>(uuids: &[String], inventory: &'a Inventory) -> Vec<&'a Device> {
    inventory.devices.iter().filter(|device| uuids.contains(&device.uuid)).collect()
}

/// The nodes that `devices` need, control nodes first. A kernel module that is not loaded has no nodes.
pub(super) fn nodes(
    devices: &[&Device],
    capabilities: &Capabilities,
    mig_caps: &[MigCapability],
    inventory: &Inventory,
    config: &Config,
) -> Vec<GrantedNode> {
    let majors = inventory.driver.majors;
    let node = |name: &str, major: Option<u32>, minor| {
        Some(Node { path: Path::new("/dev").join(name), major: major?, minor })
    };
    let control = [
        node("nvidiactl", majors.nvidia, CTL_MINOR),
        node("nvidia-uvm", majors.uvm, 0),
        node("nvidia-uvm-tools", majors.uvm, 1),
    ];
    let mut nodes: Vec<Node> = control.into_iter().flatten().collect();
    nodes.extend(devices.iter().flat_map(|device| device.nodes.clone()));
    if capabilities.has(Capability::Graphics) {
        nodes.extend(node("nvidia-modeset", majors.nvidia, MODESET_MINOR));
        nodes.extend(devices.iter().flat_map(|device| device.dri_nodes.clone()));
    }
    nodes.extend(mig_caps.iter().filter_map(|cap| inventory.driver.mig_cap(*cap)).cloned());
    // MIG devices of one GPU share its node.
    let mut seen = Vec::new();
    nodes.retain(|node| {
        let new = !seen.contains(&node.path);
        seen.push(node.path.clone());
        new
    });
    let granted = |node: Node| {
        let source = under(&config.driver.root, &node.path.to_string_lossy());
        GrantedNode { node, source }
    };
    nodes.into_iter().map(granted).collect()
}
