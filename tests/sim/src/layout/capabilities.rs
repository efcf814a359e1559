//! The kernel module's view of MIG: `/proc/driver/nvidia/capabilities` and the nodes below /dev/nvidia-caps.
//!
//! The files change together with the instances. nvidia-modprobe makes the nodes: with `cap_nodes = true` in the
//! topology they are made with the instance and, as on a real host, never removed; with `false` none is made.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::geteuid;

use super::Root;
use super::instances::Partition;
use super::topology::{Gpu, MigMode, Topology, caps};

/// The capability that allows changing MIG, and the one that allows monitoring all instances.
pub const CONFIG: u32 = 1;
/// As above.
pub const MONITOR: u32 = 2;

/// The capability file of `nvidia-cap<minor>`, as a real driver writes it: every user may read all of them except
/// `config`.
#[must_use]
pub fn text(minor: u32) -> String {
    format!("DeviceFileMinor: {minor}\nDeviceFileMode: {}\nDeviceFileModify: 1\n", mode(minor))
}

const fn mode(minor: u32) -> u32 {
    if minor == CONFIG { 0o400 } else { 0o444 }
}

/// Makes the files and nodes of one GPU match its instances. GPUs that do not support MIG have none.
///
/// # Errors
/// A file cannot be written or removed, or a node cannot be made.
pub fn sync(root: &Root, topology: &Topology, gpu: &Gpu, partition: &Partition) -> Result<()> {
    if gpu.mig_mode == MigMode::None {
        return Ok(());
    }
    let mig = root.join(format!("proc/driver/nvidia/capabilities/gpu{}/mig", gpu.minor));
    fs::create_dir_all(&mig).with_context(|| format!("{}", mig.display()))?;
    let kept: Vec<String> = partition.instances.iter().map(|one| format!("gi{}", one.id)).collect();
    remove_others(&mig, &kept)?;
    for instance in &partition.instances {
        let dir = mig.join(format!("gi{}", instance.id));
        capability(root, topology, &dir, caps(gpu.minor, instance.id, 0).0)?;
        let mut kept: Vec<String> = instance.compute.iter().map(|one| format!("ci{}", one.id)).collect();
        kept.push("access".into());
        remove_others(&dir, &kept)?;
        for compute in &instance.compute {
            let cap = caps(gpu.minor, instance.id, compute.id).1;
            capability(root, topology, &dir.join(format!("ci{}", compute.id)), cap)?;
        }
    }
    Ok(())
}

fn remove_others(dir: &Path, kept: &[String]) -> Result<()> {
    for entry in fs::read_dir(dir)?.flatten() {
        if !kept.iter().any(|name| entry.file_name() == name.as_str()) {
            fs::remove_dir_all(entry.path()).with_context(|| format!("{}", entry.path().display()))?;
        }
    }
    Ok(())
}

fn capability(root: &Root, topology: &Topology, dir: &Path, minor: u32) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("{}", dir.display()))?;
    // Existing entries stay unchanged, as in the kernel, because another process may be reading them.
    if !dir.join("access").exists() {
        fs::write(dir.join("access"), text(minor)).with_context(|| format!("{}/access", dir.display()))?;
    }
    node(root, topology, minor)
}

/// Makes a node, if the topology has nodes.
pub fn node(root: &Root, topology: &Topology, minor: u32) -> Result<()> {
    if !topology.cap_nodes || !geteuid().is_root() {
        return Ok(());
    }
    let dir = root.join("dev/nvidia-caps");
    fs::create_dir_all(&dir)?;
    let node = dir.join(format!("nvidia-cap{minor}"));
    match mknod(&node, SFlag::S_IFCHR, Mode::empty(), makedev(topology.majors.caps.into(), minor.into())) {
        Ok(()) => fs::set_permissions(&node, fs::Permissions::from_mode(mode(minor)))?,
        Err(Errno::EEXIST) => {}
        Err(errno) => return Err(errno).with_context(|| format!("mknod {}", node.display())),
    }
    Ok(())
}
