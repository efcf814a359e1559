//! The default limits of an MPS server for each client: SMs and memory. They are compared and merged together.

use serde::{Deserialize, Serialize};

use crate::share::units::MIB;
use crate::share::{Percent, bytes_of_process};

/// A server's default limits, or those that a lease needs. The `Default` value means that the limits are unknown, and
/// admits no lease.
///
/// They apply to clients that connect from now on, including those without the environment of a share (docs/evidence).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DefaultLimits {
    /// Share of the SMs.
    pub sm: Percent,
    /// Memory of a client on each device.
    pub memory: DefaultMemoryLimit,
}

/// Memory that one client may have on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DefaultMemoryLimit {
    /// In MiB. No server has the limit 0: it means that the limit in force is unknown.
    Mebibytes(u64),
    /// As much as there is.
    Unlimited,
}

impl Default for DefaultMemoryLimit {
    fn default() -> Self {
        Self::Mebibytes(0)
    }
}

impl DefaultMemoryLimit {
    /// The part of each of `processes`, which have `bytes` together, in whole MiB.
    #[must_use]
    pub(crate) fn of_each(bytes: Option<u64>, processes: u32) -> Self {
        // 0 would remove the limit (docs/evidence). So a part below 1 MiB, in which no context fits, becomes 1 MiB.
        bytes.map_or(Self::Unlimited, |bytes| {
            Self::Mebibytes((bytes_of_process(bytes, processes) / MIB).max(1))
        })
    }

    /// In bytes; `None`: unlimited.
    #[must_use]
    pub fn bytes(self) -> Option<u64> {
        match self {
            Self::Mebibytes(amount) => Some(amount.saturating_mul(MIB)),
            Self::Unlimited => None,
        }
    }
}

impl DefaultLimits {
    /// The limits of a new server: the whole device.
    pub const NONE: Self = Self { sm: Percent::WHOLE, memory: DefaultMemoryLimit::Unlimited };

    /// Whether a client that needs `needed` gets that much.
    #[must_use]
    pub(crate) fn admits(self, needed: Self) -> bool {
        needed.sm <= self.sm && needed.memory <= self.memory
    }

    /// The limits that admit what either of them admits.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self { sm: self.sm.max(other.sm), memory: self.memory.max(other.memory) }
    }

    /// The limits that admit only what both admit.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self { sm: self.sm.min(other.sm), memory: self.memory.min(other.memory) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn default_limits(sm: u32, memory: DefaultMemoryLimit) -> DefaultLimits {
        DefaultLimits { sm: Percent::from_thousandths(sm * 1000), memory }
    }

    #[test]
    fn each_part_is_compared_and_merged_by_itself() {
        use DefaultMemoryLimit::{Mebibytes, Unlimited};
        let (wide, deep) = (default_limits(60, Mebibytes(2048)), default_limits(25, Unlimited));
        assert!(wide.admits(wide) && !wide.admits(deep) && !deep.admits(wide));
        assert_eq!(wide.or(deep), default_limits(60, Unlimited));
        assert_eq!(wide.and(deep), default_limits(25, Mebibytes(2048)));
        assert!(
            DefaultLimits::NONE.admits(wide)
                && !DefaultLimits::default().admits(default_limits(0, Mebibytes(1)))
        );
    }

    #[test]
    fn a_part_is_in_whole_mebibytes_and_never_the_0_that_lifts_a_limit() {
        let each = |bytes, processes| DefaultMemoryLimit::of_each(bytes, processes);
        assert_eq!(each(Some(8 << 30), 3), DefaultMemoryLimit::Mebibytes(2730));
        assert_eq!(each(Some(8 << 30), 0), DefaultMemoryLimit::Mebibytes(8192));
        assert_eq!(each(Some(MIB), 2), DefaultMemoryLimit::Mebibytes(1));
        assert_eq!(each(None, 2), DefaultMemoryLimit::Unlimited);
    }
}
