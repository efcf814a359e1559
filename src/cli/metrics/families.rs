//! The gauges: what is there, booked and used now.

use super::{CONTAINERS, Family, Sample, Type};
use crate::status::{DeviceUsed, LeaseOnDevice, Status};
use sublet_core::process::epoch_seconds;

/// Whether the state could be read.
pub(super) fn up(is_up: bool) -> Family {
    let mut family = Family::gauge("sublet_up", "", "Whether the state of this host could be read.");
    family.add(&[], Some(f64::from(u8::from(is_up))));
    family
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
    let labels =
        vec![("version", status.driver.version.clone()), ("simulated", status.driver.simulated.to_string())];
    Family {
        kind: Type::Info,
        samples: vec![Sample { suffix: "", labels, value: 1.0 }],
        ..Family::gauge("sublet_driver", "", "The NVIDIA driver.")
    }
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
    let family = |name, unit, help, value: &dyn Fn(&Device<'_>) -> Option<f64>| {
        let mut family = Family::gauge(name, unit, help);
        for device in &all {
            family.add(&device.labels, value(device));
        }
        family
    };
    let mut info = Family { kind: Type::Info, ..Family::gauge("sublet_gpu", "", "A GPU or MIG device.") };
    for device in &all {
        let labels = [device.labels.clone(), device.about.clone()].concat();
        info.samples.push(Sample { suffix: "", labels, value: 1.0 });
    }
    let used = |device: &Device<'_>, of: fn(&DeviceUsed) -> Option<f64>| device.used.and_then(of);
    vec![
        info,
        family("sublet_gpu_memory_bytes", "bytes", "Memory of the GPU or MIG device.", &|device| {
            Some(bytes(device.memory_bytes))
        }),
        family("sublet_gpu_memory_booked_bytes", "bytes", "Memory that leases have booked.", &|device| {
            Some(bytes(device.booked_memory))
        }),
        family(
            "sublet_gpu_memory_used_bytes",
            "bytes",
            "Memory in use, as the driver reports it.",
            &|device| used(device, |used| used.memory_bytes.map(bytes)),
        ),
        family(
            "sublet_gpu_sm_booked_ratio",
            "ratio",
            "Part of the SMs that leases have booked.",
            &|device| Some(device.booked_sm / 100.0),
        ),
        family("sublet_gpu_busy_ratio", "ratio", "Part of the time in which a kernel ran.", &|device| {
            used(device, |used| used.busy_percent.map(|percent| f64::from(percent) / 100.0))
        }),
        family("sublet_gpu_power_watts", "watts", "Power draw.", &|device| {
            used(device, |used| used.power_watts)
        }),
        family("sublet_gpu_power_limit_watts", "watts", "Power limit in force.", &|device| {
            used(device, |used| used.power_limit_watts)
        }),
        family("sublet_gpu_temperature_celsius", "celsius", "Temperature.", &|device| {
            used(device, |used| used.temperature_celsius.map(f64::from))
        }),
        family("sublet_gpu_leases", "", "Leases on the GPU or MIG device.", &|device| {
            Some(count(device.leases))
        }),
        family("sublet_gpu_outside_processes", "", "Processes that use it without a lease.", &|device| {
            used(device, |used| Some(count(used.outside.len())))
        }),
        family("sublet_gpu_healthy", "", "Whether the GPU is served: not lost, and not sick.", &|device| {
            device.served.map(|served| f64::from(u8::from(served)))
        }),
        family("sublet_gpu_drained", "", "Whether it takes no new lease.", &|device| {
            Some(f64::from(u8::from(device.drained)))
        }),
    ]
}

