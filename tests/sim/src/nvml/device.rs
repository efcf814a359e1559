//! NVML: the properties of one device.
#![allow(unsafe_code, reason = "C ABI")]

use std::ffi::{c_char, c_int, c_uint};

use nix::unistd::geteuid;
use nvml_wrapper_sys::bindings::{
    NVML_DEVICE_ARCH_ADA, NVML_DEVICE_ARCH_AMPERE, NVML_DEVICE_ARCH_BLACKWELL, NVML_DEVICE_ARCH_HOPPER,
    NVML_DEVICE_ARCH_PASCAL, NVML_DEVICE_ARCH_TURING, NVML_DEVICE_ARCH_VOLTA, nvmlComputeMode_t,
    nvmlDevice_t, nvmlDeviceArchitecture_t, nvmlEnableState_t, nvmlGpuVirtualizationMode_t, nvmlMemory_t,
    nvmlMemory_v2_t, nvmlPciInfo_t,
    nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH as ARGUMENT_VERSION_MISMATCH,
    nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT,
    nvmlReturn_enum_NVML_ERROR_NO_PERMISSION as NO_PERMISSION,
    nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED, nvmlReturn_enum_NVML_ERROR_UNKNOWN as UNKNOWN,
    nvmlReturn_t,
};

use super::out::{Answer, chars, put, put_text, struct_version};
use super::session::{self, Target};
use super::system::pci_address;
use crate::layout::contexts;
use crate::layout::state_file::State;
use crate::layout::topology::{Arch, Virtualization};

