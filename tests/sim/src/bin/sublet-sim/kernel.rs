//! The kernel modules' files: /proc, /sys and the device nodes.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::geteuid;
use nvidia_ml::layout::instances::Partition;
use nvidia_ml::layout::topology::{COMPUTE_INSTANCES, GPU_INSTANCES, Gpu, MigMode, Topology, caps};
use nvidia_ml::layout::{Root, capabilities};

use super::write;

/// The number of GPUs in `mig-minors`, which does not depend on the host.
const NUMBERED_GPUS: u32 = 32;
const DRM: u32 = 226;

/// /proc and /sys.
pub fn files(root: &Root, topology: &Topology) -> Result<()> {
    let driver = &topology.driver;
    let arch = std::env::consts::ARCH;
    let version = format!("NVRM version: NVIDIA UNIX {arch} Kernel Module  {driver}  SIMULATED\n");
    write(root.join("proc/driver/nvidia/version"), version)?;
    write(root.join("sys/module/nvidia/version"), format!("{driver}\n"))?;
    write(root.join("proc/devices"), devices(topology))?;
    write(root.join("dev/kmsg"), "")?;
    write(root.join("proc/driver/nvidia-caps/mig-minors"), mig_minors())?;
    let mig = root.join("proc/driver/nvidia/capabilities/mig");
    for (name, minor) in [("config", capabilities::CONFIG), ("monitor", capabilities::MONITOR)] {
        write(mig.join(name), capabilities::text(minor))?;
    }
    for gpu in &topology.gpu {
        of_gpu(root, gpu, driver)?;
        capabilities::sync(root, topology, gpu, &Partition::initial(gpu))?;
    }
    Ok(())
}

fn of_gpu(root: &Root, gpu: &Gpu, driver: &str) -> Result<()> {
    let gpus = root.join("proc/driver/nvidia/gpus");
    write(gpus.join(&gpu.bus_id).join("information"), information(gpu, driver))?;
    let pci = root.join("sys/bus/pci/devices").join(&gpu.bus_id);
    write(pci.join("config"), pci_config())?;
    if gpu.dri {
        for node in dri(gpu) {
            fs::create_dir_all(pci.join("drm").join(node.0))?;
        }
    }
    Ok(())
}

fn information(gpu: &Gpu, driver: &str) -> String {
    let Gpu { name, uuid, bus_id, minor, .. } = gpu;
    format!(
        "Model: \t\t {name}\nIRQ:   \t\t 187\nGPU UUID: \t {uuid}\nVideo BIOS: \t 96.00.00.00.01\n\
         Bus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\nBus Location: \t {bus_id}\n\
         Device Minor: \t {minor}\nGPU Firmware: \t {driver}\nGPU Excluded:\t No\n"
    )
}

/// 256 bytes that begin with NVIDIA's vendor id and an H200's device id.
fn pci_config() -> Vec<u8> {
    let mut config = vec![0xde, 0x10, 0x35, 0x23];
    config.resize(256, 0);
    config
}

fn devices(topology: &Topology) -> String {
    let majors = &topology.majors;
    let mut character = vec![
        (1, "mem"),
        (5, "/dev/tty"),
        (10, "misc"),
        (majors.nvidia, "nvidia"),
        (majors.nvidia, "nvidia-modeset"),
        (majors.nvidia, "nvidiactl"),
        (DRM, "drm"),
        (majors.caps, "nvidia-caps"),
        (majors.uvm, "nvidia-uvm"),
    ];
    character.sort_by_key(|(major, _)| *major);
    let lines: String = character.iter().fold(String::new(), |mut text, (major, name)| {
        let _ = writeln!(text, "{major:3} {name}");
        text
    });
    format!("Character devices:\n{lines}\nBlock devices:\n  8 sd\n259 blkext\n")
}

fn mig_minors() -> String {
    let mut text = String::from("config 1\nmonitor 2\n");
    for (gpu, gi) in (0..NUMBERED_GPUS).flat_map(|gpu| (0..GPU_INSTANCES).map(move |gi| (gpu, gi))) {
        let _ = writeln!(text, "gpu{gpu}/gi{gi}/access {}", caps(gpu, gi, 0).0);
        for ci in 0..COMPUTE_INSTANCES {
            let _ = writeln!(text, "gpu{gpu}/gi{gi}/ci{ci}/access {}", caps(gpu, gi, ci).1);
        }
    }
    text
}

/// The nodes below /dev. Opening one returns ENXIO, because there is no driver, or EPERM if the device cgroup refuses
/// it.
pub fn nodes(root: &Root, topology: &Topology) -> Result<()> {
    if !geteuid().is_root() {
        eprintln!("sublet-sim: warning: not root: no device nodes");
        return Ok(());
    }
    for (path, major, minor) in wanted(topology) {
        let node = root.join("dev").join(path);
        fs::create_dir_all(node.parent().unwrap_or(root.dir()))?;
        mknod(&node, SFlag::S_IFCHR, Mode::empty(), makedev(major.into(), minor.into()))
            .with_context(|| format!("mknod {}", node.display()))?;
        // mknod's mode is not enough, because the umask applies to it.
        fs::set_permissions(&node, fs::Permissions::from_mode(0o666))?;
    }
    capability_nodes(root, topology)
}

fn capability_nodes(root: &Root, topology: &Topology) -> Result<()> {
    if topology.gpu.iter().any(|gpu| gpu.mig_mode != MigMode::None) {
        capabilities::node(root, topology, capabilities::CONFIG)?;
        capabilities::node(root, topology, capabilities::MONITOR)?;
    }
    Ok(())
}

fn wanted(topology: &Topology) -> Vec<(String, u32, u32)> {
    let majors = &topology.majors;
    let node = |path: &str, major, minor| (path.to_owned(), major, minor);
    let mut nodes = vec![
        node("nvidiactl", majors.nvidia, 255),
        node("nvidia-modeset", majors.nvidia, 254),
        node("nvidia-uvm", majors.uvm, 0),
        node("nvidia-uvm-tools", majors.uvm, 1),
    ];
    for gpu in &topology.gpu {
        nodes.push((format!("nvidia{}", gpu.minor), majors.nvidia, gpu.minor));
        if gpu.dri {
            nodes.extend(dri(gpu).map(|(name, minor)| (format!("dri/{name}"), DRM, minor)));
        }
    }
    nodes
}

/// A GPU's nodes under /dev/dri. Card 0 is another device, as on hosts with a management controller.
fn dri(gpu: &Gpu) -> [(String, u32); 2] {
    let (card, render) = (gpu.minor + 1, gpu.minor + 128);
    [(format!("card{card}"), card), (format!("renderD{render}"), render)]
}
