//! NVML's calls for MIG that nvml-wrapper lacks or gets wrong: it drops the result of
//! `nvmlDeviceGetGpuInstancePossiblePlacements_v2`. Each function is one call of nvml.h.
#![allow(unsafe_code, reason = "NVML by its C ABI")]

use std::ffi::c_uint;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try};
use nvml_wrapper_sys::bindings::{
    NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED as SHARED, NvmlLib, nvmlComputeInstance_t,
    nvmlComputeInstanceInfo_t, nvmlComputeInstancePlacement_t, nvmlComputeInstanceProfileInfo_t,
    nvmlGpuInstance_t, nvmlGpuInstanceInfo_t, nvmlGpuInstancePlacement_t, nvmlGpuInstanceProfileInfo_v2_t,
    nvmlReturn_t,
};

use schemars::JsonSchema;
use serde::Serialize;

type Answer<T> = Result<T, NvmlError>;

/// `NVML_STRUCT_VERSION(GpuInstanceProfileInfo, 2)` (nvml.h).
const PROFILE_INFO_V2: c_uint = 0x98 | 2 << 24;
const _: () =
    assert!(size_of::<nvmlGpuInstanceProfileInfo_v2_t>() == 0x98, "nvml.h's version is of its size");

/// Slices of a GPU's memory, or of a GPU instance's compute: `size` slices from `start` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
pub struct Span {
    /// The first slice.
    pub start: u32,
    /// How many.
    pub size: u32,
}

impl Span {
    /// The first slice after it.
    pub const fn end(self) -> u32 {
        self.start.saturating_add(self.size)
    }

    /// Of the first slice and their number, as the ledger has them.
    pub(crate) const fn at((start, size): (u32, u32)) -> Self {
        Self { start, size }
    }

    /// Whether the two share a slice.
    pub const fn overlaps(self, other: Self) -> bool {
        self.start < other.end() && other.start < self.end()
    }
}

/// A kind of GPU instance, as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Profile {
    /// Its id, which nvidia-smi accepts too.
    pub id: u32,
    /// Its name, such as `1g.18gb`.
    pub name: String,
    /// Compute slices.
    pub slices: u32,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// How many of them an empty GPU can have.
    pub instances: u32,
    /// JPEG engines and optical flow accelerators.
    #[serde(skip)]
    pub media: [u32; 2],
    /// How many more the GPU can have now, according to the driver. With MIG mode off driver 580 reports how many it
    /// could have.
    pub free: u32,
    /// Where one may lie.
    pub placements: Vec<Span>,
}

/// A GPU instance. Its handle belongs to the library and is valid until the instance is destroyed.
pub(crate) struct Gi<'n> {
    library: &'n NvmlLib,
    handle: nvmlGpuInstance_t,
    pub id: u32,
    pub profile: u32,
    pub span: Span,
}

/// A kind of compute instance that a GPU instance can have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComputeProfile {
    /// Its id.
    pub id: u32,
    /// Compute slices.
    pub slices: u32,
    /// How many of them there can be.
    pub instances: u32,
    /// Where one may lie in the GPU instance.
    pub placements: Vec<Span>,
}

/// The value that `call` writes to its argument.
fn written<T>(call: impl FnOnce(*mut T) -> nvmlReturn_t) -> Answer<T> {
    let mut out = MaybeUninit::<T>::zeroed();
    nvml_try(call(out.as_mut_ptr()))?;
    // SAFETY: the types asked for are C structs of integers, characters and pointers, or such pointers
    // themselves: all zeros is a value of each, and NVML has written over it.
    Ok(unsafe { out.assume_init() })
}

/// The list that `call` writes to an array of `room` elements, with their number.
fn listed<T: Copy>(room: u32, call: impl FnOnce(*mut T, *mut c_uint) -> nvmlReturn_t) -> Answer<Vec<T>> {
    let mut list = vec![MaybeUninit::<T>::zeroed(); room as usize];
    let mut count: c_uint = room;
    nvml_try(call(list.as_mut_ptr().cast(), &raw mut count))?;
    list.truncate(count as usize);
    // SAFETY: as in `written`; of C structs or pointers, the first `count` were written by NVML.
    Ok(list.into_iter().map(|one| unsafe { one.assume_init() }).collect())
}

