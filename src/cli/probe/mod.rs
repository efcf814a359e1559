//! Finds the GPUs of this host with NVML, /proc, /dev and the library directories. The result is the inventory. All other
//! code reads it from its file ([`sublet_core::inventory`]).

mod files;
mod inventory;
mod make;
mod mig_ids;
mod nvml;
mod processes;
mod running;

use sublet_core::inventory::{
    ComputeMode, Device, Driver, DriverFile, FileKind, GpuProcess, Inventory, InventoryError, Majors,
    MigGpus, Node, NodeError, Part, Virtualization, cache, caps, kernel, majors, nodes, programs, seen,
    under,
};

pub use inventory::{ProbeError, probe};
pub(crate) use inventory::{connect, mig_gpus};
pub use make::{has_gpu, is_loaded, link_nodes, make_nodes};
pub(crate) use mig_ids::instance_ids;
pub(crate) use nvml::{init as open, joined, mig_handles, unless_unsupported};
#[cfg(test)]
pub(crate) use processes::cgroups;
pub(crate) use processes::describe;
pub(crate) use running::{compute_processes, graphics_processes, mps_clients};
