//! The details of one container or device, as lines.

use super::history::Trace;
use super::rows::{both, load, percent, power};
use super::skin::Skin;
use super::source::{Look, ProcessLine};
use super::view::{DeviceRow, Pane, View};
use crate::shown::lease::{busy, called, memory, mode, whole};
use crate::shown::{self, word};
use crate::status::{DeviceUsed, LeaseOnDevice, Status};
use sublet_core::text::safe;

/// Of guard events the latest of these.
const EVENTS: usize = 8;

/// Details of what the cursor is on.
pub fn of(view: &View, width: usize, skin: Skin) -> Vec<String> {
    let Some(look) = &view.look else { return Vec::new() };
    let spark = |key: &str, trace| view.history.sparkline(key, trace, width.saturating_sub(11), skin.utf8);
    match view.pane {
        Pane::Gpus => {
            let devices = view.devices();
            let row = devices.get(view.selected(Pane::Gpus));
            row.map(|row| device(row, &look.status, &spark)).unwrap_or_default()
        }
        Pane::Containers => {
            let containers = view.containers();
            let lease = containers.get(view.selected(Pane::Containers));
            lease.map(|lease| container(lease, look, &spark)).unwrap_or_default()
        }
    }
}

type Spark<'a> = dyn Fn(&str, Trace) -> String + 'a;

fn container(lease: &LeaseOnDevice, look: &Look, spark: &Spark<'_>) -> Vec<String> {
    let status = &look.status;
    let or_dash = |text: &Option<String>| text.as_deref().map_or_else(|| "-".to_owned(), safe);
    let engine = lease.engine.as_ref().map_or_else(|| "-".to_owned(), word);
    let key = super::history::lease_key(lease);
    let mut lines = vec![
        format!("Container {}", called(lease)),
        format!("  image      {}   user {}", or_dash(&lease.image), safe(&lease.user)),
        format!(
            "  engine     {engine}   part of {}   unit {}",
            or_dash(&lease.part_of),
            or_dash(&lease.unit)
        ),
        format!("  id         {}", safe(&lease.container_id)),
        "Grant".to_owned(),
        format!("  lease      {}, {}, since {}", lease.id, word(&lease.state), lease.since),
        format!(
            "  device     {} ({}), {}",
            status.number(&lease.device),
            safe(&lease.device),
            mode(lease, status)
        ),
        format!(
            "  limits     SM {}, memory {}",
            lease.sm_percent.map_or_else(|| whole(lease), |sm| format!("{sm} %")),
            lease.memory_bytes.map_or_else(|| whole(lease), shown::memory)
        ),
        "Use".to_owned(),
        format!("  memory     {}", memory(lease)),
        format!("  busy       {}", busy(lease)),
        format!("  memory     {}", spark(&key, Trace::Memory)),
        format!("  busy       {}", spark(&key, Trace::Load)),
    ];
    lines.extend(processes(lease, look));
    lines.push("Guard events".to_owned());
    let its = |event: &&crate::status::GuardEvent| event.container_id.as_ref() == Some(&lease.container_id);
    let mut events: Vec<String> =
        status.guard.events.iter().rev().filter(its).take(EVENTS).map(event).collect();
    events.reverse();
    lines.extend(if events.is_empty() { vec!["  none".to_owned()] } else { events });
    lines.extend(with_server(lease, status));
    lines
}

fn event(event: &crate::status::GuardEvent) -> String {
    format!("  {}  {}", event.time, safe(&event.text))
}

fn processes(lease: &LeaseOnDevice, look: &Look) -> Vec<String> {
    let Some(count) = lease.used.processes else {
        return vec!["Processes".to_owned(), "  the driver does not list them".to_owned()];
    };
    let its = look.processes.get(&(lease.id.clone(), lease.device.clone()));
    let line = |process: &ProcessLine| {
        let memory = process.memory_bytes.map_or_else(|| "-".to_owned(), shown::memory);
        let busy = percent(process.sm_percent.map(f64::from));
        format!("  {:<10} {memory:>10} {busy:>6}  {}", process.pid, process.name)
    };
    let lines = its.into_iter().flatten().map(line);
    std::iter::once(format!("Processes on this device: {count}")).chain(lines).collect()
}

