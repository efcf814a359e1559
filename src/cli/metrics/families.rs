//! The gauges: what is there, booked and used now.

use std::collections::BTreeSet;

use super::{CONTAINERS, Family, Sample, Type};
use crate::shown::{Device, word};
use crate::status::{LeaseOnDevice, Status};
use sublet_core::process::epoch_seconds;

/// Whether the state could be read.
pub(super) fn up(is_up: bool) -> Family {
    Family::gauge("sublet_up", "Whether the state of this host could be read.").with(&[], Some(flag(is_up)))
}

/// Those of `status`.
pub(super) fn of(status: &Status) -> Vec<Family> {
    let driver = Family::new(Type::Info, "sublet_driver", "The NVIDIA driver.");
    let (version, simulated) = (status.driver.version.clone(), status.driver.simulated.to_string());
    let labels = [("version", version), ("simulated", simulated)];
    let mut families = vec![up(true), driver.with(&labels, Some(1.0))];
    families.extend(devices(status));
    families.extend(containers(status));
    families.extend(service(status));
    families
}

/// Adds a sample to the gauge `name`.
fn add(
    families: &mut Vec<Family>,
    (name, help): (&'static str, &'static str),
    labels: &[(&'static str, String)],
    value: Option<f64>,
) {
    let at = families.iter().position(|family| family.name == name).unwrap_or(families.len());
    if at == families.len() {
        families.push(Family::gauge(name, help));
    }
    families[at].samples.extend(value.map(|value| Sample { suffix: "", labels: labels.to_vec(), value }));
}

fn devices(status: &Status) -> Vec<Family> {
    let mut info = Family::new(Type::Info, "sublet_gpu", "A GPU or MIG device.");
    let mut families = Vec::new();
    for device in Device::all(&status.devices) {
        let mut labels = vec![("gpu", device.number.clone()), ("uuid", device.uuid.to_owned())];
        let mut gauge = |name, help, value| add(&mut families, (name, help), &labels, value);
        let used = device.used;
        let memory_used = used.and_then(|used| used.memory_bytes).map(bytes);
        let celsius = used.and_then(|used| used.temperature_celsius).map(f64::from);
        let served = device.part.is_none().then(|| flag(device.gpu.health.state == "ok"));
        let booked = device.booked;
        gauge(
            "sublet_gpu_memory_bytes",
            "Memory of the GPU or MIG device.",
            Some(bytes(device.memory_bytes)),
        );
        let help = "Memory that leases have booked.";
        gauge("sublet_gpu_memory_booked_bytes", help, Some(bytes(booked.memory_bytes)));
        gauge("sublet_gpu_memory_used_bytes", "Memory in use, as the driver reports it.", memory_used);
        let help = "Part of the SMs that leases have booked.";
        gauge("sublet_gpu_sm_booked_ratio", help, Some(booked.sm_percent / 100.0));
        let busy = used.and_then(|used| used.busy_percent).map(ratio);
        gauge("sublet_gpu_busy_ratio", "Part of the time in which a kernel ran.", busy);
        gauge("sublet_gpu_power_watts", "Power draw.", used.and_then(|used| used.power_watts));
        let limit = used.and_then(|used| used.power_limit_watts);
        gauge("sublet_gpu_power_limit_watts", "Power limit in force.", limit);
        gauge("sublet_gpu_temperature_celsius", "Temperature.", celsius);
        gauge("sublet_gpu_leases", "Leases on the GPU or MIG device.", Some(count(device.lease_count)));
        let outside = used.map(|used| count(used.outside.len()));
        gauge("sublet_gpu_outside_processes", "Processes that use it without a lease.", outside);
        gauge("sublet_gpu_healthy", "Whether the GPU is served: not lost, and not sick.", served);
        gauge("sublet_gpu_drained", "Whether it takes no new lease.", Some(flag(device.drained)));
        let about = [("name", device.name), ("mode", device.mode), ("bus_id", &device.gpu.bus_id)];
        labels.extend(about.map(|(label, text)| (label, text.to_owned())));
        info = info.with(&labels, Some(1.0));
    }
    families.insert(0, info);
    families
}

fn containers(status: &Status) -> Vec<Family> {
    let ids: BTreeSet<&str> = status.leases.iter().map(|lease| lease.id.as_str()).collect();
    let beyond: BTreeSet<&str> = ids.into_iter().skip(CONTAINERS).collect();
    let mut info = Family::new(Type::Info, "sublet_lease", "A container's lease of a device.");
    let left = Family::gauge("sublet_leases_without_samples", "Leases beyond the most that have samples.");
    let mut families = vec![left.with(&[], Some(count(beyond.len())))];
    for lease in status.leases.iter().filter(|lease| !beyond.contains(lease.id.as_str())) {
        let mut labels = labels(lease, status);
        let mut gauge = |name, help, value| add(&mut families, (name, help), &labels, value);
        let used = lease.used;
        let help = "Memory limit of the container on the device; none without a limit.";
        gauge("sublet_container_memory_limit_bytes", help, lease.memory_bytes.map(bytes));
        let help = "Memory of the container's processes on the device.";
        gauge("sublet_container_memory_used_bytes", help, used.memory_bytes.map(bytes));
        let help = "SM limit of the container; none without a limit.";
        gauge("sublet_container_sm_limit_ratio", help, lease.sm_percent.map(|sm| sm / 100.0));
        let help = "Part of the SMs that the container computed on. Containers of a shared MPS server have none: the driver \
            does not tell them apart.";
        gauge("sublet_container_busy_ratio", help, used.sm_percent.map(ratio));
        let help = "Part of the SMs that all containers of the shared MPS server computed on.";
        gauge("sublet_container_server_busy_ratio", help, used.server_sm_percent.map(ratio));
        let help = "The container's processes with contexts on the device.";
        gauge("sublet_container_processes", help, used.processes.map(count));
        let help = "When the lease was taken, since the epoch.";
        gauge("sublet_lease_since_seconds", help, Some(bytes(lease.taken)));
        labels.extend([
            ("lease", lease.id.clone()),
            ("container_id", lease.container_id.clone()),
            ("engine", lease.engine.as_ref().map(word).unwrap_or_default()),
            ("image", lease.image.clone().unwrap_or_default()),
            ("part_of", lease.part_of.clone().unwrap_or_default()),
            ("user", lease.user.clone()),
            ("mode", lease.mode.to_string()),
            ("isolation", word(&lease.isolation)),
            ("state", word(&lease.state)),
        ]);
        info = info.with(&labels, Some(1.0));
    }
    families.insert(0, info);
    families
}

/// By what people call the container; where several leases of a device have one name, with the lease's id before it.
fn labels(lease: &LeaseOnDevice, status: &Status) -> Vec<(&'static str, String)> {
    let own = label(lease);
    let same = |other: &&LeaseOnDevice| {
        other.id != lease.id
            && other.device == lease.device
            && super::text::shown(label(other)) == super::text::shown(own)
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
    let names = [&lease.name, &lease.part_of, &lease.unit];
    names.into_iter().flatten().next().unwrap_or(&lease.called)
}

fn service(status: &Status) -> Vec<Family> {
    // A time, and not an age: the age in a file that is not written any more would stay young.
    let looked_at = status.guard.last_look_seconds.map(|age| bytes(epoch_seconds().saturating_sub(age)));
    let mut daemons = Family::gauge("sublet_mps_daemons", "MPS control daemons by state.");
    for state in ["starting", "serving", "stopping", "fault", "down"] {
        let number = status.mps.iter().filter(|daemon| word(&daemon.state) == state).count();
        daemons = daemons.with(&[("state", state.to_owned())], Some(count(number)));
    }
    let mut clients = Family::gauge("sublet_mps_clients", "Clients of an MPS control daemon's servers.");
    for daemon in &status.mps {
        clients = clients.with(&[("daemon", daemon.key.to_string())], daemon.clients.map(count));
    }
    vec![
        Family::gauge("sublet_guard_watching", "Whether the guard checks every leased device.")
            .with(&[], Some(flag(status.guard.watching))),
        Family::gauge(
            "sublet_guard_last_look_timestamp_seconds",
            "When `sublet serve` last checked, since the epoch.",
        )
        .with(&[], looked_at),
        Family::gauge("sublet_warnings", "Lines that `sublet status` shows first.")
            .with(&[], Some(count(status.warnings.len()))),
        daemons,
        clients,
    ]
}

#[expect(clippy::cast_precision_loss, reason = "a byte more or less of petabytes")]
fn bytes(number: u64) -> f64 {
    number as f64
}

#[expect(clippy::cast_precision_loss, reason = "small numbers")]
fn count(number: usize) -> f64 {
    number as f64
}

fn flag(is: bool) -> f64 {
    f64::from(u8::from(is))
}

fn ratio(percent: u32) -> f64 {
    f64::from(percent) / 100.0
}
