//! The gauges: what is there, booked and used now.

use super::{CONTAINERS, Family, Type};
use crate::shown::word;
use crate::status::{DeviceUsed, LeaseOnDevice, Status};
use sublet_core::process::epoch_seconds;

/// Whether the state could be read.
pub(super) fn up(is_up: bool) -> Family {
    Family::gauge("sublet_up", "Whether the state of this host could be read.").with(&[], Some(flag(is_up)))
}

/// Those of `status`.
pub(super) fn of(status: &Status) -> Vec<Family> {
    let mut families = vec![up(true), driver(status)];
    families.extend(devices(status));
    families.extend(containers(status));
    families.extend(service(status));
    families
}

fn driver(status: &Status) -> Family {
    let driver = &status.driver;
    let labels = [("version", driver.version.clone()), ("simulated", driver.simulated.to_string())];
    Family::new(Type::Info, "sublet_driver", "The NVIDIA driver.").with(&labels, Some(1.0))
}

/// A GPU or a MIG device, as far as both are the same.
struct Device<'a> {
    labels: Vec<(&'static str, String)>,
    about: Vec<(&'static str, String)>,
    memory_bytes: u64,
    booked_memory: u64,
    booked_sm: f64,
    used: Option<&'a DeviceUsed>,
    leases: usize,
    drained: bool,
    /// `None` for a MIG device.
    served: Option<bool>,
}

fn all_devices(status: &Status) -> Vec<Device<'_>> {
    let mut all = Vec::new();
    for gpu in &status.devices {
        let labels = |number: String, uuid: &str| vec![("gpu", number), ("uuid", uuid.to_owned())];
        let about = |name: &str, mode: &str| {
            let texts = [("name", name), ("mode", mode), ("bus_id", &gpu.bus_id)];
            texts.map(|(label, text)| (label, text.to_owned())).to_vec()
        };
        all.push(Device {
            labels: labels(gpu.index.to_string(), &gpu.uuid),
            about: about(&gpu.name, gpu.mode),
            memory_bytes: gpu.memory_bytes,
            booked_memory: gpu.booked.memory_bytes,
            booked_sm: gpu.booked.sm_percent,
            used: gpu.used.as_ref(),
            leases: gpu.lease_count,
            drained: gpu.drained,
            served: Some(gpu.health.state == "ok"),
        });
        all.extend(gpu.mig.iter().map(|part| Device {
            labels: labels(part.number.clone(), &part.uuid),
            about: about(&part.profile, part.mode),
            memory_bytes: part.memory_bytes,
            booked_memory: part.booked.memory_bytes,
            booked_sm: part.booked.sm_percent,
            used: part.used.as_ref(),
            leases: part.lease_count,
            drained: part.drained,
            served: None,
        }));
    }
    all
}

fn devices(status: &Status) -> Vec<Family> {
    let all = all_devices(status);
    let family = |name, help, value: &dyn Fn(&Device<'_>) -> Option<f64>| {
        let family = Family::gauge(name, help);
        all.iter().fold(family, |family, device| family.with(&device.labels, value(device)))
    };
    let info = Family::new(Type::Info, "sublet_gpu", "A GPU or MIG device.");
    let labels = |device: &Device<'_>| [device.labels.clone(), device.about.clone()].concat();
    let info = all.iter().fold(info, |info, device| info.with(&labels(device), Some(1.0)));
    let used = |device: &Device<'_>, of: fn(&DeviceUsed) -> Option<f64>| device.used.and_then(of);
    vec![
        info,
        family("sublet_gpu_memory_bytes", "Memory of the GPU or MIG device.", &|gpu| {
            Some(bytes(gpu.memory_bytes))
        }),
        family("sublet_gpu_memory_booked_bytes", "Memory that leases have booked.", &|gpu| {
            Some(bytes(gpu.booked_memory))
        }),
        family("sublet_gpu_memory_used_bytes", "Memory in use, as the driver reports it.", &|gpu| {
            used(gpu, |used| used.memory_bytes.map(bytes))
        }),
        family("sublet_gpu_sm_booked_ratio", "Part of the SMs that leases have booked.", &|gpu| {
            Some(gpu.booked_sm / 100.0)
        }),
        family("sublet_gpu_busy_ratio", "Part of the time in which a kernel ran.", &|gpu| {
            used(gpu, |used| used.busy_percent.map(ratio))
        }),
        family("sublet_gpu_power_watts", "Power draw.", &|gpu| used(gpu, |used| used.power_watts)),
        family("sublet_gpu_power_limit_watts", "Power limit in force.", &|gpu| {
            used(gpu, |used| used.power_limit_watts)
        }),
        family("sublet_gpu_temperature_celsius", "Temperature.", &|gpu| {
            used(gpu, |used| used.temperature_celsius.map(f64::from))
        }),
        family("sublet_gpu_leases", "Leases on the GPU or MIG device.", &|gpu| Some(count(gpu.leases))),
        family("sublet_gpu_outside_processes", "Processes that use it without a lease.", &|gpu| {
            used(gpu, |used| Some(count(used.outside.len())))
        }),
        family("sublet_gpu_healthy", "Whether the GPU is served: not lost, and not sick.", &|gpu| {
            gpu.served.map(flag)
        }),
        family("sublet_gpu_drained", "Whether it takes no new lease.", &|gpu| Some(flag(gpu.drained))),
    ]
}

