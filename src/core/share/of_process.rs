//! The part of a share that one CUDA process has. MPS enforces its limits for each client, not for the container.

use super::Percent;
use super::units::MIB;

/// The part of `sm` for each of `processes`.
#[must_use]
pub(crate) fn sm_of_process(sm: Percent, processes: u32) -> Percent {
    Percent::from_thousandths(sm.thousandths() / processes.max(1))
}

/// The part of `bytes` for each of `processes`, in whole MiB, which is the unit of MPS.
#[must_use]
pub fn bytes_of_process(bytes: u64, processes: u32) -> u64 {
    bytes / u64::from(processes.max(1)) / MIB * MIB
}
