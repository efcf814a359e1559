//! NVML: handles of GPU instances and compute instances. A handle is a number and is never dereferenced. It becomes
//! invalid with its instance: a new instance with the same id has another handle.
#![allow(unsafe_code, reason = "C ABI")]

use std::ptr;

use nvml_wrapper_sys::bindings::{
    nvmlComputeInstance_t, nvmlGpuInstance_t, nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT,
};

use super::faults;
use super::out::Answer;
use super::session::{self, Session, Target};
use crate::layout::instances::{ComputeInstance, GpuInstance};
use crate::layout::topology::Gpu;

const GPU_INSTANCE: usize = 1;
const COMPUTE_INSTANCE: usize = 2;

/// A GPU instance that exists, and its GPU.
pub struct Found<'s> {
    /// The GPU.
    pub target: Target<'s>,
    /// The GPU instance.
    pub instance: GpuInstance,
}

fn number(kind: usize, gpu: &Gpu, gi: u32, ci: u32, serial: u32) -> usize {
    kind | (gi as usize) << 4 | (ci as usize) << 12 | (gpu.index as usize + 1) << 20 | (serial as usize) << 32
}

/// The handle of a GPU instance.
#[must_use]
pub fn of_gpu_instance(gpu: &Gpu, one: &GpuInstance) -> nvmlGpuInstance_t {
    ptr::without_provenance_mut(number(GPU_INSTANCE, gpu, one.id, 0, one.serial))
}

/// The handle of a compute instance.
#[must_use]
pub fn of_compute_instance(gpu: &Gpu, gi: u32, one: &ComputeInstance) -> nvmlComputeInstance_t {
    ptr::without_provenance_mut(number(COMPUTE_INSTANCE, gpu, gi, one.id, one.serial))
}

/// Answers about the GPU instance behind a handle.
pub fn gpu_instance<A: FnOnce(&Found<'_>) -> Answer>(handle: nvmlGpuInstance_t, answer: A) -> u32 {
    session::ask_as(faults::function_of::<A>(), |session| {
        answer(&find(session, handle.addr(), |gpu, one| of_gpu_instance(gpu, one).addr() == handle.addr())?)
    })
}

/// Answers about the compute instance behind a handle.
pub fn compute_instance<A>(handle: nvmlComputeInstance_t, answer: A) -> u32
where
    A: FnOnce(&Found<'_>, &ComputeInstance) -> Answer,
{
    session::ask_as(faults::function_of::<A>(), |session| {
        let is_it = |gpu: &Gpu, gi: u32, one: &ComputeInstance| {
            of_compute_instance(gpu, gi, one).addr() == handle.addr()
        };
        let found = find(session, handle.addr(), |gpu, parent| {
            parent.compute.iter().any(|one| is_it(gpu, parent.id, one))
        })?;
        let (gpu, parent) = (found.target.gpu, &found.instance);
        let one = parent.compute.iter().find(|one| is_it(gpu, parent.id, one));
        answer(&found, one.ok_or(INVALID_ARGUMENT)?)
    })
}

fn find(session: &Session, handle: usize, wanted: impl Fn(&Gpu, &GpuInstance) -> bool) -> Answer<Found<'_>> {
    let position = (handle >> 20 & 0xfff).checked_sub(1).ok_or(INVALID_ARGUMENT)?;
    let gpu = session.topology.gpu.get(position).ok_or(INVALID_ARGUMENT)?;
    let target = session.target(session::handle(gpu, None))?;
    let instances = target.partition()?.ok_or(INVALID_ARGUMENT)?.instances;
    let instance = instances.into_iter().find(|one| wanted(gpu, one)).ok_or(INVALID_ARGUMENT)?;
    Ok(Found { target, instance })
}
