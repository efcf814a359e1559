//! A libcuda that loads and answers its first two questions, so that what a loader finds can be told apart.

#![allow(unsafe_code, reason = "C ABI")]

use std::ffi::{c_int, c_uint};

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
