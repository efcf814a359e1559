//! Both texts that scrapers read: `OpenMetrics` 1.0, and the text format of Prometheus 0.0.4.

use std::fmt::Write as _;

use super::{Family, LONGEST, Sample, Type};

/// `--format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// `OpenMetrics` 1.0.
    #[default]
    Openmetrics,
    /// Prometheus' own text format, for `node_exporter`'s textfile collector.
    Prometheus,
}

/// The families that have samples.
pub(super) fn write(families: &[Family], format: Format) -> String {
    let mut text = String::new();
    for family in families.iter().filter(|family| !family.samples.is_empty()) {
        let (kind, old_kind, suffix) = match family.kind {
            Type::Gauge => ("gauge", "gauge", ""),
            Type::Counter => ("counter", "counter", "_total"),
            Type::Histogram => ("histogram", "histogram", ""),
            Type::Info => ("info", "gauge", "_info"),
        };
        // The older format describes the name that samples have, and knows no units.
        let (name, kind, unit) = match format {
            Format::Openmetrics => (family.name.to_owned(), kind, family.unit()),
            Format::Prometheus => (format!("{}{suffix}", family.name), old_kind, None),
        };
        let _ = writeln!(text, "# TYPE {name} {kind}");
        if let Some(unit) = unit {
            let _ = writeln!(text, "# UNIT {name} {unit}");
        }
        let _ = writeln!(text, "# HELP {name} {}", family.help);
        for Sample { suffix: own, labels, value } in &family.samples {
            let _ = writeln!(text, "{}{suffix}{own}{} {value}", family.name, labels_of(labels));
        }
    }
    if format == Format::Openmetrics {
        text.push_str("# EOF\n");
    }
    text
}

fn labels_of(labels: &[(&'static str, String)]) -> String {
    if labels.is_empty() {
        return String::new();
    }
    let one = |(name, value): &(&str, String)| format!("{name}=\"{}\"", escaped(value));
    format!("{{{}}}", labels.iter().map(one).collect::<Vec<_>>().join(","))
}

/// `value` as it is shown: cut, without control characters but for newlines.
pub(super) fn shown(value: &str) -> String {
    let plain = |character: char| match character {
        '\n' => '\n',
        character if character.is_control() => '\u{fffd}',
        character => character,
    };
    value.chars().take(LONGEST).map(plain).collect()
}

/// Backslash, quote and newline have escapes in both formats.
fn escaped(value: &str) -> String {
    shown(value).replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn families() -> Vec<Family> {
        let gauge = Family::gauge("sublet_x_bytes", "What x has.");
        let gauge = gauge.with(&[("container", "a\"b\\c\nd\u{1b}".to_owned())], Some(12.5)).with(&[], None);
        let empty = Family::gauge("sublet_y", "Nothing.");
        let sample = |suffix, labels: &[(&'static str, String)], value| Sample {
            suffix,
            labels: labels.to_vec(),
            value,
        };
        let counter = Family::new(Type::Counter, "sublet_refusals", "Refusals.");
        let counter = counter.with(&[("reason", "no-room".to_owned())], Some(3.0));
        let histogram = Family {
            samples: vec![
                sample("_bucket", &[("le", "1".to_owned())], 1.0),
                sample("_bucket", &[("le", "+Inf".to_owned())], 2.0),
                sample("_count", &[], 2.0),
                sample("_sum", &[], 7.5),
            ],
            ..Family::new(Type::Histogram, "sublet_lease_seconds", "How long.")
        };
        vec![gauge, empty, counter, histogram]
    }

    #[test]
    fn openmetrics_has_units_and_an_end() {
        let expected = "# TYPE sublet_x_bytes gauge\n# UNIT sublet_x_bytes bytes\n# HELP sublet_x_bytes What x has.\n\
             sublet_x_bytes{container=\"a\\\"b\\\\c\\nd\u{fffd}\"} 12.5\n# TYPE sublet_refusals counter\n\
             # HELP sublet_refusals Refusals.\nsublet_refusals_total{reason=\"no-room\"} 3\n\
             # TYPE sublet_lease_seconds histogram\n# UNIT sublet_lease_seconds seconds\n\
             # HELP sublet_lease_seconds How long.\nsublet_lease_seconds_bucket{le=\"1\"} 1\n\
             sublet_lease_seconds_bucket{le=\"+Inf\"} 2\nsublet_lease_seconds_count 2\n\
             sublet_lease_seconds_sum 7.5\n# EOF\n";
        assert_eq!(write(&families(), Format::Openmetrics), expected);
    }

    #[test]
    fn the_older_format_describes_the_names_that_samples_have() {
        let text = write(&families(), Format::Prometheus);
        assert!(text.contains("# TYPE sublet_refusals_total counter\n"), "{text}");
        assert!(!text.contains("# UNIT") && !text.contains("# EOF"), "{text}");
    }

    #[test]
    fn long_values_are_cut() {
        assert_eq!(escaped(&"ä".repeat(5000)).chars().count(), LONGEST);
    }
}
