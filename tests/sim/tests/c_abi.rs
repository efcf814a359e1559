//! The simulated NVML, called as from C, for functions that nvml-wrapper hides or gets wrong (`possible_placements` of
//! 0.13 always returns an empty list).

use std::ffi::{CStr, c_char};
use std::mem;
use std::ptr::{null, null_mut};

use crate::driver::{
    ARGUMENT_VERSION_MISMATCH, Driver, INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED,
    SUCCESS, UNINITIALIZED,
};
use nvidia_ml::layout::contexts::{self, Kind, On};
use nvidia_ml::layout::topology::Topology;
use nvml_wrapper_sys::bindings::{
    nvmlGpmMetricsGet_t, nvmlGpmSupport_t, nvmlGpuInstancePlacement_t, nvmlMemory_t, nvmlMemory_v2_t,
    nvmlProcessInfo_t, nvmlProcessUtilizationSample_t, nvmlUtilization_t,
};

const MIB: u64 = 1 << 20;

#[test]
fn nothing_is_answered_before_init_and_after_shutdown() {
    let driver = Driver::up("h200");
    let mut count = 77;
    // SAFETY: every pointer is null or valid.
    unsafe {
        assert_eq!(driver.lib.nvmlDeviceGetCount_v2(&raw mut count), UNINITIALIZED);
        assert_eq!(driver.lib.nvmlShutdown(), UNINITIALIZED);
        assert_eq!(driver.lib.nvmlInit_v2(), SUCCESS);
        assert_eq!(driver.lib.nvmlInitWithFlags(0), SUCCESS);
        assert_eq!(driver.lib.nvmlShutdown(), SUCCESS);
        assert_eq!(driver.lib.nvmlDeviceGetCount_v2(&raw mut count), SUCCESS);
        assert_eq!(driver.lib.nvmlShutdown(), SUCCESS);
        assert_eq!(driver.lib.nvmlDeviceGetCount_v2(&raw mut count), UNINITIALIZED);
        assert_eq!(CStr::from_ptr(driver.lib.nvmlErrorString(1)), c"Uninitialized");
    }
    assert_eq!(count, 1);
}

#[test]
fn null_pointers_and_forged_handles_are_invalid_arguments() {
    let driver = Driver::up("h200");
    let device = driver.first();
    let mut number = 0;
    let forged = device.wrapping_byte_add(1);
    let gone_mig = device.wrapping_byte_add(1 << 16);
    // SAFETY: every pointer is null or valid; handles are never followed.
    unsafe {
        assert_eq!(driver.lib.nvmlDeviceGetCount_v2(null_mut()), INVALID_ARGUMENT);
        assert_eq!(driver.lib.nvmlDeviceGetMinorNumber(device, null_mut()), INVALID_ARGUMENT);
        assert_eq!(driver.lib.nvmlDeviceGetMemoryInfo_v2(device, null_mut()), INVALID_ARGUMENT);
        assert_eq!(driver.lib.nvmlDeviceGetUUID(device, null_mut(), 80), INVALID_ARGUMENT);
        assert_eq!(driver.lib.nvmlDeviceGetHandleByUUID(null(), null_mut()), INVALID_ARGUMENT);
        for handle in [null_mut(), forged, gone_mig] {
            assert_eq!(driver.lib.nvmlDeviceGetMinorNumber(handle, &raw mut number), INVALID_ARGUMENT);
        }
    }
}

#[test]
fn a_string_must_fit_with_its_nul() {
    let driver = Driver::up("h200");
    let device = driver.first();
    let mut buffer: [c_char; 16] = [1; 16];
    // "NVIDIA H200" is 11 bytes.
    // SAFETY: the buffer is longer than any length given.
    unsafe {
        assert_eq!(driver.lib.nvmlDeviceGetName(device, buffer.as_mut_ptr(), 11), INSUFFICIENT_SIZE);
        assert_eq!(driver.lib.nvmlDeviceGetName(device, buffer.as_mut_ptr(), 12), SUCCESS);
        assert_eq!(CStr::from_ptr(buffer.as_ptr()), c"NVIDIA H200");
    }
    assert_eq!(buffer[12..], [1; 4]);
}

