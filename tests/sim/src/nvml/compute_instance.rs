//! NVML: compute instances, and the compute instance profiles of a GPU instance.
#![allow(unsafe_code, reason = "C ABI")]

use std::ffi::c_uint;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::SystemTime;

use nvml_wrapper_sys::bindings::{
    NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT, NVML_COMPUTE_INSTANCE_PROFILE_COUNT, nvmlComputeInstance_t,
    nvmlComputeInstanceInfo_t, nvmlComputeInstancePlacement_t, nvmlComputeInstanceProfileInfo_t,
    nvmlComputeInstanceProfileInfo_v2_t, nvmlComputeInstanceProfileInfo_v3_t, nvmlGpuInstance_t,
    nvmlReturn_enum_NVML_ERROR_IN_USE as IN_USE,
    nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES as INSUFFICIENT_RESOURCES,
    nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT,
    nvmlReturn_enum_NVML_ERROR_NO_PERMISSION as NO_PERMISSION,
    nvmlReturn_enum_NVML_ERROR_NOT_FOUND as NOT_FOUND,
    nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED, nvmlReturn_t,
};

use super::handles::{self, Found};
use super::mig::{change, used};
use super::out::{Answer, chars, put, put_all, struct_version, version_of};
use super::profiles::ComputeProfile;
use super::session;
use crate::layout::instances::{self, ComputeInstance, GpuInstance, by_id};
use crate::layout::state_file::State;

/// `NVML_STRUCT_VERSION(ComputeInstanceProfileInfo, 2)`.
const V2: c_uint = struct_version::<nvmlComputeInstanceProfileInfo_v2_t>(2);
/// `NVML_STRUCT_VERSION(ComputeInstanceProfileInfo, 3)`.
const V3: c_uint = struct_version::<nvmlComputeInstanceProfileInfo_v3_t>(3);

impl Found<'_> {
    fn profile(&self, id: c_uint) -> Answer<ComputeProfile> {
        self.profiles().into_iter().find(|one| one.id == id).ok_or(INVALID_ARGUMENT)
    }

    fn profiles(&self) -> Vec<ComputeProfile> {
        self.instance.compute_profiles(instances::table(self.target.gpu))
    }

    /// The profile with an index (`NVML_COMPUTE_INSTANCE_PROFILE_*`), which is also its id.
    fn by_index(&self, index: c_uint, engines: c_uint) -> Answer<ComputeProfile> {
        let valid = index < NVML_COMPUTE_INSTANCE_PROFILE_COUNT
            && engines < NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT;
        if valid { self.profile(index).map_err(|_| NOT_SUPPORTED) } else { Err(INVALID_ARGUMENT) }
    }

    fn info(&self, profile: &ComputeProfile) -> nvmlComputeInstanceProfileInfo_t {
        let parent = by_id(instances::table(self.target.gpu), self.instance.profile);
        let [copy, decoder, jpeg, ofa] = parent.map_or([0; 4], |parent| parent.engines);
        nvmlComputeInstanceProfileInfo_t {
            id: profile.id,
            sliceCount: profile.slices,
            instanceCount: c_uint::try_from(profile.starts.len()).unwrap_or(c_uint::MAX),
            multiprocessorCount: profile.sm_count,
            sharedCopyEngineCount: copy,
            sharedDecoderCount: decoder,
            sharedEncoderCount: 0,
            sharedJpegCount: jpeg,
            sharedOfaCount: ofa,
        }
    }

    /// "Requires privileged user."
    fn for_root(&self) -> Answer<&Self> {
        if nix::unistd::geteuid().is_root() { Ok(self) } else { Err(NO_PERMISSION) }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpuInstanceGetComputeInstanceProfileInfo(
    instance: nvmlGpuInstance_t,
    profile: c_uint,
    engine_profile: c_uint,
    info: *mut nvmlComputeInstanceProfileInfo_t,
) -> nvmlReturn_t {
    handles::gpu_instance(instance, |found| {
        let profile = found.by_index(profile, engine_profile)?;
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(info, found.info(&profile)) }
    })
}

/// The struct with the profile's name, such as `MIG 1c.2g.10gb`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpuInstanceGetComputeInstanceProfileInfoV(
    instance: nvmlGpuInstance_t,
    profile: c_uint,
    engine_profile: c_uint,
    info: *mut nvmlComputeInstanceProfileInfo_v2_t,
) -> nvmlReturn_t {
    handles::gpu_instance(instance, |found| {
        let profile = found.by_index(profile, engine_profile)?;
        let (v2, v3) = versioned(&found.info(&profile), &profile.name);
        // SAFETY: null, or it begins with its version and is valid for a write of that struct, as nvml.h
        // asks for.
        unsafe {
            match version_of(info.cast())? {
                V2 => put(info, v2),
                V3 => put(info.cast(), v3),
                _ => Err(INVALID_ARGUMENT),
            }
        }
    })
}

