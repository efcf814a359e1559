//! Finds libcuda as every CUDA program does: by its soname, through the dynamic loader.

#![allow(unsafe_code, reason = "dlopen, ioctl")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;

use nix::libc;

/// Loads `libcuda.so.1`, calls its `cuInit`, and returns the library's path.
///
/// # Errors
/// The loader's message, or `cuInit`'s error number.
pub fn load() -> Result<PathBuf, String> {
    // SAFETY: both arguments are valid; the library's initialisers are trusted as in any CUDA program.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    if library.is_null() {
        return Err(last_error());
    }
    // SAFETY: `library` was loaded above and is never unloaded.
    let symbol = unsafe { libc::dlsym(library, c"cuInit".as_ptr()) };
    if symbol.is_null() {
        return Err("libcuda.so.1 has no cuInit".into());
    }
    // SAFETY: cuInit has this type in cuda.h.
    let init: unsafe extern "C" fn(c_uint) -> c_int =
        unsafe { std::mem::transmute::<*mut c_void, _>(symbol) };
    // SAFETY: 0 is the only value that cuInit accepts.
    match unsafe { init(0) } {
        0 => file_of(symbol),
        number => Err(format!("cuInit: {number}")),
    }
}

/// Whether a system call filter stops this process from using a driver. NVIDIA's library begins with a private ioctl
/// and needs it for everything else (kernel-open/nvidia/nv.c, `NV_ESC_CHECK_VERSION_STR`). There is no such driver
/// here, so without a filter the kernel answers that the file does not support the request.
pub fn is_out_of_reach() -> bool {
    const CHECK_VERSION: u64 = 0xc048_46d2;
    let Ok(file) = std::fs::File::open("/dev/null") else { return true };
    // SAFETY: no device answers this request on /dev/null, so nobody reads or writes by the null pointer.
    let asked = unsafe { libc::ioctl(file.as_raw_fd(), CHECK_VERSION, std::ptr::null_mut::<u8>()) };
    asked < 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::EPERM)
}

fn file_of(symbol: *const c_void) -> Result<PathBuf, String> {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `info` is there to be written; all zeroes is a value of its type.
    let (found, info) = unsafe { (libc::dladdr(symbol, info.as_mut_ptr()), info.assume_init()) };
    if found == 0 || info.dli_fname.is_null() {
        return Err("dladdr does not know cuInit".into());
    }
    Ok(text(info.dli_fname).into())
}

fn last_error() -> String {
    // SAFETY: dlerror may be called at any time.
    let error: *const c_char = unsafe { libc::dlerror() };
    if error.is_null() { "dlopen failed".into() } else { text(error) }
}

/// The loader's strings live until the next call, and are copied here.
fn text(string: *const c_char) -> String {
    // SAFETY: callers pass non-null, zero-terminated strings of the loader.
    unsafe { CStr::from_ptr(string) }.to_string_lossy().into_owned()
}
