//! The instance ids of a MIG device: two NVML calls that nvml-wrapper has no method for.
#![allow(unsafe_code, reason = "NVML by its C ABI")]

use std::os::raw::c_uint;

use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try};
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlReturn_t};

/// An id of one device (`nvmlDeviceGetGpuInstanceId`, `nvmlDeviceGetComputeInstanceId`; nvml.h).
type GetId = unsafe extern "C" fn(nvmlDevice_t, *mut c_uint) -> nvmlReturn_t;

/// (GPU instance id, compute instance id) of a MIG device.
pub(crate) fn instance_ids(mig: &Device<'_>) -> Result<(u32, u32), NvmlError> {
    let library = mig.nvml().lib();
    let gpu = nvml_sym(library.nvmlDeviceGetGpuInstanceId.as_ref())?;
    let compute = nvml_sym(library.nvmlDeviceGetComputeInstanceId.as_ref())?;
    Ok((ask(mig, *gpu)?, ask(mig, *compute)?))
}

fn ask(device: &Device<'_>, get: GetId) -> Result<u32, NvmlError> {
    let mut id: c_uint = 0;
    // SAFETY: both functions are declared in nvml.h as (nvmlDevice_t, unsigned int *). The handle comes
    // from `device`, which borrows the initialized library it belongs to, and `id` outlives the call.
    nvml_try(unsafe { get(device.handle(), &raw mut id) })?;
    Ok(id)
}
