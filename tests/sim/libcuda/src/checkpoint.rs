//! Suspending other processes, with the structs of CUDA 13's cuda.h.

use std::ffi::{c_int, c_uint, c_void};

use nvidia_ml::checkpoint::Call;
use nvidia_ml::checkpoint::calls::{call, restore_thread};

const INVALID_VALUE: c_uint = 1;

/// `CUcheckpointGpuPair`: two `CUuuid`.
#[repr(C)]
pub struct GpuPair {
    old: [u8; 16],
    new: [u8; 16],
}

/// `CUcheckpointRestoreArgs`.
#[repr(C)]
pub struct RestoreArgs {
    pairs: *const GpuPair,
    pairs_count: c_uint,
    _reserved: [u8; 44],
    _reserved1: u64,
}

/// `cuCheckpointProcessGetState` of cuda.h.
///
/// # Safety
/// `state` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCheckpointProcessGetState(pid: c_int, state: *mut c_uint) -> c_uint {
    let found = call("cuCheckpointProcessGetState", pid, Call::GetState);
    // SAFETY: the caller's promise.
    unsafe { put(state, found.map(|found| found as c_uint)) }
}

/// `cuCheckpointProcessGetRestoreThreadId` of cuda.h.
///
/// # Safety
/// `thread` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCheckpointProcessGetRestoreThreadId(pid: c_int, thread: *mut c_int) -> c_uint {
    // SAFETY: the caller's promise.
    unsafe { put(thread, restore_thread("cuCheckpointProcessGetRestoreThreadId", pid)) }
}

/// `cuCheckpointProcessLock` of cuda.h. Nothing that a simulated process computes takes time, so there is nothing to wait
/// for, and the timeout in the arguments is not read.
#[unsafe(no_mangle)]
pub extern "C" fn cuCheckpointProcessLock(pid: c_int, _args: *const c_void) -> c_uint {
    number(call("cuCheckpointProcessLock", pid, Call::Lock))
}

/// `cuCheckpointProcessCheckpoint` of cuda.h. Its arguments are reserved.
#[unsafe(no_mangle)]
pub extern "C" fn cuCheckpointProcessCheckpoint(pid: c_int, _args: *const c_void) -> c_uint {
    number(call("cuCheckpointProcessCheckpoint", pid, Call::Checkpoint))
}

/// `cuCheckpointProcessRestore` of cuda.h.
///
/// # Safety
/// `args` is null or to be read, and so are as many pairs as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCheckpointProcessRestore(pid: c_int, args: *const RestoreArgs) -> c_uint {
    // SAFETY: the caller's promise.
    let pairs = match unsafe { args.as_ref() } {
        Some(args) if args.pairs.is_null() && args.pairs_count > 0 => return INVALID_VALUE,
        Some(args) if args.pairs_count > 0 => {
            // SAFETY: the caller's promise; null is turned away.
            unsafe { std::slice::from_raw_parts(args.pairs, args.pairs_count as usize) }
        }
        _ => &[],
    };
    let pairs = pairs.iter().map(|pair| (uuid(pair.old), uuid(pair.new))).collect();
    number(call("cuCheckpointProcessRestore", pid, Call::Restore(pairs)))
}

/// `cuCheckpointProcessUnlock` of cuda.h. Its arguments are reserved.
#[unsafe(no_mangle)]
pub extern "C" fn cuCheckpointProcessUnlock(pid: c_int, _args: *const c_void) -> c_uint {
    number(call("cuCheckpointProcessUnlock", pid, Call::Unlock))
}

fn number<T>(answer: Result<T, c_uint>) -> c_uint {
    answer.err().unwrap_or(0)
}

/// Writes what was found.
///
/// # Safety
/// `to` is null or may be written.
unsafe fn put<T: Copy>(to: *mut T, found: Result<T, c_uint>) -> c_uint {
    // SAFETY: the caller's promise; null is turned away.
    match (found, unsafe { to.as_mut() }) {
        (Ok(found), Some(to)) => *to = found,
        (Err(error), _) => return error,
        (_, None) => return INVALID_VALUE,
    }
    0
}

/// As NVML writes it.
fn uuid(bytes: [u8; 16]) -> String {
    let hex = format!("{:032x}", u128::from_be_bytes(bytes));
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}
