//! NVML: utilization of a GPU, in all and by process, and its power draw. Every simulated process computes all the
//! time but those whose pids are in `DIR/sim/idle`, so the figures follow from the processes that exist.
#![allow(unsafe_code, reason = "C ABI")]

use std::ffi::{c_uint, c_ulonglong};
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlProcessUtilizationSample_t, nvmlReturn_enum_NVML_ERROR_NOT_FOUND as NOT_FOUND,
    nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED, nvmlReturn_t, nvmlTemperatureSensors_t,
    nvmlUtilization_t,
};

use super::out::{Answer, put, put_list};
use super::session::{self, Target};
use crate::layout::contexts::{self, Held, Kind};

/// In milliwatts: an H200's power limit, and its idle power draw.
const POWER: (c_uint, c_uint) = (700_000, 75_000);

/// Temperature when idle and under load, in degrees Celsius.
const TEMPERATURE: (c_uint, c_uint) = (32, 61);

/// The percentage of time in which a kernel ran. Not supported in MIG mode (nvml.h).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUtilizationRates(
    device: nvmlDevice_t,
    rates: *mut nvmlUtilization_t,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        without_mig(target)?;
        let gpu = busy(target);
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(rates, nvmlUtilization_t { gpu, memory: gpu / 4 }) }
    })
}

/// The interval at which the driver records one of the computing processes.
const SAMPLE_MICROSECONDS: c_ulonglong = 200_000;

/// Older samples are dropped. The time is chosen.
const SAMPLES: c_ulonglong = 100;

/// Returns the share of each process and each MPS server in the samples since the given time. MPS clients, and
/// processes that are in no sample, have no entry (H200, driver 580: docs/evidence/2026-11-23-h200-used.md). Without
/// any sample the result is `NOT_FOUND` (nvml.h).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetProcessUtilization(
    device: nvmlDevice_t,
    samples: *mut nvmlProcessUtilizationSample_t,
    count: *mut c_uint,
    since: c_ulonglong,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        without_mig(target)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
        let now = c_ulonglong::try_from(now).unwrap_or(c_ulonglong::MAX);
        let found = sampled(&takes_part(target), since, now);
        if found.is_empty() {
            return Err(NOT_FOUND);
        }
        // SAFETY: the caller's array of `*count` elements, as nvml.h asks for.
        unsafe { put_list(samples, count, &found) }
    })
}

/// The processes take turns: each sample records the next one.
fn sampled(taking: &[Held], since: c_ulonglong, now: c_ulonglong) -> Vec<nvmlProcessUtilizationSample_t> {
    let last = now / SAMPLE_MICROSECONDS;
    let first = (since / SAMPLE_MICROSECONDS + 1).max(last.saturating_sub(SAMPLES - 1));
    let all = (last + 1).saturating_sub(first);
    let number = taking.len() as c_ulonglong;
    let entry = |(at, held): (usize, &Held)| {
        let own: Vec<c_ulonglong> =
            (first..=last).filter(|sample| sample % number == at as c_ulonglong).collect();
        let part = c_uint::try_from(100 * own.len() as c_ulonglong / all.max(1)).unwrap_or_default();
        Some(nvmlProcessUtilizationSample_t {
            pid: held.pid.unsigned_abs(),
            timeStamp: own.last()? * SAMPLE_MICROSECONDS,
            smUtil: part,
            memUtil: part / 4,
            encUtil: 0,
            decUtil: 0,
        })
    };
    taking.iter().enumerate().filter_map(entry).collect()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPowerUsage(device: nvmlDevice_t, power: *mut c_uint) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let (limit, idle) = POWER;
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(power, idle + (limit - idle) / 100 * busy(target) / 2) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetEnforcedPowerLimit(
    device: nvmlDevice_t,
    limit: *mut c_uint,
) -> nvmlReturn_t {
    // SAFETY: null or valid, as nvml.h asks for.
    session::gpu(device, |_| unsafe { put(limit, POWER.0) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTemperature(
    device: nvmlDevice_t,
    _sensor: nvmlTemperatureSensors_t,
    temperature: *mut c_uint,
) -> nvmlReturn_t {
    session::gpu(device, |target| {
        let degrees = if busy(target) > 0 { TEMPERATURE.1 } else { TEMPERATURE.0 };
        // SAFETY: null or valid, as nvml.h asks for.
        unsafe { put(temperature, degrees) }
    })
}

/// How busy the device is, in percent.
pub(super) fn busy(target: &Target<'_>) -> c_uint {
    if takes_part(target).is_empty() { 0 } else { 100 }
}

/// The processes that take turns on the device: those without MPS, and MPS servers that have clients on it.
fn takes_part(target: &Target<'_>) -> Vec<Held> {
    let held = contexts::told(&target.session.topology.tag, target.session.root.as_ref());
    let idle = target.session.root.as_ref().and_then(|root| fs::read_to_string(root.join("sim/idle")).ok());
    let idle: Vec<i32> = idle.iter().flat_map(|pids| pids.split_whitespace()).flat_map(str::parse).collect();
    let computes = |held: &Held| super::process::is_on(held, target) && !idle.contains(&held.pid);
    let here: Vec<Held> = held.into_iter().filter(computes).collect();
    let has_clients = here.iter().any(|held| held.kind == Kind::Client);
    here.into_iter()
        .filter(|held| held.kind == Kind::Compute || held.kind == Kind::Server && has_clients)
        .collect()
}

fn without_mig(target: &Target<'_>) -> Answer {
    if target.partition()?.is_some_and(|partition| partition.enabled) { Err(NOT_SUPPORTED) } else { Ok(()) }
}
