//! NVML: MIG mode and MIG devices.
#![allow(unsafe_code, reason = "C ABI")]

use std::ffi::c_uint;

use nix::unistd::geteuid;
use nvml_wrapper_sys::bindings::{
    NVML_DEVICE_MIG_DISABLE, NVML_DEVICE_MIG_ENABLE, nvmlDevice_t, nvmlDeviceAttributes_t,
    nvmlReturn_enum_NVML_ERROR_IN_USE as IN_USE,
    nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT,
    nvmlReturn_enum_NVML_ERROR_NO_PERMISSION as NO_PERMISSION,
    nvmlReturn_enum_NVML_ERROR_NOT_FOUND as NOT_FOUND,
    nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED,
    nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED as RESET_REQUIRED,
    nvmlReturn_enum_NVML_ERROR_UNKNOWN as UNKNOWN, nvmlReturn_enum_NVML_SUCCESS as SUCCESS, nvmlReturn_t,
};

use super::out::{Answer, put};
use super::session::{self, Session, Target};
use crate::layout::contexts;
use crate::layout::instances::{self, Partition};
use crate::layout::state_file::State;
use crate::layout::topology::{Gpu, Mig, Virtualization};
use crate::nvml::profiles;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigMode(
    device: nvmlDevice_t,
    current: *mut c_uint,
    pending: *mut c_uint,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let partition = target.partition()?.ok_or(NOT_SUPPORTED)?;
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe {
            put(current, u32::from(partition.enabled))?;
            put(pending, u32::from(partition.pending))
        }
    })
}

/// The requested mode becomes pending. `activation` says whether it also took effect.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceSetMigMode(
    device: nvmlDevice_t,
    mode: c_uint,
    activation: *mut nvmlReturn_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        if mode != NVML_DEVICE_MIG_DISABLE && mode != NVML_DEVICE_MIG_ENABLE || activation.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let status = set_mode(target, mode == NVML_DEVICE_MIG_ENABLE)?;
        // SAFETY: not null, so valid, as nvml.h asks for.
        unsafe { put(activation, status) }
    })
}

fn set_mode(target: &Target<'_>, enable: bool) -> Answer<nvmlReturn_t> {
    let gpu = target.gpu;
    if target.partition()?.is_none() || gpu.virtualization == Virtualization::Vgpu {
        return Err(NOT_SUPPORTED);
    }
    change(target.session, |state| {
        let partition = state.mig.get_mut(&gpu.uuid).ok_or(NOT_SUPPORTED)?;
        partition.pending = enable;
        Ok(activate(target.session, gpu, state))
    })
}

/// Makes the pending mode take effect, if possible. An Ampere GPU needs a reset for that, and a GPU that is passed
/// through to this machine cannot be reset from here.
fn activate(session: &Session, gpu: &Gpu, state: &mut State) -> nvmlReturn_t {
    let Some(partition) = state.mig.get_mut(&gpu.uuid) else { return NOT_SUPPORTED };
    if partition.pending == partition.enabled {
        return SUCCESS;
    }
    if !partition.instances.is_empty() || used(session, gpu, |_| true) {
        return IN_USE;
    }
    if !gpu.keeps_mig_mode() {
        partition.enabled = partition.pending;
        state.compute_mode.remove(&gpu.uuid);
        return SUCCESS;
    }
    if gpu.virtualization == Virtualization::Passthrough {
        return RESET_REQUIRED;
    }
    state.reset(gpu);
    SUCCESS
}

/// Whether any process has a context on some part of a GPU.
pub fn used(session: &Session, gpu: &Gpu, part: impl Fn(Option<(u32, u32)>) -> bool) -> bool {
    let held = contexts::list(&session.topology.tag);
    held.iter().any(|held| held.on.minor == gpu.minor && part(held.on.instance))
}

/// Changes MIG. Needs root.
pub fn change<T>(session: &Session, change: impl FnOnce(&mut State) -> Answer<T>) -> Answer<T> {
    if !geteuid().is_root() {
        return Err(NO_PERMISSION);
    }
    // A container cannot reach the driver's state.
    let root = session.root.as_ref().ok_or(NO_PERMISSION)?;
    State::change_mig(root, &session.topology, change).map_err(|_| UNKNOWN)?
}

/// Returns 0 if MIG is not supported or not enabled.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMaxMigDeviceCount(
    device: nvmlDevice_t,
    count: *mut c_uint,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let on = target.partition()?.is_some_and(|partition| partition.enabled);
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(count, if on { most_devices(target.gpu) } else { 0 }) }
    })
}

fn most_devices(gpu: &Gpu) -> u32 {
    instances::table(gpu).iter().map(|profile| profile.instances).max().unwrap_or(0)
}

/// Devices are counted by GPU instance, then by compute instance, without a gap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    device: nvmlDevice_t,
    index: c_uint,
    mig: *mut nvmlDevice_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let partition: Partition = target.partition()?.ok_or(NOT_SUPPORTED)?;
        if partition.enabled && index >= most_devices(target.gpu) {
            return Err(INVALID_ARGUMENT);
        }
        let devices = partition.devices(target.gpu);
        let found = devices.get(index as usize).ok_or(NOT_FOUND)?;
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(mig, session::handle(target.gpu, Some(found))) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceIsMigDeviceHandle(
    device: nvmlDevice_t,
    is_mig: *mut c_uint,
) -> nvmlReturn_t {
    // SAFETY: null or valid, as nvml.h asks for.
    session::device(device, |target| unsafe { put(is_mig, u32::from(target.mig.is_some())) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
    mig: nvmlDevice_t,
    device: *mut nvmlDevice_t,
) -> nvmlReturn_t {
    session::device(mig, |target| {
        mig_of(target)?;
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(device, session::handle(target.gpu, None)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuInstanceId(device: nvmlDevice_t, id: *mut c_uint) -> nvmlReturn_t {
    // SAFETY: null or valid, as nvml.h asks for.
    session::device(device, |target| unsafe { put(id, mig_of(target)?.gi) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeInstanceId(
    device: nvmlDevice_t,
    id: *mut c_uint,
) -> nvmlReturn_t {
    // SAFETY: null or valid, as nvml.h asks for.
    session::device(device, |target| unsafe { put(id, mig_of(target)?.ci) })
}

/// Not supported for a whole GPU, as seen on an H200 with MIG off.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetAttributes_v2(
    device: nvmlDevice_t,
    attributes: *mut nvmlDeviceAttributes_t,
) -> nvmlReturn_t {
    session::device(device, |target| {
        let mig = target.mig.as_ref().ok_or(NOT_SUPPORTED)?;
        let found = profiles::find(instances::table(target.gpu), &mig.profile);
        let (profile, compute) = found.ok_or(UNKNOWN)?;
        let [copy, decoder, jpeg, ofa] = profile.engines;
        let found = nvmlDeviceAttributes_t {
            multiprocessorCount: mig.sm_count,
            sharedCopyEngineCount: copy,
            sharedDecoderCount: decoder,
            sharedEncoderCount: 0,
            sharedJpegCount: jpeg,
            sharedOfaCount: ofa,
            gpuInstanceSliceCount: profile.slices,
            computeInstanceSliceCount: compute.slices,
            memorySizeMB: mig.memory_mib,
        };
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(attributes, found) }
    })
}

/// For a whole GPU these ids are an invalid argument, as seen on an H200.
fn mig_of<'t>(target: &'t Target<'_>) -> Answer<&'t Mig> {
    target.mig.as_ref().ok_or(INVALID_ARGUMENT)
}