#[test]
fn the_two_memory_structs_count_reserved_memory_differently() {
    let driver = Driver::up("h200");
    let device = driver.first();
    // SAFETY: plain integers.
    let (mut old, mut new): (nvmlMemory_t, nvmlMemory_v2_t) = unsafe { (mem::zeroed(), mem::zeroed()) };
    // SAFETY: every pointer is valid.
    unsafe {
        assert_eq!(driver.lib.nvmlDeviceGetMemoryInfo(device, &raw mut old), SUCCESS);
        assert_eq!(driver.lib.nvmlDeviceGetMemoryInfo_v2(device, &raw mut new), ARGUMENT_VERSION_MISMATCH);
        new.version = 0x0200_0028;
        assert_eq!(driver.lib.nvmlDeviceGetMemoryInfo_v2(device, &raw mut new), SUCCESS);
    }
    assert_eq!((old.total, old.used), (143_771 * MIB, 500 * MIB));
    assert_eq!((new.total, new.reserved, new.used), (143_771 * MIB, 500 * MIB, 0));
    assert_eq!((old.free, new.free), (143_271 * MIB, 143_271 * MIB));
}

#[test]
fn a_process_list_says_how_much_room_it_needs() {
    let driver = Driver::up("h200");
    let device = driver.first();
    let lib = &driver.lib;
    let mut count = 0;
    // SAFETY: a null array of no elements.
    let ask =
        |count: &mut u32| unsafe { lib.nvmlDeviceGetComputeRunningProcesses_v3(device, count, null_mut()) };
    assert_eq!((ask(&mut count), count), (SUCCESS, 0));
    let tag = Topology::load(&driver.root).unwrap().tag;
    let on = On { minor: 0, instance: None };
    let _held = contexts::announce(&tag, on, Kind::Compute, 516).unwrap();
    assert_eq!((ask(&mut count), count), (INSUFFICIENT_SIZE, 1));
    count = 3;
    // SAFETY: plain integers.
    let mut infos: [nvmlProcessInfo_t; 3] = unsafe { mem::zeroed() };
    // SAFETY: three elements, as `count` says.
    let code =
        unsafe { lib.nvmlDeviceGetComputeRunningProcesses_v3(device, &raw mut count, infos.as_mut_ptr()) };
    assert_eq!((code, count, infos[0].pid, infos[1].pid), (SUCCESS, 1, std::process::id(), 0));
    assert_eq!((infos[0].gpuInstanceId, infos[0].computeInstanceId), (0xffff_ffff, 0xffff_ffff));
}

#[test]
fn placements_are_the_real_cards() {
    let driver = Driver::up("h200");
    let device = driver.first();
    let lib = &driver.lib;
    let place = |profile, room: u32| {
        let mut count = room;
        let mut found = [nvmlGpuInstancePlacement_t { start: 99, size: 99 }; 8];
        let array = if room == 0 { null_mut() } else { found.as_mut_ptr() };
        // SAFETY: the array has eight elements, and no test asks for more.
        let code = unsafe {
            lib.nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, profile, array, &raw mut count)
        };
        let found = found.map(|place| (place.start, place.size));
        (code, count, found)
    };
    assert_eq!(place(19, 0).1, 7);
    let (code, count, found) = place(15, 8);
    assert_eq!((code, count, &found[..4]), (SUCCESS, 4, &[(0, 2), (2, 2), (4, 2), (6, 2)][..]));
    assert_eq!(place(9, 8).2[..3], [(0, 4), (4, 4), (99, 99)]);
    assert_eq!(place(0, 8).2[0], (0, 8));
    // `count` is only an output. The caller must have room.
    assert_eq!(place(14, 2).2[..4], [(0, 2), (2, 2), (4, 2), (99, 99)]);
    assert_eq!(place(77, 8), (INVALID_ARGUMENT, 8, [(99, 99); 8]));
}

