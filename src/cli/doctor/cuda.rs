//! What a CUDA program sees: libcuda is loaded by name, as by any program in a container.
#![allow(unsafe_code, reason = "libcuda by its C ABI (cuda.h)")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use nix::libc;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT` and `CU_DEVICE_ATTRIBUTE_MPS_ENABLED` of cuda.h.
const MULTIPROCESSOR_COUNT: c_int = 16;
const MPS_ENABLED: c_int = 133;

/// The first device, as a context on it sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Seen {
    /// How many devices CUDA lists.
    pub devices: usize,
    /// Streaming multiprocessors that the context may use.
    pub sms: i32,
    /// The memory that can still be allocated.
    pub memory_free_bytes: u64,
    /// The device's memory.
    pub memory_total_bytes: u64,
    /// Whether the context is a client of an MPS server.
    pub mps: bool,
}

type Function = *mut c_void;

/// Creates a context on device 0 and queries it. The context exists until the process ends.
///
/// # Errors
/// There is no libcuda, or it answered with an error; one line.
pub fn look() -> Result<Seen, String> {
    let (mut count, mut device, mut context) = (0, 0, std::ptr::null_mut::<c_void>());
    let (mut sms, mut mps, mut free, mut total) = (0, 0, 0_usize, 0_usize);
    // SAFETY: each symbol has the type that cuda.h gives it, and each pointer is to a local that outlives its call.
    unsafe {
        let init: extern "C" fn(c_uint) -> c_int = std::mem::transmute(symbol(c"cuInit")?);
        let get_count: extern "C" fn(*mut c_int) -> c_int = std::mem::transmute(symbol(c"cuDeviceGetCount")?);
        let get: extern "C" fn(*mut c_int, c_int) -> c_int = std::mem::transmute(symbol(c"cuDeviceGet")?);
        let retain: extern "C" fn(*mut *mut c_void, c_int) -> c_int =
            std::mem::transmute(symbol(c"cuDevicePrimaryCtxRetain")?);
        let set: extern "C" fn(*mut c_void) -> c_int = std::mem::transmute(symbol(c"cuCtxSetCurrent")?);
        let attribute: extern "C" fn(*mut c_int, c_int, c_int) -> c_int =
            std::mem::transmute(symbol(c"cuDeviceGetAttribute")?);
        let memory: extern "C" fn(*mut usize, *mut usize) -> c_int =
            std::mem::transmute(symbol(c"cuMemGetInfo_v2")?);
        done("cuInit", init(0))?;
        done("cuDeviceGetCount", get_count(&raw mut count))?;
        done("cuDeviceGet", get(&raw mut device, 0))?;
        done("cuDevicePrimaryCtxRetain", retain(&raw mut context, device))?;
        done("cuCtxSetCurrent", set(context))?;
        done("cuDeviceGetAttribute", attribute(&raw mut sms, MULTIPROCESSOR_COUNT, device))?;
        done("cuDeviceGetAttribute", attribute(&raw mut mps, MPS_ENABLED, device))?;
        done("cuMemGetInfo", memory(&raw mut free, &raw mut total))?;
    }
    Ok(Seen {
        devices: usize::try_from(count).unwrap_or(0),
        sms,
        memory_free_bytes: free as u64,
        memory_total_bytes: total as u64,
        mps: mps != 0,
    })
}

/// A function of libcuda.
fn symbol(name: &CStr) -> Result<Function, String> {
    // SAFETY: both names end in NUL; the library is never closed, so that its symbols stay.
    let found = unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
        if library.is_null() {
            return Err(format!("libcuda.so.1 cannot be loaded: {}", why()));
        }
        libc::dlsym(library, name.as_ptr())
    };
    if found.is_null() { Err(format!("libcuda has no {}", name.to_string_lossy())) } else { Ok(found) }
}

/// The loader's last error.
fn why() -> String {
    // SAFETY: dlerror returns null or a string that stays until the thread's next call of the loader.
    let text: *const c_char = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason given".to_owned();
    }
    // SAFETY: not null, see above.
    sublet_core::text::safe(&unsafe { CStr::from_ptr(text) }.to_string_lossy())
}

/// A `CUresult` in words, if a share may cause it.
fn done(call: &str, result: c_int) -> Result<(), String> {
    let word = match result {
        0 => return Ok(()),
        2 => "CUDA_ERROR_OUT_OF_MEMORY",
        46 => "CUDA_ERROR_DEVICE_UNAVAILABLE",
        100 => "CUDA_ERROR_NO_DEVICE",
        805 => "CUDA_ERROR_MPS_CONNECTION_FAILED",
        999 => "CUDA_ERROR_UNKNOWN",
        other => return Err(format!("{call}: CUDA error {other}")),
    };
    Err(format!("{call}: {word}"))
}