const MIB: u64 = 1 << 20;
/// The memory that the driver reserves on a GPU.
const RESERVED_MIB: u64 = 500;
/// The value of `nvmlMemory_v2_t.version`: `NVML_STRUCT_VERSION(Memory, 2)`.
const MEMORY_V2: c_uint = struct_version::<nvmlMemory_v2_t>(2);
/// An H200's PCI device and vendor.
const PCI_ID: c_uint = 0x2335_10de;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(
    device: nvmlDevice_t,
    text: *mut c_char,
    length: c_uint,
) -> nvmlReturn_t {
    session::device(device, |target| {
        let name = match &target.mig {
            Some(mig) => format!("{} MIG {}", target.gpu.name, mig.profile),
            None => target.gpu.name.clone(),
        };
        // SAFETY: the caller's buffer of `length` bytes, as nvml.h asks for.
        unsafe { put_text(text, length, &name) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUUID(
    device: nvmlDevice_t,
    text: *mut c_char,
    length: c_uint,
) -> nvmlReturn_t {
    session::device(device, |target| {
        let uuid = target.mig.as_ref().map_or(&target.gpu.uuid, |mig| &mig.uuid);
        // SAFETY: the caller's buffer of `length` bytes, as nvml.h asks for.
        unsafe { put_text(text, length, uuid) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetIndex(device: nvmlDevice_t, index: *mut c_uint) -> nvmlReturn_t {
    session::device(device, |target| {
        let number = match &target.mig {
            Some(mig) => {
                let devices = target.session.mig_devices(target.gpu)?;
                let position = devices.iter().position(|other| other.uuid == mig.uuid).ok_or(UNKNOWN)?;
                c_uint::try_from(position).map_err(|_| UNKNOWN)?
            }
            None => target.gpu.index,
        };
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(index, number) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMinorNumber(device: nvmlDevice_t, minor: *mut c_uint) -> nvmlReturn_t {
    // SAFETY: null or valid, as nvml.h asks for.
    session::gpu(device, |target| unsafe { put(minor, target.gpu.minor) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(
    device: nvmlDevice_t,
    pci: *mut nvmlPciInfo_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let (domain, bus, number) = pci_address(&target.gpu.bus_id).ok_or(UNKNOWN)?;
        let info = nvmlPciInfo_t {
            busIdLegacy: chars(&format!("{domain:04X}:{bus:02X}:{number:02X}.0")),
            domain,
            bus,
            device: number,
            pciDeviceId: PCI_ID,
            pciSubSystemId: PCI_ID,
            busId: chars(&format!("{domain:08X}:{bus:02X}:{number:02X}.0")),
        };
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(pci, info) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCudaComputeCapability(
    device: nvmlDevice_t,
    major: *mut c_int,
    minor: *mut c_int,
) -> nvmlReturn_t {
    session::device(device, |target| {
        let number = |part: u32| c_int::try_from(part).map_err(|_| UNKNOWN);
        let (high, low) = target.gpu.capability().ok_or(UNKNOWN)?;
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe {
            put(major, number(high)?)?;
            put(minor, number(low)?)
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetArchitecture(
    device: nvmlDevice_t,
    arch: *mut nvmlDeviceArchitecture_t,
) -> nvmlReturn_t {
    session::device(device, |target| {
        let number = match target.gpu.arch {
            Arch::Pascal => NVML_DEVICE_ARCH_PASCAL,
            Arch::Volta => NVML_DEVICE_ARCH_VOLTA,
            Arch::Turing => NVML_DEVICE_ARCH_TURING,
            Arch::Ampere => NVML_DEVICE_ARCH_AMPERE,
            Arch::Ada => NVML_DEVICE_ARCH_ADA,
            Arch::Hopper => NVML_DEVICE_ARCH_HOPPER,
            Arch::Blackwell => NVML_DEVICE_ARCH_BLACKWELL,
        };
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(arch, number) }
    })
}

/// Returns CUDA cores, not SMs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNumGpuCores(device: nvmlDevice_t, cores: *mut c_uint) -> nvmlReturn_t {
    // SAFETY: null or valid, as nvml.h asks for.
    session::gpu(device, |target| unsafe { put(cores, target.gpu.sm_count * target.gpu.cores_per_sm()) })
}

/// Total, reserved and allocated memory in MiB.
fn memory(target: &Target<'_>) -> (u64, u64, u64) {
    let held = contexts::told(&target.session.topology.tag, target.session.root.as_ref());
    let here = held.iter().filter(|held| held.on.minor == target.gpu.minor);
    match &target.mig {
        Some(mig) => {
            let inside = here.filter(|held| held.on.instance.is_some_and(|(gi, _)| gi == mig.gi));
            (mig.memory_mib, 0, inside.map(|held| held.mib).sum())
        }
        None => (target.gpu.memory_mib, RESERVED_MIB, here.map(|held| held.mib).sum()),
    }
}

/// `used` includes the memory that the driver reserves.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo(
    device: nvmlDevice_t,
    info: *mut nvmlMemory_t,
) -> nvmlReturn_t {
    session::device(device, |target| {
        let (total, reserved, allocated) = memory(target);
        let used = reserved + allocated;
        let free = total.saturating_sub(used);
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(info, nvmlMemory_t { total: total * MIB, free: free * MIB, used: used * MIB }) }
    })
}

/// `used` is the memory of processes, `reserved` that of the driver.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(
    device: nvmlDevice_t,
    info: *mut nvmlMemory_v2_t,
) -> nvmlReturn_t {
    session::device(device, |target| {
        // SAFETY: null or valid, as nvml.h asks for.
        let version = unsafe { info.as_ref() }.ok_or(INVALID_ARGUMENT)?.version;
        if version != MEMORY_V2 {
            return Err(ARGUMENT_VERSION_MISMATCH);
        }
        let (total, reserved, used) = memory(target);
        let free = total.saturating_sub(reserved + used);
        let [total, reserved, free, used] = [total, reserved, free, used].map(|mib| mib * MIB);
        // SAFETY: as above.
        unsafe { put(info, nvmlMemory_v2_t { version, total, reserved, free, used }) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeMode(
    device: nvmlDevice_t,
    mode: *mut nvmlComputeMode_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let modes = target.session.state()?.compute_mode;
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(mode, modes.get(&target.gpu.uuid).copied().unwrap_or(0)) }
    })
}

/// Applies to every process until the driver is reloaded. Needs root.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceSetComputeMode(device: nvmlDevice_t, mode: nvmlComputeMode_t) -> nvmlReturn_t {
    session::gpu(device, |target| set_compute_mode(target, mode))
}

/// A GPU in MIG mode has no exclusive modes. The exclusive-thread mode no longer exists.
fn set_compute_mode(target: &Target<'_>, mode: nvmlComputeMode_t) -> Answer {
    let gpu = target.gpu;
    match mode {
        0 | 2 | 3 => {}
        1 => return Err(NOT_SUPPORTED),
        _ => return Err(INVALID_ARGUMENT),
    }
    let mig = target.partition()?.is_some_and(|partition| partition.enabled);
    if gpu.virtualization == Virtualization::Vgpu || (mig && mode != 0) {
        return Err(NOT_SUPPORTED);
    }
    if !geteuid().is_root() {
        return Err(NO_PERMISSION);
    }
    let root = target.session.root.as_ref().ok_or(NO_PERMISSION)?;
    let set = |state: &mut State| state.compute_mode.insert(gpu.uuid.clone(), mode);
    State::update(root, set).map(drop).map_err(|_| UNKNOWN)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetDisplayActive(
    device: nvmlDevice_t,
    active: *mut nvmlEnableState_t,
) -> nvmlReturn_t {
    // SAFETY: null or valid, as nvml.h asks for.
    session::gpu(device, |target| unsafe { put(active, u32::from(target.gpu.display)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetDisplayMode(
    device: nvmlDevice_t,
    display: *mut nvmlEnableState_t,
) -> nvmlReturn_t {
    // SAFETY: null or valid, as nvml.h asks for.
    session::gpu(device, |target| unsafe { put(display, u32::from(target.gpu.display)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPersistenceMode(
    device: nvmlDevice_t,
    mode: *mut nvmlEnableState_t,
) -> nvmlReturn_t {
    // SAFETY: null or valid, as nvml.h asks for.
    session::gpu(device, |_| unsafe { put(mode, 0) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetVirtualizationMode(
    device: nvmlDevice_t,
    mode: *mut nvmlGpuVirtualizationMode_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let number = match target.gpu.virtualization {
            Virtualization::None => 0,
            Virtualization::Passthrough => 1,
            Virtualization::Vgpu => 2,
        };
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(mode, number) }
    })
}