/// The exported names, so that a renamed or missing function is noticed.
#[test]
fn every_function_of_the_wrapper_that_sublet_may_call_is_exported() {
    let driver = Driver::up("h200");
    let lib = &driver.lib;
    let missing: Vec<&str> = [
        ("nvmlDeviceGetArchitecture", lib.nvmlDeviceGetArchitecture.is_err()),
        ("nvmlDeviceGetAttributes_v2", lib.nvmlDeviceGetAttributes_v2.is_err()),
        ("nvmlDeviceGetComputeInstanceId", lib.nvmlDeviceGetComputeInstanceId.is_err()),
        ("nvmlDeviceGetDisplayMode", lib.nvmlDeviceGetDisplayMode.is_err()),
        ("nvmlDeviceGetGpuInstanceId", lib.nvmlDeviceGetGpuInstanceId.is_err()),
        ("nvmlDeviceGetGpuInstanceProfileInfoV", lib.nvmlDeviceGetGpuInstanceProfileInfoV.is_err()),
        ("nvmlDeviceGetPersistenceMode", lib.nvmlDeviceGetPersistenceMode.is_err()),
        ("nvmlDeviceIsMigDeviceHandle", lib.nvmlDeviceIsMigDeviceHandle.is_err()),
        ("nvmlSystemGetNVMLVersion", lib.nvmlSystemGetNVMLVersion.is_err()),
        ("nvmlSystemGetProcessName", lib.nvmlSystemGetProcessName.is_err()),
    ]
    .into_iter()
    .filter_map(|(name, missing)| missing.then_some(name))
    .collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn a_server_is_told_to_compute_and_its_clients_are_not() {
    let driver = Driver::up("h200");
    let device = driver.first();
    let tag = Topology::load(&driver.root).unwrap().tag;
    let on = On { minor: 0, instance: None };
    let samples = || {
        let mut count = 8;
        // SAFETY: plain numbers.
        let mut list: [nvmlProcessUtilizationSample_t; 8] = unsafe { mem::zeroed() };
        // SAFETY: an array of `count` elements.
        let code = unsafe {
            driver.lib.nvmlDeviceGetProcessUtilization(device, list.as_mut_ptr(), &raw mut count, 0)
        };
        (code, list[..count as usize].iter().map(|sample| (sample.pid, sample.smUtil)).collect::<Vec<_>>())
    };
    let busy = || {
        let mut rates = nvmlUtilization_t { gpu: 7, memory: 7 };
        // SAFETY: `rates` is valid.
        let code = unsafe { driver.lib.nvmlDeviceGetUtilizationRates(device, &raw mut rates) };
        (code, rates.gpu)
    };
    assert_eq!((samples().0, busy()), (NOT_FOUND, (SUCCESS, 0)));
    let client = contexts::announce(&tag, on, Kind::Client, 100).unwrap();
    assert_eq!(samples().0, NOT_FOUND, "a client is not told apart");
    drop(client);
    let _alone = contexts::announce(&tag, on, Kind::Compute, 100).unwrap();
    assert_eq!(samples(), (SUCCESS, vec![(std::process::id(), 100)]));
    assert_eq!(busy(), (SUCCESS, 100));
}

#[test]
fn units_of_a_hopper_are_told_between_two_samples() {
    for (topology, supported) in [("h200", 1), ("a100x2-mig", 0)] {
        let driver = Driver::up(topology);
        let device = driver.first();
        let mut support = nvmlGpmSupport_t { version: 1, isSupportedDevice: 7 };
        // SAFETY: numbers and null pointers.
        let mut get: nvmlGpmMetricsGet_t = unsafe { mem::zeroed() };
        (get.version, get.numMetrics) = (1, 2);
        (get.metrics[0].metricId, get.metrics[1].metricId) = (2, 9_999);
        // SAFETY: every pointer is valid, the samples are NVML's own.
        unsafe {
            assert_eq!(driver.lib.nvmlGpmQueryDeviceSupport(device, &raw mut support), SUCCESS);
            assert_eq!(support.isSupportedDevice, supported, "{topology}");
            assert_eq!(driver.lib.nvmlGpmSampleAlloc(&raw mut get.sample1), SUCCESS);
            assert_eq!(driver.lib.nvmlGpmSampleAlloc(&raw mut get.sample2), SUCCESS);
            let taken = [get.sample1, get.sample2].map(|sample| driver.lib.nvmlGpmSampleGet(device, sample));
            if supported == 1 {
                assert_eq!(taken, [SUCCESS, SUCCESS]);
                assert_eq!(driver.lib.nvmlGpmMetricsGet(&raw mut get), SUCCESS);
                assert_eq!((get.metrics[0].nvmlReturn, get.metrics[0].value), (SUCCESS, 0.0));
                assert_eq!(get.metrics[1].nvmlReturn, NOT_SUPPORTED);
            } else {
                assert_eq!(taken, [NOT_SUPPORTED, NOT_SUPPORTED]);
                assert_eq!(
                    driver.lib.nvmlGpmMetricsGet(&raw mut get),
                    INVALID_ARGUMENT,
                    "samples of nothing"
                );
            }
            assert_eq!(driver.lib.nvmlGpmSampleFree(get.sample1), SUCCESS);
            assert_eq!(driver.lib.nvmlGpmSampleFree(get.sample2), SUCCESS);
        }
    }
}
