//! NVML: initialization, versions and finding devices.
#![allow(unsafe_code, reason = "C ABI")]

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::fs;

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT,
    nvmlReturn_enum_NVML_ERROR_NOT_FOUND as NOT_FOUND, nvmlReturn_t,
};

use super::out::{Answer, code, put, put_text};
use super::session::{self, Session};

/// NVML's version is `13.` and the driver's version, in drivers of the CUDA 13 series.
const API: &str = "13";

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> nvmlReturn_t {
    code(session::open())
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit() -> nvmlReturn_t {
    code(session::open())
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> nvmlReturn_t {
    code(session::open())
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> nvmlReturn_t {
    code(session::close())
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(result: nvmlReturn_t) -> *const c_char {
    error_text(result).as_ptr()
}

/// Error texts, as in the real library.
const fn error_text(result: nvmlReturn_t) -> &'static CStr {
    match result {
        0 => c"The operation was successful",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        5 => c"Already Initialized",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        8 => c"Insufficient External Power",
        9 => c"Driver Not Loaded",
        10 => c"Timeout",
        15 => c"GPU is lost",
        16 => c"Reset Required",
        17 => c"OS call failed",
        18 => c"Driver/library version mismatch",
        19 => c"In use by another client",
        23 => c"Insufficient Resources",
        25 => c"Argument version mismatch",
        999 => c"Unknown Error",
        _ => c"Unknown Error Code",
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(text: *mut c_char, length: c_uint) -> nvmlReturn_t {
    // SAFETY: the caller's buffer of `length` bytes, as nvml.h asks for.
    session::ask(|session| unsafe { put_text(text, length, &session.topology.driver) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetNVMLVersion(text: *mut c_char, length: c_uint) -> nvmlReturn_t {
    // SAFETY: as above.
    session::ask(|session| unsafe { put_text(text, length, &format!("{API}.{}", session.topology.files())) })
}

/// 1000 × major + 10 × minor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) -> nvmlReturn_t {
    // SAFETY: null or valid, as nvml.h asks for.
    session::ask(|session| unsafe { put(version, cuda_version(session)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetCudaDriverVersion(version: *mut c_int) -> nvmlReturn_t {
    // SAFETY: as above.
    session::ask(|session| unsafe { put(version, cuda_version(session)) })
}

fn cuda_version(session: &Session) -> c_int {
    let mut parts = session.topology.cuda.split('.').map(|part| part.parse().unwrap_or(0));
    1000 * parts.next().unwrap_or(0) + 10 * parts.next().unwrap_or(0)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetProcessName(
    pid: c_uint,
    text: *mut c_char,
    length: c_uint,
) -> nvmlReturn_t {
    session::ask(|_| {
        let command = fs::read(format!("/proc/{pid}/cmdline")).map_err(|_| NOT_FOUND)?;
        let name = command.split(|&byte| byte == 0).next().unwrap_or_default();
        // SAFETY: the caller's buffer of `length` bytes, as nvml.h asks for.
        unsafe { put_text(text, length, &String::from_utf8_lossy(name)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> nvmlReturn_t {
    session::ask(|session| {
        let number = c_uint::try_from(session.topology.gpu.len()).unwrap_or(c_uint::MAX);
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(count, number) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(
    index: c_uint,
    device: *mut nvmlDevice_t,
) -> nvmlReturn_t {
    session::find(index, |session| {
        let gpu = session.topology.gpu.get(index as usize).ok_or(INVALID_ARGUMENT)?;
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(device, session::handle(gpu, None)) }
    })
}

/// Accepts the UUIDs of GPUs and MIG devices.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByUUID(
    uuid: *const c_char,
    device: *mut nvmlDevice_t,
) -> nvmlReturn_t {
    session::ask(|session| {
        // SAFETY: null or a C string, as nvml.h asks for.
        let found = by_uuid(session, unsafe { text(uuid)? })?;
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(device, found) }
    })
}

fn by_uuid(session: &Session, uuid: &str) -> Answer<nvmlDevice_t> {
    for gpu in &session.topology.gpu {
        session.search(gpu)?;
        if gpu.uuid == uuid {
            return Ok(session::handle(gpu, None));
        }
        if let Some(mig) = session.mig_devices(gpu)?.iter().find(|mig| mig.uuid == uuid) {
            return Ok(session::handle(gpu, Some(mig)));
        }
    }
    Err(NOT_FOUND)
}

/// Accepts `domain:bus:device.function` with a domain of any length, and `bus:device.function`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(
    bus_id: *const c_char,
    device: *mut nvmlDevice_t,
) -> nvmlReturn_t {
    session::ask(|session| {
        // SAFETY: null or a C string, as nvml.h asks for.
        let wanted = pci_address(unsafe { text(bus_id)? }).ok_or(INVALID_ARGUMENT)?;
        let mut gpus = session.topology.gpu.iter();
        let gpu = gpus.find(|gpu| pci_address(&gpu.bus_id) == Some(wanted)).ok_or(NOT_FOUND)?;
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(device, session::handle(gpu, None)) }
    })
}

/// Domain, bus and device of a bus id.
pub fn pci_address(bus_id: &str) -> Option<(u32, u32, u32)> {
    let (rest, device) = bus_id.rsplit_once(':')?;
    let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    Some((number(domain)?, number(bus)?, number(device.split('.').next()?)?))
}

/// # Safety
/// `text` is null or a C string that outlives the answer.
unsafe fn text<'t>(text: *const c_char) -> Answer<&'t str> {
    if text.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: not null, so a C string as the caller promised.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| INVALID_ARGUMENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_ids_are_read_in_every_spelling() {
        assert_eq!(pci_address("0000:3b:00.0"), Some((0, 0x3b, 0)));
        assert_eq!(pci_address("00000000:3B:00.0"), Some((0, 0x3b, 0)));
        assert_eq!(pci_address("3B:1F.0"), Some((0, 0x3b, 0x1f)));
        assert_eq!(pci_address("GPU"), None);
        assert_eq!(pci_address("0000:zz:00.0"), None);
    }
}