/// (GPU instance id, compute instance id) of a MIG device.
pub(crate) fn instance_ids(mig: &Device<'_>) -> Answer<(u32, u32)> {
    let library = mig.nvml().lib();
    let gpu = nvml_sym(library.nvmlDeviceGetGpuInstanceId.as_ref())?;
    let compute = nvml_sym(library.nvmlDeviceGetComputeInstanceId.as_ref())?;
    // SAFETY: one number is written by each.
    unsafe { Ok((written(|id| gpu(mig.handle(), id))?, written(|id| compute(mig.handle(), id))?)) }
}

/// The profile at `index` of `NVML_GPU_INSTANCE_PROFILE_*`; `free` and `placements` are not filled in.
pub(crate) fn profile(device: &Device<'_>, index: u32) -> Answer<Profile> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetGpuInstanceProfileInfoV.as_ref())?;
    let info: nvmlGpuInstanceProfileInfo_v2_t = written(|out: *mut nvmlGpuInstanceProfileInfo_v2_t| {
        // SAFETY: `out` is a whole struct of the version that is written into it; the handle is the
        // device's own.
        unsafe {
            (*out).version = PROFILE_INFO_V2;
            call(device.handle(), index, out)
        }
    })?;
    // SAFETY: the array's own bytes; `c_char` has a sign on some machines.
    let name = unsafe { std::slice::from_raw_parts(info.name.as_ptr().cast::<u8>(), info.name.len()) };
    let name = String::from_utf8_lossy(name.split(|&byte| byte == 0).next().unwrap_or_default()).into_owned();
    Ok(Profile {
        id: info.id,
        name: name.strip_prefix("MIG ").unwrap_or(&name).to_owned(),
        slices: info.sliceCount,
        sms: info.multiprocessorCount,
        memory_mib: info.memorySizeMB,
        instances: info.instanceCount,
        media: [info.jpegCount, info.ofaCount],
        free: 0,
        placements: Vec::new(),
    })
}

/// Where an instance of the profile may lie.
pub(crate) fn placements(device: &Device<'_>, profile: u32) -> Answer<Vec<Span>> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetGpuInstancePossiblePlacements_v2.as_ref())?;
    // SAFETY: without an array NVML writes the number there is.
    let room = written(|count| unsafe { call(device.handle(), profile, null_mut(), count) })?;
    // SAFETY: an array of `count` elements.
    let list = listed(room, |list, count| unsafe { call(device.handle(), profile, list, count) })?;
    let span = |at: nvmlGpuInstancePlacement_t| Span { start: at.start, size: at.size };
    Ok(list.into_iter().map(span).collect())
}

/// How many more instances of the profile have room.
pub(crate) fn remaining(device: &Device<'_>, profile: u32) -> Answer<u32> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetGpuInstanceRemainingCapacity.as_ref())?;
    // SAFETY: one number is written.
    written(|count| unsafe { call(device.handle(), profile, count) })
}

/// The GPU instances of a profile.
pub(crate) fn instances<'n>(device: &Device<'n>, profile: &Profile) -> Answer<Vec<Gi<'n>>> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetGpuInstances.as_ref())?;
    // SAFETY: an array of as many as the profile can have, which nvml.h asks for.
    let list =
        listed(profile.instances, |list, count| unsafe { call(device.handle(), profile.id, list, count) })?;
    list.into_iter().map(|handle| Gi::of(device, handle)).collect()
}

/// The GPU instance with this id.
pub(crate) fn instance<'n>(device: &Device<'n>, gi: u32) -> Answer<Gi<'n>> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetGpuInstanceById.as_ref())?;
    // SAFETY: one handle is written.
    Gi::of(device, written(|out| unsafe { call(device.handle(), gi, out) })?)
}

/// Creates a GPU instance.
pub(crate) fn create_instance<'n>(device: &Device<'n>, profile: u32, span: Span) -> Answer<Gi<'n>> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceCreateGpuInstanceWithPlacement.as_ref())?;
    let at = nvmlGpuInstancePlacement_t { start: span.start, size: span.size };
    // SAFETY: the placement is read, one handle is written.
    Gi::of(device, written(|out| unsafe { call(device.handle(), profile, &raw const at, out) })?)
}

