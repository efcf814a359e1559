//! Metrics for Prometheus: limits and use by GPU and by container, and counts of events ([`counted`]). Names and
//! units follow Prometheus' conventions: base units, ratios from 0 to 1. An unknown value has no sample.

mod counted;

use std::collections::BTreeSet;
use std::fmt::Write as _;

use crate::shown::{Device, float, word};
use crate::status::{DeviceUsed, LeaseOnDevice, Status};
use sublet_core::config::Config;
use sublet_core::process::epoch_seconds;

/// The longest value of a label, in characters.
const LONGEST: usize = 128;

/// The most containers that have samples of their own.
const CONTAINERS: usize = 500;

/// The type of a family (`OpenMetrics` 1.0, "Metric Types").
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

/// In the order in which they are written.
#[derive(Default)]
struct Families(Vec<Family>);

impl Families {
    /// Adds a sample to the family `name`, where the value is known.
    fn add(
        &mut self,
        kind: Type,
        (name, help): (&'static str, &'static str),
        labels: &[(&'static str, String)],
        value: Option<f64>,
    ) {
        let at = self.0.iter().position(|family| family.name == name).unwrap_or(self.0.len());
        if at == self.0.len() {
            self.0.push(Family { name, kind, help, samples: Vec::new() });
        }
        self.0[at].samples.extend(value.map(|value| Sample { suffix: "", labels: labels.to_vec(), value }));
    }

    /// A gauge without labels.
    fn gauge(&mut self, name: &'static str, help: &'static str, value: Option<f64>) {
        self.add(Type::Gauge, (name, help), &[], value);
    }
}

/// The text for a scraper. As root it has counts of events, too.
pub(crate) fn of_host(status: &Status, format: Format, config: &Config) -> String {
    let mut families = up(true, is_healthy(status));
    let (version, simulated) = (status.driver.version.clone(), status.driver.simulated.to_string());
    let labels = [("version", version), ("simulated", simulated)];
    families.add(Type::Info, ("sublet_driver", "The NVIDIA driver."), &labels, Some(1.0));
    devices(status, &mut families);
    containers(status, &mut families);
    service(status, &mut families);
    counted::add(config, &mut families);
    write(&families, format)
}

/// The text for a scraper where the state of the host cannot be read.
pub(crate) fn down(format: Format) -> String {
    write(&up(false, false), format)
}

/// Whether `sublet status` has nothing to warn of, and serves every GPU.
fn is_healthy(status: &Status) -> bool {
    status.warnings.is_empty() && Device::all(&status.devices).all(|device| device.gpu.health.state == "ok")
}

/// Whether the state could be read, and whether all is well.
fn up(is_up: bool, is_healthy: bool) -> Families {
    let mut families = Families::default();
    families.gauge("sublet_up", "Whether the state of this host could be read.", Some(flag(is_up)));
    let help = "Whether there is no warning, and every GPU is served.";
    families.gauge("sublet_healthy", help, Some(flag(is_healthy)));
    families
}

fn devices(status: &Status, families: &mut Families) {
    for device in Device::all(&status.devices) {
        let labels = [
            ("gpu", &*device.number),
            ("uuid", device.uuid),
            ("name", device.name),
            ("mode", device.mode),
            ("bus_id", &device.gpu.bus_id),
        ];
        let labels = labels.map(|(label, text)| (label, text.to_owned()));
        families.add(Type::Info, ("sublet_gpu", "A GPU or MIG device."), &labels, Some(1.0));
        let mut gauge = |name, help, value| families.add(Type::Gauge, (name, help), &labels[..2], value);
        let (booked, unknown) = (device.booked, DeviceUsed::default());
        let used = device.used.unwrap_or(&unknown);
        let (memory, memory_used) = (Some(float(device.memory_bytes)), used.memory_bytes.map(float));
        let served = device.part.is_none().then(|| flag(device.gpu.health.state == "ok"));
        gauge("sublet_gpu_memory_bytes", "Memory of the GPU or MIG device.", memory);
        let help = "Memory that leases have booked.";
        gauge("sublet_gpu_memory_booked_bytes", help, Some(float(booked.memory_bytes)));
        gauge("sublet_gpu_memory_used_bytes", "Memory in use, as the driver reports it.", memory_used);
        let help = "Part of the SMs that leases have booked.";
        gauge("sublet_gpu_sm_booked_ratio", help, Some(booked.sm_percent / 100.0));
        gauge(
            "sublet_gpu_busy_ratio",
            "Part of the time in which a kernel ran.",
            used.busy_percent.map(ratio),
        );
        gauge("sublet_gpu_power_watts", "Power draw.", used.power_watts);
        gauge("sublet_gpu_power_limit_watts", "Power limit in force.", used.power_limit_watts);
        gauge("sublet_gpu_temperature_celsius", "Temperature.", used.temperature_celsius.map(f64::from));
        gauge("sublet_gpu_leases", "Leases on the GPU or MIG device.", Some(count(device.lease_count)));
        let outside = device.used.map(|used| count(used.outside.len()));
        gauge("sublet_gpu_outside_processes", "Processes that use it without a lease.", outside);
        gauge("sublet_gpu_healthy", "Whether the GPU is served: not lost, and not sick.", served);
        gauge("sublet_gpu_drained", "Whether it takes no new lease.", Some(flag(device.drained)));
    }
}

fn containers(status: &Status, families: &mut Families) {
    let ids: BTreeSet<&str> = status.leases.iter().map(|lease| lease.id.as_str()).collect();
    let beyond: BTreeSet<&str> = ids.into_iter().skip(CONTAINERS).collect();
    let info = ("sublet_lease", "A container's lease of a device.");
    // Before the next.
    families.add(Type::Info, info, &[], None);
    let help = "Leases beyond the most that have samples.";
    families.gauge("sublet_leases_without_samples", help, Some(count(beyond.len())));
    let suspended = status.leases.iter().filter(|lease| lease.suspended_bytes.is_some()).count();
    families.gauge(
        "sublet_suspended_containers",
        "Containers that are suspended, or on their way.",
        Some(count(suspended)),
    );
    for lease in status.leases.iter().filter(|lease| !beyond.contains(lease.id.as_str())) {
        let mut labels = labels(lease, status);
        let mut gauge = |name, help, value| families.add(Type::Gauge, (name, help), &labels, value);
        let (used, owner) = (lease.used, lease.owner.as_ref());
        let help = "Memory limit of the container on the device; none without a limit.";
        gauge("sublet_container_memory_limit_bytes", help, lease.memory_bytes.map(float));
        let help = "Memory of the container's processes on the device.";
        gauge("sublet_container_memory_used_bytes", help, used.memory_bytes.map(float));
        let help = "SM limit of the container; none without a limit.";
        gauge("sublet_container_sm_limit_ratio", help, lease.sm_percent.map(|sm| sm / 100.0));
        let help = "Part of the SMs that the container computed on. Containers of a shared MPS server have none: the driver \
            does not tell them apart.";
        gauge("sublet_container_busy_ratio", help, used.sm_percent.map(ratio));
        let help = "Part of the SMs that all containers of the shared MPS server computed on.";
        gauge("sublet_container_server_busy_ratio", help, used.server_sm_percent.map(ratio));
        let help = "The container's processes with contexts on the device.";
        gauge("sublet_container_processes", help, used.processes.map(count));
        let help =
            "Memory of the container that is suspended into host memory, or on its way; none if it is not.";
        gauge("sublet_container_suspended_bytes", help, lease.suspended_bytes.map(float));
        let help = "When the lease was taken, since the epoch.";
        gauge("sublet_lease_since_seconds", help, Some(float(lease.taken)));
        labels.extend([
            ("lease", lease.id.clone()),
            ("container_id", lease.container_id.clone()),
            ("engine", lease.engine.as_ref().map(word).unwrap_or_default()),
            ("image", lease.image.clone().unwrap_or_default()),
            ("part_of", lease.part_of.clone().unwrap_or_default()),
            ("user", lease.user.clone()),
            ("owner", owner.map(|owner| owner.name.clone()).unwrap_or_default()),
            ("owner_known_by", owner.map(|owner| owner.known_by.to_string()).unwrap_or_default()),
            ("mode", lease.mode.to_string()),
            ("isolation", word(&lease.isolation)),
            ("state", word(&lease.state)),
        ]);
        families.add(Type::Info, info, &labels, Some(1.0));
    }
}

/// By the container's name for people; where several leases of a device have one name, with the lease's id before it.
fn labels(lease: &LeaseOnDevice, status: &Status) -> Vec<(&'static str, String)> {
    let own = label(lease);
    let same = |other: &&LeaseOnDevice| {
        other.id != lease.id && other.device == lease.device && shown(label(other)) == shown(own)
    };
    let is_shared = status.leases.iter().any(|other| same(&other));
    let container = if is_shared { format!("{} {own}", lease.id) } else { own.to_owned() };
    vec![
        ("container", container),
        ("gpu", status.number(&lease.device).into_owned()),
        ("uuid", lease.device.clone()),
    ]
}

fn label(lease: &LeaseOnDevice) -> &str {
    [&lease.name, &lease.part_of, &lease.unit].into_iter().flatten().next().unwrap_or(&lease.called)
}

fn service(status: &Status, families: &mut Families) {
    let watching = flag(status.guard.watching);
    families.gauge("sublet_guard_watching", "Whether the guard checks every leased device.", Some(watching));
    // A time, and not an age: the age in a file that is not written any more would stay young.
    let looked_at = status.guard.last_look_seconds.map(|age| float(epoch_seconds().saturating_sub(age)));
    let help = "When `sublet serve` last checked, since the epoch.";
    families.gauge("sublet_guard_last_look_timestamp_seconds", help, looked_at);
    let warnings = count(status.warnings.len());
    families.gauge("sublet_warnings", "Lines that `sublet status` shows first.", Some(warnings));
    for state in ["starting", "serving", "stopping", "fault", "down"] {
        let number = status.mps.iter().filter(|daemon| word(&daemon.state) == state).count();
        let family = ("sublet_mps_daemons", "MPS control daemons by state.");
        families.add(Type::Gauge, family, &[("state", state.to_owned())], Some(count(number)));
    }
    for daemon in &status.mps {
        let family = ("sublet_mps_clients", "Clients of an MPS control daemon's servers.");
        families.add(Type::Gauge, family, &[("daemon", daemon.key.to_string())], daemon.clients.map(count));
    }
}

fn count(number: usize) -> f64 {
    float(number as u64)
}

fn flag(is: bool) -> f64 {
    f64::from(u8::from(is))
}

fn ratio(percent: u32) -> f64 {
    f64::from(percent) / 100.0
}

// Both texts that scrapers read: `OpenMetrics` 1.0, and the text format of Prometheus 0.0.4.

/// `--format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// `OpenMetrics` 1.0.
    #[default]
    #[value(help = "OpenMetrics 1.0")]
    Openmetrics,
    /// Prometheus' own text format, for the node exporter's textfile collector.
    Prometheus,
}

/// The families that have samples.
fn write(Families(families): &Families, format: Format) -> String {
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
            Format::Openmetrics => (family.name.to_owned(), kind, unit(family.name)),
            Format::Prometheus => (format!("{}{suffix}", family.name), old_kind, None),
        };
        let _ = writeln!(text, "# TYPE {name} {kind}");
        if let Some(unit) = unit {
            let _ = writeln!(text, "# UNIT {name} {unit}");
        }
        let _ = writeln!(text, "# HELP {name} {}", family.help);
        for Sample { suffix: own, labels, value } in &family.samples {
            let one = |(name, value): &(&str, String)| format!("{name}=\"{}\"", escaped(value));
            let labels = labels.iter().map(one).collect::<Vec<_>>().join(",");
            let labels = if labels.is_empty() { labels } else { format!("{{{labels}}}") };
            let _ = writeln!(text, "{}{suffix}{own}{labels} {value}", family.name);
        }
    }
    if format == Format::Openmetrics {
        text.push_str("# EOF\n");
    }
    text
}

