//! What GPUs there are: NVML, /proc, /dev and the library directories are asked. The answer is the inventory, which
//! everybody else reads from its file ([`sublet_core::inventory`]).

mod files;
mod make;
mod mig_ids;
mod nvml;
#[expect(clippy::module_inception, reason = "until it has a better name")]
mod probe;
mod processes;
mod running;

use sublet_core::inventory::*;

pub use make::{has_gpu, is_loaded, link_nodes, make_nodes};
pub(crate) use mig_ids::instance_ids;
pub(crate) use nvml::{init as open, joined, mig_handles, unless_unsupported};
pub(crate) use probe::connect;
pub(crate) use probe::mig_gpus;
pub use probe::{ProbeError, probe};
#[cfg(test)]
pub(crate) use processes::cgroups;
pub(crate) use processes::describe;
pub(crate) use running::{compute_processes, graphics_processes, mps_clients};
