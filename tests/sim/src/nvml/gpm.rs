//! NVML: GPU performance monitoring, from Hopper on. A sample contains how busy its device was when it was taken.
#![allow(unsafe_code, reason = "C ABI")]

use std::ffi::{CStr, c_uint};

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlGpmMetric_t, nvmlGpmMetricsGet_t, nvmlGpmSample_t, nvmlGpmSupport_t,
    nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH as ARGUMENT_VERSION_MISMATCH,
    nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT,
    nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED, nvmlReturn_enum_NVML_SUCCESS as SUCCESS,
    nvmlReturn_t,
};

use super::out::{Answer, put};
use super::session::{self, Target};
use super::utilization::busy;
use crate::layout::topology::Arch;

/// Metrics (nvml.h), each with its value at full load and its unit. The units are chosen.
const METRICS: [(c_uint, f64, &CStr); 9] = [
    (1, 92.0, c"%"),
    (2, 80.0, c"%"),
    (3, 40.0, c"%"),
    (5, 30.0, c"%"),
    (10, 15.0, c"%"),
    (20, 12.0, c"MiB/s"),
    (21, 34.0, c"MiB/s"),
    (60, 0.0, c"MiB/s"),
    (61, 0.0, c"MiB/s"),
];

/// `nvmlGpmSupport_t` and `nvmlGpmMetricsGet_t` begin with this.
const VERSION: c_uint = 1;

/// The content of `nvmlGpmSample_t`: percent.
struct Sample {
    busy: Option<c_uint>,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpmQueryDeviceSupport(
    device: nvmlDevice_t,
    support: *mut nvmlGpmSupport_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        // SAFETY: null or valid, as nvml.h asks for.
        let support = unsafe { support.as_mut() }.ok_or(INVALID_ARGUMENT)?;
        if support.version != VERSION {
            return Err(ARGUMENT_VERSION_MISMATCH);
        }
        support.isSupportedDevice = c_uint::from(has_gpm(target));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpmSampleAlloc(sample: *mut nvmlGpmSample_t) -> nvmlReturn_t {
    let new = Box::into_raw(Box::new(Sample { busy: None }));
    // SAFETY: null or valid, as nvml.h asks for.
    session::ask(|_| unsafe { put(sample, new.cast()) })
}

/// # Safety
/// The sample is one of `nvmlGpmSampleAlloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpmSampleFree(sample: nvmlGpmSample_t) -> nvmlReturn_t {
    if !sample.is_null() {
        // SAFETY: as the caller promised. It is not used afterwards.
        drop(unsafe { Box::from_raw(sample.cast::<Sample>()) });
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpmSampleGet(device: nvmlDevice_t, sample: nvmlGpmSample_t) -> nvmlReturn_t {
    // SAFETY: the sample is one of nvmlGpmSampleAlloc, as nvml.h asks for.
    session::gpu(device, |target| unsafe { fill(target, sample) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpmMigSampleGet(
    device: nvmlDevice_t,
    gpu_instance: c_uint,
    sample: nvmlGpmSample_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let of_instance =
            target.session.mig_devices(target.gpu)?.into_iter().find(|mig| mig.gi == gpu_instance);
        let mig = Some(of_instance.ok_or(INVALID_ARGUMENT)?);
        let part = Target { gpu: target.gpu, mig, session: target.session };
        // SAFETY: the sample is one of nvmlGpmSampleAlloc, as nvml.h asks for.
        unsafe { fill(&part, sample) }
    })
}

/// # Safety
/// `get` is null or valid, its samples are of `nvmlGpmSampleAlloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpmMetricsGet(get: *mut nvmlGpmMetricsGet_t) -> nvmlReturn_t {
    session::ask(|_| {
        // SAFETY: as the caller promised.
        let get = unsafe { get.as_mut() }.ok_or(INVALID_ARGUMENT)?;
        if get.version != VERSION {
            return Err(ARGUMENT_VERSION_MISMATCH);
        }
        // SAFETY: as the caller promised.
        let [before, now] =
            [get.sample1, get.sample2].map(|sample| unsafe { sample.cast::<Sample>().as_ref() });
        let (_, busy) = before
            .and_then(|sample| sample.busy)
            .zip(now.and_then(|sample| sample.busy))
            .ok_or(INVALID_ARGUMENT)?;
        let wanted = get.metrics.iter_mut().take(get.numMetrics as usize);
        wanted.for_each(|metric| answer(metric, busy));
        Ok(())
    })
}

fn answer(metric: &mut nvmlGpmMetric_t, busy: c_uint) {
    let known = METRICS.iter().find(|(id, ..)| *id == metric.metricId);
    let Some((_, full, unit)) = known else {
        metric.nvmlReturn = NOT_SUPPORTED;
        return;
    };
    metric.nvmlReturn = SUCCESS;
    metric.value = full * f64::from(busy) / 100.0;
    metric.metricInfo.unit = unit.as_ptr().cast_mut();
}

/// # Safety
/// The sample is null or one of `nvmlGpmSampleAlloc`.
unsafe fn fill(target: &Target<'_>, sample: nvmlGpmSample_t) -> Answer {
    if !has_gpm(target) {
        return Err(NOT_SUPPORTED);
    }
    // SAFETY: as the caller promised.
    let sample = unsafe { sample.cast::<Sample>().as_mut() }.ok_or(INVALID_ARGUMENT)?;
    sample.busy = Some(busy(target));
    Ok(())
}

fn has_gpm(target: &Target<'_>) -> bool {
    matches!(target.gpu.arch, Arch::Hopper | Arch::Blackwell)
}
