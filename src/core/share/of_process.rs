//! The part of a share that one CUDA process has: MPS holds its limits for each client, not for the container.

use super::Percent;
use super::units::MIB;

/// The part of `sm` that one of `processes` has.
#[must_use]
pub(crate) fn sm_of_process(sm: Percent, processes: u32) -> Percent {
    Percent::from_thousandths(sm.thousandths() / processes.max(1))
}

/// The part of `bytes` that one of `processes` has, in whole MiB, as MPS takes it.
#[must_use]
pub fn bytes_of_process(bytes: u64, processes: u32) -> u64 {
    bytes / u64::from(processes.max(1)) / MIB * MIB
}