/// The later structs. They are returned with version 0, and v3 without a name, like those of GPU instances.
fn versioned(
    info: &nvmlComputeInstanceProfileInfo_t,
    name: &str,
) -> (nvmlComputeInstanceProfileInfo_v2_t, nvmlComputeInstanceProfileInfo_v3_t) {
    let v2 = nvmlComputeInstanceProfileInfo_v2_t {
        version: 0,
        id: info.id,
        sliceCount: info.sliceCount,
        instanceCount: info.instanceCount,
        multiprocessorCount: info.multiprocessorCount,
        sharedCopyEngineCount: info.sharedCopyEngineCount,
        sharedDecoderCount: info.sharedDecoderCount,
        sharedEncoderCount: info.sharedEncoderCount,
        sharedJpegCount: info.sharedJpegCount,
        sharedOfaCount: info.sharedOfaCount,
        name: chars(&format!("MIG {name}")),
    };
    let v3 = nvmlComputeInstanceProfileInfo_v3_t {
        version: 0,
        id: info.id,
        sliceCount: info.sliceCount,
        instanceCount: info.instanceCount,
        multiprocessorCount: info.multiprocessorCount,
        sharedCopyEngineCount: info.sharedCopyEngineCount,
        sharedDecoderCount: info.sharedDecoderCount,
        sharedEncoderCount: info.sharedEncoderCount,
        sharedJpegCount: info.sharedJpegCount,
        sharedOfaCount: info.sharedOfaCount,
        name: [0; 96],
        capabilities: 0,
    };
    (v2, v3)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpuInstanceGetComputeInstanceRemainingCapacity(
    instance: nvmlGpuInstance_t,
    profile_id: c_uint,
    count: *mut c_uint,
) -> nvmlReturn_t {
    handles::gpu_instance(instance, |found| {
        let profile = found.for_root()?.profile(profile_id)?;
        let free = found.instance.free_starts(&profile, instances::table(found.target.gpu)).len();
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(count, c_uint::try_from(free).unwrap_or(c_uint::MAX)) }
    })
}

