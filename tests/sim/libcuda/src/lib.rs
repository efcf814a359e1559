//! A libcuda that loads, makes one context and says what that got: all that `sublet probe` asks.

#![allow(unsafe_code, reason = "C ABI")]

use std::ffi::{c_int, c_uint, c_void};
use std::sync::LazyLock;

use nvidia_ml::mps::probe::{Got, got};

/// What the process's one context got, made when it is first asked for.
static GOT: LazyLock<Result<Got, c_int>> = LazyLock::new(|| got().map_err(|error| number(&error)));

/// `CUresult` of cuda.h.
fn number(error: &str) -> c_int {
    match error {
        "CUDA_ERROR_OUT_OF_MEMORY" => 2,
        "CUDA_ERROR_DEVICE_UNAVAILABLE" => 46,
        "CUDA_ERROR_NO_DEVICE" => 100,
        _ => 999,
    }
}

/// Writes what `of` makes of it to `to`.
///
/// # Safety
/// `to` is null or may be written.
unsafe fn tell<T>(to: *mut T, of: impl Fn(&Got) -> T) -> c_int {
    // SAFETY: the caller's promise; null is turned away.
    match (&*GOT, unsafe { to.as_mut() }) {
        (Ok(got), Some(to)) => *to = of(got),
        (Err(error), _) => return *error,
        (_, None) => return 1,
    }
    0
}

/// `cuInit` of cuda.h: always `CUDA_SUCCESS`. What a context would get is `cuda-probe`'s business.
#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: c_uint) -> c_int {
    0
}

/// `cuDriverGetVersion` of cuda.h: CUDA 13.0.
///
/// # Safety
/// `version` is null or points to an int that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    const INVALID_VALUE: c_int = 1;
    // SAFETY: the caller's promise; null is turned away.
    match unsafe { version.as_mut() } {
        Some(version) => *version = 13000,
        None => return INVALID_VALUE,
    }
    0
}

/// `cuDeviceGetCount` of cuda.h.
///
/// # Safety
/// `count` is null or points to an int that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { tell(count, |got| c_int::try_from(got.devices).unwrap_or(c_int::MAX)) }
}

/// `cuDeviceGet` of cuda.h: a device is its ordinal.
///
/// # Safety
/// `device` is null or points to an int that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { tell(device, |_| ordinal) }
}

/// `cuDevicePrimaryCtxRetain` of cuda.h: it was made when it was first asked for.
///
/// # Safety
/// `context` is null or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, _device: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { tell(context, |_| std::ptr::null_mut()) }
}

/// `cuCtxSetCurrent` of cuda.h.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(_context: *mut c_void) -> c_int {
    0
}

/// `cuDeviceGetAttribute` of cuda.h: the multiprocessors, and whether MPS serves.
///
/// # Safety
/// `value` is null or points to an int that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) -> c_int {
    let of = |got: &Got| match attribute {
        16 => c_int::try_from(got.sm).unwrap_or(c_int::MAX),
        133 => c_int::from(got.mps),
        _ => 0,
    };
    // SAFETY: the caller's promise.
    unsafe { tell(value, of) }
}

/// `cuMemGetInfo` of cuda.h.
///
/// # Safety
/// Both are null or point to a `size_t` that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut u64, total: *mut u64) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { tell(free, |got| got.free_mib << 20).max(tell(total, |got| got.total_mib << 20)) }
}
