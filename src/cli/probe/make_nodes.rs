//! Creates missing device nodes of the driver and their links in /dev/char. nvidia-modprobe creates nodes only when a
//! program asks for them, which may be after the first container starts, and udev creates no links for them.
//!
//! Without the links systemd cannot name the devices of a container's cgroup, and removes the access to them at
//! the next daemon-reload (systemd.resource-control(5), `DeviceAllow=`).

use std::os::unix::fs::{chown, symlink};
use std::path::Path;
use std::{fs, io};

use sublet_core::fs::{create_directories, read_proc_devices, under, unless_absent};
use sublet_core::inventory::device_nodes::{make_node, value};
use sublet_core::inventory::{Inventory, Majors, Node, NodeError, cache, check_node};

/// NVIDIA's PCI vendor id.
const VENDOR: &str = "0x10de";
/// Class of display controllers, 3D ones too (PCI Code and ID Assignment Specification).
const DISPLAY: &str = "0x03";

/// Whether this host has an NVIDIA GPU, with or without its driver.
pub(crate) fn has_gpu(root: &Path) -> bool {
    let Ok(devices) = fs::read_dir(under(root, "/sys/bus/pci/devices")) else { return is_loaded(root) };
    let is_gpu = |device: &Path| {
        let begins =
            |file, with| fs::read_to_string(device.join(file)).is_ok_and(|text| text.starts_with(with));
        begins("vendor", VENDOR) && begins("class", DISPLAY)
    };
    is_loaded(root) || devices.flatten().any(|device| is_gpu(&device.path()))
}

/// Whether the driver is loaded.
pub(crate) fn is_loaded(root: &Path) -> bool {
    under(root, cache::VERSION_FILE).exists()
}

/// Creates the missing nodes that are `wanted` as nvidia-modprobe would, and returns a warning for each failure. Creates none
/// if the driver is configured to leave that to the administrator (`NVreg_ModifyDeviceFiles=0`).
pub(crate) fn make_nodes(root: &Path, wanted: fn(&Node) -> bool) -> Vec<String> {
    let params = fs::read_to_string(under(root, "/proc/driver/nvidia/params")).unwrap_or_default();
    if value(&params, "ModifyDeviceFiles") == Some(0) {
        return Vec::new();
    }
    let missing =
        |node: &Node| wanted(node) && matches!(check_node(root, node), Err(NodeError::Missing { .. }));
    let failed = |node: Node| {
        let error = make(root, &node, &params).err()?;
        Some(format!("cannot create device node {}: {error}", node.path.display()))
    };
    driver_nodes(root).into_iter().filter(missing).filter_map(failed).collect()
}

/// Creates a node with the owner and mode of the module's parameters, and its link in /dev/char, without which it is usable.
fn make(root: &Path, node: &Node, params: &str) -> io::Result<()> {
    make_node(root, node, value(params, "DeviceFileMode").unwrap_or(0o666) & 0o777)?;
    let owner = (value(params, "DeviceFileUID"), value(params, "DeviceFileGID"));
    chown(under(root, &node.path.to_string_lossy()), owner.0.or(Some(0)), owner.1.or(Some(0)))?;
    let _ = link(root, node).inspect_err(|error| tracing::debug!("{}: {error}", node.path.display()));
    Ok(())
}

/// The nodes of the driver and of every GPU that it lists.
pub(crate) fn driver_nodes(root: &Path) -> Vec<Node> {
    let known = read_proc_devices(root).unwrap_or_default();
    let majors = Majors::parse(&known);
    // Its own kernel module; graphics need it, CUDA does not. Drivers up to 535 have one line in /proc/devices for all
    // (NVIDIA's open-gpu-kernel-modules, kernel-open/nvidia/nv-frontend.c).
    let has_modeset = |major: &u32| {
        known.contains(&format!("{major} nvidia-modeset\n"))
            || under(root, "/sys/module/nvidia_modeset").exists()
    };
    let modeset = majors.nvidia.filter(has_modeset);
    let gpus = fs::read_dir(under(root, "/proc/driver/nvidia/gpus")).into_iter().flatten().flatten();
    let minor =
        |gpu: fs::DirEntry| value(&fs::read_to_string(gpu.path().join("information")).ok()?, "Device Minor");
    let gpus = gpus.filter_map(minor).map(|minor| (format!("nvidia{minor}"), majors.nvidia, minor));
    let common = [
        ("nvidiactl", majors.nvidia, 255),
        ("nvidia-uvm", majors.uvm, 0),
        ("nvidia-uvm-tools", majors.uvm, 1),
        ("nvidia-modeset", modeset, 254),
    ];
    let common = common.into_iter().map(|(name, major, minor)| (name.to_owned(), major, minor));
    let node = |(name, major, minor): (String, Option<u32>, u32)| {
        Some(Node { path: Path::new("/dev").join(name), major: major?, minor })
    };
    common.chain(gpus).filter_map(node).collect()
}

