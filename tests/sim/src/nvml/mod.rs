//! NVML's stand-in: the exported C functions of libnvidia-ml.so.1 that the product calls, against the
//! simulated host of `layout`.
//!
//! Structs, constants and enums are those of nvml-wrapper-sys 0.10 (generated from CUDA 13's nvml.h, `NVML_API_VERSION`
//! 13), so a layout cannot differ from what the product's NVML wrapper reads. The exported functions' signatures were
//! compared with its `NvmlLib`. Contracts (permissions, errors, in- and out-parameters) come from the comments of
//! nvml.h in NVIDIA/go-nvml (`gen/nvml/nvml.h`). "H200" below means: seen on a real H200, driver 580, MIG off
//! (docs/evidence). Field by field:
//! - `nvmlMemory_v2_t`: `version` is checked (`NVML_STRUCT_VERSION(Memory, 2)`). `used` does not include `reserved`; in
//!   v1 it does.
//! - `nvmlProcessInfo_t` is the v2 struct in the `_v2` and `_v3` calls: without MIG the instance ids are
//!   0xFFFFFFFF. A count of 0 with a null array asks for the number (`NVML_ERROR_INSUFFICIENT_SIZE`).
//! - `nvmlPciInfo_t`: `busId` has an eight-digit domain and capitals, `busIdLegacy` a four-digit one.
//! - SMs: `nvmlDeviceGetNumGpuCores` gives CUDA cores, [`Gpu::cores_per_sm`] times the SMs; on a MIG device
//!   `nvmlDeviceGetAttributes_v2` gives SMs.
//!
//! MIG mode (`nvmlDeviceSetMigMode`, `GetMigMode`; nvml.h and NVIDIA's MIG User Guide):
//! - The call succeeds, and `activationStatus` has the result: `IN_USE` while a process has a context on the GPU (the
//!   mode is pending then); `RESET_REQUIRED` on an Ampere GPU that is passed through to a virtual machine; otherwise
//!   the mode is in effect. The call resets an Ampere GPU (`State::resets` counts), but not later GPUs. A pending mode
//!   takes effect with `nvidia-smi --gpu-reset` or the next call. After `sublet-sim reboot` Ampere GPUs keep the mode,
//!   later GPUs lose it, and all instances are lost.
//! - Chosen: `IN_USE` also while instances exist (the real driver may destroy them).
//!
//! GPU instances:
//! - `nvmlGpuInstanceProfileInfo_t`, `_v2_t`, `_v3_t`: ids, counts, engines and memory as on the H200. Both
//!   versioned structs come back with `version` 0, v3 without name and capabilities, and a wrong version is
//!   an `INVALID_ARGUMENT` (H200). Index 17 and above is an invalid argument, a profile that the part lacks
//!   is not supported (H200).
//! - `nvmlDeviceGetGpuInstancePossiblePlacements_v2` takes the profile's id, not its index; answers with MIG
//!   off; lists all placements, free or not; never reads `count` (H200).
//! - `nvmlDeviceGetGpuInstanceRemainingCapacity` with MIG off: the capacity of an empty GPU (H200). With MIG on: how
//!   many more fit beside the existing instances, at most one of the +me profiles (nvidia-smi's Free column).
//! - `nvmlDeviceGetGpuInstances` writes the existing instances into an array that must have room for as many as the
//!   profile allows (nvml.h). `GetGpuInstanceById` without such an instance is `NOT_FOUND` (nvml.h, H200).
//! - Create: `NOT_SUPPORTED` with MIG off and in a vGPU guest, `INSUFFICIENT_RESOURCES` if memory slices overlap
//!   (nvml.h), `INVALID_ARGUMENT` for a placement that the profile does not have. Without a placement, placements are
//!   tried in the order seen on A100 and H100 ([`profiles::Profile::order`]). Ids follow from the placement
//!   ([`profiles::instance_id`]).
//! - Destroy: `IN_USE` with compute instances or processes on it (nvml.h). A handle becomes invalid with its instance,
//!   and a new instance has another one (nvml.h: "the GPU instance handle would become invalid").
//! - "Requires privileged user" (nvml.h) is `NO_PERMISSION` for users other than root while MIG is on. With MIG off
//!   every user gets an answer (H200). In a container nothing can be changed.
//!
//! Compute instances: as for GPU instances. Profiles, ids, counts and SMs are those of `nvidia-smi mig -lcip` as
//! published for A100 ([`profiles`]). `id` is the lowest free one, placements are in compute slices of the GPU instance
//! (`nvidia-smi mig -lci`). The versioned structs leave out the same fields as those of GPU instances.
//!
//! MIG devices:
//! - `nvmlDeviceGetMaxMigDeviceCount` is 0 with MIG off (nvml.h, H200). Indices are ordered by GPU instance id, then
//!   compute instance id, without gaps, as in nvidia-smi's table of MIG devices. An index without a device is
//!   `NOT_FOUND` (nvml.h, H200), an index not below the maximum `INVALID_ARGUMENT`.
//! - Handles follow from the ids: "handles may be reused and their properties can change" (nvml.h). Each new device has
//!   a new UUID.
//! - For a whole GPU, the instance ids and the parent are `INVALID_ARGUMENT`, and the attributes are not supported
//!   (H200).
//! - `nvmlDeviceAttributes_t`: engines of the GPU instance, SMs and slices of the compute instance.
//!
//! Not seen on a real card, so chosen: `NVML_ERROR_NOT_SUPPORTED` if a vGPU guest changes its compute mode, and if a
//! MIG device is asked for a property of the whole GPU.
//!
//! How GPUs are joined: `nvmlDeviceGetP2PStatus` answers for `NVLink` what the topology says, and
//! `nvmlDeviceGetTopologyCommonAncestor` by `PCIe` alone, also where `NVLink` joins them (seen on four H100s). Chosen: other
//! P2P capabilities are OK, an index that nvml.h lacks and a GPU beside itself are an `INVALID_ARGUMENT`.
//!
//! Utilization: every process computes all the time. Which processes are reported separately is as on the H200
//! ([`utilization`]). GPM works from Hopper on ([`gpm`]); its values and units are chosen.
//!
//! Events and health ([`events`]): `sublet-sim xid` makes a GPU report an Xid.
//!
//! `faults` makes calls fail and records calls on demand.
//!
//! A GPU whose PCI config space reads ffff has fallen off the bus: `NVML_ERROR_GPU_IS_LOST`.
//!
//! [`Gpu::cores_per_sm`]: crate::layout::topology::Gpu::cores_per_sm

mod compute_instance;
mod device;
mod events;
pub(crate) mod faults;
mod gpm;
mod gpu_instance;
mod handles;
mod links;
mod mig;
mod out;
mod process;
pub mod profiles;
mod session;
mod system;
mod utilization;

pub(crate) use out::Answer;
pub(crate) use session::own_file;
