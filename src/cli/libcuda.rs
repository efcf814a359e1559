//! libcuda by its C ABI (cuda.h), loaded by name, as by any program in a container.
#![allow(unsafe_code, reason = "libcuda by its C ABI (cuda.h)")]

use std::ffi::{CStr, CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;

use nix::libc;

/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT` and `CU_DEVICE_ATTRIBUTE_MPS_ENABLED` of cuda.h.
pub const MULTIPROCESSOR_COUNT: i32 = 16;
pub const MPS_ENABLED: i32 = 133;

/// Memory of the device. It is never freed.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// `CUdeviceptr`.
    address: u64,
    bytes: usize,
}

/// A context, module, function or stream of the library's (`CUcontext` and so on).
type Handle = *mut c_void;

/// A kernel (`CUfunction`).
#[derive(Clone, Copy, Debug)]
pub struct Kernel(Handle);

/// Page-locked memory of the host, which the device reads and writes by itself. It is never freed.
#[derive(Debug)]
pub struct Pinned {
    address: *mut c_void,
    bytes: usize,
}

/// libcuda after `cuInit`. The library and the contexts stay until the process ends.
#[derive(Clone, Copy, Debug)]
pub struct Driver {
    /// dlopen's handle, which is never closed.
    library: *mut c_void,
}

/// A function of libcuda with the type that cuda.h gives it, called; the result is `done`'s. It is looked up once, because
/// a load starts thousands of kernels a second.
macro_rules! call {
    ($driver:expr, $name:literal, ($($type:ty),*), ($($argument:expr),*)) => {{
        static FOUND: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
        if FOUND.load(Ordering::Relaxed).is_null() {
            FOUND.store(symbol($driver.library, $name)?, Ordering::Relaxed);
        }
        let function: extern "C" fn($($type),*) -> i32 = std::mem::transmute(FOUND.load(Ordering::Relaxed));
        done($name, function($($argument),*))
    }};
}

impl Driver {
    /// Loads libcuda and initialises it.
    ///
    /// # Errors
    /// There is no libcuda, or no device; one line.
    pub fn load() -> Result<Self, String> {
        let driver = Self { library: open(c"libcuda.so.1")? };
        // SAFETY: the type is cuda.h's.
        unsafe { call!(driver, c"cuInit", (u32), (0))? }
        Ok(driver)
    }

    /// How many devices there are.
    ///
    /// # Errors
    /// The driver's, one line; so with all that follow.
    pub fn count(self) -> Result<usize, String> {
        let mut count = 0;
        // SAFETY: the type is cuda.h's; the pointer is to a local that outlives the call.
        unsafe { call!(self, c"cuDeviceGetCount", (*mut i32), (&raw mut count))? }
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Makes the primary context of device 0 current, and returns the device's number for [`Self::attribute`].
    pub fn context(self) -> Result<i32, String> {
        let (mut device, mut context) = (0, ptr::null_mut::<c_void>());
        // SAFETY: the types are cuda.h's; the pointers are to locals that outlive their calls.
        unsafe {
            call!(self, c"cuDeviceGet", (*mut i32, i32), (&raw mut device, 0))?;
            call!(self, c"cuDevicePrimaryCtxRetain", (*mut Handle, i32), (&raw mut context, device))?;
            call!(self, c"cuCtxSetCurrent", (Handle), (context))?;
        }
        Ok(device)
    }

    /// An attribute of the device, as the current context sees it.
    pub fn attribute(self, attribute: i32, device: i32) -> Result<i32, String> {
        let mut value = 0;
        // SAFETY: the type is cuda.h's; the pointer is to a local that outlives the call.
        unsafe {
            call!(self, c"cuDeviceGetAttribute", (*mut i32, i32, i32), (&raw mut value, attribute, device))?;
        }
        Ok(value)
    }

    /// Free and total bytes of the device.
    pub fn memory(self) -> Result<(u64, u64), String> {
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: the type is cuda.h's; the pointers are to locals that outlive the call.
        unsafe { call!(self, c"cuMemGetInfo_v2", (*mut usize, *mut usize), (&raw mut free, &raw mut total))? }
        Ok((free as u64, total as u64))
    }

    /// Compiles PTX for the device and finds its kernels.
    pub fn kernels<const N: usize>(self, ptx: &CStr, names: [&CStr; N]) -> Result<[Kernel; N], String> {
        let mut module = ptr::null_mut::<c_void>();
        let mut kernels = [Kernel(ptr::null_mut()); N];
        // SAFETY: the types are cuda.h's; both texts end in NUL; the pointers outlive the calls.
        unsafe {
            call!(self, c"cuModuleLoadData", (*mut Handle, *const c_char), (&raw mut module, ptx.as_ptr()))?;
            for (kernel, name) in kernels.iter_mut().zip(names) {
                call!(
                    self,
                    c"cuModuleGetFunction",
                    (*mut Handle, Handle, *const c_char),
                    (&raw mut kernel.0, module, name.as_ptr())
                )?;
            }
        }
        Ok(kernels)
    }

    /// Memory of the device, zeroed.
    pub(crate) fn allocate(self, bytes: usize) -> Result<Buffer, String> {
        let mut address = 0_u64;
        // SAFETY: the types are cuda.h's; the pointer outlives the call; the driver has just given this memory.
        unsafe {
            call!(self, c"cuMemAlloc_v2", (*mut u64, usize), (&raw mut address, bytes))?;
            call!(self, c"cuMemsetD32_v2", (u64, u32, usize), (address, 0, bytes / 4))?;
        }
        Ok(Buffer { address, bytes })
    }

    /// Page-locked memory of the host.
    pub fn pinned(self, bytes: usize) -> Result<Pinned, String> {
        let mut memory = ptr::null_mut::<c_void>();
        // SAFETY: the type is cuda.h's; the pointer outlives the call.
        unsafe { call!(self, c"cuMemAllocHost_v2", (*mut *mut c_void, usize), (&raw mut memory, bytes))? }
        Ok(Pinned { address: memory, bytes })
    }

    /// Copies up to `bytes` from the host to the device, as far as both have them.
    pub(crate) fn upload(self, to: Buffer, from: &Pinned, bytes: usize) -> Result<(), String> {
        let bytes = bytes.min(to.bytes).min(from.bytes);
        // SAFETY: the type is cuda.h's; the driver gave both memories, and neither is shorter.
        unsafe {
            call!(self, c"cuMemcpyHtoD_v2", (u64, *const c_void, usize), (to.address, from.address, bytes))
        }
    }

    /// Copies up to `bytes` from the device to the host, as far as both have them.
    pub(crate) fn download(self, to: &mut Pinned, from: Buffer, bytes: usize) -> Result<(), String> {
        let bytes = bytes.min(to.bytes).min(from.bytes);
        // SAFETY: as in `upload`.
        unsafe {
            call!(self, c"cuMemcpyDtoH_v2", (*mut c_void, u64, usize), (to.address, from.address, bytes))
        }
    }

    /// The second of the 32-bit floats in the device's memory.
    pub(crate) fn second_float(self, from: Buffer) -> Result<f32, String> {
        let mut two = [0_f32; 2];
        let bytes = size_of_val(&two);
        if from.bytes < bytes {
            return Ok(0.0);
        }
        let to = two.as_mut_ptr().cast::<c_void>();
        // SAFETY: the type is cuda.h's; both memories have as many bytes as are copied.
        unsafe { call!(self, c"cuMemcpyDtoH_v2", (*mut c_void, u64, usize), (to, from.address, bytes))? }
        Ok(two[1])
    }

    /// Starts a kernel of `blocks` blocks of `threads` threads. Its parameters are the addresses of two buffers and a number.
    pub(crate) fn launch(
        self,
        kernel: Kernel,
        (blocks, threads): (u32, u32),
        [mut first, mut second]: [Buffer; 2],
        mut number: u32,
    ) -> Result<(), String> {
        let mut parameters: [*mut c_void; 3] =
            [(&raw mut first.address).cast(), (&raw mut second.address).cast(), (&raw mut number).cast()];
        let nothing = ptr::null_mut::<c_void>();
        // SAFETY: the type is cuda.h's; the parameters belong to the kernels in `load`, and cuLaunchKernel copies them
        // before it returns.
        unsafe {
            call!(
                self,
                c"cuLaunchKernel",
                (Handle, u32, u32, u32, u32, u32, u32, u32, Handle, *mut *mut c_void, *mut *mut c_void),
                (kernel.0, blocks, 1, 1, threads, 1, 1, 0, nothing, parameters.as_mut_ptr(), ptr::null_mut())
            )
        }
    }

    /// Waits until the device has done everything.
    pub(crate) fn synchronize(self) -> Result<(), String> {
        // SAFETY: the type is cuda.h's.
        unsafe { call!(self, c"cuCtxSynchronize", (), ()) }
    }
}

/// A call that changes another process's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::EnumString, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum CheckpointCall {
    /// It makes no CUDA call any more.
    Lock,
    /// Its GPU memory goes into host memory, and its GPU is free.
    Checkpoint,
    /// Its GPU memory comes back.
    Restore,
    /// It makes CUDA calls again.
    Unlock,
}

/// libcuda's calls on other processes (cuda.h, since CUDA 12.8). They need no `cuInit`, and root.
#[derive(Clone, Copy, Debug)]
pub struct Checkpointer {
    library: *mut c_void,
}

/// `CUcheckpointLockArgs` of cuda.h.
#[repr(C)]
struct LockArguments {
    timeout_ms: u32,
    reserved: u32,
    more_reserved: [u64; 7],
}

/// `CUcheckpointGpuPair` of cuda.h: the UUIDs of a GPU and of the one that takes its place.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuPair {
    old: [u8; 16],
    new: [u8; 16],
}

impl GpuPair {
    /// Of two UUIDs as NVML writes them: `GPU-`, and 32 hex digits with hyphens.
    pub fn parse(old: &str, new: &str) -> Option<Self> {
        let bytes = |uuid: &str| {
            let digits = uuid.strip_prefix("GPU-")?.replace('-', "");
            let number = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32);
            number.map(u128::to_be_bytes)
        };
        Some(Self { old: bytes(old)?, new: bytes(new)? })
    }
}

/// `CUcheckpointRestoreArgs` of cuda.h, since CUDA 13.
#[repr(C)]
struct RestoreArguments {
    pairs: *const GpuPair,
    count: u32,
    reserved: [u8; 44],
    more_reserved: u64,
}

impl Checkpointer {
    /// Loads the libcuda in this file.
    pub fn load(library: &Path) -> Result<Self, String> {
        let path = CString::new(library.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
        Ok(Self { library: open(&path)? })
    }

    /// `CUprocessState`: 0 running, 1 locked, 2 checkpointed, 3 failed.
    pub fn state(self, pid: i32) -> Result<i32, String> {
        let mut state = 0;
        // SAFETY: the type is cuda.h's; the pointer is to a local that outlives the call.
        unsafe { call!(self, c"cuCheckpointProcessGetState", (i32, *mut i32), (pid, &raw mut state))? }
        Ok(state)
    }

    /// Carries out `call` on process `pid`. A lock waits up to `longest` for it to be between two CUDA calls; a restore goes
    /// to the GPU at the same place among those that it can open, or with `pairs` for all that it could open then to the one that
    /// takes its place.
    pub fn carry_out(
        self,
        call: CheckpointCall,
        pid: i32,
        longest: Duration,
        pairs: &[GpuPair],
    ) -> Result<(), String> {
        let count = u32::try_from(pairs.len()).unwrap_or(u32::MAX);
        let restore = RestoreArguments { pairs: pairs.as_ptr(), count, reserved: [0; 44], more_reserved: 0 };
        let restore = if pairs.is_empty() { ptr::null() } else { &raw const restore };
        let timeout_ms = u32::try_from(longest.as_millis()).unwrap_or(u32::MAX);
        let mut lock = LockArguments { timeout_ms, reserved: 0, more_reserved: [0; 7] };
        let (lock, none) = (&raw mut lock, ptr::null_mut::<c_void>());
        // SAFETY: the types are cuda.h's, which allows null for arguments; the pointers are to locals and to `pairs`, which
        // outlive the call.
        unsafe {
            match call {
                CheckpointCall::Lock => {
                    call!(self, c"cuCheckpointProcessLock", (i32, *mut LockArguments), (pid, lock))
                }
                CheckpointCall::Checkpoint => {
                    call!(self, c"cuCheckpointProcessCheckpoint", (i32, *mut c_void), (pid, none))
                }
                CheckpointCall::Restore => {
                    call!(self, c"cuCheckpointProcessRestore", (i32, *const RestoreArguments), (pid, restore))
                }
                CheckpointCall::Unlock => {
                    call!(self, c"cuCheckpointProcessUnlock", (i32, *mut c_void), (pid, none))
                }
            }
        }
    }
}

/// Loads a library. It is never closed.
fn open(name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: the name ends in NUL.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
    if library.is_null() {
        return Err(format!("{} cannot be loaded: {}", name.to_string_lossy(), why()));
    }
    Ok(library)
}

/// A function of the library.
fn symbol(library: *mut c_void, name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: the handle is dlopen's and is never closed, so that its symbols stay; the name ends in NUL.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
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

/// A `CUresult` in words, if a share or a suspension may cause it.
fn done(call: &CStr, result: i32) -> Result<(), String> {
    let word = match result {
        0 => return Ok(()),
        1 => "CUDA_ERROR_INVALID_VALUE",
        2 => "CUDA_ERROR_OUT_OF_MEMORY",
        46 => "CUDA_ERROR_DEVICE_UNAVAILABLE",
        100 => "CUDA_ERROR_NO_DEVICE",
        222 => "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        304 => "CUDA_ERROR_OPERATING_SYSTEM",
        401 => "CUDA_ERROR_ILLEGAL_STATE",
        600 => "CUDA_ERROR_NOT_READY",
        719 => "CUDA_ERROR_LAUNCH_FAILED",
        805 => "CUDA_ERROR_MPS_CONNECTION_FAILED",
        801 => "CUDA_ERROR_NOT_SUPPORTED",
        807 => "CUDA_ERROR_MPS_SERVER_NOT_READY",
        999 => "CUDA_ERROR_UNKNOWN",
        other => &format!("CUDA error {other}"),
    };
    // cuda.h's name: the library's own has the version of the function behind it.
    Err(format!("{}: {word}", call.to_string_lossy().trim_end_matches("_v2")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_is_of_uuids_as_nvml_writes_them() {
        let uuid =
            |digit: char| format!("GPU-{0}{0}-{1}-{1}-{1}-{0}{0}{0}", "0011", digit.to_string().repeat(4));
        let pair = GpuPair::parse(&uuid('a'), &uuid('b')).unwrap();
        assert_eq!((pair.old[1], pair.old[4], pair.new[4], pair.new[15]), (0x11, 0xaa, 0xbb, 0x11));
        for wrong in
            ["GPU-1", "MIG-00110011-aaaa-aaaa-aaaa-001100110011", "GPU-00110011-aaaa-aaaa-aaaa-00110011001z"]
        {
            assert_eq!(GpuPair::parse(&uuid('a'), wrong), None, "{wrong}");
        }
    }
}
