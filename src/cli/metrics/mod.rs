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

/// The units of Prometheus that names here end with.
const UNITS: [&str; 5] = ["bytes", "celsius", "ratio", "seconds", "watts"];

impl Family {
    const fn new(kind: Type, name: &'static str, help: &'static str) -> Self {
        Self { name, kind, help, samples: Vec::new() }
    }

    const fn gauge(name: &'static str, help: &'static str) -> Self {
        Self::new(Type::Gauge, name, help)
    }

    fn with(mut self, labels: &[(&'static str, String)], value: Option<f64>) -> Self {
        let sample = |value| Sample { suffix: "", labels: labels.to_vec(), value };
        self.samples.extend(value.map(sample));
        self
    }

    /// The unit that the name ends with.
    fn unit(&self) -> Option<&'static str> {
        let (_, last) = self.name.rsplit_once('_')?;
        UNITS.into_iter().find(|unit| *unit == last)
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
