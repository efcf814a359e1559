//! NVML: GPU instances, and the GPU instance profiles of a GPU.
#![allow(unsafe_code, reason = "C ABI")]

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::{
    NVML_GPU_INSTANCE_PROFILE_COUNT, nvmlDevice_t, nvmlGpuInstance_t, nvmlGpuInstanceInfo_t,
    nvmlGpuInstancePlacement_t, nvmlGpuInstanceProfileInfo_t, nvmlGpuInstanceProfileInfo_v2_t,
    nvmlGpuInstanceProfileInfo_v3_t, nvmlReturn_enum_NVML_ERROR_IN_USE as IN_USE,
    nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES as INSUFFICIENT_RESOURCES,
    nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT,
    nvmlReturn_enum_NVML_ERROR_NO_PERMISSION as NO_PERMISSION,
    nvmlReturn_enum_NVML_ERROR_NOT_FOUND as NOT_FOUND,
    nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED, nvmlReturn_t,
};

use super::handles::{self, Found};
use super::mig::{change, used};
use super::out::{Answer, chars, put, put_all, struct_version, version_of};
use super::profiles::Profile;
use super::session::{self, Target};
use crate::layout::instances::{self, Partition, by_id};
use crate::layout::topology::{Gpu, Virtualization};

/// `NVML_STRUCT_VERSION(GpuInstanceProfileInfo, 2)`.
const V2: c_uint = struct_version::<nvmlGpuInstanceProfileInfo_v2_t>(2);
/// `NVML_STRUCT_VERSION(GpuInstanceProfileInfo, 3)`.
const V3: c_uint = struct_version::<nvmlGpuInstanceProfileInfo_v3_t>(3);

/// MIG of a GPU that supports it, whether it is on or off. If it is on, only root may ask.
fn partition(target: &Target<'_>) -> Answer<Partition> {
    let partition = target.partition()?.ok_or(NOT_SUPPORTED)?;
    if partition.enabled && !nix::unistd::geteuid().is_root() {
        return Err(NO_PERMISSION);
    }
    Ok(partition)
}

fn profile(gpu: &Gpu, id: c_uint) -> Answer<&'static Profile> {
    by_id(instances::table(gpu), id).ok_or(INVALID_ARGUMENT)
}

/// The profile with an index (`NVML_GPU_INSTANCE_PROFILE_*`).
fn by_index(gpu: &Gpu, index: c_uint) -> Answer<&'static Profile> {
    if index >= NVML_GPU_INSTANCE_PROFILE_COUNT {
        return Err(INVALID_ARGUMENT);
    }
    instances::table(gpu).iter().find(|profile| profile.index == index).ok_or(NOT_SUPPORTED)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuInstanceProfileInfo(
    device: nvmlDevice_t,
    profile: c_uint,
    info: *mut nvmlGpuInstanceProfileInfo_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let profile = by_index(target.gpu, profile)?;
        let [copy, decoder, jpeg, ofa] = profile.engines;
        let found = nvmlGpuInstanceProfileInfo_t {
            id: profile.id,
            isP2pSupported: 0,
            sliceCount: profile.slices,
            instanceCount: profile.instances,
            multiprocessorCount: profile.sm_count,
            copyEngineCount: copy,
            decoderCount: decoder,
            encoderCount: 0,
            jpegCount: jpeg,
            ofaCount: ofa,
            memorySizeMB: profile.memory_mib,
        };
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(info, found) }
    })
}

/// The v2 struct contains the profile's name, such as `MIG 1g.18gb`. Driver 580 leaves it empty in the v3 struct.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuInstanceProfileInfoV(
    device: nvmlDevice_t,
    profile: c_uint,
    info: *mut nvmlGpuInstanceProfileInfo_v2_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        // SAFETY: null or a versioned struct, as nvml.h asks for.
        unsafe { put_profile(info, by_index(target.gpu, profile)?) }
    })
}

