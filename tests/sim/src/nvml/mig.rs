//! NVML: MIG mode, MIG devices and which GPU instances a GPU could have.
#![allow(unsafe_code, reason = "C ABI")]

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::{
    NVML_GPU_INSTANCE_PROFILE_COUNT, nvmlDevice_t, nvmlDeviceAttributes_t, nvmlGpuInstancePlacement_t,
    nvmlGpuInstanceProfileInfo_t, nvmlGpuInstanceProfileInfo_v2_t,
    nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH as ARGUMENT_VERSION_MISMATCH,
    nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT,
    nvmlReturn_enum_NVML_ERROR_NOT_FOUND as NOT_FOUND,
    nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED, nvmlReturn_enum_NVML_ERROR_UNKNOWN as UNKNOWN,
    nvmlReturn_t,
};

use super::out::{Answer, chars, put, put_list};
use super::profiles::{self, Profile};
use super::session::{self, Target};
use crate::layout::topology::{Gpu, Mig, MigMode};

/// `NVML_STRUCT_VERSION(GpuInstanceProfileInfo, 2)`.
#[expect(clippy::cast_possible_truncation, reason = "152 bytes")]
const PROFILE_INFO_V2: c_uint = size_of::<nvmlGpuInstanceProfileInfo_v2_t>() as c_uint | 2 << 24;

/// Current and pending mode are the same: a change that waits for a reset is not simulated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigMode(
    device: nvmlDevice_t,
    current: *mut c_uint,
    pending: *mut c_uint,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let mode = match target.gpu.mig_mode {
            MigMode::None => return Err(NOT_SUPPORTED),
            MigMode::Disabled => 0,
            MigMode::Enabled => 1,
        };
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe {
            put(current, mode)?;
            put(pending, mode)
        }
    })
}

/// Zero where MIG is not supported or not enabled.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMaxMigDeviceCount(
    device: nvmlDevice_t,
    count: *mut c_uint,
) -> nvmlReturn_t {
    // SAFETY: null or valid, as nvml.h asks for.
    session::gpu(device, |target| unsafe { put(count, most_devices(target.gpu)) })
}

fn most_devices(gpu: &Gpu) -> u32 {
    let table = if gpu.mig_mode == MigMode::Enabled { table(gpu).unwrap_or_default() } else { &[] };
    table.iter().map(|profile| profile.instances).max().unwrap_or(0)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    device: nvmlDevice_t,
    index: c_uint,
    mig: *mut nvmlDevice_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        match target.gpu.mig_mode {
            MigMode::None => return Err(NOT_SUPPORTED),
            MigMode::Disabled => return Err(NOT_FOUND),
            MigMode::Enabled if index >= most_devices(target.gpu) => return Err(INVALID_ARGUMENT),
            MigMode::Enabled => {}
        }
        let devices = target.session.mig_devices(target.gpu)?;
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

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetAttributes_v2(
    device: nvmlDevice_t,
    attributes: *mut nvmlDeviceAttributes_t,
) -> nvmlReturn_t {
    session::device(device, |target| {
        let mig = mig_of(target)?;
        let shape = profiles::shape(table(target.gpu)?, &mig.profile).ok_or(UNKNOWN)?;
        let found = nvmlDeviceAttributes_t {
            multiprocessorCount: mig.sm_count,
            sharedCopyEngineCount: shape.gpu_slices,
            sharedDecoderCount: 0,
            sharedEncoderCount: 0,
            sharedJpegCount: 0,
            sharedOfaCount: 0,
            gpuInstanceSliceCount: shape.gpu_slices,
            computeInstanceSliceCount: shape.compute_slices,
            memorySizeMB: mig.memory_mib,
        };
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(attributes, found) }
    })
}

fn mig_of<'t>(target: &'t Target<'_>) -> Answer<&'t Mig> {
    target.mig.as_ref().ok_or(NOT_SUPPORTED)
}

fn table(gpu: &Gpu) -> Answer<&'static [Profile]> {
    gpu.mig_table.as_deref().and_then(profiles::table).ok_or(NOT_SUPPORTED)
}

/// The profile with an index (`NVML_GPU_INSTANCE_PROFILE_*`).
fn by_index(gpu: &Gpu, index: c_uint) -> Answer<&'static Profile> {
    if index >= NVML_GPU_INSTANCE_PROFILE_COUNT {
        return Err(INVALID_ARGUMENT);
    }
    table(gpu)?.iter().find(|profile| profile.index == index).ok_or(NOT_SUPPORTED)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuInstanceProfileInfo(
    device: nvmlDevice_t,
    profile: c_uint,
    info: *mut nvmlGpuInstanceProfileInfo_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let profile = by_index(target.gpu, profile)?;
        let found = nvmlGpuInstanceProfileInfo_t {
            id: profile.id,
            isP2pSupported: 0,
            sliceCount: profile.slices,
            instanceCount: profile.instances,
            multiprocessorCount: profile.sm_count,
            copyEngineCount: profile.slices,
            decoderCount: 0,
            encoderCount: 0,
            jpegCount: 0,
            ofaCount: 0,
            memorySizeMB: profile.memory_mib,
        };
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(info, found) }
    })
}

/// With the profile's name, as `MIG 1g.18gb`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuInstanceProfileInfoV(
    device: nvmlDevice_t,
    profile: c_uint,
    info: *mut nvmlGpuInstanceProfileInfo_v2_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        // SAFETY: null or valid, as nvml.h asks for.
        let version = unsafe { info.as_ref() }.ok_or(INVALID_ARGUMENT)?.version;
        if version != PROFILE_INFO_V2 {
            return Err(ARGUMENT_VERSION_MISMATCH);
        }
        let profile = by_index(target.gpu, profile)?;
        let found = nvmlGpuInstanceProfileInfo_v2_t {
            version,
            id: profile.id,
            isP2pSupported: 0,
            sliceCount: profile.slices,
            instanceCount: profile.instances,
            multiprocessorCount: profile.sm_count,
            copyEngineCount: profile.slices,
            decoderCount: 0,
            encoderCount: 0,
            jpegCount: 0,
            ofaCount: 0,
            memorySizeMB: profile.memory_mib,
            name: chars(&format!("MIG {}", profile.name)),
        };
        // SAFETY: as above.
        unsafe { put(info, found) }
    })
}

/// Takes the profile's id. With a null array, `count` becomes the number there is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(
    device: nvmlDevice_t,
    profile_id: c_uint,
    placements: *mut nvmlGpuInstancePlacement_t,
    count: *mut c_uint,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let mut profiles = table(target.gpu)?.iter();
        let profile = profiles.find(|profile| profile.id == profile_id).ok_or(INVALID_ARGUMENT)?;
        let place = |&start| nvmlGpuInstancePlacement_t { start, size: profile.size };
        let found: Vec<_> = profile.starts.iter().map(place).collect();
        if placements.is_null() {
            // SAFETY: null or valid, as nvml.h asks for.
            return unsafe { put(count, c_uint::try_from(found.len()).map_err(|_| UNKNOWN)?) };
        }
        // SAFETY: the caller's array of `*count` elements, as nvml.h asks for.
        unsafe { put_list(placements, count, &found) }
    })
}
