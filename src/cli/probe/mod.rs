//! Finds the GPUs of this host with NVML, /proc, /dev and the library directories. The result is the inventory. All
//! other code reads it from its file ([`sublet_core::inventory`]).

mod driver_files;
mod inventory;
mod make_nodes;
mod nvml;
mod processes;

pub(crate) use inventory::{OLDEST_BRANCH, connect, left_out, mig_gpus};
pub use inventory::{ProbeError, probe};
pub(crate) use make_nodes::{driver_nodes, has_gpu, is_loaded, link_nodes, make_nodes};
pub(crate) use nvml::{
    Fabric, MigIds, compute_mode, device_by_uuid, fabric, init as open, joined, memory_of_host, mig_handles,
    mig_ids, renew, unless_unsupported,
};
#[cfg(test)]
pub(crate) use processes::cgroups;
pub(crate) use processes::{compute_processes, describe, graphics_processes, mps_clients};
