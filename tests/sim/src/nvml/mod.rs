//! NVML's stand-in: the exported C functions of libnvidia-ml.so.1 that the product calls, against the
//! simulated host of `layout`.
//!
//! Structs, constants and enums are those of nvml-wrapper-sys 0.10 (generated from CUDA 13's nvml.h,
//! `NVML_API_VERSION` 13), so a layout cannot differ from what the product's NVML wrapper reads; the exported
//! functions' signatures were compared with its `NvmlLib`. Field by field:
//! - `nvmlMemory_v2_t`: `version` is checked (`NVML_STRUCT_VERSION(Memory, 2)`); `used` leaves out `reserved`,
//!   as in v1 it does not.
//! - `nvmlProcessInfo_t` is the v2 struct in the `_v2` and `_v3` calls: without MIG the instance ids are
//!   0xFFFFFFFF. A count of 0 with a null array asks for the number (`NVML_ERROR_INSUFFICIENT_SIZE`).
//! - `nvmlPciInfo_t`: `busId` has an eight-digit domain and capitals, `busIdLegacy` a four-digit one.
//! - SMs: `nvmlDeviceGetNumGpuCores` gives CUDA cores, [`Gpu::cores_per_sm`] times the SMs; on a MIG device
//!   `nvmlDeviceGetAttributes_v2` gives SMs.
//! - `nvmlDeviceGetGpuInstancePossiblePlacements_v2` takes the profile's id, not its index, and answers with
//!   MIG off, as on an H200.
//!
//! Not known from a real card, so chosen: `NVML_ERROR_NOT_SUPPORTED` where a vGPU guest is told to change its
//! compute mode, where a whole GPU is asked for a MIG device's ids or attributes, and where a MIG device is
//! asked for something of the whole GPU.
//!
//! GPUs whose PCI config space reads ffff have fallen off the bus: `NVML_ERROR_GPU_IS_LOST`.
//!
//! [`Gpu::cores_per_sm`]: crate::layout::topology::Gpu::cores_per_sm

mod compute_instance;
mod device;
mod faults;
mod gpu_instance;
mod handles;
mod mig;
mod out;
mod process;
pub mod profiles;
mod session;
mod system;
