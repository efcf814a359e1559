//! What a share protects its container from and what not, in plain words. Each line is measured in
//! docs/evidence or follows from the driver's documents; nothing here is hoped for.

use sublet_core::place::Placement;
use sublet_core::share::{Isolation, Mode};

/// What holds.
pub fn protects(placement: &Placement) -> Vec<&'static str> {
    let mut lines = vec!["no other container is booked memory or SMs that are booked for this one"];
    match (placement.mode, placement.isolation, placement.daemon.is_some()) {
        (Mode::Mps, Isolation::Shared, _) => {
            lines.push("neighbours run at the same time as you, not by turns");
        }
        (Mode::Mps, Isolation::Dedicated, _) | (Mode::TimeSlice, _, true) => {
            lines.push("a neighbour's crash cannot reach you; you take turns with the others");
        }
        (Mode::TimeSlice, ..) => {
            lines.push("a neighbour's crash stays with the neighbour, as with plain --gpus");
        }
        (Mode::Exclusive, ..) => lines.push("nobody else is given this GPU"),
        (Mode::Mig, ..) => lines.push("memory and SMs are the instance's own, in hardware"),
    }
    if placement.sm.is_some() {
        lines.push(
            "the driver holds this container's SM ceiling, and no client can raise it past the server's",
        );
    }
    if placement.memory_bytes.is_some() && placement.daemon.is_some() {
        lines.push("the driver holds the memory limit for programs that leave their environment as it is");
        lines.push(match placement.isolation {
            Isolation::Shared if placement.mode == Mode::Mps => {
                "a program without that environment is held to the largest share of its MPS server"
            }
            _ => "a program without that environment is held to it as well",
        });
    }
    lines
}

/// What does not hold.
pub fn does_not_protect(placement: &Placement) -> Vec<&'static str> {
    let mut lines = Vec::new();
    if placement.mode == Mode::Mps && placement.isolation == Isolation::Shared {
        lines.push("a GPU fault in any container of this MPS server ends the work of all of them; sublet.isolation=dedicated does not");
    }
    if placement.memory_bytes.is_some()
        && (placement.mode, placement.isolation) == (Mode::Mps, Isolation::Shared)
    {
        lines.push("while a share of the same MPS server has no sublet.memory, a program without its container's environment has no memory limit");
    }
    if placement.memory_bytes.is_some() && placement.daemon.is_some() {
        lines.push(
            "a hostile program can spoil its own CUDA_MPS_PINNED_DEVICE_MEM_LIMIT and take more memory",
        );
        lines.push("the limits are per process: more processes than sublet.processes take more");
    }
    if placement.daemon.is_some() {
        lines.push("a hostile program can unset CUDA_MPS_PIPE_DIRECTORY and run beside MPS, unless the compute mode is EXCLUSIVE_PROCESS");
    }
    if placement.mode == Mode::Mig && placement.memory_bytes.is_some() {
        lines.push(
            "other compute instances of the GPU instance have the same memory: nobody is held to a part",
        );
    }
    if placement.memory_bytes.is_none() && !matches!(placement.mode, Mode::Exclusive | Mode::Mig) {
        lines.push("without sublet.memory each container can take all the memory that is free");
    }
    if placement.mode == Mode::TimeSlice && placement.daemon.is_none() {
        lines.push("turns are equal for each process: a container with more processes gets more time");
    }
    lines.push(match placement.mode {
        Mode::Mig => "PCIe, power and clocks are shared with whoever is on the same GPU",
        _ => "caches, memory bandwidth and PCIe are shared with whoever is on the same GPU",
    });
    lines
}
