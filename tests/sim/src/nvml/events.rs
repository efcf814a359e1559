//! NVML: events, and what it tells of a GPU's health ([`crate::layout::health`]).
//!
//! A set has the events after the device was registered with it (nvml.h). Of several Xids each event has the last one's number (nvml.h, `nvmlEventSetWait_v2`). GPU and compute instance are 0xffffffff without MIG (seen on H100s, driver 580).
#![allow(unsafe_code, reason = "C ABI")]

use std::ffi::{c_int, c_uint, c_ulonglong};
use std::thread;
use std::time::{Duration, Instant};

use nvml_wrapper_sys::bindings::field_id::{
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION as RECOVERY_ACTION, NVML_FI_DEV_REMAPPED_FAILURE as REMAPPED_FAILURE,
    NVML_FI_DEV_REMAPPED_PENDING as REMAPPED_PENDING,
};
use nvml_wrapper_sys::bindings::{
    NVML_NVLINK_MAX_LINKS, nvmlDevice_t, nvmlEventData_t, nvmlEventSet_t, nvmlFieldValue_t,
    nvmlGpuFabricInfo_t, nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT,
    nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED, nvmlReturn_enum_NVML_ERROR_TIMEOUT as TIMEOUT,
    nvmlReturn_enum_NVML_SUCCESS as SUCCESS, nvmlReturn_t,
};

use super::out::{Answer, put};
use super::session;
use crate::layout::health;
use crate::layout::topology::{Arch, Gpu, Virtualization};

/// `nvmlEventTypeDoubleBitEccError` and `nvmlEventTypeXidCriticalError`.
const ECC: c_ulonglong = 2;
const XID: c_ulonglong = 8;

/// What four H100s support (driver 580).
const SUPPORTED: c_ulonglong = 0xff9f;

/// How often a wait looks.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// The content of `nvmlEventSet_t`: the GPUs' indices, each with the number of Xids that were before, or of which the caller has the event.
struct Set(Vec<(u32, usize)>);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetCreate(set: *mut nvmlEventSet_t) -> nvmlReturn_t {
    let new = Box::into_raw(Box::new(Set(Vec::new())));
    // SAFETY: null or valid, as nvml.h asks for.
    session::ask(|_| unsafe { put(set, new.cast()) })
}

/// # Safety
/// The set is one of `nvmlEventSetCreate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetFree(set: nvmlEventSet_t) -> nvmlReturn_t {
    if !set.is_null() {
        // SAFETY: as the caller promised. It is not used afterwards.
        drop(unsafe { Box::from_raw(set.cast::<Set>()) });
    }
    SUCCESS
}

/// No GPU of a virtual machine's tells of events.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetSupportedEventTypes(
    device: nvmlDevice_t,
    types: *mut c_ulonglong,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let is_vgpu = target.gpu.virtualization == Virtualization::Vgpu;
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(types, if is_vgpu { 0 } else { SUPPORTED }) }
    })
}

/// # Safety
/// The set is null or one of `nvmlEventSetCreate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceRegisterEvents(
    device: nvmlDevice_t,
    types: c_ulonglong,
    set: nvmlEventSet_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        // SAFETY: as the caller promised.
        let set = unsafe { set.cast::<Set>().as_mut() }.ok_or(INVALID_ARGUMENT)?;
        if types & !SUPPORTED != 0 || target.gpu.virtualization == Virtualization::Vgpu {
            return Err(NOT_SUPPORTED);
        }
        if types & (ECC | XID) != 0 {
            let xids = target.session.root.as_ref().map(health::xids).unwrap_or_default();
            let index = target.gpu.index;
            set.0.push((index, xids.iter().filter(|(gpu, _)| *gpu == index).count()));
        }
        Ok(())
    })
}