/// `value` as it is shown: cut, without control characters but for newlines.
fn shown(value: &str) -> String {
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

/// The unit that the name ends with.
fn unit(name: &str) -> Option<&'static str> {
    let (_, last) = name.rsplit_once('_')?;
    UNITS.into_iter().find(|unit| *unit == last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn families() -> Families {
        let mut families = Families::default();
        let gauge = ("sublet_x_bytes", "What x has.");
        families.add(Type::Gauge, gauge, &[("container", "a\"b\\c\nd\u{1b}".to_owned())], Some(12.5));
        families.add(Type::Gauge, gauge, &[], None);
        families.gauge("sublet_y", "Nothing.", None);
        let labels = [("reason", "no-room".to_owned())];
        families.add(Type::Counter, ("sublet_refusals", "Refusals."), &labels, Some(3.0));
        let sample = |suffix, labels: &[(&'static str, String)], value| Sample {
            suffix,
            labels: labels.to_vec(),
            value,
        };
        let samples = vec![
            sample("_bucket", &[("le", "1".to_owned())], 1.0),
            sample("_bucket", &[("le", "+Inf".to_owned())], 2.0),
            sample("_count", &[], 2.0),
            sample("_sum", &[], 7.5),
        ];
        let (name, help) = ("sublet_lease_seconds", "How long.");
        families.0.push(Family { name, kind: Type::Histogram, help, samples });
        families
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