fn containers(status: &Status) -> Vec<Family> {
    let mut ids: Vec<&str> = status.leases.iter().map(|lease| lease.id.as_str()).collect();
    ids.sort_unstable();
    ids.dedup();
    let beyond = ids.split_off(ids.len().min(CONTAINERS));
    let shown: Vec<&LeaseOnDevice> =
        status.leases.iter().filter(|lease| ids.binary_search(&lease.id.as_str()).is_ok()).collect();
    let family = |name, help, value: &dyn Fn(&LeaseOnDevice) -> Option<f64>| {
        let family = Family::gauge(name, help);
        shown.iter().fold(family, |family, lease| family.with(&labels(lease, status), value(lease)))
    };
    let mut info = Family::new(Type::Info, "sublet_lease", "A container's lease of a device.");
    for lease in &shown {
        let mut all = labels(lease, status);
        all.extend([
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
        info = info.with(&all, Some(1.0));
    }
    let left = Family::gauge("sublet_leases_without_samples", "Leases beyond the most that have samples.");
    vec![
        info,
        left.with(&[], Some(count(beyond.len()))),
        family(
            "sublet_container_memory_limit_bytes",
            "Memory limit of the container on the device; none without a limit.",
            &|lease| lease.memory_bytes.map(bytes),
        ),
        family(
            "sublet_container_memory_used_bytes",
            "Memory of the container's processes on the device.",
            &|lease| lease.used.memory_bytes.map(bytes),
        ),
        family(
            "sublet_container_sm_limit_ratio",
            "SM limit of the container; none without a limit.",
            &|lease| lease.sm_percent.map(|sm| sm / 100.0),
        ),
        family(
            "sublet_container_busy_ratio",
            "Part of the SMs that the container computed on. Containers of a shared MPS server have none: the driver does not tell them apart.",
            &|lease| lease.used.sm_percent.map(ratio),
        ),
        family(
            "sublet_container_server_busy_ratio",
            "Part of the SMs that all containers of the shared MPS server computed on.",
            &|lease| lease.used.server_sm_percent.map(ratio),
        ),
        family(
            "sublet_container_processes",
            "The container's processes with contexts on the device.",
            &|lease| lease.used.processes.map(count),
        ),
        family("sublet_lease_since_seconds", "When the lease was taken, since the epoch.", &|lease| {
            Some(bytes(lease.taken))
        }),
    ]
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
    let watching = Family::gauge("sublet_guard_watching", "Whether the guard checks every leased device.");
    // A time, and not an age: the age in a file that is not written any more would stay young.
    let looked = Family::gauge(
        "sublet_guard_last_look_timestamp_seconds",
        "When `sublet serve` last checked, since the epoch.",
    );
    let looked_at = status.guard.last_look_seconds.map(|age| bytes(epoch_seconds().saturating_sub(age)));
    let warnings = Family::gauge("sublet_warnings", "Lines that `sublet status` shows first.");
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
        watching.with(&[], Some(flag(status.guard.watching))),
        looked.with(&[], looked_at),
        warnings.with(&[], Some(count(status.warnings.len()))),
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
