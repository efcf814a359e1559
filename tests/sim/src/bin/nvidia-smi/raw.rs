//! NVML's calls for MIG, which nvml-wrapper has no methods for.
#![allow(unsafe_code, reason = "NVML by its C ABI")]

use std::ffi::{CStr, c_uint};
use std::mem::MaybeUninit;
use std::ptr::null_mut;

use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper_sys::bindings::{
    NVML_COMPUTE_INSTANCE_PROFILE_COUNT, NvmlLib, nvmlComputeInstance_t, nvmlComputeInstanceInfo_t,
    nvmlComputeInstanceProfileInfo_v2_t, nvmlGpuInstance_t, nvmlGpuInstanceInfo_t,
    nvmlGpuInstancePlacement_t, nvmlGpuInstanceProfileInfo_v2_t, nvmlReturn_t,
};

/// The result of an NVML call.
pub type Answer<T = ()> = Result<T, NvmlError>;

/// Profile indices in the order in which nvidia-smi lists them.
const ORDER: [c_uint; 8] = [0, 7, 9, 1, 8, 2, 3, 4];
/// More instances or placements than any profile has.
const ROOM: c_uint = 16;

/// One GPU's MIG.
pub struct Mig<'d> {
    device: &'d Device<'d>,
    lib: &'d NvmlLib,
}

fn out<T>(call: impl FnOnce(*mut T) -> nvmlReturn_t) -> Answer<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    nvml_try(call(value.as_mut_ptr()))?;
    // SAFETY: NVML has written it. Every type here consists of numbers and pointers that are not followed, for which
    // all zeroes is a valid value.
    Ok(unsafe { value.assume_init() })
}

fn list<T: Copy>(empty: T, call: impl FnOnce(*mut T, *mut c_uint) -> nvmlReturn_t) -> Answer<Vec<T>> {
    let (mut values, mut count) = ([empty; ROOM as usize], ROOM);
    nvml_try(call(values.as_mut_ptr(), &raw mut count))?;
    Ok(values.into_iter().take(count as usize).collect())
}

/// `NVML_STRUCT_VERSION` of a second version.
fn version_2<T>() -> c_uint {
    c_uint::try_from(size_of::<T>()).unwrap_or(0) | 2 << 24
}

/// A profile's name.
pub fn name(text: &[std::ffi::c_char]) -> String {
    // SAFETY: NVML ends the names in its structs with a NUL.
    unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
}

impl<'d> Mig<'d> {
    /// MIG of this GPU.
    pub fn new(device: &'d Device<'d>) -> Self {
        Self { device, lib: device.nvml().lib() }
    }

    /// Its GPU instance profiles.
    pub fn profiles(&self) -> Vec<nvmlGpuInstanceProfileInfo_v2_t> {
        let profile = |index| {
            out(|info: *mut nvmlGpuInstanceProfileInfo_v2_t| {
                // SAFETY: `info` is valid and contains its version. The handle is that of a device of this
                // library.
                unsafe {
                    (*info).version = version_2::<nvmlGpuInstanceProfileInfo_v2_t>();
                    self.lib.nvmlDeviceGetGpuInstanceProfileInfoV(self.device.handle(), index, info)
                }
            })
        };
        ORDER.iter().filter_map(|&index| profile(index).ok()).collect()
    }