/// As above, by the profile's id.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuInstanceProfileInfoByIdV(
    device: nvmlDevice_t,
    profile_id: c_uint,
    info: *mut nvmlGpuInstanceProfileInfo_v2_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        // SAFETY: null or a versioned struct, as nvml.h asks for.
        unsafe { put_profile(info, profile(target.gpu, profile_id)?) }
    })
}

/// # Safety
/// `info` is null or as large as its version says.
unsafe fn put_profile(info: *mut nvmlGpuInstanceProfileInfo_v2_t, profile: &Profile) -> Answer {
    let [copy, decoder, jpeg, ofa] = profile.engines;
    let v2 = nvmlGpuInstanceProfileInfo_v2_t {
        // Driver 580 overwrites the version.
        version: 0,
        id: profile.id,
        isP2pSupported: 0,
        sliceCount: profile.slices,
        instanceCount: profile.instances,
        multiprocessorCount: profile.sm_count,
        copyEngineCount: copy,
        decoderCount: decoder,
        encoderCount: 0,
        jpegCount: jpeg,
        ofaCount: ofa,
        memorySizeMB: profile.memory_mib,
        name: chars(&format!("MIG {}", profile.name)),
    };
    // SAFETY: `info` is null or begins with its version; then it is valid for a write of that struct.
    unsafe {
        match version_of(info.cast())? {
            V2 => put(info, v2),
            V3 => put(info.cast(), v3(&v2)),
            _ => Err(INVALID_ARGUMENT),
        }
    }
}

const fn v3(v2: &nvmlGpuInstanceProfileInfo_v2_t) -> nvmlGpuInstanceProfileInfo_v3_t {
    nvmlGpuInstanceProfileInfo_v3_t {
        version: v2.version,
        id: v2.id,
        sliceCount: v2.sliceCount,
        instanceCount: v2.instanceCount,
        multiprocessorCount: v2.multiprocessorCount,
        copyEngineCount: v2.copyEngineCount,
        decoderCount: v2.decoderCount,
        encoderCount: v2.encoderCount,
        jpegCount: v2.jpegCount,
        ofaCount: v2.ofaCount,
        memorySizeMB: v2.memorySizeMB,
        name: [0; 96],
        capabilities: 0,
    }
}

/// Takes the profile's id. Returns all possible placements, free or not. With a null array it returns only their
/// number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(
    device: nvmlDevice_t,
    profile_id: c_uint,
    placements: *mut nvmlGpuInstancePlacement_t,
    count: *mut c_uint,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        partition(target)?;
        let profile = profile(target.gpu, profile_id)?;
        let place = |&start| nvmlGpuInstancePlacement_t { start, size: profile.size };
        let found: Vec<_> = profile.starts.iter().map(place).collect();
        if placements.is_null() {
            // SAFETY: null or valid, as nvml.h asks for.
            return unsafe { put(count, c_uint::try_from(found.len()).unwrap_or(c_uint::MAX)) };
        }
        // SAFETY: the caller's array has room for all, as nvml.h asks for.
        unsafe { put_all(placements, count, &found) }
    })
}

/// With MIG off, the capacity of an empty GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuInstanceRemainingCapacity(
    device: nvmlDevice_t,
    profile_id: c_uint,
    count: *mut c_uint,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let partition = partition(target)?;
        let profile = profile(target.gpu, profile_id)?;
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(count, partition.remaining(profile, instances::table(target.gpu))) }
    })
}

/// Creates it at the first free placement in the profile's order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceCreateGpuInstance(
    device: nvmlDevice_t,
    profile_id: c_uint,
    instance: *mut nvmlGpuInstance_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let profile = profile(target.gpu, profile_id)?;
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { create(target, profile, None, instance) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceCreateGpuInstanceWithPlacement(
    device: nvmlDevice_t,
    profile_id: c_uint,
    placement: *const nvmlGpuInstancePlacement_t,
    instance: *mut nvmlGpuInstance_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        // SAFETY: null or valid, as nvml.h asks for.
        let place = unsafe { placement.as_ref() }.ok_or(INVALID_ARGUMENT)?;
        let profile = profile(target.gpu, profile_id)?;
        if place.size != profile.size || !profile.starts.contains(&place.start) {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: as above.
        unsafe { create(target, profile, Some(place.start), instance) }
    })
}