/// # Safety
/// The set is null or one of `nvmlEventSetCreate`; `data` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetWait_v2(
    set: nvmlEventSet_t,
    data: *mut nvmlEventData_t,
    milliseconds: c_uint,
) -> nvmlReturn_t {
    // SAFETY: as the caller promised.
    let Some(set) = (unsafe { set.cast::<Set>().as_mut() }) else { return INVALID_ARGUMENT };
    let deadline = Instant::now() + Duration::from_millis(milliseconds.into());
    loop {
        // The session is asked anew each time: while it is, nobody else can ask it.
        let answer = session::ask_as("nvmlEventSetWait_v2", |session| {
            let xids = session.root.as_ref().map(health::xids).unwrap_or_default();
            let (device, kind, number) =
                set.0.iter_mut().find_map(|(gpu, count)| next(&xids, *gpu, count)).ok_or(TIMEOUT)?;
            let position = usize::try_from(device).ok().and_then(|index| session.topology.gpu.get(index));
            let device = session::handle(position.ok_or(INVALID_ARGUMENT)?, None);
            let all = u32::MAX;
            let event = nvmlEventData_t {
                device,
                eventType: kind,
                eventData: number,
                gpuInstanceId: all,
                computeInstanceId: all,
            };
            // SAFETY: as the caller promised.
            unsafe { put(data, event) }
        });
        if answer != TIMEOUT || Instant::now() >= deadline {
            return answer;
        }
        thread::sleep(LOOK_AGAIN);
    }
}

/// The next event of `gpu`: its type, and the number of the last Xid.
fn next(xids: &[(u32, u64)], gpu: u32, count: &mut usize) -> Option<(u32, c_ulonglong, u64)> {
    let own: Vec<u64> = xids.iter().filter(|(index, _)| *index == gpu).map(|(_, number)| *number).collect();
    let is_ecc = *own.get(*count)? == 0;
    *count += 1;
    let last = own.into_iter().rfind(|number| *number != 0).unwrap_or_default();
    Some(if is_ecc { (gpu, ECC, 0) } else { (gpu, XID, last) })
}

/// The type and the word in `sim/health` of a field that the GPU has.
///
/// Errors on `NVLinks`: up to Ampere of all together, on Hopper of each link, whose number is the scope (seen on two H200s, driver
/// 580, which have 18), on Blackwell neither (NVML's change log, 565). A GPU has links where the topology joins it with others.
fn known(gpu: &Gpu, field: u32, scope: u32) -> Option<(u32, String)> {
    // NVML_VALUE_TYPE_UNSIGNED_INT, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
    let (number, counter) = (1, 3);
    let counts_all = !matches!(gpu.arch, Arch::Hopper | Arch::Blackwell);
    match (field, gpu.nvlink) {
        (REMAPPED_PENDING | REMAPPED_FAILURE | RECOVERY_ACTION, _) => Some((number, field.to_string())),
        (38 | 52 | 59, Some(_)) if counts_all => Some((counter, field.to_string())),
        (161..=163, Some(_)) if gpu.arch == Arch::Hopper && scope < NVML_NVLINK_MAX_LINKS => {
            Some((counter, format!("{field}/{scope}")))
        }
        _ => None,
    }
}

/// Fields that the GPU has are those of `sim/health`, and 0 without a line there; any other is not supported.
///
/// # Safety
/// `values` is null or has `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetFieldValues(
    device: nvmlDevice_t,
    count: c_int,
    values: *mut nvmlFieldValue_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let length = usize::try_from(count).map_err(|_| INVALID_ARGUMENT)?;
        if values.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let text = target.session.root.as_ref().map(health::read).unwrap_or_default();
        // SAFETY: as the caller promised.
        for value in unsafe { std::slice::from_raw_parts_mut(values, length) } {
            let Some((kind, word)) = known(target.gpu, value.fieldId, value.scopeId) else {
                value.nvmlReturn = NOT_SUPPORTED;
                continue;
            };
            value.nvmlReturn = SUCCESS;
            value.valueType = kind;
            value.value.ullVal = health::number_in(&text, target.gpu.index, &word).unwrap_or_default();
        }
        Ok(())
    })
}

/// Without a line in `sim/health` the GPU is in no fabric.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuFabricInfo(
    device: nvmlDevice_t,
    info: *mut nvmlGpuFabricInfo_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let root = target.session.root.as_ref();
        let number = |word| root.and_then(|root| health::number(root, target.gpu.index, word));
        let state = number("fabric").and_then(|state| state.try_into().ok()).ok_or(NOT_SUPPORTED)?;
        let status = number("fabric-status").and_then(|status| status.try_into().ok()).unwrap_or(SUCCESS);
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(info, nvmlGpuFabricInfo_t { clusterUuid: [0; 16], status, cliqueId: 0, state }) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCurrentClocksThrottleReasons(
    device: nvmlDevice_t,
    reasons: *mut c_ulonglong,
) -> nvmlReturn_t {
    session::gpu(device, |target| -> Answer {
        let root = target.session.root.as_ref();
        let slow = root.and_then(|root| health::number(root, target.gpu.index, "slow")).unwrap_or_default();
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(reasons, slow) }
    })
}
