//! What a container gets of the host: device nodes and the driver's files.

use std::path::{Path, PathBuf};

use super::{GrantedNode, Mount};
use crate::config::{Config, Inject};
use crate::fs::below::under;
use crate::inventory::{Device, DriverFile, FileKind, Inventory, Node};
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

/// The driver's files for `capabilities`, libraries into `library_dir`, each destination once.
#[must_use]
pub(crate) fn driver_files(
    library_dir: &Path,
    capabilities: &Capabilities,
    inventory: &Inventory,
    config: &Config,
) -> Vec<Mount> {
    let mut mounts: Vec<Mount> = Vec::new();
    if config.driver.inject == Inject::None {
        return mounts;
    }
    for file in inventory.files.iter().filter(|file| wanted(file, capabilities)) {
        for destination in destinations(&file.kind, library_dir) {
            if !mounts.iter().any(|mount| mount.destination == destination) {
                mounts.push(Mount { source: file.source.clone(), destination });
            }
        }
    }
    mounts
}

/// The description files of EGL, Vulkan and `OpenCL` belong to both `video` and `graphics`.
fn wanted(file: &DriverFile, capabilities: &Capabilities) -> bool {
    let description = matches!(file.kind, FileKind::Data { .. }) && file.capability == Capability::Graphics;
    capabilities.has(file.capability) || description && capabilities.has(Capability::Video)
}

fn destinations(kind: &FileKind, library_dir: &Path) -> Vec<PathBuf> {
    match kind {
        FileKind::Library { soname, also } => {
            let mut names = vec![soname.as_str()];
            names.extend(also.iter().map(String::as_str));
            if soname == "libcuda.so.1" {
                // Triton and torch.compile link with -lcuda.
                names.push("libcuda.so");
            }
            names.into_iter().map(|name| library_dir.join(name)).collect()
        }
        FileKind::Program { name } => vec![Path::new("/usr/bin").join(name)],
        FileKind::Data { path } => vec![path.clone()],
    }
}
