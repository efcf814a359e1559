//! NVML's lists of processes on a device, each read with one call. nvml-wrapper asks for the length first, which costs
//! about half as much again (docs/evidence/2026-11-22-guard-cost.md).
#![allow(unsafe_code, reason = "NVML by its C ABI")]

use std::ffi::c_uint;

use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try};
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlProcessInfo_t, nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE as INSUFFICIENT_SIZE,
    nvmlReturn_t,
};

use super::unless_unsupported;

/// A function that lists processes of one device (`nvmlDeviceGet…RunningProcesses_v3`; nvml.h).
type GetList = unsafe extern "C" fn(nvmlDevice_t, *mut c_uint, *mut nvmlProcessInfo_t) -> nvmlReturn_t;

/// Initial room: the clients of one server, and some more.
const USUAL: usize = 128;

/// How often a list that grows between two calls is read.
const TRIES: usize = 6;

/// Processes with compute contexts: MPS servers, their clients, and processes outside MPS. Empty if the driver has no
/// such list, as are the others.
pub(crate) fn compute_processes(device: &Device<'_>) -> Result<Vec<ProcessInfo>, NvmlError> {
    let call = device.nvml().lib().nvmlDeviceGetComputeRunningProcesses_v3.as_ref();
    Ok(unless_unsupported(nvml_sym(call).and_then(|call| ask(device, *call)))?.unwrap_or_default())
}

/// Clients of MPS servers; `None` if the driver has no such list.
pub(crate) fn mps_clients(device: &Device<'_>) -> Result<Option<Vec<ProcessInfo>>, NvmlError> {
    let call = device.nvml().lib().nvmlDeviceGetMPSComputeRunningProcesses_v3.as_ref();
    unless_unsupported(nvml_sym(call).and_then(|call| ask(device, *call)))
}

/// Processes with graphics contexts.
pub(crate) fn graphics_processes(device: &Device<'_>) -> Result<Vec<ProcessInfo>, NvmlError> {
    let call = device.nvml().lib().nvmlDeviceGetGraphicsRunningProcesses_v3.as_ref();
    Ok(unless_unsupported(nvml_sym(call).and_then(|call| ask(device, *call)))?.unwrap_or_default())
}

fn ask(device: &Device<'_>, call: GetList) -> Result<Vec<ProcessInfo>, NvmlError> {
    let empty = nvmlProcessInfo_t { pid: 0, usedGpuMemory: 0, gpuInstanceId: 0, computeInstanceId: 0 };
    let mut list = vec![empty; USUAL];
    for _ in 0..TRIES {
        let room = c_uint::try_from(list.len()).map_err(|_| NvmlError::InsufficientSize(None))?;
        let mut count = room;
        // SAFETY: an array of `count` elements of the struct that version 3 of the calls has; the handle comes from
        // `device`, which borrows the initialized library it belongs to.
        let answer = unsafe { call(device.handle(), &raw mut count, list.as_mut_ptr()) };
        if answer != INSUFFICIENT_SIZE {
            nvml_try(answer)?;
            list.truncate(count as usize);
            return Ok(list.into_iter().map(ProcessInfo::from).collect());
        }
        // `count` is the room that was needed just now.
        list.resize(count.max(room) as usize + USUAL, empty);
    }
    Err(NvmlError::InsufficientSize(None))
}
