//! A libcuda that loads, makes one context and says what that got, and takes calls that compute without computing: what
//! `sublet probe` and `sublet load` ask. And it suspends other processes, as `sublet suspend` asks ([`checkpoint`]).

#![allow(unsafe_code, reason = "C ABI")]

mod checkpoint;

use std::ffi::{c_int, c_uint, c_void};
use std::sync::LazyLock;

use nvidia_ml::mps::program::{Got, got};

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

/// Waits while another process has locked this one (`cuCheckpointProcessLock`).
fn wait() {
    if let Ok(got) = &*GOT {
        got.wait();
    }
}

/// Writes what `of` makes of it to `to`.
///
/// # Safety
/// `to` is null or may be written.
unsafe fn tell<T>(to: *mut T, of: impl Fn(&Got) -> T) -> c_int {
    wait();
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

/// How long the simulated device takes for everything that was started before `cuCtxSynchronize`.
const BUSY: std::time::Duration = std::time::Duration::from_millis(1);

/// `cuModuleLoadData` of cuda.h: every text is a module.
///
/// # Safety
/// `module` is null or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut *mut c_void, _image: *const c_void) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { tell(module, |_| std::ptr::null_mut()) }
}

/// `cuModuleGetFunction` of cuda.h: every module has every kernel.
///
/// # Safety
/// `function` is null or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    function: *mut *mut c_void,
    _module: *mut c_void,
    _name: *const c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { tell(function, |_| std::ptr::null_mut()) }
}

/// `cuMemAlloc` of cuda.h: an address that nothing is behind, if the share has so much memory.
///
/// # Safety
/// `address` is null or points to an address that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> c_int {
    const OUT_OF_MEMORY: c_int = 2;
    match &*GOT {
        Ok(got) if bytes as u64 > got.free_mib << 20 => OUT_OF_MEMORY,
        // SAFETY: the caller's promise.
        _ => unsafe { tell(address, |_| 0x7f00_0000_0000) },
    }
}

/// `cuMemsetD32` of cuda.h: nothing is behind the address.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32_v2(_address: u64, _value: c_uint, _words: usize) -> c_int {
    wait();
    0
}

/// `cuMemAllocHost` of cuda.h: ordinary memory, which is never freed.
///
/// # Safety
/// `memory` is null or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocHost_v2(memory: *mut *mut c_void, bytes: usize) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { tell(memory, |_| vec![0_u8; bytes].leak().as_mut_ptr().cast()) }
}

/// `cuMemcpyHtoD` of cuda.h: nothing is behind the device's address.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoD_v2(_to: u64, _from: *const c_void, _bytes: usize) -> c_int {
    wait();
    0
}

/// `cuMemcpyDtoH` of cuda.h: the device's memory is full of the float 1.
///
/// # Safety
/// `to` is null or `bytes` bytes may be written to it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, _from: u64, bytes: usize) -> c_int {
    if to.is_null() {
        return 1;
    }
    wait();
    // SAFETY: the caller's promise.
    let memory = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), bytes) };
    for float in memory.chunks_exact_mut(4) {
        float.copy_from_slice(&1_f32.to_ne_bytes());
    }
    0
}

/// `cuLaunchKernel` of cuda.h: nothing is computed, so it takes none of its arguments from the registers and the stack.
#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernel() -> c_int {
    wait();
    0
}

/// `cuCtxSynchronize` of cuda.h.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> c_int {
    wait();
    std::thread::sleep(BUSY);
    0
}