/// Returns all possible placements, free or not. With a null array it returns only their number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpuInstanceGetComputeInstancePossiblePlacements(
    instance: nvmlGpuInstance_t,
    profile_id: c_uint,
    placements: *mut nvmlComputeInstancePlacement_t,
    count: *mut c_uint,
) -> nvmlReturn_t {
    handles::gpu_instance(instance, |found| {
        let profile = found.for_root()?.profile(profile_id)?;
        let place = |&start| nvmlComputeInstancePlacement_t { start, size: profile.slices };
        let found: Vec<_> = profile.starts.iter().map(place).collect();
        if placements.is_null() {
            // SAFETY: null or valid, as nvml.h asks for.
            return unsafe { put(count, c_uint::try_from(found.len()).unwrap_or(c_uint::MAX)) };
        }
        // SAFETY: the caller's array has room for all, as nvml.h asks for.
        unsafe { put_all(placements, count, &found) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpuInstanceCreateComputeInstance(
    instance: nvmlGpuInstance_t,
    profile_id: c_uint,
    compute: *mut nvmlComputeInstance_t,
) -> nvmlReturn_t {
    handles::gpu_instance(instance, |found| {
        let profile = found.profile(profile_id)?;
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { create(found, &profile, None, compute) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpuInstanceCreateComputeInstanceWithPlacement(
    instance: nvmlGpuInstance_t,
    profile_id: c_uint,
    placement: *const nvmlComputeInstancePlacement_t,
    compute: *mut nvmlComputeInstance_t,
) -> nvmlReturn_t {
    handles::gpu_instance(instance, |found| {
        // SAFETY: null or valid, as nvml.h asks for.
        let place = unsafe { placement.as_ref() }.ok_or(INVALID_ARGUMENT)?;
        let profile = found.profile(profile_id)?;
        if place.size != profile.slices || !profile.starts.contains(&place.start) {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: as above.
        unsafe { create(found, &profile, Some(place.start), compute) }
    })
}

/// # Safety
/// `out` is null or valid.
unsafe fn create(
    found: &Found<'_>,
    profile: &ComputeProfile,
    start: Option<u32>,
    out: *mut nvmlComputeInstance_t,
) -> Answer {
    if out.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    let (gpu, tag) = (found.target.gpu, &found.target.session.topology.tag);
    let handle = change(found.target.session, |state| {
        let serial = state.serial();
        let parent = parent(state, found)?;
        let mut free = parent.free_starts(profile, instances::table(gpu)).into_iter();
        let free = free.find(|free| start.is_none_or(|start| start == *free));
        let (id, start) = (parent.free_id(), free.ok_or(INSUFFICIENT_RESOURCES)?);
        let uuid = new_uuid(tag, &gpu.uuid, serial);
        let made = ComputeInstance { id, serial, profile: profile.id, start, uuid };
        let handle = handles::of_compute_instance(gpu, parent.id, &made);
        parent.add(made);
        Ok(handle)
    })?;
    // SAFETY: not null, so valid as the caller promised.
    unsafe { put(out, handle) }
}

/// The GPU instance under the lock. It may be destroyed, or replaced by another one.
fn parent<'s>(state: &'s mut State, found: &Found<'_>) -> Answer<&'s mut GpuInstance> {
    let partition = state.mig.get_mut(&found.target.gpu.uuid).ok_or(INVALID_ARGUMENT)?;
    let wanted = &found.instance;
    let is_it = |one: &&mut GpuInstance| one.id == wanted.id && one.serial == wanted.serial;
    partition.instances.iter_mut().find(is_it).ok_or(INVALID_ARGUMENT)
}

/// A new UUID for each instance that is created, also across roots at the same path.
fn new_uuid(tag: &str, gpu: &str, serial: u32) -> String {
    let half = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        (salt, tag, gpu, serial, SystemTime::now()).hash(&mut hasher);
        hasher.finish()
    };
    let (high, low) = (half(0), half(1));
    let (first, second, third) = (high >> 32, high >> 16 & 0xffff, high & 0xfff);
    let (fourth, fifth) = (low >> 48 & 0x3fff | 0x8000, low & 0xffff_ffff_ffff);
    format!("MIG-{first:08x}-{second:04x}-5{third:03x}-{fourth:04x}-{fifth:012x}")
}

/// Fails while a process has a context on it.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlComputeInstanceDestroy(compute: nvmlComputeInstance_t) -> nvmlReturn_t {
    handles::compute_instance(compute, |found, one| {
        let target = &found.target;
        change(target.session, |state| {
            let parent = parent(state, found)?;
            let position = parent.compute.iter().position(|other| other == one).ok_or(INVALID_ARGUMENT)?;
            if used(target.session, target.gpu, |on| on == Some((parent.id, one.id))) {
                return Err(IN_USE);
            }
            parent.compute.remove(position);
            Ok(())
        })
    })
}

/// The instances of one profile. `count` is only an output.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpuInstanceGetComputeInstances(
    instance: nvmlGpuInstance_t,
    profile_id: c_uint,
    list: *mut nvmlComputeInstance_t,
    count: *mut c_uint,
) -> nvmlReturn_t {
    handles::gpu_instance(instance, |found| {
        let profile = found.for_root()?.profile(profile_id)?;
        let (gpu, parent) = (found.target.gpu, &found.instance);
        let those = parent.compute.iter().filter(|one| one.profile == profile.id);
        let those: Vec<_> = those.map(|one| handles::of_compute_instance(gpu, parent.id, one)).collect();
        // SAFETY: the caller's array has room for as many as the profile allows, as nvml.h asks for.
        unsafe { put_all(list, count, &those) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpuInstanceGetComputeInstanceById(
    instance: nvmlGpuInstance_t,
    id: c_uint,
    compute: *mut nvmlComputeInstance_t,
) -> nvmlReturn_t {
    handles::gpu_instance(instance, |found| {
        let parent = &found.for_root()?.instance;
        let one = parent.compute.iter().find(|one| one.id == id).ok_or(NOT_FOUND)?;
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(compute, handles::of_compute_instance(found.target.gpu, parent.id, one)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlComputeInstanceGetInfo_v2(
    compute: nvmlComputeInstance_t,
    info: *mut nvmlComputeInstanceInfo_t,
) -> nvmlReturn_t {
    handles::compute_instance(compute, |found, one| {
        let written = nvmlComputeInstanceInfo_t {
            device: session::handle(found.target.gpu, None),
            gpuInstance: handles::of_gpu_instance(found.target.gpu, &found.instance),
            id: one.id,
            profileId: one.profile,
            placement: nvmlComputeInstancePlacement_t {
                start: one.start,
                size: found.profile(one.profile)?.slices,
            },
        };
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(info, written) }
    })
}
