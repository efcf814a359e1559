//! What of a cell is shown: a figure, its name and its unit.

use super::result::Measured;

/// One figure of [`Measured`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Figure {
    #[default]
    Mean,
    P50,
    P99,
    Throughput,
    Fairness,
    Memory,
    Energy,
}

impl Figure {
    /// All of them, the most important first.
    pub const ALL: [Self; 7] =
        [Self::Mean, Self::P50, Self::P99, Self::Throughput, Self::Fairness, Self::Memory, Self::Energy];

    /// Its name with its unit.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Mean => "mean of one iteration, ms",
            Self::P50 => "median of one iteration, ms",
            Self::P99 => "99th percentile, ms",
            Self::Throughput => "iterations a second, all together",
            Self::Fairness => "fairness: least served / most served",
            Self::Memory => "GPU memory of all, GiB",
            Self::Energy => "energy of the GPU for one iteration, J",
        }
    }

    /// Its value in that unit, if it is known.
    pub fn of(self, measured: &Measured) -> Option<f64> {
        match self {
            Self::Mean => Some(measured.mean_ms),
            Self::P50 => measured.p50_ms,
            Self::P99 => measured.p99_ms,
            Self::Throughput => measured.per_second,
            Self::Fairness => measured.fairness,
            #[expect(clippy::cast_precision_loss, reason = "shown with three digits")]
            Self::Memory => measured.memory_bytes.map(|bytes| bytes as f64 / f64::from(1 << 30)),
            Self::Energy => measured.energy_millijoules.map(|energy| energy / 1000.0),
        }
    }
}

/// With three digits: `0.97`, `7.19`, `54.9`, `1920`.
pub fn digits(value: f64) -> String {
    match value.abs() {
        size if size < 9.995 => format!("{value:.2}"),
        size if size < 99.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits() {
        let all = [0.0, 0.974, 7.19, 9.996, 54.94, 99.96, 1919.6].map(digits);
        assert_eq!(all, ["0.00", "0.97", "7.19", "10.0", "54.9", "100", "1920"]);
    }
}
