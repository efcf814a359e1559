//! Percentages and amounts of memory as users write them, kept exact.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One MiB in bytes.
pub const MIB: u64 = 1 << 20;

/// A percentage in thousandths: sums of shares stay exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Percent(u32);

impl Percent {
    /// 100 %.
    pub const WHOLE: Self = Self(100_000);

    /// From thousandths of a percent.
    #[must_use]
    pub const fn from_thousandths(thousandths: u32) -> Self {
        Self(thousandths)
    }

    /// In thousandths of a percent.
    #[must_use]
    pub const fn thousandths(self) -> u32 {
        self.0
    }

    /// As a number, for JSON and for people.
    #[must_use]
    pub fn as_f64(self) -> f64 {
        f64::from(self.0) / 1000.0
    }

    /// This share of `whole`, rounded down.
    #[must_use]
    pub fn of(self, whole: u64) -> u64 {
        // Less than `whole` for shares up to 100 %, so it fits; larger ones saturate.
        u64::try_from(u128::from(whole) * u128::from(self.0) / 100_000).unwrap_or(u64::MAX)
    }
}

impl fmt::Display for Percent {
    /// `25`, `12.5`: no sign, no needless zeros, never an exponent. What MPS and humans both read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, part) = (self.0 / 1000, self.0 % 1000);
        if part == 0 {
            return f.pad(&whole.to_string());
        }
        f.pad(format!("{whole}.{part:03}").trim_end_matches('0'))
    }
}

/// `sublet.memory`: an amount, or a share of the device's total.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// In bytes.
    Bytes(u64),
    /// Of the device's total.
    Share(Percent),
}

impl Memory {
    /// In bytes on a device with `total` bytes, rounded down to MiB.
    #[must_use]
    pub fn on(self, total: u64) -> u64 {
        let bytes = match self {
            Self::Bytes(bytes) => bytes,
            Self::Share(share) => share.of(total),
        };
        bytes / MIB * MIB
    }
}