impl<'n> Gi<'n> {
    fn of(device: &Device<'n>, handle: nvmlGpuInstance_t) -> Answer<Self> {
        let library = device.nvml().lib();
        let call = nvml_sym(library.nvmlGpuInstanceGetInfo.as_ref())?;
        // SAFETY: the handle is NVML's own, one struct is written.
        let info: nvmlGpuInstanceInfo_t = written(|out| unsafe { call(handle, out) })?;
        let span = Span { start: info.placement.start, size: info.placement.size };
        Ok(Self { library, handle, id: info.id, profile: info.profileId, span })
    }

    /// The kind of compute instance at `index` of `NVML_COMPUTE_INSTANCE_PROFILE_*`; `placements` are not filled in.
    pub(crate) fn profile_at(&self, index: u32) -> Answer<ComputeProfile> {
        let call = nvml_sym(self.library.nvmlGpuInstanceGetComputeInstanceProfileInfo.as_ref())?;
        // SAFETY: one struct is written.
        let info: nvmlComputeInstanceProfileInfo_t =
            written(|out| unsafe { call(self.handle, index, SHARED, out) })?;
        let (slices, instances) = (info.sliceCount, info.instanceCount);
        Ok(ComputeProfile { id: info.id, slices, instances, placements: Vec::new() })
    }

    /// Where a compute instance of that kind may lie.
    pub(crate) fn placements(&self, profile: &ComputeProfile) -> Answer<Vec<Span>> {
        let call = nvml_sym(self.library.nvmlGpuInstanceGetComputeInstancePossiblePlacements.as_ref())?;
        // SAFETY: without an array NVML writes the number there is.
        let room = written(|count| unsafe { call(self.handle, profile.id, null_mut(), count) })?;
        // SAFETY: an array of `count` elements.
        let list = listed(room, |list, count| unsafe { call(self.handle, profile.id, list, count) })?;
        let span = |at: nvmlComputeInstancePlacement_t| Span { start: at.start, size: at.size };
        Ok(list.into_iter().map(span).collect())
    }

    /// Its compute instances of that kind: the id of each, and where it lies.
    pub(crate) fn compute(&self, profile: &ComputeProfile) -> Answer<Vec<(u32, Span)>> {
        let call = nvml_sym(self.library.nvmlGpuInstanceGetComputeInstances.as_ref())?;
        // SAFETY: an array of as many as there can be, which nvml.h asks for.
        let list =
            listed(profile.instances, |list, count| unsafe { call(self.handle, profile.id, list, count) })?;
        let described = |handle: nvmlComputeInstance_t| {
            let call = nvml_sym(self.library.nvmlComputeInstanceGetInfo_v2.as_ref())?;
            // SAFETY: the handle is NVML's own, one struct is written.
            let info: nvmlComputeInstanceInfo_t = written(|out| unsafe { call(handle, out) })?;
            Ok((info.id, Span { start: info.placement.start, size: info.placement.size }))
        };
        list.into_iter().map(described).collect()
    }

    /// Destroys its compute instance with this id.
    pub(crate) fn destroy_compute(&self, ci: u32) -> Answer<()> {
        let find = nvml_sym(self.library.nvmlGpuInstanceGetComputeInstanceById.as_ref())?;
        let destroy = nvml_sym(self.library.nvmlComputeInstanceDestroy.as_ref())?;
        // SAFETY: one handle is written. It is not used any more after the instance is destroyed.
        unsafe { nvml_try(destroy(written(|out| find(self.handle, ci, out))?)) }
    }

    /// Creates a compute instance, at `span` or where the driver chooses.
    pub(crate) fn create(&self, profile: &ComputeProfile, span: Option<Span>) -> Answer<()> {
        let Some(span) = span else {
            let call = nvml_sym(self.library.nvmlGpuInstanceCreateComputeInstance.as_ref())?;
            // SAFETY: one handle is written.
            return written(|out| unsafe { call(self.handle, profile.id, out) }).map(drop);
        };
        let call = nvml_sym(self.library.nvmlGpuInstanceCreateComputeInstanceWithPlacement.as_ref())?;
        let at = nvmlComputeInstancePlacement_t { start: span.start, size: span.size };
        // SAFETY: the placement is read, one handle is written.
        written(|out| unsafe { call(self.handle, profile.id, &raw const at, out) }).map(drop)
    }

    /// Destroys the GPU instance.
    pub(crate) fn destroy(self) -> Answer<()> {
        let call = nvml_sym(self.library.nvmlGpuInstanceDestroy.as_ref())?;
        // SAFETY: the handle is not used any more: `self` is gone.
        nvml_try(unsafe { call(self.handle) })
    }
}
