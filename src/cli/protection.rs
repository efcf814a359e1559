//! What a share protects its container from, and what it does not. Each line is measured in
//! docs/evidence or follows from the driver's documentation.

use sublet_core::place::Placement;
use sublet_core::share::{Isolation, Mode};

/// What the share protects against.
pub fn protects(placement: &Placement) -> Vec<&'static str> {
    let mut lines = vec!["SMs and memory booked for this container are booked for no other"];
    match (placement.mode, placement.isolation, placement.daemon.is_some()) {
        (Mode::Mps, Isolation::Shared, _) => {
            lines.push("containers on the GPU run at the same time, without turns");
        }
        (Mode::Mps, Isolation::Dedicated, _) | (Mode::TimeSlice, _, true) => {
            lines.push("a crash in another container does not affect this one; containers take turns");
        }
        (Mode::TimeSlice, ..) => {
            lines.push("a crash in another container does not affect this one, as with plain --gpus");
        }
        (Mode::Exclusive, ..) => lines.push("no other container gets this GPU"),
        (Mode::Mig, ..) => lines.push("the instance has its own memory and SMs, in hardware"),
    }
    if placement.sm.is_some() {
        lines.push(
            "the driver enforces this container's SM limit, and no client can raise its limit above the \
             server's",
        );
    }
    if placement.memory_bytes.is_some() && placement.daemon.is_some() {
        lines.push("the driver enforces the memory limit on programs that do not change their environment");
        lines.push(match placement.isolation {
            Isolation::Shared if placement.mode == Mode::Mps => {
                "a program without that environment gets the limits of the largest share on its MPS server"
            }
            _ => "a program without that environment has the same limits",
        });
    }
    lines
}

/// What the share does not protect against.
pub fn does_not_protect(placement: &Placement) -> Vec<&'static str> {
    let mut lines = Vec::new();
    let is_limited = placement.memory_bytes.is_some();
    let is_shared = (placement.mode, placement.isolation) == (Mode::Mps, Isolation::Shared);
    if is_shared {
        lines.push("a GPU fault in any container of this MPS server ends the work of all of them; sublet.isolation=dedicated does not");
    }
    if is_shared && is_limited {
        lines.push("while a share of the same MPS server has no sublet.memory, a program without its container's environment has no memory limit");
    }
    if is_limited && placement.daemon.is_some() {
        lines.push(
            "a hostile program can set an invalid CUDA_MPS_PINNED_DEVICE_MEM_LIMIT for itself and allocate \
             more memory",
        );
        lines.push("the limits are per process: more processes than sublet.processes exceed the share");
    }
    if placement.daemon.is_some() {
        lines.push("a hostile program can unset CUDA_MPS_PIPE_DIRECTORY and run beside MPS, unless the compute mode is EXCLUSIVE_PROCESS");
    }
    if placement.mode == Mode::Mig && is_limited {
        lines.push(
            "other compute instances of the GPU instance use the same memory, and none is limited to a \
             part of it",
        );
    }
    if !is_limited && !matches!(placement.mode, Mode::Exclusive | Mode::Mig) {
        lines.push("without sublet.memory, each container can allocate all the free memory");
    }
    if placement.mode == Mode::TimeSlice && placement.daemon.is_none() {
        lines.push("turns are equal per process: a container with more processes gets more time");
    }
    lines.push(match placement.mode {
        Mode::Mig => "PCIe, power and clocks are shared with all other work on the GPU",
        _ => "caches, memory bandwidth and PCIe are shared with all other work on the GPU",
    });
    lines
}
