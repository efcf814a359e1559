//! What containers print, and what it comes to: latencies, percentiles, throughput, fairness.

use regex_lite::Regex;

use super::result::{Measured, Tenant};

/// One iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// When it ended, or when its line came, in nanoseconds of `CLOCK_MONOTONIC`.
    pub end: u64,
    /// How long it took, in nanoseconds.
    pub took: u64,
}

/// How a line of output is read.
#[derive(Clone, Debug)]
pub enum Format {
    /// A built-in load's: end and duration in nanoseconds.
    BuiltIn,
    /// The user's own: the first group of the pattern, or the whole of what it finds, is a number, in this many
    /// nanoseconds.
    Pattern(Regex, f64),
}

/// Finds the first number of a line.
pub const FIRST_NUMBER: &str = r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?";

impl Format {
    /// The iteration of a line that came at `now`; `None`: it has none.
    pub fn sample(&self, line: &str, now: u64) -> Option<Sample> {
        match self {
            Self::BuiltIn => {
                let (end, took) = line.split_once(' ')?;
                Some(Sample { end: end.parse().ok()?, took: took.trim_end().parse().ok()? })
            }
            Self::Pattern(pattern, unit) => {
                let found = pattern.captures(line)?;
                let number = found.get(1).or_else(|| found.get(0))?.as_str();
                let took = number.parse::<f64>().ok().filter(|took| took.is_finite() && *took >= 0.0)? * unit;
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "not negative; capped"
                )]
                Some(Sample { end: now, took: took.min(1e18) as u64 })
            }
        }
    }
}

/// The figures of one container for the iterations that ended in the window.
fn tenant(samples: &[u64], error: Option<String>) -> Tenant {
    let none = || samples.is_empty().then(|| "no iteration of it ended in that time".to_owned());
    Tenant {
        iterations: samples.len() as u64,
        mean_ms: mean(samples),
        p50_ms: percentile(samples, 50),
        p99_ms: percentile(samples, 99),
        error: error.or_else(none),
    }
}

/// What a cell comes to: `containers` has each one's samples, and why it did not work all the time. `None`: no
/// iteration ended in the window.
pub fn measured(containers: &[(Vec<Sample>, Option<String>)], (from, to): (u64, u64)) -> Option<Measured> {
    let inside = |samples: &[Sample]| {
        let mut took: Vec<u64> =
            samples.iter().filter(|one| (from..to).contains(&one.end)).map(|one| one.took).collect();
        took.sort_unstable();
        took
    };
    let each: Vec<(Vec<u64>, Option<String>)> =
        containers.iter().map(|(samples, error)| (inside(samples), error.clone())).collect();
    let mut all: Vec<u64> = each.iter().flat_map(|(took, _)| took.iter().copied()).collect();
    all.sort_unstable();
    if all.is_empty() {
        return None;
    }
    let counts = || each.iter().map(|(took, _)| took.len());
    let most = counts().max().unwrap_or(0);
    let least = counts().min().unwrap_or(0);
    Some(Measured {
        mean_ms: mean(&all),
        p50_ms: Some(percentile(&all, 50)),
        p99_ms: Some(percentile(&all, 99)),
        per_second: Some(rounded(float(all.len()) * 1e9 / float_of((to - from).max(1)))),
        fairness: Some(rounded(float(least) / float(most.max(1)))),
        containers: each.into_iter().map(|(took, error)| tenant(&took, error)).collect(),
        ..Measured::default()
    })
}

/// In milliseconds.
fn mean(took: &[u64]) -> f64 {
    // Not `sum`, which is -0.0 where there is none.
    let sum = took.iter().fold(0.0, |sum, took| sum + float_of(*took));
    rounded(sum / float(took.len().max(1)) / 1e6)
}

/// The least value that `percent` of the sorted values do not exceed, in milliseconds.
fn percentile(sorted: &[u64], percent: usize) -> f64 {
    let at = (sorted.len() * percent).div_ceil(100).max(1) - 1;
    rounded(sorted.get(at).copied().map_or(0.0, float_of) / 1e6)
}

/// To four decimals: more is noise, and makes results longer.
pub fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

#[expect(clippy::cast_precision_loss, reason = "counts and times far below 2^52")]
fn float_of(value: u64) -> f64 {
    value as f64
}

fn float(value: usize) -> f64 {
    float_of(value as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_built_in_loads() {
        let read = |line: &str| Format::BuiltIn.sample(line, 7);
        assert_eq!(read("100 25\n"), Some(Sample { end: 100, took: 25 }));
        for line in ["", "100", "100 x", "x 1", "-1 2"] {
            assert_eq!(read(line), None, "{line}");
        }
    }

    #[test]
    fn lines_of_other_programs() {
        let read = |pattern: &str, line: &str| {
            let format = Format::Pattern(Regex::new(pattern).unwrap(), 1e6);
            format.sample(line, 7).map(|sample| (sample.end, sample.took))
        };
        assert_eq!(read(FIRST_NUMBER, "12.5"), Some((7, 12_500_000)));
        assert_eq!(read(FIRST_NUMBER, "iteration took 3 ms"), Some((7, 3_000_000)));
        assert_eq!(read(FIRST_NUMBER, "loading"), None);
        assert_eq!(read(r"latency=(\S+)", "i=4 latency=2.5ms"), None, "2.5ms is no number");
        assert_eq!(read(r"latency=([0-9.]+)", "i=4 latency=2.5ms"), Some((7, 2_500_000)));
        assert_eq!(read(r"(nan|inf)", "nan"), None);
        assert_eq!(read(FIRST_NUMBER, "1e300"), Some((7, 1_000_000_000_000_000_000)));
    }

    #[test]
    fn figures_are_of_the_window_alone() {
        let samples = |took: &[u64]| -> Vec<Sample> {
            took.iter().zip(0..).map(|(took, at)| Sample { end: 1000 + at, took: took * 1_000_000 }).collect()
        };
        let many: Vec<u64> = (1..=100).collect();
        let mut first = samples(&many);
        first.push(Sample { end: 999, took: 5_000_000_000 });
        first.push(Sample { end: 2000, took: 5_000_000_000 });
        let second = (samples(&[200]), Some("it ended with exit code 1".to_owned()));
        let found = measured(&[(first, None), second], (1000, 2000)).unwrap();
        assert_eq!(found.containers[0].iterations, 100);
        assert!(
            (found.containers[0].p50_ms - 50.0).abs() < 1e-9
                && (found.containers[0].p99_ms - 99.0).abs() < 1e-9
        );
        assert!((found.mean_ms - (5050.0 + 200.0) / 101.0).abs() < 1e-3, "{}", found.mean_ms);
        assert_eq!(found.fairness, Some(0.01));
        assert_eq!(found.per_second, Some(101.0 * 1e6));
        assert_eq!(found.containers[1].error.as_deref(), Some("it ended with exit code 1"));
        assert_eq!(measured(&[(Vec::new(), None)], (0, 1)), None);
    }

    #[test]
    fn a_container_that_got_no_turn_is_told() {
        let one = vec![Sample { end: 5, took: 1_000_000 }];
        let found = measured(&[(one, None), (Vec::new(), None)], (0, 10)).unwrap();
        assert_eq!(found.containers[0].error, None);
        let none = &found.containers[1];
        assert_eq!(none.error.as_deref(), Some("no iteration of it ended in that time"));
        assert!(none.iterations == 0 && none.mean_ms.is_sign_positive(), "{none:?}");
    }
}
