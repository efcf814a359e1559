//! NVML: how two GPUs are joined.
#![allow(unsafe_code, reason = "C ABI")]

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlGpuLevel_enum_NVML_TOPOLOGY_HOSTBRIDGE as HOST_BRIDGE,
    nvmlGpuLevel_enum_NVML_TOPOLOGY_SINGLE as SINGLE, nvmlGpuLevel_enum_NVML_TOPOLOGY_SYSTEM as SYSTEM,
    nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_NVLINK as NVLINK,
    nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_UNKNOWN as UNKNOWN_INDEX, nvmlGpuP2PCapsIndex_t,
    nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_NOT_SUPPORTED as STATUS_NOT_SUPPORTED,
    nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_OK as STATUS_OK, nvmlGpuP2PStatus_t, nvmlGpuTopologyLevel_t,
    nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT,
    nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED, nvmlReturn_t,
};

use super::out::{Answer, put};
use super::session::{self, Target};
use crate::layout::topology::Gpu;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetP2PStatus(
    device: nvmlDevice_t,
    other: nvmlDevice_t,
    index: nvmlGpuP2PCapsIndex_t,
    status: *mut nvmlGpuP2PStatus_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let other = beside(target, other)?;
        if index >= UNKNOWN_INDEX {
            return Err(INVALID_ARGUMENT);
        }
        let joined = index != NVLINK || same(target.gpu.nvlink, other.nvlink);
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(status, if joined { STATUS_OK } else { STATUS_NOT_SUPPORTED }) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTopologyCommonAncestor(
    device: nvmlDevice_t,
    other: nvmlDevice_t,
    level: *mut nvmlGpuTopologyLevel_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let (gpu, other) = (target.gpu, beside(target, other)?);
        let common = if same(gpu.pcie_switch, other.pcie_switch) {
            SINGLE
        } else if gpu.numa_node == other.numa_node {
            HOST_BRIDGE
        } else {
            SYSTEM
        };
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(level, common) }
    })
}

/// The GPU behind a second handle.
fn beside<'t>(target: &Target<'t>, other: nvmlDevice_t) -> Answer<&'t Gpu> {
    let other = target.session.target(other)?;
    match other.mig {
        Some(_) => Err(NOT_SUPPORTED),
        None if other.gpu.index == target.gpu.index => Err(INVALID_ARGUMENT),
        None => Ok(other.gpu),
    }
}

fn same(one: Option<u32>, other: Option<u32>) -> bool {
    one.is_some() && one == other
}