    pub fn placements(&self, profile: c_uint) -> Answer<Vec<nvmlGpuInstancePlacement_t>> {
        let empty = nvmlGpuInstancePlacement_t { start: 0, size: 0 };
        list(empty, |array, count| {
            // SAFETY: the array has room for more than there are; the rest as above.
            unsafe {
                let device = self.device.handle();
                self.lib.nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, profile, array, count)
            }
        })
    }

    pub fn remaining(&self, profile: c_uint) -> Answer<c_uint> {
        // SAFETY: as above.
        out(|count| unsafe {
            self.lib.nvmlDeviceGetGpuInstanceRemainingCapacity(self.device.handle(), profile, count)
        })
    }

    /// Its GPU instances, by profile and then by id, with their profiles' names.
    pub fn instances(&self) -> Answer<Vec<(nvmlGpuInstance_t, nvmlGpuInstanceInfo_t, String)>> {
        let mut found = Vec::new();
        for profile in self.profiles() {
            let handles = list(null_mut(), |array, count| {
                // SAFETY: the array has room for more than there are; the rest as above.
                unsafe {
                    let device = self.device.handle();
                    self.lib.nvmlDeviceGetGpuInstances(device, profile.id, array, count)
                }
            })?;
            for handle in handles {
                // SAFETY: the handle is NVML's.
                let info = out(|info| unsafe { self.lib.nvmlGpuInstanceGetInfo(handle, info) })?;
                found.push((handle, info, name(&profile.name)));
            }
        }
        Ok(found)
    }

    pub fn create(
        &self,
        profile: c_uint,
        place: Option<nvmlGpuInstancePlacement_t>,
    ) -> Answer<nvmlGpuInstance_t> {
        // SAFETY: all pointers are valid.
        out(|instance| unsafe {
            let device = self.device.handle();
            match &place {
                None => self.lib.nvmlDeviceCreateGpuInstance(device, profile, instance),
                Some(place) => {
                    self.lib.nvmlDeviceCreateGpuInstanceWithPlacement(device, profile, place, instance)
                }
            }
        })
    }

    pub fn info(&self, instance: nvmlGpuInstance_t) -> Answer<nvmlGpuInstanceInfo_t> {
        // SAFETY: the handle is NVML's.
        out(|info| unsafe { self.lib.nvmlGpuInstanceGetInfo(instance, info) })
    }

    pub fn destroy(&self, instance: nvmlGpuInstance_t) -> Answer {
        // SAFETY: the handle is NVML's.
        nvml_try(unsafe { self.lib.nvmlGpuInstanceDestroy(instance) })
    }

    /// The compute instance profiles of a GPU instance.
    pub fn compute_profiles(&self, instance: nvmlGpuInstance_t) -> Vec<nvmlComputeInstanceProfileInfo_v2_t> {
        let profile = |index| {
            out(|info: *mut nvmlComputeInstanceProfileInfo_v2_t| {
                // SAFETY: `info` is valid and contains its version. The handle is NVML's.
                unsafe {
                    (*info).version = version_2::<nvmlComputeInstanceProfileInfo_v2_t>();
                    self.lib.nvmlGpuInstanceGetComputeInstanceProfileInfoV(instance, index, 0, info)
                }
            })
        };
        (0..NVML_COMPUTE_INSTANCE_PROFILE_COUNT).filter_map(|index| profile(index).ok()).collect()
    }

    pub fn compute_remaining(&self, instance: nvmlGpuInstance_t, profile: c_uint) -> Answer<c_uint> {
        // SAFETY: the handle is NVML's.
        out(|count| unsafe {
            self.lib.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance, profile, count)
        })
    }

    /// The compute instances of a GPU instance, with their profiles' names.
    pub fn compute(
        &self,
        instance: nvmlGpuInstance_t,
    ) -> Answer<Vec<(nvmlComputeInstance_t, nvmlComputeInstanceInfo_t, String)>> {
        let mut found = Vec::new();
        for profile in self.compute_profiles(instance) {
            let handles = list(null_mut(), |array, count| {
                // SAFETY: the array has room for more than there are; the handle is NVML's.
                unsafe { self.lib.nvmlGpuInstanceGetComputeInstances(instance, profile.id, array, count) }
            })?;
            for handle in handles {
                // SAFETY: the handle is NVML's.
                let info = out(|info| unsafe { self.lib.nvmlComputeInstanceGetInfo_v2(handle, info) })?;
                found.push((handle, info, name(&profile.name)));
            }
        }
        Ok(found)
    }

    pub fn create_compute(
        &self,
        instance: nvmlGpuInstance_t,
        profile: c_uint,
    ) -> Answer<nvmlComputeInstanceInfo_t> {
        // SAFETY: the handles are NVML's, the pointers valid.
        let made =
            out(|made| unsafe { self.lib.nvmlGpuInstanceCreateComputeInstance(instance, profile, made) })?;
        // SAFETY: as above.
        out(|info| unsafe { self.lib.nvmlComputeInstanceGetInfo_v2(made, info) })
    }

    pub fn destroy_compute(&self, compute: nvmlComputeInstance_t) -> Answer {
        // SAFETY: the handle is NVML's.
        nvml_try(unsafe { self.lib.nvmlComputeInstanceDestroy(compute) })
    }

    /// Sets MIG mode and returns the result of its activation.
    pub fn set_mode(&self, on: bool) -> Answer<Answer> {
        // SAFETY: the handle is that of a device of this library.
        let status = out(|status| unsafe {
            self.lib.nvmlDeviceSetMigMode(self.device.handle(), u32::from(on), status)
        })?;
        Ok(nvml_try(status))
    }
}
