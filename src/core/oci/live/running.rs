//! The nodes of GPUs in a container that runs, as it moves from one to another.
//!
//! The container's root is opened by its first process, wherever its runtime has put it, and every path is resolved in there: what
//! the container's programs do meanwhile leads nowhere else. Each change may be made again, after one that was cut short.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;

use super::attach::{Rootfs, find_node};
use super::{Access, HostSide, NamespaceError, cgroup, failed, within};
use crate::grant::{GpuNodes, Grant};
use crate::inventory::Node;
use crate::process::Process;

/// Gives the container, whose first process is `init`, the nodes of these GPUs, or takes them away. Of one of root's
/// (`is_roots`) the device cgroup is changed, too: without root a container has none of its own, and the one that it is in may be
/// that of every user.
///
/// This process enters another mount namespace and comes back: it must have one thread only.
///
/// # Errors
/// Some of it may have been done.
pub fn set_gpus(gpus: &[GpuNodes], init: Process, is_roots: bool) -> Result<(), NamespaceError> {
    let path = format!("/proc/{}/root", init.pid);
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let root = open(path.as_str(), flags, Mode::empty()).map_err(|error| failed("open its root", error))?;
    let all = gpus.iter().flat_map(|gpu| &gpu.for_graphics);
    let has_graphics = all.clone().any(|granted| find_node(&root, &granted.node).is_some());
    let nodes_of = |is_given: bool| {
        let these = gpus.iter().filter(move |gpu| gpu.is_given == is_given);
        these.flat_map(move |gpu| {
            gpu.nodes.iter().chain(gpu.for_graphics.iter().filter(move |_| has_graphics))
        })
    };
    let directories = |is_given: bool| {
        gpus.iter().filter(move |gpu| gpu.is_given == is_given).map(|gpu| gpu.directory.clone())
    };
    let (nodes, masked_paths) = (nodes_of(true).cloned().collect(), directories(false).collect());
    let grant = Grant { nodes, masked_paths, ..Grant::default() };
    let host = HostSide::open(&grant, init, root.try_clone())?;
    // Of a container without root, its user says which process is the first one, and so what its root is.
    let removed: Vec<_> =
        nodes_of(false).map(|granted| (&granted.node, directory_of(&granted.source))).collect();
    let both = [(true, Access::Open), (false, Access::Closed)];
    for (is_given, access) in both.into_iter().filter(|_| is_roots) {
        let rules: Vec<&Node> = nodes_of(is_given).map(|granted| &granted.node).collect();
        cgroup::set_devices(init.pid, &rules, access)?;
    }
    within(&host, || {
        let rootfs = Rootfs::of(root, &host);
        for (granted, source) in grant.nodes.iter().zip(&host.nodes) {
            match source {
                _ if rootfs.has(&granted.node) => {}
                Some(mount) => rootfs.mount(mount, &granted.node.path)?,
                None => rootfs.make_node(&granted.node)?,
            }
        }
        removed.iter().try_for_each(|(node, host)| rootfs.remove_node(node, *host))?;
        directories(true).try_for_each(|path| rootfs.unmask(&path))?;
        for (path, mask) in grant.masked_paths.iter().zip(&host.masks) {
            if !rootfs.is_covered(path) {
                rootfs.mask(mask, path)?;
            }
        }
        Ok(())
    })
}

/// The directory of `node` on the host, by its device and inode.
fn directory_of(node: &Path) -> Option<(u64, u64)> {
    let found = fs::metadata(node.parent()?).ok()?;
    Some((found.dev(), found.ino()))
}
