//! Finds the GPUs of this host with NVML, /proc, /dev and the library directories. The result is the inventory. All
//! other code reads it from its file ([`sublet_core::inventory`]).

mod contexts;
mod driver_files;
mod inventory;
mod left_out;
mod make_nodes;
mod nvml;
mod nvml_processes;

use sublet_core::fs::under;
use sublet_core::inventory::{
    ComputeMode, Device, Driver, DriverFile, Fact, FileDirectory, FileKind, GpuProcess, Inventory,
    InventoryError, LeftOut, Majors, MigDevice, MigGpus, Node, NodeError, Unknown, Virtualization, cache,
    device_nodes, programs,
};

#[cfg(test)]
pub(crate) use contexts::cgroups;
pub(crate) use contexts::describe;
pub use inventory::{ProbeError, probe};
pub(crate) use inventory::{connect, left_out, mig_gpus};
pub(crate) use make_nodes::{has_gpu, is_loaded, link_nodes, make_nodes};
pub(crate) use nvml::{
    MigIds, compute_mode, device_by_uuid, init as open, joined, mig_handles, mig_ids, unless_unsupported,
};
pub(crate) use nvml_processes::{compute_processes, graphics_processes, mps_clients};