fn containers(status: &Status) -> Vec<Family> {
    let mut ids: Vec<&str> = status.leases.iter().map(|lease| lease.id.as_str()).collect();
    ids.sort_unstable();
    ids.dedup();
    let beyond = ids.split_off(ids.len().min(CONTAINERS));
    let shown: Vec<&LeaseOnDevice> =
        status.leases.iter().filter(|lease| ids.binary_search(&lease.id.as_str()).is_ok()).collect();
    let family = |name, unit, help, value: &dyn Fn(&LeaseOnDevice) -> Option<f64>| {
        let mut family = Family::gauge(name, unit, help);
        for lease in &shown {
            family.add(&labels(lease, status), value(lease));
        }
        family
    };
    let mut info =
        Family { kind: Type::Info, ..Family::gauge("sublet_lease", "", "A container's lease of a device.") };
    for lease in &shown {
        let mut all = labels(lease, status);
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        all.extend([
            ("lease", lease.id.clone()),
            ("container_id", lease.container_id.clone()),
            ("engine", lease.engine.as_ref().map(word).unwrap_or_default()),
            ("image", text(&lease.image)),
            ("part_of", text(&lease.part_of)),
            ("user", lease.user.clone()),
            ("mode", lease.mode.as_str().to_owned()),
            ("isolation", word(&lease.isolation)),
            ("state", word(&lease.state)),
        ]);
        info.samples.push(Sample { suffix: "", labels: all, value: 1.0 });
    }
    let mut left =
        Family::gauge("sublet_leases_without_samples", "", "Leases beyond the most that have samples.");
    left.add(&[], Some(count(beyond.len())));
    vec![
        info,
        left,
        family(
            "sublet_container_memory_limit_bytes",
            "bytes",
            "Memory limit of the container on the device; none without a limit.",
            &|lease| lease.memory_bytes.map(bytes),
        ),
        family(
            "sublet_container_memory_used_bytes",
            "bytes",
            "Memory of the container's processes on the device.",
            &|lease| lease.used.memory_bytes.map(bytes),
        ),
        family(
            "sublet_container_sm_limit_ratio",
            "ratio",
            "SM limit of the container; none without a limit.",
            &|lease| lease.sm_percent.map(|sm| sm / 100.0),
        ),
        family(
            "sublet_container_busy_ratio",
            "ratio",
            "Part of the SMs that the container computed on. Containers of a shared MPS server have none: the driver does not tell them apart.",
            &|lease| lease.used.sm_percent.map(|percent| f64::from(percent) / 100.0),
        ),
        family(
            "sublet_container_server_busy_ratio",
            "ratio",
            "Part of the SMs that all containers of the shared MPS server computed on.",
            &|lease| lease.used.server_sm_percent.map(|percent| f64::from(percent) / 100.0),
        ),
        family(
            "sublet_container_processes",
            "",
            "The container's processes with contexts on the device.",
            &|lease| lease.used.processes.map(count),
        ),
        family(
            "sublet_lease_since_seconds",
            "seconds",
            "When the lease was taken, since the epoch.",
            &|lease| Some(bytes(lease.taken)),
        ),
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
    let mut watching =
        Family::gauge("sublet_guard_watching", "", "Whether the guard checks every leased device.");
    watching.add(&[], Some(f64::from(u8::from(status.guard.watching))));
    // A time, and not an age: the age in a file that is not written any more would stay young.
    let mut looked = Family::gauge(
        "sublet_guard_last_look_timestamp_seconds",
        "seconds",
        "When `sublet serve` last checked, since the epoch.",
    );
    looked.add(&[], status.guard.last_look_seconds.map(|age| bytes(epoch_seconds().saturating_sub(age))));
    let mut warnings = Family::gauge("sublet_warnings", "", "Lines that `sublet status` shows first.");
    warnings.add(&[], Some(count(status.warnings.len())));
    let mut daemons = Family::gauge("sublet_mps_daemons", "", "MPS control daemons by state.");
    for state in ["starting", "serving", "stopping", "fault", "down"] {
        let number = status.mps.iter().filter(|daemon| word(&daemon.state) == state).count();
        daemons.add(&[("state", state.to_owned())], Some(count(number)));
    }
    let mut clients = Family::gauge("sublet_mps_clients", "", "Clients of an MPS control daemon's servers.");
    for daemon in &status.mps {
        clients.add(&[("daemon", daemon.key.to_string())], daemon.clients.map(count));
    }
    vec![watching, looked, warnings, daemons, clients]
}

fn word(value: &impl serde::Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

#[expect(clippy::cast_precision_loss, reason = "a byte more or less of petabytes")]
fn bytes(number: u64) -> f64 {
    number as f64
}

#[expect(clippy::cast_precision_loss, reason = "small numbers")]
fn count(number: usize) -> f64 {
    number as f64
}