/// Links every node of the driver and of `inventory` in /dev/char; returns a warning for each failure.
pub(crate) fn link_nodes(root: &Path, inventory: &Inventory) -> Vec<String> {
    let mut nodes = driver_nodes(root);
    nodes.extend(inventory.devices.iter().flat_map(|device| device.nodes.iter().cloned()));
    nodes.retain(|node| check_node(root, node).is_ok());
    let failed = |node: &Node| {
        let error = link(root, node).err()?;
        Some(format!("cannot link {} in /dev/char: {error}", node.path.display()))
    };
    nodes.iter().filter_map(failed).collect()
}

fn link(root: &Path, node: &Node) -> io::Result<()> {
    let link = under(root, &format!("/dev/char/{}:{}", node.major, node.minor));
    let target = Path::new("..").join(node.path.strip_prefix("/dev").unwrap_or(&node.path));
    if fs::read_link(&link).is_ok_and(|there| there == target) {
        return Ok(());
    }
    create_directories(&under(root, "/dev/char"))?;
    // A dynamic major may have belonged to another driver earlier.
    unless_absent(fs::remove_file(&link))?;
    symlink(target, link)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sublet_core::inventory::fixture::Root;

    #[test]
    fn a_gpu_is_known_without_its_driver() {
        let root = Root::new();
        assert!(!has_gpu(root.path()));
        let pci = |device: &str, vendor: &str, class: &str| {
            root.file(&format!("/sys/bus/pci/devices/{device}/vendor"), vendor);
            root.file(&format!("/sys/bus/pci/devices/{device}/class"), class);
        };
        pci("0000:00:02.0", "0x8086\n", "0x030000\n");
        pci("0000:3b:00.1", "0x10de\n", "0x040300\n");
        assert!(!has_gpu(root.path()));
        pci("0000:3b:00.0", "0x10de\n", "0x030200\n");
        assert!(has_gpu(root.path()));
        assert!(has_gpu(Root::with_driver("580.65").path()));
    }

    #[test]
    fn the_driver_and_each_gpu_have_their_nodes() {
        let root = Root::new();
        root.file("/proc/devices", "Character devices:\n195 nvidia\n510 nvidia-uvm\n\nBlock devices:\n");
        root.file(
            "/proc/driver/nvidia/gpus/0000:3b:00.0/information",
            "Model: \t H200\nDevice Minor: \t 3\n",
        );
        let nodes = driver_nodes(root.path());
        let text = |node: &Node| format!("{} {}:{}", node.path.display(), node.major, node.minor);
        let expected = [
            "/dev/nvidiactl 195:255",
            "/dev/nvidia-uvm 510:0",
            "/dev/nvidia-uvm-tools 510:1",
            "/dev/nvidia3 195:3",
        ];
        assert_eq!(nodes.iter().map(text).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn nvidia_modeset_has_its_node_where_its_module_is_loaded() {
        let has_node = |devices: &str, module: Option<&str>| {
            let root = Root::new();
            root.file("/proc/devices", format!("Character devices:\n{devices}\n"));
            if let Some(module) = module {
                root.file(&format!("/sys/module/{module}/refcnt"), "1\n");
            }
            driver_nodes(root.path()).contains(&Node {
                path: "/dev/nvidia-modeset".into(),
                major: 195,
                minor: 254,
            })
        };
        assert!(has_node("195 nvidia\n195 nvidia-modeset\n195 nvidiactl", None));
        assert!(!has_node("195 nvidia\n195 nvidiactl", None));
        assert!(has_node("195 nvidia-frontend", Some("nvidia_modeset")));
        assert!(!has_node("195 nvidia-frontend", Some("nvidia")));
    }

    #[test]
    fn nothing_is_made_where_the_administrator_does() {
        let root = Root::new();
        root.file("/proc/devices", "Character devices:\n195 nvidia\n");
        root.file("/proc/driver/nvidia/params", "ModifyDeviceFiles: 0\n");
        assert_eq!(make_nodes(root.path(), |_| true), [""; 0]);
        assert!(!root.path().join("dev").exists());
    }

    #[test]
    fn a_link_is_relative_and_replaces_another() {
        let root = Root::new();
        let node = Node { path: "/dev/nvidia-caps/nvidia-cap1".into(), major: 241, minor: 1 };
        for _ in 0..2 {
            link(root.path(), &node).unwrap();
            let there = fs::read_link(root.path().join("dev/char/241:1")).unwrap();
            assert_eq!(there, Path::new("../nvidia-caps/nvidia-cap1"));
        }
        link(root.path(), &Node { path: "/dev/other".into(), ..node }).unwrap();
        assert_eq!(fs::read_link(root.path().join("dev/char/241:1")).unwrap(), Path::new("../other"));
    }
}
