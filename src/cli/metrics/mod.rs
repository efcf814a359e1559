//! What Prometheus scrapes: limits and use by GPU and by container, and counts of what happened. Names and units follow
//! Prometheus' conventions: base units, ratios from 0 to 1. What is not known has no sample.

mod counted;
mod families;
mod text;

use crate::status::Status;
use sublet_core::config::Config;

pub(crate) use text::Format;

/// The longest value of a label, in characters.
const LONGEST: usize = 128;

/// The most containers that have samples of their own.
const CONTAINERS: usize = 500;

/// What a family measures (`OpenMetrics` 1.0, "Metric Types").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    Gauge,
    Counter,
    Histogram,
    Info,
}

/// All samples of one name.
#[derive(Clone, Debug)]
struct Family {
    /// Without the suffix of its type.
    name: &'static str,
    kind: Type,
    /// The unit that the name ends with; empty without one.
    unit: &'static str,
    help: &'static str,
    samples: Vec<Sample>,
}

/// One value.
#[derive(Clone, Debug, PartialEq)]
struct Sample {
    /// `_bucket`, `_count`, `_sum`; empty for the name itself, or that of the type.
    suffix: &'static str,
    labels: Vec<(&'static str, String)>,
    value: f64,
}

impl Family {
    const fn gauge(name: &'static str, unit: &'static str, help: &'static str) -> Self {
        Self { name, kind: Type::Gauge, unit, help, samples: Vec::new() }
    }

    fn add(&mut self, labels: &[(&'static str, String)], value: Option<f64>) {
        if let Some(value) = value {
            self.samples.push(Sample { suffix: "", labels: labels.to_vec(), value });
        }
    }
}

/// The text for a scraper. As root it has counts of what happened, too.
pub(crate) fn of_host(status: &Status, format: Format, config: &Config) -> String {
    let mut families = families::of(status);
    families.extend(counted::families(config));
    text::write(&families, format)
}

/// The text for a scraper where the state of the host cannot be read.
pub(crate) fn down(format: Format) -> String {
    text::write(&[families::up(false)], format)
}
