//! NVML: the processes with a context on a device.
#![allow(unsafe_code, reason = "C ABI")]

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlProcessInfo_t, nvmlReturn_t};

use super::out::put_list;
use super::session::{self, Target};
use crate::layout::contexts::{self, Held, Kind};

/// The value of an instance id without an instance.
const NO_INSTANCE: c_uint = c_uint::MAX;

/// Every process with a context: processes without MPS, MPS servers and MPS clients.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_t,
) -> nvmlReturn_t {
    // SAFETY: the caller's array of `*count` elements, as nvml.h asks for.
    session::device(device, |target| unsafe { put_list(infos, count, &infos_of(target, |_| true)) })
}

/// As v3: the struct is the same.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v2(
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_t,
) -> nvmlReturn_t {
    // SAFETY: as above.
    unsafe { nvmlDeviceGetComputeRunningProcesses_v3(device, count, infos) }
}

/// MPS clients only: neither servers nor processes outside MPS.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_t,
) -> nvmlReturn_t {
    let client = |held: &Held| held.kind == Kind::Client;
    // SAFETY: the caller's array of `*count` elements, as nvml.h asks for.
    session::device(device, |target| unsafe { put_list(infos, count, &infos_of(target, client)) })
}

/// As v3: the struct is the same.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMPSComputeRunningProcesses_v2(
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_t,
) -> nvmlReturn_t {
    // SAFETY: as above.
    unsafe { nvmlDeviceGetMPSComputeRunningProcesses_v3(device, count, infos) }
}

fn infos_of(target: &Target<'_>, wanted: impl Fn(&Held) -> bool) -> Vec<nvmlProcessInfo_t> {
    let held = contexts::told(&target.session.topology.tag, target.session.root.as_ref());
    held.iter().filter(|held| wanted(held) && is_on(held, target)).map(info).collect()
}

/// Whether the context is on the device.
pub(super) fn is_on(held: &Held, target: &Target<'_>) -> bool {
    let instance = target.mig.as_ref().map(|mig| (mig.gi, mig.ci));
    held.on.minor == target.gpu.minor && (instance.is_none() || held.on.instance == instance)
}

fn info(held: &Held) -> nvmlProcessInfo_t {
    let (gi, ci) = held.on.instance.unwrap_or((NO_INSTANCE, NO_INSTANCE));
    nvmlProcessInfo_t {
        pid: held.pid.unsigned_abs(),
        usedGpuMemory: held.mib << 20,
        gpuInstanceId: gi,
        computeInstanceId: ci,
    }
}
