//! NVML's stand-in: the exported C functions of libnvidia-ml.so.1 that the product calls, against the
//! simulated host of `layout`.
//!
//! Structs, constants and enums are those of nvml-wrapper-sys 0.10 (generated from CUDA 13's nvml.h,
//! `NVML_API_VERSION` 13), so a layout cannot differ from what the product's NVML wrapper reads; the exported
//! functions' signatures were compared with its `NvmlLib`. Contracts (who may call, which error when, what is
//! an in- and what an out-parameter) were read in the comments of nvml.h as NVIDIA/go-nvml has it
//! (`gen/nvml/nvml.h`). "H200" below means: asked of a real one, driver 580, MIG off (docs/evidence). Field
//! by field:
//! - `nvmlMemory_v2_t`: `version` is checked (`NVML_STRUCT_VERSION(Memory, 2)`); `used` leaves out
//!   `reserved`, as in v1 it does not.
//! - `nvmlProcessInfo_t` is the v2 struct in the `_v2` and `_v3` calls: without MIG the instance ids are
//!   0xFFFFFFFF. A count of 0 with a null array asks for the number (`NVML_ERROR_INSUFFICIENT_SIZE`).
//! - `nvmlPciInfo_t`: `busId` has an eight-digit domain and capitals, `busIdLegacy` a four-digit one.
//! - SMs: `nvmlDeviceGetNumGpuCores` gives CUDA cores, [`Gpu::cores_per_sm`] times the SMs; on a MIG device
//!   `nvmlDeviceGetAttributes_v2` gives SMs.
//!
//! MIG mode (`nvmlDeviceSetMigMode`, `GetMigMode`; nvml.h and NVIDIA's MIG User Guide):
//! - The call succeeds and `activationStatus` says how it went: `IN_USE` while somebody has a context on the
//!   GPU, with the mode pending; `RESET_REQUIRED` on an Ampere that is passed through to a virtual machine;
//!   else it is in force. An Ampere is reset by the call itself (`State::resets` counts), later ones are not.
//!   A pending mode comes into force with `nvidia-smi --gpu-reset` or the next call. `sublet-sim reboot`
//!   leaves Ampere its mode, later ones not, and nobody an instance.
//! - Chosen: `IN_USE` also while instances exist (the real driver may take them along).
//!
//! GPU instances:
//! - `nvmlGpuInstanceProfileInfo_t`, `_v2_t`, `_v3_t`: ids, counts, engines and memory as on the H200. Both
//!   versioned structs come back with `version` 0, v3 without name and capabilities, and a wrong version is
//!   an `INVALID_ARGUMENT` (H200). Index 17 and above is an invalid argument, a profile that the part lacks
//!   is not supported (H200).
//! - `nvmlDeviceGetGpuInstancePossiblePlacements_v2` takes the profile's id, not its index; answers with MIG
//!   off; lists all placements, free or not; never reads `count` (H200).
//! - `nvmlDeviceGetGpuInstanceRemainingCapacity` with MIG off: what an empty GPU has (H200). With MIG on: as
//!   many more as fit around what is there, +me profiles one at a time (nvidia-smi's Free column).
//! - `nvmlDeviceGetGpuInstances` writes as many as there are, into an array that must have room for as many
//!   as the profile has (nvml.h); `GetGpuInstanceById` without one is `NOT_FOUND` (nvml.h, H200).
//! - Create: `NOT_SUPPORTED` with MIG off and in a vGPU guest, `INSUFFICIENT_RESOURCES` where memory slices
//!   overlap (nvml.h); a placement that the profile has not is an `INVALID_ARGUMENT`. Without a placement, in
//!   the order seen on A100 and H100 ([`profiles::Profile::order`]). Ids follow from the placement
//!   ([`profiles::instance_id`]).
//! - Destroy: `IN_USE` with compute instances or processes on it (nvml.h). A handle ends with its instance,
//!   and one made again has another (nvml.h: "the GPU instance handle would become invalid").
//! - "Requires privileged user" (nvml.h) is `NO_PERMISSION` for others than root while MIG is on; with MIG
//!   off everybody is answered (H200). In a container nothing can be changed.
//!
//! Compute instances: as for GPU instances; profiles, ids, counts and SMs as `nvidia-smi mig -lcip` was
//! published for A100 ([`profiles`]). `id` is the lowest free one, placements are in compute slices of the
//! GPU instance (`nvidia-smi mig -lci`). What the versioned structs leave out is taken over from GPU
//! instances.
//!
//! MIG devices:
//! - `nvmlDeviceGetMaxMigDeviceCount` is 0 with MIG off (nvml.h, H200). Indices go by GPU instance id, then
//!   compute instance id, without a gap, as nvidia-smi's table of MIG devices does. An index without a device
//!   is `NOT_FOUND` (nvml.h, H200), one that is not below the maximum an `INVALID_ARGUMENT`.
//! - Handles go by ids: "handles may be reused and their properties can change" (nvml.h). UUIDs are new each
//!   time.
//! - The instance ids and the parent of a whole GPU are an `INVALID_ARGUMENT`, its attributes not supported
//!   (H200).
//! - `nvmlDeviceAttributes_t`: engines of the GPU instance, SMs and slices of the compute instance.
//!
//! Not known from a real card, so chosen: `NVML_ERROR_NOT_SUPPORTED` where a vGPU guest is told to change its
//! compute mode, and where a MIG device is asked for something of the whole GPU.
//!
//! Use: every process computes all the time; who is told apart from whom is as on the H200 ([`utilization`]). GPM answers
//! from Hopper on ([`gpm`]); its values and units are chosen.
//!
//! Calls can be made to fail and are written down on demand: `faults`.
//!
//! GPUs whose PCI config space reads ffff have fallen off the bus: `NVML_ERROR_GPU_IS_LOST`.
//!
//! [`Gpu::cores_per_sm`]: crate::layout::topology::Gpu::cores_per_sm

mod compute_instance;
mod device;
mod faults;
mod gpm;
mod gpu_instance;
mod handles;
mod mig;
mod out;
mod process;
pub mod profiles;
mod session;
mod system;
mod utilization;