/// # Safety
/// `out` is null or valid.
unsafe fn create(
    target: &Target<'_>,
    profile: &Profile,
    start: Option<u32>,
    out: *mut nvmlGpuInstance_t,
) -> Answer {
    if out.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    let (gpu, table) = (target.gpu, instances::table(target.gpu));
    let enabled = target.partition()?.is_some_and(|partition| partition.enabled);
    if !enabled || gpu.virtualization == Virtualization::Vgpu {
        return Err(NOT_SUPPORTED);
    }
    let handle = change(target.session, |state| {
        let serial = state.serial();
        // Another process may have switched MIG off meanwhile.
        let partition = state.mig.get_mut(&gpu.uuid).filter(|partition| partition.enabled);
        let partition = partition.ok_or(NOT_SUPPORTED)?;
        let mut free = partition.free_starts(profile, table).into_iter();
        let free = free.find(|free| start.is_none_or(|start| start == *free));
        let id = partition.add(profile, free.ok_or(INSUFFICIENT_RESOURCES)?, serial, table);
        let made = partition.instance(id).ok_or(INSUFFICIENT_RESOURCES)?;
        Ok(handles::of_gpu_instance(gpu, made))
    })?;
    // SAFETY: not null, so valid as the caller promised.
    unsafe { put(out, handle) }
}

/// Fails while it has compute instances, or a process has a context on it.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlGpuInstanceDestroy(instance: nvmlGpuInstance_t) -> nvmlReturn_t {
    handles::gpu_instance(instance, |Found { target, instance }| {
        change(target.session, |state| {
            let partition = state.mig.get_mut(&target.gpu.uuid).ok_or(NOT_SUPPORTED)?;
            // The instance was found before the lock was taken. It may be gone, or have a compute instance by now.
            let is_it = |one: &instances::GpuInstance| one.id == instance.id && one.serial == instance.serial;
            let position = partition.instances.iter().position(is_it).ok_or(INVALID_ARGUMENT)?;
            let inside = |on: Option<(u32, u32)>| on.is_some_and(|(gi, _)| gi == instance.id);
            if !partition.instances[position].compute.is_empty() || used(target.session, target.gpu, inside) {
                return Err(IN_USE);
            }
            partition.instances.remove(position);
            Ok(())
        })
    })
}

/// The instances of one profile. `count` is only an output.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuInstances(
    device: nvmlDevice_t,
    profile_id: c_uint,
    list: *mut nvmlGpuInstance_t,
    count: *mut c_uint,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let (partition, profile) = (partition(target)?, profile(target.gpu, profile_id)?);
        let found = partition.instances.iter().filter(|one| one.profile == profile.id);
        let found: Vec<_> = found.map(|one| handles::of_gpu_instance(target.gpu, one)).collect();
        // SAFETY: the caller's array has room for as many as the profile allows, as nvml.h asks for.
        unsafe { put_all(list, count, &found) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuInstanceById(
    device: nvmlDevice_t,
    id: c_uint,
    instance: *mut nvmlGpuInstance_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let partition = partition(target)?;
        let found = partition.instance(id).ok_or(NOT_FOUND)?;
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(instance, handles::of_gpu_instance(target.gpu, found)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpuInstanceGetInfo(
    instance: nvmlGpuInstance_t,
    info: *mut nvmlGpuInstanceInfo_t,
) -> nvmlReturn_t {
    handles::gpu_instance(instance, |Found { target, instance }| {
        let found = nvmlGpuInstanceInfo_t {
            device: session::handle(target.gpu, None),
            id: instance.id,
            profileId: instance.profile,
            placement: nvmlGpuInstancePlacement_t {
                start: instance.start,
                size: profile(target.gpu, instance.profile)?.size,
            },
        };
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(info, found) }
    })
}