/// What would end with the container's work if its MPS server failed.
fn with_server(lease: &LeaseOnDevice, status: &Status) -> Vec<String> {
    let title = "If its MPS server fails".to_owned();
    let Some(daemon) = &lease.daemon else {
        return vec![title, "  it has none: a fault in another container does not end its work".to_owned()];
    };
    let is_other = |other: &&LeaseOnDevice| other.daemon.as_ref() == Some(daemon) && other.id != lease.id;
    let mut others: Vec<String> = status.leases.iter().filter(is_other).map(called).collect();
    others.dedup();
    let mut lines = vec![title, format!("  its GPU work ends (MPS daemon {})", safe(daemon))];
    if others.is_empty() {
        lines.push("  and no other container's".to_owned());
    } else {
        lines.push(format!("  and that of {} more:", others.len()));
        lines.extend(others.into_iter().map(|name| format!("    {name}")));
    }
    lines
}

fn device(row: &DeviceRow<'_>, status: &Status, spark: &Spark<'_>) -> Vec<String> {
    let uuid = row.uuid();
    let (mut lines, used, unknown) = match row {
        DeviceRow::Gpu(gpu) => {
            let name = format!("GPU {}: {}", gpu.index, safe(&gpu.name));
            let booked = (gpu.booked, gpu.memory_bytes);
            (about(name, uuid, &gpu.bus_id, gpu.mode, booked), gpu.used.as_ref(), gpu.unknown.as_ref())
        }
        DeviceRow::Mig(part, _) => {
            let name = format!("MIG device {}: {}", part.number, safe(&part.profile));
            let ids = format!("GPU instance {}, compute instance {}", part.gi, part.ci);
            let booked = (part.booked, part.memory_bytes);
            (about(name, uuid, &ids, part.mode, booked), part.used.as_ref(), part.unknown.as_ref())
        }
    };
    if let Some(why) = unknown {
        lines.push(format!("  the driver tells nothing: {}", safe(why)));
    }
    if let Some(used) = used {
        lines.extend(figures(used));
    }
    lines.push(format!("  memory     {}", spark(uuid, Trace::Memory)));
    lines.push(format!("  busy       {}", spark(uuid, Trace::Load)));
    lines.push("Containers".to_owned());
    let on_it = status.leases.iter().filter(|lease| lease.device == uuid);
    let before = lines.len();
    lines.extend(on_it.map(|lease| format!("  {:<32} {:<14} {}", called(lease), busy(lease), memory(lease))));
    if lines.len() == before {
        lines.push("  none".to_owned());
    }
    lines
}

fn about(
    name: String,
    uuid: &str,
    place: &str,
    mode: &str,
    (booked, memory): (crate::status::Room, u64),
) -> Vec<String> {
    vec![
        name,
        format!("  id         {}", safe(uuid)),
        format!("  at         {}, {mode}", safe(place)),
        format!(
            "  booked     SM {} %, memory {} of {}",
            booked.sm_percent,
            shown::memory(booked.memory_bytes),
            shown::memory(memory)
        ),
    ]
}

fn figures(used: &DeviceUsed) -> Vec<String> {
    let memory = used.memory_bytes.map_or_else(|| "-".to_owned(), shown::memory);
    let celsius = used.temperature_celsius.map_or_else(|| "-".to_owned(), |degrees| format!("{degrees} C"));
    let mut lines = vec![
        format!("  used       memory {memory}, busy {}, {}, {celsius}", load(used), power(used)),
        format!(
            "  GPM        SMs {}, occupancy {}, tensor cores {}, memory bandwidth {}",
            percent(used.sm_percent),
            percent(used.occupancy_percent),
            percent(used.tensor_percent),
            percent(used.dram_percent)
        ),
        format!(
            "  out + in   PCIe {} /s, NVLink {} /s",
            both(used.pcie_bytes_per_second),
            both(used.nvlink_bytes_per_second)
        ),
    ];
    for process in &used.outside {
        let memory = process.memory_bytes.map_or_else(|| "-".to_owned(), shown::memory);
        lines.push(format!("  no lease   {} (pid {}), {memory}", process.name, process.pid));
    }
    lines
}
